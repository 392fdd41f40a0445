"""The segments of a decode round, and a prefill slice: functions over buffers and state, that read and write nothing
else.

    append    pending features of the last commit -> draft context            (now it reaches F)
    propose   [anchor, MASK x K] -> drafts, and q for DFlash2
    verify    target over the live columns, features captured, images unchanged
    accept    licensed tokens, and log-probabilities of rows that asked
    commit    Fold of N records, convolution history, continuation hidden; features become pending

    prefill   one lane's slice of a prompt: pages, image and draft context move over its live columns

A CPU calls them; a card replays what it captured of them. So no segment asks the device for a number, and none depends
on more than its arguments and what lies in the buffers: which rows there are, where they stand and what they want are
numbers of the ingress. Rows of padding have extents of 0, and change nothing but their own places.

Two extents, never one: columns that the drafter computes (DFlash: Q = P + 1, DFlash2: W = K + 1) and columns that the
target verifies (Q).

Source: specification (verification, commit, extents); decisions 6, 7 and 14.
"""

from __future__ import annotations

import torch

from deployment.engine.buffers import RoundBuffers
from deployment.engine.histories import Histories
from deployment.engine.ingress import Rows
from deployment.engine.loading import Models
from deployment.engine.round_shape import RoundShape, Traits
from kernels.acceptance import Proposal, RowSampling, accept
from kernels.logprobs import processed_logits, token_logprobs
from kernels.masking import TokenMasks
from kernels.penalties import RowPenalties, adjust_logits
from model.drafter import DraftContext, DraftRows
from model.target import Columns, TargetState
from state.memory import StateMemory

LOGIT_BYTES = 256 << 20
"""Of FP32 logits at a time, so that what is made of them does not take gigabytes: 64 lanes with K = 15 have 1 GB."""


