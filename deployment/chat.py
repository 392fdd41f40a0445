"""`dflash-serve chat`: a conversation in the terminal, or through a pipe.

Answers go to stdout, and all that is said about them to stderr. Each message is an append turn of one session, so that
the server computes nothing twice and the conversation can be forked, moved, left and taken up again.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployment.private_file import check_replaceable, write_private
from deployment.usage import one_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from deployment.client import Called, Client, Ended, Usage


def chat(
    session: Annotated[str | None, typer.Option(help="A session to go on with, or a new one's name.")] = None,
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="DFLASH_API_KEY", help="Whose sessions they are.")] = None,
    model: Annotated[str | None, typer.Option(help="Only talk to this model.")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON list of tools that it may call; you type their results.")
    ] = None,
) -> None:
    """Talks to a running server; /help lists what else it does."""
    with one_sentence():
        from rich.console import Console

        from deployment.client import Client

        offered = None if tools is None else _offered(tools)
        # Ctrl-C ends an answer, but SIGTERM the program.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with Client(url, api_key, patience=0) as client:
            served = [entry["id"] for entry in client.models()]
        if model is not None and model not in served:
            raise ValueError(f"--model: {model!r} is not served at {url}; {', '.join(served)} is")
        notes = Console(stderr=True, highlight=False)
        with Client(url, api_key) as client:
            talk = Chat(client, Console(highlight=False), notes, model, offered)
            talk.enter(session or f"chat-{secrets.token_hex(4)}")
            talk.run(_lines(notes))


def _offered(file: Path) -> list[Any]:
    """ValueError for what is no list; what is wrong inside it the server says."""
    try:
        tools = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--tools: {file} cannot be read as JSON: {error}") from None
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"--tools: {file} must hold a list of tools, as chat completions have them")
    return tools


def _lines(notes: Console) -> Iterator[str]:
    """What is typed, or what a pipe brings, to its end."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  # `input` edits its line with it

    while True:
        try:
            yield input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            notes.print("\n/quit or Ctrl-D ends", style="dim")


@dataclass(frozen=True)
class Command:
    run: Callable[[str], None]
    argument: str
    help: str


