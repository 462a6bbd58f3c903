"""A compiled model in memory: call it with arrays, save it, time it."""

from __future__ import annotations

import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlc import threads
from mlc.build import artifact, runtime
from mlc.build.features import missing_features
from mlc.build.inputs import InputSlot, in_order
from mlc.build.places import Place, place_of
from mlc.build.stopwatch import Stopwatch
from mlc.config import physical_cores
from mlc.errors import ArtifactError, InputError
from mlc.frontend.model import TensorSpec

__all__ = ["Executable", "load"]

_BOUND = "main_with_weights"


class Executable:
    """A compiled model. ``exe(*arrays, **named)`` runs it; inputs come by position, by name, or both.

    Names that are no Python identifiers go through a dictionary: ``exe(**{"input.1": x})``. Several threads may
    call it; they take turns. ``metadata`` is what the artifact says of itself: name, target, threads, versions, and
    under ``functions`` what each tensor function was made of.
    """

    def __init__(
        self, code: bytes, metadata: dict[str, Any], weights: Sequence[np.ndarray], path: Path | None = None
    ) -> None:
        """``weights`` are bytes in the order of ``metadata["weights"]``; ``path`` is a file with the code in it."""
        self.metadata = metadata
        self.inputs = _specs(metadata["inputs"])
        self.outputs = _specs(metadata["outputs"])
        self._code, self._weights, self._path = code, weights, path
        self._copied = [bool(entry["aliased"]) for entry in metadata["outputs"]]
        self._threads = min(int(metadata["threads"]), physical_cores())
        self._lock = threading.Lock()
        self._slots = [InputSlot(spec) for spec in self.inputs]
        self._running: tuple[Callable[..., Any], Place] | None = None
        self._machine: Any = None

    def __call__(self, /, *arrays: Any, **named: Any) -> list[np.ndarray]:
        """Run the model; the outputs, in the model's order, are the caller's own.

        Raises :class:`mlc.errors.InputError` for arrays of a wrong name, shape or type, and
        :class:`mlc.errors.ArtifactError` where this machine cannot run the code.
        """
        values = arrays if not named and len(arrays) == len(self.inputs) else in_order(self.inputs, arrays, named)
        with self._lock:
            main, place = self._running or self._start()
            threads.configure(self._threads)
            return self._collected(main(*self._tensors(values, place)), place)

    def time(self, /, *arrays: Any, repeats: int = 20, warmup: int = 2, **named: Any) -> tuple[float, ...]:
        """Seconds of each of ``repeats`` runs of the compiled code on these inputs, after ``warmup`` untimed ones.

        Getting arrays in and out is not counted. An input named like an option goes by position.
        """
        _check_options(repeats=repeats, warmup=warmup)
        values = in_order(self.inputs, arrays, named)
        with self._lock:
            main, place = self._running or self._start()
            threads.configure(self._threads)
            tensors = self._tensors(values, place)
            for _ in range(warmup):
                main(*tensors)
            place.synchronise()
            return tuple(_seconds(main, tensors, place) for _ in range(repeats))

    def profile(self, /, *arrays: Any, repeats: int = 10, **named: Any) -> dict[str, float]:
        """Seconds that each tensor function takes in one run, all its calls together: the median of ``repeats`` runs.

        Keys are the ``symbol`` of ``metadata["functions"]``. Watching costs some 10 us a call, not counted here.
        An input named ``repeats`` goes by position.
        """
        _check_options(repeats=repeats)
        values = in_order(self.inputs, arrays, named)
        with self._lock:
            _, place = self._running or self._start()
            machine, main = self.machine(place)  # one of its own, since what watches cannot be taken out again
            watch = Stopwatch([entry["symbol"] for entry in self.metadata["functions"]], place.synchronise)
            machine["set_instrument"](watch)
            threads.configure(self._threads)
            tensors = self._tensors(values, place)
            return watch.medians(lambda: main(*tensors), repeats)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact, one file; raises :class:`mlc.errors.ArtifactError` where that cannot be."""
        artifact.write(Path(path), self._code, self.metadata, self._weights)

    def __repr__(self) -> str:
        takes, gives = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        return f"<Executable {self.metadata['name']} for {self.metadata['target']}: ({takes}) -> ({gives})>"

    def _start(self) -> tuple[Callable[..., Any], Place]:
        """Load the code and bind the weights; happens once, at the first call or in :func:`load`."""
        check_machine(self.metadata)
        place = place_of(self.metadata)
        self._machine, main = self.machine(place)  # kept, since `main` does not keep it
        self._running = main, place
        return self._running

    def machine(self, place: Place) -> tuple[Any, Callable[..., Any]]:
        """A new virtual machine for the code, and its ``main`` with the weights bound.

        Raises :class:`mlc.errors.ArtifactError` with whatever the system's loader or the machine has to say.
        """
        try:
            machine = _module(self._code, self._path)["vm_load_executable"]()
            machine["vm_initialization"](*place.devices)
            if not self._weights:
                return machine, machine["main"]
            machine["save_function"]("main", _BOUND, 1, *self._bound_weights())
            return machine, machine[_BOUND]
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ArtifactError(f"the code of {self.metadata['name']} must load, but TVM's runtime refused it: "
                                f"{lines[-1].strip()}; compile the model again") from error

    def _tensors(self, values: Sequence[Any], place: Place) -> list[Any]:
        tensors = (slot.tensor(value) for slot, value in zip(self._slots, values, strict=True))
        return [place.entered(index, tensor) for index, tensor in enumerate(tensors)]

    def _bound_weights(self) -> list[Any]:
        import tvm_ffi

        table = self.metadata["weights"]
        return [
            runtime.view(tvm_ffi.from_dlpack(data), tuple(entry["shape"]), entry["dtype"])
            for data, entry in zip(self._weights, table, strict=True)
        ]

    def _collected(self, result: Any, place: Place) -> list[np.ndarray]:
        tensors = [result] if len(self._copied) == 1 and hasattr(result, "__dlpack__") else result
        arrays = map(place.left, tensors)
        return [array.copy() if copied else array for array, copied in zip(arrays, self._copied, strict=True)]


def _check_options(**options: Any) -> None:
    """Options of a method share their names with inputs: raise where one got what is meant for an input."""
    for name, value in options.items():
        if not isinstance(value, int | np.integer):
            raise InputError(f"the option {name} must be a whole number, got {type(value).__name__}; give an input of "
                             "that name by position")


def _seconds(main: Callable[..., Any], tensors: Sequence[Any], place: Place) -> float:
    started = time.perf_counter()
    main(*tensors)
    place.synchronise()
    return time.perf_counter() - started


def _specs(entries: Sequence[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(entry["name"], tuple(entry["shape"]), entry["dtype"]) for entry in entries)


_opened: set[str] = set()  # files loaded as they are, by this process


def _module(code: bytes, path: Path | None) -> Any:
    """The shared library as a module of TVM's runtime.

    A file is opened in place once. Again, it goes through a copy of its code: the system's loader goes by the name
    and would hand out what the file held before, and two modules must not share one library's variables.
    """
    import tvm_ffi

    runtime.function("runtime.NumThreads")  # the library must be there before code that calls it
    place = os.path.realpath(path) if path is not None else ""
    if place and place not in _opened:
        _opened.add(place)
        return tvm_ffi.load_module(place)
    with tempfile.NamedTemporaryFile(prefix="mlc-", suffix=".so") as file:
        file.write(code)
        file.flush()
        return tvm_ffi.load_module(file.name)


def check_machine(metadata: dict[str, Any]) -> None:
    """Raise :class:`ArtifactError` where this machine's CPU or TVM cannot run the code."""
    lacking = missing_features(metadata["machine"], tuple(metadata["features"]))
    if lacking:
        what = f"a {lacking[0]} CPU" if lacking[0] == metadata["machine"] else f"the instructions {', '.join(lacking)}"
        raise ArtifactError(f"the module was built for {metadata['target']} and needs {what}, which this "
                            f"{platform.machine()} CPU does not have; compile the model on it, or for an older level "
                            "such as --target x86-64-v3")
    built, here = metadata["versions"]["tvm"], runtime.version()
    if built != here:
        raise ArtifactError(f"the module was built with TVM {built}, but TVM {here} is installed; compile the model "
                            f"again, or `pip install apache-tvm=={built}`")


def load(path: str | os.PathLike[str]) -> Executable:
    """Load what :meth:`Executable.save` wrote, ready to run.

    The weights stay in the file and are mapped into memory. Raises :class:`mlc.errors.ArtifactError` for a file that
    is missing, cut short or no artifact, and where this machine is not one that it was built for.
    """
    found = artifact.read(path)
    exe = Executable(found.code(), found.metadata, artifact.mapped_weights(found), found.path)
    exe._start()
    return exe
