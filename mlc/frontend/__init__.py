"""Importers: ONNX, PyTorch and Relax become one Relax module, with the specifications of its inputs and outputs.

The path of an ONNX model: :mod:`load <mlc.frontend.load>`, :mod:`onnx_file <mlc.frontend.onnx_file>` (read and check),
:mod:`onnx_relax <mlc.frontend.onnx_relax>` (the whole import), :mod:`onnx_static <mlc.frontend.onnx_static>` (fix
shapes, expand operators, fold constants), :mod:`onnx_importer <mlc.frontend.onnx_importer>` (convert node by node with
the tables :mod:`onnx_converters <mlc.frontend.onnx_converters>` and :mod:`onnx_definitions
<mlc.frontend.onnx_definitions>`, or TVM's own converters). Most other ``onnx_*`` modules are operators of one kind.
PyTorch models go through ``torch.export`` and this path (:mod:`pytorch <mlc.frontend.pytorch>`, ``torch_*``).
"""

from mlc.frontend.load import load_model
from mlc.frontend.model import ImportedModel, TensorSpec

__all__ = ["ImportedModel", "TensorSpec", "load_model"]
