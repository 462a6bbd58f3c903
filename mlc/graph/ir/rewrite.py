"""The rewrite engine of the simplifications: rules by operator name, applied to ``main`` until none fires.

A rule looks at one expression whose arguments are final already and returns what to put in its place, or None::

    def drop_identity(call, scope):          # R.reshape(x, x.shape)  -->  x
        return call.args[0] if shape_of(call) == shape_of(call.args[0]) else None

    DropIdentity = rewrite_pass("DropIdentity", {"relax.reshape": (drop_identity,)})

``main`` must be straight-line code in A-normal form (what every importer makes): bindings of calls, tuples and
projections, no branches. Bindings that nothing uses are left out of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst

from mlc.errors import ModelError
from mlc.graph.ir.constants import array_of
from mlc.sizes import UndecidedSizeError, depends_on, free_sizes, size_of

__all__ = [
    "PROJECTION", "Change", "Rule", "Rules", "Scope", "bindings", "builder_of", "check_straight_line", "dtype_of",
    "is_constant", "leaves", "op_name", "rebuilt", "replaced", "rewrite", "rewrite_pass", "shape_of",
]

Rule = Callable[[relax.Expr, "Scope"], "relax.Expr | None"]
Rules = Mapping[str, Sequence[Rule]]
#: of the builder, the variable and what it would be bound to, what it is bound to instead
Change = Callable[[relax.BlockBuilder, relax.Var, relax.Expr], relax.Expr]

#: the key under which rules for ``tuple[i]`` stand
PROJECTION = "tuple_get_item"

_MAX_SWEEPS = 32
_MAX_FIRINGS = 64  # of rules on one binding in one sweep; more means two rules undo each other


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """The shape of a tensor expression; free dimensions are :class:`mlc.sizes.Size`, which behave as numbers do."""
    return tuple(size_of(dim) for dim in expr.ty.shape.values)


def dtype_of(expr: relax.Expr) -> str:
    """The element type of a tensor expression, such as ``float32``."""
    return str(expr.ty.dtype)


def bindings(func: relax.Function) -> Iterator[relax.VarBinding]:
    """Every binding of a straight-line function, in order."""
    for block in func.body.blocks:
        for binding in block.bindings:
            if not isinstance(binding, relax.VarBinding) or isinstance(binding.value, relax.If | relax.Function):
                raise ModelError(
                    f"the graph must be straight-line code, but {binding.var.name} is bound by a branch, a local "
                    "function or a shape match; export the model with fixed shapes and without control flow"
                )
            yield binding


def check_straight_line(mod: tvm.IRModule) -> None:
    """Raise :class:`ModelError` unless main is straight-line code whose shapes are static, or declared to be free."""
    func = mod["main"]
    if not isinstance(func, relax.Function):
        raise ModelError(f"main must be a Relax function, got {type(func).__name__}")
    free = free_sizes(mod).keys()
    for var in [*func.params, *(binding.var for binding in bindings(func))]:
        for ty in var.ty.fields if isinstance(var.ty, relax.TupleType) else [var.ty]:
            if isinstance(ty, relax.TensorType) and not _is_known(ty, free):
                raise ModelError(
                    f"every tensor must have a static shape, but {var.name} is {ty}; fix the input sizes when exporting"
                )


def _is_known(ty: relax.TensorType, free: Set[str]) -> bool:
    return isinstance(ty.shape, relax.ShapeExpr) and all(depends_on(d) <= free for d in ty.shape.values)


class Scope:
    """The context of a rule: queries about the function being built, and adding bindings to it."""

    def __init__(self, builder: relax.BlockBuilder, rules: Rules) -> None:
        self._builder = builder
        self._rules = rules
        self._uses: Counter[relax.Var] = Counter()
        self._name = ""
        self.firings = 0

    def value(self, expr: relax.Expr) -> relax.Expr:
        """The expression a variable is bound to; parameters and everything else stand for themselves."""
        if not isinstance(expr, relax.Var):
            return expr
        bound = self._builder.lookup_binding(expr)
        return expr if bound is None else bound

    def call(self, expr: relax.Expr, *names: str) -> relax.Call | None:
        """The call that makes ``expr`` if it is one of the operators ``names`` (without ``relax.``), else None."""
        value = self.value(expr)
        if isinstance(value, relax.Call) and op_name(value).removeprefix("relax.") in names:
            return value
        return None

    def rules(self, name: str) -> Sequence[Rule]:
        """The rules for an operator (without ``relax.``)."""
        return self._rules.get(f"relax.{name}", ())

    def once(self, expr: relax.Expr) -> bool:
        """Whether nothing but the expression at hand uses the variable. Errs on the side of False."""
        return isinstance(expr, relax.Var) and self._uses[expr] <= 1

    def uses(self, var: relax.Var) -> int:
        """How many arguments of the function's bindings the variable is."""
        return self._uses[var]

    def array(self, expr: relax.Expr) -> np.ndarray | None:
        """The elements, where ``expr`` is a constant."""
        return array_of(expr)

    def emit(self, expr: relax.Expr, name: str = "") -> relax.Expr:
        """Bind ``expr`` after letting the rules at it; a leaf comes back as it is. Left out, its name is that of the
        binding at hand: names say what a value comes from."""
        expr = self._settle(self._builder.normalize(expr))
        if not isinstance(expr, relax.Call | relax.Tuple | relax.TupleGetItem):
            return expr
        return self._builder.emit(expr, name or self._name)

    def bind(self, old: relax.Var, value: relax.Expr, uses: int) -> relax.Expr:
        """Emit what replaces ``old`` and carry over how often it is used."""
        self._name = old.name
        new = self.emit(value, old.name)
        if isinstance(new, relax.Var):
            self._uses[new] += uses
        return new

    def _settle(self, expr: relax.Expr) -> relax.Expr:
        for _ in range(_MAX_FIRINGS):
            for rule in self._rules.get(_key(expr), ()):
                result = self._applied(rule, expr)
                if result is not None:
                    self.firings += 1
                    expr = self._builder.normalize(result)
                    break
            else:
                return expr
        raise AssertionError(f"rules for {_key(expr)} undo each other: {expr}")

    def _applied(self, rule: Rule, expr: relax.Expr) -> relax.Expr | None:
        """The result of a rule; None also if the rule needs the value of a free dimension."""
        try:
            return rule(expr, self)
        except UndecidedSizeError:
            return None


