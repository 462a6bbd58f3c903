"""Accessors to a node's inputs and attributes, as TVM's importer passes them to converters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

__all__ = ["array_of", "constant_at", "dtype_of", "emitter", "input_at", "required_at", "text"]


def dtype_of(expr: Any) -> str:
    return str(expr.ty.dtype)


def emitter(bb: Any, dtype: str = "float32") -> Callable[..., Any]:
    """``emit("multiply", x, 0.5)``: an operator of Relax by its name, such as ``"nn.pad"``, normalised by the block
    builder ``bb``. Arguments that are floats become constants of ``dtype``."""
    from tvm import relax

    def emit(name: str, *args: Any, **attrs: Any) -> Any:
        given = [relax.const(arg, dtype) if isinstance(arg, float) else arg for arg in args]
        return bb.normalize(attrgetter(name)(relax.op)(*given, **attrs))

    return emit


def array_of(expr: Any) -> np.ndarray | None:
    """The elements of a constant; None for any other expression."""
    import tvm

    return expr.value.numpy() if isinstance(expr, tvm.ir.GenericConst) else None


def input_at(inputs: Sequence[Any], position: int) -> Any:
    """An input; None where it is left out."""
    return inputs[position] if position < len(inputs) else None


def constant_at(inputs: Sequence[Any], position: int, name: str) -> np.ndarray | None:
    """The elements of an input, None where it is left out; raises ``ValueError`` where it is not constant."""
    given = input_at(inputs, position)
    array = array_of(given)
    if given is not None and array is None:
        raise ValueError(f"{name} must be a constant")
    return array


def required_at(inputs: Sequence[Any], position: int, name: str) -> np.ndarray:
    """The elements of an input; raises ``ValueError`` where it is left out or not constant."""
    array = constant_at(inputs, position, name)
    if array is None:
        raise ValueError(f"{name} must be given")
    return array


def text(attrs: Mapping[str, Any], name: str, default: str) -> str:
    """An attribute of letters, which may come as bytes."""
    value = attrs.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)
