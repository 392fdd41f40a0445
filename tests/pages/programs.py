"""What may be asked of the programs that pages call: read by their own parsers, and run where that is cheap."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from deployment import hub
from deployment.cli import app
from deployment.openapi.document import document
from deployment.settings import AppArgs
from tests.pages.blocks import ROOT
from tests.pages.shell import Call

LASTING = ("serve", "demo", "down")
"""Commands of ours whose servers and clusters are stand-ins here; all that they check before is checked."""

PARSED = ("bench",)
"""They take minutes: `tests/deployment/load` runs them."""

QUICK = {"bench.proposal_rows": {"131072": "4096"}}
"""Of our modules those that run here, and which numbers of a large model's are too many for the embedded one; of all
others the arguments are read."""

NOT_HERE = {"dflash": "cloud", "guidellm": "cloud", "lm_eval": "cloud", "kubectl": "k8s"}
"""Programs that a test does not have, and the mark of the blocks that call them."""


class _Read(Exception):
    """A parser has read its arguments."""


def check(call: Call, url: str | None, place: Path) -> str:
    """What a call prints, of those that run. `url` None: it is read, and not run. `place`: where it is called. Raises
    AssertionError, or the error of whoever reads the arguments."""
    name = call.program
    assert url is None or name not in NOT_HERE, f"{call} needs: {NOT_HERE[name]}"
    checks: dict[str, Callable[[Sequence[str]], None]] = {
        "ray": _ray,
        "serve": _serve,
        "make": _make,
        "git": _git,
        "pip": _pip,
        "kubectl": _kubectl,
        "curl": _urls,
        "lm_eval": _strangers,
        "guidellm": _strangers,
        "dflash": _strangers,
    }
    with contextlib.chdir(place):
        if name == "dflash-serve":
            return _ours(call, url)
        if name == "python":
            _python(call.arguments, run=url is not None)
        else:
            checks[name](call.arguments)
        return ""


def command_of(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The command of ours that is meant, and what is left for it."""
    command: Any = get_command(app)
    rest = list(arguments)
    while hasattr(command, "commands"):
        assert rest and rest[0] in command.commands, f"dflash-serve has no command {' '.join(arguments)}"
        command = command.commands[rest.pop(0)]
    return command, rest


def _ours(call: Call, url: str | None) -> str:
    command, rest = command_of(call.arguments)
    command.make_context(call.program, rest)
    if call.arguments[0] in PARSED or (url is None and call.arguments[0] not in LASTING):
        return ""
    takes_url = any("--url" in parameter.opts for parameter in command.params)
    asked = [*call.arguments, *(("--url", url) if url is not None and takes_url and "--url" not in rest else ())]
    with _without_clusters():
        result = CliRunner().invoke(app, asked, input=call.typed, env=call.exported)
    assert result.exit_code == 0, f"{call}: exit code {result.exit_code}: {result.output}"
    return result.output


@contextlib.contextmanager
def _without_clusters() -> Iterator[None]:
    """What starts Ray, or fetches a model, does nothing."""

    @contextlib.contextmanager
    def running(*_: Any, **__: Any) -> Iterator[str]:
        yield "http://127.0.0.1:8000"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deployment.local.running", running)
        patch.setattr("deployment.local.resumed", lambda app: None)
        patch.setattr("deployment.local.until_interrupted", lambda: None)
        patch.setattr("deployment.local.take_down", lambda app, address: 0)
        patch.setattr("deployment.demo.run", lambda port, keep: 0)
        patch.setattr("deployment.preflight.keep_ray_on_loopback", lambda: None)
        patch.setattr("deployment.settings.located", _known)
        yield


def _known(field: str, place: Path) -> Path:
    """A directory as it is; in the place of a name on the hub that this package knows, the embedded model's."""
    if (name := hub.hub_id(place)) is None:
        return place
    assert any(name.endswith(f"/{target}") for target in hub.DRAFTERS) or any(
        name in drafters.values() for drafters in hub.DRAFTERS.values()
    ), f"{field}: {name}"
    return Path("TARGET" if field == "model" else "DRAFT")


