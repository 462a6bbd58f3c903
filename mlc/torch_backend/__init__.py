"""``torch.compile(model, backend="mlc")``: the graphs that Dynamo captures, compiled for inference.

Dynamo breaks a model into graphs where its Python cannot be traced; each becomes a functional graph of ATen operators
(AOTAutograd takes in-place updates and views out of it and does them around the call), and, at the first call with
given sizes, a program of :func:`torch.export` that is imported as any other. Parameters and buffers are constants of
the code, packed as its kernels want them; a call that brings others, or the same ones changed, compiles again (what
changes a second time becomes an input). What is written to a few elements of a weight through ``.data`` or an array
that shares its memory may go unseen, since PyTorch does not count it: call
``torch.autograd.graph.increment_version(weight)`` after it. What cannot be compiled runs eagerly, with one warning that
says why.

The name is known through the entry point ``torch_dynamo_backends``; :func:`register` does the same where mlc is not
installed.
"""

from __future__ import annotations

from mlc.torch_backend.compiler import Options, backend, register

__all__ = ["Options", "backend", "register"]
