"""What substitutions do to whole networks: nodes saved, seconds of search, latency with and without them, in one run.

``make bench-substitutions``, or ``python -m tests.performance.substitutions --models csrnet,nas_rnn``. First the nine
networks that superoptimizers are compared by (:mod:`mlc.networks.superoptimizers`), with peers beside; then every
benchmark model and every architecture that nothing was tuned for, of which only those are timed whose two builds
differ: where the model's own graph is kept the files are the same, byte for byte. All are compiled without any log, and
outputs are compared with onnxruntime's. Results are written after each model; models that are there already are skipped
unless ``--again``. ``--build`` builds what is missing and times nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.performance.results import Results, publish, write_whole
from tests.performance.table import ROOT, geometric_mean

if TYPE_CHECKING:
    import onnx

PEERS = {"onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
WITHOUT, WITH = "without", "with"
#: what substitutions may cost at most, and what counts as a gain
COST, GAIN = 1.02, 1.05


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="comma-separated (default: all)")
    parser.add_argument("--target", default="native", help="what mlc builds for; its peers run as they come")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each engine (default: 12)")
    parser.add_argument("--build", action="store_true", help="build what is missing and time nothing")
    parser.add_argument("--publish", action="store_true", help="put the tables into results.md")
    parser.add_argument("--again", action="store_true", help="measure models that have results already, too")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-substitutions")
    args = parser.parse_args(argv)
    known = everything()
    names = args.models.split(",") if args.models else known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"a model must be one of {', '.join(known)}, got {', '.join(unknown)}")
    results = Results(args.output)
    if args.build:
        for name in names:
            if name not in results.rows:
                built(name, args.output, args.target)
        return 0
    one = partial(measure, folder=args.output, rounds=args.rounds, target=args.target)
    for row in results.fill(names, one, args.again):
        print(markdown([row]), file=sys.stderr)
    text = markdown(list(results.rows.values()))
    write_whole(args.output / "table.md", text)
    if args.publish:
        publish("substitutions", text)
    print(text)
    return 0


def everything() -> list[str]:
    """The names of all networks, those of superoptimizers first; a network of several lists once."""
    from mlc.networks.architectures import BENCHMARK_ARCHITECTURES
    from mlc.networks.models import BENCHMARK_MODELS
    from mlc.networks.superoptimizers import SUPEROPTIMIZER_MODELS

    again = {"bert_base", *SUPEROPTIMIZER_MODELS}
    others = [name for name in (*BENCHMARK_MODELS, *BENCHMARK_ARCHITECTURES) if name not in again]
    return [*SUPEROPTIMIZER_MODELS, *others]


def network(name: str) -> onnx.ModelProto:
    """A model of any of the lists; raises ``KeyError`` for any other name."""
    from mlc.networks.architectures import BENCHMARK_ARCHITECTURES
    from mlc.networks.models import model_named
    from mlc.networks.superoptimizers import SUPEROPTIMIZER_MODELS

    if name in SUPEROPTIMIZER_MODELS:
        return SUPEROPTIMIZER_MODELS[name]()
    return BENCHMARK_ARCHITECTURES[name].onnx() if name in BENCHMARK_ARCHITECTURES else model_named(name)


def built(name: str, folder: Path, target: str) -> tuple[dict[str, Path], dict[str, Any]]:
    """Both builds of a model, made if they are not there, and what the search said."""
    import onnx

    from mlc import api
    from mlc.report.substitutions import facts

    folder.mkdir(parents=True, exist_ok=True)
    files, said, path = ({side: folder / f"{name}-{side}.so" for side in (WITHOUT, WITH)},
                         folder / f"{name}.json", folder / f"{name}.onnx")
    if not said.exists():
        onnx.save(network(name), path)
        decisions: list[Any] = []
        for side, file in files.items():
            api.compile(path, target, log=False, substitutions=side == WITH, on_decision=decisions.append).save(file)
        found = facts(decisions[-1])
        chosen, own = found["candidates"][found["chosen"]], found["candidates"][0]
        write_whole(said, json.dumps({
            "operators": own["operators"], "taken": chosen["operators"], "rules": chosen["rules"],
            "reason": found["reason"], "search_seconds": found["search_seconds"],
            "same": files[WITHOUT].read_bytes() == files[WITH].read_bytes()}))
        path.unlink()
    return files, json.loads(said.read_text(encoding="utf-8"))


def measure(name: str, folder: Path, rounds: int, target: str = "native") -> dict[str, Any]:
    """What the search did to a model and, where it did anything or is one of superoptimizers' networks, the times of
    both builds and of peers, in turn."""
    import onnx

    from mlc.bench import EngineSpec, Timing, run_bench
    from mlc.networks.superoptimizers import SUPEROPTIMIZER_MODELS

    files, said = built(name, folder, target)
    row = {"model": name, "compared": name in SUPEROPTIMIZER_MODELS, **said, "when": time.time()}
    if said["same"] and not row["compared"]:
        return row
    path = folder / f"{name}.onnx"
    onnx.save(network(name), path)
    ours = {side: file for side, file in files.items() if side == WITH or not said["same"]}
    engines = [*(EngineSpec("mlc", label=side, artifact=str(file)) for side, file in ours.items()),
               *map(EngineSpec, PEERS)]
    timed = run_bench(path, engines, name=name, timing=Timing(rounds=rounds)).to_json()
    path.unlink()
    return {**timed, **row}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Superoptimizers' networks, then those of the others that substitutions change, and how many they do not."""
    compared, others = ([row for row in rows if row["compared"] is wanted] for wanted in (True, False))
    changed = [row for row in others if not row["same"]]
    parts = [_table(found) for found in (compared, changed) if found]
    if others:
        gains = [gain for row in changed if (gain := _gain(row))]
        parts.append(f"Of {len(others)} other models {len(others) - len(changed)} keep their own graph, and both "
                     f"builds are the same file; of the others {sum(g >= GAIN for g in gains)} gain at least "
                     f"{GAIN - 1:.0%}, and {sum(g * COST < 1 for g in gains)} lose more than {COST - 1:.0%}.")
    machines = ", ".join(sorted({f"{row['machine']}, {row['threads']} threads" for row in rows if "machine" in row}))
    if machines:
        parts.append(f"Milliseconds, medians, untuned; {machines}. Operators are those that the rule language knows. "
                     "Errors are the largest difference from onnxruntime, relative to the largest output.")
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = ("model", "operators", "search, s", "without, ms", "with", *PEERS.values(), "without / with",
               "best peer / with", "error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        times = _times(row)
        peers = [time for name in PEERS if (time := times.get(name))]
        gain, mine = _gain(row), times.get(WITH)
        error = next((each["max_rel_err"] for each in row["results"] if each["engine"] == WITH), None)
        saved = str(row["operators"]) if row["taken"] == row["operators"] else f"{row['operators']} to {row['taken']}"
        lines.append("| " + " | ".join([
            row["model"], saved, f"{row['search_seconds']:.1f}",
            *(f"{times[name]:.3g}" if times.get(name) else "same" if name == WITHOUT and row["same"] else "failed"
              for name in (WITHOUT, WITH, *PEERS)),
            "1, same file" if row["same"] else f"{gain:.2f}" if gain else "-",
            f"{min(peers) / mine:.2f}" if peers and mine else "-", "-" if error is None else f"{error:.0e}"]) + " |")
    ratios = [min(p for name in PEERS if (p := _times(row).get(name))) / mine for row in rows
              if (mine := _times(row).get(WITH)) and any(_times(row).get(name) for name in PEERS)]
    if len(ratios) > 1:
        lines.append(f"| geometric mean |{' |' * (len(columns) - 3)} **{geometric_mean(ratios):.2f}** | |")
    return "\n".join(lines)


def _times(row: Mapping[str, Any]) -> dict[str, float | None]:
    return {each["engine"]: each["median_ms"] for each in row["results"]}


def _gain(row: Mapping[str, Any]) -> float | None:
    without, found = (_times(row).get(side) for side in (WITHOUT, WITH))
    return without / found if without and found else None


if __name__ == "__main__":
    sys.exit(main())
