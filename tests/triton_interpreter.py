"""Makes bfloat16 right in Triton's interpreter, for tests only.

With TRITON_INTERPRET=1 a kernel runs on numpy, which has no bfloat16: Triton (seen in 3.6 to 3.8) keeps such values as
their 16 bits in uint16 arrays and then adds, compares, reduces and multiplies these bits as integers, and it cuts the
mantissa off where a card rounds to nearest even. No error, wrong numbers. The patch computes in float32 instead and
rounds each bfloat16 result to nearest even. Atomics on bfloat16 stay refused, as Triton refuses them itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

Handle = Any  # triton's TensorHandle: numpy data beside a triton dtype


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits in uint16 -> the same values in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits in uint16, to nearest even; NaN stays NaN, and overflow becomes infinity."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(np.shape(values))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    quiet_nan = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def _is_bf16(handle: Handle) -> bool:
    # A comparison's handle keeps its operands' dtype beside bool data, so the data has the last word.
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _wide(handle: Handle) -> Handle:
    return interpreter.TensorHandle(widen(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrow(handle: Handle) -> Handle:
    if handle.data.dtype == np.bool_:
        return interpreter.TensorHandle(handle.data, tl.int1)
    return interpreter.TensorHandle(narrow(handle.data), tl.bfloat16)


def _in_float32(operation: Callable[..., Handle]) -> Callable[..., Handle]:
    """For operations on handles: widen bfloat16 operands, and round the result if the last operand was one."""

    def patched(self: Any, *operands: Any) -> Handle:
        handles = [x for x in operands if isinstance(x, interpreter.TensorHandle)]
        if not any(_is_bf16(x) for x in handles):
            return operation(self, *operands)
        wide = [_wide(x) if isinstance(x, interpreter.TensorHandle) else x for x in operands]
        result = operation(self, *wide)
        return _narrow(result) if _is_bf16(handles[-1]) else result

    return patched


def _cast(original: Callable[..., Handle]) -> Callable[..., Handle]:
    def patched(self: Any, source: Handle, target_type: Any) -> Handle:
        if target_type.scalar == tl.bfloat16:
            if _is_bf16(source):
                return source
            return interpreter.TensorHandle(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return original(self, _wide(source), target_type)

    return patched


def _float_cast(original: Callable[..., Handle]) -> Callable[..., Handle]:
    def patched(self: Any, source: Handle, target_type: Any, rounding: Any) -> Handle:
        to_nearest = target_type.scalar == tl.bfloat16 and rounding != ir.ROUNDING_MODE.RTZ
        if to_nearest and source.dtype.scalar == tl.float32:
            return interpreter.TensorHandle(narrow(source.data), tl.bfloat16)
        return original(self, source, target_type, rounding)

    return patched


def _reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    """For reductions and scans over tuples of tensors: compute in float32, round what was bfloat16 once at the end."""

    def patched(self: Any, tensors: tuple[tl.tensor, ...]) -> list[tl.tensor]:
        wide = tuple(
            tl.tensor(_wide(x.handle), tl.block_type(tl.float32, list(x.shape))) if _is_bf16(x.handle) else x
            for x in tensors
        )
        results = original(self, wide)
        results = list(results) if isinstance(results, list | tuple) else [results]
        for index, (result, source) in enumerate(zip(results, tensors, strict=False)):
            if _is_bf16(source.handle) and result.dtype == tl.float32:
                shape = list(result.shape)
                kind = tl.block_type(tl.bfloat16, shape) if shape else tl.bfloat16
                results[index] = tl.tensor(_narrow(result.handle), kind)
        return results

    return patched


def _bf16_constant(self: Any, value: float) -> Handle:
    return interpreter.TensorHandle(narrow(np.array([value], dtype=np.float32)), tl.bfloat16)


def install() -> Callable[[], None]:
    """Patches the interpreter of this process; the returned function takes the patch back."""
    builder = interpreter.InterpreterBuilder
    changes: list[tuple[type, str, Any]] = [
        *((builder, name, _in_float32(getattr(builder, name))) for name in ("binary_op", "unary_op", "create_fma")),
        (builder, "ternary_op", _ternary(builder.ternary_op)),
        (builder, "create_dot", _in_float32(builder.create_dot)),
        (builder, "cast_impl", _cast(builder.cast_impl)),
        (builder, "create_fp_to_fp", _float_cast(builder.create_fp_to_fp)),
        (builder, "get_bf16", _bf16_constant),
        (interpreter.ReduceOps, "apply_impl", _reduction(interpreter.ReduceOps.apply_impl)),
        (interpreter.ScanOps, "apply_impl", _reduction(interpreter.ScanOps.apply_impl)),
    ]
    originals = [(owner, name, getattr(owner, name, None)) for owner, name, _ in changes]
    for owner, name, patched in changes:
        setattr(owner, name, patched)

    def undo() -> None:
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    return undo


def _ternary(original: Callable[..., Handle]) -> Callable[..., Handle]:
    """A select moves bits, which is right as it is; a clamp compares numbers."""
    clamp = _in_float32(original)

    def patched(self: Any, first: Handle, second: Handle, third: Handle, operation: Any) -> Handle:
        return (original if operation is np.where else clamp)(self, first, second, third, operation)

    return patched
