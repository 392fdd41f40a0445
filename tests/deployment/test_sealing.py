"""An encrypted durable tier tells nothing without its key, shows what was changed, and loses nothing to a wrong one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from deployment.durable_store import check_keys, open_place
from deployment.engine.options import EngineOptions
from deployment.sealing import OVERHEAD, SealedStore, SealingKey, keys_of, sealed_store
from state.byte_store import DirectoryStore, Entry
from state.errors import ExistsError, FormatError, StateError, StoreError
from state.names import ENCRYPTION, segment_name
from tests.state.stores import KEY, Clock, MemoryStore, data_of, document, open_tier, publish, segment

VARIABLE = "THE_DURABLE_KEY"
ONE, TWO = secrets.token_hex(32), secrets.token_hex(32)
TEXT = data_of("My locker code is 4172. ", 3000)


def key(digits: str) -> SealingKey:
    return SealingKey.of(bytes.fromhex(digits))


@pytest.fixture
def below() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def store(below: MemoryStore) -> SealedStore:
    return SealedStore(below, [key(ONE)])


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ONE)


def test_a_store_gives_what_it_was_given_and_says_how_large_that_is(store: SealedStore, below: MemoryStore):
    store.put("v1/a", TEXT)
    store.create("v1/b", memoryview(b""))
    assert (store.get("v1/a"), store.get("v1/b"), store.get("v1/c")) == (TEXT, b"", None)
    assert sorted(store.list("v1/"), key=lambda entry: entry.name) == [Entry("v1/a", len(TEXT)), Entry("v1/b", 0)]
    assert {name: len(data) for name, data in below.content.items()} == {"v1/a": len(TEXT) + OVERHEAD, "v1/b": OVERHEAD}
    with pytest.raises(ExistsError):
        store.create("v1/a", b"another")
    store.delete(["v1/a"])
    assert list(below.content) == ["v1/b"]


def test_the_bytes_are_aes_256_gcm_as_the_file_says(store: SealedStore, below: MemoryStore):
    store.put("v1/a", TEXT)
    sealed = below.content["v1/a"]
    assert sealed[:8] == b"DFSEALED" and sealed[8:16] == key(ONE).id
    assert AESGCM(bytes.fromhex(ONE)).decrypt(sealed[16:28], sealed[28:], b"v1/a") == TEXT
    store.put("v1/a", TEXT)
    assert below.content["v1/a"][16:28] != sealed[16:28], "a nonce is never used twice"


def test_nothing_of_a_session_can_be_read_without_the_key(below: MemoryStore):
    clock = Clock()
    tier = open_tier(sealed_store(below, "here", [key(ONE)]), clock)
    publish(tier, "a secret of mine", [TEXT])
    tier.delete(KEY, tier.sessions()[0].order.epoch)
    assert not [name for name, data in below.content.items() for told in (b"4172", b"secret", b"chat") if told in data]
    assert len(below.content) >= 3


@pytest.mark.parametrize("place", [0, 9, 20, 40, -1])
def test_what_was_changed_is_damaged_and_what_was_moved_too(store: SealedStore, below: MemoryStore, place: int):
    tier = open_tier(store, Clock())
    publish(tier, "one", [TEXT])
    name = segment_name(segment(TEXT).sha256)
    sealed = bytearray(below.content[name])
    sealed[place] ^= 1
    below.content[name] = bytes(sealed)
    with pytest.raises((FormatError, StoreError)):
        tier.segment(segment(TEXT).sha256)
    assert (name in below.content) == (place == 9), "under another key's id it may be whole"


def test_no_object_can_stand_in_anothers_place(store: SealedStore, below: MemoryStore):
    store.put("v1/a", b"one")
    below.content["v1/b"] = below.content["v1/a"]
    assert store.get("v1/b") == b""


def test_what_was_put_there_in_clear_is_not_believed(store: SealedStore, below: MemoryStore):
    clear = MemoryStore()
    publish(open_tier(clear, Clock()), "forged", [TEXT])
    below.content |= clear.content
    tier = open_tier(store, Clock())
    assert tier.latest(KEY) is None
    with pytest.raises((FormatError, StoreError)):
        tier.segment(segment(TEXT).sha256)


# ------------------------------------------------------------------------------------------------ keys


def published(place: Path, *keys: str, monkeypatch: pytest.MonkeyPatch, text: str, sequence: int) -> None:
    monkeypatch.setenv(VARIABLE, ",".join(keys))
    publish(open_tier(open_place(str(place), VARIABLE), Clock()), text, [data_of(text)], sequence=sequence)


def latest(place: Path, *keys: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(VARIABLE, " ".join(keys))
    found = open_tier(open_place(str(place), VARIABLE), Clock()).latest(KEY)
    return found and found[1]


def everything(place: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in place.rglob("*") if file.is_file()}


def test_a_wrong_key_and_none_are_told_by_name_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "durable"
    published(place, ONE, monkeypatch=monkeypatch, text="kept", sequence=1)
    before = everything(place)
    with pytest.raises(StateError, match=f"encrypted with key {key(ONE).id.hex()}, .* has {key(TWO).id.hex()}$"):
        latest(place, TWO, monkeypatch=monkeypatch)
    with pytest.raises(StateError, match="is encrypted; durable_key_env must name"):
        open_place(str(place))
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(StateError, match=f"durable_key_env: the environment has no {VARIABLE}"):
        open_place(str(place), VARIABLE)
    assert everything(place) == before
    assert latest(place, ONE, monkeypatch=monkeypatch) == document("kept")


def test_a_store_in_clear_is_not_encrypted_half(tmp_path: Path):
    place = tmp_path / "durable"
    publish(open_tier(open_place(str(place)), Clock()), "clear")
    before = everything(place)
    with pytest.raises(StateError, match="holds sessions that are not encrypted; give it an empty place"):
        open_place(str(place), VARIABLE)
    assert everything(place) == before


def test_keys_are_changed_by_giving_both_and_an_old_one_is_missed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = tmp_path / "durable"
    published(place, ONE, monkeypatch=monkeypatch, text="old", sequence=1)
    assert latest(place, TWO, ONE, monkeypatch=monkeypatch) == document("old")
    with pytest.raises(StoreError, match=f"was encrypted with key {key(ONE).id.hex()}, which is not given any more"):
        latest(place, TWO, monkeypatch=monkeypatch)
    store = sealed_store(DirectoryStore(place), "here", [key(TWO)])
    with pytest.raises(StoreError, match="not given any more"):
        open_tier(store, Clock()).sweep()
    assert latest(place, TWO, ONE, monkeypatch=monkeypatch) == document("old"), "nothing was swept"
    published(place, TWO, ONE, monkeypatch=monkeypatch, text="new", sequence=2)
    assert latest(place, TWO, monkeypatch=monkeypatch) == document("new")


def test_of_two_that_begin_one_store_at_once_both_use_it(below: MemoryStore):
    first = sealed_store(below, "here", [key(ONE)])
    marker = below.content.pop(ENCRYPTION)

    class Late(MemoryStore):
        """Shows the marker only once somebody else has made it."""

        def create(self, name: str, data: Any) -> None:
            self.content[ENCRYPTION] = marker
            super().create(name, data)

    late = Late()
    late.content = below.content
    second = sealed_store(late, "here", [key(ONE)])
    second.put("v1/a", b"one")
    assert first.get("v1/a") == b"one"


@pytest.mark.parametrize(
    "held",
    ["", " , ", "secretsecret", ONE[:-1], f"{ONE},secret"],
    ids=["empty", "commas", "no hexadecimal", "a digit short", "the second of two"],
)
def test_what_is_no_key_is_refused_by_the_variables_name_and_not_told(held: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, held)
    with pytest.raises(StateError, match=VARIABLE) as told:
        check_keys(VARIABLE)
    assert "secret" not in str(told.value) and ONE[:16] not in str(told.value)


def test_keys_do_not_show_what_they_are():
    assert ONE not in repr(keys_of(VARIABLE)) and bytes.fromhex(ONE) not in keys_of(VARIABLE)[0].id


def test_a_key_without_a_place_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match="durable_key_env is 'X', but durable names no place"):
        EngineOptions(model=tmp_path, durable_key_env="X")


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "deployment.sealing")
    monkeypatch.delattr("deployment.sealing")
    with pytest.raises(StateError, match=r"pip install 'dflash-serve\[encryption\]'"):
        open_place(str(tmp_path / "durable"), VARIABLE)
    assert os.environ[VARIABLE]
