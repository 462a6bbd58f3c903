"""A schedule's trace as JSON text: what the log stores, and what replays on an equal function anywhere."""

from __future__ import annotations

import json
from typing import Any

import tvm
from tvm import s_tir, tirx

from schedules.intrin import PREFIX, use
from schedules.space import InvalidDecision

__all__ = ["replay", "trace_json"]


def trace_json(sch: s_tir.Schedule) -> str:
    """The trace of ``sch`` as compact JSON; equal traces give equal texts."""
    return json.dumps(sch.trace.as_json(), default=_plain, separators=(",", ":"))


def replay(func: tirx.PrimFunc, trace: str) -> s_tir.Schedule:
    """Apply a trace that :func:`trace_json` gave to ``func``. Nothing in the text is executed.

    Raises :class:`InvalidDecision` where the trace is no trace or does not fit the function.
    """
    sch = s_tir.Schedule(tvm.IRModule({"main": func}), debug_mask="none", error_render_level="fast")
    try:
        steps = json.loads(trace)
        for name in _intrinsics(steps):
            use(name)
        s_tir.Trace.apply_json_to_schedule(steps, sch)
    except Exception as error:  # TVM reports a malformed trace with whatever its parser trips over
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidDecision(f"a trace must fit its function, but this one does not: {lines[-1]}") from error
    return sch


def _intrinsics(steps: Any) -> list[str]:
    """The tensor intrinsics of this package that a trace uses; TVM must know them before they are applied."""
    instructions, _decisions = steps
    names = [attributes[0] for kind, _inputs, attributes, _outputs in instructions if kind == "Tensorize"]
    return [name for name in names if str(name).startswith(PREFIX)]


def _plain(value: object) -> int | float | str:
    """TVM's own numbers, which ``as_json`` leaves in the decisions."""
    if isinstance(value, tirx.IntImm):
        return int(value.value)
    if isinstance(value, tirx.FloatImm):
        return float(value.value)
    raise TypeError(f"a trace holds numbers, texts and lists, got {type(value).__name__}")
