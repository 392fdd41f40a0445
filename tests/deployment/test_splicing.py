"""A history that comes back keeps the tokens that its session's model chose, where it says the same (decision 20)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployment.parsing.turn_text import TurnText
from deployment.splicing import spliced
from deployment.turns import Prompt, append, full_history
from deployment.wire import TurnRequest
from model import DEMO
from model.chat_template import ChatTemplate
from model.tokenizer import Tokenizer
from state.media import Media, PlacedMedia
from tests.deployment.places import KEY, Place, ids_of, opened, places, run, told

TOKENIZER = Tokenizer.load(DEMO / "target")
TEMPLATE = ChatTemplate.load(DEMO / "target")
FACT: Any = {"role": "user", "content": "My locker code is 4172."}
QUESTION: Any = {"role": "user", "content": "What is my locker code?"}
KEPT = {"preserve_thinking": True}
"""The template writes earlier answers as they were generated."""


def bytewise(text: str) -> tuple[int, ...]:
    """A text in one token a byte, which is how no tokenizer writes it."""
    return tuple(token for byte in text.encode() for token in BYTES[byte])


BYTES = {byte: tuple(TOKENIZER.encode(chr(byte))) for byte in range(128)}


def history(*said: Any, kept: bool = True) -> Prompt:
    return full_history(TEMPLATE, TOKENIZER, said, preserve_thinking=kept or None)


def answered(text: str, ids: Sequence[int], end: bool = True) -> tuple[Any, tuple[int, ...]]:
    """The assistant's message, and the session's ledger after it."""
    stop = TOKENIZER.id_of("<|im_end|>")
    assert stop is not None
    return {"role": "assistant", "content": text}, (*history(FACT).ids, *ids, *((stop,) if end else ()))


@pytest.mark.parametrize("end", [True, False], ids=["ended by itself", "ended by its length"])
def test_an_answer_in_tokens_of_its_own_is_gone_on_from_as_an_append_turn_does(end: bool):
    text = "Noted: four one seven two."
    ids = bytewise(text)
    assert ids != tuple(TOKENIZER.encode(text)) and TOKENIZER.decode(ids) == text
    message, ledger = answered(text, ids, end)
    anew = history(FACT, message, QUESTION)
    prompt = spliced(TOKENIZER, anew, ledger)
    assert anew.ids[: len(ledger)] != ledger, "it would be encoded as the model said it"
    assert prompt.ids[: len(ledger)] == ledger
    assert prompt.ids == append(TEMPLATE, TOKENIZER, ledger, [QUESTION]).ids
    assert prompt.opener == anew.opener


def test_a_call_in_tokens_of_its_own_is_gone_on_from_with_its_result():
    """Between the calls of one answer, templates write what came before as it was generated."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    text = "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    begin, *between, close = TOKENIZER.encode(text)
    ids = [begin, *(one for token in between for one in split(token)), close]
    asked = full_history(TEMPLATE, TOKENIZER, [FACT], tools=tools)
    said = TurnText(TOKENIZER, asked.opener, {"add": parameters})
    said.push(ids)
    said.flush()
    _, end = answered("", ())
    ledger = (*asked.ids, *ids, end[-1])
    result = {"role": "tool", "content": "7"}
    anew = full_history(TEMPLATE, TOKENIZER, [FACT, said.message, result], tools=tools)
    assert said.calls and anew.ids[: len(ledger)] != ledger
    assert spliced(TOKENIZER, anew, ledger).ids[: len(ledger)] == ledger


def split(token: int) -> tuple[int, ...]:
    return bytewise(TOKENIZER.spelled(token).decode())


def test_an_answer_that_a_template_writes_in_another_way_is_encoded_anew():
    message, ledger = answered("Noted.", bytewise("Noted."))
    anew = history(FACT, message, QUESTION, kept=False)
    assert spliced(TOKENIZER, anew, ledger) == anew


def test_an_answer_that_the_client_changed_is_encoded_anew_and_so_is_what_follows():
    message, ledger = answered("Noted.", bytewise("Noted."))
    again = history(FACT, message, QUESTION)
    ledger = (*spliced(TOKENIZER, again, ledger).ids, *bytewise("4172"))
    changed = history(FACT, message, QUESTION, {"role": "assistant", "content": "4173"}, FACT)
    kept = spliced(TOKENIZER, changed, ledger)
    assert TOKENIZER.decode(kept.ids) == TOKENIZER.decode(changed.ids)
    assert kept.ids[: len(ledger) - 4] == ledger[:-4] and "4173" in TOKENIZER.decode(kept.ids)
    other = history(FACT, {**message, "content": "Noted!"}, QUESTION, {"role": "assistant", "content": "4172"}, FACT)
    assert spliced(TOKENIZER, other, ledger) == other