class Chat:
    def __init__(
        self, client: Client, out: Console, notes: Console, model: str | None, tools: list[Any] | None = None
    ) -> None:
        self._client = client
        self._out = out
        self._notes = notes
        given = {"model": model, "tools": tools}
        self._options = {name: value for name, value in given.items() if value is not None}
        self._calls: list[Called] = []
        self._results: list[dict[str, Any]] = []
        self._session = ""
        self._exists = False
        self._state: tuple[str, str] | None = None
        self._inside_line = False
        self._commands = {
            "/fork": Command(self._fork, "[NAME] [@PLACE]", "goes on in a copy, as of a checkpoint if one is named"),
            "/checkpoint": Command(self._checkpoint, "[NAME]", "keeps the session as it is now"),
            "/migrate": Command(self._migrate, "[REPLICA]", "moves the session to another replica"),
            "/sessions": Command(self._sessions, "", "lists your sessions"),
            "/switch": Command(self._switch, "NAME", "goes on in another session, or begins it"),
            "/export": Command(self._export, "FILE", "writes the session to a file that only you can read"),
            "/help": Command(self._help, "", "says this"),
            "/quit": Command(lambda _: None, "", "ends; so does the end of the input"),
        }

    def enter(self, session: str) -> None:
        """Makes it the conversation's session, and says what is known of it. ClientError, ValueError."""
        from deployment.client import NotFound
        from deployment.client.calls import visible

        visible("session", session)
        try:
            known = self._client.session(session)
            said = f"session {session}: {len(known.get('transcript', ()))} messages, {known.get('tokens', 0)} tokens"
        except NotFound:
            known, said = None, f"session {session}: new"
        self._session, self._exists, self._state = session, known is not None, None
        self._calls, self._results = [], []
        self._note(said)

    def run(self, lines: Iterator[str]) -> None:
        """Takes messages and commands until /quit or the end. What goes wrong with one of them is told, not raised."""
        from deployment.client import ClientError

        for line in map(str.strip, lines):
            if line == "/quit":
                return
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line and self._calls:
                    self._result(line)
                elif line:
                    self._answer([{"role": "user", "content": line}])
            except (ClientError, ValueError) as error:
                self._end_line()
                self._note(str(error), style="red")
                self._ask_result()
            except KeyboardInterrupt:
                self._end_line()
                self._note("left; what the model says until your next message stays in the session")
                self._ask_result()

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        command, argument = self._commands.get(name), argument.strip()
        if command is None:
            raise ValueError(f"there is no command {name}; /help lists them")
        if argument and not command.argument:
            raise ValueError(f"{name} takes nothing, got {argument!r}")
        if not argument and command.argument and not command.argument.startswith("["):
            raise ValueError(f"{name} needs a {command.argument}")
        command.run(argument)

    # ------------------------------------------------------------------------------------------------ an answer

    def _result(self, line: str) -> None:
        """What a tool says. The model goes on when it has the results of all its calls."""
        call, *left = self._calls
        results = [*self._results, {"role": "tool", "tool_call_id": call.id, "content": line}]
        if left:
            self._calls, self._results = left, results
            self._ask_result()
        else:
            self._answer(results)

    def _ask_result(self) -> None:
        """Of the next call that waits for one, if any does."""
        if self._calls:
            self._note(f"type the result of {self._calls[0].name}, in one line")

    def _answer(self, asked: list[dict[str, Any]]) -> None:
        """Until the turn has begun, the calls that it answers wait for their results: what fails before is asked for
        again. Those of an answer that breaks off wait for none."""
        from deployment.client import Began, Called, Ended, Interrupted, NotFound, Resumed, Text, Usage

        self._begin()
        ended, calls = Ended("", None, 0, (), 0.0, 0.0, ""), list[Called]()
        try:
            events = self._client.stream(asked, session=self._session, append=True, options=self._options)
            with closing(events):
                for event in events:
                    match event:
                        case Text():
                            self._show(event.reasoning, self._notes, "dim italic")
                            self._show(event.content, self._out, "")
                        case Called():
                            self._end_line()
                            self._note(f"calls {event.name}({event.arguments})")
                            calls.append(event)
                        case Interrupted():
                            self._end_line()
                            self._show(f"connection lost ({event.reason}); ", self._notes, "dim")
                        case Resumed():
                            self._show(f"resumed after {event.seconds:.1f} s\n", self._notes, "dim")
                        case Ended():
                            ended = event
                        case Usage():
                            self._end_line()
                            self._note(_figures(ended, event))
                            self._tell_state(ended)
                        case Began():
                            self._calls, self._results = [], []
            self._calls = calls
            self._ask_result()
        except NotFound as error:
            if error.code == "session_not_found":
                self._exists, self._calls, self._results = False, [], []
                self._note(f"session {self._session} is gone from the server; your next message begins it anew")
            raise

    def _begin(self) -> None:
        """A session has a name on the server before its first turn, so that every turn is an append turn."""
        from deployment.client import Conflict

        if self._exists:
            return
        try:
            self._client.create(self._session)
        except Conflict as error:
            if error.code != "session_exists":
                raise
        self._exists = True

    def _tell_state(self, ended: Ended) -> None:
        """Where the session's state came from, if that is news."""
        resume = ended.resume
        if resume is None:
            return
        now = (resume.hit, ended.replica)
        if now != (self._state or ("none", ended.replica)):
            self._note(
                f"state from {resume.hit}: {resume.reused} tokens reused, {resume.prefilled} prefilled, "
                f"replica {ended.replica}"
            )
        self._state = now

    # ------------------------------------------------------------------------------------------------ commands

    def _fork(self, argument: str) -> None:
        child, _, place = argument.partition("@")
        forked = self._client.fork(self._session, child.strip() or None, checkpoint=place.strip() or None)
        self._note(f"session {self._session} is forked at frontier {forked['frontier']}")
        self.enter(forked["id"])

    def _checkpoint(self, name: str) -> None:
        made = self._client.checkpoint(self._session, name or None)
        self._note(f"session {self._session} has a checkpoint {made['name']} at frontier {made['frontier']}")

    def _migrate(self, replica: str) -> None:
        moved = self._client.migrate(self._session, replica or None)
        self._note(
            f"session {self._session} moved from replica {moved['from']} to {moved['to']} at frontier "
            f"{moved['frontier']}; state from {moved['hit']}"
        )

    def _sessions(self, _: str) -> None:
        for entry in self._client.sessions():
            here = "*" if entry["id"] == self._session else " "
            self._note(f"{here} {entry['id']}  replica {entry['replica']}, epoch {entry['epoch']}")

    def _switch(self, session: str) -> None:
        self.enter(session)

    def _export(self, name: str) -> None:
        file = Path(name).expanduser()
        check_replaceable(file)
        document = self._client.export(self._session)
        write_private(file, document)
        self._note(f"{file}: {len(document)} bytes of session {self._session}")

    def _help(self, _: str) -> None:
        for name, command in self._commands.items():
            self._note(f"{name} {command.argument}".ljust(24) + command.help)
        self._note("Ctrl-C ends an answer.")

    # ------------------------------------------------------------------------------------------------ the terminal

    def _show(self, text: str, where: Console, style: str) -> None:
        """Text as it is: no markup, and no control characters, which could act on the terminal."""
        if text:
            plain = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
            where.print(plain, end="", style=style, markup=False, soft_wrap=True)
            self._inside_line = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._inside_line:
            self._show("\n", self._out, "")

    def _note(self, text: str, style: str = "dim") -> None:
        self._show(f"{text}\n", self._notes, style)


def _figures(ended: Ended, usage: Usage) -> str:
    tokens = usage.completion_tokens
    speed = f", {tokens / ended.seconds:.0f} tokens/s" if ended.seconds > 0 else ""
    why = "" if ended.finish_reason == "stop" else f", ended by {ended.finish_reason}"
    return f"{tokens} tokens{speed}, acceptance length {ended.acceptance_length:.2f}{why}"
