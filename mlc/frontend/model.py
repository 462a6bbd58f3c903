"""What every importer returns: a static Relax module and the names, shapes and types of its inputs and outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mlc.errors import ModelError, UsageError
from mlc.shapes import DEFAULT_RANGE, Free, Linear, Range, is_free, usual
from mlc.shapes import shape_text as sizes_text

if TYPE_CHECKING:
    import numpy as np
    import tvm

__all__ = [
    "ARRAY_TYPES", "ImportedModel", "TensorSpec", "array_type", "check_static", "imported", "merge_shapes",
    "output_types",
]

#: element types that arrays at the model's border may have
ARRAY_TYPES = frozenset({
    "bfloat16", "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64",
})


def array_type(name: str) -> np.dtype[Any]:
    """numpy's type of a name of :data:`ARRAY_TYPES`; ``bfloat16`` is that of ml_dtypes."""
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model. ``dtype`` is numpy's name: ``float32``, ``int64``, ``bool``, or ``bfloat16``.

    Sizes that depend on the call are :class:`mlc.shapes.Free`. An output of data-dependent length has a ``length``: the
    axis, whose size in ``shape`` is the maximum, and the name of the output that holds the actual length.
    """

    name: str
    shape: tuple[int | Free, ...]
    dtype: str
    length: tuple[int, str] | None = None

    @cached_property
    def nbytes(self) -> int:
        """The size in bytes, at the usual sizes if some are free."""
        return math.prod(self.sized()) * self.itemsize

    @cached_property
    def itemsize(self) -> int:
        """The size of an element, in bytes."""
        return array_type(self.dtype).itemsize

    @property
    def free(self) -> bool:
        """Whether some of the sizes depend on the call."""
        return is_free(self.shape)

    def sized(self, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The shape with free sizes given by name in ``sizes``, by default the usual ones."""
        return usual(self.shape, sizes)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{sizes_text(self.shape)}]" if self.free else \
            f"{self.name}: {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ImportedModel:
    """``mod["main"]`` takes exactly ``inputs``, in that order, and returns a tensor, or a tuple of ``outputs``.

    Weights are Relax constants. Sizes are numbers, or expressions of the free sizes that :func:`mlc.sizes.free_sizes`
    of the module lists.
    """

    mod: tvm.IRModule
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: the inputs that are memory of the caller's to which a call adds
    states: tuple[str, ...] = ()
    #: the labels of the user's nodes that each imported node comes from (:mod:`mlc.frontend.origins`)
    nodes: tuple[tuple[str, ...], ...] = ()
    #: the model's own outputs and what each is, ``tensor``, ``sequence``, ``optional`` or ``optional sequence``, where
    #: they are not all tensors and all inputs are; a container's tensors are outputs of its name, a slash, and their
    #: number
    returned: tuple[tuple[str, str], ...] = ()

    def taken(self) -> tvm.IRModule:
        """The module, without keeping it here: passes that rewrite it can then free its weights."""
        mod = self.mod
        object.__setattr__(self, "mod", None)
        return mod


def imported(
    mod: tvm.IRModule, name: str, input_names: Sequence[str] | None = None, output_names: Sequence[str] | None = None,
    lengths: Mapping[str, tuple[int, str]] | None = None,
) -> ImportedModel:
    """Check ``mod`` and read its specifications; names left out come from the parameters, and ``output_0, …``.
    ``lengths`` are those of outputs, by name."""
    free = _free_sizes(mod)
    check_static(mod, name, free)
    function = mod["main"]
    params = list(function.params)
    if input_names is None:
        input_names = [str(p.name) for p in params]
    types = output_types(function)
    if output_names is None:
        output_names = [f"output_{i}" for i in range(len(types))]
    inputs = tuple(_spec(n, p.ty, free) for n, p in zip(input_names, params, strict=True))
    outputs = tuple(replace(_spec(n, t, free), length=(lengths or {}).get(n))
                    for n, t in zip(output_names, types, strict=True))
    for what, names in (("inputs", [s.name for s in inputs]), ("outputs", [s.name for s in outputs])):
        twice = sorted({n for n in names if names.count(n) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ModelError(f"the {what} of {name} must have different names, but {twice[0]} comes twice; rename one")
    for spec in (*inputs, *outputs):
        if spec.dtype not in ARRAY_TYPES:
            raise ModelError(f"every input and output must have a type that arrays have, but {spec.name} of {name} is "
                             f"{spec.dtype}; cast it inside the model")
    return ImportedModel(mod, name, inputs, outputs)


def output_types(function: Any) -> list[Any]:
    """The Relax tensor types that a function returns, a tuple's fields one by one."""
    from tvm import relax

    returned = function.ret_ty
    return list(returned.fields) if isinstance(returned, relax.TupleType) else [returned]


def _free_sizes(mod: tvm.IRModule) -> dict[str, Free]:
    """The free dimensions of a module that has a ``main``."""
    from mlc.sizes import free_sizes

    return free_sizes(mod) if "main" in [v.name_hint for v in mod.get_global_vars()] else {}


def check_static(mod: tvm.IRModule, name: str, free: Mapping[str, Free] | None = None) -> None:
    """Raise :class:`ModelError` unless every tensor that ``main`` takes, computes or returns has a static shape, but
    for the sizes that are ``free``."""
    if "main" not in [v.name_hint for v in mod.get_global_vars()]:
        names = ", ".join(v.name_hint for v in mod.get_global_vars())
        raise ModelError(f"an IRModule must have a Relax function main, got {names or 'none'} in {name}")
    function = mod["main"]
    for what, ty in _typed_values(function):
        if not _is_static(ty, free or {}):
            raise ModelError(
                f"every tensor of {name} must have a static shape, but {what} is {_shown(ty)}; fix the input's "
                "dimensions, and replace operators whose output size depends on the data"
            )


def merge_shapes(
    own: Mapping[str, Sequence[int | str | None]], given: Mapping[str, Sequence[Range]],
    defaults: Mapping[str, Range] | None = None,
) -> dict[str, tuple[int | Free, ...]]:
    """The inputs' shapes by name: the model's ``own``, with what is ``given`` for their free dimensions.

    A symbol is one size wherever it stands, so two ranges of it must be the same; where it was given none it has that
    of ``defaults``, or the default range, and so has a dimension without a name. What follows from symbols that stand
    alone elsewhere (``"past + length"``, ``"2*batch"``) is computed from their sizes, and may be given what that comes
    to alone.
    Raises :class:`UsageError` for shapes that contradict the model's or each other.
    """
    alone = {d for shape in own.values() for d in shape if isinstance(d, str)}
    linear = {d: found for d in alone if (found := Linear.parse(d)) and alone.issuperset(n for n, _ in found.terms)}
    for name, shape in given.items():
        fits = len(shape) == len(own[name]) and all(
            not isinstance(d, int) or (g.fixed and g.low == d) for g, d in zip(shape, own[name], strict=True))
        if not fits:
            got = "(" + ", ".join(map(str, shape)) + ")"
            raise UsageError(f"shapes[{name!r}] must fit the model's {shape_text(own[name])}, got {got}")
    ranges: dict[str, Range] = {}
    for name, shape in given.items():
        for d, wanted in zip(own[name], shape, strict=True):
            if isinstance(d, str) and d not in linear and ranges.setdefault(d, wanted) != wanted:
                raise UsageError(f"{d} is one size wherever it stands, but shapes say {ranges[d]} and {wanted} "
                                 f"({name}); give it one range")
    names = _Names()

    def size(name: str, axis: int, d: int | str | None) -> int | Free:
        if isinstance(d, int):
            return d
        if d in linear:
            terms = {term: size(name, axis, term) for term, _ in linear[d].terms}
            return _combined(linear[d], terms, given[name][axis] if name in given else None)
        if d:
            found = ranges.get(d) or (defaults or {}).get(d, DEFAULT_RANGE)
        else:
            found = given[name][axis] if name in given else DEFAULT_RANGE
        return found.low if found.fixed else Free(names.of(d or f"{name}_{axis}"), found, found.middle)

    return {name: tuple(size(name, axis, d) for axis, d in enumerate(shape)) for name, shape in own.items()}


def _combined(linear: Linear, terms: Mapping[str, int | Free], given: Range | None) -> int | Free:
    """A size that is computed from the sizes ``terms``; ``given`` may only repeat it."""
    ranges = {name: size.range if isinstance(size, Free) else Range(size, size) for name, size in terms.items()}
    low, high = linear.within(ranges)
    if low < 0 or (given is not None and (given.low > low or given.high < high)):
        said = "sizes are at least 0" if given is None else f"shapes say {given}"
        raise UsageError(f"{linear} follows from {', '.join(f'{name}={each}' for name, each in ranges.items())} and is "
                         f"{low}..{high}, but {said}; give ranges that agree")
    free = [(size.name, factor) for name, factor in linear.terms if isinstance(size := terms[name], Free)]
    fixed = sum(factor * size for name, factor in linear.terms if isinstance(size := terms[name], int))
    rest = Linear(tuple(free), linear.constant + fixed)
    usual_sizes = {size.name: size.usual for size in terms.values() if isinstance(size, Free)}
    return Free(str(rest), Range(low, high), rest.of(usual_sizes)) if free else rest.constant


class _Names:
    """Symbols as names of variables, which differ where the symbols do."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def of(self, symbol: str) -> str:
        if symbol not in self._of:
            name = re.sub(r"\W", "_", symbol)
            name = name if name[:1].isalpha() else f"size_{name}"
            while name in self._of.values():
                name += "_"
            self._of[symbol] = name
        return self._of[symbol]


def shape_text(shape: Sequence[int | str | None]) -> str:
    """``(batch, 3, ?, 224)``."""
    return "(" + ", ".join("?" if d is None else str(d) for d in shape) + ")"


def _spec(name: str, ty: Any, free: Mapping[str, Free]) -> TensorSpec:
    from tvm import relax

    if not isinstance(ty, relax.TensorType):  # the importer keeps some shapes as such
        raise ModelError(f"every input and output must be a tensor, but {name} is a {type(ty).__name__}; leave it out "
                         "of the model's inputs and outputs")
    from mlc.sizes import Size, bounds_of, scope, size_of

    def size(dim: Any) -> int | Free:
        found = size_of(dim)
        if not isinstance(found, Size):
            return int(found)
        if str(found) in free:
            return free[str(found)]
        low, high = bounds_of(found.expr)
        if low < 0 or high >= 2**31:  # as of a window that ``ceil_mode`` adds for some sizes only
            raise ModelError(f"the sizes of every output must have bounds that can be derived, but those of {name} "
                             "have none; fix the size they follow from, as in --shape NAME=1,3,224,224")
        return Free(str(found), Range(low, high), found.usual)

    with scope(free):
        return TensorSpec(name, tuple(size(d) for d in ty.shape), str(ty.dtype))


def _typed_values(function: Any) -> Iterator[tuple[str, Any]]:
    for param in function.params:
        yield f"input {param.name}", param.ty
    for block in function.body.blocks:
        for binding in block.bindings:
            yield f"value {binding.var.name}", binding.var.ty
    yield "the result", function.ret_ty


def _is_static(ty: Any, free: Mapping[str, Free]) -> bool:
    from tvm import relax

    from mlc.sizes import depends_on

    if isinstance(ty, relax.TupleType):
        return all(_is_static(field, free) for field in ty.fields)
    if isinstance(ty, relax.ShapeType):
        return ty.values is not None and all(depends_on(v) <= free.keys() for v in ty.values)
    if isinstance(ty, relax.TensorType):
        shape = ty.shape
        return isinstance(shape, relax.ShapeExpr) and all(depends_on(v) <= free.keys() for v in shape.values)
    return True


def _shown(ty: Any) -> str:
    return " ".join(str(ty).split())
