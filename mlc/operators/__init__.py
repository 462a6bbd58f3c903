"""One specification for each operator of the graph language; importing the package fills the table.

``OPERATORS[name]`` is the specification, ``infer`` the shape rule, ``evaluate`` the values (float64, or exactly over a
prime field), ``laws`` what is known about functions that are not polynomial.
"""

# ruff: noqa: F401 (importing a family enters its operators into the table)
from mlc.operators import constants, expansions, indexing, movement, pointwise, products, reductions, windows
from mlc.operators.operator import OPERATORS, Attributes, Operator, operators_where, relax_where
from mlc.operators.shapes import infer
from mlc.operators.tensor import Requirements, ShapeError, Tensor, tensor_input

__all__ = ["OPERATORS", "Attributes", "Operator", "Requirements", "ShapeError", "Tensor", "infer", "operators_where",
           "relax_where", "tensor_input"]
