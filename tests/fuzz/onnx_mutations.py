"""What can be wrong with a model file: a function for each kind of damage, all random choices from the case's seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import onnx
from onnx import TensorProto, helper

from tests.fuzz.networks import NETWORKS, network

__all__ = ["DAMAGES", "damaged"]

_INTEGERS = (-(2**63), -(2**31), -65, -2, -1, 0, 1, 2, 3, 7, 64, 1000, 10**6, 2**31, 2**40, 2**62, 2**63 - 1)
_FLOATS = (float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-45, 1e-30, 3e38, -1.0, 0.5, 2.0)
_TEXTS = (b"", b"\xff\xfe", b"\x1b[31m", b"[bold]", b"a" * 5000, b"same", b"SAME_UPPER", b"linear", b"cubic", b"\x00",
          "größe".encode(), b"self", b"/../..", b"constant", b"reverse", b"bidirectional")
_TYPES = (0, *range(1, 27), 99, -1)
_OPERATORS = tuple(sorted(onnx.defs.get_all_schemas(), key=lambda schema: (schema.domain, schema.name)))
_SCHEMAS = tuple(schema for schema in _OPERATORS if not schema.domain)

Model = onnx.ModelProto


def damaged(kind: str, rng: Random) -> bytes:
    """A file: one of the networks with damage of one kind (a few places of it)."""
    model = Model()
    model.CopyFrom(network(rng.choice(NETWORKS)))
    changed = DAMAGES[kind](model, rng)
    return changed if isinstance(changed, bytes) else model.SerializeToString()


# The bytes of the file


def _flip(model: Model, rng: Random) -> bytes:
    data = bytearray(model.SerializeToString())
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _cut(model: Model, rng: Random) -> bytes:
    data = model.SerializeToString()
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return rng.choice((data[:end], data[start:], data[:start] + data[end:], data + data[start:end]))


def _garble_text(model: Model, rng: Random) -> bytes:
    """A name of the model replaced by other bytes of the same length, valid UTF-8 or not."""
    names = [n for n in [node.op_type for node in _nodes(model)] + _values(model) if n]
    name = rng.choice(names).encode()
    other = bytes(rng.choice((0xFF, 0x1B, 0x00, 0xC3, 0x5B, 0x2F, 0x0A)) for _ in name)
    data = model.SerializeToString()
    return data.replace(name, other) if rng.random() < 0.5 else data.replace(name, other, 1)


# Parts of the graph


def _attribute(model: Model, rng: Random) -> None:
    with_some = [node for node in _nodes(model) if node.attribute]
    if not with_some or rng.random() < 0.2:
        node = rng.choice(_nodes(model))
        name = rng.choice(("axis", "axes", "pads", "strides", "dilations", "group", "alpha", "mode", "to", "perm",
                           "keepdims", "epsilon", "auto_pad", "activations", "direction", "hidden_size", "body"))
        node.attribute.append(helper.make_attribute(name, rng.choice((*_INTEGERS, *_FLOATS, *_TEXTS, [1, 1]))))
        return
    node = rng.choice(with_some)
    attribute = rng.choice(node.attribute)
    kind = rng.randrange(8)
    if kind == 0:
        node.attribute.remove(attribute)
    elif kind == 1:
        attribute.type = rng.choice(list(range(15)))
    elif kind == 2:
        node.attribute.append(attribute)
    elif kind == 3:
        attribute.ref_attr_name = rng.choice(("alpha", "nothing"))
    else:
        _change_value(attribute, rng)


def _change_value(attribute: onnx.AttributeProto, rng: Random) -> None:
    if attribute.ints or attribute.floats:
        values: Any = attribute.ints or attribute.floats
        pool: Sequence[Any] = _INTEGERS if attribute.ints else _FLOATS
        place = rng.randrange(len(values))
        kind = rng.randrange(4)
        if kind == 0:
            values.append(rng.choice(pool))
        elif kind == 1:
            del values[place]
        elif kind == 2:
            values[place] = values[place] + rng.choice((-1, 1)) if abs(values[place]) < 2**31 else 0
        else:
            values[place] = rng.choice(pool)
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = rng.choice(_FLOATS)
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = rng.choice(_TEXTS)
    elif attribute.type == onnx.AttributeProto.GRAPH:
        _change_graph(attribute.g, rng)
    else:
        attribute.i = rng.choice((*_INTEGERS, attribute.i + 1, attribute.i - 1))


def _change_graph(graph: onnx.GraphProto, rng: Random) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        del graph.output[:]
    elif kind == 1:
        del graph.node[:]
    elif kind == 2:
        graph.output.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]))
    else:
        graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]))


def _dimensions(model: Model, rng: Random) -> None:
    graph = model.graph
    if graph.initializer and rng.random() < 0.5:
        _change_dims(rng.choice(graph.initializer).dims, rng)
        return
    value = rng.choice([*graph.input, *graph.output])
    dims = value.type.tensor_type.shape.dim
    kind = rng.randrange(6)
    if kind == 0 or not dims:
        dims.add(dim_value=rng.choice(_INTEGERS))
    elif kind == 1:
        del dims[rng.randrange(len(dims))]
    elif kind == 2:
        rng.choice(dims).dim_param = rng.choice(("n", "", "\x1b[2J", "n" * 3000))
    elif kind == 3:
        value.type.tensor_type.ClearField("shape")
    elif kind == 4:
        place = rng.choice(dims)
        place.dim_value = max(1, place.dim_value + rng.choice((-1, 1)))
    else:
        rng.choice(dims).dim_value = rng.choice(_INTEGERS)


def _change_dims(dims: Any, rng: Random) -> None:
    kind = rng.randrange(4)
    if kind == 0 or not dims:
        dims.append(rng.choice((1, 1, *_INTEGERS)))
    elif kind == 1:
        del dims[rng.randrange(len(dims))]
    elif kind == 2:
        dims[:] = rng.sample(list(dims), len(dims))
    else:
        dims[rng.randrange(len(dims))] = rng.choice(_INTEGERS)


def _types(model: Model, rng: Random) -> None:
    graph = model.graph
    kind = rng.randrange(4)
    if kind == 0 and graph.initializer:
        rng.choice(graph.initializer).data_type = rng.choice(_TYPES)
    elif kind == 1:
        value = rng.choice([*graph.input, *graph.output])
        value.ClearField("type")
        if rng.random() < 0.5:
            value.type.sequence_type.elem_type.tensor_type.elem_type = 1
    elif kind == 2:
        wanted = rng.choice((10, 11, 16, 6, 7))
        for value in [*graph.input, *graph.output]:
            if value.type.tensor_type.elem_type == 1:
                value.type.tensor_type.elem_type = wanted
    else:
        rng.choice([*graph.input, *graph.output]).type.tensor_type.elem_type = rng.choice(_TYPES)


def _names(model: Model, rng: Random) -> None:
    new = rng.choice(("", "self", "file", "[red]", "\x1b[31m", "a\nb", "x" * 4000, "\x00", "main", "y", "x", "../..",
                      "main_with_weights", "%s{0}", "\u202e", "-1"))
    kind = rng.randrange(5)
    if kind == 0:
        rng.choice(_nodes(model)).name = new
    elif kind == 1:
        model.graph.name = new
    elif kind == 2:
        rng.choice(_nodes(model)).domain = new
    elif kind == 3:
        rng.choice([*model.graph.input, *model.graph.output, *model.graph.initializer]).name = new
    else:
        _rename(model.graph, rng.choice([n for n in _values(model) if n]), new)


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Everywhere, so that the model stays what it was."""
    for entry in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        if entry.name == old:
            entry.name = new
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, old, new)


