"""Algorithms for convolutions, one per file; :mod:`mlc.graph.algorithms.registry` finds them."""
