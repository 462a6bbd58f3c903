"""Run by ``test_emulated_gpu.py`` in a process of its own: models on a GPU that is this machine's CPU. Prints what
happened as JSON."""
# ruff: noqa: E402 (the GPU is put in before anything loads TVM)

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlc.testing import cuda_device

FOLDER = Path(sys.argv[1])
cuda_device.install(FOLDER)

import numpy as np
import tvm_ffi
from tvm import relax, topi

from mlc.artifact import compile_module, load, runtime
from mlc.artifact.executable import Executable
from mlc.errors import MlcError
from mlc.target import resolve
from mlc.testing import programs

TARGET = resolve("cuda:sm_80")
GPU = tvm_ffi.device("cuda", 0)
Reference = Callable[..., Sequence[np.ndarray]]


def long_sum() -> programs.Program:
    """A product whose sum is long enough to be cut over blocks, its softmax, and each row's mean."""
    weight = np.random.default_rng(4).standard_normal((1024, 24), dtype=np.float32) / 32

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        product = builder.emit_te(topi.matmul, params[0], relax.const(weight))
        return [builder.emit_te(topi.nn.softmax, product), builder.emit_te(
            lambda a: topi.sum(a, 1) * (1 / 24), product, primfunc_name_hint="row_means")]

    def reference(x: np.ndarray) -> list[np.ndarray]:
        product = x.astype("float64") @ weight
        powers = np.exp(product - product.max(1, keepdims=True))
        return [powers / powers.sum(1, keepdims=True), product.mean(1)]

    return programs.Program(programs.program({"x": ((6, 1024), "float32")}, body), reference)


def wide_between() -> programs.Program:
    """Little goes in and comes out, but a megabyte lies between its kernels."""
    weight = np.ones((4, 512), "float32")

    def body(builder: relax.BlockBuilder, params: list[relax.Var]) -> list[relax.Expr]:
        product = builder.emit_te(topi.matmul, params[0], relax.const(weight))
        return [builder.emit_te(topi.max, builder.emit_te(topi.nn.softmax, product), 1)]

    return programs.Program(programs.program({"x": ((512, 4), "float32")}, body), lambda x: [np.full(512, 1 / 512)])


PROGRAMS = {"dense": programs.dense, "results": programs.many_results, "scalars": programs.scalars,
            "constant": programs.constant_result, "twins": programs.twins, "long_sum": long_sum}


def arrays(exe: Executable, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(spec.shape) * 3).astype(spec.dtype) for spec in exe.inputs]


