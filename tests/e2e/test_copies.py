"""The chaos tests' look at the copies of a log: what it compares, and what it may pass over."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from deployment.ownership.log import Record, Round
from deployment.ownership.log_copy import LogCopy
from deployment.ownership.log_format import encode
from deployment.ownership.messages import Ends, Part
from deployment.ownership.words import NEVER, Epoch, Member, Order, SessionKey
from tests.e2e.chaos.copies import Copies

KEY = SessionKey("0" * 64, "s")
TURN = "a" * 32


class Method:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    def remote(self, *_: object) -> object:
        return self._answer


@dataclass(frozen=True)
class StoresOf:
    """Stores by node, each of which answers with the records that it holds, or raises."""

    records: dict[str, list[Record] | Exception]

    @property
    def ids(self) -> list[str]:
        return list(self.records)

    def host_store(self, node: str) -> object:
        found = self.records[node]
        if isinstance(found, ValueError):
            raise found
        member = Member(node, bytes(16).hex())
        if isinstance(found, Exception):
            return SimpleNamespace(member=Method(found), index=Method(()))
        part = Part(member, KEY, NEVER, None, tuple(map(encode, found)), ())
        ends = Ends(member, KEY, NEVER, NEVER, None, LogCopy().history, (), True, False)
        return SimpleNamespace(member=Method(member), index=Method((ends,)), answer=Method([part]))


def got(answers: object, timeout: float) -> object:
    for answer in answers if isinstance(answers, list) else []:
        if isinstance(answer, Exception):
            raise answer
    return answers


def watched(monkeypatch: pytest.MonkeyPatch, records: dict[str, list[Record] | Exception]) -> Copies:
    monkeypatch.setattr(ray, "get", got)
    with Copies(StoresOf(records)).watched() as copies:
        pass  # they are looked at once more in the end
    return copies


def logged(sequence: int, start: int, *ids: int, counter: int = 1, turn: str = TURN) -> Record:
    return Round(Order(Epoch(1, counter), sequence), turn, 0, start, ids, 0, None)


def test_records_of_two_stores_are_compared(monkeypatch: pytest.MonkeyPatch):
    one, other = logged(1, 3, 10, 11), logged(1, 3, 10, 99)
    alone = watched(monkeypatch, {"a": [one]})
    assert (alone.records, alone.compared, alone.contradictions) == (1, 0, [])
    equal = watched(monkeypatch, {"a": [one, logged(2, 5, 12)], "b": [one]})
    assert (equal.records, equal.compared, equal.contradictions) == (2, 1, [])
    assert len(watched(monkeypatch, {"a": [one], "b": [other]}).contradictions) == 1


@pytest.mark.parametrize(
    "gone", [ActorDiedError(), ActorUnavailableError("", b"0" * 16), GetTimeoutError(), ValueError()]
)
def test_store_that_is_gone_is_passed_over(monkeypatch: pytest.MonkeyPatch, gone: Exception):
    assert watched(monkeypatch, {"a": gone, "b": [logged(1, 3, 10)]}).records == 1


@pytest.mark.parametrize("failed", [RayTaskError("answer", "", KeyError("x")), KeyError("x"), RuntimeError("x")])
def test_what_else_looking_at_a_store_raises_comes_out(monkeypatch: pytest.MonkeyPatch, failed: Exception):
    with pytest.raises(type(failed)):
        watched(monkeypatch, {"a": failed, "b": [logged(1, 3, 10)]})


def test_log_of_a_turn_is_what_its_last_owners_wrote_without_holes(monkeypatch: pytest.MonkeyPatch):
    rounds = [logged(1, 3, 10, 11), logged(2, 5, 98, 99), logged(2, 5, 12, counter=2), logged(3, 6, 13, counter=2)]
    other = logged(9, 0, 1, turn="b" * 32)
    copies = watched(monkeypatch, {"a": [*rounds, other, logged(9, 9, 15, counter=2)]})
    assert copies.ids_of(TURN, 3) == (10, 11, 12, 13) and copies.ids_of("c" * 32, 3) == ()
