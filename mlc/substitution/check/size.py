"""How large a certificate may be, whatever it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlc.substitution.check.integers import CertificateError

__all__ = ["check_size"]

#: Bytes of the texts and numbers that a certificate is written with, its lists, objects, texts and numbers: twenty
#: times what the largest that ships has (26,238, 9,572); how deep these stand inside each other: five times (22).
_BYTES, _NODES, _DEPTH = 1 << 19, 200_000, 110
#: what has parts; the usual ones first
_INSIDE = (list, dict, tuple, Mapping)


def check_size(certificate: Mapping[str, Any]) -> None:
    """Raises :class:`CertificateError` for what is larger than any honest one, soon whatever it is."""
    left: list[tuple[Any, int]] = [(certificate, 0)]  # of lists and objects, and how deep each stands
    letters, nodes = 0, 1
    while left:
        value, depth = left.pop()
        inside = value
        if type(value) is not list and isinstance(value, Mapping):
            letters += sum(len(key) if isinstance(key, str) else 1 for key in value)
            nodes += len(value)
            inside = value.values()
        nodes += len(inside)
        if nodes > _NODES:
            raise CertificateError(f"it must be of at most {_NODES:,} lists, texts and numbers")
        if inside and depth >= _DEPTH:
            raise CertificateError(f"its parts must stand at most {_DEPTH} deep inside each other")
        for each in inside:
            kind = type(each)
            if kind is str:
                letters += len(each)
            elif kind is int:
                letters += each.bit_length() // 3
            elif isinstance(each, _INSIDE):
                left.append((each, depth + 1))
            else:
                letters += len(str(each))
        if letters + nodes > _BYTES:
            raise CertificateError(f"it must be written in at most {_BYTES >> 10} KiB")
