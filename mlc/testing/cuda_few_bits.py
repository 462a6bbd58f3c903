"""Products with packed weights of 2, 4 and 8 bits, each with a float64 reference that is independent of the packing.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlc.measure.data import numpy_dtype
from mlc.testing.cases import Case

__all__ = ["FEW_BITS", "PackedProduct"]

#: sums in another order than the reference's; and results that are rounded to 16 bits
_TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 3e-3}


@dataclass(frozen=True)
class PackedProduct:
    """``[m, k] x [k, n]`` of ``dtype`` with weights of so many ``bits``, each ``block`` of them along ``k`` with a
    scale of the type ``scales`` and, if there are ``zeros``, a zero point: ``whole`` or ``fractional``. A bias and ReLU
    come after it, and rounding to ``dtype``."""

    m: int
    k: int
    n: int
    bits: int = 4
    block: int = 32
    dtype: str = "float16"
    zeros: str = ""
    scales: str = "float16"
    epilogue: bool = False

    def __str__(self) -> str:
        zeros = f"_{self.zeros}" if self.zeros else ""
        return f"{self.m}x{self.k}x{self.n}_{self.dtype}_{self.bits}bits_{self.block}{zeros}_{self.scales}"

    def case(self, name: str = "") -> Case:
        """The product."""
        return Case(name or str(self), self._tensors, self._reference, _TOLERANCES[self.dtype], data=self._data,
                    space="cuda.few_bits", index="int64")

    def weights_case(self, name: str = "") -> Case:
        """Only the weights ``[n, k]``, unpacked."""
        from mlc.graph.kernels.few_bits import unpacked_weights

        def build() -> list[Any]:
            given = self._given()
            words, scale, zero = (*given, None)[:3]
            return [*given, unpacked_weights(words, scale, zero, self.packing, self.dtype)]

        def given_weights() -> list[np.ndarray]:
            return self._data()[1 : 3 + bool(self.zeros)]

        def reference(*_: Any) -> np.ndarray:
            return self._weights().T

        return Case(name or f"weights_{self}", build, reference, _TOLERANCES[self.dtype], data=given_weights,
                    space="cuda.few_bits_weights", index="int64")

    @property
    def packing(self) -> Any:
        """How the weights lie."""
        from schedules.cuda.packed import Packing

        return Packing(self.bits, self.block, self.n, self.k)

    def _given(self) -> list[Any]:
        from tvm import te

        packing = self.packing
        names = ["scale", *(["zero"] if self.zeros else [])]
        return [te.placeholder(packing.words_shape, "uint32", "words"),
                *(te.placeholder(packing.scales_shape, self.scales, name) for name in names)]

    def _tensors(self) -> list[Any]:
        from tvm import te, topi

        from mlc.graph.kernels.few_bits import dense_few_bits

        x, given = te.placeholder((self.m, self.k), self.dtype, "x"), self._given()
        bias = [te.placeholder((self.n,), "float32", "bias")] if self.epilogue else []
        words, scale, zero = (*given, None)[:3]
        y = dense_few_bits(x, words, scale, zero, self.n, self.bits, self.block)
        for each in bias:
            y = topi.nn.relu(topi.add(y, each))
        return [x, *given, *bias, topi.cast(y, self.dtype)]

    def _numbers(self) -> tuple[np.ndarray, ...]:
        """Activations, integers ``[k, n]``, scales and zero points ``[blocks, n]``, and a bias."""
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        half, blocks = 1 << (self.bits - 1), -(-self.k // self.block)
        zero = rng.uniform(-half, half, (blocks, self.n))
        zero = np.floor(zero) if self.zeros == "whole" else zero.astype(numpy_dtype(self.scales)) * bool(self.zeros)
        return (
            rng.standard_normal((self.m, self.k)).astype(numpy_dtype(self.dtype)),
            rng.integers(-half, half, (self.k, self.n)),
            rng.uniform(0.005, 0.015, (blocks, self.n)).astype(numpy_dtype(self.scales)),
            (zero + half).astype(numpy_dtype(self.scales)), rng.standard_normal(self.n).astype("float32"),
        )

    def _data(self) -> list[np.ndarray]:
        from mlc.graph.kernels.few_bits import pack_integers, pack_scales

        x, integers, scale, zero, bias = self._numbers()
        packing = self.packing
        scales = [pack_scales(each, packing) for each in (scale, *([zero] if self.zeros else []))]
        return [x, pack_integers(integers.astype(np.int8), packing), *scales, *([bias] if self.epilogue else [])]

    def _weights(self) -> np.ndarray:
        """``[k, n]``."""
        _, integers, scale, zero, _ = self._numbers()
        half = 1 << (self.bits - 1)
        moved, step = (np.repeat(each.astype("float64"), self.block, 0)[: self.k] for each in (zero, scale))
        return (integers - (moved - half if self.zeros else 0.0)) * step

    def _reference(self, *_: Any) -> np.ndarray:
        numbers = self._numbers()
        sums = numbers[0].astype("float64") @ self._weights()
        return np.maximum(sums + numbers[-1], 0) if self.epilogue else sums


FEW_BITS = (
    PackedProduct(1, 256, 64).case("few_bits_row"),
    PackedProduct(5, 100, 40, zeros="whole", epilogue=True).case("few_bits_zeros"),
    PackedProduct(9, 77, 33, 2, 16, "bfloat16", "whole", "bfloat16").case("few_bits_2_bits"),
    PackedProduct(17, 200, 50, 8, 1000, "bfloat16", "whole").case("few_bits_8_bits"),
    PackedProduct(3, 130, 24, 8, 64, "float32", "fractional", "float32", epilogue=True).case("few_bits_f32"),
    PackedProduct(40, 320, 72, 4, 48, "float16", "fractional").case("few_bits_bands"),
    PackedProduct(1, 256, 64).weights_case("few_bits_weights"),
    PackedProduct(1, 77, 33, 2, 16, "bfloat16", "whole", "bfloat16").weights_case("few_bits_weights_odd"),
)
