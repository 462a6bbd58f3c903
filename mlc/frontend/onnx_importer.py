"""TVM's ONNX importer, adapted: mlc's converters first, bindings named after nodes, errors that name the node.

Imported only when a model is, since TVM's importer takes long to import.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from mlc.errors import ModelError
from mlc.frontend import onnx_auto_pad, onnx_dynamic_lengths, onnx_selection, onnx_size_constraints, onnx_sizes
from mlc.frontend.onnx_converters import CONVERTERS
from mlc.frontend.onnx_weights import tensor_of
from mlc.frontend.origins import variable_name

__all__ = ["NEEDS", "Importer", "last_line"]

#: raised by a node with constraints on free sizes, for which the model must be imported again
NEEDS = (onnx_size_constraints.SizesMustAgreeError, onnx_size_constraints.SizeTooSmallError)


class Builder(relax.BlockBuilder):
    """Names bindings after the node that is being converted."""

    node = ""
    _made: dict[relax.Expr, relax.Var]  # bindings within expressions of the node

    def begin(self, node: str) -> None:
        self.node, self._made = node, {}

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Var:
        return super().emit(self._flat(expr), name_hint or self.node)

    def emit_output(self, output: Any, name_hint: str = "") -> relax.Var:
        return super().emit_output(output, output.name if isinstance(output, relax.Var) else name_hint)

    def normalize(self, expr: relax.Expr) -> relax.Expr:
        return super().normalize(self._flat(expr))

    def _flat(self, expr: relax.Expr) -> relax.Expr:
        """Bind nested calls here, where they are named, rather than in TVM's normaliser."""
        if isinstance(expr, relax.Call):
            args = [self._bound(arg) for arg in expr.args]
            same = all(new is old for new, old in zip(args, expr.args, strict=True))
            return expr if same else relax.Call(expr.op, args, expr.attrs, expr.ty_args)
        if isinstance(expr, relax.Tuple):
            fields = [self._bound(field) for field in expr.fields]
            same = all(new is old for new, old in zip(fields, expr.fields, strict=True))
            return expr if same else relax.Tuple(fields)
        if isinstance(expr, relax.TupleGetItem) and isinstance(expr.tuple_value, relax.Call):
            return relax.TupleGetItem(self._bound(expr.tuple_value), expr.index)
        return expr

    def _bound(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return self._flat(expr)
        if not isinstance(expr, relax.Call | relax.TupleGetItem):
            return expr
        if expr not in self._made:
            self._made[expr] = super().emit(self._flat(expr), self.node)
        return self._made[expr]


class Importer(ONNXGraphImporter):
    """TVM's importer with weights as arrays instead of protobufs (no second copy), and errors that name the node.

    ``lengths`` are the outputs of data-dependent length, see :class:`mlc.frontend.model.TensorSpec`.
    """

    def __init__(self, constants: Iterable[tuple[str, Any]], shapes: Mapping[str, list[Any]], free: bool) -> None:
        super().__init__(shape_dict=shapes, dtype_dict={})
        self._free = free
        self.bb = Builder()
        self.bb.begin("")
        self._outer: Any = None
        self._rows: dict[str, onnx_dynamic_lengths.Rows] = {}
        self._given: list[onnx_dynamic_lengths.Rows | None] = []
        self._found: list[onnx_dynamic_lengths.Rows | None] = []
        self.lengths: dict[str, tuple[int, str]] = {}
        self._nodes.update((name, relax.const(tensor_of(array))) for name, array in constants)

    def _check_for_unsupported_ops(self, graph: Any) -> None:
        """Checked earlier, with mlc's own converters taken into account."""

    def _construct_nodes(self, graph: Any) -> None:
        if self._outer is not None:  # a branch of the node that is being converted
            super()._construct_nodes(graph)
            return
        self._outer = graph
        for place, node in enumerate(graph.node):
            self.bb.begin(variable_name(place, node.op_type))
            self._given, self._found = [self._rows.get(name) for name in node.input], []
            super()._construct_nodes(SimpleNamespace(node=[node]))
            self._rows.update((name, rows) for name, rows in zip(node.output, self._found, strict=False) if rows)
            for output in node.output:
                value = self._nodes.get(output)
                if isinstance(value, relax.Call) and isinstance(value.ty, relax.TensorType):
                    self._nodes[output] = self.bb.emit(value)
        self.bb.begin("")
        self._count_outputs(graph)

    def _count_outputs(self, graph: Any) -> None:
        """Add an output with the actual length for each output of data-dependent length."""
        named: dict[Any, str] = {}
        for name in [output.name for output in graph.output]:
            rows = self._rows.get(name)
            if rows is None:
                continue
            if rows.count not in named:
                named[rows.count] = _unused(f"{name}/length", {output.name for output in graph.output})
                self._nodes[named[rows.count]] = rows.count
                graph.output.add(name=named[rows.count])
            self.lengths[name] = rows.axis, named[rows.count]

    def _convert_operator(self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int) -> Any:
        finish: onnx_auto_pad.Finish | None = None
        attrs["tvm_custom"]["opset"] = opset
        try:
            if self._free:
                onnx_size_constraints.check(op_name, inputs, attrs)
                inputs, attrs, finish = onnx_auto_pad.padded(self.bb, op_name, inputs, attrs)
            if any(self._given):
                inputs = onnx_dynamic_lengths.inside(self.bb, op_name, inputs, self._given)
            elif op_name in onnx_selection.SELECTIONS:
                return self._selected(op_name, inputs, attrs)
            ours = onnx_sizes.convert(self.bb, op_name, inputs, attrs) if self._free else None
            if ours is None and op_name in CONVERTERS:
                ours = CONVERTERS[op_name](self.bb, inputs, attrs)
            if isinstance(ours, onnx_sizes.Sizes):
                return ours
            made = super()._convert_operator(op_name, inputs, attrs, opset) if ours is None else \
                self.bb.normalize(ours)
            made = made if finish is None else finish(made)
            if self._free:
                onnx_size_constraints.check_result(op_name, made)
            if any(self._given):
                types = getattr(made.ty, "fields", None) or [made.ty]
                given = list(zip(inputs, self._given, strict=True))
                self._found = onnx_dynamic_lengths.follow(op_name, given, attrs, types, opset)
            return made
        except NEEDS:
            raise
        except Exception as error:
            node = attrs["tvm_custom"]["name"] or "an unnamed node"
            raise ModelError(
                f"every node must be importable, but {op_name} ({node}) is not: {last_line(error)}; replace it "
                "in the model or export it with another opset"
            ) from error

    def _selected(self, op_name: str, inputs: Any, attrs: dict[str, Any]) -> Any:
        convert, axis = onnx_selection.SELECTIONS[op_name]
        given = [onnx_sizes.as_tensor(self.bb, each.values.reshape(-1)[0]) if isinstance(each, onnx_sizes.Sizes)
                 else each for each in inputs]
        made, count = convert(self.bb, given, attrs)
        self._found = [onnx_dynamic_lengths.Rows(axis, self.bb.emit(count), op_name)]
        return self.bb.emit(made)


def _unused(name: str, names: Container[str]) -> str:
    while name in names:
        name += "_"
    return name


def last_line(error: BaseException) -> str:
    """The last line of an error's message, which has the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
