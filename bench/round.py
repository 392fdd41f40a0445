"""A 27B target with its DFlash2 drafter on a card, random weights: prefill, decoding, and the decode round in parts.

    python -m bench.round [--only lanes ready prefill plain rounds stalls peer] [--output bench/results/round.h200.json]

Beside them what the card does in the same run: a pure read, BF16 products, and transformers with
flash-linear-attention at the same geometry. `lanes`: bytes of a lane's recurrent state beside K + 1 copies of it.
`ready`: an engine from the start of its process to its first token. `stalls`: lanes that decode while a long prompt
arrives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.gpu import card, read_tbps, write_tables
from bench.proposal_models import DFLASH2_27B
from bench.round_models import DTYPE, TARGET_27B, random_models
from bench.round_peer import peer_rows
from bench.round_prefill import matmul_tflops, plain_rows, prefill_rows
from bench.round_ready import ready_rows
from bench.round_stalls import slice_rows, stall_rows
from bench.target_kernels import commit
from kernels.gated_delta_net import Records
from model.config import TargetConfig
from model.drafter import Drafter
from model.target import Target

MODEL = "27B"
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


def round_rows(model: str, target: Target, drafter: Drafter, tbps: float) -> Table:
    """The decode round, from `bench/round_parts.py`, if it is there."""
    if find_spec("bench.round_parts") is None:
        return []
    return import_module("bench.round_parts").rounds(model, target, drafter, tbps)


def measured(parts: list[str], tbps: float) -> Iterator[tuple[str, Table]]:
    """The tables of the results file, in the order in which memory is needed: ours, then theirs."""
    if "lanes" in parts:
        yield "bytes_per_lane", lane_rows(MODEL, TARGET_27B)
    if "ready" in parts:
        yield "ready", ready_rows(MODEL, TARGET_27B, DFLASH2_27B)
    if DECODING & set(parts):
        target, drafter = random_models(TARGET_27B, DFLASH2_27B)
        if "prefill" in parts:
            yield "prefill", prefill_rows(MODEL, target, drafter)
        if "plain" in parts:
            yield "plain", plain_rows(MODEL, target)
        if "rounds" in parts:
            yield "rounds", round_rows(MODEL, target, drafter, tbps)
        if "stalls" in parts:
            yield "slices", slice_rows(MODEL, target, drafter)
            yield "stalls", stall_rows(MODEL, target, drafter)
        del target, drafter
        torch.cuda.empty_cache()
    if "peer" in parts:
        yield "peer", peer_rows(MODEL, TARGET_27B)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default=commit(), help="of the code, where it is not run from its repository")
    args = parser.parse_args()
    torch.manual_seed(0)
    tbps = read_tbps()
    moment, lasting = matmul_tflops()
    facts: dict[str, Any] = {
        **card(),
        "commit": args.commit,
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "read_tbps": round(tbps, 3),
        "bf16_tflops": round(moment, 1),
        "bf16_tflops_lasting": round(lasting, 1),
    }
    print(facts, flush=True)
    tables: dict[str, Table] = {}
    with torch.no_grad():
        for name, rows in measured(args.only, tbps):
            tables[name] = rows
            if args.output:
                write_tables(args.output, facts, tables)


if __name__ == "__main__":
    main()
