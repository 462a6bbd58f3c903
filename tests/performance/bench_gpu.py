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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from tests.performance.results import Results
from tests.performance.table import ROOT

if TYPE_CHECKING:
    import onnx

    from mlc.artifact.executable import Executable
    from mlc.networks.models import Network

#: rows, columns and terms of products: squares, BERT's, LLaMA's, and one or sixteen rows
PRODUCTS = (
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (2048, 768, 768),
    (2048, 3072, 768), (2048, 768, 3072), (2048, 11008, 4096), (1, 4096, 4096), (16, 4096, 4096),
)
#: rows and columns of softmax and layer normalisation
ROWS = ((8192, 1024), (2048, 768), (2048, 4096), (512, 32000))
#: batch, heads, queries, keys and head size, causal or not
ATTENTIONS = ((4, 16, 2048, 2048, 128, 0), (4, 16, 2048, 2048, 128, 1), (1, 12, 128, 128, 64, 0),
              (1, 32, 1, 4096, 128, 0))
#: batch, channels, size, filters, window and stride: ResNet-50's
CONVOLUTIONS = (
    (32, 3, 224, 64, 7, 2), (32, 64, 56, 64, 3, 1), (32, 256, 56, 128, 1, 1), (32, 128, 28, 128, 3, 1),
    (32, 256, 14, 256, 3, 1), (32, 1024, 14, 2048, 1, 2), (32, 512, 7, 512, 3, 1), (1, 256, 14, 256, 3, 1),
)
#: rows, columns and terms of products with weights of 4 bits in blocks of 32: LLaMA's, decoding and prefilling
FEW_BITS = tuple((m, n, 4096) for n in (4096, 11008) for m in (1, 16, 512))
#: types of products, and the architecture, that are timed on ``mma.sync`` whatever the GPU has beside it
_BY_MMA = (("bfloat16", "sm_80"), ("float16", "sm_80"))
#: models and their batches, in float16
MODELS = (("resnet50", 1), ("resnet50", 32), ("bert_base", 1), ("bert_base", 16), ("gpt2_small", 1))
#: largest error that a result may have, relative to the largest value of the reference; of whole models ten times that
_TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
#: numbers of packed weights that have a scale
_BLOCK = 32
#: rows of a product that memory bounds
_FEW = 16
#: bytes that the copy reads and writes, beyond what any cache holds
_COPIED = 1 << 30
#: bytes of a write that leaves nothing else in the second cache (50 MB on an H200)
_WRITTEN = 256 << 20
#: a fifth of a millisecond in all, in which a call of some microseconds is surely prepared
_WRITES = 4
#: calls that are not counted, and that are
_WARMUP, _REPEATS = 5, 20


