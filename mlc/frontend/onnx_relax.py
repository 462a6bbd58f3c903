"""ONNX to Relax: mlc's converters and TVM's, driven node by node so that an error names the node."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, reduce
from operator import add
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mlc.errors import MlcError, ModelError
from mlc.frontend import onnx_auto_pad, onnx_dynamic_lengths, onnx_selection, onnx_size_constraints, onnx_sizes
from mlc.frontend.accuracy import allowed
from mlc.frontend.model import ARRAY_TYPES, ImportedModel, imported
from mlc.frontend.onnx_containers import kind_of, with_tensors
from mlc.frontend.onnx_converters import CONVERTERS
from mlc.frontend.onnx_dimensions import Agreed, AtLeast
from mlc.frontend.onnx_file import check_model, check_text
from mlc.frontend.onnx_graph import Graph
from mlc.frontend.onnx_operators import check_known, check_size, check_supported, walk_nodes
from mlc.frontend.onnx_shape_inputs import with_values
from mlc.frontend.onnx_static import make_static
from mlc.frontend.onnx_weights import Model, outside, tensor_of
from mlc.frontend.origins import origins, variable_name
from mlc.frontend.static_shapes import fold_shapes
from mlc.shapes import Linear, Shape
from mlc.sizes import attributes, scope

if TYPE_CHECKING:
    import onnx
    import tvm

__all__ = ["import_onnx"]

#: what a node may say that the model must be imported again for
_NEEDS = (onnx_size_constraints.SizesMustAgreeError, onnx_size_constraints.SizeTooSmallError)


def import_onnx(
    source: onnx.ModelProto | Model, name: str, shapes: Mapping[str, Shape] | None = None,
    values: Mapping[str, Any] | None = None,
) -> ImportedModel:
    """Check and import an ONNX model; ``shapes`` gives free input dimensions sizes or ranges of sizes, ``values``
    makes constants of inputs.

    Raises :class:`ModelError` for a model that is not valid or whose sizes depend on data, and
    :class:`UnsupportedOperators` with all operators that cannot be imported.
    """
    model = source if isinstance(source, Model) else outside(source)
    check_text(model.proto, name)
    check_known(model.proto)
    check_model(model, name)
    given, own = model.proto, list(walk_nodes(model.proto.graph.node))
    kinds = tuple((value.name, kind_of(value.type)) for value in model.proto.graph.output)
    taken_apart, shapes = with_tensors(model.proto, shapes or {}, values or {}, name)
    model = replace(model, proto=with_values(taken_apart, values or {}, name))
    graph, mod, lengths = _with_sizes_agreed(model, name, shapes)
    free = graph.free
    with scope(free):
        if attrs := {**(attributes(free) if free else {}), **allowed(graph.nodes)}:
            mod.update_func(mod.get_global_var("main"), mod["main"].with_attrs(attrs))
    outputs = [o.name for o in graph.outputs]
    counts = dict.fromkeys(each for _, each in lengths.values() if each not in outputs)
    found = imported(mod, name, [i.name for i in graph.inputs], [*outputs, *counts], lengths)
    taken = any(kind_of(value.type) not in ("", "tensor") for value in given.graph.input)
    returned = kinds if not taken and any(kind != "tensor" for _, kind in kinds) else ()
    return replace(found, nodes=origins(own, graph.nodes), returned=returned)


def _with_sizes_agreed(
    model: Model, name: str, shapes: Mapping[str, Shape]
) -> tuple[Graph, tvm.IRModule, dict[str, tuple[int, str]]]:
    """The graph and its module; free dimensions that some node needs to be equal are one, or the number they must be,
    and those that were given no range begin where every node has a result. Of outputs that a call decides the size of:
    their axis and the output that says how many there are."""
    agreed: list[Agreed | AtLeast] = []
    while True:
        graph = make_static(model, shapes, name, agreed)
        _check_borders(graph, name)
        check_size(graph.nodes, graph.is_constant, name)
        check_supported(graph.nodes)
        try:
            with scope(graph.free):
                return graph, *_to_relax(graph, name)
        except onnx_size_constraints.SizesMustAgreeError as need:
            agreed.append(Agreed(graph.place(need.name),
                                 need.other if isinstance(need.other, int) else graph.place(need.other)))
        except onnx_size_constraints.SizeTooSmallError as need:
            agreed.append(AtLeast(graph.place(need.name), need.least, need.operator))


def _check_borders(graph: Graph, name: str) -> None:
    """Raise :class:`ModelError` for inputs and outputs of types that no array has: inside, bytes hold such numbers."""
    from onnx import helper

    for value in graph.outputs:
        if value.type.WhichOneof("value") in ("sequence_type", "optional_type"):
            held = str(value.type.WhichOneof("value")).removesuffix("_type")
            raise ModelError(f"how many tensors an output holds must follow from the inputs' shapes, but {value.name} "
                             f"of {name} is a {held} of which numbers decide it; take the tensors out of it inside the "
                             "model")
    if not graph.outputs:
        raise ModelError(f"a model must give some tensor, but the outputs of {name} hold none; give out something else")
    for value in (*graph.inputs, *graph.outputs):
        kind = value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else 0
        dtype = helper.tensor_dtype_to_np_dtype(kind).name if kind else "float32"
        if dtype not in ARRAY_TYPES:
            raise ModelError(f"every input and output must have a type that arrays have, but {value.name} of {name} is "
                             f"{dtype}; cast it inside the model")


def _to_relax(graph: Graph, name: str) -> tuple[tvm.IRModule, dict[str, tuple[int, str]]]:
    from onnx import helper

    proto = helper.make_graph(graph.nodes, name, graph.inputs, graph.outputs)
    importer: Any = None
    with _quiet():
        try:
            importer = _importer_class()(graph.used_constants(), _free_shapes(graph), bool(graph.free))
            mod = importer.from_onnx(proto, graph.opset)
        except Exception as error:
            if importer is not None:
                with contextlib.suppress(Exception):  # else TVM complains of it once more where the builder ends
                    importer.bb._end_block()
            if isinstance(error, (MlcError, *_NEEDS)):
                raise
            raise ModelError(f"{name} must be importable, but TVM failed: {_last_line(error)}") from error
    return fold_shapes(mod), importer.lengths


def _free_shapes(graph: Graph) -> dict[str, list[Any]]:
    """The shapes of the inputs with free dimensions: numbers and variables, one for each name; and of those without
    elements, whose 0 TVM takes for a size that is not known."""
    from tvm import tirx

    variables = {name: tirx.Var(name, "int64") for name in graph.free}
    dims = {value.name: value.type.tensor_type.shape.dim for value in graph.inputs}
    return {
        name: [_size(d.dim_param, variables) if d.dim_param else int(d.dim_value) for d in shape]
        for name, shape in dims.items() if any(d.dim_param or not d.dim_value for d in shape)
    }


def _size(symbol: str, variables: Mapping[str, Any]) -> Any:
    """The size of a dimension: a variable, or what follows from some."""
    linear = Linear.parse(symbol)
    if linear is None:
        return variables[symbol]
    terms = [variables[name] if factor == 1 else variables[name] * factor for name, factor in linear.terms]
    return reduce(add, [*terms, *([linear.constant] if linear.constant else [])])


class _Muted(threading.local):
    """Whether this thread imports a model of ours; standard output and warning filters are everybody's."""

    now = False


