"""Models with free sizes, one build for all of them, beside onnxruntime and OpenVINO, both dynamic too.

``make bench-dynamic``, or ``python -m tests.performance.bench_dynamic --models bert_base --sizes 1x128,4x33``. For each
size the one build for the range is timed in turn with its peers, with one of mlc's for that size alone where
``--static``, and all outputs are compared with onnxruntime's. Nothing is tuned. Results are written after each model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.performance.results import Results, publish, write_whole
from tests.performance.table import ROOT, cell, geometric_mean

if TYPE_CHECKING:
    import onnx

PEERS = ("onnxruntime", "openvino")
FREE, STATIC = "mlc", "mlc static"


@dataclass(frozen=True)
class Dynamic:
    """A model and what it is built for: ``shape`` of all inputs, and the ``sizes`` of the free dimensions that are
    timed, in their order."""

    make: Callable[[], onnx.ModelProto]
    shape: str
    sizes: tuple[tuple[int, ...], ...]


def _bert(layers: int) -> onnx.ModelProto:
    from mlc.networks.models import bert_base

    return bert_base(free=True, num_hidden_layers=layers)


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


_TEXTS = ((1, 1), (1, 16), (1, 32), (4, 32), (1, 128), (8, 57), (2, 384))
MODELS = {
    "bert_base": Dynamic(partial(_bert, 12), "1..8,1..512", _TEXTS),
    "bert_2_layers": Dynamic(partial(_bert, 2), "1..8,1..512", _TEXTS),
    "resnet50": Dynamic(_resnet, "1..8,3,224,224", ((1,), (2,), (3,), (4,), (8,))),
    "detector": Dynamic(_detector, "1,3,128..512,128..512", ((128, 128), (224, 224), (256, 256), (301, 450))),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="bert_base,resnet50,detector", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--sizes", help="of the free dimensions, such as 1x128,4x33 (default: each model's own)")
    parser.add_argument("--static", action="store_true", help="build each size by itself, too")
    parser.add_argument("--target", default="native", help="what mlc builds for; its peers run as they come")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each engine (default: 12)")
    parser.add_argument("--again", action="store_true", help="measure models that have results already, too")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-dynamic")
    parser.add_argument("--publish", action="store_true", help="put the table into results.md")
    args = parser.parse_args(argv)
    sizes = [tuple(map(int, word.split("x"))) for word in args.sizes.split(",")] if args.sizes else None
    results = Results(args.output)
    one = partial(measure, sizes=sizes, static=args.static, target=args.target, rounds=args.rounds)
    for row in results.fill(args.models.split(","), one, args.again):
        print(markdown([row]), file=sys.stderr)
    text = markdown(list(results.rows.values()))
    write_whole(args.output / "table.md", text)
    if args.publish:
        publish("dynamic", text)
    print(text)
    return 0


def measure(
    name: str, sizes: Sequence[tuple[int, ...]] | None, static: bool, target: str, rounds: int
) -> dict[str, Any]:
    """One model at all sizes."""
    import onnx

    from mlc import api

    known = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="mlc-dynamic-") as folder:
        path, artifact = Path(folder, f"{name}.onnx"), Path(folder, f"{name}.so")
        model = known.make()
        onnx.save(model, path)
        shapes = {value.name: known.shape for value in model.graph.input}
        started = time.process_time()
        api.compile(path, target, log=False, shapes=shapes).save(artifact)
        spent = time.process_time() - started
        timed = [_at(path, artifact, known.shape, size, static, target, rounds) for size in sizes or known.sizes]
    return {"model": name, "shape": known.shape, "build_seconds": spent, "sizes": timed, "when": time.time()}


def _at(
    path: Path, artifact: Path, shape: str, size: Sequence[int], static: bool, target: str, rounds: int
) -> dict[str, Any]:
    """All engines at one size of the free dimensions."""
    from mlc import api
    from mlc.bench import EngineSpec, Timing, run_bench
    from mlc.frontend.model import TensorSpec
    from mlc.networks.inputs import random_inputs

    left = list(size)
    dims = tuple(left.pop(0) if ".." in word else int(word) for word in shape.split(","))
    engines = [EngineSpec("mlc", FREE, str(artifact)), *(EngineSpec(peer) for peer in PEERS)]
    own = [TensorSpec(spec.name, dims, spec.dtype) for spec in api.load(artifact).inputs]
    spent = None
    if static:
        alone = artifact.with_name(f"{artifact.stem}-{'x'.join(map(str, size))}.so")
        started = time.process_time()
        api.compile(path, target, log=False, shapes={spec.name: dims for spec in own}).save(alone)
        spent = time.process_time() - started
        engines.append(EngineSpec("mlc", STATIC, str(alone)))
    result = run_bench(path, engines, name=path.stem, inputs=random_inputs(own), timing=Timing(rounds=rounds))
    return {"size": list(size), "static_build_seconds": spent, **result.to_json()}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each size; ratios above 1 are in favour of the build for the range."""
    columns = ("model", "size", "mlc", "onnxruntime", "OpenVINO", "best peer / mlc", "static / mlc", "error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    gains: list[float] = []
    for row in rows:
        for at in row["sizes"]:
            times = {r["engine"]: r["median_ms"] for r in at["results"]}
            errors = {r["engine"]: r["max_rel_err"] for r in at["results"]}
            fastest = min((t for e in (FREE, *PEERS) if (t := times.get(e)) is not None), default=None)
            best = min((times[peer] for peer in PEERS if times.get(peer)), default=None)
            gains += [best / times[FREE]] if best and times.get(FREE) else []
            against = [f"{other / times[FREE]:.2f}" if other and times.get(FREE) else "-"
                       for other in (best, times.get(STATIC))]
            error = errors.get(FREE)
            cells = [row["model"], "x".join(map(str, at["size"])), *(cell(times, e, fastest) for e in (FREE, *PEERS)),
                     *against, "-" if error is None else f"{error:.0e}"]
            lines.append(f"| {' | '.join(cells)} |")
    if len(gains) > 1:
        lines.append(f"| geometric mean | | | | | **{geometric_mean(gains):.2f}** | | |")
    built = ", ".join(f"{row['model']} for {row['shape']} in {row['build_seconds']:.0f} s of CPU" for row in rows)
    return "\n".join([*lines, "", f"Milliseconds, medians, untuned. Built: {built}."]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
