"""The shape rule for symbolic sizes, and what operands that do not fit are told."""

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlc.operators import OPERATORS, Requirements, ShapeError, infer
from mlc.operators.arithmetic import REAL
from mlc.operators.evaluate import evaluate
from mlc.operators.index import Poly

sys.path.insert(0, str(Path(__file__).parent))
from cases import MAKERS


@pytest.mark.parametrize("op", sorted(name for name in OPERATORS if OPERATORS[name].arity))
def test_symbolic_shapes_are_those_of_the_values(op: str) -> None:
    """Every size of an input but the literal ones becomes a symbol; attributes stay, as they do in a model."""
    rng = np.random.default_rng(zlib.crc32(op.encode()) + 2)
    for _ in range(10):
        case = MAKERS[op](rng)
        (found,) = evaluate(op, case.inputs(REAL, rng), case.attributes)
        if op in ("reshape", "enlarge", "slice"):  # their attributes would contradict arbitrary sizes
            (shape,) = infer(op, case.shapes, case.attributes)
            assert tuple(size.constant for size in shape) == found.shape
            continue
        values: dict[str, int] = {}
        shapes = []
        for place, sizes in enumerate(case.shapes):
            names = [f"s{place}_{axis}" for axis in range(len(sizes))]
            values.update(zip(names, sizes, strict=True))
            shapes.append([1 if size == 1 else Poly.symbol(n) for n, size in zip(names, sizes, strict=True)])
        require = Requirements()
        (shape,) = infer(op, shapes, case.attributes, require)
        assert tuple(size.evaluate(values) for size in shape) == found.shape, case
        for condition, sentence in require.conditions:
            assert condition.evaluate(values), sentence


@pytest.mark.parametrize(
    ("op", "shapes", "attributes", "message"),
    [
        ("matmul", [(2, 3), (4, 5)], {}, "matmul needs equal inner sizes (and batches), but got [2, 3] and [4, 5]"),
        ("matmul", [(2, 3), (1, 3, 5)], {}, "matmul takes two operands of one rank, 2 or more, but got [2, 3] and "
                                            "[1, 3, 5]"),
        ("conv2d", [(1, 8, 7, 7), (4, 3, 3, 3)], {}, "conv2d needs 3 filter channels in 1 groups to make the input's 8 "
                                                     "channels"),
        ("conv2d", [(1, 4, 7, 7), (3, 2, 3, 3)], {"groups": 2}, "conv2d needs 2 groups to divide 3 output channels"),
        ("conv2d", [(1, 4, 2, 7), (3, 4, 3, 3)], {}, "conv2d has a window of 3 elements, but its axis has 2"),
        ("conv2d", [(1, 4, 7, 7), (3, 4, 3, 3)], {"padding": "full"}, 'padding is "valid", "same" or (top, left, '
                                                                      'bottom, right), but got "full"'),
        ("max_pool2d", [(1, 4, 7, 7)], {"kernel": (2, 2), "padding": (2, 0, 0, 0)},
         "max_pool2d needs paddings smaller than its window, but got 2 for a window of 2"),
        ("add", [(2, 3), (2, 4)], {}, "add needs equal sizes or ones, but got [2, 3] and [2, 4]"),
        ("add", [(2, 3), (3,)], {}, "add needs operands of equal rank or one of rank 0, but got [2, 3] and [3]"),
        ("concat", [(2, 3), (3, 3)], {"axis": 1}, "concat on axis 1 needs equal other sizes, but got [2, 3] and "
                                                  "[3, 3]"),
        ("concat", [(2, 3), (2, 3)], {"axis": 2}, "concat needs an axis from -2 to 1 for [2, 3], but got 2"),
        ("slice", [(3,)], {"axis": 0, "begin": 2, "end": 4}, "slice needs 0 <= begin < end <= 3, but got 2 and 4"),
        ("reshape", [(2, 3)], {"shape": (4,)}, "reshape keeps the number of elements, but [2, 3] has 6 and [4] has 4"),
        ("expand", [(1, 3)], {"shape": (4, 4)}, "expand needs the sizes of [1, 3] where they are not 1, but got [4, "
                                                "4]"),
        ("expand", [(3,)], {"shape": (4, 3)}, "expand needs one size for each axis of [3], but got [4, 3]"),
        ("transpose", [(2, 3)], {"perm": (0, 0)}, "transpose needs a permutation of the 2 axes of [2, 3], but got "
                                                  "(0, 0)"),
        ("sum", [(2, 3)], {"axes": ()}, "sum needs distinct axes of [2, 3], at least one, but got ()"),
        ("relu", [(2,), (2,)], {}, "relu takes 1 inputs, but got 2"),
        ("relu", [(2,)], {"slope": 1}, "relu has the attributes [], but got ['slope']"),
        ("transpose", [(2, 3)], {}, "transpose needs the attributes ['perm']"),
    ],
)
def test_operands_that_do_not_fit(op: str, shapes: Any, attributes: Any, message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        infer(op, shapes, attributes)
    assert str(caught.value) == message
    with pytest.raises(ShapeError) as caught:
        evaluate(op, [np.zeros(shape) for shape in shapes], attributes)
    assert str(caught.value) == message


def test_an_unknown_operator() -> None:
    with pytest.raises(ShapeError, match="no operator is named matmull; there are add, "):
        infer("matmull", [(2, 2), (2, 2)], {})
