"""What a scheduled function becomes before machines differ: the code by which equal candidates are known.

Schedules that differ in a decision which lowering makes nothing of (a tile as large as its loop, an unrolling that
simplifies away) lower to equal code. The hash is taken behind the last pass that host and device code share. Workers
take it while they build: lowering every candidate once more before it is proposed took 25 ms each, on seven kernels,
for one duplicate in a hundred.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.instrument import pass_instrument

from mlc.codegen import code_generation, pipeline

__all__ = ["compile_hashed"]

_LAST_SHARED_PASS = "tirx.MakePackedAPI"  # afterwards host and device code go separate ways


@pass_instrument
class _Lowered:
    """Hashes the module when it is lowered as far as host and device share."""

    def __init__(self) -> None:
        self.code_hash = ""

    def run_after_pass(self, mod: tvm.IRModule, info: Any) -> None:
        if info.name == _LAST_SHARED_PASS:
            self.code_hash = f"{tvm_ffi.structural_hash(mod, map_free_vars=True) & (2**64 - 1):016x}"


def compile_hashed(func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[Any, str]:
    """The runtime module of ``func`` and its code's hash. CPU code goes straight to memory, without a linker."""
    lowered = _Lowered()
    with code_generation(target, [lowered]) as single:
        module = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), single,
                             tir_pipeline=pipeline(single)).jit()
    return module, lowered.code_hash
