"""The CPU twin of a CUDA schedule: the same transformations without threads, so that a CPU can run the result.

A schedule is its trace. Replayed without binding loops to threads and without tensor intrinsics, and with every buffer
in ordinary memory, it computes what the kernel would compute if its threads ran one after another. That checks
tiling, padding, predicates, layouts and fusion; it can't see a missing barrier, which
:mod:`mlc.testing.cuda_emulator` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from tvm import s_tir, tirx

__all__ = ["run", "twin"]

_DROPPED = frozenset({"Bind", "Tensorize"})
#: instructions whose last attribute names the memory that a buffer lives in
_SCOPED = frozenset({"CacheRead", "CacheWrite", "SetScope", "ReIndexCacheRead", "ReIndexCacheWrite"})
#: a pipeline is unrolled into copies of the loop, which the emulator runs as they are
_DROPPED_ANNOTATIONS = frozenset({
    "permuted_layout", "software_pipeline_async_stages", "software_pipeline_order", "software_pipeline_stage",
})


def twin(sch: s_tir.Schedule, func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` under the trace of ``sch``, for a CPU."""
    import tvm
    from tvm import s_tir as schedulable

    replayed = schedulable.Schedule(tvm.IRModule({"main": func}), debug_mask="none")
    assert sch.trace is not None, "a CUDA schedule must record its trace"
    kept = [_on_cpu(inst) for inst in sch.trace.insts if not _dropped(inst)]
    schedulable.schedule.Trace(kept, dict(sch.trace.decisions)).apply_to_schedule(replayed, remove_postproc=False)
    return replayed.mod["main"]


def _dropped(inst: Any) -> bool:
    if inst.kind.name == "Annotate":
        return str(inst.attrs[0]) in _DROPPED_ANNOTATIONS
    return inst.kind.name in _DROPPED


def _on_cpu(inst: Any) -> Any:
    if inst.kind.name not in _SCOPED:
        return inst
    from tvm import s_tir as schedulable

    inner = ("shared", "local", "warp")
    attrs = ["global" if isinstance(a, str) and a.split(".")[0] in inner else a for a in inst.attrs]
    return schedulable.schedule.Instruction(inst.kind, inst.inputs, attrs, inst.outputs)


def run(func: tirx.PrimFunc, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> list[np.ndarray]:
    """Build a function for this CPU's own architecture and call it; ``outputs`` are written and returned."""
    import tvm

    module = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")
    arrays = [tvm.runtime.tensor(a) for a in (*inputs, *outputs)]
    module["main"](*arrays)
    return [a.numpy() for a in arrays[len(inputs) :]]
