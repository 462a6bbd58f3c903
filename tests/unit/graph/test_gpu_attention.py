"""GPUs' attention is found with the movement around it, and computes the same."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest
import tvm
from relax_evaluation import assert_same_values, evaluate, module, network, operators, weight
from tvm import relax
from tvm.relax import op
from tvm.script import relax as R

from mlc.graph.lowering.attention import FuseAttention
from mlc.graph.pipeline import lower
from mlc.target import resolve
from mlc.testing import cuda_emulator
from schedules import registry
from schedules.cuda.heads import Heads, heads_of
from schedules.space import best_seed

AMPERE = resolve("cuda:sm_80")
FUSE = FuseAttention(AMPERE)


def heads(mod: tvm.IRModule) -> Heads:
    """Of the only attention of a module, which its space takes."""
    funcs = [func for func in mod.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    (found,) = [each for func in funcs if (each := heads_of(func)) is not None]
    (func,) = [func for func in funcs if heads_of(func) is not None]
    assert registry.find(func, AMPERE.tvm).name == f"cuda.attention{'_f32' if found.dtype == 'float32' else ''}"
    return found


def test_three_projections_become_one_and_the_mask_stays_as_it_is() -> None:
    wq, wk, wv, bias = weight(32, 32), weight(32, 32), weight(32, 32), weight(32)

    @R.function(private=True)
    def before(x: R.Tensor((20, 32), "float32"), m: R.Tensor((1, 1, 1, 20), "float32")):
        with R.dataflow():
            q = R.permute_dims(R.reshape(R.add(R.matmul(x, wq), bias), (1, 20, 4, 8)), [0, 2, 1, 3])
            k = R.permute_dims(R.reshape(R.matmul(x, wk), (1, 20, 4, 8)), [0, 2, 3, 1])
            v = R.permute_dims(R.reshape(R.matmul(x, wv), (1, 20, 4, 8)), [0, 2, 1, 3])
            s = R.add(R.multiply(R.matmul(q, k), R.const(0.35, "float32")), m)
            y = R.matmul(R.nn.softmax(s, axis=-1), v)
            z = R.reshape(R.permute_dims(y, [0, 2, 1, 3]), (20, 32))
            R.output(z)
        return z

    after = FUSE(module(before))
    assert operators(after) == ["matmul", "add", "call_tir", "reshape"]
    found = heads(after)
    assert (found.queries, found.keys, found.depth, found.features, found.causal) == (20, 20, 8, 8, None)
    assert found.vector(found.query, 8) == found.vector(found.key, 8) == found.vector(found.value, 8) == 4
    assert_same_values(before, after)


@pytest.mark.parametrize(("shift", "never", "causal"), [(0, -np.inf, 0), (3, float(np.finfo("float32").min), 3),
                                                        (0, -1e4, None), (-1, -np.inf, None)])
def test_a_constant_that_hides_what_comes_later_is_a_limit(shift: int, never: float, causal: int | None) -> None:
    """Where it leaves each query a key, and no score could make up for it."""
    seen = np.tri(9, 12, shift, dtype=bool)
    mask = tvm.relax.const(np.where(seen, 0.0, never).astype("float32").reshape(1, 1, 9, 12))

    @R.function(private=True)
    def before(
        q: R.Tensor((1, 2, 9, 8), "float32"), k: R.Tensor((1, 2, 8, 12), "float32"),
        v: R.Tensor((1, 2, 12, 16), "float32"),
    ):
        with R.dataflow():
            y = R.matmul(R.nn.softmax(R.add(R.matmul(q, k), mask), axis=-1), v)
            R.output(y)
        return y

    after = FUSE(module(before))
    found = heads(after)
    assert found.causal == causal and (found.mask is None) == (causal is not None)
    if shift >= 0:  # else the first query sees nothing
        assert_same_values(before, after)


def attention_of(shapes: list[tuple[int, ...]], dtype: str) -> tvm.IRModule:
    """Attention of 16 bits whose queries are scaled, as the importer of ONNX's operator writes it."""
    builder = relax.BlockBuilder()
    q, k, v = (relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in zip("qkv", shapes, strict=True))
    with builder.function("main", [q, k, v]):
        with builder.dataflow():
            scale = relax.const(tvm.runtime.tensor(np.array(0.125, getattr(ml_dtypes, dtype, dtype))))
            turned = builder.emit(op.permute_dims(k, [0, 1, 3, 2]))
            scores = builder.emit(op.matmul(builder.emit(op.multiply(q, scale)), turned))
            result = builder.emit_output(op.matmul(builder.emit(op.nn.softmax(scores)), v))
        builder.emit_func_output(result)
    return builder.finalize()


