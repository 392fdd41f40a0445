"""What the tower made of the last media, by their digests, within a number of bytes.

A prompt is prefilled in chunks that may end inside an item, and the next turn of a session, its forks and other
sessions show the same items again: the tower runs once for all of them while its output is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from model.media import MediaItem


class MediaCache:
    """Embeddings of items, [n, H] each; what was not asked for for the longest time goes first. For one thread."""

    def __init__(self, encode: Callable[[MediaItem], torch.Tensor], budget: int) -> None:
        """`budget`: bytes that are kept, above 0. An item that alone has more stays until another comes, so that the
        chunks of its own prompt find it."""
        self._encode = encode
        self._budget = budget
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()
        self.bytes = 0
        """Bytes kept now."""

    def embeddings(self, item: MediaItem) -> torch.Tensor:
        """What the tower makes of `item`; the caller may hold it longer than it is kept here."""
        found = self._kept.get(item.digest)
        if found is not None:
            self._kept.move_to_end(item.digest)
            return found
        made = self._encode(item)
        self._kept[item.digest] = made
        self.bytes += made.nbytes
        while self.bytes > self._budget and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self.bytes -= gone.nbytes
        return made
