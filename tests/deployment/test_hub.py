"""Models by their names on the hub: what is fetched, which drafter belongs to which target, and what is said if not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from deployment.hub import DRAFTERS, hub_id, located
from deployment.settings import AppArgs
from model import DEMO


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What was asked of the hub, where every name leads to the demo model."""
    asked: list[tuple[str, list[str]]] = []

    def snapshot(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(DEMO / ("dflash2" if "DFlash2" in name else "target"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return asked


def test_a_name_that_is_no_directory_is_one_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert hub_id(Path("Qwen/Qwen3.8-27B")) == "Qwen/Qwen3.8-27B"
    for other in ("/models/a", "model", "a/b/c", "./a", "../a/b", "a b/c"):
        assert hub_id(Path(other)) is None
    (tmp_path / "Qwen" / "Qwen3.8-27B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id(Path("Qwen/Qwen3.8-27B")) is None and located("model", Path("Qwen/Qwen3.8-27B")).is_dir()


def test_target_and_drafter_are_fetched_without_what_is_not_read(fetched: list[tuple[str, list[str]]]):
    args = AppArgs(model=Path("Qwen/Qwen3.8-27B"), draft=Path("auto"))
    assert args.model_id == "Qwen/Qwen3.8-27B" and fetched == [], "nothing is fetched before it is needed"
    options = args.engine_options()
    assert (options.model, options.draft) == (DEMO / "target", DEMO / "dflash2")
    assert [name for name, _ in fetched] == ["Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2"]
    assert fetched[0][1] == ["*.json", "*.jinja", "*.txt", "*.safetensors"]
    located("target", Path("Qwen/Qwen3.8-27B"), weights=False)
    assert "*.safetensors" not in fetched[-1][1]


@pytest.mark.parametrize(
    ("model", "backend", "draft"),
    [
        ("Qwen/Qwen3.5-27B", "dflash", "z-lab/Qwen3.5-27B-DFlash"),
        ("Qwen/Qwen3.5-27B-FP8", "dflash", "z-lab/Qwen3.5-27B-DFlash"),
        ("/models/Qwen3.6-35B-A3B", "dflash2", "incoai/Qwen3.6-35B-A3B-DFlash2"),
        (str(DEMO / "target"), "dflash", str(DEMO / "dflash")),
    ],
)
def test_the_public_drafter_of_a_target_is_known(model: str, backend: Any, draft: str):
    assert AppArgs(model=Path(model), backend=backend, draft=Path("auto")).draft == Path(draft)


def test_a_drafter_that_nobody_knows_is_asked_for_by_name():
    with pytest.raises(
        ValueError, match=r"draft: auto knows no dflash2 drafter of Qwen/Qwen3\.5-27B; with backend dflash"
    ):
        AppArgs.of(model="Qwen/Qwen3.5-27B", draft="auto")
    with pytest.raises(ValueError, match=r"draft: auto knows no dflash2 drafter of a/b; .*Qwen3\.8-27B"):
        AppArgs.of(model="a/b", draft="auto")
    with pytest.raises(ValueError, match="a directory, a name on the Hugging Face hub, or auto"):
        AppArgs.of(model="a/b")
    assert all(backend in ("dflash", "dflash2") for known in DRAFTERS.values() for backend in known)


def test_what_is_not_to_be_had_is_named(monkeypatch: pytest.MonkeyPatch):
    def nowhere(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("offline\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nowhere)
    with pytest.raises(ValueError, match=r"^model: there is no directory a/b, and it cannot be had from .*: offline$"):
        located("model", Path("a/b"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"^model: there is no directory a/b, .* pip install 'dflash-serve\[hub\]'$"):
        located("model", Path("a/b"))