def arrays(shapes: list[tuple[int, ...]], dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype)) for shape in shapes]


def check(result: np.ndarray, values: list[np.ndarray], tolerance: float) -> None:
    q, k, v = (array.astype("float64") for array in values)
    powers = np.exp(0.125 * q @ k.swapaxes(-1, -2))
    wanted = powers / powers.sum(-1, keepdims=True) @ v
    assert wanted.std() > 0 and np.abs(result.astype("float64") - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_of_16_bits_that_are_scaled_are_read_as_they_are(dtype: str) -> None:
    """No kernel scales them, and they are rounded once less."""
    shapes = [(1, 2, 40, 64)] * 3
    lowered = lower(attention_of(shapes, dtype), AMPERE)
    assert [task.weight for task in lowered.tasks] == [1]
    values = arrays(shapes, dtype)
    (got,) = evaluate(lowered.module, *values)
    check(got, values, 1e-3 if dtype == "float16" else 8e-3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("queries", "keys", "features"), [(1, 70, 16), (1, 33, 1), (5, 40, 1), (5, 1, 16), (1, 1, 16)])
def test_axes_of_one_element_are_found(queries: int, keys: int, features: int) -> None:
    """As of a decoder's one query, or its one key, whose index the graph writes as 0: the kernel is that of attention,
    and right."""
    shapes = [(1, 2, queries, 16), (1, 2, keys, 16), (1, 2, keys, features)]
    lowered = lower(attention_of(shapes, "float16"), AMPERE)
    (task,) = lowered.tasks
    space = registry.find(task.func, AMPERE.tvm)
    assert space.name == "cuda.attention"
    values, result = arrays(shapes, "float16"), np.zeros((1, 2, queries, features), "float16")
    cuda_emulator.run(best_seed(space, task.func, AMPERE.tvm).mod["main"], AMPERE.tvm, values, [result])
    check(result, values, 2e-3)


def test_operands_of_16_bits_and_a_rounded_result() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2, 11, 3, 4, 8), "float16")):
        with R.dataflow():
            t = R.permute_dims(x, [2, 0, 3, 1, 4])
            q = R.reshape(R.strided_slice(t, [0], [0], [1]), (2, 4, 11, 8))
            k = R.reshape(R.strided_slice(t, [0], [1], [2]), (2, 4, 11, 8))
            v = R.reshape(R.strided_slice(t, [0], [2], [3]), (2, 4, 11, 8))
            s = R.matmul(q, R.permute_dims(k, [0, 1, 3, 2]), out_dtype="float32")
            p = R.astype(R.nn.softmax(s, axis=-1), "float16")
            y = R.matmul(p, v, out_dtype="float32")
            z = R.astype(R.permute_dims(y, [0, 2, 1, 3]), "float16")
            R.output(z)
        return z

    after = FUSE(module(before))
    assert operators(after) == ["call_tir"]
    found = heads(after)
    assert (found.dtype, str(found.result.buffer.dtype)) == ("float16", "float16")
    assert found.vector(found.key, 8) == 8
    assert_same_values(before, after, tolerance=2e-3)


