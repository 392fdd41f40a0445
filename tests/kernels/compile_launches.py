"""Compiles for sm_90 what `launches.py` would start, and says of each kernel what it needs of a multiprocessor.

    python -m tests.kernels.compile_launches        one JSON object: {"compiled": [...], "kernels": [names]}

Its own process, because Triton decides at import whether kernels are compiled or interpreted. No card is needed. The
launchers run on tensors without memory, so that one that would wait for a number of the device fails here too.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import kernels

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
Launch = tuple[JITFunction, dict[str, Any], dict[str, Any]]


def launched(call: Callable[[], object]) -> list[Launch]:
    """The kernels that `call` starts, with their arguments by name and their options."""
    found: list[Launch] = []

    def take(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        found.append((self, dict(zip(self.arg_names, args, strict=False)) | named, options))

    run, JITFunction.run = JITFunction.run, take  # type: ignore[method-assign]
    try:
        call()
    finally:
        JITFunction.run = run
    return found


def source(kernel: JITFunction, arguments: dict[str, Any]) -> ASTSource:
    """As a launch would specialise it: ones are constants, and multiples of 16 are known as such."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        known = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (known and type(value) is int and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            # an allocation begins at a multiple of 256 bytes
            if value.storage_offset() * value.element_size() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if known and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    return ASTSource(kernel, signature, constants, attributes)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of its stack: where a compiler puts what it has no registers for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", said)}


def compiled(launch: Launch) -> dict[str, Any]:
    kernel, arguments, options = launch
    binary = triton.compile(source(kernel, arguments), target=TARGET, options=options)
    return {
        "kernel": kernel.__name__,
        "module": kernel.__module__,
        "shared": binary.metadata.shared,
        "overlaps": options.get("launch_pdl", False),
        "ptx": binary.asm["ptx"],
        **resources(binary.asm["cubin"]),
    }


def all_kernels() -> list[str]:
    """Names of what is launched: of all Triton functions, those that no other one calls."""
    modules = [importlib.import_module(f"kernels.{module.name}") for module in pkgutil.iter_modules(kernels.__path__)]
    functions = {
        value.__name__: value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.__module__ == module.__name__
    }
    called = {
        name
        for name in functions
        for caller, function in functions.items()
        if caller != name and re.search(rf"\b{name}\(", function.src)
    }
    return sorted(set(functions) - called)


def main() -> None:
    from tests.kernels.launches import official_launches

    launches = [launch for call in official_launches() for launch in launched(call)]
    json.dump({"compiled": [compiled(launch) for launch in launches], "kernels": all_kernels()}, sys.stdout)


if __name__ == "__main__":
    main()
