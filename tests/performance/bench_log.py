"""How quick a tuning log of a million records is: opening, a task's best, appending, the summary, walking them all.

``python -m tests.performance.bench_log [--records N]``; medians, and the goal where there is one.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from mlc.log import Record, TuningLog
from mlc.log.store import row_of

_TASKS = 2000


def main() -> None:
    """Make the log, then time what a compiler and a tuner ask of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.db"
        started = time.perf_counter()
        _fill(path, args.records)
        print(f"{args.records} records of {_TASKS} tasks, {path.stat().st_size / 2**20:.0f} MiB, "
              f"made in {time.perf_counter() - started:.0f} s")
        _report("open", _spent(lambda i: TuningLog(path).close(), 20), 1.0)
        with TuningLog(path) as log:
            _report("best of a task", _spent(lambda i: log.best(_key(i * 37 % _TASKS)), 300), 0.010)
            batch = _spent(lambda i: log.append([_record(-8 * i - j) for j in range(8)]), 100)
            _report("append a batch of 8", batch, 0.005)
            _report("summary of all tasks", _spent(lambda i: log.tasks(), 3), None)
            _report("records of a task", _spent(lambda i: list(log.records(_key(i))), 20), None)


def _fill(path: Path, count: int) -> None:
    """Distinct rows; one body serves all, since encoding is not what is timed."""
    rng = random.Random(0)
    _, _, session, _, body, _ = row_of(_record(0))
    with TuningLog(path) as log:
        for start in range(0, count, 20_000):
            log.append_rows([
                (rng.randbytes(16), _key(i % _TASKS), session, rng.random() if i % 5 else None, body, int(i % 997 == 0))
                for i in range(start, min(count, start + 20_000))
            ])


def _key(task: int) -> str:
    return f"{task:016x}-llvm/x86-64-v4/2-tvm0.27.0.post1-llvm22"


def _record(trial: int) -> Record:
    trace = "[" + ",".join(f'["Split",["l{i}",{i}],[true],["l{i + 1}"]]' for i in range(60)) + "]"
    return Record(_key(trial % _TASKS), "fused_conv2d_add_relu", "cpu.conv2d_nchwc", {"oc": 4, "ow": 5}, trace,
                  (1e-3 + trial * 1e-9,), trial=trial)


def _spent(call: Callable[[int], object], count: int) -> list[float]:
    times = []
    for i in range(count):
        start = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - start)
    return times


def _report(what: str, times: list[float], goal: float | None) -> None:
    told = f" (goal: {goal * 1e3:g} ms)" if goal else ""
    print(f"{what:24s} {median(times) * 1e3:9.3f} ms, slowest {max(times) * 1e3:.3f} ms{told}")


if __name__ == "__main__":
    main()