def test_bytes_that_are_no_text_come_back_as_what_the_client_was_told():
    broken = BYTES[ord("a")] + (_id_of_byte(0xE2),) + BYTES[ord("b")]
    told = TOKENIZER.decode(broken)
    assert told == "a\ufffdb"
    message, ledger = answered(told, broken)
    assert spliced(TOKENIZER, history(FACT, message, QUESTION), ledger).ids[: len(ledger)] == ledger


def _id_of_byte(byte: int) -> int:
    return next(i for i in range(TOKENIZER.public_rows) if TOKENIZER.spelled(i) == bytes([byte]))


def test_images_and_boundaries_stay_at_what_they_stood_at():
    message, ledger = answered("Noted.", bytewise("Noted."))
    anew = history(FACT, message, QUESTION)
    ends = [place for place, token in enumerate(anew.ids) if TOKENIZER.is_special(token)]
    media = Media("image", "a" * 64, (1, 1, 2, 2), 1, 1, (), b"")
    anew = replace(anew, system_boundary=ends[0], media=(PlacedMedia(media, (ends[1], ends[-1])),))
    kept = spliced(TOKENIZER, anew, ledger)
    assert len(kept.ids) > len(anew.ids) and kept.system_boundary == ends[0]
    (shown,) = kept.media
    assert [kept.ids[place:] for place in shown.starts[1:]] == [anew.ids[ends[-1] :]]
    assert kept.ids[: shown.starts[0]] == anew.ids[: ends[1]]
    inside = anew.ids.index(TOKENIZER.encode("Noted")[0])
    prefix = spliced(TOKENIZER, replace(anew, stable_boundary=inside), ledger)
    assert prefix.ids[: prefix.stable_boundary] == anew.ids[:inside]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=4), st.data())
def test_whatever_a_model_said_the_prompt_says_the_same_and_begins_with_what_is_equal(texts: list[str], data: Any):
    said = [message for text in texts for message in (FACT, {"role": "assistant", "content": text})]
    anew = history(*said, QUESTION)
    ledger: list[int] = []
    for token in anew.ids[: data.draw(st.integers(0, len(anew.ids)))]:
        spelled = TOKENIZER.spelled(token).decode(errors="replace")
        split = spelled.isascii() and not TOKENIZER.is_special(token) and data.draw(st.booleans())
        ledger += bytewise(spelled) if split else (token,)
    kept = spliced(TOKENIZER, anew, ledger)
    assert TOKENIZER.bytes_of(kept.ids) == TOKENIZER.bytes_of(anew.ids)
    assert [t for t in kept.ids if TOKENIZER.is_special(t)] == [t for t in anew.ids if TOKENIZER.is_special(t)]
    runs = max((place for place, token in enumerate(ledger) if TOKENIZER.is_special(token)), default=-1)
    assert list(kept.ids[: runs + 1]) == ledger[: runs + 1]
    assert spliced(TOKENIZER, kept, ledger) == kept


# ------------------------------------------------------------------------------------------------ a session's turns


def test_a_full_history_reuses_an_answer_in_tokens_of_its_own_and_goes_on_as_an_append_turn_does():
    """The model is made to say one letter again and again, each time in a token of its own."""
    (letter,) = BYTES[ord("a")]
    first: Any = {"max_tokens": 8, "temperature": 0.0, "logit_bias": ((letter, 1000.0),)}
    later: Any = {"max_tokens": 12, "temperature": 0.0}

    async def turn(place: Place, name: int, mode: Any, *messages: Any, **how: Any) -> tuple[Any, tuple[int, ...]]:
        request = TurnRequest(f"{name:032x}", mode, messages, KEY, tenant=KEY.tenant, preserve_thinking=True, **how)
        events = await told(await place.begin(request))
        return opened(events), ids_of(events)

    async def gone_on(mode: Any) -> tuple[Any, ...]:
        async with places() as (_, (a, _)):
            _, said = await turn(a, 1, "history", FACT, **first)
            assert said == (letter,) * 8 != tuple(TOKENIZER.encode("a" * 8))
            frontier = a.session.frontier
            new = (QUESTION,) if mode == "append" else (*a.session.transcript, QUESTION)
            began, said = await turn(a, 2, mode, *new, **later)
            return a.session.ledger, said, began.reused, frontier

    async def steps() -> None:
        history, appended = await gone_on("history"), await gone_on("append")
        assert history == appended
        *_, reused, frontier = history
        assert reused == frontier

    run(steps)
