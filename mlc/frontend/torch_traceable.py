"""Modules of transformers whose loops data decides, computed so that ``torch.export`` can trace them.

Most of its mixtures of experts ask for products of groups; those here visit the experts that some token chose, one by
one. What stands in for them computes the same: the tokens are sorted by their expert.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["traceable"]

#: how far results may be from the module's own, as a part of the largest: a version of transformers that computes
#: something else is traced as it is
_CLOSE = 1e-3


@contextlib.contextmanager
def traceable(module: torch.nn.Module, inputs: Sequence[Any]) -> Iterator[None]:
    """While this lasts, such modules inside of ``module`` compute what can be traced, if ``module`` then returns what
    it did before for ``inputs``."""
    found = [(each, stand_in) for each in module.modules() if (stand_in := _stand_in(each))]
    with contextlib.ExitStack() as undone:
        if found:
            with torch.no_grad():
                wanted = module(*inputs)
                for each, stand_in in found:
                    each.forward = types.MethodType(stand_in, each)
                    undone.callback(vars(each).pop, "forward")
                for each in _converted(module):
                    each.to = lambda *_, same=each: same
                    undone.callback(vars(each).pop, "to")
                if not _same(module(*inputs), wanted):
                    undone.close()
        yield


def _stand_in(module: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
    """What computes the same as the module, if that computes what its class does."""
    found = _STAND_INS.get(f"{type(module).__module__}.{type(module).__qualname__}")
    plain = not _changed(module) and (found not in _BY_WEIGHTS or all(map(_plain, module.modules())))
    return found if plain else None


def _changed(module: torch.nn.Module) -> bool:
    return "forward" in vars(module)


def _plain(module: torch.nn.Module) -> bool:
    """Whether a layer of experts is told by its weights: no adapter and no integers stand for it, and nothing is done
    to what it takes and returns. What an adapter adds may be too little to be seen in results."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and not _changed(module) and type(module).__module__.startswith(_OF_EXPERTS)


def _converted(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers of routers that convert them at each call, which cannot be traced, and that are what they become."""
    for each in module.modules():
        layer = getattr(each, "classifier", None)
        if not isinstance(layer, torch.nn.Linear) or type(each).__qualname__ not in _ROUTERS:
            continue
        if layer.weight.dtype == each.dtype:
            yield layer


def _same(got: Any, wanted: Any) -> bool:
    pairs = [torch.utils._pytree.tree_leaves(each) for each in (got, wanted)]
    return len(pairs[0]) == len(pairs[1]) and all(
        not isinstance(b, torch.Tensor) or (a.shape == b.shape and _near(a, b)) for a, b in zip(*pairs, strict=True))


def _near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(got, wanted)
    return bool(torch.allclose(got, wanted, rtol=_CLOSE, atol=_CLOSE * float(wanted.abs().max()), equal_nan=True))


def _sorted_by_expert(owner: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The order that sorts rows by their expert, the one that undoes it, and where the rows of each expert end; rows of
    no expert, whose owner is ``experts``, come last."""
    owner, order = torch.sort(owner)
    ends = (owner <= torch.arange(experts, device=owner.device)[:, None]).sum(1).to(torch.int32)
    return order, torch.argsort(order), ends


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each row times the matrix of its expert; 0 behind the last end."""
    made: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, matrices, ends)
    return made


def _dbrx(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
          ) -> torch.Tensor:
    """Several experts a token, whose matrices lie in one."""
    x, count = hidden_states.reshape(-1, self.hidden_size), top_k_index.shape[-1]
    order, back, ends = _sorted_by_expert(top_k_index.reshape(-1), self.num_experts)
    gate, up, down = (each.view(self.num_experts, self.ffn_hidden_size, self.hidden_size)
                      for each in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    rows = x[order // count]
    inner = self.mlp.activation_fn(_grouped(rows, gate.transpose(1, 2), ends))
    made = _grouped(inner * _grouped(rows, up.transpose(1, 2), ends), down, ends)
    shares = top_k_weights.reshape(-1, 1)
    return (made[back] * shares).view(-1, count, self.hidden_size).sum(1).view(hidden_states.shape)


def _switch(self: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
            ) -> torch.Tensor:
    """One expert a token; none, and 0, for those that found theirs full."""
    selected = selected_experts.squeeze(1)
    owner = torch.where(selected.sum(-1) > 0, selected.argmax(-1), self.num_experts)
    order, back, ends = _sorted_by_expert(owner, self.num_experts)
    experts = list(self.values())
    up, down = (torch.stack([getattr(each, name).weight for each in experts]).transpose(1, 2) for name in ("wi", "wo"))
    inner = experts[0].act(_grouped(hidden_states[order], up, ends))
    return _grouped(inner, down, ends)[back] * routing_weights


def _nllb(self: Any, hidden_states: torch.Tensor, router_mask: torch.Tensor, router_probs: torch.Tensor
          ) -> torch.Tensor:
    """transformers takes the elements of the mask, 0 and 1, for the numbers of the experts."""
    made = [self[f"expert_{number}"](hidden_states) * (router_probs * (router_mask == number)).sum(-1, keepdim=True)
            for number in range(2)]
    kept = 1 - self.moe_token_dropout if self.moe_token_dropout > 0 else 1
    return (made[0] + made[1]) * kept


#: those that read the weights of layers instead of calling them, and where the classes of such layers are
_BY_WEIGHTS = (_dbrx, _switch)
_OF_EXPERTS = ("torch.nn.modules.", "transformers.activations", "transformers.models.")
_ROUTERS = frozenset({"SwitchTransformersTop1Router", "NllbMoeTop2Router"})
_STAND_INS: dict[str, Callable[..., torch.Tensor]] = {
    "transformers.models.dbrx.modeling_dbrx.DbrxExperts": _dbrx,
    "transformers.models.switch_transformers.modeling_switch_transformers.SwitchTransformersExperts": _switch,
    "transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeExperts": _nllb,
}