@dataclass(frozen=True)
class Case:
    """A model to build: a node of ``kind`` in ``dtype`` and of ``shape``, whose numbers are those of :data:`PRODUCTS`,
    :data:`ROWS` and so on; without a shape one of :data:`MODELS`, whose name is the ``kind``, for so many at a time.

    ``arch`` is an architecture other than the target's whose kernels it has. ``peer`` is whom it is timed beside in
    PyTorch's place: ``dlight``, or ``metaschedule`` after ``tuning`` seconds of both."""

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] | None = None
    kind: str = "product"
    batch: int = 1
    arch: str = ""
    peer: str = ""
    tuning: float = 0.0

    def beside(self, peer: str, tuning: float = 0.0) -> Case:
        """The same with another peer."""
        return replace(self, name=f"{self.name}-{peer}{f'-{tuning:g}' if tuning else ''}", peer=peer, tuning=tuning)

    def artifact(self, folder: Path) -> Path:
        """What mlc makes of it: where nothing is tuned, one for all peers."""
        return folder / f"{self.name if self.tuning else self.name.removesuffix(f'-{self.peer}')}.so"

    def others(self, folder: Path) -> Path:
        """What the peer makes of it."""
        return folder / f"{self.name}.tvm.so"

    @property
    def precision(self) -> str:
        """What operands of a model's products are rounded to."""
        return {"float16": "f16", "bfloat16": "bf16"}.get(self.dtype, "f32") if self.shape is None else "f32"

    def network(self, fused: bool = False) -> Network:
        """A whole model, as PyTorch has it; ``fused`` with its own attention."""
        from mlc.networks.architectures import TRANSFORMERS_ARCHITECTURES
        from mlc.networks.models import network

        found = network(self.kind, self.batch, fused)
        return found if found is not None else TRANSFORMERS_ARCHITECTURES[self.kind].batched(self.batch)

    def model(self, dtype: str = "") -> onnx.ModelProto:
        """The case as ONNX; a kernel in another type on demand."""
        from onnx import TensorProto, helper

        if self.shape is None:
            return self.network().onnx()
        if self.kind == "few_bits":
            return _packed_product(self.name, self.shape, dtype or self.dtype)
        kinds = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
        operator, attributes, inputs, result = self._node()
        kind = kinds[dtype or self.dtype]
        nodes = [helper.make_node(operator, list(inputs), ["result"], **attributes)]
        filters = [helper.make_tensor(name, kind, shape, _filters(shape))
                   for name, shape in inputs.items() if name == "w"]
        shapes = {name: shape for name, shape in {**inputs, "result": result}.items() if name != "w"}
        if operator == "Conv":  # among others a convolution has its images with their channels last, as the peer has
            shapes = {name: (n, h, w, c) for name, (n, c, h, w) in shapes.items()}
            nodes = [helper.make_node("Transpose", ["x"], ["image"], perm=[0, 3, 1, 2]),
                     helper.make_node(operator, ["image", "w"], ["sums"], **attributes),
                     helper.make_node("Transpose", ["sums"], ["result"], perm=[0, 2, 3, 1])]
        values = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
        graph = helper.make_graph(nodes, self.name, values[:-1], values[-1:], filters)
        opsets = [helper.make_opsetid("", 23 if operator == "Attention" else 17)]
        # the oldest format that has them: onnxruntime does not read what is newer than itself
        return helper.make_model(graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets))

    def _node(self) -> tuple[str, dict[str, Any], dict[str, tuple[int, ...]], tuple[int, ...]]:
        """The operator, its attributes, the shapes of its inputs, and of its result."""
        assert self.shape is not None
        if self.kind in ("product", "few_bits"):
            m, n, k = self.shape
            return "MatMul", {}, {"a": (m, k), "b": (k, n)}, (m, n)
        if self.kind == "attention":
            batch, heads, queries, keys, size, causal = self.shape
            asked, known = ((batch, heads, length, size) for length in (queries, keys))
            return "Attention", {"is_causal": causal}, {"q": asked, "k": known, "v": known}, asked
        if self.kind == "convolution":
            batch, channels, size, filters, window, stride = self.shape
            out = (size + 2 * (window // 2) - window) // stride + 1
            attributes = {"pads": [window // 2] * 4, "strides": [stride] * 2}
            inputs = {"x": (batch, channels, size, size), "w": (filters, channels, window, window)}
            return "Conv", attributes, inputs, (batch, filters, out, out)
        rows, columns = self.shape
        if self.kind == "softmax":
            return "Softmax", {"axis": -1}, {"x": (rows, columns)}, (rows, columns)
        return "LayerNormalization", {}, {"x": (rows, columns), "g": (columns,), "b": (columns,)}, (rows, columns)

    def rates(self, seconds: float) -> dict[str, float]:
        """TFLOP/s of products, attention and convolutions, GB/s of what only moves and of products of few rows."""
        if self.shape is None:
            return {}
        _, _, inputs, result = self._node()
        if self.kind in ("softmax", "layer_norm"):
            bytes_moved = (prod(result) + sum(map(prod, inputs.values()))) * (4 if self.dtype == "float32" else 2)
            return {"gigabytes": 1e-9 * bytes_moved / seconds}
        if self.kind == "attention":
            terms = 2 * self.shape[3] * prod(result) // (1 + self.shape[5])
        elif self.kind == "convolution":
            terms = prod(result) * prod(inputs["w"][1:])
        else:
            terms = prod(self.shape)
        rates = {"tflops": 2e-12 * terms / seconds}
        if self.kind in ("product", "few_bits") and self.shape[0] <= _FEW:
            size = 4 if self.dtype == "float32" else 2
            weights = prod(inputs["b"]) * (size if self.kind == "product" else 0.5 + size / _BLOCK)
            rates["gigabytes"] = 1e-9 * ((prod(result) + prod(inputs["a"])) * size + weights) / seconds
        return rates


def _packed_product(name: str, shape: tuple[int, ...], dtype: str) -> onnx.ModelProto:
    """A product with random weights of 4 bits whose scales float16 holds, in whichever type."""
    from onnx import TensorProto, helper, numpy_helper

    m, n, k = shape
    rng = np.random.default_rng(0)
    kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[dtype]
    packed = rng.integers(0, 256, (n, k // _BLOCK, _BLOCK // 2), dtype=np.uint8)
    scales = rng.uniform(0.002, 0.006, (n, k // _BLOCK)).astype(np.float16).astype(dtype)
    node = helper.make_node("MatMulNBits", ["a", "b", "scales"], ["result"], domain="com.microsoft", K=k, N=n, bits=4,
                            block_size=_BLOCK)
    values = [helper.make_tensor_value_info(name, kind, shape) for name, shape in (("a", (m, k)), ("result", (m, n)))]
    graph = helper.make_graph([node], name, values[:1], values[1:], [
        numpy_helper.from_array(packed, "b"), numpy_helper.from_array(scales, "scales")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def own_target() -> str:
    """What is built unless a target is named: code for this machine's GPU, else for one with warpgroups' products."""
    return "cuda" if find_gpu() is not None else "cuda:sm_90a"


def chosen_for(target: str, found: Iterable[Case]) -> list[Case]:
    """Without those that the target has kernels of anyway, or none of since it is no GPU's."""
    gpu = find_gpu() if target == "cuda" else None
    own = gpu.arch if gpu is not None else target.partition(":")[2]
    return [case for case in found if not case.arch or (target.startswith("cuda") and case.arch != own)]


def _filters(shape: tuple[int, ...]) -> np.ndarray:
    """Constant weights, as networks have them, that keep the size of what they multiply."""
    return np.random.default_rng(0).standard_normal(shape) * prod(shape[1:]) ** -0.5


def cases(
    products: Sequence[tuple[int, int, int]] = PRODUCTS, models: Sequence[tuple[str, int]] = MODELS
) -> Iterator[Case]:
    """Products in each type, and by ``mma.sync``, the other kernels, then the models."""
    for dtype, arch in (*((dtype, "") for dtype in ("bfloat16", "float16", "float32")), *_BY_MMA):
        for m, n, k in products:
            yield Case(f"{m}x{n}x{k}-{dtype}{f'-{arch}' if arch else ''}", dtype, (m, n, k), arch=arch)
    others: dict[str, tuple[Sequence[tuple[int, ...]], str]] = {
        "few_bits": (FEW_BITS, "float16"), "attention": (ATTENTIONS, "float16"),
        "convolution": (CONVOLUTIONS, "float16"), "softmax": (ROWS, "float32"), "layer_norm": (ROWS, "float32"),
    }
    for kind, (shapes, dtype) in others.items():
        for shape in shapes:
            yield Case(f"{kind}-{'x'.join(map(str, shape))}-{dtype}", dtype, shape, kind)
    for name, batch in models:
        yield Case(f"{name}-{batch}-float16", "float16", None, name, batch)


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
