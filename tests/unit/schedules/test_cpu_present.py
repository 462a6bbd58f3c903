"""Keys and values that are results are written where attention reads them, large ones past the caches."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from attention_cases import grown, grown_reference
from harness import TARGET
from tvm import tirx

from schedules.analysis import loads
from schedules.cpu.attention_few import ATTENTION_FEW
from schedules.lowering import PIPELINE
from schedules.math import expand_math
from schedules.nontemporal import lower_nontemporal_stores, nontemporal_store
from schedules.present import fuse_present_stores
from schedules.space import first_seed


def _scheduled(heads: int, past: int, depth: int) -> tirx.PrimFunc:
    return expand_math(first_seed(ATTENTION_FEW, grown(heads, 1, past, depth)[0](), TARGET)[0].mod["main"])


def test_results_are_not_read_again() -> None:
    func = _scheduled(2, 60, 32)
    results = func.params[-3:-1]
    done = fuse_present_stores(func)
    before, after = ([load.source for load in loads(each.body)] for each in (func, done))
    for result in results:
        assert any(source.same_as(result) for source in before)
        assert not any(source.same_as(result) for source in after)
    assert fuse_present_stores(done).same_as(done)


@pytest.mark.parametrize(("past", "depth", "large"), [(60, 32, False), (2500, 64, True), (2500, 20, True)])
def test_only_large_results_go_past_the_caches(past: int, depth: int, large: bool) -> None:
    """Rows of 20 numbers are vectors of 4."""
    heads = 16
    module = tvm.compile(_scheduled(heads, past, depth), target=TARGET, tir_pipeline=PIPELINE)
    assert ("!nontemporal" in module.mod.inspect_source("ll")) == large
    rng = np.random.default_rng(past)
    given = [rng.standard_normal(shape).astype("float32") for shape in (
        (heads, 1, depth), (1, heads, depth), (1, heads, depth), (heads, past, depth), (heads, past, depth))]
    wanted = grown_reference(*given)
    out = [tvm.runtime.tensor(np.full(each.shape, np.nan, "float32")) for each in wanted]
    module(*map(tvm.runtime.tensor, given), *out)
    for found, each in zip(out, wanted, strict=True):
        np.testing.assert_allclose(found.numpy(), each, rtol=1e-5, atol=1e-5)


def test_vectors_anywhere_are_stored_as_others_are() -> None:
    """An aligned store of what begins at an odd place would fail."""
    def lowered(start: int) -> tirx.PrimFunc:
        a = tirx.decl_buffer((64,), "float32", name="a")
        place = tirx.Ramp(tirx.const(start, "int32"), tirx.const(1, "int32"), 8)
        store = tirx.BufferStore(a, tirx.Broadcast(tirx.const(1.0, "float32"), 8), [place])
        return tirx.PrimFunc([a], nontemporal_store(store))

    assert "mlc_stream_float32x8" in str(lower_nontemporal_stores(lowered(16)))
    assert "mlc_stream_float32x8" not in str(lower_nontemporal_stores(lowered(12)))