class _Firing(Exception):
    """A rule has something to add."""


class _Look(Scope):
    """A read-only context of a rule, for a function as it is; adding a binding ends it."""

    def __init__(self, func: relax.Function, rules: Rules, uses: Counter[relax.Var]) -> None:
        super().__init__(relax.BlockBuilder(), rules)
        self._bound = {binding.var: binding.value for binding in bindings(func)}
        self._uses = uses

    def value(self, expr: relax.Expr) -> relax.Expr:
        return self._bound.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def emit(self, expr: relax.Expr, name: str = "") -> relax.Expr:
        raise _Firing

    def fires(self) -> bool:
        """Whether a sweep would change something. Errs on the side of True."""
        if any(isinstance(value, relax.Var) for value in self._bound.values()):  # a sweep sees through another name
            return True
        try:
            return any(self._applied(rule, value) is not None for var, value in self._bound.items() if self._uses[var]
                       for rule in self._rules.get(_key(value), ()))
        except _Firing:
            return True


def op_name(call: relax.Call) -> str:
    """``relax.nn.conv2d``, or an empty string for a call of a function."""
    return str(call.op.name) if isinstance(call.op, tvm.ir.Op) else ""


def _key(expr: relax.Expr) -> str:
    if isinstance(expr, relax.Call):
        return op_name(expr)
    return PROJECTION if isinstance(expr, relax.TupleGetItem) else ""


def leaves(expr: relax.Expr) -> Iterator[relax.Var]:
    """The variables that an expression in A-normal form uses, as often as it uses them; free sizes are none."""
    if isinstance(expr, relax.Var):
        if not isinstance(expr.ty, tvm.ir.PrimType):
            yield expr
    elif isinstance(expr, relax.Call):
        for arg in expr.args:
            yield from leaves(arg)
    elif isinstance(expr, relax.Tuple):
        for field in expr.fields:
            yield from leaves(field)
    elif isinstance(expr, relax.TupleGetItem):
        yield from leaves(expr.tuple_value)


