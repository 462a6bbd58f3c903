"""Architectures that nothing was tuned for, untuned, against their peers: what a new model may expect.

``make bench-unseen``, or ``python -m tests.performance.unseen --models swin,mamba``. Results are written after each
model, so that an interrupted run keeps what it has; models that are there already are skipped unless ``--again``
measures them anew, and those that failed are tried again. ``--seconds`` tunes each model and times that build, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.performance.results import Results, publish, write_whole
from tests.performance.table import NOISE, ROOT, cell, compared, geometric_mean

ENGINES = {"mlc-untuned": "mlc untuned", "mlc": "mlc tuned", "onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
PEERS = ("onnxruntime", "openvino")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the table."""
    from mlc.networks.architectures import BENCHMARK_ARCHITECTURES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(BENCHMARK_ARCHITECTURES), help="comma-separated (default: all)")
    parser.add_argument("--seconds", type=float, help="tuning budget of each model (default: untuned only)")
    parser.add_argument("--target", default="native", help="what mlc builds for; its peers run as they come")
    parser.add_argument("--log", type=Path, help="the tuning log (default: your own over the shipped one)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each engine (default: 12)")
    parser.add_argument("--publish", nargs="?", const="unseen", choices=("unseen", "unseen-avx2"),
                        help="put the table into a section of results.md")
    parser.add_argument("--again", action="store_true", help="measure models that have results already, too")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-unseen")
    args = parser.parse_args(argv)
    results = Results(args.output)
    for name in [name for name, row in results.rows.items() if failure(row)]:
        del results.rows[name]
    one = partial(measure, seconds=args.seconds, log=args.log, folder=args.output, rounds=args.rounds,
                  target=args.target)
    for row in results.fill(args.models.split(","), one, args.again):
        print(markdown([row]), file=sys.stderr)
    text = markdown(list(results.rows.values()))
    write_whole(args.output / "table.md", text)
    if args.publish:
        publish(args.publish, text)
    print(text)
    return 0


def measure(
    name: str, seconds: float | None, log: Path | None, folder: Path, rounds: int, target: str = "native"
) -> dict[str, Any]:
    """One architecture; what cannot be built has ``error`` instead of results."""
    from mlc.errors import MlcError
    from mlc.networks.architectures import BENCHMARK_ARCHITECTURES

    try:
        return compared(name, BENCHMARK_ARCHITECTURES[name].onnx(), folder, rounds, seconds, log, target=target)
    except MlcError as error:
        (folder / f"{name}.onnx").unlink(missing_ok=True)
        return {"model": name, "error": str(error)}


def failure(row: Mapping[str, Any]) -> str | None:
    """Why ours has no time, if so."""
    if "error" in row:
        return str(row["error"])
    return next((r["error"] for r in row["results"] if r["engine"].startswith("mlc") and r.get("error")), None)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, what is slowest against its peers first, and what failed below it."""
    timed = [row for row in rows if not failure(row)]
    failed = [f"{row['model']} failed: {why}" for row in rows if (why := failure(row))]
    return "\n\n".join([*([_table(timed)] if timed else []), *failed]) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    ours = [engine for engine in ("mlc-untuned", "mlc") if any(engine in _times(row) for row in rows)]
    engines = [*ours, *PEERS]
    columns = ("model", *(ENGINES[e] for e in engines), *(f"best peer / {ENGINES[e]}" for e in ours), "error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in sorted(rows, key=lambda row: _ratio(row, "mlc-untuned") or 0.0):
        times = _times(row)
        fastest = min(t for t in times.values() if t is not None)
        ratios = [f"{r:.2f}" if (r := _ratio(row, e)) else "-" for e in ours]
        error = "-" if (largest := _error(row)) is None else f"{largest:.0e}"
        cells = [row["model"], *(cell(times, e, fastest) for e in engines), *ratios, error]
        lines.append(f"| {' | '.join(cells)} |")
    if len(rows) > 1:
        means = [f"**{geometric_mean(found):.2f}**" if (found := _ratios(rows, e)) else "-" for e in ours]
        lines.append(f"| {' | '.join(['geometric mean', *[''] * len(engines), *means, ''])} |")
    return "\n".join([*lines, "", _legend(rows, ours)])


def _legend(rows: Sequence[Mapping[str, Any]], ours: Sequence[str]) -> str:
    machines = ", ".join(sorted({f"{row['machine']}, {row['threads']} threads" for row in rows}))
    builds = [row["build_seconds"] for row in rows]
    slower = []
    for engine in ours:
        ratios = _ratios(rows, engine)
        behind = sum(ratio * (1 + NOISE) < 1 for ratio in ratios)
        slower.append(f"{behind} of {len(ratios)} are slower than the best peer by more than {NOISE:.0%}"
                      f"{' when tuned' if engine == 'mlc' else ''}")
    budgets = sorted({seconds for row in rows if (seconds := row["tuning_seconds"]) is not None})
    budget = f" Tuning budget a model: {' or '.join(f'{s:.0f} s' for s in budgets)}." if budgets else ""
    return (
        f"Milliseconds, medians. {machines}; building untuned took {min(builds):.0f} to {max(builds):.0f} s.{budget} "
        f"Ratios above 1 are in mlc's favour; {'; '.join(slower)}. Errors are the largest difference from "
        "onnxruntime's float32, relative to the largest output; the largest of all is "
        f"{max(filter(None, map(_error, rows)), default=0.0):.0e}."
    )


def _times(row: Mapping[str, Any]) -> dict[str, float | None]:
    return {r["engine"]: r["median_ms"] for r in row["results"]}


def _error(row: Mapping[str, Any]) -> float | None:
    """The larger one of our builds; None where onnxruntime has no output to compare with."""
    if not _times(row).get("onnxruntime"):
        return None
    return max(r["max_rel_err"] for r in row["results"] if r["engine"].startswith("mlc"))


def _ratio(row: Mapping[str, Any], engine: str) -> float | None:
    times = _times(row)
    best = min((time for peer in PEERS if (time := times.get(peer))), default=None)
    ours = times.get(engine)
    return best / ours if best and ours else None


def _ratios(rows: Sequence[Mapping[str, Any]], engine: str) -> list[float]:
    return [ratio for row in rows if (ratio := _ratio(row, engine))]


if __name__ == "__main__":
    sys.exit(main())
