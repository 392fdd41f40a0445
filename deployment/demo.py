"""`dflash-serve demo`: what a session is, shown over HTTP on two CPU replicas, with checks.

a streamed answer, with and without drafting
a fact told in turn 1
the session moved to the other replica, the fact asked in an append turn
that replica killed, the fact asked again
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from deployment.local import port_is_free, running, until_interrupted
from deployment.settings import AppArgs

HOST = "127.0.0.1"
COUNT = "Count from 3 in steps of 2, 12 numbers."
FACT = "My locker code is 4172."
QUESTION = "What is my locker code?"
ANSWER = "4172"


@dataclass(frozen=True)
class Answer:
    """One streamed answer: what the last chunks and the headers said."""

    text: str
    usage: dict[str, Any]
    meta: dict[str, Any]
    session: dict[str, Any] | None

    @property
    def tokens_per_second(self) -> float:
        return self.usage["completion_tokens"] / max(self.meta["seconds"], 1e-9)


@dataclass
class Report:
    """The rows of the final table, and whether every check held."""

    console: Console
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        self.console.print(f"   [{'green' if holds else 'red'}]{'ok' if holds else 'FAILED'}[/] {what}")
        if not holds:
            self.failed.append(what)

    def step(self, name: str, answer: Answer) -> None:
        session = answer.session or {"hit": "none", "reused": 0, "prefilled": answer.usage["prompt_tokens"]}
        accepted = f"{answer.meta['spec_accept_length']:.2f}"
        self.rows.append(
            (name, answer.meta["replica"], session["hit"], str(session["reused"]), str(session["prefilled"]), accepted)
        )
        if answer.session:
            self.console.print(
                f"   replica {answer.meta['replica']}; state from: {session['hit']}; "
                f"{session['reused']} tokens reused, {session['prefilled']} prefilled"
            )

    def table(self) -> Table:
        table = Table(title="What each step cost")
        for name, justify in (("step", "left"), ("replica", "left"), ("state from", "left"), ("reused", "right"),
                              ("prefilled", "right"), ("acceptance length", "right")):  # fmt: skip
            table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
        for row in self.rows:
            table.add_row(*row)
        return table


class Client:
    """Just enough of a client for the demo. `console` shows answers while they stream."""

    def __init__(self, url: str, console: Console) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        self._console = console

    def ask(self, path: str, text: str, session: str | None = None, **extra: Any) -> Answer:
        """Sends one user message and streams the answer, greedily."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        headers = {"x-session-id": session} if session else {}
        self._console.print(f"   [bold]you[/]   {text}")
        self._console.print("   [bold]model[/] ", end="")
        pieces: list[str] = []
        last: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        with self._http.stream("POST", path, json=body, headers=headers) as response:
            if response.status_code != 200:
                response.read()
                raise RuntimeError(f"POST {path}: {response.status_code} {response.text}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(f"POST {path}: {chunk['error']['message']}")
                if chunk["choices"]:
                    piece = chunk["choices"][0]["delta"].get("content", "")
                    pieces.append(piece)
                    self._console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
                last = chunk if "meta_info" in chunk else last
                usage = chunk.get("usage") or usage
        self._console.print()
        return Answer("".join(pieces), usage, last["meta_info"], last.get("session"))

    def post(self, path: str) -> dict[str, Any]:
        response = self._http.post(path)
        if response.status_code != 200:
            raise RuntimeError(f"POST {path}: {response.status_code} {response.text}")
        return response.json()

    def process_of(self, replica: str) -> int:
        replicas = self._http.get("/v1/replicas").json()["data"]
        return next(entry["pid"] for entry in replicas if entry["id"] == replica)


def run(port: int | None, keep: bool) -> int:
    """The whole demo. Returns the exit code: 0 if every check held."""
    console = Console(file=sys.stdout)  # this very stream, since Ray's chatter is kept from sys.stdout
    args = AppArgs()
    port = port or _free_port()
    begun = time.monotonic()
    console.print("[bold]Starting Ray and two CPU replicas of the embedded demo model[/] (about 20 seconds)")
    with running(args, host=HOST, port=port, quiet=True) as url:
        console.print(f"   up at {url} after {time.monotonic() - begun:.0f} s")
        report = Report(console)
        show(Client(url, console), report)
        console.print(report.table())
        for what in report.failed:
            console.print(f"[red]FAILED[/] {what}")
        console.print(
            f"{'Some checks failed' if report.failed else 'All checks held'}: {time.monotonic() - begun:.0f} s"
        )
        if keep:
            body = json.dumps({"model": args.model_id, "messages": [{"role": "user", "content": FACT}]})
            console.print("The server stays up until Ctrl-C. Try:")
            curl = f"curl -s {url}/v1/chat/completions -H 'content-type: application/json' -H 'x-session-id: mine'"
            console.print(f"{curl} -d '{body}'", soft_wrap=True, markup=False, highlight=False)
            until_interrupted()
    return 1 if report.failed else 0


def show(client: Client, report: Report) -> None:
    """The steps, in the order of this module's docstring."""
    say = report.console.print

    say("\n[bold]1. A streamed answer, with and without drafting[/]")
    drafted = client.ask("/v1/chat/completions", COUNT)
    accepted = drafted.meta["spec_accept_length"]
    say(f"   DFlash2: acceptance length {accepted:.2f}, {drafted.tokens_per_second:.0f} tokens/s")
    report.step("streamed, DFlash2", drafted)
    plain = client.ask("/v1/chat/completions", COUNT, drafting=False)
    say(f"   drafting off: {plain.tokens_per_second:.0f} tokens/s")
    report.step("streamed, drafting off", plain)
    report.check(drafted.text == plain.text, "drafting does not change a greedy answer")
    report.check(drafted.meta["spec_accept_length"] > 1.5, "a round accepts more than it would without drafts")

    say("\n[bold]2. A fact, told in turn 1 of a session[/]")
    session = f"demo-{secrets.token_hex(4)}"
    turns = f"/v1/sessions/{session}/turns"
    told = client.ask("/v1/chat/completions", FACT, session)
    report.step("fact told", told)

    say("\n[bold]3. The session moves to the other replica, and is asked there in an append turn[/]")
    moved = client.post(f"/v1/sessions/{session}/migrate")
    say(f"   moved from replica {moved['from']} to {moved['to']} at frontier {moved['frontier']}")
    asked = client.ask(turns, QUESTION)
    report.step("asked after the move", asked)
    report.check(ANSWER in asked.text, f"the answer holds {ANSWER}")
    report.check(asked.meta["replica"] == moved["to"] != told.meta["replica"], "the other replica answered")
    report.check(_reused_all(told, asked), "nothing of turn 1 was computed again")

    say(f"\n[bold]4. Replica {asked.meta['replica']} is killed (SIGKILL), and the session is asked again[/]")
    os.kill(client.process_of(asked.meta["replica"]), signal.SIGKILL)
    again = client.ask(turns, QUESTION)
    report.step("asked after the kill", again)
    report.check(ANSWER in again.text, f"the answer holds {ANSWER}")
    report.check(again.meta["replica"] != asked.meta["replica"], "another replica answered")
    report.check((again.session or {})["hit"] == "host", "its state came from the node's host store")
    report.check(_reused_all(asked, again), "nothing of the turns before was computed again")


def _reused_all(before: Answer, after: Answer) -> bool:
    return (
        before.session is not None
        and after.session is not None
        and after.session["reused"] >= before.session["frontier"]
    )


def _free_port() -> int:
    if port_is_free(HOST, 8000):
        return 8000
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
