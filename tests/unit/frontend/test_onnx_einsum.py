"""Einstein sums of two tensors are matrix products, where they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from tvm import relax

from mlc.frontend import load_model
from mlc.graph.ir.rewrite import bindings, op_name


def _model(equation: str, shapes: Sequence[tuple[int, ...]], kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    result = np.einsum(equation, *map(np.zeros, shapes)).shape
    names = [f"x{i}" for i in range(len(shapes))]
    graph = helper.make_graph(
        [helper.make_node("Einsum", names, ["y"], equation=equation)], "einsum",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in zip(names, shapes, strict=True)],
        [helper.make_tensor_value_info("y", kind, result)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _calls(model: onnx.ModelProto) -> list[str]:
    values = (b.value for b in bindings(load_model(model).mod["main"]))
    return [op_name(value).removeprefix("relax.") for value in values if isinstance(value, relax.Call)]


@pytest.mark.parametrize("equation, shapes, calls", [
    ("bhlk,bhtk->bhlt", [(2, 3, 5, 4), (2, 3, 6, 4)], ["permute_dims", "matmul"]),
    ("bhlt,bhtv->bhlv", [(2, 3, 5, 4), (2, 3, 4, 6)], ["matmul"]),
    ("ij,jk", [(3, 4), (4, 5)], ["matmul"]),
    ("kj,ki", [(3, 4), (3, 5)], ["permute_dims", "matmul", "permute_dims"]),
    ("bqhd,bkhd->bhqk", [(2, 5, 3, 4), (2, 6, 3, 4)], ["permute_dims", "permute_dims", "matmul"]),
    ("...ij,...jk->...ik", [(2, 3, 4, 5), (2, 3, 5, 6)], ["matmul"]),
    ("b...d,...de->b...e", [(4, 2, 3), (2, 3, 5)], ["permute_dims", "matmul", "permute_dims"]),
    ("abcd,cde->abe", [(2, 3, 4, 5), (4, 5, 6)], ["reshape", "reshape", "matmul", "reshape"]),
    ("ij,j->i", [(3, 4), (4,)], ["reshape", "matmul", "reshape"]),
    ("i , i ->", [(5,), (5,)], ["reshape", "reshape", "matmul", "reshape"]),
    ("ab,ab->", [(5, 3), (5, 3)], ["reshape", "reshape", "matmul", "reshape"]),
    ("bcij,cd->bdij", [(2, 3, 4, 5), (3, 6)],
     ["permute_dims", "reshape", "matmul", "reshape", "permute_dims"]),
])
def test_products(equation: str, shapes: list[tuple[int, ...]], calls: list[str]) -> None:
    model = _model(equation, shapes)
    assert _calls(model) == calls
    _assert_right(model, equation, shapes)


@pytest.mark.parametrize("equation, shapes", [
    ("ii,ij->j", [(4, 4), (4, 5)]), ("i,j->ij", [(4,), (5,)]), ("ij,kl->il", [(4, 2), (3, 5)]),
    ("ij,ij->ij", [(4, 2), (4, 2)]), ("ij,jk,kl->il", [(4, 2), (2, 3), (3, 5)]), ("ij->ji", [(4, 2)]),
    ("ijl,jk->ik", [(4, 2, 3), (2, 5)]),
])
def test_other_sums_are_computed_as_they_are(equation: str, shapes: list[tuple[int, ...]]) -> None:
    assert "matmul" not in _calls(_model(equation, shapes))


def test_whole_numbers_are_no_matter_of_products() -> None:
    assert "matmul" not in _calls(_model("ij,jk->ik", [(3, 4), (4, 5)], TensorProto.INT32))


def _assert_right(model: onnx.ModelProto, equation: str, shapes: Sequence[tuple[int, ...]]) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    expected = np.einsum(equation, *(array.astype("float64") for array in arrays))
    machine = relax.VirtualMachine(tvm.compile(load_model(model).mod, target="llvm"), tvm.cpu())
    result = machine["main"](*map(tvm.runtime.tensor, arrays))
    actual = (result if isinstance(result, tvm.runtime.Tensor) else result[0]).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
