"""Elementwise work before a convolution, or bytes before a reduction, become part of it.

DenseNet normalises and activates *before* each convolution, and reads a tensor that grows with every layer: as a kernel
of its own that writes and reads the whole tensor once more. Inside the convolution's kernel the schedule computes it
for a chunk of rows at a time, where the convolution reads it from the cache.

Softmax and normalisations of quantised models read what is dequantised from bytes, with a mask or another such tensor
added: four times the bytes of what it is made of. Their stages read a row two or three times, from the first cache, so
that this arithmetic is done again each time, and there nothing but the bytes comes from memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from mlc.graph.algorithms.direct import DIRECT
from mlc.graph.ir.patterns import INJECTIVE, pattern_of
from mlc.graph.ir.rewrite import bindings, builder_of, dtype_of, leaves, op_name, rebuilt, replaced, shape_of
from mlc.graph.kernels.blocked import BANDED, CONVOLUTION
from mlc.target import Target
from schedules.analysis import analyse, walk

__all__ = ["FoldPrologues"]


def FoldPrologues(target: Target) -> tvm.transform.Pass:
    """Module pass over grouped functions: an elementwise group whose only reader is a direct convolution joins it, and
    one that reads bytes a reduction too."""

    @tvm.transform.module_pass(opt_level=0, name="FoldPrologues")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if target.kind != "llvm":
            return mod
        folding = _Folding(mod)
        return folding.rewritten() if folding.prologues else mod

    return run


class _Folding:
    """``prologues`` are the calls of main that become part of another one, and which that is."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod, self._func = mod, mod["main"]
        self._bound: dict[relax.Var, relax.Expr] = {b.var: b.value for b in bindings(self._func)}
        uses = Counter(leaf for value in [*self._bound.values(), self._func.body.body] for leaf in leaves(value))
        self.prologues: dict[relax.Var, relax.Var] = {}
        for var, value in self._bound.items():
            data = self._data(value)
            if not isinstance(data, relax.Var) or uses[data] != 1 or not self._elementwise(data):
                continue
            if not (_is_sized(self._mod, value) or _is_sized(self._mod, self._bound[data])):
                self.prologues[data] = var

    def _data(self, value: relax.Expr) -> relax.Expr | None:
        """What of main's values the direct convolution or the reduction in a called kernel reads, if nothing else in it
        does, and may be made there."""
        steps = list(_steps(self._mod, value))
        conv = next((call for _, call in steps if self._is_direct(self._mod[call.args[0]])), None)
        reader = conv
        if reader is None:
            if not steps or not _reduces(self._mod[steps[0][1].args[0]]):
                return None
            reader = steps[0][1]
        data = reader.args[1].fields[0]
        if conv is None and not self._of_bytes(data):
            return None
        readers = sum(leaf.same_as(data) for _, call in steps for leaf in leaves(call.args[1]))
        return data if readers == 1 else None

    def _of_bytes(self, data: relax.Expr) -> bool:
        """Whether a kernel makes the value of tensors of its shape that are all of bytes."""
        steps = list(_steps(self._mod, self._bound.get(data)))
        made = {var for var, _ in steps}
        whole = [arg for arg in _tensors(steps) if shape_of(arg) == shape_of(data) and arg not in made]
        return bool(whole) and all(dtype_of(arg) in ("uint8", "int8") for arg in whole)

    def _is_direct(self, func: tirx.PrimFunc) -> bool:
        described = (func.attrs or {}).get(CONVOLUTION)
        return described is not None and described["algorithm"] in (DIRECT.name, BANDED)

    def _elementwise(self, data: relax.Var) -> bool:
        """Whether injective kernels make the value, of a tensor of its shape and of smaller ones."""
        steps = list(_steps(self._mod, self._bound.get(data)))
        patterns = [pattern_of(self._mod[call.args[0]]) for _, call in steps]
        whole = (shape_of(arg) == shape_of(data) for arg in _tensors(steps))
        return bool(steps) and max(patterns) <= INJECTIVE and any(whole)

    def rewritten(self) -> tvm.IRModule:
        builder = builder_of(self._mod)
        prologue_of = {var: data for data, var in self.prologues.items()}
        bound = {
            var: self._joined(builder, [prologue_of[var], var]) if var in prologue_of else value
            for var, value in self._bound.items() if var not in self.prologues
        }
        return relax.transform.DeadCodeElimination()(rebuilt(self._mod, bound, builder=builder))

    def _joined(self, builder: relax.BlockBuilder, calls: Sequence[relax.Var]) -> relax.Expr:
        """One call of a group that holds what the calls of main do, the last of which gives the result."""
        steps = [step for var in calls for step in _steps(self._mod, self._bound[var], var)]
        made = {var for var, _ in steps}
        inputs: list[relax.Expr] = []
        for _, call in steps:
            given = [arg for arg in call.args[1].fields if arg not in made]
            inputs += [arg for arg in given if not any(arg.same_as(known) for known in inputs)]
        params = [relax.Var(f"p{i}", arg.ty) for i, arg in enumerate(inputs)]
        sizes: dict[str, tirx.Var] = {}  # a group has variables of its own for them
        for arg in inputs:
            walk(arg.ty, (tirx.Var, lambda var: sizes.setdefault(str(var.name), var)))

        def of_params(type_of: Any) -> Any:
            return tvm_ffi.structural_map(type_of, (tirx.Var, lambda var: sizes.get(str(var.name), var)))

        name = "_".join(["fused", *(_name(self._bound[var]) for var in calls)])
        body = relax.BlockBuilder(builder.get())
        image: dict[relax.Var, relax.Expr] = {}

        def inside(arg: relax.Expr) -> relax.Expr:
            place = next((i for i, known in enumerate(inputs) if known.same_as(arg)), None)
            return image[arg] if place is None else params[place]

        with body.function(name, params, attrs={"Primitive": True}, private=True):
            with body.dataflow():
                for var, call in steps:
                    args = relax.Tuple([inside(arg) for arg in call.args[1].fields])
                    value = relax.Call(call.op, [call.args[0], args, *call.args[2:]], call.attrs,
                                       [of_params(each) for each in call.ty_args])
                    image[var] = body.emit(value)
                result = body.emit_output(image[steps[-1][0]])
            body.emit_func_output(result)
        group = builder.add_func(body.finalize()[name], name)
        return relax.Call(group, inputs)


