"""Complex numbers of an exported program as pairs of reals, along a new last axis.

Neither ONNX nor the compiler has them, and models have them inside alone, as where positions turn pairs of numbers.
PyTorch's exporter to ONNX makes pairs of them too, those of Fourier transforms among them, but knows few operators of
complex numbers; programs with any that is not known here are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mlc.errors import ModelError

__all__ = ["in_reals"]

_ATEN = torch.ops.aten


def in_reals(program: Any, name: str) -> Any:
    """The program without complex numbers; the same one where it has none, or computes with them what no rule is of.

    Raises :class:`ModelError` for complex inputs and outputs, and for uses of operators that their rules do not take.
    """
    if not any(_is_complex(node) for node in program.graph.nodes):
        return program
    given = program
    try:
        with torch.no_grad():
            program = program.run_decompositions({})  # another one, with the same weights
    except Exception:  # a shape that data decides, say, of which the exporter tells
        return given
    if any(node.op == "call_function" and node.target not in _RULES for node in program.graph.nodes
           if _is_complex(node) or any(map(_is_complex, node.all_input_nodes))):
        return given
    pairs = _Pairs(program, name)
    for node in list(program.graph.nodes):
        try:
            pairs.take(node)
        except ModelError:
            raise
        except Exception as error:
            raise pairs.refused(f"{node.name} fails on them: {(str(error) or type(error).__name__).splitlines()[0]}"
                                ) from error
    for node in reversed(list(program.graph.nodes)):
        if node in pairs.replaced:
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else node
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.dtype.is_complex)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


class _Pairs:
    """What stands for complex values; ``replaced`` are the nodes that nobody reads any longer."""

    def __init__(self, program: Any, name: str) -> None:
        self._program, self._name = program, name
        self._complex = {node for node in program.graph.nodes if _is_complex(node)}
        self._of: dict[fx.Node, Any] = {}
        self._now: Any = None
        self.replaced: set[fx.Node] = set()

    def is_complex(self, value: Any) -> bool:
        """Whether an argument is: a number, or a node of the program as it was given."""
        return value in self._complex if isinstance(value, fx.Node) else isinstance(value, complex)

    def take(self, node: fx.Node) -> None:
        self._now = node
        if node.op == "placeholder":
            if self.is_complex(node):
                self._take_weight(node)
            return
        given = [each for each in node.all_input_nodes if self.is_complex(each)]
        if node.op == "output":
            if given:
                raise self.refused(f"output {given[0].name} is complex; give its real and imaginary parts out")
        elif given or self.is_complex(node) or node.target is _ATEN._neg_view.default:
            made = _RULES[node.target](self, node, *node.args, **node.kwargs)
            self.replaced.add(node)
            if self.is_complex(node):
                # a tensor without axes widens no other, but pairs of its have one
                kind = node.meta["val"].dtype.to_real()
                self._of[node] = made if _value(made).dtype == kind else self.call(_ATEN._to_copy.default, made,
                                                                                   dtype=kind)
            elif made is not None:
                node.replace_all_uses_with(made)

    def _take_weight(self, node: fx.Node) -> None:
        """A buffer becomes one of pairs."""
        program = self._program
        spec = next(each for each in program.graph_signature.input_specs if each.arg.name == node.name)
        if spec.target is None:
            raise self.refused(f"input {node.name} is complex; take its real and imaginary parts")
        if spec.target in program.state_dict:
            program._state_dict = {**program.state_dict, spec.target: _stored(program.state_dict[spec.target])}
        else:
            program._constants = {**program.constants, spec.target: _stored(program.constants[spec.target])}
        value = node.meta["val"]
        with value.fake_mode:
            pairs = torch.empty((*value.shape, 2), dtype=value.dtype.to_real(), device=value.device)
        node.meta = {**node.meta, "val": pairs}
        self._of[node] = node

    def refused(self, reason: str) -> ModelError:
        return ModelError(f"{self._name} must have complex numbers inside of it alone, and as pairs, but {reason}")

    def _computed(self, target: Any, args: Any, kwargs: Any, mode: Any) -> Any:
        with mode, torch.no_grad():
            return target(*fx.node.map_aggregate(args, _value), **fx.node.map_aggregate(kwargs, _value))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A new node before the one at hand, of its place in the user's model."""
        with self._program.graph.inserting_before(self._now):
            node = self._program.graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in self._now.meta.items() if key != "val"}
        node.meta["val"] = self._computed(target, args, kwargs, self._now.meta["val"].fake_mode)
        return node

    def pair(self, value: Any) -> Any:
        """Of complex numbers, or of reals, whose imaginary parts are 0."""
        return self._of[value] if self.is_complex(value) else self.joined(
            value, self.call(_ATEN.zeros_like.default, value))

    def parts(self, value: Any) -> tuple[Any, Any]:
        """The real and the imaginary part."""
        pair = self.pair(value)
        return self.call(_ATEN.select.int, pair, -1, 0), self.call(_ATEN.select.int, pair, -1, 1)

    def joined(self, real: Any, imaginary: Any) -> Any:
        return self.call(_ATEN.stack.default, [real, imaginary], -1)


