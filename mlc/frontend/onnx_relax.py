"""Imports an ONNX model as a Relax module: checks it, makes it static as far as possible
(:mod:`mlc.frontend.onnx_static`), and converts it node by node (:mod:`mlc.frontend.onnx_importer`)."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, reduce
from operator import add
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mlc.errors import MlcError, ModelError
from mlc.frontend import onnx_size_constraints
from mlc.frontend.accuracy import allowed
from mlc.frontend.model import ARRAY_TYPES, ImportedModel, imported
from mlc.frontend.onnx_containers import kind_of, with_tensors
from mlc.frontend.onnx_dimensions import Agreed, AtLeast
from mlc.frontend.onnx_file import check_model, check_text
from mlc.frontend.onnx_graph import Graph
from mlc.frontend.onnx_operators import check_known, check_size, check_supported, walk_nodes
from mlc.frontend.onnx_shape_inputs import with_values
from mlc.frontend.onnx_static import make_static
from mlc.frontend.onnx_weights import Model, outside
from mlc.frontend.origins import origins
from mlc.frontend.static_shapes import fold_shapes
from mlc.shapes import Linear, Shape
from mlc.sizes import attributes, scope

if TYPE_CHECKING:
    import onnx
    import tvm

__all__ = ["import_onnx"]


def import_onnx(
    source: onnx.ModelProto | Model, name: str, shapes: Mapping[str, Shape] | None = None,
    values: Mapping[str, Any] | None = None,
) -> ImportedModel:
    """Check and import an ONNX model.

    ``shapes`` gives sizes or ranges of free input dimensions, ``values`` turns inputs into constants. Raises
    :class:`ModelError` for a model that is invalid or whose sizes depend on data, and :class:`UnsupportedOperators`
    with all operators that cannot be imported.
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
    """The graph, its module, and the outputs of data-dependent length with their axis and the output that holds the
    length.

    Free dimensions that some node requires to be equal become one, or the number that they must be, and those without a
    given range start where every node has a result: a node reports such a constraint, and the model is imported again
    with it.
    """
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
    """Raise :class:`ModelError` for inputs and outputs of types that no array has (4-bit integers, say), which are only
    supported inside a model."""
    from onnx import helper

    for value in graph.outputs:
        if value.type.WhichOneof("value") in ("sequence_type", "optional_type"):
            held = str(value.type.WhichOneof("value")).removesuffix("_type")
            raise ModelError(f"how many tensors an output holds must follow from the inputs' shapes, but {value.name} "
                             f"of {name} is a {held} whose length depends on the data; take the tensors out of it "
                             "inside the model")
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

    from mlc.frontend.onnx_importer import NEEDS, Importer, last_line

    proto = helper.make_graph(graph.nodes, name, graph.inputs, graph.outputs)
    importer: Any = None
    with _quiet():
        try:
            importer = Importer(graph.used_constants(), _free_shapes(graph), bool(graph.free))
            mod = importer.from_onnx(proto, graph.opset)
        except Exception as error:
            if importer is not None:
                with contextlib.suppress(Exception):  # else TVM reports it once more when the builder is destroyed
                    importer.bb._end_block()
            if isinstance(error, (MlcError, *NEEDS)):
                raise
            raise ModelError(f"{name} must be importable, but TVM failed: {last_line(error)}") from error
    return fold_shapes(mod), importer.lengths


def _free_shapes(graph: Graph) -> dict[str, list[Any]]:
    """The shapes of inputs with free dimensions: numbers, and one variable per name; also of empty inputs, whose 0 TVM
    would take for an unknown size."""
    from tvm import tirx

    variables = {name: tirx.Var(name, "int64") for name in graph.free}
    dims = {value.name: value.type.tensor_type.shape.dim for value in graph.inputs}
    return {
        name: [_size(d.dim_param, variables) if d.dim_param else int(d.dim_value) for d in shape]
        for name, shape in dims.items() if any(d.dim_param or not d.dim_value for d in shape)
    }


def _size(symbol: str, variables: Mapping[str, Any]) -> Any:
    """The size of a dimension: a variable, or an expression in several."""
    linear = Linear.parse(symbol)
    if linear is None:
        return variables[symbol]
    terms = [variables[name] if factor == 1 else variables[name] * factor for name, factor in linear.terms]
    return reduce(add, [*terms, *([linear.constant] if linear.constant else [])])


class _Muted(threading.local):
    """Whether this thread is importing a model: standard output and warning filters are shared by all threads."""

    now = False


_muted = _Muted()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the importer's prints, and its warnings of renamed inputs: mlc's specifications keep the model's names.
    """
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
