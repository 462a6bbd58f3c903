"""onnxruntime's mixtures of experts, ``com.microsoft`` MoE and QMoE: rows are grouped by expert.

Each token goes to ``k`` experts. Its rows are sorted by expert, so that two grouped products
(:mod:`mlc.frontend.onnx_grouped`) read the weights of those alone that some token chose, and are put back in order.
Weights of QMoE stay integers of 2, 4 or 8 bits, which these products make float32 in registers.
What onnxruntime leaves unsaid is as its CPU kernels compute it: Gelu is the approximation with tanh, and QMoE shares
out the weight of a token among the chosen experts whatever ``normalize_routing_weights`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlc.frontend.onnx_expand import Nodes
from mlc.frontend.onnx_grouped import DOMAIN, GROUPED, GROUPED_BITS
from mlc.frontend.onnx_quantised import unpacked

__all__ = ["mixture", "quantised_mixture"]

_FLOAT, _INT64 = 1, 7  # of onnx.TensorProto
_ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "identity")
_BITS = (2, 4, 8)


@dataclass(frozen=True)
class _Layer:
    """Matrices ``[experts, depth, columns]`` and rows ``[experts, columns]`` that are added, or None.

    Where there are ``bits``, the matrices are uint8 below ``2**bits``, each of which stands for ``(integer - zero) *
    scale``; scales and zero points (float32 and uint8) are ``[experts, blocks of the depth, columns]``.
    """

    matrices: np.ndarray
    bias: np.ndarray | None
    bits: int = 0
    scales: np.ndarray | None = None
    zeros: np.ndarray | None = None

    @property
    def columns(self) -> int:
        return int(self.matrices.shape[2])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type of its products."""
        return np.dtype("float32") if self.bits else self.matrices.dtype

    def changed(self, change: Callable[[np.ndarray], np.ndarray]) -> _Layer:
        """Apply a ``change`` to the columns, the last axis."""
        def of(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else change(array)

        return _Layer(change(self.matrices), of(self.bias), self.bits, of(self.scales), of(self.zeros))

    def multiplied(self, nodes: Nodes, value: str, ends: str) -> str:
        """Its products with rows in groups that end there."""
        def constant(array: np.ndarray) -> str:
            return nodes.constant(np.ascontiguousarray(array))

        matrices = constant(self.matrices)
        if self.scales is None or self.zeros is None:
            return str(nodes(GROUPED, value, matrices, ends, domain=DOMAIN))
        zeros = [constant(self.zeros)] if (self.zeros != 1 << (self.bits - 1)).any() else []
        return str(nodes(GROUPED_BITS, value, matrices, ends, constant(self.scales), *zeros, domain=DOMAIN,
                         bits=self.bits))


def mixture(nodes: Nodes) -> str:
    """``input, router_probs, fc1 weights and bias, fc2 weights and bias, fc3 weights and bias``: weights are
    ``[experts, columns, depth]``."""
    given = nodes.inputs(8)
    layers = [None if not weight else _Layer(np.swapaxes(nodes.known(weight, "weights"), 1, 2), _bias(nodes, bias))
              for weight, bias in (given[2:4], given[4:6], given[6:8])]
    return _mixed(nodes, given[0], given[1], "", layers)


def quantised_mixture(nodes: Nodes) -> str:
    """``input, router_probs``, then of each of three layers weights, scales and bias, then their zero points, and
    ``router_weights``: weights are packed integers of 2, 4 or 8 bits, with a scale for each column or block of it."""
    given, attributes = nodes.inputs(15), nodes.attributes()
    kind = attributes.get("quant_type", b"int").decode()
    if kind != "int" or int(attributes.get("weights_prepacked", -1)) > 0:
        raise nodes.refused("its weights must be integers in onnxruntime's own order (quant_type int, "
                            f"weights_prepacked 0 or -1), got {kind}; export the model so")
    if any(nodes.node.input[15:]):
        raise nodes.refused("it must have no scales of activations and no global ones; export it with integer weights")
    layers: list[_Layer | None] = []
    for place, zeros in zip((2, 5, 8), given[11:14], strict=True):
        weight, scale, bias = given[place:place + 3]
        bits = int(attributes.get(f"fc{place // 3 + 1}_expert_weight_bits", attributes.get("expert_weight_bits", 4)))
        layers.append(_quantised(nodes, weight, scale, zeros, _bias(nodes, bias), bits) if weight else None)
    x, dtype = given[0], nodes.dtype_of(given[0])
    made = _mixed(nodes, nodes.cast(x, np.dtype("float32")), given[1], given[14], layers, like=x)
    return made if dtype == np.float32 else nodes.cast(made, dtype)


def _bias(nodes: Nodes, name: str) -> np.ndarray | None:
    return nodes.known(name, "bias") if name else None


def _quantised(nodes: Nodes, weight: str, scale: str, zeros: str, bias: np.ndarray | None, bits: int) -> _Layer:
    """A layer of integers; those whose blocks are not of whole bytes take 8 bits each."""
    if bits not in _BITS:
        raise nodes.refused(f"its weights must be of 2, 4 or 8 bits, got {bits}; quantise it so")
    if not scale:
        raise nodes.refused("its weights must have scales; export the model again")
    packed, scales = nodes.known(weight, "weights"), nodes.known(scale, "scales").astype("float32")
    block = int(nodes.attributes().get("block_size", 0))
    numbers = unpacked(packed, bits)
    depth = numbers.shape[2]
    wanted = (*packed.shape[:2], *((depth // block,) if block else ()))
    if scales.shape != wanted or (block and depth % block):
        raise nodes.refused(f"its scales must be {list(wanted)} for {depth} numbers of each column in blocks of "
                            f"{block or depth}, got {list(scales.shape)}; export the model again")
    scales = scales.reshape(*packed.shape[:2], -1)
    centres = np.full(scales.shape, 1 << (bits - 1), "uint8")
    if zeros:
        centres = unpacked(nodes.known(zeros, "zero points"), bits)[..., :wanted[-1]].reshape(scales.shape)
    whole = bits if (block or depth) * bits % 8 == 0 else 8
    matrices, scales, centres = (np.swapaxes(each, 1, 2) for each in (numbers, scales, centres))
    return _Layer(matrices, None if bias is None else bias.astype("float32"), whole, scales, centres)


def _mixed(
    nodes: Nodes, x: str, router: str, weights: str, given: list[_Layer | None], like: str = "",
) -> str:
    """The sum of what the chosen experts make of each token, times their weights. ``like`` has the shape of ``x``."""
    like, attributes = like or x, nodes.attributes()
    first, second, third = given
    if first is None or second is None:
        raise nodes.refused("it must have the weights of two layers at least; export the model again")
    kind = attributes.get("activation_type", b"relu").decode()
    fusion = int(attributes.get("swiglu_fusion", 0)) if kind == "swiglu" else 0
    _check(nodes, kind, fusion, third)
    hidden = nodes.fixed_size(like, nodes.rank_of(like, "input") - 1, "input")
    experts, k = len(first.matrices), int(attributes.get("k", 1))
    if not 1 <= k <= experts:
        raise nodes.refused(f"it must choose 1 to {experts} experts, got {k}; correct the model")
    if third is not None:
        first = _beside(first, third)
    elif fusion == 1:  # numbers of both kinds in turn
        first = first.changed(_apart)
    inner = first.columns // 2 if third is not None or fusion else first.columns
    shapes = [layer.matrices.shape for layer in (first, second)]
    if shapes != [(experts, hidden, first.columns), (experts, inner, hidden)]:
        raise nodes.refused(f"its weights must fit each other and {hidden} numbers of a token, got {list(shapes[0])} "
                            f"and {list(shapes[1])} (experts, depth, columns); export the model again")

    chosen, shares = _routed(nodes, router, weights, k, experts)
    flat = str(nodes("Reshape", chosen, nodes.constant([-1])))
    order, ends = _sorted(nodes, flat), _ends(nodes, flat, experts)
    token = nodes("Div", order, nodes.constant(np.array(k)))
    owner = str(nodes("Gather", flat, order, axis=0))
    rows = nodes("Gather", nodes("Reshape", x, nodes.constant([-1, hidden])), token, axis=0)

    def product(value: str, layer: _Layer) -> str:
        made = layer.multiplied(nodes, value, ends)
        if layer.bias is None:
            return made
        return str(nodes("Add", made, nodes("Gather", nodes.constant(layer.bias), owner, axis=0)))

    value = product(str(rows), first)
    gate, up = value, ""
    if inner != first.columns:
        gate, up = (str(nodes("Slice", value, nodes.constant([begin]), nodes.constant([begin + inner]),
                              nodes.constant([1]))) for begin in (0, inner))
    made = product(_activated(nodes, kind, gate, up, x), second)
    share = nodes("Gather", nodes("Reshape", shares, nodes.constant([-1, 1])), order, axis=0)
    made = str(nodes("Mul", made, nodes.cast(str(share), second.dtype)))
    back = nodes("Gather", made, _sorted(nodes, order), axis=0)
    total = nodes.reduced("ReduceSum", str(nodes("Reshape", back, nodes.constant([-1, k, hidden]))), [1])
    return str(nodes("Reshape", total, nodes("Shape", like)))


def _check(nodes: Nodes, kind: str, fusion: int, third: _Layer | None) -> None:
    attributes = nodes.attributes("use_sparse_mixer", "swiglu_limit_after_activation")
    if kind not in _ACTIVATIONS:
        raise nodes.refused(f"its activation must be one of {', '.join(_ACTIVATIONS)}, got {kind}; export the model so")
    if wrong := next((name for name, value in attributes.items() if value), None):
        raise nodes.refused(f"{wrong} must be 0; export the model without")
    if fusion not in (0, 1, 2) or (kind == "swiglu" and (fusion == 0) != (third is not None)):
        raise nodes.refused("swiglu must be of two layers, either fused (swiglu_fusion 1 or 2) or as fc1 and fc3 "
                            f"(swiglu_fusion 0), got {fusion} {'with' if third is not None else 'without'} fc3; export "
                            "the model again")


def _beside(first: _Layer, third: _Layer) -> _Layer:
    """Two layers of the same input as one."""
    def joined(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
        return None if a is None or b is None else np.concatenate([a, b], -1)

    biases = [each.bias for each in (first, third)]
    if any(bias is not None for bias in biases):
        biases = [np.zeros((len(each.matrices), each.columns), each.dtype) if each.bias is None else each.bias
                  for each in (first, third)]
    matrices = np.concatenate([first.matrices, third.matrices], -1)
    return _Layer(matrices, joined(*biases), max(first.bits, third.bits), joined(first.scales, third.scales),
                  joined(first.zeros, third.zeros))


def _apart(array: np.ndarray) -> np.ndarray:
    """Columns that are of one kind and of another in turn, those of one kind first."""
    return np.concatenate([array[..., 0::2], array[..., 1::2]], -1)


def _routed(nodes: Nodes, router: str, weights: str, k: int, experts: int) -> tuple[str, str]:
    """``[tokens, k]``: the experts of each token, of equal scores the last, and its shares of them in float32."""
    scores = str(nodes("Cast", router, to=_FLOAT))
    last_first = nodes("Gather", scores, nodes.constant(np.arange(experts)[::-1]), axis=1)
    best, place = nodes("TopK", last_first, nodes.constant([k]), outputs=2, axis=1, largest=1, sorted=1)
    chosen = nodes("Sub", nodes.constant(np.array(experts - 1)), place)
    whole = bool(nodes.attributes().get("normalize_routing_weights", 0))
    if weights:
        shares = nodes("GatherElements", nodes("Cast", weights, to=_FLOAT), chosen, axis=1)
        if whole:
            shares = nodes("Div", shares, nodes.reduced("ReduceSum", str(shares), [1]))
        return str(chosen), str(shares)
    if whole or nodes.node.op_type == "QMoE":
        return str(chosen), str(nodes("Softmax", best, axis=1))
    return str(chosen), str(nodes("GatherElements", nodes("Softmax", scores, axis=1), chosen, axis=1))


def _sorted(nodes: Nodes, values: str) -> str:
    """The places of whole numbers in their order."""
    _, order = nodes("TopK", values, nodes("Shape", values), outputs=2, axis=0, largest=0, sorted=1)
    return str(order)


def _ends(nodes: Nodes, owners: str, experts: int) -> str:
    """``[experts]``: how many rows are of each expert or of one before."""
    behind = nodes("Less", nodes("Reshape", owners, nodes.constant([-1, 1])),
                   nodes.constant(np.arange(1, experts + 1)[None]))
    counted = nodes.reduced("ReduceSum", str(nodes("Cast", behind, to=_INT64)), [0])
    return str(nodes("Reshape", counted, nodes.constant([experts])))


def _activated(nodes: Nodes, kind: str, gate: str, up: str, like: str) -> str:
    """The activation of ``gate``, times ``up`` where there is one."""
    def number(value: float) -> str:
        return nodes.constant(value, like)

    attributes = nodes.attributes()
    if kind == "swiglu":
        limit = float(attributes.get("swiglu_limit", np.inf))
        if np.isfinite(limit):
            gate = str(nodes("Min", gate, number(limit)))
            up = str(nodes("Max", nodes("Min", up, number(limit)), number(-limit)))
        scaled = nodes("Mul", gate, number(float(attributes.get("activation_alpha", 1.0))))
        gate = str(nodes("Mul", gate, nodes("Sigmoid", scaled)))
        return str(nodes("Mul", gate, nodes("Add", up, number(float(attributes.get("activation_beta", 0.0))))))
    if kind == "relu":
        gate = str(nodes("Relu", gate))
    elif kind == "silu":
        gate = str(nodes("Mul", gate, nodes("Sigmoid", gate)))
    elif kind == "gelu":
        cubed = nodes("Mul", nodes("Mul", nodes("Mul", gate, gate), gate), number(0.044715))
        bent = nodes("Tanh", nodes("Mul", nodes("Add", gate, cubed), number((2 / np.pi) ** 0.5)))
        gate = str(nodes("Mul", nodes("Mul", gate, nodes("Add", bent, number(1.0))), number(0.5)))
    return str(nodes("Mul", gate, up)) if up else gate
