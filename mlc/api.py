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
    """Compile a model for a target with the best schedules that are known.

    ``model`` is the path of an ONNX file, an ``onnx.ModelProto``, a ``torch.nn.Module`` with ``example_inputs`` (a
    tuple of tensors), or a Relax ``IRModule``. ``shapes`` gives the free dimensions of an ONNX model's inputs sizes or
    ranges of sizes, ``{"x": ((1, 32), 3, 224, 224)}`` or ``{"x": "1..32,3,224,224"}``; a dimension that is left out has
    :data:`mlc.shapes.DEFAULT_RANGE`. What is compiled takes every size of the ranges and returns outputs of true size.
    ``values`` makes constants of inputs of an ONNX model by name. Those whose numbers decide shapes (the sizes of a
    ``Reshape``, the axes of a ``ReduceSum``) must be: where ``values`` is None and the model has such inputs, what
    comes back is a :class:`mlc.specialising.SpecialisingExecutable`, which compiles the model at its first call with
    new values of these. The same comes back of models with sequences or optionals among their inputs or outputs, which
    a call has as lists of arrays, arrays, or None. ``shapes`` of a sequence are a list, a shape for each tensor, or a
    text that is the shape of each; of an optional, None where it holds nothing. With the shapes of all
    such inputs, and ``values``, what comes back is an executable whose inputs and outputs are their tensors, ``x/0``,
    ``x/1``, ….
    ``target`` is one of the names that ``mlc targets`` lists; several, in a list or with commas between them, make a
    :class:`mlc.artifact.Bundle`, whose one file holds code for all and weights that some share once. ``log`` is a
    tuning log's path or an open one; None means your own log for the target (as does True), read over those that ship,
    and False none at all. A function that the log does not know gets the first seed of its search space, computed from
    registers, vectors and caches. ``threads`` is how many threads the code is made for and runs on (default: the
    physical cores).

    3x3 convolutions may run by Winograd's algorithm where the log, or an estimate if it does not know, says that it
    is faster. It rounds more (relative error about 1e-5, see :mod:`mlc.graph.algorithms.winograd`);
    ``winograd=False`` forbids it, and None leaves it to ``MLC_WINOGRAD``.

    Proved rules (``mlc rules list``) may make another graph of the model where a tuning run has decided for one, or the
    log or an estimate says that it is clearly faster; ``substitutions=False`` keeps the model's own graph, and None
    leaves it to ``MLC_SUBSTITUTIONS``. ``on_decision`` is told what was found and taken.

    ``precision`` lets operands of float32 products be rounded (:mod:`mlc.graph.precision.reduced`): ``"bf16"``
    multiplies bfloat16 with float32 sums, on CPUs that do so, and ``"f16"`` rounds constants alone, to half their
    bytes; on GPUs, ``"f16"``, ``"bf16"`` and ``"tf32"`` multiply on tensor cores. ``mlc compile --precision`` says
    what that costs the outputs. ``integers=False`` computes products of quantised operands in float32, as the model
    spells them, even where integers are priced faster; None leaves it to ``MLC_INTEGERS``.

    Any thread may compile or tune; the threads of a process take turns, whereas compiled models run meanwhile.

    Raises subclasses of :class:`mlc.errors.MlcError`, each one line: ``ModelError`` (the model cannot be imported),
    ``TargetError``, ``LogError``, ``BuildError`` (a function cannot be compiled; a bug in mlc or TVM). A function whose
    schedule fails in code generation gets another, with a warning.

    Nothing has run what comes back: code that the CPU cannot execute would end this process at its first call. ``mlc
    compile`` runs it once in a process of its own, and so does :func:`mlc.artifact.smoke_test.save_tested`.
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
    """What :meth:`mlc.Compilation.build` makes with a log given as to :func:`compile`."""
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
    """Search faster schedules for a model's functions and keep every measurement in the log.

    ``trials`` (candidates measured) and ``seconds`` bound the run, whichever is reached first; with neither it ends
    when nothing gains any more. ``log`` is where records go (default: your own log for the target). Equal ``seed``
    means equal proposals as long as equal times are measured. ``resume`` goes on with the budget of the last run.
    ``on_event`` is told of progress; ``executor`` says who measures: ``local``, this machine, or the devices behind
    ``ray``, ``ray://HOST:PORT[/CLASS]`` or ``rpc://HOST:PORT/KEY`` (see ``mlc worker``), of which ``native`` then means
    the CPU; ``measurer`` replaces it. The model, ``target``, ``shapes``, ``values``, ``threads``, ``winograd``,
    ``substitutions``, ``precision`` and ``integers`` are as for :func:`compile`, which then finds what was tuned, but
    that every size must be fixed: what is measured has sizes. Where there are alternatives to a function, all that may
    be the fastest are tuned, and so are those of the graphs that rules make of the model; the best of them is then
    timed in turn with the model's own graph.

    For a GPU that this machine has not, candidates are compiled and ranked by what comes of them; none is timed, and a
    build takes what is kept only where no time is known (:mod:`mlc.tuning.untimed`).

    Raises subclasses of :class:`mlc.errors.MlcError`; a single candidate that fails never ends the run. Where the first
    candidates of several functions all fail alike, it ends with a ``MeasureError`` that names the likely cause.
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

    An artifact is native code: to load one is to run what its maker wrote, with your rights. Load those alone whose
    maker you trust. The checksums in it find damage, not malice.

    The file is read into memory of this process, by several threads, and compared with its checksums before anything
    of it is used: a file that was damaged, cut short or partly overwritten is refused, and what happens to it later
    changes nothing. ``verify=False`` checks code and metadata alone and maps the weights: nothing of them is read
    before it is used, and several processes share them. Then a damaged weight is not found, and to overwrite the file
    in place while the model is loaded changes its results or ends the process (replace the file instead, as
    ``mlc compile`` and ``save`` do).

    Of a bundle the code for the best of its targets that this machine can run is taken: one for a GPU, else the one
    that uses the most instructions. To save what came back writes that one alone.

    Needs TVM's runtime library alone. Raises :class:`mlc.errors.ArtifactError` for a file that is missing, cut short,
    damaged or no artifact, and where this machine lacks what it was built for.
    """
    from mlc.artifact import load as load_artifact

    return load_artifact(path, verify)
