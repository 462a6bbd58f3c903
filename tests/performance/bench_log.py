"""How quick a tuning log of a million records is: opening, a task's best, appending, and what ``mlc log`` does with it.

``python -m tests.performance.bench_log [--records N] [--file LOG] [--commands]``; medians, and the goal where there is
one. ``--file`` keeps the log and uses it again; ``--commands`` runs the commands that read all of it too, each in a
process of its own, whose peak memory is told.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from mlc.log import Record, TuningLog, Verdict
from mlc.log.codec import canonical_text, digest, pack

_TASKS = 2000
_BATCH = 20_000
_TEXT, _UNIQUE = "@text@", 123_456_789  # places in a record's text that make it another record


def main() -> None:
    """Make the log, then time what a compiler and a tuner ask of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--file", type=Path, help="keep the log here, or use the one that is here")
    parser.add_argument("--commands", action="store_true", help="mlc log show, check, prune and export too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "log.db"
        started = time.perf_counter()
        made = not path.exists()
        if made:
            _fill(path, args.records)
        with TuningLog(path) as log:
            count = log.count()
        print(f"{count} records of {_TASKS} tasks, {path.stat().st_size / 2**20:.0f} MiB"
              + (f", made in {time.perf_counter() - started:.0f} s" if made else ""), flush=True)
        _report("open", _spent(lambda i: TuningLog(path).close(), 20), 1.0)
        _report("open to read", _spent(lambda i: TuningLog(path, readonly=True).close(), 20), 1.0)
        with TuningLog(path) as log:
            _report("best of a task", _spent(lambda i: log.best(_key(i * 37 % _TASKS)), 300), 0.010)
            fresh = time.time_ns()
            batch = _spent(lambda i: log.append([_record(fresh + 8 * i + j) for j in range(8)]), 100)
            _report("append a batch of 8", batch, 0.005)
            _report("summary of all tasks", _spent(lambda i: log.tasks(), 3), None)
            _report("records of a task", _spent(lambda i: list(log.records(_key(i))), 20), None)
        if args.commands:
            _commands(path, Path(folder))


def _commands(path: Path, folder: Path) -> None:
    """Each command's seconds and the most memory that it held."""
    jsonl, pruned, plot = folder / "log.jsonl", folder / "pruned.db", folder / "plot.html"
    for words in (["show"], ["show", "--task", "fused"], ["check"], ["prune", pruned], ["export", jsonl],
                  ["show", "--plot", plot]):
        start = time.perf_counter()
        program = ("import json, resource, sys; from mlc.cli.main import main; code = main(sys.argv[1:]); "
                   "print(json.dumps([code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))")
        done = subprocess.run([sys.executable, "-c", program, "log", *map(str, words), "--log", str(path)],
                              capture_output=True, text=True)
        code, peak = json.loads(done.stdout.splitlines()[-1]) if done.stdout else (done.returncode, 0)
        print(f"mlc log {words[0]:7s}{words[1] if len(words) > 1 and str(words[1]).startswith('-') else '':10s}"
              f"{time.perf_counter() - start:9.1f} s, at most {peak / 1024:.0f} MiB"
              + (f", exit code {code}: {done.stderr.strip()[-200:]}" if code else ""), flush=True)


def _fill(path: Path, count: int) -> None:
    """Distinct records as a tuner writes them. Their texts differ in a few places, so that a million take minutes."""
    rng, form = random.Random(0), replace(_record(0), detail=_TEXT, trial=_UNIQUE, task_key=_TEXT)
    good = canonical_text(replace(form, times=(0.5,)))
    kept = canonical_text(replace(form, times=(0.5,), verdict=Verdict.KEPT))
    failed = canonical_text(replace(form, times=(), failure="crash"))
    with TuningLog(path) as log:
        for start in range(0, count, _BATCH):
            rows = []
            for i in range(start, min(count, start + _BATCH)):
                which = failed if i % 5 == 0 else kept if i % 97 == 0 else good
                key, seconds = _key(i % _TASKS), round(rng.uniform(1e-3, 1e-2), 9)
                text = which.replace("[0.5]", f"[{seconds!r}]").replace(f'"task_key":"{_TEXT}"', f'"task_key":"{key}"')
                text = text.replace(_TEXT, f"SIGSEGV {i}").replace(str(_UNIQUE), str(i + 1))
                ok = which is not failed
                rows.append((digest(text), key, "s", seconds if ok else None, pack(text), int(which is kept)))
            log.append_rows(rows)


def _key(task: int) -> str:
    return f"{task:016x}-llvm/x86-64-v4/2-tvm0.27.0.post1-llvm22"


def _record(trial: int) -> Record:
    trace = "[" + ",".join(f'["Split",["l{i}",{i}],[true],["l{i + 1}"]]' for i in range(60)) + "]"
    return Record(_key(trial % _TASKS), "fused_conv2d_add_relu", "cpu.conv2d_nchwc", {"oc": 4, "ow": 5}, trace,
                  (1e-3 + trial % 1000 * 1e-9,), trial=trial, session="s", machine="a CPU, 2 cores", when=1.7e9)


def _spent(call: Callable[[int], object], count: int) -> list[float]:
    times = []
    for i in range(count):
        start = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - start)
    return times


def _report(what: str, times: list[float], goal: float | None) -> None:
    told = f" (goal: {goal * 1e3:g} ms)" if goal else ""
    print(f"{what:24s} {median(times) * 1e3:9.3f} ms, slowest {max(times) * 1e3:.3f} ms{told}", flush=True)


if __name__ == "__main__":
    main()
