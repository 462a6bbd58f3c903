"""A task: one fused tensor function, the target it is built for, and how often the model calls it.

Two kinds of equality are distinguished. Functions with equal *keys* are scheduled alike: they differ at most in
constants that a schedule does not depend on (:mod:`mlc.graph.ir.immediates`), so that one is tuned for all. Functions
with equal *identities* compute the same, and only these may share code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import tvm
import tvm_ffi
from tvm import tirx

from mlc.graph.ir.immediates import without_immediates
from mlc.graph.ir.int32_indices import narrowed
from mlc.shapes import Free
from mlc.sizes import scope
from mlc.target import Target
from schedules.flatten_elementwise import flattened_elementwise
from schedules.flatten_spatial import FLAT, FUSED, flattened
from schedules.free import SIZES, variables
from schedules.merged import MERGED

__all__ = ["Task", "function_key", "normalise", "task_key"]

#: attributes of a PrimFunc that change what it computes or how it must be built; the rest is naming
_KEPT_ATTRS = ("tirx.noalias", FLAT, FUSED, MERGED)
#: the hash of a function without its immediates by that of the whole; the same functions come again with each graph
_MASKED: dict[int, int] = {}
_MOST_MASKED = 1 << 14


@dataclass(frozen=True)
class Task:
    """``func`` is normalised (see :func:`normalise`); ``weight`` is the number of its calls in one run of the model.

    Tasks with an equal, nonempty ``choice`` are alternatives: the model runs only the fastest of them. ``constants``
    are the positions of the parameters that are weights of the model in every call, and ``constant_bytes`` is the size
    of all weights that one run of the model reads, which is how much passes through the caches before a weight is read
    again. Neither is part of the key.
    """

    name: str
    func: tirx.PrimFunc
    target: Target
    weight: int = 1
    choice: str = ""
    constants: tuple[int, ...] = ()
    constant_bytes: int = 0

    @cached_property
    def key(self) -> str:
        """The log's key: equal for functions that are scheduled alike on equal targets with equal versions."""
        return task_key(self.func, self.target)

    @cached_property
    def identity(self) -> str:
        """Equal for functions that compute the same, on equal targets with equal versions."""
        return function_key(self.func, self.target)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys under which logs may have records of the task, the current one first: constants used to be part of
        the key."""
        return tuple(dict.fromkeys((self.key, self.identity)))

    def with_weight(self, weight: int) -> Task:
        return replace(self, weight=weight)

    def competing(self, choice: str) -> Task:
        """The task as one of the alternatives called ``choice``."""
        return replace(self, choice=choice)


def normalise(func: tirx.PrimFunc, free: Mapping[str, Free] | None = None) -> tirx.PrimFunc:
    """Remove names and attributes that do not change the function's meaning, and use 32-bit indices where they fit.

    ``free`` are the free sizes by the names of their variables; those of the function become its attribute
    :data:`schedules.free.SIZES`, and so part of the key. Rows and columns that are both free become one axis if nothing
    depends on which pixels are neighbours (:mod:`schedules.flatten_spatial`), and so do all free axes of what is
    elementwise (:mod:`schedules.flatten_elementwise`).
    """
    with scope(free or {}):
        func = narrowed(func)
    kept = {k: func.attrs[k] for k in _KEPT_ATTRS if func.attrs and k in func.attrs}
    sizes = [(free or {})[str(var.name)] for var in variables(func)]
    if sizes:
        kept[SIZES] = [[each.range.low, each.range.high, each.usual] for each in sizes]
    func = tirx.PrimFunc(func.params, func.body, func.ret_type)
    for key, value in {**kept, "tirx.noalias": True, "global_symbol": "main"}.items():
        func = func.with_attr(key, value)
    return flattened_elementwise(flattened(func))


def task_key(func: tirx.PrimFunc, target: Target) -> str:
    """``<structural hash>-<target>-<versions>`` of everything that a schedule depends on; stable across processes and
    machines.

    Equal to :func:`function_key` if the function has no constants that are ignored.
    """
    whole = _hash(func)
    if whole not in _MASKED:
        if len(_MASKED) >= _MOST_MASKED:
            _MASKED.clear()
        _MASKED[whole] = _hash(without_immediates(func))
    return _key(_MASKED[whole], target)


def function_key(func: tirx.PrimFunc, target: Target) -> str:
    """The key of what a function computes, constants included, in the format of :func:`task_key`."""
    return _key(_hash(func), target)


def _hash(func: tirx.PrimFunc) -> int:
    return int(tvm_ffi.structural_hash(func, map_free_vars=True)) & (2**64 - 1)


def _key(digest: int, target: Target) -> str:
    return f"{digest:016x}-{target.canonical}-{versions()}"


@lru_cache(maxsize=1)
def versions() -> str:
    """The versions within which a schedule keeps its meaning: TVM's and LLVM's."""
    return f"tvm{tvm.__version__}-llvm{tvm.target.codegen.llvm_version_major(allow_none=True)}"


def to_json(func: tirx.PrimFunc) -> str:
    """The function as text that :func:`from_json` reads back in another process."""
    return str(tvm.ir.save_json(func))


def from_json(text: str) -> tirx.PrimFunc:
    """Inverse of :func:`to_json`; raises ``ValueError`` for anything that is no function."""
    func = tvm.ir.load_json(text)
    if not isinstance(func, tirx.PrimFunc):
        raise ValueError(f"a serialised PrimFunc is needed, got {type(func).__name__} from {json.dumps(text[:40])}")
    return func
