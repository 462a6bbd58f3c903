"""Transcendental functions as vectorisable arithmetic.

LLVM turns a vector ``exp`` into one library call per lane, which makes softmax or GELU ten times slower than the
memory they touch. :func:`expand_math` replaces such calls on ``float32`` by polynomials and bit operations, before or
after scheduling. Largest relative errors over the whole range, measured against float64 (``tests``): ``exp``, ``log``
and their bases 2 and 10: 3e-7; ``tanh``, ``sigmoid``, ``erf``: 5e-7. Infinities, NaN, zeros and denormal numbers come
out as the library's. The coefficients are minimax fits (Lawson's iteration) in double precision, rounded.

Other types and functions keep their library calls.

Maxima and minima of two floating-point numbers of any type, and so every clip and ReLU, are NaN where one of the
numbers is, as they are in ONNX and numpy and not in an instruction. Those of many numbers (a pool, a reduction) may
lose a NaN among numbers, as they do in onnxruntime: to keep it takes them 1.5 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad

from schedules.analysis import op_name, walk

__all__ = ["EXPANDED", "expand_math"]

#: exp(r) = 1 + r + r^2 P(r) on |r| <= log(2)/2; relative error 3e-9
_EXP = (0.4999999403953552, 0.1666652113199234, 0.04166838899254799, 0.00836874544620514, 0.0013814540579915047)
#: log(1 + f) = f - f^2/2 + f^3 P(f) on [sqrt(1/2) - 1, sqrt(2) - 1]; relative error 8e-10
_LOG = (
    0.3333331346511841, -0.25000008940696716, 0.2000211924314499, -0.1666799634695053, 0.14219552278518677,
    -0.1240558922290802, 0.11888162046670914, -0.11675652116537094, 0.06746640801429749,
)
#: erf(x) = x P(x^2) / Q(x^2) on |x| <= 3.93; relative error 2e-8. Beyond, erf rounds to one.
_ERF_P = (
    1.1283791065216064, 0.19078318774700165, 0.05279019847512245, 0.003779581282287836, 0.0002848079602699727,
    2.0419754491740605e-06,
)
_ERF_Q = (
    1.0, 0.5024099349975586, 0.11425725370645523, 0.014997381716966629, 0.0011652059620246291, 3.800409103860147e-05,
)
_ERF_END = 3.93
#: log(2) in two parts; the first has so few bits that its product with an exponent is exact
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LOG2_E = 1.4426950408889634
#: adding and subtracting 1.5 * 2^23 rounds a float32 to the nearest integer and leaves it in the low bits
_ROUNDER, _ROUNDER_BITS = 12582912.0, 0x4B400000
_SQRT_HALF_BITS = 0x3F3504F3
_SIGN_BIT = -0x80000000


def _f(value: float) -> Any:
    return tirx.const(value, "float32")


def _i(value: int) -> Any:
    return tirx.const(value, "int32")


def _u(value: int) -> Any:
    return tirx.const(value, "uint32")


def _let(value: Any, body: Callable[[Any], Any], dtype: str = "float32") -> Any:
    """``body`` of a new variable that holds ``value``, so that the value is computed once."""
    variable = tirx.Var("t", dtype)
    return tirx.Let(variable, tvm_ffi.structural_map(value, (tirx.Cast, _spelled_out)), body(variable))


def _spelled_out(node: tirx.Cast) -> Any:
    """The conversion of a bfloat16 number to float32 as operations on bits; any other as it is.

    TVM's pass that makes these operations of conversions, BF16ComputeLegalize, leaves out the values of variables, and
    what it leaves out converts the bits as if they were an integer.
    """
    value = node.value
    if (str(node.ty), str(value.ty)) != ("float32", "bfloat16"):
        return node
    if _rounds(value):
        return _rounded(value.value)
    return _float(tirx.shift_left(tirx.Cast("uint32", tirx.reinterpret("uint16", value)), _u(16)))


def _rounds(node: Any) -> bool:
    """Whether it makes a bfloat16 number of a float32 one."""
    return isinstance(node, tirx.Cast) and (str(node.ty), str(node.value.ty)) == ("bfloat16", "float32")


def _rounded(value: Any) -> Any:
    """A float32 number rounded to one that bfloat16 has, halves to even, as operations on bits; a NaN stays one."""
    def nearest(bits: Any) -> Any:
        upper = (bits + _u(0x7FFF) + (tirx.shift_right(bits, _u(16)) & _u(1))) & _u(0xFFFF0000)
        return _float(tirx.Select((bits & _u(0x7FFFFFFF)) > _u(0x7F800000), bits, upper))

    return _let(tirx.reinterpret("uint32", value), nearest, "uint32")


class _Roundings:
    """Roundings to bfloat16 whose results are computed with. BF16ComputeLegalize computes in float32, and there a
    conversion to bfloat16 and back is none: so the number is rounded before. Storing rounds by itself."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, tirx.Cast]] = []

    def cast(self, node: tirx.Cast) -> Any:
        if not _rounds(node):
            return node
        self._made.append((tirx.Cast("bfloat16", _rounded(node.value)), node))
        return self._made[-1][0]

    def store(self, node: tirx.BufferStore) -> Any:
        value = self._own(node.value)
        return node if value.same_as(node.value) else tirx.BufferStore(node.buffer, value, node.indices)

    def _own(self, value: Any) -> Any:
        """The value that is stored with its own conversions, where they are all that is made of what is rounded."""
        choice = _choice(value)
        if choice is None:
            return next((cast for made, cast in self._made if made.same_as(value)), value)
        parts = [self._own(part) for part in choice.parts]
        same = all(new.same_as(old) for new, old in zip(parts, choice.parts, strict=True))
        return value if same else choice.of(choice.condition, *parts)


