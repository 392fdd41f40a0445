"""Execution: prefill chunks and decode rounds over the engine's memory. No scheduling, no publication.

    round    append, propose, verify, accept       segments of the device (`deployment/engine/segments.py`)
             while the target verifies: grammar masks on the host
             one copy back: licensed tokens
    commit   the segment of that name, N columns of each row

What a round needs to know of its rows goes to the device in one copy ahead of the segments, what it licensed comes back
in one behind them; in between the host asks for nothing but the drafts of rows that have a grammar.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from deployment.engine.buffers import BufferSizes, RoundBuffers
from deployment.engine.commands import TokenLogprob
from deployment.engine.controls import masked_rows, traits_of, write_masks
from deployment.engine.errors import EngineError
from deployment.engine.grammar import Grammars, Masks
from deployment.engine.graphs import Graphs, Runs, eagerly
from deployment.engine.histories import Histories
from deployment.engine.lane import Lane
from deployment.engine.loading import Models
from deployment.engine.logprobs import prompt_logprobs, scored
from deployment.engine.media_cache import MediaCache
from deployment.engine.placing import item_of
from deployment.engine.round_rows import RowMaker
from deployment.engine.round_shape import GREEDY, SAMPLED, SLICES, RoundShape, Shapes, Traits
from deployment.engine.segments import Segments
from deployment.engine.tally import Laps
from deployment.engine.transfer import on_device
from model.media_positions import media_positions
from model.placeholders import inserted
from model.target import Columns, Inserted
from state.geometry import pages_for
from state.memory import UNSETTLED, StateMemory

logger = logging.getLogger(__name__)

FIRST_TOKEN = RoundShape(rows=1, pending=0, drafts=0, width=1)
"""A round of one column that the target has seen already."""


@dataclass(frozen=True)
class ExecutedRound:
    """What a round licensed: `licensed[i]` are lane i's tokens, `accepted[i]` of them were drafts, of `drafted[i]` that
    were verified; `logprobs[i]` has an entry for each of them if the lane asked. `number`: which round it was; what its
    commit needs lies in the buffers until the next one. `dead_ends`: lanes whose grammar allows nothing after what they
    licensed."""

    lanes: tuple[Lane, ...]
    licensed: tuple[tuple[int, ...], ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    number: int
    shape: RoundShape
    dead_ends: tuple[tuple[Lane, EngineError], ...] = ()


class Executor:
    """Runs models over state. `lanes` is the largest number of lanes a round can have, and `shapes` are what its rounds
    look like; `media_bytes`: of what the tower made, to be kept. `captures`: on a card, segments run as graphs. `laps`
    hears where the time of rounds goes."""

    def __init__(
        self,
        models: Models,
        memory: StateMemory,
        lanes: int,
        shapes: Shapes,
        media_bytes: int,
        captures: bool = True,
        laps: Laps | None = None,
    ) -> None:
        self._models = models
        self._laps = laps or Laps()
        self._memory = memory
        self._device = models.device
        self._media = MediaCache(models.vision.tower.encode, media_bytes) if models.vision is not None else None
        self.grammars = Grammars(models.tokenizer, models.target.public_rows, models.defaults.eos_ids)
        self._graphs = Graphs(models.device) if models.device.type == "cuda" and captures else None
        self._runs: Runs = self._graphs or eagerly
        self._shapes = shapes
        self._lanes = lanes
        self._lay_out()
        self._round = 0

    def _lay_out(self) -> None:
        """Allocates what rounds of these shapes need."""
        models, drafter, vocabulary = self._models, self._models.drafter, self._models.target.public_rows
        sizes = BufferSizes(
            lanes=self._lanes,
            rows=self._shapes.most_rows(self._lanes),
            width=self._shapes.most_width,
            cells=self._shapes.most_cells(self._lanes),
            features=len(models.taps) * models.geometry.hidden_size if drafter is not None else 0,
            candidates=drafter.config.selector_top_k or 0 if drafter is not None else 0,
            pages=pages_for(models.context),
            mask_bytes=self.grammars.mask_bytes,
        )
        self._buffers = RoundBuffers(sizes, models.geometry, self._device)
        self._histories = Histories(self._lanes, vocabulary, self._device)
        self._segments = Segments(models, self._memory, self._buffers, self._histories)
        self._rows = RowMaker(self._histories, vocabulary, self._memory.images.dead, self._lanes)

    # ------------------------------------------------------------------------------------------------ capture

    @torch.no_grad()
    def capture(self) -> None:
        """Captures the segments of all rounds that are to be expected, and says what that took. They run once each,
        over rows of padding. Without graphs there is nothing to do."""
        if self._graphs is None:
            return
        torch.cuda.empty_cache()
        begun, before = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        for shape in self._shapes.expected(self._lanes):
            self._rehearse(shape)
        self._rehearse(FIRST_TOKEN)
        self._rehearse_slices()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # of what ran once before it was captured
        logger.info(
            "%d graphs for up to %d lanes, captured in %.1f s: %.1f MiB for them, %.1f MiB for a round's buffers",
            self._graphs.count,
            self._lanes,
            time.perf_counter() - begun,
            (torch.cuda.memory_reserved(self._device) - before) / (1 << 20),
            self._buffers.size / (1 << 20),
        )

    def _rehearse(self, shape: RoundShape) -> None:
        """A round in which no lane is."""
        self._buffers.ingress.send(self._rows.rows([], [], None, shape.rows))
        self._buffers.counts.place().fill(0)
        self._buffers.counts.send()
        whole = shape is not FIRST_TOKEN
        if whole:
            self._append([], shape)
            self._verify(shape)
            self._commit(shape)
        for wanted in (GREEDY, SAMPLED):
            traits = self._shapes.traits(wanted, shape.rows, self._models.target.public_rows)
            self._propose(shape, traits)
            self._judge(shape, traits)

    def _rehearse_slices(self) -> None:
        """Slices without a token, the longest first."""
        most = self._shapes.slice(min(SLICES[-1], self._models.context))
        for width in (width for width in reversed(SLICES) if most is not None and width <= most):
            self._buffers.prompt.send(self._memory.images.dead, self._lanes, 0, (), width)
            self._prefill(width)

    # ------------------------------------------------------------------------------------------------ prefill

    @torch.no_grad()
    def prefill(self, lane: Lane, end: int) -> tuple[TokenLogprob, ...]:
        """Moves a lane's frontier to `end` by running ledger tokens [F, end); the draft context goes with it. Returns
        what the lane asked to know of its prompt and does not know yet: tokens [scored, end], as far as they are."""
        start, told = lane.frontier, ()
        needs_hidden = lane.submit.sampling.prompt_logprobs is not None
        width = None if lane.spans or needs_hidden else self._shapes.slice(end - start)
        lane.memory.unsettle_image()
        lane.memory.context_frontier = UNSETTLED
        if width is not None:
            self._write_pages([lane])
            self._buffers.prompt.send(lane.memory.slot, lane.row, start, lane.ledger[start:end], width)
            self._prefill(width)
        else:
            hidden = self._prefill_exactly(lane, start, end)
            told = prompt_logprobs(lane, hidden, start, self._models.target.logits)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # how long a slice takes decides how large the next one is
        lane.memory.context_frontier = end
        lane.memory.settle(end)
        return told

    def _prefill(self, width: int) -> None:
        self._runs(("prefill", width), partial(self._segments.prefill, width))

    def _prefill_exactly(self, lane: Lane, start: int, end: int) -> torch.Tensor:
        """Any number of columns, with whatever media stand in them -> hidden [T, H]."""
        slot, first, count = self._int([lane.memory.slot]), self._int([start]), self._int([end - start])
        ids, pages = self._int([lane.ledger[start:end]]), self._int([lane.memory.pages])
        columns = Columns(ids, first, count, pages, slot, *self._shown(lane, start, end))
        drafter = self._models.drafter
        skipped = drafter.first_kept(end - start) if drafter is not None else 0
        hidden = self._segments.advance(columns, self._int([lane.memory.draft_pages]), skipped)
        self._memory.images.hidden[lane.memory.slot] = hidden[-1]
        return hidden

    def _shown(self, lane: Lane, start: int, end: int) -> tuple[torch.Tensor | None, Inserted | None]:
        """Rotary positions and media of the columns [start, end) of a lane, which may begin and end inside an item."""
        if self._media is None or not lane.spans:
            return None, None
        cache, media = self._media, lane.submit.media
        positions = on_device(media_positions(lane.spans, start, end)[None], self._device)
        shown = inserted(lane.spans, start, end, lambda item: cache.embeddings(item_of(media[item].media)))
        return positions, shown

    @torch.no_grad()
    def first_token(self, lane: Lane) -> tuple[int, tuple[TokenLogprob, ...]]:
        """The token after the prompt, chosen from the continuation hidden under position F - 1, and its logprob if the
        lane asked for it. Raises EngineError where the lane's grammar allows none."""
        masks = self.grammars.masks([lane], [()], 1)
        if masks is not None and masks.dead:
            raise masks.dead[0][1]
        shape = FIRST_TOKEN
        traits = self._shapes.traits(traits_of([lane]), 1, self._models.target.public_rows)
        self._round += 1
        self._buffers.ingress.send(self._rows.rows([lane], [0], block=1, count=1, back=1))
        self._buffers.hidden(1, 1).copy_(self._memory.images.hidden[lane.memory.slot])
        self._accept([lane], shape, traits, masks)
        (licensed,), _ = self._verdict(1, shape)
        (logprobs,) = self._told([lane], [licensed], shape, traits)
        return licensed[0], logprobs

    # ------------------------------------------------------------------------------------------------ rounds

    @torch.no_grad()
    def run(self, lanes: Sequence[Lane], meanwhile: Callable[[], None] | None = None) -> ExecutedRound:
        """Append, propose, verify and accept for up to `lanes` decoding lanes. No committed state changes.
        `meanwhile` is called when everything is launched, before the verdict is waited for."""
        laps = self._laps
        laps.begin()
        self._round += 1
        drafter = self._models.drafter
        extents = [self._extent(lane, self._shapes.draft_tokens.of(len(lanes))) for lane in lanes]
        whole_block = drafter is not None and drafter.selector is not None
        shape = self._shapes.of(extents, [lane.pending for lane in lanes], whole_block)
        self._send(lanes, extents, shape, shape.drafts + 1 if whole_block else None)
        self._append(lanes, shape)
        laps.lap("append")
        # behind the first launch: until there was one, the card has waited since the verdict
        traits = self._shapes.traits(traits_of(lanes), shape.rows, self._models.target.public_rows)
        self._propose(shape, traits)
        laps.lap("propose")
        constrained = any(lane.matcher is not None for lane in lanes)
        if constrained:  # before verify is launched: the copy must not wait for it
            self._buffers.proposed.ask(shape.rows * shape.drafts)
        self._verify(shape)
        laps.lap("verify")
        masks = None
        if constrained:
            drafts = self._buffers.proposed.wait(shape.rows * shape.drafts).reshape(shape.rows, shape.drafts).tolist()
            live = [row[:count] for row, count in zip(drafts, extents, strict=False)]
            masks = self.grammars.masks(lanes, live, shape.width)
            laps.lap("masks")
        self._accept(lanes, shape, traits, masks)
        if meanwhile is not None:
            meanwhile()
        licensed, accepted = self._verdict(len(lanes), shape)
        ends = _cut_at_dead_ends(lanes, licensed, accepted, masks)
        logprobs = self._told(lanes, licensed, shape, traits)
        laps.lap("accept")
        return ExecutedRound(
            tuple(lanes), tuple(licensed), tuple(extents), tuple(accepted), logprobs, self._round, shape, ends
        )

    @torch.no_grad()
    def commit(self, done: ExecutedRound, counts: Sequence[int]) -> None:
        """Adopts the first counts[i] input columns of each lane; 0 leaves a lane exactly as it was. Raises RuntimeError
        where another round has been run since."""
        if done.number != self._round:
            raise RuntimeError(f"round {done.number} can not be committed any more: {self._round} was run since")
        for lane, kept in zip(done.lanes, counts, strict=True):
            if kept:
                lane.memory.unsettle_image()
        place = self._buffers.counts.place().view(np.int64)
        place[: done.shape.rows] = 0
        place[: len(counts)] = counts
        self._buffers.counts.send()
        self._commit(done.shape)
        for lane, kept in zip(done.lanes, counts, strict=True):
            if kept == 0:
                continue
            lane.memory.settle(lane.frontier + kept)
            if self._models.drafter is not None:
                lane.pending = kept
            else:
                lane.memory.context_frontier = lane.memory.frontier

    @torch.no_grad()
    def catch_up(self, lanes: Sequence[Lane]) -> None:
        """Takes pending features into the draft context, so that it reaches the frontier of every lane."""
        lanes = [lane for lane in lanes if lane.pending]
        if not lanes:
            return
        self._round += 1  # what the last round left for its commit is overwritten
        pending = self._shapes.of([0] * len(lanes), [lane.pending for lane in lanes], False).pending
        shape = RoundShape(self._shapes.bucket(len(lanes)), pending, drafts=0, width=1)
        self._send(lanes, [0] * len(lanes), shape, block=None)
        self._append(lanes, shape)

    def _send(self, lanes: Sequence[Lane], extents: Sequence[int], shape: RoundShape, block: int | None) -> None:
        """What the device must know of these lanes."""
        self._write_pages(lanes)
        self._buffers.ingress.send(self._rows.rows(lanes, extents, block, shape.rows))

    def _write_pages(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            self._buffers.pages.write(lane.row, lane.memory, lane.memory.pages)
            self._buffers.draft_pages.write(lane.row, lane.memory, lane.memory.draft_pages)

    def _append(self, lanes: Sequence[Lane], shape: RoundShape) -> None:
        if self._models.drafter is None or not shape.pending:
            return
        ends = [lane.memory.context_frontier + lane.pending for lane in lanes]
        for lane in lanes:
            lane.memory.context_frontier = UNSETTLED
        self._runs(("append", shape.rows, shape.pending), partial(self._segments.append, shape))
        for lane, end in zip(lanes, ends, strict=True):
            lane.memory.context_frontier, lane.pending = end, 0

    def _accept(self, lanes: Sequence[Lane], shape: RoundShape, traits: Traits, masks: Masks | None) -> None:
        """Asks for the verdict as well."""
        if traits.penalised:
            self._histories.follow(lanes)
        if traits.masks:
            count = len(masked_rows(lanes))
            size = count * shape.width * self._buffers.sizes.mask_bytes
            allowed = self._buffers.masks.place()[:size].reshape(count, shape.width, -1)
            write_masks(lanes, masks, allowed)
            self._buffers.masks.send(size)
        self._judge(shape, traits)
        self._buffers.verdict.ask(shape.rows * (shape.width + 1))

    def _propose(self, shape: RoundShape, traits: Traits) -> None:
        if shape.drafts:
            key = ("propose", shape.rows, shape.drafts, traits.reproducible)
            self._runs(key, partial(self._segments.propose, shape, traits))

    def _verify(self, shape: RoundShape) -> None:
        key = ("verify", shape.rows, shape.drafts, shape.width)
        self._runs(key, partial(self._segments.verify, shape))

    def _judge(self, shape: RoundShape, traits: Traits) -> None:
        key = ("accept", shape.rows, shape.drafts, shape.width, traits)
        self._runs(key, partial(self._segments.accept, shape, traits))

    def _commit(self, shape: RoundShape) -> None:
        self._runs(("commit", shape.rows, shape.width), partial(self._segments.commit, shape))

    def _verdict(self, count: int, shape: RoundShape) -> tuple[list[tuple[int, ...]], list[int]]:
        """Licensed tokens, and accepted drafts, of the first `count` rows."""
        columns = shape.rows * shape.width
        numbers = self._buffers.verdict.wait(columns + shape.rows)
        accepted = numbers[columns:][:count].tolist()
        rows = numbers[:columns].reshape(shape.rows, shape.width)[:count].tolist()
        return [tuple(row[: kept + 1]) for row, kept in zip(rows, accepted, strict=True)], accepted

    def _told(
        self, lanes: Sequence[Lane], licensed: Sequence[Sequence[int]], shape: RoundShape, traits: Traits
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        """Of each lane's licensed tokens; empty for a lane that asked for none or that has no token."""
        if not traits.told:
            return ((),) * len(lanes)
        places = self._buffers.told.of(traits.told, shape.width, traits.alternatives)
        own, ids, best = (place.tolist() for place in places)
        told: list[tuple[TokenLogprob, ...]] = []
        asking = 0
        for lane, tokens in zip(lanes, licensed, strict=True):
            most = lane.submit.sampling.logprobs
            if most is None:
                told.append(())
                continue
            told.append(scored(tokens, own[asking], ids[asking], best[asking], most))
            asking += 1
        return tuple(told)

    def _extent(self, lane: Lane, draft_tokens: int) -> int:
        """P: proposals that may be verified for a lane this round (decision 7), whose K is `draft_tokens`."""
        drafter = self._models.drafter
        if drafter is None or not lane.submit.drafting:
            return 0
        if lane.thinking is not None and lane.thinking.forced is not None:
            return 0  # the next token is not the model's: whatever were drafted would be dropped
        room = drafter.config.max_positions - lane.frontier - 1
        return max(0, min(draft_tokens, lane.tokens_left - 1, room))

    def _int(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return on_device(torch.tensor(values, dtype=torch.int64), self._device)


def _cut_at_dead_ends(
    lanes: Sequence[Lane], licensed: list[tuple[int, ...]], accepted: list[int], masks: Masks | None
) -> tuple[tuple[Lane, EngineError], ...]:
    """A row ends before the first column that has no token: its drafts up to there stand, and nothing comes after.
    Changes `licensed` and `accepted` of such rows, and returns their lanes."""
    ends: list[tuple[Lane, EngineError]] = []
    for row, (column, error) in masks.dead.items() if masks else ():
        if accepted[row] >= column:
            accepted[row], licensed[row] = column, licensed[row][:column]
            ends.append((lanes[row], error))
    return tuple(ends)
