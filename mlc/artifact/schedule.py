"""Schedules every tensor function: the log's best trace, else a shipped one, else the first seed of its space."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import tvm
from tvm import relax, s_tir, tirx

from cost_model.roofline import analyse
from mlc.artifact.pieces import Scheduled, in_pieces
from mlc.codegen import prepared
from mlc.errors import BuildError
from mlc.frontend.origins import listed
from mlc.graph.ir.rewrite import bindings, op_name
from mlc.graph.task import Task
from mlc.graph.tasks import Called, called_functions
from mlc.log.record import Record
from mlc.log.shipped import is_shipped, schedule_of
from mlc.measure.machine import machine_id
from mlc.target import Target
from schedules import registry
from schedules.free import SIZES, usual_function
from schedules.pieces import Piece, pieces_of, with_pieces
from schedules.space import InvalidDecision, Space, first_seed

__all__ = ["BuiltFunction", "Lookup", "Origins", "last_line", "ready", "schedule_functions"]

_LOG = logging.getLogger("mlc.build")

#: the log's best record of a task, or None
Lookup = Callable[[Task], Record | None]

#: a function's symbol --> the model's nodes that each call of it comes from, as :func:`mlc.frontend.origins.labelled`
#: gives them
Origins = Mapping[str, tuple[tuple[str, ...], ...]]


@dataclass(frozen=True)
class BuiltFunction:
    """The result for one distinct tensor function; several may belong to one task, with its ``key``.

    ``calls`` is the number of its call sites. ``seconds`` is its logged time, ``roofline_seconds`` a lower bound from
    the machine's peak rates, ``bytes`` the memory traffic that is at least necessary (both 0 if the function cannot be
    analysed), all per call.

    ``source`` of the schedule: ``log`` (a trace that was measured here), ``untimed`` (one that was ranked but not run),
    ``shipped`` (one that came with mlc; ``seconds`` only if it was timed on such a machine), ``seed`` (computed by the
    space), ``plain`` (unscheduled loops, if nothing else compiles) or ``given`` (the function came with its schedule).
    ``replaced`` says what failed in code generation before this schedule was used, and is empty if the first one
    worked. ``origins`` are the model's nodes that each call computes, as far as they are known.
    """

    name: str
    symbol: str
    key: str
    space: str
    source: str
    calls: int = 1
    seconds: float | None = None
    flops: float = 0.0
    decisions: dict[str, int] = field(default_factory=dict)
    roofline_seconds: float = 0.0
    bytes: float = 0.0
    replaced: str = ""
    origins: tuple[tuple[str, ...], ...] = ()

    @property
    def described(self) -> str:
        """The name, and the nodes that the function comes from, for an error."""
        nodes = listed(self.origins)
        return f"{self.name} (of {nodes})" if nodes else self.name

    def to_json(self) -> dict[str, Any]:
        """JSON values; ``tuned`` says whether the log had it."""
        return {**asdict(self), "tuned": self.source == "log"}


def schedule_functions(
    mod: tvm.IRModule, target: Target, lookup: Lookup, origins: Origins | None = None
) -> tuple[tvm.IRModule, list[BuiltFunction], dict[str, str]]:
    """Schedule each distinct tensor function that ``main`` calls, once.

    Returns the module with scheduled functions, a description of each, and, for functions that compute the same as an
    earlier one, the symbol of that one. Functions with an equal key but different constants remain separate functions
    with the same schedule. Raises :class:`BuildError` with the name of a function that no space can schedule.
    """
    _check_called(mod)
    scheduled = tvm.IRModule(mod.functions, attrs=mod.attrs)
    built: list[BuiltFunction] = []
    twins: dict[str, str] = {}
    called = called_functions(mod, target)
    for place, found in enumerate(called, 1):
        _LOG.info("scheduling function %d of %d", place, len(called))
        (symbol, *others), task = found.symbols, found.task
        twins.update(dict.fromkeys(others, symbol))
        func, nodes = mod[symbol], _nodes(found, origins or {})
        if func.attrs and func.attrs.get("tirx.is_scheduled", False):
            entry = BuiltFunction(task.name, symbol, task.key, "given", "given", task.weight)
        else:
            func, entry = _scheduled(task, symbol, lookup, nodes)
        built.append(replace(_bounded(entry, task), origins=nodes))
        scheduled.update_func(mod.get_global_var(symbol), ready(func, symbol, target))
    return scheduled, built, twins


def ready(func: tirx.PrimFunc, symbol: str, target: Target) -> tirx.PrimFunc:
    """Prepare a scheduled function for code generation."""
    pieces = [Piece(each.box, prepared(each.func, target.tvm)) for each in pieces_of(func)]
    whole = with_pieces(prepared(func, target.tvm), pieces)
    return whole.with_attr("global_symbol", symbol).with_attr("tirx.is_scheduled", True)


def _check_called(mod: tvm.IRModule) -> None:
    """Raise :class:`BuildError` where ``main`` calls what is no tensor function."""
    calls = (b.value for b in bindings(mod["main"]) if isinstance(b.value, relax.Call))
    for symbol in (call.args[0].name_hint for call in calls if op_name(call) == "relax.call_tir"):
        if not isinstance(mod[symbol], tirx.PrimFunc):
            raise BuildError(
                f"main must call tensor functions only, but {symbol} is a {type(mod[symbol]).__name__}")


def _nodes(found: Called, origins: Origins) -> tuple[tuple[str, ...], ...]:
    return tuple(nodes for symbol in found.symbols for nodes in origins.get(symbol, ()))


def _scheduled(
    task: Task, symbol: str, lookup: Lookup, nodes: tuple[tuple[str, ...], ...] = ()
) -> tuple[tirx.PrimFunc, BuiltFunction]:
    record = lookup(task)
    if record is not None:
        try:
            func = schedule_of(task, record).mod["main"]
        except InvalidDecision as error:
            if not is_shipped(record):  # what ships need not suit every machine
                warnings.warn(f"the log's schedule of {task.name} no longer fits it, so the untuned one is used "
                              f"({error})", stacklevel=2)
        else:
            source = "shipped" if is_shipped(record) else "log" if record.ok else "untimed"
            known = record.seconds if source == "log" or (record.ok and record.machine == machine_id()) else None
            return func, BuiltFunction(task.name, symbol, task.key, record.space, source, task.weight, known,
                                       record.flops, dict(record.decisions))
    try:
        space, sch, decisions = _seeded(task)
    except Exception as error:  # whatever TVM raises for a function that cannot be analysed
        said = BuiltFunction(task.name, symbol, task.key, "", "", origins=nodes).described
        raise BuildError(f"function {said} must have a schedule for {task.target.canonical}, but none fits it: "
                         f"{last_line(error)}; report it with MLC_DUMP_DIR's files") from error
    func, entry = sch.mod["main"], BuiltFunction(task.name, symbol, task.key, space.name, "seed", task.weight,
                                                 decisions=decisions)
    if SIZES in task.func.attrs and space.by_size:
        func = in_pieces(task, ((space.name, decisions), func), partial(_recorded, lookup=lookup), _seed)
    return func, entry


def _recorded(task: Task, lookup: Lookup) -> Scheduled | None:
    """The log's schedule of a task; None if it has none that fits."""
    record = lookup(task)
    if record is not None:
        with suppress(InvalidDecision):
            return record.trace, schedule_of(task, record).mod["main"]
    return None


