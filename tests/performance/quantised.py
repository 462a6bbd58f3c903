"""Quantised and 16-bit models, untuned, against onnxruntime, OpenVINO and mlc's own float32, in one interleaved run.

``make bench-quantised``, or ``python -m tests.performance.quantised --models resnet50-qdq,bert_base-dynamic``. A model
is the name of a network and how onnxruntime's own tools make it smaller: ``qdq`` calibrates and quantises each channel
of the weights, ``dynamic`` is ``quantize_dynamic``, ``f16`` converts to float16, ``bf16`` that to bfloat16. Machines
with 8-bit dot products publish tables of their own, by the width of their vectors, and so do those with a matrix unit.
Calibration data are seeded. Results are written after each model; those that are there already are skipped unless
``--again`` measures them anew. What was built stays in the folder and is timed again as it is: remove it after a change
to mlc.

``make bench-sixteen``, or ``--sixteen``, is the same for every benchmark model in both types of 16 bits, and for those
of float16 with ``--precision bf16`` (``f16-in-bf16``), of which OpenVINO is asked as well. Errors are relative to what
onnxruntime makes in float32 of the same weights and the same inputs. ``--build`` makes and builds the models and times
nothing. ``--alone``, of either, times mlc's own builds of a network in turn, without peers: minutes instead of an hour.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.performance.results import Results, publish, write_whole
from tests.performance.table import ROOT, cell, geometric_mean
from tuning_logs.quantised import MODELS, original, quantised

if TYPE_CHECKING:
    import numpy as np
    import onnx

PEERS = {"onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
_TYPES = {"f16": "float16", "bf16": "bfloat16", "f16-in-bf16": "float16 in bfloat16"}
#: ends the name of a model whose operands may be rounded to bfloat16
_ROUNDED = "-in-bf16"
_LANES_OF_AVX2 = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="comma-separated (default: all)")
    parser.add_argument("--sixteen", action="store_true", help="all benchmark models in 16 bits instead")
    parser.add_argument("--build", action="store_true", help="build what is missing and time nothing")
    parser.add_argument("--alone", action="store_true", help="mlc in each type in turn, no peers, no table")
    parser.add_argument("--target", default="native", help="what mlc builds for; its peers run as they come")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each engine (default: 12)")
    parser.add_argument("--publish", action="store_true", help="put the table into results.md")
    parser.add_argument("--again", action="store_true", help="measure models that have results already, too")
    parser.add_argument("--output", type=Path, help="the folder (default: one of build/)")
    args = parser.parse_args(argv)
    known = sixteen() if args.sixteen else MODELS
    output = args.output or ROOT / "build" / ("bench-sixteen" if args.sixteen else "bench-quantised")
    models, results = args.models.split(",") if args.models else known, Results(output)
    if unknown := [name for name in models if name not in known]:
        parser.error(f"models must be among {', '.join(known)}, got {', '.join(unknown)}")
    if args.build:
        for name in models:
            built(name, output, args.target)
        return 0
    if args.alone:
        for network, kinds in _by_network(models).items():
            print(_alone(network, kinds, output, args.rounds, args.target), flush=True)
        return 0
    one = partial(measure, folder=output, rounds=args.rounds, target=args.target)
    for row in results.fill(models, one, args.again):
        print(markdown([row]), file=sys.stderr)
    order = {name: place for place, name in enumerate(known)}
    text = markdown(sorted(results.rows.values(), key=lambda row: order.get(row["model"], len(order))))
    write_whole(output / "table.md", text)
    if args.publish:
        publish("sixteen" if args.sixteen else _section(args.target), text)
    print(text)
    return 0


def sixteen() -> tuple[str, ...]:
    """Every benchmark model in both types of 16 bits, and those of float16 computed in bfloat16."""
    from mlc.networks.models import BENCHMARK_MODELS

    return tuple(f"{network}-{how}" for how in _TYPES for network in BENCHMARK_MODELS)


def _section(target: str) -> str:
    """The table for machines like this one."""
    from mlc.graph.kernels.integer import dot_form
    from mlc.target import resolve
    from schedules.intrin.dot import QUADS
    from schedules.machine import cpu_machine

    resolved = resolve(target)
    machine = cpu_machine(resolved.tvm)
    if machine.tile_per_cycle:
        return "quantised-amx"
    if dot_form(resolved) != QUADS:
        return "quantised"
    return "quantised-vnni" if machine.lanes() > _LANES_OF_AVX2 else "quantised-avx-vnni"


def built(name: str, folder: Path, target: str) -> tuple[Path, Path]:
    """What mlc makes of both files of a model, built if it is not there."""
    from mlc import api

    small, plain = made(name, folder)
    found = []
    for path, stem, precision in ((small, name, _precision(name)), (plain, plain.stem, "")):
        found.append(path.with_name(f"{stem}.{target.replace(':', '_').split()[0]}.so"))
        if not found[-1].exists():  # the float32 model of several
            api.compile(path, target, log=False, precision=precision or "f32").save(found[-1])
    return found[0], found[1]


def _precision(name: str) -> str:
    """What ``--precision`` says of a row; empty where it is left out."""
    return "bf16" if name.endswith(_ROUNDED) else ""


def measure(name: str, folder: Path, rounds: int, target: str) -> dict[str, Any]:
    """One model: built from both files, and timed in turn with its peers on the small one."""
    from mlc.bench import EngineSpec, Timing, run_bench

    (small, _), (ours, plain) = made(name, folder), built(name, folder, target)
    asked = _precision(name)
    engines = [EngineSpec("mlc", artifact=str(ours), precision=asked), EngineSpec("mlc-untuned", artifact=str(plain)),
               *(EngineSpec(peer, precision=asked if peer == "openvino" else "") for peer in PEERS)]
    inputs, reference = _widened_results(small) if name.endswith(tuple(_TYPES)) else (None, None)
    result = run_bench(small, engines, name=name, timing=Timing(rounds=rounds), inputs=inputs,
                       reference=reference).to_json()
    return {**result, "widened": reference is not None, "bytes": ours.stat().st_size / plain.stat().st_size,
            "when": time.time()}


def _by_network(models: Iterable[str]) -> dict[str, list[str]]:
    """The ways that are asked for to make each network smaller."""
    found: dict[str, list[str]] = {}
    for name in models:
        network, _, how = name.partition("-")
        found.setdefault(network, []).append(how)
    return found


def _alone(network: str, ways: Sequence[str], folder: Path, rounds: int, target: str) -> str:
    """mlc's builds of a network timed in turn: each one's time, what part it is of float32's, and how far its results
    are from those."""
    from mlc.bench import EngineSpec, Timing, run_bench

    files = {how: built(f"{network}-{how}", folder, target) for how in ways}
    plain = next(wide for _, wide in files.values())
    engines = [EngineSpec("mlc", "float32", str(plain)),
               *(EngineSpec("mlc", how, str(ours), precision=_precision(f"-{how}"))
                 for how, (ours, _) in files.items())]
    result = run_bench(original(network, folder), engines, timing=Timing(rounds=rounds)).to_json()
    rows = {row["engine"]: row for row in result["results"]}
    first = rows["float32"]["median_ms"]
    said = [f"{how} {rows[how]['median_ms']:.2f} ms ({rows[how]['median_ms'] / first:.2f} of it, "
            f"error {rows[how]['max_rel_err']:.0e})" for how in ways]
    return f"{network}: float32 {first:.2f} ms, {', '.join(said)}"


def made(name: str, folder: Path) -> tuple[Path, Path]:
    """The files of a model and of the float32 one that it is made of; both have the same inputs."""
    name = name.removesuffix(_ROUNDED)
    network, _, how = name.rpartition("-")
    if how not in _SIXTEEN:
        return quantised(name, folder), original(network, folder)
    wide, small = original(network, folder), folder / f"{name}.onnx"
    if not small.exists():
        _SIXTEEN[how](wide, small)
    return small, wide


def halved(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float16, with inputs and outputs of the types that it had."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    small = convert_float_to_float16(model, keep_io_types=True)
    _sort(small.graph)
    return small


def _halved(plain: Path, small: Path) -> None:
    import onnx

    onnx.save(halved(onnx.load(plain)), small)


def _bfloats(plain: Path, small: Path) -> None:
    """The model in float16, with bfloat16 in its place."""
    import onnx

    _halved(plain, small)
    onnx.save(_retyped(onnx.load(small), "BFLOAT16"), small)


_SIXTEEN = {"f16": _halved, "bf16": _bfloats}


def _retyped(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model with the floats of ONNX's type ``name`` in place of its 16-bit floats."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    dtype = TensorProto.DataType.Value(name)
    narrow, kind = (TensorProto.FLOAT16, TensorProto.BFLOAT16), helper.tensor_dtype_to_np_dtype(dtype)

    def renewed(tensor: onnx.TensorProto) -> None:
        if tensor.data_type in narrow:
            raw = numpy_helper.to_array(tensor).astype(np.float32).astype(kind).tobytes()
            tensor.CopyFrom(TensorProto(name=tensor.name, dims=tensor.dims, data_type=dtype, raw_data=raw))

    for tensor in model.graph.initializer:
        renewed(tensor)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i in narrow:
                attribute.i = dtype
            if attribute.HasField("t"):
                renewed(attribute.t)
    del model.graph.value_info[:]
    return model


def _widened_results(small: Path) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Inputs of numbers that bfloat16 holds, which no engine rounds, and what onnxruntime makes of them in float32 with
    the weights of a model of 16 bits."""
    import ml_dtypes
    import numpy as np
    import onnx
    import onnxruntime

    from mlc.bench.engines import onnx_inputs
    from mlc.networks.inputs import random_inputs

    wide = _retyped(onnx.load(small), "FLOAT").SerializeToString()
    feeds = {name: array.astype(ml_dtypes.bfloat16).astype(array.dtype) if array.dtype == np.float32 else array
             for name, array in random_inputs(onnx_inputs(str(small))).items()}
    return feeds, list(onnxruntime.InferenceSession(wide, providers=["CPUExecutionProvider"]).run(None, feeds))


