"""How large is the state of one sequence? Sizes of all planes, as the configs of target and drafter give them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from state.errors import StateError

PAGE_TOKENS = 64
"""Token positions of one page, in every pool."""

DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Element types that a plane may have, under the names that safetensors gives them."""


@dataclass(frozen=True)
class StateGeometry:
    """Sizes of all planes. The drafter's are 0 when there is none; `window` is S, the capacity of a ring.

    Raises `StateError` naming the field when sizes are negative, contradict each other, or a dtype is not supported.
    """

    kv_layers: int
    kv_heads: int
    kv_head_dim: int
    kv_dtype: torch.dtype
    gdn_layers: int
    gdn_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_channels: int
    conv_history: int
    conv_dtype: torch.dtype
    hidden_size: int
    hidden_dtype: torch.dtype
    ring_layers: int = 0
    full_layers: int = 0
    draft_kv_heads: int = 0
    draft_head_dim: int = 0
    window: int = 0
    ring_key_dtype: torch.dtype = torch.float32
    ring_value_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.dtype):
                if value not in DTYPE_NAMES:
                    known = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
                    raise StateError(f"geometry: {field.name} is {value}, must be one of {known}")
            elif value < 0:
                raise StateError(f"geometry: {field.name} is {value}, must not be negative")
        self._need("hidden_size", "a sequence")
        if self.kv_layers:
            self._need("kv_heads", "kv_layers")
            self._need("kv_head_dim", "kv_layers")
        if self.gdn_layers:
            for name in ("gdn_heads", "gdn_key_dim", "gdn_value_dim", "conv_channels", "conv_history"):
                self._need(name, "gdn_layers")
        if self.ring_layers or self.full_layers:
            self._need("draft_kv_heads", "a drafter")
            self._need("draft_head_dim", "a drafter")
        if self.ring_layers:
            self._need("window", "ring_layers")

    def _need(self, name: str, owner: str) -> None:
        if getattr(self, name) < 1:
            raise StateError(f"geometry: {name} is {getattr(self, name)}, but {owner} needs at least 1")

    @property
    def gdn_bytes(self) -> int:
        """Bytes of the GDN states of one image, FP32: [Lg, Hv, Dk, Dv]."""
        return 4 * self.gdn_layers * self.gdn_heads * self.gdn_key_dim * self.gdn_value_dim

    @property
    def conv_bytes(self) -> int:
        """Bytes of the convolution history of one image: [Lg, C, history]."""
        return self.conv_dtype.itemsize * self.gdn_layers * self.conv_channels * self.conv_history

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the continuation hidden of one image: [H]."""
        return self.hidden_dtype.itemsize * self.hidden_size

    @property
    def ring_bytes(self) -> int:
        """Bytes of the draft rings of one image, K and V: 2 x [Lr, S, Hkv, D]."""
        return self.ring_layers * self.window * self._draft_token_layer_bytes

    @property
    def image_bytes(self) -> int:
        """Bytes of one image: all planes whose size does not grow with the frontier."""
        return self.gdn_bytes + self.conv_bytes + self.hidden_bytes + self.ring_bytes

    @property
    def target_page_bytes(self) -> int:
        """Bytes of one target page, K and V: 2 x [L, 64, Hkv, D]."""
        return 2 * self.kv_dtype.itemsize * self.kv_layers * PAGE_TOKENS * self.kv_heads * self.kv_head_dim

    @property
    def draft_page_bytes(self) -> int:
        """Bytes of one page of the drafter's full-attention layers, K and V: 2 x [Lf, 64, Hkv, D]."""
        return self.full_layers * PAGE_TOKENS * self._draft_token_layer_bytes

    @property
    def _draft_token_layer_bytes(self) -> int:
        element = self.ring_key_dtype.itemsize + self.ring_value_dtype.itemsize
        return element * self.draft_kv_heads * self.draft_head_dim

    def facts(self) -> dict[str, str | int]:
        """All sizes and dtypes by name, for a fingerprint."""
        known: dict[str, str | int] = {"page_tokens": PAGE_TOKENS}
        for field in fields(self):
            value = getattr(self, field.name)
            known[field.name] = DTYPE_NAMES[value] if isinstance(value, torch.dtype) else int(value)
        return known


def pages_for(tokens: int) -> int:
    """Pages that hold positions [0, tokens)."""
    return -(-tokens // PAGE_TOKENS)
