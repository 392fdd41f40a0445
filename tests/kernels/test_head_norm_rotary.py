"""Head norms and rotary in one pass: equal to the two operators that it replaces, and to both in FP64."""

from __future__ import annotations

import pytest
import torch

from kernels.head_norm_rotary import head_norm_rotary, head_norm_rotary_triton
from kernels.rotary import rotary_frequencies, rotary_tables
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory

EPS = 1e-6
POSITIONS = torch.tensor([[0, 1, 7], [4095, 4096, 250_000]])


def inputs(queries: int, keys: int, head_dim: int, dtype: torch.dtype, rotated: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(queries + head_dim)
    qkv = torch.randn(2, 3, queries + 2 * keys, head_dim, generator=generator) * 3
    qkv[..., queries + keys :, :] = torch.nan  # v is nobody's business here
    q_norm, k_norm = torch.randn(2, head_dim, generator=generator)
    cos, sin = rotary_tables(POSITIONS, rotary_frequencies(rotated, 1e7))
    return qkv.to(dtype), q_norm.to(dtype), k_norm.to(dtype), cos, sin


def on_device(*tensors: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = head_norm_rotary_triton(*(t.to(DEVICE) for t in tensors), keys, EPS)  # type: ignore[call-arg]
    return q.cpu(), k.cpu()


SHAPES = [(4, 1, 64, 64), (7, 7, 128, 128), (32, 8, 128, 128), (6, 2, 256, 256), (3, 1, 256, 64), (1, 1, 16, 16)]


@pytest.mark.parametrize(("queries", "keys", "head_dim", "rotated"), SHAPES)
def test_heads_are_normalised_and_rotated_as_in_fp64(queries: int, keys: int, head_dim: int, rotated: int) -> None:
    qkv, q_norm, k_norm, cos, sin = inputs(queries, keys, head_dim, torch.float32, rotated)
    frequencies = rotary_frequencies(rotated, 1e7)
    split = qkv.split((queries, keys, keys), dim=-2)
    expected = [
        oracles.rotate(norm.double() * oracles.rms(x, EPS), POSITIONS, frequencies)
        for x, norm in zip(split, (q_norm, k_norm), strict=False)
    ]
    for got in (
        head_norm_rotary(qkv, q_norm, k_norm, cos, sin, keys, EPS),
        on_device(qkv, q_norm, k_norm, cos, sin, keys=keys),
    ):
        for actual, exact in zip(got, expected, strict=True):
            oracles.close(actual, exact, 2e-6)


@pytest.mark.parametrize(("queries", "keys", "head_dim", "rotated"), SHAPES)
def test_the_kernel_rounds_bfloat16_where_the_two_operators_do(
    queries: int, keys: int, head_dim: int, rotated: int
) -> None:
    arguments = inputs(queries, keys, head_dim, torch.bfloat16, rotated)
    expected = head_norm_rotary(*arguments, keys, EPS)  # type: ignore[call-arg]
    for actual, reference in zip(on_device(*arguments, keys=keys), expected, strict=True):
        assert actual.shape == reference.shape and actual.is_contiguous()
        oracles.rounds_like(actual, reference.double(), share=0.002)


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs(5, 3, 64, torch.float32, 64)
    poison_new_memory(monkeypatch)
    for out in on_device(*arguments, keys=3):
        assert bool(out.isfinite().all())


def test_what_does_not_fit_together_is_refused_by_name() -> None:
    qkv, q_norm, k_norm, cos, sin = inputs(4, 2, 64, torch.float32, 64)
    with pytest.raises(ValueError, match="qkv: 8 heads, must be more than the 2 \\* 4"):
        head_norm_rotary_triton(qkv, q_norm, k_norm, cos, sin, 4, EPS)
    with pytest.raises(ValueError, match=r"k_norm: torch.bfloat16, must be torch.float32"):
        head_norm_rotary_triton(qkv, q_norm, k_norm.bfloat16(), cos, sin, 2, EPS)
    with pytest.raises(ValueError, match="sin: shape"):
        head_norm_rotary_triton(qkv, q_norm, k_norm, cos, sin[:1], 2, EPS)
    with pytest.raises(ValueError, match="cos: 64 frequencies, must be at most 32"):
        head_norm_rotary_triton(qkv, q_norm, k_norm, cos.repeat(1, 1, 2), sin, 2, EPS)
    with pytest.raises(ValueError, match="qkv: head dimension 48, must be a power of two"):
        head_norm_rotary_triton(qkv[..., :48].contiguous(), q_norm, k_norm, cos, sin, 2, EPS)
