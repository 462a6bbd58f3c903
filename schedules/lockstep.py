"""Schedules functions with free sizes: every step that a space takes for the usual sizes is applied to the function
itself.

A space's program asks for extents, and decides by them. It is run on the function for its usual sizes, and every step
that it takes is taken on the function with free sizes first: both stay in lockstep, and the trace of the latter is the
candidate. A loop of free extent is split into as many tiles as there are, the last of which is predicated, and lowering
peels it.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from schedules.analysis import walk
from schedules.errors import InvalidDecision
from schedules.loop_partition import HINT

__all__ = ["Lockstep", "is_fixed"]

#: elements of a vectorised piece of a loop of free extent: one AVX-512 or two AVX2 vectors of float32
_WIDEST = 16

_RANDOM = (s_tir.schedule.LoopRV, s_tir.schedule.SBlockRV, s_tir.schedule.ExprRV)


class Lockstep:
    """Two schedules that take the same steps; what is asked is answered by the one with ``usual`` sizes.

    For a ``gpu`` an instruction that does not fit the free sizes is an error, where for CPUs its loops stay, and
    nothing is peeled: threads of a ragged tile test for themselves. What TVM must prove before a step it proves for the
    usual sizes, which nothing divides: the other schedule takes the step without.
    """

    def __init__(self, usual: s_tir.Schedule, free: s_tir.Schedule, *, gpu: bool = False) -> None:
        self.usual, self.free, self._gpu = usual, free, gpu
        self._twin: dict[Any, Any] = {}

    def __tvm_ffi_object__(self) -> s_tir.Schedule:
        return self.usual

    @property
    def mod(self) -> tvm.IRModule:
        return self.usual.mod

    def get(self, rv: Any) -> Any:
        return self.usual.get(rv)

    def __getattr__(self, name: str) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            there = [self._on_free(each) for each in args]
            others = {key: self._on_free(each) for key, each in options.items()}
            if self._gpu:
                result = getattr(self.usual, name)(*args, **options)  # its checks are those of both
            if name == "tensorize" and not self._gpu and not self._possible(name, there, others):
                made = None  # the loops that an instruction would replace stay
            elif name == "split":
                made = self._split(there, others)
            elif name in ("vectorize", "unroll") and self._free_extent(there[0]):
                made = None
                if name == "vectorize":
                    self._vectorise(args[0], there[0])
            else:
                if name == "rfactor":
                    self._check_whole(there[0])
                if name == "fuse":
                    self._unhinted(there)
                made = self._taken(name, there, others)  # first: what it refuses leaves both as they were
            if not self._gpu:
                try:
                    result = getattr(self.usual, name)(*args, **options)
                except s_tir.ScheduleError as error:
                    raise InvalidDecision(f"{name} must be possible for the usual sizes too, but it is not") from error
            self._pair(result, made)
            return result

        return step

    def _taken(self, name: str, args: list[Any], options: dict[str, Any]) -> Any:
        try:
            return getattr(self.free, name)(*args, **options)
        except s_tir.ScheduleError as error:
            if not self._gpu:
                raise
            raise InvalidDecision(f"{name} must be possible for free sizes too, but it is not") from error
        except Exception as error:  # TVM's checks of itself, which no space expects
            raise InvalidDecision(f"{name} must be possible for free sizes, but TVM refused it: "
                                  f"{str(error).strip().splitlines()[-1]}") from error

    def _unhinted(self, loops: list[Any]) -> None:
        """Loops without the hints of :meth:`_split`, with which TVM fuses none: nothing is peeled off what they make.
        """
        for loop in loops:
            if HINT in self.free.get(loop).annotations:
                self.free.unannotate(loop, HINT)

    def _check_whole(self, loop: Any) -> None:
        """Raise :class:`InvalidDecision` for a loop whose iterations a predicate bounds: ``rfactor`` drops that, and
        what lies behind the end would be added up, too."""
        ragged: list[Any] = []
        walk(self.free.get(loop), (s_tir.SBlockRealize, lambda realize: ragged.append(realize.predicate)))
        if not all(isinstance(predicate, tirx.IntImm) for predicate in ragged):
            raise InvalidDecision("a sum must be cut into equal parts, but they are ragged for some of its free sizes")

    def _possible(self, name: str, args: list[Any], options: dict[str, Any]) -> bool:
        """Whether a step that may fail half-way would succeed."""
        try:
            getattr(self.free.copy(), name)(*args, **options)
        except Exception:
            return False
        return True

    def _free_extent(self, loop: Any) -> bool:
        return not isinstance(self.free.get(loop).extent, tirx.IntImm)

    def _vectorise(self, usual: Any, loop: Any) -> None:
        """Vectorise a loop of free extent by pieces that the usual one has several of, or one."""
        extent = int(self.usual.get(usual).extent)
        width = min(1 << (extent.bit_length() - 1), _WIDEST)
        if width > 1:
            _, self._twin[usual] = self._split([loop, [None, width]], {})
            self.free.vectorize(self._twin[usual])

    def _split(self, args: list[Any], options: dict[str, Any]) -> Any:
        """Split a loop; one of free extent into as many of its outermost tiles as there are, the last one ragged."""
        loop = args[0] if args else options["loop"]
        factors = list(args[1] if len(args) > 1 else options["factors"])
        if not self._free_extent(loop):
            return self._taken("split", args, options)
        if None not in factors:
            factors[0] = None
        given = [loop, factors, *args[2:]]
        made = self._taken("split", given, {k: v for k, v in options.items() if k not in ("loop", "factors")})
        if not self._gpu and any(factor not in (None, 1) for factor in factors):  # full tiles test nothing
            self.free.annotate(made[min(1, len(made) - 2)], HINT, True)
        return made

    def _on_free(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._on_free(each) for each in value)
        return self._twin[value] if isinstance(value, _RANDOM) else value

    def _pair(self, usual: Any, free: Any) -> None:
        if isinstance(usual, _RANDOM):
            self._twin[usual] = free
        elif isinstance(usual, list | tuple | tvm_ffi.Array):
            if len(usual) != len(free):
                raise InvalidDecision("a step must find as many loops and blocks whatever the sizes are")
            for one, other in zip(usual, free, strict=True):
                self._pair(one, other)


def is_fixed(sch: s_tir.Schedule | Lockstep, loop: Any) -> bool:
    """Whether a loop that ``sch`` shows runs as often in every call."""
    return not isinstance(sch, Lockstep) or not sch._free_extent(sch._on_free(loop))
