"""The measured table: each model untuned, tuned, and in its peers, in one interleaved run.

``make bench``, or ``python -m tests.performance.table --models squeezenet,resnet50 --seconds 600``. Results are written
after each model, so that an interrupted run keeps what it has; models that are there already are skipped unless
``--again`` measures them anew. With ``--seconds 0`` nothing is tuned: what the log has is used (``--log``, else your
own over the shipped one). ``--publish`` puts the table into ``results.md`` and what it comes to into README.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.performance.results import Results, publish

if TYPE_CHECKING:
    import numpy as np
    import onnx

ROOT = Path(__file__).parent.parent.parent
PEERS = {"onnxruntime": "onnxruntime", "openvino": "OpenVINO", "torch-compile": "torch.compile"}
#: a tuned model may be this much slower than the untuned one, in the medians of one run, and be as fast
NOISE = 0.02


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the table."""
    from mlc.networks.models import BENCHMARK_MODELS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(BENCHMARK_MODELS), help="comma-separated (default: all)")
    parser.add_argument("--seconds", type=float, default=600.0, help="tuning budget of each model (default: 600)")
    parser.add_argument("--target", default="native", help="what mlc builds for; its peers run as they come")
    parser.add_argument("--log", type=Path, help="the tuning log (default: your own over the shipped one)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each engine (default: 12)")
    parser.add_argument("--again", action="store_true", help="measure models that have results already, too")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--against", default=",".join(PEERS), help=f"peers (default: {','.join(PEERS)})")
    parser.add_argument("--publish", nargs="?", const="models", choices=("models", "models-avx2"),
                        help="put the table into a section of results.md; `models`, the default, also into README.md")
    args = parser.parse_args(argv)
    results = Results(args.output)
    one = partial(measure, seconds=args.seconds, log=args.log, folder=args.output, rounds=args.rounds,
                  target=args.target, peers=args.against.split(","))
    for row in results.fill(args.models.split(","), one, args.again):
        print(markdown([row]), file=sys.stderr)
    rows = results.rows
    known = [rows[name] for name in (*BENCHMARK_MODELS, *rows.keys() - set(BENCHMARK_MODELS)) if name in rows]
    text = markdown(known)
    (args.output / "table.md").write_text(text, encoding="utf-8")
    if args.publish:
        publish(args.publish, text)
    if args.publish == "models":
        publish("measured", summary(known), ROOT / "README.md")
    print(text)
    return 0


def measure(
    name: str, seconds: float, log: Path | None, folder: Path, rounds: int, target: str = "native",
    peers: Sequence[str] = tuple(PEERS),
) -> dict[str, Any]:
    """One of the benchmark models, its errors against float64."""
    from mlc.networks.models import model_named
    from tests.performance.reference import float64_outputs

    model, program = model_named(name), _program(name, folder) if "torch-compile" in peers else None
    row = compared(name, model, folder, rounds, seconds, log, program, partial(float64_outputs, model), target, peers)
    if program is not None:
        program.unlink()
    return row


def compared(
    name: str, model: onnx.ModelProto, folder: Path, rounds: int, seconds: float | None, log: Path | None = None,
    program: Path | None = None, reference: Callable[[dict[str, np.ndarray]], list[np.ndarray]] | None = None,
    target: str = "native", peers: Sequence[str] = tuple(PEERS),
) -> dict[str, Any]:
    """Build a model for ``target`` untuned, tune it for ``seconds``, build it again, and time everything in turn.

    0 seconds: what the log has is built; None: only the untuned build is timed. Errors are those against ``reference``,
    else against onnxruntime.
    """
    import onnx

    from mlc import api
    from mlc.bench import EngineSpec, Timing, run_bench
    from mlc.bench.engines import onnx_inputs
    from mlc.networks.inputs import random_inputs
    from mlc.report.console import stderr_console
    from mlc.report.progress import listening

    path, untuned, tuned = (folder / f"{name}{end}" for end in (".onnx", "-untuned.so", ".so"))
    onnx.save(model, path)
    started = time.monotonic()
    api.compile(path, target, log=False).save(untuned)
    build_seconds = time.monotonic() - started
    engines = [EngineSpec("mlc-untuned", artifact=str(untuned)),
               *(EngineSpec(peer) for peer in peers if program or not peer.startswith("torch"))]
    trials, sources = 0, []
    if seconds is not None:
        if seconds > 0:
            with listening(stderr_console()) as listener:
                trials = api.tune(path, target, seconds=seconds, log=log, on_event=listener).trials
        exe = api.compile(path, target, log=log)
        exe.save(tuned)
        sources = [function["source"] for function in exe.metadata["functions"]]
        engines.insert(0, EngineSpec("mlc", artifact=str(tuned)))
    inputs = random_inputs(onnx_inputs(str(path)))
    result = run_bench(path, engines, name=name, inputs=inputs, reference=reference(inputs) if reference else None,
                       program=program, timing=Timing(rounds=rounds))
    path.unlink()
    return {
        **result.to_json(), "target": result.target, "build_seconds": build_seconds,
        "tuning_seconds": seconds, "trials": trials,
        "functions": {source: sources.count(source) for source in sorted(set(sources))}, "when": time.time(),
    }


