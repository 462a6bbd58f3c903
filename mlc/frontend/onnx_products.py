"""Products of onnxruntime's domain ``com.microsoft`` with integer operands or integer weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mlc.frontend.accuracy import allow
from mlc.frontend.onnx_expand import Expand, Nodes
from mlc.frontend.onnx_quantised import unpacked, wrong_scale

__all__ = ["PRODUCTS", "integer_to_float", "scale_of_product"]

_FLOAT = 1  # onnx.TensorProto.FLOAT
#: numbers of the shortest part of a row whose scale is one: shorter ones have more bytes of scales than of codes
_LEAST_BLOCK = 16


def _gemm(nodes: Nodes) -> str:
    """``A, a_scale, a_zero_point, B, b_scale, b_zero_point, C, y_scale, y_zero_point``; ``C`` is of int32 and in steps
    of ``alpha * a_scale * b_scale``. Without ``y_scale`` the result stays float32."""
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = nodes.inputs(9)
    attributes = nodes.attributes("alpha", "transA", "transB")
    column = 0 if attributes.get("transB", 0) else 1
    inputs = [nodes.dequantised(a, a_scale, a_zero), nodes.dequantised(b, b_scale, b_zero, column)]
    if c:
        steps = nodes.product(a_scale, b_scale)
        if attributes.get("alpha", 1.0) != 1.0:
            steps = nodes.product(steps, nodes.constant(float(attributes["alpha"])))
        inputs.append(nodes.dequantised(c, steps, axis=-1))
    result = str(nodes("Gemm", *inputs, **attributes))
    return nodes.quantised(result, y_scale, y_zero, a) if y_scale else result


def scale_of_product(nodes: Nodes, first: str, second: str) -> str:
    """The product of two scales; raises :class:`ModelError` for a constant that is no scale."""
    for constant in map(nodes.constant_of, (first, second)):
        wrong = None if constant is None else wrong_scale(constant)
        if wrong is not None:
            raise nodes.refused(f"its scale must be finite and positive, got {wrong:g}; quantise the model again")
    return nodes.product(first, second)


def integer_to_float(nodes: Nodes, a: str, b: str, scale: str, zeros: tuple[str, str], bias: str) -> str:
    """``(a - zero) @ (b - zero)`` in integers, times the scale, plus the bias."""
    product = nodes("Cast", nodes("MatMulInteger", a, b, *zeros), to=_FLOAT)
    result = str(nodes("Mul", product, scale))
    return str(nodes("Add", result, bias)) if bias else result


def _dynamic_quantize_matmul(nodes: Nodes) -> str:
    """``A, B, b_scale, b_zero_point, bias``; ``A`` is quantised by its own range."""
    a, b, b_scale, b_zero, bias = nodes.inputs(5)
    quantised, a_scale, a_zero = nodes("DynamicQuantizeLinear", a, outputs=3)
    return integer_to_float(nodes, quantised, b, scale_of_product(nodes, a_scale, b_scale), (a_zero, b_zero), bias)


def _matmul_integer_to_float(nodes: Nodes) -> str:
    """``A, B, a_scale, b_scale, a_zero_point, b_zero_point, bias``."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = nodes.inputs(7)
    return integer_to_float(nodes, a, b, scale_of_product(nodes, a_scale, b_scale), (a_zero, b_zero), bias)


