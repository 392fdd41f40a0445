"""However a turn's ids are cut into deltas, the client gets the same thinking and the same answer."""

from __future__ import annotations

import pytest

from deployment.parsing.turn_text import TurnText
from model import DEMO
from model.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "text, reasoning, content",
    [
        ("One, two.\n</think>\n\n{\"a\": [1, 2]} caf\u00e9", "One, two.\n", "{\"a\": [1, 2]} caf\u00e9"),
        ("</think>\n\n{}", "", "{}"),
        ("caf\u00e9</think>caf\u00e9", "caf\u00e9", "caf\u00e9"),
        ("never closed", "never closed", ""),
    ],
)  # fmt: skip
def test_every_size_of_delta_gives_the_same_message(text: str, reasoning: str, content: str) -> None:
    tokenizer = Tokenizer.load(DEMO / "target")
    opener, ids = tokenizer.encode("<think>\n"), tokenizer.encode(text)
    for size in range(1, 17):
        for first in range(size):  # the first delta may be shorter
            turn = TurnText(tokenizer, opener)
            starts = [0, *range(first or size, len(ids), size)]
            pieces = [turn.push(ids[a:b]) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
            pieces.append(turn.flush())
            told = ("".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces))
            assert told == (reasoning, content)
            assert (turn.reasoning, turn.content) == (reasoning, content)
