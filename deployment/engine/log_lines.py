"""Log records as lines of JSON, and what they speak of as fields of their own. Without Ray, for engines' processes too.

Standard fields have the names that Ray Serve gives them. What else a record has (`extra=`) stands beside them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from state.names import Epoch, Order, SessionKey

LogFormat = Literal["text", "json"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

ROOMS = ("kernels", "model", "state", "deployment")
SERVE = "ray.serve"
"""Our loggers have the names of our packages, or the one that Serve gives to its users."""


@dataclass(frozen=True)
class LogOptions:
    """`texts`: prompts and answers are logged too."""

    form: LogFormat = "text"
    level: LogLevel = "INFO"
    texts: bool = False


_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """`always`: fields of every line."""

    def __init__(self, always: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._always = always or {}

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
            **self._always,
            **{name: value for name, value in record.__dict__.items() if name not in _STANDARD},
        }
        if record.exc_info:
            fields["exc_text"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class SpokenOf(logging.Filter):
    """Lets everything pass. The session and the epoch that a message names become fields of its record."""

    def filter(self, record: logging.LogRecord) -> bool:
        for value in record.args if isinstance(record.args, tuple) else ():
            match value:
                case SessionKey():
                    record.session, record.tenant = value.session, value.tenant[:16]
                case Order():
                    record.epoch = str(value.epoch)
                case Epoch():
                    record.epoch = str(value)
                case _:
                    pass
        return True


def log_through(handlers: Iterable[logging.Handler], level: LogLevel, names: Sequence[str] = ROOMS) -> None:
    """The loggers of these names write through these handlers, and through no others."""
    handlers = list(handlers)
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = False


def log_to_stderr(form: LogFormat, level: LogLevel) -> None:
    """Of a process of which Serve knows nothing: an engine, or a detached actor."""
    handler = logging.StreamHandler()
    handler.addFilter(SpokenOf())
    text = logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    log_through([handler], level, (*ROOMS, SERVE))
