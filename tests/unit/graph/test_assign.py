"""The cheapest layouts of a whole graph, against trying every combination; what regions of real blocks become."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import tvm
from relax_evaluation import assert_same_values, network
from tvm import relax

from mlc.graph.ir.channels import ChannelBlocks
from mlc.graph.ir.rewrite import bindings
from mlc.graph.layout.assign import Alternative, assign
from mlc.graph.layout.blocked import BlockedLayouts
from mlc.graph.layout.convolutions import name_of
from mlc.graph.layout.regions import Planner
from mlc.graph.pipeline import passes
from mlc.options import CompileOptions
from mlc.target import resolve

AVX512, AVX2 = resolve("x86-64-v4", threads=2), resolve("x86-64-v3", threads=2)
RNG = np.random.default_rng(3)


def cost(values, wanted, price, chosen) -> float:  # type: ignore[no-untyped-def]
    """What a choice of one alternative for each of some values costs, conversions where they are needed."""
    total, needed, converted = 0.0, dict.fromkeys(wanted), set()
    for value in reversed(list(values)):
        layouts = {layout for v, layout in needed if v == value}
        if not layouts:
            continue
        alternative = values[value][chosen[value]]
        total += alternative.seconds
        converted |= {(value, layout) for layout in layouts if layout != alternative.layout}
        needed.update(dict.fromkeys(alternative.reads.items()))
    return total + sum(price(*each) for each in converted)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    values: dict[str, list[Alternative[int]]] = {"x": [Alternative(0)]}
    for name in "abcdefg":
        sources = rng.sample(list(values), min(len(values), rng.choice((1, 2))))
        values[name] = [
            Alternative(layout, {s: rng.choice((layout, rng.randrange(3))) for s in sources}, rng.uniform(1, 9) * 1e-6)
            for layout in rng.sample(range(3), rng.choice((1, 2, 3)))
        ]
    prices = {(v, layout): rng.uniform(0, 6) * 1e-6 for v in values for layout in range(3)}
    wanted = [("g", 0), ("d", 1)]

    def price(value: object, layout: int) -> float:
        return prices[str(value), layout]

    found = assign(values, wanted, price)
    counts = [range(len(alternatives)) for alternatives in values.values()]
    best = min(
        cost(values, wanted, price, dict(zip(values, each, strict=True))) for each in itertools.product(*counts)
    )
    places = {v: values[str(v)].index(found[v]) if v in found else 0 for v in values}
    assert cost(values, wanted, price, places) == pytest.approx(best, abs=2e-9)


def test_what_nobody_needs_is_left_out_and_what_nobody_makes_is_an_error() -> None:
    values = {"x": [Alternative("p")], "dead": [Alternative("p", {"x": "p"}, 1.0)], "y": [Alternative("p", {"x": "p"})]}
    assert set(assign(values, [("y", "p")], lambda v, layout: 1.0)) == {"x", "y"}
    with pytest.raises(ValueError, match="every value that is read must be made, but z is not"):
        assign(values, [("z", "p")], lambda v, layout: 1.0)


def conv(bb: relax.BlockBuilder, x: relax.Expr, shape: tuple[int, ...], **attrs: object) -> relax.Expr:
    weight = RNG.standard_normal(shape).astype("float32") / np.sqrt(np.prod(shape[1:]))
    return bb.emit(relax.op.nn.conv2d(x, relax.const(weight.astype("float32")), **attrs))


def layouts(mod: tvm.IRModule, target=AVX512) -> list[ChannelBlocks | None]:  # type: ignore[no-untyped-def]
    """Of the convolutions, in order."""
    chosen = Planner(mod["main"], target, CompileOptions.of(winograd=False)).choose()
    return [chosen[b.var].layout for b in bindings(mod["main"]) if name_of(b.value) == "relax.nn.conv2d"]


def test_a_small_convolution_between_plain_operators_stays_plain() -> None:
    def alone(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = conv(bb, bb.emit(relax.op.nn.softmax(x, axis=1)), (16, 16, 1, 1))
        return relax.op.nn.softmax(y, axis=1)

    def heavy(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = conv(bb, bb.emit(relax.op.nn.softmax(x, axis=1)), (128, 128, 3, 3), padding=1)
        return relax.op.nn.softmax(y, axis=1)

    def several(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = bb.emit(relax.op.nn.softmax(x, axis=1))
        for _ in range(12):
            y = conv(bb, y, (16, 16, 3, 3), padding=1)
        return relax.op.nn.softmax(y, axis=1)

    assert layouts(network((1, 16, 14, 14), alone)) == [None]
    assert layouts(network((1, 128, 28, 28), heavy)) == [ChannelBlocks(128)]
    assert layouts(network((1, 16, 14, 14), several)) == [ChannelBlocks(16)] * 12


def bottleneck(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """Channels that fill half blocks only, between ones that fill whole ones."""
    y = bb.emit(relax.op.nn.relu(conv(bb, x, (24, 32, 3, 3), padding=1)))
    z = bb.emit(relax.op.nn.relu(conv(bb, y, (24, 24, 3, 3), padding=1)))
    z = bb.emit(relax.op.add(z, y))
    return conv(bb, z, (32, 24, 3, 3), padding=1)


def test_blocks_of_two_sizes_where_vectors_are_short() -> None:
    mod = network((1, 32, 56, 56), bottleneck)
    assert layouts(mod, AVX2) == [ChannelBlocks(24, size=8)] * 2 + [ChannelBlocks(32)]
    assert layouts(mod, AVX512) == [ChannelBlocks(24)] * 2 + [ChannelBlocks(32)]
    for target in (AVX2, AVX512):
        assert_same_values(mod, BlockedLayouts(target, CompileOptions.of(winograd=False))(mod), 1e-4)


def test_parts_of_a_concatenation_share_their_blocks() -> None:
    def body(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        parts = [conv(bb, x, (channels, 32, 3, 3), padding=1) for channels in (24, 40, 56)]
        return conv(bb, bb.emit(relax.op.concat(parts, axis=1)), (32, 120, 3, 3), padding=1)

    mod = network((1, 32, 40, 40), body)
    found = layouts(mod, AVX2)
    assert [layout.size if layout else None for layout in found] == [8, 8, 8, 16]
    after = BlockedLayouts(AVX2, CompileOptions.of(winograd=False))(mod)
    assert_same_values(mod, after, 1e-4)
    names = [name_of(b.value) for b in bindings(after["main"])]
    assert names.count("relax.permute_dims") == 2  # into the region and out of it


@pytest.mark.alone
def test_each_convolution_of_a_large_graph_gets_a_layout() -> None:
    from mlc.frontend.load import load_model
    from mlc.networks.light import light_model

    mod = load_model(light_model("densenet121")).mod
    with AVX512.tvm:
        for each in itertools.takewhile(lambda p: p.info.name != "BlockedLayouts", passes(AVX512)):
            mod = each(mod)
        found = layouts(mod)
    assert len(found) == 121 and all(found)
