"""The Python face: compile a model, tune it, load what was compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm

    from mlc.build import Executable
    from mlc.frontend.model import ImportedModel
    from mlc.graph.substitute.choose import Decided, Decision, Substitutions
    from mlc.log import LogReader, Prices
    from mlc.measure import Measurer
    from mlc.target import Target
    from mlc.tune import TuneReport
    from mlc.tune.joint import Timer

__all__ = ["compile", "load", "tune"]

_SEARCH_SECONDS = 5.0  # for other graphs of a model that no tuning run has decided about
_TUNED_SEARCH_SECONDS = 20.0  # and for those that are tuned: what is found must not depend on the machine's load
_BUILD_WORKERS = 8  # more processes that compile candidates than this only wait for the one that is timed


def compile(
    model: Any,
    target: str | Target = "native",
    log: str | os.PathLike[str] | LogReader | bool | None = None,
    *,
    example_inputs: Sequence[Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    threads: int | None = None,
    winograd: bool | None = None,
    substitutions: bool | None = None,
    on_decision: Callable[[Decision], None] | None = None,
) -> Executable:
    """Compile a model for a target with the best schedules that are known.

    ``model`` is the path of an ONNX file, an ``onnx.ModelProto``, a ``torch.nn.Module`` with ``example_inputs`` (a
    tuple of tensors), or a Relax ``IRModule``; ``shapes`` fixes free dimensions of an ONNX model's inputs. ``target``
    is one of the names that ``mlc targets`` lists. ``log`` is a tuning log's path or an open one; None means your own
    log for the target (as does True), read over those that ship, and False none at all. A function that the log does
    not know gets the schedule that arithmetic on the machine says is good. ``threads`` is how many threads the code is
    made for and runs on (default: the physical cores).

    3x3 convolutions may run by Winograd's algorithm where the log, or an estimate if it does not know, says that it
    is faster. It rounds more (relative error about 1e-5, see :func:`mlc.graph.winograd.error_bound`);
    ``winograd=False`` forbids it, and None leaves it to ``MLC_WINOGRAD``.

    Proved rules (``mlc rules list``) may make another graph of the model where a tuning run has decided for one, or the
    log or an estimate says that it is clearly faster; ``substitutions=False`` keeps the model's own graph, and None
    leaves it to ``MLC_SUBSTITUTIONS``. ``on_decision`` is told what was found and taken.

    Raises subclasses of :class:`mlc.errors.MlcError`, each one line: ``ModelError`` (the model cannot be imported),
    ``TargetError``, ``LogError``, ``BuildError`` (a function cannot be compiled; a bug in mlc or TVM). A function whose
    schedule fails in code generation gets another, with a warning.

    Nothing has run what comes back: code that the CPU cannot execute would end this process at its first call. ``mlc
    compile`` runs it once in a process of its own, and so does :func:`mlc.build.trial.save_tried`.
    """
    from mlc.build import ModelMeta, compile_module

    imported, resolved = _imported(model, target, example_inputs, shapes, threads)
    meta = ModelMeta(imported.name, imported.inputs, imported.outputs)

    def built(reader: LogReader | None) -> Executable:
        from mlc.log import Prices

        rules = _substitutions(substitutions, reader, on_decision, _SEARCH_SECONDS)
        optimised = _optimised(imported, resolved, Prices(reader), winograd, rules)
        return compile_module(optimised, resolved, None if reader is None else reader.best, meta)

    if log is False:
        return built(None)
    if log is not None and not isinstance(log, str | os.PathLike | bool):
        return built(log)
    from mlc.log import layered

    with layered(Path(log) if isinstance(log, str | os.PathLike) else None, resolved) as reader:
        return built(reader)


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
    shapes: Mapping[str, Sequence[int]] | None = None,
    threads: int | None = None,
    winograd: bool | None = None,
    substitutions: bool | None = None,
) -> TuneReport:
    """Search faster schedules for a model's functions and keep every measurement in the log.

    ``trials`` (candidates measured) and ``seconds`` bound the run, whichever is reached first; with neither it ends
    when nothing gains any more. ``log`` is where records go (default: your own log for the target). Equal ``seed``
    means equal proposals as long as equal times are measured. ``resume`` goes on with the budget of the last run.
    ``on_event`` is told of progress; ``measurer`` replaces the one that uses this machine. The model, ``target``,
    ``shapes``, ``threads``, ``winograd`` and ``substitutions`` are as for :func:`compile`, which then finds what was
    tuned. Where there are alternatives to a function, all that may be the fastest are tuned, and so are those of the
    graphs that rules make of the model; the best of them is then timed in turn with the model's own graph.

    Raises subclasses of :class:`mlc.errors.MlcError`; a single candidate that fails never ends the run. Where the first
    candidates of several functions all fail alike, it ends with a ``MeasureError`` that names the likely cause.
    """
    from mlc.tune import TuneOptions, tune_tasks

    options = TuneOptions(trials=trials, seconds=seconds, seed=seed, resume=resume, strategy=strategy)
    imported, resolved = _imported(model, target, example_inputs, shapes, threads)
    from mlc.config import user_log_path
    from mlc.graph.tasks import extract_tasks, with_alternatives
    from mlc.log import Layers, Prices, TuningLog
    from mlc.log.layers import shipped
    from mlc.tune.transfer import Experience

    others = Layers(shipped(resolved))
    path = Path(log) if log is not None else user_log_path(resolved.canonical)
    own = measurer is None
    rules = _substitutions(substitutions, None, None, _TUNED_SEARCH_SECONDS)
    if rules is not None:
        from mlc.config import get_flag
        from mlc.tune.joint import JointTuning

        chosen = measurer if measurer is not None else _local_measurer(resolved)
        try:
            with TuningLog(path) as records:
                with _lowering_errors(imported, resolved):
                    joint = JointTuning(
                        imported.mod, resolved, records, options, chosen, rules, on_event, shipped=others,
                        winograd=get_flag("MLC_WINOGRAD") if winograd is None else winograd,
                        timer=_timer(resolved) if own and resolved.kind == "llvm" else None,
                    )
                return joint.run()
        finally:
            if own:
                chosen.close()
    asked = Prices(others)  # without the user's log, what would be built untuned comes first among its alternatives
    optimised = _optimised(imported, resolved, asked, winograd)
    tasks = with_alternatives(extract_tasks(optimised, resolved), asked.alternatives)
    chosen = measurer if measurer is not None else _local_measurer(resolved)
    try:
        with TuningLog(path) as records:
            return tune_tasks(tasks, resolved, records, options, chosen, on_event, shipped=others.best,
                              experience=Experience.of([records, *others.readers], resolved))
    finally:
        if own:
            chosen.close()


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

    Needs TVM's runtime library alone. Raises :class:`mlc.errors.ArtifactError` for a file that is missing, cut short,
    damaged or no artifact, and where this machine lacks what it was built for.
    """
    from mlc.build import load as load_artifact

    return load_artifact(path, verify)


