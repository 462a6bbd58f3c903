"""The public functions: :func:`compile` a model, :func:`tune` it, and :func:`load` what was compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from mlc.artifact import Executable
    from mlc.compilation import Compilation
    from mlc.graph.substitute.choose import Decision
    from mlc.log import LogReader
    from mlc.measure import Measurer
    from mlc.shapes import Shape
    from mlc.specialising import SpecialisingExecutable
    from mlc.target import Target
    from mlc.tuning import TuneReport

__all__ = ["compile", "load", "tune"]


@overload
def compile(
    model: Any,
    target: str | Target | Sequence[str | Target] = ...,
    log: str | os.PathLike[str] | LogReader | bool | None = ...,
    *,
    example_inputs: Sequence[Any] | None = ...,
    shapes: Mapping[str, Shape] | None = ...,
    values: Mapping[str, Any],
    threads: int | None = ...,
    winograd: bool | None = ...,
    substitutions: bool | None = ...,
    precision: str = ...,
    integers: bool | None = ...,
    on_decision: Callable[[Decision], None] | None = ...,
) -> Executable: ...


@overload
def compile(
    model: Any,
    target: str | Target | Sequence[str | Target] = ...,
    log: str | os.PathLike[str] | LogReader | bool | None = ...,
    *,
    example_inputs: Sequence[Any] | None = ...,
    shapes: Mapping[str, Shape] | None = ...,
    values: None = ...,
    threads: int | None = ...,
    winograd: bool | None = ...,
    substitutions: bool | None = ...,
    precision: str = ...,
    integers: bool | None = ...,
    on_decision: Callable[[Decision], None] | None = ...,
) -> Executable | SpecialisingExecutable: ...


def compile(
    model: Any,
    target: str | Target | Sequence[str | Target] = "native",
    log: str | os.PathLike[str] | LogReader | bool | None = None,
    *,
    example_inputs: Sequence[Any] | None = None,
    shapes: Mapping[str, Shape] | None = None,
    values: Mapping[str, Any] | None = None,
    threads: int | None = None,
    winograd: bool | None = None,
    substitutions: bool | None = None,
    precision: str = "f32",
    integers: bool | None = None,
    on_decision: Callable[[Decision], None] | None = None,
) -> Executable | SpecialisingExecutable:
    """Compile a model for a target, with the best schedules that are known.

    Args:
        model: The path of an ONNX file, an ``onnx.ModelProto``, a ``torch.nn.Module`` with ``example_inputs``, a
            ``torch.export.ExportedProgram``, or a Relax ``IRModule``.
        target: One of the names that ``mlc targets`` lists, or TVM's target string. Several, in a list or separated by
            commas, make a :class:`mlc.artifact.Bundle`: one file with code for all of them.
        log: The path of a tuning log, or an open log. None (or True) means your own log for the target, read over the
            shipped ones; False means no log. A function that the log does not know gets the first seed of its search
            space, which is computed from the target's registers, vector width and caches.
        example_inputs: A tuple of tensors to export a ``torch.nn.Module`` with.
        shapes: Sizes or ranges of sizes of the free dimensions of inputs, by name: ``{"x": ((1, 32), 3, 224, 224)}``
            or ``{"x": "1..32,3,224,224"}``. A dimension that is left out has :data:`mlc.shapes.DEFAULT_RANGE`. The
            executable takes every size in the ranges and returns outputs of the actual sizes. The shapes of a sequence
            are a list with a shape for each tensor, or a text that is the shape of each; None for an empty optional.
        values: Values of inputs of an ONNX model that become constants. Inputs whose values decide shapes (the sizes of
            a ``Reshape``, the axes of a ``ReduceSum``) must become constants: see the return value.
        threads: The number of threads that the code is made for and runs on (default: the physical cores).
        winograd: False forbids Winograd's algorithm for 3x3 convolutions, which is used where the log, or an estimate,
            says that it is faster, and rounds more (relative error about 1e-5,
            :mod:`mlc.graph.algorithms.winograd`). None: as ``MLC_WINOGRAD`` says.
        substitutions: False keeps the model's own graph. Otherwise proved rules (``mlc rules list``) may replace it, if
            a tuning run has decided so, or if the log or an estimate says that another graph is clearly faster. None:
            as ``MLC_SUBSTITUTIONS`` says.
        precision: What operands of float32 products may be rounded to (:mod:`mlc.graph.precision.reduced`): ``"f32"``
            (nothing is rounded), ``"bf16"`` (on CPUs with such instructions, and GPUs), ``"f16"`` (constants only on
            CPUs, which halves their bytes; both operands on GPUs), ``"tf32"`` (on GPUs). ``mlc compile --precision``
            reports the error that this causes.
        integers: False computes products of quantised operands in float32, as the model spells them, even where integer
            products are estimated to be faster. None: as ``MLC_INTEGERS`` says.
        on_decision: Called with the :class:`mlc.graph.substitute.choose.Decision` between graphs.

    Returns:
        An :class:`mlc.artifact.Executable`. If inputs decide shapes and ``values`` is None, or if inputs or outputs are
        sequences or optionals, a :class:`mlc.specialising.SpecialisingExecutable`: it is called in the same way (with
        lists of arrays, arrays or None for containers), and compiles the model at the first call with new values. With
        ``values``, and the ``shapes`` of all containers, an executable whose inputs and outputs are their tensors,
        ``x/0``, ``x/1``, ….

    Raises:
        mlc.errors.MlcError: In one line; of its subclasses ``ModelError`` (the model cannot be imported),
            ``UsageError`` and ``TargetError`` (arguments), ``LogError``, and ``BuildError`` (a function cannot be
            compiled, which is a bug in mlc or TVM). A function whose schedule fails in code generation gets another
            one, with a warning.

    Any thread may compile or tune; the threads of a process take turns, while compiled models run concurrently.

    The compiled code has not been run when this returns: code that the CPU cannot execute would end this process at its
    first call. ``mlc compile`` and :func:`mlc.artifact.smoke_test.save_tested` run it once in a separate process.
    """
    from mlc.installation import check_pins

    check_pins()
    from mlc.compilation import Compilation
    from mlc.errors import ValuesNeededError
    from mlc.target import several

    targets = several(target, threads)
    try:
        first = Compilation.of(model, targets[0], example_inputs=example_inputs, shapes=shapes, values=values,
                               winograd=winograd, substitutions=substitutions, precision=precision, integers=integers)
    except ValuesNeededError as needed:
        if values is not None:
            raise
        from mlc.specialising import SpecialisingExecutable

        own = needed.shapes
        build = partial(compile, model, target, log, threads=threads, winograd=winograd, substitutions=substitutions,
                        precision=precision, integers=integers, on_decision=on_decision)
        return SpecialisingExecutable(
            needed.model, needed.inputs, needed.names,
            lambda given, forms: build(values=given, shapes={**own, **forms}), needed.containers, needed.outputs, own)
    built = [build_with(replace(first, target=each), log, on_decision, last=each is targets[-1]) for each in targets]
    from mlc.artifact import Bundle

    exe = built[0] if len(built) == 1 else Bundle(built)
    if values is not None or not first.model.returned:
        return exe
    from mlc.specialising import SpecialisingExecutable

    names, outputs = [spec.name for spec in first.model.inputs], dict(first.model.returned)
    return SpecialisingExecutable(first.model.name, names, [], lambda given, forms: exe, outputs=outputs)


def build_with(
    compilation: Compilation, log: str | os.PathLike[str] | LogReader | bool | None = None,
    on_decision: Callable[[Decision], None] | None = None, *, last: bool = False,
) -> Executable:
    """:meth:`mlc.Compilation.build`, with ``log`` given as to :func:`compile`."""
    if log is False:
        return compilation.build(None, on_decision, last=last)
    if log is not None and not isinstance(log, str | os.PathLike | bool):
        return compilation.build(log, on_decision, last=last)
    from mlc.log import layered

    path = Path(log) if isinstance(log, str | os.PathLike) else None
    with layered(path, compilation.target) as reader:
        return compilation.build(reader, on_decision, last=last)


def tune(
    model: Any,
    target: str | Target = "native",
    *,
    trials: int | None = None,
    seconds: float | None = None,
    log: str | os.PathLike[str] | None = None,
    seed: int = 0,
    resume: bool = False,
    strategy: str = "evolutionary",
    on_event: Callable[[Any], None] | None = None,
    measurer: Measurer | None = None,
    example_inputs: Sequence[Any] | None = None,
    shapes: Mapping[str, Shape] | None = None,
    values: Mapping[str, Any] | None = None,
    threads: int | None = None,
    winograd: bool | None = None,
    substitutions: bool | None = None,
    precision: str = "f32",
    integers: bool | None = None,
    executor: str = "local",
) -> TuneReport:
    """Search for faster schedules of a model's functions, and record every measurement in the log.

    Args:
        model, target, example_inputs, shapes, values, threads, winograd, substitutions, precision, integers: As for
            :func:`compile`, which then finds what was tuned; but every size must be fixed.
        trials: Measure at most so many candidates.
        seconds: Stop after so many seconds. With neither bound, tuning ends when no task is expected to gain any more.
        log: The path of the log that records go to (default: your own log for the target).
        seed: Random seed. Equal seeds give equal proposals as long as equal times are measured.
        resume: Continue with what is left of the budget of the last run on this model.
        strategy: How candidates are proposed, a module of :mod:`mlc.tuning.strategy`.
        on_event: Called with each event of :mod:`mlc.tuning.events`.
        executor: Where candidates are measured: ``local``, or the devices behind ``ray``, ``ray://HOST:PORT[/CLASS]``
            or ``rpc://HOST:PORT/KEY`` (see ``mlc worker``), whose CPU ``native`` then means.
        measurer: A :class:`mlc.measure.Measurer` to use instead of ``executor``.

    Returns:
        A :class:`mlc.tuning.TuneReport`.

    Raises:
        mlc.errors.MlcError: In one line. A single candidate that fails never ends a run. If the first candidates of
            several functions all fail in the same way, a ``MeasureError`` names the likely cause.

    Of alternatives to a function (algorithms of a convolution), all that may be the fastest are tuned, and so are the
    functions of other graphs that proved rules make of the model. The best graph is timed interleaved with the model's
    own, and kept if it is faster.

    For a GPU that this machine does not have, candidates are compiled and ranked analytically but not timed; a build
    uses them only where no measured time is known (:mod:`mlc.tuning.untimed`).
    """
    from mlc.compilation import Compilation
    from mlc.config import user_log_path
    from mlc.gpu import find_gpu
    from mlc.log import TuningLog
    from mlc.target import resolve
    from mlc.tuning import TuneOptions
    from mlc.tuning.devices import devices
    from mlc.tuning.untimed import need_compiler

    options = TuneOptions(trials=trials, seconds=seconds, seed=seed, resume=resume, strategy=strategy)
    with devices(executor, target, on_event) as fleet:
        here = measurer is None and fleet.fleet is None
        untimed = here and resolve(fleet.target).kind == "cuda" and find_gpu() is None
        if untimed:
            need_compiler(resolve(fleet.target))  # before the model is prepared, which may take a minute
        compilation = Compilation.of(model, fleet.target, example_inputs=example_inputs, shapes=shapes, values=values,
                                     threads=threads, winograd=winograd, substitutions=substitutions,
                                     precision=precision, integers=integers)
        path = Path(log) if log is not None else user_log_path(compilation.target.canonical, fleet.machine)
        with TuningLog(path) as records:
            if untimed:
                return compilation.rank(records, options, on_event=on_event)
            chosen = measurer or fleet.measurer(compilation.target.threads)
            return compilation.tune(records, options, measurer=chosen, on_event=on_event)


def load(path: str | os.PathLike[str], verify: bool = True) -> Executable:
    """Load a compiled model from a file that :meth:`Executable.save` or ``mlc compile`` wrote, ready to run.

    An artifact is native code: loading one runs what its author wrote, with your privileges. Load only artifacts whose
    author you trust. The checksums in it detect damage, not malice.

    Args:
        path: The file. Of a bundle, the best variant that this machine can run is loaded: one for a GPU, else the one
            that uses the most instruction-set extensions. Saving what is returned writes that variant only.
        verify: Read the whole file into this process's memory, on several threads, and compare it with its checksums
            before anything is used: a file that is damaged, truncated or partly overwritten is refused, and later
            changes to the file have no effect. False checks only code and metadata, and maps the weights: they are read
            when they are used, and several processes share them. Then a damaged weight is not detected, and overwriting
            the file in place while the model is loaded changes its results or ends the process (replace the file
            instead, as ``mlc compile`` and ``save`` do).

    Returns:
        An :class:`mlc.artifact.Executable`. Loading and running it needs TVM's runtime library only.

    Raises:
        mlc.errors.ArtifactError: The file is missing, truncated, damaged or no artifact, or this machine cannot run it.
    """
    from mlc.artifact import load as load_artifact

    return load_artifact(path, verify)
