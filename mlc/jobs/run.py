"""Runs jobs, one target after another; targets whose devices are missing are postponed or skipped.

What each target has brought is written beside the page as soon as it is known, so that an interrupted run goes on where
it was: a target that is done is not begun again, and one that is not goes on with its budget, from what its log has.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from mlc.artifact.compare import in_turn
from mlc.artifact.cpu_features import lacking
from mlc.compilation import Compilation, tune_together
from mlc.config import user_log_path
from mlc.errors import MeasureError, MlcError, ModelError, UsageError
from mlc.jobs.file import JobModel, Jobs, JobTarget
from mlc.log import Layers, TuningLog
from mlc.log.layers import layered, shipped
from mlc.measure.executors import parse
from mlc.measure.fleet import DeviceStatus
from mlc.target import Target, resolve
from mlc.tuning import TuneOptions, TuneReport
from mlc.tuning.devices import Measuring, devices
from mlc.tuning.early_abort import HopelessRun
from mlc.tuning.events import BatchMeasured, Event, FleetChanged, Listener

__all__ = ["ModelGain", "Plan", "TargetResult", "known_results", "plan", "run"]

#: seconds between two looks for a device that is waited for
_LOOK = 20.0
_VERSION = 1

Find = Callable[[str], Any]


@dataclass(frozen=True)
class ModelGain:
    """What one model gained on one target. Seconds are of one run of it, None while something of it is not known.

    ``whole``: measured as compiled without and with the log, in turn; else the sums over its functions, untuned and
    tuned. ``functions`` are distinct ones, ``shared`` those that another model of the jobs has too. ``substituted``:
    another graph than the model's own is used.
    """

    model: str
    priority: int
    functions: int
    shared: int
    untuned: float | None
    tuned: float | None
    whole: bool
    substituted: bool

    @property
    def gain(self) -> float | None:
        """How many times faster."""
        return self.untuned / self.tuned if self.untuned and self.tuned else None


@dataclass(frozen=True)
class TargetResult:
    """``state``: ``done``, ``interrupted``, ``skipped`` (its devices are missing), ``failed``, ``not begun``, or
    ``running``, which it stays in what is kept where the session is killed; ``reason`` says why, of what is done why it
    ended. ``trials`` and ``seconds`` are of all runs on it."""

    identity: str
    target: str
    executor: str
    state: str
    reason: str = ""
    canonical: str = ""
    machine: str = ""
    log: str = ""
    trials: int = 0
    seconds: float = 0.0
    budget: tuple[int | None, float | None] = (None, None)
    models: tuple[ModelGain, ...] = ()
    devices: tuple[DeviceStatus, ...] = ()
    tasks: tuple[str, ...] = field(default=(), repr=False)  # keys

    def to_json(self) -> dict[str, Any]:
        """JSON values, with each model's gain."""
        models = [{**asdict(model), "gain": model.gain} for model in self.models]
        return {**asdict(self), "models": models}


