"""What converters ask of a node's inputs and attributes, as TVM's importer hands them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["array_of", "constant_at", "dtype_of", "input_at", "required_at", "text"]


def dtype_of(expr: Any) -> str:
    return str(expr.ty.dtype)


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
