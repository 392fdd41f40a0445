"""Random numbers: Philox's published vectors, separate keys that are never a batch row."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels import randomness
from kernels.randomness import (
    ACCEPT,
    CORRECTION,
    PROPOSAL,
    TARGET,
    exponential,
    exponential_at,
    philox,
    signed_seed,
    uniform,
    uniform_at,
)
from tests.kernels import oracles
from tests.kernels.devices import DEVICE

# Random123's known answers for philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: str, key: str, output: str) -> None:
    got = philox(tuple(map(rows, words(counter))), tuple(map(rows, words(key))))  # type: ignore[arg-type]
    assert tuple(int(word) for word in got) == words(output)
    assert oracles.philox(words(counter), words(key)) == words(output)


def test_a_uniform_is_the_upper_24_bits_of_its_key() -> None:
    for seed, position, purpose, sub in [(0, 0, PROPOSAL, 0), (7, 4095, ACCEPT, 3), (2**64 - 1, 2**31, ACCEPT, 1)]:
        got = uniform(rows(signed_seed(seed)), rows(position), purpose, rows(sub))
        assert got.dtype == torch.float32
        assert float(got) == oracles.uniform(seed, position, purpose, sub)


def test_uniforms_fill_zero_to_one_evenly_and_never_reach_one() -> None:
    n = 1 << 16
    u = uniform(rows(5).expand(n), torch.arange(n), ACCEPT, rows(0).expand(n))
    assert float(u.min()) >= 0.0 and float(u.max()) < 1.0
    assert bool((u * 2**24 == (u * 2**24).round()).all())
    assert oracles.chi_square(torch.histc(u, 64, 0.0, 1.0), torch.full((64,), 1 / 64)) > 1e-4


def test_the_largest_word_stays_below_one_and_the_smallest_noise_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def extreme(word: int):
        monkeypatch.setattr(randomness, "philox", lambda counter, key: (torch.full_like(counter[0], word),) * 4)

    zero = rows(0)
    extreme(0xFFFFFFFF)
    assert float(uniform(zero, zero, ACCEPT, zero)) == 1.0 - 2.0**-24
    largest = exponential(zero, zero, TARGET, zero, zero)
    # -log1p(-(1 - 2^-24)) = 24 log 2: clamped, for FP32 rounds (2^32 - 0.5) / 2^32 to 1
    torch.testing.assert_close(largest, torch.tensor([24 * 0.6931471805599453]), rtol=1e-6, atol=0)
    extreme(0)
    assert float(uniform(zero, zero, ACCEPT, zero)) == 0.0
    smallest = exponential(zero, zero, TARGET, zero, zero)
    torch.testing.assert_close(smallest, torch.tensor([2.0**-33]), rtol=1e-6, atol=0)


def test_noise_is_that_of_its_key_for_each_token() -> None:
    tokens = rows(0, 1, 2, 3, 4, 5, 8191, 248_076)
    for seed, position, purpose, sub in [(1, 0, TARGET, 0), (2**63 + 12345, 70_000, CORRECTION, 2)]:
        got = exponential(rows(signed_seed(seed)), rows(position), purpose, rows(sub), tokens)
        expected = [oracles.noise(seed, position, purpose, sub, int(token)) for token in tokens]
        torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def test_every_part_of_a_key_gives_other_numbers() -> None:
    """Also the upper half of the seed, and tokens that share a counter."""

    def at(seed: int = 11, position: int = 22, purpose: int = TARGET, sub: int = 0, token: int = 40) -> float:
        noise = exponential(rows(signed_seed(seed)), rows(position), purpose, rows(sub), rows(token))
        return float(noise)

    numbers = [at(), at(seed=12), at(seed=11 + 2**32), at(seed=11 + 2**63), at(position=23), at(sub=1), at(position=0)]
    numbers += [at(purpose=purpose) for purpose in (PROPOSAL, ACCEPT, CORRECTION)]
    numbers += [at(token=token) for token in (41, 42, 43, 44)]
    assert len(set(numbers)) == len(numbers)


def test_neighbouring_keys_are_not_correlated() -> None:
    n = 40_000
    zero, positions = rows(0).expand(n), torch.arange(n)
    base = uniform(zero, positions, ACCEPT, zero)
    others = {
        "seed": uniform(zero + 1, positions, ACCEPT, zero),
        "upper seed": uniform(zero + 2**32, positions, ACCEPT, zero),
        "position": uniform(zero, positions + 1, ACCEPT, zero),
        "purpose": uniform(zero, positions, PROPOSAL, zero),
        "sub": uniform(zero, positions, ACCEPT, zero + 1),
    }
    for name, other in others.items():
        correlation = float(torch.corrcoef(torch.stack((base, other)))[0, 1])
        assert abs(correlation) < 5 / n**0.5, name


def test_seeds_are_unsigned_and_reduced_modulo_two_to_the_64() -> None:
    assert [signed_seed(s) for s in (0, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5, -1)] == [
        0,
        2**63 - 1,
        -(2**63),
        -1,
        5,
        -1,
    ]


# ------------------------------------------------------------------------------------------------ inside kernels


@triton.jit
def draw_inside_a_kernel(seed_ptr, position_ptr, sub_ptr, token_ptr, u_ptr, e_ptr, PURPOSE: tl.constexpr):
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    seed, position, sub = tl.load(seed_ptr + i), tl.load(position_ptr + i), tl.load(sub_ptr + i)
    tl.store(u_ptr + i, uniform_at(seed, position, PURPOSE, sub))
    tl.store(e_ptr + i, exponential_at(seed, position, PURPOSE, sub, tl.load(token_ptr + i)))


@pytest.mark.parametrize("purpose", [PROPOSAL, ACCEPT, TARGET, CORRECTION])
def test_a_kernel_draws_the_numbers_of_the_torch_functions(purpose: int) -> None:
    generator = torch.Generator().manual_seed(purpose)

    def keys(extremes: list[int], bound: int) -> torch.Tensor:
        drawn = torch.randint(0, bound, (256 - len(extremes),), generator=generator)
        return torch.cat((torch.tensor(extremes), drawn))[torch.randperm(256, generator=generator)].to(DEVICE)

    seeds = keys([signed_seed(s) for s in (0, 1, 2**32, 2**63, 2**64 - 1, 2**63 - 1, -(2**40))], 2**62)
    positions = keys([0, 1, 2**31, 2**32 - 1], 2**20)
    sub = keys([0, 1, 2**32 - 1], 64)
    tokens = keys([0, 1, 2, 3, 4, 2**18, 2**32 - 1], 2**18)
    u, noise = torch.full((2, 256), torch.nan, device=DEVICE)
    draw_inside_a_kernel[(4,)](seeds, positions, sub, tokens, u, noise, PURPOSE=purpose)  # pyright: ignore
    assert torch.equal(u, uniform(seeds, positions, purpose, sub))
    torch.testing.assert_close(noise, exponential(seeds, positions, purpose, sub, tokens), rtol=1e-6, atol=0.0)


@triton.jit
def noise_of_words(word_ptr, out_ptr):
    i = tl.arange(0, 64)
    tl.store(out_ptr + i, randomness.noise_of(tl.load(word_ptr + i).to(tl.uint32)))


def test_the_noise_of_every_size_of_word_is_exact_to_a_few_units() -> None:
    """Where 1 - u rounds away most of a small u, and at both ends."""
    words = torch.tensor([0, 1, 255, *(1 << s for s in range(32)), *((1 << 32) - (1 << s) for s in range(29))])
    out = torch.full((64,), torch.nan, device=DEVICE)
    noise_of_words[(1,)](words.to(DEVICE), out)
    u = ((words.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    torch.testing.assert_close(out.cpu(), (-torch.log1p(-u.double())).float(), rtol=1e-6, atol=0.0)
