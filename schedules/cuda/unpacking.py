"""Packed integers as floats, by a mask and a multiply-add, in a kernel's code.

The bits of an integer, put below the exponent of a power of two, are a float that is larger than that power by the
integer, or by a power of two times it; a multiply-add takes both away, and a zero point with them. Conversions of
integers would take four times as long as these (CUDA C++ Programming Guide, "Throughput of Native Arithmetic
Instructions").
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx

__all__ = ["pair_of", "twice", "weight_of"]


class _Half:
    """A type of 16-bit floats: what PTX and C++ call it, the bits of its mantissa, and the number whose last bit is
    1."""

    def __init__(self, ptx: str, convert: str, mantissa: int) -> None:
        self.ptx, self.convert, self.mantissa = ptx, convert, mantissa
        self.base = float(1 << mantissa)

    def twice(self, value: float) -> int:
        """The bits of two equal numbers that the type holds."""
        bits = np.float32(value).view(np.uint32)
        half = np.float16(value).view(np.uint16) if self.ptx == "f16" else np.uint16(bits >> 16)
        return int(half) * 0x10001


_HALVES = {"float16": _Half("f16", "half held = __float2half_rn(value)", 10),
           "bfloat16": _Half("bf16", "nv_bfloat16 held = __float2bfloat16_rn(value)", 7)}

_TWICE = """
__forceinline__ __device__ unsigned int mlc_twice_{ptx}(float value) {{
  {convert};
  unsigned int bits = *(unsigned short*)&held;
  return bits | bits << 16;
}}
"""
_MULTIPLY_ADD = """
__forceinline__ __device__ unsigned int mlc_multiply_add_{ptx}(unsigned int a, unsigned int b, unsigned int c) {{
  unsigned int d;
  asm("fma.rn.{ptx}x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}}
"""
_WEIGHT = """
__forceinline__ __device__ float mlc_integer_{name}(unsigned int word) {{
  unsigned int bits = (word >> {shift} & {mask}u) | 0x4b000000u;
  return *(float*)&bits * {factor!r}f - {base!r}f;
}}
"""


def _called(name: str, source: str, result: str, *arguments: Any) -> tirx.Expr:
    from tvm.backend.cuda.op import cuda_func_call

    return cuda_func_call(name, *arguments, source_code=source, return_type=result)


def _number(value: int) -> tirx.Expr:
    return tirx.const(value, "uint32")


def twice(value: Any, dtype: str) -> tirx.Expr:
    """Two equal 16-bit floats in a register."""
    half = _HALVES[dtype]
    return _called(f"mlc_twice_{half.ptx}", _TWICE.format(ptx=half.ptx, convert=half.convert), "uint32",
                   tirx.Cast("float32", value) if str(value.ty.dtype) != "float32" else value)


def _multiply_add(half: _Half, a: Any, b: Any, c: Any) -> tirx.Expr:
    a, b, c = (_number(half.twice(each)) if isinstance(each, float) else each for each in (a, b, c))
    return _called(f"mlc_multiply_add_{half.ptx}", _MULTIPLY_ADD.format(ptx=half.ptx), "uint32", a, b, c)


def pair_of(word: Any, place: int, bits: int, dtype: str, zero: Any | None) -> tirx.Expr:
    """A word's pair of integers at a ``place``, which begin ``place * bits`` bits from either half's end, less a zero
    point, as 16-bit floats; exact where the zero point is an integer.

    ``zero`` are two equal numbers in a register; left out, the middle of the integers' range.
    """
    half = _HALVES[dtype]
    middle = float(1 << (bits - 1))
    if bits > half.mantissa:
        return _in_two(half, word, place, zero)
    each = half.mantissa // bits  # places that lie in a mantissa
    shift, at = place // each * each * bits, place % each * bits
    masked = _masked(half, word, shift, ((1 << bits) - 1) << at)
    base = half.base / (1 << at)
    if zero is None:
        return _multiply_add(half, masked, 1.0 / (1 << at), -(base + middle))
    integer = _multiply_add(half, masked, 1.0 / (1 << at), -base)
    return _multiply_add(half, zero, -1.0, integer)


def _masked(half: _Half, word: Any, shift: int, mask: int) -> tirx.Expr:
    moved = word >> _number(shift) if shift else word
    return (moved & _number(mask * 0x10001)) | _number(half.twice(half.base))


def _in_two(half: _Half, word: Any, place: int, zero: Any | None) -> tirx.Expr:
    """Of integers of 8 bits where a mantissa has fewer: the upper and the lower four of each."""
    low, high = (_multiply_add(half, _masked(half, word, 8 * place + 4 * part, 15), 1.0, -half.base)
                 for part in range(2))
    if zero is None:
        return _multiply_add(half, _multiply_add(half, high, 16.0, -128.0), 1.0, low)
    return _multiply_add(half, zero, -1.0, _multiply_add(half, high, 16.0, low))


def weight_of(word: Any, bit: int, bits: int, zero: Any | None) -> tirx.Expr:
    """The integer that begins at a ``bit`` of a word, less a zero point, as float32; exact where the zero point is an
    integer. Without one, the middle of the integers' range is taken off."""
    shift, at = (16, bit - 16) if bit >= 16 else (0, bit)
    mask = ((1 << bits) - 1) << at
    base = 2.0 ** (23 - at) + (float(1 << (bits - 1)) if zero is None else 0.0)
    name = f"{bits}_{bit}" if zero is None else f"{bits}_{bit}_zero"
    source = _WEIGHT.format(name=name, shift=shift, mask=mask, factor=2.0**-at, base=base)
    integer = _called(f"mlc_integer_{name}", source, "float32", word)
    return integer if zero is None else integer - zero
