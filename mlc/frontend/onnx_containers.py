"""Sequences and optionals among a model's inputs and outputs, replaced by the tensors that they hold in a call.

An input ``x`` that holds tensors becomes inputs ``x/0, x/1, …`` and a node that puts them together, of which nothing is
left (:mod:`mlc.frontend.onnx_sequences`); an output becomes outputs of such names. How many there are must be known
when a model is compiled: it is the form that ``shapes`` says, or that a call has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlc.errors import ModelError, UsageError, ValuesNeededError
from mlc.frontend.onnx_shape_inputs import missing_values
from mlc.shapes import Range, Shape, parse_shape, shape_text

if TYPE_CHECKING:
    import onnx

__all__ = ["kind_of", "tensor_type_of", "with_tensors"]

#: a tensor of a container's, by its number
_TENSOR = re.compile(r"(.*)/(\d+)", re.DOTALL)


def kind_of(kind: onnx.TypeProto) -> str:
    """``tensor``, ``sequence``, ``optional`` or ``optional sequence`` of tensors; an empty text for anything else."""
    if kind.HasField("optional_type"):
        inner = kind_of(kind.optional_type.elem_type)
        return {"tensor": "optional", "sequence": "optional sequence"}.get(inner, "")
    if kind.HasField("sequence_type"):
        return "sequence" if kind.sequence_type.elem_type.HasField("tensor_type") else ""
    return "tensor" if kind.HasField("tensor_type") else ""


def tensor_type_of(kind: onnx.TypeProto) -> onnx.TypeProto:
    """The type of the tensors that a value of a type of :func:`kind_of` holds."""
    while not kind.HasField("tensor_type"):
        kind = (kind.optional_type if kind.HasField("optional_type") else kind.sequence_type).elem_type
    return kind


def with_tensors(
    model: onnx.ModelProto, shapes: Mapping[str, Shape | None], values: Mapping[str, Any], name: str
) -> tuple[onnx.ModelProto, dict[str, Shape]]:
    """The model without containers among its inputs, and the shapes of its inputs.

    ``shapes`` say of a sequence the shape of each of its tensors, in a list; of an optional None, where it holds
    nothing, else as of what it holds; or of single tensors, by the names of their inputs. Sizes that are numbers are
    fixed. Raises :class:`ValuesNeededError` where such a form is missing, or a value that decides shapes in ``values``,
    and :class:`UsageError` for a form that does not fit.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    held = {value.name: kind for value in inputs if (kind := kind_of(value.type)) not in ("", "tensor")}
    known: dict[str, Any] = dict(shapes)
    _take_single(known, held)
    known |= {key: _forms(known[key], kind, key, name) for key, kind in held.items() if key in known}
    unknown = next((each for each in held if each not in known or _is_of_all(known[each], held[each])), "")
    needed = missing_values(model, values)
    if unknown or needed:
        kinds = {value.name: kind_of(value.type) for value in model.graph.output}
        raise ValuesNeededError(name, [value.name for value in inputs], needed, held, kinds, unknown, known)
    if nothing := next((key for key, shape in known.items() if shape is None and key not in held), None):
        raise UsageError(f"shapes[{nothing!r}] must be a shape, got None; only an optional may hold nothing")
    if not held:
        return model, known
    changed = type(model)()
    changed.CopyFrom(model)
    del changed.graph.input[:]
    symbols = {d.dim_param for value in inputs if value.name not in held for d in value.type.tensor_type.shape.dim}
    nodes: list[onnx.NodeProto] = []
    for value in model.graph.input:
        if value.name not in held:
            changed.graph.input.append(value)
            continue
        made, tensors, more = _taken_apart(value, held[value.name], known.pop(value.name), symbols)
        nodes.extend(made)
        changed.graph.input.extend(tensors)
        known.update(more)
    nodes.extend(model.graph.node)
    del changed.graph.node[:]
    changed.graph.node.extend(nodes)
    names = [value.name for value in changed.graph.input] + [each.output[0] for each in nodes if each.name in held]
    used = {each for node in model.graph.node for each in node.output} | weights | held.keys()
    if twice := next((n for n in names if names.count(n) > 1 or n in used), None):
        raise ModelError(f"the tensors of {twice.rpartition('/')[0]} are inputs of {name} by names such as {twice}, "
                         "which is there already; rename it in the model")
    return changed, known


