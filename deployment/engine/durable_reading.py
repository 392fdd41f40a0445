"""How does what a publication needs of the device come off it while turns go on? Some of its segments at a time."""

from __future__ import annotations

from collections.abc import Sequence

from state.begun_image import BegunImage
from state.byte_store import Bytes
from state.checkpoint import Checkpoint
from state.codec import DetachedSegment
from state.errors import StateError
from state.memory import StateMemory


class Reading:
    """Of `segments`, whose state is that of `checkpoints`: what it has read so far is `held`, by its digest."""

    def __init__(self, checkpoints: Sequence[Checkpoint], segments: Sequence[DetachedSegment]) -> None:
        self._checkpoints = tuple(checkpoints)
        self._left = list(reversed(segments))
        self._image: tuple[BegunImage, bytearray] | None = None
        self.held: dict[bytes, Bytes] = {}
        self.taken = 0
        """Bytes that it has read so far."""

    @property
    def left(self) -> bool:
        """Whether there is anything to be read."""
        return bool(self._left)

    @property
    def size(self) -> int:
        """Bytes of memory that it takes."""
        return sum(map(len, self.held.values())) + (len(self._image[1]) if self._image is not None else 0)

    def stands(self, memory: StateMemory) -> bool:
        """Whether all of its state is still there."""
        return all(map(memory.keeps, self._checkpoints))

    def read(self, most: int | None) -> bool:
        """About `most` bytes more, or all of them. Whether nothing is left."""
        end = None if most is None else self.taken + most
        while self._left and (end is None or self.taken < end):
            self.taken += self._next(None if end is None else end - self.taken)
        return not self._left

    def _next(self, most: int | None) -> int:
        """Reads the next segment, or of an image the next piece; returns how many bytes that were."""
        segment = self._left[-1]
        if segment.sha256 in self.held:
            self._left.pop()
            return 0
        if most is None or segment.image is None:
            self.held[segment.sha256] = data = segment.read()
            self._left.pop()
            return len(data)
        if self._image is None:
            self._image = BegunImage(0, segment.image()), bytearray(segment.size)
        begun, data = self._image
        piece = begun.next_piece(most)
        data[piece.offset : piece.offset + len(piece.data)] = piece.data
        if piece.sha256 is not None:
            if piece.sha256 != segment.sha256:
                raise StateError(f"image {segment.sha256.hex()} is another one now")
            self.held[segment.sha256] = data
            self._image = None
            self._left.pop()
        return len(piece.data)
