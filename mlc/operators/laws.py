"""What is known about functions that are not polynomial, and why.

Proofs and searches may use these laws and no others. Functions act on single elements, so that each commutes with
everything that only moves elements (transpose, reshape, concat, slice), whatever it is; what it does to zeros decides
about padding.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LAWS", "Laws"]


@dataclass(frozen=True)
class Laws:
    """Laws of one function ``f`` of the reals, on its domain.

    - ``monotone``: ``x <= y`` gives ``f(x) <= f(y)``; hence ``f(max(x, y)) = max(f(x), f(y))``, since the larger
      argument has the larger value, and likewise for max over axes and windows.
    - ``idempotent``: ``f(f(x)) = f(x)``.
    - ``odd``: ``f(-x) = -f(x)``.
    - ``nonnegative``: ``f(x) >= 0``; hence ``relu(f(x)) = f(x)``.
    - ``zero``: ``f(0) = 0``; hence it commutes with padding by zeros.

    ``domain`` says where it is defined: everywhere (empty), where its argument is ``>= 0``, or ``> 0``. (A reciprocal
    is defined where its argument is not 0.) Elsewhere nothing is known of its value, and an element that is computed
    of it is not defined either, whatever the value is multiplied with. ``because`` proves the laws.
    """

    because: str
    monotone: bool = False
    idempotent: bool = False
    odd: bool = False
    nonnegative: bool = False
    zero: bool = False
    domain: str = ""


LAWS: dict[str, Laws] = {
    "relu": Laws(
        "relu(x) = max(x, 0): max is monotone in each argument, at least 0 with 0, and max(max(x, 0), 0) = max(x, 0)",
        monotone=True, idempotent=True, nonnegative=True, zero=True,
    ),
    "sigmoid": Laws("1 / (1 + exp(-x)) is positive and grows as exp(-x) falls", monotone=True, nonnegative=True),
    "tanh": Laws("sinh is odd, cosh even; the derivative 1 / cosh^2 is positive", monotone=True, odd=True, zero=True),
    "exp": Laws("exp is positive and its own derivative", monotone=True, nonnegative=True),
    "log": Laws("the derivative 1 / x is positive on the domain", monotone=True, domain="> 0"),
    "sqrt": Laws(
        "the nonnegative root; the inverse of a growing function on x >= 0",
        monotone=True, nonnegative=True, domain=">= 0",
    ),
    "erf": Laws("the integral from 0 of a positive even function", monotone=True, odd=True, zero=True),
}
