"""A model's kernels captured as one CUDA graph, so that launch overhead is paid only once per call.

A graph holds addresses. All that :data:`INTO <mlc.artifact.memory.INTO>` touches therefore stays where it is: its
caller gives it the same inputs, outputs and weights in each call (:class:`mlc.artifact.devices.CudaDevice` keeps them),
and its intermediate tensors lie in memory that is planned now and allocated at the first call. ``main`` is left as it
is: it takes tensors from anywhere, and each of its kernels can be watched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import tvm
from tvm import relax, tirx
from tvm.relax import transform

from mlc.artifact.memory import INTO, VIEWS, is_call
from mlc.artifact.runtime import CAPTURED
from mlc.graph.ir.rewrite import bindings, replaced, results_of

__all__ = ["CaptureGraph", "captured"]

_RUN = "vm.builtin.cuda_graph.run_or_capture"
_OPTION = "relax.backend.use_cuda_graph"


def _capture_graph(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """``main_into`` starts what TVM finds capturable of it as a graph, where that is all of its kernels.

    Several graphs with kernels between them would come of code that runs on the host in the middle; then the kernels
    are started one by one, as they are where a result is a part of some intermediate tensor.
    """
    whole = next((var for var in mod.functions if var.name_hint == INTO), None)
    if whole is None:
        return mod
    into = mod[whole]
    bound = {b.var: b.value for b in bindings(into)}
    results = [_chain(each, bound) for each in results_of(into.body.body, bound)]
    if any(source in bound for source, _ in results):
        return mod
    # TVM captures calls of what never moves: memory of its own, and parameters behind the first `num_input`. What a
    # graph returns it does not see, so results are looked up behind it
    fixed = {var: func for var, func in mod.functions.items() if var.name_hint != "main"}
    silent = relax.Function(into.params, relax.SeqExpr(into.body.blocks, relax.Tuple([])), relax.TupleType([]),
                            is_pure=bool(into.is_pure))
    fixed[whole] = silent.with_attrs({**dict(into.attrs), "num_input": 0})
    with tvm.transform.PassContext(config={_OPTION: True}):
        made = transform.RewriteCUDAGraph()(tvm.IRModule(fixed))
    if captured(made) != [len(list(_kernels(into, mod)))]:
        return mod
    return _returning(made, mod, results)


def _chain(result: relax.Expr, bound: Mapping[relax.Var, relax.Expr]) -> tuple[relax.Expr, list[relax.Call]]:
    """What a result is ultimately a view of (a parameter, or a tensor that is no view), and the views in between, last
    first."""
    views: list[relax.Call] = []
    while (value := bound.get(result)) is not None:
        if any(is_call(value, name) for name in VIEWS):
            views.append(value)
            result = value.args[0]
        elif isinstance(value, relax.Var):
            result = value
        else:
            break
    return result, views


def _returning(
    made: tvm.IRModule, mod: tvm.IRModule, results: Sequence[tuple[relax.Expr, list[relax.Call]]]
) -> tvm.IRModule:
    """The module whose graph is captured, with ``main`` and with the results of ``main_into``."""
    func, before = made[INTO], mod[INTO]
    functions = {var: _with_result(each) if CAPTURED in var.name_hint else each
                 for var, each in made.functions.items() if var.name_hint != INTO}
    (given,) = (each.ret_ty for var, each in functions.items() if CAPTURED in var.name_hint)
    builder = relax.BlockBuilder(tvm.IRModule({**functions, mod.get_global_var("main"): mod["main"]}))
    image: dict[relax.Var, relax.Expr] = {}
    with builder.function(INTO, list(func.params), attrs=dict(before.attrs), pure=bool(before.is_pure)):
        for binding in bindings(func):
            value = replaced(binding.value, image)
            if is_call(value, "relax.call_builtin_with_ctx") and value.args[0].global_symbol == _RUN:
                value = relax.Call(value.op, value.args, value.attrs, [given])
            image[binding.var] = builder.emit(value, binding.var.name)
        params = dict(zip(before.params, func.params, strict=True))
        found: list[relax.Expr] = []
        for source, views in results:
            found.append(params[source])
            for view in reversed(views):
                found[-1] = builder.emit(relax.Call(view.op, [found[-1], *view.args[1:]], view.attrs, view.ty_args))
        several = isinstance(before.ret_ty, relax.TupleType)
        builder.emit_func_output(relax.Tuple(found) if several else found[0])
    both = builder.finalize()
    return both.with_attrs(dict(mod.attrs)) if mod.attrs else both


def _with_result(func: relax.Function) -> relax.Function:
    """The captured part, returning one of its parameters, since the virtual machine cannot return nothing."""
    builder = relax.BlockBuilder()
    image: dict[relax.Var, relax.Expr] = {}
    with builder.function("captured", list(func.params), attrs=dict(func.attrs or {}), pure=bool(func.is_pure)):
        for binding in bindings(func):
            if not isinstance(binding.value, relax.Tuple) or binding.value.fields:  # else the result so far
                image[binding.var] = builder.emit(replaced(binding.value, image), binding.var.name)
        builder.emit_func_output(relax.Tuple([func.params[0]]))
    return builder.get()["captured"].without_attr("global_symbol")


def captured(mod: tvm.IRModule) -> list[int]:
    """The CUDA graphs of a module, by the calls of tensor functions in each."""
    return [len(list(_kernels(func, mod))) for var, func in mod.functions.items()
            if isinstance(func, relax.Function) and CAPTURED in var.name_hint]


def _kernels(func: relax.Function, mod: tvm.IRModule) -> Iterator[tvm.ir.GlobalVar]:
    """The calls of a module's tensor functions in a function, in order."""
    for binding in bindings(func):
        called = binding.value.op if isinstance(binding.value, relax.Call) else None
        if isinstance(called, tvm.ir.GlobalVar) and isinstance(mod[called.name_hint], tirx.PrimFunc):
            yield called


CaptureGraph = tvm.transform.module_pass(_capture_graph, opt_level=0, name="CaptureGraph")
