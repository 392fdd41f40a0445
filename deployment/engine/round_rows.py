"""The numbers of a round's rows, from the lanes that are in them."""

from __future__ import annotations

from collections.abc import Sequence

from deployment.engine.controls import masked_rows
from deployment.engine.histories import Histories
from deployment.engine.ingress import Row
from deployment.engine.lane import Lane
from kernels.randomness import signed_seed


class RowMaker:
    """`vocabulary`: public rows. `dead_slot`, `lanes`: where rows stand that no lane is in. What a turn asks for never
    changes, so that it is looked up once for each turn that comes into a lane."""

    def __init__(self, histories: Histories, vocabulary: int, dead_slot: int, lanes: int) -> None:
        self._histories = histories
        self._vocabulary = vocabulary
        self._padding = Row(
            slot=dead_slot,
            lane=lanes,
            history=lanes,
            frontier=0,
            anchor=0,
            extent=0,
            live=0,
            columns=0,
            context=0,
            pending=0,
            shift=0,
            mask=-1,
            told=0,
            top_k=0,
            seed=0,
            sub=0,
            reproducible=0,
            processed=0,
        )
        self._asked: list[tuple[Lane | None, tuple[float, ...]]] = [(None, ())] * lanes

    def rows(
        self, lanes: Sequence[Lane], extents: Sequence[int], block: int | None, count: int, back: int = 0
    ) -> list[Row]:
        """`count` rows, the lanes' first. `extents`: P of each lane. `block`: columns that the drafter computes of
        every row; None: P + 1. `back`: how far before its frontier each lane's column 0 stands."""
        masks = {row: number for number, row in enumerate(masked_rows(lanes))}
        told = [row for row, lane in enumerate(lanes) if lane.submit.sampling.logprobs is not None]
        told += [0] * (count - len(told))
        rows: list[Row] = []
        for index, (lane, extent) in enumerate(zip(lanes, extents, strict=True)):
            memory, frontier = lane.memory, lane.frontier - back
            rows.append(
                Row._make(  # in the order of its fields
                    (
                        memory.slot,
                        lane.row,
                        self._histories.row(lane),
                        frontier,
                        lane.ledger[frontier],
                        extent,
                        extent + 1,
                        extent + 1 if block is None else block,
                        memory.context_frontier,
                        lane.pending,
                        lane.rope_delta,
                        masks.get(index, -1),
                        told[index],
                        *self._asked_by(lane),
                    )
                )
            )
        return rows + [self._padding._replace(told=told[index]) for index in range(len(lanes), count)]

    def _asked_by(self, lane: Lane) -> tuple[float, ...]:
        """The last numbers of a lane's row, in their order."""
        known, asked = self._asked[lane.row]
        if known is lane:
            return asked
        controls = lane.submit.sampling
        asked = (
            min(controls.top_k, self._vocabulary),
            signed_seed(controls.seed),
            controls.sub,
            controls.reproducible,
            controls.logprobs_mode == "processed_logprobs",
            controls.temperature,
            controls.top_p,
            controls.min_p,
            controls.repetition_penalty,
            controls.presence_penalty,
            controls.frequency_penalty,
        )
        self._asked[lane.row] = lane, asked
        return asked
