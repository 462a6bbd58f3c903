"""Changes to what Dynamo traces, for this backend only."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, SymNodeVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from mlc.frontend.torch_recurrent import WHOLE

__all__ = ["trace_recurrent_layers"]


def trace_recurrent_layers(backend: Callable[..., Any]) -> None:
    """Let Dynamo trace ``torch.nn.LSTM``, ``GRU`` and ``RNN`` where it traces for ``backend``, and keep them whole.

    Dynamo leaves them to eager PyTorch, and says nothing, unless its setting ``allow_rnn`` is on. That holds for every
    backend of the process, and Inductor would unroll their steps; so it is on here while Dynamo looks at such a layer
    for this backend. What their ``forward`` calls would fix the number of steps, so operators of
    :data:`mlc.frontend.torch_recurrent.WHOLE` are captured instead. A layer that these do not compute is named in a
    warning and left as it was.
    """
    wrap = VariableBuilder.wrap_module
    named = weakref.WeakSet[torch.nn.Module]()  # of which it was said that they run eagerly

    @functools.wraps(wrap)
    def wrapped(builder: Any, value: torch.nn.Module) -> Any:
        mine = isinstance(value, torch.nn.RNNBase) and _is_for(backend, builder.tx)
        if not mine or torch._dynamo.config.allow_rnn:
            return wrap(builder, value)
        reason = _left(value) or _packed(builder.tx)
        if reason:
            if value not in named:
                named.add(value)
                warnings.warn(f"{value} runs eagerly: {reason}", stacklevel=2)
            return wrap(builder, value)
        with torch._dynamo.config.patch(allow_rnn=True):
            return wrap(builder, value)

    VariableBuilder.wrap_module = wrapped
    handlers = TorchInGraphFunctionVariable._get_handlers()
    handlers.update({function: functools.partial(_captured, backend, whole) for function, whole in WHOLE.items()})


def _left(layer: torch.nn.RNNBase) -> str:
    """Why a layer stays with eager PyTorch; empty where it is traced. Dynamo would trace it step by step."""
    if torch.is_grad_enabled():
        return ("it is called where gradients are recorded, and mlc compiles inference alone; call it under "
                "torch.inference_mode() or torch.no_grad()")
    if layer.training and layer.dropout and layer.num_layers > 1:
        return "it must compute the same each time, but drops elements at random between its layers; call eval() first"
    return ""


def _packed(tx: Any) -> str:
    """Why layers stay with eager PyTorch where Dynamo goes on after packing a sequence; empty elsewhere."""
    values = getattr(tx, "f_locals", {}).values()
    if not any(isinstance(value, torch.nn.utils.rnn.PackedSequence) for value in values):
        return ""
    return ("it is called where there is a packed sequence, whose lengths are known when it runs; give it the padded "
            "tensor, and mask what lies behind each end")


def _captured(backend: Callable[..., Any], whole: Any, _function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of the operator that stays whole; None, and Dynamo goes on as ever, for what it does not compute."""
    if torch.is_grad_enabled() or kwargs or not _is_for(backend, tx) or len(args) != 9:
        return None
    biases, layers, training, *others = (_number(args[i], tx) for i in (3, 4, 6, 7, 8))
    if None in (biases, layers, training, *others) or (training and layers > 1 and _number(args[5], tx)):
        return None
    numbers = [ConstantVariable.create(each) for each in (biases, layers, 0.0, False, *others)]
    return TorchInGraphFunctionVariable(whole).call_function(tx, [*args[:3], *numbers], {})


def _number(arg: Any, tx: Any) -> Any:
    """The value of an argument, which Dynamo may have left free; None for what is no number: a packed sequence's."""
    if isinstance(arg, LazyVariableTracker):
        arg = arg.realize()
    if isinstance(arg, SymNodeVariable):
        return arg.evaluate_expr(tx.output)
    return arg.as_python_constant() if arg.is_python_constant() else None


def _is_for(backend: Callable[..., Any], tx: Any) -> bool:
    """Whether what Dynamo calls in the end is the backend, which ``torch.compile`` wraps with its options."""
    compiler = tx.output.compiler_fn
    while compiler is not None and compiler is not backend:
        compiler = next((getattr(compiler, name) for name in _WRAPPED if hasattr(compiler, name)), None)
    return compiler is backend


#: where wrappers keep what they wrap; the second is an older PyTorch's
_WRAPPED = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn")
