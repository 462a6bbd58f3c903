"""Python's numbers in an exported program, where what ONNX's operators make of them is something else.

Whole numbers that data decides (``.item()``) are divided towards minus infinity, where ONNX's are towards 0; numbers
beside tensors of float64 have its precision, where attributes of ONNX and the constants that PyTorch's exporter writes
have that of float32.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._decomp import get_decompositions
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils._pytree import tree_leaves

from mlc.errors import ModelError

__all__ = ["with_exact_numbers"]

_ATEN = torch.ops.aten


def with_exact_numbers(program: Any, name: str) -> Any:
    """The program as it is where it has no such numbers; else another one with the same weights.

    Raises :class:`ModelError` for numbers beside tensors of float64 for which there is no exact way.
    """
    graphs = [each.graph for each in program.graph_module.modules() if isinstance(each, fx.GraphModule)]
    if not any(_is_double(node) or _rounds(node) for graph in graphs for node in graph.nodes):
        return program
    try:
        with torch.no_grad():
            program = program.run_decompositions(_decompositions())  # those of float64 alone
    except Exception as error:  # a shape that data decides, say
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"PyTorch must be able to take {name} apart, but: {reason}") from error
    numbers = _Numbers(program)
    for node in list(program.graph.nodes):
        if _rounds(node):
            numbers.divide(node)
        elif _is_double(node):
            numbers.take(node)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if _is_double(node) and (wrong := _inexact(node)) is not None:
                raise ModelError(f"numbers beside tensors of float64 must be exact, but {name} has {wrong} in "
                                 f"{node.target} ({node.name}); make it a tensor of float64, or compute in float32")
    program.graph_module.recompile()
    return program


def _is_double(node: fx.Node) -> bool:
    """Whether an operator takes or returns tensors of float64."""
    return isinstance(node.target, torch._ops.OpOverload) and any(
        isinstance(value, torch.Tensor) and value.dtype == torch.float64
        for value in (*tree_leaves(node.meta.get("val")), *(each.meta.get("val") for each in node.all_input_nodes)))


def _rounds(node: fx.Node) -> bool:
    """Whether a division of whole numbers may be of others than both sizes."""
    return node.target is operator.floordiv and any(map(_may_be_negative, map(_value, node.args)))


def _may_be_negative(value: Any) -> bool:
    if isinstance(value, torch.SymInt):
        return bool(value.node.shape_env.bound_sympy(value.node.expr).lower < 0)
    return isinstance(value, int) and value < 0


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _inexact(node: fx.Node) -> Any:
    """A number that float32 does not hold, or of which it cannot be told; None where there is none."""
    for each in tree_leaves((node.args, node.kwargs)):
        if isinstance(each, fx.Node) and isinstance(each.meta.get("val"), torch.SymFloat):
            if each.target not in (_ATEN.item.default, _ATEN._local_scalar_dense.default):
                return each.name
        elif _is_rounded(each):
            return each
    return None


def _is_rounded(value: Any) -> bool:
    """Whether a number is another one in float32."""
    if not isinstance(value, float) or value != value:
        return False
    with np.errstate(over="ignore"):
        return float(np.float32(value)) != value


class _Numbers:
    """What stands for such numbers in a program."""

    def __init__(self, program: Any) -> None:
        self._program, self._graph = program, program.graph
        self._place = 0
        self._first: fx.Node | None = None  # constants come before what the user gives
        specs = zip(self._graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)
        for place, (node, spec) in enumerate(specs):
            if spec.kind == InputKind.USER_INPUT:
                self._place, self._first = place, node
                break
        self._constants: dict[str, fx.Node] = {}

    def divide(self, node: fx.Node) -> None:
        """``a // b`` as ``(a - a % b) // b``, which is even."""
        dividend, divisor = node.args
        rest = self._call(node, operator.mod, dividend, divisor)
        node.args = (self._call(node, operator.sub, dividend, rest), divisor)

    def take(self, node: fx.Node) -> None:
        """Numbers become tensors where the operator, or another one like it, takes tensors in their place."""
        if not any(map(_is_rounded, tree_leaves((node.args, node.kwargs)))) or self._first is None:
            return
        if node.target in _CREATING and not node.all_input_nodes:
            self._replace(node, self._constant(node, node.target(*node.args, **node.kwargs)))
        elif node.target in (_ATEN.full.default, _ATEN.full_like.default):
            shape = node.args[0] if node.target is _ATEN.full.default else list(node.meta["val"].shape)
            if all(isinstance(size, int | fx.Node) for size in shape):
                self._replace(node, self._call(node, _ATEN.expand.default, self._constant(node, node.args[1]), shape))
        elif node.target in _SCALED:
            if _is_rounded(alpha := node.kwargs.get("alpha")):
                other = node.args[1]
                scaled = self._call(node, _ATEN.mul.Tensor, other, self._constant(node, alpha))
                node.args, node.kwargs = (node.args[0], scaled), {}
            node.args = self._as_tensors(node)
        else:
            target = _TAKING_TENSORS.get(node.target, node.target)
            types = [argument.type for argument in target._schema.arguments]
            if all(isinstance(kind, torch.TensorType | torch.OptionalType) for kind in types[:len(node.args)]):
                node.target, node.args = target, self._as_tensors(node)

    def _as_tensors(self, node: fx.Node) -> tuple[Any, ...]:
        return tuple(self._constant(node, float(arg)) if isinstance(arg, int | float) and not isinstance(arg, bool)
                     else arg for arg in node.args)

    def _replace(self, node: fx.Node, made: fx.Node) -> None:
        node.replace_all_uses_with(made)
        self._graph.erase_node(node)

    def _call(self, before: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
        with self._graph.inserting_before(before):
            node = self._graph.call_function(target, args)
        node.meta = {key: value for key, value in before.meta.items() if key != "val"}
        values = fx.node.map_aggregate(args, _value)
        node.meta["val"] = _computed(target, values, before)
        return node

    def _constant(self, user: fx.Node, value: Any) -> fx.Node:
        """A constant of float64 that the program holds."""
        tensor = torch.as_tensor(value, dtype=torch.float64)
        name = f"number_{len(self._constants)}"
        key = repr(value) if isinstance(value, float) else name
        if key not in self._constants:
            with self._graph.inserting_before(self._first):
                node = self._constants[key] = self._graph.placeholder(name)
            node.meta["val"] = _computed(torch.empty_like, (tensor,), user)
            spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), node.name)
            self._program.graph_signature.input_specs.insert(self._place, spec)
            self._program.constants[node.name] = tensor
            self._place += 1
        return self._constants[key]


