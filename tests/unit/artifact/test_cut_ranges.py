"""Which parts of a range of sizes get a schedule of their own."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnxruntime
import pytest
import tvm
from tvm import s_tir, te, tirx

import mlc
from mlc.artifact.pieces import Scheduled, bands, in_pieces, octaves
from mlc.graph.kernels.blocked import dense_packed
from mlc.graph.task import Task, normalise
from mlc.shapes import Free, Range
from mlc.target import resolve
from schedules import registry
from schedules.free import SIZES
from schedules.pieces import pieces_of
from schedules.space import first_seed

TARGET = resolve("native", threads=2)


def _product(rows: int | None, usual: int = 128) -> Task:
    n = tirx.Var("n", "int64") if rows is None else rows
    x, w = te.placeholder((n, 64), name="x"), te.placeholder((3, 64, 16), name="w")
    func = te.create_prim_func([x, w, dense_packed(x, w)])
    return Task("dense", normalise(func, {"n": Free("n", Range(1, 512), usual)}), TARGET)


def _seeded(task: Task) -> Scheduled:
    space = registry.find(task.func, TARGET.tvm)
    sch, decisions = first_seed(space, task.func, TARGET.tvm)
    return (space.name, decisions), sch.mod["main"]


@pytest.mark.parametrize(("low", "high", "usual"), [
    (1, 512, 32), (1, 512, 128), (1, 4096, 512), (1, 8, 1), (4, 4096, 64), (3, 3000, 48), (1, 1, 1), (16, 300, 255),
])
def test_bands_are_the_whole_range_in_order(low, high, usual):
    found = list(bands(low, high, usual))
    assert [size for first, last, _ in found for size in range(first, last + 1)] == list(range(low, high + 1))
    assert all(first <= rep <= last for first, last, rep in found)
    assert found[-1][2] == usual
    tiled = list(bands(low, high, usual, least=12))
    assert [size for first, last, _ in tiled for size in range(first, last + 1)] == list(range(low, high + 1))
    assert all(first >= 12 or first == low for first, _, rep in tiled if rep >= 12)


def test_few_rows_are_a_piece_and_the_usual_ones_are_not():
    task = _product(None)
    whole = _seeded(task)
    pieces = pieces_of(in_pieces(task, whole, lambda _task: None, _seeded))
    assert [piece.box for piece in pieces] == [((1, 1),), ((1, 11),)]
    assert pieces_of(in_pieces(task, whole, lambda _task: None, lambda _task: whole)) == []  # the same schedule


def test_one_row_is_a_piece_where_few_rows_have_another_schedule():
    """Of what few rows have, not of what all have: a piece that does what another one does anyway is not made."""
    task = _product(None)
    whole = ("whole", {}), _seeded(task)[1]
    schedules = {(1, 11): "few", (1, 1): "few"}

    def seeded(task: Task) -> Scheduled:
        if SIZES not in task.func.attrs:
            return (schedules[1, 1], {}), whole[1]
        (low, high, _), = task.func.attrs[SIZES]
        return (schedules[int(low), int(high)], {}), whole[1]

    assert [piece.box for piece in pieces_of(in_pieces(task, whole, lambda _task: None, seeded))] == [((1, 11),)]
    schedules[1, 1] = "one"
    cut = pieces_of(in_pieces(task, whole, lambda _task: None, seeded))
    assert [piece.box for piece in cut] == [((1, 1),), ((1, 11),)]


def test_one_text_of_one_token_is_a_piece_of_both_free_sizes():
    b, n = tirx.Var("b", "int64"), tirx.Var("n", "int64")
    x, w = te.placeholder((b, n, 64), name="x"), te.placeholder((3, 64, 16), name="w")
    free = {"b": Free("b", Range(1, 8), 4), "n": Free("n", Range(1, 512), 32)}
    task = Task("dense", normalise(te.create_prim_func([x, w, dense_packed(x, w)]), free), TARGET)
    first, *_ = pieces_of(in_pieces(task, _seeded(task), lambda _task: None, _seeded))
    assert first.box == ((1, 1), (1, 1)) and SIZES not in (first.func.attrs or {})


def test_what_the_log_knows_of_the_usual_sizes_is_a_piece_under_the_key_of_fixed_sizes():
    asked: list[str] = []

    def tuned(task: Task) -> Scheduled | None:
        asked.append(task.key)
        return _seeded(task) if SIZES not in task.func.attrs else None

    task = _product(None)
    pieces = pieces_of(in_pieces(task, _seeded(task), tuned, lambda _task: None))
    assert [piece.box for piece in pieces] == [((128, 128),), ((1, 1),)]
    assert _product(128).key in asked


def _shared(task: Task, axis: int) -> Scheduled:
    """A schedule whose cores share one axis of what an elementwise task writes."""
    sch = s_tir.Schedule(tvm.IRModule({"main": task.func}))
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    sch.parallel(sch.get_loops(block)[axis])
    return ("by hand", {"axis": axis}), sch.mod["main"]


def test_sizes_that_leave_cores_waiting_are_pieces_of_a_more_even_schedule():
    n = tirx.Var("n", "int64")
    x = te.placeholder((n, 8, 64), name="x")
    y = te.compute(x.shape, lambda *i: x(*i) + tirx.const(1.0, "float32"), name="y")
    task = Task("add", normalise(te.create_prim_func([x, y]), {"n": Free("n", Range(1, 8), 4)}), TARGET)
    images, rows = partial(_shared, axis=0), partial(_shared, axis=1)
    cut = in_pieces(task, images(task), lambda _task: None, rows)
    assert [piece.box for piece in pieces_of(cut)] == [((1, 1),), ((3, 3),), ((5, 5),)]
    assert pieces_of(in_pieces(task, images(task), lambda _task: None, images)) == []  # no better by themselves
    alone = pieces_of(in_pieces(task, rows(task), lambda _task: None, images))  # even for every batch
    assert [piece.box for piece in alone] == [((1, 1),)]  # as the space has it for one image


def test_networks_are_right_at_every_batch_where_odd_ones_are_pieces():
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((128, 128, 3, 3)) / 34).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 128, 7, 7]) for name in "xy")
    graph = helper.make_graph([node], "convolution", [x], [y], [numpy_helper.from_array(weight, "w")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    exe, reference = (mlc.compile(proto, log=False, shapes={"x": "1..6,128,7,7"}),
                      onnxruntime.InferenceSession(proto.SerializeToString()))
    for batch in range(1, 7):
        images = rng.standard_normal((batch, 128, 7, 7)).astype(np.float32)
        (expected,) = reference.run(None, {"x": images})
        np.testing.assert_allclose(exe(images)[0], expected, rtol=1e-3, atol=1e-4, err_msg=str(batch))


def test_models_are_right_on_both_sides_of_a_cut():
    from onnx import TensorProto, helper, numpy_helper

    weight = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", n]) for name, n in (("x", 64), ("y", 48)))
    graph = helper.make_graph(nodes, "product", [x], [y], [numpy_helper.from_array(weight, "w")])
    exe = mlc.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), log=False,
                      shapes={"x": "1..4096,64"})
    for n in (1, 2, 3, 4, 5, 63, 64, 65, 4096):
        rows = np.random.default_rng(n).standard_normal((n, 64)).astype(np.float32)
        np.testing.assert_allclose(exe(rows)[0], np.maximum(rows.astype(np.float64) @ weight, 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("ends", "parts"), [
    ((1, 5000, 100), [(1, 8, 4), (9, 64, 32), (65, 512, 100), (513, 4096, 2048), (4097, 5000, 4097)]),
    ((1, 8, 4), [(1, 8, 4)]), ((3, 512, 64), [(3, 8, 4), (9, 64, 64), (65, 512, 256)]),
    ((20, 30, 25), [(20, 30, 25)]),
])
def test_gpus_have_parts_of_powers_of_eight(ends: tuple[int, int, int], parts: list[tuple[int, int, int]]) -> None:
    assert list(octaves(*ends)) == parts
    assert list(octaves(1, 64, 32, [1, 2])) == [(1, 1, 1), (2, 2, 2), (3, 8, 4), (9, 64, 32)]
