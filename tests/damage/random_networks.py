"""Random networks of operators that models use: sound files, of which every one must compile and be right.

A network grows by a node at a time. Each is evaluated alone by onnxruntime, so the reference has no fused kernel, and a
node is kept if what it gives is finite and tame. Every value is computed a second time with noise of a few roundings
after each node: what that moves an output by says how exact another order of sums can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

__all__ = ["KINDS", "Network", "random_network"]

#: what a network starts from, and which operators it is made of
KINDS = ("image", "sequence", "matrix", "volume", "signal", "mixed", "free image", "free sequence", "free matrix")
_OPSET = 20
_NOISE = 1e-6
#: values beyond it make comparisons of float32 meaningless
_TAME = 300.0
_MOST_ELEMENTS = 200_000
_TRIES = 12

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Network:
    """A model and, for one or two sizes of its free dimensions, inputs, outputs, and how far noise moves those."""

    model: onnx.ModelProto
    inputs: Sequence[Arrays]
    outputs: Sequence[Arrays]
    moved: Sequence[dict[str, float]]


@dataclass
class _Growing:
    """A network while it grows: per size, every value as computed and with noise."""

    rng: Random
    numbers: np.random.Generator
    sizes: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: Arrays = field(default_factory=dict)
    inputs: dict[str, list[int | str]] = field(default_factory=dict)
    exact: list[Arrays] = field(default_factory=list)
    noisy: list[Arrays] = field(default_factory=list)
    #: values that no rounding has touched: discontinuous operators may read them
    unrounded: set[str] = field(default_factory=set)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.exact[0][name].shape

    def free(self, name: str) -> list[bool]:
        """Which axes have another size at the other sizes of the free dimensions."""
        return [len({arrays[name].shape[i] for arrays in self.exact}) > 1 for i in range(len(self.shape(name)))]

    def names(self, rank: int | None = None, kind: str = "f") -> list[str]:
        """Values of a rank and kind of type, oldest first."""
        found = [n for n in self.exact[0] if n not in self.weights and self.exact[0][n].dtype.kind in kind]
        return [n for n in found if rank is None or len(self.shape(n)) == rank]

    def pick(self, rank: int | None = None, kind: str = "f") -> str | None:
        """One of those, most often a young one."""
        names = self.names(rank, kind)
        if not names:
            return None
        return self.rng.choice(names[-2:] if self.rng.random() < 0.7 else names)

    def weight(self, shape: Sequence[int], spread: float = 1.0, middle: float = 0.0) -> str:
        return self.constant((self.numbers.normal(middle, spread, tuple(shape))).astype(np.float32))

    def constant(self, values: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(values)
        for arrays in (*self.exact, *self.noisy):
            arrays[name] = self.weights[name]
        return name

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, moves: bool = False, **attributes: Any) -> bool:
        """Keep a node if it can be evaluated for every size; ``moves`` says that it only copies numbers."""
        number = len(self.nodes)
        names = [f"v{number}_{i}" for i in range(outputs)]
        node = helper.make_node(op, list(inputs), names, name=f"n{number}", **attributes)
        unrounded = moves and all(n in self.unrounded or n in self.weights for n in inputs if n)
        found = []
        for arrays, noisy in zip(self.exact, self.noisy, strict=True):
            clean = _evaluate(node, arrays)
            if clean is None or not all(map(_tame, clean)):
                return False
            moved = _evaluate(node, noisy)
            if moved is None or any(a.shape != b.shape for a, b in zip(clean, moved, strict=True)):
                return False
            found.append((clean, [self._with_noise(a) if not moves else a for a in moved]))
        for (clean, moved), arrays, noisy in zip(found, self.exact, self.noisy, strict=True):
            arrays.update(zip(names, clean, strict=True))
            noisy.update(zip(names, moved, strict=True))
        self.nodes.append(node)
        if unrounded:
            self.unrounded.update(names)
        return True

    def _with_noise(self, array: np.ndarray) -> np.ndarray:
        if array.dtype.kind != "f":
            return array
        return np.asarray(array * (1 + _NOISE * self.numbers.standard_normal(array.shape)), dtype=array.dtype)


def _evaluate(node: onnx.NodeProto, arrays: Arrays) -> list[np.ndarray] | None:
    import onnxruntime as ort

    names = list(dict.fromkeys(n for n in node.input if n))
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(arrays[n].dtype), arrays[n].shape)
         for n in names],
        [helper.make_empty_tensor_value_info(n) for n in node.output])
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        text = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
        session = ort.InferenceSession(text.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return [np.asarray(a) for a in session.run(None, {n: arrays[n] for n in names})]
    except Exception:
        return None


def _tame(array: np.ndarray) -> bool:
    if not 0 < array.size <= _MOST_ELEMENTS:
        return False
    if array.dtype.kind != "f":
        return True
    return bool(np.isfinite(array).all() and np.abs(array).max() <= _TAME)


# Each of the following adds one operator with random attributes, or nothing where no value fits. ----------------------


def _convolution(g: _Growing, rank: int) -> bool:
    x = g.pick(rank + 2)
    if x is None:
        return False
    channels = g.shape(x)[1]
    kernel = [g.rng.choice((1, 1, 2, 3, 3, 3, 5, 7)) if rank < 3 else g.rng.choice((1, 2, 3)) for _ in range(rank)]
    if g.rng.random() < 0.7:
        kernel = kernel[:1] * rank
    groups = g.rng.choice([1, 1, 1, channels, *(n for n in (2, 3, 4, 8) if channels % n == 0)])
    out = g.rng.choice((1, 3, 5, 8, 16, 24, 32, 40)) if groups == 1 else groups * g.rng.choice((1, 1, 2, 4))
    taps = channels // groups * int(np.prod(kernel))
    inputs = [x, g.weight([out, channels // groups, *kernel], taps ** -0.5)]
    if g.rng.random() < 0.6:
        inputs.append(g.weight([out]))
    attributes: dict[str, Any] = {"group": groups, "strides": _around(g, rank, (1, 1, 1, 2, 3)),
                                  "dilations": _around(g, rank, (1, 1, 1, 2))}
    if g.rng.random() < 0.2:
        attributes["auto_pad"] = g.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    else:
        attributes["pads"] = _pads(g, rank, max(kernel))
    return g.add("Conv", inputs, **attributes)


def _transposed(g: _Growing) -> bool:
    x = g.pick(4)
    if x is None:
        return False
    channels = g.shape(x)[1]
    groups = g.rng.choice([1, 1, *(n for n in (2, 4) if channels % n == 0)])
    kernel, stride = g.rng.choice((1, 2, 3, 4)), g.rng.choice((1, 2, 2, 3))
    weight = g.weight([channels, g.rng.choice((1, 2, 4, 8)), kernel, kernel], channels ** -0.5)
    return g.add("ConvTranspose", [x, weight], group=groups, strides=[stride, stride], pads=_pads(g, 2, kernel),
                 output_padding=[g.rng.randrange(stride), 0])


def _pads(g: _Growing, rank: int, kernel: int) -> list[int]:
    if g.rng.random() < 0.6:
        return [kernel // 2] * (2 * rank)
    return [g.rng.randrange(kernel) for _ in range(2 * rank)]


def _around(g: _Growing, rank: int, choices: Sequence[int]) -> list[int]:
    return [g.rng.choice(choices)] * rank if g.rng.random() < 0.8 else [g.rng.choice(choices) for _ in range(rank)]


def _pool(g: _Growing) -> bool:
    x = g.pick(g.rng.choice((4, 4, 4, 3, 5)))
    if x is None:
        return False
    rank = len(g.shape(x)) - 2
    kernel = _around(g, rank, (1, 2, 2, 3, 3))
    strides = _around(g, rank, (1, 2, 2, 3))
    if any(size < k for arrays in g.exact for size, k in zip(arrays[x].shape[2:], kernel, strict=True)):
        return False
    # engines differ on a last window that begins beyond the image
    ceiling = g.rng.random() < 0.3 and all(s <= k for s, k in zip(strides, kernel, strict=True))
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "ceil_mode": int(ceiling),
                                  "pads": [g.rng.randrange(k) for k in kernel] * 2}
    kind = g.rng.choice(("MaxPool", "AveragePool"))
    if kind == "AveragePool":
        attributes["count_include_pad"] = g.rng.randrange(2)
    return g.add(kind, [x], **attributes)


def _global_pool(g: _Growing) -> bool:
    x = g.pick(g.rng.choice((3, 4, 4)))
    return x is not None and g.add(g.rng.choice(("GlobalAveragePool", "GlobalMaxPool")), [x])


def _channel_norm(g: _Growing) -> bool:
    x = g.pick(g.rng.choice((2, 3, 4, 4, 5)))
    if x is None:
        return False
    channels = g.shape(x)[1]
    scale, bias = g.weight([channels], 0.3, 1), g.weight([channels])
    if g.rng.random() < 0.6:
        mean, variance = g.weight([channels]), g.constant(g.numbers.uniform(0.5, 2, channels).astype("f4"))
        return g.add("BatchNormalization", [x, scale, bias, mean, variance])
    return min(g.shape(x)[2:], default=0) > 1 and g.add("InstanceNormalization", [x, scale, bias])


def _layer_norm(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x) or g.shape(x)[-1] < 3:
        return False
    width = g.shape(x)[-1]
    return g.add("LayerNormalization", [x, g.weight([width], 0.3, 1), g.weight([width])], axis=-1)


def _product(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    depth = g.shape(x)[-1]
    others = [n for n in g.names() if len(g.shape(n)) >= 2 and g.shape(n)[-2] == depth]
    if others and g.rng.random() < 0.4:
        return g.add("MatMul", [x, g.rng.choice(others)])
    width = g.rng.choice((1, 3, 7, 8, 16, 24, 32, 48, 65))
    before = list(g.shape(x)[:-2]) if g.rng.random() < 0.15 and not any(g.free(x)) else []
    return g.add("MatMul", [x, g.weight([*before, depth, width], depth ** -0.5)])


def _gemm(g: _Growing) -> bool:
    x = g.pick(2)
    if x is None:
        return False
    over, width = g.rng.randrange(2), g.rng.choice((1, 5, 8, 16, 30, 64))
    turned = g.rng.randrange(2)
    depth = g.shape(x)[0 if over else 1]
    inputs = [x, g.weight([width, depth] if turned else [depth, width], depth ** -0.5)]
    if g.rng.random() < 0.6:
        inputs.append(g.weight(g.rng.choice(([width], [1, width], [1], []))))
    return g.add("Gemm", inputs, transA=over, transB=turned, alpha=g.rng.choice((1.0, 0.5)),
                 beta=g.rng.choice((1.0, 2.0)))


def _attention(g: _Growing) -> bool:
    """Scores, their softmax and the mixture of values, of one sequence by itself."""
    x = g.pick(3)
    if x is None:
        return False
    last = g.names()[-1]
    perm = [0, 2, 1]
    if not g.add("Transpose", [x], moves=True, perm=perm):
        return False
    turned = f"v{len(g.nodes) - 1}_0"
    if not g.add("MatMul", [x, turned]):
        return False
    scores = f"v{len(g.nodes) - 1}_0"
    if not g.add("Mul", [scores, g.constant(np.float32(g.shape(x)[-1] ** -0.5))]):
        return False
    if not g.add("Softmax", [f"v{len(g.nodes) - 1}_0"], axis=-1):
        return False
    return g.add("MatMul", [f"v{len(g.nodes) - 1}_0", x]) and last != x


_UNARY = ("Relu", "Sigmoid", "Tanh", "Erf", "Abs", "Neg", "HardSwish", "HardSigmoid", "Softplus", "Softsign", "Elu",
          "Selu", "LeakyRelu", "Mish", "Sin", "Cos", "Exp", "Identity", "Celu", "ThresholdedRelu", "Atan", "Sinh")
_BROKEN = ("Floor", "Ceil", "Round", "Sign")


def _unary(g: _Growing) -> bool:
    x = g.pick()
    if x is None:
        return False
    if x in g.unrounded and g.rng.random() < 0.3:
        return g.add(g.rng.choice(_BROKEN), [x])
    return g.add(g.rng.choice(_UNARY[:-3] if x not in g.unrounded else _UNARY), [x])


def _positive(g: _Growing) -> bool:
    """Square roots, logarithms, quotients and powers, of what is safely positive."""
    x = g.pick()
    if x is None or not g.add("Abs", [x]):
        return False
    x = f"v{len(g.nodes) - 1}_0"
    if not g.add("Add", [x, g.constant(np.float32(0.7))]):
        return False
    x = f"v{len(g.nodes) - 1}_0"
    op = g.rng.choice(("Sqrt", "Log", "Reciprocal", "Div", "Pow"))
    if op == "Div":
        return g.add("Div", [g.rng.choice([n for n in g.names() if g.shape(n) == g.shape(x)]), x])
    if op == "Pow":
        return g.add("Pow", [x, g.constant(np.float32(g.rng.choice((0.5, 2.0, -0.5, 1.5, 3.0))))])
    return g.add(op, [x])


def _binary(g: _Growing) -> bool:
    x = g.pick()
    if x is None:
        return False
    op = g.rng.choice(("Add", "Add", "Mul", "Mul", "Sub", "Max", "Min", "PRelu"))
    others = [n for n in g.names() if n != x and _broadcast(g.shape(n), g.shape(x))]
    if others and g.rng.random() < 0.6 and op != "PRelu":
        pair = [x, g.rng.choice(others[-4:])]
        g.rng.shuffle(pair)
        return g.add(op, pair)
    shape = [size if g.rng.random() < 0.5 and not free else 1 for size, free in zip(g.shape(x), g.free(x), strict=True)]
    while shape and g.rng.random() < 0.3:
        del shape[0]
    return g.add(op, [x, g.weight(shape)])


def _broadcast(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(1 in (m, n) or m == n for m, n in zip(reversed(a), reversed(b), strict=False))


def _clip(g: _Growing) -> bool:
    x = g.pick()
    low, high = sorted(g.numbers.normal(0, 2, 2).astype(np.float32))
    bounds = [g.constant(low), g.constant(high)]
    if g.rng.random() < 0.3:
        bounds[g.rng.randrange(2)] = ""
    return x is not None and g.add("Clip", [x, *bounds])


def _softmax(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    return g.add(g.rng.choice(("Softmax", "Softmax", "LogSoftmax")), [x], axis=g.rng.randrange(len(g.shape(x))))


def _reduce(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    rank = len(g.shape(x))
    axes = g.rng.sample(range(-rank, 0), g.rng.randint(1, min(rank, 3)))
    op = g.rng.choice(("ReduceMean", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceL1",
                       "ReduceLogSumExp", "ReduceSumSquare"))
    return g.add(op, [x, g.constant(np.array(axes, np.int64))], keepdims=g.rng.randrange(2))


def _index(g: _Growing) -> bool:
    """Arg-extremes, sorted values and comparisons, of numbers that no rounding has touched."""
    names = [n for n in g.names() if n in g.unrounded and g.shape(n)]
    if not names:
        return False
    x = g.rng.choice(names)
    axis = g.rng.randrange(len(g.shape(x)))
    kind = g.rng.choice(("arg", "top", "where", "less"))
    if kind == "arg":
        return g.add(g.rng.choice(("ArgMax", "ArgMin")), [x], axis=axis, keepdims=g.rng.randrange(2))
    if kind == "top":
        k = g.constant(np.array([g.rng.randint(1, min(4, g.shape(x)[axis]))], np.int64))
        return g.add("TopK", [x, k], outputs=2, axis=axis, largest=g.rng.randrange(2))
    if not g.add(g.rng.choice(("Greater", "LessOrEqual")), [x, g.constant(np.float32(0.1))]):
        return False
    if kind == "less":
        return g.add("Cast", [f"v{len(g.nodes) - 1}_0"], to=onnx.TensorProto.FLOAT)
    other = g.rng.choice([n for n in g.names() if _broadcast(g.shape(n), g.shape(x))])
    return g.add("Where", [f"v{len(g.nodes) - 1}_0", x, other])


def _concat(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    axis = g.rng.randrange(len(g.shape(x)))
    like = [n for n in g.names(len(g.shape(x))) if all(m == n for i, (m, n) in enumerate(
        zip(g.shape(x), g.shape(n), strict=True)) if i != axis)]
    parts = [x, *(g.rng.choice(like) for _ in range(g.rng.randint(1, 3)))]
    return g.add("Concat", parts, moves=True, axis=axis - (len(g.shape(x)) if g.rng.random() < 0.3 else 0))


def _split(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    axis = g.rng.randrange(len(g.shape(x)))
    size = g.shape(x)[axis]
    if size < 2:
        return False
    at = g.rng.randint(1, size - 1)
    return g.add("Split", [x, g.constant(np.array([at, size - at], np.int64))], outputs=2, moves=True, axis=axis)


def _slice(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    axes = g.rng.sample(range(len(g.shape(x))), g.rng.randint(1, len(g.shape(x))))
    starts, ends, steps = [], [], []
    for axis in axes:
        size, step = g.shape(x)[axis], g.rng.choice((1, 1, 1, 2, 3, -1, -2))
        first, last = sorted((g.rng.randint(0, size), g.rng.randint(0, size)))
        if g.rng.random() < 0.5:
            first, last = g.rng.randint(0, max(0, size // 3)), np.iinfo(np.int64).max
        if step < 0:
            first, last = min(last, size) - 1, first - 1 if first else np.iinfo(np.int64).min
        starts.append(first)
        ends.append(last)
        steps.append(step)
    values = [g.constant(np.array(v, np.int64)) for v in (starts, ends, axes, steps)]
    return g.add("Slice", [x, *values], moves=True)


def _pad(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    mode = g.rng.choice(("constant", "constant", "reflect", "edge", "wrap"))
    rank = len(g.shape(x))
    most = [min(3, size - 1) if mode != "constant" else 3 for size in g.shape(x)]
    pads = [g.rng.randint(-1 if mode == "constant" else 0, most[i % rank]) if g.rng.random() < 0.5 else 0
            for i in range(2 * rank)]
    return g.add("Pad", [x, g.constant(np.array(pads, np.int64)), g.constant(np.float32(0.5))], moves=True, mode=mode)


def _transpose(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    perm = list(range(len(g.shape(x))))
    g.rng.shuffle(perm)
    return g.add("Transpose", [x], moves=True, perm=perm)


def _reshape(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    dims = list(g.shape(x))
    kind = g.rng.choice(("join", "cut", "flatten", "squeeze", "unsqueeze"))
    if kind == "flatten":
        return g.add("Flatten", [x], moves=True, axis=g.rng.randint(0, len(dims)))
    if kind == "unsqueeze":
        return g.add("Unsqueeze", [x, g.constant(np.array([g.rng.randint(0, len(dims))], np.int64))], moves=True)
    if kind == "squeeze":
        ones = [i for i, free in enumerate(g.free(x)) if dims[i] == 1 and not free]
        return bool(ones) and g.add("Squeeze", [x, g.constant(np.array([g.rng.choice(ones)], np.int64))], moves=True)
    at = g.rng.randrange(len(dims))
    if kind == "join":
        if at + 1 >= len(dims):
            return False
        dims[at:at + 2] = [dims[at] * dims[at + 1]]
    else:
        factors = [n for n in range(2, dims[at]) if dims[at] % n == 0]
        if not factors:
            return False
        factor = g.rng.choice(factors)
        dims[at:at + 1] = [factor, dims[at] // factor]
    if dims:
        dims[0 if g.sizes > 1 else g.rng.randrange(len(dims))] = -1
    return g.add("Reshape", [x, g.constant(np.array(dims, np.int64))], moves=True)


def _expand(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    if g.rng.random() < 0.5:
        times = [g.rng.choice((1, 1, 2, 3)) for _ in g.shape(x)]
        return g.add("Tile", [x, g.constant(np.array(times, np.int64))], moves=True)
    dims = [g.rng.choice((1, 2, 5)) if size == 1 and not free else 1
            for size, free in zip(g.shape(x), g.free(x), strict=True)]
    return g.add("Expand", [x, g.constant(np.array([2, *dims][g.rng.randrange(2):], np.int64))], moves=True)


def _gather(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    axis = g.rng.randrange(len(g.shape(x)))
    size = min(env[x].shape[axis] for env in g.exact)
    indices = g.numbers.integers(-size, size, g.rng.choice(((), (1,), (4,), (2, 3))))
    return g.add("Gather", [x, g.constant(np.asarray(indices, np.int64))], moves=True, axis=axis)


def _depth(g: _Growing) -> bool:
    x = g.pick(4)
    if x is None:
        return False
    if g.rng.random() < 0.5:
        return g.add("SpaceToDepth", [x], moves=True, blocksize=2)
    return g.add("DepthToSpace", [x], moves=True, blocksize=2, mode=g.rng.choice(("DCR", "CRD")))


def _resize(g: _Growing) -> bool:
    x = g.pick(4)
    if x is None:
        return False
    mode = g.rng.choice(("nearest", "linear", "cubic"))
    scales = [1, 1, *(g.rng.choice((2.0, 2.0, 1.5, 0.5)) for _ in range(2))]
    attributes = {"mode": mode, "coordinate_transformation_mode": g.rng.choice(
        ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"))}
    if mode == "nearest":  # ties between pixels depend on rounding
        attributes |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        scales = [1, 1, 2, 2]
    return g.add("Resize", [x, "", g.constant(np.array(scales, np.float32))], **attributes)


def _scan(g: _Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    if len(g.shape(x)) >= 2 and g.rng.random() < 0.4:
        return g.add("Trilu", [x], moves=True, upper=g.rng.randrange(2))
    axis = g.constant(np.array(g.rng.randrange(len(g.shape(x))), np.int64))
    return g.add("CumSum", [x, axis], exclusive=g.rng.randrange(2), reverse=g.rng.randrange(2))


def _einsum(g: _Growing) -> bool:
    x = g.pick(3)
    if x is None:
        return False
    _, b, c = g.shape(x)
    equation, shape = g.rng.choice((("abc,cd->abd", (c, 8)), ("abc,dc->adb", (5, c)), ("abc,bd->acd", (b, 4)),
                                    ("abc,c->ab", (c,))))
    return g.add("Einsum", [x, g.weight(shape, shape[-1] ** -0.5)], equation=equation)


def _recurrent(g: _Growing) -> bool:
    x = g.pick(3)
    if x is None or g.shape(x)[0] > 12:
        return False
    width, hidden = g.shape(x)[2], g.rng.choice((4, 7, 16))
    kind, gates = g.rng.choice((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    ways = g.rng.choice((1, 1, 2))
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": "bidirectional" if ways == 2 else g.rng.choice(
        ("forward", "reverse"))}
    if kind == "GRU":
        attributes["linear_before_reset"] = g.rng.randrange(2)
    inputs = [x, g.weight([ways, gates * hidden, width], width ** -0.5),
              g.weight([ways, gates * hidden, hidden], hidden ** -0.5)]
    if g.rng.random() < 0.5:
        inputs.append(g.weight([ways, 2 * gates * hidden]))
    return g.add(kind, inputs, outputs=2, **attributes)


_Operators = Sequence[Callable[[_Growing], bool]]
_POINTWISE: _Operators = (_unary, _unary, _binary, _binary, _positive, _clip)
_MOVING: _Operators = (_concat, _split, _slice, _pad, _transpose, _reshape, _reshape, _expand, _gather)
_OF_IMAGES: _Operators = (*(lambda g: _convolution(g, 2),) * 5, _transposed, _pool, _pool, _global_pool,
                          _channel_norm, _channel_norm, _depth, _resize)
_OF_SEQUENCES: _Operators = (_product, _product, _product, _layer_norm, _layer_norm, _attention, _softmax, _einsum,
                             _recurrent, _scan)
_REDUCING: _Operators = (_reduce, _reduce, _softmax, _index)
_OPERATORS: dict[str, _Operators] = {
    "image": (*_OF_IMAGES, *_OF_IMAGES, *_POINTWISE, *_MOVING[:4], _reduce),
    "sequence": (*_OF_SEQUENCES, *_OF_SEQUENCES, *_POINTWISE, *_MOVING, *_REDUCING),
    "matrix": (_product, _product, _gemm, _gemm, _gemm, *_POINTWISE, *_MOVING, *_REDUCING, _layer_norm, _scan),
    "volume": (*(lambda g: _convolution(g, 3),) * 4, _pool, _channel_norm, *_POINTWISE, _reduce, _concat, _reshape),
    "signal": (*(lambda g: _convolution(g, 1),) * 4, _pool, _channel_norm, _global_pool, *_POINTWISE, *_MOVING,
               _product, _recurrent),
    "mixed": (*_OF_IMAGES, *_OF_SEQUENCES, *_POINTWISE, *_MOVING, *_REDUCING, _gemm, lambda g: _convolution(g, 1)),
}


def _start(g: _Growing, kind: str, free: bool) -> None:
    r = g.rng
    shapes: dict[str, list[int]] = {
        "image": [r.choice((1, 1, 2, 3)), r.choice((1, 3, 4, 8, 12, 16, 32)), r.randint(5, 30), r.randint(5, 30)],
        "sequence": [r.choice((1, 2, 3)), r.randint(2, 20), r.choice((8, 12, 16, 33, 64))],
        "matrix": [r.randint(1, 40), r.choice((1, 5, 16, 31, 64, 100))],
        "volume": [r.choice((1, 2)), r.choice((1, 3, 8)), r.randint(4, 9), r.randint(4, 9), r.randint(4, 9)],
        "signal": [r.choice((1, 2)), r.choice((1, 4, 8, 16)), r.randint(8, 60)],
    }
    shapes["mixed"] = shapes[r.choice(tuple(shapes))]
    g.exact, g.noisy = [{} for _ in range(g.sizes)], [{} for _ in range(g.sizes)]
    loose = [0] if kind != "image" or r.random() < 0.5 else [2, 3]
    if kind == "sequence" and r.random() < 0.5:
        loose = [0, 1]
    other = [size if i not in loose else max(1, size + r.choice((-1, 1, 2, 5))) for i, size in enumerate(shapes[kind])]
    for i in range(r.choice((1, 1, 2))):
        name = f"x{i}"
        g.inputs[name] = [f"n{k}" if free and k in loose else size for k, size in enumerate(shapes[kind])]
        for arrays, noisy, shape in zip(g.exact, g.noisy, (shapes[kind], other), strict=False):
            arrays[name] = noisy[name] = g.numbers.normal(0, 1, shape).astype(np.float32)
        g.unrounded.add(name)


def random_network(rng: Random, kind: str, nodes: int) -> Network:
    """A network of a kind of :data:`KINDS` with about so many nodes; those that are free are evaluated at two sizes."""
    free = kind.startswith("free ")
    g = _Growing(rng, np.random.default_rng(rng.getrandbits(32)), 2 if free else 1)
    name = kind.removeprefix("free ")
    _start(g, name, free)
    for _ in range(_TRIES * nodes):
        if len(g.nodes) >= nodes:
            break
        rng.choice(_OPERATORS[name])(g)
    return _finished(g)


def _finished(g: _Growing) -> Network:
    read = {n for node in g.nodes for n in node.input}
    made = [n for node in g.nodes for n in node.output]
    outputs = [n for n in made if n not in read or g.rng.random() < 0.1]
    infos = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, dims) for n, dims in g.inputs.items()]
    used = [n for n in g.weights if n in read]
    ends = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(g.exact[0][n].dtype),
                                          [None] * g.exact[0][n].ndim) for n in outputs]
    graph = helper.make_graph(g.nodes, "random", infos, ends,
                              [numpy_helper.from_array(np.asarray(g.weights[n]), n) for n in used])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    moved = [{n: float(np.abs(np.subtract(a[n], b[n], dtype="f8")).max()) for n in outputs}
             for a, b in zip(g.exact, g.noisy, strict=True)]
    return Network(model, [{n: a[n] for n in g.inputs} for a in g.exact],
                   [{n: a[n] for n in outputs} for a in g.exact], moved)
