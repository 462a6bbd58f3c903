"""Which ONNX operators can be imported, and which others have a definition that can be inlined."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from mlc.errors import ModelError, UnsupportedOperators
from mlc.frontend.onnx_converters import CONVERTERS
from mlc.frontend.onnx_decoder import NORMS
from mlc.frontend.onnx_definitions import definition_of
from mlc.frontend.onnx_expand import STANDARD, Expand
from mlc.frontend.onnx_functions import fails_to_inline, from_function
from mlc.frontend.onnx_grouped import DOMAIN, GROUPED, GROUPED_BITS
from mlc.frontend.onnx_microsoft import MICROSOFT
from mlc.text import one_line

if TYPE_CHECKING:
    import onnx

__all__ = [
    "check_known", "check_size", "check_supported", "expansion_of", "functions_to_inline", "unsupported", "walk_nodes",
]

_STANDARD = ("", "ai.onnx")
#: nodes that are left when all that is constant has been folded; large exported language models have 5,000
_MOST_NODES = 20_000
_MOST_READERS = 2_000
#: attributes that may be infinite: elements of tensors, and what elements are compared with or replaced by
_BOUNDS = frozenset({"value", "value_float", "min", "max", "mask_filter_value", "swiglu_limit"})
_COMPARING = frozenset({"ThresholdedRelu"})
# Values that no compiled function can hold: sequences and optionals.
_NOT_TENSORS = frozenset({
    "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt", "SequenceConstruct",
    "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SplitToSequence",
})


@lru_cache(maxsize=1)
def _converters() -> frozenset[str]:
    """Operators with a converter in TVM. It names no public list of them; the package's version is pinned."""
    from tvm.relax.frontend.onnx import onnx_frontend

    return frozenset(onnx_frontend._get_convert_map()) - _NOT_TENSORS


def walk_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Every node, those of nested graphs (the bodies of If, Loop, Scan) included."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from walk_nodes(graph.node)


def expansion_of(node: onnx.NodeProto) -> Expand | None:
    """The nodes that the node is expanded to; None if it is converted directly, or not at all."""
    if node.domain in _STANDARD:
        found = STANDARD.get(node.op_type) or NORMS.get(node.op_type) or definition_of(node)
        if found is None and fails_to_inline(node) and not _is_converted(node):
            return from_function
        return found
    return MICROSOFT.get(node.op_type) if node.domain == "com.microsoft" else None


def unsupported(node: onnx.NodeProto) -> str:
    """The operator's name, with what is special about this use, if TVM cannot import the node; else an empty text."""
    qualified = _qualified(node)
    if endless := _not_finite(node):
        return f"{qualified} with {endless}"
    if expansion_of(node) is not None:
        return ""
    if node.domain == DOMAIN and node.op_type in (GROUPED, GROUPED_BITS):
        return ""
    if node.domain not in _STANDARD:
        return qualified
    if not _is_converted(node):
        return qualified
    return _wrongly_converted(node)


def _is_converted(node: onnx.NodeProto) -> bool:
    return node.op_type in CONVERTERS or node.op_type in _converters() or node.op_type == "Constant"


def _not_finite(node: onnx.NodeProto) -> str:
    """An attribute that is multiplied with and is infinite or NaN: TVM's operators multiply where ONNX's choose, and
    make NaN of 0, and ONNX's own definitions cannot be written out with it."""
    for attribute in node.attribute if node.op_type not in _COMPARING else ():
        if attribute.name not in _BOUNDS and not math.isfinite(attribute.f):
            return f"{attribute.name} {attribute.f:g}"
    return ""


def _wrongly_converted(node: onnx.NodeProto) -> str:
    """Uses that TVM's converters accept and compute wrongly, or fail at without a reason."""
    attributes = {a.name: a for a in node.attribute}
    used_outputs = [o for o in node.output if o]
    if node.op_type == "BatchNormalization" and len(used_outputs) > 1:
        return "BatchNormalization in training mode"
    if node.op_type == "LayerNormalization" and len(used_outputs) > 1:
        return "LayerNormalization with its mean and deviation"
    if node.op_type == "Upsample" and "scales" not in attributes:
        return "Upsample without scales in an attribute (as of opset 7; Resize takes them otherwise)"
    if node.op_type == "MaxUnpool" and len(node.input) > 2 and node.input[2]:
        return "MaxUnpool with output_shape"
    if "keepdims" in attributes and attributes["keepdims"].i not in (0, 1):  # TVM takes any number for 1, ONNX for 0
        return f"{node.op_type} with keepdims {attributes['keepdims'].i}"
    return ""


