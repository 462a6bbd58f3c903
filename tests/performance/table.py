"""The README's measured table: each model untuned, tuned, and in its peers, in one interleaved run.

``make bench``, or ``python tests/performance/table.py --models squeezenet,resnet50 --seconds 600``. Results are
written after each model, so that an interrupted run keeps what it has; models that are there already are skipped.
``--readme`` puts the table into README.md. With ``--seconds 0`` nothing is tuned: what the log has is used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->"
PEERS = ("onnxruntime", "openvino")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the table."""
    from mlc.testing.models import LIGHT_MODELS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join((*LIGHT_MODELS, "bert_base", "gpt2_small")))
    parser.add_argument("--seconds", type=float, default=600.0, help="tuning budget of each model (default: 600)")
    parser.add_argument("--log", type=Path, help="the tuning log (default: your own)")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    store = args.output / "results.json"
    rows: list[dict[str, Any]] = json.loads(store.read_text()) if store.exists() else []
    for name in args.models.split(","):
        if any(row["model"] == name for row in rows):
            continue
        rows.append(measure(name, args.seconds, args.log, args.output))
        store.write_text(json.dumps(rows, indent=2))
        print(markdown(rows[-1:]), file=sys.stderr)
    text = markdown(rows)
    (args.output / "table.md").write_text(text, encoding="utf-8")
    if args.readme:
        readme = ROOT / "README.md"
        readme.write_text(inserted(readme.read_text(encoding="utf-8"), text), encoding="utf-8")
    print(text)
    return 0


def measure(name: str, seconds: float, log: Path | None, folder: Path) -> dict[str, Any]:
    """One model: build it untuned, tune it, build it again, and time everything in turn."""
    import onnx

    from mlc import api
    from mlc.bench import EngineSpec, run_bench
    from mlc.report.console import stderr_console
    from mlc.report.progress import listening
    from mlc.testing.models import test_model

    path = folder / f"{name}.onnx"
    onnx.save(test_model(name), path)
    untuned, tuned = folder / f"{name}-untuned.so", folder / f"{name}.so"
    started = time.monotonic()
    api.compile(path, log=False).save(untuned)
    build_seconds = time.monotonic() - started
    trials = 0
    if seconds > 0:
        with listening(stderr_console()) as listener:
            trials = api.tune(path, seconds=seconds, log=log, on_event=listener).trials
    api.compile(path, log=log).save(tuned)
    engines = [EngineSpec("mlc", artifact=str(tuned)), EngineSpec("mlc-untuned", artifact=str(untuned)),
               *map(EngineSpec, PEERS)]
    result = run_bench(path, engines, name=name)
    path.unlink()
    return {**result.to_json(), "build_seconds": build_seconds, "tuning_seconds": seconds, "trials": trials}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table; the fastest engine of each model in bold."""
    if not rows:
        return ""
    columns = ("model", "build, untuned", "mlc untuned", "mlc tuned", "onnxruntime", "OpenVINO", "tuned / best peer",
               "max error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        times = {r["engine"]: r["median_ms"] for r in row["results"]}
        fastest = min((t for t in times.values() if t is not None), default=None)
        cells = [_cell(times.get(engine), fastest) for engine in ("mlc-untuned", "mlc", *PEERS)]
        peers = [times[peer] for peer in PEERS if times.get(peer)]
        ratio = f"{times['mlc'] / min(peers):.2f}" if peers and times.get("mlc") else "-"
        errors = [r["max_rel_err"] for r in row["results"] if r["engine"].startswith("mlc")]
        worst = f"{max(errors):.0e}" if errors and None not in errors else "-"
        lines.append(f"| {row['model']} | {row['build_seconds']:.0f} s | {' | '.join(cells)} | {ratio} | {worst} |")
    first = rows[0]
    budget = ", ".join(sorted({f"{row['tuning_seconds']:.0f} s" for row in rows}))
    lines += ["", f"Milliseconds. {first['machine']}, {first['threads']} threads; tuning budget a model: {budget}."]
    return "\n".join(lines) + "\n"


def inserted(readme: str, text: str) -> str:
    """The README with ``text`` between its markers; raises ``ValueError`` where they are gone."""
    start, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return readme[:start] + text + readme[end:]


def _cell(value: float | None, fastest: float | None) -> str:
    if value is None:
        return "failed"
    text = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"**{text}**" if value == fastest else text


if __name__ == "__main__":
    sys.exit(main())
