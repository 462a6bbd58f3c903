"""Tensor intrinsics: pieces of a loop nest that one machine instruction computes.

An :class:`Intrinsic` names a pair of functions: what is computed, and the same with the instruction. A space asks for
one by name, :func:`use` makes it known to TVM at that moment, and ``sch.tensorize`` does the rest. Nothing is parsed
at import: TVM's own intrinsics take 20 seconds, since they are all built when their module is loaded.

One file per family, listed in ``_FAMILIES``, each of which calls :func:`declare` when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import tvm
from tvm import s_tir, tirx

__all__ = ["PREFIX", "Intrinsic", "available", "declare", "use"]

#: what the names of intrinsics begin with, so that they do not meet TVM's
PREFIX = "mlc."


@dataclass(frozen=True)
class Intrinsic:
    """``build`` gives the description and the implementation, two functions over equal buffers.

    ``supported`` tells whether a target has the instruction. Names begin with :data:`PREFIX`.
    """

    name: str
    supported: Callable[[tvm.target.Target], bool]
    build: Callable[[], tuple[tirx.PrimFunc, tirx.PrimFunc]]

    def __post_init__(self) -> None:
        if not self.name.startswith(PREFIX):
            raise ValueError(f"an intrinsic's name must begin with '{PREFIX}', got {self.name!r}")


_FAMILIES = ("dot", "transpose")
_DECLARED: dict[str, Intrinsic] = {}


def declare(intrinsic: Intrinsic) -> None:
    """Make an intrinsic known to :func:`available` and :func:`use`; raises ``ValueError`` for a name that is taken."""
    if intrinsic.name in _DECLARED:
        raise ValueError(f"each intrinsic must have a name of its own, got {intrinsic.name!r} twice")
    _DECLARED[intrinsic.name] = intrinsic


def available(target: tvm.target.Target) -> tuple[str, ...]:
    """The names of the intrinsics whose instruction ``target`` has."""
    _load()
    return tuple(name for name, intrinsic in _DECLARED.items() if intrinsic.supported(target))


def use(name: str) -> str:
    """Register the intrinsic with TVM, once, and return the name for ``sch.tensorize``; ``KeyError`` if undeclared."""
    if s_tir.TensorIntrin.get(name, allow_missing=True) is None:
        _load()
        s_tir.TensorIntrin.register(name, *_DECLARED[name].build())
    return name


def _load() -> None:
    for family in _FAMILIES:
        import_module(f"{__name__}.{family}")
