"""How soon tuning has what it will have: whole models from an empty log, and with the shipped log of other models.

    python -m tests.performance.bench_models [--models A,B] [--seconds S] [--rounds N] [--target T] [--output DIR]
        [--again]

Each model is tuned twice, in processes of their own: ``empty`` knows no record at all, ``others`` the shipped records
of every task that is not the model's. What either had after so many trials is then built, and all of it is timed in
turn with the peers, so that the tuner is not believed its own times. (The cost model that ships is used by both; it
has seen candidates of some of the tasks.) Results: ``DIR/results.json`` and ``DIR/table.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.performance.left_out import LeftOut
from tests.performance.results import write_whole

ROOT = Path(__file__).parent.parent.parent
VARIANTS = ("empty", "others")
PEERS = ("onnxruntime", "openvino")
#: trials after which the model is built; it is in the end, too
CHECKPOINTS = (0, 50, 100, 200, 400, 800, 1600, 3200)


def main(argv: Sequence[str] | None = None) -> int:
    """Tune what is missing, time it, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="resnet50,bert_base", help="comma-separated (default: resnet50,bert_base)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="budget of each run (default: 3600)")
    parser.add_argument("--target", default="native", help="a CPU target that this machine can run")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each build (default: 12)")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-models")
    parser.add_argument("--again", action="store_true", help="tune and time anew what has results already")
    parser.add_argument("--tune", nargs=2, metavar=("MODEL", "VARIANT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.tune:
        tune(args.tune[0], args.tune[1], args.seconds, args.output, args.target)
        return 0
    rows = []
    for model in args.models.split(","):
        folder = args.output / model
        for variant in VARIANTS:
            if args.again or not (folder / variant / "run.json").exists():
                shutil.rmtree(folder / variant, ignore_errors=True)
                (folder / variant).mkdir(parents=True)
                print(f"{model}: {variant} ...", file=sys.stderr)
                subprocess.run(
                    [sys.executable, "-m", "tests.performance.bench_models", "--tune", model, variant, "--seconds",
                     str(args.seconds), "--target", args.target, "--output", str(folder / variant)],
                    cwd=ROOT, env=os.environ, check=True,
                )
                (folder / "times.json").unlink(missing_ok=True)
        rows.append(timed(model, folder, args.rounds))
        write_whole(args.output / "results.json", json.dumps(rows, indent=1))
        write_whole(args.output / "table.md", markdown(rows))
    print(markdown(rows))
    return 0


def tune(model: str, variant: str, seconds: float, folder: Path, target_name: str = "native") -> None:
    """Tune a model with what the variant knows, and build what the log had at each checkpoint."""
    from mlc.log import Layers, TuningLog
    from mlc.log.layers import MemoryLog
    from mlc.measure import local_measurer
    from mlc.report.console import stderr_console
    from mlc.report.progress import listening
    from mlc.tuning import TuneOptions, tune_tasks
    from mlc.tuning.events import BatchMeasured, Event
    from mlc.tuning.transfer import Experience

    left = LeftOut(model, target_name)
    target = left.target
    others = left.others if variant == "others" else Layers([])
    steps: list[tuple[int, float, float | None]] = []

    def note(event: Event) -> None:
        if isinstance(event, BatchMeasured):
            steps.append((event.trials, event.elapsed, event.latency))

    measurer = local_measurer(target)
    try:
        with TuningLog(folder / "log.db") as log, listening(stderr_console()) as listener:

            def both(event: Event) -> None:
                note(event)
                listener(event)

            report = tune_tasks(
                left.compilation.tasks(others), target, log, TuneOptions(seconds=seconds), measurer, both,
                shipped=others.best, experience=Experience.of(others.readers, target),
            )
            records = list(log.records())
    finally:
        measurer.close()
    builds = {}
    for trials in [*(c for c in CHECKPOINTS if c < report.trials), report.trials]:
        last = trials == report.trials
        known = MemoryLog(r for r in records if last or (r.trial <= trials and r.verdict is None))
        layers = Layers([known, *others.readers])
        file = folder / f"{trials}.so"
        left.compilation.build(layers).save(file)
        builds[trials] = str(file)
    write_whole(folder / "run.json", json.dumps({
        "model": model, "variant": variant, "seconds": report.seconds, "trials": report.trials,
        "reason": report.reason, "steps": steps, "builds": builds,
    }))


def timed(model: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Every build of a model and its peers in turn."""
    import onnx

    from mlc.bench import EngineSpec, Timing, run_bench
    from mlc.bench.engines import onnx_inputs
    from mlc.networks.inputs import random_inputs
    from mlc.networks.models import model_named
    from tests.performance.reference import float64_outputs

    store = folder / "times.json"
    if store.exists():
        found: dict[str, Any] = json.loads(store.read_text())
        return found
    runs = {variant: json.loads((folder / variant / "run.json").read_text()) for variant in VARIANTS}
    path, source = folder / "model.onnx", model_named(model)
    onnx.save(source, path)
    inputs = random_inputs(onnx_inputs(str(path)))
    engines = [EngineSpec("mlc", label=f"{variant} {trials}", artifact=file)
               for variant, run in runs.items() for trials, file in run["builds"].items()]
    result = run_bench(path, [*engines, *map(EngineSpec, PEERS)], name=model, inputs=inputs,
                       reference=float64_outputs(source, inputs), timing=Timing(rounds=rounds))
    path.unlink()
    row = {**result.to_json(), "runs": runs}
    write_whole(store, json.dumps(row))
    return row


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a build: when it was there, its time, and how far it is from the best peer and from the empty log's
    end."""
    lines = ["| model | log | trials | after | ms | best peer / this | this / end of the empty log's | error |",
             "|---" * 8 + "|"]
    for row in rows:
        times = {r["engine"]: r["median_ms"] for r in row["results"]}
        errors = {r["engine"]: r["max_rel_err"] for r in row["results"]}
        peer = min(times[p] for p in PEERS if times.get(p))
        end = times[f"empty {row['runs']['empty']['trials']}"]
        for variant, run in row["runs"].items():
            for trials in map(int, run["builds"]):
                label = f"{variant} {trials}"
                after = next((at for t, at, _ in run["steps"] if t >= trials), run["seconds"]) if trials else 0.0
                after = run["seconds"] if trials == run["trials"] else after
                stop = f" ({run['reason']})" if trials == run["trials"] else ""
                cells = [row["model"], variant, f"{trials}{stop}", f"{after:.0f} s", f"{times[label]:.3g}",
                         f"{peer / times[label]:.2f}", f"{times[label] / end:.3f}", f"{errors[label]:.0e}"]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
