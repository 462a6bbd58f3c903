"""Convolutions get the kernel with the lowest price, for each shape and epilogue, and keep computing the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from relax_evaluation import evaluate
from tvm import relax

from mlc.errors import UsageError
from mlc.graph.lowering.select import MARGIN, cheapest
from mlc.graph.pipeline import lower, optimise
from mlc.graph.task import Task
from mlc.graph.tasks import extract_tasks
from mlc.log import Prices, Record
from mlc.log.record import ELSEWHERE
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.target import resolve

CPU = resolve("x86-64-v3", threads=2)
DIRECT = CompileOptions.of(winograd=False)
BOUND = 2e-5  # that :class:`Winograd` states for F(4x4) and 32 channels
RNG = np.random.default_rng(5)
FIRST, SECOND = (RNG.standard_normal(shape).astype("float32") for shape in ((32, 24, 3, 3), (32, 32, 3, 3)))
BIAS = RNG.standard_normal((1, 32, 1, 1)).astype("float32")


def network() -> tvm.IRModule:
    """Two 3x3 convolutions of different shape: one with a bias and relu, one with a residual sum."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 24, 11, 13), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit(relax.op.nn.conv2d(x, relax.const(FIRST), padding=1))
            y = bb.emit(relax.op.nn.relu(bb.emit(relax.op.add(y, relax.const(BIAS)))))
            z = bb.emit(relax.op.nn.conv2d(y, relax.const(SECOND), padding=1))
            result = bb.emit_output(relax.op.add(z, y))
        bb.emit_func_output(result)
    return bb.finalize()


def convolved(data: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """3x3 at stride 1 with one zero around, in float64."""
    padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, weight.astype("float64"), optimize=True)


def check(mod: tvm.IRModule, tolerance: float) -> None:
    data = RNG.standard_normal((1, 24, 11, 13)).astype("float32")
    first = np.maximum(convolved(data, FIRST) + BIAS, 0)
    expected = convolved(first, SECOND) + first
    (actual,) = evaluate(mod, data)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def kernels(mod: tvm.IRModule) -> list[str]:
    return [t.name for t in extract_tasks(mod, CPU) if "conv2d" in t.name or "winograd" in t.name]


def priced(**seconds: float) -> Callable[[Task], float | None]:
    """Prices by tile size and epilogue, ``direct_relu`` or ``f4_add``; None for the others."""

    def price(task: Task) -> float | None:
        kernel = "f2" if "2x2" in task.name else "f4" if "4x4" in task.name else "direct"
        return seconds.get(f"{kernel}_{'relu' if 'relu' in task.name else 'add'}")

    return price


@pytest.mark.parametrize(("seconds", "names"), [
    ({"direct_relu": 1.0, "f2_relu": 2.0, "f4_relu": 3.0, "direct_add": 1.0, "f2_add": 1.1, "f4_add": 1.2},
     ["fused_conv2d_add_relu", "fused_conv2d_add"]),
    ({"direct_relu": 1.0, "f2_relu": 0.7, "f4_relu": 0.6, "direct_add": 1.0, "f2_add": 0.5, "f4_add": 0.8},
     ["fused_winograd_4x4_add_relu", "fused_winograd_2x2_add"]),
    ({"direct_relu": 1.0, "f4_relu": 2.0, "direct_add": 1.0, "f4_add": 0.5},
     ["fused_conv2d_add_relu", "fused_winograd_4x4_add"]),
])
def test_each_convolution_follows_its_own_prices(seconds: dict[str, float], names: list[str]) -> None:
    mod = optimise(network(), CPU, priced(**seconds), DEFAULT_OPTIONS)
    assert kernels(mod) == names
    check(mod, 2 * BOUND)


def test_without_prices_an_estimate_decides() -> None:
    mod = optimise(network(), CPU, options=DEFAULT_OPTIONS)
    assert all("winograd" in name for name in kernels(mod))
    check(mod, 2 * BOUND)


def test_what_is_not_allowed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(task: Task) -> float:
        raise AssertionError(f"{task.name} has no alternative")

    direct = optimise(network(), CPU, never, DIRECT)
    assert not any("winograd" in name for name in kernels(direct))
    check(direct, 1e-6)
    monkeypatch.setenv("MLC_WINOGRAD", "0")
    assert kernels(optimise(network(), CPU)) == kernels(direct)
    monkeypatch.setenv("MLC_WINOGRAD", "no")
    with pytest.raises(UsageError, match="MLC_WINOGRAD must be 0 or 1, got 'no'"):
        optimise(network(), CPU)


