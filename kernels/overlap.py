"""Launches that overlap: a kernel takes its places on the card while the one before it still runs.

A launch with `launch_pdl=True` starts as soon as every program of the kernel before it has called `let_next_start` or
has ended. So its programs call `wait_for_earlier` before they read or write: it returns when all that kernel wrote is
there to be read, and since that kernel waited likewise, all that came before it too. Only this may stand ahead of it:
`ask_for`, since a line of memory is the same in the cache; loads of what none of our kernels writes, such as slots; and
loads of what was there before the kernel before this one let it start, having waited itself.

Cards before Hopper cannot, nor can Triton's interpreter: there `overlaps` is False and launches follow each other.

Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
"""

# Triton declares neither its launch options nor what constexpr parameters take.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 9


def overlaps(x: torch.Tensor) -> bool:
    """Whether launches on the device of `x` may overlap. A tensor without memory stands for the newest card."""
    return x.is_meta or (x.is_cuda and _is_new_enough(x.device))


@cache
def _is_new_enough(device: torch.device) -> bool:
    return not knobs.runtime.interpret and torch.cuda.get_device_capability(device)[0] >= _HOPPER


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr):
    """Returns when the kernels before this one are done. Before all loads and stores of a kernel that overlaps."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """The next launch may take the places that are free, where it waits for the end of this one."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def ask_for(pointers, OVERLAPS: tl.constexpr):
    """Has the lines of memory behind `pointers` brought into the L2 cache, ahead of `wait_for_earlier`."""
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
