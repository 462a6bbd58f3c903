"""Sequences and optionals among a model's inputs and outputs, against onnxruntime: lists of arrays, and None."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import mlc
from mlc.errors import InputError, ModelError, UsageError, ValuesNeededError
from mlc.shapes import parse_shape
from mlc.specialising import SpecialisingExecutable

RNG = np.random.default_rng(0)


def model(signature: str, body: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {signature} {{ {body} }}')


def array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


JOINED = model("(seq(float[n, 3]) x, float[m, 3] y) => (float[p, 3] z, seq(float[p, 3]) s, int64 k)", """
    s = SequenceInsert(x, y)
    z = ConcatFromSequence<axis=0>(s)
    k = SequenceLength(s)""")
MAYBE = model("(optional(float[n, 3]) x, float[n, 3] y) => (float[n, 3] z)", """
    h = OptionalHasElement(x)
    z = If (h) <then_branch = yes () => (float[n, 3] a) { e = OptionalGetElement(x) a = Add(e, y) },
                else_branch = no () => (float[n, 3] b) { b = Neg(y) }>""")


def check(exe: Any, session: onnxruntime.InferenceSession, given: dict[str, Any]) -> None:
    same(exe(**given), session.run(None, given))


def same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, list):
        assert len(got) == len(wanted)
        for ours, theirs in zip(got, wanted, strict=True):
            same(ours, theirs)
    else:
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shapes", [None, {"x": "1..9,3"}], ids=["as they come", "of a range"])
def test_a_sequence_in_and_out(shapes: dict[str, Any] | None) -> None:
    exe = mlc.compile(JOINED, log=False, shapes=shapes)
    session = onnxruntime.InferenceSession(JOINED.SerializeToString())
    for rows in ([2, 4], [2, 4], [5, 1], [7]):
        check(exe, session, {"x": [array(n, 3) for n in rows], "y": array(len(rows), 3)})
    # of a range, there is one for each length
    assert len(exe._kept) == (3 if shapes is None else 2)


def test_an_empty_sequence() -> None:
    (z, s, k), y = mlc.compile(JOINED, log=False)([], y := array(4, 3)), y
    np.testing.assert_array_equal(z, y)
    assert [each.tolist() for each in s] == [y.tolist()] and k == 1


def test_a_tensor_without_elements() -> None:
    exe, session = mlc.compile(JOINED, log=False), onnxruntime.InferenceSession(JOINED.SerializeToString())
    check(exe, session, {"x": [array(0, 3), array(2, 3)], "y": array(3, 3)})


def test_an_optional_that_may_hold_nothing() -> None:
    exe, x, y = mlc.compile(MAYBE, log=False), array(5, 3), array(5, 3)
    np.testing.assert_array_equal(exe(None, y)[0], -y)
    np.testing.assert_allclose(exe(x, y)[0], x + y, rtol=1e-6)
    np.testing.assert_allclose(exe(x=x[:2], y=y[:2])[0], (x + y)[:2], rtol=1e-6)


def test_a_size_that_another_input_has_too_stays_free() -> None:
    exe = mlc.compile(MAYBE, log=False, shapes={"x": "1..8,3", "y": "1..8,3"})
    assert isinstance(exe, mlc.Executable) and [spec.name for spec in exe.inputs] == ["x/0", "y"]
    for n in (1, 8, 5):
        x, y = array(n, 3), array(n, 3)
        np.testing.assert_allclose(exe(x, y)[0], x + y, rtol=1e-6)


def test_given_forms_make_an_executable_that_can_be_saved(tmp_path: Path) -> None:
    exe = mlc.compile(JOINED, log=False, shapes={"x": ["1..4,3", (2, 3)], "y": (1, 3)})
    exe.save(tmp_path / "joined.so")
    loaded = mlc.load(tmp_path / "joined.so")
    assert [spec.name for spec in loaded.inputs] == ["x/0", "x/1", "y"]
    assert [spec.name for spec in loaded.outputs] == ["z", "s/0", "s/1", "s/2", "k"]
    for n in (1, 4):
        tensors = [array(n, 3), array(2, 3), array(1, 3)]
        z, *rest, k = loaded(*tensors)
        np.testing.assert_array_equal(z, np.concatenate(tensors))
        same(rest, tensors)
        assert k == 3
    by_number = mlc.compile(JOINED, log=False, shapes={"x/0": "1..4,3", "x/1": (2, 3), "y": (1, 3)})
    assert [(s.name, s.shape) for s in by_number.inputs] == [(s.name, s.shape) for s in exe.inputs]


@pytest.mark.parametrize("shapes", [
    {"x": [[1, 3], [2, 3]]}, {"x": [[[1, 5], 3], "2,3"]}, {"x/0": (1, 3), "x/1": ((1, 2), 3)},
], ids=str)
def test_forms_of_some_containers_are_said_and_others_come(shapes: dict[str, Any]) -> None:
    two = model("(seq(float[n, 3]) x, seq(float[n, 3]) w) => (float[p, 3] z)", """
        a = ConcatFromSequence<axis=0>(x)
        b = ConcatFromSequence<axis=0>(w)
        z = Concat<axis=0>(a, b)""")
    exe, session = mlc.compile(two, log=False, shapes=shapes), onnxruntime.InferenceSession(two.SerializeToString())
    for rows in ([4], [2, 1]):
        check(exe, session, {"x": [array(1, 3), array(2, 3)], "w": [array(n, 3) for n in rows]})


def test_arrays_that_only_dlpack_reads() -> None:
    class Held:
        def __init__(self, array: np.ndarray) -> None:
            self._array = array

        def __dlpack__(self, **words: Any) -> Any:
            return self._array.__dlpack__(**words)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    x, y = [array(2, 3), array(1, 3)], array(4, 3)
    same(mlc.compile(JOINED, log=False)([Held(each) for each in x], Held(y))[0], np.concatenate([*x, y]))


def test_a_name_behind_an_optional_sequence() -> None:
    """Which is of no tensor of it."""
    given = model("(optional(seq(float[2])) x, float[2] y) => (seq(float[2]) z, float[2] xxtensors)", """
        e = OptionalGetElement(x)
        z = SequenceInsert(e, y)
        xxtensors = Neg(y)""").SerializeToString().replace(b"xxtensors", b"x/tensors")
    z, negated = mlc.compile(onnx.ModelProto.FromString(given), log=False)([x := array(2)], y := array(2))
    same(z, [x, y])
    same(negated, -y)


def test_what_a_specialising_executable_compiled_can_be_saved(tmp_path: Path) -> None:
    exe = mlc.compile(JOINED, log=False)
    with pytest.raises(UsageError, match=r"save exe.compiled\(x=\.\.\.\)"):
        exe.save(tmp_path / "joined.so")
    exe.compiled(x=[array(2, 3)]).save(tmp_path / "joined.so")
    assert [spec.name for spec in mlc.load(tmp_path / "joined.so").inputs] == ["x/0", "y"]


def test_outputs_alone_may_hold_tensors(tmp_path: Path) -> None:
    cut = model("(float[n, 6] x) => (seq(float[n, 2]) s, optional(float[n, 6]) o, optional(float) none)", """
        two = Constant<value = int64 {2}>()
        s = SplitToSequence<axis=1>(x, two)
        o = Optional(x)""")
    nothing = onnx.helper.make_node("Optional", [], ["none"], type=onnx.helper.make_tensor_type_proto(1, []))
    cut.graph.node.append(nothing)
    exe, x = mlc.compile(cut, log=False), array(4, 6)
    assert isinstance(exe, SpecialisingExecutable)
    s, o, none = exe(x)
    same(s, [x[:, :2], x[:, 2:4], x[:, 4:]])
    same(o, x)
    assert none is None
    exe.save(tmp_path / "cut.so")
    same(mlc.load(tmp_path / "cut.so")(x), [*s, o])


def test_a_sequence_that_a_condition_chooses() -> None:
    """Of one length in one case and of another in the other: for each value there is code."""
    chosen = model("(bool c, float[n, 2] x) => (seq(float[n, 2]) s)", """
        s = If (c) <then_branch = yes () => (seq(float[n, 2]) a) { a = SequenceConstruct(x) },
                    else_branch = no () => (seq(float[n, 2]) b) { m = Neg(x) b = SequenceConstruct(m, x) }>""")
    exe, session = mlc.compile(chosen, log=False), onnxruntime.InferenceSession(chosen.SerializeToString())
    for c in (True, False):
        check(exe, session, {"c": np.array(c), "x": array(3, 2)})


def test_places_that_are_inputs() -> None:
    placed = model("(seq(float[n, 2]) x, int64 i, int64 j) => (float[n, 2] y, seq(float[n, 2]) s)", """
        y = SequenceAt(x, i)
        s = SequenceErase(x, j)""")
    exe, session = mlc.compile(placed, log=False), onnxruntime.InferenceSession(placed.SerializeToString())
    for i, j in ((0, 2), (-1, 1)):
        check(exe, session, {"x": [array(n, 2) for n in (1, 4, 2)], "i": np.array(i), "j": np.array(j)})


@pytest.mark.parametrize(("shapes", "said"), [
    ({"x": [(2, 4)]}, r"the shape of x/0 must fit the model's \(n,3\), got \(2,4\)"),
    ({"x": [(2,)]}, r"must fit the model's \(n,3\), got \(2\)"),
    ({"x": None}, "must be a list of shapes, got None; only an optional may hold nothing"),
    ({"x": 5}, "must be a list of shapes, one for each tensor of the sequence of g, got 5"),
    ({"x": (2, 3)}, r"must be a list of shapes, one for each tensor of the sequence of g, got \(2, 3\)"),
    ({"x": parse_shape("1..4,3")}, r"one for each tensor of the sequence of g, got 1..4,3$"),
    ({"x": [(True, 3)]}, "shapes of x/0: a size must be a whole number, got True"),
    ({"x": [], "y": 5}, "a shape must be sizes such as"),
    ([("x", [])], "shapes must be those of inputs by name, such as {'x': .*got"), ({5: []}, "by name, such as"),
    ({"x": ["9..2,3"]}, "shapes of x/0: a range of sizes must be LOW..HIGH"),
    ({"x/1": (2, 3)}, "must say once of each tensor of x, from x/0 on, got x/1"),
    ({"x/0": (2, 3), "x": []}, "must say once of each tensor of x, from x/0 on, got x/0 beside x"),
    ({"x": [], "y": None}, "shapes\\['y'\\] must be a shape, got None; only an optional may hold nothing"),
    ({"x": [], "z": (1,)}, "shapes must name inputs of g"),
], ids=str)
def test_forms_that_do_not_fit_are_refused_in_one_line(shapes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        mlc.compile(JOINED, log=False, shapes=shapes)
    assert "\n" not in str(caught.value)


def test_what_a_file_cannot_leave_open_is_said() -> None:
    with pytest.raises(ValuesNeededError, match=r"x of g is a sequence; give the shape of each.*: --shape x/0=…, or s"):
        mlc.Compilation.of(JOINED)
    with pytest.raises(ValuesNeededError, match="x of g is an optional; give the shape"):
        mlc.compile(MAYBE, log=False, values={})


@pytest.mark.parametrize(("x", "said"), [
    (array(2, 3), "input x must be a list of arrays, as it is a sequence, got ndarray; put them in a list"),
    (None, "input x must be a list of arrays, as it is a sequence, got NoneType"),
    ([array(2, 4)], "x/0 must fit the model's"),
    ([array(2, 3).astype("float64")], "input x/0 must be float32, got float64"),
    ([[[1.0, 2.0, 3.0], [1.0]]], "input x/0 must be an array, got list"),
], ids=["an array", "nothing", "another shape", "another type", "rows of many lengths"])
def test_what_no_sequence_is_is_said_of_a_call(x: Any, said: str) -> None:
    with pytest.raises((InputError, UsageError), match=said) as caught:
        mlc.compile(JOINED, log=False)(x, array(1, 3))
    assert "\n" not in str(caught.value)


def test_a_call_with_another_length_than_said_is_refused() -> None:
    two = mlc.compile(model("(seq(float[2]) x, seq(float[2]) w) => (seq(float[2]) y)", "y = Identity(x)"), log=False,
                      shapes={"x": [(2,), (2,)]})
    assert len(two([array(2)] * 2, [])[0]) == 2
    with pytest.raises(InputError, match="x/2"):
        two([array(2)] * 3, [])


@pytest.mark.parametrize(("signature", "body", "shapes", "said"), [
    ("(seq(float[2]) x, float[2] x_0) => (float[2] y)", "y = Identity(x_0)", {"x": [(2,)]},
     "x/0, which is there already"),
    ("(seq(float[2]) x, seq(float[2]) x_0) => (float[p] y)", "y = ConcatFromSequence<axis=0>(x_0)",
     {"x": [(2,)], "x_0": [(2,)]}, "x/0, which is there already"),
    ("(float[2] x) => (seq(float[2]) y, float[2] y_1)", "y = SequenceConstruct(x) y_1 = Neg(x)", None,
     "y/1, which is there already"),
    ("(seq(float[2]) x) => (seq(float[2]) y)", "y = Identity(x)", {"x": []}, "a model must give some tensor"),
    ("(optional(seq(float[2])) x) => (optional(seq(float[2])) y)",
     "y = Identity(x)", {"x": []}, "holds a sequence of none"),
])
def test_what_is_ambiguous_is_refused_in_one_line(signature: str, body: str, shapes: Any, said: str) -> None:
    shapes = shapes and {key.replace("_", "/"): shape for key, shape in shapes.items()}
    renamed = model(signature, body).SerializeToString().replace(b"x_0", b"x/0").replace(b"y_1", b"y/1")
    with pytest.raises(ModelError, match=said) as caught:
        mlc.compile(onnx.ModelProto.FromString(renamed), log=False, shapes=shapes)
    assert "\n" not in str(caught.value)