@pytest.mark.parametrize(("known", "estimated", "taken"), [
    ([None, None, None], [1.0, 0.5, 0.4], 2),  # nobody knows
    ([None, None, None], [1.0, 0.99, 0.98], 0),  # not worth the rounding
    ([1.0, 0.9, None], [1.0, 2.0, 0.1], 1),  # what was measured goes before what is hoped for
    ([1.0, 1.1, None], [1.0, 0.5, 0.1], 0),
    ([1.0, None, None], [1.0, 0.5, 0.6], 1),  # a price alone says nothing
    ([None, 2.0, 1.0], [1.0, 2.0, 3.0], 2),
    ([1.0, MARGIN, 1.0], [1.0, 1.0, 1.0], 1),
])
def test_cheapest(known: list[float | None], estimated: list[float], taken: int) -> None:
    assert cheapest(known, estimated) == taken


def test_tasks_of_a_choice_are_what_would_be_built() -> None:
    """The keys of the tasks that are weighed are those of the functions that each choice leads to."""
    lowered = lower(network(), CPU, options=DEFAULT_OPTIONS)
    chosen, tasks = lowered.tasks, lowered.with_alternatives()
    assert [t.key for t in tasks[: len(chosen)]] == [t.key for t in chosen]
    choices = {t.choice for t in tasks if t.choice}
    assert len(choices) == 2 and all(sum(t.choice == c for t in tasks) == 3 for c in choices)
    assert all(t.constants and t.constant_bytes for t in tasks if t.choice)
    assert len({t.name for t in tasks}) == len(tasks)
    keys = {t.key for t in tasks if t.choice}
    for wanted in ("direct", "f2", "f4"):
        others = {f"{k}_{e}": 2.0 for k in ("direct", "f2", "f4") for e in ("relu", "add")}
        best = {**others, f"{wanted}_relu": 1.0, f"{wanted}_add": 1.0}
        built = extract_tasks(optimise(network(), CPU, priced(**best), DEFAULT_OPTIONS), CPU)
        assert len(keys & {t.key for t in built}) == 2


def test_equal_convolutions_are_one_choice_and_weigh_their_calls() -> None:
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 32, 9, 9), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit(relax.op.nn.relu(bb.emit(relax.op.nn.conv2d(x, relax.const(SECOND), padding=1))))
            y = bb.emit(relax.op.nn.relu(bb.emit(relax.op.nn.conv2d(y, relax.const(SECOND * 2), padding=1))))
            result = bb.emit_output(relax.op.nn.conv2d(y, relax.const(SECOND), strides=2))
        bb.emit_func_output(result)
    lowered = lower(bb.finalize(), CPU, options=DEFAULT_OPTIONS)
    assert [(t.name, t.weight) for t in lowered.alternatives] == [
        ("fused_conv2d_relu", 2), ("fused_winograd_2x2_relu", 2), ("fused_winograd_4x4_relu", 2)
    ]


class _Log:
    """Records of one kernel each, found by the word in a task's name."""

    def __init__(self, **records: tuple[float, str]) -> None:
        self.records = records
        self.names: dict[str, str] = {}

    def best(self, key: str) -> Record | None:
        found = self.records.get(self.names[key])
        return None if found is None else Record(key, "", "", {}, "", times=(found[0],), machine=found[1])


def test_times_of_two_machines_are_not_compared() -> None:
    log = _Log(a=(1.0, "here"), b=(0.5, "there"), c=(0.7, "here"))
    func = extract_tasks(optimise(network(), CPU, options=DIRECT), CPU)
    tasks = [Task(name, task.func, CPU, choice="one") for name, task in zip("abc", func, strict=False)]
    log.names = {task.key: task.name for task in tasks}
    prices = Prices(log)  # type: ignore[arg-type]
    assert [prices(task) for task in tasks] == [1.0, None, 0.7]
    log.records["c"] = (0.1, ELSEWHERE)
    assert [Prices(log)(task) for task in tasks[2:]] == [None]  # type: ignore[arg-type]
