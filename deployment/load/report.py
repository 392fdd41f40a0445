"""What a load's clients saw, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deployment.load.turns import COLD, TurnSeen


@dataclass(frozen=True)
class Spread:
    """Of so many values; None: there was none."""

    count: int
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls(0)
        return cls(len(ordered), *(percentile(ordered, part) for part in (0.5, 0.95, 0.99)))


@dataclass(frozen=True)
class Report:
    """`seconds`: of the whole load. Times in seconds: to the first text of turns for which nothing was found (`cold`)
    and of the others (`warm`), and between two texts. `acceptance_length`: published tokens after the first, by rounds;
    None without a round. `refused`: turns, by the error's code."""

    turns: int
    seconds: float
    tokens: int
    tokens_per_second: float
    cold: Spread
    warm: Spread
    gaps: Spread
    acceptance_length: float | None
    prompt_tokens: int
    reused_tokens: int
    refused: dict[str, int]


def report(seen: Sequence[TurnSeen], seconds: float) -> Report:
    whole = [one for one in seen if one.refused is None]
    tokens, rounds = sum(one.tokens for one in whole), sum(len(one.rounds) for one in whole)
    return Report(
        turns=len(seen),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / max(seconds, 1e-9),
        cold=Spread.of(_firsts(whole, cold=True)),
        warm=Spread.of(_firsts(whole, cold=False)),
        gaps=Spread.of(gap for one in whole for gap in one.gaps),
        acceptance_length=(tokens - sum(one.tokens > 0 for one in whole)) / rounds if rounds else None,
        prompt_tokens=sum(one.prompt_tokens for one in whole),
        reused_tokens=sum(one.reused for one in whole),
        refused=dict(Counter(one.refused for one in seen if one.refused is not None)),
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """The first of these values that has so large a part of them before it, or the last one."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _firsts(turns: Iterable[TurnSeen], cold: bool) -> list[float]:
    return [one.first for one in turns if one.first is not None and (one.hit == COLD) == cold]
