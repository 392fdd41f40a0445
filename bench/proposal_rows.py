"""Makes the index of a proposal head: the token ids that are most frequent in a text.

    python -m bench.proposal_rows MODEL OUTPUT --rows 131072 FILE [FILE ...]

Fewer rows make drafting's head cheaper; a token that is left out can still be generated, but not proposed. Ids that
the text never has are filled up from the lowest id on; end tokens are always in. Use: `--proposal-head OUTPUT`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.config import load_target_config
from model.generation_defaults import load_generation_defaults
from model.tokenizer import Tokenizer

PIECE = 1 << 20


def pieces(files: Iterable[Path]) -> Iterable[str]:
    """The texts, a megabyte at a time; a token that a cut divides does not matter for frequencies."""
    for path in files:
        with path.open(encoding="utf-8", errors="replace") as stream:
            while text := stream.read(PIECE):
                yield text


def most_frequent(tokenizer: Tokenizer, always: Iterable[int], texts: Iterable[str], rows: int) -> torch.Tensor:
    """`rows` token ids, int32 ascending: `always`, then the most frequent ones, ties to the lower id."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer.encode(text))
    ranked = sorted(range(tokenizer.public_rows), key=lambda token: (-counts[token], token))
    chosen = list(dict.fromkeys([*always, *ranked]))[:rows]
    return torch.tensor(sorted(chosen), dtype=torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.model)
    if not 1 <= args.rows <= tokenizer.public_rows:
        parser.error(f"--rows is {args.rows}, must be 1 to the {tokenizer.public_rows} public token ids")
    always = load_generation_defaults(args.model, load_target_config(args.model)).eos_ids
    rows = most_frequent(tokenizer, always, pieces(args.files), args.rows)
    save_file({"rows": rows}, args.output)
    print(f"{args.output}: {len(rows)} of {tokenizer.public_rows} token ids")


if __name__ == "__main__":
    main()
