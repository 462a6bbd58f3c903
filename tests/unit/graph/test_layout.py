"""Blocked layouts and packed weights compute what the plain graph computes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from relax_evaluation import network
from tvm import relax, tirx

from mlc.graph.algorithms.direct import DIRECT
from mlc.graph.estimate import Convolution, Estimate
from mlc.graph.ir.channels import BLOCK, ChannelBlocks, block_diagonal, merged_groups
from mlc.graph.ir.rewrite import bindings
from mlc.graph.layout.blocked import BlockedLayouts
from mlc.graph.layout.packing import PackWeights
from mlc.target import resolve

TARGET = resolve("x86-64-v4", threads=2)  # whose blocks are chosen; any machine can compute what they hold
NATIVE = resolve("native", threads=2)
RNG = np.random.default_rng(7)


def _weight(*shape: int) -> relax.Expr:
    return relax.const(RNG.standard_normal(shape).astype("float32"))


def _run(mod: tvm.IRModule, data: np.ndarray) -> np.ndarray:
    with NATIVE.tvm:
        mod = relax.transform.DecomposeOpsForInference()(mod)
        exe = tvm.compile(mod, target=NATIVE.tvm)
    vm = relax.VirtualMachine(exe, tvm.cpu())
    return vm["main"](tvm.runtime.tensor(data)).numpy()


def _operators(mod: tvm.IRModule) -> list[str]:
    return [
        b.value.op.name for block in mod["main"].body.blocks for b in block.bindings
        if isinstance(b.value, relax.Call) and isinstance(b.value.op, tvm.ir.Op)
    ]


def _check(mod: tvm.IRModule, shape: tuple[int, ...], passes) -> tvm.IRModule:  # type: ignore[no-untyped-def]
    data = RNG.standard_normal(shape).astype("float32")
    expected = _run(mod, data)
    after = mod
    for each in passes:
        after = each(after)
    actual = _run(after, data)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    return after


def _conv(bb: relax.BlockBuilder, x: relax.Expr, oc: int, kernel: int, **attrs: object) -> relax.Expr:
    groups = attrs.get("groups", 1)
    channels = int(x.ty.shape[1])
    weight = _weight(oc, channels // groups, kernel, kernel)  # type: ignore[operator]
    return bb.emit(relax.op.nn.conv2d(x, weight, **attrs))


CASES = {
    "narrow input, wide kernel": (3, 32, 7, {"strides": 2, "padding": 3}),
    "whole blocks": (32, 48, 3, {"padding": 1}),
    "channels that need padding": (24, 40, 3, {"padding": (1, 0, 2, 1)}),
    "pointwise": (16, 64, 1, {}),
    "dilated": (16, 16, 3, {"dilation": 2, "padding": 2}),
    "depthwise": (48, 48, 3, {"groups": 48, "padding": 1}),
    "depthwise, padded channels": (20, 20, 3, {"groups": 20, "padding": 1, "strides": 2}),
    "grouped, whole blocks": (64, 32, 3, {"groups": 2, "padding": 1}),
    "grouped, padded blocks": (24, 60, 1, {"groups": 4}),
    "four groups a block": (32, 32, 3, {"groups": 8, "padding": 1}),
    "two groups a block and more filters": (32, 64, 3, {"groups": 4, "padding": 1, "strides": 2}),
    "all groups in one block": (16, 16, 3, {"groups": 4, "dilation": 2}),
}


@pytest.mark.usefixtures("always_blocked")
@pytest.mark.parametrize("name", CASES)
def test_convolution_with_epilogue(name: str) -> None:
    channels, out, kernel, attrs = CASES[name]
    shape = (1, channels, 13, 11)

    def body(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = _conv(bb, x, out, kernel, **attrs)
        y = bb.emit(relax.op.add(y, _weight(1, out, 1, 1)))
        return relax.op.nn.relu(y)

    after = _check(network(shape, body), shape, [BlockedLayouts(TARGET)])
    names = _operators(after)
    assert "relax.nn.conv2d" not in names
    assert names.index("relax.nn.relu") < max(i for i, n in enumerate(names) if n == "relax.reshape")


@pytest.mark.usefixtures("always_blocked")
def test_narrow_groups_share_blocks_without_padding() -> None:
    shape = (1, 64, 8, 8)

    def body(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        first = bb.emit(relax.op.nn.relu(_conv(bb, x, 128, 1)))
        return _conv(bb, bb.emit(relax.op.nn.relu(_conv(bb, first, 128, 3, padding=1, groups=32))), 64, 1)

    after = _check(network(shape, body), shape, [BlockedLayouts(TARGET)])
    names = _operators(after)
    assert names.count("relax.permute_dims") == 2 and "relax.nn.pad" not in names
    shapes = [tuple(map(int, p.shape)) for f in after.functions.values() if isinstance(f, tirx.PrimFunc)
              for p in f.params]
    assert (8, 1, 3, 3, 16, 16) in shapes  # four groups of four channels in each block


def test_block_diagonal_weights_meet_no_other_group() -> None:
    weight = RNG.standard_normal((12, 2, 3, 3)).astype("float32")
    whole = block_diagonal(weight, groups=6, merged=3)
    assert whole.shape == (12, 6, 3, 3)
    for output, inside in np.ndindex(12, 6):
        place = inside - output // 2 % 3 * 2
        expected = weight[output, place] if 0 <= place < 2 else np.zeros((3, 3))
        np.testing.assert_array_equal(whole[output, inside], expected)


@pytest.mark.parametrize(
    ("groups", "channels", "filters", "merged"),
    [(32, 128, 128, 4), (32, 256, 256, 2), (32, 512, 512, 1), (4, 24, 60, 0), (8, 32, 64, 4), (3, 12, 12, 0)],
)
def test_groups_that_fill_a_block(groups: int, channels: int, filters: int, merged: int) -> None:
    assert merged_groups(groups, ChannelBlocks(channels), ChannelBlocks(filters)) == merged


@pytest.mark.usefixtures("always_blocked")
def test_region_stays_blocked_between_convolutions() -> None:
    shape = (1, 16, 12, 12)

    def body(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        left = bb.emit(relax.op.nn.relu(_conv(bb, x, 32, 3, padding=1)))
        right = bb.emit(relax.op.sigmoid(_conv(bb, x, 32, 1)))
        both = bb.emit(relax.op.concat([left, right], axis=1))
        pooled = bb.emit(relax.op.nn.max_pool2d(both, (3, 3), (2, 2), (1, 1)))
        last = _conv(bb, pooled, 16, 1)
        scaled = bb.emit(relax.op.multiply(last, relax.const(0.5, "float32")))
        return relax.op.mean(scaled, axis=[2, 3], keepdims=True)

    after = _check(network(shape, body), shape, [BlockedLayouts(TARGET)])
    # one conversion into the region (shared by both convolutions); out of it only the reshape of the 1 x 1 result
    assert _operators(after).count("relax.permute_dims") == 1


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize(
    ("channels", "size", "kernel", "stride"), [(144, 56, 3, 1), (32, 112, 3, 1), (240, 28, 5, 1), (96, 112, 3, 2)]
)
def test_a_depthwise_layer_alone_is_blocked_only_where_its_vectors_pay_for_that(
    channels: int, size: int, kernel: int, stride: int, target: str
) -> None:
    """Between convolutions it is blocked; alone it would pay for both conversions, which only strides are worth."""
    attrs = {"padding": kernel // 2, "groups": channels, "strides": stride}
    shape = (1, channels, size, size)
    alone = network(shape, lambda bb, x: _conv(bb, x, channels, kernel, **attrs))
    between = network(
        shape, lambda bb, x: _conv(bb, _conv(bb, _conv(bb, x, channels, 3), channels, kernel, **attrs), channels, 3)
    )
    layouts = BlockedLayouts(resolve(target, threads=2))
    assert ("relax.nn.conv2d" in _operators(layouts(alone))) == (stride == 1)
    assert "relax.nn.conv2d" not in _operators(layouts(between))


@pytest.mark.usefixtures("always_blocked")
def _tokens(bb: relax.BlockBuilder, x: relax.Expr, then) -> relax.Expr:  # type: ignore[no-untyped-def]
    """``[N, H, W, C]`` through what ``then`` makes of the image of its pixels."""
    image = bb.emit(then(bb.emit(relax.op.permute_dims(bb.emit(relax.op.exp(x)), [0, 3, 1, 2]))))
    return relax.op.tanh(bb.emit(relax.op.permute_dims(image, [0, 2, 3, 1])))


@pytest.mark.parametrize("channels, copies", [(48, 0), (40, 0), (36, 2), (8, 2)])
def test_a_depthwise_layer_between_rows_of_channels_works_on_them(channels: int, copies: int) -> None:
    shape = (2, 9, 13, channels)

    def body(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        def layer(image: relax.Expr) -> relax.Expr:
            y = _conv(bb, image, channels, 3, padding=1, groups=channels)
            return relax.op.nn.gelu(bb.emit(relax.op.add(y, _weight(1, channels, 1, 1))))

        return _tokens(bb, x, layer)

    after = _check(network(shape, body), shape, [BlockedLayouts(TARGET)])
    assert _operators(after).count("relax.permute_dims") == copies


def test_patches_are_read_from_rows_of_channels() -> None:
    shape = (1, 16, 24, 64)
    after = _check(
        network(shape, lambda bb, x: _tokens(bb, x, lambda image: _conv(bb, image, 32, 4, strides=4))), shape,
        [BlockedLayouts(TARGET)],
    )
    names = _operators(after)
    assert names.index("relax.permute_dims") > names.index("relax.call_tir")  # of the result, which is small
    weights = [tuple(map(int, p.shape)) for f in after.functions.values() if isinstance(f, tirx.PrimFunc)
               for p in f.params]
    assert (2, 1, 4, 4, 64, 16) in weights


def test_residual_converts_the_plain_operand_once() -> None:
    shape = (1, 32, 9, 9)

    def body(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = _conv(bb, x, 32, 3, padding=1)
        return relax.op.nn.relu(bb.emit(relax.op.add(y, x)))

    after = _check(network(shape, body), shape, [BlockedLayouts(TARGET)])
    assert _operators(after).count("relax.permute_dims") == 2


@pytest.mark.usefixtures("always_blocked")
def test_average_pool_and_plain_consumers() -> None:
    shape = (1, 8, 14, 14)

    def body(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        y = _conv(bb, x, 40, 3, padding=1)
        pooled = bb.emit(relax.op.nn.avg_pool2d(y, (3, 3), (2, 2), (1, 1), count_include_pad=False))
        return relax.op.nn.softmax(pooled, axis=1)

    _check(network(shape, body), shape, [BlockedLayouts(TARGET)])


def test_gpu_targets_keep_plain_layouts() -> None:
    mod = network((1, 16, 8, 8), lambda bb, x: _conv(bb, x, 16, 3))
    assert "relax.nn.conv2d" in _operators(BlockedLayouts(resolve("cuda:sm_80"))(mod))


@pytest.mark.parametrize("columns", [48, 50, 1])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 5)])
def test_packed_weights(rows: tuple[int, ...], columns: int) -> None:
    shape = (*rows, 36)

    def body(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        return relax.op.add(bb.emit(relax.op.matmul(x, _weight(36, columns))), _weight(columns))

    mod = network(shape, body)
    after = _check(mod, shape, [PackWeights(TARGET)])
    assert "relax.matmul" not in _operators(after)


def test_a_weight_that_several_products_read_is_packed_once() -> None:
    """A recurrence that is unrolled reads it at every step."""

    def body(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        weight = _weight(32, 32)
        for _ in range(3):
            x = bb.emit(relax.op.tanh(bb.emit(relax.op.matmul(x, weight))))
        return bb.emit(relax.op.matmul(x, _weight(32, 32)))

    after = _check(network((2, 32), body), (2, 32), [PackWeights(TARGET)])
    constants = [
        arg.value.data_ptr() for b in bindings(after["main"]) for arg in getattr(b.value, "args", [])[1:]
        for arg in getattr(arg, "fields", []) if isinstance(arg, tvm.ir.GenericConst)
    ]
    assert [constants.count(place) for place in constants] == [3, 3, 3, 1]


def test_channel_blocks_pad_each_group() -> None:
    layout = ChannelBlocks(24, groups=4)
    assert (layout.per_group, layout.blocks, layout.padded) == (1, 4, True)
    cut = layout.cut(np.arange(1, 25, dtype="float32"), 0)
    assert cut.shape == (4, BLOCK)
    np.testing.assert_array_equal(cut[1], [7, 8, 9, 10, 11, 12] + [0] * 10)
    assert ChannelBlocks(64, groups=2).canonical() == ChannelBlocks(64)


@pytest.mark.usefixtures("always_blocked")
@pytest.mark.parametrize(
    ("channels", "before", "ways", "groups"),
    [(68, 4, 4, 4), (64, 1, 4, 4), (272, 4, 4, 4), (48, 1, 3, 2), (36, 3, 6, 3), (40, 2, 4, 5), (32, 1, 2, 1)],
)
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_convolution_reads_shuffled_channels_where_they_are(
    channels: int, before: int, ways: int, groups: int, kernel: int
) -> None:
    """``before`` are the groups of the convolution that the shuffle follows, whose blocks may be padded."""
    shape = (1, 16 * before, 5, 6)

    def body(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
        x = _conv(bb, x, channels, 1, groups=before)
        cut = bb.emit(relax.op.reshape(x, (1, ways, channels // ways, 5, 6)))
        swapped = bb.emit(relax.op.permute_dims(cut, [0, 2, 1, 3, 4]))
        return _conv(bb, bb.emit(relax.op.reshape(swapped, (1, channels, 5, 6))), 10 * groups, kernel, groups=groups)

    after = _check(network(shape, body), shape, [BlockedLayouts(TARGET)])
    moved = [name for name in _operators(after) if name == "relax.permute_dims"]
    assert len(moved) == 2  # at the model's borders only


@pytest.mark.parametrize(("channels", "size", "filters", "half"), [(512, 13, 1000, False), (96, 56, 24, True)])
def test_half_blocks_must_save_more_lanes_than_their_loads_take(
    channels: int, size: int, filters: int, half: bool
) -> None:
    """On AVX2 half a block is one vector, so that a step of a tile of twelve sums loads thirteen values, not eight."""
    estimate = Estimate(resolve("x86-64-v3", threads=2).tvm, 0.0)
    seconds = {
        block: DIRECT.seconds(Convolution(
            1, channels, -(-filters // block) * block, (size, size), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1, BLOCK,
            block), estimate) for block in (BLOCK, BLOCK // 2)
    }
    assert (seconds[BLOCK // 2] < seconds[BLOCK]) == half
