"""What a GPU makes of kernels and whole models: built where there is none, timed where there is one.

    python -m tests.performance.bench_gpu --build [--target cuda:sm_90a]    # anywhere, with a CUDA compiler
    make bench-gpu                                                          # with a GPU: at most ten minutes
    python -m tests.performance.bench_gpu --tvm [--tune 60]                 # models beside TVM's schedules, too

Building leaves an artifact for each case in ``build/bench-gpu/``; timing checks the numbers of each against onnxruntime
on the CPU (a product against float64, other kernels of 16 bits against the same in float32), takes medians of runs on
random data that is on the device already, and sets PyTorch's (cuBLAS, cuDNN, its attention; ``torch.compile`` with
``max-autotune`` of whole models) beside them where it knows the GPU. Then both are timed between two events of the
device, and kernels with none of their operands in the second cache; else this machine's clock is read (``clock``). A
row has the rate of arithmetic, or of memory where that counts, and that of a copy on the device.

Without ``--target`` the code is for this machine's GPU, or where there is none for sm_90a, whose products are made by
warpgroups. Those of 16 bits have a second row with the kernels of sm_80 (``mma.sync``), which later GPUs run too.

``--tvm`` adds a row for each model with TVM's default schedules (dlight) beside mlc's, ``--tune`` one in which mlc and
MetaSchedule had as many seconds each. ``results.json`` has everything; what does not build or run has an ``error``. The
last line printed says how many times as fast as each peer mlc is, in the geometric mean and at least. When
``--seconds`` are over no other case is begun: the next call goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.errors import MlcError
from mlc.gpu import find_gpu
from mlc.target import resolve
from tests.performance import gpu_peers
from tests.performance.gpu_cases import Case, cases
from tests.performance.results import Results
from tests.performance.table import ROOT

if TYPE_CHECKING:
    from mlc.artifact.executable import Executable

#: largest error that a result may have, relative to the largest value of the reference; of whole models ten times that
_TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
#: bytes that the copy reads and writes, beyond what any cache holds
_COPIED = 1 << 30
#: bytes of a write that leaves nothing else in the second cache (50 MB on an H200)
_WRITTEN = 256 << 20
#: a fifth of a millisecond in all, in which a call of some microseconds is surely prepared
_WRITES = 4
#: calls that are not counted, and that are
_WARMUP, _REPEATS = 5, 20


def own_target() -> str:
    """What is built unless a target is named: code for this machine's GPU, else for one with warpgroups' products."""
    return "cuda" if find_gpu() is not None else "cuda:sm_90a"


def chosen_for(target: str, found: Iterable[Case]) -> list[Case]:
    """Without those that the target has kernels of anyway, or none of since it is no GPU's."""
    gpu = find_gpu() if target == "cuda" else None
    own = gpu.arch if gpu is not None else target.partition(":")[2]
    return [case for case in found if not case.arch or (target.startswith("cuda") and case.arch != own)]


