"""Measures candidates on this machine, in worker processes that stay alive between batches.

A batch has two phases. First every worker builds its share, all at once, since compiling is what costs. Then the
candidates run one after the other, each in the worker that built it, while the other workers sleep, so that nothing
disturbs the times. A time is that of repeated calls on the same activations, which are found in the caches as far as
they fit, as a model's mostly are. Weights are another matter: a model comes back to them after it has read all the
others, so calls take turns among as many copies of them (see :mod:`mlc.measure.rotation`).

Where requests name a baseline, every worker builds that of the tasks whose candidates it has, once, and times it in
between: a shared machine's speed, and where in memory a worker's buffers happen to lie, change times by more than most
decisions do.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mlc.errors import MeasureError
from mlc.measure.measurer import MeasureOptions, MeasureRequest, MeasureResult
from mlc.measure.pool import Job, Pool
from mlc.measure.process import WorkerProcess
from mlc.measure.protocol import Message
from mlc.measure.quiescence import wait_until_quiescent

__all__ = ["Batch", "Candidate", "LocalMeasurer"]

_REFERENCE_SECONDS = 300.0  # for the unscheduled function of a task
_DATA_SECONDS = 120.0  # for a worker to draw a task's inputs
_LEAST_SECONDS = 0.5  # a run gets this much even if the build took nearly all of the candidate's time
_HELD = 48  # baselines that a worker keeps the code of

OnResult = Callable[[int, MeasureResult], None]


@dataclass
class _Reference:
    """The file of a task's reference outputs, or why there is none."""

    path: Path
    ready: bool = False
    problem: str = ""
    crashes: int = 0


@dataclass
class Candidate:
    """A request on its way. ``worker`` is the process that holds its code; ``crashes`` counts second chances."""

    index: int
    request: MeasureRequest
    reference: _Reference
    worker: WorkerProcess | None = None
    code_hash: str = ""
    build_seconds: float = 0.0
    crashes: int = 0
    result: MeasureResult | None = None


@dataclass(frozen=True)
class Batch:
    """The candidates of one call. ``fresh`` means that results of equal code are not taken from earlier batches."""

    number: int
    candidates: list[Candidate]
    options: MeasureOptions
    on_result: OnResult | None = None
    fresh: bool = False

    def open(self) -> list[Candidate]:
        """The candidates without a result."""
        return [c for c in self.candidates if c.result is None]

    def settle(self, candidate: Candidate, result: MeasureResult) -> None:
        candidate.result = replace(result, code_hash=candidate.code_hash, build_seconds=candidate.build_seconds)
        if self.on_result is not None:
            self.on_result(candidate.index, candidate.result)

    def results(self) -> list[MeasureResult]:
        return [c.result for c in self.candidates if c.result is not None]


