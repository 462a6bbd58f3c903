"""Products of rows in groups, each with a matrix of its own, against the groups' products one by one in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.errors import ModelError
from mlc.frontend.onnx_grouped import DOMAIN, GROUPED, GROUPED_BITS, define_operators

RNG = np.random.default_rng(0)


def grouped(
    rows: int | str, weights: np.ndarray, constant: bool = True, kind: int = TensorProto.FLOAT,
    ends: int = TensorProto.INT32, groups: int | None = None,
) -> onnx.ModelProto:
    define_operators()
    count, depth, columns = weights.shape
    inputs = [helper.make_tensor_value_info("x", kind, [rows, depth]),
              helper.make_tensor_value_info("ends", ends, [groups or count])]
    if not constant:
        inputs.append(helper.make_tensor_value_info("w", kind, list(weights.shape)))
    graph = helper.make_graph(
        [helper.make_node(GROUPED, ["x", "w", "ends"], ["y"], domain=DOMAIN)], "grouped", inputs,
        [helper.make_tensor_value_info("y", kind, [rows, columns])],
        [numpy_helper.from_array(weights, "w")] if constant else [])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def expected(x: np.ndarray, weights: np.ndarray, ends: np.ndarray) -> np.ndarray:
    made, begin = np.zeros((len(x), weights.shape[2])), 0
    for end, weight in zip(ends, weights, strict=True):
        made[begin:end] = x[begin:end].astype("float64") @ weight.astype("float64")
        begin = end
    return made


def distributions(rows: int, groups: int) -> list[np.ndarray]:
    """Ends of groups: at random, all rows in the last one, in the first one, and some rows in none."""
    def ends(owner: np.ndarray) -> np.ndarray:
        return np.cumsum(np.bincount(owner, minlength=groups + 1)[:groups])

    return [ends(RNG.integers(0, groups, rows)), ends(np.full(rows, groups - 1)), ends(np.zeros(rows, int)),
            ends(RNG.integers(0, groups + 1, rows))]


def check(exe: mlc.Executable, rows: int, weights: np.ndarray, constant: bool = True, dtype: str = "int32") -> None:
    given = {} if constant else {"w": weights}
    for ends in distributions(rows, len(weights)):
        x = RNG.standard_normal((rows, weights.shape[1])).astype(weights.dtype)
        (got,) = exe(x=x, ends=ends.astype(dtype), **given)
        np.testing.assert_allclose(got, expected(x, weights, ends), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("error::UserWarning")  # how it is told that the first schedule of a function fails
@pytest.mark.parametrize(("rows", "shape", "constant", "dtype"), [
    (28, (4, 32, 80), True, "int32"), (5, (8, 16, 24), False, "int64"), (1, (3, 8, 17), True, "int64"),
    (40, (1, 33, 20), False, "int32"),
], ids=str)
def test_each_row_times_the_matrix_of_its_group(
    rows: int, shape: tuple[int, ...], constant: bool, dtype: str
) -> None:
    weights = RNG.standard_normal(shape, dtype="float32")
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    check(mlc.compile(grouped(rows, weights, constant, ends=kind), log=False), rows, weights, constant, dtype)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("constant", [True, False])
def test_a_free_number_of_rows(constant: bool) -> None:
    weights = RNG.standard_normal((6, 16, 48), dtype="float32")
    exe = mlc.compile(grouped("rows", weights, constant), log=False, shapes={"x": "1..64,16"})
    for rows in (1, 2, 13, 64):
        check(exe, rows, weights, constant)


def test_the_products_are_scheduled_as_contractions() -> None:
    """In a tile of registers: not by the space of last resort."""
    weights = RNG.standard_normal((4, 32, 80), dtype="float32")
    exe = mlc.compile(grouped(28, weights), log=False)
    spaces = [each["space"] for each in exe.metadata["functions"] if "grouped_mat_mul" in each["name"]]
    assert spaces == ["cpu.contraction"]


def test_sums_of_halves_are_in_float32() -> None:
    weights = RNG.standard_normal((3, 64, 16)).astype("float16")
    exe = mlc.compile(grouped(20, weights, kind=TensorProto.FLOAT16), log=False)
    x, ends = RNG.standard_normal((20, 64)).astype("float16"), np.array([4, 4, 17], "int32")
    (got,) = exe(x=x, ends=ends)
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, expected(x, weights, ends), rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("error::UserWarning")
def test_what_follows_on_bfloat16_is_fused_and_scheduled() -> None:
    weights = RNG.standard_normal((3, 7, 16)).astype(ml_dtypes.bfloat16)
    model = grouped(12, weights, kind=TensorProto.BFLOAT16)
    model.graph.node[0].output[0] = "product"
    model.graph.node.append(helper.make_node("Relu", ["product"], ["y"]))
    x, ends = RNG.standard_normal((12, 7)).astype(ml_dtypes.bfloat16), np.array([4, 4, 10], "int32")
    (got,) = mlc.compile(model, log=False)(x=x, ends=ends)
    np.testing.assert_allclose(got.astype("float64"), np.maximum(expected(x, weights, ends), 0), rtol=1e-2, atol=1e-2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ends", [[9, -5, 3], [100, 2, 10**9], [-1, -1, -1]], ids=str)
def test_ends_in_no_order_read_nothing_but_what_there_is(ends: list[int]) -> None:
    """The result is that of no groups, but it is one, of the rows and matrices there are."""
    weights = RNG.standard_normal((3, 8, 16), dtype="float32")
    exe = mlc.compile(grouped(12, weights), log=False)
    x = RNG.standard_normal((12, 8), dtype="float32")
    (got,) = exe(x=x, ends=np.array(ends, "int32"))
    each = np.einsum("rk,ekn->ern", x, weights)
    possible = np.concatenate([each.reshape(-1, 16), np.zeros((1, 16), "float32")])
    for row in got:
        assert np.isclose(possible, row, rtol=1e-4, atol=1e-4).all(axis=1).any()


def test_ends_of_other_groups_are_refused_in_one_line() -> None:
    weights = RNG.standard_normal((3, 8, 16), dtype="float32")
    with pytest.raises(ModelError, match=r"rows alone may be free, got \[12, 8\], \[3, 8, 16\], \[4\]") as error:
        mlc.compile(grouped(12, weights, groups=4), log=False)
    assert "\n" not in str(error.value)


def of_bits(
    rows: int | str, bits: int, shape: tuple[int, int, int], blocks: int, zeros: bool,
) -> tuple[onnx.ModelProto, np.ndarray]:
    """A product with integers at both ends of their range, and the numbers that they stand for."""
    define_operators()
    count, depth, columns = shape
    integers = RNG.choice(np.array([0, 1, (1 << bits) - 1], "uint8"), shape)
    constants = {"w": integers, "s": RNG.uniform(0.5, 1.5, (count, blocks, columns)).astype("float32")}
    centres = np.full((count, blocks, columns), 1 << (bits - 1))
    if zeros:
        centres = RNG.choice([0, 1, (1 << bits) - 1], (count, blocks, columns))
        constants["z"] = centres.astype("uint8")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, depth]),
              helper.make_tensor_value_info("ends", TensorProto.INT32, [count])]
    graph = helper.make_graph(
        [helper.make_node(GROUPED_BITS, ["x", "w", "ends", "s", *(["z"] if zeros else [])], ["y"], domain=DOMAIN,
                          bits=bits)],
        "grouped", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, columns])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    centres, scales = (np.repeat(each, depth // blocks, 1) for each in (centres, constants["s"].astype("float64")))
    weights = (integers.astype("float64") - centres) * scales
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), weights


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("rows", "bits", "shape", "blocks", "zeros"), [
    (28, 4, (4, 64, 80), 2, True), ("rows", 2, (3, 32, 17), 1, False), (1, 8, (3, 24, 40), 3, True),
], ids=str)
def test_integers_of_few_bits(
    rows: int | str, bits: int, shape: tuple[int, int, int], blocks: int, zeros: bool
) -> None:
    """They stay such until they are in a tile's registers."""
    model, weights = of_bits(rows, bits, shape, blocks, zeros)
    free = isinstance(rows, str)
    exe = mlc.compile(model, log=False, **({"shapes": {"x": f"1..64,{shape[1]}"}} if free else {}))
    for count in (1, 13) if free else (rows,):
        for ends in distributions(count, len(weights)):
            x = RNG.standard_normal((count, weights.shape[1])).astype("float32")
            wanted = expected(x, weights, ends)
            np.testing.assert_allclose(exe(x=x, ends=ends.astype("int32"))[0], wanted, rtol=0, atol=1e-6 * (
                1 + np.abs(x).sum(axis=1).max() * np.abs(weights).max()))
    taken = {each["dtype"]: int(np.prod(each["shape"])) for each in exe.metadata["weights"] if len(each["shape"]) > 3}
    columns = -(-shape[2] // 16) * 16
    assert taken.pop("uint8") <= len(weights) * columns * (shape[1] * bits // 8 + zeros * blocks)
    assert taken == {"float32": len(weights) * blocks * columns}, "scales"
    spaces = [each["space"] for each in exe.metadata["functions"] if "grouped_mat_mul" in each["name"]]
    assert spaces == ["cpu.contraction"]


def test_integers_that_are_no_whole_bytes_are_refused_in_one_line() -> None:
    model, _ = of_bits(4, 4, (3, 9, 16), 3, False)
    with pytest.raises(ModelError, match="whole bytes of 2, 4 or 8 bits, got 3 integers of 4") as error:
        mlc.compile(model, log=False)
    assert "\n" not in str(error.value)
