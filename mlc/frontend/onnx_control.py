"""ONNX control flow as a straight-line graph: loops of known length are unrolled, both branches of an ``If`` computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlc.frontend.onnx_expand import Nodes

if TYPE_CHECKING:
    import onnx

__all__ = ["branches", "copied", "loop", "scan", "stacked"]

#: of all steps together; a graph of more is refused in any case
_MOST_NODES = 20_000


def branches(nodes: Nodes) -> list[str]:
    """``If`` a condition that is known at run time alone: both branches are computed, and one is chosen.

    Raises :class:`mlc.errors.ModelError` where they differ in shape.
    """
    condition, given = nodes.node.input[0], nodes.attributes()
    for output in filter(None, nodes.node.output):
        nodes.check_sizes(output, "output in both branches")  # known where it is the same in both
    both = [copied(nodes, given[name], {}, name) for name in ("then_branch", "else_branch")]
    return [str(nodes("Where", condition, one, other)) for one, other in zip(*both, strict=True)]


def loop(nodes: Nodes) -> list[str]:
    """``Loop`` of a known number of steps: ``M, cond`` and the states; the results are the last states and what each
    step gives besides, along a new first axis."""
    count, condition, *states = nodes.node.input
    body = nodes.attributes()["body"]
    if not _goes_on(body):
        raise nodes.refused("its body must leave its condition as it is; write the loop with a number of steps")
    if condition and not np.all(nodes.known(condition, "condition")):
        steps = 0
    elif count:
        steps = int(nodes.known(count, "number of steps").reshape(()))
    else:
        raise nodes.refused("it must say how many steps it takes; it would never end")
    _check_length(nodes, body, steps)
    index, inner, *_ = (value.name for value in body.input)
    going, given = nodes.constant(np.array(True)), []
    for step in range(steps):
        names = {index: nodes.constant(np.array(step)), inner: going}
        names.update(zip((value.name for value in body.input[2:]), states, strict=True))
        _, *results = copied(nodes, body, names, str(step))
        states, found = results[:len(states)], results[len(states):]
        given.append(found)
    if not steps and len(body.output) > 1 + len(states):
        raise nodes.refused("it takes no step, so that what its steps give has no shape")
    return [*states, *(stacked(nodes, parts, 0) for parts in zip(*given, strict=True))]


def scan(nodes: Nodes) -> list[str]:
    """``Scan``: states, and tensors of which each step takes a slice; the results are the last states and what each
    step gives, stacked."""
    if nodes.opset < 9:
        return _scan_of_batch(nodes)
    given = nodes.attributes()
    body, count = given["body"], int(given["num_scan_inputs"])
    first = len(nodes.node.input) - count
    states, scanned = list(nodes.node.input[:first]), list(nodes.node.input[first:])
    outputs = len(body.output) - first
    axes, backward = (given.get(name, [0] * count) for name in ("scan_input_axes", "scan_input_directions"))
    places, reversed_ = (given.get(name, [0] * outputs) for name in ("scan_output_axes", "scan_output_directions"))
    lengths = {nodes.known_shape(name, "scanned input")[axis] for name, axis in zip(scanned, axes, strict=True)}
    if len(lengths) != 1:
        raise nodes.refused(f"its scanned inputs must be of one length, got {sorted(lengths)}")
    (steps,) = lengths
    _check_length(nodes, body, steps)
    parts: list[list[str]] = []
    for step in range(steps):
        slices = [str(nodes("Gather", name, nodes.constant(np.array(steps - 1 - step if turn else step)), axis=axis))
                  for name, axis, turn in zip(scanned, axes, backward, strict=True)]
        names = dict(zip((value.name for value in body.input), [*states, *slices], strict=True))
        results = copied(nodes, body, names, str(step))
        states = results[:first]
        parts.append(results[first:])
    given_back = [stacked(nodes, each[::-1] if turn else each, axis)
                  for each, axis, turn in zip(zip(*parts, strict=True), places, reversed_, strict=True)]
    return [*states, *given_back]


def _scan_of_batch(nodes: Nodes) -> list[str]:
    """``Scan`` of opset 8: ``sequence_lens`` first, all tensors with an axis of the batch before that of the steps, and
    a body for one of the batch."""
    given = nodes.attributes()
    body, count = given["body"], int(given["num_scan_inputs"])
    lengths, *rest = nodes.node.input
    states, scanned = rest[:len(rest) - count], rest[len(rest) - count:]
    backward = given.get("directions", [0] * count)
    (batch, steps), *others = {nodes.known_shape(name, "scanned input")[:2] for name in scanned}
    if others:
        raise nodes.refused(f"its scanned inputs must be of one batch and length, got {[(batch, steps), *others]}")
    if lengths and np.any(nodes.known(lengths, "sequence_lens") != steps):
        raise nodes.refused(f"sequence_lens must all be the number of steps, {steps}; leave it out")
    _check_length(nodes, body, steps * batch)

    def at(name: str, number: int) -> str:
        return str(nodes("Gather", name, nodes.constant(np.array(number)), axis=0))

    results = []
    for row in range(batch):
        held, parts = [at(name, row) for name in states], list[list[str]]()
        tensors = [at(name, row) for name in scanned]
        for step in range(steps):
            slices = [at(name, steps - 1 - step if turn else step)
                      for name, turn in zip(tensors, backward, strict=True)]
            names = dict(zip((value.name for value in body.input), [*held, *slices], strict=True))
            made = copied(nodes, body, names, f"{row}/{step}")
            held = made[:len(states)]
            parts.append(made[len(states):])
        results.append([*held, *(stacked(nodes, each, 0) for each in zip(*parts, strict=True))])
    return [stacked(nodes, each, 0) for each in zip(*results, strict=True)]


def _goes_on(body: onnx.GraphProto) -> bool:
    """Whether the body gives back the condition that it is given, or one that always holds."""
    from onnx import numpy_helper

    made = {output: node for node in body.node for output in node.output}
    name = body.output[0].name
    while name in made and made[name].op_type == "Identity":
        name = made[name].input[0]
    if name in made and made[name].op_type == "Constant":
        return all(bool(numpy_helper.to_array(a.t).all()) for a in made[name].attribute if a.name == "value")
    held = {tensor.name: tensor for tensor in body.initializer}
    return name == body.input[1].name or (name in held and bool(numpy_helper.to_array(held[name]).all()))


def _check_length(nodes: Nodes, body: onnx.GraphProto, steps: int) -> None:
    if steps * len(body.node) > _MOST_NODES:
        raise nodes.refused(f"its {steps} steps of {len(body.node)} nodes must be at most {_MOST_NODES} nodes; take "
                            "fewer steps")


def copied(nodes: Nodes, body: onnx.GraphProto, names: Mapping[str, str], label: str) -> list[str]:
    """Add the body's nodes; its outputs. ``names`` are what its inputs are; values of its own are named anew, those
    of the graph around it stay."""
    from onnx import numpy_helper

    known = dict(names)
    for tensor in body.initializer:
        known[tensor.name] = nodes.constant(numpy_helper.to_array(tensor))
    prefix = f"{next(o for o in nodes.node.output if o)}/{label}/"
    for node in body.node:
        known.update({output: prefix + output for output in node.output if output})
    for node in body.node:
        nodes.made.append(_renamed(node, known))
    return [known.get(value.name, value.name) for value in body.output]


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """The node with other names of values, in graphs within it too, but for what those name themselves."""
    copied = type(node)()
    copied.CopyFrom(node)
    for values in (copied.input, copied.output):
        for i, value in enumerate(values):
            values[i] = names.get(value, value)
    for attribute in copied.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            own = {v.name for v in (*graph.input, *graph.initializer)} | {o for n in graph.node for o in n.output}
            outer = {name: new for name, new in names.items() if name not in own}
            inner = [_renamed(each, outer) for each in graph.node]
            del graph.node[:]
            graph.node.extend(inner)
            for value in graph.output:
                value.name = outer.get(value.name, value.name)
    return copied


def stacked(nodes: Nodes, parts: Sequence[str], axis: int) -> str:
    """Tensors side by side along a new axis."""
    if nodes.opset >= 13:
        wide = [str(nodes("Unsqueeze", part, nodes.constant([axis]))) for part in parts]
    else:
        wide = [str(nodes("Unsqueeze", part, axes=[axis])) for part in parts]
    return str(nodes("Concat", *wide, axis=axis))
