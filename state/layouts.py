"""Which tensors does a state consist of, in which segments? The answer for a geometry, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from state.errors import FormatError, StateError
from state.geometry import DTYPE_NAMES, PAGE_TOKENS, StateGeometry, pages_for

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""The tensors of one kind of segment: name -> (dtype, shape)."""
Layouts = Mapping[str, Layout]
"""Per kind of segment: image, target, draft."""

SEGMENT_HEADER_LIMIT = 4096
"""Bytes that a segment may have beyond its tensors' data: its safetensors header, of which ours take about 400."""

_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_RINGS = ("ring_keys", "ring_values")


def layouts(geometry: StateGeometry) -> dict[str, Layout]:
    """The tensors of each kind of segment; rings at their capacity S. Planes without layers are absent."""
    g = geometry
    image: Layout = {}
    if g.gdn_layers:
        image["gdn"] = ("F32", (g.gdn_layers, g.gdn_heads, g.gdn_key_dim, g.gdn_value_dim))
        image["conv"] = (DTYPE_NAMES[g.conv_dtype], (g.gdn_layers, g.conv_channels, g.conv_history))
    image["hidden"] = (DTYPE_NAMES[g.hidden_dtype], (g.hidden_size,))
    if g.ring_layers:
        ring = (g.ring_layers, g.window, g.draft_kv_heads, g.draft_head_dim)
        image["ring_keys"] = (DTYPE_NAMES[g.ring_key_dtype], ring)
        image["ring_values"] = (DTYPE_NAMES[g.ring_value_dtype], ring)
    known = {"image": image}
    if g.kv_layers:
        page = (g.kv_layers, PAGE_TOKENS, g.kv_heads, g.kv_head_dim)
        known["target"] = dict.fromkeys(("keys", "values"), (DTYPE_NAMES[g.kv_dtype], page))
    if g.full_layers:
        page = (g.full_layers, PAGE_TOKENS, g.draft_kv_heads, g.draft_head_dim)
        known["draft"] = {
            "keys": (DTYPE_NAMES[g.ring_key_dtype], page),
            "values": (DTYPE_NAMES[g.ring_value_dtype], page),
        }
    return known


def geometry_of(stated: Layouts) -> StateGeometry:
    """The geometry whose layouts these are. Raises `FormatError` naming the kind that no geometry has."""

    def taken(kind: str, name: str, rank: int) -> tuple[torch.dtype, tuple[int, ...]]:
        dtype, shape = stated.get(kind, {}).get(name, ("F32", (0,) * rank))
        if len(shape) != rank or dtype not in _BYTES:
            raise FormatError(f"manifest.layouts.{kind}.{name}", f"is {dtype} {list(shape)}, must have {rank} sizes")
        return next(known for known, label in DTYPE_NAMES.items() if label == dtype), shape

    _, gdn = taken("image", "gdn", 4)
    conv_dtype, conv = taken("image", "conv", 3)
    hidden_dtype, hidden = taken("image", "hidden", 1)
    key_dtype, ring = taken("image", "ring_keys", 4)
    value_dtype, _ = taken("image", "ring_values", 4)
    kv_dtype, target = taken("target", "keys", 4)
    draft_key_dtype, draft = taken("draft", "keys", 4)
    draft_value_dtype, _ = taken("draft", "values", 4)
    drafter = draft if draft[0] else ring
    try:
        geometry = StateGeometry(
            kv_layers=target[0],
            kv_heads=target[2],
            kv_head_dim=target[3],
            kv_dtype=kv_dtype,
            gdn_layers=gdn[0],
            gdn_heads=gdn[1],
            gdn_key_dim=gdn[2],
            gdn_value_dim=gdn[3],
            conv_channels=conv[1],
            conv_history=conv[2],
            conv_dtype=conv_dtype,
            hidden_size=hidden[0],
            hidden_dtype=hidden_dtype,
            ring_layers=ring[0],
            full_layers=draft[0],
            draft_kv_heads=drafter[2],
            draft_head_dim=drafter[3],
            window=ring[1],
            ring_key_dtype=draft_key_dtype if draft[0] else key_dtype,
            ring_value_dtype=draft_value_dtype if draft[0] else value_dtype,
        )
    except StateError as error:
        raise FormatError("manifest.layouts", f"are those of no geometry ({error})") from None
    check_layouts(stated, geometry)
    return geometry


def check_layouts(stated: Layouts, geometry: StateGeometry) -> None:
    """Raises `FormatError` naming the first kind whose layout is not this geometry's."""
    known = layouts(geometry)
    for kind in [*known, *stated]:
        if stated.get(kind) != known.get(kind):
            problem = f"is {stated.get(kind)}, this geometry has {known.get(kind)}"
            raise FormatError(f"manifest.layouts.{kind}", problem)


def at_frontier(layout: Layout, frontier: int) -> Layout:
    """A segment's tensors at a frontier: of a ring only its live interval, min(F, S) positions."""
    return {
        name: (dtype, (shape[0], min(frontier, shape[1]), *shape[2:]) if name in _RINGS else shape)
        for name, (dtype, shape) in layout.items()
    }


def kind_of(segment_name: str) -> str:
    return segment_name.partition("/")[0]


def segment_names(stated: Layouts, frontier: int) -> list[str]:
    """All segments of a checkpoint in their order: image, target/0, target/1, ..., draft/0, draft/1, ..."""
    paged = [kind for kind in ("target", "draft") if kind in stated]
    return ["image", *(f"{kind}/{index}" for kind in paged for index in range(pages_for(frontier)))]


def data_bytes(layout: Layout) -> int:
    """Bytes of all tensors of a layout."""
    return sum(_BYTES[dtype] * prod(shape) for dtype, shape in layout.values())
