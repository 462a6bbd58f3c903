"""A network that grows by a node at a time, and what each of its values is.

Each node is evaluated alone by onnxruntime, so the reference has no fused kernel, and is kept if what it gives is
finite and tame. Every value is computed a second time with noise of a few roundings after each node: what that moves an
output by says how exact another order of sums can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import helper

__all__ = ["OPSET", "Arrays", "Growing", "evaluated", "is_tame"]

OPSET = 20
#: values beyond it make comparisons of float32 meaningless
_TAME = 300.0
_MOST_ELEMENTS = 200_000

Arrays = dict[str, np.ndarray]


@dataclass
class Growing:
    """A network while it grows: per size, every value as computed and with ``noise``, relative to each value."""

    rng: Random
    numbers: np.random.Generator
    sizes: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: Arrays = field(default_factory=dict)
    inputs: dict[str, list[int | str]] = field(default_factory=dict)
    exact: list[Arrays] = field(default_factory=list)
    noisy: list[Arrays] = field(default_factory=list)
    #: values that no rounding has touched: discontinuous operators may read them
    unrounded: set[str] = field(default_factory=set)
    noise: float = 1e-6

    def shape(self, name: str) -> tuple[int, ...]:
        return self.exact[0][name].shape

    def free(self, name: str) -> list[bool]:
        """Which axes have another size at the other sizes of the free dimensions."""
        return [len({arrays[name].shape[i] for arrays in self.exact}) > 1 for i in range(len(self.shape(name)))]

    def names(self, rank: int | None = None, kind: str = "f") -> list[str]:
        """Values of a rank and kind of type, oldest first."""
        found = [n for n in self.exact[0] if n not in self.weights and self.exact[0][n].dtype.kind in kind]
        return [n for n in found if rank is None or len(self.shape(n)) == rank]

    def pick(self, rank: int | None = None, kind: str = "f") -> str | None:
        """One of those, most often a young one."""
        names = self.names(rank, kind)
        if not names:
            return None
        return self.rng.choice(names[-2:] if self.rng.random() < 0.7 else names)

    def weight(self, shape: Sequence[int], spread: float = 1.0, middle: float = 0.0) -> str:
        return self.constant((self.numbers.normal(middle, spread, tuple(shape))).astype(np.float32))

    def constant(self, values: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(values)
        for arrays in (*self.exact, *self.noisy):
            arrays[name] = self.weights[name]
        return name

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, moves: bool = False, **attributes: Any) -> bool:
        """Keep a node if it can be evaluated for every size; ``moves`` says that it only copies numbers."""
        number = len(self.nodes)
        names = [f"v{number}_{i}" for i in range(outputs)]
        node = helper.make_node(op, list(inputs), names, name=f"n{number}", **attributes)
        unrounded = moves and all(n in self.unrounded or n in self.weights for n in inputs if n)
        found = []
        for arrays, noisy in zip(self.exact, self.noisy, strict=True):
            clean = evaluated(node, arrays)
            if clean is None or not all(map(is_tame, clean)):
                return False
            moved = evaluated(node, noisy)
            if moved is None or any(a.shape != b.shape for a, b in zip(clean, moved, strict=True)):
                return False
            if any(a.dtype.kind == "f" and not np.isfinite(a).all() for a in moved):
                return False
            found.append(([self.stored(a) for a in clean], [self.disturbed(a) if not moves else a for a in moved]))
        for (clean, moved), arrays, noisy in zip(found, self.exact, self.noisy, strict=True):
            arrays.update(zip(names, clean, strict=True))
            noisy.update(zip(names, moved, strict=True))
        self.nodes.append(node)
        if unrounded:
            self.unrounded.update(names)
        return True

    def stored(self, array: np.ndarray) -> np.ndarray:
        """A node's result as the network's type holds it."""
        return array

    def disturbed(self, array: np.ndarray) -> np.ndarray:
        """A node's result with the noise that other roundings may be."""
        if array.dtype.kind != "f":
            return array
        return np.asarray(array * (1 + self.noise * self.numbers.standard_normal(array.shape)), dtype=array.dtype)


def evaluated(node: onnx.NodeProto, arrays: Arrays) -> list[np.ndarray] | None:
    import onnxruntime as ort

    names = list(dict.fromkeys(n for n in node.input if n))
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(arrays[n].dtype), arrays[n].shape)
         for n in names],
        [helper.make_empty_tensor_value_info(n) for n in node.output])
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        text = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        session = ort.InferenceSession(text.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return [np.asarray(a) for a in session.run(None, {n: arrays[n] for n in names})]
    except Exception:
        return None


def is_tame(array: np.ndarray) -> bool:
    if not 0 < array.size <= _MOST_ELEMENTS:
        return False
    if array.dtype.kind != "f":
        return True
    return bool(np.isfinite(array).all() and np.abs(array).max() <= _TAME)
