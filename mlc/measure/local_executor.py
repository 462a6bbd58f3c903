"""The local worker processes as an executor."""

from __future__ import annotations

from collections.abc import Sequence

from mlc.config import physical_cores
from mlc.gpu import find_gpu
from mlc.measure.dispatch import Dispatcher
from mlc.measure.executor import Answer, Job
from mlc.measure.local import LocalMeasurer
from mlc.measure.measurer import MeasureOptions, Measurer, MeasureResult
from mlc.measure.stream import StreamingExecutor, StreamingMeasurer
from mlc.target import Target

__all__ = ["LocalExecutor", "build_workers", "local_measurer"]

_BATCH = 64  # jobs that are built together before the first is timed
_BUILD_WORKERS = 8  # more processes that compile candidates than this only wait for the one that is timed
_CUDA_WORKERS = 32  # of a GPU's, which take seconds to compile and milliseconds to run
_CUDA_BYTES = 2 << 30  # of the GPU's memory that one of these may have: a context, and the inputs that it keeps
_GRACE = 900.0  # seconds beyond its limit that a GPU's candidate may wait for a worker, and for its task's reference


def local_measurer(target: Target) -> Measurer:
    """What measures candidates for ``target`` on this machine; to be closed.

    For a GPU it builds candidates while it times others. A CPU's times would be disturbed by that: there a batch is
    built, then timed, and the next is proposed with all of its times known.
    """
    options = MeasureOptions(threads=target.threads)
    workers = build_workers(target.kind)
    if target.kind == "cuda":
        return Dispatcher(StreamingExecutor(StreamingMeasurer(options, workers)), options, grace=_GRACE)
    return Dispatcher(LocalExecutor(LocalMeasurer(options, workers)), options)


def build_workers(kind: str = "llvm") -> int:
    """How many processes of this machine compile candidates for targets of a kind at once."""
    if kind != "cuda":
        return max(1, min(physical_cores(), _BUILD_WORKERS))
    gpu = find_gpu()
    most = gpu.memory_bytes // _CUDA_BYTES if gpu is not None and gpu.memory_bytes else _CUDA_WORKERS
    return max(1, min(physical_cores(), _CUDA_WORKERS, most))


class LocalExecutor:
    """Implements :class:`mlc.measure.executor.Executor` with a measurer of this machine, which loses nothing.

    Nothing here runs by itself: what was submitted is done, all together, by the next :meth:`poll` that may wait.
    Jobs of one candidate are one batch for the measurer, which builds some while others wait.
    """

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._jobs: dict[str, Job] = {}
        self._done: list[Answer] = []

    @property
    def capacity(self) -> int:
        return _BATCH

    @property
    def wanted(self) -> int:
        return 1

    @property
    def machine(self) -> str:
        return ""

    @property
    def grain(self) -> int:
        return 1

    def submit(self, jobs: Sequence[Job]) -> None:
        self._jobs.update((job.id, job) for job in jobs)

    def poll(self, timeout: float) -> list[Answer]:
        if timeout > 0:
            self._run()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._jobs.clear()
        self._measurer.close()

    def _run(self) -> None:
        jobs, self._jobs = list(self._jobs.values()), {}
        single = [job for job in jobs if not job.rounds and len(job.requests) == 1]

        told: set[int] = set()

        def done(index: int, result: MeasureResult) -> None:
            told.add(index)
            self._done.append(Answer(single[index].id, (result,)))

        if single:
            for index, result in enumerate(self._measurer.measure([job.requests[0] for job in single], done)):
                if index not in told:
                    done(index, result)
        for job in jobs:
            if job.rounds:
                self._done.append(Answer(job.id, tuple(self._measurer.compare(job.requests, job.rounds))))
            elif job not in single:
                self._done.append(Answer(job.id, tuple(self._measurer.measure(job.requests))))
