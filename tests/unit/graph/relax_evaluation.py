"""What the tests of the graph room share: constants, evaluation by TVM's own lowering, structural comparison."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

RNG = np.random.default_rng(11)


def weight(*shape: int, low: float = -1.0, high: float = 1.0) -> relax.Expr:
    """A constant with random elements."""
    return relax.const(RNG.uniform(low, high, shape).astype("float32"))


def values(expr: relax.Expr) -> np.ndarray:
    """The elements of a constant."""
    return expr.value.numpy()


def module(func: relax.Function) -> tvm.IRModule:
    """A module whose main is ``func``, in the A-normal form that importers make."""
    func = func.with_attr("global_symbol", "main")
    passes = [relax.transform.Normalize(), relax.transform.CanonicalizeBindings()]
    return tvm.transform.Sequential(passes)(tvm.IRModule({"main": func}))


def network(shape: tuple[int, ...], body, dtype: str = "float32") -> tvm.IRModule:  # type: ignore[no-untyped-def]
    """A module whose main is ``body(builder, x)`` of one input of ``shape``."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(body(builder, x))
        builder.emit_func_output(result)
    return builder.finalize()


def assert_becomes(pass_: tvm.transform.Pass, before: relax.Function, expected: relax.Function) -> tvm.IRModule:
    """``before`` turns into ``expected``; the module that came out."""
    after = pass_(module(before))
    tvm.ir.assert_structural_equal(after["main"], module(expected)["main"], map_free_vars=True)
    return after


def assert_unchanged(pass_: tvm.transform.Pass, before: relax.Function) -> None:
    """No rule fires: the very same module comes back."""
    mod = module(before)
    assert pass_(mod).same_as(mod)


def assert_same_values(before: tvm.IRModule | relax.Function, after: tvm.IRModule, tolerance: float = 1e-5) -> None:
    """Both compute the same on random inputs."""
    first = before if isinstance(before, tvm.IRModule) else module(before)
    inputs = [
        RNG.standard_normal([int(d) for d in p.ty.shape.values]).astype(str(p.ty.dtype)) for p in first["main"].params
    ]
    for old, new in zip(evaluate(first, *inputs), evaluate(after, *inputs), strict=True):
        assert old.std() > 0
        np.testing.assert_allclose(new, old, rtol=tolerance, atol=tolerance * float(np.abs(old).max()))


def evaluate(mod: tvm.IRModule, *inputs: np.ndarray) -> list[np.ndarray]:
    """Run main as TVM lowers it by default, or, if it is lowered, as it stands. LLVM optimises nothing: that would take
    longer than all else, and what is run is small."""
    with tvm.target.Target({"kind": "llvm", "opt-level": 0}) as target:
        exe = tvm.compile(relax.transform.DecomposeOpsForInference()(mod), target=target)
    result = relax.VirtualMachine(exe, tvm.cpu())["main"](*(tvm.runtime.tensor(x) for x in inputs))
    return [result.numpy()] if isinstance(result, tvm.runtime.Tensor) else [r.numpy() for r in result]


def operators(mod: tvm.IRModule) -> list[str]:
    """The operators main calls, in order, without ``relax.``."""
    found = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call) and isinstance(binding.value.op, tvm.ir.Op):
                found.append(binding.value.op.name.removeprefix("relax."))
    return found