class _Choice(NamedTuple):
    """One of two values by a condition, and what makes such a value of others."""

    condition: Any
    parts: tuple[Any, Any]
    of: Callable[[Any, Any, Any], Any]


def _choice(value: Any) -> _Choice | None:
    if isinstance(value, tirx.Select):
        return _Choice(value.condition, (value.true_value, value.false_value), tirx.Select)
    if isinstance(value, Call) and op_name(value) == "if_then_else":
        condition, *parts = value.args
        return _Choice(condition, (parts[0], parts[1]), tirx.if_then_else)
    return None


def _narrowed(node: tirx.BufferStore) -> Any:
    """A store of float32 numbers as bfloat16 with the rounding as operations on bits, where variables are computed.

    BF16ComputeLegalize writes what it rounds twice, variables and all, and TVM's vectoriser refuses those.
    """
    value = _stored_bits(node.value)
    return node if value is None else tirx.BufferStore(node.buffer, tirx.reinterpret("bfloat16", value), node.indices)


#: what may be of bfloat16 beside loads and conversions
_COMPUTED = (Call, tirx.Select, tirx.Max, tirx.Min, tirx.Add, tirx.Sub, tirx.Mul, tirx.Div)


def _stored_bits(value: Any) -> Any:
    """The uint16 of a number that is rounded to bfloat16, or of a choice of such; None where TVM may round it."""
    choice = _choice(value)
    if choice is not None:
        parts = [_stored_bits(part) for part in choice.parts]
        if all(part is None for part in parts):
            return None
        parts = [_given_bits(each) if part is None else part
                 for part, each in zip(parts, choice.parts, strict=True)]
        return choice.of(choice.condition, *parts) if all(part is not None for part in parts) else None
    if not _rounds(value):
        return None
    variables: list[Any] = []
    narrow: list[Any] = []
    walk(value.value, (tirx.Let, variables.append), (_COMPUTED, narrow.append))
    if not variables or any(str(each.ty) == "bfloat16" for each in narrow):
        return None

    def upper(bits: Any) -> Any:
        nearest = bits + _u(0x7FFF) + (tirx.shift_right(bits, _u(16)) & _u(1))
        quiet = bits | _u(0x400000)
        kept = tirx.Select((bits & _u(0x7FFFFFFF)) > _u(0x7F800000), quiet, nearest)
        return tirx.Cast("uint16", tirx.shift_right(kept, _u(16)))

    return _let(tirx.reinterpret("uint32", value.value), upper, "uint32")


def _given_bits(value: Any) -> Any:
    """A constant or an element of bfloat16 as uint16; None for anything else."""
    if isinstance(value, TensorLoad):
        return tirx.reinterpret("uint16", value)
    if not isinstance(value, tirx.FloatImm):
        return None
    return tirx.const(int(np.float32(value.value).astype(ml_dtypes.bfloat16).view(np.uint16)), "uint16")


