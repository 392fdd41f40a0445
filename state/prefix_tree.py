"""Which kept images stand at a prefix of these tokens? A tree of 64-token blocks, compared by exact ids, never by hash.

    root -> block -> block -> ... -> tail (the 0 to 63 tokens after the last whole block) -> what is kept there

A hybrid model goes on from an image or not at all, so only places where something is kept count: pages alone are no
match. A root is whose tokens they are (a tenant); nothing is ever found under another one. A block's key holds its
tokens and the media that begin in it, each by its offset and digest, so that equal placeholder ids of two pictures
differ. A look-up takes O(length / 64) steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from state.errors import StateError
from state.geometry import PAGE_TOKENS

Item = TypeVar("Item", bound=Hashable)

Media = Sequence[tuple[int, bytes]]
"""(position of its first token, digest of all that tells it apart) of each picture or clip, by position."""

_Block = tuple[tuple[int, ...], tuple[tuple[int, bytes], ...]]
"""Tokens, and (offset, digest) of media that begin among them."""


class _Node(Generic[Item]):
    """The end of a run of whole blocks: [0, `start`). `key`: the last of them, under which the parent knows it."""

    __slots__ = ("blocks", "key", "parent", "start", "tails")

    def __init__(self, parent: _Node[Item] | None, key: _Block) -> None:
        self.parent = parent
        self.key = key
        self.start = 0 if parent is None else parent.start + PAGE_TOKENS
        self.blocks: dict[_Block, _Node[Item]] = {}
        self.tails: dict[_Block, list[Item]] = {}

    @property
    def empty(self) -> bool:
        return not self.blocks and not self.tails


class PrefixTree(Generic[Item]):
    """Items by root and exact tokens. An item lies at one place; a place may hold several."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[Item]] = {}
        self._places: dict[Item, tuple[Hashable, _Node[Item], _Block]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    def insert(self, root: Hashable, tokens: Sequence[int], item: Item, media: Media = ()) -> None:
        """Keeps `item` at the end of `tokens`. Raises `StateError` if it lies somewhere already."""
        if item in self._places:
            raise StateError("prefix tree: an item is inserted that lies in it already")
        node = self._roots.setdefault(root, _Node(None, ((), ())))
        whole = len(tokens) - len(tokens) % PAGE_TOKENS
        for start in range(0, whole, PAGE_TOKENS):
            key = _block(tokens, media, start, start + PAGE_TOKENS)
            child = node.blocks.get(key)
            if child is None:
                child = node.blocks[key] = _Node(node, key)
            node = child
        tail = _block(tokens, media, whole, len(tokens))
        node.tails.setdefault(tail, []).append(item)
        self._places[item] = (root, node, tail)

    def remove(self, item: Item) -> None:
        """Takes an item out, and the blocks that lead to nothing without it. `StateError` if it is not there."""
        if item not in self._places:
            raise StateError("prefix tree: an item is removed that does not lie in it")
        root, node, tail = self._places.pop(item)
        node.tails[tail].remove(item)
        if not node.tails[tail]:
            del node.tails[tail]
        while node.empty and node.parent is not None:
            del node.parent.blocks[node.key]
            node = node.parent
        if node.empty:
            del self._roots[root]

    def prefixes(self, root: Hashable, tokens: Sequence[int], limit: int, media: Media = ()) -> Iterator[Item]:
        """All items at exact prefixes of `tokens` of at most `limit` tokens: the deepest first, at one place the
        newest first. The tree must not change while the answers are read."""
        node = self._roots.get(root)
        limit = min(limit, len(tokens))
        path: list[_Node[Item]] = []
        while node is not None:
            path.append(node)
            end = node.start + PAGE_TOKENS
            node = node.blocks.get(_block(tokens, media, node.start, end)) if end <= limit else None
        for node in reversed(path):
            for tail in sorted(node.tails, key=lambda tail: len(tail[0]), reverse=True):
                end = node.start + len(tail[0])
                if end <= limit and tail == _block(tokens, media, node.start, end):
                    yield from reversed(node.tails[tail])

    def ancestor(self, item: Item) -> int:
        """Tokens of the deepest place at an exact prefix of this item's place where another item lies; 0 without one.
        That may be its own place. `StateError` if the item is not in the tree."""
        if item not in self._places:
            raise StateError("prefix tree: the ancestor of an item is asked for that does not lie in it")
        _, node, below = self._places[item]
        while True:
            found = [len(tail[0]) for tail, items in node.tails.items() if _leads(tail, below) and items != [item]]
            if found:
                return node.start + max(found)
            if node.parent is None:
                return 0
            node, below = node.parent, node.key


def _block(tokens: Sequence[int], media: Media, start: int, end: int) -> _Block:
    if not media:
        return tuple(tokens[start:end]), ()
    first, last = (bisect_left(media, place, key=_position) for place in (start, end))
    return tuple(tokens[start:end]), tuple((at - start, digest) for at, digest in media[first:last])


def _position(entry: tuple[int, bytes]) -> int:
    return entry[0]


def _leads(tail: _Block, below: _Block) -> bool:
    """Whether `tail` is a prefix of `below`, which begins at the same position."""
    count = len(tail[0])
    return tail[0] == below[0][:count] and tail[1] == tuple(entry for entry in below[1] if entry[0] < count)
