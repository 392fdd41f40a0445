"""Makes Triton's interpreter faster, for tests only.

Interpreted, `triton.language` is patched when a kernel is launched and then again whenever it calls a function of ours
(seen in 3.6 to 3.8): all members of four modules and classes are looked at each time, which is a third of what such
kernels take. Within a launch the second time changes nothing, for one module of ours.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def install() -> None:
    """Patches the interpreter of this process."""
    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()  # global names of modules, in the launch that runs

    def patch_once(function: Any) -> Any:
        names = id(function.__globals__)
        if names in patched:
            return None
        patched.add(names)
        return patch_language(function)

    def launch_anew(self: Any, *args: Any, **named: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *args, **named)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
