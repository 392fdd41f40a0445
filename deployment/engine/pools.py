"""How large are an engine's pools?"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from deployment.engine.histories import history_bytes
from deployment.engine.loading import Models
from deployment.engine.options import EngineOptions
from model.errors import ModelError
from state.geometry import StateGeometry, pages_for
from state.memory import StateMemory

FREE_PERCENT = 90
"""Of what is free beside the weights and what comes later, pools may have that much: the rest is for activations, a
round's buffers and graphs, and the one image that nobody holds."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Later:
    """What the device will be asked for when it is first needed, in bytes. `media`: what a tower makes of images and
    videos; `penalties`: what lanes remember of tokens."""

    media: int = 0
    penalties: int = 0

    @classmethod
    def of(cls, options: EngineOptions, vocabulary: int, sees: bool) -> Later:
        """`sees`: whether the model has a tower."""
        return cls(options.media_cache_bytes if sees else 0, history_bytes(options.lanes, vocabulary))


@dataclass(frozen=True)
class PoolSizes:
    """Units of each pool; target and draft pools have equally many pages. `context`: tokens of one sequence."""

    images: int
    pages: int
    geometry: StateGeometry
    context: int

    @property
    def image_bytes(self) -> int:
        return self.images * self.geometry.image_bytes

    @property
    def target_bytes(self) -> int:
        return self.pages * self.geometry.target_page_bytes

    @property
    def draft_bytes(self) -> int:
        return self.pages * self.geometry.draft_page_bytes

    def __str__(self) -> str:
        total = self.image_bytes + self.target_bytes + self.draft_bytes
        sequences = self.pages / pages_for(self.context)
        return (
            f"{self.images} images ({_mib(self.image_bytes)}), {self.pages} target pages ({_mib(self.target_bytes)}) "
            f"and draft pages ({_mib(self.draft_bytes)}), {_mib(total)} in all; the pages hold {sequences:.1f} "
            f"sequences of {self.context} tokens"
        )


def pool_sizes(
    options: EngineOptions, geometry: StateGeometry, context: int, free: int | None, later: Later
) -> PoolSizes:
    """`free`: bytes that the device has beside the weights; None where memory does not bound the pools.

    Unless options say how many, there are pages for every lane at full context and half as much for checkpoints, or as
    many as fit. Raises ModelError where what is asked for does not fit.
    """
    images = options.lanes + options.images
    pages = options.pages or pages_for(context) * (options.lanes + max(1, options.lanes // 2))
    if free is not None:
        page_bytes = geometry.target_page_bytes + geometry.draft_page_bytes
        usable = max(0, free - later.media - later.penalties) * FREE_PERCENT // 100
        fitting = (usable - images * geometry.image_bytes) // page_bytes
        pages = pages if options.pages else min(pages, fitting)
        if pages < 1 or pages > fitting:
            raise ModelError(
                f"images and pages do not fit the device: {images} images of {geometry.image_bytes} bytes and "
                f"{max(pages, 1)} pages of {page_bytes} bytes are wanted, {usable} bytes can be used beside "
                f"{later.media} that are kept for media (media_cache_bytes) and {later.penalties} for penalties of all "
                f"lanes; choose fewer lanes, images or pages, or a smaller media_cache_bytes"
            )
    return PoolSizes(images, pages, geometry, context)


def state_memory(models: Models, options: EngineOptions) -> StateMemory:
    """All pools of an engine, whose sizes it logs. Raises ModelError where the device has no room for them."""
    free = torch.cuda.mem_get_info(models.device)[0] if models.device.type == "cuda" else None
    later = Later.of(options, models.target.public_rows, models.vision is not None)
    sizes = pool_sizes(options, models.geometry, models.context, free, later)
    logger.info("state pools on %s: %s", models.device, sizes)
    return StateMemory(models.geometry, sizes.pages, sizes.pages, sizes.images, models.device)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