def _stored(weight: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_real(weight.detach().resolve_conj().resolve_neg()).contiguous()
    return torch.nn.Parameter(pairs, weight.requires_grad) if isinstance(weight, torch.nn.Parameter) else pairs


_Rule = Callable[..., Any]


def _unchanged(pairs: _Pairs, node: fx.Node, value: Any, *_: Any, **__: Any) -> Any:
    return pairs.pair(value)


def _to_copy(pairs: _Pairs, node: fx.Node, value: Any, *, dtype: Any = None, **_: Any) -> Any:
    kind = node.meta["val"].dtype
    if kind == torch.bool:
        return pairs.call(_ATEN.any.dim, pairs.call(_ATEN.ne.Scalar, pairs.pair(value), 0), -1)
    if not kind.is_complex:
        return pairs.call(_ATEN._to_copy.default, pairs.parts(value)[0], dtype=kind)  # as PyTorch, with a warning
    if pairs.is_complex(value):
        return pairs.call(_ATEN._to_copy.default, pairs.pair(value), dtype=kind.to_real())
    real = pairs.call(_ATEN._to_copy.default, value, dtype=kind.to_real())
    return pairs.joined(real, pairs.call(_ATEN.zeros_like.default, real))


def _polar(pairs: _Pairs, node: fx.Node, length: Any, angle: Any) -> Any:
    return pairs.joined(*(pairs.call(_ATEN.mul.Tensor, length, pairs.call(turned, angle))
                          for turned in (_ATEN.cos.default, _ATEN.sin.default)))


def _complex(pairs: _Pairs, node: fx.Node, real: Any, imaginary: Any) -> Any:
    def wide(part: Any, other: Any) -> Any:
        return pairs.call(_ATEN.mul.Tensor, part, pairs.call(_ATEN.ones_like.default, other))

    if len(_value(real).shape) == len(_value(imaginary).shape) and all(
            m == n for m, n in zip(_value(real).shape, _value(imaginary).shape, strict=True)):
        return pairs.joined(real, imaginary)
    return pairs.joined(wide(real, imaginary), wide(imaginary, real))


def _mul(pairs: _Pairs, node: fx.Node, a: Any, b: Any) -> Any:
    if not pairs.is_complex(a) or isinstance(a, complex):  # then it is a tensor of them, if either is
        a, b = b, a

    def times(x: Any, y: Any) -> Any:
        return pairs.call(_ATEN.mul.Tensor, x, y)

    if isinstance(a, complex):
        return pairs.joined(times(b, a.real), times(b, a.imag))
    if not pairs.is_complex(b):
        return _by_real(_ATEN.mul.Tensor, pairs, a, b)
    (ar, ai), (br, bi) = pairs.parts(a), (b.real, b.imag) if isinstance(b, complex) else pairs.parts(b)
    return pairs.joined(pairs.call(_ATEN.sub.Tensor, times(ar, br), times(ai, bi)),
                        pairs.call(_ATEN.add.Tensor, times(ar, bi), times(ai, br)))


def _div(pairs: _Pairs, node: fx.Node, a: Any, b: Any) -> Any:
    if pairs.is_complex(b):
        raise pairs.refused(f"{node.name} divides by complex numbers; divide by reals")
    return _by_real(_ATEN.div.Tensor, pairs, a, b)


def _by_real(target: Any, pairs: _Pairs, a: Any, b: Any) -> Any:
    wide = pairs.call(_ATEN.unsqueeze.default, b, -1) if isinstance(_value(b), torch.Tensor) else b
    return pairs.call(target, pairs.pair(a), wide)


def _sum(target: Any) -> _Rule:
    def made(pairs: _Pairs, node: fx.Node, a: Any, b: Any, *, alpha: Any = 1) -> Any:
        if isinstance(alpha, complex):
            raise pairs.refused(f"{node.name} adds a complex multiple; multiply first")
        if isinstance(b, fx.Node):
            return pairs.call(target, pairs.pair(a), pairs.pair(b), alpha=alpha)
        real, imaginary = (pairs.call(target, part, number, alpha=alpha)
                           for part, number in zip(pairs.parts(a), (b.real, b.imag), strict=True))
        return pairs.joined(real, imaginary)

    return made


def _behind(dim: int, value: Any) -> int:
    """An axis of complex numbers as one of pairs; a number, too, has one to speak of."""
    return dim if dim >= 0 else dim - 1 if len(_value(value).shape) else 0


def _along(target: Any, default: int | None = None) -> _Rule:
    """Operators whose second argument is an axis."""
    def made(pairs: _Pairs, node: fx.Node, value: Any, dim: Any = default, *rest: Any, **kwargs: Any) -> Any:
        return pairs.call(target, pairs.pair(value), _behind(dim, value), *rest, **kwargs)

    return made


def _sized(target: Any) -> _Rule:
    def made(pairs: _Pairs, node: fx.Node, value: Any, sizes: Sequence[Any], **kwargs: Any) -> Any:
        return pairs.call(target, pairs.pair(value), [*sizes, 2], **kwargs)

    return made


def _transposed(pairs: _Pairs, node: fx.Node, value: Any, first: int, second: int) -> Any:
    return pairs.call(_ATEN.transpose.int, pairs.pair(value), _behind(first, value), _behind(second, value))


def _permuted(pairs: _Pairs, node: fx.Node, value: Any, order: Sequence[int]) -> Any:
    return pairs.call(_ATEN.permute.default, pairs.pair(value), [*(_behind(dim, value) for dim in order), len(order)])


def _cat(pairs: _Pairs, node: fx.Node, values: Sequence[Any], dim: int = 0) -> Any:
    # PyTorch overlooks what has neither elements nor axes to speak of
    kept = [value for value in values if tuple(_value(value).shape) != (0,)] or values
    return pairs.call(_ATEN.cat.default, [pairs.pair(value) for value in kept], _behind(dim, kept[0]))


def _indexed(pairs: _Pairs, node: fx.Node, value: Any, indices: Sequence[Any]) -> Any:
    return pairs.call(_ATEN.index.Tensor, pairs.pair(value), list(indices))


def _part(place: int) -> _Rule:
    return lambda pairs, node, value: pairs.parts(value)[place]


def _conjugate(pairs: _Pairs, node: fx.Node, value: Any) -> Any:
    real, imaginary = pairs.parts(value)
    return pairs.joined(real, pairs.call(_ATEN.neg.default, imaginary))


def _abs(pairs: _Pairs, node: fx.Node, value: Any) -> Any:
    """Without squares of what is large or small: the larger part times the root of 1 and the square of a ratio."""
    first, second = (pairs.call(_ATEN.abs.default, part) for part in pairs.parts(value))
    large = pairs.call(_ATEN.maximum.default, first, second)
    small = pairs.call(_ATEN.minimum.default, first, second)
    ratio = pairs.call(_ATEN.where.self, pairs.call(_ATEN.eq.Tensor, small, large),  # also where both are 0
                       pairs.call(_ATEN.ones_like.default, large), pairs.call(_ATEN.div.Tensor, small, large))
    squares = pairs.call(_ATEN.add.Tensor, pairs.call(_ATEN.mul.Tensor, ratio, ratio), 1.0)
    return pairs.call(_ATEN.mul.Tensor, large, pairs.call(_ATEN.sqrt.default, squares))


def _negated(pairs: _Pairs, node: fx.Node, value: Any) -> Any:
    return pairs.call(_ATEN.neg.default, pairs.pair(value) if pairs.is_complex(value) else value)


def _forgotten(pairs: _Pairs, node: fx.Node, *_: Any, **__: Any) -> None:
    return None


_RULES: Mapping[Any, _Rule] = {
    _ATEN.view_as_complex.default: lambda pairs, node, value: value,
    _ATEN.view_as_real.default: _unchanged, _ATEN.polar.default: _polar, _ATEN.complex.default: _complex,
    _ATEN.alias.default: _unchanged, _ATEN.clone.default: _unchanged, _ATEN.detach.default: _unchanged,
    _ATEN.resolve_conj.default: _unchanged, _ATEN._to_copy.default: _to_copy,
    _ATEN.mul.Tensor: _mul, _ATEN.div.Tensor: _div, _ATEN.add.Tensor: _sum(_ATEN.add.Tensor),
    _ATEN.sub.Tensor: _sum(_ATEN.sub.Tensor),
    _ATEN.neg.default: _negated, _ATEN._neg_view.default: _negated,
    _ATEN.unsqueeze.default: _along(_ATEN.unsqueeze.default), _ATEN.squeeze.dim: _along(_ATEN.squeeze.dim),
    _ATEN.select.int: _along(_ATEN.select.int), _ATEN.slice.Tensor: _along(_ATEN.slice.Tensor, 0),
    _ATEN.index_select.default: _along(_ATEN.index_select.default),
    # pairs may lie in memory as complex numbers do not
    **{shaped.default: _sized(_ATEN.reshape.default) for shaped in (_ATEN.view, _ATEN.reshape, _ATEN._unsafe_view)},
    _ATEN.expand.default: _sized(_ATEN.expand.default),
    _ATEN.transpose.int: _transposed, _ATEN.permute.default: _permuted, _ATEN.cat.default: _cat,
    _ATEN.index.Tensor: _indexed, _ATEN.real.default: _part(0), _ATEN.imag.default: _part(1),
    _ATEN._conj.default: _conjugate, _ATEN._conj_physical.default: _conjugate, _ATEN.abs.default: _abs,
    _ATEN._assert_tensor_metadata.default: _forgotten,
}
