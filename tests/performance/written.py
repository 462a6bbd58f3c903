"""What substitutions gain on architectures as their authors publish them: with and without, in one run.

``make bench-written``, or ``python -m tests.performance.written --models graph_sage,deep_sdf``. Both are compiled
without any log, and timed in turns with onnxruntime and OpenVINO; outputs are compared with an evaluation in float64.
Results are written after each model; models that are there already are skipped unless ``--again``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.performance.ablation import ROOT, TOLERANCE, VARIANTS, build
from tests.performance.results import Results, publish

PEERS = {"onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
#: what the two columns of ours are called in results, without and with
OURS = tuple(variant.name for variant in VARIANTS if not variant.tuned)
#: a gain that counts
GAIN = 1.05


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, write the table; 1 if an output is wrong."""
    from mlc.networks.ablation import PUBLISHED_MODELS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(PUBLISHED_MODELS), help="comma-separated (default: all)")
    parser.add_argument("--target", default="native", help="what mlc builds for; its peers run as they come")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each engine (default: 12)")
    parser.add_argument("--publish", action="store_true", help="put the table into results.md")
    parser.add_argument("--again", action="store_true", help="measure models that have results already, too")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "written")
    args = parser.parse_args(argv)
    results = Results(args.output)
    one = partial(measure, folder=args.output, rounds=args.rounds, target=args.target)
    for row in results.fill(args.models.split(","), one, args.again):
        print(markdown([row]), file=sys.stderr)
    rows = list(results.rows.values())
    text = markdown(rows)
    if args.publish:
        publish("written", text)
    print(text)
    wrong = [row["model"] for row in rows if not (_error(row) or 0.0) <= TOLERANCE]
    if wrong:
        print(f"outputs must be within {TOLERANCE} of float64, but are not: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def measure(name: str, folder: Path, rounds: int, target: str = "native") -> dict[str, Any]:
    """Build a model without and with substitutions, then time both and the peers in turn."""
    import onnx

    from mlc.bench import EngineSpec, Timing, run_bench
    from mlc.bench.engines import onnx_inputs
    from mlc.networks.ablation import ablation_model
    from mlc.networks.inputs import random_inputs
    from tests.performance.reference import float64_outputs

    path, model = folder / f"{name}.onnx", ablation_model(name)
    onnx.save(model, path)
    built = {each.name: build(path, each, 0.0, folder, target) for each in VARIANTS if not each.tuned}
    inputs = random_inputs(onnx_inputs(str(path)))
    engines = [EngineSpec("mlc", label=label, artifact=found["artifact"]) for label, found in built.items()]
    result = run_bench(path, [*engines, *map(EngineSpec, PEERS)], name=name, inputs=inputs,
                       reference=float64_outputs(model, inputs), timing=Timing(rounds=rounds))
    path.unlink()
    return {**result.to_json(), "target": result.target, "variants": built, "when": time.time()}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Medians in milliseconds, what substitutions gain, greatest first, and the largest error of ours."""
    names = {OURS[0]: "without, ms", OURS[1]: "with", **PEERS}
    columns = ("model", *names.values(), "without / with", "best peer / with", "error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in sorted(rows, key=lambda row: -(_gain(row) or 0.0)):
        times = _times(row)
        peers = [times[name] for name in PEERS if times.get(name)]
        against = min(peers) / times[OURS[1]] if peers and times.get(OURS[1]) else None
        cells = [row["model"], *("-" if times.get(name) is None else f"{times[name]:.3g}" for name in names),
                 *("-" if ratio is None else f"{ratio:.2f}" for ratio in (_gain(row), against)),
                 "-" if (error := _error(row)) is None else f"{error:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    machines = ", ".join(sorted({f"{row['machine']}, {row['threads']} threads" for row in rows}))
    counted = sum((_gain(row) or 0.0) >= GAIN for row in rows)
    legend = (f"Medians; {machines}. {counted} of {len(rows)} gain at least {GAIN - 1:.0%}. Errors are the largest "
              "difference from float64, relative to the largest output.")
    return "\n".join([*lines, "", legend, ""])


def _times(row: Mapping[str, Any]) -> dict[str, float | None]:
    return {each["engine"]: each["median_ms"] for each in row["results"]}


def _gain(row: Mapping[str, Any]) -> float | None:
    without, found = (_times(row).get(name) for name in OURS)
    return without / found if without and found else None


def _error(row: Mapping[str, Any]) -> float | None:
    """The larger of ours; not a number where one failed."""
    errors = [each["max_rel_err"] for each in row["results"] if each["engine"] in OURS]
    return None if not errors else float("nan") if None in errors else max(errors)


if __name__ == "__main__":
    sys.exit(main())
