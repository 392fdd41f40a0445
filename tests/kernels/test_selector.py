"""DFlash2's conditional path against a naive walk in FP64, and its draws against the law that it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl

from kernels import selector
from kernels.randomness import PROPOSAL
from kernels.selector import draw_rank, select_path_reference, select_path_triton
from kernels.shortlist import shortlist
from tests.kernels import oracles
from tests.kernels.devices import DEVICE, poison_new_memory

INF = float("inf")
VOCABULARY = 60

Select = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def on_device(*arguments: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    drafts, law = select_path_triton(*(None if x is None else x.contiguous().to(DEVICE) for x in arguments))  # type: ignore[arg-type]
    return drafts.cpu(), law.cpu()


@pytest.fixture(params=[select_path_reference, on_device], ids=["reference", "kernel"])
def select(request: pytest.FixtureRequest) -> Select:
    return request.param


@dataclass(frozen=True)
class Walk:
    """The arguments of `select_path`, in its order."""

    candidates: torch.Tensor
    unary: torch.Tensor
    hidden: torch.Tensor
    predecessor: torch.Tensor
    successor: torch.Tensor
    anchors: torch.Tensor
    frontier: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    sub: torch.Tensor
    reproducible: torch.Tensor | None = None

    def select(self, select: Select = select_path_reference) -> tuple[torch.Tensor, torch.Tensor]:
        return select(*vars(self).values())

    def expand(self, rows: int) -> Walk:
        """Row 0 many times, each copy with a seed of its own."""
        shared = {
            name: getattr(self, name)[:1].expand(rows, *getattr(self, name).shape[1:])
            for name in ("candidates", "unary", "hidden", "anchors", "frontier", "temperature", "sub")
        }
        return replace(self, **shared, seeds=torch.arange(rows))

    def oracle(self, row: int) -> tuple[list[int], torch.Tensor, float]:
        return oracles.walk(
            self.candidates[row],
            self.unary[row],
            self.hidden[row],
            self.predecessor,
            self.successor,
            int(self.anchors[row]),
            float(self.temperature[row]),
            [
                oracles.uniform(int(self.seeds[row]), int(self.frontier[row]) + i, PROPOSAL, int(self.sub[row]))
                for i in range(self.candidates.shape[1])
            ],
        )


def random_walk(batch: int, columns: int, choices: int, temperature: float, seed: int = 0, rank: int = 8) -> Walk:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    scores = normal(batch * columns, VOCABULARY) * 2
    unary, candidates = shortlist(scores, choices)
    return Walk(
        candidates.view(batch, columns, choices),
        unary.view(batch, columns, choices),
        normal(batch, columns, rank),
        normal(VOCABULARY, rank),
        normal(VOCABULARY, rank),
        torch.randint(0, VOCABULARY, (batch,), generator=generator),
        torch.randint(0, 5000, (batch,), generator=generator),
        torch.full((batch,), temperature),
        torch.randint(-(2**62), 2**62, (batch,), generator=generator),
        torch.arange(batch) % 3,
    )


@pytest.mark.parametrize("temperature", [0.0, -1.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize(("columns", "choices"), [(1, 16), (7, 16), (15, 4), (3, 1)])
def test_a_path_and_its_law_are_those_of_the_naive_walk(temperature: float, columns: int, choices: int) -> None:
    walk = random_walk(8, columns, choices, temperature, seed=columns)
    drafts, law = walk.select()
    assert drafts.shape == (8, columns) and law.shape == (8, columns, choices) and law.dtype == torch.float32
    for row in range(8):
        expected, expected_law, margin = walk.oracle(row)
        assert margin > 1e-5, "a near tie: choose other inputs"
        assert drafts[row].tolist() == expected
        oracles.close(law[row], expected_law, 1e-5)


def test_greedy_and_drawing_rows_share_a_batch(select: Select) -> None:
    walk = random_walk(6, 5, 16, 0.9, seed=3)
    walk = replace(walk, temperature=torch.tensor([0.0, 0.9, 0.9, -2.0, 0.4, 0.0]))
    drafts, law = walk.select(select)
    for row in range(6):
        expected, expected_law, margin = walk.oracle(row)
        assert margin > 1e-5
        assert drafts[row].tolist() == expected
        oracles.close(law[row], expected_law, 1e-5)


def test_each_column_depends_on_the_token_that_was_picked_before_it(select: Select) -> None:
    """With codebooks that only let token t + 1 follow token t, the path counts upwards from the anchor."""
    identity = torch.eye(VOCABULARY)
    following = identity.roll(1, 0)  # row t + 1 is the unit vector of t
    walk = random_walk(1, 6, 16, 0.0)
    walk = replace(
        walk,
        candidates=torch.arange(10, 26).flip(0).expand(1, 6, -1).contiguous(),
        unary=torch.zeros(1, 6, 16),
        hidden=torch.ones(1, 6, VOCABULARY),
        predecessor=identity,
        successor=following,
        anchors=torch.tensor([11]),
    )
    assert walk.select(select)[0].tolist() == [[12, 13, 14, 15, 16, 17]]


@pytest.mark.parametrize("temperature", [0.0, -0.5])
def test_an_exact_tie_goes_to_the_lowest_rank_when_greedy(select: Select, temperature: float) -> None:
    walk = random_walk(2, 3, 8, temperature)
    walk = replace(walk, unary=torch.zeros(2, 3, 8), hidden=torch.zeros(2, 3, 8))
    drafts, law = walk.select(select)
    assert torch.equal(drafts, walk.candidates[:, :, 0])
    assert bool((law[:, :, 0] == 1).all()) and float(law.sum()) == 6.0


def test_rows_do_not_influence_each_other(select: Select) -> None:
    walk = random_walk(5, 4, 16, 1.0, seed=4)
    drafts, law = walk.select(select)
    order = torch.tensor([3, 0, 4, 2, 1])
    per_row = {
        name: getattr(walk, name)[order]
        for name in ("candidates", "unary", "hidden", "anchors", "frontier", "temperature", "seeds", "sub")
    }
    shuffled, shuffled_law = replace(walk, **per_row).select(select)
    assert torch.equal(shuffled, drafts[order])
    assert torch.equal(shuffled_law, law[order])


def test_paths_follow_the_law_that_is_returned() -> None:
    """Joint counts of two columns: q_0 of the first choice times q_1 of the second, given the first."""
    n, choices = 30_000, 5
    walk = random_walk(1, 2, choices, 1.3, seed=5).expand(n)
    drafts, law = walk.select()
    picked = (walk.candidates == drafts[..., None]).to(torch.int64).argmax(-1)
    joint = torch.zeros(choices, choices, dtype=torch.float64)
    for first in range(choices):
        rows = picked[:, 0] == first
        conditional = law[rows, 1]
        assert torch.equal(conditional, conditional[:1].expand_as(conditional)), "the law given the past is one law"
        joint[first] = law[0, 0, first].double() * conditional[0].double()
    observed = torch.bincount(picked[:, 0] * choices + picked[:, 1], minlength=choices**2)
    assert oracles.chi_square(observed, joint) > 1e-4
    independent = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    assert oracles.chi_square(observed, independent) < 1e-6, "the walk is conditional, and the test would see if not"


def test_a_candidate_of_probability_zero_is_never_drawn() -> None:
    n = 4096
    walk = random_walk(1, 3, 6, 1.0, seed=6)
    unary = walk.unary.clone()
    unary[:, :, [0, 3, 5]] = -INF
    drafts, law = replace(walk, unary=unary).expand(n).select()
    forbidden = walk.candidates[0, :, [0, 3, 5]]
    assert not bool((drafts[:, :, None] == forbidden).any())
    assert float(law[:, :, [0, 3, 5]].sum()) == 0.0


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-24])
def test_the_ends_of_the_unit_interval_meet_possible_ranks_only(u: float) -> None:
    laws = torch.tensor(
        [
            [0.0, 0.0, 1.0, 0.0],
            [0.0, 0.5, 0.5, 0.0],
            [1.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 1.0],
            [1e-30, 1.0, 1e-30, 0.0],  # the cumulative sum is 1 from the second rank on
        ]
    )
    ranks = draw_rank(laws, torch.full((5,), u))
    assert bool((laws.gather(-1, ranks[:, None]) > 0).all())


def test_a_boundary_belongs_to_the_rank_above_it() -> None:
    law = torch.tensor([[0.25, 0.25, 0.5]]).expand(4, -1)
    u = torch.tensor([0.25 - 2.0**-24, 0.25, 0.5 - 2.0**-24, 0.5])
    assert draw_rank(law, u).tolist() == [0, 1, 1, 2]


def test_bfloat16_codebooks_are_multiplied_in_fp32(select: Select) -> None:
    walk = random_walk(4, 5, 16, 0.8, seed=7, rank=64)
    walk = replace(
        walk,
        hidden=walk.hidden.bfloat16(),
        predecessor=walk.predecessor.bfloat16(),
        successor=walk.successor.bfloat16(),
    )
    drafts, law = walk.select(select)
    for row in range(4):
        expected, expected_law, margin = walk.oracle(row)
        assert margin > 1e-5
        assert drafts[row].tolist() == expected
        oracles.close(law[row], expected_law, 1e-5)


def test_a_tiny_temperature_is_as_good_as_greedy(select: Select) -> None:
    one = torch.ones(1, dtype=torch.int64)
    walk = Walk(
        candidates=torch.tensor([[[4, 5, 6]]]),
        unary=torch.tensor([[[60.0, 40.0, 20.0]]]),
        hidden=torch.zeros(1, 1, 2),
        predecessor=torch.zeros(8, 2),
        successor=torch.zeros(8, 2),
        anchors=one,
        frontier=one,
        temperature=torch.tensor([1e-40]),
        seeds=one,
        sub=one,
    )
    drafts, law = walk.select(select)
    assert law.tolist() == [[[1.0, 0.0, 0.0]]] and drafts.tolist() == [[4]]


# ------------------------------------------------------------------------------------------------ kernel


@pytest.mark.parametrize(("columns", "choices", "rank"), [(3, 16, 24), (15, 3, 8), (2, 5, 40), (1, 16, 16)])
def test_reproducible_rows_race_in_the_kernel_as_in_the_reference(columns: int, choices: int, rank: int) -> None:
    walk = random_walk(6, columns, choices, 0.8, seed=11, rank=rank)
    racing = torch.tensor([True, True, False, False, True, False])
    walk = replace(
        walk,
        temperature=torch.tensor([0.8, 0.0, 1.5, 3.0, 2.0, 0.5]),
        reproducible=racing,
        seeds=torch.randint(-(2**63), 2**63 - 1, (6,), generator=torch.Generator().manual_seed(1)),
    )
    drafts, law = walk.select(select_path_reference)
    kernel_drafts, kernel_law = walk.select(on_device)
    assert torch.equal(kernel_drafts, drafts)
    oracles.close(kernel_law, law, 1e-5)
    unraced, _ = replace(walk, reproducible=None).select(on_device)
    changed = (unraced != drafts).any(-1)
    assert not bool(changed[~racing].any()), "only the rows that ask for it race"
    if columns > 2:
        assert bool(changed[racing & (walk.temperature > 0)].any())


def test_the_kernel_never_draws_a_candidate_of_probability_zero() -> None:
    walk = random_walk(1, 3, 6, 1.0, seed=6)
    unary = walk.unary.clone()
    unary[:, :, [0, 3, 5]] = -INF
    drafts, law = replace(walk, unary=unary).expand(16).select(on_device)
    forbidden = walk.candidates[0, :, [0, 3, 5]]
    assert not bool((drafts[:, :, None] == forbidden).any())
    assert float(law[:, :, [0, 3, 5]].sum()) == 0.0


@triton.jit
def draw_one_row(law_ptr, u_ptr, rank_ptr, N: tl.constexpr, C: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, C)
    law = tl.load(law_ptr + row * N + c, mask=c < N, other=0.0)
    one = tl.arange(0, 1)
    tl.store(rank_ptr + row + one, selector._drawn_rank(law[None, :], tl.load(u_ptr + row), c, C))


def test_the_kernel_draws_the_rank_that_the_reference_draws_at_every_boundary() -> None:
    laws = [[0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    laws += [[1e-30, 1.0, 1e-30, 0.0], [0.25, 0.25, 0.5, 0.0], [0.2, 0.2, 0.2, 0.2]]
    points = [0.0, 0.25 - 2.0**-24, 0.25, 0.5 - 2.0**-24, 0.5, 1.0 - 2.0**-24]
    law = torch.tensor([x for x in laws for _ in points])
    u = torch.tensor(points * len(laws))
    ranks = torch.full((len(u),), -1, dtype=torch.int64, device=DEVICE)
    draw_one_row[(len(u),)](law.to(DEVICE), u.to(DEVICE), ranks, N=4, C=16)  # pyright: ignore
    assert torch.equal(ranks.cpu(), draw_rank(law, u))


def test_a_kernel_writes_every_number_and_reads_no_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch comes poisoned, and so are codebook rows that no candidate names."""
    walk = random_walk(3, 4, 5, 0.9, seed=12, rank=12)
    expected, expected_law = walk.select(select_path_reference)
    named = torch.cat((walk.candidates.flatten(), walk.anchors))
    dead = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, named, False)
    dead[0] = False  # the padding of a list of 5 reads row 0
    poisoned = replace(
        walk,
        predecessor=walk.predecessor.masked_fill(dead[:, None], torch.nan),
        successor=walk.successor.masked_fill(dead[:, None], torch.nan),
    )
    poison_new_memory(monkeypatch)
    drafts, law = poisoned.select(on_device)
    assert torch.equal(drafts, expected)
    oracles.close(law, expected_law, 1e-5)


def test_the_kernel_refuses_what_it_would_read_wrongly() -> None:
    walk = random_walk(2, 3, 16, 1.0)
    with pytest.raises(ValueError, match=r"unary: shape \(2, 3, 15\), must be \(2, 3, 16\)"):
        replace(walk, unary=walk.unary[..., :15].contiguous()).select(on_device)
    with pytest.raises(ValueError, match=r"seeds: torch.int32, must be torch.int64"):
        replace(walk, seeds=walk.seeds.int()).select(on_device)
