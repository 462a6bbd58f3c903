"""A recurrent layer, over all of its steps, as one tensor function.

The inputs' part of the gates comes as one tensor for all steps; what is left of a step is the product of the state
with the recurrent weights and the cell. The function holds, for each direction and each part of the batch, a loop over
the steps around two blocks: ``before`` copies the states that the step begins with, and ``step`` has the blocks
``product -> inner -> outer`` of the new states. A scope of its own lets a schedule tile these three like any product
and its epilogue (:mod:`schedules.cpu.recurrent`). Where a gate's product reads what other gates leave of the state, a
block ``reset`` of ``gates_product -> gates`` comes between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from mlc.graph.kernels.blocked import PANEL

__all__ = ["Cell", "Recurrence", "recurrent"]

#: an expression of one hidden unit, from lists of expressions and expressions of that unit
Unit = Callable[..., Any]


@dataclass(frozen=True)
class Cell:
    """What a step computes for one hidden unit of ``gates`` gates.

    ``inner(inputs, products, extras, before)`` is the new cell's state, or with ``hidden_before`` whatever ``outer``
    needs; ``outer(inputs, products, extras, inner, before)`` the new hidden state. ``inputs`` and ``products`` are the
    two parts of each gate, ``extras`` the vectors of the layer, ``before`` the cell's state before the step, with
    ``hidden_before`` the hidden state.

    With ``reset``, the last gate's product is not with the hidden state but with the first of the two results of
    ``reset(inputs, products, extras, before)``, which has the products of the other gates; the second result is the
    only one of the ``products`` before the last gate's that ``inner`` and ``outer`` have.
    """

    gates: int
    inner: Unit
    outer: Unit
    hidden_before: bool
    extras: int = 0
    reset: Unit | None = None

    @property
    def stages(self) -> tuple[int, ...]:
        """Gates of each of a step's products, one after another."""
        return (self.gates,) if self.reset is None else (self.gates - 1, 1)


