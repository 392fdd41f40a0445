"""The command line: a mistake is one sentence on stderr and exit code 2, before anything is started."""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from deployment import cli
from deployment.cli import app
from deployment.local import LaunchError, _disconnect, _uninterrupted, port_is_free, take_down, url_of, why_not
from model import DEMO


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    result = command("serve", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("dflash-serve: ") and result.stderr.count("\n") == 1 and not result.stdout
    return result.stderr


def copied(source: str, directory: Path) -> Path:
    return Path(shutil.copytree(DEMO / source, directory / source, copy_function=shutil.copyfile))


@pytest.mark.parametrize(
    ("host", "named"),
    [("::1", "[::1]"), ("::", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("gpu-1", "gpu-1")],
)
def test_a_server_is_told_under_a_url_that_finds_it(host: str, named: str):
    url = httpx.URL(url_of(host, 8000, None))
    assert str(url) == f"http://{named}:8000" and url.port == 8000


def test_model_directory_that_does_not_exist_is_named():
    assert "/nowhere/at-all" in refused("--model", "/nowhere/at-all", "--backend", "none")


def test_missing_weights_are_named(tmp_path: Path):
    model = copied("target", tmp_path)
    (model / "model.safetensors").unlink()
    assert "safetensors" in refused("--model", str(model), "--backend", "none")


def test_missing_shard_is_named(tmp_path: Path):
    model = copied("target", tmp_path)
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in refused("--model", str(model), "--backend", "none")


def test_draft_checkpoint_that_is_cut_in_the_middle_is_named(tmp_path: Path):
    draft = copied("dflash2", tmp_path)
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert str(file) in refused("--draft", str(draft))


def test_draft_that_does_not_fit_the_target_is_refused_with_both_sizes(tmp_path: Path):
    draft = copied("dflash2", tmp_path)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"hidden_size": 640}))
    message = refused("--draft", str(draft))
    assert "640" in message and "320" in message


def test_draft_of_another_kind_than_the_backend_is_refused():
    assert "dflash2 drafter" in refused("--backend", "dflash", "--draft", str(DEMO / "dflash2"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--backend", "eagle"), "backend"),
        (("--device", "tpu"), "device"),
        (("--draft-tokens", "16"), "draft_tokens"),
        (("--replicas", "0"), "replicas"),
        (("--model", str(DEMO)), "draft"),
        (("--api-keys", "/nowhere/keys"), "api_keys"),
        (("--tls-cert", "/nowhere/cert.pem"), "tls_key"),
        (("--durable-key-env", "NOT_THERE"), "durable_key_env"),
        (("--durable", "/tmp/d", "--durable-key-env", "NOT_THERE"), "NOT_THERE"),
        (("--durable", "sessions"), "durable"),
        (("--durable", "/srv/sessions", "--no-durable"), "--no-durable"),
    ],
)
def test_option_with_a_wrong_value_is_named(arguments: tuple[str, ...], named: str):
    assert named in refused(*arguments)


def test_the_server_listens_on_loopback_unless_told_otherwise():
    serve = inspect.signature(cli.serve).parameters
    assert serve["host"].default == "127.0.0.1" and inspect.signature(cli.demo).parameters.keys() == {"keep", "port"}


def test_launch_errors_of_a_cluster_become_one_sentence(monkeypatch: pytest.MonkeyPatch):
    def no_cluster(app: str, address: str | None) -> int:
        raise LaunchError("no Ray cluster answers at 'auto'")

    monkeypatch.setattr("deployment.local.take_down", no_cluster)
    result = command("down")
    assert (result.exit_code, result.stderr) == (2, "dflash-serve: no Ray cluster answers at 'auto'\n")


def test_help_needs_neither_ray_nor_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom deployment.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\nassert 'demo' in result.output\n"
        "print([name for name in ('ray', 'torch', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_port_in_use_is_seen():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
    assert port_is_free("127.0.0.1", port)


def test_address_at_which_nobody_can_listen_is_not_called_in_use():
    reason = why_not("203.0.113.1", 8000)
    assert reason is not None and "in use" not in reason


def test_ctrl_c_waits_until_ray_has_started_or_ended_whole():
    done: list[bool] = []

    def start() -> None:
        with _uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done


@pytest.mark.parametrize("address", [None, "auto"])
def test_how_the_parts_of_its_own_cluster_end_is_not_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str | None
):
    def tells(*_: object) -> None:
        print("Task ServeController.graceful_shutdown failed", file=sys.stderr)

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.serve.delete", tells)
    monkeypatch.setattr("ray.serve.shutdown", tells)
    monkeypatch.setattr("ray.shutdown", tells)
    monkeypatch.setattr("deployment.local.remove", tells)
    _disconnect("app", address)
    assert ("failed" in capsys.readouterr().err) is (address is not None)


@pytest.mark.parametrize("error", [ConnectionError("nobody there"), Exception("timed out during startup.\nMore of it")])
def test_whatever_ray_raises_when_it_does_not_come_up_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(
        LaunchError, match=r"^no Ray cluster answers at 'auto': (nobody there|timed out during startup\.)$"
    ):
        take_down("app", None)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ((12, "/kept/here"), "resumed 12 sessions from /kept/here\n"),
        ((0, "/kept/here"), "sessions are kept in /kept/here\n"),
        (None, ""),
    ],
)
def test_who_starts_a_server_reads_how_many_sessions_it_goes_on_with(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, str] | None, line: str
):
    monkeypatch.setattr("deployment.preflight.keep_ray_on_loopback", lambda: None)
    monkeypatch.setattr("deployment.local.running", lambda *_, **__: contextlib.nullcontext("http://127.0.0.1:1"))
    monkeypatch.setattr("deployment.local.resumed", lambda app: found if app == "mine" else None)
    monkeypatch.setattr("deployment.local.until_interrupted", lambda: None)
    result = command("serve", "--app", "mine")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{line}demo is served at http://127.0.0.1:1/v1 by 2 replicas.")
