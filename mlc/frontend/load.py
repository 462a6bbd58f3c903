"""The single entry point of the importers: whatever holds a model becomes an :class:`ImportedModel`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlc.errors import UsageError
from mlc.frontend.model import ImportedModel, imported
from mlc.frontend.onnx_weights import Model
from mlc.shapes import Shape
from mlc.text import one_line

__all__ = ["load_model"]


def load_model(
    source: Any,
    *,
    example_inputs: Sequence[Any] | None = None,
    shapes: Mapping[str, Shape] | None = None,
    values: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> ImportedModel:
    """Import a model.

    ``source`` is the path of an ONNX file, an ``onnx.ModelProto`` (or one with its weights outside of it), a
    ``torch.nn.Module`` with ``example_inputs`` (a tuple of tensors), a ``torch.export.ExportedProgram``, or a Relax
    ``IRModule`` whose ``main`` has static shapes.

    ``shapes`` gives sizes or ranges of the free dimensions of an ONNX model's inputs:
    ``{"input": ((1, 32), 3, 224, 224)}`` or ``{"input": "1..32,3,224,224"}``; what is left out is
    :data:`mlc.shapes.DEFAULT_RANGE`. The free dimensions of a program of ``torch.export`` (``torch.export.Dim``) have
    the ranges that it was exported with, or narrower ones given in ``shapes``. ``values`` turns inputs of an ONNX model
    into constants, as is required for inputs whose values decide shapes.

    Raises :class:`mlc.errors.ValuesNeededError` where such a value is missing, :class:`mlc.errors.ModelError` for a
    model that is missing, broken or outside what can be imported, and :class:`mlc.errors.UsageError` for arguments
    that do not fit it.
    """
    if isinstance(source, str | os.PathLike):
        from mlc.frontend.onnx_file import read_model
        from mlc.frontend.onnx_relax import import_onnx

        path = Path(source)
        return import_onnx(read_model(path), one_line(name or path.stem), shapes, values)
    if _is(source, "onnx", "ModelProto") or isinstance(source, Model):
        from mlc.frontend.onnx_relax import import_onnx

        graph = (source.proto if isinstance(source, Model) else source).graph
        return import_onnx(source, one_line(name or graph.name or "model"), shapes, values)
    if _is(source, "torch.export", "ExportedProgram") and not values:
        from mlc.frontend.pytorch import import_torch

        return import_torch(source, None, name or type(source).__name__, shapes)
    if shapes or values:
        raise UsageError("shapes and values are of inputs of an ONNX model only; give example_inputs as you want them, "
                         "or a program of torch.export with dynamic_shapes")
    if _is(source, "torch.nn", "Module"):
        from mlc.frontend.pytorch import import_torch

        return import_torch(source, example_inputs, name or type(source).__name__)
    if _is(source, "tvm", "IRModule"):
        return imported(source, name or "module")
    raise UsageError(
        "a model must be a path, an onnx.ModelProto, a torch.nn.Module with example_inputs, or a tvm.IRModule, got "
        f"{type(source).__name__}"
    )


def _is(value: Any, module: str, name: str) -> bool:
    """``isinstance`` without importing ``module``: its instances can only exist if it was imported already."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))
