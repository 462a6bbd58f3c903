"""Models of which an input decides shapes: code is made for each of its values, when they first come."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.errors import InputError, UsageError

if TYPE_CHECKING:
    from mlc.artifact import Executable

__all__ = ["MOST_KEPT", "SpecialisingExecutable"]

#: executables that one model keeps; of the others, the one that was not called for the longest time goes
MOST_KEPT = 8


class SpecialisingExecutable:
    """A model called as an :class:`~mlc.artifact.Executable` is, ``exe(*arrays, **named)``.

    ``inputs`` are the names of its inputs in order, and ``decisive`` those whose values decide shapes. A call with new
    values of these compiles the model for them first; the last :data:`MOST_KEPT` are kept. Several threads may call it.
    """

    def __init__(self, name: str, inputs: Sequence[str], decisive: Sequence[str],
                 build: Callable[[Mapping[str, np.ndarray]], Executable]) -> None:
        """``build`` compiles for values by name."""
        self.name, self.inputs, self.decisive = name, tuple(inputs), tuple(decisive)
        self._build, self._lock = build, threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], Executable] = OrderedDict()

    def __call__(self, /, *arrays: Any, **named: Any) -> list[np.ndarray]:
        """Run the model. Raises :class:`mlc.errors.InputError` for arrays that do not fit, and what
        :func:`mlc.compile` raises for values that no code can be made for."""
        given = self._by_name(arrays, named)
        exe = self.compiled(**{name: given.pop(name) for name in self.decisive})
        return exe(**given)

    def compiled(self, **values: Any) -> Executable:
        """The executable for these values, which can be saved; they are no inputs of it."""
        missing = [name for name in self.decisive if name not in values]
        if missing or len(values) > len(self.decisive):
            raise InputError(f"{self.name} is compiled for values of {', '.join(self.decisive)}, got "
                             f"{', '.join(values) or 'none'}")
        arrays = {name: np.asarray(values[name]) for name in self.decisive}
        key = tuple((array.dtype.str, array.shape, array.tobytes()) for array in arrays.values())
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._build(arrays)
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raises :class:`mlc.errors.UsageError`: there is no code for all values; save what :meth:`compiled` gives."""
        names = ", ".join(f"{name}=..." for name in self.decisive)
        raise UsageError(f"a file holds code for known shapes, but those of {self.name} depend on the values of "
                         f"{', '.join(self.decisive)}; save exe.compiled({names})")

    def __repr__(self) -> str:
        return f"<SpecialisingExecutable {self.name}: ({', '.join(self.inputs)}), by {', '.join(self.decisive)}>"

    def _by_name(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        given = {**dict(zip(self.inputs, arrays, strict=False)), **named}
        if len(arrays) + len(named) != len(self.inputs) or given.keys() != set(self.inputs):
            raise InputError(f"{self.name} takes {', '.join(self.inputs)}, got {len(arrays)} by position"
                             + (f" and {', '.join(named)} by name" if named else ""))
        return given