def _seed(task: Task) -> Scheduled | None:
    """The schedule of :func:`_seeded`; None if none fits."""
    try:
        space, sch, decisions = _seeded(task)
    except Exception:  # whatever TVM raises: the schedule for the whole range serves
        return None
    return (space.name, decisions), sch.mod["main"]


def _seeded(task: Task) -> tuple[Space, s_tir.Schedule, dict[str, int]]:
    """The schedule of the first seed of the function's space that fits. If none does, on GPUs other spaces that match
    are tried first, then the last space; with a warning, unless it is because of free sizes."""
    target = task.target.tvm
    space, last = registry.find(task.func, target), registry.all_spaces(task.target.kind)[-1]
    try:
        return space, *first_seed(space, task.func, target)
    except InvalidDecision as error:
        if space is last:
            raise
        if usual_function(task.func) is task.func:
            warnings.warn(f"no schedule of {space.name} fits {task.name}, so {last.name} lays it out, which is slow "
                          f"({error})", stacklevel=2)
        elif task.target.kind == "cuda":
            for other in registry.matching(task.func, target):
                with suppress(InvalidDecision):
                    return other, *first_seed(other, task.func, target)
        return last, *first_seed(last, task.func, target)


def _bounded(entry: BuiltFunction, task: Task) -> BuiltFunction:
    """Add the function's roofline to its description."""
    try:
        bound = analyse(usual_function(task.func), task.target.tvm, task.constants, task.constant_bytes)
    except Exception:  # a figure for the report is not worth a build
        return entry
    return replace(entry, roofline_seconds=bound.seconds, bytes=bound.bytes, flops=entry.flops or bound.flops)


def last_line(error: BaseException) -> str:
    """The last line of a long TVM message, which has the reason."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
