"""Models with free sizes, one build for all of them, beside onnxruntime and OpenVINO, both dynamic too.

``make bench-dynamic``, or ``python -m tests.performance.bench_dynamic --models bert_base --sizes 1x128,4x33``. First
the build's outputs are compared with onnxruntime's at random sizes and at the ends of their ranges. Then it is timed
in turn with its peers and with builds of mlc's for one size each, at sizes that it was scheduled for and at others.
Nothing is tuned. Each build, comparison and size is kept in ``--output`` as soon as it is there and not done again.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.performance.decoders import Sizes as DecoderSizes
from tests.performance.decoders import sizes_of
from tests.performance.results import Results, publish, write_whole
from tests.performance.table import ROOT, cell, geometric_mean

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from mlc.artifact import Executable
    from mlc.shapes import Range

PEERS = {"onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
FREE, STATIC = "mlc", "mlc static"
#: how far outputs may be from onnxruntime's, as a part of the largest: of integers, a number that lies between two is
#: rounded to either, and twelve layers follow. onnxruntime with and without its rewrites is 0.09 apart
RTOL, RTOL_INTEGERS = 1e-4, 0.2
#: sizes at which outputs are compared, ends of the ranges included
COMPARED = 20

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Dynamic:
    """A model and what it is built for: ``shape`` of all inputs, and the ``sizes`` of the free dimensions that are
    timed, in their order.

    Where inputs differ, ``shape`` is the ranges alone, ``inputs`` are their shapes by what their names begin with, and
    ``names`` are those of the free dimensions in them, which may be added up: ``"1,past+length"``.
    """

    make: Callable[[], onnx.ModelProto]
    shape: str
    sizes: tuple[Sizes, ...]
    names: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    rtol: float = RTOL

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The least and the largest size of each free dimension."""
        return [(int(low), int(high)) for word in self.shape.split(",") if ".." in word
                for low, high in [word.split("..")]]

    def dims(self, sizes: Sizes, name: str = "") -> tuple[int, ...]:
        """The shape of the input ``name`` at ``sizes`` of the free dimensions."""
        if self.inputs:
            known = dict(zip(self.names, sizes, strict=True))
            return tuple(sum(known[part] if part in known else int(part) for part in word.split("+"))
                         for word in self._own(name))
        left = iter(sizes)
        return tuple(next(left) if ".." in word else int(word) for word in self.shape.split(","))

    def range(self, name: str) -> str | None:
        """The shape of the input ``name`` as a build for the range is given it; None for what follows from others."""
        if not self.inputs:
            return self.shape
        known = dict(zip(self.names, self.shape.split(","), strict=True))
        words = self._own(name)
        return None if any("+" in word for word in words) else ",".join(known.get(word, word) for word in words)

    def _own(self, name: str) -> list[str]:
        return next(shape for start, shape in self.inputs.items() if name.startswith(start)).split(",")

    def compared(self, count: int = COMPARED) -> list[Sizes]:
        """Where outputs are compared: each corner of the range, and random sizes."""
        rng, found = random.Random(0), dict.fromkeys(itertools.product(*self.ranges))
        most = 1
        for low, high in self.ranges:
            most *= high - low + 1
        while len(found) < min(count, most):
            found[tuple(rng.randint(low, high) for low, high in self.ranges)] = None
        return list(found)


def _bert(layers: int) -> onnx.ModelProto:
    from mlc.networks.models import bert_base

    return bert_base(free=True, num_hidden_layers=layers)


def _quantised_bert(how: str) -> onnx.ModelProto:
    """BERT as onnxruntime's tools make it smaller: ``qdq`` or ``dynamic``."""
    import onnx

    from tuning_logs.quantised import smaller

    with tempfile.TemporaryDirectory(prefix="mlc-quantised-") as folder:
        plain, small = (Path(folder) / f"{name}.onnx" for name in ("plain", "small"))
        onnx.save(_bert(12), plain)
        smaller(plain, small, how)
        return onnx.load(small)


