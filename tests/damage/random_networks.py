"""Random networks of operators that models use: sound files, of which every one must compile and be right.

A network starts from random inputs and grows (:mod:`tests.damage.growing`) by operators of its kind
(:mod:`tests.damage.random_operators`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.damage.growing import OPSET, Arrays, Growing
from tests.damage.random_operators import OPERATORS

__all__ = ["KINDS", "Network", "random_network"]

#: what a network starts from, and which operators it is made of
KINDS = ("image", "sequence", "matrix", "volume", "signal", "mixed", "free image", "free sequence", "free matrix")
_TRIES = 12


@dataclass(frozen=True)
class Network:
    """A model and, for one or two sizes of its free dimensions, inputs, outputs, and how far noise moves those."""

    model: onnx.ModelProto
    inputs: Sequence[Arrays]
    outputs: Sequence[Arrays]
    moved: Sequence[dict[str, float]]


def _start(g: Growing, kind: str, free: bool) -> None:
    r = g.rng
    shapes: dict[str, list[int]] = {
        "image": [r.choice((1, 1, 2, 3)), r.choice((1, 3, 4, 8, 12, 16, 32)), r.randint(5, 30), r.randint(5, 30)],
        "sequence": [r.choice((1, 2, 3)), r.randint(2, 20), r.choice((8, 12, 16, 33, 64))],
        "matrix": [r.randint(1, 40), r.choice((1, 5, 16, 31, 64, 100))],
        "volume": [r.choice((1, 2)), r.choice((1, 3, 8)), r.randint(4, 9), r.randint(4, 9), r.randint(4, 9)],
        "signal": [r.choice((1, 2)), r.choice((1, 4, 8, 16)), r.randint(8, 60)],
    }
    shapes["mixed"] = shapes[r.choice(tuple(shapes))]
    g.exact, g.noisy = [{} for _ in range(g.sizes)], [{} for _ in range(g.sizes)]
    loose = [0] if kind != "image" or r.random() < 0.5 else [2, 3]
    if kind == "sequence" and r.random() < 0.5:
        loose = [0, 1]
    other = [size if i not in loose else max(1, size + r.choice((-1, 1, 2, 5))) for i, size in enumerate(shapes[kind])]
    for i in range(r.choice((1, 1, 2))):
        name = f"x{i}"
        g.inputs[name] = [f"n{k}" if free and k in loose else size for k, size in enumerate(shapes[kind])]
        for arrays, noisy, shape in zip(g.exact, g.noisy, (shapes[kind], other), strict=False):
            arrays[name] = noisy[name] = g.numbers.normal(0, 1, shape).astype(np.float32)
        g.unrounded.add(name)


def random_network(rng: Random, kind: str, nodes: int) -> Network:
    """A network of a kind of :data:`KINDS` with about so many nodes; those that are free are evaluated at two sizes."""
    free = kind.startswith("free ")
    g = Growing(rng, np.random.default_rng(rng.getrandbits(32)), 2 if free else 1)
    name = kind.removeprefix("free ")
    _start(g, name, free)
    for _ in range(_TRIES * nodes):
        if len(g.nodes) >= nodes:
            break
        rng.choice(OPERATORS[name])(g)
    return _finished(g)


def _finished(g: Growing) -> Network:
    read = {n for node in g.nodes for n in node.input}
    made = [n for node in g.nodes for n in node.output]
    outputs = [n for n in made if n not in read or g.rng.random() < 0.1]
    infos = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, dims) for n, dims in g.inputs.items()]
    used = [n for n in g.weights if n in read]
    ends = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(g.exact[0][n].dtype),
                                          [None] * g.exact[0][n].ndim) for n in outputs]
    graph = helper.make_graph(g.nodes, "random", infos, ends,
                              [numpy_helper.from_array(np.asarray(g.weights[n]), n) for n in used])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    moved = [{n: float(np.abs(np.subtract(a[n], b[n], dtype="f8")).max()) for n in outputs}
             for a, b in zip(g.exact, g.noisy, strict=True)]
    return Network(model, [{n: a[n] for n in g.inputs} for a in g.exact],
                   [{n: a[n] for n in outputs} for a in g.exact], moved)
