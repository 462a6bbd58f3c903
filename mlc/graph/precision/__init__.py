"""Low precision: quantised models in integer arithmetic, 16-bit floats that are stored but computed in float32.

Quantised models come as ``quantize`` and ``dequantize`` around operators of floats. :func:`Quantisation` makes integer
kernels of them: dequantising moves past what only moves, products of 8-bit operands become integer products, and what
is left becomes arithmetic that fuses with the kernels around it. Where the weight alone is quantised, its integers are
what the product reads. Models of float32 may be rounded too, where the user says so (``reduced``, on GPUs
``operands``).
"""

from mlc.graph.precision.dynamic import DynamicQuantisation
from mlc.graph.precision.integer import IntegerProducts
from mlc.graph.precision.quantisation import Quantisation
from mlc.graph.precision.reduced import RoundConstants, check_precision
from mlc.graph.precision.reduced_gpu import AllowTensorFloat, NarrowOperands
from mlc.graph.precision.requantise import ExpandRequantisation
from mlc.graph.precision.rescaled import Rescale
from mlc.graph.precision.sink_dequantise import MoveQuantisation, SignedActivations, UnsignedActivations
from mlc.graph.precision.weight_only import WeightOnlyProducts
from mlc.graph.precision.widened import WidenFloats, WidenSums

__all__ = [
    "AllowTensorFloat",
    "DynamicQuantisation",
    "ExpandRequantisation",
    "IntegerProducts",
    "MoveQuantisation",
    "NarrowOperands",
    "Quantisation",
    "Rescale",
    "RoundConstants",
    "SignedActivations",
    "UnsignedActivations",
    "WeightOnlyProducts",
    "WidenFloats",
    "WidenSums",
    "check_precision",
]
