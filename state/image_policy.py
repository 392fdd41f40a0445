"""When is an image worth its bytes? Rules over token counts alone; who asks knows what is kept.

Only a prefix that ends in an image can be reused, but an image has a fixed size: 187 MiB at 27B, whether one token came
since the last one or thousands. So one is kept where prefilling the tokens since the nearest kept image would cost more
than keeping another: `min_tokens`. Whoever goes on later prefills at most that many tokens, and loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from state.geometry import PAGE_TOKENS, StateGeometry

BYTES_PER_TOKEN = 368 << 10
"""What an image may cost to spare a later turn one token's prefill. An image that is kept is hashed and written to
slower tiers at about 3 GB/s, and a token takes about 0.12 ms to prefill where images have their 187 MiB; both shrink
together with the model."""

LADDER_TOKENS = 1024
LONG_TURN_TOKENS = 8192


@dataclass(frozen=True)
class ImagePolicy:
    """`min_tokens`: an image is not worth it for as many tokens or fewer. `ladder_gap`: tokens between two images that
    a long prefill leaves."""

    min_tokens: int
    ladder_gap: int

    @classmethod
    def of(cls, geometry: StateGeometry, chunk: int, min_tokens: int | None) -> ImagePolicy:
        """`chunk`: tokens of a prefill slice. `min_tokens` None: what the size of an image says."""
        wanted = default_min_tokens(geometry) if min_tokens is None else min_tokens
        return cls(wanted, max(LADDER_TOKENS, chunk, wanted + 1))

    def worth(self, tokens: int) -> bool:
        """Whether a place that turns go on from is kept, `tokens` after the nearest kept image."""
        return tokens > self.min_tokens

    def ladder(self, tokens: int) -> bool:
        """Whether a prefill leaves an image at the end of a slice, `tokens` after the last one of its way."""
        return tokens >= self.ladder_gap

    def long_turn(self, tokens: int) -> bool:
        """Whether a turn that decodes leaves an image on its way, `tokens` after the last one."""
        return tokens >= max(LONG_TURN_TOKENS, self.min_tokens + 1)


def default_min_tokens(geometry: StateGeometry) -> int:
    """Tokens whose prefill costs as much as keeping an image of this geometry, in whole pages: 512 for 187 MiB, 0
    below 23 MiB, as for the demo model."""
    tokens = geometry.image_bytes // BYTES_PER_TOKEN
    return tokens - tokens % PAGE_TOKENS
