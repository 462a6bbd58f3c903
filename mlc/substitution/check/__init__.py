"""Checks certificates of rules again, without any of the code that found them.

Trusted are the operators' specifications, polynomials (:mod:`mlc.operators.index`) and the reader of rules. The
checker composes both sides itself (``certificate.py``), writes source minus target as terms: factor, index variables
over all integers, guards, atoms (``terms.py``), and plays the steps of the certificate (``play.py``); at the end no
term may be left. The steps:

- ``drop i w``: the guards contradict each other (or the factor is 0).
- ``division i q p low high``: the quotient ``q = n // d`` is ``p``, since ``0 <= n - d*p <= d - 1`` there.
- ``divide variable i k d w``: variable k is ``d*q + r`` with ``0 <= r < d``, for ``d >= 1``.
- ``guard i g w``: a guard that the others imply is added. ``split i g``: two or three cases, ``g`` and its opposites.
- ``fix i k p low high``: variable k has to be ``p``. ``count i k w``: variable k, which nothing uses, as a factor.
- ``merge i j map inverse forth back pairing equal``: a bijection of the variables under which guards imply each other
  and the atoms are equal in pairs; the factors are added up.
- ``context division | split | fact``: the same for the indices of the output, or of what is around a function.

A witness (``witness.py``) is a list of ``[factor > 0, facts]``; the products of facts add up to what is to be shown at
least 0, or to -1 with its opposite among the facts (number -1).
"""

from mlc.substitution.check.certificate import check
from mlc.substitution.check.witness import CertificateError

__all__ = ["CertificateError", "check"]
