"""Ids to text a piece at a time is the same text, whatever the pieces; and the library is the oracle of the whole."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model import DEMO
from model.errors import ModelError
from model.tokenizer import Detokenizer, Tokenizer

TOKENIZER = Tokenizer.load(DEMO / "target")
ORACLE = tokenizers.Tokenizer.from_file(str(DEMO / "target/tokenizer.json"))
ids_lists = st.lists(st.integers(0, TOKENIZER.public_rows - 1), max_size=40)


def in_pieces(ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*pieces, detokenizer.flush()]


@given(ids=ids_lists)
@settings(max_examples=300, deadline=None)
def test_decode_equals_the_library_for_any_ids(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == ORACLE.decode(ids, skip_special_tokens=True)


def test_every_single_id_decodes_like_the_library() -> None:
    for token_id in range(TOKENIZER.public_rows):
        assert TOKENIZER.decode([token_id]) == ORACLE.decode([token_id], skip_special_tokens=True)


@given(ids=ids_lists, cuts=st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_ids_join_to_the_whole(ids: list[int], cuts: list[int]) -> None:
    assert "".join(in_pieces(ids, cuts)) == TOKENIZER.decode(ids)


@given(text=st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_a_text_is_streamed_without_a_broken_character(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == ORACLE.encode(text, add_special_tokens=False).ids
    pieces = in_pieces(ids, list(range(len(ids))))
    whole = TOKENIZER.decode(ids)
    assert "".join(pieces) == whole
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd") == text.count("\ufffd")


def test_a_character_split_over_tokens_comes_when_it_is_complete() -> None:
    ids = TOKENIZER.encode("😀")
    assert len(ids) == 4, "the demo tokenizer spells an emoji in four byte tokens"
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_a_broken_character_does_not_swallow_what_follows() -> None:
    start = TOKENIZER.encode("😀")[:2]
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(start) == ""
    assert detokenizer.push(TOKENIZER.encode("ok")) == "\ufffdok"


def test_flush_gives_up_on_an_incomplete_character_and_starts_fresh() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(TOKENIZER.encode("a😀")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(TOKENIZER.encode("b")) == "b"


def test_streaming_is_linear_in_time() -> None:
    def seconds(count: int) -> float:
        detokenizer = Detokenizer(TOKENIZER)
        broken = TOKENIZER.encode("😀")[0]  # never completes: a window that waits for it would grow for ever
        begin = time.process_time()
        for _ in range(count):
            detokenizer.push([broken])
        return time.process_time() - begin

    seconds(1000)
    assert seconds(20_000) < 40 * max(seconds(2_000), 1e-3)


def test_special_tokens_are_encoded_and_not_shown() -> None:
    ids = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == TOKENIZER.id_of("<|im_start|>") == 8179 and ids[-1] == 8180
    assert TOKENIZER.decode(ids) == "user\nhi"
    assert TOKENIZER.token(8180) == "<|im_end|>"


def test_tokens_that_are_added_but_not_special_are_shown() -> None:
    think = TOKENIZER.id_of("<think>")
    assert think is not None and TOKENIZER.decode([think]) == "<think>"


def test_public_rows_end_after_the_highest_known_id() -> None:
    assert TOKENIZER.public_rows == 8192
    assert TOKENIZER.id_of("no such token") is None
    assert TOKENIZER.decode([8192, 10**9]) == ""
    with pytest.raises(ValueError, match="token id 8192 is unknown"):
        TOKENIZER.token(8192)


def test_a_lone_surrogate_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        TOKENIZER.encode("ab\ud800c")


def test_missing_broken_and_foreign_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
    content = json.loads((DEMO / "target/tokenizer.json").read_text())
    path.write_text(json.dumps(content | {"decoder": None}))
    with pytest.raises(ModelError, match="decoder is None, but must be 'ByteLevel'"):
        Tokenizer.load(tmp_path)


def test_sha256_is_that_of_the_file(tmp_path: Path) -> None:
    content = (DEMO / "target/tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(content)
    assert Tokenizer.load(tmp_path).sha256 == TOKENIZER.sha256
    (tmp_path / "tokenizer.json").write_text(content + " ")
    assert Tokenizer.load(tmp_path).sha256 != TOKENIZER.sha256
