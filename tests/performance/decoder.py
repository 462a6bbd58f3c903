"""Tokens per second of decoders, beside their peers: like LLaMA with a billion parameters, of 4 bits or float32; GPT-2.

``make bench-decoder``, or ``python -m tests.performance.decoder --model gpt2 --prompt 800``. The models are made here
(:mod:`tests.performance.decoders`). Every engine has a process of its own and the same threads; each in turn takes a
prompt anew and then generates tokens, each of which is the likeliest after those before it. The weights are more than
any cache holds, so that a token takes at least the time of reading them and the keys and values before it: the table
gives that rate, and in the row ``reading`` what this machine reads while it does nothing else, measured in turn with
the engines. ``mlc-long`` is mlc with a cache eight times as long, which is not used: it must take as long.
llama.cpp joins the decoder of 4 bits where its Python package is installed
(:mod:`tests.performance.llama_cpp_engine`).
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.performance import llama_cpp_engine
from tests.performance.decoders import DECODERS, Sizes, eager, save, sizes_of, state_bytes, weight_bytes
from tests.performance.results import publish, write_whole
from tests.performance.table import ROOT

#: what is timed of each decoder unless something else is asked for
_DEFAULTS = {
    "llama-4bit": "mlc,onnxruntime,openvino" + (",llama.cpp" if llama_cpp_engine.installed() else ""),
    "llama": "mlc,onnxruntime,torch,reading", "gpt2": "mlc,mlc-long,onnxruntime,torch,reading",
}
#: sections of results.md
_SECTIONS = {"llama-4bit": "decoder", "llama": "decoder-llama", "gpt2": "decoder-gpt2"}
#: what the table says of a level of MatMulNBits
_ALLOWED = {0: "", 4: "The model allows activations of 8 bits in its products, which OpenVINO makes no use of."}
#: how much longer the cache of ``mlc-long`` is
_LONGER = 8
#: bytes that each core reads in the row ``reading``: more than the last cache holds
_READ = 256 << 20


@dataclass(frozen=True)
class Run:
    """A decoder in a file, and what is done with it."""

    model: str
    sizes: Sizes
    path: Path
    threads: int
    prompt: int
    tokens: int
    target: str = "native"

    @property
    def token_bytes(self) -> int:
        """What a token reads, of weights and of the keys and values before it."""
        return weight_bytes(self.sizes, self.model) + state_bytes(self.sizes, self.prompt + self.tokens // 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model, time the engines and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-4bit", choices=DECODERS, help="(default: llama-4bit)")
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(_ENGINES)}, reading (default: by model)")
    parser.add_argument("--layers", type=int, help="fewer of them, to try (default: 22, of gpt2 12)")
    parser.add_argument("--capacity", type=int, default=Sizes.capacity, help="tokens that the cache has room for")
    parser.add_argument("--accuracy-level", type=int, default=4, choices=sorted(_ALLOWED),
                        help="what MatMulNBits allows onnxruntime: 0 as is, 4 activations of 8 bits (default: 4)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt (default: 32)")
    parser.add_argument("--tokens", type=int, default=16, help="that each turn generates (default: 16)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine (default: 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", default="native", help="what mlc builds for; its peers run as they come")
    parser.add_argument("--build", action="store_true", help="make and build what is missing and time nothing")
    parser.add_argument("--publish", action="store_true", help="put the table into results.md")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-decoder")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.prompt + args.tokens > args.capacity:
        parser.error(f"--capacity must be at least --prompt and --tokens, got {args.capacity} for {args.prompt} and "
                     f"{args.tokens}")
    sizes, level = sizes_of(args.model, args.layers, args.capacity), args.accuracy_level
    named = f"{args.model}-{sizes.layers}-{sizes.capacity}{f'-{level}' if args.model == 'llama-4bit' else ''}"
    run = Run(args.model, sizes, args.output / f"{named}.onnx", args.threads, args.prompt, args.tokens,
              args.target)
    engines = (args.engines or _DEFAULTS[args.model]).split(",")
    if args.serve:
        return _read(run) if args.serve == "reading" else _serve(_ENGINES[args.serve](run), run)
    args.output.mkdir(parents=True, exist_ok=True)
    if not run.path.exists():
        save(args.model, sizes, run.path, level)
    if args.build:
        for name in engines:
            if name.startswith("mlc"):
                _ENGINES[name](run)
        return 0
    turns = measured(engines, sys.argv[1:] if argv is None else argv, args.rounds, args.threads)
    text = markdown(turns, run, args.rounds, _ALLOWED[level] if args.model == "llama-4bit" else "")
    write_whole(args.output / f"{args.model}.md", text)
    if args.publish:
        publish(_SECTIONS[args.model], text)
    print(text)
    return 0


#: token ids ``[1, n]`` after those before them --> logits of the last one; None forgets them all
Step = Callable[["np.ndarray | None"], np.ndarray]


def _mlc(run: Run) -> Step:
    import mlc

    target = "" if run.target == "native" else f".{run.target.replace(':', '_').split()[0]}"
    built = run.path.with_suffix(f".{run.sizes.capacity}.{run.threads}{target}.so")
    if not built.exists():
        mlc.Generator(run.path, capacity=run.sizes.capacity, target=run.target, threads=run.threads,
                      log=False).save(built)
    generator = mlc.Generator(built)

    def step(ids: np.ndarray | None) -> np.ndarray:
        if ids is None:
            generator.reset()
            return np.empty(0)
        return np.asarray(generator.logits(ids))[0, -1]

    return step


def _mlc_long(run: Run) -> Step:
    return _mlc(replace(run, sizes=replace(run.sizes, capacity=_LONGER * run.sizes.capacity)))


def _torch(run: Run) -> Step:
    import torch
    from transformers import DynamicCache

    torch.set_num_threads(run.threads)
    module = eager(run.model, run.sizes, run.path)
    state: dict[str, Any] = {}

    def step(ids: np.ndarray | None) -> np.ndarray:
        if ids is None:
            state["past"] = DynamicCache()
            return np.empty(0)
        with torch.inference_mode():
            made = module(torch.from_numpy(ids), past_key_values=state["past"], use_cache=True)
        return np.asarray(made.logits[0, -1].numpy())

    return step


def _empty(names: Sequence[str], s: Sizes) -> dict[str, np.ndarray]:
    return {name: np.zeros((1, s.groups, 0, s.head), np.float32) for name in names if name.startswith("past")}


def _given(ids: np.ndarray, seen: int, names: Sequence[str]) -> dict[str, np.ndarray]:
    """What a model takes beside keys and values, of ``ids`` the last ones of ``seen``."""
    made = {"input_ids": ids, "attention_mask": np.ones((1, seen), np.int64),
            "position_ids": np.arange(seen - ids.shape[1], seen)[None]}
    return {name: array for name, array in made.items() if name in names}


def _onnxruntime(run: Run) -> Step:
    """Keys and values stay where the session has put them."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = run.threads
    session = ort.InferenceSession(str(run.path), options, providers=["CPUExecutionProvider"])
    names, outputs = ([i.name for i in each] for each in (session.get_inputs(), session.get_outputs()))
    pasts = [name for name in names if name.startswith("past")]
    state: dict[str, Any] = {}
    made = ort.OrtValue.ortvalue_from_numpy

    def step(ids: np.ndarray | None) -> np.ndarray:
        if ids is None:
            state.update({n: made(a) for n, a in _empty(names, run.sizes).items()}, seen=0)
            return np.empty(0)
        state["seen"] += ids.shape[1]
        feeds = {name: made(array) for name, array in _given(ids, state["seen"], names).items()}
        logits, *present = session.run_with_ort_values(outputs, {**feeds, **{n: state[n] for n in pasts}})
        state.update(zip(pasts, present, strict=True))
        return np.asarray(logits.numpy())[0, -1]

    return step


