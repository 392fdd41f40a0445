"""One torch thread, and Triton kernels on the CPU where there is no card. Both must be settled before Triton loads."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests import distribution

torch.set_num_threads(1)

INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
_undo = None
if INTERPRETED:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before tests/conftest.py could set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
    from tests import triton_interpreter, triton_language

    _undo = triton_interpreter.install()
    triton_language.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: distribution.rank_of(distribution.file_of(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return distribution.scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture
def plain_interpreter() -> Iterator[None]:
    """Triton's interpreter without our bfloat16 patch, to show what the patch is for."""
    if _undo is None:
        pytest.skip("Triton runs on a card here")
    _undo()
    yield
    triton_interpreter.install()


@pytest.fixture
def serve_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the serving code logs, also where a test before this one had it written to a stream of its own."""
    logger = logging.getLogger("ray.serve")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, "ray.serve"):
        yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagate
