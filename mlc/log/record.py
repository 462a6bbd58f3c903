"""A record: one measured (or failed, or untimed) candidate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

__all__ = ["CLEARLY_FASTER", "ELSEWHERE", "Record", "Verdict", "best_of", "untimed_of"]

#: a single measurement outweighs an earlier comparison only if it took less than this part of its seconds
CLEARLY_FASTER = 0.95


#: the machine of records that came with mlc and whose times cannot be those of a machine like the one at hand
ELSEWHERE = "a faster machine"


class Verdict(Enum):
    """The result of timing a candidate interleaved with the untuned default."""

    KEPT = "kept"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Record:
    """What happened when one candidate of one task was built and run.

    ``times`` are seconds per call, one per repeat, and empty on failure. ``failure`` is empty on success, else one of
    ``build``, ``run``, ``timeout``, ``crash``, ``wrong``, with an explanation in ``detail``. ``decisions`` are the knob
    values by name, ``trace`` is the JSON of the schedule's trace, which can be replayed on an equal function.

    ``verdict`` is None for a trial, and set for a candidate that was timed again in a comparison. ``code`` is the hash
    of the machine code. ``slowness`` is how many times slower than its best the machine was during the measurement, and
    0 if it was not disturbed. ``made_for`` is the target of a shipped record, and empty for all others. ``device`` is
    the name of the device that measured, if ``machine`` is a class of several. ``expected`` is the estimated time of a
    candidate that was compiled for a GPU and not run, and 0 for all others. ``extra`` is not interpreted by mlc.
    """

    task_key: str
    task_name: str
    space: str
    decisions: dict[str, int]
    trace: str
    times: tuple[float, ...] = ()
    failure: str = ""
    detail: str = ""
    machine: str = ""
    versions: str = ""
    seed: int = 0
    session: str = ""
    trial: int = 0
    build_seconds: float = 0.0
    when: float = 0.0  # seconds since the epoch
    flops: float = 0.0
    verdict: Verdict | None = None
    code: str = ""
    slowness: float = 0.0
    made_for: str = ""
    device: str = ""
    expected: float = 0.0
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it has a valid time."""
        return not self.failure and bool(self.times)

    @property
    def untimed(self) -> bool:
        """Whether the candidate was compiled and accepted, but not run."""
        return not self.failure and not self.times and self.expected > 0

    @property
    def kept(self) -> bool:
        """Whether this won when the best candidates of its task and the untuned default were timed interleaved."""
        return self.ok and self.verdict is Verdict.KEPT

    @property
    def seconds(self) -> float:
        """Median seconds a call; infinity for a failure."""
        return median(self.times) if self.ok else float("inf")


def best_of(records: Iterable[Record]) -> Record | None:
    """The record to compile a task with, of its records, oldest first; see :meth:`mlc.log.LogReader.best`."""
    best: Record | None = None
    for record in records:
        if not record.ok:
            continue
        margin = CLEARLY_FASTER if best is not None and best.kept else 1.0
        if record.kept or best is None or record.seconds < best.seconds * margin:
            best = record
    return best


def untimed_of(records: Iterable[Record]) -> Record | None:
    """The record to compile a task with if none has a time, of its records, oldest first: of those that were never run,
    and did not fail on other devices, the one with the least estimated time in the latest run."""
    found: dict[tuple[str, tuple[tuple[str, int], ...]], Record] = {}
    for record in records:
        which = record.space, tuple(sorted(record.decisions.items()))
        if record.untimed:
            found[which] = record
        elif record.failure:
            found.pop(which, None)
    return min(found.values(), key=lambda record: record.expected, default=None)
