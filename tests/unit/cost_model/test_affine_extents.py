"""Index arithmetic against brute force over all iterations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tvm import tirx

from cost_model.affine import Affine, Environment, evaluate

EXTENTS = [5, 4, 6]


def loops() -> tuple[list[tirx.Var], Environment]:
    variables = [tirx.Var(f"i{n}", "int32") for n in range(3)]
    return variables, Environment({v: Affine.loop(n) for n, v in enumerate(variables)}, list(EXTENTS))


CASES = {
    "i*6+k": lambda i, j, k: i * 6 + k,
    "fused // 6": lambda i, j, k: tirx.floordiv(i * 6 + k, 6),
    "fused % 6": lambda i, j, k: tirx.floormod(i * 6 + k, 6),
    "split by 3": lambda i, j, k: tirx.floordiv(k, 3) * 7 + tirx.floormod(k, 3),
    "window": lambda i, j, k: i * 2 + j - 1,
    "constant": lambda i, j, k: tirx.IntImm("int32", 7),
    "clamp": lambda i, j, k: tirx.max(tirx.min(i + j, 6), 0),
}
PYTHON = {
    "i*6+k": lambda i, j, k: i * 6 + k, "fused // 6": lambda i, j, k: (i * 6 + k) // 6,
    "fused % 6": lambda i, j, k: (i * 6 + k) % 6, "split by 3": lambda i, j, k: k // 3 * 7 + k % 3,
    "window": lambda i, j, k: i * 2 + j - 1, "constant": lambda i, j, k: 7,
    "clamp": lambda i, j, k: max(min(i + j, 6), 0),
}


def values(name: str, moving: set[int]) -> np.ndarray:
    ranges = [range(e) if n in moving else [0] for n, e in enumerate(EXTENTS)]
    return np.array([PYTHON[name](*at) for at in product(*ranges)])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("moving", [set(), {0}, {1}, {2}, {0, 2}, {0, 1, 2}])
def test_ranges_bound_what_iterating_finds_and_are_close(name: str, moving: set[int]) -> None:
    (i, j, k), env = loops()
    form = evaluate(CASES[name](i, j, k), env)
    found = values(name, moving)
    bound = form.range_over(moving, EXTENTS)
    assert found.max() - found.min() <= bound + 1e-9
    if name not in ("split by 3", "clamp"):
        assert bound <= found.max() - found.min() + 1e-9
    distinct = len(np.unique(found))
    assert distinct <= form.positions(moving, EXTENTS) + 1e-9


@pytest.mark.parametrize(("name", "steps"), [
    ("i*6+k", (6, 0, 1)), ("fused // 6", (1, 0, 0)), ("fused % 6", (0, 0, 1)), ("window", (2, 1, 0)),
    ("constant", (0, 0, 0)),
])  # fmt: skip
def test_steps_are_differences_of_consecutive_iterations(name: str, steps: tuple[int, ...]) -> None:
    (i, j, k), env = loops()
    form = evaluate(CASES[name](i, j, k), env)
    assert tuple(form.step(n) for n in range(3)) == steps
    origin = PYTHON[name](0, 0, 0)
    assert tuple(PYTHON[name](*np.eye(3, dtype=int)[n]) - origin for n in range(3)) == steps


def test_a_gather_moves_with_its_arguments() -> None:
    (i, j, _), env = loops()
    buffer = tirx.decl_buffer((64,), "int32")
    form = evaluate(tirx.BufferLoad(buffer, [i + j]), env)
    assert form.loops == {0, 1}