def _edges(model: Model, rng: Random) -> None:
    node = rng.choice(_nodes(model))
    names = rng.choice((node.input, node.input, node.output))
    values = [*_values(model), "", "nothing"]
    kind = rng.randrange(6)
    if kind == 0 or not names:
        names.append(rng.choice(values))
    elif kind == 1:
        del names[rng.randrange(len(names))]
    elif kind == 2:
        names[:] = rng.sample(list(names), len(names))
    elif kind == 3:
        names.append(names[rng.randrange(len(names))])
    elif kind == 4:
        del names[:]
    else:
        names[rng.randrange(len(names))] = rng.choice(values)


def _operators(model: Model, rng: Random) -> None:
    node = rng.choice(_nodes(model))
    fitting = [s for s in _SCHEMAS if s.min_input <= len(node.input) <= s.max_input
               and s.min_output <= len(node.output) <= s.max_output]
    node.op_type = rng.choice(_OPERATORS if rng.random() < 0.2 or not fitting else fitting).name
    if rng.random() < 0.6:
        del node.attribute[:]


def _order(model: Model, rng: Random) -> None:
    graph = model.graph
    kind = rng.randrange(6)
    if kind == 0:
        graph.node.append(rng.choice(graph.node))
    elif kind == 1:
        graph.node.remove(rng.choice(graph.node))
    elif kind == 2:
        nodes = rng.sample(list(graph.node), len(graph.node))
        del graph.node[:]
        graph.node.extend(nodes)
    elif kind == 3:
        place = rng.choice((graph.input, graph.output, graph.initializer))
        if place:
            place.append(rng.choice(place))
    elif kind == 4:
        place = rng.choice((graph.input, graph.output, graph.initializer))
        if place:
            place.remove(rng.choice(place))
    else:
        graph.output.append(_output(rng.choice(_values(model)), TensorProto.FLOAT, rng.randrange(5)))


