"""TVM's legalised operators mean what the specifications say, on random shapes."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.op import nn

from mlc.operators import OPERATORS
from mlc.operators.arithmetic import REAL
from mlc.operators.evaluate import evaluate

sys.path.insert(0, str(Path(__file__).parent))
from cases import MAKERS, Case

INSTANCES = 6


def pads(case: Case, kernel: Any, dilation: Any = (1, 1)) -> list[int]:
    """Top, left, bottom and right padding, spelt out."""
    padding, extents = case.attributes["padding"], case.shapes[0][2:]
    if padding == "valid":
        return [0, 0, 0, 0]
    if padding != "same":
        return list(padding)
    before, after = [], []
    for extent, window, step, gap in zip(extents, kernel, case.attributes["stride"], dilation, strict=True):
        total = max(0, (-(-extent // step) - 1) * step + (window - 1) * gap + 1 - extent)
        before.append(total // 2)
        after.append(total - total // 2)
    return before + after


def conv2d(case: Case, x: Any, w: Any) -> Any:
    given = case.attributes
    padding = pads(case, case.shapes[1][2:], given["dilation"])
    return nn.conv2d(x, w, list(given["stride"]), padding, list(given["dilation"]), groups=given["groups"])


def pool(case: Case, x: Any) -> Any:
    given = case.attributes
    kernel, stride, padding = list(given["kernel"]), list(given["stride"]), pads(case, given["kernel"])
    if case.op == "max_pool2d":
        return nn.max_pool2d(x, kernel, stride, padding)
    return nn.avg_pool2d(x, kernel, stride, padding, count_include_pad=bool(given["count_include_pad"]))


def enlarge(case: Case, w: Any) -> Any:
    width = []
    for small, large in zip(case.shapes[0][2:], case.attributes["kernel"], strict=True):
        low = (large - 1) // 2 - (small - 1) // 2
        width += [low, large - small - low]
    return nn.pad(w, [0, 0, 0, 0, *width])


def slice_(case: Case, x: Any) -> Any:
    given = case.attributes
    return relax.op.strided_slice(x, [given["axis"]], [given["begin"]], [given["end"]])


def reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda case, x: function(x, list(case.attributes["axes"]), bool(case.attributes["keepdims"]))


def normalise(case: Case, *operands: Any) -> Any:
    given = case.attributes
    epsilon = float(given["epsilon"]) if case.op == "batch_norm" else 1 / given["inverse_epsilon"]
    if case.op == "batch_norm":
        return relax.TupleGetItem(nn.batch_norm(*operands, axis=1, epsilon=epsilon, training=False), 0)
    function = nn.layer_norm if case.op == "layer_norm" else nn.rms_norm
    return function(*operands, axes=-1, epsilon=epsilon)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda case, *operands: function(*operands)


RELAX: dict[str, Callable[..., Any]] = {
    "matmul": plain(relax.op.matmul), "conv2d": conv2d, "max_pool2d": pool, "avg_pool2d": pool,
    "add": plain(relax.op.add), "sub": plain(relax.op.subtract), "mul": plain(relax.op.multiply),
    "div": plain(relax.op.divide), "maximum": plain(relax.op.maximum), "minimum": plain(relax.op.minimum),
    "relu": plain(nn.relu), "gelu": plain(nn.gelu), "silu": plain(nn.silu), "neg": plain(relax.op.negative),
    **{op: plain(getattr(relax.op, op)) for op in ("sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "erf")},
    "reciprocal": lambda case, x: relax.op.divide(relax.const(1.0), x),
    **{op: reduction(getattr(relax.op, op)) for op in ("sum", "mean", "max")},
    "transpose": lambda case, x: relax.op.permute_dims(x, list(case.attributes["perm"])),
    "reshape": lambda case, x: relax.op.reshape(x, case.attributes["shape"]),
    "expand": lambda case, x: relax.op.broadcast_to(x, case.attributes["shape"]),
    "concat": lambda case, a, b: relax.op.concat([a, b], case.attributes["axis"]),
    "slice": slice_, "enlarge": enlarge,
    "gather": lambda case, x, i: relax.op.take(x, relax.op.astype(i, "int64"), case.attributes["axis"], mode="clip"),
    "pad": lambda case, x: nn.pad(x, [s for both in zip(case.attributes["before"], case.attributes["after"],
                                                        strict=True) for s in both]),
    "ones": lambda case: relax.op.ones(case.attributes["shape"], "float32"),
    "identity_matrix": lambda case: relax.op.eye(case.attributes["size"], dtype="float32"),
    "batch_norm": normalise, "layer_norm": normalise, "rms_norm": normalise,
    "softmax": lambda case, x: nn.softmax(x, case.attributes["axis"]),
}
#: constants that no operator of TVM makes
NO_COUNTERPART = {"scalar", "identity_kernel"}


def test_every_operator_has_its_counterpart() -> None:
    assert set(RELAX) | NO_COUNTERPART == set(OPERATORS)


def legalised(cases: list[Case]) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    for place, case in enumerate(cases):
        params = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(case.shapes)]
        with builder.function(f"case{place}", params):
            builder.emit_func_output(builder.normalize(RELAX[case.op](case, *params)))
    return relax.transform.LegalizeOps()(relax.transform.DecomposeOpsForInference()(builder.get()))


@pytest.mark.parametrize("op", sorted(RELAX))
def test_tvm_means_the_same(op: str) -> None:
    rng = np.random.default_rng(zlib.crc32(op.encode()) + 1)
    cases = [MAKERS[op](rng) for _ in range(INSTANCES)]
    machine = relax.VirtualMachine(tvm.compile(legalised(cases), target="llvm"), tvm.cpu())
    for place, case in enumerate(cases):
        inputs = [np.asarray(a, dtype=np.float32) for a in case.inputs(REAL, rng)]
        found = machine[f"case{place}"](*(tvm.runtime.tensor(a) for a in inputs)).numpy()
        (expected,) = evaluate(op, [a.astype(np.float64) for a in inputs], case.attributes)
        assert found.shape == expected.shape, case
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5, err_msg=str(case))
