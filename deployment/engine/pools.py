"""How large are an engine's pools?"""

from __future__ import annotations

import torch

from deployment.engine.loading import Models
from deployment.engine.options import EngineOptions
from model.errors import ModelError
from state.geometry import pages_for
from state.memory import StateMemory


def state_memory(models: Models, options: EngineOptions) -> StateMemory:
    """All pools of an engine. Raises ModelError where the device has no room for them.

    Unless told otherwise there are pages for every lane at full context and half as much for checkpoints; a GPU gives
    at most what is free beside the weights, less a tenth for activations.
    """
    images = options.lanes + options.images
    pages = options.pages or pages_for(models.context) * (options.lanes + max(1, options.lanes // 2))
    geometry = models.geometry
    if models.device.type == "cuda":
        free = int(0.9 * torch.cuda.mem_get_info(models.device)[0])
        fitting = (free - images * geometry.image_bytes) // (geometry.target_page_bytes + geometry.draft_page_bytes)
        pages = pages if options.pages else min(pages, fitting)
        if pages < 1 or pages > fitting:
            raise ModelError(
                f"images and pages do not fit the device: {images} images of {geometry.image_bytes} bytes and "
                f"{max(pages, 1)} pages of {geometry.target_page_bytes + geometry.draft_page_bytes} bytes are wanted, "
                f"{free} bytes can be used; choose fewer lanes, images or pages"
            )
    return StateMemory(geometry, pages, pages, images, models.device)