def _matmul_nbits(nodes: Nodes) -> str:
    """``A, B, scales, zero_points, g_idx, bias``: ``A @ transpose(dequantised(B)) + bias``.

    ``B`` holds ``N`` rows of ``K`` numbers of ``bits`` bits, in blocks of ``block_size`` that start at a byte and
    have a scale each. A zero point is the middle of the range where it is left out, else packed like ``B``, or a
    floating-point number. The numbers become signed integers about the middle, so that symmetric weights have no
    zero point. ``g_idx`` says which block's scale each of the ``K`` numbers has, as GPTQ in the order of activations
    writes it: those of a block are brought together, and so are the columns of ``A``. ``accuracy_level`` goes with the
    product (:mod:`mlc.frontend.accuracy`).
    """
    a, b, scales, zeros, listed, bias = nodes.inputs(6)
    attributes = nodes.attributes()
    rows, columns, block = (int(attributes.get(name, 0)) for name in ("N", "K", "block_size"))
    bits = int(attributes.get("bits", 4))
    if bits not in (2, 4, 8):
        raise nodes.refused(f"bits must be 2, 4 or 8, got {bits}; quantise the weights again")
    if block < 16 or block & (block - 1):
        raise nodes.refused(f"block_size must be a power of two of at least 16, got {block}; quantise it again")
    _check_sizes(nodes, rows, columns)
    count, middle = -(-columns // block), 1 << (bits - 1)
    owners = _owners(nodes, listed, columns, block)
    packed, steps = nodes.known(b, "B"), nodes.known(scales, "scales")
    narrow = steps.dtype if steps.dtype != np.float32 else None  # a type to store, not to multiply in
    if narrow is not None:
        a, steps = str(nodes("Cast", a, to=_FLOAT)), steps.astype("float32")
    if packed.dtype != np.uint8 or packed.size != rows * count * (block * bits // 8):
        raise nodes.refused(f"B must be uint8 of {[rows, count, block * bits // 8]} for {rows} rows of {columns} "
                            f"numbers of {bits} bits, got {packed.dtype} of {list(packed.shape)}; quantise them again")
    if steps.size != rows * count:
        raise nodes.refused(f"it must have one scale for each of {[rows, count]} blocks, got {list(steps.shape)}; "
                            "quantise the weights again")
    numbers = unpacked(packed.reshape(rows, count, -1), bits).reshape(rows, count * block)[:, :columns]
    steps, offsets = steps.reshape(rows, count), _zero_points(nodes, zeros, (rows, count), bits)
    if owners is not None:
        order = np.argsort(owners, kind="stable")
        begins = 1 + np.flatnonzero(np.diff(owners[order]))
        block = int(np.gcd.reduce(begins)) or columns  # parts of equal length, each of one block
        if block >= _LEAST_BLOCK:
            a = str(nodes("Gather", a, nodes.constant(order), axis=-1))
            numbers, owners = numbers[:, order], owners[order][::block]
        steps, offsets = steps[:, owners], None if offsets is None else offsets[:, owners]
    signed = (numbers.astype("int16") - middle).astype("int8")
    weights = _dequantised(nodes, signed, steps, offsets, block)
    result = str(nodes("MatMul", a, nodes("Transpose", weights, perm=[1, 0])))
    allow(nodes.made[-1], int(attributes.get("accuracy_level", 0)))
    if bias:
        result = str(nodes("Add", result, bias if narrow is None else nodes("Cast", bias, to=_FLOAT)))
    return result if narrow is None else nodes.cast(result, narrow)


def _dequantised(nodes: Nodes, numbers: np.ndarray, steps: np.ndarray, offsets: np.ndarray | None, block: int) -> str:
    """``(numbers - offsets) * steps``, of which each ``block`` of a row has one; numbers here where that is short."""
    wrong = wrong_scale(steps, positive=False)
    if wrong is not None:
        raise nodes.refused(f"its scale must be finite, got {wrong:g}; quantise the weights again")
    if steps.shape == numbers.shape and block < _LEAST_BLOCK:
        moved = numbers.astype("float32") - (0 if offsets is None else offsets.astype("float32"))
        return nodes.constant(moved * steps)
    fractional = {"fractional": 1} if offsets is not None and offsets.dtype == np.float32 else {}
    return nodes.dequantised(nodes.constant(numbers), nodes.constant(steps),
                             "" if offsets is None else nodes.constant(offsets), 1, block_size=block, **fractional)


def _check_sizes(nodes: Nodes, rows: int, columns: int) -> None:
    if rows < 1 or columns < 1:
        raise nodes.refused(f"N and K must be at least 1, got {rows} and {columns}; quantise the weights again")


def _owners(nodes: Nodes, listed: str, columns: int, block: int) -> np.ndarray | None:
    """The block of every column by ``g_idx``, which may go on to the end of the last block; None where it is left out
    or says of all columns their own."""
    if not listed:
        return None
    given, whole = nodes.known(listed, "g_idx"), columns + -columns % block
    if given.shape not in ((columns,), (whole,)):
        raise nodes.refused(f"g_idx must be of {[columns]}, one block's number for each column, got "
                            f"{list(given.shape)}; quantise the weights again")
    owners = given[:columns].astype("int64")
    wrong = owners[(owners < 0) | (owners >= whole // block)]
    if wrong.size:
        raise nodes.refused(f"g_idx must hold numbers of the {whole // block} blocks, got {wrong[0]}; quantise the "
                            "weights again")
    return None if np.array_equal(owners, np.arange(columns) // block) else owners


def _zero_points(nodes: Nodes, zeros: str, shape: tuple[int, int], bits: int) -> np.ndarray | None:
    """Zero points about the middle of the range, one for each block: as int8, or float32 where they are not whole; None
    where they are zero."""
    if not zeros:
        return None
    given, middle = nodes.known(zeros, "zero_points"), 1 << (bits - 1)
    rows, count = shape
    if given.dtype == np.uint8:
        width = -(-count * bits // 8)
        if given.size != rows * width:
            raise nodes.refused(f"zero_points must be of {[rows, width]} bytes for {list(shape)} blocks, got "
                                f"{list(given.shape)}; quantise the weights again")
        numbers = unpacked(given.reshape(rows, width), bits)[:, :count].astype("float64")
    elif given.dtype.kind in "iub":
        raise nodes.refused(f"zero_points must be uint8 or floating-point numbers, got {given.dtype}; quantise the "
                            "weights again")
    elif given.size != rows * count:
        raise nodes.refused(f"zero_points must be of {list(shape)}, one for each block, got {list(given.shape)}; "
                            "quantise the weights again")
    else:
        numbers = given.astype("float64").reshape(shape)
    moved = numbers - middle
    if not moved.any():
        return None
    if not np.isfinite(moved).all():
        raise nodes.refused("zero_points must be finite; quantise the weights again")
    whole = np.array_equal(moved, np.clip(np.rint(moved), -128, 127))
    return moved.astype("int8" if whole else "float32")


#: what the 4 bits of a weight stand for by ``quant_type``: floating-point numbers, and quantiles of normal ones
_BNB4 = tuple(np.array(table, "float32") for table in (
    [sign * number for sign in (1, -1) for number in (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)],
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
     0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0],
))


def _matmul_bnb4(nodes: Nodes) -> str:
    """``A, B, absmax``: ``A @ transpose(W)``, or ``A @ W`` with ``transB`` 0, of weights in one of two tables.

    ``W`` has ``N`` rows of ``K`` numbers, in blocks of ``block_size`` that go on from row to row. ``B`` holds two
    numbers a byte, the first in the high half. Where blocks end with rows, or in parts of them that are long enough,
    the codes stay such; else they become numbers here.
    """
    a, b, largest = nodes.inputs(3)
    attributes = nodes.attributes()
    rows, columns, block, kind = (int(attributes[name]) for name in ("N", "K", "block_size", "quant_type"))
    if kind not in (0, 1):
        raise nodes.refused(f"quant_type must be 0 or 1, got {kind}; quantise the weights again")
    if block < 16 or block & (block - 1):
        raise nodes.refused(f"block_size must be a power of two of at least 16, got {block}; quantise it again")
    _check_sizes(nodes, rows, columns)
    packed, scales, count = nodes.known(b, "B"), nodes.known(largest, "absmax"), rows * columns
    if packed.dtype != np.uint8 or packed.size != -(-count // 2):
        raise nodes.refused(f"B must be uint8 of {[-(-count // 2)]} for {rows} rows of {columns} numbers, got "
                            f"{packed.dtype} of {list(packed.shape)}; quantise the weights again")
    if scales.size != -(-count // block):
        raise nodes.refused(f"absmax must be of {[-(-count // block)]}, one for each block, got {list(scales.shape)}; "
                            "quantise the weights again")
    wrong = wrong_scale(scales, positive=False)
    if wrong is not None:
        raise nodes.refused(f"absmax must be finite, got {wrong:g}; quantise the weights again")
    codes = unpacked(packed.ravel(), 4).reshape(-1, 2)[:, ::-1].ravel()[:count].reshape(rows, columns)
    narrow = scales.dtype if scales.dtype != np.float32 else None  # a type to store, not to multiply in
    steps = scales.astype("float32").ravel()
    turned, common = bool(attributes.get("transB", 1)), math.gcd(block, columns)
    if turned and common >= _LEAST_BLOCK:  # a scale for each part of a row: the codes stay what they are
        each = np.repeat(steps, block // common)[: count // common].reshape(rows, columns // common)
        weights = nodes.dequantised(nodes.constant(codes.astype("uint8")), nodes.constant(each), axis=1,
                                    block_size=common, table=_BNB4[kind].tolist())
        given = nodes("Transpose", weights, perm=[1, 0])
    else:
        matrix = _BNB4[kind][codes] * np.repeat(steps, block)[:count].reshape(rows, columns)
        given = nodes.constant(np.ascontiguousarray(matrix.T if turned else matrix))
    if narrow is not None:
        a = nodes("Cast", a, to=_FLOAT)
    result = str(nodes("MatMul", a, given))
    return result if narrow is None else nodes.cast(result, narrow)


#: operator of ``com.microsoft`` --> what it is made of
PRODUCTS: Mapping[str, Expand] = {
    "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "MatMulBnb4": _matmul_bnb4,
    "MatMulIntegerToFloat": _matmul_integer_to_float,
    "MatMulNBits": _matmul_nbits,
    "QGemm": _gemm,
}
