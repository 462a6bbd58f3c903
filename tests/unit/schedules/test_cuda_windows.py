"""Convolutions as products of warpgroups: their boxes, what is in the machine code, and what the emulator computes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from harness import check_orders, emulate
from tvm import te, tirx

from mlc.codegen.inspection import DynamicShared, Kernel, find_nvdisasm, kernels
from mlc.graph.kernels.channels_last import conv2d_channels_last
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_images import Image, Transposed
from schedules import registry
from schedules.cuda.image import Image as Windows
from schedules.cuda.product import product_of
from schedules.cuda.wgmma import WarpgroupGemm
from schedules.space import first_seed, schedule_with

SPACE = WarpgroupGemm()
HOPPER = resolve("cuda:sm_90a").tvm
#: so few multiprocessors that a block takes several tiles
SMALL = tvm.target.Target({**HOPPER.export(), "model": "sms=2"})
#: calls that keep what is asynchronous apart
ORDERS = re.compile(
    r"__syncthreads\(\);|mlc_(wait_\w+|expect|arrive\w*|fence_\w+|commit_\w+|meet_\w+)\([^;]*\);")
#: of ResNet-50, 32 images at once
RESNET = [
    Image((32, 56, 56, 64), 64, pad=1), Image((32, 28, 28, 128), 128, pad=1), Image((32, 14, 14, 256), 256, pad=1),
    Image((32, 7, 7, 512), 512, pad=1), Image((32, 14, 14, 1024), 2048, 1, 2), Image((32, 56, 56, 128), 128, 3, 2, 1),
]

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")


def tile(**knobs: int) -> dict[str, int]:
    return {"block_m": 64, "block_n": 64, "block_k": 64, "consumers": 1, "stages": 3, "panel": 1, "boxed": 0,
            "cluster": 1, "persistent": 0, **knobs}


def windows_of(image: Image) -> Windows:
    product = product_of(image.case("image").func())
    assert product is not None and isinstance(product.a, Windows)
    return product.a


def scheduled(case: Case, decisions: dict[str, int], target: tvm.target.Target = HOPPER) -> tirx.PrimFunc:
    return schedule_with(SPACE, case.func(), target, decisions).mod["main"]


def compiled(func: tirx.PrimFunc) -> Kernel:
    shared = DynamicShared()
    (kernel,) = kernels(cuda_emulator.cuda_source(func, HOPPER, [shared]), "sm_90a", shared.bytes)
    return kernel


def check_promises(kernel: Kernel, decisions: dict[str, int]) -> None:
    assert kernel.stack_bytes == kernel.spilled_bytes == 0 and not kernel.serialised and kernel.blocks
    if find_nvdisasm():
        assert kernel.count("HGMMA") and kernel.count("UTMALDG.4D") and kernel.count("UTMALDG.2D")
        assert not kernel.count("LDL") and not kernel.count("STL") and not kernel.count("LDGSTS")
        assert bool(kernel.count("UTMASTG.4D")) == bool(decisions["boxed"]) != bool(kernel.count("STG"))
        assert kernel.count("STG") == kernel.count("STG.E.128")


@needs_nvcc
@pytest.mark.sampled(3)
@pytest.mark.parametrize("image", RESNET, ids=str)
def test_seeds_hold_their_instructions_and_spill_nothing(image: Image) -> None:
    func = image.case("image").func()
    assert registry.find(func, HOPPER).name == SPACE.name
    sch, decisions = first_seed(SPACE, func, HOPPER)
    check_promises(compiled(sch.mod["main"]), decisions)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("image", [*RESNET, Image((32, 14, 14, 256), 256, pad=1, residual=True)], ids=str)
def test_no_seed_spills(image: Image) -> None:
    func = image.case("image").func()
    for decisions in SPACE.seeds(func, HOPPER):
        check_promises(compiled(schedule_with(SPACE, func, HOPPER, decisions).mod["main"]), dict(decisions))


@pytest.mark.parametrize(("image", "rows", "boxed", "tiles"), [
    (RESNET[0], 128, True, 784), (RESNET[1], 128, True, 196), (RESNET[2], 128, True, 49), (RESNET[3], 128, True, 14),
    (RESNET[3], 64, False, 28), (Image((1, 14, 14, 64), 64, pad=1), 64, True, 4), (RESNET[5], 256, True, 98),
])
def test_boxes_have_as_many_pixels_as_may_be(image: Image, rows: int, boxed: bool, tiles: int) -> None:
    """Of 32 images of 7 by 7 pixels 12.25 tiles of 128 would do, of 64 rows 24.5."""
    boxes = windows_of(image).boxes(rows, boxed=boxed)
    assert boxes.count == tiles and boxes.pixels <= rows
    assert not boxed or boxes.pixels == rows
    least = -(-image.size[0] * (-(-image.size[1] // image.stride)) * (-(-image.size[2] // image.stride)) // rows)
    assert least <= tiles <= least * 1.2


#: images, and what is decided of them
COMPUTED: list[tuple[Image, dict[str, int]]] = [
    (Image((2, 9, 11, 64), 64, pad=1), {"boxed": 1}),
    (Image((3, 7, 7, 64), 72, pad=1, residual=True), {"block_k": 128}),
    (Image((1, 15, 15, 128), 72, 1, 2), {"boxed": 1, "cluster": 2, "block_k": 128}),
    (Image((1, 10, 9, 64), 64, pad=2, dilation=2, dtype="bfloat16"), {"block_n": 128, "persistent": 1}),
    (Image((2, 13, 10, 64), 136, 3, 2, 1, residual=True), {"cluster": 2, "persistent": 1, "panel": 4}),
    (Image((5, 6, 5, 96), 64, pad=1, dtype="bfloat16"), {"block_m": 128, "consumers": 2, "boxed": 1, "cluster": 2}),
    (Image((1, 12, 9, 40), 64, 5, 3, 2), {"block_k": 128, "cluster": 2}),
    (Image((2, 8, 8, 72), 64, 1, 2, dtype="bfloat16"), {"boxed": 1, "block_k": 128}),
    (Image((1, 17, 19, 64), 192, 3, 2, 2, dilation=3), {"block_m": 256, "consumers": 2, "boxed": 1, "persistent": 1}),
    (Image((1, 23, 20, 8), 64, 7, 2, 3), {"boxed": 1}),
    (Image((4, 4, 4, 64), 200, 2, 1, 0, residual=True), {"block_n": 256, "persistent": 1}),
    (Image((8, 3, 3, 64), 64, 3, 1, 1), {"boxed": 1, "cluster": 2}),
    (Image((2, 41, 49, 64), 64, 1, 8), {"boxed": 1}),
]


@needs_gxx
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("image", "knobs"), COMPUTED, ids=str)
def test_windows_are_exact_enough(image: Image, knobs: dict[str, int]) -> None:
    case = image.case(str(image), SPACE.name)
    error, costs = emulate(case, scheduled(case, tile(**knobs), SMALL), HOPPER)
    assert error <= case.rtol
    assert all(cost.taken == cost.least for cost in costs if cost.shared), costs


@needs_gxx
def test_rows_beyond_a_box_are_stored_nowhere() -> None:
    """Of 64 a box has 54, and other images go on where it ends: their blocks run before it too, and store theirs."""
    image = Image((2, 9, 11, 64), 64, residual=True, pad=1)
    assert windows_of(image).boxes(64, boxed=False).pixels == 54
    case = image.case("beyond a box", SPACE.name)
    inputs, outputs = case.arrays()
    cuda_emulator.run(scheduled(case, tile()), HOPPER, inputs, outputs, repeats=2)  # the second time backwards
    assert case.error(inputs, outputs) <= case.rtol


@needs_gxx
def test_what_lies_beyond_the_channels_of_the_last_place_is_no_number() -> None:
    """A step of 128 has two places, of nine the last one alone: zeros that no infinity is multiplied with."""
    image = Image((1, 8, 8, 64), 64, pad=1)
    case = image.case("infinite", SPACE.name)
    inputs, outputs = case.arrays()
    inputs[0][0, 0, 7, 3] = float("inf")  # of all channels
    cuda_emulator.run(scheduled(case, tile(block_k=128)), HOPPER, inputs, outputs)
    finite = outputs[0][0, 0, :6]
    wanted = case.reference(*(each.astype("float64") for each in inputs[:3]))
    assert abs(finite.astype("float64") - wanted[0, 0, :6]).max() <= 1e-3 * abs(wanted[0, 0, :6]).max()


@needs_gxx
@pytest.mark.parametrize(("knobs", "count"), [({"persistent": 1}, 18), ({"persistent": 1, "boxed": 1}, 20)], ids=str)
def test_each_wait_and_barrier_is_needed(monkeypatch: pytest.MonkeyPatch, knobs: dict[str, int], count: int) -> None:
    """Whichever is left out, the results are wrong or the kernel does not end: of two tiles, nine steps."""
    image = Image((2, 8, 8, 64), 128, pad=1)
    one = tvm.target.Target({**HOPPER.export(), "model": "sms=1"})
    case = image.case("orders", SPACE.name)
    func = scheduled(case, tile(**knobs, block_n=128), one)
    assert check_orders(monkeypatch, case, func, HOPPER, ORDERS) == count


@needs_nvcc
@pytest.mark.parametrize("case", [
    Transposed((8, 28, 28, 128), 64).case("doubled", SPACE.name),
    Transposed((8, 32, 32, 256), 128, (2, 2), pads=(0, 0)).case("apart", SPACE.name),
    Transposed((4, 1, 800, 128), 64, (1, 16), (1, 8), (0, 4)).case("line", SPACE.name)], ids=str)
def test_transposed_convolutions_are_windows_too(case: Case) -> None:
    """The products of their groups of phases in one kernel, which interleaves them in stores of whole vectors."""
    func = case.func()
    assert registry.find(func, HOPPER).name == SPACE.name
    kernel = compiled(first_seed(SPACE, func, HOPPER)[0].mod["main"])
    assert kernel.stack_bytes == kernel.spilled_bytes == 0 and not kernel.serialised and kernel.blocks
    if find_nvdisasm():
        assert kernel.count("HGMMA") and kernel.count("UTMALDG.4D")
        assert kernel.count("STG") == kernel.count("STG.E.128")


@needs_gxx
@pytest.mark.parametrize("knobs", [{}, {"block_n": 128, "cluster": 2}, {"persistent": 1, "block_k": 128}], ids=str)
@pytest.mark.parametrize("image", [
    Transposed((2, 9, 7, 72), 40), Transposed((1, 6, 11, 64), 32, (3, 3)),
    Transposed((2, 1, 45, 96), 24, (1, 8), (1, 4), (0, 2))], ids=str)
@pytest.mark.sampled(2)
def test_transposed_convolutions_are_exact_enough(image: Transposed, knobs: dict[str, int]) -> None:
    case = image.case("transposed", SPACE.name)
    boxed = int(product_of(case.func()).results is not None)
    for decisions in ({**tile(**knobs)}, *([tile(**knobs, boxed=1)] if boxed else [])):
        error, costs = emulate(case, scheduled(case, decisions, SMALL), SMALL)
        assert error <= case.rtol and costs


def convolved(
    change: Callable[[te.Tensor], te.Tensor], strides: tuple[int, int] = (1, 1), groups: int = 1, channels: int = 64,
) -> tirx.PrimFunc:
    """The function of a convolution without padding of what ``change`` makes of an image."""
    x = te.placeholder((2, 1, 24, 24, channels), "float16", "x")
    w = te.placeholder((64, 3, 3, channels // groups), "float16", "w")
    y = conv2d_channels_last(change(x), w, strides, (0,) * 4, (1, 1), groups)
    return te.create_prim_func([x, w, y], index_dtype_override="int64")


def padded(inside: Callable[..., Any], value: float = 0.0) -> Callable[[te.Tensor], te.Tensor]:
    """An image with a border of one pixel, its own where ``inside`` says so."""
    def border(x: te.Tensor) -> te.Tensor:
        return te.compute((2, 1, 26, 26, 64), lambda n, b, h, w, c: tirx.if_then_else(
            inside(n, h, w, c), x[n, b, h - 1, w - 1, c], tirx.const(value, "float16")), name="padded")

    return border


def within(n: Any, h: Any, w: Any, c: Any) -> Any:
    return tirx.all(h >= 1, h < 25, w >= 1, w < 25)


def test_what_is_no_window_of_an_image_is_not_taken() -> None:
    """Boxes have all that lies in the image and zeros elsewhere."""
    def name(func: tirx.PrimFunc) -> str:
        return registry.find(func, HOPPER).name

    assert name(convolved(lambda x: x)) == name(convolved(padded(within))) == SPACE.name
    for refused in (
        convolved(padded(within, 1.0)), convolved(padded(lambda n, h, w, c: tirx.all(within(n, h, w, c), h < 24))),
        convolved(padded(lambda n, h, w, c: tirx.all(within(n, h, w, c), c < 60))),
        convolved(padded(lambda n, h, w, c: tirx.all(within(n, h, w, c), h + w < 40))),
        convolved(lambda x: te.compute(x.shape, lambda *i: x(*i) * x(*i), name="squared")),
        convolved(lambda x: te.compute(x.shape, lambda n, b, h, w, c: x[n, b, w, h, c], name="turned")),
        convolved(lambda x: x, (9, 9)), convolved(lambda x: x, groups=2), convolved(lambda x: x, channels=68),
    ):
        assert product_of(refused) is None and name(refused) != SPACE.name


def test_who_takes_an_image() -> None:
    """Few pixels and many channels are better cut along the sum, and so are eight channels: seven eighths zeros."""
    for image, space in (
        (Image((1, 7, 7, 512), 512, pad=1), "cuda.mma"), (Image((8, 112, 112, 8), 64, 7, 2, 3), "cuda.mma"),
        (Image((8, 56, 56, 96), 96, pad=1), SPACE.name),
    ):
        assert product_of(image.case("image").func()) is not None
        assert registry.find(image.case("image").func(), HOPPER).name == space
        assert registry.find(image.case("image").func(), resolve("cuda:sm_80").tvm).name == "cuda.mma"
