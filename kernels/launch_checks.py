"""What a launcher refuses: a kernel reads memory as its arguments describe it, so these are checked first."""

from __future__ import annotations

import torch


def require(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raises ValueError unless `tensor` has this shape, one of `dtypes` (any, where none is given) and a last axis
    without gaps."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be {shape}")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"{name}: {tensor.dtype}, must be {' or '.join(str(dtype) for dtype in dtypes)}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: its last axis has stride {tensor.stride(-1)}, must be 1")


def require_contiguous(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """As `require`, and without gaps on every axis."""
    require(name, tensor, shape, *dtypes)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()}, must be contiguous")


def require_head_dim(name: str, head_dim: int) -> None:
    """Raises ValueError for a head dimension that no matrix unit takes as one block."""
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"{name}: head dimension {head_dim}, must be a power of two of at least 16")
