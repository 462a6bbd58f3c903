"""From tensor functions to kernels: merge those that should be one.

A heavy operator takes in what follows it elementwise (bias, activation, a residual sum); chains of elementwise
operators and copies become one function. Nothing is ever merged *into* a reduction or product from before it, since
its loops would repeat that work. A reshape is a view and stays ``R.reshape``, unless it stands between two copies,
where it would keep them apart.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

import tvm
from tvm import relax, s_tir, tirx, topi
from tvm.relax import transform

from mlc.errors import BuildError
from mlc.graph.ir.origins import FuseOps
from mlc.graph.ir.patterns import BROADCAST, INJECTIVE, OPAQUE, pattern_of
from mlc.graph.ir.rewrite import Change, bindings, leaves, op_name, rebuilt, shape_of
from mlc.graph.ir.states import is_append
from mlc.operators import relax_where
from mlc.sizes import in_scope, size_of, usual_size
from schedules.analysis import expensive_calls

__all__ = ["GROUPING", "MERGING", "LowerInnerReshapes", "check_lowered"]

#: operators that only copy elements somewhere else; a reshape copies none
_COPIES = {f"relax.{name}" for name in relax_where(lambda each: each.movement)} - {"relax.reshape"}
#: operators that no copy before them is merged with
_HEAVY = ("relax.nn.conv", "relax.matmul", "relax.call_tir", "relax.nn.batch_norm", "relax.nn.layer_norm",
          "relax.nn.softmax", "relax.nn.log_softmax", "relax.reshape")
#: functions of each other in one kernel: transcendental ones, and any (chains of a Mamba that is unrolled are of 68)
_DEEPEST, _LONGEST = 3, 128
#: what main may call in the end
_LOWERED = {"relax.call_tir", "relax.concat", "relax.reshape", "relax.strided_slice"}


def _values(func: relax.Function) -> list[relax.Expr]:
    return [binding.value for binding in bindings(func)]


def _inner_reshapes(func: relax.Function) -> set[relax.Var]:
    """The reshapes of a copy's result, used by nothing else, for operators that a copy can be merged into."""
    bound = {b.var: b.value for b in bindings(func)}
    users: dict[relax.Var, list[relax.Expr]] = defaultdict(list)
    for value in [*_values(func), func.body.body]:
        for leaf in leaves(value):
            users[leaf].append(value)

    def between_copies(var: relax.Var, value: relax.Expr) -> bool:
        if not isinstance(value, relax.Call) or op_name(value) != "relax.reshape":
            return False
        if _divides_by_free(value):
            return False
        source = bound.get(value.args[0])
        copied = isinstance(source, relax.Call) and op_name(source) in _COPIES and len(users[value.args[0]]) == 1
        return copied and all(
            isinstance(user, relax.Call) and not op_name(user).startswith(_HEAVY) for user in users[var]
        )

    return {var for var, value in bound.items() if between_copies(var, value)}


def _divides_by_free(reshape: relax.Call) -> bool:
    """Whether an element's place is found by dividing by sizes that only a call knows: slow to compute, and TVM's
    simplifier may not come to an end on it. All but the first axis of both shapes are what is divided by."""
    return not all(isinstance(size, int) for each in (reshape.args[0], reshape) for size in shape_of(each)[1:])


