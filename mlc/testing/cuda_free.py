"""Tensor functions with free sizes for GPUs, each with a float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tvm import te, tirx

__all__ = ["FREE", "FreeCase"]

_WIDE = {"float16": 1e-3, "float32": 1e-5}


@dataclass(frozen=True)
class FreeCase:
    """A function whose ``free`` sizes, ``[low, high, usual]`` by their names, a call decides.

    ``tensors`` gives its tensors for sizes that are variables or numbers, inputs first; ``reference`` maps the inputs,
    as float64, to the output, within ``rtol`` of the largest element.
    """

    name: str
    free: Mapping[str, tuple[int, int, int]]
    tensors: Callable[..., list[te.Tensor]]
    reference: Callable[..., np.ndarray]
    rtol: float
    spaces: Mapping[str, str] = field(default_factory=dict)
    index: str = "int32"
    #: whether the reference takes the numbers of :meth:`arguments`, too
    told: bool = False

    def __str__(self) -> str:
        return self.name

    def func(self) -> tirx.PrimFunc:
        """The function as a task has it."""
        from tvm import te, tirx

        from schedules.free import SIZES, variables
        from schedules.merged import merged, with_named_sizes

        sizes = {name: tirx.Var(name, self.index) for name in self.free}
        *inputs, output = self.tensors(**sizes)
        alone = {dim for tensor in (*inputs, output) for dim in tensor.shape if isinstance(dim, tirx.Var)}
        scalars = [size for size in sizes.values() if size not in alone]
        func = te.create_prim_func([*inputs, *scalars, output], index_dtype_override=self.index)
        ranges = [list(self.free[str(var.name)]) for var in variables(func)]
        func = func.with_attr(SIZES, ranges).with_attr("tirx.noalias", True).with_attr("global_symbol", "main")
        return merged(with_named_sizes(func))

    def arguments(self, sizes: Mapping[str, int], seed: int = 0) -> list[np.ndarray | int]:
        """Random inputs for these sizes, and what the function is given as numbers."""
        from tvm import tirx

        rng, named = np.random.default_rng(seed), {name: tirx.Var(name, self.index) for name in self.free}
        *inputs, output = self.tensors(**named)
        alone = {str(dim.name) for tensor in (*inputs, output) for dim in tensor.shape if isinstance(dim, tirx.Var)}
        arrays = [rng.standard_normal([int(d) for d in tensor.shape]).astype(str(tensor.dtype))
                  for tensor in self.tensors(**sizes)[:-1]]
        return [*arrays, *(size for name, size in sizes.items() if name not in alone)]

    def wanted(self, arguments: Sequence[np.ndarray | int]) -> np.ndarray:
        """The output in float64."""
        arrays = [a.astype("float64") for a in arguments if isinstance(a, np.ndarray)]
        return self.reference(*arrays, *arguments[len(arrays):] if self.told else ())

    def output(self, sizes: Mapping[str, int]) -> np.ndarray:
        """Room for the output, filled with what no kernel gives."""
        last = self.tensors(**sizes)[-1]
        return np.full([int(d) for d in last.shape], np.nan, str(last.dtype))


def _sum(terms: Any, axis: Any) -> Any:
    from tvm import te

    return te.sum(terms, axis=axis)


def _product(
    name: str, rows: Sequence[str], k: int, n: int, dtype: str, usual: int, spaces: Mapping[str, str]
) -> FreeCase:
    """``tanh(x @ w + b)`` of as many rows as the product of the sizes ``rows``."""
    def tensors(**sizes: Any) -> list[te.Tensor]:
        from tvm import te, tirx

        m = prod(sizes[row] for row in rows)
        x, w = te.placeholder((m, k), dtype, "x"), te.placeholder((k, n), dtype, "w")
        b, r = te.placeholder((n,), "float32", "b"), te.reduce_axis((0, k), "r")
        total = te.compute((m, n), lambda i, j: _sum(
            x[i, r.var].astype("float32") * w[r.var, j].astype("float32"), [r]), "total")
        made = te.compute((m, n), lambda i, j: tirx.tanh(
            total[i, j] * tirx.const(0.1, "float32") + b[j]).astype(dtype), "made")
        return [x, w, b, made]

    return FreeCase(name, {row: (1, 4096, usual) for row in rows}, tensors,
                    lambda x, w, b: np.tanh(0.1 * (x @ w) + b), _WIDE[dtype], spaces)


def _norm() -> FreeCase:
    def tensors(n: Any) -> list[te.Tensor]:
        from tvm import te, tirx

        x = te.placeholder((n, 96), "float32", "x")
        first, second = te.reduce_axis((0, 96), "r"), te.reduce_axis((0, 96), "s")
        total = te.compute((n,), lambda i: _sum(x[i, first.var], [first]), "total")
        square = te.compute((n,), lambda i: _sum(x[i, second.var] * x[i, second.var], [second]), "square")
        part = tirx.const(1 / 96, "float32")
        made = te.compute((n, 96), lambda i, j: (x[i, j] - total[i] * part) * tirx.rsqrt(
            square[i] * part - total[i] * part * total[i] * part + tirx.const(1e-5, "float32")), "made")
        return [x, made]

    def reference(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)

    return FreeCase("norm", {"n": (1, 4096, 64)}, tensors, reference, 1e-5)


def _broadcast() -> FreeCase:
    def tensors(batch: Any, length: Any) -> list[te.Tensor]:
        from tvm import te

        x, p = te.placeholder((batch, length, 24), "float32", "x"), te.placeholder((1, length, 24), "float32", "p")
        return [x, p, te.compute((batch, 24, length), lambda i, c, j: x[i, j, c] + p[0, j, c], "made")]

    return FreeCase("broadcast", {"batch": (1, 64, 4), "length": (1, 512, 64)}, tensors,
                    lambda x, p: (x + p).transpose(0, 2, 1), 1e-6)


def _window(dtype: str) -> FreeCase:
    """A convolution of images with their channels last, of a free number of images."""
    def tensors(batch: Any) -> list[te.Tensor]:
        from tvm import te, tirx

        x, w = te.placeholder((batch, 7, 9, 32), dtype, "x"), te.placeholder((64, 3, 3, 32), dtype, "w")
        filled = te.compute((batch, 9, 11, 32), lambda n, h, v, c: tirx.if_then_else(
            tirx.all(h >= 1, h < 8, v >= 1, v < 10), x[n, h - 1, v - 1, c], tirx.const(0, dtype)), "filled")
        kh, kv, c = te.reduce_axis((0, 3), "kh"), te.reduce_axis((0, 3), "kv"), te.reduce_axis((0, 32), "c")
        return [x, w, te.compute((batch, 7, 9, 64), lambda n, h, v, f: _sum(
            filled[n, h + kh.var, v + kv.var, c.var].astype("float32") * w[f, kh.var, kv.var, c.var].astype("float32"),
            [kh, kv, c]), "made")]

    def reference(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        filled = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return sum(np.einsum("nhvc,fc->nhvf", filled[:, i : i + 7, j : j + 9], w[:, i, j])
                   for i in range(3) for j in range(3))

    space = {"float16": "cuda.mma", "float32": "cuda.conv"}[dtype]
    return FreeCase(f"window_{dtype}", {"batch": (1, 64, 4)}, tensors, reference, _WIDE[dtype],
                    {"sm_80": space, "sm_90a": space})


def _stretched() -> FreeCase:
    """A transposed convolution of images of twice the free height, as TVM computes one: its results' places are
    quotients by a free size, by which TVM's pass for sums over threads does not find them."""
    def tensors(height: Any) -> list[te.Tensor]:
        from tvm import te, topi

        x, w = te.placeholder((1, 24, 2 * height, 28), "float32", "x"), te.placeholder((24, 16, 2, 2), "float32", "w")
        bias = te.placeholder((1, 16, 1, 1), "float32", "bias")
        return [x, w, bias, topi.add(topi.nn.conv2d_transpose_nchw(x, w, (2, 2), (0, 0), "float32", (0, 0)), bias)]

    def reference(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
        apart = np.einsum("nchw,cfrs->nfhrws", x, w)
        return apart.reshape(*apart.shape[:2], 2 * x.shape[2], 2 * x.shape[3]) + bias

    return FreeCase("stretched", {"height": (1, 130, 32)}, tensors, reference, 1e-5)


def _strided() -> FreeCase:
    """A convolution of every second pixel of images of free height and width: as many rows as a product of quotients.
    """
    def tensors(height: Any, width: Any) -> list[te.Tensor]:
        from tvm import te

        from mlc.graph.kernels.pixel_rows import conv2d_pixel_rows

        rows, columns = ((size - 1) // 2 + 1 for size in (height, width))
        x, w = te.placeholder((height * width * 2, 32), "float16", "x"), te.placeholder((48, 3, 3, 32), "float16", "w")
        return [x, w, conv2d_pixel_rows(x, w, rows * columns * 2, height, width, rows, columns, (2, 2), (1, 1), (1, 1))]

    def reference(x: np.ndarray, w: np.ndarray, height: int, width: int) -> np.ndarray:
        padded = np.pad(x.reshape(2, height, width, 32), ((0, 0), (1, 1), (1, 1), (0, 0)))
        rows, columns = (height - 1) // 2 + 1, (width - 1) // 2 + 1
        parts = [np.einsum("nhvc,fc->nhvf", padded[:, i :: 2, j :: 2][:, :rows, :columns], w[:, i, j])
                 for i in range(3) for j in range(3)]
        return np.asarray(sum(parts)).reshape(-1, 48)

    return FreeCase("strided", {"height": (1, 40, 16), "width": (1, 40, 16)}, tensors, reference, _WIDE["float16"],
                    dict.fromkeys(("sm_80", "sm_90a"), "cuda.mma"), told=True)


def _attention(
    name: str, dtype: str, *, queries: int = 0, causal: int | None = None, mask: bool = False, groups: int = 1
) -> FreeCase:
    """Of a free number of keys, and of queries where these are no number; with a mask a query may see no key."""
    free = {"keys": (1, 2048, 128), **({} if queries else {"queries": (1, 2048, 128)})}

    def tensors(keys: Any, queries: Any = queries) -> list[te.Tensor]:
        from tvm import te

        from mlc.graph.kernels.attention import fused_attention
        from mlc.sizes import Size

        def size(value: Any) -> Any:
            return value if isinstance(value, int) else Size(value)

        q = te.placeholder((1, queries, 4, 64), dtype, "q")
        k, v = (te.placeholder((1, keys, 4 // groups, 64), dtype, each) for each in "kv")
        seen = te.placeholder((1, 1, queries, keys), "float32", "seen")
        loads = (lambda b, h, i, c: q(b, i, h, c), lambda b, h, j, c: k(b, j, h // groups, c),
                 lambda b, h, j, c: v(b, j, h // groups, c))

        def logit(score: Any, _b: Any, _h: Any, i: Any, j: Any) -> Any:
            return score + seen(0, 0, i, j) if mask else score

        made = fused_attention((1, 4), (size(queries), size(keys), 64, 64), 0.125, loads, logit, causal,
                               (0, 2, 1, 3), (dtype, dtype), zeros=mask)
        return [q, k, v, *([seen] if mask else []), made]

    def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: Any = 0.0) -> np.ndarray:
        k, v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
        scores = np.einsum("bihc,bjhc->bhij", q, k) * 0.125 + seen
        if causal is not None:
            i, j = np.indices(scores.shape[-2:])
            scores = np.where(j <= i + causal, scores, -np.inf)
        with np.errstate(invalid="ignore"):
            powers = np.exp(scores - scores.max(-1, keepdims=True))
            weights = powers / powers.sum(-1, keepdims=True)
        return np.einsum("bhij,bjhf->bihf", np.where(np.isnan(weights), 0, weights), v)

    spaces = {"float16": "cuda.attention", "float32": "cuda.attention_f32"}[dtype]
    return FreeCase(name, free, tensors, reference, _WIDE[dtype], {"sm_80": spaces, "sm_90a": spaces}, "int64")


FREE = (
    _product("product_f16", ("batch", "length"), 96, 72, "float16", 24, {"sm_80": "cuda.mma", "sm_90a": "cuda.wgmma"}),
    _product("product_f32", ("n",), 50, 40, "float32", 64, {"sm_80": "cuda.gemm", "sm_90a": "cuda.gemm"}),
    _product("long_sum", ("n",), 3072, 72, "float16", 32, {"sm_80": "cuda.mma", "sm_90a": "cuda.mma"}),
    _norm(), _broadcast(), _window("float16"), _window("float32"), _stretched(), _strided(),
    _attention("attention_f16", "float16"), _attention("attention_f16_causal", "float16", causal=3),
    _attention("attention_f16_masked", "float16", mask=True), _attention("attention_f32", "float32", groups=2),
    _attention("decode_f16", "float16", queries=1, groups=4),
)
