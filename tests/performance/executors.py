"""A model tuned by this machine, by two Ray nodes and by two workers behind TVM's tracker, all of them on this machine.

    python -m tests.performance.executors [--model light:squeezenet] [--trials N] [--executors local,ray,rpc]
        [--target T] [--output DIR]

Devices share this machine, so that a run by several says nothing about speed: what is compared is how good the
schedules are that it ends with, and whether a candidate is measured once. Each run has the same trials and an empty
log; the results are built and timed in turn in this process, functions apart. Written to ``DIR/executors.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np

import mlc
from mlc.cli.models import find_model
from mlc.log import TuningLog
from mlc.testing.rack import Rack
from tests.performance.results import write_whole

ROOT = Path(__file__).parent.parent.parent
NODES = 2
CLASS = "rack"


@dataclass(frozen=True)
class Result:
    """``functions`` are seconds of each task in the model by its key, ``repeated`` candidates that were measured more
    than once before the last comparison, ``left_out`` how often a device was, since its times differed."""

    executor: str
    seconds: float
    trials: int
    failures: int
    repeated: int
    left_out: int
    latency: float
    functions: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Tune, build, time in turn, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="light:squeezenet")
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--executors", default="local,ray,rpc")
    parser.add_argument("--target", default="native", help="what is tuned and built for (default: native)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each build (default: 12)")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-executors")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    names = args.executors.split(",")
    os.environ["MLC_TOKEN"] = secrets.token_hex(32)
    runs = {}
    for name in names:
        log = args.output / f"{name}.db"
        for old in args.output.glob(f"{name}.db*"):
            old.unlink()
        with _reached(name) as executor:
            runs[name] = _tuned(args.model, args.target, args.trials, executor, log)
    results = _timed(args.model, args.target, names, args.output, args.rounds, runs)
    text = _table(results)
    write_whole(args.output / "executors.md", text)
    print(text)
    return 0


@contextmanager
def _reached(name: str) -> Iterator[str]:
    """What ``--executor`` takes, with two devices behind it for as long as the block runs."""
    if name == "rpc":
        rack = Rack(NODES, os.environ["MLC_TOKEN"])
        try:
            yield rack.executor
        finally:
            rack.close()
    elif name == "ray":
        from mlc.measure.ray_devices import PREFIX, authentication, loopback

        os.environ.update(authentication() | loopback(""))
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "object_store_memory": 80_000_000, "resources": {PREFIX + CLASS: 1}}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            for _ in range(NODES - 1):
                cluster.add_node(**node)
            yield f"ray://{cluster.address}/{CLASS}"
        finally:
            cluster.shutdown()
    else:
        yield name


def _tuned(model: str, target: str, trials: int, executor: str, log: Path) -> dict[str, Any]:
    """One run's seconds, and how often a device was left out."""
    command = [sys.executable, "-m", "mlc.cli.main", "tune", model, "--target", target, "--trials", str(trials),
               "--executor", executor, "--log", str(log), "--json"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{executor}: {done.stderr.strip().splitlines()[-1]}")
    fleets = [json.loads(line)["devices"] for line in done.stderr.splitlines() if '"FleetChanged"' in line]
    left_out = sum(device["state"].startswith("left out") for device in fleets[-1]) if fleets else 0
    return {"seconds": time.monotonic() - started, "left_out": left_out}


def _timed(
    model: str, target: str, names: Sequence[str], folder: Path, rounds: int, runs: dict[str, Any]
) -> list[Result]:
    source = find_model(model).source()
    built = {name: mlc.compile(source, target=target, log=folder / f"{name}.db") for name in names}
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(spec.sized()).astype(spec.dtype) for spec in built[names[0]].inputs]
    whole: dict[str, list[float]] = {name: [] for name in names}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            whole[name] += built[name].time(*inputs, repeats=10)
            parts[name].append(_functions(built[name], inputs))
    found = []
    for name in names:
        keys = parts[name][0]
        functions = {key: median(each[key] for each in parts[name]) for key in keys}
        with TuningLog(folder / f"{name}.db") as log:
            measured = [r for r in log.records() if r.verdict is None]
        times = Counter((r.task_key, tuple(sorted(r.decisions.items())), r.space) for r in measured)
        found.append(Result(name, runs[name]["seconds"], len(measured), sum(not r.ok for r in measured),
                            sum(count > 1 for count in times.values()), runs[name]["left_out"], median(whole[name]),
                            functions))
    return found


def _functions(exe: mlc.Executable, inputs: Sequence[np.ndarray]) -> dict[str, float]:
    """Seconds of each function of a run, by its task."""
    seconds = exe.profile(*inputs, repeats=5)
    return {entry["key"]: seconds[entry["symbol"]] for entry in exe.metadata["functions"]}


def _table(results: Sequence[Result]) -> str:
    first = results[0]
    lines = ["| executor | left out | trials | failed | measured twice | tuning, s | model, ms | functions, to local |",
             "|---|---|---|---|---|---|---|---|"]
    for r in results:
        shared = [r.functions[key] / first.functions[key] for key in first.functions if key in r.functions]
        ratio = f"{geometric_mean(shared):.3f} ({min(shared):.2f} to {max(shared):.2f}, {len(shared)} shared)"
        lines.append(f"| {r.executor} | {r.left_out} | {r.trials} | {r.failures} | {r.repeated} | {r.seconds:.0f} | "
                     f"{1e3 * r.latency:.3f} | {ratio} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