def _computed(target: Callable[..., Any], args: Any, like: fx.Node) -> Any:
    """The type of what a call returns, in the world of another node's."""
    modes = [value.fake_mode for value in tree_leaves((like.meta.get("val"), [_value(a) for a in like.all_input_nodes]))
             if isinstance(value, torch._subclasses.FakeTensor)]
    if not modes:
        return target(*args)
    with modes[0], torch.no_grad():
        return target(*(modes[0].from_tensor(a) if type(a) is torch.Tensor else a for a in args))


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Of operators of float64 into those that have no numbers but as arguments of arithmetic; others stay whole."""
    table = {**torch.export.default_decompositions().materialize(), **get_decompositions(_TAKEN_APART)}
    return {target: _in_double(function) for target, function in table.items()}


def _in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if any(map(_double, tree_leaves((args, kwargs)))) else NotImplemented

    return decomposed


def _double(value: Any) -> bool:
    return value is torch.float64 or (isinstance(value, torch.Tensor) and value.dtype == torch.float64)


def _overloads(names: Iterable[str], kind: str) -> dict[Any, Any]:
    packets = [getattr(_ATEN, name) for name in names]
    return {packet.Scalar: getattr(packet, kind) for packet in packets}


_CREATING = frozenset({_ATEN.scalar_tensor.default, _ATEN.arange.start_step, _ATEN.arange.start, _ATEN.arange.default,
                       _ATEN.linspace.default})
_SCALED = frozenset({_ATEN.add.Tensor, _ATEN.sub.Tensor})
#: operators that take numbers -> those that take tensors in their place
_TAKING_TENSORS: dict[Any, Any] = {
    **_overloads(("add", "sub", "eq", "ne", "lt", "le", "gt", "ge", "fmod", "remainder", "mul", "div"), "Tensor"),
    _ATEN.pow.Tensor_Scalar: _ATEN.pow.Tensor_Tensor, _ATEN.pow.Scalar: _ATEN.pow.Tensor_Tensor,
    _ATEN.clamp.default: _ATEN.clamp.Tensor, _ATEN.clamp_min.default: _ATEN.clamp_min.Tensor,
    _ATEN.clamp_max.default: _ATEN.clamp_max.Tensor, _ATEN.masked_fill.Scalar: _ATEN.masked_fill.Tensor,
    _ATEN.where.ScalarOther: _ATEN.where.self, _ATEN.where.ScalarSelf: _ATEN.where.self,
    _ATEN.where.Scalar: _ATEN.where.self,
}
#: besides those that torch.export takes apart by default
_TAKEN_APART = [
    _ATEN.leaky_relu, _ATEN.elu, _ATEN.hardsigmoid, _ATEN.hardswish, _ATEN.hardtanh, _ATEN.softplus, _ATEN.threshold,
    _ATEN.softshrink, _ATEN.huber_loss, _ATEN.native_layer_norm, _ATEN.native_group_norm, _ATEN.native_batch_norm,
    _ATEN._native_batch_norm_legit_no_training, _ATEN._native_batch_norm_legit, _ATEN.addmm, _ATEN.addcmul,
    _ATEN.addcdiv, _ATEN.lerp, _ATEN.rsub, _ATEN.deg2rad, _ATEN.logaddexp, _ATEN.linalg_vector_norm, _ATEN.celu,
    _ATEN.upsample_bilinear2d, _ATEN.selu, _ATEN._prelu_kernel,
]
