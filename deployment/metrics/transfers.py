"""What one replica's sessions have sent between its device, the host stores and other replicas, since it began."""

from __future__ import annotations

from deployment.engine.counts import Flow
from deployment.engine.tally import Recorder
from deployment.metrics.measured import TransferCounts
from deployment.wire import Movement

PAUSE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of how long a session that moves stands."""


class Transfers:
    """One replica's. Used from its event loop alone."""

    def __init__(self) -> None:
        self._copied = self._fetched = Flow()
        self._moved = self._stayed = 0
        self._ahead = self._in_pause = 0
        self._seconds = 0.0
        self._pauses = Recorder(PAUSE_SECONDS)

    def copied(self, size: int, seconds: float) -> None:
        """An image was taken for the host stores; `seconds`: until its bytes had left the device."""
        self._copied = self._copied.plus(size, seconds)

    def fetched(self, size: int, seconds: float) -> None:
        """An image came from a host store."""
        self._fetched = self._fetched.plus(size, seconds)

    def departed(self, movement: Movement | None, seconds: float) -> None:
        """A move is over. None: the session stayed."""
        self._seconds += seconds
        if movement is None:
            self._stayed += 1
            return
        self._moved += 1
        self._ahead += movement.bytes_ahead
        self._in_pause += movement.bytes_in_pause
        self._pauses.add(movement.pause_seconds)

    @property
    def counts(self) -> TransferCounts:
        return TransferCounts(
            self._copied,
            self._fetched,
            self._moved,
            self._stayed,
            self._ahead,
            self._in_pause,
            self._seconds,
            self._pauses.so_far,
        )