def _with_changed(mod: tvm.IRModule, chosen: set[relax.Var], change: Change) -> tvm.IRModule:
    """The module with what the ``chosen`` variables of main are bound to replaced by ``change`` of it."""
    if not chosen:
        return mod

    def changed(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        return change(builder, var, value) if var in chosen else value

    return rebuilt(mod, {b.var: b.value for b in bindings(mod["main"])}, changed)


def _lower_inner_reshapes(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    def lower(builder: relax.BlockBuilder, _var: relax.Var, value: relax.Expr) -> relax.Expr:
        return builder.call_te(topi.reshape, *value.args, primfunc_name_hint="reshape")

    return _with_changed(mod, _inner_reshapes(mod["main"]), lower)


def _blocks(stmt: tirx.Stmt) -> Iterator[s_tir.SBlock]:
    """The computing blocks of a function as a tensor expression makes it: loops around blocks, one after another."""
    if isinstance(stmt, s_tir.SBlockRealize):
        inner = list(_blocks(stmt.block.body))
        yield from inner or [stmt.block]
    elif isinstance(stmt, tirx.SeqStmt):
        for each in stmt.seq:
            yield from _blocks(each)
    elif isinstance(stmt, tirx.For):
        yield from _blocks(stmt.body)


def _is_product(func: tirx.PrimFunc) -> bool:
    """Whether the function holds a convolution or matrix product: a reduction that reads two tensors."""
    return any(
        any(var.iter_type == tirx.IterVar.CommReduce for var in block.iter_vars)
        and len({region.source for region in block.reads}) > 1
        for block in _blocks(func.body)
    )


def _elements(expr: relax.Expr) -> int:
    """How many there are, of the usual sizes; of a function with several results those of the last."""
    return _elements_of(expr.ty.fields[-1] if isinstance(expr.ty, relax.TupleType) else expr.ty)


def _elements_of(ty: relax.TensorType) -> int:
    return math.prod(usual_size(size_of(extent)) for extent in ty.shape.values)


def _separate_products(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """Tell FuseOps to keep what has another shape out of a product's kernel.

    The kernel of a product has one shape: that of the product and of everything after it. An operator that broadcasts
    its result (the gate of a squeeze and excitation block times a whole image) is not merged with it, and neither is
    something small that the epilogue reads (an attention mask), which would be computed again for every element. On
    GPUs, where a kernel costs more than that, a vector of plain arithmetic is (the products of two scales).
    """
    repeats = _repeats()
    bound = {b.var: b.value for b in bindings(mod["main"])}
    pattern = {
        gvar: pattern_of(func)
        for gvar, func in mod.functions.items() if isinstance(func, tirx.PrimFunc)
    }
    products = {gvar for gvar in pattern if _is_product(mod[gvar])}
    uses = Counter(leaf for value in [*_values(mod["main"]), mod["main"].body.body] for leaf in leaves(value))
    inside: set[relax.Var] = set()  # results of products, and what would become their epilogue
    injective: set[relax.Var] = set()
    changed: dict[relax.Var, int] = {}
    for binding in bindings(mod["main"]):
        call, var = binding.value, binding.var
        if not isinstance(call, relax.Call) or op_name(call) != "relax.call_tir":
            continue
        gvar, args = call.args[0], set(leaves(call.args[1]))
        if pattern[gvar] <= INJECTIVE:
            injective.add(var)
        small = {arg for arg in args if _elements(arg) < _elements(var)}
        if gvar in products:
            inside.add(var)
        elif pattern[gvar] <= BROADCAST and small & inside:
            changed[var] = INJECTIVE
        elif pattern[gvar] <= BROADCAST and args & inside:
            inside.add(var)
            changed.update((arg, OPAQUE) for arg in small & injective
                           if uses[arg] == 1 and not (repeats and _is_light(mod, bound[arg])))

    return _with_patterns(mod, changed)


def _repeats() -> bool:
    """Whether what is small is computed again where it is read: on GPUs, of what is quantised at run time, which is
    recognised where sizes are fixed."""
    return _for_gpu() and not in_scope()


def _for_gpu() -> bool:
    target = tvm.target.Target.current(allow_none=True)
    return target is not None and str(target.kind.name) == "cuda"


def _is_light(mod: tvm.IRModule, call: relax.Call) -> bool:
    """Whether a tensor function makes a vector without transcendental functions."""
    return sum(size_of(extent) != 1 for extent in call.ty_args[0].shape.values) <= 1 and (
        not expensive_calls(mod[call.args[0]].body))


def _repeat_scalars(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """On GPUs, make single numbers anew for each elementwise function that reads them, which then is one kernel with
    them: of several readers each would wait for a kernel of one thread."""
    if not _repeats():
        return mod

    def is_scalar(value: relax.Expr | None) -> bool:
        return isinstance(value, relax.Call) and op_name(value) == "relax.call_tir" and (
            isinstance(value.ty_args[0], relax.TensorType) and _elements_of(value.ty_args[0]) == 1
            and pattern_of(mod[value.args[0]]) <= BROADCAST)

    found = {b.var for b in bindings(mod["main"]) if is_scalar(b.value)}
    if not found:
        return mod

    def repeated(builder: relax.BlockBuilder, value: relax.Call) -> relax.Call:
        args = [builder.emit(repeated(builder, made)) if is_scalar(made := _binding(builder, arg)) else arg
                for arg in value.args[1].fields]
        return relax.Call(value.op, [value.args[0], relax.Tuple(args), *value.args[2:]], value.attrs, value.ty_args)

    def change(builder: relax.BlockBuilder, _var: relax.Var, value: relax.Expr) -> relax.Expr:
        reads = isinstance(value, relax.Call) and op_name(value) == "relax.call_tir" and (
            pattern_of(mod[value.args[0]]) <= BROADCAST)
        return repeated(builder, value) if reads else value

    return transform.DeadCodeElimination()(rebuilt(mod, {b.var: b.value for b in bindings(mod["main"])}, change))


def _binding(builder: relax.BlockBuilder, arg: relax.Expr) -> relax.Expr | None:
    return builder.lookup_binding(arg) if isinstance(arg, relax.Var) else None


def _cut_deep_chains(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """Tell FuseOps to keep chains of functions of each other in kernels of few: of transcendental ones, and of any.

    The expansions of the former hold their argument several times, by name; TVM's simplifier puts the value there, and
    takes time that is exponential in the depth: two nested sigmoids 0.03 s, four 1 s, eight more than 45 s. Inlining
    takes time that is quadratic in the length of any chain, and a pass over memory is little beside so many operators.
    """
    gpu = _for_gpu()
    depth: dict[relax.Var, int] = {}
    length: dict[relax.Var, int] = {}
    changed: dict[relax.Var, int] = {}
    expanded: set[relax.Var] = set()  # made by kernels with transcendental functions
    for binding in bindings(mod["main"]):
        call, var = binding.value, binding.var
        if not isinstance(call, relax.Call) or op_name(call) != "relax.call_tir":
            continue
        func, args = mod[call.args[0]], list(leaves(call.args[1]))
        slow = bool(expensive_calls(func.body))
        if slow or not expanded.isdisjoint(args):
            expanded.add(var)
        if pattern_of(func) > INJECTIVE:
            continue
        tensors = [param for param in func.params if not isinstance(param.ty, tvm.ir.PrimType)]
        if not gpu and any(str(tensor.dtype) == "bfloat16" for tensor in tensors) and var in expanded:
            changed[var] = OPAQUE  # TVM cannot make float32 of bfloat16 and expand functions of CPUs
            expanded.discard(var)
            continue
        depth[var] = slow + max((depth.get(arg, 0) for arg in args), default=0)
        length[var] = 1 + max((length.get(arg, 0) for arg in args), default=0)
        if (slow and depth[var] > _DEEPEST) or length[var] > _LONGEST:
            changed[var], depth[var], length[var] = OPAQUE, 0, 0
    return _with_patterns(mod, changed)


def _with_patterns(mod: tvm.IRModule, changed: dict[relax.Var, int]) -> tvm.IRModule:
    """The module with other FuseOps patterns for the functions that make the variables ``changed``."""

    def with_pattern(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr:
        gvar = value.args[0]
        copy = builder.add_func(mod[gvar].with_attr("op_pattern", changed[var]), gvar.name_hint)
        return relax.Call(value.op, [copy, *value.args[1:]], value.attrs, value.ty_args)

    return _with_changed(mod, set(changed), with_pattern)


def check_lowered(mod: tvm.IRModule) -> None:
    """Raise :class:`BuildError` if main calls anything but tensor functions and reshapes."""
    left: Counter[str] = Counter()
    for binding in bindings(mod["main"]):
        value = binding.value
        if isinstance(value, relax.Call) and op_name(value) not in _LOWERED and not is_append(value):
            left[op_name(value) or str(value.op)] += 1
    if left:
        names = ", ".join(f"{name} ({count} calls)" for name, count in sorted(left.items()))
        raise BuildError(
            f"every operator must be lowered to a tensor function, but these are left: {names}; "
            "replace them in the model, or add a legalisation for them"
        )


CutDeepChains = tvm.transform.module_pass(_cut_deep_chains, opt_level=0, name="CutDeepChains")
RepeatScalars = tvm.transform.module_pass(_repeat_scalars, opt_level=0, name="RepeatScalars")
SeparateProducts = tvm.transform.module_pass(_separate_products, opt_level=0, name="SeparateProducts")
LowerInnerReshapes = tvm.transform.module_pass(_lower_inner_reshapes, opt_level=0, name="LowerInnerReshapes")

#: tensor functions that become one kernel to functions of their own, in this order
GROUPING: tuple[tvm.transform.Pass, ...] = (
    transform.AnnotateTIROpPattern(),
    RepeatScalars,
    SeparateProducts,
    CutDeepChains,
    FuseOps,
)
#: those functions to kernels
MERGING: tuple[tvm.transform.Pass, ...] = (
    transform.FuseTIR(),
    transform.DeadCodeElimination(),
)
