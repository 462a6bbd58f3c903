"""Tensor intrinsics: loop nests that one machine instruction, or a fixed few, compute.

An :class:`Intrinsic` says what is computed, as loops and as numpy, and how the machine does it. A space asks for one by
what it computes (:func:`select`), :func:`use` makes it known to TVM at that moment, and ``sch.tensorize`` does the
rest. Nothing is parsed at import: TVM's own intrinsics take 20 seconds, since they are all built when their module is
loaded.

One file per family, listed in ``_FAMILIES``, each of which calls :func:`declare` when it is imported. To add an
instruction is to declare it there: ``mlc.testing.intrinsics`` tests every entry from what it says of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import tvm
from tvm import s_tir, tirx

__all__ = ["PREFIX", "Intrinsic", "available", "check_available", "declare", "declared", "select", "use"]

#: what the names of intrinsics begin with, so that they do not meet TVM's
PREFIX = "mlc."


@dataclass(frozen=True)
class Intrinsic:
    """One entry of a family.

    ``name`` is :data:`PREFIX`, what is computed, and where several machines compute that, a dot and a word for this
    one: ``mlc.dot_quads4.sdot``. It stands in traces, so it may never change its meaning.

    ``types`` are those of the operands' elements, the result last. ``features`` are alternatives, any of which the
    target must have: LLVM's names of what its code generator may use for a target of ``kind`` ``llvm``, the least
    architecture (``sm_80``) for ``cuda``, or the only one (``sm_90a``); of several architectures each must have it.

    ``description`` builds the loops that are replaced, a function of one buffer for each of ``types``, and
    ``implementation`` the same from it with the instruction. ``specification`` maps the operands' arrays, the result's
    old values last, to the result; ``tolerance`` is how far the instruction may be from it, relative to the largest
    element (0: exact). ``instruction`` is a regular expression of what stands in the machine code.
    """

    name: str
    types: tuple[str, ...]
    features: tuple[tuple[str, ...], ...]
    description: Callable[[], tirx.PrimFunc]
    implementation: Callable[[tirx.PrimFunc], tirx.PrimFunc]
    specification: Callable[..., Any]
    instruction: str
    kind: str = "llvm"
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not self.name.startswith(PREFIX):
            raise ValueError(f"an intrinsic's name must begin with '{PREFIX}', got {self.name!r}")

    @property
    def computes(self) -> str:
        """The computation that the name stands for, independent of the machine."""
        return self.name.removeprefix(PREFIX).partition(".")[0]

    def supported(self, target: tvm.target.Target) -> bool:
        """Whether ``target`` has the instruction."""
        return str(target.kind.name) == self.kind and any(_has(target, needed) for needed in self.features)

    @property
    def needs(self) -> str:
        """The features, to be read: ``avx512vnni and avx512vl, or avxvnni``."""
        return ", or ".join(" and ".join(needed) or "nothing" for needed in self.features)


def _has(target: tvm.target.Target, features: tuple[str, ...]) -> bool:
    if str(target.kind.name) == "cuda":
        return all(_offers(arch, name) for arch in str(target.attrs["arch"]).split(",") for name in features)
    return _cpu_has(str(target), features)


@lru_cache(maxsize=1024)
def _cpu_has(target_json: str, features: tuple[str, ...]) -> bool:
    with tvm.target.Target(target_json) as target:
        return all(tvm.target.codegen.llvm_cpu_has_features(feature, target) for feature in features)


def _offers(architecture: str, needed: str) -> bool:
    return _number(architecture) >= _number(needed) if needed[-1].isdigit() else architecture == needed


def _number(architecture: str) -> int:
    return int("".join(filter(str.isdigit, architecture)))


_FAMILIES = ("dot", "lookup", "matrix", "mma", "tiles", "transpose")
_DECLARED: dict[str, Intrinsic] = {}


def declare(*intrinsics: Intrinsic) -> None:
    """Make intrinsics known to all else here; raises ``ValueError`` for a name that is taken."""
    for intrinsic in intrinsics:
        if intrinsic.name in _DECLARED:
            raise ValueError(f"each intrinsic must have a name of its own, got {intrinsic.name!r} twice")
        _DECLARED[intrinsic.name] = intrinsic


def declared() -> tuple[Intrinsic, ...]:
    """Every intrinsic of every family."""
    for family in _FAMILIES:
        import_module(f"{__name__}.{family}")
    return tuple(_DECLARED.values())


def available(target: tvm.target.Target) -> tuple[str, ...]:
    """The names of the intrinsics whose instruction ``target`` has."""
    return tuple(intrinsic.name for intrinsic in declared() if intrinsic.supported(target))


def select(computes: str, target: tvm.target.Target) -> str | None:
    """The name of the first intrinsic that ``computes`` this and whose instruction ``target`` has; None without one."""
    return next((i.name for i in declared() if i.computes == computes and i.supported(target)), None)


def use(name: str) -> str:
    """Register the intrinsic with TVM, once, and return the name for ``sch.tensorize``; ``KeyError`` if undeclared."""
    if s_tir.TensorIntrin.get(name, allow_missing=True) is None:
        declared()
        if name not in _DECLARED:
            raise KeyError(f"an intrinsic must be one of a family in schedules/intrin, got {name[:60]!r}")
        description = _DECLARED[name].description()
        s_tir.TensorIntrin.register(name, description, _DECLARED[name].implementation(description))
    return name


def check_available(name: str, target: tvm.target.Target) -> None:
    """Raise ``ValueError`` in one line for a declared intrinsic whose instruction ``target`` lacks."""
    intrinsic = _DECLARED[name]
    if not intrinsic.supported(target):
        machine = target.attrs.get("mcpu", target.attrs.get("arch", target.kind.name))
        raise ValueError(f"{name} needs {intrinsic.needs}, which {machine} does not have")