def _is_sized(mod: tvm.IRModule, value: relax.Expr) -> bool:
    """Whether a kernel is given free sizes beside tensors: types in terms of such a parameter are lost by Relax."""
    return any(isinstance(arg.ty, tvm.ir.PrimType) for _, call in _steps(mod, value) for arg in call.args[1].fields)


def _reduces(func: tirx.PrimFunc) -> bool:
    """Whether the function is made of reductions of one tensor: softmax, a normalisation, a mean."""
    info = analyse(func)
    return bool(info.reductions) and not any(block.windowed or block.contraction for block in info.reductions)


def _steps(
    mod: tvm.IRModule, value: relax.Expr | None, result: relax.Var | None = None
) -> Iterator[tuple[relax.Expr | None, relax.Call]]:
    """The calls of tensor functions that a kernel called in main is made of, with the variables they give values to.

    They read main's own values; ``result`` is the last one's variable.
    """
    if not isinstance(value, relax.Call):
        return
    if op_name(value) == "relax.call_tir" and isinstance(mod[value.args[0]], tirx.PrimFunc):
        yield result, value
    elif isinstance(value.op, tvm.ir.GlobalVar):
        func = mod[value.op]
        image: dict[relax.Var, relax.Expr] = dict(zip(func.params, value.args, strict=True))
        for binding in bindings(func):
            step = replaced(binding.value, image)
            if isinstance(step, relax.Call):
                last = binding.var.same_as(func.body.body) and result is not None
                image[binding.var] = result if last else binding.var
                yield image[binding.var], step
            else:
                image[binding.var] = step


def _tensors(steps: Sequence[tuple[relax.Expr | None, relax.Call]]) -> list[relax.Expr]:
    """The tensors that a kernel's calls read; a free size is an argument too."""
    return [arg for _, call in steps for arg in call.args[1].fields if isinstance(arg.ty, relax.TensorType)]


def _name(call: relax.Call) -> str:
    callee = call.op if isinstance(call.op, tvm.ir.GlobalVar) else call.args[0]
    return str(callee.name_hint).removeprefix("fused_")