def replaced(expr: relax.Expr, image: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """The expression with variables replaced by what ``image`` says."""
    if isinstance(expr, relax.Var):
        return image.get(expr, expr)
    if isinstance(expr, relax.Call):
        args = [replaced(arg, image) for arg in expr.args]
        if all(new.same_as(old) for new, old in zip(args, expr.args, strict=True)):
            return expr
        return relax.Call(expr.op, args, expr.attrs, expr.ty_args)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([replaced(field, image) for field in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(replaced(expr.tuple_value, image), expr.index)
    return expr


def results_of(result: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> list[relax.Expr]:
    """The tensors that a function returns as ``result``, a tensor or a tuple of them, by its bindings."""
    while isinstance(bound.get(result), relax.Var | relax.Tuple):
        result = bound[result]
    return list(result.fields) if isinstance(result, relax.Tuple) else [result]


def emit_result(builder: relax.BlockBuilder, result: relax.Expr) -> relax.Var:
    """``builder.emit_output`` of the result, which keeps its name."""
    return builder.emit_output(result, result.name if isinstance(result, relax.Var) else "")


def builder_of(mod: tvm.IRModule) -> relax.BlockBuilder:
    """A builder with the functions of ``mod`` but for main, which is to be built anew."""
    return relax.BlockBuilder(tvm.IRModule({g: f for g, f in mod.functions_items() if g.name_hint != "main"}))


def rebuilt(
    mod: tvm.IRModule, bound: Mapping[relax.Var, relax.Expr], change: Change | None = None,
    builder: relax.BlockBuilder | None = None, image: dict[relax.Var, relax.Expr] | None = None,
) -> tvm.IRModule:
    """The module with the bindings ``bound`` in main, in their order; ``change`` sees each as it comes, its variables
    replaced by the new ones. ``builder`` has the other functions (default: :func:`builder_of` the module), and
    ``image`` gets what stands for each variable, for a ``change`` that asks."""
    func = mod["main"]
    builder = builder_of(mod) if builder is None else builder
    image = {} if image is None else image
    with builder.function("main", list(func.params), attrs=dict(func.attrs or {})):
        with builder.dataflow():
            for var, before in bound.items():
                value = replaced(before, image)
                image[var] = builder.emit(value if change is None else change(builder, var, value), var.name)
            result = emit_result(builder, replaced(func.body.body, image))
        builder.emit_func_output(result)
    return builder.finalize()


def _live_uses(func: relax.Function) -> Counter[relax.Var]:
    """How often each variable is used by bindings that the result depends on."""
    uses: Counter[relax.Var] = Counter(leaves(func.body.body))
    for binding in reversed(list(bindings(func))):
        if uses[binding.var]:
            uses.update(leaves(binding.value))
    return uses


def _sweep(func: relax.Function, rules: Rules, uses: Counter[relax.Var]) -> tuple[relax.Function, int]:
    """One pass over the function; the second value says how many rules fired."""
    builder = relax.BlockBuilder()
    scope = Scope(builder, rules)
    scope._uses.update({param: uses[param] for param in func.params})
    image: dict[relax.Var, relax.Expr] = {}
    with builder.function("main", list(func.params), attrs=dict(func.attrs or {})):
        with builder.dataflow():
            for binding in bindings(func):
                if uses[binding.var]:
                    image[binding.var] = scope.bind(binding.var, replaced(binding.value, image), uses[binding.var])
            result = emit_result(builder, replaced(func.body.body, image))
        builder.emit_func_output(result)
    return builder.finalize()["main"], scope.firings


def rewrite(mod: tvm.IRModule, rules: Rules) -> tvm.IRModule:
    """Apply ``rules`` to ``main`` until none fires; the module itself comes back if none ever does."""
    original = func = mod["main"]
    if not any(_key(binding.value) in rules for binding in bindings(func)):
        return mod  # most passes have nothing to do in most networks, and unrolled ones have thousands of bindings
    for _ in range(_MAX_SWEEPS):
        uses = _live_uses(func)
        useless = func is not original and not all(uses[binding.var] for binding in bindings(func))
        if not useless and not _Look(func, rules, uses).fires():  # much sooner seen than swept
            break
        new, firings = _sweep(func, rules, uses)
        if firings or useless:
            func = new
        if not firings:
            break
    else:
        raise AssertionError(f"rules for {sorted(rules)} did not settle in {_MAX_SWEEPS} sweeps")
    if func is original:
        return mod
    mod = tvm.IRModule(mod.functions, attrs=mod.attrs, global_infos=mod.global_infos)
    mod.update_func(mod.get_global_var("main"), func)
    return relax.transform.CanonicalizeBindings()(mod)  # no alias of the result


def rewrite_pass(name: str, rules: Rules) -> tvm.transform.Pass:
    """A named module pass that applies ``rules`` to ``main``."""

    def transform(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite(mod, rules)

    return tvm.transform.module_pass(transform, opt_level=0, name=name)


def is_constant(expr: relax.Expr) -> bool:
    """Whether the expression is a literal tensor."""
    return isinstance(expr, GenericConst)
