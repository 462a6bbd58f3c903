"""A compiled model in memory: call it with arrays, save it, time it."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlc import threads
from mlc.artifact import artifact, runtime
from mlc.artifact import metadata as description
from mlc.artifact.compact_weights import buffers, transformed, transformed_bytes
from mlc.artifact.cpu_features import missing_features
from mlc.artifact.data_dependent import truncated, visible_outputs
from mlc.artifact.devices import Device, device_of, is_out_of_memory, out_of_memory_error
from mlc.artifact.inputs import Fit, InputSlot, OutputSlot, check_apart, check_sizes, in_order
from mlc.artifact.library import loaded
from mlc.artifact.stopwatch import Stopwatch
from mlc.config import physical_cores
from mlc.cpu import tiles_denied
from mlc.errors import ArtifactError, InputError
from mlc.frontend.model import TensorSpec
from mlc.shapes import from_json
from mlc.target import generation

__all__ = ["Bundle", "Executable", "load", "pick"]

_BOUND = "{}_with_weights"
_WEIGHTS_FIT = "weights_fit"  # see mlc.artifact.argument_checks, which needs the compiler
_INTO = "main_into"  # see mlc.artifact.memory, which needs the compiler


class Executable:
    """A compiled model. ``exe(*arrays, **named)`` runs it; inputs are passed by position, by name, or both.

    Names that are not Python identifiers are passed through a dictionary: ``exe(**{"input.1": x})``. Several threads
    may call one executable; they take turns. A forked process may call it too.

    Attributes:
        inputs, outputs: :class:`mlc.frontend.model.TensorSpec` of each, with ``name``, ``shape`` and ``dtype``.
        states: The names of inputs that are memory of the caller to which a call appends (:class:`mlc.Generator`).
        metadata: Name, target, threads, versions, and under ``functions`` what each tensor function was made of.
    """

    def __init__(self, code: bytes, metadata: dict[str, Any], weights: Sequence[np.ndarray]) -> None:
        """``weights`` are bytes in the order of ``metadata["weights"]``; filters (``made``) are given untransformed,
        and transformed once, when the code is loaded."""
        self.metadata = metadata
        self.inputs = _specs(metadata["inputs"])
        self._all = tuple(
            replace(spec, length=tuple(entry["length"])) if "length" in entry else spec
            for spec, entry in zip(_specs(metadata["outputs"]), metadata["outputs"], strict=True))
        self.outputs = visible_outputs(self._all)
        self._code, self._weights = code, weights
        self._results = [Fit(spec) for spec in self._all]
        self._copied = [bool(entry["aliased"]) for entry in metadata["outputs"]]
        self._threads = min(int(metadata["threads"]), physical_cores())
        self._lock = threading.Lock()
        self._free = any(spec.free for spec in self.inputs)
        self.states = frozenset(metadata.get("states", ()))
        gpu = metadata["kind"] == "cuda"
        alignment = int(metadata.get("alignment", runtime.ALIGNMENT))
        self._slots = [OutputSlot(spec, "state", gpu) if spec.name in self.states else InputSlot(spec, gpu, alignment)
                       for spec in self.inputs]
        self._targets = [OutputSlot(spec, gpu=gpu) for spec in self.outputs]
        self._running: tuple[Callable[..., Any], Device] | None = None
        self._into: Callable[..., Any] | None = None
        self._machine: Any = None
        self._bound: list[Any] | None = None
        _living.add(self)

    def __call__(self, /, *arrays: Any, **named: Any) -> list[np.ndarray]:
        """Run the model; returns the outputs in the model's order, as arrays that the caller owns.

        An input is anything with ``__dlpack__`` (arrays of numpy and jax, tensors of torch and TVM), or that numpy can
        convert to an array. It is read in place if it is contiguous and starts at a multiple of 16 bytes (as those of
        torch and jax do, and writable ones of numpy), and copied otherwise. Outputs share memory with what compiled
        code wrote, and no later call writes to it: ``torch.from_dlpack(output)`` does not copy either. Code for GPUs
        also takes contiguous tensors of the first GPU; its inputs and outputs are copied.

        Raises :class:`mlc.errors.InputError` for arrays of a wrong name, shape or type, and
        :class:`mlc.errors.ArtifactError` if this machine cannot run the code.
        """
        values = arrays if not named and len(arrays) == len(self.inputs) else in_order(self.inputs, arrays, named)
        with self._lock:
            main, device = self._running or self._start()
            return self._collected(threads.call(self._threads, self._run, main, self._tensors(values, device)), device)

    def run(
        self, inputs: Sequence[Any] | Mapping[str, Any], outputs: Sequence[Any] | Mapping[str, Any], stream: Any = None
    ) -> None:
        """Run the model into the caller's memory: ``exe.run([x], [y])``, or both by name in dictionaries.

        Inputs are as for a call. Outputs are contiguous, writable numpy arrays or other tensors with ``__dlpack__``, of
        the right shape and type, that start at a multiple of 64 bytes (:meth:`empty_outputs` makes such arrays) and
        share no memory with each other or with inputs. Code for CPUs writes to them directly; what cannot be computed
        in place (an input or a weight that is returned as it is, results of a GPU) is copied.

        On a GPU everything runs on ``stream``: a number, PyTorch's stream, or any object with ``__cuda_stream__``. The
        default is the current stream of ``tvm_ffi``, then PyTorch's if a tensor is PyTorch's. If all inputs and outputs
        are on the GPU, this returns at once, and later work on that stream sees the results. If any is in host memory,
        or there is no such stream (then the default stream is used), it returns when the results are there.

        Raises :class:`mlc.errors.InputError` before anything is written, and :class:`mlc.errors.ArtifactError`.
        """
        if len(self._all) > len(self.outputs):
            raise InputError(f"the shapes of all outputs must follow from those of inputs, but some of {self._name} "
                             "depend on the data; call it instead")
        values = _in_order(self.inputs, inputs, "input")
        targets = _in_order(self.outputs, outputs, "output")
        with self._lock:
            main, device = self._running or self._start()
            device.begin([*values, *targets], stream)
            tensors = [slot.tensor(value, device.stream) for slot, value in zip(self._slots, values, strict=True)]
            outs = [slot.tensor(value, device.stream) for slot, value in zip(self._targets, targets, strict=True)]
            if self._free:
                check_sizes(self.inputs, [tuple(map(int, tensor.shape)) for tensor in tensors])
            check_apart(list(zip(self.inputs, tensors, strict=True)), list(zip(self.outputs, outs, strict=True)))
            tensors = self._given(tensors, device)
            if self._into is None:
                self._into = self._entry_into(main, device)
            threads.call(self._threads, self._run_into, self._into, tensors, outs, device)

    def empty_outputs(self) -> list[np.ndarray]:
        """Uninitialised arrays that :meth:`run` can write to.

        Raises :class:`mlc.errors.InputError` if the shapes of outputs depend on the call.
        """
        free = [spec for spec in self.outputs if spec.free]
        if free:
            raise InputError(f"every output must have a fixed shape, but that of {free[0]} depends on the call; call "
                             "the model once, and give arrays of the shapes that it returns")
        return [runtime.array_of(runtime.empty_tensor(spec.sized(), spec.dtype)) for spec in self.outputs]

    def time(self, /, *arrays: Any, repeats: int = 20, warmup: int = 2, **named: Any) -> tuple[float, ...]:
        """Time the compiled code on these inputs: seconds of each of ``repeats`` runs, after ``warmup`` untimed ones.

        Transfer of arrays is not included. Pass an input that is named like an option by position.
        """
        _check_options(repeats=repeats, warmup=warmup)
        values = in_order(self.inputs, arrays, named)
        with self._lock:
            main, device = self._running or self._start()
            tensors = self._tensors(values, device)
            return threads.call(self._threads, self._times, main, tensors, device, warmup, repeats)

    def profile(self, /, *arrays: Any, repeats: int = 10, **named: Any) -> dict[str, float]:
        """Time each tensor function: the seconds of all of its calls in one run, the median of ``repeats`` runs.

        Keys are the ``symbol`` of ``metadata["functions"]``. Profiling adds some 10 us per call, which are not counted.
        Pass an input named ``repeats`` by position.
        """
        _check_options(repeats=repeats)
        values = in_order(self.inputs, arrays, named)
        with self._lock:
            _, device = self._running or self._start()
            machine, main = self.machine(device)  # a separate one, since its instrument cannot be removed again
            watch = Stopwatch([entry["symbol"] for entry in self.metadata["functions"]], device.synchronise)
            machine["set_instrument"](watch)
            tensors = self._tensors(values, device)
            return threads.call(self._threads, watch.medians, lambda: self._run(main, tensors), repeats)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact, one file. Raises :class:`mlc.errors.ArtifactError` if that fails."""
        self._check([self.metadata])
        artifact.write(Path(path), self._code, self.metadata, self._weights)

    def _check(self, metadata: Sequence[dict[str, Any]]) -> None:
        try:
            description.check_variants(metadata)
        except ValueError as error:
            raise ArtifactError(f"{self._name} must be what a file can describe: {error}; name the model's "
                                "parts otherwise") from error

    @property
    def variant(self) -> artifact.Variant:
        """The code, metadata and weights, as a file stores them."""
        return artifact.Variant(self._code, self.metadata, list(self._weights))

    def __repr__(self) -> str:
        takes, gives = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        return f"<Executable {self.metadata['name']} for {self.metadata['target']}: ({takes}) -> ({gives})>"

    def _start(self) -> tuple[Callable[..., Any], Device]:
        """Load the code and bind the weights; happens once, at the first call or in :func:`load`."""
        check_machine(self.metadata)
        device = device_of(self.metadata)
        self._machine, main = self.machine(device)  # kept, since `main` does not keep it
        if not self._free and (outs := device.outputs(self._all)) and self._machine.implements_function(_INTO):
            into = self._entry(self._machine, _INTO, device)
            main = partial(_into_same, into, outs)
        self._running = main, device
        return self._running

    def _forked(self) -> None:
        """In a forked child, another thread's run never ends: replace its lock, and start a new virtual machine."""
        if self._lock.locked():
            self._lock, self._running, self._into = threading.Lock(), None, None

    def machine(self, device: Device) -> tuple[Any, Callable[..., Any]]:
        """A new virtual machine for the code, and its ``main`` with the weights bound.

        Raises :class:`mlc.errors.ArtifactError` with the message of the system's loader or of the virtual machine.
        """
        what = "load"
        try:
            machine = loaded(self._code)["vm_load_executable"]()
            machine["vm_initialization"](*device.vm_devices)
            if self._weights and machine.implements_function(_WEIGHTS_FIT):
                weights, what = device.weights(self._bound_weights()), "run on what its metadata describes"
                machine[_WEIGHTS_FIT](*weights)
            return machine, self._entry(machine, "main", device)
        except ArtifactError:  # the GPU has no memory for the weights
            raise
        except Exception as error:
            raise self._refused(what, error) from error

    def _entry(self, machine: Any, entry: str, device: Device) -> Callable[..., Any]:
        """A function of the virtual machine with the weights bound, which are its last arguments."""
        name = entry
        if self._weights:
            name = _BOUND.format(entry)
            machine["save_function"](entry, name, 1, *device.weights(self._bound_weights()))
        return device.wrapped(machine[name], machine.implements_function(f"{entry}{runtime.CAPTURED}"))

    def _entry_into(self, main: Callable[..., Any], device: Device) -> Callable[..., Any]:
        """The function that takes inputs and outputs. Code for GPUs computes into its own memory, and artifacts of
        earlier versions have only ``main``."""
        if self.metadata["kind"] != "cuda" and self._machine.implements_function(_INTO):
            return self._entry(self._machine, _INTO, device)
        return lambda *tensors: main(*tensors[: len(self.inputs)])

    @property
    def _name(self) -> str:
        """The model's name, which may be any text, as one line."""
        return " ".join(str(self.metadata["name"]).split())

    def _refused(self, what: str, error: Exception) -> ArtifactError:
        """An error that TVM's runtime raised, as one line."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if self.metadata["kind"] == "cuda" and is_out_of_memory(error):
            lies = "the code" if what == "load" else "what lies between the kernels"
            return out_of_memory_error(f"{lies} of {self._name}", error)
        return ArtifactError(f"the code of {self._name} must {what}, but TVM's runtime refused it: "
                             f"{lines[-1].strip()}; compile the model again")

    def _tensors(self, values: Sequence[Any], device: Device) -> list[Any]:
        device.begin(values)
        tensors = [slot.tensor(value, device.stream) for slot, value in zip(self._slots, values, strict=True)]
        if self._free:
            check_sizes(self.inputs, [tuple(map(int, tensor.shape)) for tensor in tensors])
        return self._given(tensors, device)

    def _given(self, tensors: Sequence[Any], device: Device) -> list[Any]:
        """The caller's tensors as the code takes them: states in place, all else where the code can read it."""
        return [device.state(spec, tensor) if spec.name in self.states else device.to_device(index, tensor)
                for index, (spec, tensor) in enumerate(zip(self.inputs, tensors, strict=True))]

    def state_memory(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Zeros for a state of this model, in memory that its code appends to: an array, or a tensor on the GPU.

        Raises :class:`mlc.errors.ArtifactError` if this machine cannot run the code or has no memory for it.
        """
        with self._lock:
            _, device = self._running or self._start()
            return device.zeros(shape, dtype)

    def _run(self, main: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        try:
            return main(*tensors)
        except Exception as error:  # the virtual machine checks its arguments
            raise self._refused("run on what its metadata describes", error) from error

    def _run_into(self, into: Callable[..., Any], tensors: Sequence[Any], outs: Sequence[Any], device: Device) -> None:
        result = self._run(into, (*tensors, *outs))
        for index, (spec, tensor, out) in enumerate(zip(self.outputs, self._made(result), outs, strict=True)):
            if spec.free and tuple(tensor.shape) != tuple(out.shape):
                raise InputError(f"output {spec.name} must have shape {list(map(int, tensor.shape))} for these inputs, "
                                 f"got {list(map(int, out.shape))}; give an array of that shape")
            if tensor.data_ptr() != out.data_ptr():
                device.copy(index, tensor, out)
        device.end()

    def _times(
        self, main: Callable[..., Any], tensors: Sequence[Any], device: Device, warmup: int, repeats: int
    ) -> tuple[float, ...]:
        for _ in range(warmup):
            self._run(main, tensors)
        device.synchronise()
        return tuple(self._seconds(main, tensors, device) for _ in range(repeats))

    def _seconds(self, main: Callable[..., Any], tensors: Sequence[Any], device: Device) -> float:
        started = time.perf_counter()
        self._run(main, tensors)
        device.synchronise()
        return time.perf_counter() - started

    def _bound_weights(self) -> list[Any]:
        if self._bound is None:
            table = self.metadata["weights"]
            made = iter(buffers([transformed_bytes(e["shape"], e["made"]) for e in table if "made" in e]))
            self._bound = [_as_read(data, entry, made) for data, entry in zip(self._weights, table, strict=True)]
        return self._bound

    def _made(self, result: Any) -> Sequence[Any]:
        """The tensors that compiled code returned, one for each output."""
        tensors: Sequence[Any] = [result] if len(self._all) == 1 and hasattr(result, "__dlpack__") else result
        if len(tensors) != len(self._all):
            raise self._otherwise()
        return tensors

    def _otherwise(self) -> ArtifactError:
        return ArtifactError(f"{self._name} must return what its metadata describes, but does not; "
                             "compile the model again")

    def _collected(self, result: Any, device: Device) -> list[np.ndarray]:
        arrays = device.to_host(self._made(result))
        if not all(fit.takes(array) for fit, array in zip(self._results, arrays, strict=True)):
            raise self._otherwise()
        arrays = [array.copy() if copied else array for array, copied in zip(arrays, self._copied, strict=True)]
        if len(self._all) == len(self.outputs):
            return arrays
        try:
            return truncated(arrays, self._all)
        except ValueError:
            raise self._otherwise() from None


class Bundle(Executable):
    """A model compiled for several targets: runs the best of ``variants`` that this machine can run, and is saved with
    all of them. If it can run none, a call raises an error."""

    def __init__(self, variants: Sequence[Executable]) -> None:
        self.variants = tuple(variants)
        try:
            best = self.variants[pick([exe.metadata for exe in variants], "the model")]
        except ArtifactError:  # compiled for other machines
            best = self.variants[0]
        own = best.variant
        super().__init__(own.code, own.metadata, own.weights)
        self.shared_bytes = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, of which :func:`mlc.load` picks the best variant. Afterwards ``shared_bytes`` is what sharing
        weights between variants has saved."""
        self._check([exe.metadata for exe in self.variants])
        self.shared_bytes = artifact.write_bundle(Path(path), [exe.variant for exe in self.variants])


_living: weakref.WeakSet[Executable] = weakref.WeakSet()


def _forked() -> None:
    for exe in list(_living):
        exe._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _as_read(data: np.ndarray, entry: Mapping[str, Any], buffers_for_made: Iterator[np.ndarray]) -> Any:
    """A weight as compiled code reads it; a transformed one is written to the next of the buffers."""
    import tvm_ffi

    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if "made" in entry:
        filters, data = data.view(np.float32).reshape(shape), next(buffers_for_made)
        shape = transformed(filters, entry["made"], data)
    return runtime.view(tvm_ffi.from_dlpack(data), shape, dtype)


def _into_same(into: Callable[..., Any], outs: Sequence[Any], /, *inputs: Any) -> Any:
    return into(*inputs, *outs)


def _in_order(specs: Sequence[TensorSpec], given: Sequence[Any] | Mapping[str, Any], kind: str) -> Sequence[Any]:
    if isinstance(given, list | tuple) and len(given) == len(specs):
        return given
    if isinstance(given, Mapping):
        return in_order(specs, (), given, kind)
    if not isinstance(given, Sequence):
        raise InputError(f"{kind}s must be a list or a dictionary of arrays, got {type(given).__name__}; put it in one")
    return in_order(specs, given, {}, kind)


def _check_options(**options: Any) -> None:
    """Options of a method share their names with inputs: raise if one was given what is meant for an input."""
    for name, value in options.items():
        if not isinstance(value, int | np.integer):
            raise InputError(f"the option {name} must be a whole number, got {type(value).__name__}; give an input of "
                             "that name by position")


def _specs(entries: Sequence[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(entry["name"], from_json(entry["shape"]), entry["dtype"]) for entry in entries)


def check_machine(metadata: dict[str, Any]) -> None:
    """Raise :class:`ArtifactError` if this machine's CPU or TVM cannot run the code."""
    lacking = missing_features(metadata["machine"], tuple(metadata["features"]))
    if lacking:
        what = f"a {lacking[0]} CPU" if lacking[0] == metadata["machine"] else f"the instructions {', '.join(lacking)}"
        if any(name.startswith("amx_") for name in lacking) and tiles_denied():
            raise ArtifactError(f"the module was built for {metadata['target']} and needs {what}, which the kernel "
                                "does not let this process use; allow it tiles (arch_prctl, ARCH_REQ_XCOMP_PERM), or "
                                "compile the model for an older CPU (`mlc targets` lists them)")
        raise ArtifactError(f"the module was built for {metadata['target']} and needs {what}, which this "
                            f"{platform.machine()} CPU does not have; compile the model on it, or for an older CPU "
                            "(`mlc targets` lists them)")
    built, here = metadata["versions"]["tvm"], runtime.version()
    if built != here:
        raise ArtifactError(f"the module was built with TVM {built}, but TVM {here} is installed; compile the model "
                            f"again, or `pip install apache-tvm=={built}`")


def pick(metadata: Sequence[dict[str, Any]], name: str) -> int:
    """The index of the variant that this machine should run: of those that it can run, one for a GPU, with kernels for
    the latest architecture, else the one that uses the most instruction-set extensions. Raises :class:`ArtifactError`
    if it can run none."""
    refused: list[ArtifactError] = []
    for index in sorted(range(len(metadata)), key=lambda i: _rank(metadata[i]), reverse=True):
        try:
            check_machine(metadata[index])
            device_of(metadata[index])
        except ArtifactError as error:
            refused.append(error)
        else:
            return index
    if len(refused) == 1:
        raise refused[0]
    targets = ", ".join(each["target"] for each in metadata)
    raise ArtifactError(f"{name} must have code that this machine can run, but was built for {targets}: {refused[-1]}")


def _rank(metadata: dict[str, Any]) -> tuple[Any, ...]:
    """Sort key of variants, larger is better. Code for several architectures has kernels for the lowest of them, which
    is compared first; then whether there is machine code for a later one, which the driver need not compile."""
    if metadata["kind"] != "cuda":
        return False, len(metadata["features"])
    archs = sorted(map(generation, json.loads(metadata["target_attrs"])["arch"].split(",")))
    return True, archs[0], archs[-1]


def load(path: str | os.PathLike[str], verify: bool = True, target: str = "") -> Executable:
    """Load what :meth:`Executable.save` wrote, ready to run; see :func:`mlc.load`.

    ``target`` is the canonical name of the variant to load (default: :func:`pick` decides).
    """
    found = artifact.read(path, verify)
    described = [variant.metadata for variant in found.variants]
    try:
        description.check_variants(described)
    except ValueError as error:
        raise artifact.nonsense(found.path, error) from error
    index = next((i for i, each in enumerate(described) if each["target"] == target), None)
    chosen = found.variants[pick(described, str(path)) if index is None else index]
    exe = Executable(chosen.code, chosen.metadata, chosen.weights)
    exe._start()
    return exe
