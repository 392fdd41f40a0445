"""A file of API keys: whose they are, what is refused in it, and what a change of it does."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from deployment.api_keys import LOOK_SECONDS, MAX_FILE_BYTES, KeyFile, any_key, read_keys, tenant_among, tenant_id

ALICE, ALSO_ALICE, BOB = "alices-own-key-0001", "alices-own-key-0002", "bobs-own-key-000001"


def written(directory: Path, text: str, mode: int = 0o600) -> Path:
    file = directory / "keys"
    file.write_text(text)
    file.chmod(mode)
    return file


def sha256(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path, f"# who\nalice {ALICE}\nalice\t{sha256(ALSO_ALICE)}\n\n  bob {BOB}\n")


def test_a_tenant_has_all_of_its_keys_and_no_other_has_any_of_them(file: Path):
    keys = read_keys(file)
    assert tenant_among(keys, ALICE) == tenant_among(keys, ALSO_ALICE) == tenant_id("alice")
    assert tenant_among(keys, BOB) == tenant_id("bob") != tenant_id("alice")


@pytest.mark.parametrize("key", ["", ALICE[:-1], f"{ALICE} ", ALICE.upper(), sha256(ALICE), "schlüssel"])
def test_what_is_none_of_the_keys_is_nobody(file: Path, key: str):
    assert tenant_among(read_keys(file), key) is None


def test_a_tenant_of_a_list_is_none_that_a_key_makes_without_one():
    assert tenant_id("alice") not in {any_key("alice"), any_key("tenant:alice"), any_key("")}
    assert len(tenant_id("alice")) == 64


def test_every_key_of_the_list_is_compared_whichever_comes(file: Path, monkeypatch: pytest.MonkeyPatch):
    compared: list[bytes] = []
    same = lambda one, other: (compared.append(one), one == other)[1]  # noqa: E731
    monkeypatch.setattr("deployment.api_keys.hmac.compare_digest", same)
    for key in (ALICE, ALSO_ALICE, BOB, "nobody"):
        compared.clear()
        tenant_among(read_keys(file), key)
        assert len(compared) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no key"),
        ("# nothing\n", "has no key"),
        (f"alice {ALICE}\nbob\n", "line 2: has 1 words"),
        ("alice two words-of-a-secret\n", "line 1: has 3 words"),
        ("alice secret\n", "line 1: a key has at least 16 visible"),
        ("alice secretsecretsecrét\n", "line 1: a key has at least 16 visible"),
        ("alice sha256:secret\n", "line 1: sha256: must be followed by the 64 hex digits"),
        (f"al/ice {ALICE}\n", "line 1: the tenant's name"),
        (f"alice {ALICE}\nbob {ALICE}\n", "line 2: this key stands on a line above"),
        (f"alice {ALICE}\nbob {sha256(ALICE)}\n", "line 2: this key stands on a line above"),
    ],
)
def test_a_wrong_line_is_named_and_its_key_is_not_told(tmp_path: Path, text: str, said: str):
    with pytest.raises(ValueError, match=r"^api_keys: .*keys") as told:
        read_keys(written(tmp_path, text))
    assert said in str(told.value)
    assert "secret" not in str(told.value).replace(str(tmp_path), "") and ALICE not in str(told.value)


def test_a_file_that_everybody_can_read_holds_digests_alone(tmp_path: Path):
    assert read_keys(written(tmp_path, f"alice {sha256(ALICE)}\n", 0o644))
    assert read_keys(written(tmp_path, f"alice {ALICE}\n", 0o640)), "a group may be the server's own"
    with pytest.raises(ValueError, match="line 1: a key that every user of this machine can read; chmod 600"):
        read_keys(written(tmp_path, f"alice {ALICE}\n", 0o644))


def test_what_is_no_file_of_keys_is_refused_in_one_sentence(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_keys(tmp_path / "none")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_keys(tmp_path)
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="no text"):
        read_keys(tmp_path / "keys")
    with pytest.raises(ValueError, match="larger than"):
        read_keys(written(tmp_path, "#" * (MAX_FILE_BYTES + 1)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def replaced(file: Path, text: str, mode: int = 0o600) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    os.replace(new, file)  # noqa: PTH105


def test_a_changed_file_is_noticed_and_what_cannot_be_read_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
):
    clock = Clock()
    keys = KeyFile(file, clock)
    carol = "carols-own-key-0001"
    replaced(file, f"carol {carol}\n")
    assert keys(ALICE) is not None, "not looked at yet"
    clock.now += LOOK_SECONDS
    assert (keys(carol), keys(ALICE)) == (tenant_id("carol"), None)
    replaced(file, f"bob {BOB}\ncarol {carol} twice\n")
    with caplog.at_level(logging.ERROR, "ray.serve"):
        for _ in range(3):
            clock.now += LOOK_SECONDS
            assert (keys(carol), keys(BOB)) == (tenant_id("carol"), None)
    file.unlink()
    with caplog.at_level(logging.ERROR, "ray.serve"):
        for _ in range(3):
            clock.now += LOOK_SECONDS
            assert keys(carol) == tenant_id("carol")
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said) == 2 and "line 2" in said[0] and "No such file" in said[1], "once a change, not once a request"
    assert carol not in caplog.text
    replaced(file, f"bob {BOB}\n")
    clock.now += LOOK_SECONDS
    assert (keys(BOB), keys(carol)) == (tenant_id("bob"), None)


def test_a_key_that_was_taken_back_is_nobodys_once_what_the_log_asks_for_is_done(
    file: Path, caplog: pytest.LogCaptureFixture
):
    clock = Clock()
    keys = KeyFile(file, clock)
    replaced(file, f"alice {ALICE}\n", 0o644)
    clock.now += LOOK_SECONDS
    assert keys(BOB) == tenant_id("bob") and "chmod 600" in caplog.text
    file.chmod(0o600)
    clock.now += LOOK_SECONDS
    assert (keys(ALICE), keys(BOB)) == (tenant_id("alice"), None)
