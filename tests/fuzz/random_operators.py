"""The operators that random networks are made of.

Each function adds one with random attributes to a network, or nothing where no value fits, and says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from tests.fuzz.growing import Growing

__all__ = ["OPERATORS", "Operators"]


def _convolution(g: Growing, rank: int) -> bool:
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


def _transposed(g: Growing) -> bool:
    x = g.pick(4)
    if x is None:
        return False
    channels = g.shape(x)[1]
    groups = g.rng.choice([1, 1, *(n for n in (2, 4) if channels % n == 0)])
    kernel, stride = g.rng.choice((1, 2, 3, 4)), g.rng.choice((1, 2, 2, 3))
    weight = g.weight([channels, g.rng.choice((1, 2, 4, 8)), kernel, kernel], channels ** -0.5)
    return g.add("ConvTranspose", [x, weight], group=groups, strides=[stride, stride], pads=_pads(g, 2, kernel),
                 output_padding=[g.rng.randrange(stride), 0])


def _pads(g: Growing, rank: int, kernel: int) -> list[int]:
    if g.rng.random() < 0.6:
        return [kernel // 2] * (2 * rank)
    return [g.rng.randrange(kernel) for _ in range(2 * rank)]


def _around(g: Growing, rank: int, choices: Sequence[int]) -> list[int]:
    return [g.rng.choice(choices)] * rank if g.rng.random() < 0.8 else [g.rng.choice(choices) for _ in range(rank)]


def _pool(g: Growing) -> bool:
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


def _global_pool(g: Growing) -> bool:
    x = g.pick(g.rng.choice((3, 4, 4)))
    return x is not None and g.add(g.rng.choice(("GlobalAveragePool", "GlobalMaxPool")), [x])


def _channel_norm(g: Growing) -> bool:
    x = g.pick(g.rng.choice((2, 3, 4, 4, 5)))
    if x is None:
        return False
    channels = g.shape(x)[1]
    scale, bias = g.weight([channels], 0.3, 1), g.weight([channels])
    if g.rng.random() < 0.6:
        mean, variance = g.weight([channels]), g.constant(g.numbers.uniform(0.5, 2, channels).astype("f4"))
        return g.add("BatchNormalization", [x, scale, bias, mean, variance])
    return min(g.shape(x)[2:], default=0) > 1 and g.add("InstanceNormalization", [x, scale, bias])


def _layer_norm(g: Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x) or g.shape(x)[-1] < 3:
        return False
    width = g.shape(x)[-1]
    return g.add("LayerNormalization", [x, g.weight([width], 0.3, 1), g.weight([width])], axis=-1)


def _product(g: Growing) -> bool:
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


def _gemm(g: Growing) -> bool:
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


def _attention(g: Growing) -> bool:
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


def _unary(g: Growing) -> bool:
    x = g.pick()
    if x is None:
        return False
    if x in g.unrounded and g.rng.random() < 0.3:
        return g.add(g.rng.choice(_BROKEN), [x])
    return g.add(g.rng.choice(_UNARY[:-3] if x not in g.unrounded else _UNARY), [x])


def _positive(g: Growing) -> bool:
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


def _binary(g: Growing) -> bool:
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


def _clip(g: Growing) -> bool:
    x = g.pick()
    low, high = sorted(g.numbers.normal(0, 2, 2).astype(np.float32))
    bounds = [g.constant(low), g.constant(high)]
    if g.rng.random() < 0.3:
        bounds[g.rng.randrange(2)] = ""
    return x is not None and g.add("Clip", [x, *bounds])


def _softmax(g: Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    return g.add(g.rng.choice(("Softmax", "Softmax", "LogSoftmax")), [x], axis=g.rng.randrange(len(g.shape(x))))


def _reduce(g: Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    rank = len(g.shape(x))
    axes = g.rng.sample(range(-rank, 0), g.rng.randint(1, min(rank, 3)))
    op = g.rng.choice(("ReduceMean", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceL1",
                       "ReduceLogSumExp", "ReduceSumSquare"))
    return g.add(op, [x, g.constant(np.array(axes, np.int64))], keepdims=g.rng.randrange(2))


def _index(g: Growing) -> bool:
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


def _concat(g: Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    axis = g.rng.randrange(len(g.shape(x)))
    like = [n for n in g.names(len(g.shape(x))) if all(m == n for i, (m, n) in enumerate(
        zip(g.shape(x), g.shape(n), strict=True)) if i != axis)]
    parts = [x, *(g.rng.choice(like) for _ in range(g.rng.randint(1, 3)))]
    return g.add("Concat", parts, moves=True, axis=axis - (len(g.shape(x)) if g.rng.random() < 0.3 else 0))


def _split(g: Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    axis = g.rng.randrange(len(g.shape(x)))
    size = g.shape(x)[axis]
    if size < 2:
        return False
    at = g.rng.randint(1, size - 1)
    return g.add("Split", [x, g.constant(np.array([at, size - at], np.int64))], outputs=2, moves=True, axis=axis)


def _slice(g: Growing) -> bool:
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


def _pad(g: Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    mode = g.rng.choice(("constant", "constant", "reflect", "edge", "wrap"))
    rank = len(g.shape(x))
    most = [min(3, size - 1) if mode != "constant" else 3 for size in g.shape(x)]
    pads = [g.rng.randint(-1 if mode == "constant" else 0, most[i % rank]) if g.rng.random() < 0.5 else 0
            for i in range(2 * rank)]
    return g.add("Pad", [x, g.constant(np.array(pads, np.int64)), g.constant(np.float32(0.5))], moves=True, mode=mode)


def _transpose(g: Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    perm = list(range(len(g.shape(x))))
    g.rng.shuffle(perm)
    return g.add("Transpose", [x], moves=True, perm=perm)


def _reshape(g: Growing) -> bool:
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


def _expand(g: Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    if g.rng.random() < 0.5:
        times = [g.rng.choice((1, 1, 2, 3)) for _ in g.shape(x)]
        return g.add("Tile", [x, g.constant(np.array(times, np.int64))], moves=True)
    dims = [g.rng.choice((1, 2, 5)) if size == 1 and not free else 1
            for size, free in zip(g.shape(x), g.free(x), strict=True)]
    return g.add("Expand", [x, g.constant(np.array([2, *dims][g.rng.randrange(2):], np.int64))], moves=True)


def _gather(g: Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    axis = g.rng.randrange(len(g.shape(x)))
    size = min(env[x].shape[axis] for env in g.exact)
    indices = g.numbers.integers(-size, size, g.rng.choice(((), (1,), (4,), (2, 3))))
    return g.add("Gather", [x, g.constant(np.asarray(indices, np.int64))], moves=True, axis=axis)


def _depth(g: Growing) -> bool:
    x = g.pick(4)
    if x is None:
        return False
    if g.rng.random() < 0.5:
        return g.add("SpaceToDepth", [x], moves=True, blocksize=2)
    return g.add("DepthToSpace", [x], moves=True, blocksize=2, mode=g.rng.choice(("DCR", "CRD")))


def _resize(g: Growing) -> bool:
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


def _scan(g: Growing) -> bool:
    x = g.pick()
    if x is None or not g.shape(x):
        return False
    if len(g.shape(x)) >= 2 and g.rng.random() < 0.4:
        return g.add("Trilu", [x], moves=True, upper=g.rng.randrange(2))
    axis = g.constant(np.array(g.rng.randrange(len(g.shape(x))), np.int64))
    return g.add("CumSum", [x, axis], exclusive=g.rng.randrange(2), reverse=g.rng.randrange(2))


def _einsum(g: Growing) -> bool:
    x = g.pick(3)
    if x is None:
        return False
    _, b, c = g.shape(x)
    equation, shape = g.rng.choice((("abc,cd->abd", (c, 8)), ("abc,dc->adb", (5, c)), ("abc,bd->acd", (b, 4)),
                                    ("abc,c->ab", (c,))))
    return g.add("Einsum", [x, g.weight(shape, shape[-1] ** -0.5)], equation=equation)


def _recurrent(g: Growing) -> bool:
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


Operators = Sequence[Callable[[Growing], bool]]
_POINTWISE: Operators = (_unary, _unary, _binary, _binary, _positive, _clip)
_MOVING: Operators = (_concat, _split, _slice, _pad, _transpose, _reshape, _reshape, _expand, _gather)
_OF_IMAGES: Operators = (*(lambda g: _convolution(g, 2),) * 5, _transposed, _pool, _pool, _global_pool,
                          _channel_norm, _channel_norm, _depth, _resize)
_OF_SEQUENCES: Operators = (_product, _product, _product, _layer_norm, _layer_norm, _attention, _softmax, _einsum,
                             _recurrent, _scan)
_REDUCING: Operators = (_reduce, _reduce, _softmax, _index)
OPERATORS: dict[str, Operators] = {
    "image": (*_OF_IMAGES, *_OF_IMAGES, *_POINTWISE, *_MOVING[:4], _reduce),
    "sequence": (*_OF_SEQUENCES, *_OF_SEQUENCES, *_POINTWISE, *_MOVING, *_REDUCING),
    "matrix": (_product, _product, _gemm, _gemm, _gemm, *_POINTWISE, *_MOVING, *_REDUCING, _layer_norm, _scan),
    "volume": (*(lambda g: _convolution(g, 3),) * 4, _pool, _channel_norm, *_POINTWISE, _reduce, _concat, _reshape),
    "signal": (*(lambda g: _convolution(g, 1),) * 4, _pool, _channel_norm, _global_pool, *_POINTWISE, *_MOVING,
               _product, _recurrent),
    "mixed": (*_OF_IMAGES, *_OF_SEQUENCES, *_POINTWISE, *_MOVING, *_REDUCING, _gemm, lambda g: _convolution(g, 1)),
}
