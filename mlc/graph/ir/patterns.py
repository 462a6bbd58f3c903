"""TVM's classes of tensor functions, as FuseOps reads them from the attribute ``op_pattern``."""

from __future__ import annotations

from tvm import tirx

__all__ = ["BROADCAST", "INJECTIVE", "OPAQUE", "PRODUCT", "pattern_of"]

#: up to ``INJECTIVE``, each element is made of one of each input; nothing is merged with ``OPAQUE``
BROADCAST, INJECTIVE, PRODUCT, OPAQUE = 1, 2, 4, 8


def pattern_of(func: tirx.PrimFunc) -> int:
    """The kind of a function that ``AnnotateTIROpPattern`` has seen, ``OPAQUE`` for any other."""
    return int((func.attrs or {}).get("op_pattern", OPAQUE))
