"""A trace from elsewhere says what spaces say, or nothing: no code, no unchecked bounds, no unbounded cost."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tvm
from harness import refusal
from tvm import te, tirx

from mlc.log import Record
from mlc.log.exchange import read_jsonl
from schedules.language import parse_trace
from schedules.space import InvalidDecision
from schedules.tvm_json import check_graph, check_index_map

Steps = list[Any]


def add(rows: int = 6, columns: int = 256) -> tirx.PrimFunc:
    a, b = (te.placeholder((rows, columns), "float32", name) for name in "ab")
    return te.create_prim_func([a, b, te.compute((rows, columns), lambda i, j: a[i, j] + b[i, j], "C")])


def steps(*more: list[Any]) -> Steps:
    """A small trace that is allowed, and ``more`` after it."""
    return [[
        ["SampleCategorical", [], [[1, 8, 16], [0.25, 0.5, 0.25]], ["v0"]],
        ["GetSBlock", [], ["C", "main"], ["b1"]],
        ["GetLoops", ["b1"], [], ["l2", "l3"]],
        ["Split", ["l3", "None", "v0"], [True, False], ["l4", "l5"]],
        ["Vectorize", ["l5"], [], []],
        *more,
    ], [[0, 1]]]


def index_map(final: Callable[..., Any]) -> str:
    return str(tvm.ir.save_json(tirx.IndexMap.from_func(final, ndim=2, index_dtype="int32")))


def test_what_spaces_say_is_allowed() -> None:
    assert refusal(add(), json.dumps(steps(["Parallel", ["l2"], [], []]))) == ""


@pytest.mark.parametrize("value", [True, 1, "; assembly", "i8* null", [1, 2], 0.5, None])
@pytest.mark.parametrize("key", [
    "pragma_import_llvm", "pragma_import_c", "pragma_debug_skip_region", "software_pipeline_stage",
    "explicit_read_region",
    "warp_execution", "disable_lower_builtin", "meta_schedule.auto_tensorize", "pragma_unroll", "",
])  # fmt: skip
def test_an_annotation_that_no_space_makes(key: str, value: Any) -> None:
    for place in ("l4", "b1"):
        assert refusal(add(), json.dumps(steps(["Annotate", [place, value], [key], []])))


@pytest.mark.parametrize("instruction", [
    ["UnsafeSetDType", ["b1"], [0, "float64"], []],
    ["UnsafeHideBufferAccess", ["b1"], ["read", [0]], []],
    ["AnnotateBufferAccess", ["b1"], [0, 0, "x"], []],
    ["SetScope", ["b1"], [0, "texture"], []],
    ["SetScope", ["b1"], [0, "local"], []],  # an output
    ["Split", ["l2", 4, 2], [True, True], ["l8", "l9"]],  # without the check of bounds
    ["Split", ["l2", 0, 2], [True, False], ["l8", "l9"]],
    ["Split", ["l2", -1, 2], [True, False], ["l8", "l9"]],
    ["Split", ["l2", "None", 1 << 40], [True, False], ["l8", "l9"]],
    ["Split", ["l2", "None", 2.5], [True, False], ["l8", "l9"]],
    ["Split", ["b1", "None", 2], [True, False], ["l8", "l9"]],
    ["Fuse", ["l7"], [1], ["l8"]],  # not defined
    ["Fuse", ["l2", "l4"], [1], ["l3"]],  # defined already
    ["Fuse", ["l2", "l4"], [1], ["b8"]],
    ["Tensorize", ["l4"], ["dot_4x4_i8i8s32_neon", 1], []],
    ["Tensorize", ["l4"], ["mlc.unknown", 1], []],
    ["Annotate", ["l4", [9, 0, 64]], ["mlc.prefetch"], []],  # there are three parameters
    ["Annotate", ["l4", [1, 0]], ["mlc.prefetch"], []],
    ["Annotate", ["l4", 1 << 20], ["pragma_auto_unroll_max_step"], []],
    ["StorageAlign", ["b1"], [0, 0, 1 << 30, 0], []],
    ["Bind", ["l2"], ["cpu"], []],
    ["GetSBlock", [], ["C", "other"], ["b8"]],
    ["SampleCategorical", [], [[1, 2], [0.5, 0.5]], ["v8"]],  # not decided
    ["TransformLayout", ["b1", index_map(lambda i, j: [j, i])], [0, 1, None, 0], []],  # of an output
    ["TransformLayout", ["b1", index_map(lambda i, j: [j, i])], [0, 1, None, 1], []],
    ["TransformLayout", ["b1", index_map(lambda i, j: [j, i])], [0, 1, 0.0, 0], []],
    ["TransformBlockLayout", ["b1", index_map(lambda i, j: [j // 2])], [], []],
    "Vectorize", [], ["Vectorize", ["l2"]], ["Vectorize", "l2", [], []], ["Vectorize", [["l2"]], [], []], None,
    {"a": 1},
], ids=str)  # fmt: skip
def test_an_instruction_that_no_space_gives(instruction: Any) -> None:
    assert refusal(add(), json.dumps(steps(instruction)))


@pytest.mark.parametrize("decisions", [
    [], [[0, 3]], [[0, -1]], [[0, 1.0]], [[0, True]], [[0, 1], [0, 1]], [[1, 1]], [[0, 1], [2, 1]], [[0]], [0],
    {"0": 1},
    [[0, [1]]], [[0, "1"]], [[[], 1]],
], ids=str)  # fmt: skip
def test_decisions_outside_the_choices(decisions: Any) -> None:
    assert refusal(add(), json.dumps([steps()[0], decisions]))


@pytest.mark.parametrize("text", [
    "", "null", "[]", "[[]]", "{}", "[1, 2]", '"x"', "[" * 100_000, "[[], []] x", '[[["GetLoops"', "[[], null]",
    "[[]," + "1" * 5000 + "]", " " * (1 << 21), "[[], [[NaN, 1]]]",
], ids=lambda text: text[:12])
def test_text_that_is_no_trace(text: str) -> None:
    assert refusal(add(), text)


@pytest.mark.parametrize(("more", "what"), [
    ([["Unroll", ["l4"], [], []]], "statements"),
    ([["Vectorize", ["l4"], [], []]], "vector"),
    ([["Split", ["l2", "None", 1 << 22], [True, False], ["l6", "l7"]]], "iterations"),
])  # fmt: skip
def test_what_grows_too_far(more: list[Any], what: str) -> None:
    assert f"{what}" in refusal(add(8, 1 << 20), json.dumps(steps(*more)))


def test_a_graph_of_objects_is_no_index_map() -> None:
    good = json.loads(index_map(lambda i, j: [j // 16, i, j % 16]))
    check_index_map(json.dumps(good))
    for place, node in enumerate(good["nodes"]):
        for kind in ("ir.IRModule", "tirx.PrimFunc", "ffi.Function", "None", "ffi.Array"):
            if kind == node["type"]:
                continue
            bad = copy.deepcopy(good)
            bad["nodes"][place]["type"] = kind
            with pytest.raises(InvalidDecision, match="index map"):
                check_index_map(json.dumps(bad))
        for name in node.get("data", {}) if isinstance(node.get("data"), dict) else ():
            for target in (place, len(good["nodes"]) + 5, -1, "x", None, [0]):  # a cycle, and none
                bad = copy.deepcopy(good)
                bad["nodes"][place]["data"][name] = target
                with pytest.raises(InvalidDecision, match="index map"):
                    check_index_map(json.dumps(bad))


def test_a_divisor_of_zero_is_refused() -> None:
    text = index_map(lambda i, j: [j // 16, i, j % 16]).replace('"data":16', '"data":0').replace(
        '"data": 16', '"data": 0')
    with pytest.raises(InvalidDecision, match="divisor"):
        check_index_map(text)


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_what_ships_is_allowed(level: str) -> None:
    records = [found for _, found in read_jsonl(f"tuning_logs/{level}/models.jsonl") if isinstance(found, Record)]
    assert len(records) > 100
    for record in records:
        parse_trace(record.trace, 32)


def _square(x: te.Tensor, *index: tirx.Var) -> Any:
    return x(*index) * x(*index)


def squares(count: int, shared: bool = False) -> tirx.PrimFunc:
    """Each block the square of the one before; or one block of as many squares of one expression."""
    a = x = te.placeholder((4, 4), "float32", "a")

    def power(*index: Any) -> Any:
        value = a[index]
        for _ in range(count):
            value = value * value
        return value

    if shared:
        return te.create_prim_func([a, te.compute((4, 4), power, "b0")])
    for number in range(count):
        x = te.compute((4, 4), partial(_square, x), f"b{number}")
    return te.create_prim_func([a, x])


def inlined(count: int, reverse: bool) -> Steps:
    """All but the last block into those that read them; or all but the first into those that they read."""
    kind = "ReverseComputeInline" if reverse else "ComputeInline"
    order = range(count - 1, 0, -1) if reverse else range(count - 1)
    found = []
    for number in order:
        found += [["GetSBlock", [], [f"b{number}", "main"], [f"b{number}"]], [kind, [f"b{number}"], [], []]]
    return [found, []]


@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_inlined_must_not_double_from_block_to_block(reverse: bool) -> None:
    """Of forty blocks there would be 10^12 loads; it is said before one is inlined."""
    assert refusal(squares(8), json.dumps(inlined(8, reverse))) == ""
    assert "must make at most 65536 loads of a block" in refusal(squares(40), json.dumps(inlined(40, reverse)))
    neighbours = inlined(40, reverse)
    first = neighbours[0][0][3][0]
    neighbours[0][2:] = [["GetProducers" if reverse else "GetConsumers", [first], [], ["b90"]],
                         [neighbours[0][1][0], ["b90"], [], []]]
    assert "must make at most 65536 loads of a block" in refusal(squares(40), json.dumps(neighbours))


def test_a_function_whose_parts_stand_in_too_many_places() -> None:
    """A list of few objects may be a tree of many: here a square of a square, each one object that is named twice."""
    graph = json.loads(tvm.ir.save_json(squares(6, shared=True)))
    check_graph(json.dumps(graph))
    nodes = graph["nodes"]
    products = [place for place, node in enumerate(nodes) if node["type"] == "prim.Mul"]
    last = dict(nodes[products[-1]]["data"])
    for _ in range(40):
        last["a"] = last["b"] = len(nodes) - 1 if nodes[-1]["type"] == "prim.Mul" else products[-1]
        nodes.append({"type": "prim.Mul", "data": dict(last)})
    graph["root_index"] = len(nodes) - 1
    with pytest.raises(ValueError, match="it has more than 4194304 parts, each counted where it stands"):
        check_graph(json.dumps(graph))


@pytest.mark.parametrize("factor", [16, 5])
def test_a_reduction_is_factored_by_what_divides_it(factor: int) -> None:
    """Else TVM's ``ComputeAt`` loses the guard of the last round, and reads what is not there."""
    a = te.placeholder((6, 48), "float32", "a")
    k = te.reduce_axis((0, 48), "k")
    total = te.compute((6,), lambda i: te.sum(a[i, k], k), "B")
    func = te.create_prim_func([a, te.compute((6,), lambda i: total[i] * 2.0, "C")])
    trace = [[
        ["GetSBlock", [], ["B", "main"], ["b0"]],
        ["GetLoops", ["b0"], [], ["l1", "l2"]],
        ["Split", ["l2", "None", factor], [True, False], ["l3", "l4"]],
        ["RFactor", ["l4"], [0], ["b5"]],
        ["GetSBlock", [], ["C", "main"], ["b6"]],
        ["GetLoops", ["b6"], [], ["l7"]],
        ["ComputeAt", ["b0", "l7"], [True, -1], []],
        ["ComputeAt", ["b5", "l7"], [True, -1], []],
    ], []]
    said = refusal(func, json.dumps(trace))
    assert said == "" if factor == 16 else said == "a reduction must be factored by what divides it, but B_rf is not"
