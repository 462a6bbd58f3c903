"""What is left of three models when their graphs are optimised: which kernels they call, with what, in which order."""

from __future__ import annotations

import pytest
from golden_files import Golden
from golden_kernels import target_named

from mlc.compilation import Compilation
from mlc.networks.ablation import bert_qkv, rnn_unrolled
from mlc.networks.models import model_named

_MODELS = {
    "squeezenet": lambda: model_named("squeezenet"),
    "bert_qkv": bert_qkv,
    "rnn_unrolled": lambda: rnn_unrolled(steps=2),
}


@pytest.mark.parametrize("model", _MODELS)
def test_graph(golden: Golden, model: str) -> None:
    """Without substitutions, which have tests of their own."""
    compilation = Compilation.of(_MODELS[model](), target_named("x86-64-v3"), winograd=True, substitutions=False)
    main = compilation.lowered().module["main"]
    golden(f"graphs/{model}.relax", str(main.script(show_meta=False)))