@dataclass(frozen=True)
class Plan:
    """What a run on one target would tune: ``functions`` distinct ones, ``shared`` by several models, ``known`` to the
    log or to those that ship, of ``models``, each with its functions and calls."""

    target: JobTarget
    canonical: str
    log: Path
    functions: int
    shared: int
    known: int
    models: tuple[tuple[str, int, int], ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        target = self.target
        return {
            "target": target.target, "executor": target.executor, "canonical": self.canonical, "log": str(self.log),
            "trials": target.trials, "seconds": target.seconds, "missing": target.missing, "functions": self.functions,
            "shared": self.shared, "known": self.known,
            "models": [{"model": name, "functions": functions, "calls": calls}
                       for name, functions, calls in self.models],
        }


def plan(jobs: Jobs, find: Find) -> list[Plan]:
    """What each target's run would tune, without reaching a device: for a fleet's ``native`` as if it were this CPU.
    Graphs that substitutions might add are left out."""
    plans, imported = [], _Imported(jobs, find)
    for job, target in _resolved(jobs).items():
        models = {}
        for model, compilation in zip(jobs.models, imported.of(target), strict=True):
            models[model.model] = compilation.tasks()
        keys = [{task.key for task in tasks} for tasks in models.values()]
        every = set().union(*keys)
        path = job.log or user_log_path(target.canonical)
        with layered(job.log if job.log is not None and job.log.exists() else None, target) as log:
            named = {task.key: task.keys for tasks in models.values() for task in tasks}
            known = sum(log.best(*keys) is not None for keys in named.values())
        plans.append(Plan(
            job, target.canonical, path, len(every), len(_shared(keys)), known,
            tuple((name, len({t.key for t in tasks}), sum(t.weight for t in tasks if not t.choice or t.choice == t.key))
                  for name, tasks in models.items()),
        ))
    return plans


def run(
    jobs: Jobs, find: Find, *, resume: bool = False, tell: Callable[[str], None] = lambda _text: None,
    listening: Callable[[], AbstractContextManager[Listener]] | None = None,
    sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic,
) -> list[TargetResult]:
    """Tune all models for all targets; a result of each target, in the file's order.

    ``find`` gives what :func:`mlc.compile` takes for a model's name. ``tell`` is told of what happens between two runs,
    ``listening`` opened for each run and what it gives told of its events. ``resume`` goes on from the results that
    are kept beside the page. A keyboard interrupt ends the run; what is known by then is handed back, as is what one
    target's failure leaves of the others.

    Raises :class:`mlc.errors.MlcError` for a model that cannot be imported, before anything is tuned.
    """
    return _Run(jobs, find, resume, tell, listening, sleep, clock).run()


def known_results(jobs: Jobs) -> dict[str, TargetResult]:
    """The results that are kept beside the page, by the identity of their target; none where nothing has run."""
    try:
        document = json.loads(jobs.results.read_text(encoding="utf-8"))
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']}")
        return {found.identity: found for found in map(_parsed, document["targets"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"results of jobs must be what mlc wrote, but {jobs.results} is not ({error}); delete it, and "
                         "nothing that the logs have is lost") from error


def _parsed(values: Mapping[str, Any]) -> TargetResult:
    models = tuple(ModelGain(**{k: v for k, v in model.items() if k != "gain"}) for model in values["models"])
    statuses = tuple(DeviceStatus(**status) for status in values["devices"])
    trials, seconds = values["budget"]
    return TargetResult(**{**values, "models": models, "devices": statuses, "budget": (trials, seconds),
                           "tasks": tuple(values["tasks"])})


class _Imported:
    """The models of the jobs, each imported once."""

    def __init__(self, jobs: Jobs, find: Find) -> None:
        self._jobs, self._find = jobs, find
        self._known: list[Compilation] = []

    def of(self, target: Target) -> list[Compilation]:
        """Each model on its way to ``target``."""
        if not self._known:
            self._known = [self._compilation(model, target) for model in self._jobs.models]
        return [replace(each, target=target) for each in self._known]

    def _compilation(self, model: JobModel, target: Target) -> Compilation:
        with _at(self._jobs, model.line):
            return Compilation.of(self._find(model.model), target, shapes=model.shapes, winograd=model.winograd,
                                  substitutions=model.substitutions)


def _resolved(jobs: Jobs) -> dict[JobTarget, Target]:
    found = {}
    for job in jobs.targets:
        with _at(jobs, job.line):
            found[job] = resolve(job.target)
    return found


@contextmanager
def _at(jobs: Jobs, line: int) -> Iterator[None]:
    """Errors name the line of the file."""
    try:
        yield
    except MlcError as error:
        kind = ModelError if isinstance(error, ModelError) else type(error)
        raise kind(f"{jobs.path}:{line}: {error}") from error


class _Missing(Exception):
    """No device is there that could measure for a target; the message says what is missing."""


class _Run:
    def __init__(
        self, jobs: Jobs, find: Find, resume: bool, tell: Callable[[str], None],
        listening: Callable[[], AbstractContextManager[Listener]] | None, sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._jobs, self._imported = jobs, _Imported(jobs, find)
        self._resume, self._tell, self._listening = resume, tell, listening
        self._sleep, self._clock = sleep, clock
        self._results = {job: TargetResult(jobs.identity(job), job.target, job.executor, "not begun",
                                           budget=(job.trials, job.seconds)) for job in jobs.targets}
        self._begun: set[JobTarget] = set()
        self._listener: Listener = _ignore  # of the run under way
        self._open = ExitStack()
        self._reached: tuple[str, Measuring] | None = None  # devices stay for targets that follow

    def run(self) -> list[TargetResult]:
        if self._resume:
            self._recall()
        self._imported.of(next(iter(_resolved(self._jobs).values())))  # what is wrong with one is said at once
        with self._open:
            return self._all()

    def _all(self) -> list[TargetResult]:
        waiting = deque(job for job, result in self._results.items() if result.state != "done")
        since: dict[JobTarget, float] = {}
        try:
            while waiting:
                job = waiting.popleft()
                try:
                    self._results[job] = result = self._tuned(job, resume=job in self._begun)
                except _Missing as missing:
                    first = since.setdefault(job, self._clock())
                    given_up = job.patience is not None and self._clock() - first >= job.patience
                    if job.missing == "wait" and not given_up:
                        self._tell(f"{job} waits: {missing}")
                        waiting.append(job)
                        if all(each in since for each in waiting):
                            self._sleep(_LOOK)
                        continue
                    result = self._results[job] = replace(self._results[job], state="skipped", reason=str(missing))
                    self._tell(f"{job} is left out: {missing}")
                except MlcError as error:
                    result = self._results[job] = replace(self._results[job], state="failed", reason=str(error))
                    self._tell(f"{job} failed: {error}")
                self._keep()
                if result.state == "interrupted":
                    break
        except KeyboardInterrupt:  # between two runs, or while a model is timed
            for job, result in self._results.items():
                if result.state == "running":
                    self._results[job] = replace(result, state="interrupted", reason="interrupted")
            self._keep()
        return list(self._results.values())

    def _recall(self) -> None:
        kept = known_results(self._jobs)
        for job, result in self._results.items():
            known = kept.get(result.identity)
            if known is None:
                continue
            enough = known.state == "done" and (known.budget == result.budget or known.reason == "finished")
            self._results[job] = replace(known, budget=result.budget, state="done" if enough else "not begun")
            if known.trials or known.state == "running":
                self._begun.add(job)

    def _keep(self) -> None:
        """Write the results, whole or not at all."""
        path = self._jobs.results
        part = path.with_name(f".{path.name}.{os.getpid()}")
        text = json.dumps({"version": _VERSION, "targets": [r.to_json() for r in self._results.values()]}, indent=1)
        try:
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise UsageError(f"the results must be writable, but {path} is not ({error.strerror})") from error

    def _tuned(self, job: JobTarget, *, resume: bool) -> TargetResult:
        here = parse(job.executor) is None
        target = resolve(job.target)
        compilations = self._imported.of(target)
        lacks = lacking(target) if here else ""
        if lacks:
            raise _Missing(f"this machine lacks {lacks}")
        self._tell(f"{job}: {len(compilations)} models")
        statuses, trials = list[DeviceStatus](), 0
        with self._events() as listener:

            def note(event: Event) -> None:
                nonlocal trials
                if isinstance(event, FleetChanged):
                    statuses[:] = event.devices
                elif isinstance(event, BatchMeasured):
                    trials = event.trials
                listener(event)

            try:
                self._listener = note
                reached = self._devices(job)
                target = resolve(reached.target)
                compilations = [replace(each, target=target) for each in compilations]
                path = job.log or user_log_path(target.canonical, reached.machine)
                self._begun.add(job)
                self._results[job] = replace(self._results[job], state="running")
                self._keep()
                options = TuneOptions(trials=job.trials, seconds=job.seconds, seed=self._jobs.seed, resume=resume,
                                      strategy=self._jobs.strategy)
                with TuningLog(path) as log:
                    reports = tune_together(
                        compilations, log, options, priorities=[model.priority for model in self._jobs.models],
                        measurer=reached.measurer(target.threads), on_event=note,
                    )
                if reached.fleet is not None:
                    statuses[:] = reached.fleet.status()
            except MlcError as error:
                self._leave()
                before = self._results[job]
                self._results[job] = replace(before, trials=before.trials + trials)
                if here or isinstance(error, HopelessRun) or not isinstance(error, MeasureError):
                    raise
                raise _Missing(str(error)) from error  # none has come, or the last has gone
            finally:
                self._listener = _ignore
        first = reports[0]
        before = self._results[job]
        state = "interrupted" if first.reason == "interrupted" else "done"
        return replace(
            before, state=state, reason=first.reason, canonical=target.canonical, machine=reached.machine,
            log=str(path), trials=before.trials + first.trials, seconds=before.seconds + first.seconds,
            models=self._gains(compilations, reports, path, timed=here and state == "done"), devices=tuple(statuses),
            tasks=tuple(sorted({task.key for report in reports for task in report.tasks})),
        )

    def _devices(self, job: JobTarget) -> Measuring:
        """The devices that measure for a target; those of the previous target if they are the same."""
        if self._reached is None or self._reached[0] != job.executor:
            self._leave()
            # the fleet tells of its devices for as long as it is there, in whichever run that is
            opened = self._open.enter_context(devices(job.executor, job.target, lambda event: self._listener(event)))
            self._reached = job.executor, opened
        return self._reached[1].of(job.target)

    def _leave(self) -> None:
        """Give the devices back."""
        self._reached = None
        self._open.close()

    def _gains(
        self, compilations: Sequence[Compilation], reports: Sequence[TuneReport], path: Path, *, timed: bool
    ) -> tuple[ModelGain, ...]:
        keys = [{task.key for task in report.used} for report in reports]
        shared, gains = _shared(keys), []
        for model, compilation, report, own in zip(self._jobs.models, compilations, reports, keys, strict=True):
            whole = _whole(compilation, path) if timed and compilation.target.kind == "llvm" else None
            untuned, tuned = whole or (report.default_latency, report.best_latency)
            gains.append(ModelGain(
                model.model, model.priority, len(own), len(own & shared), untuned, tuned, whole is not None,
                report.graph is not None and report.graph.substituted,
            ))
        return tuple(gains)

    def _events(self) -> AbstractContextManager[Listener]:
        return nullcontext(_ignore) if self._listening is None else self._listening()


def _whole(compilation: Compilation, path: Path) -> tuple[float, float] | None:
    """Seconds of a run as compiled without the log and with it, timed in turn; None where that cannot be."""
    ships = shipped(compilation.target)
    try:
        with TuningLog(path, readonly=True) as log:
            models = [compilation.build(Layers(readers)) for readers in (ships, [log, *ships])]
        untuned, tuned = map(median, in_turn(models))
    except MlcError as error:  # a figure for the report; what was tuned is in the log
        warnings.warn(f"{compilation.model.name} could not be timed as a whole: {error}", stacklevel=2)
        return None
    return untuned, tuned


def _shared(keys: Sequence[set[str]]) -> set[str]:
    """The elements that several of the sets contain."""
    return {key for i, own in enumerate(keys) for key in own if any(key in other for other in keys[:i])}


def _ignore(event: Event) -> None:
    """Nobody listens."""