@pytest.mark.parametrize(("arch", "features"), [("sm_80", 136), ("sm_75", 16)])
def test_what_registers_do_not_hold_or_cannot_be_copied_ahead_is_left_alone(arch: str, features: int) -> None:
    def attend(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        weights = b.emit(op.nn.softmax(b.emit(op.matmul(x, weight(1, 2, 8, 12)))))
        return b.emit(op.matmul(weights, weight(1, 2, 12, features)))

    mod = network((1, 2, 9, 8), attend)
    assert FuseAttention(resolve(f"cuda:{arch}"))(mod).same_as(mod)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_capped_scores_of_a_temperature_for_each_head(dtype: str) -> None:
    """As Gemma 2 and Swin v2 have them: both are done to a score where it is made."""
    q, k, v = ((1, 3, 20, 16) for _ in range(3))
    temperature, mask = weight(3, 1, 1, low=0.5, high=2.0), weight(20, 20)
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in zip("qkv", (q, k, v), strict=True)]
    with builder.function("main", params):
        with builder.dataflow():
            emit = builder.emit
            scores = emit(op.matmul(params[0], emit(op.permute_dims(params[1], [0, 1, 3, 2])), out_dtype="float32"))
            scaled = emit(op.multiply(emit(op.multiply(scores, relax.const(0.5, "float32"))), temperature))
            capped = emit(op.multiply(emit(op.tanh(scaled)), relax.const(3.0, "float32")))
            weights = emit(op.nn.softmax(emit(op.add(capped, mask))))
            weights = weights if dtype == "float32" else emit(op.astype(weights, dtype))
            result = builder.emit_output(op.matmul(weights, params[2], out_dtype="float32"))
        builder.emit_func_output(result)
    before = builder.finalize()
    after = FUSE(before)
    assert operators(after) == ["call_tir"]
    heads(after)
    values = arrays([q, k, v], dtype)
    (wanted,), (got,) = evaluate(before, *values), evaluate(after, *values)
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    np.testing.assert_allclose(got, wanted, atol=tolerance * np.abs(wanted).max())
    (func,) = [func for func in after.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    constants = [temperature.value.numpy(), mask.value.numpy()]
    order = [len(p.shape) for p in func.params]
    assert order == [4, 4, 4, 2, 3, 4]
    space = registry.find(func, AMPERE.tvm)
    found = np.zeros_like(wanted)
    cuda_emulator.run(best_seed(space, func, AMPERE.tvm).mod["main"], AMPERE.tvm, [*values, *constants[::-1]], [found])
    np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize(("heads_first", "shape"), [((4,), (1, 4)), ((1, 4), (4,)), ((6,), (2, 3)), ((2, 3), (6,))])
def test_scores_and_weights_of_other_batch_dimensions(heads_first: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """As Bloom's are, and those of exporters that multiply tensors of three dimensions: scores are added to and turned
    into weights as ``heads_first`` says, and meet the values as ``shape``."""
    alibi = weight(*heads_first, 1, 9)

    def attend(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        turned = b.emit(op.permute_dims(x, [*range(len(heads_first)), len(heads_first) + 1, len(heads_first)]))
        scores = b.emit(op.add(b.emit(op.matmul(x, turned)), alibi))
        weights = b.emit(op.reshape(b.emit(op.nn.softmax(scores)), (*shape, 9, 9)))
        return b.emit(op.matmul(weights, b.emit(op.reshape(x, (*shape, 9, 8)))))

    before = network((*heads_first, 9, 8), attend)
    after = FUSE(before)
    assert "softmax" not in operators(after) and "matmul" not in operators(after)
    heads(after)
    assert_same_values(before, after)


def test_a_mask_of_the_scores_own_dimensions() -> None:
    """Scores are seen as of texts and heads for the mask of a text, and put back."""
    mask = weight(2, 1, 1, 9)

    def attend(b: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        scores = b.emit(op.matmul(x, b.emit(op.permute_dims(x, [0, 2, 1]))))
        masked = b.emit(op.add(b.emit(op.reshape(scores, (2, 3, 9, 9))), mask))
        weights = b.emit(op.nn.softmax(b.emit(op.reshape(masked, (6, 9, 9)))))
        return b.emit(op.matmul(weights, x))

    before = network((6, 9, 8), attend)
    assert FUSE(before).same_as(before), "a mask of a text's would have to be repeated for its heads"
