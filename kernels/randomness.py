"""Counter-based random numbers: Philox4x32-10, keyed by (seed, position, purpose, sub), never by batch row.

    key     = seed (64 bits)
    counter = (token >> 2, position, purpose, sub)         four 32-bit words
    r32     = word (token & 3) of the output

so that every (seed, position, purpose, sub, token) has a number of its own, whichever lane, batch, replica or device
draws it. `accept` and `proposal` draw one uniform of 24 bits (token 0). `target` and `correction` are exponential
races (`kernels/race.py`), which need a number per token (decision 13):

    u_v = min((r32 + 0.5) / 2^32, 1 - 2^-24) in FP32        E_v = -log1p(-u_v)

Position is the scalar cache ordinal of the column that predicts: the token at t is drawn under t - 1.

The torch functions draw for whole tensors. `uniform_at` and `exponential_at` are the same numbers inside a Triton
kernel: words and uniforms are equal bit for bit, the logarithm to a few units of its last place.

Source: decision 13; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox and its constants).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROPOSAL, ACCEPT, TARGET, CORRECTION = 0, 1, 2, 3

_MASK32 = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def _multiply_high_low(constant: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of `constant * x`, both factors below 2^32. int64 wraps around, and has all 64 bits."""
    product = constant * x
    return (product >> 32) & _MASK32, product & _MASK32


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10. Four counter words and two key words, int64 in [0, 2^32), broadcastable -> four output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_high_low(_MULTIPLY[0], c0)
        high1, low1 = _multiply_high_low(_MULTIPLY[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def _key(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two key words of `seeds` (int64, the two's complement of an unsigned 64-bit seed)."""
    return seeds & _MASK32, (seeds >> 32) & _MASK32


def signed_seed(seed: int) -> int:
    """An unsigned 64-bit seed as the int64 that a tensor holds. Larger or negative seeds are reduced mod 2^64."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def uniform(seeds: torch.Tensor, positions: torch.Tensor, purpose: int, sub: torch.Tensor) -> torch.Tensor:
    """One uniform in [0, 1) of 24 bits a row. `seeds`, `positions`, `sub` int64 [...] -> FP32 [...]."""
    zeros = torch.zeros_like(positions)
    words = philox((zeros, positions & _MASK32, zeros + purpose, sub & _MASK32), _key(seeds))
    return (words[0] >> 8).float() * 2.0**-24


def exponential(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: int, sub: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """The race's noise E_v. All arguments int64 and broadcastable -> FP32 of the broadcast shape, positive."""
    zeros = torch.zeros_like(tokens)
    counter = (tokens >> 2, zeros + (positions & _MASK32), zeros + purpose, zeros + (sub & _MASK32))
    words = torch.stack(torch.broadcast_tensors(*philox(counter, _key(seeds))))
    lane = (tokens & 3).expand(words.shape[1:])
    return _noise(words.gather(0, lane[None])[0])


def exponential_rows(
    seeds: torch.Tensor, positions: torch.Tensor, purpose: int, sub: torch.Tensor, count: int
) -> torch.Tensor:
    """The noise of all tokens below `count`, four of one output. `seeds`, `positions`, `sub` int64 [R] -> FP32 [R,
    count]."""
    block = torch.arange(-(-count // 4), device=seeds.device)[None]
    counter = (block, positions[:, None] & _MASK32, torch.full_like(block[:, :1], purpose), sub[:, None] & _MASK32)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, _key(seeds[:, None]))), dim=-1)
    return _noise(words.flatten(-2)[:, :count])


def _noise(r32: torch.Tensor) -> torch.Tensor:
    u = ((r32.float() + 0.5) * 2.0**-32).clamp(max=_LARGEST_UNIFORM)
    return -torch.log1p(-u)


# ------------------------------------------------------------------------------------------------ inside kernels


@triton.jit
def words_at(seed, block, position, purpose, sub):
    """The four output words, uint32. `seed`, `block` (token >> 2), `position` and `sub` are int64 of one shape."""
    return tl.philox(
        seed, block.to(tl.uint32), position.to(tl.uint32), (block * 0 + purpose).to(tl.uint32), sub.to(tl.uint32)
    )


@triton.jit
def uniform_at(seed, position, purpose: tl.constexpr, sub):
    """`uniform` for int64 tensors or scalars of one shape -> FP32."""
    word, _, _, _ = words_at(seed, position * 0, position, purpose, sub)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def noise_of(word):
    """The race's noise of a uint32 word -> FP32, positive."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    u = tl.minimum(u, 0.999999940395355224609375)  # 1 - 2^-24
    # Kahan's log1p(-u): the quotient takes out the rounding of 1 - u, which is all there is of a small u
    kept = 1.0 - u
    lost = tl.where(kept == 1.0, -1.0, kept - 1.0)
    return tl.where(kept == 1.0, u, tl.log(kept) * tl.div_rn(u, lost))


@triton.jit
def exponential_at(seed, position, purpose: tl.constexpr, sub, token):
    """`exponential` for int64 tensors of one shape -> FP32, positive."""
    word0, word1, word2, word3 = words_at(seed, token >> 2, position, purpose, sub)
    lane = token & 3
    return noise_of(tl.where(lane < 2, tl.where(lane == 0, word0, word1), tl.where(lane == 2, word2, word3)))