def main(argv: Sequence[str] | None = None) -> int:
    """Build what is missing, and time what was not timed yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", action="store_true", help="only build; no GPU is needed")
    parser.add_argument("--target", default=own_target(),
                        help="what is built (default: cuda, this machine's GPU; without one cuda:sm_90a)")
    parser.add_argument("--tvm", action="store_true", help="models beside TVM's default schedules, too")
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS",
                        help="models beside MetaSchedule, too, both tuned for so long; needs a GPU, and more than "
                             "twice that for each model")
    parser.add_argument("--match", default="", help="only the cases whose name contains this")
    parser.add_argument("--again", action="store_true", help="time cases that have results already, too")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after that (default: 600)")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-gpu")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    models = [case for case in cases() if case.shape is None]
    peers = [case.beside("dlight") for case in models] if args.tvm else []
    if args.tune and not args.build:
        peers += [case.beside("metaschedule", args.tune) for case in models]
    chosen = [case for case in chosen_for(args.target, chain(cases(), peers)) if args.match in case.name]
    return run(chosen, args.target, args.output, args.build, args.again, args.seconds)


def run(
    chosen: Sequence[Case], target: str, folder: Path, only_build: bool = False, again: bool = False,
    seconds: float = float("inf"),
) -> int:
    """Build each case that has no artifact in ``folder``, then time it, unless so many seconds are over; 1 if one
    failed."""
    known = {case.name: case for case in chosen}
    failed, end = False, time.monotonic() + seconds
    for case in chosen:
        problem = build(case, target, folder)
        failed |= problem is not None
        print(f"{case.name}: {problem or 'built'}", file=sys.stderr)
    if only_build:
        return int(failed)
    results = Results(folder)
    for row in results.fill(known, lambda name: measure(known[name], folder, target), again):
        print(json.dumps(row), flush=True)
        failed |= "error" in row
        if time.monotonic() > end:
            break
    if left := [name for name in known if name not in results.rows]:
        print(f"{len(left)} cases are left: call again", file=sys.stderr)
    print(json.dumps({"gains": gains(list(results.rows.values()))}), flush=True)
    return int(failed)


def gains(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By what is computed and beside whom: how many times as fast as the peer mlc is, in the geometric mean, and at
    least."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for peer in ("torch", "dlight", "metaschedule"):
            if row.get(f"{peer}_seconds"):
                words = [row["kind"], row["dtype"], row.get("arch", "")] if row["shape"] else ["models"]
                kind = " ".join(filter(None, words))
                found.setdefault(f"{kind}, {peer}", []).append(row[f"{peer}_seconds"] / row["seconds"])
    return {name: {"geometric_mean": statistics.geometric_mean(each), "least": min(each), "cases": len(each)}
            for name, each in found.items()}


def build(case: Case, target: str, folder: Path) -> str | None:
    """The artifact of ``case``, unless it is there; what went wrong."""
    import mlc

    if case.tuning:  # where it runs
        return None
    try:
        if not case.artifact(folder).exists():
            there = f"cuda:{case.arch}" if case.arch else target
            mlc.compile(case.model(), target=there, precision=case.precision).save(case.artifact(folder))
        if case.peer and not case.others(folder).exists():
            gpu_peers.build(case.model(), case.precision, resolve(target), case.others(folder))
    except MlcError as error:
        return str(error)
    return None


def _tune(case: Case, folder: Path, target: str) -> None:
    """Artifacts of mlc and of MetaSchedule, both of which had the same seconds on this machine's GPU."""
    import mlc

    here = target
    if target.startswith("cuda"):
        if find_gpu() is None:
            raise MlcError("tuning needs a GPU that this machine's driver shows, but it shows none; leave --tune out")
        here = "cuda"
    options, log = {"precision": case.precision}, folder / f"{case.name}.db"
    mlc.tune(case.model(), here, seconds=case.tuning, log=log, **options)
    mlc.compile(case.model(), here, log, **options).save(case.artifact(folder))
    gpu_peers.build(case.model(), case.precision, resolve(here), case.others(folder), gpu_peers.tuned(case.tuning))


def measure(case: Case, folder: Path, target: str = "native") -> dict[str, Any]:
    """Median seconds, the error, and the peer's median where there is one."""
    import mlc
    from mlc.networks.inputs import random_inputs

    row: dict[str, Any] = {
        "model": case.name, "kind": case.kind, "dtype": case.dtype, "shape": case.shape, "arch": case.arch,
        "when": time.time()}
    try:
        if case.tuning and not case.others(folder).exists():
            _tune(case, folder, target)
        exe = mlc.load(case.artifact(folder))
        inputs = random_inputs(exe.inputs)
        row["error_of_numbers"] = error = _error(case, exe(**inputs), inputs)
        _check(case, error)
        row["target"] = exe.metadata["target"]
        row["clock"], row["seconds"] = _seconds(_started(exe, inputs), exe, cold=case.shape is not None)
        if case.peer:
            call = gpu_peers.started(case.others(folder), inputs, exe.metadata["kind"] == "cuda")
            row["peer_error_of_numbers"] = error = _error(case, [each.numpy() for each in call()], inputs)
            _check(case, error)
            row[f"{case.peer}_seconds"] = _seconds(call, exe)[1]
        else:
            row["torch_seconds"] = _torch(case) if case.shape else _compiled(case)
        row |= case.rates(row["seconds"])
        if "gigabytes" in row:
            row["copied_gigabytes"] = _copied()
    except MlcError as error:
        row["error"] = str(error)
    return row


def _started(exe: Executable, inputs: dict[str, np.ndarray]) -> Callable[[], Any]:
    """Runs the compiled code on inputs that are on its device; of a GPU's it does not wait for the end."""
    main, place = exe._running or exe._start()
    tensors = exe._tensors([inputs[spec.name] for spec in exe.inputs], place)
    return lambda: main(*tensors)


def _seconds(call: Callable[[], Any], exe: Executable, *, cold: bool = False) -> tuple[str, float]:
    """What was read, and the median: events on the GPU where PyTorch knows it, else this machine's clock."""
    import torch

    if exe.metadata["kind"] == "cuda" and torch.cuda.is_available():
        return "events", statistics.median(_events(torch, lambda _: call(), cold=cold))
    _, place = exe._running or exe._start()
    times = []
    for _ in range(_WARMUP + _REPEATS):
        started = time.perf_counter()
        call()
        place.synchronise()
        times.append(time.perf_counter() - started)
    return "wall", statistics.median(times[_WARMUP:])


