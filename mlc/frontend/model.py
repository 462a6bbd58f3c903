"""What every importer returns: a static Relax module and the names, shapes and types of its inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mlc.errors import ModelError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import tvm

__all__ = [
    "ARRAY_TYPES", "ImportedModel", "TensorSpec", "array_type", "check_static", "imported", "merge_shape",
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
    """A tensor at the model's border. ``dtype`` is numpy's name: ``float32``, ``int64``, ``bool``, or ``bfloat16``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def nbytes(self) -> int:
        """The size in memory, in bytes."""
        return math.prod(self.shape) * array_type(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ImportedModel:
    """``mod["main"]`` takes exactly ``inputs``, in that order, and returns a tensor, or a tuple of ``outputs``.

    Weights are Relax constants and every shape is a number.
    """

    mod: tvm.IRModule
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def imported(
    mod: tvm.IRModule, name: str, input_names: Sequence[str] | None = None, output_names: Sequence[str] | None = None
) -> ImportedModel:
    """Check ``mod`` and read its specifications; names left out come from the parameters, and ``output_0, …``."""
    check_static(mod, name)
    function = mod["main"]
    params = list(function.params)
    if input_names is None:
        input_names = [str(p.name) for p in params]
    types = output_types(function)
    if output_names is None:
        output_names = [f"output_{i}" for i in range(len(types))]
    inputs = tuple(_spec(n, p.ty) for n, p in zip(input_names, params, strict=True))
    outputs = tuple(_spec(n, t) for n, t in zip(output_names, types, strict=True))
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


def check_static(mod: tvm.IRModule, name: str) -> None:
    """Raise :class:`ModelError` unless every tensor that ``main`` takes, computes or returns has a static shape."""
    if "main" not in [v.name_hint for v in mod.get_global_vars()]:
        names = ", ".join(v.name_hint for v in mod.get_global_vars())
        raise ModelError(f"an IRModule must have a Relax function main, got {names or 'none'} in {name}")
    function = mod["main"]
    for what, ty in _typed_values(function):
        if not _is_static(ty):
            raise ModelError(
                f"every tensor of {name} must have a static shape, but {what} is {_shown(ty)}; fix the input's "
                "dimensions, and replace operators whose output size depends on the data"
            )


def merge_shape(
    name: str, shape: Sequence[int | str | None], shapes: Mapping[str, Sequence[int]]
) -> tuple[int | str | None, ...]:
    """An input's shape with its free dimensions set from ``shapes[name]``; fixed dimensions must agree."""
    if name not in shapes:
        return tuple(shape)
    given = tuple(int(d) for d in shapes[name])
    fits = len(given) == len(shape) and all(
        g > 0 and (not isinstance(d, int) or d == g) for g, d in zip(given, shape, strict=True)
    )
    if not fits:
        raise UsageError(f"shapes[{name!r}] must fit the model's {shape_text(shape)}, got {shape_text(given)}")
    return given


def shape_text(shape: Sequence[int | str | None]) -> str:
    """``(batch, 3, ?, 224)``."""
    return "(" + ", ".join("?" if d is None else str(d) for d in shape) + ")"


def _spec(name: str, ty: Any) -> TensorSpec:
    from tvm import relax

    if not isinstance(ty, relax.TensorType):  # the importer keeps some shapes as such
        raise ModelError(f"every input and output must be a tensor, but {name} is a {type(ty).__name__}; leave it out "
                         "of the model's inputs and outputs")
    return TensorSpec(name, tuple(int(d) for d in ty.shape), str(ty.dtype))


def _typed_values(function: Any) -> Iterator[tuple[str, Any]]:
    for param in function.params:
        yield f"input {param.name}", param.ty
    for block in function.body.blocks:
        for binding in block.bindings:
            yield f"value {binding.var.name}", binding.var.ty
    yield "the result", function.ret_ty


def _is_static(ty: Any) -> bool:
    from tvm import relax, tirx

    if isinstance(ty, relax.TupleType):
        return all(_is_static(field) for field in ty.fields)
    if isinstance(ty, relax.ShapeType):
        return ty.values is not None and all(isinstance(v, tirx.IntImm) for v in ty.values)
    if isinstance(ty, relax.TensorType):
        shape = ty.shape
        return isinstance(shape, relax.ShapeExpr) and all(isinstance(v, tirx.IntImm) for v in shape.values)
    return True


def _shown(ty: Any) -> str:
    return " ".join(str(ty).split())
