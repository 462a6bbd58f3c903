"""Recurrent layers of many steps beside onnxruntime and OpenVINO, untuned, and how long they take to compile.

``make bench-recurrent``, or ``python -m tests.performance.recurrent --models lstm,gru``. Two layers with random weights
read 128 steps of one sequence; each engine is timed in turn with the others. Rows that are there already are not
measured anew unless ``--again`` asks for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.performance.results import Results, publish, write_whole
from tests.performance.table import ROOT, cell, compared, geometric_mean

if TYPE_CHECKING:
    import onnx

PEERS = {"onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class Recurrent:
    """Layers of one operator, one after another, that read ``[steps, batch, features]``."""

    operator: str
    hidden: int = 256
    steps: int = 128
    layers: int = 2
    features: int = 128
    batch: int = 1
    ways: int = 1
    #: whether a GRU's reset comes after its product, as in PyTorch
    reset_after: bool = True

    def onnx(self) -> onnx.ModelProto:
        """The model: ``x`` to the last layer's states of all steps."""
        from onnx import TensorProto, helper, numpy_helper

        rng, nodes, weights = np.random.default_rng(0), [], []

        def weight(name: str, *shape: int) -> str:
            values = rng.uniform(-1, 1, shape).astype(np.float32) * np.float32(self.hidden**-0.5)
            weights.append(numpy_helper.from_array(values, name))
            return name

        weights.append(numpy_helper.from_array(np.array([0, 0, -1], np.int64), "rows"))
        rows, features, x = _GATES[self.operator] * self.hidden, self.features, "x"
        attributes: dict[str, Any] = {"hidden_size": self.hidden}
        if self.ways == 2:
            attributes["direction"] = "bidirectional"
        if self.operator == "GRU":
            attributes["linear_before_reset"] = int(self.reset_after)
        for i in range(self.layers):
            given = [x, weight(f"w{i}", self.ways, rows, features), weight(f"r{i}", self.ways, rows, self.hidden),
                     weight(f"b{i}", self.ways, 2 * rows)]
            nodes.append(helper.make_node(self.operator, given, [f"states{i}"], name=f"layer{i}", **attributes))
            nodes.append(helper.make_node("Transpose", [f"states{i}"], [f"turned{i}"], perm=[0, 2, 1, 3]))
            nodes.append(helper.make_node("Reshape", [f"turned{i}", "rows"], [x := f"y{i}"]))
            features = self.ways * self.hidden
        shapes = {"x": [self.steps, self.batch, self.features], x: [self.steps, self.batch, features]}
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
        graph = helper.make_graph(nodes, "recurrent", values[:1], values[1:], weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


MODELS = {
    "lstm": Recurrent("LSTM"), "lstm_512": Recurrent("LSTM", 512), "lstm_both_ways": Recurrent("LSTM", ways=2),
    "lstm_batch_8": Recurrent("LSTM", batch=8), "gru": Recurrent("GRU"), "gru_512": Recurrent("GRU", 512),
    "gru_both_ways": Recurrent("GRU", ways=2), "gru_reset_before": Recurrent("GRU", reset_after=False),
    "rnn": Recurrent("RNN"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (default: all)")
    parser.add_argument("--target", default="native", help="what mlc builds for; its peers run as they come")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each engine (default: 12)")
    parser.add_argument("--publish", action="store_true", help="put the table into results.md")
    parser.add_argument("--again", action="store_true", help="measure models that have results already, too")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench-recurrent")
    args = parser.parse_args(argv)
    names = args.models.split(",")
    if unknown := sorted(set(names) - set(MODELS)):
        parser.error(f"models must be of {', '.join(MODELS)}, got {', '.join(unknown)}")
    results = Results(args.output)
    one = partial(measure, folder=args.output, rounds=args.rounds, target=args.target)
    for row in results.fill(names, one, args.again):
        print(markdown([row]), file=sys.stderr, flush=True)
    order = {name: place for place, name in enumerate(MODELS)}
    text = markdown(sorted(results.rows.values(), key=lambda row: order.get(row["model"], len(order))))
    write_whole(args.output / "table.md", text)
    if args.publish:
        publish("recurrent", text)
    print(text)
    return 0


def measure(name: str, folder: Path, rounds: int, target: str = "native") -> dict[str, Any]:
    """One row."""
    return compared(name, MODELS[name].onnx(), folder, rounds, None, target=target)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table; ratios above 1 are in favour of mlc."""
    columns = ("layers", "mlc", *PEERS.values(), "best peer / mlc", "compiled in, s", "error")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    gains = []
    for row in rows:
        times = {each["engine"]: each["median_ms"] for each in row["results"]}
        fastest = min(time for time in times.values() if time is not None)
        best = min((time for peer in PEERS if (time := times.get(peer))), default=None)
        if best and times.get("mlc-untuned"):
            gains.append(best / times["mlc-untuned"])
        error = next(each["max_rel_err"] for each in row["results"] if each["engine"] == "mlc-untuned")
        cells = [row["model"], *(cell(times, engine, fastest) for engine in ("mlc-untuned", *PEERS)),
                 f"{gains[-1]:.2f}" if best else "-", f"{row['build_seconds']:.1f}",
                 "-" if error is None else f"{error:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    machines = ", ".join(sorted({f"{row['machine']}, {row['threads']} threads" for row in rows}))
    mean = f" Geometric mean of the ratios: {geometric_mean(gains):.2f}." if len(gains) > 1 else ""
    return "\n".join([*lines, "", f"Milliseconds, medians, untuned; {machines}.{mean}"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
