"""The schedule that each space gives a function untuned, as TensorIR."""

from __future__ import annotations

import pytest
from golden_files import Golden
from golden_kernels import CPU_TARGETS, CUDA_TARGET, NEEDS, function_of, target_named

from schedules.registry import all_spaces, find
from schedules.space import best_seed

_CASES = [
    (target, space.name)
    for target in (*CPU_TARGETS, CUDA_TARGET) for space in all_spaces("cuda" if target == CUDA_TARGET else "llvm")
    if space.name not in NEEDS
] + [(target, space) for space, target in NEEDS.items()]


@pytest.mark.parametrize(("name", "space"), _CASES, ids=[f"{target}-{space}" for target, space in _CASES])
def test_code(golden: Golden, name: str, space: str) -> None:
    target = target_named(name)
    func = function_of(space, target)
    found = find(func, target.tvm)
    assert found.name == space
    scheduled = best_seed(found, func, target.tvm)
    folder = name.split("=")[-1].replace(":", "_")
    golden(f"code/{folder}/{space}.tir", str(scheduled.mod["main"].script(show_meta=False)))
