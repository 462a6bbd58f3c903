"""How large a certificate may be, whatever it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlc.substitution.check.integers import need

__all__ = ["check_size"]

#: Bytes of the texts and numbers that a certificate is written with, its lists, objects, texts and numbers: twenty
#: times what the largest that ships has (26,238, 9,572); how deep these stand inside each other: five times (22).
_BYTES, _NODES, _DEPTH = 1 << 19, 200_000, 110


def check_size(certificate: Mapping[str, Any]) -> None:
    """Raises :class:`CertificateError` for what is larger than any honest one, soon whatever it is."""
    left, letters, nodes = [(certificate, 0)], 0, 0
    while left:
        value, depth = left.pop()
        nodes += 1
        need(depth <= _DEPTH, f"its parts must stand at most {_DEPTH} deep inside each other")
        if isinstance(value, str):
            letters += len(value)
        elif isinstance(value, Mapping):
            letters += sum(len(key) if isinstance(key, str) else 1 for key in value)
            nodes += len(value)
            left += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list | tuple):
            left += [(each, depth + 1) for each in value]
        else:
            letters += value.bit_length() // 3 if isinstance(value, int) else 1
        need(nodes + len(left) <= _NODES, f"it must be of at most {_NODES:,} lists, texts and numbers")
        need(letters + nodes <= _BYTES, f"it must be written in at most {_BYTES >> 10} KiB")
