"""The host store: a fence by epoch, idempotent puts, a byte budget, and no bytes that are not a document."""

from __future__ import annotations

from deployment.host_store import HostStore, Receipt
from deployment.ownership import Epoch, SessionKey
from state.errors import FormatError

KEY = SessionKey("t" * 64, "one")
OTHER = SessionKey("t" * 64, "two")


def accept(blob: bytes) -> None:
    if blob.startswith(b"bad"):
        raise FormatError("trailer", "is cut")


def store(budget: int = 1000) -> HostStore:
    return HostStore(budget, accept)


def put(
    hosts: HostStore, key: SessionKey, owner: str, epoch: Epoch, order: int, size: int = 10, frontier: int = 40
) -> Receipt:
    return hosts.put(key, owner, epoch, order, (frontier,), b"d" * size)


def frontier_of(hosts: HostStore, key: SessionKey = KEY) -> int:
    held = hosts.newest(key)
    assert held is not None
    return max(held.frontiers)


def test_put_of_an_older_epoch_is_fenced():
    hosts = store()
    assert put(hosts, KEY, "b", Epoch(1, 5), 1).accepted
    late = put(hosts, KEY, "a", Epoch(1, 4), 9, frontier=99)
    assert not late.accepted and late.fenced and "1.4" in late.reason and "1.5" in late.reason
    assert frontier_of(hosts) == 40


def test_seal_fences_the_former_owner_before_anything_is_put():
    hosts = store()
    put(hosts, KEY, "a", Epoch(1, 4), 1)
    held = hosts.seal(KEY, Epoch(1, 5))
    assert held is not None and held.owner == "a"
    assert put(hosts, KEY, "a", Epoch(1, 4), 2).fenced
    assert hosts.seal(OTHER, Epoch(1, 6)) is None
    assert put(hosts, OTHER, "a", Epoch(1, 4), 1).fenced


def test_repeated_put_is_accepted_and_changes_nothing():
    hosts = store()
    put(hosts, KEY, "a", Epoch(1, 1), 2, frontier=40)
    assert put(hosts, KEY, "a", Epoch(1, 1), 2, frontier=7).accepted
    assert put(hosts, KEY, "a", Epoch(1, 1), 1).accepted
    assert frontier_of(hosts) == 40


def test_a_put_replaces_the_sessions_older_document_even_by_one_without_state():
    hosts = store()
    put(hosts, KEY, "a", Epoch(1, 1), 1, size=50)
    assert hosts.put(KEY, "a", Epoch(1, 1), 2, (), b"ledger").accepted
    held = hosts.newest(KEY)
    assert held is not None and (held.document, held.frontiers, hosts.size) == (b"ledger", (), 6)


def test_bytes_that_are_no_document_are_refused_and_what_was_there_stays():
    hosts = store()
    put(hosts, KEY, "a", Epoch(1, 1), 1, frontier=20)
    receipt = hosts.put(KEY, "a", Epoch(1, 1), 2, (30,), b"bad")
    assert not receipt.accepted and not receipt.fenced and "trailer" in receipt.reason
    assert frontier_of(hosts) == 20


def test_budget_evicts_the_session_that_was_unused_for_longest():
    hosts = store(budget=100)
    put(hosts, KEY, "a", Epoch(1, 1), 1, 40)
    put(hosts, OTHER, "a", Epoch(1, 2), 1, 40)
    hosts.newest(KEY)
    put(hosts, SessionKey("t" * 64, "three"), "a", Epoch(1, 3), 1, 40)
    assert hosts.newest(OTHER) is None and hosts.newest(KEY) is not None
    assert hosts.size == 80


def test_a_document_over_the_whole_budget_is_refused_with_both_sizes_and_evicts_nobody():
    hosts = store(budget=100)
    put(hosts, OTHER, "a", Epoch(1, 1), 1, 90)
    refused = put(hosts, KEY, "a", Epoch(1, 2), 3, 101)
    assert refused.too_large and not refused.accepted and "101" in refused.reason and "100" in refused.reason
    assert hosts.newest(OTHER) is not None
    assert put(hosts, KEY, "a", Epoch(1, 2), 3, 60).accepted, "less of it under the same order"


def test_deleted_session_is_not_written_again_by_its_old_owner():
    hosts = store()
    put(hosts, KEY, "a", Epoch(1, 1), 1)
    hosts.delete(KEY, Epoch(1, 1))
    assert hosts.newest(KEY) is None
    assert put(hosts, KEY, "a", Epoch(1, 1), 2).fenced
    assert put(hosts, KEY, "b", Epoch(1, 2), 1).accepted


def test_a_late_deletion_takes_nothing_of_a_session_that_was_made_anew():
    hosts = store()
    put(hosts, KEY, "a", Epoch(1, 1), 1)
    put(hosts, KEY, "b", Epoch(1, 2), 1, frontier=50)
    hosts.delete(KEY, Epoch(1, 1))
    assert frontier_of(hosts) == 50 and put(hosts, KEY, "b", Epoch(1, 2), 2).accepted


def test_index_tells_everything_but_the_bytes():
    hosts = store()
    hosts.put(KEY, "a", Epoch(1, 1), 3, (10, 20), b"d" * 10)
    (held,) = hosts.index()
    assert (held.key, held.owner, held.epoch, held.order, held.frontiers) == (KEY, "a", Epoch(1, 1), 3, (10, 20))
    assert held.document == b""