@dataclass(frozen=True)
class Recurrence:
    """Sizes: ``steps`` of ``batch`` sequences, numbers or variables of 32 bits, with ``hidden`` units, one direction
    for each of ``backwards``, which says whether it begins at the last step. The batch is cut into ``parts``, which are
    computed in parallel.

    Every other step goes through the panels of weights backwards, so that it begins with those that the step before
    read last: of weights that overflow a cache, it still finds what fits. Forwards, a cache that drops what was unused
    for longest would have dropped each before its turn. Each of ``shares`` runs of panels, which cores may share out
    among them, is turned by itself."""

    steps: Any
    batch: Any
    hidden: int
    backwards: tuple[bool, ...]
    parts: int = 1
    shares: int = 1

    @property
    def padded(self) -> int:
        """Hidden units in whole panels."""
        return -(-self.hidden // PANEL) * PANEL

    @property
    def rows(self) -> Any:
        """The rows of each part of the batch."""
        return self.batch if self.parts == 1 else self.batch // self.parts

    def panel(self, number: Any, step: Any) -> Any:
        """Which panel is the ``number``-th of a step."""
        run = self.padded // PANEL // self.shares
        return number + tirx.floormod(step, 2) * (run - 1 - 2 * tirx.floormod(number, run))

    def time(self, step: Any, direction: Any) -> Any:
        """At which time a direction is in its ``step``."""
        last = self.steps - 1
        if len(set(self.backwards)) == 1:
            return last - step if self.backwards[0] else step
        return step + direction * (last - 2 * step)  # forwards first, then backwards


def recurrent(layer: Recurrence, cell: Cell, sizes: Sequence[Any] = ()) -> tirx.PrimFunc:
    """The function of ``inputs [steps, batch, directions, gates, padded]``, ``weights [directions, padded / panel,
    hidden, gates, panel]`` for the gates of each stage, with extras ``[directions, extras, padded]``, the states
    ``[directions, batch, padded]`` before the first step, to the hidden state after each step, ``[steps, directions,
    batch, padded]``. A cell with a state of its own has it after the last step in one place more of the first
    dimension. ``sizes`` are variables that no shape gives, parameters before the result."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as I

    count, width, gates = len(layer.backwards), layer.padded, cell.gates
    rows, panels = layer.rows, width // PANEL
    state = (count, layer.batch, width)
    states = ("hidden",) if cell.hidden_before else ("hidden", "cell")

    def outermost() -> Any:
        whole = count * layer.parts
        return I.parallel(0, whole) if whole > 1 else I.serial(0, whole)

    def bound(extents: Sequence[int], loops: Sequence[Any]) -> list[Any]:
        return [I.axis.spatial(extent, loop) for extent, loop in zip(extents, loops, strict=True)]

    with IRBuilder() as builder, I.prim_func(s_tir=True):
        I.func_name("recurrent")
        I.func_attr({"tirx.noalias": True})
        x = I.arg("x", I.buffer((layer.steps, layer.batch, count, gates, width)))
        weights = [I.arg(f"{kind}weights", I.buffer((count, panels, layer.hidden, each, PANEL)))
                   for kind, each in zip(("gates_", "")[-len(cell.stages):], cell.stages, strict=True)]
        extra: Any = I.arg("extra", I.buffer((count, cell.extras, width))) if cell.extras else None
        first = [I.arg(f"{name}_first", I.buffer(state)) for name in states]
        slots = layer.steps + len(states) - 1
        for size in sizes:
            I.arg(str(size.name), size)
        y = I.arg("y", I.buffer((slots, *state)))
        copies = [I.sblock_alloc_buffer(state) for _ in states]
        # what the last gate's product reads in place of the state, and what else is known before it
        passed = [I.sblock_alloc_buffer(state) for _ in range(2)] if cell.reset else []

        with outermost() as task, I.serial(0, layer.steps) as loop:
            with I.sblock("before"):
                at, step = I.axis.spatial(count * layer.parts, task), I.axis.scan(layer.steps, loop)
                d, begin = tirx.floordiv(at, layer.parts), tirx.floormod(at, layer.parts) * rows
                mine = (d, slice(begin, begin + rows), slice(0, width))
                then = layer.time(step - 1, d)
                I.reads(*(each[mine] for each in first), y[(slice(0, slots), *mine)])
                I.writes(*(each[mine] for each in copies))
                for name, start, copy, slot in zip(states, first, copies, (then, layer.steps), strict=False):
                    with I.grid(rows, width) as loops, I.sblock(f"{name}_before"):
                        b, j = bound((rows, width), loops)
                        place = (d, begin + b, j)
                        old = tirx.if_then_else(step == 0, start[place], y[(slot, *place)])
                        I.buffer_store(copy, old, list(place))
            if cell.reset:
                with I.sblock("reset"):
                    at, step = I.axis.spatial(count * layer.parts, task), I.axis.scan(layer.steps, loop)
                    one = _Step(layer, cell, at, step, x, extra, copies[-1])
                    I.reads(*one.reads(weights[0], cell.stages[0]), copies[0][one.mine])
                    I.writes(*(each[one.mine] for each in passed))
                    sums = one.product("gates_product", copies[0], weights[0], cell.stages[0])
                    with I.grid(rows, panels, PANEL) as loops, I.sblock("gates"):
                        b, p, lane = bound((rows, panels, PANEL), loops)
                        place = one.place(b, p, lane)
                        made = cell.reset(*one.unit([sums[b, p, g, lane] for g in range(gates - 1)], b, p, lane))
                        for buffer, value in zip(passed, made, strict=True):
                            I.buffer_store(buffer, value, list(place))
            with I.sblock("step"):
                at, step = I.axis.spatial(count * layer.parts, task), I.axis.scan(layer.steps, loop)
                one = _Step(layer, cell, at, step, x, extra, copies[-1])
                state_read, read = (passed[0], passed[1:]) if cell.reset else (copies[0], [])
                I.reads(*one.reads(weights[-1], cell.stages[-1]), *(each[one.mine] for each in (*passed, *copies)))
                I.writes(y[(one.now, *one.mine)], *([] if cell.hidden_before else [y[(layer.steps, *one.mine)]]))
                sums = one.product("product", state_read, weights[-1], cell.stages[-1])
                inner = I.sblock_alloc_buffer((rows, panels, PANEL))
                for last in (False, True):
                    with I.grid(rows, panels, PANEL) as loops, I.sblock("outer" if last else "inner"):
                        b, p, lane = bound((rows, panels, PANEL), loops)
                        place = one.place(b, p, lane)
                        known = [each[place] for each in read] + [sums[b, p, g, lane] for g in range(cell.stages[-1])]
                        *own, before = one.unit(known, b, p, lane)
                        if not last:
                            I.buffer_store(inner, cell.inner(*own, before), [b, p, lane])
                            continue
                        found = inner[b, p, lane]
                        I.buffer_store(y, cell.outer(*own, found, before), [one.now, *place])
                        if not cell.hidden_before:
                            I.buffer_store(y, found, [layer.steps, *place])
    return builder.get()


class _Step:
    """What the blocks of one step share: its index ``at`` among all directions and parts, and the location of its data.
    """

    def __init__(
        self, layer: Recurrence, cell: Cell, at: Any, step: Any, x: Any, extra: Any, before: Any
    ) -> None:
        self._layer, self._cell, self._step = layer, cell, step
        self._x, self._extra, self._before = x, extra, before
        self.rows, self.panels = layer.rows, layer.padded // PANEL
        self._d, self._begin = tirx.floordiv(at, layer.parts), tirx.floormod(at, layer.parts) * self.rows
        self.mine = (self._d, slice(self._begin, self._begin + self.rows), slice(0, layer.padded))
        self.now = layer.time(step, self._d)

    def reads(self, weights: Any, gates: int) -> list[Any]:
        """The inputs, weights and vectors of the layer that a block reads."""
        d, layer, cell = self._d, self._layer, self._cell
        _, rows, units = self.mine
        own = (self.now, rows, d, slice(0, cell.gates), units)
        return [self._x[own], weights[d, 0 : self.panels, 0 : layer.hidden, 0:gates, 0:PANEL],
                *([self._extra[d, 0 : cell.extras, units]] if cell.extras else [])]

    def product(self, name: str, state: Any, weights: Any, gates: int) -> Any:
        """The block of a state's product with the weights of some gates, ``[rows, panels, gates, panel]``."""
        from tvm.script.ir_builder import tirx as I

        sums, hidden = I.sblock_alloc_buffer((self.rows, self.panels, gates, PANEL)), self._layer.hidden
        with I.grid(self.rows, self.panels, gates, PANEL, hidden) as loops, I.sblock(name):
            extents = (self.rows, self.panels, gates, PANEL)
            b, p, g, lane = (I.axis.spatial(extent, loop) for extent, loop in zip(extents, loops[:4], strict=True))
            k = I.axis.reduce(hidden, loops[4])
            I.sblock_attr({"mlc.op": "recurrent"})
            here = [b, p, g, lane]
            with I.init():
                I.buffer_store(sums, tirx.const(0.0, "float32"), here)
            panel = self._layer.panel(p, self._step)
            term = state[self._d, self._begin + b, k] * weights[self._d, panel, k, g, lane]
            I.buffer_store(sums, sums[tuple(here)] + term, here)
        return sums

    def place(self, b: Any, p: Any, lane: Any) -> tuple[Any, Any, Any]:
        """The position in a state of the unit at ``lane`` of panel ``p`` of a tile."""
        return self._d, self._begin + b, self._layer.panel(p, self._step) * PANEL + lane

    def unit(self, products: list[Any], b: Any, p: Any, lane: Any) -> tuple[Any, ...]:
        """The operands of a cell for one unit: inputs, products, extras, and its previous state."""
        d, row, j = place = self.place(b, p, lane)
        return ([self._x[self.now, row, d, g, j] for g in range(self._cell.gates)], products,
                [self._extra[d, e, j] for e in range(self._cell.extras)], self._before[place])
