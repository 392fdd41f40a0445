"""`dflash-serve state`: what it shows, what it refuses by name, and how it ends."""

from __future__ import annotations

import http.server
import json
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import safetensors.torch
from typer.testing import CliRunner, Result

from deployment.cli import app
from deployment.engine.commands import Export
from model import DEMO
from state.codec import encode_session
from tests.engine.driving import Driver, prompt
from tests.state.blobs import put_together, take_apart
from tests.state.golden_session import GOLDEN, GOLDEN_FINGERPRINT, GOLDEN_RECORD, golden_state

DEMO_MODEL = ("--model", str(DEMO / "target"), "--draft", str(DEMO / "dflash2"))


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["state", *arguments], terminal_width=200)


def refused(code: int, *arguments: str) -> str:
    result = command(*arguments)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("dflash-serve: ") and result.stderr.count("\n") == 1 and not result.stdout
    return result.stderr


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    file = tmp_path / "session.dfs"
    file.write_bytes(GOLDEN.read_bytes())
    return file


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    driver = Driver("dflash2", images=4)
    driver.run(prompt(0), session="s", stable_boundary=20, max_tokens=4, ignore_eos=True)
    file = tmp_path_factory.mktemp("state") / "demo.dfs"
    file.write_bytes(driver.call(Export("e", "s")).document)
    return file


# ------------------------------------------------------------------------------------------------ inspect


def test_inspect_tells_the_manifests_facts_as_json():
    facts = json.loads(command("inspect", str(GOLDEN), "--json").stdout)
    assert facts["session"] == {
        "id": "golden", "branch": "main", "order": 5, "opener": 64, "frontier": 69, "epoch": "1700000000.3",
    }  # fmt: skip
    assert [(entry["kind"], entry["frontier"]) for entry in facts["checkpoints"]] == [
        ("turn_start", 64),
        ("explicit", 66),
    ]
    assert (facts["ledger_tokens"], facts["segments"], facts["signature"]) == (70, 6, "none")
    assert facts["turns"][0]["seed"] == 2**64 - 1 and facts["fingerprint"] == GOLDEN_FINGERPRINT


def test_inspect_prints_a_table_in_which_a_files_text_cannot_act(tmp_path: Path):
    hostile = replace(GOLDEN_RECORD, branch="[red]\x1b[2Jx")
    memory, checkpoints = golden_state()
    file = tmp_path / "hostile.dfs"
    file.write_bytes(encode_session(memory, checkpoints, hostile, GOLDEN_FINGERPRINT))
    shown = command("inspect", str(file)).stdout
    assert "[red]" in shown and "\x1b" not in shown
    assert "checkpoint turn_start" in shown and "prompt at 64" in shown and "seed 18446744073709551615" in shown


# ------------------------------------------------------------------------------------------------ verify


def test_verify_reads_a_whole_file_and_names_the_place_of_every_kind_of_damage(golden: Path):
    assert "ok" in command("verify", str(golden)).stdout
    whole = golden.read_bytes()
    for at, place in ((3, "header.magic"), (100, "trailer"), (-40, "segment draft/1"), (-1, "trailer")):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        golden.write_bytes(damaged)
        assert place in refused(1, "verify", str(golden))
    golden.write_bytes(whole[:-1])
    assert "header.size" in refused(1, "verify", str(golden))


def test_verify_finds_without_a_model_what_is_whole_but_lies(golden: Path):
    parts = take_apart(golden.read_bytes())
    coverage = parts.manifest["checkpoints"][0]["coverage"]
    lies = {
        "coverage of gdn": parts.with_checkpoint(coverage=coverage | {"gdn": 63}),
        "manifest.layouts": parts.with_manifest(layouts={**parts.manifest["layouts"], "more": {}}),
        "layouts.target.keys": parts.with_manifest(
            layouts={**parts.manifest["layouts"], "target": {"keys": ["F64", [1, 64, 1, 2]]}}
        ),
    }
    for place, lie in lies.items():
        golden.write_bytes(put_together(lie))
        assert place in refused(1, "verify", str(golden))


def test_verify_tells_whether_a_session_belongs_to_a_model(demo_file: Path, golden: Path):
    assert "2 checkpoints" in command("verify", str(demo_file), *DEMO_MODEL).stdout
    assert "fingerprint field backend" in refused(1, "verify", str(demo_file), "--model", str(DEMO / "target"))
    assert "fingerprint field tokenizer" in refused(1, "verify", str(golden), *DEMO_MODEL)