def error(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    differences = [np.abs(np.asarray(f, "float64") - w).max() for f, w in zip(found, wanted, strict=True)]
    return float(max(differences))


def counted(act: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    before = cuda_device.counts()
    result = act()
    return result, cuda_device.counts().since(before)._asdict()


def calls(name: str, program: programs.Program) -> dict[str, Any]:
    """Three calls of what was saved and loaded, each with arrays of its own."""
    compile_module(program.mod, TARGET).save(FOLDER / f"{name}.so")
    exe = load(FOLDER / f"{name}.so")
    found, kept = [], []
    for seed in range(3):
        given = arrays(exe, seed)
        kept.append((exe(*given) if seed else None, program.reference(*given)))
        results, counts = counted(lambda given=given: exe(*given))
        found.append({"error": error(results, program.reference(*given)), **counts})
    found[0]["later"] = max(error(results, wanted) for results, wanted in kept if results is not None)
    return {"calls": found, "functions": sum(f["calls"] for f in exe.metadata["functions"])}


class Producer:
    """A tensor of another library's on the GPU."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.streams = tensor, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        return self.tensor.__dlpack__()


def on_device() -> dict[str, Any]:
    """Tensors that are on the GPU go in and come out there."""
    case = programs.dense()
    exe = load(FOLDER / "dense.so")  # as `calls` left it
    (x,) = arrays(exe, 7)
    exe(x)
    copy = runtime.function("runtime.TVMTensorCopyFromTo")
    there, out = (runtime.empty_tensor((5, 24), "float32", GPU) for _ in range(2))
    copy(runtime.tensor_of(x), there)
    given = Producer(there)
    _, counts = counted(lambda: exe.run([given], [out]))
    back = runtime.empty_tensor((5, 24), "float32")
    copy(out, back)
    facts = {"error": error([runtime.array_of(back)], case.reference(x)), "streams": given.streams, **counts}
    flat = runtime.view(there, (24, 5), "float32")
    facts["refused"] = [refusal(lambda: exe(flat)), refusal(lambda: exe.run([there], [there]))]
    host = exe.empty_outputs()
    _, into = counted(lambda: exe.run([x], host))
    facts |= {"host": error(host, case.reference(x)), "host_pageable": into["pageable"]}
    facts["profiled"] = sorted(exe.profile(x, repeats=2)) == sorted(f["symbol"] for f in exe.metadata["functions"])
    return facts


def streams() -> dict[str, Any]:
    """Which stream each thing is done on, and in which order of streams a call gives what it should."""
    case = programs.dense()
    exe = load(FOLDER / "dense.so")  # as `calls` left it
    copy = runtime.function("runtime.TVMTensorCopyFromTo")
    given = [arrays(exe, seed)[0] for seed in (1, 2, 3, 4)]
    there = [runtime.empty_tensor((5, 24), "float32", GPU) for _ in given]
    out = [runtime.empty_tensor((5, 24), "float32", GPU) for _ in given]
    for array, tensor in zip(given, there, strict=True):
        copy(runtime.tensor_of(array), tensor)
    GPU.sync()
    exe(given[0])  # captures the graph
    cuda_device.journal()
    facts: dict[str, Any] = {}

    def of(number: int) -> float:
        back = runtime.empty_tensor((5, 24), "float32")
        copy(out[number], back)
        return error([runtime.array_of(back)], case.reference(given[number]))

    producer = Producer(there[0])
    exe.run([producer], [out[0]], stream=71)
    facts["asked_of_producer"], facts["named"] = producer.streams, cuda_device.journal()
    facts["before_it_is_awaited"] = of(0)
    cuda_device.journal()
    for number, stream in enumerate((72, 73, 73, 74)):
        exe.run([there[number]], [out[number]], stream=stream)
    facts["several"] = cuda_device.journal()
    GPU.sync(74)
    facts["after"] = [of(number) for number in range(4)]
    cuda_device.journal()
    with tvm_ffi.use_raw_stream(GPU, 75):
        facts["results_here"] = error(exe(there[0]), case.reference(given[0]))
        facts["current"] = cuda_device.journal()
        facts["arrays_here"] = error(exe(given[1]), case.reference(given[1]))
        facts["current_of_arrays"] = cuda_device.journal()
    exe.run([there[2]], [out[2]])
    facts["nobody_names_one"], facts["default"] = of(2), cuda_device.journal()
    exe.run([there[0]], [out[0]], stream=76)
    mixed = exe.empty_outputs()
    exe.run([given[3]], mixed, stream=77)
    facts["mixed"], facts["into_this_machine"] = error(mixed, case.reference(given[3])), cuda_device.journal()
    facts["torch"] = torch_stream(exe, there[0], out[0])
    exe.profile(given[0], repeats=1)
    with tvm_ffi.use_raw_stream(GPU, 78):
        cuda_device.journal()
        exe.profile(given[0], repeats=1)
    facts["no_graph"] = [*dict.fromkeys(cuda_device.journal())]
    facts["refused"] = [refusal(lambda bad=bad: exe.run([there[0]], [out[0]], stream=bad)) for bad in ("a", -1, True)]
    return facts


def torch_stream(exe: Executable, x: Any, y: Any) -> Any:
    """Where a call runs whose input is PyTorch's, which is no more than its streams here."""
    class Tensor(Producer):
        is_cuda, requires_grad = True, False

    torch = types.ModuleType("torch")
    torch.Tensor = Tensor
    torch.cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=79))
    cuda_device.journal()
    kept = sys.modules.get("torch")
    sys.modules["torch"] = torch
    try:
        exe.run([Tensor(x)], [y])
    finally:
        del sys.modules["torch"]
        if kept is not None:
            sys.modules["torch"] = kept
    return cuda_device.journal()