def _resnet() -> onnx.ModelProto:
    """ResNet-50 with a free batch; its reshape to rows keeps the first axis."""
    from onnx import numpy_helper

    from mlc.networks.light import light_model

    model = light_model("resnet50")
    graph = model.graph
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    targets = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
    for weight in graph.initializer:
        if weight.name in targets:
            dims = numpy_helper.to_array(weight).copy()
            dims[0] = 0
            weight.CopyFrom(numpy_helper.from_array(dims, weight.name))
    return model


def _detector() -> onnx.ModelProto:
    from mlc.networks.models import detector

    return detector()


def _decoder(name: str, sizes: DecoderSizes) -> onnx.ModelProto:
    """A decoder whose inputs say what their sizes are to each other."""
    import onnx

    from mlc.frontend.onnx_past import decoder
    from tests.performance.decoders import save

    with tempfile.TemporaryDirectory(prefix="mlc-decoder-") as folder:
        path = Path(folder) / f"{name}.onnx"
        save(name, sizes, path)
        return decoder(onnx.load(path), 1, sizes.capacity, name).model


def _generating(name: str, sizes: DecoderSizes) -> Dynamic:
    """A decoder that is given its past and returns it with the tokens of the call: prompts, and tokens behind them."""
    past = f"1,{sizes.groups},past,{sizes.head}"
    return Dynamic(
        partial(_decoder, name, sizes), f"0..{_PAST},1..{_PROMPT}",
        ((0, 17), (0, 64), (100, 17), (1, 1), (100, 1), (500, 1), (1000, 1)), ("past", "length"),
        {"input_ids": "1,length", "attention_mask": "1,past+length", "position_ids": "1,length", "past": past})


