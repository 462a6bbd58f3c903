"""``torch.compile(backend="mlc")`` against eager PyTorch and Inductor, on architectures that nothing was tuned for.

    python -m tests.performance.bench_torch_compile [NAME...] [--small] [--check] [--repeats N]

Prints for each architecture how many graphs were compiled and why others were not, the largest error against eager,
relative to the largest magnitude, and the median milliseconds of the engines on as many threads as the machine has
cores. The last line has the geometric means.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mlc import torch_backend
from mlc.config import physical_cores
from mlc.networks.architectures import BENCHMARK_ARCHITECTURES, SMALL_ARCHITECTURES
from mlc.networks.models import Network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--small", action="store_true", help="of those with a few layers, in seconds")
    parser.add_argument("--check", action="store_true", help="compare results alone")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch_backend.register()
    torch.set_num_threads(physical_cores())
    known = SMALL_ARCHITECTURES if args.small else BENCHMARK_ARCHITECTURES
    ratios: list[tuple[float, float]] = []
    with torch.inference_mode():
        for name in args.names or known:
            ratios += _row(name, known[name], 0 if args.check else args.repeats)
    if ratios:
        eager, inductor = np.exp(np.log(ratios).mean(axis=0))
        print(f"geometric mean of {len(ratios)}: {eager:.2f}x eager, {inductor:.2f}x inductor", flush=True)


def _row(name: str, network: Network, repeats: int) -> list[tuple[float, float]]:
    module, inputs = network._module(), _inputs(network)
    wanted = _leaves(module(*inputs))
    torch._dynamo.reset()
    mine = torch.compile(module, backend="mlc")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        started = time.perf_counter()
        got = _leaves(mine(*inputs))
        seconds = time.perf_counter() - started
    eagerly = [str(w.message) for w in caught if "runs eagerly" in str(w.message)]
    error = max((float((g - w).abs().max()) / max(float(w.abs().max()), 1e-9) for g, w in zip(got, wanted, strict=True)
                 if w.is_floating_point()), default=0.0)
    line = f"{name}: {seconds:.1f} s to compile, error {error:.1e}, {len(eagerly)} graphs eager"
    print(line + "".join(f"\n    {reason}" for reason in eagerly), flush=True)
    if not repeats:
        return []
    import torch._inductor.config as inductor

    inductor.freezing = True  # weights are constants, packed as its kernels want them
    peer = torch.compile(module, backend="inductor")
    times = _times([lambda: module(*inputs), lambda: peer(*inputs), lambda: mine(*inputs)], repeats)
    print("    eager {:.2f} ms, inductor {:.2f} ms, mlc {:.2f} ms".format(*(1e3 * t for t in times)), flush=True)
    return [(times[0] / times[2], times[1] / times[2])]


def _inputs(network: Network) -> list[torch.Tensor]:
    """Random ones of the network's shapes; whole numbers are small enough for every vocabulary."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.ones(shape, dtype=torch.int64) if name.endswith("_mask")
        else torch.randint(0, 100, shape, generator=generator) if name.endswith("_ids")
        else torch.randn(shape, generator=generator)
        for name, shape in network.inputs.items()
    ]


def _leaves(results: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]


def _times(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median seconds of each after a few calls that do not count. One engine after the other: threads of PyTorch's pool
    and of TVM's wait for work by spinning, each in the other's way."""
    medians = []
    for call in calls:
        taken = []
        for _ in range(repeats + 5):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        medians.append(float(np.median(taken[5:])))
    return medians


if __name__ == "__main__":
    main()
