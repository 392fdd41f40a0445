"""Where Triton kernels run in tests: on the card, or in the interpreter where there is none."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