def _forms(shape: Any, kind: str, name: str, model: str) -> Any:
    """What is said of a container: None where it holds nothing, the sizes of an optional's tensor, those of each of a
    sequence's, or a text that is all of theirs."""
    if shape is None:
        if not kind.startswith("optional"):
            raise UsageError(f"shapes[{name!r}] must be a list of shapes, got None; only an optional may hold nothing")
        return None
    several = "sequence" in kind
    if several and isinstance(shape, str):
        _form(shape, f"{name}/0")
        return shape
    each_shape = shape if several and isinstance(shape, Sequence) else [shape]
    if not all(isinstance(each, str | Sequence) for each in each_shape) or (several and each_shape is not shape):
        ranges = isinstance(shape, tuple) and all(isinstance(each, Range) for each in shape)  # of --shape
        got = shape_text(shape) if ranges else repr(shape)
        wanted = "a list of shapes, one for each tensor of the" if several else "a shape or None for the"
        raise UsageError(f"shapes[{name!r}] must be {wanted} {kind} of {model}, got {got}")
    forms = tuple(_form(each, f"{name}/{i}") for i, each in enumerate(each_shape))
    return forms if several else forms[0]


def _is_of_all(shape: Any, kind: str) -> bool:
    """Whether one shape is said of all tensors of a sequence, of which there may be any number."""
    return "sequence" in kind and isinstance(shape, str)


def _take_single(known: dict[str, Any], held: Mapping[str, str]) -> None:
    """Make lists of shapes that are said of single tensors."""
    single: dict[str, dict[int, Any]] = {}
    for key in list(known):
        found = _TENSOR.fullmatch(key)
        if found and found[1] in held and key not in held:
            single.setdefault(found[1], {})[int(found[2])] = known.pop(key)
    for owner, shapes in single.items():
        if owner in known or sorted(shapes) != list(range(len(shapes))):
            raise UsageError(f"shapes must say once of each tensor of {owner}, from {owner}/0 on, got "
                             f"{', '.join(f'{owner}/{i}' for i in sorted(shapes))}"
                             + (f" beside {owner}" if owner in known else ""))
        given = [shapes[i] for i in range(len(shapes))]
        known[owner] = given if "sequence" in held[owner] else given[0] if len(given) == 1 else given


def _taken_apart(
    value: onnx.ValueInfoProto, kind: str, form: Any, symbols: set[str]
) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto], dict[str, Shape]]:
    """Nodes that make a container of tensors of that form, the inputs that these are, and shapes of some of them."""
    from onnx import TypeProto, helper

    name, tensor = value.name, tensor_type_of(value.type)
    if form is None:
        inner = TypeProto()
        inner.CopyFrom(value.type.optional_type.elem_type)
        return [helper.make_node("Optional", [], [name], type=inner)], [], {}
    tensors, shapes = [], dict[str, Shape]()
    for i, each in enumerate(form if "sequence" in kind else [form]):
        made = helper.make_value_info(f"{name}/{i}", tensor)
        free = _fix(made, each, symbols if kind == "optional" else set())
        tensors.append(made)
        if free:
            shapes[made.name] = each
    names = [each.name for each in tensors]
    if kind == "optional":
        return [helper.make_node("Optional", names, [name])], tensors, shapes
    sequence = f"{name}/{len(names)}" if kind == "optional sequence" else name
    nodes = [helper.make_node("SequenceConstruct", names, [sequence]) if names else
             helper.make_node("SequenceEmpty", [], [sequence], dtype=tensor.tensor_type.elem_type)]
    if kind == "optional sequence":
        nodes.append(helper.make_node("Optional", [sequence], [name]))
    return nodes, tensors, shapes


def _form(shape: Shape, name: str) -> tuple[Range, ...]:
    """Like :func:`mlc.shapes.parse_shape`, but sizes that are numbers may be 0, as in an array."""
    try:
        sizes = None if isinstance(shape, str) else [
            size for size in shape if isinstance(size, int) and not isinstance(size, bool) and size >= 0]
        if sizes is not None and len(sizes) == len(shape):
            return tuple(Range(size, size) for size in sizes)
        return parse_shape(shape)
    except UsageError as error:
        raise UsageError(f"shapes of {name}: {error}") from None


def _fix(value: onnx.ValueInfoProto, form: Sequence[Range], symbols: set[str]) -> bool:
    """Give a tensor the sizes of its form, but for those that go by a name of ``symbols``; whether some are ranges.

    Raises :class:`UsageError` where the model says other sizes.
    """
    tensor = value.type.tensor_type
    own = list(tensor.shape.dim)
    said = [d.dim_value if d.HasField("dim_value") else None for d in own]
    fits = not tensor.HasField("shape") or (len(own) == len(form) and all(
        n is None or (each.fixed and each.low == n) for n, each in zip(said, form, strict=True)))
    if not fits:
        wanted = ",".join(d.dim_param or "?" if n is None else str(n) for n, d in zip(said, own, strict=True))
        raise UsageError(f"the shape of {value.name} must fit the model's ({wanted}), got ({shape_text(form)})")
    names = [d.dim_param for d in own] or [""] * len(form)
    tensor.ClearField("shape")
    tensor.shape.SetInParent()
    for each, symbol in zip(form, names, strict=True):
        dim = tensor.shape.dim.add()
        if symbol and symbol in symbols:  # also the size of another input, which says its range
            dim.dim_param = symbol
        elif each.fixed:
            dim.dim_value = each.low
    return not all(each.fixed for each in form)
