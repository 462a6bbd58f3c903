"""One adapter per engine: load a model with a thread count, then call it, numpy arrays in and numpy arrays out.

Adapters run inside a worker process (:mod:`mlc.bench.worker`), whose environment is :func:`environment`. Each takes
the engine's own fastest path for one request at a time, in the numbers that the file asks for, or in fewer bits where
that is asked for and the engine can be asked.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.errors import ArtifactError, InstallationError, UsageError
from mlc.frontend.model import TensorSpec
from mlc.threads import environment as tvm_environment

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ENGINES", "Call", "Engine", "EngineSpec", "Job", "environment", "expand", "is_ours", "load_engine", "onnx_inputs",
    "program_inputs",
]

Call = Callable[[], "list[np.ndarray]"]


@dataclass(frozen=True)
class EngineSpec:
    """An engine to run: ``kind`` is a name of :data:`ENGINES`, ``label`` what its row is called.

    ``artifact`` is the compiled module of an mlc engine, ``seconds`` the tuning budget of ``tvm-metaschedule``.
    ``precision`` is what operands may be rounded to, where the file does not say so: what the artifact was compiled
    with, or OpenVINO's own word for it. The other engines are not asked.
    """

    kind: str
    label: str = ""
    artifact: str = ""
    seconds: float = 0.0
    precision: str = ""

    @property
    def name(self) -> str:
        """The row's name."""
        return self.label or self.kind


@dataclass(frozen=True)
class Job:
    """A worker's job: paths of the model as ONNX and as an exported PyTorch program, empty if missing."""

    spec: EngineSpec
    threads: int
    onnx_path: str = ""
    program_path: str = ""


@dataclass(frozen=True)
class Engine:
    """A loaded model. ``bind`` fixes the inputs, by name, and returns the call that is timed."""

    inputs: tuple[TensorSpec, ...]
    bind: Callable[[Mapping[str, np.ndarray]], Call]


def environment(threads: int) -> dict[str, str]:
    """Variables of a worker: its thread count for every library, and no spinning while another engine's turn is on."""
    n = str(threads)
    return {
        "OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n, "MLC_THREADS": n,
        "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore",
        **tvm_environment(threads),
    }


def expand(names: Iterable[str | EngineSpec]) -> list[EngineSpec]:
    """Engine names as specifications; ``torch`` stands for both of PyTorch's. Raises :class:`UsageError`."""
    specs: list[EngineSpec] = []
    for name in names:
        if isinstance(name, EngineSpec):
            specs.append(name)
        else:
            specs.extend(EngineSpec(kind) for kind in _GROUPS.get(name, (name,)))
    for spec in specs:
        if spec.kind not in ENGINES:
            raise UsageError(f"an engine must be one of {', '.join([*ENGINES, *_GROUPS])}, got {spec.kind!r}")
    labels = [spec.name for spec in specs]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise UsageError(f"engines must have different names, got {', '.join(twice)} twice; give them labels")
    return specs


def is_ours(spec: EngineSpec) -> bool:
    """Whether the engine runs a module that mlc compiled."""
    return ENGINES[spec.kind] is _mlc


def load_engine(job: Job) -> Engine:
    """Load the model into the engine; whatever goes wrong is raised and becomes the engine's row."""
    try:
        return ENGINES[job.spec.kind](job)
    except ModuleNotFoundError as error:
        if "." in (error.name or "."):  # a part of an installed package: its version, then
            raise
        raise InstallationError(
            f"{error.name} must be installed for {job.spec.name}; run `pip install mlc[bench]`"
        ) from None


def _needs_onnx(job: Job) -> str:
    if not job.onnx_path:
        raise UsageError(f"{job.spec.kind} needs the model as ONNX and there is only another form; name the .onnx file")
    return job.onnx_path


def _onnxruntime(job: Job) -> Engine:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    # Threads spin within a run, as by default, and stop when it ends: the next turn belongs to another engine.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(_needs_onnx(job), options, providers=["CPUExecutionProvider"])
    return Engine(onnx_inputs(job.onnx_path), lambda feeds: lambda: list(session.run(None, dict(feeds))))


def _openvino(job: Job) -> Engine:
    import openvino as ov

    core = ov.Core()
    settings = {
        "INFERENCE_NUM_THREADS": job.threads,
        "PERFORMANCE_HINT": "LATENCY",
        # left out, bfloat16 where the CPU has it; quantised operators stay of integers whatever this says
        "INFERENCE_PRECISION_HINT": job.spec.precision or _float_type(_needs_onnx(job)),
        "NUM_STREAMS": 1,
    }
    compiled = core.compile_model(core.read_model(_needs_onnx(job)), "CPU", settings)
    request = compiled.create_infer_request()
    position = {name: i for i, port in enumerate(compiled.inputs) for name in port.get_names()}

    def bind(feeds: Mapping[str, np.ndarray]) -> Call:
        by_position = {position[name]: array for name, array in feeds.items() if name in position}

        def call() -> list[np.ndarray]:
            results = request.infer(by_position, share_inputs=True)
            return [results[port] for port in compiled.outputs]

        return call

    return Engine(onnx_inputs(job.onnx_path), bind)