# ------------------------------------------------------------------------------------------------ python


def _python(arguments: Sequence[str], run: bool) -> None:
    assert len(arguments) >= 2 and arguments[0] == "-m", f"python -m MODULE, not python {' '.join(arguments)}"
    _, module, *rest = arguments
    if module == "pytest":
        _pytest(rest)
        return
    name = f"{module}.__main__" if (ROOT / module.replace(".", "/") / "__main__.py").is_file() else module

    def read(self: argparse.ArgumentParser, *_: Any) -> None:
        known = parse(self)
        assert known is not None
        raise _Read

    parse, main = argparse.ArgumentParser.parse_args, importlib.import_module(name).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *rest])
        if run and module in QUICK:
            patch.setattr(sys, "argv", [module, *(QUICK[module].get(one, one) for one in rest)])
            main()
            return
        patch.setattr(argparse.ArgumentParser, "parse_args", read)
        with pytest.raises(_Read):
            main()


def _pytest(arguments: Sequence[str]) -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    rest = list(arguments)
    while rest:
        if (one := rest.pop(0)) == "-m":
            assert rest.pop(0) in {marker.partition(":")[0] for marker in markers}
        else:
            assert (ROOT / one).exists(), one


# ------------------------------------------------------------------------------------------------ Ray


def clicked(command: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """What a command of click's makes of its arguments."""
    name, *rest = arguments
    assert name in command.commands, f"{command.name} has no command {name}"
    return command.commands[name].make_context(name, rest).params


def _ray(arguments: Sequence[str]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.scripts.scripts import cli

    read = clicked(cli, arguments)
    if "cluster_config_file" in read:
        validate_config(prepare_config(yaml.safe_load(Path(read["cluster_config_file"]).read_text())))


def _serve(arguments: Sequence[str]) -> None:
    from ray.serve.schema import ServeDeploySchema
    from ray.serve.scripts import cli

    read = clicked(cli, arguments)
    if arguments[0] == "deploy":
        config = ServeDeploySchema.model_validate(yaml.safe_load(Path(read["config_or_import_path"]).read_text()))
        assert [AppArgs.model_validate(application.args) for application in config.applications]
    if arguments[0] == "run":
        assert read["config_or_import_path"] == "deployment.app:build"
        AppArgs.model_validate(dict(argument.split("=", 1) for argument in read["arguments"]))


# ------------------------------------------------------------------------------------------------ others


def _make(arguments: Sequence[str]) -> None:
    subprocess.run(["make", "-n", *arguments], check=True, capture_output=True, timeout=60)


def _git(arguments: Sequence[str]) -> None:
    action, _, into = arguments
    assert action == "clone" and (Path(into) / "Makefile").exists()


def _pip(arguments: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    action, *rest = arguments
    assert action == "install"
    for found in re.findall(r"(?:dflash-serve|\.)\[([\w,]+)\]", " ".join(rest)):
        assert set(found.split(",")) <= extras.keys(), found


def _kubectl(arguments: Sequence[str]) -> None:
    action, option, file = arguments
    assert (action, option) == ("apply", "-f")
    service = yaml.safe_load(Path(file).read_text())
    assert service["kind"] == "RayService"
    assert yaml.safe_load(service["spec"]["serveConfigV2"])


def _urls(arguments: Sequence[str]) -> None:
    """Of a program that is not here: what it asks our server for is there, and so are files of ours that it reads."""
    from deployment.ingress import VERSION, api

    routes = document(api, VERSION)["paths"]
    for found in re.findall(r"(?:http://)?127\.0\.0\.1:8000[^\s,\"']*", " ".join(arguments)):
        path = urlsplit(found if "//" in found else f"http://{found}").path
        assert path.rstrip("/") in {"", "/v1", *routes}, found


def _strangers(arguments: Sequence[str]) -> None:
    _urls(arguments)
    for found in re.findall(r"\b(?:model|docs|deployment)/[\w./-]+", " ".join(arguments)):
        assert Path(found).exists(), found
