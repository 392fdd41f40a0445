"""A session's document as a file: all of it or nothing, and readable by its owner only, since it is as secret as its
text."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def check_replaceable(file: Path) -> None:
    """Before anything is fetched for it. ValueError for what is there and is no file."""
    if file.exists() and not file.is_file():
        raise ValueError(f"{file} cannot be written: it exists and is no file")


def write_private(file: Path, data: bytes) -> None:
    """ValueError if it cannot be written."""
    try:
        handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from None
