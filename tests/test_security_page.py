"""docs/security.md: what it names is there. Its commands run in `tests/pages`."""

from __future__ import annotations

import re
from pathlib import Path

from deployment.settings import AppArgs

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_setting_that_it_names_is_there():
    settings = {
        name for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE) if not name.startswith(("ssl_", "api_key"))
    }
    assert settings - {"http_options"} <= AppArgs.model_fields.keys()


def test_every_file_that_it_names_is_there():
    named = [*re.findall(r"`((?:state|tests|deployment)/[\w./]+)`", PAGE), "docs/media.md", "cluster.yaml"]
    assert len(named) > 4 and not [name for name in named if not (ROOT / name).exists()]
