"""The canonical lowered code of a candidate, before it is specialised to a machine; identifies equal candidates.

Schedules that differ in a decision which lowering makes nothing of (a tile as large as its loop, an unrolling that
simplifies away) lower to equal code. The hash is taken behind the last pass that host and device code share. Workers
take it while they build: lowering every candidate once more before it is proposed took 25 ms each, on seven kernels,
for one duplicate in a hundred.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.ir.instrument import pass_instrument

from mlc.codegen import code_generation, pipeline
from mlc.link import link_shared
from mlc.measure.gauge import LANES, ROUNDS
from mlc.measure.runner import ENTRY

__all__ = ["arithmetic", "compile_hashed", "export_hashed"]

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
    compiled, code_hash = _compiled(func, target)
    return compiled.jit(), code_hash


def export_hashed(func: tirx.PrimFunc, target: tvm.target.Target, path: Path, architecture: str) -> str:
    """Write ``func`` to ``path`` as a library of which :data:`ENTRY` is the one function, for a CPU that need not be
    this one; its code's hash. Raises :class:`mlc.errors.BuildError` where nothing links it."""
    compiled, code_hash = _compiled(func, target)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled.export_library(str(path), fcompile=partial(link_shared, architecture=architecture),
                                workspace_dir=folder)
    return code_hash


def arithmetic(threads: int) -> tirx.PrimFunc:
    """The computation that :mod:`mlc.measure.gauge` times: sums of products within the first-level cache, a share for
    each thread."""
    x, y = (te.placeholder(shape, name=name) for shape, name in (((threads, LANES), "x"), ((ROUNDS,), "y")))
    r = te.reduce_axis((0, ROUNDS), name="r")
    products = te.compute((threads, LANES), lambda t, v: te.sum(x[t, v] * y[r], axis=[r]), name="products")
    sch = s_tir.Schedule(te.create_prim_func([x, y, products]))
    t, v, rounds = sch.get_loops(sch.get_sblock("products"))
    sch.reorder(t, rounds, v)
    sch.vectorize(v)
    sch.parallel(t)
    return sch.mod["main"]


def _compiled(func: tirx.PrimFunc, target: tvm.target.Target) -> tuple[tvm.runtime.Executable, str]:
    lowered = _Lowered()
    with code_generation(target, [lowered]) as single:
        compiled = tvm.compile(tvm.IRModule({ENTRY: func.with_attr("global_symbol", ENTRY)}), single,
                               tir_pipeline=pipeline(single))
    return compiled, lowered.code_hash
