"""Which tensor functions a module calls: what there is to tune."""

from __future__ import annotations

import re
from collections import Counter

import tvm
from tvm import relax, tirx

from mlc.graph.rewrite import bindings, op_name
from mlc.graph.task import Task, normalise
from mlc.target import Target

__all__ = ["extract_tasks", "human_name"]


#: names longer than this mention each operator once only
_LONG = 60


def human_name(symbol: str) -> str:
    """A function's name without the numbers that only keep it apart: ``fused_conv2d10_add6 --> fused_conv2d_add``."""
    parts = [re.sub(r"(?<=[1-3]d)\d+$|(?<=[a-z])(?<![1-3]d)\d+$", "", part) for part in symbol.split("_")]
    name = "_".join(part for part in parts if part and not part.isdigit())
    return name if len(name) <= _LONG else "_".join(dict.fromkeys(name.split("_")))


def _calls(mod: tvm.IRModule) -> Counter[str]:
    """How often ``main`` calls each function, in the order of first calls."""
    calls: Counter[str] = Counter()
    for binding in bindings(mod["main"]):
        value = binding.value
        if isinstance(value, relax.Call) and op_name(value) == "relax.call_tir":
            calls[value.args[0].name_hint] += 1
    return calls


def extract_tasks(mod: tvm.IRModule, target: Target) -> list[Task]:
    """One task for each distinct tensor function that ``main`` calls, in the order of first calls.

    Equal functions are one task whatever they are called in the module; ``weight`` counts the calls of all of them.
    Names are unique: the second ``fused_conv2d_add`` is ``fused_conv2d_add_2``.
    """
    tasks: dict[str, Task] = {}
    names: Counter[str] = Counter()
    for symbol, count in _calls(mod).items():
        func = mod[symbol]
        if not isinstance(func, tirx.PrimFunc):
            continue
        task = Task(human_name(symbol), normalise(func), target, count)
        key = task.key
        if key in tasks:
            tasks[key] = tasks[key].with_weight(tasks[key].weight + count)
            continue
        names[task.name] += 1
        if names[task.name] > 1:
            task = Task(f"{task.name}_{names[task.name]}", task.func, target, count)
        tasks[key] = task
    return list(tasks.values())
