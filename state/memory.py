"""Who owns which page and image? All device state of an engine, and the books of sequences and checkpoints."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from state.checkpoint import Checkpoint, new_checkpoint_id
from state.coverage import Coverage, Form, check_coverage
from state.errors import CapacityError, StateError
from state.geometry import PAGE_TOKENS, StateGeometry, pages_for
from state.images import ImagePool
from state.media import Placed, begun
from state.pages import PagePool

UNSETTLED = -1
"""The coverage of a plane that is being written in place."""


@dataclass(eq=False)
class SequenceMemory:
    """What a running lane owns: an image and pages, and how far each plane of them has come.

    `frontier`: positions [0, F) whose target state is committed. `context_frontier`: positions whose draft context is
    materialised; it may lag behind until catch-up, and equals `frontier` when there is no drafter. `target_kv`, `gdn`,
    `conv` and `hidden` are what each target plane covers; the engine stamps them where it has written them, and marks
    a plane `UNSETTLED` while it is being written in place, so that a step that was torn can never be captured.
    `pages` and `draft_pages` are changed by `StateMemory` only.
    """

    slot: int
    pages: list[int]
    draft_pages: list[int]
    frontier: int = 0
    context_frontier: int = 0
    target_kv: int = 0
    gdn: int = 0
    conv: int = 0
    hidden: int = 0
    parent: str | None = None

    def unsettle_image(self) -> None:
        """The image is about to be written in place: until it is stamped it covers nothing."""
        self.gdn = self.conv = self.hidden = UNSETTLED

    def settle(self, frontier: int) -> None:
        """All target planes are at `frontier`, which is committed."""
        self.target_kv = self.gdn = self.conv = self.hidden = self.frontier = frontier


class StateMemory:
    """Owns the target pages, the draft pages (None without full-attention draft layers) and the images.

    Not thread safe: one engine thread owns it. Every method that takes memory is all or nothing.
    """

    def __init__(
        self,
        geometry: StateGeometry,
        target_pages: int,
        draft_pages: int,
        images: int,
        device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.time,
    ) -> None:
        g = geometry
        self.geometry = geometry
        self.target = PagePool(
            "target pages", g.kv_layers, g.kv_heads, g.kv_head_dim, target_pages, g.kv_dtype, g.kv_dtype, device
        )
        self.draft: PagePool | None = None
        if g.full_layers:
            self.draft = PagePool(
                "draft pages",
                g.full_layers,
                g.draft_kv_heads,
                g.draft_head_dim,
                draft_pages,
                g.ring_key_dtype,
                g.ring_value_dtype,
                device,
            )
        self.images = ImagePool(geometry, images, device)
        self._clock = clock
        self._sequences: dict[int, SequenceMemory] = {}
        self._checkpoints: dict[int, Checkpoint] = {}
        self._serials = itertools.count(1)

    @property
    def sequences(self) -> tuple[SequenceMemory, ...]:
        return tuple(self._sequences.values())

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return tuple(self._checkpoints.values())

    @property
    def changes(self) -> int:
        """As long as it stays, nothing was taken of any pool, shared or given back."""
        return self.images.changes + self.target.changes + (self.draft.changes if self.draft else 0)

    # ------------------------------------------------------------------------------------------------ sequences

    def open(self, tokens: int) -> SequenceMemory:
        """A new sequence at frontier 0: a cleared image, and pages for positions [0, tokens). `CapacityError`."""
        slot, pages, draft_pages = self._take(pages_for(tokens), pages_for(tokens))
        self.images.clear(slot)
        return self._adopt_sequence(SequenceMemory(slot, pages, draft_pages))

    def full_pages(self, sequence: SequenceMemory) -> int:
        """How many of a sequence's first pages are full in every pool, so that nobody writes to them again."""
        covered = min(sequence.frontier, sequence.target_kv)
        if self.draft:
            covered = min(covered, sequence.context_frontier)
        return max(0, covered) // PAGE_TOKENS

    def close(self, sequence: SequenceMemory) -> None:
        """Ends a sequence. Checkpoints taken from it keep what they share."""
        self._check_open(sequence)
        del self._sequences[sequence.slot]
        self._give_back(sequence.slot, sequence.pages, sequence.draft_pages)
        sequence.pages, sequence.draft_pages = [], []

    # ---------------------------------------------------------------------------------------------- checkpoints

    def capture(
        self,
        sequence: SequenceMemory,
        ledger: Sequence[int],
        form: Form,
        kind: str,
        parent: str | None = None,
        media: Placed = (),
    ) -> Checkpoint:
        """An immutable checkpoint of a sequence at its frontier; the sequence goes on.

        Shares the pages that hold [0, F) and copies the image. The draft context must have caught up. Raises
        `CoverageError` or `CapacityError`. `parent` defaults to the checkpoint that the sequence was restored from.
        `media`: of the sequence, those beyond the ledger included.
        """
        self._check_open(sequence)
        coverage = self._coverage_of(sequence, len(ledger), form)
        check_coverage(coverage, self.geometry)
        count = pages_for(sequence.frontier)
        return self._retain(
            Checkpoint(
                id=new_checkpoint_id(),
                kind=kind,
                form=form,
                frontier=sequence.frontier,
                ledger=tuple(ledger),
                coverage=coverage,
                parent=sequence.parent if parent is None else parent,
                fork_origin=None,
                slot=sequence.slot,
                pages=tuple(sequence.pages[:count]),
                draft_pages=tuple(sequence.draft_pages[:count]),
                created=self._clock(),
                media=begun(media, len(ledger)),
            )
        )

    def restore(self, checkpoint: Checkpoint, tokens: int) -> SequenceMemory:
        """A new sequence that goes on from a checkpoint, with pages for positions [0, tokens).

        Full pages are shared, a partial last page is copied before the sequence writes to it, and so is the image.
        Raises `CoverageError` or `CapacityError`.
        """
        self.check_kept(checkpoint)
        check_coverage(checkpoint.coverage, self.geometry)
        frontier = checkpoint.frontier
        full, columns = divmod(frontier, PAGE_TOKENS)
        fresh = pages_for(max(tokens, frontier)) - full
        slot, pages, draft_pages = self._take(fresh, fresh)
        self.images.copy(checkpoint.slot, slot)
        self.target.share(checkpoint.pages[:full])
        if columns:
            self.target.copy_page(checkpoint.pages[full], pages[0], columns)
        if self.draft:
            self.draft.share(checkpoint.draft_pages[:full])
            if columns:
                self.draft.copy_page(checkpoint.draft_pages[full], draft_pages[0], columns)
        return self._adopt_sequence(
            SequenceMemory(
                slot,
                [*checkpoint.pages[:full], *pages],
                [*checkpoint.draft_pages[:full], *draft_pages],
                frontier=frontier,
                context_frontier=frontier,
                target_kv=frontier,
                gdn=frontier,
                conv=frontier,
                hidden=frontier,
                parent=checkpoint.id,
            )
        )

    def fork(self, checkpoint: Checkpoint, kind: str | None = None) -> Checkpoint:
        """An independent checkpoint of the same state, of the same kind unless it is given another: pages are shared,
        the image is copied. `CapacityError`."""
        self.check_kept(checkpoint)
        check_coverage(checkpoint.coverage, self.geometry)
        kind = checkpoint.kind if kind is None else kind
        return self._retain(replace(checkpoint, id=new_checkpoint_id(), kind=kind, fork_origin=checkpoint.id))

    def release(self, checkpoint: Checkpoint) -> None:
        """Ends a checkpoint. Sequences and forks that share its pages keep them."""
        self.check_kept(checkpoint)
        del self._checkpoints[checkpoint.slot]
        self._give_back(checkpoint.slot, checkpoint.pages, checkpoint.draft_pages)

    def keeps(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint is one of this memory's, and was not released."""
        return self._checkpoints.get(checkpoint.slot) is checkpoint

    def check_kept(self, checkpoint: Checkpoint) -> None:
        """Raises `StateError` if the checkpoint is not one of this memory's: its pages may be somebody else's now."""
        if not self.keeps(checkpoint):
            raise StateError(f"checkpoint {checkpoint.id} was released, or belongs to another memory")

    # --------------------------------------------------------------------------------------------------- import

    def take_for_import(
        self, frontier: int, shared: Sequence[int] = (), shared_draft: Sequence[int] = ()
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """An image and pages for [0, frontier) that nobody sees yet: slot, pages, draft pages. `CapacityError`.

        They must go to `adopt` or to `abandon`. `shared`, `shared_draft`: the first pages are these, of a checkpoint
        that is here and has the same content.
        """
        fresh = pages_for(frontier) - len(shared)
        slot, pages, draft_pages = self._take(fresh, fresh)
        self.target.share(shared)
        if self.draft:
            self.draft.share(shared_draft)
        return slot, (*shared, *pages), (*shared_draft, *draft_pages)

    def adopt(self, checkpoint: Checkpoint) -> Checkpoint:
        """Makes an imported checkpoint visible, whose places came from `take_for_import`: the one that this returns.
        `CoverageError`."""
        check_coverage(checkpoint.coverage, self.geometry)
        if checkpoint.slot in self._checkpoints or checkpoint.slot in self._sequences:
            raise StateError(f"image slot {checkpoint.slot} of the imported checkpoint is in use")
        return self._keep(checkpoint)

    def abandon(self, slot: int, pages: Sequence[int], draft_pages: Sequence[int]) -> None:
        """Gives back what `take_for_import` took, when the import failed."""
        self._give_back(slot, pages, draft_pages)

    # ------------------------------------------------------------------------------------------------ invariants

    def check_invariants(self) -> None:
        """Compares all books with each other. Raises `StateError`: something is leaked, or used twice."""
        holders = [*self._sequences.values(), *self._checkpoints.values()]
        self.images.check_slots(holder.slot for holder in holders)
        self.target.check_references(page for holder in holders for page in holder.pages)
        if self.draft:
            self.draft.check_references(page for holder in holders for page in holder.draft_pages)
        self._check_single_writers()

    def _check_single_writers(self) -> None:
        # Pages from a sequence's frontier on are written by it: no other sequence may have them, and a checkpoint
        # only the one page that holds the frontier, of which it reads the columns below its own frontier.
        pools = (("target", "pages", True), ("draft", "draft_pages", self.draft is not None))
        for pool, attribute, exists in pools:
            writers: dict[int, SequenceMemory] = {}
            for sequence in self._sequences.values() if exists else ():
                for page in getattr(sequence, attribute)[sequence.frontier // PAGE_TOKENS :]:
                    if page in writers:
                        raise StateError(f"{pool} page {page} has two writers")
                    writers[page] = sequence
            for sequence in self._sequences.values() if exists else ():
                for page in getattr(sequence, attribute)[: sequence.frontier // PAGE_TOKENS]:
                    if page in writers:
                        raise StateError(f"{pool} page {page} is full for one sequence and written by another")
            for checkpoint in self._checkpoints.values() if exists else ():
                for index, page in enumerate(getattr(checkpoint, attribute)):
                    writer = writers.get(page)
                    end = min(checkpoint.frontier, (index + 1) * PAGE_TOKENS)
                    if writer is not None and writer.frontier < end:
                        raise StateError(f"{pool} page {page} of a checkpoint is written below its frontier")

    # ------------------------------------------------------------------------------------------------- internals

    def _coverage_of(self, sequence: SequenceMemory, ledger_tokens: int, form: Form) -> Coverage:
        context = sequence.context_frontier
        ring = self.images.rings.live(context) if self.geometry.ring_layers else None
        draft_kv = min(context, len(sequence.draft_pages) * PAGE_TOKENS) if self.geometry.full_layers else None
        return Coverage(
            form=form,
            frontier=sequence.frontier,
            ledger_tokens=ledger_tokens,
            target_kv=min(sequence.target_kv, len(sequence.pages) * PAGE_TOKENS),
            gdn=sequence.gdn,
            conv=sequence.conv,
            hidden=sequence.hidden,
            ring=ring,
            draft_kv=draft_kv,
        )

    def _check_room(self, target_pages: int, draft_pages: int, images: int = 0) -> None:
        # images last: whoever evicts a checkpoint for its pages gets its image as well
        if target_pages > self.target.free:
            raise CapacityError(self.target.name, target_pages, self.target.free)
        if self.draft and draft_pages > self.draft.free:
            raise CapacityError(self.draft.name, draft_pages, self.draft.free)
        if images > self.images.free:
            raise CapacityError(self.images.name, images, self.images.free)

    def _take(self, target_pages: int, draft_pages: int) -> tuple[int, list[int], list[int]]:
        self._check_room(target_pages, draft_pages, images=1)
        pages = self.target.allocate(target_pages)
        return self.images.allocate(), pages, self.draft.allocate(draft_pages) if self.draft else []

    def _give_back(self, slot: int, pages: Sequence[int], draft_pages: Sequence[int]) -> None:
        self.images.release(slot)
        self.target.release(pages)
        if self.draft:
            self.draft.release(draft_pages)

    def _adopt_sequence(self, sequence: SequenceMemory) -> SequenceMemory:
        self._sequences[sequence.slot] = sequence
        return sequence

    def _retain(self, source: Checkpoint) -> Checkpoint:
        slot = self.images.allocate()
        self.images.copy(source.slot, slot)
        self.target.share(source.pages)
        if self.draft:
            self.draft.share(source.draft_pages)
        return self._keep(replace(source, slot=slot))

    def _keep(self, checkpoint: Checkpoint) -> Checkpoint:
        kept = replace(checkpoint, serial=next(self._serials))
        self._checkpoints[kept.slot] = kept
        return kept

    def _check_open(self, sequence: SequenceMemory) -> None:
        if self._sequences.get(sequence.slot) is not sequence:
            raise StateError(f"the sequence at image slot {sequence.slot} is not open")
