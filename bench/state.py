"""What a session's state costs to keep: documents beside memcpy, sha256 and a file copy; bytes a turn; coming back.

    python -m bench.state [--device cpu|cuda] [--output FILE]

cpu    encode, decode and verify of one checkpoint at 27B geometry with random contents; bytes written a turn, of a real
       session of the demo model and of 27B by its sizes (`bench/state_sizes.py`); a document's way into the demo engine
       against a prefill of the same tokens
cuda   a whole checkpoint at 27B geometry into pinned memory and back, against one pinned copy of as many bytes; what
       hashing it takes is told beside

A row's `reference` is measured in the same run, on as many bytes. Medians of a few runs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu import card, write_results
from bench.state_sizes import GEOMETRY_27B, agent, conversation
from deployment.engine.commands import Export, Import, Publish, Submit
from deployment.engine.durable_sessions import DurableSessions
from deployment.engine.engine import Engine
from deployment.engine.events import Event, Exported, Finished, Publishing
from deployment.engine.loading import Models, load_models
from deployment.engine.options import EngineOptions
from model import DEMO
from state.background import BackgroundWriter
from state.byte_store import DirectoryStore
from state.checkpoint import Checkpoint
from state.codec import encode_session
from state.document import open_document
from state.durable import DurableTier, Published
from state.fingerprint import Fingerprint
from state.geometry import StateGeometry, pages_for
from state.host_copy import HostTransfer
from state.memory import StateMemory
from state.names import Epoch, Order, SessionKey
from state.session_record import SessionRecord

Row = dict[str, Any]
FINGERPRINT: Fingerprint = {"weights": "random", "tokenizer": "none"}
RUNS = 5
CPU_FRONTIER = 1000
CUDA_FRONTIERS = (1024, 8192, 32768, 65536)
CONTEXTS = (128, 256, 512, 1024)
GOAL = 0.8
"""Of the bandwidth of a pinned copy."""


def seconds(work: Callable[[], Any], runs: int = RUNS) -> float:
    """Median of `runs`, after one that does not count."""
    work()
    times: list[float] = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def row(what: str, size: int, took: float | None, reference: str | None, reference_took: float | None) -> Row:
    """Both took their seconds for `size` bytes, or did not move them at all."""
    return {
        "what": what,
        "bytes": size,
        "seconds": took,
        "gbps": size / took / 1e9 if took else None,
        "reference": reference,
        "reference_gbps": size / reference_took / 1e9 if reference_took else None,
    }


def sized(what: str, written: float, new_kv: float) -> Row:
    return row(what, round(written), None, f"new KV, {round(new_kv)} bytes", None) | {"ratio": written / new_kv}


def random_checkpoint(memory: StateMemory, frontier: int) -> Checkpoint:
    """At a frontier, full of random numbers."""
    sequence = memory.open(frontier)
    pools = [memory.target] + ([memory.draft] if memory.draft else [])
    for pool, pages in zip(pools, (sequence.pages, sequence.draft_pages), strict=False):
        for page in pages:
            pool.keys[page].normal_()
            pool.values[page].normal_()
    images = memory.images
    for plane in (images.gdn, images.conv, images.hidden, images.rings.keys, images.rings.values):
        plane[sequence.slot].normal_()
    sequence.settle(frontier)
    sequence.context_frontier = frontier
    checkpoint = memory.capture(sequence, range(frontier + 1), "decode", "turn_end")
    memory.close(sequence)
    return checkpoint


# ------------------------------------------------------------------------------------------------ documents


def documents() -> list[Row]:
    """One checkpoint of 27B on the host: encoding hashes and copies it, verifying hashes, decoding does both."""
    memory = StateMemory(GEOMETRY_27B, 2 * pages_for(CPU_FRONTIER), 1, 3)
    checkpoint = random_checkpoint(memory, CPU_FRONTIER)
    record = SessionRecord("s", checkpoint.ledger, frontier=checkpoint.frontier)
    document = encode_session(memory, [checkpoint], record, FINGERPRINT)

    def verify() -> None:
        open_document(document).check_payload()

    def decode() -> None:
        opened = open_document(document)
        opened.check_fit(memory.geometry)
        opened.check_payload()
        memory.release(opened.load(memory, opened.manifest.checkpoints[0]))

    source = torch.frombuffer(bytearray(document), dtype=torch.uint8)
    destination = torch.empty_like(source)
    with tempfile.TemporaryDirectory(prefix="bench-state-") as directory:
        file = Path(directory) / "session.dfs"
        references = {
            "memcpy": seconds(lambda: destination.copy_(source)),
            "sha256": seconds(lambda: hashlib.sha256(document).digest()),
            "file copy": seconds(lambda: copied(file, document)),
        }
        works = {
            "encode": seconds(lambda: encode_session(memory, [checkpoint], record, FINGERPRINT)),
            "verify": seconds(verify),
            "decode": seconds(decode),
            "encode to a file": seconds(
                lambda: copied(file, encode_session(memory, [checkpoint], record, FINGERPRINT))
            ),
        }
    return [
        row(what, len(document), took, reference, reference_took)
        for what, took in works.items()
        for reference, reference_took in references.items()
    ]


def copied(file: Path, data: bytes) -> None:
    """Written and synced: a cache that fills up would measure the cache."""
    with file.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


# ------------------------------------------------------------------------------------------------ the demo engine


class Demo:
    """An engine of the demo model on this machine."""

    def __init__(self, models: Models, options: EngineOptions, durable: DurableSessions | None = None) -> None:
        self.events: list[Event] = []
        self.engine = Engine(models, options, self.events.append, durable=durable)

    def turn(self, ids: tuple[int, ...], tokens: int, **more: Any) -> tuple[int, ...]:
        self.engine.execute(Submit("t", ids, max_tokens=tokens, ignore_eos=True, **more))
        while self.engine.step():
            pass
        finished = self.events[-1]
        assert isinstance(finished, Finished), finished
        return finished.token_ids


def demo_options() -> EngineOptions:
    return EngineOptions(DEMO / "target", DEMO / "dflash2", "dflash2", lanes=1, images=8, context=CONTEXTS[-1] + 64)


def prompt(tokens: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist())


def conversation_on_the_demo(models: Models, turns: int = 20, asked: int = 24, answered: int = 8) -> list[Row]:
    """A session that is published with its state after every turn."""
    outcomes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="bench-state-") as directory:
        tier = DurableTier(DirectoryStore(Path(directory) / "store"), 1 << 32, open_document)
        writer = BackgroundWriter(places=1, most_bytes=1 << 40)
        durable = DurableSessions(tier, writer, 1e-3, lambda *told: outcomes.append(told[2]))
        demo = Demo(models, demo_options(), durable)
        ledger: tuple[int, ...] = ()
        took = 0.0
        for number in range(turns):
            ids = (*ledger, *prompt(asked))
            ledger = ids + demo.turn(ids, answered, session="s", stable_boundary=len(ids) - 1)
            record = SessionRecord("s", ledger, frontier=len(ledger) - 1)
            started = time.perf_counter()
            demo.engine.execute(Publish("p", "s", SessionKey("a" * 64, "s"), Order(Epoch(1, 1), number), record))
            took += time.perf_counter() - started
            assert isinstance(demo.events[-1], Publishing), demo.events[-1]
            writer.flush(60)
        writer.close(60)
    written = [outcome.written for outcome in outcomes if isinstance(outcome, Published)]
    assert len(written) == turns, outcomes
    geometry = models.geometry
    new_kv = (geometry.target_page_bytes + geometry.draft_page_bytes) * len(ledger) / 64 / turns
    name = "written a turn of a 20-turn conversation, demo model"
    return [sized(name, sum(written) / turns, new_kv) | {"seconds": took / turns, "last_bytes": written[-1]}]


def restores(models: Models) -> list[Row]:
    """From a document in memory to the first new token, against the prefill of as many tokens."""
    rows: list[Row] = []
    for tokens in CONTEXTS:
        source = Demo(models, demo_options())
        ids = prompt(tokens)
        ledger = ids + source.turn(ids, 1, session="s")
        source.engine.execute(Export("e", "s"))
        exported = source.events[-1]
        assert isinstance(exported, Exported), exported
        document = bytes(exported.document)
        destination = Demo(models, replace(demo_options(), images=1))

        def restored(here: Demo = destination, document: bytes = document, ledger: tuple[int, ...] = ledger) -> None:
            here.engine.execute(Import("i", "s", document))
            here.turn(ledger, 1, session="s")

        fresh = Demo(models, replace(demo_options(), images=0))
        took = seconds(restored, runs=3)
        prefill = seconds(lambda here=fresh, ledger=ledger: here.turn(ledger, 1), runs=3)
        name = f"restore of {tokens} tokens from a document, demo model"
        rows.append(row(name, len(document), took, "prefill of the same tokens", prefill) | {"faster": prefill / took})
    return rows


# ------------------------------------------------------------------------------------------------ the card


def transfers(geometry: StateGeometry, frontiers: Sequence[int], device: str) -> list[Row]:
    """Whole checkpoints, out and back. The pages are twice as many as the largest has, for what comes back."""
    memory = StateMemory(geometry, 2 * pages_for(frontiers[-1]), 1, 4, device)
    transfer = HostTransfer(memory)
    rows: list[Row] = []
    for frontier in frontiers:
        checkpoint = random_checkpoint(memory, frontier)
        size = transfer.size(checkpoint)
        pinned = transfer.host_buffer(size)
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        copy = transfer.out(checkpoint, pinned)

        def restored(copy: Any = copy, pinned: torch.Tensor = pinned) -> None:
            memory.release(transfer.back(copy, pinned))

        tokens = f"{frontier} tokens at 27B"
        out = seconds(synced(lambda c=checkpoint, p=pinned: transfer.out(c, p)))
        flat_out = seconds(synced(lambda f=flat, p=pinned: p.copy_(f, non_blocking=True)))
        transfer.out(checkpoint, pinned).wait()
        back = seconds(synced(restored))
        flat_back = seconds(synced(lambda f=flat, p=pinned: f.copy_(p, non_blocking=True)))
        rows.append(row(f"capture to the host, {tokens}", size, out, "pinned copy out", flat_out))
        rows.append(row(f"restore from the host, {tokens}", size, back, "pinned copy in", flat_back))
        if frontier == frontiers[0]:
            hashed = seconds(lambda p=pinned: hashlib.sha256(p.numpy().data).digest(), runs=1)
            rows.append(row(f"sha256 beside it, one core, {tokens}", size, hashed, "pinned copy out", flat_out))
        memory.release(checkpoint)
        del pinned, flat, copy
    return rows


def synced(work: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "cuda":
        rows, facts = transfers(GEOMETRY_27B, CUDA_FRONTIERS, args.device), dict(card())
    else:
        models = load_models(demo_options())
        rows = documents() + conversation_on_the_demo(models) + restores(models)
        facts = {"machine": platform.machine(), "torch": torch.__version__}
    rows.append(sized("written a turn of a 20-turn conversation, 27B by its sizes", *conversation()))
    rows.append(sized("written a tool call of a 100-call agent, 27B by its sizes", *agent()))
    for each in rows:
        print(told(each), flush=True)
    facts["load"] = f"{os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    if args.output:
        write_results(args.output, facts, rows)


def told(each: Row) -> str:
    """A row as a line for people."""
    if each["gbps"] is None:
        return f"{each['what']}: {each['bytes']} bytes, {each['ratio']:.2f} times {each['reference']}"
    share = each["gbps"] / each["reference_gbps"]
    moved = each["what"].startswith(("capture", "restore from the host"))
    missed = f", below the goal of {GOAL:.0%}" if moved and share < GOAL else ""
    return (
        f"{each['what']}: {each['gbps']:.2f} GB/s, {each['seconds'] * 1e3:.1f} ms; {each['reference']} "
        f"{each['reference_gbps']:.2f} GB/s: {share:.0%}{missed}"
    )


if __name__ == "__main__":
    main()
