"""The tuner against MetaSchedule on seven kernels: ``make bench-tuner``.

    python -m tests.performance.bench_tuner [--trials N] [--seeds K] [--tasks TEXT] [--target T] [--output DIR]
                                               [--again]

Both tune the same tensor functions from nothing, each in a process of its own, at the same number of threads,
MetaSchedule with the set-up that ``meta_schedule.tune_tir`` has by default. What either of them found, at every
trial, is then timed in turn by one harness, so that neither is believed its own times. Nothing that is imported
counts. Each run is written when it is done and not done again, so that a benchmark of hours can be interrupted; runs
for different targets lie in different folders. Results: ``DIR/results.json`` and ``DIR/table.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mlc import threads
from mlc.config import physical_cores
from mlc.measure.machine import load_warning, machine_id
from mlc.report import format as fmt
from mlc.target import resolve
from tests.performance.results import publish, write_whole

__all__ = ["CHECKPOINTS", "Race", "main", "markdown"]

ROOT = Path(__file__).parent.parent.parent
#: trials after which the best so far is compared
CHECKPOINTS = (1, 4, 16, 64, 256)
TUNERS = ("mlc", "metaschedule")


@dataclass(frozen=True)
class Found:
    """One tuner's run. ``steps`` are (trial, seconds since the start, time of the kernel in the harness), in order;
    the last step is what the tuner leaves behind."""

    trials: int
    seconds: float
    stopped: str
    steps: tuple[tuple[int, float, float], ...]

    @property
    def final(self) -> float:
        """Seconds of the kernel that the run ended with."""
        return self.steps[-1][2] if self.steps else math.inf

    def after(self, trials: int) -> float:
        """Seconds of the kernel that was the best after so many trials; all of them if the run had no more."""
        if trials >= self.trials:
            return self.final
        return next((time for trial, _, time in reversed(self.steps) if trial <= trials), math.inf)

    def reaches(self, time: float) -> tuple[int, float] | None:
        """The trials and seconds after which the kernel takes at most ``time`` seconds; None: never."""
        return next(((trial, at) for trial, at, own in self.steps if own <= time), None)


@dataclass(frozen=True)
class Race:
    """Both tuners on one kernel with one seed."""

    kernel: str
    seed: int
    mlc: Found
    metaschedule: Found

    @property
    def gain(self) -> float:
        """How many times faster mlc's final kernel is."""
        return self.metaschedule.final / self.mlc.final

    @property
    def trials_needed(self) -> float:
        """Trials in which mlc had what MetaSchedule had in the end; infinite: it never had."""
        reached = self.mlc.reaches(self.metaschedule.final)
        return math.inf if reached is None else reached[0]

    @property
    def time_needed(self) -> float:
        """The same in seconds, as a part of MetaSchedule's seconds."""
        reached = self.mlc.reaches(self.metaschedule.final)
        return math.inf if reached is None else reached[1] / self.metaschedule.seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, time it, write the results."""
    from tests.performance.kernels import tuner_kernels

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=256, help="of each tuner on each kernel (default: 256)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--tasks", default="", help="only kernels whose names hold this text (alternatives: a|b)")
    parser.add_argument("--target", default="native", help="a CPU target that this machine can run")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-tuner")
    parser.add_argument("--publish", action="store_true", help="put the table into results.md")
    parser.add_argument("--again", action="store_true", help="tune and time anew what has results already")
    args = parser.parse_args(argv)
    names = [k.name for k in tuner_kernels() if any(part in k.name for part in args.tasks.split("|"))]
    if not names:
        parser.error(f"--tasks must name kernels, got {args.tasks!r}; "
                     f"there are {', '.join(k.name for k in tuner_kernels())}")
    if warning := load_warning():
        print(warning, file=sys.stderr)
    resolve(args.target, threads=args.threads)  # refused here and not in the first child
    folder = args.output / _plain(args.target) / f"{args.trials}-trials"
    races = []
    for name in names:
        for seed in range(args.seeds):
            races.append(_race(name, seed, args.trials, args.target, args.threads, folder, args.again))
            print(f"{name}, seed {seed}: {_sentence(races[-1])}", file=sys.stderr)
            _write(args.output, races, args.trials, args.target, args.threads)
    text = (args.output / "table.md").read_text(encoding="utf-8")
    if args.publish:
        publish("tuner", text)
    print(text)
    return 0


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def _race(name: str, seed: int, trials: int, target: str, thread_count: int, folder: Path, again: bool) -> Race:
    place = folder / _plain(name) / f"seed{seed}"
    fresh = False
    for tuner in TUNERS:
        own = place / tuner
        if again or not (own / "run.json").exists():
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            print(f"{name}, seed {seed}: {tuner} tunes ...", file=sys.stderr)
            _call(target, thread_count, own / "output.txt", "tune", tuner, name, seed, trials, own)
            fresh = True
    times = place / "times.json"
    if fresh or not times.exists():
        _call(target, thread_count, place / "output.txt", "time", name, times, *(place / t for t in TUNERS))
    measured = json.loads(times.read_text())
    return Race(name, seed, *(_found(place / tuner, measured[tuner]) for tuner in TUNERS))


def _call(target: str, thread_count: int, output: Path, *arguments: object) -> None:
    """A job of ``tests.performance.tuners``; what it prints goes to ``output``."""
    command = [sys.executable, "-m", "tests.performance.tuners", "--target", target, "--threads", str(thread_count),
               *map(str, arguments)]
    with output.open("w", encoding="utf-8") as file:
        status = subprocess.call(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                 env={**os.environ, **threads.environment(thread_count)})
    if status:
        raise SystemExit(f"a job must end well, but {' '.join(command[3:])} ended with {status}; see {output}")


def _found(folder: Path, times: Sequence[float]) -> Found:
    from tests.performance.tuners import read_run

    run = read_run(folder)
    steps = tuple((s.trial, s.at, t) for s, t in zip(run.steps, times, strict=True))
    return Found(len(run.trials), run.seconds, run.stopped, steps)


# -- results


def _write(output: Path, races: Sequence[Race], trials: int, target: str, thread_count: int) -> None:
    document = {
        "machine": machine_id(), "target": target, "threads": thread_count, "trials": trials,
        "races": [{**asdict(r), "gain": r.gain, "trials_needed": _finite(r.trials_needed),
                   "time_needed": _finite(r.time_needed)} for r in races],
        "summary": summary(races),
    }
    write_whole(output / "results.json", json.dumps(document, indent=1))
    write_whole(output / "table.md", markdown(races, trials, target))


def summary(races: Sequence[Race]) -> dict[str, Any]:
    """Medians over the seeds, then over the kernels: the geometric mean of gains, the worst of what was needed."""
    gains = _by_kernel(races, lambda r: r.gain)
    needed = _by_kernel(races, lambda r: r.trials_needed)
    parts = _by_kernel(races, lambda r: r.time_needed)
    return {
        "gain": _geometric(list(gains.values())), "most_trials_needed": _finite(max(needed.values())),
        "most_time_needed": _finite(max(parts.values())),
    }


def markdown(races: Sequence[Race], trials: int, target: str) -> str:
    """One line for each kernel, medians over its seeds: times after so many trials, and what it took to catch up."""
    points = [k for k in CHECKPOINTS if k <= trials]
    columns = ["kernel", "tuner", *(f"{k} trials" if k > 1 else "1 trial" for k in points), "seconds",
               "final gain", "MetaSchedule's final reached"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in dict.fromkeys(r.kernel for r in races):
        own = [r for r in races if r.kernel == name]
        needed, part = (median(value(r) for r in own) for value in (_trials_needed, _time_needed))
        reached = "never" if math.isinf(needed) else f"after {needed:.0f} trials, {100 * part:.1f}% of its time"
        for label, runs in (("mlc", [r.mlc for r in own]), ("MetaSchedule", [r.metaschedule for r in own])):
            cells = [_seconds(median(run.after(k) for run in runs)) for k in points]
            tail = [f"**{median(r.gain for r in own):.2f}**", reached] if label == "mlc" else ["", ""]
            first = name if label == "mlc" else ""
            lines.append(f"| {' | '.join([first, label, *cells, f'{median(r.seconds for r in runs):.0f}', *tail])} |")
    total = summary(races)
    seeds = len({r.seed for r in races})
    lines += ["", f"Geometric mean of the final gains: **{total['gain']:.2f}**. {machine_id()}, {target}; medians over "
              f"{seeds} seed{'s' if seeds > 1 else ''}; times of the kernel that was the best so far, all timed in "
              "turn by one harness; imports are not counted."]
    return "\n".join(lines) + "\n"


def _trials_needed(race: Race) -> float:
    return race.trials_needed


def _time_needed(race: Race) -> float:
    return race.time_needed


def _by_kernel(races: Sequence[Race], value: Callable[[Race], float]) -> Mapping[str, float]:
    names = dict.fromkeys(r.kernel for r in races)
    return {name: median(value(r) for r in races if r.kernel == name) for name in names}


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _seconds(value: float) -> str:
    return fmt.seconds(value) if math.isfinite(value) else "-"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _sentence(race: Race) -> str:
    reached = race.mlc.reaches(race.metaschedule.final)
    caught = f"reached after {reached[0]} trials, {reached[1]:.1f} s" if reached else "not reached"
    return (f"{fmt.seconds(race.mlc.final)} against {fmt.seconds(race.metaschedule.final)} "
            f"({fmt.factor(race.gain)}), {caught} of {race.metaschedule.seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
