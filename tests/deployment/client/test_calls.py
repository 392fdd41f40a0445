"""Calls of tools in streams that break: each one comes once, whatever became of the connection."""

from __future__ import annotations

from typing import Any

import pytest

from deployment.client import AnswerEvent, Called, Client, Contradiction, Text
from deployment.client.events import collected
from tests.deployment.client.fake_server import MESSAGES, FakeServer, Time, cut, published, written

CALL = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
TEXT = f"So: {CALL.format(7)}\n{CALL.format(8)} é"
TOOLS: dict[str, Any] = {"add": {"properties": {"a": {"type": "integer"}}}}


def stream(text: str = TEXT, cuts: tuple[int, ...] = (3, 9, 40, 60)) -> Any:
    return published(cuts, text=text, tools=TOOLS)


def events(server: FakeServer, session: str | None = "trip") -> list[AnswerEvent]:
    time = Time()
    client = Client("http://server", patience=time.patience(), transport=server.transport, sleep=time.sleep)
    return list(client.stream(MESSAGES, session=session))


def test_an_answer_has_its_calls_and_the_message_that_their_results_follow():
    answer = collected(events(FakeServer(stream())))
    assert [(call.name, call.arguments, call.index) for call in answer.calls] == [
        ("add", '{"a": 7}', 0), ("add", '{"a": 8}', 1),
    ]  # fmt: skip
    assert len({call.id for call in answer.calls}) == 2 and answer.content.startswith("So:")
    message = answer.choices[0].message
    assert message["content"] == answer.content
    assert [call["id"] for call in message["tool_calls"]] == [call.id for call in answer.calls]


@pytest.mark.parametrize("session", ["trip", None])
def test_calls_come_once_wherever_the_stream_breaks(session: str | None):
    told = stream()
    undisturbed = [one for one in events(FakeServer(told), session) if isinstance(one, Text | Called)]
    assert sum(isinstance(one, Called) for one in undisturbed) == 2
    for sent in range(0, len(written(told, None)), 67):
        broken = events(FakeServer(told, [cut(sent)]), session)
        assert [one for one in broken if isinstance(one, Text | Called)] == undisturbed, sent


def test_a_call_that_is_told_again_differently_is_named():
    """Without a session the turn is told from its first event again."""
    told = stream()
    data = written(told, None)
    end = data.index(b"tool_calls", data.index(b"tool_calls") + 20)
    assert data.count(b'{\\"a\\": 7}') == 1

    class Other(FakeServer):
        def __call__(self, request: Any) -> Any:
            answer = super().__call__(request)
            if len(self.asked) == 2:
                self.bodies[-1]._data = self.bodies[-1]._data.replace(b'{\\"a\\": 7}', b'{\\"a\\": 9}')
            return answer

    with pytest.raises(Contradiction, match="another call than was read before"):
        events(Other(told, [cut(end)]), None)
