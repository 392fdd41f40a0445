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
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from deployment.client import Answer, AnswerEvent, Client, Text
from deployment.client.events import collected
from deployment.local import port_is_free, running, until_interrupted
from deployment.settings import AppArgs

HOST = "127.0.0.1"
COUNT = "Count from 3 in steps of 2, 12 numbers."
FACT = "My locker code is 4172."
QUESTION = "What is my locker code?"
ANSWER = "4172"


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

    def step(self, name: str, answer: Answer, *, drafted: bool = True) -> None:
        ended, resume = answer.ended, answer.resume
        hit, reused, prefilled = (
            (resume.hit, resume.reused, resume.prefilled) if resume else ("none", 0, answer.usage.prompt_tokens)
        )
        accepted = f"{ended.acceptance_length:.2f}" if drafted else "-"
        self.rows.append((name, ended.replica, hit, str(reused), str(prefilled), accepted))
        if resume:
            self.console.print(
                f"   replica {ended.replica}; state from: {hit}; {reused} tokens reused, {prefilled} prefilled"
            )

    def table(self) -> Table:
        table = Table(title="What each step cost")
        for name, justify in (("step", "left"), ("replica", "left"), ("state from", "left"), ("reused", "right"),
                              ("prefilled", "right"), ("acceptance length", "right")):  # fmt: skip
            table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
        for row in self.rows:
            table.add_row(*row)
        return table


class Visitor:
    """Who asks the demo's questions. `console` shows answers while they stream."""

    def __init__(self, client: Client, console: Console) -> None:
        self.client = client
        self._console = console

    def ask(self, text: str, session: str | None = None, *, append: bool = False, drafting: bool = True) -> Answer:
        """Sends one user message and streams the answer, greedily."""
        self._console.print(f"   [bold]you[/]   {text}")
        self._console.print("   [bold]model[/] ", end="")
        messages = [{"role": "user", "content": text}]
        options = {"temperature": 0, "max_tokens": 64, "drafting": drafting}
        told = self.client.stream(messages, session=session, append=append, options=options)
        answer = collected(self._shown(told))
        self._console.print()
        return answer

    def _shown(self, told: Iterator[AnswerEvent]) -> Iterator[AnswerEvent]:
        for event in told:
            if isinstance(event, Text):
                self._console.print(event.content, end="", markup=False, highlight=False, soft_wrap=True)
            yield event

    def process_of(self, replica: str) -> int:
        return next(entry["pid"] for entry in self.client.replicas() if entry["id"] == replica)


def run(port: int | None, keep: bool) -> int:
    """The whole demo. Returns the exit code: 0 if every check held."""
    console = Console(file=sys.stdout)  # this very stream, since Ray's chatter is kept from sys.stdout
    args = AppArgs(durable=None)
    port = port or _free_port()
    begun = time.monotonic()
    console.print("[bold]Starting Ray and two CPU replicas of the embedded demo model[/] (about 20 seconds)")
    with running(args, host=HOST, port=port, quiet=True) as url:
        console.print(f"   up at {url} after {time.monotonic() - begun:.0f} s")
        report = Report(console)
        with Client(url) as client:
            show(Visitor(client, console), report)
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
            console.print(f"or look at it, and talk to it, at {url}/console", soft_wrap=True, highlight=False)
            until_interrupted()
        else:
            console.print("To go on: dflash-serve demo --keep leaves the server up, and docs/quickstart.md is next.")
    return 1 if report.failed else 0


def show(visitor: Visitor, report: Report) -> None:
    """The steps, in the order of this module's docstring."""
    say = report.console.print

    say("\n[bold]1. A streamed answer, with and without drafting[/]")
    drafted = visitor.ask(COUNT)
    accepted = drafted.ended.acceptance_length
    say(f"   DFlash2: acceptance length {accepted:.2f}, {drafted.tokens_per_second:.0f} tokens/s")
    report.step("streamed, DFlash2", drafted)
    plain = visitor.ask(COUNT, drafting=False)
    say(f"   drafting off: {plain.tokens_per_second:.0f} tokens/s")
    report.step("streamed, drafting off", plain, drafted=False)
    report.check(drafted.content == plain.content, "drafting does not change a greedy answer")
    report.check(accepted > 1.5, "a round accepts more than it would without drafts")

    say("\n[bold]2. A fact, told in turn 1 of a session[/]")
    session = f"demo-{secrets.token_hex(4)}"
    told = visitor.ask(FACT, session)
    report.step("fact told", told)

    say("\n[bold]3. The session moves to the other replica, and is asked there in an append turn[/]")
    moved = visitor.client.migrate(session)
    say(f"   moved from replica {moved['from']} to {moved['to']} at frontier {moved['frontier']}")
    asked = visitor.ask(QUESTION, session, append=True)
    report.step("asked after the move", asked)
    report.check(ANSWER in asked.content, f"the answer holds {ANSWER}")
    report.check(asked.ended.replica == moved["to"] != told.ended.replica, "the other replica answered")
    report.check(_reused_all(told, asked), "nothing of turn 1 was computed again")

    say(f"\n[bold]4. Replica {asked.ended.replica} is killed (SIGKILL), and the session is asked again[/]")
    os.kill(visitor.process_of(asked.ended.replica), signal.SIGKILL)
    again = visitor.ask(QUESTION, session, append=True)
    report.step("asked after the kill", again)
    report.check(ANSWER in again.content, f"the answer holds {ANSWER}")
    report.check(again.ended.replica != asked.ended.replica, "another replica answered")
    report.check(again.resume is not None and again.resume.hit == "host", "its state came from the node's host store")
    report.check(_reused_all(asked, again), "nothing of the turns before was computed again")


def _reused_all(before: Answer, after: Answer) -> bool:
    left, found = before.resume, after.resume
    return left is not None and found is not None and left.frontier is not None and found.reused >= left.frontier


def _free_port() -> int:
    if port_is_free(HOST, 8000):
        return 8000
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
