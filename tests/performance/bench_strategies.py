"""Which strategy finds most in how many trials: what the default was chosen by.

    python -m tests.performance.bench_strategies [--trials N] [--seeds K] [--kernels TEXT]

Each strategy tunes each kernel from an empty log. What each had after a quarter, a half and all of its trials is timed
in turn with what the others had, in one worker; figures are relative to the fastest of them, geometric means over
kernels and seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlc.log import Record

__all__ = ["main"]

STRATEGIES = ("evolutionary", "coordinate", "exhaustive", "random")
_KERNELS = "bert 128x768x3072|gemm 768, two activations|resnet 3x3 s1 128->128 @28|resnet 1x1 s1 256->64 @56|" \
           "depthwise 3x3 s2|layer norm"
_ROUNDS = 15


def main(argv: Sequence[str] | None = None) -> int:
    """Tune, compare, print the table."""
    from mlc.config import physical_cores
    from mlc.graph.task import Task, normalise, to_json
    from mlc.log import TuningLog
    from mlc.measure import MeasureRequest, local_measurer
    from mlc.target import resolve
    from mlc.tuning import TuneOptions, tune_tasks
    from tests.performance.kernels import kernels

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=64, help="of each strategy on each kernel (default: 64)")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--target", default="native", help="a CPU target that this machine can run")
    parser.add_argument("--kernels", default=_KERNELS, help="only kernels whose names hold this text (a|b)")
    args = parser.parse_args(argv)
    chosen = [k for k in kernels() if any(part in k.name for part in args.kernels.split("|"))]
    target = resolve(args.target, threads=physical_cores())
    points = [args.trials // 4, args.trials // 2, args.trials]
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    measurer = local_measurer(target)
    try:
        for kernel in chosen:
            task = Task(kernel.name, normalise(kernel.build(target)), target)
            for seed in range(args.seeds):
                found: dict[tuple[str, int], Record] = {}
                for strategy in STRATEGIES:
                    with tempfile.TemporaryDirectory() as folder, TuningLog(Path(folder) / "log.db") as log:
                        options = TuneOptions(trials=args.trials, seed=seed, strategy=strategy, confirm_rounds=0)
                        tune_tasks([task], target, log, options, measurer)
                        records = [r for r in log.records() if r.ok]
                    for point in points:
                        found[strategy, point] = min((r for r in records if r.trial <= point), key=lambda r: r.seconds)
                requests = [
                    MeasureRequest(task.key, to_json(task.func), target.attrs, record.trace)
                    for record in found.values()
                ]
                times = [median(r.times) for r in measurer.compare(requests, _ROUNDS)]
                for key, time in zip(found, times, strict=True):
                    ratios[key].append(time / min(times))
                print(f"{kernel.name}, seed {seed}: " + ", ".join(
                    f"{s} {t * 1e6:.1f} us" for (s, p), t in zip(found, times, strict=True) if p == args.trials
                ), file=sys.stderr)
    finally:
        measurer.close()
    print(f"| strategy | {' | '.join(f'after {p} trials' for p in points)} |\n" + "|---" * (1 + len(points)) + "|")
    for strategy in STRATEGIES:
        means = [math.exp(sum(map(math.log, ratios[strategy, p])) / len(ratios[strategy, p])) for p in points]
        print(f"| {strategy} | {' | '.join(f'{m:.3f}' for m in means)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
