"""The tasks of a lowered module: which tensor functions it calls, and how often."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import tvm
import tvm_ffi
from tvm import relax, tirx

from mlc.graph.ir.constants import tensor_of
from mlc.graph.ir.rewrite import bindings, op_name
from mlc.graph.task import Task, normalise
from mlc.sizes import free_sizes
from mlc.target import Target
from schedules.merged import merged, with_named_sizes

__all__ = ["Called", "called_functions", "combined", "extract_tasks", "human_name", "with_alternatives"]


#: names longer than this mention each operator once only
_LONG = 60
#: the number after a word; in ``2d`` and ``4x4`` digits belong to it
_SERIAL = re.compile(r"(?<=[1-3]d)\d+$|(?<=\dx\d)\d+$|(?<=[a-z])(?<![1-3]d)(?<!\dx)\d+$")


def human_name(symbol: str) -> str:
    """A function's name without the numbers that only make it unique: ``fused_conv2d10_add6 --> fused_conv2d_add``."""
    parts = [_SERIAL.sub("", part) for part in symbol.split("_")]
    name = "_".join(part for part in parts if part and not part.isdigit())
    return name if len(name) <= _LONG else "_".join(dict.fromkeys(name.split("_")))


@dataclass
class _Calls:
    """How often ``main`` calls a function, and which of its arguments are constant in every call."""

    count: int
    constants: frozenset[int]

    def and_(self, other: _Calls) -> _Calls:
        """The calls of both, of functions that are one."""
        return _Calls(self.count + other.count, self.constants & other.constants)


def _calls(mod: tvm.IRModule) -> tuple[dict[str, _Calls], int]:
    """The calls of each function in the order of first calls, and the bytes of all constants among their arguments."""
    calls: dict[str, _Calls] = {}
    sizes: dict[tuple[int, int], int] = {}  # a tensor that several calls share is one
    for binding in bindings(mod["main"]):
        value = binding.value
        if not (isinstance(value, relax.Call) and op_name(value) == "relax.call_tir"):
            continue
        found = {i: tensor_of(arg) for i, arg in enumerate(value.args[1].fields)}
        tensors = {i: tensor for i, tensor in found.items() if tensor is not None}
        for tensor in tensors.values():
            size = math.prod(map(int, tensor.shape)) * ((tensor.dtype.bits + 7) // 8)
            sizes[int(tensor.data_ptr()), size] = size
        symbol, call = value.args[0].name_hint, _Calls(1, frozenset(tensors))
        calls[symbol] = calls[symbol].and_(call) if symbol in calls else call
    return calls, sum(sizes.values())


@dataclass(frozen=True)
class Called:
    """A function that ``main`` calls: ``symbols`` all stand for it, in the order of first calls. ``task`` is its own,
    whose weight counts these calls alone; tasks of an equal key have one name."""

    symbols: tuple[str, ...]
    task: Task


def called_functions(mod: tvm.IRModule, target: Target) -> list[Called]:
    """The distinct tensor functions that ``main`` calls, in the order of their first calls.

    Functions are the same only if they compute the same, constants included.
    """
    found = _distinct(mod, target)
    names = {task.key: task.name for task in _merged((each.task, each.calls) for each in found)}
    return [Called(tuple(each.symbols), _weighed(replace(each.task, name=names[each.task.key]), each.calls))
            for each in found]


def extract_tasks(mod: tvm.IRModule, target: Target) -> list[Task]:
    """One task for each group of called tensor functions that are scheduled alike, in the order of their first calls.

    Functions with equal keys are one task, whatever they are called in the module; ``weight`` is the number of all of
    their calls. Names are unique: the second ``fused_conv2d_add`` is ``fused_conv2d_add_2``.
    """
    return _merged((each.task, each.calls) for each in _distinct(mod, target))


@dataclass
class _Function:
    symbols: list[str]
    task: Task
    calls: _Calls


def _distinct(mod: tvm.IRModule, target: Target) -> list[_Function]:
    """The functions that ``main`` calls, equal ones as one."""
    calls, constant_bytes = _calls(mod)
    free = free_sizes(mod)
    found: list[_Function] = []
    known: defaultdict[str, list[_Function]] = defaultdict(list)
    for symbol, call in calls.items():
        func = mod[symbol]
        if not isinstance(func, tirx.PrimFunc):
            continue
        normal = normalise(func, free)
        task = Task(human_name(symbol), merged(with_named_sizes(normal)) if target.kind == "cuda" else normal, target,
                    constant_bytes=constant_bytes)
        twins = known[task.identity]
        # a hash is no proof, and taking one function for another is wrong numbers
        twin = next((each for each in twins if _are_equal(each.task.func, task.func)), None)
        if twin is not None:
            twin.symbols.append(symbol)
            twin.calls = twin.calls.and_(call)
        else:
            twins.append(_Function([symbol], task, call))
            found.append(twins[-1])
    return found


def _are_equal(one: tirx.PrimFunc, other: tirx.PrimFunc) -> bool:
    return bool(tvm_ffi.structural_equal(one, other, map_free_vars=True))


def _merged(functions: Iterable[tuple[Task, _Calls]]) -> list[Task]:
    """Merge functions with equal keys into one task."""
    found: dict[str, tuple[Task, _Calls]] = {}
    for task, calls in functions:
        known = found.get(task.key)
        found[task.key] = (task, calls) if known is None else (known[0], known[1].and_(calls))
    return _uniquely_named(_weighed(task, calls) for task, calls in found.values())


def _weighed(task: Task, calls: _Calls) -> Task:
    return replace(task, weight=calls.count, constants=tuple(sorted(calls.constants)))


def combined(tasks: Iterable[Task]) -> list[Task]:
    """Merge tasks with equal keys, adding up their weights, in the order of their first appearance."""
    found: dict[str, Task] = {}
    for task in tasks:
        key = task.key
        found[key] = found[key].with_weight(found[key].weight + task.weight) if key in found else task
    return list(found.values())


def with_alternatives(tasks: Sequence[Task], alternatives: Iterable[Task]) -> list[Task]:
    """``tasks`` of a module, followed by the alternatives that it might call instead.

    ``alternatives`` are the tasks that :func:`mlc.graph.lowering.select.ChooseKernels` compared with each other.
    """
    asked = {task.key: task for task in alternatives}
    taken = [task.competing(asked[task.key].choice) if task.key in asked else task for task in tasks]
    rivals = {task.choice: task for task in taken if task.choice}
    keys = {task.key for task in taken}
    others = [
        replace(task, constants=rivals[task.choice].constants, constant_bytes=rivals[task.choice].constant_bytes)
        for key, task in asked.items() if key not in keys and task.choice in rivals
    ]
    return [*taken, *_uniquely_named(others, Counter(human_name(task.name) for task in taken))]


def _uniquely_named(tasks: Iterable[Task], names: Counter[str] | None = None) -> list[Task]:
    names = Counter() if names is None else names
    named = []
    for task in tasks:
        names[task.name] += 1
        named.append(replace(task, name=f"{task.name}_{names[task.name]}" if names[task.name] > 1 else task.name))
    return named
