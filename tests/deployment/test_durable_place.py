"""Sessions outlive their cluster without being told where, on one machine; on several a place must be named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployment.durable_place import default_place, held, settled
from deployment.settings import AppArgs

HERE: dict[str, Any] = {"on_head": True}


def test_the_default_is_a_directory_of_the_user_and_of_the_application(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    place = settled(AppArgs(), "dflash", **HERE).engine_options().durable
    assert place == default_place("dflash") == f"{tmp_path}/dflash-serve/dflash"
    assert default_place("a/../b") == f"{tmp_path}/dflash-serve/a%2F%2E%2E%2Fb"
    monkeypatch.setenv("HOME", "/home/somebody")
    for state in ("", "relative/is/to/be/ignored"):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert default_place("dflash") == "/home/somebody/.local/state/dflash-serve/dflash"


@pytest.mark.parametrize(
    ("given", "place"), [("none", None), (None, None), ("/srv/s", "/srv/s"), ("s3://b/p", "s3://b/p")]
)
def test_what_is_named_holds_on_every_node(given: str | None, place: str | None):
    for on_head in (True, False):
        assert settled(AppArgs(durable=given), "dflash", on_head=on_head).durable == place


def test_a_replica_beside_the_head_node_asks_for_a_place_that_all_nodes_reach():
    with pytest.raises(ValueError, match=r"^durable: .* name a place that all nodes reach .* or none$"):
        settled(AppArgs(), "dflash", on_head=False)


@pytest.mark.parametrize("place", ["sessions", "./sessions", "~/sessions", ""])
def test_a_relative_place_is_refused_by_name(place: str):
    with pytest.raises(ValueError, match=r"^durable: must be an absolute path, a URL, default or none"):
        AppArgs.of(durable=place)


def test_a_second_server_is_told_that_the_place_is_taken_until_the_first_has_ended(tmp_path: Path):
    place = str(tmp_path / "state" / "dflash")
    code = f"from deployment.durable_place import held\nwith held({place!r}):\n    print('here', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"here\n"
        with pytest.raises(ValueError, match="another server uses"), held(place):
            raise AssertionError
        first.kill()
    with held(place):
        assert Path(f"{place}.lock").stat().st_mode & 0o777 == 0o600


def test_a_place_that_cannot_be_made_is_refused_by_name(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"durable: .*/file/dflash cannot be used: "), held(f"{tmp_path}/file/dflash"):
        raise AssertionError
