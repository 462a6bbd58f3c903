"""Operators of free sizes, each alone, against onnxruntime at several sizes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import mlc
from mlc.errors import MlcError
from mlc.testing.targets import runs

_STEPS = "<int64[1] from = {%d}, int64[1] axis = {0}, int64[1] to = {%d}, int64[1] step = {%d}> " \
         "{ y = Slice(x, from, to, axis, step) }"
_FAR = np.iinfo(np.int64).max
_RESIZE = "<float[4] s = {%s}> { y = Resize<%s>(x, , s) }"
_RECURRENT = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ROWS = ({"n": 4}, {"n": 9}, {"n": 1})
_IMAGES = ({"h": 5, "w": 7}, {"h": 8, "w": 8}, {"h": 3, "w": 12})

#: the shape of x, the graph's body, sizes
CASES: dict[str, tuple[Sequence[int | str], str, Sequence[Mapping[str, int]]]] = {
    "gather from the end": (("n", 6), "<int64[3] i = {-1, 0, -2}> { y = Gather<axis=0>(x, i) }", ({"n": 4}, {"n": 9})),
    "every second": (("n", 6), _STEPS % (0, _FAR, 2), _ROWS),
    "backwards": (("n", 6), _STEPS % (-1, -_FAR, -1), _ROWS),
    "every second backwards": (("n", 6), _STEPS % (-1, -_FAR, -2), _ROWS),
    "the first ones, or all": (("n", 6), """<int64[1] from = {0}, int64[1] to = {5}, int64[1] axis = {0}> {
        s = Slice(x, from, to, axis)
        t = Transpose(s)
        p = MatMul(s, t)
        y = MatMul(p, s) }""", _ROWS),
    "the last ones, or all": (("n", 6), """<int64[1] from = {-5}, int64[1] to = {100000}, int64[1] axis = {0}> {
        s = Slice(x, from, to, axis)
        y = Softmax<axis=0>(s) }""", _ROWS),
    "largest": (("n", 6), "<int64[1] k = {2}> { y, i = TopK<axis=0>(x, k) }", ({"n": 4}, {"n": 9})),
    "nearest, doubled": ((1, 3, "h", "w"), _RESIZE % (
        "1, 1, 2, 2", 'nearest_mode="floor", coordinate_transformation_mode="asymmetric"'), _IMAGES),
    "nearest, by parts": ((1, 3, "h", "w"), _RESIZE % ("1, 1, 1.5, 0.5", 'nearest_mode="round_prefer_ceil"'), _IMAGES),
    "linear, doubled": ((1, 3, "h", "w"), _RESIZE % ("1, 1, 2, 2", 'mode="linear"'), _IMAGES),
    "linear, by parts": ((1, 3, "h", "w"), _RESIZE % ("1, 1, 0.5, 1.5", 'mode="linear"'), _IMAGES),
    "linear, one row": ((1, 3, "h", "w"), _RESIZE % (
        "1, 1, 0.5, 3", 'mode="linear", coordinate_transformation_mode="pytorch_half_pixel"'), _IMAGES),
    "linear, corners aligned": ((1, 3, "h", "w"), _RESIZE % (
        "1, 1, 2, 0.5", 'mode="linear", coordinate_transformation_mode="align_corners"'), _IMAGES),
    "cubic": ((1, 3, "h", "w"), _RESIZE % ("1, 1, 1.5, 2", 'mode="cubic"'), _IMAGES),
    "cubic, without what lies outside": ((1, 3, "h", "w"), _RESIZE % (
        "1, 1, 2, 0.5", 'mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5, '
        'coordinate_transformation_mode="half_pixel_symmetric"'), _IMAGES),
    "cubic, to the size of another": ((1, 4, "h", "w"), """{
        a = MaxPool<kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1]>(x)
        s = Shape(x)
        y = Resize<mode="cubic", coordinate_transformation_mode="align_corners">(a, , , s) }""", _IMAGES),
    "linear, to the size of another": ((1, 4, "h", "w"), """{
        a = MaxPool<kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1]>(x)
        s = Shape(x)
        u = Resize<mode="linear", coordinate_transformation_mode="asymmetric">(a, , , s)
        y = Add(u, x) }""", _IMAGES),
    "linear, smoothed": ((2, 3, "h", "w"), _RESIZE % ("1, 1, 0.5, 2", 'mode="linear", antialias=1'), _IMAGES),
    "linear, smoothed along both": ((1, 3, "h", "w"), _RESIZE % ("1, 1, 0.6, 0.45", 'mode="linear", antialias=1'),
                                    _IMAGES),
    "cubic, smoothed": ((1, 3, "h", "w"), _RESIZE % (
        "1, 1, 0.6, 0.5", 'mode="cubic", antialias=1, cubic_coeff_a=-0.5, exclude_outside=1'), _IMAGES),
    "linear, smoothed, of any size to one": ((1, 3, "h", "w"), """<int64[4] s = {1, 3, 5, 4}> {
        y = Resize<mode="linear", antialias=1>(x, , , s) }""", (*_IMAGES, {"h": 40, "w": 2})),
    "linear, smoothed, to the size of another": ((1, 4, "h", "w"), """{
        a = MaxPool<kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1]>(x)
        s = Shape(a)
        u = Resize<mode="linear", antialias=1>(x, , , s)
        y = Add(u, a) }""", _IMAGES),
    "largest and where they are": (("n", 3, 9, 8), """{
        v, i = MaxPool<kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1], ceil_mode=1, storage_order=1>(x)
        f = Cast<to=1>(i)
        y = Concat<axis=0>(v, f) }""", _ROWS),
    "a branch of two": (("n", "m"), """{
        s = ReduceSum<keepdims=0>(x)
        z = Sub(s, s)
        c = Greater(s, z)
        y = If(c) <then_branch = one () => (float[a, b] u) { u = Exp(x) },
                   else_branch = other () => (float[c, d] v) { v = Neg(x) }> }""",
                        ({"n": 4, "m": 2}, {"n": 1, "m": 1}, {"n": 2, "m": 5})),
    "a sequence backwards": (("n", "m", 3), """{
        s = Shape<start=1, end=2>(x)
        o = ConstantOfShape<value = int64[1] {1}>(s)
        y = ReverseSequence(x, o) }""", ({"n": 4, "m": 2}, {"n": 1, "m": 1}, {"n": 9, "m": 5})),
    "the largest of a row as 1": (("n", "m"), "{ y = Hardmax(x) }", ({"n": 4, "m": 2}, {"n": 1, "m": 1})),
    "ones beside the diagonal": (("n", "m"), """{
        e = EyeLike<dtype=6, k=1>(x)
        f = Cast<to=1>(e)
        y = Mul(f, x) }""", ({"n": 4, "m": 2}, {"n": 1, "m": 1}, {"n": 2, "m": 5})),
    "parts of which several are free": ((31, "n"), """<int64[1] a = {1}> {
        b = Sigmoid(x)
        l = ReduceMax(x, a)
        y = Concat<axis=-1>(l, b, b, l) }""", _ROWS),
    "mirrored borders": ((1, 4, "h", "w"), """<int64[8] p = {0, 1, 2, 0, 0, 0, 3, 2}, float[1] m = {1e9}> {
        b = Pad<mode="reflect">(x, p)
        y = Min(b, m) }""", ({"h": 26, "w": 27}, {"h": 5, "w": 7})),
    "divided by its length": (("n", 6), """{
        s = Shape<start=0, end=1>(x)
        f = Cast<to=1>(s)
        r = Sqrt(f)
        a = Div(x, r)
        y = Add(a, r) }""", _ROWS),
    "to the size of another": ((1, 4, "h", "w"), """{
        a = MaxPool<kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1]>(x)
        s = Shape(x)
        u = Resize<nearest_mode="floor", coordinate_transformation_mode="asymmetric">(a, , , s)
        y = Add(u, x) }""", _IMAGES),
}


def _model(
    shape: Sequence[int | str], body: str, weights: Mapping[str, Sequence[int]] | None = None
) -> onnx.ModelProto:
    rng, given = np.random.default_rng(0), weights or {}
    declared = ", ".join(f"float[{', '.join(map(str, s))}] {n}" for n, s in {"x": shape, **given}.items())
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 19]> g ({declared}) => (float[1] y) {body}')
    for value in [each for each in model.graph.input if each.name in given]:
        array = rng.standard_normal(given[value.name]).astype("float32") / 3
        model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        model.graph.input.remove(value)
    rank = len(onnxruntime.InferenceSession(_unshaped(model).SerializeToString()).get_outputs()[0].shape)
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None] * rank))
    return model


def _unshaped(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output[0].type.tensor_type.ClearField("shape")
    return copy


def _check(
    model: onnx.ModelProto, shape: Sequence[int | str], sizes: Sequence[Mapping[str, int]], target: str = "native"
) -> None:
    reference, rng = onnxruntime.InferenceSession(model.SerializeToString()), np.random.default_rng(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of a kernel that no schedule fits
        executable = mlc.compile(model, target=target, log=False)
    for size in sizes:
        x = rng.standard_normal([size.get(str(each), each) for each in shape]).astype("float32")
        found = executable(x)
        (wanted,) = reference.run(["y"], {"x": x})
        np.testing.assert_allclose(found[0] if isinstance(found, list | tuple) else found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_of_free_sizes(name: str) -> None:
    shape, body, sizes = CASES[name]
    _check(_model(shape, body), shape, sizes)


def test_attention_over_itself_without_wide_vectors() -> None:
    """Rows of its chunks lie between two divisions by free sizes, whose difference TVM takes for any number."""
    body = """<float s = {0.125}> {
        t = Transpose<perm=[0, 2, 1]>(x)
        d = MatMul(x, t)
        m = Mul(d, s)
        p = Softmax<axis=-1>(m)
        y = MatMul(p, x) }"""
    sizes = ({"b": 1, "n": 1}, {"b": 2, "n": 7}, {"b": 3, "n": 33})
    _check(_model(("b", "n", 64), body), ("b", "n", 64), sizes, "x86-64-v2")


def test_a_mean_over_a_free_size_in_ragged_vectors() -> None:
    """What it divides by is a number of 64 bits, its loops are counted in 32."""
    body = "<int64[2] a = {0, 1}> { y = ReduceMean(x, a) }"
    target = "x86-64-v3" if runs("x86-64-v3") else "native"
    _check(_model(("n", 5, 33), body), ("n", 5, 33), _ROWS, target)


def test_a_softmax_over_an_axis_of_one_or_two() -> None:
    """The few rows that a schedule for the smallest sizes keeps have no bound to TVM."""
    _check(_model((3, "n", 16), "{ y = Softmax<axis=1>(x) }"), (3, "n", 16), ({"n": 1}, {"n": 2}, {"n": 11}),
           "x86-64-v2")


@pytest.mark.parametrize(("body", "kernel"), [
    ('{ y = Conv<auto_pad="SAME_LOWER", strides=[3, 3]>(x, k) }', (5, 4, 5, 2)),  # some columns are in no window
    ('{ y = MaxPool<kernel_shape=[3, 3], auto_pad="SAME_UPPER", strides=[3, 2]>(x) }', None),
], ids=["lower", "upper"])
def test_windows_around_which_a_free_image_is_padded(body: str, kernel: Sequence[int] | None) -> None:
    shape = (1, 4, 7, "w")
    _check(_model(shape, body, {"k": kernel} if kernel else {}), shape, (*_IMAGES, {"w": 1}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pooling", [
    'AveragePool<kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER">',
    "AveragePool<kernel_shape=[2, 2], pads=[1, 0, 1, 0], strides=[2, 2], ceil_mode=1>",
    "AveragePool<kernel_shape=[2, 2], pads=[1, 0, 1, 0], strides=[3, 2], ceil_mode=1, count_include_pad=1>",
    "AveragePool<kernel_shape=[2, 3], pads=[1, 1, 1, 2], strides=[3, 2], dilations=[2, 1], ceil_mode=1>",
    "MaxPool<kernel_shape=[2, 2], strides=[3, 3], ceil_mode=1>",
], ids=["as many as begin", "up", "up and counted", "up and dilated", "up, largest"])
def test_the_last_windows_of_free_images(pooling: str) -> None:
    """Those that begin behind an image are none, and a mean is over what lies inside."""
    shape = (1, 4, "h", "w")
    _check(_model(shape, f"{{ y = {pooling}(x) }}"), shape, _IMAGES)


def test_windows_of_a_free_batch_divide_by_what_lies_inside() -> None:
    shape = ("n", 4, 10, 16)
    body = "{ y = AveragePool<kernel_shape=[3, 3], strides=[3, 3], pads=[1, 1, 1, 1]>(x) }"
    _check(_model(shape, body), shape, _ROWS, "x86-64-v2")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("operator", "attributes", "ways"), [
    ("LSTM", "", 1), ("GRU", "", 1), ("GRU", ", linear_before_reset=1", 1), ("RNN", ', direction="bidirectional"', 2),
])
def test_recurrent_layers_of_a_free_batch(operator: str, attributes: str, ways: int) -> None:
    gates, shape = _RECURRENT[operator] * 8, (5, "n", 6)
    weights = {"w": (ways, gates, 6), "r": (ways, gates, 8), "b": (ways, 2 * gates)}
    body = f"{{ y, last = {operator}<hidden_size=8{attributes}>(x, w, r, b) }}"
    _check(_model(shape, body, weights), shape, _ROWS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("operator", _RECURRENT)
def test_sequences_of_several_lengths_in_a_free_batch(operator: str) -> None:
    """Of random lengths from 0 to 5: as many as there are first features above 0."""
    gates, shape = _RECURRENT[operator] * 8, (5, "n", 6)
    weights = {"w": (2, gates, 6), "r": (2, gates, 8)}
    last = "y_h, y" if operator == "LSTM" else "y"
    body = f"""<int64 first = {{0}}, float zero = {{0}}, int64[1] steps = {{0}}> {{
        f = Gather<axis=2>(x, first) g = Greater(f, zero) c = Cast<to=6>(g) l = ReduceSum<keepdims=0>(c, steps)
        all, {last} = {operator}<hidden_size=8, direction="bidirectional">(x, w, r, , l) }}"""
    _check(_model(shape, body, weights), shape, _ROWS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("operator", "result", "batch", "direction"), [
    ("LSTM", "y, last", 1, "forward"), ("LSTM", "by_time, last, y", 3, "reverse"), ("GRU", "y, last", 2, "reverse"),
    ("GRU", "by_time, y", 1, "bidirectional"), ("RNN", "by_time, y", 2, "reverse"), ("RNN", "y, last", 1, "forward"),
])
def test_recurrent_layers_of_a_free_number_of_steps(operator: str, result: str, batch: int, direction: str) -> None:
    gates, shape, ways = _RECURRENT[operator] * 21, ("n", batch, 6), 1 + (direction == "bidirectional")
    weights = {"w": (ways, gates, 6), "r": (ways, gates, 21), "b": (ways, 2 * gates)}
    body = f'{{ {result} = {operator}<hidden_size=21, direction="{direction}">(x, w, r, b) }}'
    _check(_model(shape, body, weights), shape, ({"n": 1}, {"n": 7}, {"n": 40}))


@pytest.mark.parametrize(("operator", "batch", "direction"), [
    ("LSTM", "b", "bidirectional"), ("LSTM", 2, "forward"), ("GRU", "b", "bidirectional"), ("GRU", "b", "reverse"),
    ("RNN", 3, "reverse"), ("RNN", "b", "forward"),
])
def test_sequences_of_several_lengths_of_free_steps(operator: str, batch: int | str, direction: str) -> None:
    """All results: of each step, and the states at the last one that a sequence has."""
    rng, ways, gates = np.random.default_rng(5), 1 + (direction == "bidirectional"), _RECURRENT[operator] * 21
    results = ("y", "h", "c")[: 3 if operator == "LSTM" else 2]
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 19]>
        g (float[t, {batch}, 6] x, int32[{batch}] l) => ({", ".join(f"float[r, s, p] {name}" for name in results)}) {{
        {", ".join(results)} = {operator}<hidden_size=21, direction="{direction}">(x, w, r, bias, l) }}""")
    model.graph.output[0].type.tensor_type.shape.dim.add()
    for name, shape in (("w", (ways, gates, 6)), ("r", (ways, gates, 21)), ("bias", (ways, 2 * gates))):
        array = rng.standard_normal(shape).astype("float32") / 5
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        executable = mlc.compile(model, log=False)
    for steps, rows in ((1, 1), (7, 3), (40, 5)):
        rows = batch if isinstance(batch, int) else rows
        given = {"x": rng.standard_normal((steps, rows, 6)).astype("float32"),
                 "l": rng.integers(1, steps + 1, rows).astype("int32")}
        for found, wanted in zip(executable(**given), session.run(None, given), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_recurrent_layers_after_each_other_of_free_steps() -> None:
    shape, weights = ("n", 2, 6), {"w": (1, 8, 6), "r": (1, 8, 8), "v": (1, 16, 8), "q": (1, 16, 4)}
    body = "{ a, b = RNN<hidden_size=8>(x, w, r) c = Squeeze(a, one) y, d = LSTM<hidden_size=4>(c, v, q) }"
    _check(_model(shape, "<int64[1] one = {1}> " + body, weights), shape, ({"n": 1}, {"n": 7}, {"n": 40}))


@pytest.mark.slow
def test_what_is_done_before_a_convolution_of_a_free_batch() -> None:
    body = """{
        a = Conv<pads=[1, 1, 1, 1], kernel_shape=[3, 3]>(x, k)
        b = InstanceNormalization(a, s, t)
        y = Conv<strides=[3, 1], pads=[1, 1, 1, 1], kernel_shape=[3, 3]>(b, l) }"""
    shape, weights = ("n", 16, 10, 15), {"k": (32, 16, 3, 3), "s": (32,), "t": (32,), "l": (16, 32, 3, 3)}
    _check(_model(shape, body, weights), shape, ({"n": 1}, {"n": 5}), "x86-64-v2")


def test_images_that_are_smaller_than_a_tile_and_its_border() -> None:
    """Both ends of a loop are cut off, and of so few rows there is no middle: none is added up twice."""
    model = _model(("b", 3, "h", "w"), "{ y = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(x, k) }", {"k": (4, 3, 3, 3)})
    executable = mlc.compile(model, shapes={"x": "1..2,3,1..40,1..10"}, log=False, target="x86-64-v2")
    session, rng = onnxruntime.InferenceSession(model.SerializeToString()), np.random.default_rng(4)
    for sizes in ((b, 3, h, w) for b in (1, 2) for h in (1, 2, 3, 5, 6, 7, 40) for w in (1, 2, 3, 10)):
        x = rng.standard_normal(sizes).astype("float32")
        np.testing.assert_allclose(executable(x)[0], session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_transposed_convolution_whose_free_result_is_no_multiple_of_its_stride() -> None:
    body = "{ y = ConvTranspose<strides=[2, 2], pads=[1, 1, 1, 1]>(x, k) }"
    shape = (1, 16, "h", "w")
    _check(_model(shape, body, {"k": (16, 16, 3, 3)}), shape, _IMAGES, "x86-64-v2")


def test_a_choice_by_what_means_of_a_free_batch_are() -> None:
    body = "{ a = AveragePool<kernel_shape=[2, 1], pads=[1, 0, 1, 0]>(x) y = PRelu(a, s) }"
    shape = ("n", 12, 9, 7)
    _check(_model(shape, body, {"s": (12, 1, 7)}), shape, ({"n": 1}, {"n": 5}), "x86-64-v2")


@pytest.mark.parametrize("operator", ["LSTM", "GRU"])
def test_recurrent_layers_of_free_steps_and_batch(operator: str) -> None:
    gates, shape = _RECURRENT[operator] * 21, ("n", "b", 6)
    weights = {"w": (2, gates, 6), "r": (2, gates, 21), "bias": (2, 2 * gates)}
    body = f'{{ y, last = {operator}<hidden_size=21, direction="bidirectional">(x, w, r, bias) }}'
    _check(_model(shape, body, weights), shape, ({"n": 4, "b": 1}, {"n": 1, "b": 3}, {"n": 33, "b": 9}))


def test_lengths_that_a_call_gives() -> None:
    text = """<ir_version: 8, opset_import: ["" : 19]> g (float[t, b, 3] x, int64[b] l) => (float[t, b, 3] y) {
        y = ReverseSequence(x, l) }"""
    model, rng = parser.parse_model(text), np.random.default_rng(2)
    session, executable = onnxruntime.InferenceSession(model.SerializeToString()), mlc.compile(model, log=False)
    for steps, batch in ((1, 1), (7, 3), (20, 2)):
        given = {"x": rng.standard_normal((steps, batch, 3)).astype("float32"), "l": rng.integers(1, steps + 1, batch)}
        np.testing.assert_array_equal(executable(**given)[0], session.run(None, given)[0])


def test_samples_between_the_pixels_of_a_free_batch() -> None:
    rng = np.random.default_rng(3)
    model = parser.parse_model("""<ir_version: 9, opset_import: ["" : 19]>
        g (float[n, 4, 7, 6] x, float[n, 36, 7, 6] o, float[n, 18, 7, 6] m) => (float[n, 3, 7, 6] y) {
        y = DeformConv<kernel_shape=[3, 3], pads=[1, 1, 1, 1], offset_group=2>(x, k, o, , m) }""")
    model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((3, 4, 3, 3)).astype("float32"), "k"))
    executable, reference = mlc.compile(model, log=False), ReferenceEvaluator(model)
    for batch in (1, 3):
        given = {name: rng.standard_normal((batch, size, 7, 6)).astype("float32")
                 for name, size in (("x", 4), ("o", 36), ("m", 18))}
        np.testing.assert_allclose(executable(**given)[0], reference.run(None, given)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shape", "body", "said"), [
    (("n", 3), """<int64[1] b = {0}, int64[1] e = {1}> {
        s = ReduceSum<keepdims=0>(x)
        z = Sub(s, s)
        c = Greater(s, z)
        y = If(c) <then_branch = one () => (float[a, d] u) { u = Slice(x, b, e) },
                   else_branch = other () => (float[a, d] v) { v = Neg(x) }> }""", "both branches must be known"),
    ((1, 3, "h", "w"), '''<int64[4] s = {1, 3, 8, 8}> {
        y = Resize<mode="linear", keep_aspect_ratio_policy="not_larger">(x, , , s) }''', "without a region or an"),
])
def test_what_must_not_be_free_is_said(shape: Sequence[int | str], body: str, said: str) -> None:
    with pytest.raises(MlcError, match=said) as caught:
        mlc.compile(_model(shape, body), log=False)
    assert "\n" not in str(caught.value)
