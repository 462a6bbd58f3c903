"""onnxruntime's ``GatherBlockQuantized``: rows of a table of integers with one scale per block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlc.frontend.onnx_expand import Nodes
from mlc.frontend.onnx_quantised import unpacked, wrong_scale

__all__ = ["gather_block_quantized"]

_FLOAT = 1  # onnx.TensorProto.FLOAT


def _packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of :func:`unpacked`."""
    apart = numbers.astype("uint8").reshape(*numbers.shape[:-1], -1, 8 // bits)
    return np.bitwise_or.reduce(apart << np.arange(0, 8, bits, dtype="uint8"), axis=-1)


@dataclass(frozen=True, eq=False)
class _Table:
    """Numbers from 0 on whose rows, along the first axis, are taken; scales and zero points as the numbers, but along
    the axis ``along`` one for each ``block``. The result's axis of rows is ``axis``."""

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    axis: int
    along: int
    block: int
    bits: int


def gather_block_quantized(nodes: Nodes) -> str:
    """``data, indices, scales, zero_points``: ``(data - zero_points) * scales`` at the indices; zeros where an index is
    none of the table.

    Numbers of fewer than 8 bits stay packed in bytes; of a row that is taken they are taken apart.
    """
    _, indices, _, _ = nodes.inputs(4)
    table, rank = _table(nodes), nodes.rank_of(nodes.node.input[1], "indices")
    rows, *rest = table.numbers.shape
    if table.along == 0:
        place = nodes("Where", nodes("Less", indices, _like(nodes, 0, indices)),
                      nodes("Add", indices, _like(nodes, rows, indices)), indices)
        place = nodes("Div", place, _like(nodes, table.block, indices))
        value = _scaled(nodes, _numbers(nodes, table, rank), table, place, None)
        kept = rest
    else:
        at = rank + table.along - 1
        count, kept = table.scales.shape[table.along], list(rest)
        kept[table.along - 1] = count * table.block
        split = [*kept[: table.along - 1], count, table.block, *kept[table.along :]]
        single = [*kept[: table.along - 1], count, 1, *kept[table.along :]]
        apart = _shaped(nodes, _numbers(nodes, table, rank), rank, split)
        value = _shaped(nodes, _scaled(nodes, apart, table, indices, [0] * rank + single), rank, kept)
        if kept != rest:
            value = str(nodes("Slice", value, *(nodes.constant([n]) for n in (0, rest[table.along - 1], at))))
    known = nodes.constant_of(indices)
    if known is None or np.any((known < -rows) | (known >= rows)):
        inside = nodes("And", nodes("Less", indices, _like(nodes, rows, indices)),
                       nodes("Not", nodes("Less", indices, _like(nodes, -rows, indices))))
        value = str(nodes("Where", _shaped(nodes, inside, rank, [1] * len(rest)), value, nodes.constant(0.0)))
    if table.axis:
        before = range(rank, rank + table.axis)
        value = nodes("Transpose", value, perm=[*before, *range(rank), *range(rank + table.axis, rank + len(rest))])
    return value if table.scales.dtype == np.float32 else nodes.cast(value, table.scales.dtype)


def _table(nodes: Nodes) -> _Table:
    """The table that the node's inputs describe; raises :class:`ModelError` if they are invalid."""
    given = nodes.attributes()
    name, _, scale_name, zero_name = nodes.inputs(4)
    data, scales = nodes.known(name, "data"), nodes.known(scale_name, "scales")
    kind, rank, block, bits = data.dtype.name, data.ndim, int(given.get("block_size", 128)), int(given.get("bits", 4))
    if kind not in ("int4", "uint4", "uint8"):
        raise nodes.refused(f"its data must be int4, uint4 or uint8, got {kind}; quantise the table again")
    if bits not in ((2, 4, 8) if kind == "uint8" else (4,)):
        raise nodes.refused(f"bits must be {'2, 4 or 8' if kind == 'uint8' else 4} for data of {kind}, got {bits}; "
                            "quantise the table again")
    if block < 16 or block & (block - 1):
        raise nodes.refused(f"block_size must be a power of two of at least 16, got {block}; quantise the table again")
    axes = {"gather_axis": 0, "quantize_axis": 1}
    for attribute, default in axes.items():
        axes[attribute] = int(given.get(attribute, default))
        if not -rank <= axes[attribute] < rank:
            raise nodes.refused(f"{attribute} must be from {-rank} to {rank - 1}, got {axes[attribute]}; write the "
                                "model again")
    axis, along = (each % rank for each in axes.values())
    if kind == "uint8" and (axis, along) != (0, max(rank - 1, 1)):
        raise nodes.refused(f"gather_axis must be 0 and quantize_axis the last, {max(rank - 1, 1)}, for data of uint8, "
                            f"got {axis} and {along}; quantise the table again")
    wrong = wrong_scale(scales, positive=False)
    if wrong is not None:
        raise nodes.refused(f"its scales must be finite, got {wrong:g}; quantise the table again")
    least = -8 if kind == "int4" else 0
    numbers = unpacked(data, bits) if kind == "uint8" else data.astype("int8") - least
    count = -(-numbers.shape[along] // block)
    wanted = tuple(count if each == along else extent for each, extent in enumerate(numbers.shape))
    if scales.shape != wanted:
        raise nodes.refused(f"scales must be of {list(wanted)}, one for each block, got {list(scales.shape)}; quantise "
                            "the table again")
    zeros = np.full(wanted, 1 << (bits - 1) if kind == "uint8" else -least)
    if zero_name:
        zeros = nodes.known(zero_name, "zero_points")
        stored = (*wanted[:-1], -(-count * bits // 8)) if kind == "uint8" else wanted
        if zeros.dtype != data.dtype or zeros.shape != stored:
            raise nodes.refused(f"zero_points must be {kind} of {list(stored)}, got {zeros.dtype.name} of "
                                f"{list(zeros.shape)}; quantise the table again")
        zeros = unpacked(zeros, bits)[..., :count] if kind == "uint8" else zeros.astype("int8") - least
    numbers, scales, zeros = (np.moveaxis(array, axis, 0) for array in (numbers, scales, zeros))
    return _Table(numbers, scales, zeros, axis, 0 if axis == along else along + (along < axis), block, bits)


def _numbers(nodes: Nodes, table: _Table, rank: int) -> str:
    """The numbers of the rows as float32, filled up to whole blocks; ``rank`` is that of the indices."""
    bits, (_, *rest) = table.bits if table.numbers.ndim > 1 else 8, table.numbers.shape
    many = [-extent % (8 // bits if axis == len(rest) else 1) for axis, extent in enumerate(rest, 1)]
    if table.along:
        many[table.along - 1] = -rest[table.along - 1] % table.block
    filled = np.pad(table.numbers, [(0, 0), *((0, each) for each in many)]).astype("uint8")
    table_name = nodes.constant(filled if bits == 8 else _packed(filled, bits))
    taken = nodes("Gather", table_name, nodes.node.input[1], axis=0)
    if bits < 8:
        parts = []
        for begin in range(0, 8, bits):  # what is above is shifted out, then what is below
            part = taken
            for amount, way in ((8 - bits - begin, "LEFT"), (8 - bits, "RIGHT")):
                if amount:
                    part = nodes("BitShift", part, nodes.constant(np.array(amount, "uint8")), direction=way)
            parts.append(_shaped(nodes, part, rank, [*filled.shape[1:-1], filled.shape[-1] * bits // 8, 1]))
        taken = _shaped(nodes, nodes("Concat", *parts, axis=-1), rank, filled.shape[1:])
        if many[-1] and table.along != len(rest):
            at = rank + len(rest) - 1
            taken = nodes("Slice", taken, *(nodes.constant([n]) for n in (0, rest[-1], at)))
    return str(nodes("Cast", taken, to=_FLOAT))


def _scaled(nodes: Nodes, numbers: str, table: _Table, place: str, shape: list[int] | None) -> str:
    """``(numbers - zeros) * scales`` with the rows ``place`` of zeros and scales, in that shape if they need one."""
    def rows(array: np.ndarray) -> str:
        taken = nodes("Gather", nodes.constant(np.ascontiguousarray(array)), place, axis=0)
        wide = taken if array.dtype == np.float32 else nodes("Cast", taken, to=_FLOAT)
        return str(wide if shape is None else nodes("Reshape", wide, nodes.constant(shape)))

    zeros = table.zeros
    if zeros.any():
        same = bool((zeros == zeros.flat[0]).all())
        numbers = nodes("Sub", numbers, nodes.constant(float(zeros.flat[0])) if same else rows(zeros.astype("uint8")))
    return str(nodes("Mul", numbers, rows(table.scales)))


def _shaped(nodes: Nodes, value: str, rank: int, rest: list[int] | tuple[int, ...]) -> str:
    """The value with other axes behind the first ``rank``, which may be free."""
    return str(nodes("Reshape", value, nodes.constant([0] * rank + list(rest))))


def _like(nodes: Nodes, number: int, indices: str) -> str:
    return nodes.constant(np.array(number, nodes.dtype_of(indices)))
