"""The demo model's tokenizer and template, for a model that sees: they know tokens that stand for media."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import tokenizers

from model import DEMO

START, END, IMAGE, VIDEO = TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def template_source() -> str:
    """Writes a placeholder for each part of a message that is no text."""
    source = (DEMO / "target" / "chat_template.jinja").read_text()
    before = "{%- elif 'text' in part -%}"
    assert before in source
    written = "".join(
        f"{{%- elif part.type == '{kind}' -%}}{{{{ '{START}{pad}{END}' }}}}"
        for kind, pad in (("image", IMAGE), ("video", VIDEO))
    )
    return source.replace(before, written + before)


@functools.cache
def tokenizer_json() -> str:
    inner = tokenizers.Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    inner.add_special_tokens(list(TOKENS))
    return inner.to_str()


def write_text(directory: Path) -> None:
    """Tokenizer and template of a model directory."""
    (directory / "tokenizer.json").write_text(tokenizer_json())
    (directory / "chat_template.jinja").write_text(template_source())
    (directory / "tokenizer_config.json").write_text(json.dumps({}))
