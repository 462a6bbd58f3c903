"""Tokens per second of a LLaMA-like decoder of a billion parameters with weights of 4 bits, beside its peers.

``make bench-decoder``, or ``python -m tests.performance.decoder --engines mlc,onnxruntime,openvino``. The model is made
here, as exporters for onnxruntime write one (MatMulNBits in blocks of 32, GroupQueryAttention with rotary positions),
with the sizes of TinyLlama and random weights. Every engine has a process of its own and the same threads; each in turn
takes a prompt anew and then generates tokens, each of which is the likeliest after those before it. The weights are
more than any cache holds, so that a token takes at least the time of reading them: the table gives that rate, too.
llama.cpp joins where its Python package is installed (:mod:`tests.performance.llama_cpp_engine`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.performance import llama_cpp_engine
from tests.performance.results import publish, write_whole
from tests.performance.table import ROOT

if TYPE_CHECKING:
    import onnx

ENGINES = ("mlc", "onnxruntime", "openvino", *(["llama.cpp"] if llama_cpp_engine.installed() else []))
_BLOCK = 32
#: what the table says of a level of MatMulNBits
_ALLOWED = {0: "", 4: "The model allows activations of 8 bits in its products, which OpenVINO makes no use of."}


@dataclass(frozen=True)
class Sizes:
    """Of a decoder; the defaults are TinyLlama's, 1.1 billion parameters."""

    layers: int = 22
    width: int = 2048
    inner: int = 5632
    heads: int = 32
    groups: int = 4
    vocabulary: int = 32000
    capacity: int = 512

    @property
    def head(self) -> int:
        return self.width // self.heads


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model, time the engines and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated (default: all)")
    parser.add_argument("--layers", type=int, default=Sizes.layers, help="fewer of them, to try (default: 22)")
    parser.add_argument("--accuracy-level", type=int, default=4, choices=sorted(_ALLOWED),
                        help="what MatMulNBits allows onnxruntime: 0 as is, 4 activations of 8 bits (default: 4)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt (default: 32)")
    parser.add_argument("--tokens", type=int, default=16, help="that each turn generates (default: 16)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine (default: 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--build", action="store_true", help="make and build what is missing and time nothing")
    parser.add_argument("--publish", action="store_true", help="put the table into results.md")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-decoder")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    path = args.output / f"decoder{args.layers}-{args.accuracy_level}.onnx"
    if args.serve:
        return _serve(_ENGINES[args.serve](path, args.threads), args.prompt, args.tokens)
    args.output.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        import onnx

        onnx.save(decoder(Sizes(layers=args.layers), args.accuracy_level), path)
    if args.build:
        _ENGINES["mlc"](path, args.threads)
        return 0
    turns = measured(args.engines.split(","), sys.argv[1:] if argv is None else argv, args.rounds)
    text = markdown(turns, weight_bytes(Sizes(layers=args.layers)), args)
    write_whole(args.output / "table.md", text)
    if args.publish:
        publish("decoder", text)
    print(text)
    return 0


def decoder(sizes: Sizes, accuracy: int = 0) -> onnx.ModelProto:
    """The model: int64 ``input_ids``, ``attention_mask`` and past keys and values to logits and present ones."""
    return _Decoder(sizes, accuracy).model()


def weight_bytes(sizes: Sizes) -> int:
    """What a token reads: half a byte for each weight of a product, four for each block's scale."""
    kv, w = sizes.groups * sizes.head, sizes.width
    weights = sizes.layers * (2 * w * w + 2 * w * kv + 3 * w * sizes.inner) + w * sizes.vocabulary
    return weights // 2 + weights // _BLOCK * 4