class LocalMeasurer(AbstractContextManager["LocalMeasurer"]):
    """Implements :class:`mlc.measure.measurer.Measurer` with ``workers`` processes on this machine.

    A candidate that crashes or hangs costs its worker, which is replaced, and nothing else. One that crashes in a
    worker where others ran before gets a second chance in another, since an earlier one may have done the damage.
    Code that has been timed is not timed again: candidates that lower to equal code share the result. ``kind`` is one
    of :data:`mlc.measure.worker.RUNNERS`: where it loads code that was built elsewhere, requests are as
    :mod:`mlc.measure.board` makes them.
    """

    def __init__(self, options: MeasureOptions, workers: int = 2, kind: str = "compiling") -> None:
        if workers < 1:
            raise MeasureError(f"at least one worker is needed to measure, got {workers}")
        self.options = options
        self._folder = Path(tempfile.mkdtemp(prefix="mlc-measure-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._pool = Pool(workers, options.threads, self._folder, kind)
        self._references: dict[str, _Reference] = {}
        self._known: dict[tuple[str, str], MeasureResult] = {}
        self._usual: dict[str, float] = {}  # seconds of the baselines that were timed here
        self._deadly: set[str] = set()  # baselines that a worker has died of
        self._batches = 0
        self._ran: WorkerProcess | None = None  # the last candidate's

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every worker and remove what they shared. Idempotent."""
        self._pool.close()
        self._remove()

    def wait_until_ready(self) -> None:
        """Return once every worker has started; without it they start behind the first candidates."""
        self._pool.settle()

    def measure(
        self, requests: Sequence[MeasureRequest], on_result: OnResult | None = None
    ) -> list[MeasureResult]:
        """One result for each request, in order, whatever the candidates do."""
        batch = self._batch(requests, self.options, on_result)
        self._settle(batch)
        return batch.results()

    def compare(self, requests: Sequence[MeasureRequest], rounds: int) -> list[MeasureResult]:
        """Check the candidates, then time them in turn, ``rounds`` times each, in one worker.

        Slow drifts of the machine then hit all alike. Each success has ``rounds`` times, in the order of the rounds.
        """
        batch = self._comparison(requests)
        slot = self._pool.slot_with(frozenset(map(code_of, requests)))
        self._settle(batch, slots=(slot,))
        passed = [c for c in batch.candidates if c.result is not None and not c.result.failure]
        lost = [c for c in passed if not self._pool.living(c.worker)]  # their worker died of another candidate
        self._pool.serve([self._build_job(batch, c) for c in lost], slots=(slot,))
        self._interleave(batch, [c for c in passed if self._pool.living(c.worker)], rounds, slot)
        return batch.results()

    # -- phases

    def _batch(
        self, requests: Sequence[MeasureRequest], options: MeasureOptions, on_result: OnResult | None = None,
        fresh: bool = False,
    ) -> Batch:
        if self._pool.closed:
            raise MeasureError("a measurer cannot be used after it was closed; make a new one")
        self._batches += 1
        candidates = [Candidate(i, request, self._reference(request)) for i, request in enumerate(requests)]
        return Batch(self._batches, candidates, options, on_result, fresh)

    def _comparison(self, requests: Sequence[MeasureRequest]) -> Batch:
        """Candidates to be checked first, then timed in turn."""
        return self._batch(requests, replace(self.options, repeats=1, cutoff=0.0), fresh=True)

    def _settle(self, batch: Batch, slots: Sequence[int] | None = None) -> None:
        """Build and run until every candidate has a result; those whose worker another one took down go again."""
        while batch.open():
            missing = {c.reference.path: c for c in batch.open() if not (c.reference.ready or c.reference.problem)}
            jobs = [self._reference_job(c.request, c.reference) for c in missing.values()]
            jobs += [self._build_job(batch, c) for c in batch.open() if not self._pool.living(c.worker)]
            self._pool.serve(jobs, slots)
            self._pool.settle()
            self._prepare(batch)
            self._hold(batch)
            # baselines, then those of one worker after another, first of the one that ran last: whenever the worker
            # changes, the last one's threads must be idle
            for candidate in sorted(batch.open(), key=lambda c: (
                not _is_baseline(c.request), c.worker is not self._ran, self._slot(c.worker),
            )):
                self._run(batch, candidate)

    def _prepare(self, batch: Batch) -> None:
        """Let all workers draw their tasks' inputs at once, before any is timed."""
        jobs = {}
        for candidate in batch.open():
            worker, path = candidate.worker, candidate.reference.path
            if worker is None or not self._pool.living(worker) or not candidate.reference.ready:
                continue
            if path not in worker.prepared:
                job = self._prepare_job(batch, candidate)
                jobs[worker.pid, path] = replace(job, slot=self._pool.slot_of(worker))
        self._pool.serve(jobs.values())

    def _hold(self, batch: Batch) -> None:
        """Let all workers build the baselines that they lack, at once."""
        jobs = []
        for candidate in batch.open():
            worker, name = candidate.worker, _baseline(candidate)
            if batch.fresh or not name or worker is None or not self._pool.living(worker):
                continue
            if name in worker.baselines or name in self._deadly:
                continue
            forget = list(worker.baselines)[: max(0, len(worker.baselines) + 1 - _HELD)]
            for gone in forget:
                del worker.baselines[gone]
            worker.baselines[name] = False
            jobs.append(self._hold_job(batch, candidate, name, forget, self._pool.slot_of(worker)))
        self._pool.serve(jobs)

    def _run(self, batch: Batch, candidate: Candidate) -> None:
        worker, reference = candidate.worker, candidate.reference
        if self._settle_unrun(batch, candidate) or not reference.ready:
            return
        if worker is None or not self._pool.living(worker):
            return
        slots = (self._pool.slot_of(worker),)
        self._quiet(worker)
        if reference.path not in worker.prepared:
            self._pool.serve([self._prepare_job(batch, candidate)], slots)
        if self._pool.living(worker) and candidate.result is None:
            self._pool.serve([self._run_job(batch, candidate)], slots)

    def _settle_unrun(self, batch: Batch, candidate: Candidate) -> bool:
        """Whether a candidate has its result without a run: there is nothing to compare with, or its code was timed."""
        if candidate.reference.problem:
            batch.settle(candidate, MeasureResult(failure="run", detail=candidate.reference.problem))
            return True
        known = self._known.get((candidate.request.task_key, candidate.code_hash))
        if known is None or not candidate.code_hash or batch.fresh:
            return False
        batch.settle(candidate, replace(known, run_seconds=0.0))
        return True

    def _slot(self, worker: WorkerProcess | None) -> int:
        return self._pool.slot_of(worker) if worker is not None and self._pool.living(worker) else -1

    def _quiet(self, worker: WorkerProcess) -> None:
        """Wait for whoever ran before ``worker``."""
        if self._ran is not None and self._ran is not worker and self._pool.living(self._ran):
            wait_until_quiescent(self._ran.pid)
        self._ran = worker

    def _interleave(self, batch: Batch, candidates: list[Candidate], rounds: int, slot: int) -> None:
        if candidates:
            self._pool.serve([self._interleave_job(batch, candidates, rounds)], slots=(slot,))

    def _interleave_job(self, batch: Batch, candidates: list[Candidate], rounds: int) -> Job:
        estimates = [statistics.median(c.result.times) for c in candidates if c.result is not None]
        round_seconds = sum(max(t, batch.options.min_repeat_seconds) + t for t in estimates)
        message = {
            "job": "interleave", "runs": [self._run_message(batch, c) for c in candidates], "estimates": estimates,
            "rounds": rounds, "min_repeat_seconds": batch.options.min_repeat_seconds,
        }

        def done(worker: WorkerProcess, answer: Message) -> None:
            for position, candidate in enumerate(candidates):
                if "failure" in answer:
                    batch.settle(candidate, _failure(answer))
                else:
                    batch.settle(candidate, MeasureResult(times=tuple(answer["times"][position])))

        return Job(message, batch.options.timeout + 3 * rounds * round_seconds, done)

    # -- jobs

    def _reference(self, request: MeasureRequest) -> _Reference:
        name = hashlib.blake2b(f"{request.func}\0{request.target}".encode(), digest_size=12).hexdigest()
        return self._references.setdefault(name, _Reference(self._folder / f"{name}.npz"))

    def _reference_job(self, request: MeasureRequest, reference: _Reference) -> Job:
        def done(worker: WorkerProcess, answer: Message) -> None:
            if "failure" not in answer:
                reference.ready = True
            elif answer["failure"] == "crash" and worker.runs and not reference.crashes:
                reference.crashes += 1
            else:
                reference.problem = f"the task's reference output could not be computed ({answer['detail']})"

        message = {"job": "reference", "func": request.func, "target": request.target, "path": str(reference.path)}
        return Job(message, _REFERENCE_SECONDS, done)

    def _build_job(self, batch: Batch, candidate: Candidate) -> Job:
        def done(worker: WorkerProcess, answer: Message) -> None:
            if "failure" in answer:
                self._failed(batch, candidate, worker, answer)
                return
            candidate.worker = worker
            candidate.code_hash, candidate.build_seconds = answer["code_hash"], answer["build_seconds"]

        message = {"job": "build", "batch": batch.number, "id": candidate.index, **asdict(candidate.request)}
        return Job(message, batch.options.timeout, done)

    def _hold_job(self, batch: Batch, candidate: Candidate, name: str, forget: list[str], slot: int) -> Job:
        """A baseline that cannot be built is missed, nothing else: as a candidate it fails by itself. One that
        takes its worker along, and what that has built, is built no more: it would again, without end."""
        request = candidate.request

        def done(worker: WorkerProcess, answer: Message) -> None:
            worker.baselines[name] = "failure" not in answer
            if answer.get("failure") in ("crash", "timeout"):
                self._deadly.add(name)

        message = {"job": "hold", "name": name, "forget": forget, "func": request.func, "target": request.target,
                   "trace": request.baseline, "scheduled": ""}
        return Job(message, batch.options.timeout, done, slot)

    def _prepare_job(self, batch: Batch, candidate: Candidate) -> Job:
        """Drawing inputs may take seconds for large tasks, which is not the candidate's fault."""

        def done(worker: WorkerProcess, answer: Message) -> None:
            if "failure" in answer:
                self._failed(batch, candidate, worker, answer)
            else:
                worker.prepared.add(candidate.reference.path)

        return Job(self._run_message(batch, candidate) | {"job": "prepare"}, _DATA_SECONDS, done)

    def _run_job(self, batch: Batch, candidate: Candidate) -> Job:
        def done(worker: WorkerProcess, answer: Message) -> None:
            if "failure" in answer:
                self._failed(batch, candidate, worker, answer)
            else:
                batch.settle(candidate, MeasureResult(
                    tuple(answer["times"]), run_seconds=answer["run_seconds"], slowness=answer["slowness"],
                ))
                if _is_baseline(candidate.request) and not batch.fresh:
                    self._usual.setdefault(_baseline(candidate), statistics.median(answer["times"]))
            worker.runs += 1
            worker.ran.add(code_of(candidate.request))
            if candidate.result is not None:
                self._known[candidate.request.task_key, candidate.code_hash] = candidate.result

        limit = max(batch.options.timeout - candidate.build_seconds, _LEAST_SECONDS)
        return Job(self._run_message(batch, candidate) | {"job": "run"}, limit, done)

    def _run_message(self, batch: Batch, candidate: Candidate) -> Message:
        request, options, name = candidate.request, batch.options, _baseline(candidate)
        usual = request.baseline_seconds or self._usual.get(name, 0.0)
        held = not batch.fresh and candidate.worker is not None and candidate.worker.baselines.get(name, False)
        first = _is_baseline(request) and not usual and not batch.fresh  # all others are measured by it
        return {
            "id": candidate.index, "func": request.func, "target": request.target,
            "reference": str(candidate.reference.path), "rtol": options.rtol,
            "repeats": options.repeats, "exact": first,
            "baseline": name if held else "", "baseline_seconds": usual,
            "warmup_runs": options.warmup_runs, "min_repeat_seconds": options.min_repeat_seconds,
            "most_repeats": options.most_repeats, "best": 0.0 if batch.fresh else request.best,
            "cutoff": options.cutoff, "constants": request.constants, "constant_bytes": request.constant_bytes,
        }

    def _failed(self, batch: Batch, candidate: Candidate, worker: WorkerProcess, answer: Message) -> None:
        if answer["failure"] == "crash" and worker.runs and not candidate.crashes:
            candidate.crashes += 1  # perhaps an earlier candidate did it: once more, in another worker
            return
        batch.settle(candidate, _failure(answer))


def _baseline(candidate: Candidate) -> str:
    """The name of a candidate's baseline, one for each task and coldness of its weights; empty for none."""
    request = candidate.request
    if not request.baseline:
        return ""
    return f"{candidate.reference.path.stem}/{request.constants}/{request.constant_bytes}/{hash(request.baseline)}"


def _is_baseline(request: MeasureRequest) -> bool:
    return bool(request.baseline) and request.trace == request.baseline


def code_of(request: MeasureRequest) -> int:
    """Equal for requests of the same code."""
    return hash((request.func, request.target, request.trace, request.scheduled))


def _failure(answer: Message) -> MeasureResult:
    return MeasureResult(failure=answer["failure"], detail=answer["detail"])
