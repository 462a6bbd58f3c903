"""Functions with a schedule for each part of a range: calls go to the first part that they are in."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from harness import TARGET
from tvm import te, tirx

from mlc.graph.task import normalise
from mlc.shapes import Free, Range
from schedules.free import SIZES, variables
from schedules.lowering import PIPELINE
from schedules.pieces import Box, Piece, boxed, expanded, pieces_of, with_pieces

FREE = {"n": Free("n", Range(1, 40), 8), "k": Free("k", Range(2, 9), 4)}


def _scaled(factor: float, *, sizes: bool = False) -> tirx.PrimFunc:
    """``y = factor * x`` of ``[n, k]``, upside down; with ``sizes``, ``n`` and ``k`` are parameters too."""
    n, k = tirx.Var("n", "int64"), tirx.Var("k", "int64")
    x = te.placeholder((n, k), name="x")
    y = te.compute((n, k), lambda i, j: x[n - 1 - i, j] * tirx.const(factor, "float32"), name="y")
    return normalise(te.create_prim_func([x, n, y, k] if sizes else [x, y]), FREE)


def _run(func: tirx.PrimFunc, n: int, k: int, sizes: bool = False) -> np.ndarray:
    library = tvm.compile(tvm.IRModule({"main": func}), target=TARGET, tir_pipeline=PIPELINE)
    x, y = (tvm.runtime.tensor(np.full((n, k), value, np.float32)) for value in (1.0, np.nan))
    library["main"](*((x, n, y, k) if sizes else (x, y)))
    return y.numpy()


@pytest.mark.parametrize("sizes", [False, True])
def test_calls_go_to_the_first_piece_that_their_sizes_are_in(sizes: bool) -> None:
    boxes: list[Box] = [((8, 8), (4, 4)), ((1, 2), (2, 9)), ((1, 20), (3, 3)), ((8, 30), (4, 6))]
    whole = _scaled(9.0, sizes=sizes)
    func = with_pieces(whole, [
        Piece(box, boxed(_scaled(float(number), sizes=sizes), box, [low for low, _ in box]))
        for number, box in enumerate(boxes, 1)
    ])
    library = tvm.compile(tvm.IRModule({"main": func}), target=TARGET, tir_pipeline=PIPELINE)
    for n in (1, 2, 3, 7, 8, 9, 20, 21, 30, 31, 40):
        for k in (2, 3, 4, 6, 7, 9):
            inside = (i for i, box in enumerate(boxes, 1)
                      if all(low <= size <= high for (low, high), size in zip(box, (n, k), strict=True)))
            x, y = (tvm.runtime.tensor(np.full((n, k), value, np.float32)) for value in (1.0, np.nan))
            library["main"](*((x, n, y, k) if sizes else (x, y)))
            np.testing.assert_array_equal(y.numpy(), np.float32(next(inside, 9)), err_msg=f"{n} x {k}")


def test_a_box_narrows_ranges_and_turns_single_sizes_into_numbers() -> None:
    part = boxed(_scaled(2.0, sizes=True), ((8, 8), (2, 5)), [8, 3])
    assert [list(map(int, each)) for each in part.attrs[SIZES]] == [[2, 5, 3]]
    assert [str(var.name) for var in variables(part)] == ["k"]
    assert len(part.params) == 3 and int(part.params[0].shape[0]) == 8
    fixed = boxed(_scaled(2.0), ((8, 8), (4, 4)), [8, 4])
    assert SIZES not in fixed.attrs and not variables(fixed)
    np.testing.assert_array_equal(_run(fixed, 8, 4), 2.0)


def test_a_function_without_pieces_stays_as_it_is() -> None:
    func = _scaled(3.0)
    assert with_pieces(func, []) is func
    assert pieces_of(func) == []


def _rows(factor: float, low: int, high: int) -> tirx.PrimFunc:
    n = tirx.Var("n", "int64")
    x = te.placeholder((n, 4), name="x")
    y = te.compute((n, 4), lambda i, j: x[i, j] * tirx.const(factor, "float32"), name="y")
    return normalise(te.create_prim_func([x, y]), {"n": Free("n", Range(low, high), high)})


@pytest.mark.parametrize(("boxes", "least"), [
    ([((1, 1),), ((2, 11),)], 12), ([((1, 11),), ((1, 1),)], 12), ([((3, 11),)], 1), ([((1, 1),), ((5, 7),)], 2),
])
def test_what_no_piece_holds_is_all_that_the_rest_is_lowered_for(boxes: list[Box], least: int) -> None:
    """A register tile of a function that is never called with fewer rows need not test them."""
    whole = _rows(9.0, 1, 40)
    func = with_pieces(whole, [Piece(box, boxed(_rows(float(i), 1, 40), box, [box[0][0]]))
                               for i, box in enumerate(boxes, 1)])
    mod = expanded(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    rest = next(each for var, each in mod.functions_items() if var.name_hint == f"main__{len(boxes)}")
    assert [list(map(int, each)) for each in rest.attrs[SIZES]] == [[least, 40, 40]]
    for n in (1, 2, 4, 6, 11, 12, 40):
        inside = next((i for i, ((low, high),) in enumerate(boxes, 1) if low <= n <= high), 9)
        np.testing.assert_array_equal(_run(func, n, 4), np.float32(inside))


def test_a_piece_for_all_sizes_serves_what_no_other_holds() -> None:
    boxes: list[Box] = [((1, 3),), ((1, 40),)]
    pieces = [Piece(box, boxed(_rows(float(i), 1, 40), box, [2])) for i, box in enumerate(boxes, 1)]
    func = with_pieces(_rows(9.0, 1, 40), pieces)
    mod = expanded(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    assert sorted(var.name_hint for var in mod.functions) == ["main", "main__0", "main__1"]
    for n, wanted in ((1, 1), (3, 1), (4, 2), (40, 2)):
        np.testing.assert_array_equal(_run(func, n, 4), np.float32(wanted))