class _Decoder:
    """A decoder under construction."""

    def __init__(self, sizes: Sizes, accuracy: int) -> None:
        self._sizes, self._accuracy, self._rng = sizes, accuracy, np.random.default_rng(0)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        from onnx import TensorProto, helper

        s, value = self._sizes, helper.make_tensor_value_info
        names = [f"{layer}.{side}" for layer in range(s.layers) for side in ("key", "value")]
        self._tokens()
        shape = ["batch", s.groups, "past", s.head], ["batch", s.groups, "total", s.head]
        graph = helper.make_graph(
            self._nodes, "decoder",
            [value("input_ids", TensorProto.INT64, ["batch", "sequence"]),
             value("attention_mask", TensorProto.INT64, ["batch", "total"]),
             *(value(f"past_key_values.{n}", TensorProto.FLOAT, shape[0]) for n in names)],
            [value("logits", TensorProto.FLOAT, ["batch", "sequence", s.vocabulary]),
             *(value(f"present.{n}", TensorProto.FLOAT, shape[1]) for n in names)], self._weights)
        domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=domains, ir_version=10)

    def _constant(self, values: Any) -> str:
        from onnx import numpy_helper

        self._weights.append(numpy_helper.from_array(np.asarray(values), f"w{len(self._weights)}"))
        return str(self._weights[-1].name)

    def _add(self, operator: str, *inputs: str, out: Sequence[str] = (), **attributes: Any) -> str:
        from onnx import helper

        names = list(out) or [f"v{len(self._nodes)}"]
        self._nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names[0]

    def _dense(self, x: str, depth: int, columns: int, out: Sequence[str] = ()) -> str:
        blocks = depth // _BLOCK
        words = self._rng.integers(0, 256, (columns, blocks, _BLOCK // 2), np.uint8)
        scales = self._rng.uniform(0.5, 1.5, columns * blocks) / (4.6 * depth**0.5)  # results of variance one
        level = {"accuracy_level": self._accuracy} if self._accuracy else {}
        return self._add("MatMulNBits", x, self._constant(words), self._constant(scales.astype(np.float32)), out=out,
                         domain="com.microsoft", K=depth, N=columns, bits=4, block_size=_BLOCK, **level)

    def _gamma(self) -> str:
        return self._constant(self._rng.uniform(0.5, 1.5, self._sizes.width).astype(np.float32))

    def _tokens(self) -> None:
        s = self._sizes
        table = self._rng.standard_normal((s.vocabulary, s.width), np.float32)
        x = self._add("Gather", self._constant(table), "input_ids")
        past = self._lengths()
        y = self._add("SimplifiedLayerNormalization", x, self._gamma(), axis=-1, epsilon=1e-5)
        for layer in range(s.layers):
            x, y = self._skipped(x, self._attended(y, layer, past), f"attended{layer}")
            x, y = self._skipped(x, self._inner(y), f"inner{layer}")
        self._dense(y, s.width, s.vocabulary, ["logits"])

    def _lengths(self) -> tuple[str, ...]:
        """Of the past and in all, and the tables of rotary positions."""
        from onnx import TensorProto

        s, one = self._sizes, self._constant(np.array(1, np.int64))
        count = self._add("Sub", self._add("ReduceSum", "attention_mask", self._constant(np.array([1], np.int64)),
                                           keepdims=0), one)
        total = self._add("Gather", self._add("Shape", "attention_mask"), one, axis=0)
        turn = np.outer(np.arange(s.capacity), 1e4 ** -(np.arange(s.head // 2) / (s.head // 2)))
        tables = (self._constant(f(turn).astype(np.float32)) for f in (np.cos, np.sin))
        return (self._add("Cast", count, to=TensorProto.INT32), self._add("Cast", total, to=TensorProto.INT32), *tables)

    def _attended(self, y: str, layer: int, past: Sequence[str]) -> str:
        s = self._sizes
        parts = [self._dense(y, s.width, count * s.head) for count in (s.heads, s.groups, s.groups)]
        sides = [f"{layer}.{side}" for side in ("key", "value")]
        seen = self._add(
            "GroupQueryAttention", *parts, *(f"past_key_values.{n}" for n in sides), *past,
            out=[f"seen{layer}", *(f"present.{n}" for n in sides)], domain="com.microsoft", num_heads=s.heads,
            kv_num_heads=s.groups, do_rotary=1)
        return self._dense(seen, s.width, s.width)

    def _inner(self, y: str) -> str:
        s = self._sizes
        gate, up = (self._dense(y, s.width, s.inner) for _ in range(2))
        gate = self._add("Mul", gate, self._add("Sigmoid", gate))
        return self._dense(self._add("Mul", gate, up), s.inner, s.width)

    def _skipped(self, x: str, y: str, name: str) -> tuple[str, str]:
        """The sum, and that normalised."""
        self._add("SkipSimplifiedLayerNormalization", x, y, self._gamma(), out=[name, "", "", f"{name}.sum"],
                  domain="com.microsoft", epsilon=1e-5)
        return f"{name}.sum", name


#: token ids ``[1, n]`` after those before them --> logits of the last one; None forgets them all
Step = Callable[["np.ndarray | None"], np.ndarray]


def _mlc(path: Path, threads: int) -> Step:
    import mlc

    built = path.with_suffix(f".{threads}.so")
    if not built.exists():
        mlc.Generator(path, capacity=Sizes.capacity, threads=threads, log=False).save(built)
    generator = mlc.Generator(built)

    def step(ids: np.ndarray | None) -> np.ndarray:
        if ids is None:
            generator.reset()
            return np.empty(0)
        return np.asarray(generator.logits(ids))[0, -1]

    return step


def _empty(names: Sequence[str]) -> dict[str, np.ndarray]:
    s = Sizes()
    return {name: np.zeros((1, s.groups, 0, s.head), np.float32) for name in names if name.startswith("past")}


def _onnxruntime(path: Path, threads: int) -> Step:
    """Keys and values stay where the session has put them."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names, outputs = ([i.name for i in each] for each in (session.get_inputs(), session.get_outputs()))
    state: dict[str, Any] = {}
    made = ort.OrtValue.ortvalue_from_numpy

    def step(ids: np.ndarray | None) -> np.ndarray:
        if ids is None:
            state.update({n: made(a) for n, a in _empty(names).items()}, seen=0)
            return np.empty(0)
        state["seen"] += ids.shape[1]
        feeds = {"input_ids": made(ids), "attention_mask": made(np.ones((1, state["seen"]), np.int64))}
        logits, *present = session.run_with_ort_values(outputs, {**feeds, **{n: state[n] for n in names[2:]}})
        state.update(zip(names[2:], present, strict=True))
        return np.asarray(logits.numpy())[0, -1]

    return step


def _openvino(path: Path, threads: int) -> Step:
    """At its own default precision; keys and values stay tensors of its own."""
    import openvino as ov

    core = ov.Core()
    compiled = core.compile_model(str(path), "CPU", {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1})
    names = [port.get_any_name() for port in compiled.inputs]
    requests = [compiled.create_infer_request() for _ in range(2)]  # one reads what the other has made
    state: dict[str, Any] = {}

    def step(ids: np.ndarray | None) -> np.ndarray:
        if ids is None:
            state.update({n: ov.Tensor(a) for n, a in _empty(names).items()}, seen=0)
            return np.empty(0)
        state["seen"] += ids.shape[1]
        request = requests[0]
        requests.reverse()
        request.set_tensor("input_ids", ov.Tensor(ids))
        request.set_tensor("attention_mask", ov.Tensor(np.ones((1, state["seen"]), np.int64)))
        for name in names:
            if name.startswith("past"):
                request.set_tensor(name, state[name])
        request.infer()
        for name in names:
            if name.startswith("past"):
                state[name] = request.get_tensor(name.replace("past_key_values", "present"))
        return np.array(request.get_tensor("logits").data)[0, -1]

    return step


def _llama_cpp(path: Path, threads: int) -> Step:
    return llama_cpp_engine.step(path, threads, Sizes.capacity)


_ENGINES: dict[str, Callable[[Path, int], Step]] = {
    "mlc": _mlc, "onnxruntime": _onnxruntime, "openvino": _openvino, "llama.cpp": _llama_cpp,
}


def _serve(step: Step, prompt: int, tokens: int) -> int:
    """For each line of input, one of output: seconds of the prompt and of each token, and the prompt's logits."""
    ids = np.random.default_rng(1).integers(0, Sizes.vocabulary, (1, prompt))
    print("ready", flush=True)
    for _ in sys.stdin:
        step(None)
        start = time.perf_counter()
        logits = first = step(ids)
        times = [time.perf_counter() - start]
        for _ in range(tokens):
            start = time.perf_counter()
            logits = step(np.array([[logits.argmax()]]))
            times.append(time.perf_counter() - start)
        print(json.dumps({"seconds": times, "logits": first.astype(float).tolist()}), flush=True)
    return 0


def measured(engines: Sequence[str], argv: Sequence[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """The answers of every engine's turns, the first of which is not counted; an engine that fails has none."""
    from mlc.bench.engines import environment

    command = [sys.executable, "-m", "tests.performance.decoder", *argv]
    threads = argv[argv.index("--threads") + 1] if "--threads" in argv else "2"
    running = {name: subprocess.Popen([*command, "--serve", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      text=True, cwd=ROOT, env={**os.environ, **environment(int(threads))})
               for name in engines}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    waiting = {name: process for name, process in running.items() if _line(process) == "ready\n"}
    for turn in range(rounds + 1):
        for name, process in list(waiting.items()):
            answer = _asked(process)
            if not answer:
                del waiting[name]
            elif turn:
                turns[name].append(json.loads(answer))
    for process in running.values():
        process.communicate()
    return turns


def _asked(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return _line(process)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def markdown(turns: dict[str, list[dict[str, Any]]], size: int, args: argparse.Namespace) -> str:
    """The table, and what it is."""
    from mlc.cpu import machine_id

    lines = ["| engine | tokens/s | ms a token | GB/s of weights | prompt, ms | error |", "|---" * 6 + "|"]
    lines += _rows(turns, size)
    return "\n".join([*lines, "", (
        f"{args.layers} layers, {size / 1e6:.0f} MB of weights and scales; {args.tokens} tokens after a prompt of "
        f"{args.prompt}, {args.rounds} turns each, medians; {machine_id()}, {args.threads} threads. The error is that "
        "of the prompt's logits, relative to the largest, against the first engine. " + _ALLOWED[args.accuracy_level])
    ]).rstrip() + "\n"


def _rows(turns: dict[str, list[dict[str, Any]]], size: int) -> Iterator[str]:
    reference: np.ndarray | None = None
    for name, answers in turns.items():
        if not answers:
            yield f"| {name} | failed | | | | |"
            continue
        token = statistics.median(second for each in answers for second in each["seconds"][1:])
        prompt = statistics.median(each["seconds"][0] for each in answers)
        logits = np.array(answers[0]["logits"])
        reference = logits if reference is None else reference
        error = np.abs(logits - reference).max() / np.abs(reference).max()
        yield (f"| {name} | {1 / token:.1f} | {1e3 * token:.1f} | {size / token / 1e9:.1f} | {1e3 * prompt:.0f} | "
               f"{error:.0e} |")


if __name__ == "__main__":
    sys.exit(main())