def _imported(
    model: Any,
    target: str | Target,
    example_inputs: Sequence[Any] | None,
    shapes: Mapping[str, Sequence[int]] | None,
    threads: int | None,
) -> tuple[ImportedModel, Target]:
    from mlc.installation import check_pins

    check_pins()
    from mlc.frontend.load import load_model
    from mlc.target import resolve

    resolved = resolve(target, threads)  # first, since a misspelt name must not wait for the import
    return load_model(model, example_inputs=example_inputs, shapes=shapes), resolved


def _substitutions(
    wanted: bool | None, log: LogReader | None, notify: Callable[[Decision], None] | None, seconds: float
) -> Substitutions | None:
    """The shipped rules with what the log has decided; None where they are switched off."""
    from mlc.config import get_flag

    if not (get_flag("MLC_SUBSTITUTIONS") if wanted is None else wanted):
        return None
    from mlc.graph.substitute.choose import Substitutions
    from mlc.graph.substitute.rules import shipped_patterns
    from mlc.graph.substitute.search import Options

    def decided(subject: str) -> Decided | None:
        from mlc.log.decision import decision_of

        return None if log is None else decision_of(log, subject)

    patterns = shipped_patterns()
    if not patterns:
        return None
    options = Options(seconds=seconds)
    return Substitutions(patterns, options, decided=decided, notify=notify or (lambda _: None))


def _optimised(
    imported: ImportedModel, target: Target, prices: Prices, winograd: bool | None, rules: Substitutions | None = None
) -> tvm.IRModule:
    """The fused module."""
    from mlc.graph.pipeline import optimise

    with _lowering_errors(imported, target):
        return optimise(imported.mod, target, prices, winograd=winograd, substitutions=rules)


@contextmanager
def _lowering_errors(imported: ImportedModel, target: Target) -> Iterator[None]:
    """Whatever TVM raises on the way becomes one line."""
    from mlc.errors import BuildError, MlcError

    try:
        yield
    except MlcError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BuildError(f"the graph of {imported.name} must be lowered for {target.canonical}, but a pass failed: "
                         f"{lines[-1].strip()}; MLC_DUMP_DIR=DIR writes the graph after every pass") from error


def _timer(target: Target) -> Timer:
    from mlc.build.compare import times_in_turn

    return lambda modules, lookup: times_in_turn(modules, target, lookup)


def _local_measurer(target: Target) -> Measurer:
    from mlc.config import physical_cores
    from mlc.measure import Dispatcher, LocalExecutor, LocalMeasurer, MeasureOptions

    workers = max(1, min(physical_cores(), _BUILD_WORKERS))
    options = MeasureOptions(threads=target.threads)
    return Dispatcher(LocalExecutor(LocalMeasurer(options, workers)), options)
