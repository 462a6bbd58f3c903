"""Which of the model's nodes each call of a lowered module computes.

Nodes are known by the names of variables (:mod:`mlc.frontend.origins`). A call does the work of the node that its
variable is named after, and of those nodes before it whose variables are gone: a rewrite has merged them into it. What
a rewrite adds (a copy into another layout) works for the nodes that read it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax import transform

from mlc.frontend.origins import node_of
from mlc.graph.ir.rewrite import bindings, builder_of, emit_result, is_constant, leaves, op_name, replaced, results_of

__all__ = ["MERGED", "FuseOps", "NodeGraph", "Origins", "without_merged"]

#: an attribute of main: for the variable of a grouped call, those of the calls that became it
MERGED = "mlc.merged"

#: for each tensor function, by symbol, the nodes that each call of it does the work of, in the order of calls
Origins = Mapping[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class NodeGraph:
    """The nodes of an imported module: which read which, and which made the results, in order."""

    inputs: Mapping[int, frozenset[int]]
    results: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, mod: tvm.IRModule) -> NodeGraph:
        """Read it from a module as it was imported."""
        inputs: dict[int, set[int]] = defaultdict(set)
        behind: dict[relax.Var, frozenset[int]] = {}  # the nodes that a variable holds something of
        func = mod["main"]
        for binding in bindings(func):
            before = frozenset().union(*(behind.get(leaf, frozenset()) for leaf in leaves(binding.value)))
            node = node_of(binding.var.name)
            if node is None:
                behind[binding.var] = before
            else:
                inputs[node] |= before - {node}
                behind[binding.var] = frozenset((node,))
        bound = {b.var: b.value for b in bindings(func)}
        made = results_of(func.body.body, bound)
        results = tuple(behind.get(var, frozenset()) if isinstance(var, relax.Var) else frozenset() for var in made)
        return cls({node: frozenset(before) for node, before in inputs.items()}, results)

    def with_lost(self, nodes: Iterable[int], left: set[int]) -> frozenset[int]:
        """``nodes`` and those before them up to such as are ``left``."""
        found, pending = set(nodes), list(nodes)
        while pending:
            for before in self.inputs.get(pending.pop(), ()):
                if before not in left and before not in found:
                    found.add(before)
                    pending.append(before)
        return frozenset(found)

    def origins(self, mod: tvm.IRModule) -> Origins:
        """The nodes that each call of a module lowered from this one computes."""
        func = mod["main"]
        merged = (func.attrs or {}).get(MERGED, {})
        bound = {b.var: b.value for b in bindings(func)}
        own = {var: _named(var.name, merged) for var, value in bound.items() if _is_kernel(value)}
        left = set().union(*own.values())
        found: dict[relax.Var, frozenset[int]] = defaultdict(frozenset)
        last = results_of(func.body.body, bound)
        for var, nodes in zip(last, self.results, strict=True):
            if isinstance(var, relax.Var):
                found[var] |= self.with_lost(nodes - left if own.get(var) else nodes, left)
        for var, value in reversed(bound.items()):
            if own.get(var):
                found[var] = self.with_lost(own[var], left) | (found[var] if var in last else frozenset())
            for leaf in leaves(value):
                if not own.get(leaf):
                    found[leaf] |= found[var]
        return _by_symbol(bound, found)


def _named(name: str, merged: Mapping[str, Iterable[str]]) -> frozenset[int]:
    """The nodes that a variable of main is named after, or those that became it."""
    nodes = (node_of(str(each)) for each in merged.get(name, (name,)))
    return frozenset(node for node in nodes if node is not None)


def _is_kernel(value: relax.Expr) -> bool:
    """Whether it is the call of a tensor function: what is a view alone may be named after what it prepares."""
    return isinstance(value, relax.Call) and op_name(value) == "relax.call_tir"


def _by_symbol(bound: Mapping[relax.Var, relax.Expr], found: Mapping[relax.Var, frozenset[int]]) -> Origins:
    calls: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for var, value in bound.items():
        if _is_kernel(value):
            calls[value.args[0].name_hint].append(tuple(sorted(found[var])))
    return {symbol: tuple(each) for symbol, each in calls.items()}


def without_merged(mod: tvm.IRModule) -> tvm.IRModule:
    """The module without the attribute that :data:`FuseOps` leaves."""
    if MERGED not in (mod["main"].attrs or {}):
        return mod
    found = tvm.IRModule(mod.functions, attrs=mod.attrs, global_infos=mod.global_infos)
    found.update_func(mod.get_global_var("main"), mod["main"].without_attr(MERGED))
    return found


def _fuse_ops(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """TVM's grouping, which names results afresh: they get the names of what they hold, and main an attribute that
    says which calls became one."""
    return _Groups(mod, transform.FuseOps()(mod)).named()


FuseOps = tvm.transform.module_pass(_fuse_ops, opt_level=0, name="FuseOps")


class _Groups:
    """Finds each step of the grouped calls in the module before: the same function of the same values."""

    def __init__(self, before: tvm.IRModule, after: tvm.IRModule) -> None:
        self._after = after
        self._old: dict[tuple[object, ...], list[relax.Var]] = defaultdict(list)
        for binding in bindings(before["main"]):
            self._old[self._key(binding.value, lambda leaf: leaf)].append(binding.var)
        self._image: dict[relax.Expr, relax.Expr] = {p: p for p in before["main"].params}
        self._image.update(zip(after["main"].params, before["main"].params, strict=True))

    def named(self) -> tvm.IRModule:
        func = self._after["main"]
        merged: dict[str, list[str]] = {}
        builder, image = builder_of(self._after), dict[relax.Var, relax.Expr]()
        with builder.function("main", list(func.params), attrs=dict(func.attrs or {})):
            with builder.dataflow():
                for binding in bindings(func):
                    steps = list(self._steps(binding.var, binding.value))
                    new = builder.emit(replaced(binding.value, image), steps[-1] if steps else binding.var.name)
                    image[binding.var] = new
                    if len(steps) > 1:
                        merged[str(new.name)] = steps
                result = emit_result(builder, replaced(func.body.body, image))
            builder.emit_func_output(result)
        mod = builder.finalize()
        mod.update_func(mod.get_global_var("main"), mod["main"].with_attr(MERGED, merged))
        return mod

    def _steps(self, var: relax.Var, value: relax.Expr) -> Iterator[str]:
        """The names that the results of what is called had before."""
        if not (isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar)):
            yield from self._step(var, value, self._image)
            return
        func = self._after[value.op]
        inside = {param: self._image.get(arg, arg) for param, arg in zip(func.params, value.args, strict=True)}
        for binding in bindings(func):
            yield from self._step(binding.var, binding.value, inside)
            self._image[var] = inside.get(binding.var, var)

    def _step(self, var: relax.Var, value: relax.Expr, image: dict[relax.Expr, relax.Expr]) -> Iterator[str]:
        if isinstance(value, relax.Var):  # another name of it
            image[var] = image.get(value, value)
            return
        known = self._old.get(self._key(value, lambda leaf: image.get(leaf, leaf)))
        if known:
            image[var] = known.pop(0) if len(known) > 1 else known[0]
            yield str(image[var].name)

    @staticmethod
    def _key(value: relax.Expr, of: Callable[[relax.Expr], relax.Expr]) -> tuple[object, ...]:
        """Equal for calls of one function with the same arguments."""
        if not isinstance(value, relax.Call):
            return ("", *map(of, leaves(value)))
        args = [each for arg in value.args for each in (arg.fields if isinstance(arg, relax.Tuple) else (arg,))]
        return tuple(_identity(arg, of) for arg in (value.op, *args))


def _identity(arg: relax.Expr, of: Callable[[relax.Expr], relax.Expr]) -> object:
    if isinstance(arg, tvm.ir.GlobalVar):
        return arg.name_hint
    if isinstance(arg, relax.Var):
        arg = of(arg)
    return arg if isinstance(arg, relax.Var) else hash(arg) if is_constant(arg) else type(arg).__name__
