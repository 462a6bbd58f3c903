from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import TARGET, Case, SpaceContract, build_and_run, pytest_generate_tests
from tvm import te, tirx, topi

from mlc.graph.kernels.blocked import depthwise_nchwc
from mlc.target import resolve
from schedules.analysis import analyse
from schedules.cpu.contraction import CONTRACTION
from schedules.cpu.depthwise import DEPTHWISE
from schedules.cpu.pooling import POOLING
from schedules.cpu.window import read_window
from schedules.registry import find
from schedules.space import best_seed

__all__ = ["pytest_generate_tests"]


def _p(*shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype)


def _pool(shape: tuple[int, ...], kernel: int, stride: int, pad: int, kind: str):  # type: ignore[no-untyped-def]
    layout = "NCHW16c" if len(shape) == 5 else "NCHW"

    def build() -> list[te.Tensor]:
        a = _p(*shape)
        window, steps = (kernel, kernel), (stride, stride)
        return [a, topi.nn.pool2d(
            a, window, steps, (1, 1), (pad,) * 4, kind, layout=layout, count_include_pad=False,
        )]

    return build


def _torch_pool(kernel: int, stride: int, pad: int, kind: str):  # type: ignore[no-untyped-def]
    def reference(a: np.ndarray) -> np.ndarray:
        blocked = a.ndim == 5
        plain = a.transpose(0, 1, 4, 2, 3).reshape(a.shape[0], -1, *a.shape[2:4]) if blocked else a
        data = torch.from_numpy(np.ascontiguousarray(plain))
        if kind == "max":
            out = F.max_pool2d(data, kernel, stride, pad).numpy()
        else:
            out = F.avg_pool2d(data, kernel, stride, pad, count_include_pad=False).numpy()
        return out.reshape(a.shape[0], a.shape[1], 16, *out.shape[2:]).transpose(0, 1, 3, 4, 2) if blocked else out

    return reference


def _conv(convolution, *, stride: int = 1, pad: int = 0, groups: int = 1):  # type: ignore[no-untyped-def]
    def reference(a: np.ndarray, w: np.ndarray) -> np.ndarray:
        x, y = torch.from_numpy(a), torch.from_numpy(w)
        return convolution(x, y, stride=stride, padding=pad, groups=groups).numpy()

    return reference


def _lrn(a: np.ndarray) -> np.ndarray:
    return F.local_response_norm(torch.from_numpy(a), 5, alpha=1e-2, beta=0.75, k=1.0).numpy()


