"""Which algorithm computes a convolution: the direct one, or one of :mod:`mlc.graph.algorithms` besides it.

Runs between grouping and merging, where a kernel's epilogue is known and its weight is still a constant of ``main``.
Each alternative is merged with the epilogue and priced as the task that it would be, so the choice is made for each
shape and epilogue. Layouts do not depend on it: all alternatives read and write the same blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import transform

from mlc.graph.algorithms.direct import unpacked
from mlc.graph.algorithms.filters import TRANSFORMED, Filters
from mlc.graph.algorithms.registry import Algorithm, offered
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.ir.constants import array_of, constant, tensor_of
from mlc.graph.ir.halves import is_narrow
from mlc.graph.ir.rewrite import bindings, builder_of, op_name, rebuilt, replaced, shape_of
from mlc.graph.kernels.blocked import BANDED, CONVOLUTION
from mlc.graph.task import Task, normalise
from mlc.graph.tasks import human_name
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.sizes import in_scope
from mlc.target import Target

__all__ = ["ChooseKernels", "Price", "cheapest"]

#: seconds of one call of a task, None where nobody knows
Price = Callable[[Task], "float | None"]

#: part of the direct kernel's time that one which rounds more and has larger weights may take at most
MARGIN = 0.97


def cheapest(known: Sequence[float | None], estimated: Sequence[float]) -> int:
    """The alternative to take; the first is the one to stay with unless another is clearly faster.

    Where two or more prices are known the best of them wins, so that nothing is taken that was measured to be slower
    or not at all; otherwise the estimates decide.
    """
    priced = [i for i, seconds in enumerate(known) if seconds is not None]
    seconds = [math.inf if s is None else s for s in known] if len(priced) > 1 else list(estimated)
    best = min(range(len(seconds)), key=lambda i: (seconds[i], i))
    return 0 if seconds[best] > MARGIN * seconds[0] else best


@dataclass
class _Site:
    """A kernel with a convolution and what it may be replaced by.

    ``weight`` is the place of the convolution's weight among the arguments of a call. ``algorithms`` are those of
    ``callees``, the direct one first.
    """

    shape: Convolution
    weight: int
    algorithms: list[Algorithm]
    callees: list[tvm.ir.GlobalVar]
    calls: int = 0
    chosen: int = 0


def ChooseKernels(
    target: Target, price: Price | None = None, options: CompileOptions = DEFAULT_OPTIONS, *,
    notify: Callable[[Task], None] | None = None, filters: MutableMapping[int, Filters] | None = None,
) -> tvm.transform.Pass:
    """Module pass: every convolution of a CPU target gets the kernel with the lowest price.

    The task that each alternative would be is handed to ``price``; where fewer than two prices are known (or ``price``
    is None) an analytic estimate decides. Tasks with an equal ``choice`` compete for the same calls; ``notify`` is told
    each of them, taken or not. ``options`` may forbid some. ``filters`` gets what transformed weights are made of where
    that is of 16 bits, by the address of each.
    """

    @tvm.transform.module_pass(opt_level=0, name="ChooseKernels")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if target.kind != "llvm":
            return mod
        prices, told = price or (lambda _task: None), notify or (lambda _task: None)
        return _Chooser(mod, target, prices, options, told, {} if filters is None else filters).run()

    return run


class _Chooser:
    def __init__(
        self, mod: tvm.IRModule, target: Target, price: Price, options: CompileOptions, notify: Callable[[Task], None],
        filters: MutableMapping[int, Filters],
    ) -> None:
        self._mod, self._target, self._price, self._notify = mod, target, price, notify
        self._options, self._filters = options, filters
        self._builder = builder_of(mod)
        self._estimate = Estimate(target.tvm, _constant_bytes(mod))
        self._sites: dict[str, _Site | None] = {}  # by the symbol that main calls

    def run(self) -> tvm.IRModule:
        for binding in bindings(self._mod["main"]):
            site = self._site(binding.value)
            if site is not None:
                site.calls += 1
        sites = [site for site in self._sites.values() if site is not None and site.calls]
        if not sites:
            return self._mod
        merged = _merged(self._builder.get(), [callee for site in sites for callee in site.callees])
        for site in sites:
            self._choose(site, merged)
        return self._rewritten() if any(site.chosen for site in sites) else self._mod

    # -- what could be called instead

    def _site(self, value: relax.Expr) -> _Site | None:
        """The site that an expression of main calls, if its weight is a constant."""
        callee = _callee(value)
        if callee is None:
            return None
        if callee.name_hint not in self._sites:
            self._sites[callee.name_hint] = self._new_site(callee, value)
        site = self._sites[callee.name_hint]
        return None if site is None or array_of(_arguments(value)[site.weight]) is None else site

    def _new_site(self, callee: tvm.ir.GlobalVar, value: relax.Call) -> _Site | None:
        func = self._mod[callee]
        found = _convolution(self._mod, func, value)
        if found is None:
            return None
        call, weight = found
        shape = _shape_of_convolution(self._mod, call)
        direct, *others = offered(shape, self._options)
        site = _Site(shape, weight, [direct], [callee])
        for algorithm in others:
            prim = self._builder.add_func(algorithm.function(shape), algorithm.name)
            whole = prim
            if isinstance(func, relax.Function):
                param = relax.Var(f"weight_{algorithm.name}",
                                  relax.TensorType(algorithm.weight_shape(shape), "float32"))
                whole = self._regrouped(func, call, callee.name_hint, prim, weight, param)
            site.algorithms.append(algorithm)
            site.callees.append(whole)
        return site if others else None

    def _regrouped(
        self, func: relax.Function, call: relax.Call, name: str, prim: tvm.ir.GlobalVar, weight: int, param: relax.Var
    ) -> tvm.ir.GlobalVar:
        """The grouped function with ``prim`` called in place of ``call``, and ``param`` as the weight."""
        params = [relax.Var(param.name, param.ty) for param in func.params]
        params[weight] = param
        image: dict[relax.Var, relax.Expr] = dict(zip(func.params, params, strict=True))
        body = relax.BlockBuilder(self._builder.get())
        name = name.replace(call.args[0].name_hint, prim.name_hint, 1)
        with body.function(name, params, attrs=dict(func.attrs)):
            with body.dataflow():
                for binding in bindings(func):
                    value = replaced(binding.value, image)
                    if binding.value.same_as(call):
                        args = relax.Tuple([replaced(call.args[1].fields[0], image), param])
                        value = relax.Call(call.op, [prim, args, *call.args[2:]], call.attrs, call.ty_args)
                    image[binding.var] = body.emit(value, binding.var.name)
                result = body.emit_output(replaced(func.body.body, image))
            body.emit_func_output(result)
        return self._builder.add_func(body.finalize()[name], name)

    # -- the choice

    def _choose(self, site: _Site, merged: Mapping[str, tirx.PrimFunc]) -> None:
        tasks = [
            Task(human_name(callee.name_hint), normalise(merged[callee.name_hint], in_scope()), self._target,
                 site.calls)
            for callee in site.callees
        ]
        rivals = [task.competing(tasks[0].key) for task in tasks]
        for task in rivals:
            self._notify(task)
        known = [self._price(task) for task in rivals]
        estimated = [algorithm.seconds(site.shape, self._estimate) for algorithm in site.algorithms]
        site.chosen = cheapest(known, estimated)

    def _rewritten(self) -> tvm.IRModule:
        bound = {b.var: b.value for b in bindings(self._mod["main"])}

        def chosen(_builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
            site = self._site(bound[var])
            return self._with_kernel(value, site) if site is not None and site.chosen else value

        return rebuilt(self._mod, bound, chosen, self._builder)

    def _with_kernel(self, call: relax.Call, site: _Site) -> relax.Call:
        """The call with the chosen kernel and a weight transformed for it."""
        args, callee, algorithm = _arguments(call), site.callees[site.chosen], site.algorithms[site.chosen]
        packed = array_of(args[site.weight])
        assert packed is not None
        weight = unpacked(packed)
        args[site.weight] = constant(algorithm.pack(weight, site.shape))
        made = tensor_of(args[site.weight])
        if made is not None and algorithm.name in TRANSFORMED and is_narrow(weight):
            self._filters[int(made.data_ptr())] = Filters(np.ascontiguousarray(weight), algorithm.name)
        if isinstance(call.op, tvm.ir.GlobalVar):
            return relax.Call(callee, args, call.attrs, call.ty_args)
        data = relax.Tuple(args[:2])  # kernels read free sizes off their data
        return relax.Call(call.op, [callee, data, *call.args[2:]], call.attrs, call.ty_args)


def _merged(mod: tvm.IRModule, callees: Sequence[tvm.ir.GlobalVar]) -> dict[str, tirx.PrimFunc]:
    """What each grouped function is as one tensor function, by name; the others as they are."""
    groups = [callee for callee in callees if isinstance(mod[callee], relax.Function)]
    params = [[relax.Var(param.name, param.ty) for param in mod[group].params] for group in groups]
    builder = relax.BlockBuilder(mod)
    with builder.function("main", [param for each in params for param in each]):
        with builder.dataflow():
            calls = [builder.emit(relax.Call(group, each)) for group, each in zip(groups, params, strict=True)]
            result = builder.emit_output(relax.Tuple(calls))
        builder.emit_func_output(result)
    fused = transform.FuseTIR()(builder.get())  # leaves out what main does not call
    found = {callee.name_hint: mod[callee] for callee in callees}
    for group, binding in zip(groups, bindings(fused["main"]), strict=False):
        found[group.name_hint] = fused[binding.value.args[0]]
    return found


def _callee(value: relax.Expr) -> tvm.ir.GlobalVar | None:
    """The function that an expression of main calls."""
    if not isinstance(value, relax.Call):
        return None
    if isinstance(value.op, tvm.ir.GlobalVar):
        return value.op
    return value.args[0] if op_name(value) == "relax.call_tir" else None


def _arguments(call: relax.Call) -> list[relax.Expr]:
    return list(call.args if isinstance(call.op, tvm.ir.GlobalVar) else call.args[1].fields)


def _constant_bytes(mod: tvm.IRModule) -> int:
    calls = [b.value for b in bindings(mod["main"]) if _callee(b.value) is not None]
    arrays = [array_of(arg) for call in calls for arg in _arguments(call)]
    return sum(array.nbytes for array in arrays if array is not None)


def _convolution(
    mod: tvm.IRModule, func: relax.Function | tirx.PrimFunc, call: relax.Call
) -> tuple[relax.Call, int] | None:
    """The call of a convolution in a kernel that ``call`` of main calls, and its weight's place in main's call."""
    if isinstance(func, tirx.PrimFunc):
        return (call, 1) if _is_convolution(func) else None
    params = list(func.params)
    for binding in bindings(func):
        callee = _callee(binding.value)
        if callee is not None and isinstance(mod[callee], tirx.PrimFunc) and _is_convolution(mod[callee]):
            weight = _arguments(binding.value)[1]
            place = next((i for i, param in enumerate(params) if param.same_as(weight)), None)
            return None if place is None else (binding.value, place)
    return None


def _is_convolution(func: tirx.PrimFunc) -> bool:
    return bool(func.attrs) and CONVOLUTION in func.attrs and func.attrs[CONVOLUTION]["algorithm"] != BANDED


def _shape_of_convolution(mod: tvm.IRModule, call: relax.Call) -> Convolution:
    """What is convolved, with channels counted in whole blocks."""
    attrs = mod[call.args[0]].attrs[CONVOLUTION]
    data, weight = (shape_of(arg) for arg in call.args[1].fields[:2])  # free sizes may follow
    n, _, height, width, block_in = data
    filters, channels, kernel_h, kernel_w, depth, block_out = weight
    strides, pads, dilation = (tuple(int(v) for v in attrs[key]) for key in ("strides", "pads", "dilation"))
    groups = int(attrs["groups"])
    return Convolution(
        n, channels * depth * groups, filters * block_out, (height, width), (kernel_h, kernel_w), strides, pads,
        dilation, groups, block_in, block_out,
    )
