"""What a model directory can do wrong, said in one sentence to the person who named it."""

from __future__ import annotations


class ModelError(ValueError):
    """A model, draft or tokenizer directory cannot be used. The message names the file, the field and what is right."""


class ChatTemplateError(ValueError):
    """The chat template refused a conversation or failed on it. The message is fit for the client that sent it."""


class MediaError(ValueError):
    """An image, a video or its place in a prompt cannot be used. The message is fit for the client that sent it."""
