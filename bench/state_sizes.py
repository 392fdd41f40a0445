"""Bytes that a session writes to the durable tier at 27B geometry, turn by turn: policies and sizes, no contents.

A turn asks and answers so many tokens. Images are where `ImagePolicy` has them; a publication names the newest turn
start, the newest turn end and the deepest of them, and writes what was not written before: images, full pages, and
partial last pages. A conversation pauses after every turn, so that each is published with its state; an agent does not,
so that its state follows once in `LONG_TURN_TOKENS` and at its end, and each call writes its ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from state.geometry import PAGE_TOKENS, StateGeometry
from state.image_policy import LONG_TURN_TOKENS, ImagePolicy

GEOMETRY_27B = StateGeometry(
    kv_layers=16,
    kv_heads=4,
    kv_head_dim=256,
    kv_dtype=torch.bfloat16,
    gdn_layers=48,
    gdn_heads=48,
    gdn_key_dim=128,
    gdn_value_dim=128,
    conv_channels=10240,
    conv_history=3,
    conv_dtype=torch.bfloat16,
    hidden_size=5120,
    hidden_dtype=torch.bfloat16,
    ring_layers=5,
    draft_kv_heads=8,
    draft_head_dim=128,
    window=2048,
    ring_key_dtype=torch.bfloat16,
    ring_value_dtype=torch.float16,
)
"""27B with its DFlash2 drafter: 64 KiB of KV a token, an image of 187 MiB."""

CHUNK = 512
TOKEN_BYTES = 4
"""Of a ledger."""


@dataclass
class Traffic:
    """A session on its way. `images`: frontiers by kind, newest last; `written`: names of what is stored already."""

    geometry: StateGeometry
    every: int
    frontier: int = 0
    published: int = 0
    images: dict[str, int] = field(default_factory=dict[str, int])
    written: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])

    def turn(self, asked: int, answered: int, *, last: bool = False) -> int:
        """Bytes written for a turn. `last`: the session is idle after it."""
        policy = ImagePolicy.of(self.geometry, CHUNK, None)
        for kind, tokens in (("turn_start", asked), ("turn_end", answered)):
            self.frontier += tokens
            nearest = max(self.images.values(), default=0)
            if policy.worth(self.frontier - nearest) or not self.images:
                self.images[kind] = self.frontier
        written = TOKEN_BYTES * self.frontier
        if last or self.frontier - self.published >= self.every:
            self.published = self.frontier
            written += sum(self._written(frontier) for frontier in set(self.images.values()))
        return written

    def _written(self, frontier: int) -> int:
        full, columns = divmod(frontier, PAGE_TOKENS)
        pages = [("page", number, PAGE_TOKENS) for number in range(full)]
        pages += [("page", full, columns)] if columns else []
        new_pages = [page for page in pages if page not in self.written]
        image = ("image", frontier, 0)
        new_image = image not in self.written
        self.written.update((image, *new_pages))
        page_bytes = self.geometry.target_page_bytes + self.geometry.draft_page_bytes
        return len(new_pages) * page_bytes + new_image * self.geometry.image_bytes


def kv_bytes(geometry: StateGeometry, tokens: int) -> int:
    return (geometry.target_page_bytes + geometry.draft_page_bytes) * tokens // PAGE_TOKENS


def conversation(turns: int = 20, asked: int = 200, answered: int = 600) -> tuple[float, float]:
    """Mean bytes written a turn, and mean new KV."""
    traffic = Traffic(GEOMETRY_27B, every=0)
    written = sum(traffic.turn(asked, answered) for _ in range(turns))
    return written / turns, kv_bytes(GEOMETRY_27B, traffic.frontier) / turns


def agent(calls: int = 100, system: int = 6000, asked: int = 320, answered: int = 80) -> tuple[float, float]:
    """Mean bytes written a tool call, and mean new KV. `asked`: tokens of a tool's result; `answered`: of a call."""
    traffic = Traffic(GEOMETRY_27B, every=LONG_TURN_TOKENS)
    written = sum(
        traffic.turn(asked + (0 if call else system), answered, last=call == calls - 1) for call in range(calls)
    )
    return written / calls, kv_bytes(GEOMETRY_27B, traffic.frontier) / calls
