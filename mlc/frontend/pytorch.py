"""PyTorch to Relax: through ``torch.onnx`` and the ONNX importer, or directly where ONNX lacks an operator.

Both start from ``torch.export``. The exporter to ONNX simplifies what tracing leaves behind (masks, positions), so that
one set of graph patterns serves both formats; TVM's direct importer decomposes what ONNX keeps whole, an LSTM say.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlc.errors import MlcError, ModelError, UnsupportedOperators, UsageError
from mlc.frontend.model import ImportedModel, imported
from mlc.frontend.origins import name_by_scopes
from mlc.frontend.static_shapes import fold_shapes

if TYPE_CHECKING:
    import onnx
    import tvm

__all__ = ["export_module", "import_torch", "quiet", "to_onnx"]


def import_torch(source: Any, example_inputs: Sequence[Any] | None, name: str) -> ImportedModel:
    """Import a ``torch.nn.Module`` in evaluation mode at the shapes of ``example_inputs``, or an exported program.

    Inputs are named as the parameters of ``forward``; outputs ``output_0, …`` in order, nested structures flattened.
    """
    import torch

    if isinstance(source, torch.nn.Module):
        source = export_module(source, example_inputs, name)
    inputs = list(source.graph_signature.user_inputs)
    try:
        through = _through_onnx(source, name)
        return replace(imported(through.mod, name, inputs), nodes=through.nodes)
    except (MlcError, ImportError) as first:
        try:
            mod = _direct(source, name)
        except UnsupportedOperators as second:
            raise (first if isinstance(first, UnsupportedOperators) else second) from None
        return imported(mod, name, inputs)


def export_module(module: Any, example_inputs: Sequence[Any] | None, name: str) -> Any:
    """``torch.export`` of the module in evaluation mode; refuses what cannot be traced, in one line."""
    import torch

    if example_inputs is None:
        raise UsageError(
            f"a torch.nn.Module needs example inputs to fix its shapes, got none for {name}; pass "
            "example_inputs=(tensor, ...)"
        )
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not all(isinstance(value, torch.Tensor) for value in example_inputs):
        kinds = ", ".join(type(value).__name__ for value in example_inputs)
        raise UsageError(f"example_inputs must be tensors, got {kinds}; wrap the module so that it takes tensors only")
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), quiet():
            return torch.export.export(module, tuple(example_inputs))
    except Exception as error:
        raise ModelError(
            f"torch.export must be able to trace {name}, but: {_first_line(error)}; see its documentation for what a "
            "module may do"
        ) from error
    finally:
        module.train(training)


def _through_onnx(program: Any, name: str) -> ImportedModel:
    from mlc.frontend.onnx_relax import import_onnx

    return import_onnx(name_by_scopes(to_onnx(program, name)), name)


def to_onnx(program: Any, name: str) -> onnx.ModelProto:
    """An exported program as ONNX; :class:`ModelError` where PyTorch has no translation."""
    import torch

    try:
        with quiet():
            return torch.onnx.export(program, dynamo=True, verbose=False).model_proto
    except torch.onnx.errors.OnnxExporterError as error:
        raise ModelError(f"torch.onnx must be able to export {name}, but: {_first_line(error)}") from error


def _direct(program: Any, name: str) -> tvm.IRModule:
    from tvm.relax.frontend.torch import from_exported_program

    with quiet():
        # Here rather than in TVM, so that what is missing is looked up among the operators that will be converted.
        program = program.run_decompositions()
        _check_operators(program)
        try:
            mod = from_exported_program(program, unwrap_unit_return_tuple=True, run_ep_decomposition=False)
        except Exception as error:
            raise ModelError(f"{name} must be importable, but TVM failed: {_first_line(error)}") from error
    return fold_shapes(mod)


def _check_operators(program: Any) -> None:
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    known = ExportedProgramImporter().create_convert_map()
    missing: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target.__name__ not in known:
            missing.setdefault(str(node.target), []).append(node.name)
    if missing:
        raise UnsupportedOperators(missing)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' notes on their own internals and on packages that they do not need."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
