"""Models whose numbers say how many results there are, against onnxruntime: for fixed and free sizes, none included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

import mlc
from mlc.artifact import artifact
from mlc.artifact import metadata as description
from mlc.errors import ArtifactError, InputError, ModelError

Feeds = Sequence[Mapping[str, np.ndarray]]


def _model(text: str, weights: Mapping[str, np.ndarray] | None = None, opset: int = 17) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in (weights or {}).items())
    return model


def _check(executable: mlc.Executable, model: onnx.ModelProto, feeds: Feeds) -> list[int]:
    """How many elements the first output of each call has."""
    session, sizes = onnxruntime.InferenceSession(model.SerializeToString()), []
    for given in feeds:
        made = executable(**given)
        for found, wanted in zip(made, session.run(None, dict(given)), strict=True):
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        sizes.append(made[0].size)
    return sizes


def _sparse(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    x = rng.standard_normal(shape).astype("float32")
    return np.where(rng.random(shape) < rng.choice([0, 0.3, 0.9, 1]), np.float32(0), x)


@pytest.mark.parametrize(("shape", "text"), [
    ((3, 5), "(int64[q, w] y) { y = NonZero(x) }"),
    (("n", "h", 5), "(int64[q, w] y) { y = NonZero(x) }"),
    (("n", "h"), """(float[q] y, int64[r, c] p) {
        a = Relu(x)
        z = NonZero(a)
        p = Transpose<perm=[1, 0]>(z)
        g = GatherND(x, p)
        y = Exp(g) }"""),
    (("n", 6), """(float[q, w] y) <int64 last = {5}, float zero = {0.0}> {
        s = Gather<axis=1>(x, last)
        c = Greater(s, zero)
        z = NonZero(c)
        i = Reshape(z, row)
        g = Gather<axis=0>(x, i)
        m = Softmax<axis=1>(g)
        y = MatMul(m, k) }"""),
    (("n", 6), """(float[q, w] y) <int64 last = {5}, float[2] t = {0.1, 0.2}> {
        s = Gather<axis=1>(x, last)
        c = Cast<to=9>(s)
        a, b = Split<axis=1>(x, parts)
        d = Compress<axis=0>(a, c)
        e = Compress<axis=1>(d, f)
        y = Add(e, t) }"""),
    (("n", 4), """(float[q] y) {
        c = Cast<to=9>(x)
        r = Reshape(c, row)
        y = Compress(x, r) }"""),
], ids=["fixed", "free", "elements", "rows", "compressed", "all in a row"])
def test_places_that_are_not_zero(shape: Sequence[int | str], text: str) -> None:
    rng = np.random.default_rng(1)
    weights = {"k": rng.standard_normal((6, 4)).astype("float32"), "parts": np.array([4, 2]), "row": np.array([-1]),
               "f": np.array([True, False, True, False])}
    model = _model(f"(float[{', '.join(map(str, shape))}] x) => {text}",
                   {name: each for name, each in weights.items() if f" {name})" in text})
    executable = mlc.compile(model, log=False)
    feeds = []
    for _ in range(16):
        sizes = {"n": int(rng.integers(1, 10)), "h": int(rng.integers(1, 10))}
        feeds.append({"x": _sparse(rng, [each if isinstance(each, int) else sizes[each] for each in shape])})
    feeds.append({"x": np.zeros_like(feeds[0]["x"])})
    sizes_found = _check(executable, model, feeds)
    assert sizes_found[-1] == 0
    assert max(sizes_found) > 0


@pytest.mark.parametrize(("shape", "text", "opset"), [
    ((1,), "(int64[q, w] y) { z = NonZero(x) y = Flatten<axis=0>(z) }", 17),
    ((1,), "(int64[q, w] y) { z = NonZero(x) t = Transpose(z) y = Flatten<axis=0>(t) }", 17),
    ((3, 5), """(int64[q, w] y) {
        z = NonZero(x)
        t = Transpose(z)
        y = Slice(t, first, second, second) }""", 17),
    ((3, 5), """(float[q, w] y) {
        z = NonZero(x)
        f = Cast<to=1>(z)
        t = Transpose(f)
        y = Softmax(t) }""", 11),
    ((3, 5), """(int64[q, w] y) {
        z = NonZero(x)
        y = Reshape(z, as_it_is) }""", 17),
], ids=["a row", "a column", "sliced", "softmax of rows", "reshaped"])
def test_axes_that_stay(shape: Sequence[int], text: str, opset: int) -> None:
    weights = {"first": np.array([0]), "second": np.array([1]), "as_it_is": np.array([0, -1])}
    model = _model(f"(float[{', '.join(map(str, shape))}] x) => {text}",
                   {name: each for name, each in weights.items() if f"{name}" in text}, opset)
    rng, executable = np.random.default_rng(7), mlc.compile(model, log=False)
    _check(executable, model, [{"x": _sparse(rng, shape)} for _ in range(8)] + [{"x": np.zeros(shape, "float32")}])


def test_what_is_no_number_is_not_zero() -> None:
    model = _model("(float[n] x) => (int64[q, w] y) { y = NonZero(x) }")
    given = np.array([np.nan, -0.0, np.inf, 0, -np.nan, 1], "float32")
    assert _check(mlc.compile(model, log=False), model, [{"x": given}]) == [4]


@pytest.mark.parametrize(("rows", "condition"), [("3", "5"), ("5", "3"), ("n", "5"), ("n", "m")])
@pytest.mark.parametrize("axis", [None, 1])
def test_conditions_of_another_length(rows: str, condition: str, axis: int | None) -> None:
    operator, result = ("Compress", "q") if axis is None else (f"Compress<axis={axis}>", "q, w")
    model = _model(f"(float[1, {rows}] x, bool[{condition}] c) => (float[{result}] y) {{ y = {operator}(x, c) }}")
    rng, executable = np.random.default_rng(8), mlc.compile(model, log=False)
    sizes = ([1, 4, 9] if size in "nm" else [int(size)] for size in (rows, condition))
    _check(executable, model, [{"x": rng.standard_normal((1, n)).astype("float32"), "c": rng.random(m) < 0.7}
                               for n, m in product(*sizes)])


@pytest.mark.parametrize("rows", ["3", "n"])
def test_a_known_condition_that_is_longer(rows: str) -> None:
    model = _model(f"(float[2, {rows}] x) => (float[q, w] y) {{ y = Compress<axis=1>(x, c) }}",
                   {"c": np.array([True, False, True, True, False, True])})
    rng, executable = np.random.default_rng(9), mlc.compile(model, log=False)
    _check(executable, model, [{"x": rng.standard_normal((2, n)).astype("float32")}
                               for n in ([1, 3, 6, 9] if rows == "n" else [3])])


def test_outputs_may_be_named_like_a_count() -> None:
    model = _model("(float[3, 5] x) => (int64[q, w] y, float[3, 5] v) { y = NonZero(x) v = Neg(x) }")
    model.graph.node[1].output[0] = model.graph.output[1].name = "y/length"
    executable = mlc.compile(model, log=False)
    _check(executable, model, [{"x": _sparse(np.random.default_rng(6), (3, 5))}])
    assert [spec.name for spec in executable.outputs] == ["y", "y/length"]


def _boxes(rng: np.random.Generator, images: int, classes: int, count: int) -> dict[str, np.ndarray]:
    corner = rng.random((images, count, 2)) * 20
    boxes = np.concatenate([corner, corner + rng.random((images, count, 2)) * 12], -1)
    return {"boxes": boxes.astype("float32"), "scores": rng.random((images, classes, count)).astype("float32")}


@pytest.mark.parametrize(("most", "least", "centres", "shape"), [
    (5, 0.5, 0, ("b", "n")), (1000, 0.3, 0, (2, "n")), (300, 0.9, 1, ("b", 40)), (0, 0.5, 0, (1, "n")),
    (3, 2.0, 0, (2, 40)),
], ids=["few", "all", "centres", "none", "none good enough"])
def test_boxes_that_overlap(most: int, least: float, centres: int, shape: Sequence[int | str]) -> None:
    images, count = shape
    model = _model(f"""(float[{images}, {count}, 4] boxes, float[{images}, 3, {count}] scores) => (int64[q, w] y)
        <int64[1] m = {{{most}}}, float[1] i = {{0.4}}, float[1] s = {{{least}}}> {{
        y = NonMaxSuppression<center_point_box={centres}>(boxes, scores, m, i, s) }}""")
    rng = np.random.default_rng(2)
    sizes = [(b if images == "b" else int(images), n if count == "n" else 40)
             for b in (1, 3) for n in (1, 2, 7, 40, 100, 512)]
    _check(mlc.compile(model, log=False), model, [_boxes(rng, b, 3, n) for b, n in sizes])


def test_thresholds_that_a_call_gives() -> None:
    model = _model("""(float[1, n, 4] boxes, float[1, 2, n] scores, int64[1] m, float[1] i, float[1] s)
        => (int64[q, w] y) { y = NonMaxSuppression(boxes, scores, m, i, s) }""")
    rng, executable = np.random.default_rng(3), mlc.compile(model, log=False)
    feeds = [{**_boxes(rng, 1, 2, n), "m": np.array([most]), "i": np.array([overlap], "float32"),
              "s": np.array([least], "float32")}
             for n, most, overlap, least in ((30, 4, 0.2, 0.1), (30, 1000, 0.9, 0.5), (9, 0, 0.5, 0.5), (1, 1, 0.5, 1))]
    _check(executable, model, feeds)


def test_boxes_and_scores_of_one_number_whatever_it_is_called() -> None:
    model = _model("""(float[a, n, 4] boxes, float[b, 2, m] scores) => (int64[q, w] y)
        <int64 z = {1}, float[1] i = {0.5}> {
        d = Shape(boxes)
        most = Gather<axis=0>(d, z)
        y = NonMaxSuppression(boxes, scores, most, i) }""")
    executable, rng = mlc.compile(model, log=False), np.random.default_rng(3)
    _check(executable, model, [_boxes(rng, b, 2, n) for b, n in ((1, 1), (2, 33), (1, 100))])
    given = _boxes(rng, 1, 2, 5)
    with pytest.raises(InputError, match="must agree"):
        executable(given["boxes"], given["scores"][:, :, :3])
    with pytest.raises(ModelError, match="boxes must be"):
        mlc.compile(model, shapes={"boxes": (1, 5, 4), "scores": (1, 2, 3)}, log=False)


@pytest.mark.parametrize(("shape", "attributes", "outputs", "opset"), [
    ((3, 5), "sorted=1", "y, i, v, c", 17), ((3, 5), "sorted=0", "y, i, v, c", 11),
    ((2, 7, 2), "axis=1", "y, i, v, c", 18), ((2, 7, 2), "sorted=0, axis=-2", "y, i, v, c", 13),
    ((1, 3), "axis=0", "y, i", 17), ((6,), "sorted=1", "y", 17),
], ids=["elements", "as they come", "along an axis", "as they come along an axis", "one", "no places"])
def test_what_is_there_once(shape: Sequence[int], attributes: str, outputs: str, opset: int) -> None:
    results = {"y": f"float[{', '.join('qwe'[:len(shape) if 'axis' in attributes else 1])}] y", "i": "int64[k] i",
               "v": "int64[l] v", "c": "int64[m] c"}
    names = outputs.split(", ")
    model = _model(f"""(float[{', '.join(map(str, shape))}] x) => ({', '.join(results[each] for each in names)})
        {{ {outputs} = Unique<{attributes}>(x) }}""", opset=opset)
    rng, executable = np.random.default_rng(10), mlc.compile(model, log=False)
    sizes = _check(executable, model, [{"x": rng.integers(-most, most + 1, shape).astype("float32")}
                                       for most in (0, 1, 1, 1, 3, 90)])
    assert sizes[0] <= sizes[-1]


@pytest.mark.parametrize(("shape", "attributes", "opset"), [
    (("n",), "sorted=1", 17), (("n", "m"), "sorted=0", 11), (("n", 3), "axis=0", 18),
    ((2, "n", 2), "sorted=0, axis=1", 13),
], ids=["elements", "as they come", "rows", "as they come along an axis"])
def test_what_is_there_once_of_a_free_number(shape: Sequence[int | str], attributes: str, opset: int) -> None:
    results = f"float[{', '.join('qwe'[:len(shape) if 'axis' in attributes else 1])}] y"
    model = _model(f"""(float[{', '.join(map(str, shape))}] x) => ({results}, int64[k] i, int64[l] v, int64[m] c)
        {{ y, i, v, c = Unique<{attributes}>(x) }}""", opset=opset)
    rng, executable, feeds = np.random.default_rng(11), mlc.compile(model, log=False), []
    for n, m, most in ((1, 1, 3), (1, 4, 0), (2, 1, 1), (9, 7, 1), (9, 7, 2), (64, 3, 5), (40, 5, 0), (512, 2, 90)):
        sizes = [{"n": n, "m": m}.get(str(each), each) for each in shape]
        feeds.append({"x": rng.integers(-most, most + 1, sizes).astype("float32")})
    sizes_found = _check(executable, model, feeds)
    assert sizes_found[0] <= sizes_found[-1]


def test_what_is_there_once_of_narrow_numbers() -> None:
    """Which are not sorted as such."""
    model = _model("(int8[n] x) => (int8[q] y, int64[q] i, int64[n] v, int64[q] c) { y, i, v, c = Unique(x) }")
    given = [{"x": np.random.default_rng(0).integers(-9, 9, n).astype("int8")} for n in (1, 30)]
    _check(mlc.compile(model, log=False), model, given)


def test_what_is_there_once_is_of_a_fixed_number_of_numbers() -> None:
    with pytest.raises(ModelError, match="axis 1 of its input must be a number"):
        mlc.compile(_model("(float[2, n] x) => (float[q, w] y) { y = Unique<axis=0>(x) }"), log=False)
    with pytest.raises(ModelError, match="at most 64 numbers, got 100"):
        mlc.compile(_model("(float[3, 100] x) => (float[q, w] y) { y = Unique<axis=0>(x) }"), log=False)


def _detector() -> onnx.ModelProto:
    """Boxes and scores of each pixel of a smaller image, and the box, class and score of the best."""
    rng = np.random.default_rng(4)
    text = """(float[b, 3, h, w] x) => (float[k, q] found, int64[k, r] chosen)
        <int64[1] m = {7}, float[1] i = {0.3}, float[1] s = {0.55}, int64[3] flat = {0, 6, -1}, int64[1] zero = {0},
         int64[1] four = {4}, int64[1] six = {6}, int64[1] one = {1}, int64[2] ends = {0, 2},
         float[1, 4, 1] sides = {9, 9, 9, 9}, int64[1] middle = {1}> {
        c = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(x, k1)
        a = Relu(c)
        d = Conv(a, k2)
        f = Reshape(d, flat)
        g = Slice(f, zero, four, one)
        e = Slice(f, four, six, one)
        u = Mul(g, sides)
        boxes = Transpose<perm=[0, 2, 1]>(u)
        scores = Sigmoid(e)
        chosen = NonMaxSuppression(boxes, scores, m, i, s)
        pair = Gather<axis=1>(chosen, ends)
        image_box = GatherND(boxes, pair)
        score = GatherND(scores, chosen)
        column = Unsqueeze(score, one)
        kind = Gather<axis=1>(chosen, middle)
        number = Cast<to=1>(kind)
        found = Concat<axis=1>(image_box, number, column) }"""
    return _model(text, {"k1": rng.standard_normal((8, 3, 3, 3)).astype("float32") / 3,
                         "k2": rng.standard_normal((6, 8, 1, 1)).astype("float32") / 3})


def test_a_detector_of_images_of_any_size(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(5), _detector()
    executable = mlc.compile(model, shapes={"x": "1..3,3,1..60,1..40"}, log=False)
    executable.save(tmp_path / "detector.so")
    feeds = [{"x": scale * rng.standard_normal((b, 3, h, w)).astype("float32")} for scale, b, h, w in (
        (1, 1, 1, 1), (1, 3, 60, 40), (1, 1, 60, 1), (1, 2, 1, 40), (0, 1, 8, 8), (1, 2, 17, 23), (1, 1, 33, 39))]
    for each in (executable, mlc.load(tmp_path / "detector.so")):
        sizes = _check(each, model, feeds)
        assert sizes[4] == 0
        assert max(sizes) > 7
    assert [str(spec) for spec in executable.outputs] == [
        "found: float32[0..42,6]", "chosen: int64[0..42,3]"]


@pytest.mark.parametrize(("body", "said"), [
    ("z = NonZero(x) y = ReduceSum<keepdims=0>(z)", "ReduceSum .*NonZero counts in each call"),
    ("z = NonZero(x) y = Shape(z)", "Shape .*NonZero counts in each call"),
    ("z = NonZero(x) a = Neg(x) w = NonZero(a) y = Add(z, w)", "Add .*NonZero counts them several times"),
    ("z = NonZero(x) y = Concat<axis=1>(z, z)", "Concat .*NonZero counts in each call"),
    ("z = NonZero(x) y = Div(z, z)", "Div .*NonZero counts in each call"),
    ("z = NonZero(x) s = Shape(x) y = Add(z, s)", "Add .*NonZero counts in each call"),
])
def test_what_would_mix_what_is_counted_is_refused(body: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        mlc.compile(_model(f"(float[n, 5] x) => (int64[q] y) {{ {body} }}"), log=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("operator", "opset"), [
    ("Softmax<axis=0>(f)", 11), ("LogSoftmax<axis=1>(f)", 12), ("Gemm<transA=1>(f, f)", 17),
    ("Gemm(t, two, fifteen)", 17), ("Slice(t, zero, zero)", 17),
])
def test_what_reads_across_what_is_counted_is_refused(operator: str, opset: int) -> None:
    weights = {"two": np.zeros((2, 5), "float32"), "fifteen": np.zeros((15, 5), "float32"), "zero": np.array([0])}
    model = _model(f"""(float[3, 5] x) => (float[q, w] y) {{
        z = NonZero(x)
        f = Cast<to=1>(z)
        t = Transpose(f)
        y = {operator} }}""", {name: each for name, each in weights.items() if name in operator}, opset)
    with pytest.raises(ModelError, match=r"NonZero counts in each call") as caught:
        mlc.compile(model, log=False)
    assert "\n" not in str(caught.value)


def test_gpus_do_not_count() -> None:
    model = _model("(float[3, 5] x) => (int64[q, w] y) { y = NonZero(x) }")
    with pytest.raises(ModelError, match=r"length of y of g depends on the data; compile .* for a CPU"):
        mlc.compile(model, target="cuda:sm_80", log=False)


@pytest.fixture(scope="module")
def written() -> mlc.Executable:
    model = _model("(float[2, 3] x) => (int64[q, w] y, float[2, 3] v) { y = NonZero(x) v = Neg(x) }")
    return mlc.compile(model, log=False)


def _crafted(built: mlc.Executable, folder: Path, place: int, side: str = "outputs", **change: Any) -> Path:
    metadata = deepcopy(built.metadata)
    metadata[side][place].update(change)
    artifact.write(folder / "crafted.so", built.variant.code, metadata, built.variant.weights)
    return folder / "crafted.so"


@pytest.mark.parametrize(("change", "said"), [
    ({"length": None}, "an axis and an output"), ({"length": [2, "y/length"]}, "from 0 to 1"),
    ({"length": [True, "y/length"]}, "from 0 to 1"), ({"length": [1, "v"]}, "an output of one int64"),
    ({"length": [1, ["y/length"]]}, "an output of one int64"), ({"shape": [2, 1 << 33]}, "from 0 to 2147483647"),
    ({"length": None, "name": "two\nlines"}, "an axis and an output"),
], ids=str)
def test_a_false_length_is_refused(
    written: mlc.Executable, tmp_path: Path, change: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(ArtifactError, match=said) as caught:
        mlc.load(_crafted(written, tmp_path, 0, **change))
    assert "\n" not in str(caught.value)


def test_inputs_have_no_length(written: mlc.Executable, tmp_path: Path) -> None:
    found = mlc.load(_crafted(written, tmp_path, 0, "inputs", length=5))
    assert found(np.ones((2, 3), "float32"))[0].shape == (2, 6)


def test_variants_count_alike(written: mlc.Executable) -> None:
    other = deepcopy(written.metadata)
    del other["outputs"][0]["length"]
    with pytest.raises(ValueError, match="inputs and outputs must be alike"):
        description.check_variants([written.metadata, other])


def test_a_count_of_more_than_there_are(written: mlc.Executable, tmp_path: Path) -> None:
    found = mlc.load(_crafted(written, tmp_path, 0, length=[0, "y/length"]))
    with pytest.raises(ArtifactError, match="must return what its metadata describes"):
        found(np.ones((2, 3), "float32"))


def test_results_of_any_length_do_not_go_into_memory_of_the_caller() -> None:
    executable = mlc.compile(_model("(float[3, 5] x) => (int64[q, w] y) { y = NonZero(x) }"), log=False)
    with pytest.raises(InputError, match="call it instead"):
        executable.run([np.zeros((3, 5), "float32")], [np.zeros((2, 15), "int64")])
    with pytest.raises(InputError, match="depends on the call"):
        executable.empty_outputs()
