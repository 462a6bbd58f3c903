"""Executables for models with shape inputs: code is compiled for each combination of their values, at the first call.

So do sequences and optionals, by how many tensors they hold, of which shapes.
"""

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

    Inputs that are ``containers``, by name and kind, are lists of arrays (``sequence``, ``optional sequence``) or an
    array (``optional``), and an optional may be None. So are outputs. What each call's hold is compiled for, too, as
    ``x/0, x/1, …``, which are inputs and outputs of :meth:`compiled`.
    """

    def __init__(
        self, name: str, inputs: Sequence[str], decisive: Sequence[str],
        build: Callable[[Mapping[str, np.ndarray], Mapping[str, Any]], Executable],
        containers: Mapping[str, str] | None = None, outputs: Mapping[str, str] | None = None,
        shapes: Mapping[str, Any] | None = None,
    ) -> None:
        """``build`` compiles for values by name, and for the shapes of what containers hold. ``outputs`` are all, by
        name and kind, where some are containers. ``shapes`` of containers are instead of those of a call: a text is
        what each tensor of a sequence has."""
        self.name, self.inputs, self.decisive = name, tuple(inputs), tuple(decisive)
        self.containers, self._shapes = dict(containers or {}), dict(shapes or {})
        self._outputs = dict(outputs or {}) if any(kind != "tensor" for kind in (outputs or {}).values()) else {}
        self._build, self._lock = build, threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], Executable] = OrderedDict()

    def __call__(self, /, *arrays: Any, **named: Any) -> list[Any]:
        """Run the model. Raises :class:`mlc.errors.InputError` for arrays that do not fit, and what
        :func:`mlc.compile` raises for values that no code can be made for."""
        given = self._by_name(arrays, named)
        exe = self.compiled(**{name: given[name] for name in (*self.decisive, *self.containers)})
        tensors = {name: value for name, value in given.items()
                   if name not in self.containers and name not in self.decisive}
        for name, kind in self.containers.items():
            tensors |= {f"{name}/{i}": each for i, each in enumerate(_held(name, kind, given[name]) or ())}
        found = exe(**tensors)
        return self._nested([spec.name for spec in exe.outputs], found) if self._outputs else found

    def compiled(self, **values: Any) -> Executable:
        """The executable for these values, which can be saved; they are no inputs of it, but tensors that containers
        hold are."""
        wanted = (*self.decisive, *self.containers)
        if values.keys() != set(wanted):
            raise InputError(f"{self.name} is compiled for values of {', '.join(wanted)}, got "
                             f"{', '.join(values) or 'none'}")
        arrays = {name: np.asarray(values[name]) for name in self.decisive}
        forms = {name: self._form(name, _held(name, kind, values[name])) for name, kind in self.containers.items()}
        key = (tuple((array.dtype.str, array.shape, array.tobytes()) for array in arrays.values()),
               tuple(forms.values()))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._build(arrays, forms)
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def _form(self, name: str, held: list[Any] | None) -> Any:
        """The shapes of the tensors of a container: None for none, one shape, or several."""
        if held is None:
            return None
        said, single = self._shapes.get(name), self.containers[name] == "optional"
        if said is not None and (single or not isinstance(said, str)):
            return said
        sizes = tuple(_shape(each, f"{name}/{i}") if said is None else said for i, each in enumerate(held))
        return sizes[0] if single else sizes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raises :class:`mlc.errors.UsageError` where inputs decide shapes: there is no code for all values; save what
        :meth:`compiled` gives."""
        if not (decisive := (*self.decisive, *self.containers)):
            return self.compiled().save(path)
        names = ", ".join(f"{name}=..." for name in decisive)
        raise UsageError(f"a file holds code for known shapes, but those of {self.name} depend on the values of "
                         f"{', '.join(decisive)}; save exe.compiled({names})")

    def __repr__(self) -> str:
        by = ", ".join((*self.decisive, *self.containers))
        return f"<SpecialisingExecutable {self.name}: ({', '.join(self.inputs)}), by {by}>"

    def _by_name(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        given = {**dict(zip(self.inputs, arrays, strict=False)), **named}
        if len(arrays) + len(named) != len(self.inputs) or given.keys() != set(self.inputs):
            raise InputError(f"{self.name} takes {', '.join(self.inputs)}, got {len(arrays)} by position"
                             + (f" and {', '.join(named)} by name" if named else ""))
        return given

    def _nested(self, names: Sequence[str], arrays: Sequence[np.ndarray]) -> list[Any]:
        """The outputs, those of containers put together."""
        by_name, found = dict(zip(names, arrays, strict=True)), list[Any]()
        for name, kind in self._outputs.items():
            if kind == "tensor":
                found.append(by_name[name])
                continue
            held = list[np.ndarray]()
            while (tensor := f"{name}/{len(held)}") in by_name:
                held.append(by_name[tensor])
            found.append(held if kind == "sequence" else None if not held else held[0] if kind == "optional" else held)
        return found


def _held(name: str, kind: str, value: Any) -> list[Any] | None:
    """The contents of a sequence or an optional; raises :class:`mlc.errors.InputError` for a value of another kind."""
    if value is None and kind.startswith("optional"):
        return None
    if kind == "optional":
        return [value]
    if not isinstance(value, list | tuple):
        raise InputError(f"input {name} must be a list of arrays, as it is {'an' if kind[0] == 'o' else 'a'} {kind}, "
                         f"got {type(value).__name__}; put them in a list")
    return list(value)


def _shape(value: Any, name: str) -> tuple[int, ...]:
    """The shape of an array, or of anything that numpy can convert to one."""
    shape = getattr(value, "shape", None)
    try:
        if shape is None:
            return np.shape(np.from_dlpack(value) if hasattr(value, "__dlpack__") else value)
        return tuple(map(int, shape))
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InputError(f"input {name} must be an array, got {type(value).__name__}: {error}") from None
