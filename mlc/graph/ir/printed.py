"""Modules as readable text."""

from __future__ import annotations

import tvm

from mlc.text import one_line

__all__ = ["as_script"]


def as_script(mod: tvm.IRModule) -> str:
    """The module as TVMScript. Of a function that TVM's printer (0.27) refuses, a comment with the reason: who looks at
    a model's code should not be denied its build."""
    try:
        return str(mod.script(show_meta=False))
    except (TypeError, RuntimeError):
        return "\n".join(_script(str(var.name_hint), func) for var, func in mod.functions_items())


def _script(name: str, func: tvm.relax.Function | tvm.tirx.PrimFunc) -> str:
    try:
        return str(tvm.IRModule({name: func}).script(show_meta=False))
    except (TypeError, RuntimeError) as error:
        return f"# {name} cannot be printed: {one_line(str(error))}\n"