def _check(case: Case, error: float) -> None:
    most = _TOLERANCE[case.dtype] * (1 if case.shape else 10)
    if not error <= most:
        raise MlcError(f"the result must be within {most:g} of the reference, got {error:.2g}")


def _error(case: Case, outputs: Sequence[np.ndarray], inputs: dict[str, np.ndarray]) -> float:
    """The largest difference from the reference, relative to its largest value."""
    if case.shape is None or case.kind != "product":
        import onnxruntime

        model = case.model("float32" if case.shape else "")
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        wide = {name: x.astype(np.float32) if case.shape else x for name, x in inputs.items()}
        wanted = session.run(None, wide)
    else:  # some rows, at all columns: float64 products of thousands squared take minutes on a CPU
        rows = slice(0, min(case.shape[0], 64))
        wanted = [inputs["a"][rows].astype(np.float64) @ inputs["b"].astype(np.float64)]
        outputs = [outputs[0][rows]]
    return max(float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())
               for got, want in zip(outputs, wanted, strict=True))


def _torch(case: Case) -> float | None:
    """Median seconds of PyTorch's kernel; None where it knows no GPU. Operands take turns so that L2 holds none."""
    import torch

    if not torch.cuda.is_available():
        return None
    _, attributes, inputs, _ = case._node()
    dtype = getattr(torch, case.dtype)
    sets = max(1, (256 << 20) // (dtype.itemsize * sum(map(prod, inputs.values()))))
    operands = [[torch.randn(shape, device="cuda").to(dtype) for shape in inputs.values()]
                for _ in range(min(sets, 16))]
    if case.kind == "convolution":
        torch.backends.cudnn.benchmark = True
        operands = [[x.contiguous(memory_format=torch.channels_last) for x in each] for each in operands]

    def run(*xs: Any) -> Any:
        functional = torch.nn.functional
        if case.kind in ("product", "few_bits"):  # no kernel of its own takes packed weights: what they would cost
            return torch.matmul(*xs)
        if case.kind == "attention":
            return functional.scaled_dot_product_attention(*xs, is_causal=bool(attributes["is_causal"]))
        if case.kind == "convolution":
            return functional.conv2d(*xs, stride=attributes["strides"], padding=attributes["pads"][:2])
        if case.kind == "softmax":
            return torch.softmax(xs[0], -1)
        return functional.layer_norm(xs[0], xs[0].shape[-1:], *xs[1:])

    with torch.inference_mode():
        return statistics.median(_events(torch, lambda turn: run(*operands[turn % len(operands)]), cold=True))


def _compiled(case: Case, device: str = "cuda") -> float | None:
    """Median seconds of a whole model by ``torch.compile``, tuned; None where PyTorch knows no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    network, dtype = case.network(fused=True), getattr(torch, case.dtype)
    module = network._module().to(device, dtype)
    inputs = [
        torch.randint(1, 1000, each.shape, device=device) if name.endswith("_ids")
        else each.to(device) if name.endswith("_mask") else torch.randn(each.shape, device=device).to(dtype)
        for name, each in zip(network.inputs, network._example(), strict=True)
    ]
    if inputs[0].ndim == 4:
        module = module.to(memory_format=torch.channels_last)
        inputs = [each.contiguous(memory_format=torch.channels_last) for each in inputs]
    fast = torch.compile(module, mode="max-autotune")
    with torch.inference_mode():
        return statistics.median(_events(torch, lambda _: fast(*inputs)))


@cache
def _copied() -> float | None:
    """GB/s that a copy on the device reads and writes; None where PyTorch knows no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    source, target = (torch.zeros(_COPIED // 8, dtype=torch.float32, device="cuda") for _ in range(2))
    return 1e-9 * _COPIED / statistics.median(_events(torch, lambda _: target.copy_(source)))


def _events(torch: Any, call: Callable[[int], Any], *, cold: bool = False) -> list[float]:
    """Seconds of each call between two events on the device; ``cold``: behind writes that fill the second cache and
    last until the call is on its way."""
    times = []
    written = torch.empty(_WRITTEN, dtype=torch.int8, device="cuda") if cold else None
    for turn in range(_WARMUP + _REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(_WRITES if written is not None else 0):
            written.zero_()
        begin.record()
        call(turn)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return times[_WARMUP:]


if __name__ == "__main__":
    sys.exit(main())
