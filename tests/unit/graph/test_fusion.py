"""What becomes one kernel and what does not, and the tasks that come out."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from relax_evaluation import RNG, assert_same_values, evaluate, module, network, operators, values, weight
from scipy import special
from tvm import relax
from tvm.script import relax as R

import mlc
from mlc.errors import BuildError, ModelError
from mlc.graph.lowering.fuse import check_lowered
from mlc.graph.pipeline import optimise, passes
from mlc.graph.tasks import extract_tasks, human_name
from mlc.target import resolve

CPU = resolve("native")
GPU = resolve("cuda:sm_80")  # no blocked layouts, no packed weights: the plain operators stay recognisable


def _kernels(func: relax.Function) -> list[str]:
    return [task.name for task in extract_tasks(optimise(module(func), GPU), GPU)]


def test_a_convolution_takes_bias_activation_and_residual() -> None:
    w, b = weight(8, 8, 3, 3), weight(8, 1, 1)

    @R.function(private=True)
    def func(x: R.Tensor((1, 8, 6, 6), "float32")):
        with R.dataflow():
            y = R.nn.relu(R.add(R.add(R.nn.conv2d(x, w, padding=1), b), x))
            R.output(y)
        return y

    assert _kernels(func) == ["fused_conv2d_add_add_relu"]


def test_elementwise_work_is_not_repeated_inside_reductions() -> None:
    w = weight(8, 8)

    @R.function(private=True)
    def func(x: R.Tensor((4, 8), "float32"), m: R.Tensor((4, 1), "float32")):
        with R.dataflow():
            a = R.nn.softmax(R.add(R.exp(x), m), axis=-1)
            y = R.matmul(R.sin(a), w)
            R.output(y)
        return y

    assert _kernels(func) == ["fused_tir_exp_add", "fused_softmax_tir_sin", "matmul"]


def test_embeddings_are_one_kernel_with_their_indices_and_what_is_added() -> None:
    words, places = weight(50, 16), weight(12, 16)

    @R.function(private=True)
    def func(ids: R.Tensor((2, 12), "int64")):
        with R.dataflow():
            negative = R.less(ids, R.const(0, "int64"))
            rows = R.where(negative, R.add(ids, R.const(50, "int64")), ids)
            y = R.nn.relu(R.add(R.take(words, rows, axis=0), places))
            R.output(y)
        return y

    mod, ids = optimise(module(func), CPU), RNG.integers(-50, 50, (2, 12))
    assert len(extract_tasks(mod, CPU)) == 1
    (found,) = evaluate(mod, ids)
    np.testing.assert_allclose(found, np.maximum(values(words)[ids] + values(places), 0), rtol=1e-6)


def test_columns_of_indices_are_looked_up_in_tables_by_one_kernel() -> None:
    first, second = weight(9, 8), weight(7, 8)

    @R.function(private=True)
    def func(ids: R.Tensor((5, 3), "int64")):
        with R.dataflow():
            a = R.take(first, R.take(ids, R.const(2, "int64"), axis=1), axis=0)
            b = R.take(second, R.take(ids, R.const(0, "int64"), axis=1), axis=0)
            y = R.concat((R.expand_dims(a, axis=1), R.expand_dims(b, axis=1)), axis=1)
            R.output(y)
        return y

    mod, ids = optimise(module(func), CPU), RNG.integers(0, 7, (5, 3))
    assert len(extract_tasks(mod, CPU)) == 1
    (found,) = evaluate(mod, ids)
    np.testing.assert_array_equal(
        found, np.stack([values(first)[ids[:, 2]], values(second)[ids[:, 0]]], axis=1))


def test_deep_chains_of_transcendental_functions_are_cut() -> None:
    """Code generation takes time that is exponential in how deep they are nested: ten would take hours."""

    @R.function(private=True)
    def func(x: R.Tensor((4, 8), "float32")):
        with R.dataflow():
            a = R.sigmoid(R.sigmoid(R.sigmoid(R.sigmoid(R.sigmoid(x)))))
            y = R.sigmoid(R.sigmoid(R.sigmoid(R.sigmoid(R.sigmoid(R.add(a, x))))))
            R.output(y)
        return y

    assert len(_kernels(func)) >= 4
    x = expected = RNG.standard_normal((4, 8)).astype("float32")
    for _ in range(5):
        expected = special.expit(expected)
    expected = expected + x
    for _ in range(5):
        expected = special.expit(expected)
    (got,) = mlc.compile(module(func), log=False)(x)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_long_chains_are_cut() -> None:
    """Inlining takes time that is quadratic in their length."""
    steps = 150

    def body(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        for _ in range(steps):
            x = builder.emit(relax.op.nn.relu(relax.op.add(x, relax.const(-0.01, "float32"))))
        return x

    mod = network((4, 8), body)
    assert 3 <= len(extract_tasks(optimise(mod, GPU), GPU)) <= 5
    x = expected = RNG.standard_normal((4, 8)).astype("float32")
    for _ in range(steps):
        expected = np.maximum(expected - np.float32(0.01), 0)
    (got,) = mlc.compile(mod, log=False)(x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_kernel_of_a_product_has_one_shape() -> None:
    w = weight(8, 8, 1, 1)

    @R.function(private=True)
    def func(x: R.Tensor((1, 8, 6, 6), "float32"), m: R.Tensor((1, 1, 6, 6), "float32")):
        with R.dataflow():
            s = R.sigmoid(R.nn.conv2d(R.mean(x, axis=[2, 3], keepdims=True), w))
            a = R.nn.relu(R.multiply(x, s))
            y = R.add(R.nn.conv2d(a, w), R.exp(m))
            R.output(y)
        return y

    expected = ["mean", "fused_conv2d_tir_sigmoid", "fused_multiply_relu", "tir_exp", "fused_conv2d_add"]
    assert sorted(_kernels(func)) == sorted(expected)


def test_a_concatenation_does_not_enter_the_convolution_after_it() -> None:
    w = weight(4, 6, 3, 3)

    @R.function(private=True)
    def func(x: R.Tensor((1, 3, 6, 6), "float32"), z: R.Tensor((1, 3, 6, 6), "float32")):
        with R.dataflow():
            y = R.nn.conv2d(R.nn.relu(R.concat((x, z), axis=1)), w, padding=1)
            R.output(y)
        return y

    assert _kernels(func) == ["fused_concatenate_relu", "conv2d"]


def test_reshapes_between_copies_join_them_and_others_stay_views() -> None:
    @R.function(private=True)
    def func(x: R.Tensor((2, 6, 8), "float32")):
        with R.dataflow():
            a = R.strided_slice(x, axes=[2], begin=[4], end=[8])
            b = R.permute_dims(R.reshape(a, (2, 6, 2, 2)), axes=[0, 2, 1, 3])
            y = R.reshape(b, (4, 12))
            R.output(y)
        return y

    mod = optimise(module(func), CPU)
    assert operators(mod) == ["call_tir", "reshape"]
    assert [t.name for t in extract_tasks(mod, CPU)] == ["fused_strided_slice_reshape_transpose"]
    assert_same_values(func, mod)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("exp", np.exp),
        ("erf", special.erf),
        ("tanh", np.tanh),
        ("sigmoid", special.expit),
        ("nn.silu", lambda x: x * special.expit(x)),
        ("nn.gelu", lambda x: x * special.ndtr(x)),
        ("nn.gelu_tanh", lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    ],
)
def test_vectorised_functions_are_exact_to_rounding(name: str, reference) -> None:  # type: ignore[no-untyped-def]
    data = np.concatenate([RNG.uniform(-30, 30, 3000), RNG.uniform(-2, 2, 1096)]).astype("float32")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4096,), "float32"))
    build = relax.op
    for part in name.split("."):
        build = getattr(build, part)
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(build(x))
        builder.emit_func_output(y)
    result = evaluate(optimise(builder.finalize(), CPU), data)[0]
    np.testing.assert_allclose(result, reference(data.astype("float64")), rtol=3e-7, atol=1e-6)


def test_softmax_of_large_and_masked_scores() -> None:
    @R.function(private=True)
    def func(x: R.Tensor((3, 5), "float32")):
        with R.dataflow():
            y = R.nn.softmax(x, axis=-1)
            R.output(y)
        return y

    lowest = np.finfo("float32").min
    data = np.array(
        [[1e4, 1e4, 0, -1e4, 5], [lowest, 1, lowest, 2, lowest], [lowest] * 5], "float32"
    )
    expected = special.softmax(data.astype("float64"), axis=-1)
    np.testing.assert_allclose(evaluate(optimise(module(func), CPU), data)[0], expected, rtol=1e-6, atol=1e-30)


def test_layer_norm_subtracts_the_mean_before_it_squares() -> None:
    g, b = relax.const(np.ones(64, "float32")), relax.const(np.zeros(64, "float32"))

    @R.function(private=True)
    def func(x: R.Tensor((4, 64), "float32")):
        with R.dataflow():
            y = R.nn.layer_norm(x, g, b, axes=[-1], epsilon=1e-5)
            R.output(y)
        return y

    data = (1e3 + RNG.standard_normal((4, 64))).astype("float32")  # E[x^2] - E[x]^2 loses every digit of this
    wide = data.astype("float64")
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(evaluate(optimise(module(func), CPU), data)[0], expected, atol=1e-3)


def test_operators_that_are_left_are_named() -> None:
    @R.function(private=True)
    def func(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.add(R.nn.relu(x), R.nn.relu(R.exp(x)))
            R.output(y)
        return y

    with pytest.raises(BuildError, match=r"relax.add \(1 calls\), relax.exp \(1 calls\), relax.nn.relu \(2 calls\)"):
        check_lowered(module(func))


def test_control_flow_is_refused_with_its_place() -> None:
    @R.function(private=True)
    def func(c: R.Tensor((), "bool"), x: R.Tensor((4,), "float32")):
        if c:  # noqa: SIM108 - TVMScript has no conditional expression
            y = R.exp(x)
        else:
            y = R.nn.relu(x)
        return y

    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with pytest.raises(ModelError, match="straight-line code, but y"):
        optimise(mod, CPU)


def test_symbolic_shapes_are_refused_with_their_tensor() -> None:
    @R.function(private=True)
    def func(x: R.Tensor(("n", 4), "float32")):
        with R.dataflow():
            y = R.exp(x)
            R.output(y)
        return y

    with pytest.raises(ModelError, match="static shape, but x is"):
        optimise(module(func), CPU)


def test_dumps_show_every_pass(tmp_path) -> None:  # type: ignore[no-untyped-def]
    @R.function(private=True)
    def func(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.exp(x)
            R.output(y)
        return y

    optimise(module(func), CPU, dump=tmp_path)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert len(files) == len(passes(CPU))
    (first,) = (name for name in files if name.endswith("_Simplify.py"))
    assert "R.exp" in (tmp_path / first).read_text()


def test_tasks_count_calls_and_share_equal_functions() -> None:
    w, u = weight(8, 8, 1, 1), weight(8, 8, 1, 1)
    v = weight(4, 8, 1, 1)

    @R.function(private=True)
    def func(x: R.Tensor((1, 8, 6, 6), "float32")):
        with R.dataflow():
            a = R.nn.relu(R.nn.conv2d(x, w))
            b = R.nn.relu(R.nn.conv2d(a, u))
            c = R.nn.relu(R.nn.conv2d(b, w))
            y = R.nn.relu(R.nn.conv2d(c, v))
            R.output(y)
        return y

    tasks = extract_tasks(optimise(module(func), GPU), GPU)
    assert [(t.name, t.weight) for t in tasks] == [("fused_conv2d_relu", 3), ("fused_conv2d_relu_2", 1)]
    assert len({t.key for t in tasks}) == 2


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("fused_conv2d10_add6_relu6", "fused_conv2d_add_relu"),
        ("conv2d", "conv2d"),
        ("max_pool2d1", "max_pool2d"),
        ("avg_pool3d", "avg_pool3d"),
        ("layer_norm12", "layer_norm"),
        ("log1p3", "log1p"),
        ("fused_" + "_".join(["transpose", "reshape"] * 6), "fused_transpose_reshape"),
    ],
)
def test_names_for_people(symbol: str, name: str) -> None:
    assert human_name(symbol) == name


@pytest.mark.parametrize(("epilogue", "views"), [(False, 1), (True, 3)])
def test_gates_are_read_in_place_by_arithmetic_and_as_views_by_products(epilogue: bool, views: int) -> None:
    w, u = weight(64, 192), weight(64, 64)

    def body(builder: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        gates = builder.emit(R.matmul(x, w))
        a, b, c = (builder.emit(R.strided_slice(gates, axes=[1], begin=[i], end=[i + 64])) for i in (0, 64, 128))
        opened = builder.emit(R.multiply(builder.emit(R.sigmoid(a)), builder.emit(R.tanh(b))))
        if epilogue:  # which takes in no copies
            opened = builder.emit(R.add(builder.emit(R.matmul(builder.emit(R.exp(x)), u)), opened))
        return R.add(builder.emit(R.matmul(opened, u)), c)

    before = network((1, 64), body)
    mod = optimise(before, CPU)
    assert_same_values(before, mod)
    assert operators(mod).count("strided_slice") == views
    assert not any(t.name.removeprefix("fused_") in ("copy", "strided_slice") for t in extract_tasks(mod, CPU))