def _openvino(run: Run) -> Step:
    """At its own default precision; keys and values stay tensors of its own."""
    import openvino as ov

    core = ov.Core()
    compiled = core.compile_model(str(run.path), "CPU", {"INFERENCE_NUM_THREADS": run.threads, "NUM_STREAMS": 1})
    names = [port.get_any_name() for port in compiled.inputs]
    requests = [compiled.create_infer_request() for _ in range(2)]  # one reads what the other has made
    state: dict[str, Any] = {}

    def step(ids: np.ndarray | None) -> np.ndarray:
        if ids is None:
            state.update({n: ov.Tensor(a) for n, a in _empty(names, run.sizes).items()}, seen=0)
            return np.empty(0)
        state["seen"] += ids.shape[1]
        request = requests[0]
        requests.reverse()
        for name, array in _given(ids, state["seen"], names).items():
            request.set_tensor(name, ov.Tensor(array))
        for name in names:
            if name.startswith("past"):
                request.set_tensor(name, state[name])
        request.infer()
        for name in names:
            if name.startswith("past"):
                state[name] = request.get_tensor(name.replace("past_key_values", "present"))
        return np.array(request.get_tensor("logits").data)[0, -1]

    return step


def _llama_cpp(run: Run) -> Step:
    return llama_cpp_engine.step(run.path, run.threads, run.sizes.capacity)