def _sort(graph: onnx.GraphProto) -> None:
    """Nodes after what they read: the converter puts its casts of inputs last."""
    known = {"", *(each.name for each in (*graph.input, *graph.initializer))}
    waiting, sorted_nodes = list(graph.node), []
    while waiting:
        ready = [node for node in waiting if known.issuperset(node.input)]
        if not ready:
            raise ValueError(f"nodes must be sortable, but {waiting[0].name!r} reads what nothing makes")
        sorted_nodes += ready
        known.update(name for node in ready for name in node.output)
        waiting = [node for node in waiting if not known.issuperset(node.output)]
    del graph.node[:]
    graph.node.extend(sorted_nodes)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, and what it is."""
    columns = ("model", "mlc", "mlc, float32", *PEERS.values(), "best peer / mlc", "float32 / mlc", "size")
    if errors := any(row.get("widened") for row in rows):
        columns += (f"errors of mlc, {', '.join(PEERS.values())}",)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    against: dict[str, list[float]] = {}
    for row in rows:
        times = {each["engine"]: each["median_ms"] for each in row["results"]}
        known = {name: value for name, value in times.items() if value is not None}
        best = min(known[peer] for peer in PEERS if peer in known)
        kind = _TYPES.get(row["model"].partition("-")[2], "8 bits")
        against.setdefault(kind, []).append(best / known["mlc"])
        cells = [cell(times, name, min(known.values())) for name in ("mlc", "mlc-untuned", *PEERS)]
        ratios = [f"{best / known['mlc']:.2f}", f"{known['mlc-untuned'] / known['mlc']:.2f}", f"{row['bytes']:.2f}"]
        lines.append(f"| {' | '.join([row['model'], *cells, *ratios, *([_errors(row)] if errors else [])])} |")
    machines = ", ".join(sorted({f"{row['machine']}, {row['threads']} threads" for row in rows}))
    means = "; ".join(f"{kind} {geometric_mean(found):.2f}" for kind, found in against.items())
    said = (" Errors are relative to the largest of each output of float32 arithmetic on the same weights." if errors
            else "")
    return "\n".join([*lines, "", f"Milliseconds, medians, untuned. {machines}. Ratios above 1 are in mlc's favour; "
                      f"geometric means of the best peer over mlc: {means}. The size is that of the compiled file, "
                      f"as a part of the float32 model's.{said}"]) + "\n"


def _errors(row: Mapping[str, Any]) -> str:
    """Those of mlc and of its peers, where the reference was the same model in float32."""
    found = {each["engine"]: each["max_rel_err"] for each in row["results"] if row.get("widened")}
    return ", ".join("-" if found.get(name) is None else f"{found[name]:.0e}" for name in ("mlc", *PEERS))


if __name__ == "__main__":
    sys.exit(main())
