"""A load is what it says, and its report what its clients saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest
from typer.testing import CliRunner

from deployment.cli import app
from deployment.client import AsyncClient
from deployment.load.report import Report, Spread, percentile, report
from deployment.load.traffic import Load, put
from deployment.load.turns import TurnSeen
from tests.deployment.serving import serving


def test_sessions_of_several_turns_are_drawn_reused_and_deleted_and_the_command_tells_the_same():
    load = Load(conversations=3, at_once=2, turns=2, tokens=6)

    async def scenario(url: str) -> tuple[list[TurnSeen], float, list[TurnSeen]]:
        heard: list[TurnSeen] = []
        async with AsyncClient(url, "bench", patience=0) as client:
            seen, seconds = await put(client, load, heard.append)
        return seen, seconds, heard

    with serving() as url:
        seen, seconds, heard = asyncio.run(scenario(url))
        left = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("dflash_sessions{")]
        told = CliRunner().invoke(app, ["bench", "--url", url, "--conversations", "2", "--tokens", "6", "--json"])
        shown = CliRunner().invoke(app, ["bench", "--url", url, "--conversations", "1", "--tokens", "6"])
    assert heard == seen and len(seen) == load.all_turns and not any(one.refused for one in seen)
    assert [one.tokens for one in seen] == [6] * 6 and all(one.first is not None and one.rounds for one in seen)
    assert sorted((one.hit, one.reused > 0) for one in seen) == [("device", True)] * 3 + [("none", False)] * 3
    assert all(one.first is not None and one.first <= one.chunks[-1] <= one.seconds <= seconds for one in seen)
    assert left == ['dflash_sessions{replica="a"} 0.0']
    assert told.exit_code == 0, told.output
    summary = json.loads(told.stdout)
    assert (summary["turns"], summary["tokens"], summary["refused"]) == (2, 12, {})
    assert summary["cold"]["count"] == 2 and summary["acceptance_length"] >= 1 and summary["load"]["at_once"] == 8
    assert shown.exit_code == 0 and "tokens/s" in shown.stdout and "acceptance length" in shown.stdout


def test_messages_are_those_of_the_seed_and_each_its_own():
    load = Load(conversations=8, at_once=8, turns=20, words=40)
    said = [load.message(number, turn)["content"] for number in range(8) for turn in range(20)]
    assert len(set(said)) == 160 and all(36 <= len(text.split()) <= 40 for text in said)
    assert said[0] == Load(1, 1, words=40).message(0, 0)["content"] != Load(1, 1, words=40, seed=1).message(0, 0)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda request: httpx.Response(429, json={"error": {"message": "later", "code": "overloaded"}}), "overloaded"),
        (lambda request: httpx.Response(200, text="<html>"), "UnexpectedAnswer"),
        (lambda request: (_ for _ in ()).throw(httpx.ConnectError("nobody")), "Unreachable"),
    ],
)
def test_a_turn_that_is_refused_ends_its_conversation_and_is_counted(
    answer: Callable[[httpx.Request], httpx.Response], code: str
):
    async def scenario() -> Report:
        transport = httpx.MockTransport(answer)
        async with AsyncClient("http://x", transport=transport, patience=0) as client:
            return report(*await put(client, Load(conversations=5, at_once=2, turns=4)))

    told = asyncio.run(scenario())
    assert told.refused == {code: 5} and (told.turns, told.tokens, told.acceptance_length) == (5, 0, None)
    assert told.cold == told.warm == told.gaps == Spread(0)


def test_a_report_parts_cold_from_warm_and_counts_only_turns_that_were_answered():
    seen = [
        TurnSeen(1.0, (0.5, 0.6, 0.9), 7, 20, 0, (2, 1), "none"),
        TurnSeen(1.0, (0.2, 0.4), 5, 30, 20, (3,), "host"),
        TurnSeen(1.0, (0.1,), 2, 10, 0, (), "none", refused="replica_lost"),
    ]
    told = report(seen, 2.0)
    assert (told.turns, told.tokens, told.tokens_per_second) == (3, 12, 6.0)
    assert (told.cold.p50, told.cold.count, told.warm.p50, told.warm.count) == (0.5, 1, 0.2, 1)
    assert told.gaps.count == 3 and told.gaps.p50 == pytest.approx(0.2) and told.gaps.p99 == pytest.approx(0.3)
    assert told.acceptance_length == 10 / 3 and (told.prompt_tokens, told.reused_tokens) == (50, 20)
    assert told.refused == {"replica_lost": 1}


@pytest.mark.parametrize(("part", "value"), [(0.0, 1), (0.5, 51), (0.95, 96), (0.99, 100), (1.0, 100)])
def test_a_percentile_is_one_of_the_values(part: float, value: int):
    assert percentile(range(1, 101), part) == value


@pytest.mark.parametrize("name", ["conversations", "at-once", "turns", "tokens", "words"])
def test_a_load_that_is_none_is_refused_by_its_fields_name(name: str):
    told = CliRunner().invoke(app, ["bench", f"--{name}", "0"])
    assert told.exit_code == 2 and f"{name.replace('-', '_')} is 0, must be at least 1" in told.output


def test_a_server_that_is_not_there_is_one_sentence():
    told = CliRunner().invoke(app, ["bench", "--url", "http://127.0.0.1:9", "--conversations", "1"])
    assert told.exit_code == 2 and "http://127.0.0.1:9 does not answer" in told.output