_muted = _Muted()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the importer's prints, and its warnings of renamed inputs: our specifications keep the model's names."""
    _mute_importer()
    _muted.now = True
    try:
        yield
    finally:
        _muted.now = False


@cache
def _mute_importer() -> None:
    """Silence the prints and warnings of TVM's importer in threads within :func:`_quiet`."""
    from tvm.relax.frontend.onnx import onnx_frontend

    def unless_muted(function: Callable[..., None]) -> Callable[..., None]:
        return lambda *words, **options: None if _muted.now else function(*words, **options)

    onnx_frontend.print = unless_muted(print)
    onnx_frontend.warnings = SimpleNamespace(warn=unless_muted(warnings.warn))


def _importer_class() -> Any:
    """TVM's importer with weights as arrays instead of protobufs (no second copy), and errors that name the node."""
    from tvm import relax
    from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

    class Builder(relax.BlockBuilder):
        """Names what is bound after the node at hand."""

        node = ""
        _made: dict[relax.Expr, relax.Var]  # what was bound inside of expressions of the node

        def begin(self, node: str) -> None:
            self.node, self._made = node, {}

        def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Var:
            return super().emit(self._flat(expr), name_hint or self.node)

        def emit_output(self, output: Any, name_hint: str = "") -> relax.Var:
            return super().emit_output(output, output.name if isinstance(output, relax.Var) else name_hint)

        def normalize(self, expr: relax.Expr) -> relax.Expr:
            return super().normalize(self._flat(expr))

        def _flat(self, expr: relax.Expr) -> relax.Expr:
            """The expression with what TVM would bind inside of it bound here."""
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
            """Done before, with our own converters counted in."""

        def _construct_nodes(self, graph: Any) -> None:
            if self._outer is not None:  # a branch of the node at hand
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
            """Outputs of which the numbers say how many there are come with one that says it."""
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
            except _NEEDS:
                raise
            except Exception as error:
                node = attrs["tvm_custom"]["name"] or "an unnamed node"
                raise ModelError(
                    f"every node must be importable, but {op_name} ({node}) is not: {_last_line(error)}; replace it "
                    "in the model or export it with another opset"
                ) from error

        def _selected(self, op_name: str, inputs: Any, attrs: dict[str, Any]) -> Any:
            convert, axis = onnx_selection.SELECTIONS[op_name]
            given = [onnx_sizes.as_tensor(self.bb, each.values.reshape(-1)[0]) if isinstance(each, onnx_sizes.Sizes)
                     else each for each in inputs]
            made, count = convert(self.bb, given, attrs)
            self._found = [onnx_dynamic_lengths.Rows(axis, self.bb.emit(count), op_name)]
            return self.bb.emit(made)

    return Importer


def _unused(name: str, names: Container[str]) -> str:
    while name in names:
        name += "_"
    return name


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
