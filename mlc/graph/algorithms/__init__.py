"""Ways to compute an operator, a file for each; :mod:`mlc.graph.algorithms.registry` finds them."""
