"""The host store: a fence by epoch, idempotent puts, a byte budget, and no bytes that are not a checkpoint."""

from __future__ import annotations

from deployment.host_store import HostStore, Image
from deployment.ownership import Epoch, SessionKey
from state.errors import FormatError

KEY = SessionKey("t" * 64, "one")
OTHER = SessionKey("t" * 64, "two")


def accept(blob: bytes) -> None:
    if blob.startswith(b"bad"):
        raise FormatError("trailer", "is cut")


def store(budget: int = 1000) -> HostStore:
    return HostStore(budget, accept)


def end(size: int = 10, frontier: int = 40) -> tuple[Image, ...]:
    return (Image("turn_end", frontier, b"e" * size),)


def start(size: int = 10, frontier: int = 20) -> tuple[Image, ...]:
    return (Image("turn_start", frontier, b"s" * size),)


def test_put_of_an_older_epoch_is_fenced():
    hosts = store()
    assert hosts.put(KEY, "b", Epoch(1, 5), 1, end()).accepted
    late = hosts.put(KEY, "a", Epoch(1, 4), 9, end(frontier=99))
    assert not late.accepted and late.fenced and "1.4" in late.reason and "1.5" in late.reason
    held = hosts.newest(KEY)
    assert held is not None and held.frontier == 40


def test_seal_fences_the_former_owner_before_anything_is_put():
    hosts = store()
    hosts.put(KEY, "a", Epoch(1, 4), 1, end())
    held = hosts.seal(KEY, Epoch(1, 5))
    assert held is not None and held.owner == "a"
    assert hosts.put(KEY, "a", Epoch(1, 4), 2, end()).fenced
    assert hosts.seal(OTHER, Epoch(1, 6)) is None
    assert hosts.put(OTHER, "a", Epoch(1, 4), 1, end()).fenced


def test_repeated_put_is_accepted_and_changes_nothing():
    hosts = store()
    hosts.put(KEY, "a", Epoch(1, 1), 2, end(frontier=40))
    assert hosts.put(KEY, "a", Epoch(1, 1), 2, end(frontier=7)).accepted
    assert hosts.put(KEY, "a", Epoch(1, 1), 1, start()).accepted
    held = hosts.newest(KEY)
    assert held is not None and [image.frontier for image in held.images] == [40]


def test_each_kind_is_replaced_by_its_newest_and_the_newest_put_comes_last():
    hosts = store()
    hosts.put(KEY, "a", Epoch(1, 1), 1, (*start(frontier=10), *end(frontier=20)))
    hosts.put(KEY, "a", Epoch(1, 1), 2, start(frontier=30))
    held = hosts.newest(KEY)
    assert held is not None
    assert [(image.kind, image.frontier) for image in held.images] == [("turn_end", 20), ("turn_start", 30)]


def test_bytes_that_are_no_checkpoint_are_refused_and_what_was_there_stays():
    hosts = store()
    hosts.put(KEY, "a", Epoch(1, 1), 1, end(frontier=20))
    receipt = hosts.put(KEY, "a", Epoch(1, 1), 2, (Image("turn_end", 30, b"bad"),))
    assert not receipt.accepted and not receipt.fenced and "trailer" in receipt.reason
    held = hosts.newest(KEY)
    assert held is not None and held.frontier == 20


def test_budget_evicts_the_session_that_was_unused_for_longest():
    hosts = store(budget=100)
    hosts.put(KEY, "a", Epoch(1, 1), 1, end(40))
    hosts.put(OTHER, "a", Epoch(1, 2), 1, end(40))
    hosts.newest(KEY)
    hosts.put(SessionKey("t" * 64, "three"), "a", Epoch(1, 3), 1, end(40))
    assert hosts.newest(OTHER) is None and hosts.newest(KEY) is not None
    assert hosts.size == 80


def test_session_that_alone_is_over_the_budget_loses_its_older_image():
    hosts = store(budget=100)
    hosts.put(KEY, "a", Epoch(1, 1), 1, end(80))
    assert hosts.put(KEY, "a", Epoch(1, 1), 2, start(60)).accepted
    held = hosts.newest(KEY)
    assert held is not None and [image.kind for image in held.images] == ["turn_start"]
    refused = hosts.put(KEY, "a", Epoch(1, 1), 3, end(101))
    assert not refused.accepted and "101" in refused.reason and "100" in refused.reason


def test_deleted_session_is_not_written_again_by_its_old_owner():
    hosts = store()
    hosts.put(KEY, "a", Epoch(1, 1), 1, end())
    hosts.delete(KEY, Epoch(1, 1))
    assert hosts.newest(KEY) is None
    assert hosts.put(KEY, "a", Epoch(1, 1), 2, end()).fenced
    assert hosts.put(KEY, "b", Epoch(1, 2), 1, end()).accepted


def test_index_tells_everything_but_the_bytes():
    hosts = store()
    hosts.put(KEY, "a", Epoch(1, 1), 3, (*start(frontier=10), *end(frontier=20)))
    (held,) = hosts.index()
    assert (held.key, held.owner, held.epoch, held.order, held.frontier) == (KEY, "a", Epoch(1, 1), 3, 20)
    assert all(image.blob == b"" for image in held.images)
