"""What is known about functions that are not polynomial, and why.

Proofs and searches may use these laws and no others. Functions act on single elements, so that each commutes with
everything that only moves elements (transpose, reshape, concat, slice), whatever it is; what it does to zeros decides
about padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

__all__ = ["BELOW", "LAWS", "VALUES", "Laws"]


@dataclass(frozen=True)
class Laws:
    """Laws of one function ``f`` of the reals, on its domain.

    - ``monotone``: ``x <= y`` gives ``f(x) <= f(y)``; hence ``f(max(x, y)) = max(f(x), f(y))``, since the larger
      argument has the larger value, and likewise for max over axes and windows.
    - ``idempotent``: ``f(f(x)) = f(x)``.
    - ``odd``: ``f(-x) = -f(x)``.
    - ``nonnegative``: ``f(x) >= 0``; hence ``relu(f(x)) = f(x)``.
    - ``positive``: ``f(x) > 0``; hence its reciprocal, root and logarithm are defined.
    - ``zero``: ``f(0) = 0``; hence it commutes with padding by zeros.
    - ``contracts``: ``f(x) <= max(x, 0)``; hence ``max(x, relu(f(x))) = relu(x)``.
      Where it is not defined it is taken as 0.
    - ``exceeds``: ``f(x) >= x``; hence ``min(x, f(x)) = x``.
    - ``gentle``: ``f(x) - f(y) <= max(x - y, 0)``; hence ``max(x - f(x), y - f(y))`` is that of the larger.
    - ``at_most_one``: ``f(x) <= 1``; hence ``f(x) <= sqrt(f(x))``, where a root of less than 0 is taken as 0.

    ``domain`` says where it is defined: everywhere (empty), where its argument is ``>= 0``, or ``> 0``. (A reciprocal
    is defined where its argument is not 0.) Elsewhere nothing is known of its value, and an element that is computed
    of it is not defined either, whatever the value is multiplied with. ``because`` proves the laws.
    """

    because: str
    monotone: bool = False
    idempotent: bool = False
    odd: bool = False
    nonnegative: bool = False
    positive: bool = False
    zero: bool = False
    contracts: bool = False
    exceeds: bool = False
    gentle: bool = False
    at_most_one: bool = False
    domain: str = ""

    @property
    def grows(self) -> bool:
        """Whether it is monotone on all reals, so that it commutes with every maximum."""
        return self.monotone and not self.domain

    @property
    def grows_continued(self) -> bool:
        """Whether it grows where it is taken as 0 outside of its domain: so does a root."""
        return self.grows or (self.monotone and self.nonnegative and self.domain == ">= 0")


#: by the names of functions: those of the operators that have laws
LAWS: dict[str, Laws] = {}

#: values of functions at numbers
VALUES: dict[tuple[str, Fraction], Fraction] = {(f, Fraction(x)): Fraction(y) for f, x, y in (
    ("sqrt", 1, 1), ("sqrt", 0, 0), ("exp", 0, 1), ("log", 1, 0), ("sigmoid", 0, Fraction(1, 2)))}

#: pairs f, g with f(x) <= g(x) for all x, where a function that is not defined is taken as 0, and why
BELOW: dict[tuple[str, str], str] = {
    ("erf", "exp"): "erf is at most 0 up to 0, where exp is above 0, and below 1 from there on, where exp is at "
                    "least 1",
    ("tanh", "exp"): "tanh is at most 0 up to 0, where exp is above 0, and below 1 from there on, where exp is at "
                     "least 1",
    ("log", "exp"): "log(x) <= x - 1 < exp(x) for x > 0, its tangent at 1; up to 0 it is taken as 0",
    ("log", "sqrt"): "log(x) = 2 log(sqrt(x)) <= 2/e sqrt(x), as log(y) <= y/e, its tangent at e; up to 0 both are "
                     "taken as 0",
    ("tanh", "sqrt"): "for x >= 0 tanh(x) is at most the smaller of x and 1, and sqrt(x) at least that; below 0 tanh "
                      "is below 0, as which the root is taken",
    ("erf", "sqrt"): "erf is concave for x >= 0 and below both 2/sqrt(pi) x and 1: up to pi/4 the first is at most "
                     "sqrt(x); from there to 1, erf(x) <= erf(1) < 0.843 < 0.886 < sqrt(pi/4); then sqrt(x) >= 1; "
                     "below 0 erf is below 0, as which the root is taken",
}