def _depthwise_blocked(stride: int, pad: int):  # type: ignore[no-untyped-def]
    """``[N, C/c, H, W, c] * [C/c, 1, KH, KW, 1, c]``, annotated, with a residual and a ReLU behind it."""

    def build() -> list[te.Tensor]:
        size = (20 + 2 * pad - 3) // stride + 1
        a, w, r = _p(1, 3, 20, 20, 16), _p(3, 1, 3, 3, 1, 16), _p(1, 3, size, size, 16)
        padded = topi.nn.pad(a, [0, 0, pad, pad, 0], name="padded") if pad else a
        kh, kw = te.reduce_axis((0, 3), "kh"), te.reduce_axis((0, 3), "kw")

        def product(n, b, h, x, c):  # type: ignore[no-untyped-def]
            return te.sum(padded[n, b, h * stride + kh, x * stride + kw, c] * w[b, 0, kh, kw, 0, c], axis=[kh, kw])

        out = te.compute((1, 3, size, size, 16), product, name="depthwise", attrs={"mlc.op": "depthwise_nchwc"})
        return [a, w, r, topi.nn.relu(topi.add(out, r))]

    def reference(a: np.ndarray, w: np.ndarray, r: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(a.transpose(0, 1, 4, 2, 3).reshape(1, 48, 20, 20).copy())
        y = torch.from_numpy(w.transpose(0, 5, 1, 4, 2, 3).reshape(48, 1, 3, 3).copy())
        out = F.conv2d(x, y, stride=stride, padding=pad, groups=48).numpy()
        blocked = out.reshape(1, 3, 16, *out.shape[2:]).transpose(0, 1, 3, 4, 2)
        return np.maximum(blocked + r, 0)

    return build, reference


def _two(make, first: tuple[int, ...], second: tuple[int, ...], dtype: str = "float32"):  # type: ignore[no-untyped-def]
    def build() -> list[te.Tensor]:
        a, b = _p(*first, dtype=dtype), _p(*second, dtype=dtype)
        return [a, b, make(a, b)]

    return build


def _blend_with_product() -> list[te.Tensor]:
    """``n + z * (h - n)`` with ``n = tanh(a @ b)``: the last step of a gated recurrent unit."""
    a, b, z, h = _p(3, 20), _p(20, 21), _p(3, 21), _p(3, 21)
    n = topi.tanh(topi.matmul(a, b))
    return [a, b, z, h, topi.add(n, topi.multiply(z, topi.subtract(h, n)))]


def _int8_product(a: te.Tensor, b: te.Tensor) -> te.Tensor:
    k = te.reduce_axis((0, 70), "k")
    return te.compute((60, 48), lambda i, j: te.sum(a[i, k].astype("int32") * b[k, j].astype("int32"), k))


class TestPooling(SpaceContract):
    space = POOLING
    cases = (
        Case("max_blocked", _pool((1, 2, 27, 27, 16), 3, 2, 0, "max"), _torch_pool(3, 2, 0, "max")),
        Case("max_blocked_padded", _pool((1, 2, 28, 28, 16), 3, 2, 1, "max"), _torch_pool(3, 2, 1, "max")),
        Case("average_blocked_padded", _pool((1, 2, 14, 14, 16), 3, 1, 1, "avg"), _torch_pool(3, 1, 1, "avg")),
        Case("max_plain", _pool((1, 6, 30, 33), 3, 2, 1, "max"), _torch_pool(3, 2, 1, "max")),
        Case("average_plain", _pool((2, 3, 12, 12), 2, 2, 0, "avg"), _torch_pool(2, 2, 0, "avg")),
        Case("response_norm", lambda: [a := _p(1, 12, 9, 11), topi.nn.lrn(a, 5, 1, 1e-2, 0.75, 1.0)], _lrn),
    )


_STRIDE1, _STRIDE2, _BARE = _depthwise_blocked(1, 1), _depthwise_blocked(2, 1), _depthwise_blocked(1, 0)


class TestDepthwise(SpaceContract):
    space = DEPTHWISE
    cases = (
        Case("blocked", *_STRIDE1),
        Case("blocked_stride", *_STRIDE2),
        Case("blocked_unpadded", *_BARE),
        Case(
            "plain",
            _two(
                lambda a, w: topi.nn.depthwise_conv2d_nchw(a, w, (1, 1), (1, 1, 1, 1), (1, 1)),
                (1, 8, 18, 24), (8, 1, 3, 3),
            ),
            _conv(F.conv2d, pad=1, groups=8),
        ),
    )


class TestContraction(SpaceContract):
    space = CONTRACTION
    cases = (
        Case(
            "conv2d", _two(lambda a, w: topi.nn.conv2d_nchw(a, w, 1, 1, 1), (1, 6, 15, 24), (10, 6, 3, 3)),
            _conv(F.conv2d, pad=1),
        ),
        Case(
            "conv2d_prime_width",
            _two(lambda a, w: topi.nn.conv2d_nchw(a, w, (1, 1), (0, 0, 0, 0), (1, 1)), (1, 3, 9, 73), (4, 3, 3, 3)),
            _conv(F.conv2d),
        ),
        Case(
            "conv2d_stride", _two(lambda a, w: topi.nn.conv2d_nchw(a, w, 2, 1, 1), (2, 5, 17, 32), (6, 5, 3, 3)),
            _conv(F.conv2d, stride=2, pad=1),
        ),
        Case(
            "conv2d_groups",
            _two(lambda a, w: topi.nn.group_conv2d_nchw(a, w, 1, 1, 1, 2), (1, 8, 12, 16), (12, 4, 3, 3)),
            _conv(F.conv2d, pad=1, groups=2),
        ),
        Case(
            "conv2d_transpose",
            _two(
                lambda a, w: topi.nn.conv2d_transpose_nchw(a, w, (2, 2), (1, 1, 1, 1), "float32", (0, 0)),
                (1, 6, 7, 8), (6, 4, 4, 4),
            ),
            _conv(F.conv_transpose2d, stride=2, pad=1),
        ),
        Case("conv1d", _two(lambda a, w: topi.nn.conv1d(a, w), (1, 8, 100), (12, 8, 5)), _conv(F.conv1d)),
        Case(
            "conv3d", _two(lambda a, w: topi.nn.conv3d_ncdhw(a, w, 1, 1, 1, 1), (1, 4, 5, 9, 16), (6, 4, 3, 3, 3)),
            _conv(F.conv3d, pad=1),
        ),
        Case("product_odd", _two(topi.matmul, (6, 70), (70, 51)), lambda a, b: a @ b),
        Case(
            "product_with_an_epilogue_that_reads_an_intermediate_twice", _blend_with_product,
            lambda a, b, z, h: (1 - z) * np.tanh(a @ b) + z * h,
        ),
        Case("product_float64_odd", _two(topi.matmul, (7, 70), (70, 51), "float64"), lambda a, b: a @ b),
        Case(
            "product_int8", _two(_int8_product, (60, 70), (70, 48), "int8"),
            lambda a, b: a.astype(int) @ b.astype(int),
        ),
    )


def test_a_product_of_few_contiguous_rows_goes_by_rows() -> None:
    a, b = _p(3, 64), _p(33, 64)
    func = te.create_prim_func([a, b, topi.matmul(a, b, transp_b=True)])
    space = find(func, TARGET)
    assert space.name == "cpu.reduction"
    x, y = (np.random.default_rng(s).normal(size=(n, 64)).astype("float32") for s, n in ((0, 3), (1, 33)))
    got = build_and_run(best_seed(space, func, TARGET).mod, [x, y, np.zeros((3, 33), "float32")])[2]
    np.testing.assert_allclose(got, x.astype("float64") @ y.T.astype("float64"), rtol=1e-5, atol=1e-5)


def test_an_epilogue_of_another_shape_falls_back_and_is_correct() -> None:
    a = _p(1, 4, 12, 12)
    pooled = topi.nn.pool2d(a, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), "max")
    func = te.create_prim_func([a, topi.transpose(pooled, (0, 2, 3, 1))])
    assert read_window(analyse(func)) is None
    space = find(func, TARGET)
    data = np.random.default_rng(2).normal(size=(1, 4, 12, 12)).astype("float32")
    got = build_and_run(best_seed(space, func, TARGET).mod, [data, np.zeros((1, 12, 12, 4), "float32")])[1]
    want = F.max_pool2d(torch.from_numpy(data), 3, 1, 1).numpy().transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(got, want)


