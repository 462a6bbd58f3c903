"""One way to write a free size, wherever it stands in the tensors that functions take."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx

from schedules.analysis import replaced

__all__ = ["WriteSizesAlike"]


@tvm.transform.module_pass(opt_level=0, name="WriteSizesAlike")
def WriteSizesAlike(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
    """Parameters of tensor functions have simplified sizes.

    A concatenation makes ``n + 1`` elements where what reads them was made for ``1 + n``. To TVM, which compares how
    sizes are written where it fuses the two, those are different tensors.
    """
    functions = {var: func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    made = {var: _alike(func) for var, func in functions.items()}
    changed = {var: func for var, func in made.items() if func is not functions[var]}
    if not changed:
        return mod
    result = mod.clone()
    for var, func in changed.items():
        result.update_func(var, func)
    return result


def _alike(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with simplified sizes; the same object where they are."""
    analyzer, image = tvm.sym.Analyzer(), {}
    for param in func.params:
        shape = list(getattr(param, "shape", ()))
        simple = [size if isinstance(size, tirx.IntImm | tirx.Var) else analyzer.simplify(size) for size in shape]
        if not all(tvm_ffi.structural_equal(*pair) for pair in zip(shape, simple, strict=True)):
            image[param] = tirx.decl_buffer(simple, str(param.dtype), name=str(param.name), scope=str(param.scope()),
                                            layout=param.ty.layout)  # that of TVM's own functions is none
    if not image:
        return func
    params = [image.get(param, param) for param in func.params]
    made = tirx.PrimFunc(params, replaced(func.body, image), func.ret_type)
    return made.with_attrs(dict(func.attrs)) if func.attrs else made
