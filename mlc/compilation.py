"""A model being compiled for a target: it is imported once, and can be lowered, tuned and built any number of times.

Each function of :mod:`mlc.api` is one call of it; benchmarks and the tools that build the shipped logs use the steps in
between.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlc.options import DEFAULT_OPTIONS, CompileOptions

if TYPE_CHECKING:
    import onnx
    import tvm

    from mlc.artifact import Executable
    from mlc.frontend.model import ImportedModel
    from mlc.frontend.onnx_weights import Model
    from mlc.graph.pipeline import Lowered
    from mlc.graph.substitute.choose import Decided, Decision, Substitutions
    from mlc.graph.task import Task
    from mlc.log import LogReader, Prices, Record, TuningLog
    from mlc.measure import Measurer
    from mlc.shapes import Shape
    from mlc.target import Target
    from mlc.tuning import TuneOptions, TuneReport
    from mlc.tuning.events import Listener

__all__ = ["Compilation", "tune_together"]

_LOG = logging.getLogger("mlc.build")

#: work bound of the search for other graphs when a model is built without a tuning decision: at most 12 s of a core
_SEARCH_WORK = 1.2e6
#: and when it is tuned
_TUNED_SEARCH_WORK = 4 * _SEARCH_WORK

#: held while a thread compiles or tunes: TVM's builders keep their scopes in class variables, shared by all threads
_turn = threading.RLock()


def _new_turn() -> None:
    global _turn
    _turn = threading.RLock()  # in a forked child nobody would ever release the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_turn)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait until no other thread of this process compiles or tunes. Reentrant."""
    with _turn:
        yield