def functions_to_inline(nodes: Iterable[onnx.NodeProto], opsets: dict[str, int]) -> set[tuple[str, str]]:
    """``(domain, operator)`` of the nodes that cannot be imported but that ONNX defines by other operators."""
    return {(node.domain, node.op_type) for node in nodes
            if unsupported(node) and not _not_finite(node) and _is_function(node, opsets)}


def check_size(nodes: Sequence[onnx.NodeProto], is_constant: Callable[[str], bool], name: str) -> None:
    """Raise :class:`ModelError` for a graph that would take the compiler hours: the time of several passes grows with
    the square of a tensor's readers (800 take 14 s)."""
    if len(nodes) > _MOST_NODES:
        raise ModelError(f"a graph must have at most {_MOST_NODES} nodes that are not constant, but {name} has "
                         f"{len(nodes)}; split the model")
    readers = Counter(value for node in nodes for value in set(node.input) if not is_constant(value))
    tensor, count = max(readers.items(), key=lambda item: item[1], default=("", 0))
    if count > _MOST_READERS:
        raise ModelError(f"a tensor must be read by at most {_MOST_READERS} nodes, but {one_line(tensor)} of {name} is "
                         f"read by {count}; split the model")


def check_supported(nodes: Iterable[onnx.NodeProto]) -> None:
    """Raise :class:`UnsupportedOperators` with every node that cannot be imported."""
    _raise_if_any((unsupported(node), node) for node in nodes)


def check_known(model: onnx.ModelProto) -> None:
    """Raise :class:`UnsupportedOperators` if an operator exists neither in ONNX at this opset nor in the model.

    Then everything else that could not be imported is listed with it, so that nobody fixes one at a time.
    """
    opsets = {o.domain: o.version for o in model.opset_import}
    local = {(f.domain, f.name) for f in model.functions}
    bodies = [node for function in model.functions for node in function.node]
    nodes = [n for n in walk_nodes([*model.graph.node, *bodies]) if (n.domain, n.op_type) not in local]
    unknown = [n for n in nodes if _schema(n, opsets) is None and unsupported(n)]
    if unknown:
        _raise_if_any(
            (_unknown_text(n, opsets) if _schema(n, opsets) is None else unsupported(n), n)
            for n in nodes if unsupported(n) and not _is_function(n, opsets) and not _may_fold(n)
        )


def _may_fold(node: onnx.NodeProto) -> bool:
    """Whether the node often disappears when shapes are folded."""
    return node.op_type in ("If", "Loop", *_NOT_TENSORS)


def _unknown_text(node: onnx.NodeProto, opsets: dict[str, int]) -> str:
    if node.domain in _STANDARD:
        return f"{_qualified(node)} (unknown in opset {opsets.get(node.domain, 0)})"
    return _qualified(node)


def _raise_if_any(found: Iterable[tuple[str, onnx.NodeProto]]) -> None:
    by_operator: dict[str, list[str]] = {}
    for name, node in found:
        if name:
            by_operator.setdefault(name, []).append(_node_name(node))
    if by_operator:
        raise UnsupportedOperators(by_operator)


def _is_function(node: onnx.NodeProto, opsets: dict[str, int]) -> bool:
    schema = _schema(node, opsets)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def _schema(node: onnx.NodeProto, opsets: dict[str, int]) -> onnx.defs.OpSchema | None:
    import onnx

    domain = "" if node.domain in _STANDARD else node.domain
    version = opsets.get(domain, opsets.get("ai.onnx", 0) if domain == "" else 0)
    try:
        return onnx.defs.get_schema(node.op_type, version, domain)
    except (onnx.defs.SchemaError, TypeError):  # the latter for versions beyond 32 bits
        return None


def _qualified(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in _STANDARD else f"{node.domain}.{node.op_type}"


def _node_name(node: onnx.NodeProto) -> str:
    """The node's name, or its first output's: exporters may leave names empty, outputs never are."""
    return node.name or next((o for o in node.output if o), "an unnamed node")
