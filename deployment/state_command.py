"""`dflash-serve state`: look into session files, check and compare them, and carry them from and to a server.

Exit status: 0; 1 where a file is not whole, does not fit, or two files differ; 2 for a mistake of the caller.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployment.private_file import check_replaceable, write_private
from deployment.usage import fail, one_sentence

if TYPE_CHECKING:
    from state.document import SessionDocument

# torch and httpx take seconds to import: `--help` should not wait for them.

app = typer.Typer(help="Looks into session files (state/FORMAT.md), and carries them from and to a server.")

File = Annotated[Path, typer.Argument(help="A session file, .dfs.")]
KeyFile = Annotated[Path | None, typer.Option(help="The cluster's key: says whether the file is signed with it.")]
Url = Annotated[str, typer.Option(help="The server.")]
ApiKey = Annotated[str | None, typer.Option(envvar="DFLASH_API_KEY", help="Whose sessions they are.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]

READ_BYTES = 1 << 24


@app.command()
def inspect(file: File, as_json: AsJson = False, key_file: KeyFile = None) -> None:
    """Prints what a session file says about itself. Its payload is not checked; no model is needed."""
    with one_sentence(exit_code=1):
        facts = described(_opened(file, key_file))
        if as_json:
            typer.echo(json.dumps(facts, indent=2, ensure_ascii=False, default=bytes.hex))
        else:
            _print_table(str(file), _rows(facts))


@app.command()
def verify(
    file: File,
    key_file: KeyFile = None,
    signed: Annotated[bool, typer.Option("--signed", help="Refuse a file that is not signed with the key.")] = False,
    model: Annotated[Path | None, typer.Option(help="Also: does the state belong to this model?")] = None,
    draft: Annotated[Path | None, typer.Option(help="The drafter's directory.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, with --model.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, with --model.")] = "float32",
) -> None:
    """Checks every digest and every rule of the format, and with --model that the state would load there."""
    with one_sentence(exit_code=1):
        document = _opened(file, key_file, demand_signature=signed)
        if model is not None:
            _check_model(document, model, draft, device, dtype)
        checked = _check_whole(document)
        typer.echo(f"ok: {file} is whole; {checked} checkpoints, {len(document.manifest.segments)} segments")


@app.command()
def diff(left: File, right: File, as_json: AsJson = False) -> None:
    """Names what differs between two session files: fields, tokens, planes, and the first layer and position."""
    with one_sentence():
        from state.difference import differences

        documents = [_opened(file, None) for file in (left, right)]
        for document in documents:
            _check_whole(document)
        found = list(differences(*documents))
        if as_json:
            typer.echo(json.dumps([vars(difference) for difference in found], indent=2, ensure_ascii=False))
        elif found:
            _print_table("", [(entry.place, entry.left, entry.right) for entry in found])
        else:
            typer.echo("no difference")
        if found:
            raise typer.Exit(1)


@app.command("export")
def export_session(
    session: Annotated[str, typer.Argument(help="The session's name.")],
    file: Annotated[Path, typer.Argument(help="Where to write it; an existing file is replaced.")],
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Writes a session of a running server to a file that only you can read."""
    with one_sentence():
        from deployment.client import Client

        check_replaceable(file)
        with Client(url, api_key, patience=0) as client:
            document = client.export(session)
        write_private(file, document)
        typer.echo(f"{file}: {len(document)} bytes of session {session}")


