"""What a GPU makes of products and whole models: built where there is none, timed where there is one.

    python -m tests.performance.bench_gpu --build [--target cuda:sm_80,sm_90a]    # anywhere, with a CUDA compiler
    make bench-gpu                                                                # with a GPU: at most ten minutes

Building leaves an artifact for each case in ``build/bench-gpu/``; timing checks the numbers of each against onnxruntime
on the CPU (a 16-bit product against float64), takes medians of runs on random data that is on the device already, and
sets PyTorch's (cuBLAS, cuDNN) beside them where it knows the GPU. ``results.json`` has everything; what does not build
or run has an ``error``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlc.errors import MlcError
from tests.performance.results import Results
from tests.performance.table import ROOT

if TYPE_CHECKING:
    import onnx

#: rows, columns and terms of products: squares, BERT's, LLaMA's, and one or sixteen rows
PRODUCTS = (
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (2048, 768, 768),
    (2048, 3072, 768), (2048, 768, 3072), (2048, 11008, 4096), (1, 4096, 4096), (16, 4096, 4096),
)
MODELS = ("resnet50", "bert_base", "gpt2_small")
#: largest error that a result may have, relative to the largest value of the reference
_TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Case:
    """A model to build. ``shape`` is (m, n, k) of a product in ``dtype``; None for one of :data:`MODELS`."""

    name: str
    dtype: str = "float32"
    shape: tuple[int, int, int] | None = None

    def model(self) -> onnx.ModelProto:
        """The case as ONNX."""
        from onnx import TensorProto, helper

        from mlc.networks.models import model_named

        if self.shape is None:
            return model_named(self.name)
        m, n, k = self.shape
        kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
        a, b, c = (helper.make_tensor_value_info(name, kind[self.dtype], shape)
                   for name, shape in (("a", (m, k)), ("b", (k, n)), ("c", (m, n))))
        graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], self.name, [a, b], [c])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def cases(products: Sequence[tuple[int, int, int]] = PRODUCTS, models: Sequence[str] = MODELS) -> Iterator[Case]:
    """Products in each type, then the models."""
    for dtype in ("bfloat16", "float16", "float32"):
        for m, n, k in products:
            yield Case(f"{m}x{n}x{k}-{dtype}", dtype, (m, n, k))
    yield from map(Case, models)


def main(argv: Sequence[str] | None = None) -> int:
    """Build what is missing, and time what was not timed yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", action="store_true", help="only build; no GPU is needed")
    parser.add_argument("--target", default="cuda:sm_80,sm_90a", help="what is built (default: cuda:sm_80,sm_90a)")
    parser.add_argument("--match", default="", help="only the cases whose name contains this")
    parser.add_argument("--again", action="store_true", help="time cases that have results already, too")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-gpu")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    return run([case for case in cases() if args.match in case.name], args.target, args.output, args.build, args.again)


def run(chosen: Sequence[Case], target: str, folder: Path, only_build: bool = False, again: bool = False) -> int:
    """Build each case that has no artifact in ``folder``, then time it; 1 if one failed."""
    known = {case.name: case for case in chosen}
    failed = False
    for case in chosen:
        problem = build(case, target, folder)
        failed |= problem is not None
        print(f"{case.name}: {problem or 'built'}", file=sys.stderr)
    if only_build:
        return int(failed)
    for row in Results(folder).fill(known, lambda name: measure(known[name], folder), again):
        print(json.dumps(row), flush=True)
        failed |= "error" in row
    return int(failed)


def build(case: Case, target: str, folder: Path) -> str | None:
    """The artifact of ``case``, unless it is there; what went wrong."""
    import mlc

    path = folder / f"{case.name}.so"
    if not path.exists():
        try:
            mlc.compile(case.model(), target=target).save(path)
        except MlcError as error:
            return str(error)
    return None


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Median seconds, the error, and the peer's median where there is one."""
    import mlc
    from mlc.networks.inputs import random_inputs

    row: dict[str, Any] = {"model": case.name, "dtype": case.dtype, "shape": case.shape, "when": time.time()}
    try:
        exe = mlc.load(folder / f"{case.name}.so")
        inputs = random_inputs(exe.inputs)
        row["error_of_numbers"] = error = _error(case, exe(**inputs), inputs)
        if not error <= _TOLERANCE[case.dtype]:
            raise MlcError(f"the result must be within {_TOLERANCE[case.dtype]:g} of the reference, got {error:.2g}")
        row["target"], row["seconds"] = exe.metadata["target"], statistics.median(exe.time(**inputs))
        row["torch_seconds"] = _torch_product(case) if case.shape else None
        if case.shape:
            row["tflops"] = 2e-12 * float(np.prod([float(size) for size in case.shape])) / row["seconds"]
    except MlcError as error:
        row["error"] = str(error)
    return row


def _error(case: Case, outputs: Sequence[np.ndarray], inputs: dict[str, np.ndarray]) -> float:
    """The largest difference from the reference, relative to its largest value."""
    if case.shape is None:
        import onnxruntime

        session = onnxruntime.InferenceSession(case.model().SerializeToString(), providers=["CPUExecutionProvider"])
        wanted = session.run(None, inputs)
    else:  # some rows, at all columns: float64 products of thousands squared take minutes on a CPU
        rows = slice(0, min(case.shape[0], 64))
        wanted = [inputs["a"][rows].astype(np.float64) @ inputs["b"].astype(np.float64)]
        outputs = [outputs[0][rows]]
    return max(float(np.abs(got.astype(np.float64) - want).max() / np.abs(want).max())
               for got, want in zip(outputs, wanted, strict=True))


def _torch_product(case: Case) -> float | None:
    """Median seconds of PyTorch's product; None where it knows no GPU. Operands take turns so that L2 holds none."""
    import torch

    if not torch.cuda.is_available() or case.shape is None:
        return None
    m, n, k = case.shape
    dtype = getattr(torch, case.dtype)
    sets = max(1, (256 << 20) // (dtype.itemsize * (m * k + k * n)))
    pairs = [(torch.randn(m, k, device="cuda").to(dtype), torch.randn(k, n, device="cuda").to(dtype))
             for _ in range(min(sets, 16))]
    return statistics.median(_events(torch, lambda turn: torch.matmul(*pairs[turn % len(pairs)])))


def _events(torch: Any, call: Callable[[int], Any], warmup: int = 5, repeats: int = 20) -> list[float]:
    """Seconds of each call between two events on the device."""
    times = []
    for turn in range(warmup + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(turn)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return times[warmup:]


if __name__ == "__main__":
    sys.exit(main())
