"""From tensor functions to kernels: merge those that should be one.

A heavy operator takes in what follows it elementwise (bias, activation, a residual sum); chains of elementwise
operators and copies become one function. Nothing is ever merged *into* a reduction or product from before it, since
its loops would repeat that work. A reshape is a view and stays ``R.reshape``, unless it stands between two copies,
where it would keep them apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import tvm
from tvm import relax, topi
from tvm.relax import transform

from mlc.errors import BuildError
from mlc.graph.rewrite import bindings, leaves, op_name, replaced

__all__ = ["FUSION", "LowerInnerReshapes", "check_lowered"]

#: operators that only copy elements somewhere else
_COPIES = {
    f"relax.{name}"
    for name in ("broadcast_to", "concat", "flip", "gather_elements", "gather_nd", "nn.pad", "permute_dims", "repeat",
                 "strided_slice", "take", "tile")
}
#: operators that no copy before them is merged with
_HEAVY = ("relax.nn.conv", "relax.matmul", "relax.call_tir", "relax.nn.batch_norm", "relax.nn.layer_norm",
          "relax.nn.softmax", "relax.nn.log_softmax", "relax.reshape")
#: what main may call in the end
_LOWERED = {"relax.call_tir", "relax.reshape"}


def _inner_reshapes(func: relax.Function) -> set[relax.Var]:
    """The reshapes of a copy's result, used by nothing else, for operators that a copy can be merged into."""
    bound = {b.var: b.value for b in bindings(func)}
    users: dict[relax.Var, list[relax.Expr]] = defaultdict(list)
    for value in [*bound.values(), func.body.body]:
        for leaf in leaves(value):
            users[leaf].append(value)

    def between_copies(var: relax.Var, value: relax.Expr) -> bool:
        if not isinstance(value, relax.Call) or op_name(value) != "relax.reshape":
            return False
        source = bound.get(value.args[0])
        copied = isinstance(source, relax.Call) and op_name(source) in _COPIES and len(users[value.args[0]]) == 1
        return copied and all(
            isinstance(user, relax.Call) and not op_name(user).startswith(_HEAVY) for user in users[var]
        )

    return {var for var, value in bound.items() if between_copies(var, value)}


def _lower_inner_reshapes(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    func = mod["main"]
    inner = _inner_reshapes(func)
    if not inner:
        return mod
    builder = relax.BlockBuilder(tvm.IRModule({g: f for g, f in mod.functions.items() if g.name_hint != "main"}))
    image: dict[relax.Var, relax.Expr] = {}
    with builder.function("main", list(func.params), attrs=dict(func.attrs or {})):
        with builder.dataflow():
            for binding in bindings(func):
                value = replaced(binding.value, image)
                if binding.var in inner:
                    value = builder.call_te(topi.reshape, *value.args, primfunc_name_hint="reshape")
                image[binding.var] = builder.emit(value, binding.var.name)
            result = builder.emit_output(replaced(func.body.body, image))
        builder.emit_func_output(result)
    return builder.finalize()


def check_lowered(mod: tvm.IRModule) -> None:
    """Raise :class:`BuildError` if main calls anything but tensor functions and reshapes."""
    left: Counter[str] = Counter()
    for binding in bindings(mod["main"]):
        value = binding.value
        if isinstance(value, relax.Call) and op_name(value) not in _LOWERED:
            left[op_name(value) or str(value.op)] += 1
    if left:
        names = ", ".join(f"{name} ({count} calls)" for name, count in sorted(left.items()))
        raise BuildError(
            f"every operator must be lowered to a tensor function, but these are left: {names}; "
            "replace them in the model, or add a legalisation for them"
        )


LowerInnerReshapes = tvm.transform.module_pass(_lower_inner_reshapes, opt_level=0, name="LowerInnerReshapes")

#: tensor functions to kernels, in this order
FUSION: tuple[tvm.transform.Pass, ...] = (
    transform.AnnotateTIROpPattern(),
    transform.FoldConstant(),
    transform.FuseOps(),
    transform.FuseTIR(),
    transform.DeadCodeElimination(),
)