@app.command("import")
def import_session(
    file: File,
    name: Annotated[str | None, typer.Option("--as", help="Its name there; default: the one that it has.")] = None,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Makes a session of a running server from a file. Refused by name if anything it depends on is not the same."""
    with one_sentence():
        from deployment.client import Client

        document = _read(file)
        with Client(url, api_key, patience=0) as client:
            answer = client.import_(document, name)
        typer.echo(f"session {answer['id']} is on replica {answer['replica']}, frontier {answer['frontier']}")


# ------------------------------------------------------------------------------------------------ files


def _read(file: Path) -> bytes:
    """As much as the header says, and one byte more if there is more: a pipe may be read, a device does not end."""
    from state.container import HEADER, stated_bytes

    try:
        with file.open("rb") as stream:
            data = bytearray(stream.read(HEADER.size))
            end = stated_bytes(data) + 1
            while part := stream.read(min(READ_BYTES, end - len(data))):
                data += part
            return bytes(data)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _opened(file: Path, key_file: Path | None, demand_signature: bool = False) -> SessionDocument:
    from deployment.engine.options import read_key
    from state.document import open_document

    if demand_signature and key_file is None:
        fail("--signed needs a --key-file", 2)
    key = None if key_file is None else read_key(key_file, "--key-file")
    return open_document(_read(file), key=key, demand_signature=demand_signature)


def _check_whole(document: SessionDocument) -> int:
    """Every rule that needs no model. Returns how many checkpoints were read to their last byte."""
    from state.layouts import geometry_of

    document.check_fit(geometry_of(document.manifest.layouts))
    document.check_payload()
    if document.detached:
        return 0
    for entry in document.manifest.checkpoints:
        for _ in document.tensors(entry):
            pass
    return len(document.manifest.checkpoints)


def _check_model(document: SessionDocument, model: Path, draft: Path | None, device: str, dtype: str) -> None:
    from deployment.engine.loading import load_models
    from deployment.engine.options import EngineOptions
    from model.config import load_draft_config
    from state.fingerprint import require_equal

    backend = "none" if draft is None else load_draft_config(draft).kind
    models = load_models(EngineOptions(model, draft, backend, device=device, dtype=dtype), dry=True)
    require_equal(document.manifest.fingerprint, models.fingerprint)
    document.check_tokens(models.target.public_rows)
    document.check_fit(models.geometry)


# ------------------------------------------------------------------------------------------------ what is shown


def described(document: SessionDocument) -> dict[str, Any]:
    """A document's facts as plain data; token ids, text and payload stay out, but for the transcript."""
    from dataclasses import asdict

    manifest, session = document.manifest, document.manifest.session
    table = manifest.segments
    return {
        "session": {name: getattr(session, name) for name in ("id", "branch", "order", "opener", "frontier")}
        | {"epoch": ".".join(map(str, session.epoch))},
        "signature": "of this key" if document.signed else "not checked" if document.has_signature else "none",
        "detached": document.detached,
        "ledger_tokens": len(session.ledger),
        "media": [
            {
                "kind": entry.placed.media.kind,
                "digest": entry.placed.media.digest,
                "shape": list(entry.placed.media.shape),
                "starts": list(entry.placed.starts),
            }
            for entry in manifest.media
        ],
        "fingerprint": manifest.fingerprint,
        "checkpoints": [
            {
                "id": entry.id,
                "kind": entry.kind,
                **asdict(entry.coverage),
                "parent": entry.parent,
                "fork_origin": entry.fork_origin,
                "created": entry.created,
                "shared_tokens": entry.shared_tokens,
                "bytes": sum(table[int(index)].size for index in entry.segments),
            }
            for entry in manifest.checkpoints
        ],
        "segments": len(table),
        "segment_bytes": sum(segment.size for segment in table),
        "layouts": {kind: dict(layout) for kind, layout in manifest.layouts.items()},
        "transcript": list(session.transcript),
        "turns": [asdict(turn) for turn in session.turns],
        "fork_points": [
            {name: getattr(point, name) for name in ("turn", "name", "tokens", "messages", "frontier", "image")}
            for point in session.fork_points
        ],
    }


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, str(value)) for name, value in facts["session"].items()]
    rows += [(name, str(facts[name])) for name in ("signature", "detached", "ledger_tokens")]
    for entry in facts["checkpoints"]:
        form = f"{entry['form']} at {entry['frontier']}, {entry['bytes']} bytes, {entry['id']}"
        rows.append((f"checkpoint {entry['kind']}", form))
    rows.append(("segments", f"{facts['segments']}, {facts['segment_bytes']} bytes, each stored once"))
    for turn in facts["turns"]:
        what = f"{turn['mode']}, {turn['start']} + {turn['published']} tokens, {turn['finish_reason']}"
        rows.append((f"turn {turn['id']}", f"{what}, seed {turn['seed']}"))
    for point in facts["fork_points"]:
        if point["name"] is not None:
            rows.append((f"kept as {point['name']}", f"after turn {point['turn']}, {point['tokens']} tokens"))
    for media in facts["media"]:
        frames, _, height, width = media["shape"]
        what = f"{frames} of {height} x {width} at token {media['starts'][0]}, {media['digest']}"
        rows.append((media["kind"], what))
    rows.append(("messages", str(len(facts["transcript"]))))
    return rows + [(f"fingerprint {name}", str(value)) for name, value in facts["fingerprint"].items()]


def _print_table(title: str, rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), show_header=False, box=None)
    for row in rows:
        # What a file says is shown as it is: no markup, no control characters.
        table.add_row(
            *(Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cell)) for cell in row)
        )
    Console(soft_wrap=True).print(table)
