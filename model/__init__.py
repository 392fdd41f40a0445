"""Mathematics and weights: configs, checkpoints, the target, the drafters, tokenizer and chat template."""

from pathlib import Path

DEMO: Path = Path(__file__).resolve().parent / "demo"
"""The embedded default checkpoint: `target/`, `dflash/` and `dflash2/`, each a Hugging Face directory."""
