"""Read an ONNX file and refuse, in one line, what is missing, broken or not valid ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc.errors import ModelError
from mlc.frontend.onnx_decoder import NORMS
from mlc.frontend.onnx_weights import Model, Weight, light_message, take_external
from mlc.text import one_line

if TYPE_CHECKING:
    import onnx

__all__ = ["check_model", "check_text", "read_model", "whole"]

_PROTOBUF_LIMIT = 2 << 30  # bytes one protobuf message can hold; larger models keep their weights in other files
_MICROSOFT = "com.microsoft"


def read_model(path: Path) -> Model:
    """The model in ``path``, parsed but not checked, its large weights outside of its message."""
    import onnx

    if not path.exists():
        raise ModelError(f"the model file must exist, but there is no {path}; check the path")
    if path.is_dir():
        raise ModelError(f"the model must be an ONNX file, but {path} is a folder; name the .onnx file inside it")
    weights: dict[str, Weight] = {}
    try:
        if (light := light_message(path)) is not None:
            model, weights = onnx.ModelProto.FromString(light[0]), dict(light[1])
        else:
            model = onnx.load(path, load_external_data=False)  # by its suffix: protobuf, textproto, JSON, ONNX's text
    except OSError as error:
        raise ModelError(f"the model file must be readable, but {path} is not: {error.strerror}; check its permissions"
                         ) from None
    except Exception as error:  # each format has its parser, and each parser its own errors
        size = path.stat().st_size
        raise ModelError(
            f"the model must be an ONNX protobuf, but {path} ({size} bytes) cannot be parsed{_parsers_reason(error)}; "
            f"{_too_large(size)}it is truncated or another format: copy or export it again"
        ) from None
    if not model.graph.node and not model.graph.output:
        raise ModelError(f"the model must hold a graph, but the one in {path} is empty; export it again")
    check_text(model, path.name)
    try:
        weights |= take_external(model, path.parent)
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
        raise ModelError(
            f"the weights that {path.name} keeps in other files must lie beside it, but: {_one_line(error)}; "
            "copy them together"
        ) from None
    return Model(model, weights)


def whole(model: Model) -> onnx.ModelProto:
    """The model as one message, as other engines want it. Raises :class:`ModelError` for weights that cannot be read.
    """
    import onnx

    message = onnx.ModelProto()
    message.CopyFrom(model.proto)
    for tensor in message.graph.initializer:
        if tensor.name in model.weights:
            tensor.raw_data = model.weights[tensor.name].array().tobytes()
    return message


def _parsers_reason(error: Exception) -> str:
    """The message of a text parser, which names the line; protobuf's is empty."""
    from google.protobuf.message import DecodeError

    return "" if isinstance(error, DecodeError) else f" ({one_line(str(error))[:200]})"


def _too_large(size: int) -> str:
    if size < _PROTOBUF_LIMIT:
        return ""
    return "one protobuf holds less than 2 GiB, keep the weights in other files; else "


def check_text(message: Any, name: str) -> None:
    """Raise :class:`ModelError` where a name or another text of the model is not UTF-8; protobuf hands it out as it is.
    """
    for field, value in message.ListFields():
        if field.type not in (field.TYPE_MESSAGE, field.TYPE_STRING):
            continue
        single = isinstance(value, str | bytes) or hasattr(value, "ListFields")
        for each in (value,) if single else value:
            if field.type == field.TYPE_MESSAGE:
                check_text(each, name)
            elif not isinstance(each, str):
                raise ModelError(f"every name must be UTF-8, but {name} has {bytes(each)[:60]!r} as {field.name}; "
                                 "export it again")


def check_model(given: Model, name: str) -> None:
    """Raise :class:`ModelError` where ``onnx.checker`` refuses the model."""
    import onnx

    model = _with_empty(given)
    unknown = any(map(_is_norm, model.graph.node))
    if model.ByteSize() >= _PROTOBUF_LIMIT or unknown:
        model = _without_weights(model)
    if unknown:
        for node in filter(_is_norm, model.graph.node):
            node.domain = _MICROSOFT
        model.opset_import.add(domain=_MICROSOFT, version=1)
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError, TypeError) as error:
        raise ModelError(
            f"the model must pass onnx.checker, but {name} does not: {_one_line(error)}; export it again"
        ) from None


def _with_empty(model: Model) -> onnx.ModelProto:
    """The message with nothing in the weights outside, which are as large as they say: the checker wants elements of
    others."""
    import onnx

    if not model.weights:
        return model.proto
    message = onnx.ModelProto()
    message.CopyFrom(model.proto)
    for tensor in message.graph.initializer:
        if tensor.name in model.weights:
            tensor.dims[:] = [0]
    return message


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with its initializers as inputs, so that models beyond protobuf's size limit can be checked."""
    import onnx

    light = onnx.ModelProto(ir_version=model.ir_version)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    light.graph.name = model.graph.name
    light.graph.node.extend(model.graph.node)
    light.graph.output.extend(model.graph.output)
    light.graph.input.extend(model.graph.input)
    named = {i.name for i in model.graph.input}
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims))
        for t in model.graph.initializer if t.name not in named
    )
    return light


def _is_norm(node: onnx.NodeProto) -> bool:
    """Whether the node is one that onnxruntime puts into the standard domain, whose checker does not know it."""
    return node.op_type in NORMS and node.domain in ("", "ai.onnx")


def _one_line(error: Exception) -> str:
    """The part of a checker's message that says what is wrong, without its context dump."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(line for line in lines if not line.startswith("==> Context"))
    return text.rstrip(".;") or type(error).__name__