def test_slow_intermediates_of_an_epilogue_are_computed_twice() -> None:
    """The power 3/4 as roots: one of them is read by the other and by their product."""
    def rooted() -> list[te.Tensor]:
        a, w = _p(1, 5, 9, 9), _p(5, 5, 3, 3)
        root = topi.sqrt(topi.nn.relu(topi.nn.conv2d(a, w, 1, 0, 1)))
        return [a, w, topi.multiply(root, topi.sqrt(root))]

    func = te.create_prim_func(rooted())
    assert find(func, TARGET) is CONTRACTION
    sch = best_seed(CONTRACTION, func, TARGET)
    rng = np.random.default_rng(0)
    a, w = (rng.standard_normal(shape).astype("float32") for shape in ((1, 5, 9, 9), (5, 5, 3, 3)))
    got = build_and_run(sch.mod, [a, w, np.zeros((1, 5, 7, 7), "float32")])[2]
    wanted = F.conv2d(torch.from_numpy(a.astype("float64")), torch.from_numpy(w.astype("float64"))).numpy()
    np.testing.assert_allclose(got, np.maximum(wanted, 0) ** 0.75, rtol=1e-4, atol=1e-5)


def test_accumulators_are_one_tile() -> None:
    """The reduction's buffer is computed inside the tile loop, so lowering shrinks it to registers."""
    func = te.create_prim_func(_pool((1, 4, 56, 56, 16), 3, 2, 1, "max")())
    sch = best_seed(POOLING, func, TARGET)
    anchor = sch.get_sblock("pool_max_update") if "pool_max_update" in sch.mod.script() else sch.get_sblock("pool_max")
    kinds = [int(sch.get(loop).kind) for loop in sch.get_loops(anchor)]
    assert tirx.ForKind.PARALLEL in kinds and kinds[-1] == tirx.ForKind.VECTORIZED


@pytest.mark.parametrize(("target", "size", "stride", "expected"), [
    ("x86-64-v3", 14, 1, (8, 7)),  # neighbours read the same: long tiles of one vector
    ("x86-64-v3", 56, 2, (16, 4)),  # hardly any: whole lines
    ("x86-64-v4", 14, 1, (16, 7)),
    ("x86-64-v4", 56, 2, (16, 7)),
])
def test_tiles_of_depthwise_convolutions(target: str, size: int, stride: int, expected: tuple[int, int]) -> None:
    a, w = _p(1, 24, size, size, 16), _p(24, 1, 3, 3, 1, 16)
    func = te.create_prim_func([a, w, depthwise_nchwc(a, w, (stride, stride), (1, 1, 1, 1), (1, 1))])
    seed = next(iter(DEPTHWISE.seeds(func, resolve(target, threads=2).tvm)))
    assert (seed["width"], seed["tile"]) == expected


def test_eight_pixels_that_slide_would_spill() -> None:
    """Eight sums, eight values that the next tap reads again, and its weights: two more than 16 registers."""
    a, w = _p(1, 4, 56, 56, 16), _p(4, 1, 3, 3, 1, 16)
    func = te.create_prim_func([a, w, depthwise_nchwc(a, w, (1, 1), (1, 1, 1, 1), (1, 1))])
    seeds = list(DEPTHWISE.seeds(func, resolve("x86-64-v3", threads=2).tvm))
    assert all((seed["width"], seed["tile"]) != (8, 8) for seed in seeds)


@pytest.mark.parametrize(("size", "rows"), [(14, 14), (28, 14), (56, 8)])
def test_chunks_of_short_rows_have_more_of_them(size: int, rows: int) -> None:
    a, w = _p(1, 24, size, size, 16), _p(24, 1, 3, 3, 1, 16)
    func = te.create_prim_func([a, w, depthwise_nchwc(a, w, (1, 1), (1, 1, 1, 1), (1, 1))])
    assert next(iter(DEPTHWISE.seeds(func, resolve("x86-64-v3", threads=2).tvm)))["rows"] == rows