def test_verify_demands_a_signature_of_the_given_key(tmp_path: Path):
    memory, checkpoints = golden_state()
    signed, key_file, other = tmp_path / "signed.dfs", tmp_path / "key", tmp_path / "other"
    key_file.write_bytes(b"a cluster's secret\n")
    other.write_bytes(b"another's secret")
    signed.write_bytes(
        encode_session(memory, checkpoints, GOLDEN_RECORD, GOLDEN_FINGERPRINT, b"a cluster's secret")
    )  # fmt: skip
    assert command("verify", str(signed), "--signed", "--key-file", str(key_file)).exit_code == 0
    assert "another key" in refused(1, "verify", str(signed), "--signed", "--key-file", str(other))
    assert "missing" in refused(1, "verify", str(GOLDEN), "--signed", "--key-file", str(key_file))
    assert "--key-file" in refused(2, "verify", str(signed), "--signed")


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    for name in ("inspect", "verify"):
        assert "nowhere.dfs cannot be read" in refused(1, name, str(tmp_path / "nowhere.dfs"))


def test_a_file_that_does_not_end_is_not_read_to_its_end(tmp_path: Path):
    assert "no session document" in refused(1, "inspect", "/dev/zero")
    huge = tmp_path / "huge.dfs"
    with huge.open("wb") as stream:
        stream.truncate(1 << 40)
    assert "no session document" in refused(1, "verify", str(huge))
    assert "no session document" in refused(2, "import", str(huge), "--url", "http://127.0.0.1:1")
    assert "--key-file: /dev/zero holds more" in refused(1, "verify", str(GOLDEN), "--key-file", "/dev/zero")
    with huge.open("r+b") as stream:
        stream.write(GOLDEN.read_bytes())
    assert "header.size" in refused(1, "verify", str(huge))


@pytest.mark.parametrize("size", [0, 10, 32, 63])
def test_a_file_that_ends_too_soon_is_refused(tmp_path: Path, size: int):
    short = tmp_path / "short.dfs"
    short.write_bytes(GOLDEN.read_bytes()[:size])
    for name in ("inspect", "verify"):
        assert "header: the document has" in refused(1, name, str(short))
    assert "header: the document has" in refused(2, "diff", str(GOLDEN), str(short))


def test_a_pipe_is_read_like_a_file(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_bytes, args=(GOLDEN.read_bytes(),)).start()
    assert command("verify", str(pipe)).exit_code == 0


