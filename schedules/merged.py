"""Free sizes that occur in a function only as a product, merged into one size.

A dense layer of ``batch * sequence`` rows depends on neither: what is tiled is the product, of which TVM's analysis
proves more if it is one variable. :func:`restored` gives the lowered function the parameters of its callers again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from schedules.analysis import replaced, uses, walk
from schedules.free import SIZES, variables

__all__ = ["MERGED", "Product", "merged", "restored", "with_named_sizes"]

#: the attribute of such a function: the places at which its callers give the sizes whose product it has, in the order
#: of the product's factors
MERGED = "mlc.merged"


def with_named_sizes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function in which each size of its parameters that is computed of free ones by division is a free size by
    itself, which the parameter tells; the same object where there is none.

    ::

        f(x[h, w], h, w, y[((h - 1) // 2 + 1) * ((w - 1) // 2 + 1)])   -->   f(x[h, w], h, w, y[n])
    """
    free = variables(func)
    known = dict(zip(free, func.attrs[SIZES], strict=True)) if func.attrs and SIZES in func.attrs else {}
    named: list[tuple[Any, tirx.Var]] = []
    for param in func.params:
        for size in () if isinstance(param.ty, tvm.ir.PrimType) else param.shape:
            if _divides(size) and not any(tvm_ffi.structural_equal(size, each) for each, _ in named):
                named.append((size, tirx.Var(f"size{len(named)}", str(size.ty))))
    if not known or not named:
        return func

    def by_name(expr: Any) -> Any:
        return next((var for size, var in named if tvm_ffi.structural_equal(size, expr)), expr)

    made = tvm_ffi.structural_map(func, ((tirx.Add, tirx.Mul, tirx.FloorDiv), by_name), order="pre")
    ranges = known | {var: [_value(size, {each: known[each][end] for each in free}) for end in range(3)]
                      for size, var in named}
    return made.with_attr(SIZES, [[int(end) for end in ranges[var]] for var in variables(made)])


def _divides(size: Any) -> bool:
    found: list[Any] = []
    walk(size, (tirx.FloorDiv, found.append))
    return bool(found)


def _value(size: Any, values: Mapping[tirx.Var, Any]) -> int:
    """What a size is where free ones have these values; it grows with each of them."""
    constants = {var: tirx.const(int(value), str(var.ty)) for var, value in values.items()}
    return int(tvm.sym.Analyzer().simplify(replaced(size, constants)))


def merged(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with free sizes that has one in place of their product; the same object where it has sizes that stand
    alone, or multiples of the product.

    ::

        f(x[b * s, 768], s, b, y[b * s, 64])   -->   f(x[n, 768], y[n, 64])
    """
    free = variables(func)
    if len(free) < 2 or any(not any(param.same_as(var) for param in func.params) for var in free):
        return func
    rows = tirx.Var("rows", str(free[0].ty))
    whole = Product(free, rows)
    made = tvm_ffi.structural_map(func, (tirx.Mul, whole.replaced), order="post")
    if whole.factors is None:
        return func
    params = [param for param in made.params if not any(param.same_as(var) for var in free)]
    if any(uses(size, free) for param in params for size in param.shape) or uses(made.body, free):
        return func
    # one that stands there as a multiple alone could not be told from the tensors
    if any(uses(size, [rows]) and not size.same_as(rows) for param in params for size in param.shape):
        return func
    ranges = dict(zip(free, func.attrs[SIZES], strict=True))
    ends = [1, 1, 1]
    for factor in whole.factors:
        ends = [end * int(own) for end, own in zip(ends, ranges[factor], strict=True)]
    places = [next(i for i, param in enumerate(func.params) if param.same_as(factor)) for factor in whole.factors]
    result = tirx.PrimFunc(params, made.body, func.ret_type)
    for key, value in dict(func.attrs).items():
        result = result.with_attr(key, value)
    return result.with_attr(SIZES, [ends]).with_attr(MERGED, places)


class Product:
    """The product of all ``free`` sizes wherever it stands, for which ``rows`` is put."""

    def __init__(self, free: Sequence[tirx.Var], rows: Any) -> None:
        self._free, self._rows = free, rows
        #: in the order in which the product was found to have them; None where it was not found
        self.factors: list[tirx.Var] | None = None

    def replaced(self, product: tirx.Mul) -> Any:
        """``rows`` for the product, and every other one as it is."""
        factors = _factors(product)
        if len(factors) != len(self._free) or not all(any(each.same_as(var) for each in factors) for var in self._free):
            return product
        self.factors = self.factors or factors
        return self._rows


def _factors(expr: Any) -> list[Any]:
    return [*_factors(expr.a), *_factors(expr.b)] if isinstance(expr, tirx.Mul) else [expr]


def restored(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function with the parameters that its callers give: each size of the product by itself."""
    if not (func.attrs and MERGED in func.attrs):
        return func
    (rows,), places = variables(func), [int(place) for place in func.attrs[MERGED]]
    sizes = {place: tirx.Var(f"size_{place}", str(rows.ty)) for place in places}
    product: Any = None
    for place in places:
        product = sizes[place] if product is None else product * sizes[place]
    image: dict[Any, Any] = {rows: product}
    given = []
    for param in func.params:
        if _has(param, rows):
            shape = [replaced(size, {rows: product}) for size in param.shape]
            image[param] = tirx.decl_buffer(shape, str(param.dtype), name=str(param.name), scope=str(param.scope()),
                                            data_alignment=int(param.data_alignment))
        given.append(image.get(param, param))
    for place in sorted(sizes):
        given.insert(place, sizes[place])
    made = tirx.PrimFunc(given, replaced(func.body, image), func.ret_type)
    for key, value in dict(func.attrs).items():
        made = made.with_attr(key, value) if key not in (MERGED, SIZES) else made
    return made


def _has(param: Any, rows: tirx.Var) -> bool:
    """Whether a parameter is a tensor of so many rows."""
    return not isinstance(param.ty, tvm.ir.PrimType) and any(uses(size, [rows]) for size in param.shape)
