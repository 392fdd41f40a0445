"""An engine in a process of its own: the same events as on a thread, and an end with its parent."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import IO

import pytest

from deployment.engine.card import WAIT_SECONDS, wait_for_room
from deployment.engine.commands import Export, Import, Inspect, Publish, Sampling, Submit
from deployment.engine.durability import Durability, open_tier
from deployment.engine.errors import EngineError
from deployment.engine.events import Event, Exported, Failed, Finished, Imported, Stored
from deployment.engine.process import ORPHANED
from deployment.engine.runners import ProcessRunner
from deployment.engine.service import EngineService
from model.errors import ModelError
from state.names import Epoch, Order, SessionKey
from state.session_record import SessionRecord
from tests.engine.tiny import TinyDriver, tiny_options

OPTIONS = tiny_options("dflash2", own_process=True)
LONG = Submit("long", (1, 2, 3), Sampling(temperature=1.0, seed=7), max_tokens=200, ignore_eos=True)


async def collect(service: EngineService, submit: Submit) -> list[Event]:
    return [event async for event in service.turn(submit)]


# ------------------------------------------------------------------------------------------------ as on a thread


def test_a_process_gives_the_events_of_a_thread_and_ends_when_it_is_closed():
    async def scenario(service: EngineService):
        turns = [
            replace(
                LONG,
                turn=f"t{i}",
                session="s" if i == 0 else None,
                sampling=Sampling(1.0, seed=i, logprobs=2),
                max_tokens=60,
            )
            for i in range(3)
        ]
        events = await asyncio.gather(*(collect(service, turn) for turn in turns))
        exported = await service.call(Export("e", "s"))
        assert isinstance(exported, Exported)
        imported = await service.call(Import("i", "another", exported.document))
        with pytest.raises(EngineError, match="no state of session 'nobody'"):
            await service.call(Export("e", "nobody"))
        running = service.turn(LONG)
        await anext(running)
        await asyncio.to_thread(service.close)
        last = [event async for event in running][-1]
        with pytest.raises(EngineError, match="the engine has ended: it was closed"):
            await service.call(Inspect("i"))
        return [*map(timeless, events), exported.frontiers, imported], last

    on_thread, _ = asyncio.run(scenario(EngineService.start(replace(OPTIONS, own_process=False))))
    service = EngineService.start(OPTIONS)
    in_process, last = asyncio.run(scenario(service))
    assert in_process == on_thread
    assert [len(turn[-1].token_ids) for turn in in_process[:3]] == [60] * 3
    assert isinstance(last, Failed | Finished)
    assert not alive(process_of(service))


def test_a_process_makes_sessions_durable_and_says_so_and_another_goes_on_from_them(tmp_path):
    key, order = SessionKey("a" * 64, "s"), Order(Epoch(1, 1), 1)
    options = replace(OPTIONS, durable=str(tmp_path))

    async def scenario():
        service = EngineService.start(options)
        stored: asyncio.Queue[Stored] = asyncio.Queue()
        service.when_stored(stored.put_nowait)
        turn = await collect(service, replace(LONG, session="s", max_tokens=5))
        assert isinstance(turn[-1], Finished)
        ledger = (*LONG.prompt_ids, *turn[-1].token_ids)
        record = SessionRecord("s", ledger, frontier=turn[-1].frontier)
        await service.call(Publish("p", "s", key, order, record))
        told = await stored.get()
        await asyncio.to_thread(service.close)
        return told, record

    told, record = asyncio.run(scenario())
    assert told == Stored(key, order, "published", payload=True, checkpoints=told.checkpoints)
    assert max(told.checkpoints) == ("turn_end", record.frontier)
    emitted: list[Event] = []
    durability = Durability(options, emitted.append)
    driver = TinyDriver("dflash2", durable=durability.sessions)
    with open_tier(str(tmp_path), options.durable_bytes).reading(key) as reading:
        assert reading is not None
        imported = driver.call(Import("i", "s", reading.document, "disk"))
    assert isinstance(imported, Imported) and imported.record == record and imported.frontiers == (record.frontier,)
    durability.close()


def test_a_durable_place_that_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match="durable is 'here', must be an absolute path or a URL"):
        replace(OPTIONS, durable="here")
    with pytest.raises(ModelError, match="durable: durable store: 'nowhere://x' cannot be opened"):
        Durability(replace(OPTIONS, durable="nowhere://x"), lambda event: None)
    with pytest.raises(ValueError, match="durable_bytes is -1, must not be negative"):
        replace(OPTIONS, durable_bytes=-1)


def timeless(events: list[Event]) -> list[Event]:
    return [replace(event, seconds=0.0) if isinstance(event, Finished) else event for event in events]


def test_a_model_that_cannot_be_loaded_costs_a_sentence():
    with pytest.raises(ModelError, match="draft_tokens is 99, must be between 1 and"):
        ProcessRunner(replace(OPTIONS, draft_tokens=99), lambda event: None, lambda reason: None)


# ------------------------------------------------------------------------------------------------ ends


def process_of(service: EngineService) -> int:
    assert isinstance(service._runner, ProcessRunner)
    return service._runner.pid


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def gone_within(seconds: float, pid: int) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_an_engine_that_dies_ends_its_turns_and_says_how():
    async def scenario():
        service = EngineService.start(OPTIONS)
        turn = service.turn(LONG)
        events = [await anext(turn)]
        os.kill(process_of(service), signal.SIGKILL)
        events += [event async for event in turn]
        with pytest.raises(EngineError, match="the engine has ended: its process ended by SIGKILL"):
            await service.call(Inspect("i"))
        await asyncio.to_thread(service.close)
        return events

    last = asyncio.run(scenario())[-1]
    assert isinstance(last, Failed) and "its process ended by SIGKILL" in last.message


PARENT = """
import sys
from importlib import import_module
from deployment.engine import runners

