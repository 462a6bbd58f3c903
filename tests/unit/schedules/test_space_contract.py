"""Every registered space keeps the contract; those of CUDA on the cases that name them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from harness import SpaceContract, pytest_generate_tests

from mlc.testing.cuda_cases import CASES
from schedules.cuda import SPACES
from schedules.registry import all_spaces

__all__ = ["pytest_generate_tests"]

for _space in SPACES:
    _cases = tuple(case for case in CASES if case.space == _space.name)
    _name = f"Test{type(_space).__name__}"
    globals()[_name] = type(_name, (SpaceContract,), {"space": _space, "cases": _cases})


def _kept(contract: type[SpaceContract]) -> set[str]:
    own = {contract.space.name} if getattr(contract, "cases", ()) else set()
    return own.union(*map(_kept, contract.__subclasses__())) if contract.__subclasses__() else own


@pytest.mark.parametrize("kind", ["llvm", "cuda"])
def test_every_registered_space_keeps_the_contract(kind: str) -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        import_module(path.stem)
    kept = set().union(*map(_kept, SpaceContract.__subclasses__()))
    missing = {space.name for space in all_spaces(kind)} - kept
    assert not missing, f"a space needs a class that inherits SpaceContract and lists cases, but {missing} have none"