def without_the_event() -> list[float]:
    """What two calls on two streams give where nothing puts them in order."""
    from mlc.artifact import streams as module

    case, exe = programs.dense(), load(FOLDER / "dense.so")
    given = [arrays(exe, seed)[0] for seed in (1, 2)]
    there, out = ([runtime.empty_tensor((5, 24), "float32", GPU) for _ in given] for _ in range(2))
    copy = runtime.function("runtime.TVMTensorCopyFromTo")
    for array, tensor in zip(given, there, strict=True):
        copy(runtime.tensor_of(array), tensor)
    GPU.sync()
    exe(given[0])
    kept, module.Event.hold_back = module.Event.hold_back, lambda self, stream: None
    try:
        for number, stream in enumerate((81, 82)):
            exe.run([there[number]], [out[number]], stream=stream)
        GPU.sync(82)
        GPU.sync(81)
    finally:
        module.Event.hold_back = kept
    errors = []
    for array, tensor in zip(given, out, strict=True):
        back = runtime.empty_tensor((5, 24), "float32")
        copy(tensor, back)
        errors.append(error([runtime.array_of(back)], case.reference(array)))
    return errors


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except MlcError as reason:
        return str(reason)
    return ""


def without_memory() -> list[str]:
    """There is no room for weights, then none for inputs, then none for what lies between kernels."""
    def start(name: str) -> None:
        exe = load(FOLDER / f"{name}.so")
        exe(*arrays(exe, 0))

    compile_module(wide_between().mod, TARGET).save(FOLDER / "wide_between.so")
    reasons = []
    for size, name in ((1 << 10, "long_sum"), (100_000, "long_sum"), (100_000, "wide_between")):  # as `calls` left it
        cuda_device.limit_memory(cuda_device.counts().held + size)
        reasons.append(refusal(lambda name=name: start(name)))
    return reasons


def transformer() -> dict[str, Any]:
    """BERT with two layers, exact and on tensor cores, beside onnxruntime: its second call."""
    import onnxruntime

    import mlc
    from mlc.networks.models import bert_tiny

    model = bert_tiny()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng, facts = np.random.default_rng(8), {}
    for precision in ("f32", "f16"):
        exe = mlc.compile(model, target=TARGET, log=False, precision=precision)
        for _ in range(2):
            given = {spec.name: rng.integers(0, 200 if spec.name == "input_ids" else 2, spec.shape)
                     for spec in exe.inputs}
            given["attention_mask"][:, 0] = 1
            found, counts = counted(lambda exe=exe, given=given: exe(**given))
        spaces = sorted({f["space"] for f in exe.metadata["functions"]})
        facts[precision] = {"error": error(found, session.run(None, given)), "spaces": spaces, **counts}
    return facts


def decoder() -> dict[str, Any]:
    """A token of a decoder like LLaMA, with heads that share keys, behind many others, exact and on tensor cores,
    beside onnxruntime: its second call."""
    import onnxruntime

    import mlc
    from mlc.frontend import onnx_past

    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.performance import decoders

    past = 500
    sizes = decoders.Sizes(layers=2, width=64, inner=96, heads=4, groups=2, vocabulary=50, capacity=past + 1)
    model = onnx_past.decoder(decoders.decoder(sizes, None), 1, past + 1, "decoder").model
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = {spec.name: {"input_ids": (1, 1), "attention_mask": (1, past + 1)}.get(spec.name, (1, 2, past, 16))
              for spec in session.get_inputs()}
    rng, facts = np.random.default_rng(9), {}
    for precision in ("f32", "f16"):
        exe = mlc.compile(model, target=TARGET, log=False, precision=precision, shapes=shapes)
        for _ in range(2):
            given = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
            given |= {"input_ids": rng.integers(0, 50, (1, 1)), "attention_mask": np.ones((1, past + 1), "int64")}
            found, counts = counted(lambda exe=exe, given=given: exe(**given))
        attentions = [f for f in exe.metadata["functions"] if f["space"].startswith("cuda.attention")]
        facts[precision] = {"error": error(found, session.run(None, given)), **counts,
                            "splits": [f["decisions"].get("splits", 1) for f in attentions]}
    return facts