def _program(name: str, folder: Path) -> Path | None:
    """The model as an exported PyTorch program where PyTorch defines it: for the ``light_*`` files nothing does."""
    import torch

    from mlc.networks.models import torch_program

    program = torch_program(name)
    if program is None:
        return None
    torch.export.save(program, folder / f"{name}.pt2")
    return folder / f"{name}.pt2"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, with the peers that were timed; each model's fastest engine in bold, geometric means last."""
    if not rows:
        return ""
    peers = [peer for peer in PEERS if any(r["engine"] == peer for row in rows for r in row["results"])]
    columns = ("model", "mlc untuned", "mlc tuned", *(PEERS[peer] for peer in peers), "best peer / tuned",
               "best peer / untuned", "slower by tuning", "error, untuned", "error, tuned")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    gains: dict[str, list[float]] = {"mlc": [], "mlc-untuned": []}
    for row in rows:
        times = {r["engine"]: r["median_ms"] for r in row["results"]}
        errors = {r["engine"]: r["max_rel_err"] for r in row["results"]}
        fastest = min((t for t in times.values() if t is not None), default=None)
        cells = [row["model"], *(cell(times, engine, fastest) for engine in ("mlc-untuned", "mlc", *peers))]
        best = min((times[peer] for peer in peers if times.get(peer)), default=None)
        for engine, found in gains.items():
            gain = best / times[engine] if best and times.get(engine) else None
            cells.append("-" if gain is None else f"{gain:.2f}")
            found += [] if gain is None else [gain]
        cells.append(_regression(times.get("mlc"), times.get("mlc-untuned")))
        cells += ["-" if errors.get(e) is None else f"{errors[e]:.0e}" for e in ("mlc-untuned", "mlc")]
        lines.append(f"| {' | '.join(cells)} |")
    if len(rows) > 1:
        means = [f"**{geometric_mean(g):.2f}**" if g else "-" for g in gains.values()]
        empty = [""] * (2 + len(peers))
        lines.append(f"| {' | '.join(['geometric mean', *empty, *means, '', '', ''])} |")
    return "\n".join([*lines, "", _legend(rows)]) + "\n"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The README's table: each model tuned, beside the two peers that ship binaries."""
    peers = ("onnxruntime", "openvino")
    lines = [f"| model | mlc | {' | '.join(PEERS[peer] for peer in peers)} | best peer / mlc |", "|---" * 5 + "|"]
    gains: list[float] = []
    for row in rows:
        times = {r["engine"]: r["median_ms"] for r in row["results"]}
        fastest = min((t for e in ("mlc", *peers) if (t := times.get(e)) is not None), default=None)
        best = min((times[peer] for peer in peers if times.get(peer)), default=None)
        gain = best / times["mlc"] if best and times.get("mlc") else None
        gains += [] if gain is None else [gain]
        cells = [row["model"], *(cell(times, e, fastest) for e in ("mlc", *peers)),
                 "-" if gain is None else f"{gain:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    if len(gains) > 1:
        lines.append(f"| geometric mean |  |  |  | **{geometric_mean(gains):.2f}** |")
    machines = ", ".join(sorted({f"{row['machine']}, {row['threads']} threads" for row in rows}))
    return "\n".join([*lines, "", f"Milliseconds, medians; {machines}."]) + "\n"


def _legend(rows: Sequence[Mapping[str, Any]]) -> str:
    machines = ", ".join(sorted({f"{row['machine']}, {row['threads']} threads" for row in rows}))
    budgets = sorted({row["tuning_seconds"] for row in rows})
    if budgets == [0]:
        budget = "tuned: what the log had"
    else:
        budget = "tuning budget a model: " + " or ".join(f"{seconds:.0f} s" for seconds in budgets)
    builds = [row["build_seconds"] for row in rows]
    targets = sorted({row["target"] for row in rows if row.get("target")})
    built = f" mlc is built for {' or '.join(targets)}." if targets else ""
    engines = {result["engine"] for row in rows for result in row["results"]}
    dash = " A dash: nothing defines the model in PyTorch." if "torch-compile" in engines else ""
    return (
        f"Milliseconds, medians. {machines};{built} {budget}; "
        f"building untuned took {min(builds):.0f} to {max(builds):.0f} s. "
        "Ratios above 1 are in mlc's favour. Errors are the largest difference from float64, relative to the largest "
        f"output.{dash}"
    )


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of at least one ratio."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _regression(tuned: float | None, untuned: float | None) -> str:
    """Whether tuning made it slower by more than noise, and by how much."""
    if not tuned or not untuned:
        return "-"
    return "no" if tuned <= untuned * (1 + NOISE) else f"**{100 * (tuned / untuned - 1):.0f}%**"


def cell(times: Mapping[str, float | None], engine: str, fastest: float | None) -> str:
    """Milliseconds of an engine, in bold those of the fastest."""
    if engine not in times:
        return "-"
    value = times[engine]
    if value is None:
        return "failed"
    text = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"**{text}**" if value == fastest else text


if __name__ == "__main__":
    sys.exit(main())
