"""Constants leave ``main`` and become parameters, and outputs that share memory are known."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, topi

from mlc.artifact.weights import aliased_outputs, lift
from mlc.testing.programs import dense, many_results, program, twins


def _params(mod: tvm.IRModule) -> list[tuple[str, tuple[int, ...]]]:
    return [(str(p.name), tuple(int(d) for d in p.ty.shape.values)) for p in mod["main"].params]


def test_constants_become_parameters_after_the_inputs() -> None:
    lifted, tensors = lift(dense(rows=5, size=24).mod)
    assert _params(lifted) == [("x", (5, 24)), ("weight_0", (24, 24)), ("weight_1", (24,))]
    assert [tuple(t.shape) for t in tensors] == [(24, 24), (24,)]
    assert int(lifted["main"].attrs["num_input"]) == 1
    assert "GenericConst" not in lifted["main"].script(show_meta=False)


def test_a_shared_constant_is_one_parameter() -> None:
    shared = relax.const(np.random.default_rng(0).standard_normal(4, dtype=np.float32))

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        return [builder.emit_te(topi.add, builder.emit_te(topi.multiply, params[0], shared), shared)]

    lifted, tensors = lift(program({"x": ((3, 4), "float32")}, body))
    assert _params(lifted) == [("x", (3, 4)), ("weight_0", (4,))]
    assert len(tensors) == 1


def test_equal_functions_are_called_by_one_name() -> None:
    lifted, tensors = lift(twins().mod, {"plus": "add"})
    assert sorted(v.name_hint for v in lifted.get_global_vars()) == ["add", "main"]
    assert lifted["main"].script().count("R.call_tir(add") == 2
    assert len(tensors) == 2


def test_outputs_that_share_memory_are_flagged() -> None:
    # x itself, a weight, a view of the sum, the sum again, a value of its own
    lifted, _ = lift(many_results().mod)
    assert aliased_outputs(lifted["main"]) == (True, True, False, True, False)


def test_a_view_of_an_input_is_flagged_through_reshapes_and_tuples() -> None:
    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        pair = builder.emit(relax.Tuple([params[0], builder.emit_te(topi.exp, params[0])]))
        first = builder.emit(relax.op.reshape(builder.emit(relax.TupleGetItem(pair, 0)), (2, 6)))
        return [builder.emit(relax.op.reshape(first, (12,))), builder.emit(relax.TupleGetItem(pair, 1))]

    lifted, _ = lift(program({"x": ((3, 4), "float32")}, body))
    assert aliased_outputs(lifted["main"]) == (True, False)
