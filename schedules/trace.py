"""Traces of schedules as JSON text, as the log stores them, and their replay on an equal function."""

from __future__ import annotations

import json
from typing import Any

import tvm
from tvm import s_tir, tirx

from schedules.amx_tiles import check_tiles
from schedules.analysis.expressions import walk
from schedules.cuda.few_bits_form import check_marked_few_bits
from schedules.cuda.heads import check_marked
from schedules.cuda.product import check_marked_product
from schedules.intrin import check_available, use
from schedules.language import parse_trace
from schedules.permuted_layout import check_permuted
from schedules.reducers import register
from schedules.size_limits import check_growth, check_inlining
from schedules.space import InvalidDecision, unshared

__all__ = ["replay", "trace_json"]


def trace_json(sch: s_tir.Schedule) -> str:
    """The trace of ``sch`` as compact JSON; equal traces give equal texts."""
    return json.dumps(sch.trace.as_json(), default=_plain, separators=(",", ":"))


def replay(func: tirx.PrimFunc, trace: str, target: tvm.target.Target | None = None) -> s_tir.Schedule:
    """Apply a trace that :func:`trace_json` gave to ``func``. Nothing in the text is executed.

    ``target`` is what the result is built for; left out, the trace may use the instructions of any machine.

    The text may come from anyone: the result computes what ``func`` does, on equal parameters, within bounded memory,
    code and work. Raises :class:`InvalidDecision` where the trace is no trace, says what no space's program says
    (:mod:`schedules.language`), asks for an instruction that ``target`` lacks, does not fit the function or makes far
    more of it (:mod:`schedules.size_limits`).
    """
    steps = parse_trace(trace, len(func.params))
    check_inlining(func, steps[0])
    register()
    sch = s_tir.Schedule(tvm.IRModule({"main": unshared(func)}), debug_mask="none", error_render_level="fast")
    try:
        for name in _intrinsics(steps):
            use(name)
            if target is not None:
                check_available(name, target)
        _check_factors(func, steps)
        s_tir.Trace.apply_json_to_schedule(steps, sch)
    except InvalidDecision:
        raise
    except Exception as error:  # TVM reports a trace that does not fit with whatever its checks raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidDecision(f"a trace must fit its function, but this one does not: {lines[-1]}") from error
    check_growth(func, sch.mod["main"])
    check_permuted(sch.mod["main"])
    check_marked(func, sch.mod["main"])
    check_marked_product(func, sch.mod["main"])
    check_marked_few_bits(func, sch.mod["main"])
    check_tiles(sch.mod["main"])
    return sch


def _check_factors(func: tirx.PrimFunc, steps: list[Any]) -> None:
    """Raise :class:`InvalidDecision` where a reduction is factored by a loop that does not divide it: the guard of the
    last round stands in the block's own variables then, and TVM's ``ComputeAt`` loses it."""
    instructions, decisions = steps
    for end, (kind, *_) in enumerate(instructions, 1):
        if kind == "RFactor":
            begun = s_tir.Schedule(tvm.IRModule({"main": unshared(func)}), debug_mask="none", error_render_level="fast")
            s_tir.Trace.apply_json_to_schedule([instructions[:end], [d for d in decisions if d[0] < end]], begun)
            realized: list[s_tir.SBlockRealize] = []
            walk(begun.mod["main"].body, (s_tir.SBlockRealize, realized.append))
            for each in realized:
                if str(each.block.name_hint).endswith("_rf") and _guards_rounds(each):
                    name = each.block.name_hint
                    raise InvalidDecision(f"a reduction must be factored by what divides it, but {name} is not")


def _guards_rounds(realize: s_tir.SBlockRealize) -> bool:
    """Whether a block is not run in some rounds of a loop over what it reduces."""
    iters = zip(realize.block.iter_vars, realize.iter_values, strict=True)
    reduced = {var for each, value in iters if int(each.iter_type) == tirx.IterVar.CommReduce
               for var in _variables(value)}
    return not reduced.isdisjoint(_variables(realize.predicate))


def _variables(expression: Any) -> list[tirx.Var]:
    return [] if isinstance(expression, bool) else list(tirx.analysis.undefined_vars(expression))


def _intrinsics(steps: list[Any]) -> list[str]:
    """The tensor intrinsics that a trace uses; TVM must know them before they are applied."""
    return [attributes[0] for kind, _inputs, attributes, _outputs in steps[0] if kind == "Tensorize"]


def _plain(value: object) -> int | float | str:
    """TVM's own numbers, which ``as_json`` leaves in the decisions."""
    if isinstance(value, tirx.IntImm):
        return int(value.value)
    if isinstance(value, tirx.FloatImm):
        return float(value.value)
    raise TypeError(f"a trace holds numbers, texts and lists, got {type(value).__name__}")
