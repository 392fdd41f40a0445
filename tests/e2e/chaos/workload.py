"""Conversations at the same time, each by a client of its own, and what became of each of their turns."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from state.document import open_document
from tests.e2e.chaos.conversations import Conversation, Step
from tests.e2e.chaos.reading import Answer, Refusal, Unanswered, asked, follow, take


@dataclass(frozen=True)
class Taken:
    """A turn that is over. `ledger`, `said`: the session's after it, and the text of its transcript's last message;
    `size`: bytes of its document. `record`: the turn as the session has it. `followers`: what others heard who read it,
    too."""

    step: Step
    answer: Answer
    ledger: tuple[int, ...]
    said: str
    size: int
    record: dict[str, Any]
    followers: tuple[Answer, ...]

    @property
    def moved(self) -> bool:
        """Whether another replica ended it than began it."""
        return self.record["replica"] != self.answer.replica


@dataclass
class Broken:
    """A turn whose client was refused for good: what it had heard by then, and who followed it. `following` is over
    when the follower is; `ledger`: the session's in the end, None while it does not answer."""

    step: Step
    answer: Answer = field(default_factory=Answer)
    follower: Answer = field(default_factory=Answer)
    following: Future[None] | None = None
    ledger: tuple[int, ...] | None = None


@dataclass
class Talk:
    """A conversation while it is had. `steps`: how many were made; `given_up`: why there are no more, `broken`: within
    which turn. `refusals`: of requests that take no turn."""

    conversation: Conversation
    key: str
    steps: int = 0
    turns: list[Taken] = field(default_factory=list)
    running: dict[str, Answer] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    given_up: Unanswered | None = None
    broken: Broken | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


class Workload:
    """All conversations of a run. `run` is a name that no other run on the cluster has; `pause`: seconds, at most, that
    a client thinks between two turns."""

    def __init__(self, url: str, run: str, conversations: Sequence[Conversation], pause: float = 0.0) -> None:
        self._url = url
        self._pause = pause
        self.talks = [Talk(conversation, f"{run}-{conversation.name}") for conversation in conversations]
        self._pool = ThreadPoolExecutor(2 * len(self.talks))
        self._futures: list[Future[None]] = []
        self._stopped = threading.Event()

    @contextlib.contextmanager
    def begun(self) -> Iterator[Workload]:
        self._futures = [self._pool.submit(self._talk, talk) for talk in self.talks]
        try:
            yield self
        finally:
            self.stop()
            self._pool.shutdown(wait=True)

    @property
    def over(self) -> bool:
        return all(future.done() for future in self._futures)

    def stop(self) -> None:
        """No conversation begins another turn."""
        self._stopped.set()

    def finish(self) -> list[Talk]:
        """Waits for all; raises what one of them raised. Where a client gave up within a turn, what has become of its
        session is asked then."""
        for future in self._futures:
            future.result()
        for settled in [self._pool.submit(self._settle, talk, talk.broken) for talk in self.talks if talk.broken]:
            settled.result()
        return self.talks

    def _settle(self, talk: Talk, broken: Broken) -> None:
        if broken.following is not None:
            with contextlib.suppress(Unanswered):
                broken.following.result()
        session = talk.conversation.session(broken.step.branch)
        with self._client(talk) as client, contextlib.suppress(Unanswered):
            broken.ledger = _ledger(client, talk, session)[0]

    def _talk(self, talk: Talk) -> None:
        histories: dict[str, list[dict[str, str]]] = {}
        draw = random.Random(talk.key)
        with self._client(talk) as client:
            try:
                for number, step in enumerate(talk.conversation.steps):
                    if self._stopped.wait(draw.uniform(0, self._pause)) if self._pause else self._stopped.is_set():
                        return
                    if step.kind == "fork":
                        self._fork(client, talk, step, histories)
                    else:
                        talk.turns.append(self._turn(client, talk, number, step, histories.setdefault(step.branch, [])))
                    talk.steps += 1
            except Unanswered as error:
                talk.given_up = error

    def _fork(self, client: httpx.Client, talk: Talk, step: Step, histories: dict[str, list[dict[str, str]]]) -> None:
        assert step.parent is not None
        parent, child = talk.conversation.session(step.parent), talk.conversation.session(step.branch)
        # A fork that was made, and whose answer was lost, is there when it is asked for again.
        asked(client, "POST", f"/v1/sessions/{parent}/fork", json={"id": child},
              known=("session_exists",), refusals=talk.refusals)  # fmt: skip
        talk.sessions.append(child)
        histories[step.branch] = list(histories[step.parent])

    def _turn(self, client: httpx.Client, talk: Talk, number: int, step: Step, history: list[dict[str, str]]) -> Taken:
        turn = Broken(step)  # until it is whole
        try:
            return self._whole_turn(client, talk, number, turn, history)
        except Unanswered:
            talk.broken = turn
            raise

    def _whole_turn(
        self, client: httpx.Client, talk: Talk, number: int, turn: Broken, history: list[dict[str, str]]
    ) -> Taken:
        step, answer = turn.step, turn.answer
        session = talk.conversation.session(step.branch)
        message = {"role": "user", "content": step.message}
        messages = [*history, message] if step.kind == "chat" else [message]
        path = "/v1/chat/completions" if step.kind == "chat" else f"/v1/sessions/{session}/turns"
        key = f"{talk.key}-{number}" if step.keyed else None
        if step.followed:
            turn.following = self._pool.submit(self._follow, talk, session, answer, turn.follower)
        talk.running[session] = answer
        try:
            take(client, path, session, {"messages": messages, **dict(step.options)}, key, answer)
        finally:
            del talk.running[session]
        if session not in talk.sessions:
            talk.sessions.append(session)
        known = asked(client, "GET", f"/v1/sessions/{session}", refusals=talk.refusals).json()
        ledger, size = _ledger(client, talk, session)
        record = next(each for each in known["turns"] if each["id"] == answer.turn)
        said = known["transcript"][-1]["content"]
        history += [message, {"role": "assistant", "content": answer.text}]
        if turn.following is not None:
            turn.following.result()
        return Taken(step, answer, ledger, said, size, record, (turn.follower,) if turn.following else ())

    def _follow(self, talk: Talk, session: str, answer: Answer, heard: Answer) -> None:
        """Somebody else who reads the turn as soon as it is known, over a connection of his own."""
        while answer.turn is None:
            if talk.given_up:
                return
            time.sleep(0.05)
        with self._client(talk) as client:
            follow(client, session, answer.turn, heard)

    def _client(self, talk: Talk) -> httpx.Client:
        return httpx.Client(base_url=self._url, timeout=40, headers=talk.headers)


def _ledger(client: httpx.Client, talk: Talk, session: str) -> tuple[tuple[int, ...], int]:
    """A session's tokens, and the bytes of its document."""
    document = asked(client, "GET", f"/v1/sessions/{session}/export", refusals=talk.refusals).content
    return tuple(open_document(document).manifest.session.ledger), len(document)
