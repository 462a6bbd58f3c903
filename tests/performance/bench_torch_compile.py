"""``torch.compile(backend="mlc")`` beside eager PyTorch and Inductor, on architectures that nothing was tuned for.

``make bench-torch``, or ``python -m tests.performance.bench_torch_compile --models vit_small,mamba``. First what the
compiled module returns is compared with what the module itself does, and it is counted which graphs were left to eager
PyTorch, and why. Then all three are timed in turn, on as many threads; Inductor has its weights frozen. Each step has a
process of its own, is kept in ``--output`` as soon as it is there, and is not done again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.networks.architectures import BENCHMARK_ARCHITECTURES, SMALL_ARCHITECTURES, TRANSFORMERS_ARCHITECTURES
from tests.performance.results import Results, publish, write_whole
from tests.performance.table import NOISE, ROOT, geometric_mean

if TYPE_CHECKING:
    import torch

    from mlc.networks.models import Network

ENGINES = ("mlc", "eager", "inductor")
#: how far results may be from eager ones, as a part of the largest
RTOL = 1e-3
#: seconds for one step, and of each engine's turn
_LIMIT, _TURN = 1800, 0.25
_KNOWN = {**BENCHMARK_ARCHITECTURES, **TRANSFORMERS_ARCHITECTURES}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="comma-separated (default: all)")
    parser.add_argument("--small", action="store_true", help="of those with a few layers, in seconds")
    parser.add_argument("--check", action="store_true", help="compare results and time nothing")
    parser.add_argument("--target", default="native", help="what mlc builds for; its peers run as they come")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each engine (default: 8)")
    parser.add_argument("--again", action="store_true", help="do what is there already, too")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-torch")
    parser.add_argument("--publish", action="store_true", help="put the table into results.md")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    known = SMALL_ARCHITECTURES if args.small else _KNOWN
    if args.step:
        print(json.dumps(_taken(args.step, known, args.rounds, args.target)))
        return 0
    results = Results(args.output)
    for title in [title for title, row in results.rows.items() if "failed" in row]:
        del results.rows[title]
    own = ["--target", args.target, "--rounds", str(args.rounds), *(["--small"] if args.small else [])]
    for row in results.fill(_steps(args.models.split(",") if args.models else known, args.check),
                            partial(_step, options=own), args.again):
        print(_said(row), file=sys.stderr, flush=True)
    text = markdown(results.rows)
    write_whole(args.output / "table.md", text)
    if args.publish:
        publish("torch", text)
    print(text)
    return 0


def _steps(models: Sequence[str] | Mapping[str, Any], check: bool) -> Iterator[str]:
    for name in models:
        yield f"{name} right"
        if not check:
            yield name


def _step(title: str, options: Sequence[str]) -> dict[str, Any]:
    """Take a step in a process of its own; one that fails has the last line of what it said."""
    command = [sys.executable, "-m", "tests.performance.bench_torch_compile", *options, "--step", title]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"model": title, "failed": f"it took more than {_LIMIT} s"}
    if done.returncode:
        return {"model": title, "failed": next(iter(done.stderr.strip().splitlines()[-1:]), f"rc {done.returncode}")}
    return {"model": title, **json.loads(done.stdout.splitlines()[-1]), "when": time.time()}


def _taken(title: str, known: Mapping[str, Network], rounds: int, target: str = "native") -> dict[str, Any]:
    import torch

    from mlc import torch_backend
    from mlc.config import physical_cores

    torch_backend.register()
    torch.set_num_threads(physical_cores())
    name, _, right = title.partition(" ")
    module = known[name]._module()
    with torch.inference_mode():
        if right:
            return _right(module, [_inputs(known[name], times) for times in (1, 2)], target)
        return _timed(module, _inputs(known[name]), rounds, target)


def _right(module: Any, batches: Sequence[Sequence[torch.Tensor]], target: str) -> dict[str, Any]:
    """How far results are from eager ones, what was compiled, and why other graphs were not.

    The second batch is larger than the first, so that Dynamo leaves its size free.
    """
    import torch

    mine, errors = torch.compile(module, backend="mlc", options={"target": target}), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        started = time.perf_counter()
        for inputs in batches:
            pairs = zip(_leaves(mine(*inputs)), _leaves(module(*inputs)), strict=True)
            errors.append(max((_error(got, wanted) for got, wanted in pairs), default=0.0))
        seconds = time.perf_counter() - started
    counters = torch._dynamo.utils.counters
    said = [str(each.message) for each in caught]
    return {"seconds": seconds, "error": max(errors), "graphs": counters["stats"]["unique_graphs"],
            "eager": [each for each in said if "runs eagerly" in each],
            "one_by_one": [each for each in said if "for each set of sizes" in each],
            "breaks": [" ".join(str(why).split())[:200] for why in counters["graph_break"]]}


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest magnitude; infinite for other shapes, types or whole numbers."""
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return float("inf")
    if not wanted.is_floating_point():
        return 0.0 if bool((got == wanted).all()) else float("inf")
    worst = float((got - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-9)
    return worst if worst == worst else float("inf")


def _timed(module: Any, inputs: Sequence[torch.Tensor], rounds: int, target: str) -> dict[str, Any]:
    import torch
    import torch._inductor.config as inductor

    from mlc.cpu import machine_id

    inductor.freezing = True  # weights are constants, packed as its kernels want them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of graphs that run eagerly, which the other step tells
        calls = {"eager": module, "mlc": torch.compile(module, backend="mlc", options={"target": target}),
                 "inductor": torch.compile(module, backend="inductor")}
        bound = {name: partial(calls[name], *inputs) for name in ENGINES}
        # Inductor leaves recurrent layers to eager PyTorch, and from then on Dynamo does so for every backend
        times = _in_pairs(bound, rounds) if _is_recurrent(module) else _times(bound, rounds)
    return {"ms": {name: 1e3 * seconds for name, seconds in times.items()}, "machine": machine_id(),
            "threads": torch.get_num_threads()}


def _is_recurrent(module: Any) -> bool:
    import torch

    return any(isinstance(each, torch.nn.RNNBase) for each in module.modules())


def _in_pairs(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, the others in turn with eager PyTorch, one after the other, as many times its time."""
    pairs = {name: _times({each: calls[each] for each in ("eager", name)}, rounds) for name in ("mlc", "inductor")}
    eager = pairs["mlc"]["eager"]
    return {"eager": eager, **{name: each[name] * eager / each["eager"] for name, each in pairs.items()}}


def _inputs(network: Network, times: int = 1) -> list[torch.Tensor]:
    """Random ones of the network's shapes, ``times`` as many; whole numbers are small enough for every vocabulary."""
    import torch

    generator = torch.Generator().manual_seed(times - 1)
    return [
        torch.ones(shape, dtype=torch.int64) if name.endswith("_mask")
        else torch.randint(0, 100, shape, generator=generator) if name.endswith("_ids")
        else torch.randn(shape, generator=generator)
        for name, (batch, *others) in network.inputs.items() for shape in [(times * batch, *others)]
    ]


def _leaves(results: Any) -> list[torch.Tensor]:
    import torch

    return [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]


def _times(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, in turns: the first calls of a turn do not count, since the threads of the engine before
    still spin for work."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            _lasting(call, _TURN / 10)
            if turn:
                taken[name] += _lasting(call, _TURN)
    return {name: statistics.median(each) for name, each in taken.items()}


def _lasting(call: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of each call, of at least one, for so long."""
    taken: list[float] = []
    while sum(taken) < seconds:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return taken


def _said(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{row['model']}: failed: {row['failed']}"
    if "ms" in row:
        return f"{row['model']}: " + ", ".join(f"{name} {ms:.3g} ms" for name, ms in row["ms"].items())
    said = (f"{row['model']}: error {row['error']:.0e}, {row['graphs']} graphs, {len(row['eager'])} eager, "
            f"{row['seconds']:.1f} s to compile")
    return "\n    ".join([said, *row["eager"], *row.get("one_by_one", ()), *row["breaks"]])


def markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The table, what gains least first, and below it what failed or runs eagerly; ratios above 1 are in mlc's
    favour."""
    columns = ("model", *ENGINES, "eager / mlc", "inductor / mlc", "error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    timed = {name: row["ms"] for name, row in rows.items() if "ms" in row}
    checked = {title.removesuffix(" right"): row for title, row in rows.items() if "error" in row}
    gains = {peer: {name: ms[peer] / ms["mlc"] for name, ms in timed.items()} for peer in ENGINES[1:]}
    for name in sorted(timed, key=lambda name: gains["inductor"][name]):
        cells = [f"**{ms:.3g}**" if ms == min(timed[name].values()) else f"{ms:.3g}"
                 for ms in (timed[name][engine] for engine in ENGINES)]
        error = f"{checked[name]['error']:.0e}" if name in checked else "-"
        lines.append(f"| {' | '.join([name, *cells, *(f'{gains[p][name]:.2f}' for p in ENGINES[1:]), error])} |")
    if len(timed) > 1:
        means = (f"**{geometric_mean(list(each.values())):.2f}**" for each in gains.values())
        lines.append(f"| geometric mean | | | | {' | '.join(means)} | |")
    parts = ["\n".join(lines)] if timed else []
    return "\n\n".join([*parts, *_legend(rows, checked, gains), *_left(rows, checked)]) + "\n"


def _legend(rows: Mapping[str, Mapping[str, Any]], checked: Mapping[str, Mapping[str, Any]],
            gains: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    said = []
    if machines := ", ".join(sorted({f"{r['machine']}, {r['threads']} threads" for r in rows.values() if "ms" in r})):
        slower = sum(gain * (1 + NOISE) < 1 for gain in gains["eager"].values())
        said.append(f"Milliseconds, medians, untuned; {machines}. {slower} of {len(gains['eager'])} are slower than "
                    f"eager by more than {NOISE:.0%}.")
    if checked:
        graphs, eager = (sum(count) for count in zip(
            *((row["graphs"], len(row["eager"])) for row in checked.values()), strict=True))
        wrong = sorted(name for name, row in checked.items() if not row["error"] <= RTOL)
        said.append(
            f"Of {graphs} graphs of {len(checked)} architectures {eager or 'none'} ran eagerly. Errors are the largest "
            f"difference from eager results, relative to the largest; "
            f"{'all are' if not wrong else 'all but ' + ', '.join(wrong) + ' are'} within {RTOL:.0e}.")
    if said:
        yield " ".join(said)


def _left(rows: Mapping[str, Mapping[str, Any]], checked: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield from (f"{title} failed: {row['failed']}" for title, row in rows.items() if "failed" in row)
    yield from (f"{name}: {why}" for name, row in checked.items()
                for why in (*row["eager"], *row.get("one_by_one", ())))
    if without := [name for name, row in checked.items() if not row["graphs"]]:
        yield f"Of {', '.join(without)} Dynamo captures nothing, so that all of it ran eagerly."


if __name__ == "__main__":
    sys.exit(main())
