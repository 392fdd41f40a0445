"""`dflash-serve chat`: what is typed, what is shown where, and that nothing of it ends the program but its user."""

from __future__ import annotations

import io
import json
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from deployment.chat import Chat
from deployment.cli import app
from deployment.client import Client
from deployment.errors import unknown_session
from tests.deployment.client.fake_server import (
    Body,
    FakeServer,
    Plan,
    Time,
    cut,
    lost,
    published,
    refused,
    whole_text,
    written,
)

CUTS = [3, 7, 12]


class ChatServer:
    """The routes that a chat uses. `sessions`: those that exist."""

    def __init__(self, *plans: Plan, sessions: tuple[str, ...] = (), **told: Any) -> None:
        self.turns = FakeServer(published(CUTS, **told), list(plans))
        self.sessions = list(sessions)
        self.asked: list[tuple[str, str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, request.read()
        self.asked.append((request.method, path, json.loads(body) if body else None))
        if path.endswith(("/turns", "/events")):
            return self.turns(request)
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "demo"}]})
        if path == "/v1/sessions":
            return httpx.Response(200, json=self._all(request, json.loads(body) if body else None))
        _, _, _, name, *rest = path.split("/")
        if name not in self.sessions:
            told = unknown_session(name).refused
            return httpx.Response(404, json=told.body)
        return self._one(name, rest[0] if rest else "", json.loads(body) if body else {})

    def _all(self, request: httpx.Request, body: Any) -> dict[str, Any]:
        if request.method == "POST":
            self.sessions.append(body["id"])
            return {"id": body["id"]}
        return {"data": [{"id": name, "replica": "r1", "epoch": "1.2"} for name in self.sessions]}

    def _one(self, name: str, what: str, body: Any) -> httpx.Response:
        if what == "export":
            return httpx.Response(200, content=b"document")
        if what == "fork":
            self.sessions.append(body.get("id", "random"))
        answers: dict[str, dict[str, Any]] = {
            "": {"id": name, "transcript": [{}, {}], "tokens": 27},
            "fork": {"id": self.sessions[-1], "frontier": 26},
            "checkpoints": {"name": body.get("name", "0f0f0f0f"), "frontier": 27},
            "migrate": {"from": "r1", "to": body.get("to", "r2"), "frontier": 26, "hit": "peer"},
        }
        return httpx.Response(200, json=answers[what])


def talk(
    server: ChatServer, *lines: str, session: str = "trip", model: str | None = None, tools: list[Any] | None = None
) -> tuple[str, str]:
    """(stdout, stderr) of a chat in which these lines are typed."""
    time, out, notes = Time(), io.StringIO(), io.StringIO()
    with Client(
        "http://server", patience=time.patience(), transport=httpx.MockTransport(server), sleep=time.sleep
    ) as client:
        chat = Chat(client, Console(file=out), Console(file=notes, width=200), model, tools)
        chat.enter(session)
        chat.run(iter(f"{line}\n" for line in lines))
    return out.getvalue(), notes.getvalue()


# ------------------------------------------------------------------------------------------------ answers


def test_answers_go_to_stdout_and_what_is_said_about_them_to_stderr():
    server = ChatServer()
    out, notes = talk(server, "Hello", "", "More", model="demo")
    assert out == f"{whole_text(CUTS)}\n" * 2
    assert notes.splitlines() == [
        "session trip: new",
        "30 tokens, 60 tokens/s, acceptance length 2.50",
        "state from peer: 8 tokens reused, 2 prefilled, replica r1",
        "30 tokens, 60 tokens/s, acceptance length 2.50",
    ]
    assert [entry[:2] for entry in server.asked] == [
        ("GET", "/v1/sessions/trip"), ("POST", "/v1/sessions"),
        ("POST", "/v1/sessions/trip/turns"), ("POST", "/v1/sessions/trip/turns"),
    ]  # fmt: skip
    assert server.asked[-1][2]["messages"] == [{"role": "user", "content": "More"}]
    assert server.asked[-1][2]["model"] == "demo"


def test_calls_are_shown_and_the_lines_that_follow_are_their_results():
    call = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    server = ChatServer(text=f"{call.format(7)}\n{call.format(8)} é", tools={"add": {}})
    offered = [{"type": "function", "function": {"name": "add"}}]
    _, notes = talk(server, "Hello", "/sessions", "seven", "eight", tools=offered)
    lines = [line for line in notes.splitlines() if "add" in line]
    asked = "type the result of add, in one line"
    assert lines[:4] == ['calls add({"a": "7"})', 'calls add({"a": "8"})', asked, asked]
    said, results = (body for method, path, body in server.asked if path.endswith("/turns"))
    assert said["messages"] == [{"role": "user", "content": "Hello"}] and said["tools"] == offered
    assert [(one["role"], one["content"]) for one in results["messages"]] == [("tool", "seven"), ("tool", "eight")]
    assert len({one["tool_call_id"] for one in results["messages"]}) == 2