def _horner(coefficients: Sequence[float], x: Any) -> Any:
    result = _f(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + _f(coefficient)
    return result


def _bits(x: Any) -> Any:
    return tirx.reinterpret("int32", x)


def _float(x: Any) -> Any:
    return tirx.reinterpret("float32", x)


def _power_of_two(n: Any) -> Any:
    return _float(tirx.shift_left(n + _i(127), _i(23)))


def _reduced(x: Any, body: Callable[[Any, Any], Any]) -> Any:
    """``body(r, n)`` with ``x = n log(2) + r``, ``|r| <= log(2)/2`` and ``n`` an int32 (Cody and Waite, 1980)."""

    def shifted(k: Any) -> Any:
        return _let(k - _f(_ROUNDER), lambda n: body(
            (x - n * _f(_LN2_HIGH)) - n * _f(_LN2_LOW), _bits(k) - _i(_ROUNDER_BITS),
        ))

    return _let(x * _f(_LOG2_E) + _f(_ROUNDER), shifted)


def _scaled_exp(r: Any, n: Any) -> Any:
    """``exp(r) 2^n``. The power is applied in two halves, so that results below the normal range are rounded once
    and results above it become infinite."""
    return _let(r, lambda r: _let(n, lambda n: _let(tirx.shift_right(n, _i(1)), lambda half: (
        (r * r * _horner(_EXP, r) + r + _f(1.0)) * _power_of_two(half) * _power_of_two(n - half)
    ), "int32"), "int32"))


def _clamp(low: float, x: Any, high: float) -> Any:
    """``x`` between two constants. They come first in max and min, because then a NaN passes through."""
    return tirx.Min(_f(high), tirx.Max(_f(low), x))


def _exp(x: Any) -> Any:
    return _let(_clamp(-104.0, x, 89.0), lambda c: _reduced(c, _scaled_exp))


def _exp2(x: Any) -> Any:
    return _let(_clamp(-150.0, x, 129.0), lambda c: _let(c + _f(_ROUNDER), lambda k: _scaled_exp(
        (c - (k - _f(_ROUNDER))) * _f(0.6931471805599453), _bits(k) - _i(_ROUNDER_BITS),
    )))


def _log(x: Any) -> Any:
    def normal(y: Any, shift: Any) -> Any:
        def split(e: Any) -> Any:
            mantissa = _float(_bits(y) - tirx.shift_left(e, _i(23)))
            return _let(tirx.Cast("float32", e) + shift, lambda n: _let(mantissa - _f(1.0), lambda f: (
                n * _f(_LN2_HIGH) + (f + (f * f * (f * _horner(_LOG, f) - _f(0.5)) + n * _f(_LN2_LOW)))
            )))

        return _let(tirx.shift_right(_bits(y) - _i(_SQRT_HALF_BITS), _i(23)), split, "int32")

    def whole(x: Any) -> Any:
        small = x < _f(1.1754943508222875e-38)  # denormal: scaled into the normal range first
        scaled, shift = tirx.Select(small, x * _f(8388608.0), x), tirx.Select(small, _f(-23.0), _f(0.0))
        finite = _let(scaled, lambda y: normal(y, shift))
        special = tirx.Select(x.equal(_f(0.0)), _f(float("-inf")), _f(float("nan")))
        return tirx.Select(x > _f(0.0), tirx.Select(x < _f(float("inf")), finite, x), special)

    return _let(x, whole)


def _log1p(x: Any) -> Any:
    # log(u) (x / (u - 1)) for u = 1 + x undoes the rounding of u (Kahan)
    def corrected(u: Any) -> Any:
        exact = tirx.Select(u < _f(float("inf")), _log(u) * (x / (u - _f(1.0))), u)
        return tirx.Select(u.equal(_f(1.0)), x, exact)

    return _let(_f(1.0) + x, corrected)


def _tanh(x: Any) -> Any:
    # with E = exp(2|x|) - 1, built from r^2 P(r) + r so that nothing cancels for small x: tanh |x| = E / (E + 2)
    def positive(r: Any, n: Any) -> Any:
        return _let(r, lambda r: _let(_power_of_two(n), lambda s: _let(
            s * (r * r * _horner(_EXP, r) + r) + (s - _f(1.0)), lambda e: e / (e + _f(2.0)),
        )))

    def signed(x: Any) -> Any:
        size = tirx.Min(_f(9.02), tirx.abs(x)) * _f(2.0)
        result = _let(size, lambda z: _reduced(z, positive))
        return _float(tirx.bitwise_or(_bits(result), tirx.bitwise_and(_bits(x), _i(_SIGN_BIT))))

    return _let(x, signed)


def _erf(x: Any) -> Any:
    def rational(c: Any) -> Any:
        return _let(c * c, lambda t: c * _horner(_ERF_P, t) / _horner(_ERF_Q, t))

    return _clamp(-1.0, _let(_clamp(-_ERF_END, x, _ERF_END), rational), 1.0)


def _sigmoid(x: Any) -> Any:
    return _f(1.0) / (_f(1.0) + _exp(_f(0.0) - x))


def _pow(x: Any, y: Any) -> Any | None:
    """Quarter powers by multiplication and square roots; None for any other exponent."""
    if not isinstance(y, tirx.FloatImm) or float(y.value) * 4 != int(float(y.value) * 4) or abs(float(y.value)) > 4:
        return None
    quarters = int(abs(float(y.value)) * 4)

    def product(x: Any) -> Any:
        root = tirx.sqrt(x)
        parts = {0: [], 1: [tirx.sqrt(root)], 2: [root], 3: [root, tirx.sqrt(root)]}[quarters % 4]
        result = _f(1.0)
        for position, factor in enumerate([*[x] * (quarters // 4), *parts]):
            result = factor if position == 0 else result * factor
        return result if float(y.value) >= 0 else _f(1.0) / result

    return _let(x, product)


def _extremum(node: Any, folded: Sequence[Any]) -> Any:
    """A maximum or minimum that is NaN where one side is.

    ``Max(a, b)`` is the instruction ``a > b ? a : b``, which loses a NaN of ``a`` alone. So a constant comes first, at
    no cost, and any other ``a`` is looked at, which makes three instructions of one. What is ``folded`` into one of
    these buffers stays one instruction.
    """
    if not str(node.ty).startswith(("float", "bfloat")) or isinstance(node.a, tirx.FloatImm):
        return node
    kind = type(node)
    if isinstance(node.b, tirx.FloatImm):
        return kind(node.b, node.a)
    if any(_reads(side, buffer) for side in (node.a, node.b) for buffer in folded):
        return node
    a, b = (node.b, node.a) if isinstance(node.b, TensorLoad) else (node.a, node.b)
    if isinstance(a, TensorLoad):
        return _kept(a, kind(a, b))
    return _let(a, lambda a: _kept(a, kind(a, b)), str(node.ty))


def _to_nearest(node: tirx.Cast) -> Any:
    """``int32(round(x))`` as one instruction; both of TVM's operators round halves to even."""
    rounded = node.value
    if str(node.ty) != "int32" or not isinstance(rounded, Call) or op_name(rounded) not in ("nearbyint", "round"):
        return node
    return tirx.call_llvm_pure_intrin("int32", "llvm.lrint", *rounded.args) if str(rounded.ty) == "float32" else node


def _kept(a: Any, otherwise: Any) -> Any:
    number = tirx.Cast("float32", a) if str(a.ty) == "bfloat16" else a  # TVM asks no bfloat16
    return tirx.Select(tirx.isnan(number), a, otherwise)


def _reads(value: Any, buffer: Any) -> bool:
    return isinstance(value, TensorLoad) and value.source.same_as(buffer)


def _folded(func: tirx.PrimFunc) -> list[Any]:
    """The buffers that hold running extrema: ``B[i] = Max(B[i], ...)``."""
    found = []

    def look(store: tirx.BufferStore) -> None:
        value = store.value
        if isinstance(value, (tirx.Max, tirx.Min)) and any(_reads(s, store.buffer) for s in (value.a, value.b)):
            found.append(store.buffer)

    walk(func.body, (tirx.BufferStore, look))
    return found


_RULES: dict[str, Callable[..., Any]] = {
    "exp": _exp,
    "exp2": _exp2,
    "log": _log,
    "log1p": lambda x: _let(x, _log1p),
    "log2": lambda x: _log(x) * _f(_LOG2_E),
    "log10": lambda x: _log(x) * _f(0.4342944819032518),
    "tanh": _tanh,
    "erf": _erf,
    "sigmoid": _sigmoid,
    "pow": _pow,
    "rsqrt": lambda x: _f(1.0) / tirx.sqrt(x),
    # TVM does not vectorise the operator itself; every target has an instruction
    "nearbyint": lambda x: tirx.call_llvm_pure_intrin("float32", "llvm.nearbyint", x),
}

#: the operators that are replaced
EXPANDED = tuple(sorted(_RULES))


def expand_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """``func`` with its slow float32 calls as arithmetic and extrema that keep NaN; the same object where there are
    neither.

    Scheduling before or after makes no difference to the result. After is better: the task keeps its name in the
    tuning log when a polynomial changes, and a cost model sees one operation.

    ``B[i] = T.exp(A[i])   -->   B[i] = T.Let(...)``
    """
    changed = [False]

    def call(node: Call) -> Any:
        rule = _RULES.get(op_name(node))
        if rule is None or str(node.ty) != "float32":
            return node
        expansion = rule(*node.args)
        if expansion is None:
            return node
        changed[0] = True
        return expansion

    roundings = _Roundings()

    def cast(node: tirx.Cast) -> Any:
        result = roundings.cast(_to_nearest(node))
        changed[0] = changed[0] or not result.same_as(node)
        return result

    folded = _folded(func)

    def extremum(node: Any) -> Any:
        result = _extremum(node, folded)
        changed[0] = changed[0] or not result.same_as(node)
        return result

    body = tvm_ffi.structural_map(func.body, [(tirx.Cast, cast), (tirx.BufferStore, roundings.store)])
    body = tvm_ffi.structural_map(body, [(Call, call), ((tirx.Max, tirx.Min), extremum)])
    return func.with_body(tvm_ffi.structural_map(body, (tirx.BufferStore, _narrowed))) if changed[0] else func
