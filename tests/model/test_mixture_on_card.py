"""A mixture's verification and its slices of a prompt on a card: captured and replayed, they are what they are eagerly,
and ask the card for nothing. Run with `-m gpu`."""

from __future__ import annotations

import zlib

import pytest
import torch

from model.config import MoeConfig, RotaryConfig, TargetConfig
from model.target import Columns, Forward, Target, TargetState

pytestmark = pytest.mark.gpu

CONFIG = TargetConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=0,
    num_layers=4,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    rotary=RotaryConfig(theta=1e6, dim=32, sections=None, interleaved=False, yarn=None),
    gdn_key_heads=2,
    gdn_value_heads=4,
    gdn_key_dim=64,
    gdn_value_dim=64,
    conv_kernel=4,
    max_positions=1024,
    tie_embeddings=False,
    eos_ids=(),
    moe=MoeConfig(num_experts=24, experts_per_token=3, intermediate_size=96, shared_intermediate_size=160),
)
ROWS, WIDTH, PAGES = 3, 8, 2
EXTENTS = torch.tensor([WIDTH, 3, 1])
LIVE = torch.arange(WIDTH) < EXTENTS[:, None]


class Normal:
    """A source of random tensors of every name, the same ones in whatever order they are read."""

    def __contains__(self, name: str) -> bool:
        return True

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        pass

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        size = 0.1 if "norm" in name else destination.shape[-1] ** -0.5
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        destination.copy_(torch.randn(destination.shape, generator=generator) * size)


def target_on(device: str, dtype: torch.dtype) -> tuple[Target, TargetState]:
    """With empty state."""
    target = Target.load(Normal(), CONFIG, CONFIG.vocab_size, torch.device(device), dtype)
    pages = torch.zeros(ROWS * PAGES, 1, 64, 2, 64, dtype=dtype, device=device)
    states = torch.zeros(ROWS, 3, 4, 64, 64, device=device)
    histories = torch.zeros(ROWS, 3, CONFIG.conv_channels, 3, dtype=dtype, device=device)
    return target, TargetState(pages, pages.clone(), states, histories)


def columns_on(device: str, seed: int) -> Columns:
    ids = torch.randint(0, CONFIG.vocab_size, (ROWS, WIDTH), generator=torch.Generator().manual_seed(seed))
    start = torch.zeros(ROWS, dtype=torch.int64, device=device)
    table = torch.arange(ROWS * PAGES, device=device).view(ROWS, PAGES)
    return Columns(ids.to(device), start, EXTENTS.to(device), table, torch.arange(ROWS, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replayed_verification_has_the_bits_of_an_eager_one_though_other_experts_are_chosen(dtype):
    target, state = target_on("cuda", dtype)
    columns = columns_on("cuda", 0)

    def verify() -> Forward:
        return target.verify(columns, state, (1,))

    with torch.no_grad():
        verify()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = verify()
        for seed in (1, 2):
            columns.token_ids.copy_(columns_on("cuda", seed).token_ids)
            graph.replay()
            replayed = captured.hidden.cpu()
            torch.cuda.set_sync_debug_mode("error")
            try:
                eager = verify()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(replayed[LIVE], eager.hidden.cpu()[LIVE]) and bool(replayed[LIVE].isfinite().all())


@pytest.mark.parametrize("width", [64, 192])  # products of our own, and of the library
def test_a_replayed_slice_of_a_prompt_leaves_the_bits_of_an_eager_one(width):
    """With padding behind its tokens, in memory where another slice was."""
    target, state = target_on("cuda", torch.bfloat16)
    planes = (state.keys, state.values, state.recurrent, state.history)
    ids, start = torch.zeros(1, width, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64).cuda()
    live = width - 5
    columns = Columns(ids, start, start + live, torch.arange(4, device="cuda")[None], start + 1)

    def prefill() -> Forward:
        return target.prefill(columns, state, (1,))

    def left(forward: Forward) -> list[torch.Tensor]:
        assert forward.features is not None
        return [x.clone() for x in (forward.hidden[0, :live], forward.features[0, :live], *planes)]

    with torch.no_grad():
        prefill()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = prefill()
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            ids.copy_(torch.randint(0, CONFIG.vocab_size, ids.shape, generator=generator))
            for plane in planes:
                plane.zero_()
            graph.replay()
            replayed = left(captured)
            for plane in planes:
                plane.zero_()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                forward = prefill()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            eager = left(forward)
            assert all(torch.equal(one, other) for one, other in zip(replayed, eager, strict=True))
            assert bool(replayed[0].isfinite().all()) and bool((replayed[4][1] != 0).any())


def test_a_card_verifies_a_mixture_as_a_cpu_does():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    hidden = {}
    with torch.no_grad():
        for device in ("cpu", "cuda"):
            target, state = target_on(device, torch.float32)
            hidden[device] = target.verify(columns_on(device, 5), state).hidden.cpu()
    torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(hidden["cuda"][LIVE], hidden["cpu"][LIVE], rtol=1e-3, atol=1e-3)
