"""The tower runs once for an item while what it made is within the budget."""

from __future__ import annotations

import torch

from deployment.engine.media_cache import MediaCache
from model.media import MediaItem

ROW = 4 * 8  # bytes of one embedding


class Encoder:
    """Counts how often each item is encoded."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, item: MediaItem) -> torch.Tensor:
        self.seen.append(item.digest)
        return torch.full((item.embeddings, 8), float(ord(item.digest)))


def item(digest: str, rows: int = 2) -> MediaItem:
    return MediaItem("image", torch.empty(0, dtype=torch.uint8), 1, rows, 1, (), digest)


def test_an_item_is_encoded_once_and_the_least_recently_used_goes_first() -> None:
    encode = Encoder()
    cache = MediaCache(encode, budget=4 * ROW)
    for digest in "abacba":
        assert cache.embeddings(item(digest)).eq(ord(digest)).all()
        assert cache.bytes <= 4 * ROW
    assert encode.seen == ["a", "b", "c", "b", "a"]


def test_an_item_above_the_budget_is_kept_until_another_comes() -> None:
    encode = Encoder()
    cache = MediaCache(encode, budget=4 * ROW)
    for digest, rows in (("a", 2), ("x", 9), ("x", 9), ("a", 2), ("x", 9)):
        cache.embeddings(item(digest, rows))
    assert encode.seen == ["a", "x", "a", "x"] and cache.bytes == 9 * ROW
