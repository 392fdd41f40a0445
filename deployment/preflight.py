"""Looks at the model directories before anything is started: a wrong one should cost a sentence, not a minute."""

from __future__ import annotations

from deployment.settings import AppArgs
from model.chat_template import ChatTemplate
from model.checkpoint import Checkpoint
from model.config import check_fit, load_draft_config, load_target_config
from model.errors import ModelError
from model.tokenizer import Tokenizer


def check_directories(args: AppArgs) -> None:
    """Reads configs, tokenizer, template and the headers of all weight files. Raises ModelError."""
    for name, directory in (("model", args.model), ("draft", args.draft)):
        if directory is not None and not directory.is_dir():
            raise ModelError(f"{name}: {directory} is not a directory")
    target = load_target_config(args.model)
    if args.draft is not None:
        draft = load_draft_config(args.draft)
        if draft.kind != args.backend:
            raise ModelError(f"backend: {args.backend} is asked for, but {args.draft} holds a {draft.kind} drafter")
        check_fit(target, draft)
        Checkpoint.open_draft(args.draft)
    Checkpoint.open(args.model)
    Tokenizer.load(args.model)
    ChatTemplate.load(args.model)