CALL = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
CALLING: dict[str, Any] = {"text": f"{CALL.format(7)}\n{CALL.format(8)} é", "tools": {"add": {}}}


def sent(server: ChatServer) -> list[list[tuple[str, str]]]:
    """The messages of each turn that was asked for."""
    bodies = [body for _, path, body in server.asked if path.endswith("/turns")]
    return [[(one["role"], one["content"]) for one in body["messages"]] for body in bodies]


def test_a_result_that_was_not_taken_is_asked_for_again_and_those_before_it_are_kept():
    server = ChatServer(Body, refused(409, "session_busy"), **CALLING)
    _, notes = talk(server, "Hello", "seven", "eight", "ate", "/frok", tools=[{}])
    results = [("tool", "seven"), ("tool", "eight")], [("tool", "seven"), ("tool", "ate")]
    assert sent(server) == [[("user", "Hello")], *results]
    said = notes.splitlines()
    asked = "type the result of add, in one line"
    refusal = next(line for line, text in enumerate(said) if "answers 409" in text)
    assert said[refusal + 1] == asked
    assert said[-1] == asked and "/frok" in said[-2], "the calls of the second answer wait all the same"


def test_calls_of_an_answer_that_breaks_off_wait_for_no_result():
    def breaks(data: bytes) -> Body:
        class Interrupting(Body):
            def __iter__(self) -> Iterator[bytes]:
                yield data[: data.index(b"\n\n", data.index(b'"tool_calls"')) + 2]
                raise KeyboardInterrupt

        return Interrupting(data)

    server = ChatServer(breaks, **CALLING)
    _, notes = talk(server, "Hello", "More", tools=[{}])
    assert "calls add" in notes.partition("left; ")[0], "one was told before the answer broke off"
    assert sent(server) == [[("user", "Hello")], [("user", "More")]]


def test_a_session_that_is_gone_waits_for_no_result():
    server = ChatServer(Body, refused(404, "session_not_found"), **CALLING)
    talk(server, "Hello", "seven", "eight", "Hello", tools=[{}])
    assert sent(server)[-1] == [("user", "Hello")]


@pytest.mark.parametrize("content", ["[", "{}", "[]"])
def test_tools_that_are_no_list_are_refused_before_anything_is_asked(tmp_path: Path, content: str):
    file = tmp_path / "tools.json"
    file.write_text(content)
    result = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:9", "--tools", str(file)])
    assert result.exit_code == 2 and result.stderr.startswith(f"dflash-serve: --tools: {file} ")


def test_a_broken_connection_costs_one_line_and_nothing_of_the_answer():
    out, notes = talk(ChatServer(cut(900), lost()), "Hello")
    assert out.replace("\n", "") == whole_text(CUTS) and out.endswith("\n")
    (line,) = [line for line in notes.splitlines() if "connection" in line]
    assert line == "connection lost (connection reset); resumed after 0.8 s"


def test_a_refusal_is_told_and_the_conversation_goes_on():
    out, notes = talk(ChatServer(refused(409, "session_busy", "session 'trip' is busy")), "Hello", "Hello")
    assert "the server answers 409: session 'trip' is busy\n" in notes and out == f"{whole_text(CUTS)}\n"


def test_a_session_that_the_server_lost_is_said_so_and_begun_anew():
    server = ChatServer(refused(404, "session_not_found", "session 'trip' does not exist"), sessions=("trip",))
    _, notes = talk(server, "Hello", "Hello")
    assert "does not exist" in notes and "begins it anew" in notes
    assert [path for method, path, _ in server.asked if method == "POST"] == [
        "/v1/sessions/trip/turns", "/v1/sessions", "/v1/sessions/trip/turns",
    ]  # fmt: skip


def test_ctrl_c_ends_the_answer_and_not_the_program():
    def interrupted(data: bytes) -> Body:
        class Interrupting(Body):
            def __iter__(self) -> Iterator[bytes]:
                yield data[:900]
                raise KeyboardInterrupt

        return Interrupting(data)

    server = ChatServer(interrupted)
    out, notes = talk(server, "Hello", "Again")
    assert server.turns.bodies[0].closed and "left; " in notes
    first, second = out.splitlines()
    assert whole_text(CUTS).startswith(first) and second == whole_text(CUTS)


def test_text_cannot_act_on_the_terminal():
    hostile = published([], text="[red]\x1b[2Jx!")
    server = ChatServer(lambda data: Body(written(hostile, None)))
    out, _ = talk(server, "Hello")
    assert out == "[red]\N{REPLACEMENT CHARACTER}[2Jx\n"


