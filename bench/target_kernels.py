"""The target's operators on a card, at the official geometries: right against FP64, how near to the floor, and how they
stand beside other code for the same work.

    python -m bench.target_kernels [--only gdn attention accept moe] [--output bench/results/target_kernels.h200.json]

`attention` also times the copies of checkpoints. Every operator is compared with an FP64 oracle and then timed in a
CUDA graph on inputs that rotate, beside the time that its bytes take at the bandwidth of a pure read, measured in the
same run. Chains of rounds show that Fold has the bits of verification.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench import target_accept, target_attention, target_gdn, target_moe
from bench.facts import commit
from bench.gpu import card, read_tbps, write_results
from bench.target_works import measure

PARTS = {"gdn": target_gdn, "attention": target_attention, "accept": target_accept, "moe": target_moe}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default=commit(), help="of the code, where it is not run from its repository")
    args = parser.parse_args()
    torch.manual_seed(0)
    tbps = read_tbps()
    facts: dict[str, Any] = {
        **card(),
        "commit": args.commit,
        "command": f"python -m bench.target_kernels --only {' '.join(args.only)}",
    }
    facts["read_tbps"] = round(tbps, 3)
    print(f"{card()}; pure read {tbps:.2f} TB/s")
    print("model    op                                     ours      floor      peer   over the floor")
    rows: list[dict[str, Any]] = []
    for name in args.only:
        with torch.no_grad():
            for work in PARTS[name].works():
                rows.append(measure(work, tbps))
                del work
                torch.cuda.empty_cache()
            if name == "gdn":
                facts["fold"] = target_gdn.fold_chains()
                print(facts["fold"])
        if args.output:
            write_results(args.output, facts, rows)


if __name__ == "__main__":
    main()
