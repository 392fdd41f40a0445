"""The numbers of a round's rows, from the lanes that are in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployment.engine.controls import masked_rows
from deployment.engine.histories import Histories
from deployment.engine.ingress import Row
from deployment.engine.lane import Lane
from kernels.randomness import signed_seed


@dataclass(frozen=True)
class RowMaker:
    """`vocabulary`: public rows. `dead_slot`, `dead_lane`: where rows stand that no lane is in."""

    histories: Histories
    vocabulary: int
    dead_slot: int
    dead_lane: int

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
            controls = lane.submit.sampling
            rows.append(
                Row(
                    slot=lane.memory.slot,
                    lane=lane.row,
                    history=self.histories.row(lane),
                    frontier=lane.frontier - back,
                    anchor=lane.ledger[lane.frontier - back],
                    extent=extent,
                    live=extent + 1,
                    columns=extent + 1 if block is None else block,
                    context=lane.memory.context_frontier,
                    pending=lane.pending,
                    mask=masks.get(index, -1),
                    told=told[index],
                    top_k=min(controls.top_k, self.vocabulary),
                    seed=signed_seed(controls.seed),
                    sub=controls.sub,
                    reproducible=controls.reproducible,
                    temperature=controls.temperature,
                    top_p=controls.top_p,
                    min_p=controls.min_p,
                    repetition=controls.repetition_penalty,
                    presence=controls.presence_penalty,
                    frequency=controls.frequency_penalty,
                )
            )
        return rows + [self._padding(told[index]) for index in range(len(lanes), count)]

    def _padding(self, told: int) -> Row:
        """Nothing is verified of it, nothing appended, and what is drafted for it goes nowhere."""
        return Row(
            slot=self.dead_slot,
            lane=self.dead_lane,
            history=self.dead_lane,
            frontier=0,
            anchor=0,
            extent=0,
            live=0,
            columns=0,
            context=0,
            pending=0,
            mask=-1,
            told=told,
            top_k=0,
            seed=0,
            sub=0,
            reproducible=0,
        )