def free_sizes() -> dict[str, Any]:
    """A transformer of a free number of texts of a free length, and one that goes on behind none or some tokens, each
    compiled once, beside onnxruntime."""
    import onnxruntime

    import mlc
    from mlc.networks.models import bert_base
    from mlc.shapes import Range

    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.performance import decoders

    rng, facts = np.random.default_rng(10), {}
    few = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
           "vocab_size": 200, "initializer_range": 0.125}
    texts = bert_base(free=True, **few)
    sizes = decoders.Sizes(layers=1, width=64, inner=96, heads=4, groups=2, vocabulary=50, capacity=64)
    tokens = decoders.decoder(sizes, None)

    def compared(model: Any, ranges: dict[str, Any], calls: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        mlc.compile(model, target=TARGET, log=False, precision="f16", shapes=ranges).save(FOLDER / "free.so")
        exe = load(FOLDER / "free.so")
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        errors = [error(exe(**given), session.run(None, given)) for given in calls]
        return {"errors": errors, "spaces": sorted({f["space"] for f in exe.metadata["functions"]}),
                "refused": refusal(lambda: exe(**{name: np.repeat(a, 7, 0) for name, a in calls[0].items()}))}

    def text(batch: int, length: int) -> dict[str, np.ndarray]:
        kept = (rng.random((batch, length)) < 0.8).astype("int64")
        kept[:, 0] = 1
        return {"input_ids": rng.integers(0, 200, (batch, length)), "attention_mask": kept,
                "token_type_ids": rng.integers(0, 2, (batch, length))}

    given = {name: (Range(1, 6), Range(1, 80)) for name in ("input_ids", "attention_mask", "token_type_ids")}
    facts["texts"] = compared(texts, given, [text(*each) for each in ((1, 1), (2, 33), (1, 80), (6, 16), (2, 33))])

    def token(length: int, past: int) -> dict[str, np.ndarray]:
        held = {spec.name: rng.standard_normal((1, 2, past, 16)).astype("float32") for spec in tokens.graph.input
                if "past" in spec.name}
        return {"input_ids": rng.integers(0, 50, (1, length)),
                "attention_mask": np.ones((1, past + length), "int64"), **held}

    kept = {spec.name: (1, 2, Range(0, 40), 16) for spec in tokens.graph.input if "past" in spec.name}
    facts["tokens"] = compared(tokens, {"input_ids": (1, Range(1, 24)), **kept},
                               [token(*each) for each in ((24, 0), (1, 24), (3, 7), (1, 40))])
    return facts


def generator() -> dict[str, Any]:
    """A decoder that generates: its state stays in the GPU's memory from call to call."""
    import onnxruntime

    import mlc

    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.performance import decoders

    sizes = decoders.Sizes(layers=2, width=64, inner=96, heads=4, groups=2, vocabulary=50, capacity=32)
    model, ids = decoders.decoder(sizes, None), np.random.default_rng(3).integers(0, 50, (1, 14))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    nothing = {spec.name: np.zeros((1, 2, 0, 16), "float32") for spec in session.get_inputs() if "past" in spec.name}
    wanted = session.run(["logits"], {"input_ids": ids, "attention_mask": np.ones_like(ids), **nothing})[0]
    mlc.Generator(model, capacity=32, target=TARGET, log=False).save(FOLDER / "generator.so")
    made, errors = mlc.Generator(FOLDER / "generator.so"), []
    for cuts in ((5, 1, 1, 4, 3), (14,), (1, 13)):
        made.reset()
        steps = np.split(ids, np.cumsum(cuts)[:-1], 1)
        errors.append(error([np.concatenate([made.logits(step) for step in steps], 1)], [wanted]))
    narrow = mlc.Generator(model, capacity=32, target=TARGET, log=False, precision="f16")
    in_float16 = error([np.concatenate([narrow.logits(part) for part in (ids[:, :9], ids[:, 9:])], 1)], [wanted])
    exe = made.executable
    here = {spec.name: runtime.array_of(runtime.empty_tensor((4, *spec.shape[1:]), spec.dtype))
            if spec.name in exe.states else np.ones([1, 4] if spec.name != exe.inputs[-1].name else [0], spec.dtype)
            for spec in exe.inputs}
    return {"errors": errors, "in_float16": in_float16, "refused": refusal(lambda: exe(**here))}


if __name__ == "__main__":
    facts: dict[str, Any] = {}
    alone = {"transformer": transformer, "decoder": decoder, "free_sizes": free_sizes, "generator": generator}
    if sys.argv[2:]:
        facts = alone[sys.argv[2]]()
    else:
        facts = {name: calls(name, make()) for name, make in PROGRAMS.items()}
        facts |= {"device": on_device(), "streams": streams(), "without_the_event": without_the_event(),
                  "without_memory": without_memory()}
    print(json.dumps(facts))
