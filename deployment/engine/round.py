"""Execution: prefill chunks and decode rounds over the engine's memory. No scheduling, no publication.

    round    append   pending features of the last commit -> draft context        (now it reaches F)
             propose  [anchor, MASK x K] -> drafts, and q for DFlash2
             verify   target over the live columns, features captured, images unchanged; grammar masks on the host
             accept   licensed tokens
    commit   Fold of N records, convolution history, continuation hidden, frontier F + N; N features become pending

Two extents, never one: columns the drafter computes (DFlash: Q = P + 1, DFlash2: W = K + 1) and columns the target
verifies (Q). A CPU runs this eagerly; the same functions are captured on a GPU later.

Source: specification (verification, commit, extents); decisions 6, 7 and 14.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deployment.engine.controls import row_penalties, row_sampling, token_masks
from deployment.engine.drafting import DraftTokens
from deployment.engine.errors import EngineError
from deployment.engine.grammar import Grammars, Masks
from deployment.engine.lane import Lane
from deployment.engine.loading import Models
from deployment.engine.logprobs import licensed_logprobs, prompt_logprobs
from deployment.engine.media_cache import MediaCache
from deployment.engine.messages import TokenLogprob
from deployment.engine.placing import item_of
from deployment.engine.transfer import on_device
from kernels.acceptance import Proposal, RowSampling, accept, choose
from kernels.penalties import adjust_logits
from model.drafter import DraftContext, DraftRows
from model.media_positions import media_positions
from model.placeholders import inserted
from model.target import Columns, Forward, Inserted, TargetState
from state.memory import UNSETTLED, StateMemory


@dataclass(frozen=True)
class ExecutedRound:
    """What a round licensed: `licensed[i]` are lane i's tokens, `accepted[i]` of them were drafts, `logprobs[i]` has an
    entry for each of them if the lane asked. `forward` holds the records, hidden and features that a commit needs.
    `dead_ends`: lanes whose grammar allows nothing after what they licensed."""

    lanes: tuple[Lane, ...]
    licensed: tuple[tuple[int, ...], ...]
    accepted: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    forward: Forward
    dead_ends: tuple[tuple[Lane, EngineError], ...] = ()


class Executor:
    """Runs models over state. `lanes` is the largest number of rows a round can have; `draft_tokens` says what K is
    for how many of them; `media_bytes`: of what the tower made, to be kept."""

    def __init__(
        self, models: Models, memory: StateMemory, lanes: int, draft_tokens: DraftTokens, media_bytes: int
    ) -> None:
        self._models = models
        self._draft_tokens = draft_tokens
        self._memory = memory
        self._device = models.device
        self.grammars = Grammars(models.tokenizer, models.target.public_rows, models.defaults.eos_ids)
        self._state = TargetState(memory.target.keys, memory.target.values, memory.images.gdn, memory.images.conv)
        vision, drafter = models.vision, models.drafter
        self._media = MediaCache(vision.tower.encode, media_bytes) if vision is not None else None
        self._context: DraftContext | None = None
        self._pending = torch.empty(0)
        if drafter is not None:
            rings, pages = memory.images.rings, memory.draft
            page_keys, page_values = (pages.keys, pages.values) if pages else (None, None)
            self._context = DraftContext(rings.keys, rings.values, page_keys, page_values)
            width = draft_tokens.most + 1
            features = len(models.taps) * models.geometry.hidden_size
            self._pending = torch.zeros(lanes, width, features, dtype=models.dtype, device=self._device)

    # ------------------------------------------------------------------------------------------------ prefill

    @torch.no_grad()
    def prefill(self, lane: Lane, end: int) -> tuple[TokenLogprob, ...]:
        """Moves a lane's frontier to `end` by running ledger tokens [F, end); the draft context goes with it. Returns
        what the lane asked to know of its prompt and does not know yet: tokens [scored, end], as far as they are."""
        start = lane.frontier
        ids = torch.tensor([lane.ledger[start:end]], device=self._device)
        columns = Columns(
            ids,
            self._int([start]),
            self._int([end - start]),
            self._page_table([lane]),
            self._slots([lane]),
            *self._shown(lane, start, end),
        )
        lane.memory.unsettle_image()
        lane.memory.context_frontier = UNSETTLED
        forward = self._models.target.prefill(columns, self._state, self._models.taps)
        self._memory.images.hidden[lane.memory.slot] = forward.hidden[0, -1]
        if self._models.drafter is not None and self._context is not None and forward.features is not None:
            skipped = self._models.drafter.first_kept(end - start)
            self._models.drafter.append_context(
                forward.features[:, skipped:],
                columns.start + skipped,
                columns.valid - skipped,
                self._draft_rows([lane]),
                self._context,
            )
        told = prompt_logprobs(lane, forward.hidden[0], start, self._models.target.logits)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # how long a slice takes decides how large the next one is
        lane.memory.context_frontier = end
        lane.memory.settle(end)
        return told

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
        hidden = self._memory.images.hidden[lane.memory.slot]
        logits = self._models.target.logits(hidden)[None, None]
        controlled = self._controlled([lane], logits, None, masks)
        token = int(choose(controlled, self._int([[lane.frontier - 1]]), self._sampling([lane]))[0, 0])
        return token, licensed_logprobs([lane], logits, [(token,)])[0]

    # ------------------------------------------------------------------------------------------------ rounds

    @torch.no_grad()
    def run(self, lanes: Sequence[Lane]) -> ExecutedRound:
        """Append, propose, verify and accept for up to `lanes` decoding lanes. No committed state changes."""
        self.catch_up(lanes)
        sampling = self._sampling(lanes)
        extents = [self._extent(lane, self._draft_tokens.of(len(lanes))) for lane in lanes]
        frontier = self._int([lane.frontier for lane in lanes])
        anchors = self._int([lane.anchor for lane in lanes])
        extent = self._int(extents)
        width = max(extents) + 1
        proposal = self._propose(lanes, anchors, frontier, extent, width, sampling) if width > 1 else None

        ids = anchors[:, None].repeat(1, width)  # columns beyond the live width repeat the anchor
        if proposal is not None:
            live = torch.arange(1, width, device=self._device) <= extent[:, None]
            ids[:, 1:] = torch.where(live, proposal.drafts[:, : width - 1], ids[:, 1:])
        constrained = any(lane.matcher is not None for lane in lanes)
        drafts = ids[:, 1:].tolist() if constrained else []  # before verify is launched: the copy must not wait for it
        places = frontier + self._int([lane.rope_delta for lane in lanes])  # of the rotary; drafts go by ordinals
        positions = places[:, None] + torch.arange(width, device=self._device)
        columns = Columns(ids, frontier, extent + 1, self._page_table(lanes), self._slots(lanes), positions)
        forward = self._models.target.verify(columns, self._state, self._models.taps)
        masks = None
        if constrained:
            live = [row[:count] for row, count in zip(drafts, extents, strict=True)]
            masks = self.grammars.masks(lanes, live, width)
        logits = self._models.target.logits(forward.hidden)
        verdict = accept(self._controlled(lanes, logits, proposal, masks), proposal, extent, frontier, sampling)
        accepted = verdict.accepted.tolist()
        licensed = [tuple(row[: count + 1]) for row, count in zip(verdict.licensed.tolist(), accepted, strict=True)]
        ends = _cut_at_dead_ends(lanes, licensed, accepted, masks)
        logprobs = licensed_logprobs(lanes, logits, licensed)
        return ExecutedRound(tuple(lanes), tuple(licensed), tuple(accepted), logprobs, forward, ends)

    @torch.no_grad()
    def commit(self, done: ExecutedRound, counts: Sequence[int]) -> None:
        """Adopts the first counts[i] input columns of each lane; 0 leaves a lane exactly as it was."""
        lanes = done.lanes
        for lane, kept in zip(lanes, counts, strict=True):
            if kept:
                lane.memory.unsettle_image()
        self._models.target.commit(done.forward.records, self._int(counts), self._slots(lanes), self._state)
        for index, (lane, kept) in enumerate(zip(lanes, counts, strict=True)):
            if kept == 0:
                continue
            self._memory.images.hidden[lane.memory.slot] = done.forward.hidden[index, kept - 1]
            if done.forward.features is not None:
                self._pending[lane.row, :kept] = done.forward.features[index, :kept]
                lane.pending = kept
            lane.memory.settle(lane.frontier + kept)
            if self._models.drafter is None:
                lane.memory.context_frontier = lane.memory.frontier

    @torch.no_grad()
    def catch_up(self, lanes: Sequence[Lane]) -> None:
        """Takes pending features into the draft context, so that it reaches the frontier of every lane."""
        lanes = [lane for lane in lanes if lane.pending]
        if not lanes or self._models.drafter is None or self._context is None:
            return
        counts = [lane.pending for lane in lanes]
        features = self._pending[[lane.row for lane in lanes], : max(counts)]
        starts = [lane.memory.context_frontier for lane in lanes]
        for lane in lanes:
            lane.memory.context_frontier = UNSETTLED
        start = self._int(starts)
        self._models.drafter.append_context(features, start, self._int(counts), self._draft_rows(lanes), self._context)
        for lane, before in zip(lanes, starts, strict=True):
            lane.memory.context_frontier = before + lane.pending
            lane.pending = 0

    def _extent(self, lane: Lane, draft_tokens: int) -> int:
        """P: proposals that may be verified for a lane this round (decision 7), whose K is `draft_tokens`."""
        drafter = self._models.drafter
        if drafter is None or not lane.submit.drafting:
            return 0
        if lane.thinking is not None and lane.thinking.forced is not None:
            return 0  # the next token is not the model's: whatever were drafted would be dropped
        room = drafter.config.max_positions - lane.frontier - 1
        return max(0, min(draft_tokens, lane.tokens_left - 1, room))

    def _propose(
        self,
        lanes: Sequence[Lane],
        anchors: torch.Tensor,
        frontier: torch.Tensor,
        extent: torch.Tensor,
        width: int,
        sampling: RowSampling,
    ) -> Proposal:
        drafter = self._models.drafter
        assert drafter is not None and self._context is not None
        if drafter.selector is not None:
            width = self._draft_tokens.of(len(lanes)) + 1
            columns = torch.full_like(extent, width)
        else:
            columns = extent + 1
        rows = self._draft_rows(lanes)
        return drafter.propose(anchors, frontier, columns, width, rows, self._context, sampling)

    # ------------------------------------------------------------------------------------------------ rows

    def _int(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return on_device(torch.tensor(values, dtype=torch.int64), self._device)

    def _slots(self, lanes: Sequence[Lane]) -> torch.Tensor:
        return self._int([lane.memory.slot for lane in lanes])

    def _page_table(self, lanes: Sequence[Lane]) -> torch.Tensor:
        return self._padded([lane.memory.pages for lane in lanes])

    def _draft_rows(self, lanes: Sequence[Lane]) -> DraftRows:
        return DraftRows(self._slots(lanes), self._padded([lane.memory.draft_pages for lane in lanes]))

    def _padded(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        longest = max(len(table) for table in tables)
        return self._int([[*table, *[0] * (longest - len(table))] for table in tables])

    def _sampling(self, lanes: Sequence[Lane]) -> RowSampling:
        return row_sampling(lanes, self._models.target.public_rows, self._device)

    def _controlled(
        self, lanes: Sequence[Lane], logits: torch.Tensor, proposal: Proposal | None, masks: Masks | None
    ) -> torch.Tensor:
        """`logits` FP32 [B, W, V] after bias, penalties and masks, each column with its own history."""
        width, vocabulary = logits.shape[1:]
        penalties = row_penalties(lanes, vocabulary, self._device)
        allowed = token_masks(lanes, masks, width, vocabulary, self._device)
        drafts = proposal.drafts if proposal is not None else self._int([[]] * len(lanes))
        return adjust_logits(logits, drafts, penalties, allowed)


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
