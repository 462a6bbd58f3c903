"""Networks of few bits while they grow: float ones with integers between their operators, and those of 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz.growing import Growing

__all__ = ["Halved", "Quantised"]

#: the operators whose constant operands are integers, and their outputs' axis there
_WEIGHTED = {"Conv": 0, "MatMul": -1, "Gemm": -1}
#: what ONNX has in float32 alone, and what takes scales in it
_FLOAT32 = ("Celu", "Resize")
#: part of the integers that the noisy twin has one step off, many more than other sums round to the other side
_FLIPPED = 0.01


@dataclass
class Quantised(Growing):
    """What most nodes give is quantised and dequantised, and so are most weights.

    Steps are of 8 bits for a tensor, a few for each channel, with zero points where values need them, in the middle,
    and at both ends, where half of the values saturate. A few integers are results by themselves. ``plain`` networks
    are those that onnxruntime's own operators are for: nearly all values are uint8, with one step each.
    """

    plain: bool = False

    #: the step of what was dequantised, of all its channels
    steps: dict[str, float] = field(default_factory=dict)

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, moves: bool = False, **attributes: Any) -> bool:
        operands, before = list(inputs), len(self.nodes)
        if op in _WEIGHTED and operands[1] in self.weights and self.rng.random() < 0.9:
            axis = 0 if attributes.get("transB") else _WEIGHTED[op] % self.weights[operands[1]].ndim
            steps = self._weight(operands, axis)
            if len(operands) > 2 and operands[0] in self.steps and op == "Conv" and self.rng.random() < 0.6:
                self._bias(operands, self.steps[operands[0]] * steps)
        if not super().add(op, operands, outputs, moves, **attributes):
            self._without(before)
            return False
        made = f"v{len(self.nodes) - 1}_0"
        often = 0.97 if self.plain else 0.75
        if outputs == 1 and self.exact[0][made].dtype == np.float32 and self.rng.random() < often:
            self.quantise(made)
        return True

    def disturbed(self, array: np.ndarray) -> np.ndarray:
        if array.dtype not in (np.int8, np.uint8):
            return super().disturbed(array)
        moved = array.astype(np.int32) + self.numbers.choice((-1, 1), array.shape)
        kept = self.numbers.random(array.shape) >= _FLIPPED
        limits = np.iinfo(array.dtype)
        return np.where(kept, array, moved.clip(limits.min, limits.max)).astype(array.dtype)

    def quantise(self, name: str) -> None:
        """Add what makes integers of a value, and numbers of those; nothing where either cannot be."""
        array, before = self.exact[0][name], len(self.nodes)
        dtype = np.uint8 if self.plain else self.rng.choice((np.uint8, np.uint8, np.int8))
        axis = self.rng.randrange(array.ndim) if array.ndim and not self.plain and self.rng.random() < 0.05 else None
        rest = None if axis is None else tuple(i for i in range(array.ndim) if i != axis)
        low, high = np.minimum(array.min(rest), 0), np.maximum(array.max(rest), 0)
        limits, extent = np.iinfo(dtype), (high - low) * self.rng.choice((1.0, 1.0, 0.7))
        step = np.maximum(extent / 255, 1e-4).astype(np.float32)
        fitting = np.rint(limits.min - low / step).clip(limits.min, limits.max)
        style = self.rng.choice(("fitting", "fitting", "fitting", "least", "middle", "largest"))
        middle = (limits.min + limits.max + 1) // 2
        zero = {"fitting": fitting, "least": np.full_like(fitting, limits.min), "middle": np.full_like(fitting, middle),
                "largest": np.full_like(fitting, limits.max)}[style].astype(dtype)
        given = [self.constant(step), self.constant(zero)]
        along = {} if axis is None else {"axis": axis}
        if not super().add("QuantizeLinear", [name, *given], **along):
            return
        if not self.plain and self.rng.random() < 0.05:
            return
        if not super().add("DequantizeLinear", [f"v{len(self.nodes) - 1}_0", *given], **along):
            self._without(before)
            return
        self.steps[f"v{len(self.nodes) - 1}_0"] = float(step.max())

    def _without(self, before: int) -> None:
        """Take back all nodes but the first so many."""
        for node in self.nodes[before:]:
            for arrays in (*self.exact, *self.noisy):
                for name in node.output:
                    del arrays[name]
        del self.nodes[before:]

    def _weight(self, operands: list[str], axis: int) -> np.ndarray:
        """Put the second operand's integers in its place, with a few at their ends; returns its steps."""
        values = self.weights[operands[1]]
        rest = tuple(i for i in range(values.ndim) if i != axis) if self.rng.random() < 0.6 else None
        step = np.maximum(np.abs(values).max(rest) / 127, 1e-5).astype(np.float32)
        dtype = self.rng.choice((np.int8, np.int8, np.int8, np.uint8))
        limits = np.iinfo(dtype)
        usual = 0 if dtype is np.int8 else 128
        point = self.rng.choice((usual, usual, usual, limits.min, limits.max))
        shape = [-1 if i == axis else 1 for i in range(values.ndim)] if step.ndim else []
        whole = np.rint(values / step.reshape(shape)) + point
        ends = self.numbers.choice((limits.min, limits.max), values.shape)
        whole = np.where(self.numbers.random(values.shape) < 0.02, ends, whole)
        given = [self.constant(whole.clip(limits.min, limits.max).astype(dtype)), self.constant(step),
                 self.constant(np.full(step.shape, point, dtype))]
        if super().add("DequantizeLinear", given, **({"axis": axis} if step.ndim else {})):
            operands[1] = f"v{len(self.nodes) - 1}_0"
        return step

    def _bias(self, operands: list[str], step: np.ndarray) -> None:
        """Put integers of 32 bits in the place of the third operand, in steps of the sums."""
        values = self.weights[operands[2]]
        whole, step = np.rint(values / step).astype(np.int32), step.astype(np.float32)
        given = [self.constant(whole), self.constant(step), self.constant(np.zeros(step.shape, np.int32))]
        if super().add("DequantizeLinear", given, **({"axis": 0} if step.ndim else {})):
            operands[2] = f"v{len(self.nodes) - 1}_0"


@dataclass
class Halved(Growing):
    """Values are float32 in which nothing is that ``dtype`` does not hold; each node is evaluated in float32."""

    dtype: Any = np.float16

    def __post_init__(self) -> None:
        self.noise = float(ml_dtypes.finfo(self.dtype).eps)

    def constant(self, values: Any) -> str:
        return super().constant(self.stored(np.asarray(values)))

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, moves: bool = False, **attributes: Any) -> bool:
        return op not in _FLOAT32 and super().add(op, inputs, outputs, moves, **attributes)

    def stored(self, array: np.ndarray) -> np.ndarray:
        return array.astype(self.dtype).astype(np.float32) if array.dtype == np.float32 else array
