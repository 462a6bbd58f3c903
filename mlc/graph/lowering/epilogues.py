"""Which values FuseOps will compute where: by itself, with what follows, or in the epilogue of a product."""

from __future__ import annotations

from collections import defaultdict

import tvm
from tvm import relax

from mlc.graph.ir.patterns import BROADCAST, INJECTIVE, OPAQUE, PRODUCT, pattern_of
from mlc.graph.ir.rewrite import bindings, leaves, op_name, shape_of

__all__ = ["Epilogues"]


class Epilogues:
    """Answers for the variables of ``main``, whose calls are lowered."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = relax.transform.AnnotateTIROpPattern()(mod)
        func = self._mod["main"]
        self._bound: dict[relax.Var, relax.Expr] = {b.var: b.value for b in bindings(func)}
        #: the variables that are made of one; None stands for the result
        self._readers: dict[relax.Expr, list[relax.Var | None]] = defaultdict(list)
        for var, value in [*self._bound.items(), (None, func.body.body)]:
            for leaf in leaves(value):
                self._readers[leaf].append(var)

    def injective(self, var: relax.Expr) -> bool:
        """Whether every element of the value is made of single elements, outside of any product's epilogue."""
        return self._pattern(var) <= INJECTIVE and not self._within(var)

    def apart(self, var: relax.Expr) -> bool:
        """Whether :meth:`injective` holds for the value and for all that alone is made of it, up to another kernel."""
        following: relax.Expr | None = var
        while following is not None and self._pattern(following) <= INJECTIVE:
            if self._within(following):
                return False
            following = self.sole_reader(following)
        return following is not var

    def once(self, var: relax.Expr) -> bool:
        """Whether a single value, or the result alone, is made of ``var``."""
        return len(self._readers[var]) == 1

    def sole_reader(self, var: relax.Expr) -> relax.Var | None:
        """The variable that alone is made of ``var``; None where several are, or the result."""
        return self._readers[var][0] if self.once(var) else None

    def _within(self, var: relax.Expr) -> bool:
        """Whether the value is a product's, or will be computed in the epilogue of one."""
        if self._pattern(var) > BROADCAST:
            return self._pattern(var) == PRODUCT
        value = self._bound.get(var)
        return value is not None and any(
            self.once(arg) and shape_of(arg) == shape_of(var) and self._within(arg)
            for arg in leaves(value)
        )

    def _pattern(self, var: relax.Expr) -> int:
        value = self._bound.get(var)
        if not isinstance(value, relax.Call) or op_name(value) != "relax.call_tir":
            return OPAQUE
        return pattern_of(self._mod[value.args[0]])
