"""The ablation table: neither, substitutions only, schedules only, and both searched together, on nine networks.

Three of them are in the form in which they are trained or written.

``make bench-ablation``, or ``python -m tests.performance.ablation --models rnn_unrolled --seconds 120``. "Neither" and
"substitutions only" are compiled without any log: every function gets the first seed of its search space. "Schedules
only" and "joint" are tuned for ``--seconds`` each, into logs of their own; with ``--seconds 0`` nothing is tuned, and
they use what your own log and the shipped ones have. The four are then timed in turns in one run, and their outputs
compared with an evaluation in float64 that shares nothing with mlc. Results are written after each model; models that
are there already are skipped unless ``--again``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.performance.results import Results, publish

ROOT = Path(__file__).parent.parent.parent
#: the largest error that may come from float32, relative to the largest output
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Variant:
    """One column of the table."""

    name: str
    substitutions: bool
    tuned: bool


VARIANTS = (
    Variant("neither", False, False),
    Variant("substitutions", True, False),
    Variant("schedules", False, True),
    Variant("joint", True, True),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, write the table; 1 if an output is wrong."""
    from mlc.networks.ablation import ABLATION_MODELS, WRITTEN_MODELS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join([*ABLATION_MODELS, *WRITTEN_MODELS]),
                        help="comma-separated (default: all)")
    parser.add_argument("--seconds", type=float, default=300.0, help="tuning budget of a tuned variant (default: 300)")
    parser.add_argument("--target", default="native", help="what every variant is built for (default: native)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each variant (default: 12)")
    parser.add_argument("--publish", action="store_true", help="put the table into results.md")
    parser.add_argument("--again", action="store_true", help="measure models that have results already, too")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "ablation")
    args = parser.parse_args(argv)
    results = Results(args.output)
    one = partial(measure, seconds=args.seconds, folder=args.output, rounds=args.rounds, target=args.target)
    for row in results.fill(args.models.split(","), one, args.again):
        print(markdown([row]), file=sys.stderr)
    rows = results.rows
    text = markdown(list(rows.values()))
    (args.output / "table.md").write_text(text, encoding="utf-8")
    if args.publish:
        publish("ablation", text)
    print(text)
    wrong = [f"{row['model']}, {variant}" for row in rows.values() for variant in wrong_variants(row)]
    if wrong:
        print(f"outputs must be within {TOLERANCE} of float64, but are not: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def measure(name: str, seconds: float, folder: Path, rounds: int, target: str = "native") -> dict[str, Any]:
    """Build the four variants of a model, then time them in turn."""
    import onnx

    from mlc.bench import EngineSpec, Timing, run_bench
    from mlc.bench.engines import onnx_inputs
    from mlc.networks.ablation import ablation_model
    from mlc.networks.inputs import random_inputs
    from tests.performance.reference import float64_outputs

    path = folder / f"{name}.onnx"
    model = ablation_model(name)
    onnx.save(model, path)
    built = {variant.name: build(path, variant, seconds, folder, target) for variant in VARIANTS}
    inputs = random_inputs(onnx_inputs(str(path)))
    engines = [EngineSpec("mlc", label=label, artifact=found["artifact"]) for label, found in built.items()]
    result = run_bench(path, engines, name=name, inputs=inputs, reference=float64_outputs(model, inputs),
                       timing=Timing(rounds=rounds))
    path.unlink()
    return {
        **result.to_json(), "target": result.target, "variants": built, "tuning_seconds": seconds, "when": time.time(),
    }


def build(path: Path, variant: Variant, seconds: float, folder: Path, target: str = "native") -> dict[str, Any]:
    """Tune if the variant is tuned, compile and save: the artifact, seconds of compiling, trials."""
    from mlc import api

    log: Path | bool | None = None if variant.tuned else False
    trials = 0
    if variant.tuned and seconds > 0:
        log = folder / f"{path.stem}-{variant.name}.db"
        trials = api.tune(path, target, seconds=seconds, log=log, substitutions=variant.substitutions).trials
    started = time.monotonic()
    exe = api.compile(path, target, log=log, substitutions=variant.substitutions)
    artifact = folder / f"{path.stem}-{variant.name}.so"
    exe.save(artifact)
    return {"artifact": str(artifact), "compile_seconds": time.monotonic() - started, "trials": trials}


def wrong_variants(row: Mapping[str, Any]) -> list[str]:
    """The variants of a model that failed, or whose outputs are not the model's."""
    errors = {result["engine"]: result["max_rel_err"] for result in row["results"]}
    return [v.name for v in VARIANTS if errors.get(v.name) is None or not errors[v.name] <= TOLERANCE]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians in milliseconds, what each search gains over "neither", and joint over schedules only; the six networks,
    then those in the form in which they are trained or written."""
    from mlc.networks.ablation import WRITTEN_MODELS

    columns = ("model", *(f"{variant.name}, ms" for variant in VARIANTS),
               *(f"neither / {variant.name}" for variant in VARIANTS[1:]), "schedules / joint", "largest error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for written in (False, True):
        lines += _group([row for row in rows if (row["model"] in WRITTEN_MODELS) == written])
    return "\n".join(lines) + "\n"


def _group(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each model, and of several the geometric means."""
    lines: list[str] = []
    gains: list[list[float]] = []
    for row in rows:
        times = {result["engine"]: result["median_ms"] for result in row["results"]}
        pairs = [("neither", variant.name) for variant in VARIANTS[1:]] + [("schedules", "joint")]
        ratios = [times[a] / times[b] if times.get(a) and times.get(b) else math.nan for a, b in pairs]
        gains.append(ratios)
        errors = [result["max_rel_err"] for result in row["results"] if result["max_rel_err"] is not None]
        cells = [row["model"], *("-" if times.get(v.name) is None else f"{times[v.name]:.3f}" for v in VARIANTS),
                 *map(_ratio, ratios), f"{max(errors):.0e}" if errors else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    if len(rows) > 1:
        means = [math.exp(sum(map(math.log, column)) / len(column)) for column in zip(*gains, strict=True)]
        cells = ["geometric mean", *[""] * len(VARIANTS), *map(_ratio, means), ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
