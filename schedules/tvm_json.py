"""Validation of TVM's JSON format for objects (a list of nodes that refer to each other), whose reader would create any
object.

What came from elsewhere is read here first. In an index map of a trace, only what maps of layouts consist of is let
through: variables, whole numbers, their sums, products, quotients and remainders. In a function, every node must point
to nodes before it, and be of a kind that functions are made of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from schedules.space import InvalidDecision

__all__ = ["check_graph", "check_index_map"]

_MAX_TEXT = 1 << 17
#: what the kinds of objects begin with that functions and modules of them are made of
_OF_FUNCTIONS = (
    "None", "bool", "int", "float", "DataType", "ffi.String", "ffi.Array", "ffi.Map", "ir.", "prim.", "tirx.", "s_tir.",
    "relax.",
)
#: fields that hold a number itself, and those that may have nothing
_NUMBERS = ("data_alignment", "iter_type", "kind", "ndim", "offset_factor")
_MAY_BE_NOTHING = (
    "attrs", "derive_func", "init", "layout", "span", "step", "thread_binding", "ty", "vdevice",
)
_PLAIN = ("None", "bool", "int", "float", "DataType", "Device", "ffi.String")
#: what is one thing wherever it is named; of others a function is a tree of, a few times as many as there are
_NAMED = ("ir.Var", "ir.PrimType", "tirx.Buffer", "prim.Buffer", "ir.Tensor", "tirx.Var")
_MAX_WHOLE = 1 << 22
_MAX_NODES = 1024
_MAX_VALUE = 1 << 31
_EXPRESSION = ("ir.Var", "ir.IntImm", "prim.Add", "prim.Sub", "prim.Mul", "prim.FloorDiv", "prim.FloorMod")
_TYPE, _NOTHING, _ARRAY = ("ir.PrimType",), ("None",), ("ffi.Array",)
_BINARY = {"span": _NOTHING, "ty": _TYPE, "a": _EXPRESSION, "b": _EXPRESSION}
#: the fields of each kind of node, and the kinds of node that they may point to
_FIELDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ir.Var": {"span": _NOTHING, "ty": _TYPE, "name": ("ffi.String",)},
    "ir.IntImm": {"span": _NOTHING, "ty": _TYPE, "value": ("int",)},
    **dict.fromkeys(_EXPRESSION[2:], _BINARY),
    "tirx.IndexMap": {"initial_indices": _ARRAY, "final_indices": _ARRAY, "inverse_index_map": _NOTHING},
}


def check_index_map(text: Any) -> None:
    """Raise :class:`InvalidDecision` for text that is no index map of whole numbers."""
    try:
        if not isinstance(text, str) or len(text) > _MAX_TEXT:
            raise ValueError("it is no text, or too long a one")
        graph = json.loads(text)
        nodes, root = graph["nodes"], graph["root_index"]
        if not set(graph) <= {"nodes", "root_index", "metadata"} or not 0 < len(nodes) <= _MAX_NODES:
            raise ValueError("it has other parts than nodes, or too many of them")
        kinds: list[str] = []
        for node in nodes:
            kinds.append(_checked(node, kinds))
        if isinstance(root, bool) or kinds[root] != "tirx.IndexMap" or root != len(nodes) - 1:
            raise ValueError("its last node is no index map")
        _check_map(nodes, kinds)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InvalidDecision(f"a layout must be an index map of whole numbers, but {error}") from None


def check_graph(text: str) -> None:
    """Raise ``ValueError`` for JSON of objects that is no function's: another kind of object, a reference that TVM
    would follow out of the list of objects or in a circle, or parts that stand in so many places that to go through
    the function takes hours."""
    try:
        graph = json.loads(text)
        nodes = graph["nodes"]
        if type(graph["root_index"]) is not int or not 0 <= graph["root_index"] < len(nodes):
            raise ValueError("the root is none of the objects")
        sizes: list[int] = []
        for index, node in enumerate(nodes):
            kind, data = node["type"], node.get("data")
            sizes.append(1)
            if not kind.startswith(_OF_FUNCTIONS):
                raise ValueError(f"there is a {kind[:40]!r}")
            if isinstance(data, str) or kind in _PLAIN:
                continue
            fields = data.items() if isinstance(data, dict) else [("", place) for place in data or ()]
            for name, place in fields:
                if name in _NUMBERS or isinstance(place, str | bool | float):
                    continue
                target = nodes[_index(place, index)]["type"]
                if not target.startswith(_NAMED):
                    sizes[index] += sizes[place]
                if target == "None" and name and name not in _MAY_BE_NOTHING:
                    raise ValueError(f"a {kind[:40]} has no {name[:40]}")
            if sizes[index] > _MAX_WHOLE:
                raise ValueError(f"it has more than {_MAX_WHOLE} parts, each counted where it stands")
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no list of objects ({error})") from None


def _checked(node: Mapping[str, Any], before: list[str]) -> str:
    """The kind of a node, which may point to nodes ``before`` it only."""
    kind: str = node["type"]
    data: Any = node.get("data")
    if kind in _FIELDS:
        fields = _FIELDS[kind]
        if set(data or ()) != set(fields):
            raise ValueError(f"a {kind} has other fields")
        for name, allowed in fields.items():
            if before[_index(data[name], len(before))] not in allowed:
                raise ValueError(f"a {kind} has a wrong {name}")
    elif kind == "ffi.Array":
        for place in data:
            if before[_index(place, len(before))] not in _EXPRESSION:
                raise ValueError("a list holds something else than expressions")
    elif kind == "ir.PrimType":
        if set(data) != {"span", "dtype"} or before[_index(data["span"], len(before))] != "None":
            raise ValueError("a type has other fields")
        if data["dtype"] not in ("int32", "int64"):
            raise ValueError(f"its numbers are {str(data['dtype'])[:20]}")
    elif kind == "int":
        if type(data) is not int or not -_MAX_VALUE <= data <= _MAX_VALUE:
            raise ValueError("it has too large a number")
    elif kind == "ffi.String":
        if not isinstance(data, str) or not data.isidentifier() or len(data) > 64:
            raise ValueError("a variable has no name")
    elif kind != "None" or data is not None:
        raise ValueError(f"it has a node of the kind {kind[:40]!r}")
    return kind


def _index(place: Any, count: int) -> int:
    if type(place) is not int or not 0 <= place < count:
        raise ValueError("a node points to none before it")
    return place


def _check_map(nodes: list[Mapping[str, Any]], kinds: list[str]) -> None:
    """Inputs are distinct variables; divisors are positive numbers."""
    inputs = nodes[nodes[-1]["data"]["initial_indices"]]["data"]
    if len(set(inputs)) != len(inputs) or any(kinds[place] != "ir.Var" for place in inputs):
        raise ValueError("its inputs are no distinct variables")
    for node, kind in zip(nodes, kinds, strict=True):
        if kind in ("prim.FloorDiv", "prim.FloorMod"):
            divisor = node["data"]["b"]
            if kinds[divisor] != "ir.IntImm" or nodes[nodes[divisor]["data"]["value"]]["data"] <= 0:
                raise ValueError("a divisor is no positive number")
