"""What an operator's call costs is known where tensor functions are read, which know TVM's intrinsics and no table."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import Call

from cost_model.nests import _SPECIAL
from mlc.operators import OPERATORS
from schedules.analysis import expensive_calls, op_name, walk

#: functions of the table that lower to a call, as all do but relu
CALLED = [each for each in OPERATORS.values() if each.real is not None and each.name != "relu"]


def lowered(name: str) -> tirx.PrimFunc:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.normalize(relax.Call(tvm.ir.Op.get(f"relax.{name}"), [x])))
    mod = relax.transform.LegalizeOps()(builder.get())
    [func] = (func for _, func in mod.functions_items() if isinstance(func, tirx.PrimFunc))
    return func


@pytest.mark.parametrize("operator", CALLED, ids=lambda each: each.name)
def test_calls_are_known_to_be_slow(operator: object) -> None:
    func = lowered(operator.relax.name)  # type: ignore[attr-defined]
    called: list[str] = []
    walk(func.body, (Call, lambda node: called.append(op_name(node))))
    assert expensive_calls(func.body) == 1
    assert [name for name in called if name in _SPECIAL]


def test_relu_is_cheap() -> None:
    assert expensive_calls(lowered("nn.relu").body) == 0
