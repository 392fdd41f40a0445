"""The pipe between an engine's process and its replica: what goes through it, and what cannot."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from dataclasses import replace
from typing import Any, get_args

import pytest

from deployment.engine import errors, process
from deployment.engine.commands import (
    Cancel,
    Command,
    Export,
    Foreign,
    Fork,
    Grammar,
    Import,
    Inspect,
    Publish,
    Resumed,
    Sampling,
    SegmentBytes,
    StageSegments,
    Submit,
    ThinkingBudget,
    TokenLogprob,
)
from deployment.engine.counts import Counts
from deployment.engine.errors import EngineError
from deployment.engine.events import Event, Facts, Failed, Finished, Imported, Suspended, Tokens, Unpinned
from deployment.engine.frames import receive_messages
from deployment.engine.message_codec import decode, encode
from deployment.engine.process import DEAF
from deployment.engine.runners import ProcessRunner
from deployment.engine.service import EngineService
from state.fingerprint import Mismatch
from state.names import Epoch, Order, SessionKey
from state.session_record import SessionRecord, TurnRecord
from tests.engine.test_process import LONG, OPTIONS, alive, collect, gone_within, process_of

TURN = TurnRecord(
    "t", "history", "r", {"n": [1, None]}, b"\0" * 32, 2**64 - 1, None, 3, 4, "stop", 6, "none", 0, 3, 2.5
)
RECORD = SessionRecord("s", (1, 2, 3), turns=(TURN,), transcript=({"role": "user", "content": "ä\ud800"},))


@pytest.mark.parametrize(
    "message",
    [
        Submit("t", (1, 2), Sampling(seed=2**64 - 1, logit_bias=((3, -1.5),)), thinking=ThinkingBudget(5, (7,), 8)),
        Submit("t", (), grammar=Grammar("json_schema", '{"type": "object"}', after=9), stop_strings=("a", "\0")),
        Import("c", "s", b"\xff" * 100_000, "disk", exact=True, tenant="x"),
        Submit("t", (1,), resumed=Resumed((2, 3), (1,), (TokenLogprob(2, -0.5, ()),))),
        Export("c", "s", without=frozenset((b"\0" * 32, b"\xff" * 32))),
        StageSegments("c", "m", (SegmentBytes(b"\0" * 32, b"data"),)),
        Publish("c", "s", SessionKey("t", "s"), Order(Epoch(1, 2), 3), RECORD),
        Imported("c", "s", (1, 2), RECORD, Foreign(Mismatch("weights", "weights", "a", "b"), {"a": 1}), True),
        Tokens("t", 4, (5, 6), None, (TokenLogprob(5, -0.25, ((5, -0.25), (6, float("-inf")))),)),
        Failed("t", "code", "message", None, Finished("t", "failed", (1,), None, 1, 2, (0, 3), 1.5, 0.1)),
        OPTIONS,
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_comes_out_of_its_bytes_as_it_was(message):
    again = decode(encode([message]))
    assert again == [message] and type(again[0]) is type(message)


def test_every_message_has_a_name_on_the_pipe():
    for known in (*get_args(Command), *get_args(Event)):
        fields = dict.fromkeys(known.__dataclass_fields__, 1)
        assert decode(encode(known(**fields))) == known(**fields)


def test_bytes_that_are_no_message_are_refused():
    import msgpack

    foreign: list[Any] = [
        msgpack.ExtType(2, msgpack.packb(["Popen", "rm"])),
        msgpack.ExtType(2, msgpack.packb(["Cancel", 1, 2, 3])),
        msgpack.ExtType(9, b""),
    ]
    for value in foreign:
        with pytest.raises(ValueError, match="not a message of this program"):
            decode(msgpack.packb(value) or b"")
    with pytest.raises(ValueError, match="not a message of this program"):
        decode(b"\xc1")
    with pytest.raises(TypeError, match="has no form on the engine's pipe"):
        encode(object())


# ------------------------------------------------------------------------------------------------ what cannot be sent

TOO_LARGE = 10**20
"""No integer of msgpack."""


async def never_hears(service: EngineService) -> str:
    """Why it does not answer any more."""
    while True:
        try:
            await service.call(Inspect("i"))
        except EngineError as error:
            return error.message


def test_a_turn_that_cannot_be_sent_fails_and_those_of_others_go_on_until_nothing_can():
    bad = replace(LONG, turn="bad", sampling=Sampling(logit_bias=((TOO_LARGE, 1.0),)))

    async def scenario(service: EngineService):
        running = service.turn(LONG)
        first = await anext(running)
        (failed,) = await collect(service, bad)
        with pytest.raises(EngineError, match="its Fork cannot be sent"):
            await service.call(Fork("f", "s", "t", (TOO_LARGE,)))
        others = [first, *[event async for event in running], *await collect(service, replace(LONG, turn="c"))]
        service._runner.put(object())  # pyright: ignore[reportArgumentType] - nobody would hear of it
        assert "the engine has ended" in await never_hears(service)
        return failed, [event for event in others if isinstance(event, Finished)]

    service = EngineService.start(OPTIONS)
    failed, finished = asyncio.run(scenario(service))
    assert isinstance(failed, Failed) and failed.code == errors.INTERNAL_ERROR
    assert "its Submit cannot be sent between the engine and its replica" in failed.message
    assert [len(turn.token_ids) for turn in finished] == [200, 200]
    assert gone_within(1.0, process_of(service))


def test_an_engine_whose_events_are_not_heard_any_more_ends():
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def deliver(events: object) -> None:
        raise RuntimeError("out of order")

    runner = ProcessRunner(OPTIONS, deliver, ended.put)
    runner.put(LONG)
    assert ended.get(timeout=60) == "its events are not heard any more: RuntimeError: out of order"
    assert not alive(runner.pid)
    runner.close()


@pytest.fixture
def writing(monkeypatch):
    """What an engine's process writes: the parent's end of the pipe, its events and commands, how it exits."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    exits: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(process.os, "_exit", exits.put)
    writer = threading.Thread(target=process._write, args=(theirs, events, commands), daemon=True)
    writer.start()
    with ours, theirs:
        yield ours, events, commands, exits
        events.put(None)
        writer.join(10)


def test_an_answer_that_cannot_be_sent_is_a_failure_and_the_next_ones_come(writing):
    ours, events, commands, exits = writing
    events.put(Facts("c", {"pages": TOO_LARGE}, Counts()))
    events.put(Tokens("t", 0, (TOO_LARGE,), None))
    events.put(Unpinned("d", "s", 1))
    heard: list[Any] = []
    while len(heard) < 3:
        heard += receive_messages(ours) or []
    failed, last = [event for event in heard if isinstance(event, Failed)], Unpinned("d", "s", 1)
    assert [event.ref for event in failed] == ["c", "t"] and last in heard
    assert commands.get(timeout=10) == Cancel("t") and commands.empty() and exits.empty()


def test_a_process_ends_where_nobody_would_hear_of_what_cannot_be_sent(writing):
    _, events, _, exits = writing
    events.put(Suspended("c", "t", None, TOO_LARGE, 0))
    assert exits.get(timeout=10) == DEAF


def test_a_process_ends_where_its_commands_cannot_be_read(monkeypatch):
    exits: list[int] = []
    monkeypatch.setattr(process.os, "_exit", exits.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall((1).to_bytes(8, "little") + b"\xc1")
        ours.close()
        process._read(theirs, queue.SimpleQueue())
    assert exits[0] == DEAF
