"""Passes from operators to kernels, in the order of :func:`mlc.graph.pipeline.lowering`:

attention as one function, operators as tensor functions (``legalise``), slices and concatenations that need no copy
(``slices``, ``concat``, which ask ``epilogues``), sizes in one form (``one_form``), what becomes one kernel (``fuse``),
the algorithm of each convolution (``select``), and elementwise work that a convolution reads (``prologue``).
"""