def _weights(model: Model, rng: Random) -> None:
    if not model.graph.initializer:
        return
    tensor = rng.choice(model.graph.initializer)
    kind = rng.randrange(7)
    if kind == 0:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    elif kind == 1:
        tensor.raw_data += bytes(rng.randrange(9))
    elif kind == 2:
        _outside(tensor, rng)
    elif kind == 3:
        tensor.float_data.extend([rng.choice(_FLOATS)] * rng.randrange(4))
    elif kind == 4 and tensor.int64_data:
        tensor.int64_data[rng.randrange(len(tensor.int64_data))] = rng.choice(_INTEGERS)
    elif kind == 5:
        tensor.segment.begin = rng.choice(_INTEGERS)
    elif tensor.raw_data:
        data = bytearray(tensor.raw_data)
        place = rng.randrange(len(data)) & ~3
        data[place : place + 4] = rng.choice((b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff\xff\xff\xff", b"\0\0\0\0"))
        tensor.raw_data = bytes(data[: len(tensor.raw_data)])


def _outside(tensor: TensorProto, rng: Random) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    where = rng.choice(("/etc/passwd", "../../../../etc/passwd", "nothing.bin", "", "/dev/zero", "m.onnx", "\x1b[31m",
                        "\x00", "a" * 5000))
    tensor.external_data.add(key="location", value=where)
    for key in ("offset", "length"):
        if rng.random() < 0.5:
            tensor.external_data.add(key=key, value=rng.choice(("0", "1", "-1", "9" * 30, "nan", "\x1b", "1e3")))


def _versions(model: Model, rng: Random) -> None:
    kind = rng.randrange(6)
    if kind == 0:
        model.ir_version = rng.choice(_INTEGERS)
    elif kind == 1:
        del model.opset_import[:]
    elif kind == 2:
        model.opset_import.append(helper.make_opsetid(rng.choice(("", "ai.onnx", "com.microsoft", "\x1b")), 17))
    else:
        model.opset_import[0].version = rng.choice((*range(1, 27), *_INTEGERS))


# Whole graphs


def _nested(model: Model, rng: Random) -> None:
    """The last node inside the branches of many conditions, or functions that call each other."""
    if rng.random() < 0.3:
        _calls_in_a_circle(model, rng)
        return
    node = model.graph.node[-1]
    depth = rng.choice((1, 2, 5, 10, 20))  # of what protobuf parses: 100 messages inside each other
    model.graph.initializer.append(helper.make_tensor("condition", TensorProto.BOOL, [], [rng.randrange(2)]))
    outputs = list(node.output)
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    for level in range(depth):
        names = [f"{name}/{level}" if name else "" for name in outputs]
        inner.output[:] = names
        body = helper.make_graph([inner], f"level {level}", [],
                                 [helper.make_empty_tensor_value_info(name) for name in names if name])
        inner = helper.make_node("If", ["condition"], outputs, then_branch=body, else_branch=body if level < 6 else
                                 helper.make_graph([], "nothing", [], []))
    node.CopyFrom(inner)


def _calls_in_a_circle(model: Model, rng: Random) -> None:
    names = [f"f{i}" for i in range(rng.choice((1, 2, 3, 40)))]
    for place, name in enumerate(names):
        following = names[(place + 1) % len(names)] if rng.random() < 0.9 else "Relu"
        calls = [helper.make_node(following, ["a"], ["b"], domain="local" if following != "Relu" else "")]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
        model.functions.append(helper.make_function("local", name, ["a"], ["b"], calls, opsets))
    model.graph.node[-1].op_type, model.graph.node[-1].domain = names[0], "local"


def _many(model: Model, rng: Random) -> None:
    """A value that many nodes read, or a long chain behind it."""
    graph = model.graph
    if not graph.input:  # other damage has taken them
        return
    given, count = rng.choice(graph.input), rng.choice((10, 100, 400))
    start = given.name
    operator = rng.choice(("Identity", "Relu", "Neg", "Sqrt", "Cast", "Abs"))
    chain = rng.random() < 0.5
    names = [start] + [f"many/{i}" for i in range(count)]
    for place, name in enumerate(names[1:]):
        read = names[place] if chain else start
        graph.node.append(helper.make_node(operator, [read], [name], **({"to": 1} if operator == "Cast" else {})))
    graph.node.append(helper.make_node("Sum", names[1:] if not chain else names[-1:], ["many"]))
    graph.output.append(_output("many", TensorProto.FLOAT, len(given.type.tensor_type.shape.dim)))


def _grown(model: Model, rng: Random) -> None:
    """A constant computation whose result is larger than any memory."""
    graph = model.graph
    sizes = rng.choice(((2**31, 4), (10**5, 10**5), (2**62, 1), (2**40,), (2**33, 0), (10**9,), (1, -1)))
    graph.initializer.append(helper.make_tensor("sizes", TensorProto.INT64, [len(sizes)], sizes))
    graph.initializer.append(helper.make_tensor("unit", TensorProto.FLOAT, [1] * len(sizes), [1.0]))
    for name, bound in (("from", 0), ("up", max(sizes)), ("by", 1)):
        graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [], [bound]))
    graph.initializer.append(helper.make_tensor("padding", TensorProto.INT64, [2 * len(sizes)], [0] * len(sizes) + list(
        sizes)))
    inputs = rng.choice((("ConstantOfShape", ["sizes"]), ("Expand", ["unit", "sizes"]), ("Tile", ["unit", "sizes"]),
                         ("Range", ["from", "up", "by"]), ("Pad", ["unit", "padding"]),
                         ("Resize", ["unit", "", "", "sizes"])))
    graph.node.append(helper.make_node(inputs[0], inputs[1], ["grown"]))
    rank = 1 if inputs[0] == "Range" else len(sizes)
    last, rank = rng.choice((("ReduceMax", 0), ("Shape", 1), ("Identity", rank), ("Size", 0), ("Neg", rank)))
    graph.node.append(helper.make_node(last, ["grown"], ["result"], **({"keepdims": 0} if last == "ReduceMax" else {})))
    whole = last in ("Shape", "Size") or inputs[0] == "Range"
    graph.output.append(_output("result", TensorProto.INT64 if whole else TensorProto.FLOAT, rank))


def _output(name: str, kind: int, rank: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [f"{name} {i}" for i in range(rank)])


def _several(model: Model, rng: Random) -> bytes | None:
    kinds = [k for k in DAMAGES if k not in ("several", "grown")]
    for _ in range(rng.randrange(2, 5)):
        found = DAMAGES[rng.choice(kinds)](model, rng)
        if found is not None:
            return found
    return None


def _nodes(model: Model) -> list[onnx.NodeProto]:
    def of(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
        for node in nodes:
            yield node
            for attribute in node.attribute:
                yield from of(attribute.g.node)

    return [*of(model.graph.node), *(node for function in model.functions for node in function.node)]


def _values(model: Model) -> list[str]:
    return [name for node in _nodes(model) for name in (*node.input, *node.output)]


DAMAGES: dict[str, Callable[[Model, Random], bytes | None]] = {
    "attribute": _attribute, "dimensions": _dimensions, "types": _types, "names": _names, "edges": _edges,
    "operators": _operators, "order": _order, "weights": _weights, "versions": _versions, "nested": _nested,
    "many": _many, "grown": _grown, "several": _several, "flip": _flip, "cut": _cut, "text": _garble_text,
}
