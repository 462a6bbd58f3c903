"""Relax to Relax: simplify, substitute, choose layouts, lower and fuse; and the tasks that come out.

:mod:`mlc.graph.pipeline` runs the groups in this order: ``simplify``, ``substitute``, ``layout``, ``lowering``.
``kernels`` are the tensor expressions that they call, ``ir`` the helpers that they share.
"""
