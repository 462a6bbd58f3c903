"""Weights of matrix products, packed at build time into the panels that the GEMM schedule reads."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import tvm
from tvm import relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc.graph.estimate import Estimate
from mlc.graph.ir.constants import array_of, constant
from mlc.graph.ir.patterns import PRODUCT
from mlc.graph.ir.rewrite import dtype_of, op_name, shape_of
from mlc.graph.kernels import bfloat
from mlc.graph.kernels.blocked import PANEL, dense_packed
from mlc.graph.kernels.integer import STEP, dense_integer, dot_form, pack_dense, packed_operand
from mlc.graph.kernels.saturating import Split, dense_bytes, has_bytes
from mlc.graph.layout.remainders import emit_remainder, pays, with_whole_rows
from mlc.graph.precision.bfloats import reads_bfloats
from mlc.graph.precision.integer import is_integer_product
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.target import Target
from schedules.cpu.gemm_matrix import pays as pairs_pay
from schedules.cpu.gemm_tiles import pays as tiles_pay
from schedules.intrin.dot import BFLOATS, QUADS
from schedules.intrin.matrix import BFLOAT_PAIRS, BYTE_PAIRS, DEPTHS, ROWS
from schedules.intrin.tiles import TILE

__all__ = ["PackWeights"]

#: of what packed weights of a type are multiplied by dot products, or in tiles
_FORMS = {"int8": QUADS, "bfloat16": BFLOATS}


def PackWeights(target: Target, options: CompileOptions = DEFAULT_OPTIONS) -> tvm.transform.Pass:
    """Module pass: ``matmul(x, constant [K, N])`` reads its weight as ``[N/16, K, 16]`` on CPU targets, or as
    :func:`mlc.graph.kernels.integer.pack_dense` packs 8-bit integers, for pairs of rows where that pays. Of products of
    integers, a second operand that is no constant is packed by a kernel, and where bytes are multiplied with saturation
    alone, a constant becomes two (:mod:`mlc.graph.kernels.saturating`). Products of float32 with constants read both
    operands as bfloat16 where the model or the ``options`` say so (:mod:`mlc.graph.precision.bfloats`).

    ``N`` that is no multiple of the panel is padded with zero columns, and the result is sliced; so are rows that make
    no whole tiles of a matrix unit, or pairs, where that pays.
    """

    @tvm.transform.module_pass(opt_level=0, name="PackWeights")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Packer(mod, target, options).run() if target.kind == "llvm" else mod

    return run


def _pack(weight: np.ndarray) -> np.ndarray:
    """The panels ``[N/16, K, 16]`` as a view where no padding is needed: weights can be hundreds of megabytes."""
    depth, columns = weight.shape
    panels = -(-columns // PANEL)
    if columns % PANEL:
        weight = np.pad(weight, ((0, 0), (0, panels * PANEL - columns)))
    return weight.reshape(depth, panels, PANEL).transpose(1, 0, 2)


def _kernel(call: relax.Call, packed: relax.Expr) -> tuple[Callable[..., te.Tensor], int]:
    """The kernel of a product with packed weights, and the number of products in a step of its sum."""
    if is_integer_product(call):
        return dense_integer, max(STEP, shape_of(packed)[-1])
    return (bfloat.dense_bfloat, shape_of(packed)[-1]) if dtype_of(packed) == "bfloat16" else (dense_packed, 1)


@mutator
class _Packer(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, target: Target, options: CompileOptions) -> None:
        super().__init__(mod)
        self._mod, self._target = mod, target
        self._estimate, self._narrow = Estimate(target.tvm, 0.0), reads_bfloats(mod["main"], target, options)
        #: by the address of a weight: unrolled recurrences read one at every step
        self._packed: dict[tuple[int, tuple[int, ...], str], relax.Expr] = {}
        self._splits: dict[tuple[int, tuple[int, ...]], Split] = {}
        #: activations as columns, for products of sparse weights
        self._turned: dict[relax.Expr, relax.Expr] = {}

    def run(self) -> tvm.IRModule:
        gvar = self._mod.get_global_var("main")
        self.builder_.update_func(gvar, self.visit_expr(self._mod["main"]))
        return self.builder_.get()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if op_name(call) != "relax.matmul":
            return call
        data, weight = call.args
        split = self._split(call)
        if split is not None:
            return self._saturating(data, split)
        packed = self._panels(call)
        if packed is None:
            return call
        (*_, depth, columns), rank = shape_of(weight), len(shape_of(data))
        kernel, step = _kernel(call, packed)
        if kernel is bfloat.dense_bfloat:
            data = self.builder_.emit(relax.op.astype(data, "bfloat16"))
        rows, short = shape_of(data)[-2], self._short_rows(data, packed)
        if depth % step or short:
            around = [*[0] * (2 * rank - 3), short, 0, -depth % step]
            data = self.builder_.emit(relax.op.nn.pad(data, around))
        product = self.builder_.call_te(kernel, data, packed, primfunc_name_hint="dense")
        cut = [axis for axis, more in ((rank - 2, short), (rank - 1, columns % PANEL)) if more]
        if not cut:
            return product
        ends = {rank - 2: rows, rank - 1: columns}
        return relax.op.strided_slice(self.builder_.emit(product), cut, [0] * len(cut), [ends[axis] for axis in cut])

    def _short_rows(self, data: relax.Expr, packed: relax.Expr) -> int:
        """How many rows of zeros are put below the activations, where a matrix unit multiplies whole tiles of them
        faster than dot products do the rows that there are, or where rows are multiplied in pairs."""
        rows, form = shape_of(data)[-2], _FORMS.get(dtype_of(packed))
        if form is None or not isinstance(rows, int):
            return 0
        if (dtype_of(packed), shape_of(packed)[-1]) in DEPTHS.values():
            return -rows % ROWS
        panels, steps = shape_of(packed)[-4:-2]
        return -rows % TILE if tiles_pay(rows, panels * PANEL, steps, form, self._target.tvm) else 0

    def _split(self, call: relax.Call) -> Split | None:
        """The weight of an integer product in two, where that is faster."""
        data, weight = call.args
        array, shape = array_of(weight), shape_of(data)
        if array is None or array.ndim != 2 or not is_integer_product(call) or not has_bytes(self._target):
            return None
        if not all(isinstance(extent, int) for extent in shape) or len(shape) < 2 or array.shape[1] % PANEL:
            return None
        place = (array.ctypes.data, array.shape)
        if place not in self._splits:
            self._splits[place] = Split.of(array)
        split = self._splits[place]
        return split if pays(split, prod(shape[:-1]), self._estimate) else None

    def _saturating(self, data: relax.Expr, split: Split) -> relax.Expr:
        """``dense_bytes(x, W1) + remainder(x, W2)``."""
        shape = shape_of(data)
        whole, short = data, -shape[-1] % STEP
        if short:
            whole = self.builder_.emit(relax.op.nn.pad(data, [0] * (2 * len(shape) - 1) + [short]))
        arguments: list[relax.Expr] = [whole, constant(split.panels)]
        if split.rest.any():
            arguments.append(self._remainder(data, split))
        return self.builder_.call_te(dense_bytes, *arguments, primfunc_name_hint="dense",
                                     primfunc_attrs={"op_pattern": PRODUCT})

    def _remainder(self, data: relax.Expr, split: Split) -> relax.Expr:
        if data not in self._turned:
            rows = self.builder_.emit(relax.op.reshape(data, [prod(shape_of(data)[:-1]), shape_of(data)[-1]]))
            columns = self.builder_.emit(relax.op.permute_dims(rows, [1, 0]))
            self._turned[data] = with_whole_rows(self.builder_, columns)
        return emit_remainder(self.builder_, self._turned[data], split)

    def _panels(self, call: relax.Call) -> relax.Expr | None:
        """The second operand as the kernel reads it, if there is a kernel for the product."""
        data, weight = call.args
        array, integer = array_of(weight), is_integer_product(call)
        if len(shape_of(data)) < 2:
            return None
        if array is None or array.ndim != 2:
            return self._packed_operand(data, weight) if integer else None
        if not integer and not array.dtype == dtype_of(data) == "float32":
            return None
        form = self._form(data, array.shape, BYTE_PAIRS if integer else BFLOAT_PAIRS)
        place = (array.ctypes.data, array.shape, form)
        if place not in self._packed:
            self._packed[place] = constant(self._pack(array, integer, form))
        return self._packed[place]

    def _form(self, data: relax.Expr, shape: tuple[int, ...], pairs: str) -> str:
        """The form of a packed weight: of ``pairs`` where two rows at a time are faster, else of dot products."""
        rows, (*_, depth, columns) = shape_of(data)[-2], shape
        if isinstance(rows, int) and pairs_pay(rows, columns, depth, pairs, self._target.tvm):
            return pairs
        return BFLOATS if pairs == BFLOAT_PAIRS else dot_form(self._target)

    def _pack(self, array: np.ndarray, integer: bool, form: str) -> np.ndarray:
        if integer:
            return pack_dense(array, form)
        if not self._narrow(array):
            return _pack(array)
        return bfloat.pack_dense(array, DEPTHS[form][1] if form == BFLOAT_PAIRS else bfloat.STEP)

    def _packed_operand(self, data: relax.Expr, weight: relax.Expr) -> relax.Expr | None:
        """Integers that a kernel packs, of one matrix for all of ``data`` or of one for each."""
        shape, batch = shape_of(weight), shape_of(data)[:-2]
        fixed = all(isinstance(extent, int) for extent in (*batch, *shape))
        if len(shape) < 2 or not fixed or shape[:-2] not in ((), batch):
            return None
        form = self._form(data, shape, BYTE_PAIRS)
        packed = self.builder_.call_te(packed_operand, weight, form, primfunc_name_hint="pack")
        return self.builder_.emit(packed)
