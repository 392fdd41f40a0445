"""Context K/V of the drafter: where committed positions leave their target features, for every draft layer.

    c_t = plain_rmsnorm(W_feature s_t, context_norm)                      once, common to all layers
    K_t = rope_1d(plain_head_rmsnorm(W_key c_t, key_norm), t)             per layer; no cast before the head norm
    V_t = W_value c_t                                                     per layer

Local layers store into rings (position p in slot p mod S), full layers into pages of 64. K is rounded to the store's
key dtype; V first to the model's dtype, then to the store's value dtype (BF16, then FP16 RNE, in the official formats).
A row's chunk may be longer than a ring: only its last S columns are stored, and no column at or beyond counts[b].

Source: specification (conditioning, context K/V, prefill longer than the ring); decision 8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.norms import plain_rms_norm
from kernels.rotary import apply_rotary


def context_features(features: torch.Tensor, feature_weight: torch.Tensor, norm: torch.Tensor, eps: float):
    """`features` [B, T, n H] (taps concatenated in recorded order), `feature_weight` [H, n H] -> c [B, T, H]."""
    return plain_rms_norm(F.linear(features, feature_weight), norm, eps)


def context_keys_values(
    c: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    key_norm: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer: `c` [B, T, H], weights [Hkv D, H], `key_norm` [D], rotary tables of the positions [B, T, D/2] ->
    K FP32 [B, T, Hkv, D] and V in c's dtype [B, T, Hkv, D]."""
    head_dim = key_norm.shape[0]
    raw = F.linear(c.float(), key_weight.float()).unflatten(-1, (-1, head_dim))
    keys = apply_rotary(plain_rms_norm(raw, key_norm.float(), eps), cos, sin)
    values = F.linear(c, value_weight).unflatten(-1, (-1, head_dim))
    return keys, values
