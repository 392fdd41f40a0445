"""What all replicas are asked is told by those that answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError
from starlette.requests import Request

from deployment import replica, replica_calls
from deployment.engine.errors import EngineError
from deployment.errors import Refused, RequestError
from deployment.lasting_stream import LastingStream
from deployment.ownership.messages import Placed
from deployment.ownership.words import Epoch, SessionKey
from deployment.replica_calls import Replicas
from deployment.replica_watch import ReplicaLost, ReplicaWatch
from deployment.session_api import SessionApi
from deployment.token_api import TokenApi
from deployment.wire import Adopted, Encoded, NotHere, Received, Route, Told, TurnRequest


def fleet(*replicas: Callable[[], Awaitable[Any]]) -> Any:
    """What Serve gives to who asks all replicas: each of them answers as it does."""

    async def sent() -> list[Any]:
        return [SimpleNamespace(get_async=replica) for replica in replicas]

    return SimpleNamespace(broadcast=lambda method: SimpleNamespace(_fetch_replica_results_async=sent))


def told(answer: Any) -> Callable[[], Awaitable[Any]]:
    async def get() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return get


async def stuck() -> None:
    await asyncio.sleep(1e9)


async def cancelled() -> None:
    raise asyncio.CancelledError


def test_a_replica_whose_engine_is_in_a_long_step_is_left_out_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica, "MEASURED_SECONDS", 0.01)
    busy: Any = replica.EngineReplica.__new__(replica.EngineReplica)
    busy._service = SimpleNamespace(call=lambda command: asyncio.sleep(20))

    assert asyncio.run(Replicas(fleet(busy.measured, told("another")), cast(Any, None)).measured()) == ["another"]


@pytest.mark.parametrize("lost", [told(RayActorError()), told(EngineError("internal_error", "gone")), stuck, cancelled])
def test_a_replica_that_is_dead_or_cut_off_keeps_no_others_answer_back(
    lost: Callable[[], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replica_calls, "MEASURED_SECONDS", 0.05)
    replicas = Replicas(fleet(told("a"), lost, told("b")), cast(Any, None))
    assert {*asyncio.run(replicas.measured())} == {"a", "b"}
    assert asyncio.run(Replicas(fleet(told("a"), lost, told(None)), cast(Any, None)).answering()) == 2
    with pytest.raises(RequestError) as caught:
        asyncio.run(Replicas(fleet(lost), cast(Any, None)).measured())
    assert caught.value.refused.status == 503


@pytest.mark.parametrize("lost", [True, False])
def test_a_replica_that_says_nothing_is_waited_for_until_its_lease_is_over(lost: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.replica_watch.SILENT_SECONDS", 0.02)
    asked: list[str | None] = []

    async def show(route: Route) -> str:
        asked.append(route.replica)
        await asyncio.sleep(0.1 if route.replica == "b" or not lost else 1e9)
        return f"of {route.replica}"

    async def is_lost(replica: str) -> bool:
        return replica == "a" and lost

    async def staying(beside: str) -> tuple[str, ...]:
        return ("b",)

    engine: Any = SimpleNamespace(show=SimpleNamespace(remote=show))
    replicas = Replicas(engine, cast(Any, SimpleNamespace(is_lost=is_lost, staying=staying)))
    assert asyncio.run(replicas.ask("show", Route("x", "a"))) == ("of b" if lost else "of a")
    assert asked == (["a", "b"] if lost else ["a"])


@pytest.mark.parametrize("lost", [True, False])
def test_who_is_asked_after_a_replica_that_was_lost_is_told_that_it_may_be_done(
    lost: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replica_calls, "AGAIN_SECONDS", 0.0)
    asked: list[Route] = []

    async def fork(route: Route) -> Any:
        asked.append(route)
        if len(asked) == 1 and lost:
            raise RayActorError
        return NotHere("a", "b") if len(asked) < 3 else "forked"

    async def suspect(replica: str) -> None: ...

    engine: Any = SimpleNamespace(fork=SimpleNamespace(remote=fork))
    replicas = Replicas(engine, cast(Any, SimpleNamespace(suspect=suspect)))
    assert asyncio.run(replicas.ask("fork", Route("x", "a"))) == "forked"
    assert [route.again for route in asked] == [False, lost, lost]


def test_a_question_that_changes_nothing_is_asked_of_another_where_an_unknown_one_is_silent(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("deployment.replica_calls.SILENT_SECONDS", 0.02)
    asked: list[str | None] = []

    async def show(route: Route) -> str:
        asked.append(route.replica)
        return "shown" if route.replica is not None else str(await stuck())

    async def staying(beside: str) -> tuple[str, ...]:
        return ("b",)

    async def scenario() -> Any:
        engine: Any = SimpleNamespace(show=SimpleNamespace(remote=show))
        async with asyncio.timeout(5):
            return await Replicas(engine, cast(Any, SimpleNamespace(staying=staying))).ask_any("show", "x")

    assert asyncio.run(scenario()) == "shown" and asked == [None, "b"]


def test_a_prompt_that_takes_long_to_encode_is_encoded_once_while_its_replica_lives(monkeypatch: pytest.MonkeyPatch):
    for module in ("replica_calls", "replica_watch"):
        monkeypatch.setattr(f"deployment.{module}.SILENT_SECONDS", 0.02)
    asked: list[str | None] = []

    async def encode(route: Route, turn: TurnRequest, wanted: str) -> Encoded:
        asked.append(route.replica)
        await asyncio.sleep(0.2)
        return Encoded(3, 4)

    async def staying(beside: str) -> tuple[str, ...]:
        return ("b",)

    async def is_lost(replica: str) -> bool:
        return False

    async def scenario() -> int:
        engine: Any = SimpleNamespace(encode=SimpleNamespace(remote=encode))
        replicas = Replicas(engine, cast(Any, SimpleNamespace(staying=staying, is_lost=is_lost)))
        return await TokenApi(replicas, cast(Any, None), "m").count(TurnRequest("a" * 32, "history", ()))

    assert asyncio.run(scenario()) == 3 and asked == ["b"]


def test_many_counts_ask_the_directory_once_who_is_there():
    asked: list[str] = []

    async def encode(route: Route, turn: TurnRequest, wanted: str) -> Encoded:
        return Encoded(3, 4)

    async def staying(beside: str) -> tuple[str, ...]:
        asked.append(beside)
        await asyncio.sleep(0.01)
        return ("b",)

    async def scenario() -> None:
        engine: Any = SimpleNamespace(encode=SimpleNamespace(remote=encode))
        replicas = Replicas(engine, cast(Any, SimpleNamespace(staying=staying)))
        api = TokenApi(replicas, cast(Any, None), "m")
        counts = [api.count(TurnRequest(f"{number:032x}", "history", ())) for number in range(50)]
        assert await asyncio.gather(*counts[:25]) == [3] * 25
        for count in counts[25:]:
            await count
        await replicas.instead("b", "m")  # who is lost is asked about now

    asyncio.run(scenario())
    assert asked == ["", "b"]


async def _received(first: AsyncIterator[Any]) -> Any:
    return await anext(first)


@pytest.mark.parametrize("receipt", [True, False])
def test_who_gets_a_turn_says_so_before_anything_else_where_it_is_asked_to(receipt: bool):
    here: Any = replica.EngineReplica.__new__(replica.EngineReplica)
    here._id, here._started = "a", True
    here._take = here._desk = None  # neither is ever asked
    route, key = Route("x", receipt=receipt), SessionKey("t" * 64, "s")
    turn = TurnRequest("a" * 32, "history", (), key, tenant=key.tenant)
    for answers in (here.take_turn(route, turn), here.follow_turn(route, key, turn.turn, None)):
        if receipt:
            assert asyncio.run(_received(answers)) == Received("a")
        else:
            with pytest.raises((TypeError, AttributeError)):
                asyncio.run(_received(answers))


def test_a_stream_and_a_call_that_wait_for_one_replica_ask_for_it_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.replica_watch.SILENT_SECONDS", 0.3)
    monkeypatch.setattr("deployment.replica_watch.LOOK_SECONDS", 0.5)
    asked: list[str] = []
    key = SessionKey("t" * 64, "s")

    async def is_lost(replica: str) -> bool:
        asked.append(replica)
        return True

    async def staying(beside: str) -> tuple[str, ...]:
        return ("b",)

    async def locate(key: SessionKey) -> Placed:
        return Placed(key, Epoch(1, 1), "a", ())

    async def show(route: Route) -> str | None:
        return "shown" if route.replica == "b" else await stuck()

    async def events(route: Route) -> AsyncIterator[Told]:
        if route.replica != "b":
            await stuck()
        yield Told("", Refused(409, "session_busy", "x"))

    async def scenario() -> tuple[Any, list[Told]]:
        engine = SimpleNamespace(
            show=SimpleNamespace(remote=show),
            options=lambda stream: SimpleNamespace(take_turn=SimpleNamespace(remote=Streamed)),
        )
        cluster: Any = SimpleNamespace(is_lost=is_lost, staying=staying, locate=locate)
        replicas = Replicas(cast(Any, engine), cluster)
        turn = TurnRequest("a" * 32, "history", (), key, tenant=key.tenant)
        stream = LastingStream(replicas, cluster).taken(turn)
        return await asyncio.gather(replicas.ask("show", Route("x", "a")), _all(stream))

    class Streamed:
        """As Serve gives it out."""

        def __init__(self, route: Route, turn: TurnRequest) -> None:
            self._events = events(route)

        def __aiter__(self) -> AsyncIterator[Told]:
            return self._events

        def cancel(self) -> None: ...

    shown, told = asyncio.run(scenario())
    assert shown == "shown" and len(told) == 1 and asked == ["a"]


async def _all(stream: AsyncIterator[Told]) -> list[Told]:
    return [one async for one in stream]


def http_request(body: bytes, tenant: str) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": [], "state": {"tenant": tenant}}, receive)


MAKING: dict[str, Callable[[SessionApi, str], Awaitable[Any]]] = {
    "create_session": lambda api, tenant: api.create(http_request(b'{"id": "one"}', tenant)),
    "import_session": lambda api, tenant: api.import_(http_request(b"document", tenant), "one"),
}


@pytest.mark.parametrize("method", MAKING)
def test_what_a_replica_that_is_cut_off_was_to_make_is_asked_of_another_as_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("deployment.replica_watch.SILENT_SECONDS", 0.02)
    monkeypatch.setattr(replica_calls, "AGAIN_SECONDS", 0.0)
    record = SimpleNamespace(id="one", frontier=7)
    document = SimpleNamespace(manifest=SimpleNamespace(session=record))
    monkeypatch.setattr("deployment.session_api._opened", lambda body: document)
    asked: list[tuple[str | None, bool, SessionKey]] = []

    async def make(route: Route, key: SessionKey, *more: Any) -> Any:
        asked.append((route.replica, route.again, key))
        if len(asked) == 1:
            await asyncio.sleep(1e9)
        return Adopted("b", Epoch(1, 1), "none", 0)

    async def staying(beside: str) -> tuple[str, ...]:
        return ("b",) if asked else ("a",)

    cluster: Any = SimpleNamespace(
        locate=lambda key: told(None)(), staying=staying, is_lost=lambda replica: told(replica == "a")()
    )
    api = SessionApi(
        Replicas(cast(Any, SimpleNamespace(**{method: SimpleNamespace(remote=make)})), cluster), cluster, 1 << 20
    )

    async def scenario() -> Any:
        async with asyncio.timeout(5):
            return await MAKING[method](api, "t" * 64)

    assert asyncio.run(scenario())["id"] == "one"
    key = SessionKey("t" * 64, "one")
    assert asked == [("a", False, key), ("b", True, key)]


def test_of_replicas_that_are_gone_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deployment.replica_watch.SILENT_SECONDS", 0.0)
    monkeypatch.setattr("deployment.replica_watch.LOOK_SECONDS", 0.02)
    watch = ReplicaWatch(lambda replica: told(True)())

    async def scenario() -> None:
        for number in range(8):
            with pytest.raises(ReplicaLost):
                await watch.answer(stuck(), f"replica {number}")
            await asyncio.sleep(0.03)

    asyncio.run(scenario())
    assert len(watch._known) == 1