class Segments:
    """Of one engine. `state`, `context`: views of its memory; `context` None without a drafter."""

    def __init__(self, models: Models, memory: StateMemory, buffers: RoundBuffers, histories: Histories) -> None:
        self._models = models
        self._memory = memory
        self._buffers = buffers
        self._histories = histories
        self.state = TargetState(memory.target.keys, memory.target.values, memory.images.gdn, memory.images.conv)
        self.context: DraftContext | None = None
        if models.drafter is not None:
            rings, pages = memory.images.rings, memory.draft
            page_keys, page_values = (pages.keys, pages.values) if pages else (None, None)
            self.context = DraftContext(rings.keys, rings.values, page_keys, page_values)

    def prefill(self, width: int) -> None:
        slot, lane, start, count, ids = self._buffers.prompt.of(width)
        pages, draft_pages = (
            table.device.index_select(0, lane) for table in (self._buffers.pages, self._buffers.draft_pages)
        )
        hidden = self.advance(Columns(ids, start, count, pages, slot), draft_pages)
        self._memory.images.hidden.index_copy_(0, slot, hidden.index_select(0, (count - 1).clamp(min=0)))

    def advance(self, columns: Columns, draft_pages: torch.Tensor, skipped: int = 0) -> torch.Tensor:
        """One row's columns into its pages, its image and its draft context, which needs none of the first `skipped` ->
        hidden [T, H]."""
        forward, drafter = self._models.target.prefill(columns, self.state, self._models.taps), self._models.drafter
        if drafter is not None and self.context is not None and forward.features is not None:
            start, count = columns.start + skipped, columns.valid - skipped
            rows = DraftRows(columns.slots, draft_pages)
            drafter.append_context(forward.features[:, skipped:], start, count, rows, self.context)
        return forward.hidden[0]

    def append(self, shape: RoundShape) -> None:
        rows, drafter = self._buffers.ingress.rows(shape.rows), self._models.drafter
        assert drafter is not None and self.context is not None
        features = self._buffers.pending[:, : shape.pending].index_select(0, rows.lane)
        drafter.append_context(features, rows.context, rows.pending, self._draft_rows(rows), self.context)

    def propose(self, shape: RoundShape, traits: Traits) -> None:
        rows, drafter = self._buffers.ingress.rows(shape.rows), self._models.drafter
        assert drafter is not None and self.context is not None
        proposal = drafter.propose(
            rows.anchor,
            rows.frontier,
            rows.columns,
            shape.drafts + 1,
            self._draft_rows(rows),
            self.context,
            _sampling(rows, traits),
        )
        self._buffers.drafts(shape.rows, shape.drafts).copy_(proposal.drafts)
        if proposal.candidates is not None and proposal.law is not None:
            candidates, law = self._buffers.laws(shape.rows, shape.drafts)
            candidates.copy_(proposal.candidates)
            law.copy_(proposal.law)

    def verify(self, shape: RoundShape) -> None:
        rows, width = self._buffers.ingress.rows(shape.rows), shape.width
        ids = rows.anchor[:, None].repeat(1, width)  # columns beyond the live width repeat the anchor
        if shape.drafts:
            drafts = self._buffers.drafts(shape.rows, shape.drafts)[:, : width - 1]
            live = torch.arange(1, width, device=ids.device) <= rows.extent[:, None]
            ids[:, 1:] = torch.where(live, drafts, ids[:, 1:])
        pages = self._buffers.pages.device.index_select(0, rows.lane)
        places = rows.frontier + rows.shift  # of the rotary; drafts go by ordinals
        positions = places[:, None] + torch.arange(width, device=ids.device)
        columns = Columns(ids, rows.frontier, rows.live, pages, rows.slot, positions)
        records = self._buffers.records(shape.rows, width)
        forward = self._models.target.verify(columns, self.state, self._models.taps, records)
        self._buffers.hidden(shape.rows, width).copy_(forward.hidden)
        if forward.features is not None:
            self._buffers.features(shape.rows, width).copy_(forward.features)

    def accept(self, shape: RoundShape, traits: Traits) -> None:
        """As many rows at a time as have logits of `LOGIT_BYTES`: what is chosen in a row depends on no other."""
        vocabulary = self._models.target.public_rows
        together = max(1, LOGIT_BYTES // (4 * shape.width * vocabulary))
        for first in range(0, shape.rows, together):
            self._judge(shape, traits, slice(first, min(first + together, shape.rows)))
        for first in range(0, traits.told, together):
            self._tell(shape, traits, slice(first, min(first + together, traits.told)))

    def _judge(self, shape: RoundShape, traits: Traits, part: slice) -> None:
        rows, width = self._buffers.ingress.rows(shape.rows).part(part), shape.width
        logits = self._models.target.logits(self._buffers.hidden(shape.rows, width)[part])
        drafts = self._buffers.drafts(shape.rows, shape.drafts)[part]
        controlled = self._adjusted(logits, drafts, rows, traits)
        verdict = accept(controlled, self._proposal(shape, part), rows.extent, rows.frontier, _sampling(rows, traits))
        licensed, accepted = self._buffers.verdicts(shape.rows, width)
        licensed[part].copy_(verdict.licensed)
        accepted[part].copy_(verdict.accepted)

    def _adjusted(self, logits: torch.Tensor, drafts: torch.Tensor, rows: Rows, traits: Traits) -> torch.Tensor:
        """By all that comes before the temperature; `logits` FP32 [B, W, V] and `drafts` of these rows."""
        masks = None
        if traits.masks:
            masks = TokenMasks(self._buffers.allowed(traits.masks, logits.shape[1]), rows.mask)
        return adjust_logits(logits, drafts, self._penalties(rows) if traits.penalised else None, masks)

    def _tell(self, shape: RoundShape, traits: Traits, part: slice) -> None:
        """Log-probabilities for some of the rows that asked, whose logits are computed again: few rounds need them, and
        which rows they are only the device knows."""
        rows = self._buffers.ingress.rows(shape.rows)
        asking = rows.told[part]
        hidden = self._buffers.hidden(shape.rows, shape.width).index_select(0, asking)
        licensed, _ = self._buffers.verdicts(shape.rows, shape.width)
        licensed = licensed.index_select(0, asking)
        places = self._buffers.told.of(traits.told, shape.width, traits.alternatives)
        drafts = self._buffers.drafts(shape.rows, shape.drafts)
        if traits.processed:
            rows, drafts = rows.at(asking), drafts.index_select(0, asking)
        for number, logits in enumerate(self._models.target.logits(hidden)):
            if traits.processed:
                one = slice(number, number + 1)
                logits = self._as_wanted(logits, drafts[one], rows.part(one), traits)
            values = token_logprobs(logits, licensed[number], traits.alternatives)
            for place, value in zip(places, values, strict=True):
                place[part.start + number] = value

    def _as_wanted(self, logits: torch.Tensor, drafts: torch.Tensor, row: Rows, traits: Traits) -> torch.Tensor:
        """`logits` [W, V] of one row, raw, or as the controls leave them."""
        adjusted = self._adjusted(logits[None], drafts, row, traits)
        processed = processed_logits(adjusted, _sampling(row, traits), row.extent)[0]
        return torch.where(row.processed > 0, processed, logits)

    def commit(self, shape: RoundShape) -> None:
        rows, images = self._buffers.ingress.rows(shape.rows), self._memory.images
        kept = self._buffers.kept(shape.rows)
        self._models.target.commit(self._buffers.records(shape.rows, shape.width), kept, rows.slot, self.state)
        last = (kept - 1).clamp(min=0)[:, None, None]
        hidden = self._buffers.hidden(shape.rows, shape.width)
        hidden = hidden.gather(1, last.expand(-1, 1, hidden.shape[-1]))[:, 0]
        before = images.hidden.index_select(0, rows.slot)
        images.hidden.index_copy_(0, rows.slot, torch.where(kept[:, None] > 0, hidden, before))
        if self._models.drafter is not None:
            features = self._buffers.features(shape.rows, shape.width)
            self._buffers.pending[:, : shape.width].index_copy_(0, rows.lane, features)

    # ------------------------------------------------------------------------------------------------ arguments

    def _draft_rows(self, rows: Rows) -> DraftRows:
        return DraftRows(rows.slot, self._buffers.draft_pages.device.index_select(0, rows.lane))

    def _proposal(self, shape: RoundShape, part: slice) -> Proposal | None:
        if not shape.drafts:
            return None
        drafts = self._buffers.drafts(shape.rows, shape.drafts)
        if not self._buffers.sizes.candidates:
            return Proposal(drafts).rows(part)
        return Proposal(drafts, *self._buffers.laws(shape.rows, shape.drafts)).rows(part)

    def _penalties(self, rows: Rows) -> RowPenalties:
        bias, in_prompt, counts = (
            plane.index_select(0, rows.history)
            for plane in (self._histories.bias, self._histories.in_prompt, self._histories.counts)
        )
        return RowPenalties(rows.repetition, rows.presence, rows.frequency, bias, in_prompt, counts)


def _sampling(rows: Rows, traits: Traits) -> RowSampling:
    return RowSampling(
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        seeds=rows.seed,
        sub=rows.sub,
        min_p=rows.min_p if traits.min_p else None,
        reproducible=rows.reproducible > 0 if traits.reproducible else None,
        all_greedy=traits.greedy,
    )