@dataclass(frozen=True)
class Compilation:
    """An imported model with its target and options; :meth:`of` makes one.

    All methods may be called from any thread; the threads of a process take turns.
    """

    model: ImportedModel
    target: Target
    options: CompileOptions = DEFAULT_OPTIONS

    @classmethod
    def of(
        cls,
        model: Any,
        target: str | Target = "native",
        *,
        example_inputs: Sequence[Any] | None = None,
        shapes: Mapping[str, Shape] | None = None,
        values: Mapping[str, Any] | None = None,
        threads: int | None = None,
        winograd: bool | None = None,
        substitutions: bool | None = None,
        precision: str = "f32",
        integers: bool | None = None,
    ) -> Compilation:
        """Import a model; arguments and errors are those of :func:`mlc.compile`."""
        from mlc.installation import check_pins

        check_pins()
        from mlc.errors import ModelError, UsageError
        from mlc.frontend.load import load_model
        from mlc.graph.precision.reduced import check_precision
        from mlc.target import resolve

        resolved = resolve(target, threads)  # first, since a misspelt name must not wait for the import
        options = CompileOptions.of(winograd=winograd, substitutions=substitutions, precision=precision,
                                    integers=integers)
        check_precision(options, resolved)
        if shapes is not None and not (isinstance(shapes, Mapping) and all(isinstance(each, str) for each in shapes)):
            raise UsageError(f"shapes must be those of inputs by name, such as {{'x': (1, 3)}}, got {shapes!r}")
        with _one_at_a_time():
            _LOG.info("importing the model")
            imported = load_model(model, example_inputs=example_inputs, shapes=shapes, values=values)
        counted = next((spec.name for spec in imported.outputs if spec.length is not None), None)
        if counted is not None and resolved.kind == "cuda":
            raise ModelError(f"on a GPU the shape of every output must follow from those of inputs, but the length of "
                             f"{counted} of {imported.name} depends on the data; compile the model for a CPU, or end "
                             "it before the operator that counts")
        return cls(imported, resolved, options)

    @classmethod
    def of_decoder(
        cls, model: onnx.ModelProto | Model, name: str, batch: int, capacity: int, target: str | Target = "native", *,
        threads: int | None = None, precision: str = "f32",
    ) -> Compilation:
        """Import a decoder that keeps the keys and values of at most ``capacity`` tokens in the caller's memory.

        Raises what :meth:`of` does, and :class:`mlc.errors.ModelError` for a model without a past.
        """
        from mlc.frontend.model import imported
        from mlc.frontend.onnx_past import LENGTH, decoder
        from mlc.frontend.onnx_past import PAST as BEFORE
        from mlc.frontend.onnx_weights import Model, outside
        from mlc.graph.ir.states import PAST, keep_states
        from mlc.sizes import at_most

        model = model if isinstance(model, Model) else outside(model)
        found = decoder(model.proto, batch, capacity, name)
        with at_most(capacity, BEFORE, LENGTH):
            first = cls.of(Model(found.model, model.weights), target, shapes=found.shapes, threads=threads,
                           substitutions=False, precision=precision)
        given = [spec.name for spec in first.model.inputs]
        with _one_at_a_time():
            mod = keep_states(first.model.mod, found.states, given)
        left = [spec.name for i, spec in enumerate(first.model.outputs) if i not in found.states.values()]
        kept = imported(mod, name, [*given, PAST], left)
        return replace(first, model=replace(kept, states=tuple(found.states), nodes=first.model.nodes))

    def prices(self, log: LogReader | None) -> Prices:
        """The prices of tasks, in seconds, by which alternatives are chosen: the log's, unknown without a log."""
        from mlc.log import Prices

        return Prices(log)

    def lowered(
        self, log: LogReader | None = None, on_decision: Callable[[Decision], None] | None = None, *,
        last: bool = False,
    ) -> Lowered:
        """The fused module as it would be built with ``log``. Raises :class:`mlc.errors.BuildError` in one line.

        ``last``: this compilation is not used again, so that the imported weights can be freed.
        """
        from mlc.graph.pipeline import lower

        rules = self._rules(_SEARCH_WORK, log, on_decision)
        with _one_at_a_time(), _one_line(self.model.name, self.target):
            _LOG.info("optimising the graph")
            return lower(self.model.taken() if last else self.model.mod, self.target, self.prices(log), self.options,
                         substitutions=rules)

    def tasks(self, log: LogReader | None = None) -> list[Task]:
        """The tasks of :meth:`lowered`, and their alternatives (other algorithms for the same convolution)."""
        return self.lowered(log).with_alternatives()

    def build(
        self, log: LogReader | None = None, on_decision: Callable[[Decision], None] | None = None, *,
        last: bool = False,
    ) -> Executable:
        """Compile with the best schedules of ``log``; see :func:`mlc.compile`, and :meth:`lowered` for ``last``."""
        from mlc.artifact import ModelMeta, compile_module
        from mlc.frontend.origins import labelled

        with _one_at_a_time():
            lowered = self.lowered(log, on_decision, last=last)
            origins = labelled(lowered.origins, self.model.nodes)
            meta = ModelMeta(self.model.name, self.model.inputs, self.model.outputs, self.model.states, origins,
                             lowered.filters)
            lookup = None if log is None else partial(_chosen, log)
            return compile_module(lowered.module, self.target, lookup, meta)

    def stand_in(self, log: LogReader | None = None) -> Executable:
        """The graph as lowered for a GPU, built for this machine's CPU: slow, but with the GPU's rounding.

        Raises what :meth:`build` does, also if the CPU has no schedule for a function.
        """
        from mlc.artifact import ModelMeta, compile_module
        from mlc.artifact.gpu_on_cpu import for_cpu
        from mlc.target import resolve

        meta = ModelMeta(self.model.name, self.model.inputs, self.model.outputs, self.model.states)
        with _one_at_a_time(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is slow
            return compile_module(for_cpu(self.lowered(log).module, self.target), resolve("native"), None, meta)

    def rank(self, log: TuningLog, options: TuneOptions, *, on_event: Listener | None = None) -> TuneReport:
        """Compile promising schedules for an absent GPU, and record the compiler's findings in ``log``; run nothing.

        Raises what :func:`mlc.tuning.untimed.rank_tasks` does.
        """
        from mlc.tuning.untimed import rank_tasks

        self._check_fixed()
        with _one_at_a_time():
            return rank_tasks(self.tasks(log), self.target, log, options, on_event)

    def tune(
        self, log: TuningLog, options: TuneOptions, *, measurer: Measurer | None = None,
        on_event: Listener | None = None,
    ) -> TuneReport:
        """Search for schedules, and for other graphs if rules are enabled; record every measurement in ``log``.

        ``measurer`` (default: this machine) is not closed. See :func:`mlc.tune`.
        """
        (report,) = tune_together([self], log, options, measurer=measurer, on_event=on_event)
        return report

    def _check_fixed(self) -> None:
        """Raise :class:`UsageError` if sizes are free: only fixed sizes can be measured."""
        from mlc.errors import UsageError
        from mlc.sizes import free_sizes

        free = free_sizes(self.model.mod)
        if free:
            example = {spec.name: ",".join(map(str, spec.sized())) for spec in self.model.inputs if spec.free}
            shapes = " ".join(f"--shape {name}={shape}" for name, shape in example.items())
            listed = ", ".join(map(str, free.values()))
            raise UsageError(f"tuning measures fixed sizes, but {listed} of {self.model.name} are free; give sizes, "
                             f"such as {shapes}")

    def _times(
        self, modules: Sequence[tvm.IRModule], lookup: Callable[[Task], Record | None]
    ) -> list[list[float]]:
        from mlc.artifact.compare import times_in_turn

        return times_in_turn(modules, self.target, lookup)

    def _rules(
        self, work: float, log: LogReader | None = None, notify: Callable[[Decision], None] | None = None
    ) -> Substitutions | None:
        """The shipped rules with the decisions stored in ``log``; None if substitutions are disabled."""
        if not self.options.substitutions:
            return None
        from mlc.graph.substitute.choose import Substitutions
        from mlc.graph.substitute.rules import rank_for, shipped_patterns
        from mlc.graph.substitute.search import Options

        def decided(subject: str) -> Decided | None:
            from mlc.log.decision import decision_of

            return None if log is None else decision_of(log, subject)

        patterns = shipped_patterns(rank_for(self.model.mod["main"]))
        if not patterns:
            return None
        return Substitutions(patterns, Options(work=work), decided=decided, notify=notify or (lambda _: None),
                             found_again=_TUNED_SEARCH_WORK)


def _chosen(log: LogReader, task: Task) -> Record | None:
    """The record to compile a task with: the best timed one, else an untimed one."""
    from mlc.log.record import untimed_of

    return log.best(*task.keys) or untimed_of(record for key in reversed(task.keys) for record in log.records(key))


def tune_together(
    compilations: Sequence[Compilation], log: TuningLog, options: TuneOptions, *, priorities: Sequence[int] = (),
    measurer: Measurer | None = None, on_event: Listener | None = None,
) -> list[TuneReport]:
    """Tune several models for one target within one budget; returns a report for each.

    Functions that several models share are tuned once. ``priorities`` say how often each model runs relative to the
    others (default: equally often): trials go where they save most time over all of these runs.
    """
    from mlc.log import Layers
    from mlc.log.layers import shipped
    from mlc.measure import local_measurer
    from mlc.tuning.joint import JointTuning, TunedModel

    target = compilations[0].target
    for compilation in compilations:
        compilation._check_fixed()
        if compilation.target != target:
            raise ValueError(f"models are tuned together for one target, got {target.name} and "
                             f"{compilation.target.name}")
    chosen = measurer if measurer is not None else local_measurer(target)
    timed = measurer is None and target.kind == "llvm"
    try:
        with _one_at_a_time():
            models = [
                TunedModel(each.model.mod, each._rules(_TUNED_SEARCH_WORK), each.options,
                           each._times if timed else None, priority)
                for each, priority in zip(compilations, priorities or [1] * len(compilations), strict=True)
            ]
            with _one_line(" or ".join(each.model.name for each in compilations), target):
                run = JointTuning(models, target, log, options, chosen, on_event, shipped=Layers(shipped(target)))
            return run.run()
    finally:
        if measurer is None:
            chosen.close()


@contextmanager
def _one_line(name: str, target: Target) -> Iterator[None]:
    """Turn whatever TVM raises while the graph of ``name`` is lowered into a one-line error."""
    from mlc.errors import BuildError, MlcError

    try:
        yield
    except MlcError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BuildError(
            f"the graph of {name} must be lowered for {target.canonical}, but a pass failed: {lines[-1].strip()}; "
            "MLC_DUMP_DIR=DIR writes the graph after every pass") from error
