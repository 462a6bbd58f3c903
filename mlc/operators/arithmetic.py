"""The number systems to evaluate in: float64 and float32 as numpy has them, and the prime field of 2^61 - 1 elements,
in which nothing rounds.

Polynomials that differ agree at a random point of the field with a probability of at most degree / 2^61 (Schwartz,
Zippel). Functions that are not polynomial are fixed maps of the field that keep the laws of :mod:`mlc.operators.laws`:
relu and max go by the order of the representatives from -(p-1)/2 to (p-1)/2, so that the laws of lattices hold
exactly; monotone functions are monotone in that order, odd ones are odd, and else they are pseudorandom.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any, Protocol, TypeAlias

import numpy as np

from mlc.operators.laws import LAWS
from mlc.operators.operator import OPERATORS

__all__ = ["FIELD", "PRIME", "REAL", "SINGLE", "STRICT", "STRICT_SINGLE", "Arithmetic", "Array", "Field", "Real",
           "Single", "Strict"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
PRIME = 2**61 - 1
_ADD: Any = np.add.reduce
_MAXIMUM: Any = np.maximum.reduce


class Arithmetic(Protocol):
    """What evaluation needs of numbers; arrays have ``dtype``, and 0 is 0 in both."""

    dtype: Any

    def constant(self, value: Fraction | int) -> Any: ...
    def integers(self, values: Array) -> Array: ...
    def add(self, a: Any, b: Any) -> Any: ...
    def sub(self, a: Any, b: Any) -> Any: ...
    def mul(self, a: Any, b: Any) -> Any: ...
    def neg(self, a: Any) -> Any: ...
    def reciprocal(self, a: Any) -> Any: ...
    def maximum(self, a: Any, b: Any) -> Any: ...
    def total(self, a: Array, axes: tuple[int, ...], keepdims: bool = False) -> Any: ...
    def largest(self, a: Array, axes: tuple[int, ...], keepdims: bool = False) -> Any: ...
    def matmul(self, a: Array, b: Array) -> Array: ...
    def call(self, function: str, a: Any) -> Any: ...
    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array: ...

    @property
    def lowest(self) -> Any:
        """Not above any number; the largest of none."""
        ...

    @property
    def undefined(self) -> Any:
        """Stands for an element of an index outside of its axis; not told from others over the field."""
        ...


class Real:
    """float64, as numpy computes it."""

    dtype: Any = np.float64
    lowest = -np.inf
    undefined = np.nan

    add, sub, mul, neg, reciprocal = np.add, np.subtract, np.multiply, np.negative, np.reciprocal
    maximum, matmul = np.maximum, np.matmul

    def constant(self, value: Fraction | int) -> Any:
        return np.float64(float(value))

    def integers(self, values: Array) -> Array:
        return np.asarray(values, dtype=np.float64)

    def total(self, a: Array, axes: tuple[int, ...], keepdims: bool = False) -> Any:
        return _ADD(a, axes, keepdims=keepdims)

    def largest(self, a: Array, axes: tuple[int, ...], keepdims: bool = False) -> Any:
        return _MAXIMUM(a, axes, keepdims=keepdims, initial=self.lowest)

    def call(self, function: str, a: Any) -> Any:
        real = OPERATORS[function].real
        if real is None:
            raise ValueError(f"no function is named {function}; there are {', '.join(LAWS)}")
        return real(a)

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.standard_normal(shape)


class Strict(Real):
    """float64 with NaN for what is not defined: a reciprocal of 0, a logarithm, a root outside of its domain. Being
    computed of it, nothing is defined then, as the specifications say: an infinity would be lost in a maximum."""

    def reciprocal(self, a: Any) -> Any:  # type: ignore[override]
        return np.where(np.asarray(a) == 0, np.nan, np.reciprocal(a))

    def call(self, function: str, a: Any) -> Any:
        value, domain = super().call(function, a), LAWS[function].domain
        if not domain:
            return value
        return np.where(np.asarray(a) > 0 if domain == "> 0" else np.asarray(a) >= 0, value, np.nan)


class Single(Real):
    """float32, in which models compute."""

    dtype = np.float32

    def constant(self, value: Fraction | int) -> Any:
        return np.float32(float(value))

    def integers(self, values: Array) -> Array:
        return np.asarray(values, dtype=np.float32)

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)


class StrictSingle(Single, Strict):
    """float32 with NaN for what is not defined."""


def _u(value: int) -> np.uint64:
    return np.uint64(value)


P, HALF = _u(PRIME), _u(PRIME // 2)
B61, B32, B29, B3 = _u(61), _u(32), _u(29), _u(3)
LOW32, LOW29, LOW21 = _u(2**32 - 1), _u(2**29 - 1), _u(2**21 - 1)
#: three limbs of 21 bits: their products sum exactly in float64 for up to 2^11 terms
LIMBS = np.array([0, 21, 42], dtype=np.uint64)
LEFT = (LIMBS[:, None] + LIMBS) % 61
RIGHT = B61 - LEFT
EXACT_TERMS = 2**11


def _reduced(a: Any) -> Any:
    """Any uint64 as its representative below p."""
    a = (a & P) + (a >> B61)
    return a - P * (a >= P)


class Field:
    """Integers modulo 2^61 - 1, as uint64 from 0 to p - 1."""

    dtype = np.uint64
    #: the representative of -(p-1)/2
    lowest = _u(PRIME // 2 + 1)
    undefined = _u(0)

    def constant(self, value: Fraction | int) -> Any:
        value = Fraction(value)
        return _u(value.numerator * pow(value.denominator, -1, PRIME) % PRIME)

    def integers(self, values: Array) -> Array:
        return (np.asarray(values, dtype=np.int64) % PRIME).astype(np.uint64)

    def add(self, a: Any, b: Any) -> Any:
        return _reduced(a + b)

    def sub(self, a: Any, b: Any) -> Any:
        return _reduced(a + (P - b))

    def neg(self, a: Any) -> Any:
        return _reduced(P - a)

    def mul(self, a: Any, b: Any) -> Any:
        high_a, low_a, high_b, low_b = a >> B32, a & LOW32, b >> B32, b & LOW32
        # 2^64 = 8 and 2^61 = 1; the middle products have the weight 2^32
        middle = high_a * low_b + low_a * high_b
        low = low_a * low_b
        total = ((high_a * high_b) << B3) + (middle >> B29) + ((middle & LOW29) << B32) + (low & P) + (low >> B61)
        return _reduced(total)

    def reciprocal(self, a: Any) -> Any:
        """The inverse, and 0 for 0: one inversion for all elements, by products of those before (Montgomery)."""
        flat = [int(v) for v in np.ravel(a)]
        before, running = [], 1
        for value in flat:
            before.append(running)
            running = running * (value or 1) % PRIME
        inverse, found = pow(running, -1, PRIME), [0] * len(flat)
        for place in range(len(flat) - 1, -1, -1):
            if flat[place]:
                found[place] = inverse * before[place] % PRIME
                inverse = inverse * flat[place] % PRIME
        return np.array(found, dtype=np.uint64).reshape(np.shape(a))

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger by the order of signed representatives."""
        return _reduced(np.maximum(_reduced(a + HALF), _reduced(b + HALF)) + (P - HALF))

    def total(self, a: Array, axes: tuple[int, ...], keepdims: bool = False) -> Any:
        if math.prod(a.shape[axis] for axis in axes) <= 8:
            return _reduced(_ADD(a, axes, keepdims=keepdims))
        low = _ADD(a & LOW32, axes, keepdims=keepdims)
        high = _reduced(_ADD(a >> B32, axes, keepdims=keepdims))
        # high has the weight 2^32: its upper 32 bits of 61 wrap around
        return _reduced(_reduced(low) + ((high << B32) & P) + (high >> B29))

    def largest(self, a: Array, axes: tuple[int, ...], keepdims: bool = False) -> Any:
        return _reduced(_MAXIMUM(_reduced(a + HALF), axes, keepdims=keepdims, initial=_u(0)) + (P - HALF))

    def matmul(self, a: Array, b: Array) -> Array:
        """By nine exact float64 products of limbs, in one call of the BLAS."""
        *batch, rows, inner = a.shape
        columns = b.shape[-1]
        if inner > EXACT_TERMS:
            halves = (
                self.matmul(a[..., :EXACT_TERMS], b[..., :EXACT_TERMS, :]),
                self.matmul(a[..., EXACT_TERMS:], b[..., EXACT_TERMS:, :]),
            )
            return self.add(*halves)
        left = ((a[..., None, :, :] >> LIMBS[:, None, None]) & LOW21).astype(np.float64)
        right = ((b[..., None, :] >> LIMBS[:, None]) & LOW21).astype(np.float64)
        product = left.reshape(*batch, 3 * rows, inner) @ right.reshape(*batch, inner, 3 * columns)
        limbs = product.astype(np.uint64).reshape(*batch, 3, rows, 3, columns)
        weight, back = LEFT[:, None, :, None], RIGHT[:, None, :, None]
        # a product of limbs below 2^53, times 2^weight, as a rotation of 61 bits
        rotated = ((limbs << weight) & P) + (limbs >> back)
        once = _ADD(rotated, -4)
        return _reduced(_ADD((once & P) + (once >> B61), -2))

    def call(self, function: str, a: Any) -> Any:
        if function == "relu":
            return a * (a <= HALF)
        return _field_function(function)(a)

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.integers(0, PRIME, shape, dtype=np.uint64)