# ------------------------------------------------------------------------------------------------ commands


def test_every_command_does_what_help_says(tmp_path: Path):
    file = tmp_path / "trip.dfs"
    server = ChatServer(sessions=("trip",))
    lines = ("/fork copy", "/checkpoint", "/checkpoint here", "/fork @here", "/fork two @here", "/switch copy",
             "/migrate", "/migrate r7", "/sessions", "/switch new", "/switch trip",
             f"/export {file}", "/help", "/quit", "never read")  # fmt: skip
    out, notes = talk(server, *lines)
    said = notes.splitlines()
    assert out == "" and said[:19] == [
        "session trip: 2 messages, 27 tokens",
        "session trip is forked at frontier 26",
        "session copy: 2 messages, 27 tokens",
        "session copy has a checkpoint 0f0f0f0f at frontier 27",
        "session copy has a checkpoint here at frontier 27",
        "session copy is forked at frontier 26",
        "session random: 2 messages, 27 tokens",
        "session random is forked at frontier 26",
        "session two: 2 messages, 27 tokens",
        "session copy: 2 messages, 27 tokens",
        "session copy moved from replica r1 to r2 at frontier 26; state from peer",
        "session copy moved from replica r1 to r7 at frontier 26; state from peer",
        "  trip  replica r1, epoch 1.2",
        "* copy  replica r1, epoch 1.2",
        "  random  replica r1, epoch 1.2",
        "  two  replica r1, epoch 1.2",
        "session new: new",
        "session trip: 2 messages, 27 tokens",
        f"{file}: 8 bytes of session trip",
    ]
    assert file.read_bytes() == b"document" and stat.S_IMODE(file.stat().st_mode) == 0o600
    forks = [body for _, path, body in server.asked if path.endswith("/fork")]
    assert forks == [{"id": "copy"}, {"checkpoint": "here"}, {"id": "two", "checkpoint": "here"}]
    named = [line.split()[0] for line in said[19:] if line.startswith("/")]
    assert named == ["/fork", "/checkpoint", "/migrate", "/sessions", "/switch", "/export", "/help", "/quit"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("/frok", "there is no command /frok; /help lists them"),
        ("/switch", "/switch needs a NAME"),
        ("/sessions now", "/sessions takes nothing, got 'now'"),
        ("/export /nowhere/at/all", "/nowhere/at/all cannot be written"),
        ("/export /dev/null", "exists and is no file"),
        ("/fork", "session 'other' does not exist"),
    ],
)
def test_a_mistake_is_one_line(line: str, why: str):
    session = "other" if line == "/fork" else "trip"
    _, notes = talk(ChatServer(sessions=("trip",)), line, "/help", session=session)
    assert why in notes.splitlines()[1] and "/quit" in notes


# ------------------------------------------------------------------------------------------------ the program


@pytest.fixture
def url() -> Iterator[str]:
    """A chat's server that listens."""
    told = ChatServer()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            assert self.headers["authorization"] == "Bearer mine"
            answer = told(httpx.Request(self.command, f"http://server{self.path}", content=body))
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers["content-type"])
            self.end_headers()
            self.wfile.write(answer.read())

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


def command(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=typed, env={"DFLASH_API_KEY": "mine"})


def test_a_pipe_is_a_conversation(url: str):
    result = command("--url", f"{url}/v1", "--session", "trip", "--model", "demo", typed="Hello\n/sessions\n")
    assert result.exit_code == 0 and result.stdout == f"{whole_text(CUTS)}\n", result.output
    assert "* trip" in result.stderr
    named = command("--url", url, typed="")
    assert named.stderr.startswith("session chat-") and named.stderr.endswith(": new\n")


def test_what_is_wrong_from_the_start_ends_in_one_sentence(url: str):
    for arguments, why in (
        (("--url", "http://127.0.0.1:1"), "http://127.0.0.1:1 does not answer"),
        (("--url", "here"), "url: must be http://HOST:PORT"),
        (("--url", url, "--model", "other"), "--model: 'other' is not served"),
        (("--url", url, "--session", "a b"), "session: has visible ASCII"),
    ):
        result = command(*arguments)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1 and why in result.stderr, result.output


def test_sigterm_ends_the_program(url: str):
    program = "import sys; from deployment.cli import app; app(['chat', '--api-key', 'mine', '--url', sys.argv[1]])"
    chat = subprocess.Popen(
        [sys.executable, "-c", program, url], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    assert chat.stderr is not None and "new" in chat.stderr.readline()
    chat.send_signal(signal.SIGTERM)
    assert chat.wait(10) == 143 and chat.stderr.read() == ""
    assert chat.stdin is not None
    chat.stdin.close()
    chat.stderr.close()
