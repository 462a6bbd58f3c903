"""An algorithm is added by one file: it is found, offered, priced, taken where it wins, and computes the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tvm
from relax_evaluation import evaluate
from tvm import relax

from mlc.errors import UsageError
from mlc.graph import algorithms as package
from mlc.graph.algorithms.direct import DIRECT
from mlc.graph.algorithms.registry import Algorithm, algorithms, fastest, offered
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.pipeline import lower
from mlc.graph.products import product_of
from mlc.graph.substitute.costs import Costs
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.substitution.egraph import ENode
from mlc.target import resolve

CPU = resolve("x86-64-v3", threads=2)
RNG = np.random.default_rng(7)
WEIGHT = RNG.standard_normal((32, 24, 5, 3)).astype("float32")
BIAS = RNG.standard_normal((1, 32, 1, 1)).astype("float32")
CONV = Convolution(1, 32, 32, (11, 13), (5, 3), (2, 1), (1, 0, 2, 1), (1, 1), 1, 16, 16)


@pytest.fixture
def im2col(monkeypatch: pytest.MonkeyPatch) -> Iterator[Algorithm]:
    """The file of ``added_algorithms`` as if it lay in the package; it is twice as fast as the direct algorithm."""
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(Path(__file__).with_name("added_algorithms"))])
    algorithms.cache_clear()
    yield algorithms()["im2col"]
    algorithms.cache_clear()
    del sys.modules[f"{package.__name__}.im2col"]


def network() -> tvm.IRModule:
    """A convolution that Winograd does not apply to, with a bias and relu, whose channels do not fill their blocks."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 24, 11, 13), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit(relax.op.nn.conv2d(x, relax.const(WEIGHT), strides=(2, 1), padding=(1, 0, 2, 1)))
            result = bb.emit_output(relax.op.nn.relu(bb.emit(relax.op.add(y, relax.const(BIAS)))))
        bb.emit_func_output(result)
    return bb.finalize()


def expected(data: np.ndarray) -> np.ndarray:
    """In float64."""
    padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), (1, 2), (0, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 3), axis=(2, 3))[:, :, ::2]
    return np.maximum(np.einsum("nchwij,ocij->nohw", windows, WEIGHT.astype("float64"), optimize=True) + BIAS, 0)


def test_it_is_offered_beside_the_direct_one_and_taken_where_its_estimate_wins(im2col: Algorithm) -> None:
    lowered = lower(network(), CPU, options=DEFAULT_OPTIONS)
    assert [task.name for task in lowered.alternatives] == ["fused_conv2d_add_relu", "fused_im2col_add_relu"]
    assert len({task.choice for task in lowered.alternatives}) == 1
    assert "fused_im2col_add_relu" in [task.name for task in lowered.tasks]
    data = RNG.standard_normal((1, 24, 11, 13)).astype("float32")
    (actual,) = evaluate(lowered.module, data)
    wanted = expected(data)
    assert np.abs(actual - wanted).max() < im2col.error_bound(CONV) * np.abs(wanted).max()


def test_where_its_estimate_or_a_price_loses_the_direct_one_stays(
    im2col: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    dear = lower(network(), CPU, lambda task: 2.0 if "im2col" in task.name else 1.0, DEFAULT_OPTIONS)
    monkeypatch.setattr(im2col, "faster", 0.5)
    slow = lower(network(), CPU, options=DEFAULT_OPTIONS)
    for lowered in (dear, slow):
        assert [task.name for task in lowered.alternatives] == ["fused_conv2d_add_relu", "fused_im2col_add_relu"]
        assert "fused_conv2d_add_relu" in [task.name for task in lowered.tasks]


def test_layouts_and_searches_price_it(im2col: Algorithm) -> None:
    estimate = Estimate(CPU.tvm, 0.0)
    direct = DIRECT.seconds(CONV, estimate)
    assert [each.name for each in offered(CONV, DEFAULT_OPTIONS)] == ["conv2d", "im2col"]
    assert fastest(CONV, DEFAULT_OPTIONS, estimate) == pytest.approx(direct / 2)
    forbidden = CompileOptions(frozenset({"im2col"}))
    assert fastest(CONV, forbidden, estimate) == direct
    given = {"dilation": (1, 1), "groups": 1, "padding": CONV.pads, "stride": CONV.strides}
    option, shapes = ENode("conv2d", (0, 1), tuple(given.items())), {0: (1, 32, *CONV.size), 1: (32, 32, *CONV.kernel)}
    free, confined = (Costs(CPU.tvm, 0.0, options).of(option, (1, 32, *CONV.out), shapes, {1}).seconds
                      for options in (DEFAULT_OPTIONS, forbidden))
    assert confined - free == pytest.approx(direct / 2)


def test_times_of_its_product_say_nothing_of_others(im2col: Algorithm) -> None:
    found = {task.name: product_of(task.func) for task in lower(network(), CPU, options=DEFAULT_OPTIONS).alternatives}
    assert found == {"fused_conv2d_add_relu": "conv2d", "fused_im2col_add_relu": None}


@pytest.mark.parametrize("name", ["im2col", "gemm"])
def test_what_is_forbidden_by_name_or_family_is_not_offered(im2col: Algorithm, name: str) -> None:
    lowered = lower(network(), CPU, options=CompileOptions(frozenset({name})))
    assert lowered.alternatives == () and not any("im2col" in task.name for task in lowered.tasks)


def test_it_is_gone_without_its_file() -> None:
    assert "im2col" not in algorithms()
    assert lower(network(), CPU, options=DEFAULT_OPTIONS).alternatives == ()
    with pytest.raises(UsageError, match="one of the algorithms winograd, winograd_2x2, winograd_4x4, got 'im2col'"):
        lower(network(), CPU, options=CompileOptions(frozenset({"im2col"})))
