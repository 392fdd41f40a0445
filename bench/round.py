"""Targets of the official geometries with their drafters on a card, random weights: prefill, decoding, and the decode
round in parts.

    python -m bench.round [--model 27B 35B-A3B] [--only lanes ready prefill plain rounds stalls peer]
                          [--output bench/results/round.h200.json]

Beside them what the card does in the same run: a pure read, BF16 products, and transformers with
flash-linear-attention at the same geometry. `lanes`: bytes of a lane's recurrent state beside K + 1 copies of it.
`ready`: an engine from the start of its process to its first token. `stalls`: lanes that decode while a long prompt
arrives.

A results file that is there already keeps the rows of other models and other parts, if it is of the same card and
versions; `runs` says which command measured what, and what the card did in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.facts import commit
from bench.gpu import card, read_tbps, write_tables
from bench.round_models import DTYPE, MODELS, random_models
from bench.round_parts import CONTEXTS, rounds
from bench.round_peer import peer_rows
from bench.round_prefill import matmul_tflops, plain_rows, prefill_rows
from bench.round_ready import ready_rows
from bench.round_stalls import slice_rows, stall_rows
from kernels.gated_delta_net import Records
from model.config import TargetConfig

PARTS = ("lanes", "ready", "prefill", "plain", "rounds", "stalls", "peer")
DECODING = {"prefill", "plain", "rounds", "stalls"}
"""Parts that need the models."""
Table = list[dict[str, Any]]


def lane_rows(model: str, config: TargetConfig) -> Table:
    """Bytes of a lane for K drafts: its recurrent state and convolution history (`state`), what Fold needs of a round
    (`records`), and what K + 1 states would take, one of which the next round begins with (`states`)."""
    heads, layers = config.gdn_value_heads, len(config.gdn_layers)
    recurrent = layers * heads * config.gdn_key_dim * config.gdn_value_dim * torch.float32.itemsize
    state = recurrent + layers * config.conv_channels * (config.conv_kernel - 1) * DTYPE.itemsize

    def records(width: int) -> int:
        empty = Records.empty(layers, 1, width, config.conv_channels, heads, DTYPE, "meta")
        return sum(tensor.nbytes for tensor in vars(empty).values())

    return [
        {"model": model, "K": k, "state": state, "records": records(k + 1), "states": (k + 1) * state} for k in (7, 15)
    ]


def measured(model: str, parts: list[str], tbps: float, contexts: list[int]) -> Iterator[tuple[str, Table]]:
    """Rows of one model and their table in the results file, as they come: in the order in which memory is needed,
    ours, then theirs."""
    pair = MODELS[model]
    if "lanes" in parts:
        yield "bytes_per_lane", lane_rows(model, pair.target)
    if "ready" in parts:
        yield "ready", ready_rows(model, pair.target, pair.draft)
    if DECODING & set(parts):
        target, drafter = random_models(pair.target, pair.draft)
        if "prefill" in parts:
            yield "prefill", prefill_rows(model, target, drafter)
        if "plain" in parts:
            yield "plain", plain_rows(model, target)
        if "rounds" in parts:
            for drafts in pair.drafts:
                for row in rounds(model, target, drafter, drafts, tbps, contexts):
                    yield "rounds", [row]
        if "stalls" in parts:
            yield "slices", slice_rows(model, target, drafter)
            yield "stalls", stall_rows(model, target, drafter)
        del target, drafter
        torch.cuda.empty_cache()
    if "peer" in parts:
        yield "peer", peer_rows(model, pair.target)


# ------------------------------------------------------------------------------------------------ the results file


def earlier(path: Path | None, facts: dict[str, Any]) -> dict[str, Any]:
    """What a results file holds that is to be continued: nothing, if it is not there. Raises ValueError for one of
    another card or other versions, whose rows must not stand beside these."""
    if path is None or not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    for name in card():
        if found.get(name) != facts[name]:
            raise ValueError(f"{path}: {name} is {found.get(name)}, must be {facts[name]} to be continued")
    return found


def replaced(rows: Table, model: str) -> Table:
    """Those of other models. What a run says of a model anew, its `model` or the first word of it tells."""
    return [row for row in rows if row["model"].split(",")[0] != model]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--context", nargs="+", type=int, default=list(CONTEXTS), help="of rounds, two and more, ascending"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default=commit(), help="of the code, where it is not run from its repository")
    args = parser.parse_args()
    told = "--model", *args.model, "--only", *args.only, "--context", *map(str, args.context)
    torch.manual_seed(0)
    tbps = read_tbps()
    moment, lasting = matmul_tflops()
    facts: dict[str, Any] = {
        **card(),
        "commit": args.commit,
        "command": " ".join(("python -m bench.round", *told)),
        "read_tbps": round(tbps, 3),
        "bf16_tflops": round(moment, 1),
        "bf16_tflops_lasting": round(lasting, 1),
    }
    print(facts, flush=True)
    kept = earlier(args.output, facts)
    tables: dict[str, Table] = {name: value for name, value in kept.items() if isinstance(value, list)}
    run = {name: value for name, value in facts.items() if name not in card()}
    first = {name: value for name, value in kept.items() if not isinstance(value, list)} or facts
    with torch.no_grad():
        for model in args.model:
            fresh: set[str] = set()
            for name, rows in measured(model, args.only, tbps, args.context):
                before = tables.get(name, [])
                tables[name] = (before if name in fresh else replaced(before, model)) + rows
                fresh.add(name)
                one = {"model": model, **run}
                tables["runs"] = [row for row in tables.get("runs", []) if row != one] + [one]
                if args.output:
                    write_tables(args.output, first, tables)


if __name__ == "__main__":
    main()
