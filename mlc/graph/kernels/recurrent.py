"""A recurrent layer over all its steps as one function.

The inputs' part of the gates comes as one tensor for all steps; what is left of a step is the product of the state
with the recurrent weights and the cell. The function holds, for each direction and each part of the batch, a loop over
the steps around two blocks: ``before`` copies the states that the step begins with, and ``step`` has the blocks
``product -> inner -> outer`` of the new states. A scope of its own lets a schedule tile these three like any product
and its epilogue (:mod:`schedules.cpu.recurrent`).
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
    """

    gates: int
    inner: Unit
    outer: Unit
    hidden_before: bool
    extras: int = 0


@dataclass(frozen=True)
class Recurrence:
    """Sizes: ``steps`` of ``batch`` sequences with ``hidden`` units, one direction for each of ``backwards``, which
    says whether it begins at the last step. The batch is cut into ``parts``, which are computed in parallel.

    Every other step goes through the panels of weights backwards, so that it begins with those that the step before
    read last: of weights that overflow a cache, it still finds what fits. Forwards, a cache that drops what was unused
    for longest would have dropped each before its turn. Each of ``shares`` runs of panels, which cores may share out
    among them, is turned by itself."""

    steps: int
    batch: int
    hidden: int
    backwards: tuple[bool, ...]
    parts: int = 1
    shares: int = 1

    @property
    def padded(self) -> int:
        """Hidden units in whole panels."""
        return -(-self.hidden // PANEL) * PANEL

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


def recurrent(layer: Recurrence, cell: Cell) -> tirx.PrimFunc:
    """The function of ``inputs [steps, batch, directions, gates, padded]``, ``weights [directions, padded / panel,
    hidden, gates, panel]``, with extras ``[directions, extras, padded]``, the states ``[directions, batch, padded]``
    before the first step, to the hidden state after each step, ``[steps, directions, batch, padded]``. A cell with a
    state of its own has it after the last step in one place more of the first dimension."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as I

    count, width, gates = len(layer.backwards), layer.padded, cell.gates
    rows, panels = layer.batch // layer.parts, width // PANEL
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
        weights = I.arg("weights", I.buffer((count, panels, layer.hidden, gates, PANEL)))
        extra: Any = I.arg("extra", I.buffer((count, cell.extras, width))) if cell.extras else None
        first = [I.arg(f"{name}_first", I.buffer(state)) for name in states]
        slots = layer.steps + len(states) - 1
        y = I.arg("y", I.buffer((slots, *state)))
        copies = [I.sblock_alloc_buffer(state) for _ in states]

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
            with I.sblock("step"):
                at, step = I.axis.spatial(count * layer.parts, task), I.axis.scan(layer.steps, loop)
                d, begin = tirx.floordiv(at, layer.parts), tirx.floormod(at, layer.parts) * rows
                mine = (d, slice(begin, begin + rows), slice(0, width))
                now = layer.time(step, d)
                own = (now, slice(begin, begin + rows), d, slice(0, gates), slice(0, width))
                I.reads(x[own], weights[d, 0:panels, 0:layer.hidden, 0:gates, 0:PANEL],
                        *([extra[d, 0:cell.extras, 0:width]] if cell.extras else []), *(c[mine] for c in copies))
                I.writes(y[(now, *mine)], *([] if cell.hidden_before else [y[(layer.steps, *mine)]]))
                products = I.sblock_alloc_buffer((rows, panels, gates, PANEL))
                inner = I.sblock_alloc_buffer((rows, panels, PANEL))
                with I.grid(rows, panels, gates, PANEL, layer.hidden) as loops, I.sblock("product"):
                    b, p, g, lane = bound((rows, panels, gates, PANEL), loops[:4])
                    k = I.axis.reduce(layer.hidden, loops[4])
                    I.sblock_attr({"mlc.op": "recurrent"})
                    here = [b, p, g, lane]
                    with I.init():
                        I.buffer_store(products, tirx.const(0.0, "float32"), here)
                    product = copies[0][d, begin + b, k] * weights[d, layer.panel(p, step), k, g, lane]
                    I.buffer_store(products, products[tuple(here)] + product, here)

                def unit(b: Any, p: Any, lane: Any) -> tuple[Any, ...]:
                    j = layer.panel(p, step) * PANEL + lane
                    return (
                        [x[now, begin + b, d, g, j] for g in range(gates)],
                        [products[b, p, g, lane] for g in range(gates)],
                        [extra[d, e, j] for e in range(cell.extras)],
                    )

                for last in (False, True):
                    with I.grid(rows, panels, PANEL) as loops, I.sblock("outer" if last else "inner"):
                        b, p, lane = bound((rows, panels, PANEL), loops)
                        place = (d, begin + b, layer.panel(p, step) * PANEL + lane)
                        before = copies[-1][place]
                        if not last:
                            I.buffer_store(inner, cell.inner(*unit(b, p, lane), before), [b, p, lane])
                            continue
                        found = inner[b, p, lane]
                        I.buffer_store(y, cell.outer(*unit(b, p, lane), found, before), [now, *place])
                        if not cell.hidden_before:
                            I.buffer_store(y, found, [layer.steps, *place])
    return builder.get()