def test_a_key_that_is_no_secret_is_refused(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.write_bytes(b" \n")
    assert "--key-file" in refused(1, "verify", str(GOLDEN), "--signed", "--key-file", str(empty))


# ------------------------------------------------------------------------------------------------ diff


def test_diff_of_equal_files_is_silent_and_ends_with_0():
    result = command("diff", str(GOLDEN), str(GOLDEN))
    assert (result.exit_code, result.stdout.strip()) == (0, "no difference")


def test_diff_names_fields_tokens_planes_and_the_first_layer_and_position(tmp_path: Path):
    memory, checkpoints = golden_state()
    page = checkpoints[1].pages[1]
    memory.target.values[page, 0, 1, 0, 1] += 0.5  # position 65
    memory.images.gdn[checkpoints[1].slot, 0, 0, 1] += 1
    record = replace(GOLDEN_RECORD, opener=65, ledger=(*GOLDEN_RECORD.ledger[:67], 9, 9, 9, 9))
    changed = tmp_path / "changed.dfs"
    changed.write_bytes(encode_session(memory, checkpoints, record, GOLDEN_FINGERPRINT | {"window": 7}))
    result = command("diff", str(GOLDEN), str(changed), "--json")
    assert result.exit_code == 1
    found = {entry["place"]: (entry["left"], entry["right"]) for entry in json.loads(result.stdout)}
    assert found == {
        "fingerprint.window": ("6", "7"),
        "session.opener": ("64", "65"),
        "ledger[67]": ("token 167", "token 9"),
        "ledger": ("70 tokens", "71 tokens"),
        "checkpoint explicit image gdn": ("1 of 1 layers differ, first layer 0", "by at most 1"),
        "checkpoint explicit target/1 values": (
            "1 of 1 layers differ, first layer 0 from position 65", "by at most 0.5",
        ),
    }  # fmt: skip


def test_diff_compares_every_checkpoint_of_a_kind(tmp_path: Path):
    parts = take_apart(GOLDEN.read_bytes())
    (first, second), files = parts.manifest["checkpoints"], []
    for created in (first["created"], first["created"] + 1):
        same_kind = [first | {"created": created}, second | {"kind": first["kind"]}]
        files.append(tmp_path / f"{created}.dfs")
        files[-1].write_bytes(put_together(parts.with_manifest(checkpoints=same_kind)))
    result = command("diff", *map(str, files), "--json")
    assert (result.exit_code, [entry["place"] for entry in json.loads(result.stdout)]) == (
        1, ["checkpoint turn_start.created"],
    )  # fmt: skip


def test_diff_tells_other_bytes_of_equal_tensors(tmp_path: Path):
    parts = take_apart(GOLDEN.read_bytes())
    tensors = safetensors.torch.load(parts.segment("image"))
    named = safetensors.torch.save(tensors, {"made": "elsewhere"})
    other = tmp_path / "other.dfs"
    other.write_bytes(put_together(parts.with_segment("image", named)))
    (entry,) = json.loads(command("diff", str(GOLDEN), str(other), "--json").stdout)
    assert entry["place"] == "checkpoint turn_start image" and "equal tensors" in entry["right"]


def test_diff_names_a_checkpoint_that_only_one_file_has(tmp_path: Path):
    memory, checkpoints = golden_state()
    fewer = tmp_path / "fewer.dfs"
    fewer.write_bytes(encode_session(memory, checkpoints[:1], GOLDEN_RECORD, GOLDEN_FINGERPRINT))
    (entry,) = json.loads(command("diff", str(GOLDEN), str(fewer), "--json").stdout)
    assert entry == {"place": "checkpoint explicit", "left": "there", "right": "absent"}


# ------------------------------------------------------------------------------------------------ a server


@dataclass
class Server:
    """Answers what it is told, and keeps what it was asked."""

    url: str = ""
    status: int = 200
    body: bytes = b"{}"
    asked: list[tuple[str, str, str | None, bytes]] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    told = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            told.asked.append((self.command, self.path, self.headers.get("authorization"), body))
            self.send_response(told.status)
            self.send_header("content-length", str(len(told.body)))
            self.end_headers()
            self.wfile.write(told.body)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        told.url = f"http://127.0.0.1:{listening.server_address[1]}"
        yield told
        listening.shutdown()


def test_export_writes_a_private_file_whole_or_not_at_all(server: Server, tmp_path: Path):
    server.body = GOLDEN.read_bytes()
    file = tmp_path / "out.dfs"
    result = command("export", "my/trip", str(file), "--url", server.url, "--api-key", "k")
    assert result.exit_code == 0, result.output
    assert file.read_bytes() == server.body and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert server.asked == [("GET", "/v1/sessions/my%2Ftrip/export", "Bearer k", b"")]
    nowhere = tmp_path / "missing" / "out.dfs"
    assert "cannot be written" in refused(2, "export", "s", str(nowhere), "--url", server.url)
    assert [path.name for path in tmp_path.iterdir()] == ["out.dfs"]


def test_export_replaces_nothing_but_a_file(server: Server, tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path, Path("/dev/null")):
        assert "exists and is no file" in refused(2, "export", "s", str(place), "--url", server.url)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert server.asked == []


def test_import_sends_the_file_and_tells_where_the_session_is(server: Server):
    server.body = b'{"id": "mine", "replica": "r1", "frontier": 66}'
    result = command("import", str(GOLDEN), "--as", "mine", "--url", server.url)
    assert "mine" in result.stdout and "r1" in result.stdout and "66" in result.stdout
    assert server.asked == [("POST", "/v1/sessions/import?id=mine", None, GOLDEN.read_bytes())]


def test_a_servers_refusal_is_told_in_its_own_words(server: Server, tmp_path: Path):
    server.status, server.body = 409, b'{"error": {"message": "document: fingerprint field weights is ..."}}'
    assert "409: document: fingerprint field weights" in refused(2, "import", str(GOLDEN), "--url", server.url)
    server.status, server.body = 502, b"<html>"
    assert "502" in refused(2, "export", "s", str(tmp_path / "x"), "--url", server.url)
    assert "does not answer" in refused(2, "export", "s", str(tmp_path / "x"), "--url", "http://127.0.0.1:1")
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_a_demo_session_has_its_ledger(demo_file: Path):
    facts = json.loads(command("inspect", str(demo_file), "--json").stdout)
    assert facts["ledger_tokens"] == len(prompt(0)) + 4