def _scrambled(values: Any, seed: int) -> Any:
    """18 pseudorandom bits of every uint64 (the finaliser of splitmix64); products wrap on purpose."""
    with np.errstate(over="ignore"):
        values = (values + _u(seed)) * _u(0x9E3779B97F4A7C15)
        values = (values ^ (values >> _u(30))) * _u(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> _u(27))) * _u(0x94D049BB133111EB)
    return (values >> _u(46)).astype(np.int64)


@cache
def _field_function(function: str) -> Callable[[Any], Any]:
    laws, seed = LAWS[function], list(LAWS).index(function)

    def monotone(x: Any) -> Any:
        """Steps of 2^19 for every 2^20, random within; small numbers are told apart one by one."""
        step = x >> 20
        noise = _scrambled(step.view(np.uint64), seed)
        return (step << 19) + noise + ((x & 0xFFFFF) >> 2) + 8 * np.clip(x, -4096, 4096) + seed

    def apply(a: Any) -> Any:
        field = np.asarray(a, dtype=np.uint64)
        signed = field.astype(np.int64) - (field > HALF) * np.int64(PRIME)
        value = np.sign(signed) * monotone(np.abs(signed)) if laws.odd else monotone(signed)
        if laws.nonnegative:
            value = (value + 2**60) >> 1
        return (value + (value < 0) * np.int64(PRIME)).astype(np.uint64)

    return apply


REAL, SINGLE, FIELD = Real(), Single(), Field()
STRICT, STRICT_SINGLE = Strict(), StrictSingle()
