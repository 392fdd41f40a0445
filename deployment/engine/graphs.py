"""How do segments run? A CPU calls them; a card replays them as CUDA graphs.

A graph is captured behind the first call of its segment: that call loads and compiles what the segment needs. All
graphs have one pool of memory, which is right because one runs at a time and what outlives a segment lies in buffers of
its own (`deployment/engine/buffers.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Hashable
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

Segment = Callable[[], None]


class Runs(Protocol):
    """`key` names a segment with all that is not data of the device: equal keys, the same launches."""

    def __call__(self, key: Hashable, segment: Segment) -> None: ...


def eagerly(key: Hashable, segment: Segment) -> None:
    segment()


class Graphs:
    """A `Runs` for one card. What cannot be captured runs eagerly from then on, and the log says so."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._captured: dict[Hashable, torch.cuda.CUDAGraph | None] = {}

    @property
    def count(self) -> int:
        return sum(graph is not None for graph in self._captured.values())

    def __call__(self, key: Hashable, segment: Segment) -> None:
        if key not in self._captured:
            with self._aside():
                segment()
            self._captured[key] = self._capture(key, segment)
        elif (graph := self._captured[key]) is None:
            segment()
        else:
            graph.replay()

    @contextlib.contextmanager
    def _aside(self) -> Generator[None, None, None]:
        """On the stream that graphs are captured from, so that what libraries keep for a stream is there; in the order
        of the caller's stream."""
        callers = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(callers)
        with torch.cuda.stream(self._stream):
            yield
        callers.wait_stream(self._stream)

    def _capture(self, key: Hashable, segment: Segment) -> torch.cuda.CUDAGraph | None:
        # what other threads ask of the card meanwhile is none of the graph's business: hence thread_local
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    segment()
                finally:
                    graph.capture_end()
        except Exception as error:
            logger.warning("%s is not captured, and runs eagerly: %s: %s", key, type(error).__name__, error)
            return None
        return graph