#: tokens before a call and of a call, at most
_PAST, _PROMPT = 1024, 128
_CAPACITY = _PAST + _PROMPT
_TEXTS = ((1, 1), (1, 16), (4, 32), (1, 128), (8, 57), (2, 384))
MODELS = {
    "bert_base": Dynamic(partial(_bert, 12), "1..8,1..512", _TEXTS),
    "bert_base-qdq": Dynamic(partial(_quantised_bert, "qdq"), "1..8,1..512", _TEXTS, rtol=RTOL_INTEGERS),
    "bert_base-dynamic": Dynamic(partial(_quantised_bert, "dynamic"), "1..8,1..512", _TEXTS, rtol=RTOL_INTEGERS),
    "bert_2_layers": Dynamic(partial(_bert, 2), "1..8,1..512", _TEXTS),
    "resnet50": Dynamic(_resnet, "1..8,3,224,224", ((1,), (3,), (4,), (8,))),
    "detector": Dynamic(_detector, "1,3,128..512,128..512", ((128, 128), (224, 224), (256, 256), (301, 450),
                                                             (512, 512))),
    "gpt2": _generating("gpt2", sizes_of("gpt2", capacity=_CAPACITY)),
    "llama": _generating("llama", DecoderSizes(8, 1024, 2816, 16, 4, 32000, _CAPACITY)),
    "llama_2_layers": _generating("llama", DecoderSizes(2, 256, 704, 8, 2, 1000, _CAPACITY)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="bert_base,resnet50,detector,gpt2,llama", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--sizes", help="of the free dimensions, such as 1x128,4x33 (default: each model's own)")
    parser.add_argument("--no-static", action="store_true", help="without builds for one size each")
    parser.add_argument("--target", default="native", help="what mlc builds for; its peers run as they come")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each engine (default: 8)")
    parser.add_argument("--again", action="store_true", help="do what is there already, too")
    parser.add_argument("--build-only", action="store_true", help="build and compare, and time nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-dynamic")
    parser.add_argument("--publish", nargs="?", const="dynamic", choices=("dynamic", "dynamic-integers"),
                        help="put the table into a section of results.md")
    args = parser.parse_args(argv)
    sizes = [tuple(map(int, word.split("x"))) for word in args.sizes.split(",")] if args.sizes else None
    results = Results(args.output)
    for name in args.models.split(","):
        session = _Session(args.output, name, args.target, not args.no_static, args.rounds)
        for row in results.fill(session.steps(sizes, args.build_only), session.step, args.again):
            print(_said(row), file=sys.stderr, flush=True)
    text = markdown(results.rows)
    write_whole(args.output / "table.md", text)
    if args.publish:
        publish(args.publish, text)
    print(text)
    return 0


class _Session:
    """What is done with one model, in steps that are rows of the results: ``NAME build``, ``NAME right``,
    ``NAME build 1x128``, ``NAME 1x128``."""

    def __init__(self, folder: Path, name: str, target: str, static: bool, rounds: int) -> None:
        self.folder, self.name, self.known = folder, name, MODELS[name]
        self.target, self.static, self.rounds = target, static, rounds

    def steps(self, sizes: Sequence[Sizes] | None, build_only: bool) -> Iterator[str]:
        """The names of the steps, in order."""
        own = ["x".join(map(str, each)) for each in sizes or self.known.sizes]
        yield from (f"{self.name} {word}" for word in ("build", "right"))
        yield from (f"{self.name} build {each}" for each in own if self.static)
        yield from (f"{self.name} {each}" for each in own if not build_only)

    def step(self, title: str) -> dict[str, Any]:
        """Take one step; the row it makes."""
        words = title.removeprefix(f"{self.name} ").split()
        sizes = next((tuple(map(int, word.split("x"))) for word in words if word not in ("build", "right")), None)
        if words == ["right"]:
            done = self._right()
        elif words[0] == "build":
            done = {"seconds": self._built(sizes)}
        else:
            assert sizes is not None
            done = self._timed(sizes)
        return {**done, "model": title, "when": time.time()}

    @property
    def _path(self) -> Path:
        """The model's file, written when it is missing."""
        import onnx

        path = self.folder / f"{self.name}.onnx"
        if not path.exists():
            onnx.save(self.known.make(), path)
        return path

    def _artifact(self, sizes: Sizes | None) -> Path:
        return self.folder / f"{'-'.join([self.name, *map(str, sizes or ())])}.so"

    def _built(self, sizes: Sizes | None) -> float:
        """Seconds of CPU that a build took, for the range or for ``sizes`` alone."""
        from mlc import api
        from mlc.bench.engines import onnx_inputs

        started = time.process_time()
        names = [value.name for value in onnx_inputs(str(self._path))]
        given = {name: ",".join(map(str, self.known.dims(sizes, name))) if sizes else self.known.range(name)
                 for name in names}
        shapes = {name: _ranges(shape) for name, shape in given.items() if shape is not None}
        api.compile(self._path, self.target, log=False, shapes=shapes).save(self._artifact(sizes))
        return time.process_time() - started

    def _right(self) -> dict[str, Any]:
        """Compares the outputs with onnxruntime's; raises ``ValueError`` where they differ."""
        import onnxruntime as ort

        from mlc import api
        from mlc.bench.run import output_error

        options = ort.SessionOptions()
        options.add_session_config_entry("session.force_spinning_stop", "1")  # the cores are mlc's then
        exe, theirs = api.load(self._artifact(None)), ort.InferenceSession(self._path, options)
        errors = {}
        for number, sizes in enumerate(self.known.compared()):
            feeds = self._inputs(exe, sizes, number)
            (_, relative), why = output_error([*map(_array, exe(**feeds))], theirs.run(None, feeds))
            if why or relative > self.known.rtol:
                raise ValueError(f"{self.name} at {sizes} must be within {self.known.rtol} of onnxruntime: "
                                 f"{why or relative}")
            errors["x".join(map(str, sizes))] = relative
        return {"errors": errors}

    def _inputs(self, exe: Executable, sizes: Sizes, seed: int = 0) -> dict[str, np.ndarray]:
        import numpy as np

        from mlc.frontend.model import TensorSpec
        from mlc.networks.inputs import random_inputs

        own = [TensorSpec(spec.name, self.known.dims(sizes, spec.name), spec.dtype) for spec in exe.inputs]
        feeds = random_inputs(own, seed)
        for name, array in feeds.items():
            if "mask" in name:  # some token of each text is there, all of what a decoder has seen
                array[:, slice(None) if self.known.inputs else 0] = 1
            elif "position" in name and self.known.inputs:
                array[...] = np.arange(sizes[0], sum(sizes))
        return feeds

    def _timed(self, sizes: Sizes) -> dict[str, Any]:
        """All engines at one size of the free dimensions."""
        from mlc import api
        from mlc.bench import EngineSpec, Timing, run_bench

        whole, alone = self._artifact(None), self._artifact(sizes)
        engines = [EngineSpec("mlc", FREE, str(whole)), *map(EngineSpec, PEERS)]
        if self.static:
            engines.append(EngineSpec("mlc", STATIC, str(alone)))
        inputs = self._inputs(api.load(whole), sizes)
        result = run_bench(self._path, engines, name=self.name, inputs=inputs, timing=Timing(rounds=self.rounds))
        return {"sizes": list(sizes), **result.to_json()}


def _ranges(shape: str) -> tuple[Range, ...]:
    """A shape that is written as on the command line; a past may begin at 0 here."""
    from mlc.shapes import Range

    ends = (word.partition("..") for word in shape.split(","))
    return tuple(Range(int(low), int(high or low)) for low, _, high in ends)


def _array(value: Any) -> np.ndarray:
    import numpy as np

    return np.asarray(value)


def _said(row: Mapping[str, Any]) -> str:
    if "results" in row:
        return markdown({row["model"]: row})
    if "errors" in row:
        return f"{row['model']}: {len(row['errors'])} sizes, worst error {max(row['errors'].values()):.1e}"
    return f"{row['model']}: {row['seconds']:.0f} s of CPU"


def markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each size that was timed; ratios above 1 are in favour of the build for the range."""
    columns = ("model", "sizes", FREE, *PEERS.values(), "best peer / mlc", STATIC, "static / mlc", "error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    gains: list[float] = []
    own: list[float] = []
    timed = [row for row in rows.values() if "results" in row]
    for row in timed:
        times = {r["engine"]: r["median_ms"] for r in row["results"]}
        error = next(r["max_rel_err"] for r in row["results"] if r["engine"] == FREE)
        mine, best = times[FREE], min((times[peer] for peer in PEERS if times.get(peer)), default=None)
        fastest = min((t for e in (FREE, *PEERS) if (t := times.get(e)) is not None), default=None)
        gain, ratio = (other / mine if other and mine else None for other in (best, times.get(STATIC)))
        gains += [gain] if gain else []
        own += [ratio] if ratio else []
        name, _, size = row["model"].partition(" ")
        cells = [name, size, *(cell(times, e, fastest) for e in (FREE, *PEERS)), _ratio(gain),
                 cell(times, STATIC, None), _ratio(ratio), "-" if error is None else f"{error:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    if len(timed) > 1:
        means = [f"**{geometric_mean(each):.2f}**" if each else "-" for each in (gains, own)]
        lines.append(f"| geometric mean | | | | | {means[0]} | | {means[1]} | |")
    return "\n".join([*lines, "", _legend(rows, timed)]) + "\n"


def _legend(rows: Mapping[str, Mapping[str, Any]], timed: Sequence[Mapping[str, Any]]) -> str:
    machines = ", ".join(sorted({f"{row['machine']}, {row['threads']} threads" for row in timed}))
    said = [f"Milliseconds, medians of one interleaved run for each size, untuned; {machines}."]
    for name, known in MODELS.items():
        if f"{name} build" in rows:
            said.append(f"{name} was built for {known.shape} in {rows[f'{name} build']['seconds']:.0f} s of CPU.")
        if f"{name} right" in rows:
            errors = rows[f"{name} right"]["errors"]
            said.append(f"Its outputs are within {max(errors.values()):.0e} of onnxruntime's, relative to the "
                        f"largest, at {len(errors)} sizes, ends included (asked: {known.rtol:.0e}).")
    return " ".join(said)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