_ENGINES: dict[str, Callable[[Run], Step]] = {
    "mlc": _mlc, "mlc-long": _mlc_long, "onnxruntime": _onnxruntime, "openvino": _openvino, "torch": _torch,
    "llama.cpp": _llama_cpp}


def _read(run: Run) -> int:
    """For each line of input, one of output: seconds of reading what a token reads, at the rate of this moment."""
    from mlc import threads
    from mlc.measure.calibrate import Kernels
    from mlc.target import resolve

    threads.configure(run.threads)
    kernels = Kernels(resolve("native", run.threads))
    print("ready", flush=True)
    for _ in sys.stdin:
        rate, _confirmed = kernels.read(_READ, run.threads)
        print(json.dumps({"seconds": [0.0, run.token_bytes / rate], "logits": []}), flush=True)
    return 0


def _serve(step: Step, run: Run) -> int:
    """For each line of input, one of output: seconds of the prompt and of each token, and the prompt's logits."""
    ids = np.random.default_rng(1).integers(0, run.sizes.vocabulary, (1, run.prompt))
    print("ready", flush=True)
    for _ in sys.stdin:
        step(None)
        start = time.perf_counter()
        logits = first = step(ids)
        times = [time.perf_counter() - start]
        for _ in range(run.tokens):
            start = time.perf_counter()
            logits = step(np.array([[logits.argmax()]]))
            times.append(time.perf_counter() - start)
        print(json.dumps({"seconds": times, "logits": first.astype(float).tolist()}), flush=True)
    return 0


def measured(engines: Sequence[str], argv: Sequence[str], rounds: int, threads: int) -> dict[str, list[dict[str, Any]]]:
    """The answers of every engine's turns, the first of which is not counted; an engine that fails has none."""
    from mlc.bench.engines import environment

    command = [sys.executable, "-m", "tests.performance.decoder", *argv]
    running = {name: subprocess.Popen([*command, "--serve", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      text=True, cwd=ROOT, env={**os.environ, **environment(threads)})
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


def markdown(turns: dict[str, list[dict[str, Any]]], run: Run, rounds: int, allowed: str = "") -> str:
    """The table, and what it is."""
    from mlc.cpu import machine_id

    sizes = run.sizes
    lines = ["| engine | tokens/s | ms a token | GB/s | prompt, ms | error |", "|---" * 6 + "|", *_rows(turns, run)]
    said = [f"{run.model}, {sizes.layers} layers, {weight_bytes(sizes, run.model) / 1e6:.0f} MB of weights; "
            f"{run.tokens} tokens after a prompt of {run.prompt} in a cache of {sizes.capacity}, {rounds} turns each, "
            f"medians; {machine_id()}, {run.threads} threads. The error is that of the prompt's logits, relative to "
            "the largest, against the first engine."]
    times = {name: _token(answers) for name, answers in turns.items() if answers}
    if times.keys() >= {"mlc", "reading"}:
        said.append(f"A token of mlc's takes {times['mlc'] / times['reading']:.2f} times as long as reading alone.")
    return "\n".join([*lines, "", " ".join([*said, allowed]).rstrip()]) + "\n"


def _token(answers: Sequence[dict[str, Any]]) -> float:
    return statistics.median(second for each in answers for second in each["seconds"][1:])


def _rows(turns: dict[str, list[dict[str, Any]]], run: Run) -> Iterator[str]:
    reference: np.ndarray | None = None
    for name, answers in turns.items():
        if not answers:
            yield f"| {name} | failed | | | | |"
            continue
        token = _token(answers)
        row = f"| {name} | {1 / token:.1f} | {1e3 * token:.1f} | {run.token_bytes / token / 1e9:.1f} |"
        if name == "reading":
            yield f"{row} | |"
            continue
        prompt = statistics.median(each["seconds"][0] for each in answers)
        logits = np.array(answers[0]["logits"])
        reference = logits if reference is None else reference
        error = np.abs(logits - reference).max() / np.abs(reference).max()
        yield f"{row} {1e3 * prompt:.0f} | {error:.0e} |"


if __name__ == "__main__":
    sys.exit(main())
