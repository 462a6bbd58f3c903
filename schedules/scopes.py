"""Removes loop annotations that TVM's code generator does not know and would warn about."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

__all__ = ["WithoutScopes", "without_scopes"]


def without_scopes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function without the scopes of ``T.seq_scope``, which topi's scatters use; they change nothing on a CPU.

    ``with T.attr(0, "pragma_scope", "seq"): S   -->   S``
    """
    return func.with_body(tvm_ffi.structural_map(
        func.body, (tirx.AttrStmt, lambda scope: scope.body if str(scope.attr_key) == "pragma_scope" else scope)))


WithoutScopes = tirx.transform.prim_func_pass(
    lambda func, _mod, _ctx: without_scopes(func), opt_level=0, name="mlc.WithoutScopes"
)
