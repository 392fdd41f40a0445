"""Rotary embedding against complex rotation in FP64 and against transformers' own tables, YaRN included."""

from __future__ import annotations

import pytest
import torch

from kernels.rotary import (
    apply_rotary,
    rotary_frequencies,
    rotary_tables,
    rotary_tables_reference,
    rotary_tables_triton,
    yarn_frequencies,
)
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory

POSITIONS = torch.tensor([[0, 1, 2, 63, 64], [255, 4095, 32_767, 131_071, 262_143]])


def heads(dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 5, 3, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)


@pytest.mark.parametrize(("dim", "theta"), [(2, 1e4), (64, 1e7), (128, 1e6)])
def test_frequencies_are_powers_of_theta(dim: int, theta: float) -> None:
    torch.testing.assert_close(
        rotary_frequencies(dim, theta).double(), oracles.plain_frequencies(dim, theta), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (64, 16), (128, 128), (8, 2)])
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_pairs_are_split_halves_turned_by_position_times_frequency(head_dim: int, rotated: int, factor: float) -> None:
    x, frequencies = heads(head_dim), rotary_frequencies(rotated, 1e7)
    cos, sin = rotary_tables(POSITIONS, frequencies, factor)
    assert cos.shape == sin.shape == (2, 5, rotated // 2) and cos.dtype == torch.float32
    turned = apply_rotary(x, cos, sin)
    oracles.close(turned, oracles.rotate(x, POSITIONS, frequencies, factor), 2e-6)
    assert torch.equal(turned[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("rotated", [16, 24, 128])
@pytest.mark.parametrize("rows", [(3,), (2, 5), (2, 0)])
def test_the_kernels_tables_are_sine_and_cosine_up_to_a_million_positions(
    rotated: int, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_new_memory(monkeypatch)
    positions = torch.randint(0, 2**20, rows, generator=torch.Generator().manual_seed(rotated))
    frequencies = rotary_frequencies(rotated, 1e7)
    exact = (positions.float()[..., None] * frequencies).double()
    for tables in (rotary_tables_reference, rotary_tables_triton):
        cos, sin = tables(positions.to(DEVICE), frequencies.to(DEVICE), 1.25)
        assert cos.dtype == sin.dtype == torch.float32
        oracles.close(cos.cpu(), exact.cos() * 1.25, 3e-7)
        oracles.close(sin.cpu(), exact.sin() * 1.25, 3e-7)


def test_position_zero_changes_nothing() -> None:
    x = heads(64)
    cos, sin = rotary_tables(torch.zeros(2, 5, dtype=torch.int64), rotary_frequencies(64, 1e4))
    assert torch.equal(apply_rotary(x, cos, sin), x)


def test_scores_depend_on_distance_only() -> None:
    q, k = heads(64)[:1, :1], heads(64)[1:, :1]
    frequencies = rotary_frequencies(64, 1e4)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        q_turned = apply_rotary(q, *rotary_tables(torch.tensor([[at_q]]), frequencies))
        k_turned = apply_rotary(k, *rotary_tables(torch.tensor([[at_k]]), frequencies))
        return (q_turned * k_turned).sum(-1)

    oracles.close(score(1000, 990), score(10, 0), 1e-3)
    assert float((score(1000, 990) - score(1000, 1010)).abs().max()) > 1e-2, "the sense of rotation matters"


def test_bfloat16_heads_are_turned_with_tables_rounded_to_bfloat16() -> None:
    x, frequencies = heads(64, torch.bfloat16), rotary_frequencies(64, 1e7)
    cos, sin = rotary_tables(POSITIONS, frequencies)
    turned = apply_rotary(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    rounded = torch.complex(cos.bfloat16().double(), sin.bfloat16().double())[..., None, :]
    exact = torch.complex(*oracles.double(x[..., :32], x[..., 32:])) * rounded
    oracles.close(turned, torch.cat((exact.real, exact.imag), dim=-1), 2.0**-6)


def test_the_drafters_tables_are_those_of_transformers_qwen3() -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = Qwen3Config(hidden_size=96, num_attention_heads=3, num_key_value_heads=3, head_dim=32)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e7}
    x = heads(32)
    cos, sin = Qwen3RotaryEmbedding(config)(x, POSITIONS)
    theirs, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    ours = apply_rotary(x, *rotary_tables(POSITIONS, rotary_frequencies(32, 1e7)))
    oracles.close(ours, theirs.transpose(1, 2), 1e-6)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("factor", "original", "fast", "slow"), [(4.0, 32_768, 32, 1), (64.0, 2_048, 8, 2)])
@pytest.mark.parametrize(("dim", "theta"), [(128, 1e7), (32, 1e4)])
def test_yarn_is_transformers_yarn(
    dim: int, theta: float, factor: float, original: int, fast: float, slow: float, truncate: bool
) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3Config(
        hidden_size=dim, num_attention_heads=1, head_dim=dim, max_position_embeddings=int(original * factor)
    )
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": truncate,
    }
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = yarn_frequencies(dim, theta, factor, original, fast, slow, truncate)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
    plain = rotary_frequencies(dim, theta)
    assert not torch.equal(ours, plain) and not torch.equal(ours, plain / factor)