case = import_module(sys.argv[1])
start = runners._start
def told(theirs):
    process = start(theirs)
    print(process.pid, flush=True)
    return process
runners._start = told
def deliver(events):
    for event in events:
        print(type(event).__name__, flush=True)
runner = runners.ProcessRunner(case.OPTIONS, deliver, print)
runner.put(case.LONG)
sys.stdin.read()
"""
"""Tells the engine's process id, then the kind of each event of the turn LONG of the module that is its argument."""


def parent_of_an_engine(module: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", PARENT, module]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def lines_of(parent: subprocess.Popen[str], seconds: float = 120.0) -> Iterator[str]:
    """What it prints. Who waits so long for a line waits in vain: `queue.Empty`."""
    assert parent.stdout is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read(output: IO[str]) -> None:
        for line in output:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, args=(parent.stdout,), daemon=True).start()
    while line := lines.get(timeout=seconds):
        yield line


@pytest.mark.parametrize("loaded", [False, True], ids=["while it loads", "while it decodes"])
def test_an_engine_ends_with_its_killed_parent(loaded):
    with parent_of_an_engine(__name__) as parent:
        lines = lines_of(parent)
        engine = int(next(lines))
        if loaded:
            assert "Tokens\n" in lines
        assert alive(engine)
        parent.kill()
        assert gone_within(1.0, engine)


def test_an_engine_whose_pipe_ends_ends_too():
    """The parent lives, but nobody of it holds the other end any more."""
    import socket

    from deployment.engine.frames import receive_messages, send_messages

    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "deployment.engine.process", str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    theirs.close()
    send_messages(ours, [OPTIONS])
    assert receive_messages(ours) == [""]
    ours.close()
    assert process.wait(1.0) == ORPHANED


# ------------------------------------------------------------------------------------------------ a card that is held


def test_a_replica_waits_for_its_card_and_then_goes_on():
    now, free = [0.0], [1 << 30]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 3:
            free[0] = 8 << 30

    wait_for_room("cuda:0", 4 << 30, lambda: free[0], lambda: ["process 7 (x)"], lambda: now[0], sleep)
    assert 3 < now[0] < 4


def test_a_card_that_stays_held_is_refused_with_its_holder():
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    message = r"need 4\.0 GiB and 1\.0 GiB are free after 60 s; the card is held by process 7 \(python, 60 GiB\)"
    with pytest.raises(ModelError, match=message):
        wait_for_room("cuda:0", 4 << 30, lambda: 1 << 30, lambda: ["process 7 (python, 60 GiB)"], lambda: now[0], sleep)
    assert now[0] == pytest.approx(WAIT_SECONDS, abs=1)
