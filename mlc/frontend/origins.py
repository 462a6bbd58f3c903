"""Which nodes of the user's model the bindings of an imported module originate from.

The variable of a node's result is named after the node's place in the imported graph, ``n12_Conv``. Passes keep names,
or add a number to keep them apart, so that names are where an origin survives; :mod:`mlc.graph.ir.origins` reads them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

__all__ = ["label", "labelled", "listed", "name_by_scopes", "node_of", "origins", "variable_name"]

_NAME = re.compile(r"n(\d+)_[A-Z]\w*")
#: the modules and the operator that PyTorch's exporter says a node was made for
_SCOPES = "pkg.torch.onnx.name_scopes"


def variable_name(place: int, operator: str) -> str:
    """The name of the variable that holds the result of the node at ``place``: ``n12_Conv_``.

    >>> variable_name(12, "Conv")
    'n12_Conv_'
    """
    return f"n{place}_{operator[:1].upper()}{re.sub(r'[^0-9A-Za-z]', '', operator[1:])}_"


def node_of(name: str) -> int | None:
    """The place in the name of a variable; None where it was not made by :func:`variable_name`.

    >>> node_of("n12_Conv_1"), node_of("lv12")
    (12, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def label(node: onnx.NodeProto) -> str:
    """How a node is called: by its name, or by its operator and first output: ``Conv -> features``."""
    return node.name or f"{node.op_type} -> {next((o for o in node.output if o), '?')}"


def origins(own: Iterable[onnx.NodeProto], imported: Sequence[onnx.NodeProto]) -> tuple[tuple[str, ...], ...]:
    """The labels of the model's ``own`` nodes that each of the ``imported`` ones comes from.

    Nodes that are left keep the names of their outputs. One that was made on the way (a function's, or a quantised
    operator's parts) comes from the nodes for whose results it works.
    """
    known = {output: label(node) for node in own for output in node.output if output}
    readers: dict[str, list[str]] = {}
    found: list[tuple[str, ...]] = []
    for node in reversed(imported):
        direct = [known[output] for output in node.output if output in known]
        labels = direct or [each for output in node.output for each in readers.get(output, ())]
        found.append(tuple(dict.fromkeys(labels)))
        for name in node.input:
            readers.setdefault(name, []).extend(found[-1])
    return tuple(reversed(found))


def labelled(
    places: Mapping[str, Sequence[Sequence[int]]], nodes: Sequence[Sequence[str]]
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """For each tensor function the labels of the nodes that each call comes from, where ``places`` are those of nodes
    and ``nodes`` the labels of each (:attr:`mlc.frontend.model.ImportedModel.nodes`)."""
    return {
        symbol: tuple(tuple(dict.fromkeys(name for place in call if place < len(nodes) for name in nodes[place]))
                      for call in calls)
        for symbol, calls in places.items()
    }


def listed(calls: Sequence[Sequence[str]], most: int = 3) -> str:
    """The nodes of the first call in few words, and how many calls there are.

    >>> listed([["conv1", "bn1", "relu1", "pool1"], ["conv2"]])
    'conv1, bn1, relu1 and 1 more; 1 other call'
    """
    first = next(iter(calls), ())
    if not first:
        return ""
    more, others = len(first) - most, len(calls) - 1
    text = ", ".join(first[:most]) + (f" and {more} more" if more > 0 else "")
    return f"{text}; {others} other call{'s' * (others > 1)}" if others else text


def name_by_scopes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the nodes of an export the names that PyTorch's user knows: ``layer1.0.conv1/conv2d``."""
    for node in model.graph.node:
        said = next((each.value for each in node.metadata_props if each.key == _SCOPES), None)
        try:
            scopes = [str(scope) for scope in ast.literal_eval(said or "[]") if scope]
        except (SyntaxError, ValueError):  # another version's way to write them
            continue
        if scopes:
            node.name = "/".join(scopes[-2:])
    return model
