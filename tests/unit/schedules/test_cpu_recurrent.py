"""Recurrent layers as one kernel over their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from harness import Case, SpaceContract, pytest_generate_tests
from tvm import tirx

from mlc.graph.ir.int32_indices import narrowed
from mlc.graph.kernels.recurrent import Cell, Recurrence, recurrent
from mlc.graph.lowering.recurrent import _shares
from mlc.target import resolve
from schedules.cpu.recurrent import _HAND_OVERS, RECURRENT, _saved, _Shape
from schedules.machine import cpu_machine

__all__ = ["TestRecurrent", "pytest_generate_tests"]

#: a state of its own, beside the hidden one, and a vector of the layer that both parts of the cell read
CELL = Cell(
    2, lambda x, p, e, before: tirx.sigmoid(x[0] + p[0]) * before + e[0],
    lambda x, p, e, inner, before: tirx.tanh(x[1] + p[1]) * inner + e[0] * before, hidden_before=False, extras=1,
)
#: as a gated unit: the sum of the second gate is used apart from its input
UNIT = Cell(
    2, lambda x, p, e, before: tirx.tanh(x[0] + 0.5 * p[1]),
    lambda x, p, e, inner, before: inner + tirx.sigmoid(x[1] + p[0]) * (before - inner), hidden_before=True,
)
#: as one whose candidate's product is with what the reset leaves of the state
RESET = Cell(
    3, lambda x, p, e, before: tirx.tanh(x[2] + p[1]),
    lambda x, p, e, inner, before: inner + p[0] * (before - inner), hidden_before=True,
    reset=lambda x, p, e, before: (tirx.sigmoid(x[1] + p[1]) * before, tirx.sigmoid(x[0] + p[0])),
)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _walk(layer: Recurrence, x: np.ndarray, weights: np.ndarray, states: list[np.ndarray], step: Callable[..., Any]) \
        -> np.ndarray:
    """The hidden states by time, and the other state after the last step; ``step`` gives all states."""
    y = np.zeros((layer.steps + len(states) - 1, *states[0].shape))
    plain = weights.transpose(0, 3, 2, 1, 4).reshape(len(layer.backwards), 2, layer.hidden, layer.padded)
    for d, backwards in enumerate(layer.backwards):
        now = [state[d] for state in states]
        for t in range(layer.steps)[:: -1 if backwards else 1]:
            products = np.einsum("bk,gkj->gbj", now[0][:, : layer.hidden], plain[d])
            now = step(d, x[t, :, d].transpose(1, 0, 2), products, now)
            y[t, d] = now[0]
        if len(states) > 1:
            y[layer.steps, d] = now[1]
    return y


def _cell(layer: Recurrence) -> tuple[Callable[[], tirx.PrimFunc], Callable[..., np.ndarray]]:
    def reference(x: np.ndarray, weights: np.ndarray, extra: np.ndarray, h: np.ndarray, c: np.ndarray) -> np.ndarray:
        def step(d: int, x: np.ndarray, p: np.ndarray, now: list[np.ndarray]) -> list[np.ndarray]:
            inner = _sigmoid(x[0] + p[0]) * now[1] + extra[d, 0]
            return [np.tanh(x[1] + p[1]) * inner + extra[d, 0] * now[1], inner]

        return _walk(layer, x, weights, [h, c], step)

    return lambda: narrowed(recurrent(layer, CELL)), reference


def _unit(layer: Recurrence) -> tuple[Callable[[], tirx.PrimFunc], Callable[..., np.ndarray]]:
    def reference(x: np.ndarray, weights: np.ndarray, h: np.ndarray) -> np.ndarray:
        def step(d: int, x: np.ndarray, p: np.ndarray, now: list[np.ndarray]) -> list[np.ndarray]:
            inner = np.tanh(x[0] + 0.5 * p[1])
            return [inner + _sigmoid(x[1] + p[0]) * (now[0] - inner)]

        return _walk(layer, x, weights, [h], step)

    return lambda: narrowed(recurrent(layer, UNIT)), reference


def _reset(layer: Recurrence) -> tuple[Callable[[], tirx.PrimFunc], Callable[..., np.ndarray]]:
    def reference(x: np.ndarray, gates: np.ndarray, weights: np.ndarray, h: np.ndarray) -> np.ndarray:
        def step(d: int, x: np.ndarray, p: np.ndarray, now: list[np.ndarray]) -> list[np.ndarray]:
            plain = weights[d].transpose(2, 1, 0, 3).reshape(layer.hidden, layer.padded)
            kept = _sigmoid(x[1] + p[1]) * now[0]
            inner = np.tanh(x[2] + kept[:, : layer.hidden] @ plain)
            return [inner + _sigmoid(x[0] + p[0]) * (now[0] - inner)]

        return _walk(layer, x, gates, [h], step)

    return lambda: narrowed(recurrent(layer, RESET)), reference


def _arrays(layer: Recurrence, cell: Cell) -> Callable[[], list[np.ndarray]]:
    """Weights so small that errors do not grow from step to step."""

    def made() -> list[np.ndarray]:
        rng = np.random.default_rng(layer.hidden)
        inputs = [p for p in recurrent(layer, cell).params][:-1]
        arrays = [rng.uniform(-1, 1, [int(extent) for extent in p.shape]).astype("float32") for p in inputs]
        for weights in arrays[1 : 1 + len(cell.stages)]:
            weights /= np.float32(layer.hidden)
        return arrays

    return made


def _case(name: str, layer: Recurrence, cell: Cell) -> Case:
    made, reference = {id(CELL): _cell, id(UNIT): _unit, id(RESET): _reset}[id(cell)](layer)
    return Case(name, made, reference, data=_arrays(layer, cell))


class TestRecurrent(SpaceContract):
    space = RECURRENT
    cases = (
        _case("cell", Recurrence(5, 1, 48, (False,)), CELL),
        _case("cell_backwards_ragged", Recurrence(4, 3, 37, (True,)), CELL),
        _case("unit_both_ways", Recurrence(6, 2, 16, (False, True)), UNIT),
        _case("unit_parts_of_a_batch", Recurrence(3, 6, 30, (False, True), parts=2), UNIT),
        _case("cell_shared_out", Recurrence(5, 1, 64, (False,), shares=2), CELL),
        _case("reset_shared_out", Recurrence(4, 1, 64, (True,), shares=2), RESET),
        _case("reset_parts_of_a_batch", Recurrence(3, 4, 37, (False, True), parts=2), RESET),
        _case("one_step", Recurrence(1, 4, 64, (False,)), UNIT),
    )


def test_every_other_step_begins_where_the_one_before_ended() -> None:
    layer = Recurrence(4, 1, 96, (False,), shares=2)

    def order(step: int) -> list[int]:
        return [int(tvm.sym.Analyzer().simplify(layer.panel(tirx.const(n), tirx.const(step)))) for n in range(6)]

    assert order(0) == order(2) == [0, 1, 2, 3, 4, 5]
    assert order(1) == order(3) == [2, 1, 0, 5, 4, 3], "each core turns its own panels"


def test_a_step_is_shared_out_in_whole_runs_of_panels() -> None:
    target = resolve("x86-64-v3", threads=2)
    assert [_shares(target, *sizes) for sizes in ((256, 1), (240, 1), (256, 2))] == [2, 1, 1]


@pytest.mark.parametrize(("level", "shared"), [(1 << 19, 1), (1 << 20, 1), (1 << 21, 0)])
def test_weights_stay_in_a_cache_that_has_room_beside_them(level: int, shared: int) -> None:
    """A megabyte of them, on two cores: each step reads half of them from its own second level, or all from there."""
    shape = _Shape(rows=1, panels=16, gates=4, width=16, depth=256, states=2, shared=False)
    machine = replace(cpu_machine(resolve("x86-64-v4", threads=2).tvm), hz=4.2e9, l2_bytes=level, l2_rate=32.0,
                      l3_rate=20.0)
    assert shape.weight_bytes == 1 << 20
    assert (_saved(shape, machine) > _HAND_OVERS * machine.launch_seconds) == shared
