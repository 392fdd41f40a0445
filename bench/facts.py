"""What was measured? For a results file."""

from __future__ import annotations

import subprocess


def commit() -> str | None:
    """The commit of the working directory, None where there is no repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
