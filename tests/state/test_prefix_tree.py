"""The prefix tree against a list that is searched from end to end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state.errors import StateError
from state.prefix_tree import PrefixTree

# Runs of equal ids, so that sequences share whole blocks, leave each other inside blocks, and end at block boundaries.
RUN = st.tuples(st.integers(0, 1), st.sampled_from([1, 3, 62, 63, 64, 65, 128]))
TOKENS = st.lists(RUN, max_size=4).map(lambda runs: tuple(token for token, count in runs for _ in range(count)))
ROOTS = st.sampled_from(["one tenant", "another"])
MEDIA = st.sampled_from([(), ((2, b"cat"),), ((2, b"dog"),), ((2, b"cat"), (70, b"dog"))])
STEP = st.one_of(
    st.tuples(st.just("insert"), ROOTS, TOKENS, MEDIA),
    st.tuples(st.just("remove"), st.integers(0, 30)),
    st.tuples(st.just("look up"), ROOTS, TOKENS, MEDIA, st.integers(0, 300)),
)


class ListOfAll:
    """What the tree should say."""

    def __init__(self):
        self.entries = []

    def at_prefixes(self, root, tokens, limit, media):
        found = [
            (item, kept)
            for item, kept_root, kept, kept_media in self.entries
            if kept_root == root
            and len(kept) <= limit
            and kept == tokens[: len(kept)]
            and kept_media == tuple(entry for entry in media if entry[0] < len(kept))
        ]
        newest_first = reversed(found)
        return [item for item, kept in sorted(newest_first, key=lambda entry: len(entry[1]), reverse=True)]

    def ancestor(self, item):
        _, root, tokens, media = next(entry for entry in self.entries if entry[0] == item)
        others = [other for other in self.at_prefixes(root, tokens, len(tokens), media) if other != item]
        return max((len(kept) for other, _, kept, _ in self.entries if other in others), default=0)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=30))
def test_whatever_was_kept_and_taken_out_the_tree_finds_what_a_search_of_all_finds(steps):
    tree: PrefixTree[int] = PrefixTree()
    model = ListOfAll()
    for number, (what, *rest) in enumerate(steps):
        if what == "insert":
            root, tokens, media = rest
            begun = tuple(entry for entry in media if entry[0] < len(tokens))
            tree.insert(root, tokens, number, begun)
            model.entries.append((number, root, tokens, begun))
        elif what == "remove" and model.entries:
            item = model.entries.pop(rest[0] % len(model.entries))[0]
            tree.remove(item)
        elif what == "look up":
            root, tokens, media, limit = rest
            assert list(tree.prefixes(root, tokens, limit, media)) == model.at_prefixes(root, tokens, limit, media)
        assert len(tree) == len(model.entries)
        assert {item: tree.ancestor(item) for item, *_ in model.entries} == {
            item: model.ancestor(item) for item, *_ in model.entries
        }
    for item, *_ in model.entries:
        tree.remove(item)
    assert not tree._roots, "blocks that lead to nothing are kept"


def test_ids_are_compared_themselves_and_not_by_their_hash():
    """hash(-1) == hash(-2), so that a tree that trusted hashes would take one for the other."""
    tree: PrefixTree[str] = PrefixTree()
    tree.insert("tenant", (-1,) * 70, "image")
    assert hash((-1,) * 64) == hash((-2,) * 64)
    assert list(tree.prefixes("tenant", (-2,) * 80, 80)) == []
    assert list(tree.prefixes("tenant", (-1,) * 80, 80)) == ["image"]


def test_a_look_up_takes_as_many_steps_as_the_prompt_has_blocks_however_much_is_kept():
    class Counted(tuple):
        slices = 0

        def __getitem__(self, key):
            Counted.slices += 1
            return super().__getitem__(key)

    tree: PrefixTree[int] = PrefixTree()
    for other in range(200):
        tree.insert("tenant", (other, *range(6400)), other)
    prompt = Counted((77, *range(6400)))
    assert next(tree.prefixes("tenant", prompt, 6401)) == 77
    assert Counted.slices <= 6401 // 64 + 3


def test_an_item_is_kept_once_and_taken_out_once():
    tree: PrefixTree[str] = PrefixTree()
    tree.insert("tenant", (1, 2), "image")
    with pytest.raises(StateError, match="inserted"):
        tree.insert("tenant", (1, 2, 3), "image")
    tree.remove("image")
    for refused in (tree.remove, tree.ancestor):
        with pytest.raises(StateError, match="does not lie in it"):
            refused("image")
