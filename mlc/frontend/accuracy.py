"""How far a model allows the operands of a product to be rounded: ``accuracy_level`` of onnxruntime's ``MatMulNBits``.

The level names the least accurate type that activations may become: 1 float32, 2 float16, 3 bfloat16, 4 int8; 0 leaves
them as they are. It goes with the product's node through the import and then stands in an attribute of ``main``, by the
node's place, which the product's variable is named after (:mod:`mlc.frontend.origins`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlc.frontend.origins import node_of

if TYPE_CHECKING:
    import onnx

__all__ = ["INT8", "LEVELS", "allow", "allowed", "level_of"]

#: the level from which activations may become integers of 8 bits
INT8 = 4
#: the attribute of ``main``: the level of a node by its place, as text
LEVELS = "mlc.accuracy_levels"
_KEY = "mlc.accuracy_level"


def allow(node: onnx.NodeProto, level: int) -> None:
    """Note a level with a node that was made for one that has it."""
    if level:
        node.metadata_props.add(key=_KEY, value=str(level))


def allowed(nodes: Sequence[onnx.NodeProto]) -> dict[str, Any]:
    """The attributes of ``main`` for a graph of these nodes."""
    noted = {str(place): int(each.value) for place, node in enumerate(nodes) for each in node.metadata_props
             if each.key == _KEY}
    return {LEVELS: noted} if noted else {}


def level_of(name: str, attributes: Mapping[str, Any] | None) -> int:
    """The level of the node whose result the variable of that name holds, by the attributes of ``main``."""
    place = node_of(name)
    return int((attributes or {}).get(LEVELS, {}).get(str(place), 0)) if place is not None else 0
