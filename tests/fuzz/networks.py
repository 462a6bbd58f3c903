"""Small networks that between them use what models use; the damage is done to these."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import onnx
from onnx import numpy_helper, parser

__all__ = ["NETWORKS", "network"]

_HEAD = '<ir_version: 8, opset_import: ["" : 17, "local" : 1]>\n'

# Inputs whose names begin with w are filled with seeded random values, as weights.
_TEXTS = {
    "convolution": """g (float[1,3,12,12] x, float[8,3,3,3] w1, float[8] w2, float[8] w3, float[8] w4, float[8] w5,
        float[8] w6, float[8,1,3,3] w7, float[5,8] w8, float[5] w9) => (float[1,5] y) {
        a = Conv<pads=[1,1,1,1], kernel_shape=[3,3]>(x, w1, w2)
        b = BatchNormalization<epsilon=0.001>(a, w3, w4, w5, w6)
        c = Relu(b)
        d = Conv<group=8, strides=[2,2], pads=[1,1,1,1]>(c, w7)
        e = MaxPool<kernel_shape=[2,2], strides=[2,2]>(d)
        f = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(e)
        h = GlobalAveragePool(f)
        i = Flatten<axis=1>(h)
        y = Gemm<transB=1>(i, w8, w9) }""",
    "dense": """g (float[4,10] x, float[10,16] w1, float[16] w2, float[16,7] w3, float[7] w4) => (float[4,7] y) {
        a = Gemm<alpha=0.5>(x, w1, w2)
        b = LeakyRelu<alpha=0.2>(a)
        c = MatMul(b, w3)
        d = Add(c, w4)
        y = Sigmoid(d) }""",
    "attention": """g (float[2,6,8] x, float[8,24] w1, float[24] w2, float[8,8] w3, float[2,1,1,6] m)
        => (float[2,6,8] y) <int64[3] parts = {8, 8, 8}, int64[4] split = {0, 0, 2, 4}, int64[3] joined = {2, 6, 8},
        float[1] scale = {0.5}> {
        a = MatMul(x, w1)
        b = Add(a, w2)
        q, k, v = Split<axis=-1>(b, parts)
        qs = Reshape(q, split)
        qt = Transpose<perm=[0,2,1,3]>(qs)
        ks = Reshape(k, split)
        kt = Transpose<perm=[0,2,3,1]>(ks)
        vs = Reshape(v, split)
        vt = Transpose<perm=[0,2,1,3]>(vs)
        s = MatMul(qt, kt)
        t = Mul(s, scale)
        u = Add(t, m)
        p = Softmax<axis=-1>(u)
        o = MatMul(p, vt)
        ot = Transpose<perm=[0,2,1,3]>(o)
        r = Reshape(ot, joined)
        z = MatMul(r, w3)
        y = Add(z, x) }""",
    "recurrent": """g (float[4,2,3] x, float[1,20,3] w1, float[1,20,5] w2, float[1,40] w3, float[2,15,5] w4,
        float[2,15,5] w5, float[2,30] w6) => (float[4,2,2,5] y, float[2,2,5] last) <int64[1] axis = {1}> {
        a, b, c = LSTM<hidden_size=5>(x, w1, w2, w3)
        d = Squeeze(a, axis)
        y, last = GRU<hidden_size=5, direction="bidirectional", linear_before_reset=1>(d, w4, w5, w6) }""",
    "resize": """g (float[1,4,5,5] x, float[4,3,2,2] w1) => (float[1,3,17,17] y)
        <float[4] scales = {1, 1, 2, 2}, int64[4] sizes = {1, 4, 8, 8}, int64[8] pads = {0, 0, 1, 0, 0, 0, 0, 1},
        float low = {-1}, float high = {1}> {
        a = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(x, , scales)
        b = Resize<mode="linear", coordinate_transformation_mode="half_pixel">(a, , , sizes)
        c = ConvTranspose<strides=[2,2]>(b, w1)
        d = Pad<mode="constant">(c, pads)
        y = Clip(d, low, high) }""",
    "shapes": """g (float[2,3,8] x) => (float[6,12] y, int64[2] size)
        <int64[1] one = {1}, int64[1] zero = {0}, int64[1] four = {4}, int64[1] last = {-1},
        int64[1] step = {2}, int64[1] end = {8},
        int64 first = {0}> {
        a = Slice(x, zero, four, last, one)
        b = Slice(x, four, end, last, step)
        c = Concat<axis=2>(a, b, b, a)
        s = Shape(c)
        n = Gather<axis=0>(s, first)
        m = Unsqueeze(n, zero)
        k = Gather<axis=0>(s, one)
        t = Mul(m, k)
        size = Concat<axis=0>(t, last)
        r = Reshape(c, size)
        z = Constant<value_floats=[0.5]>()
        y = Mul(r, z) }""",
    "quantised": """g (float[1,4,8,8] x, float[6,4,3,3] w1) => (float[1,6,8,8] y, uint8[1,4,8,8] q)
        <float xs = {0.05}, uint8 xz = {120}, float[6] ws = {0.1, 0.2, 0.1, 0.05, 0.02, 0.01},
        int8[6] wz = {0, 0, 0, 0, 0, 0}, float ys = {0.3}, uint8 yz = {100}> {
        q = QuantizeLinear(x, xs, xz)
        d = DequantizeLinear(q, xs, xz)
        v = QuantizeLinear<axis=0>(w1, ws, wz)
        w = DequantizeLinear<axis=0>(v, ws, wz)
        c = Conv<pads=[1,1,1,1]>(d, w)
        r = Relu(c)
        e = QuantizeLinear(r, ys, yz)
        y = DequantizeLinear(e, ys, yz) }""",
    "control": """g (float[2,3] x, float[2,3] w1) => (float[2,3] y) <bool yes = {1}, bool no = {0}> {
        a = If(yes) <then_branch = t () => (float[2,3] p) { p = Add(x, w1) },
                     else_branch = e () => (float[2,3] q) { q = Sub(x, w1) }>
        b = If(no) <then_branch = u () => (float[2,3] r) { r = Neg(a) },
                    else_branch = f () => (float[2,3] v) {
            v = If(yes) <then_branch = h () => (float[2,3] k) { k = Mul(a, x) },
                         else_branch = o () => (float[2,3] l) { l = Exp(a) }> }>
        y = Tanh(b) }""",
    "norms": """g (float[3,10] x, float[10] w1, float[10] w2, float[10,10] w3) => (float[3,10] y, float[3,10] z)
        <float half = {0.5}, float root = {1.4142135}, float one = {1}, float two = {2}> {
        a = LayerNormalization<axis=-1, epsilon=0.00001>(x, w1, w2)
        b = MatMul(a, w3)
        c = Div(b, root)
        d = Erf(c)
        e = Add(d, one)
        f = Mul(b, e)
        h = Mul(f, half)
        y = LogSoftmax<axis=1>(h)
        i = Pow(h, two)
        j = Sqrt(i)
        z = Softmax<axis=0>(j) }""",
    "reductions": """g (float[3,4,5] x) => (float[3,5] y, int64[3,4] i, float[3,4,2] v, float[3,4,5] s, float[3] n)
        <int64[1] k = {2}, int64 axis = {1}, int64[2] axes = {1, 2}> {
        a = ReduceMean<axes=[1], keepdims=0>(x)
        b = ReduceMax<axes=[1], keepdims=0>(x)
        y = Sub(b, a)
        i = ArgMax<axis=2, keepdims=0>(x)
        v, w = TopK<axis=-1>(x, k)
        s = CumSum(x, axis)
        n = ReduceSum<keepdims=0>(x, axes) }""",
    "indices": """g (float[4,5] x, int64[2,3] i, float[7,5] w1, float[3,1] w2) => (float[2,3,5] y, float[8,5] z)
        <int64[3] to = {2, 3, 5}, int64[2] times = {2, 1}, float zero = {0}, int64 low = {0}, int64 high = {6}> {
        j = Clip(i, low, high)
        a = Gather<axis=0>(w1, j)
        b = Expand(w2, to)
        c = Greater(a, zero)
        y = Where(c, a, b)
        t = Tile(x, times)
        f = Cast<to=7>(t)
        h = Cast<to=1>(f)
        z = Sub(t, h) }""",
}

_FUNCTION = """<domain: "local", opset_import: ["" : 17]>
scaled<alpha>(a, b) => (c) {
    d = Mul(a, b)
    e = Relu(d)
    c = LeakyRelu<alpha: float = @alpha>(e) }"""
_TEXTS["function"] = """g (float[3,4] x, float[3,4] w1) => (float[3,4] y) {
    a = local.scaled<alpha=0.3>(x, w1)
    y = local.scaled<alpha=0.1>(a, x) }
""" + _FUNCTION

NETWORKS = tuple(_TEXTS)


@lru_cache
def network(name: str) -> onnx.ModelProto:
    """The network of that name; a copy is the caller's to damage."""
    model = parser.parse_model(_HEAD + _TEXTS[name])
    rng = np.random.default_rng(len(name))
    graph = model.graph
    for value in [v for v in graph.input if v.name.startswith("w")]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = rng.uniform(0.1, 1.0, shape).astype(np.float32) * (1 if len(shape) == 1 else rng.choice([-1, 1], shape))
        graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), value.name))
        graph.input.remove(value)
    return model
