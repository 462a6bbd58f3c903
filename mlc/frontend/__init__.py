"""Models in: ONNX, PyTorch and Relax become one static Relax module with its input and output specifications."""

from mlc.frontend.load import load_model
from mlc.frontend.model import ImportedModel, TensorSpec

__all__ = ["ImportedModel", "TensorSpec", "load_model"]
