"""What a run writes to the log: records, the budget that is used up, and the cost model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from cost_model.model import CostModel
from mlc.graph.task import Task, versions
from mlc.log.record import Record, Verdict
from mlc.log.store import TuningLog
from mlc.log.workload import Workload
from mlc.measure.gauge import DISTURBED
from mlc.measure.machine import machine_id
from mlc.measure.measurer import MeasureResult
from mlc.target import Target
from mlc.tuning.options import TuneOptions

__all__ = ["Journal"]

#: the log keeps the cost model under this name, one for each target
_MODEL_STATE = "cost_model/{target}"
#: seconds between two times that the cost model is stored while a run goes on
_MODEL_PERIOD = 60.0


class Journal:
    """The budget and the log of one run. ``spent_trials`` and ``spent_seconds`` are a resumed run's earlier use."""

    def __init__(self, log: TuningLog, tasks: Sequence[Task], target: Target, options: TuneOptions) -> None:
        self.log = log
        self.trials = 0
        self.records = 0
        self.spent_trials, self.spent_seconds = 0, 0.0
        self._options = options
        self._state = _MODEL_STATE.format(target=target.canonical)
        self._began = self._stored = time.monotonic()
        which = sha256("\n".join(sorted({t.key for t in tasks})).encode()).hexdigest()[:16]
        if options.resume:
            for session in log.sessions():
                if session.options.get("tasks") == which:
                    self.spent_trials, self.spent_seconds = session.trials, session.seconds
        log.put_workloads(map(Workload.of, tasks))
        session = log.start_session({**options.to_json(), "tasks": which, "target": target.canonical})
        self._session = log.update_session(session, trials=self.spent_trials, seconds=self.spent_seconds)

    @property
    def session(self) -> str:
        return self._session.id

    @property
    def elapsed(self) -> float:
        """Seconds since this run began."""
        return time.monotonic() - self._began

    @property
    def trials_left(self) -> int | None:
        """Trials that may still be measured; None without a bound."""
        bound = self._options.trials
        return None if bound is None else max(0, bound - self.spent_trials - self.trials)

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the run may still take; None without a bound."""
        bound = self._options.seconds
        return None if bound is None else max(0.0, bound - self.spent_seconds - self.elapsed)

    def trial(
        self, task: Task, space: str, decisions: Mapping[str, int], trace: str, result: MeasureResult, flops: float
    ) -> Record:
        """The record of a trial's result; counts the trial."""
        self.trials += 1
        return Record(
            task.key, task.name, space, dict(decisions), trace, times=tuple(result.times), failure=result.failure,
            detail=result.detail[:500], machine=result.machine or machine_id(), versions=versions(),
            seed=self._options.seed, session=self.session, trial=self.spent_trials + self.trials,
            build_seconds=result.build_seconds, when=time.time(), flops=flops, code=result.code_hash,
            slowness=round(result.slowness, 2) if result.slowness >= DISTURBED else 0.0, device=result.device,
        )

    def undisturbed(self, record: Record) -> float | None:
        """Seconds of a record that this run measured while the machine was as fast as it can be; else None."""
        own = record.ok and record.session == self.session and not record.slowness
        return record.seconds if own and record.verdict is None else None

    def again(self, record: Record, result: MeasureResult, verdict: Verdict) -> Record:
        """The record of a candidate that was timed again in the last comparison; no trial of its own."""
        return replace(
            record, times=tuple(result.times), failure=result.failure, detail=result.detail[:500],
            machine=result.machine or machine_id(), versions=versions(), session=self.session, seed=self._options.seed,
            when=time.time(), verdict=verdict, device=result.device,
        )

    def append(self, records: Iterable[Record]) -> None:
        """Make records and the budget they used up durable, together."""
        rows = list(records)
        self._session = replace(
            self._session, trials=self.spent_trials + self.trials, seconds=self.spent_seconds + self.elapsed
        )
        self.log.append(rows, session=self._session)
        self.records += len(rows)

    def finish(self, reason: str, stopped: Mapping[str, str]) -> None:
        """Note why the run ended, why each task that stopped before did, and the seconds that all took."""
        noted = {**self._session.options, "reason": reason, "stopped": dict(stopped)}
        self._session = replace(self._session, options=noted)
        self.append([])

    def load_model(self, model: CostModel) -> None:
        """Give ``model`` what the log has stored; a model of another version stays as it is."""
        blob = self.log.get_state(self._state)
        if blob is None:
            return
        try:
            model.load(blob)
        except ValueError:
            return  # the features have changed since: it is trained again from the records

    def store_model(self, model: CostModel, *, always: bool = False) -> None:
        """Store the model if a while has passed since the last time."""
        if always or time.monotonic() - self._stored > _MODEL_PERIOD:
            self._stored = time.monotonic()
            self.log.put_state(self._state, model.save())