def _float_type(path: str) -> str:
    """OpenVINO's name of the floating-point type that most of the weights have; f32 where there are none."""
    import onnx

    names = {onnx.TensorProto.FLOAT16: "f16", onnx.TensorProto.BFLOAT16: "bf16", onnx.TensorProto.FLOAT: "f32"}
    elements = dict.fromkeys(("f32", "f16", "bf16"), 0)
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        if tensor.data_type in names:
            elements[names[tensor.data_type]] += math.prod(tensor.dims)
    return max(elements, key=lambda name: elements[name])


def _torch(job: Job, compiled: bool) -> Engine:
    import torch

    if not job.program_path:
        raise UsageError(f"{job.spec.kind} needs a torch.nn.Module or an exported program, and the model is not one")
    torch.set_num_threads(job.threads)
    torch.set_num_interop_threads(1)
    program = torch.export.load(job.program_path)
    module = program.module()
    if compiled:
        import torch._inductor.config as inductor

        inductor.freezing = True  # weights are constants, packed as its kernels want them
        module = torch.compile(module)
    inputs = program_inputs(program)

    def bind(feeds: Mapping[str, np.ndarray]) -> Call:
        tensors = [torch.from_numpy(feeds[spec.name]) for spec in inputs]

        def call() -> list[np.ndarray]:
            with torch.inference_mode():
                results = module(*tensors)
            return [t.numpy() for t in torch.utils._pytree.tree_leaves(results)]

        return call

    return Engine(inputs, bind)


def _tvm(job: Job) -> Engine:
    """TVM as it comes: its default pipelines, no tuning. Its loops are naive, so this is slow."""
    import tvm

    from mlc.frontend import load_model
    from mlc.graph.lowering.recurrent import UnrollRecurrent
    from mlc.target import resolve

    model = load_model(_needs_onnx(job))
    with resolve("native", job.threads).tvm as target:
        return _tvm_engine(tvm.compile(UnrollRecurrent(model.mod), target=target), model.inputs, job.threads)


def _tvm_metaschedule(job: Job) -> Engine:
    """TVM after MetaSchedule tuned every task for the budget, with the same threads."""
    import tvm

    from mlc.bench import metaschedule
    from mlc.frontend import load_model
    from mlc.graph.lowering.recurrent import UnrollRecurrent
    from mlc.target import resolve

    if job.spec.seconds <= 0:
        raise UsageError("tvm-metaschedule needs a tuning budget, got none; give --seconds S")
    model = load_model(_needs_onnx(job))
    native = resolve("native", job.threads)
    with tempfile.TemporaryDirectory(prefix="mlc-metaschedule-") as folder:
        mod = metaschedule.tuned(UnrollRecurrent(model.mod), native, Path(folder), job.spec.seconds)
        with native.tvm as target:
            return _tvm_engine(tvm.compile(mod, target=target), model.inputs, job.threads)


def _tvm_engine(executable: Any, inputs: Sequence[TensorSpec], threads: int) -> Engine:
    import tvm
    from tvm import relax

    from mlc.threads import configure

    configure(threads)
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]

    def bind(feeds: Mapping[str, np.ndarray]) -> Call:
        arrays = [feeds[spec.name] for spec in inputs]

        def call() -> list[np.ndarray]:
            result = main(*[tvm.runtime.tensor(a) for a in arrays])
            return [t.numpy() for t in ([result] if isinstance(result, tvm.runtime.Tensor) else result)]

        return call

    return Engine(tuple(inputs), bind)


def _mlc(job: Job) -> Engine:
    from mlc.artifact import load

    if not job.spec.artifact:
        raise ArtifactError(f"{job.spec.name} needs a compiled module, got none; run `mlc compile` first")
    executable = load(job.spec.artifact)
    inputs = tuple(executable.inputs)

    def bind(feeds: Mapping[str, np.ndarray]) -> Call:
        arrays = [feeds[spec.name] for spec in inputs]
        return lambda: list(executable(*arrays))

    return Engine(inputs, bind)


#: engine name -> adapter, in the order that help texts list them
ENGINES: dict[str, Callable[[Job], Engine]] = {
    "mlc": _mlc,
    "mlc-untuned": _mlc,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "torch-eager": partial(_torch, compiled=False),
    "torch-compile": partial(_torch, compiled=True),
    "tvm": _tvm,
    "tvm-metaschedule": _tvm_metaschedule,
}
_GROUPS = {"torch": ("torch-eager", "torch-compile")}


def onnx_inputs(path: str) -> tuple[TensorSpec, ...]:
    """Inputs of the ONNX file, weights not read; symbolic dimensions count as one."""
    import onnx
    from onnx import helper

    graph = onnx.load(path, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    return tuple(
        TensorSpec(
            value.name,
            tuple(int(d.dim_value) if d.dim_value > 0 else 1 for d in value.type.tensor_type.shape.dim),
            str(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)),
        )
        for value in graph.input if value.name not in weights
    )


def program_inputs(program: Any) -> tuple[TensorSpec, ...]:
    """Inputs of an exported PyTorch program."""
    wanted = list(program.graph_signature.user_inputs)
    metas = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    return tuple(
        TensorSpec(name, tuple(int(d) for d in metas[name].shape), str(metas[name].dtype).removeprefix("torch."))
        for name in wanted
    )
