"""What a model of GPUs that is not mlc's makes of the first seeds of products on tensor cores; no GPU is needed.

    PYTHONPATH=FOLDER python -m tests.performance.outside_model [--arch sm_80 sm_90a] [--seeds 1] [--output FILE]

The model is NVIDIA's nvMatmulHeuristics (``nvidia-matmul-heuristics`` 0.1.0.27), which prices a kernel by its tiles,
stages and cuts on a GPU that it knows. Its licence lets it be installed and used, not passed on as open source, so it
is no dependency and stands in a folder of its own (``pip install --target FOLDER nvidia-matmul-heuristics``).

Each of 50 products is priced as the first seed of the space that takes it would compute it, or the best of the first
``--seeds``, and as the cheapest kernel that the model proposes, unless the seed is cheaper still. Each line has both,
the last one the geometric mean of their ratios.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

from mlc.target import resolve
from mlc.testing.cuda_cases import product_case
from schedules import registry
from schedules.space import Decisions, InvalidDecision, schedule_with

#: rows, columns and terms: squares and others of large sizes, BERT's, GPT-2's, LLaMA's, ResNet-50's convolutions, ViT's
SHAPES: tuple[tuple[int, int, int], ...] = (
    *((n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)),
    *product((128, 512, 2048), (768, 2304, 3072), (768,)), *product((128, 512, 2048), (768,), (3072,)),
    *product((16, 64, 512, 2048), (4096, 12288, 22016), (4096,)), *product((16, 64, 512, 2048), (4096,), (11008,)),
    (3136, 64, 576), (3136, 256, 64), (784, 128, 1152), (784, 512, 128), (196, 256, 2304), (196, 1024, 256),
    (49, 512, 4608), (49, 2048, 512), (6272, 256, 2304), (197, 768, 768), (197, 3072, 768), (1024, 1024, 8192),
    (8192, 1024, 1024), (4096, 128, 4096), (128, 4096, 4096), (256, 32000, 4096),
)
_GPUS = {"sm_80": "A100_SXM_80GB", "sm_90a": "H200_SXM"}
#: the kinds of kernels that the model knows for what each space makes
_KINDS = {"cuda.mma": "CUTLASS", "cuda.wgmma": "CUTLASS3"}
#: candidates of each kind of which the cheapest counts
_COUNT = 32
_ELEMENT = 2


class Outside:
    """The model, for one GPU. Products are of float16, added up in float32, with the second operand by columns."""

    def __init__(self, arch: str) -> None:
        import nvMatmulHeuristics as model  # type: ignore[import-not-found]

        self._kinds = {space: model.NvMatmulHeuristicsInterfaceEx(
            backend=model.NvMatmulHeuristicsTarget[kind], gpu=model.NvMatmulHeuristicsNvidiaGpu[_GPUS[arch]],
            flags=model.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        ) for space, kind in _KINDS.items() if arch == "sm_90a" or space == "cuda.mma"}
        self._layout = model.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR

    def best(self, shape: tuple[int, int, int]) -> tuple[float, str]:
        """Seconds of the cheapest kernel that the model proposes, and what it is."""
        found = [each for kind in self._kinds.values() for each in kind.get(self._problem(kind, shape), _COUNT, "HSS")]
        cheapest = min(found, key=lambda each: each["runtime"])
        return cheapest["runtime"], str(cheapest["kernel"])

    def seconds(self, shape: tuple[int, int, int], space: str, decisions: Decisions) -> float:
        """Of a seed; raises ``ValueError`` where the model knows no such kernel."""
        kind = self._kinds[space]
        problem, config = self._problem(kind, shape), kind.nvmmhKernelConfiguration()
        tile_m, tile_n = decisions["block_m"], decisions["block_n"]
        if space == "cuda.wgmma":  # the model's warps have 64 rows each, and side by side what is left
            depth = decisions["block_k"]
            beside = decisions["consumers"] * 4 * 64 // tile_m
            warp, instruction = (64, tile_n // beside, depth), (64, 8, 16)
        else:
            depth = decisions["block_k"] // _ELEMENT
            warp, instruction = (decisions["warp_m"], decisions["warp_n"], depth), (16, 8, 16)
        config.cta[:], config.warp[:], config.instr[:] = (tile_m, tile_n, depth), warp, instruction
        config.splitK, config.loadStages = decisions.get("split_k", 1), decisions["stages"]
        config.gridSwizzle, config.ctaOrder = decisions["panel"], 1
        config.cluster[:] = decisions.get("cluster", 1), 1  # blocks side by side share B's columns
        # the package's own function for this calls one that it does not have
        seconds = float(kind.nvMatmulHeuristicsEstimateRuntime(
            kind.handle, b"HSS", ctypes.c_int(kind.target), ctypes.byref(problem), ctypes.byref(config),
            kind.hardware_descriptor))
        if not seconds > 0:
            raise ValueError(f"the model must know kernels as {space} makes of {dict(decisions)}, but it does not")
        return seconds

    def _problem(self, kind: Any, shape: tuple[int, int, int]) -> Any:
        return kind.makeNvMatmulHeuristicsProblem(*shape, self._layout)


def rows(arch: str, shapes: Sequence[tuple[int, int, int]], seeds: int = 1) -> Iterator[dict[str, Any]]:
    """What the model says of each product."""
    model, target = Outside(arch), resolve(f"cuda:{arch}").tvm
    for shape in shapes:
        m, n, k = shape
        func = product_case("priced", (m, k), (n, k), "float16", "float32", transposed=True).func()
        space = registry.find(func, target)
        best, chosen = model.best(shape)
        priced = []
        for decisions in space.seeds(func, target):
            try:
                schedule_with(space, func, target, decisions)
            except InvalidDecision:
                continue
            priced.append((model.seconds(shape, space.name, decisions), dict(decisions)))
            if len(priced) == seeds:
                break
        seconds, decisions = min(priced, key=lambda each: each[0])
        if seconds < best:
            best, chosen = seconds, "the seed"
        yield {"arch": arch, "shape": shape, "space": space.name, "decisions": decisions, "seconds": seconds,
               "best_seconds": best, "best": chosen, "ratio": seconds / best}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each product and the mean of each architecture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", choices=_GPUS, default=list(_GPUS))
    parser.add_argument("--seeds", type=int, default=1, help="price so many seeds and count the cheapest (default: 1)")
    parser.add_argument("--first", type=int, default=len(SHAPES), help="only so many products")
    parser.add_argument("--output", type=Path, help="a JSON file for all that is printed")
    args = parser.parse_args(argv)
    if find_spec("nvMatmulHeuristics") is None:
        parser.error("the model must be on PYTHONPATH, but it is not; install nvidia-matmul-heuristics into a folder")
    written: list[dict[str, Any]] = []
    for arch in args.arch:
        found = []
        for row in rows(arch, tuple(islice(SHAPES, args.first)), args.seeds):
            found.append(row)
            times = f"{row['seconds'] * 1e6:8.1f} / {row['best_seconds'] * 1e6:.1f} us"
            print(f"{arch} {'x'.join(map(str, row['shape'])):>16} {row['ratio']:5.2f} {row['space']} {times} "
                  f"{tuple(row['decisions'].values())} {row['best']}", flush=True)
        mean = math.exp(sum(math.log(row["ratio"]) for row in found) / len(found))
        print(f"{arch}: {mean:.3f} times the model's best in the geometric mean of {len(found)}", flush=True)
        written += found
    if args.output:
        args.output.write_text(json.dumps(written, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
