from __future__ import annotations

import numpy as np
import pytest
import tvm
from harness import TARGET, Case, SpaceContract, build_and_run, pytest_generate_tests
from scipy.special import erf
from tvm import s_tir, te, tirx, topi

from schedules.analysis import choices, walk
from schedules.cpu.elementwise import ELEMENTWISE
from schedules.space import best_seed

__all__ = ["pytest_generate_tests"]


def _p(*shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype)


def _chain() -> list[te.Tensor]:
    a, b, c = _p(2, 33, 96), _p(96), _p(2, 33, 96)
    return [a, b, c, topi.nn.relu(topi.add(topi.multiply(topi.add(a, b), c), a))]


def _gelu() -> list[te.Tensor]:
    a = _p(4, 320)
    return [a, te.compute(a.shape, lambda i, j: a[i, j] * 0.5 * (1 + tirx.erf(a[i, j] * 0.70710678)))]


def _one(make, *shape: int, dtype: str = "float32"):  # type: ignore[no-untyped-def]
    def build() -> list[te.Tensor]:
        a = _p(*shape, dtype=dtype)
        out = make(a)
        return [a, *(out if isinstance(out, list) else [out])]

    return build


def _two(make, first: tuple[int, ...], second: tuple[int, ...], dtype: str = "float32"):  # type: ignore[no-untyped-def]
    def build() -> list[te.Tensor]:
        a, b = _p(*first), _p(*second, dtype=dtype)
        return [a, b, make(a, b)]

    return build


def _shuffle(a: te.Tensor) -> te.Tensor:
    x = topi.transpose(topi.reshape(a, (1, 2, 29, 14, 14)), (0, 2, 1, 3, 4))
    return topi.reshape(x, (1, 58, 14, 14))


def _to_blocked(a: np.ndarray) -> np.ndarray:
    return a.reshape(1, 4, 16, 28, 28).transpose(0, 1, 3, 4, 2)


def _shared_slow() -> list[te.Tensor]:
    """A slow value per channel that every pixel reads."""
    a, v = _p(8, 32, 64), _p(32)
    scale = te.compute((32,), lambda c: 1.0 / tirx.sqrt(v[c] + 1e-3), name="scale")
    return [a, v, te.compute(a.shape, lambda n, c, w: a[n, c, w] * scale[c], name="scaled")]


def _doubled(a: te.Tensor) -> te.Tensor:
    return topi.image.resize2d(a, (0.0,) * 4, (14, 22), "NCHW16c", "linear", "half_pixel")


def _interpolated(a: np.ndarray) -> np.ndarray:
    """Each output lies a quarter of a pixel from its source, at the edges on it."""
    for axis in (2, 3):
        old = a.shape[axis]
        places = np.clip((np.arange(2 * old) + 0.5) / 2 - 0.5, 0, old - 1)
        a = np.apply_along_axis(lambda line, x=places, n=old: np.interp(x, np.arange(n), line), axis, a)
    return a


class TestElementwise(SpaceContract):
    space = ELEMENTWISE
    cases = (
        Case("chain", _chain, lambda a, b, c: np.maximum((a + b) * c + a, 0)),
        Case("gelu", _gelu, lambda a: a * 0.5 * (1 + erf(a * 0.70710678))),
        Case("prime", _one(topi.nn.relu, 31013), lambda a: np.maximum(a, 0)),
        Case("odd_width", _one(topi.nn.relu, 40, 7, 7), lambda a: np.maximum(a, 0)),
        Case("tiny", _one(topi.nn.relu, 3), lambda a: np.maximum(a, 0)),
        Case("ones", _one(topi.exp, 1, 1), lambda a: np.exp(a)),
        Case("int64", _one(lambda a: topi.add(a, a), 5, 37, dtype="int64"), lambda a: a + a),
        Case("bool", _two(topi.greater, (4, 100), (4, 100)), lambda a, b: a > b),
        Case("float64", _one(lambda a: topi.multiply(a, a), 300, dtype="float64"), lambda a: a * a),
        Case("resize", _one(_doubled, 1, 2, 7, 11, 16), _interpolated),
        Case("channel_scale", _two(topi.multiply, (1, 24, 20, 20), (1, 24, 1, 1)), lambda a, b: a * b),
        Case("transpose", _one(topi.transpose, 200, 300), lambda a: a.T),
        Case("transpose_by_powers_of_two", _one(topi.transpose, 512, 256), lambda a: a.T),
        Case("transpose_batched", _one(lambda a: topi.transpose(a, (0, 2, 1)), 3, 64, 48), lambda a: a.swapaxes(1, 2)),
        Case("transpose_odd", _one(topi.transpose, 37, 53), lambda a: a.T),
        Case(
            "heads", _one(lambda a: topi.transpose(a, (0, 2, 1, 3)), 1, 64, 12, 64),
            lambda a: a.transpose(0, 2, 1, 3),
        ),
        Case(
            "keys", _one(lambda a: topi.transpose(a, (0, 1, 3, 2)), 1, 12, 128, 64),
            lambda a: a.transpose(0, 1, 3, 2),
        ),
        Case("to_blocked", _one(lambda a: topi.layout_transform(a, "NCHW", "NCHW16c"), 1, 64, 28, 28), _to_blocked),
        Case(
            "from_blocked", _one(lambda a: topi.layout_transform(a, "NCHW16c", "NCHW"), 1, 4, 28, 28, 16),
            lambda a: a.transpose(0, 1, 4, 2, 3).reshape(1, 64, 28, 28),
        ),
        Case(
            "concat_channels", _two(lambda a, b: topi.concatenate([a, b], 1), (1, 4, 28, 28, 16), (1, 2, 28, 28, 16)),
            lambda a, b: np.concatenate([a, b], 1),
        ),
        Case(
            "concat_last", _two(lambda a, b: topi.concatenate([a, b], -1), (9, 50), (9, 75)),
            lambda a, b: np.concatenate([a, b], -1),
        ),
        Case(
            "pad", _one(lambda a: topi.nn.pad(a, [0, 0, 1, 2], [0, 0, 2, 1]), 1, 8, 30, 30),
            lambda a: np.pad(a, ((0, 0), (0, 0), (1, 2), (2, 1))),
        ),
        Case(
            "gather", _two(lambda a, i: topi.take(a, i, axis=0, mode="clip"), (500, 96), (1, 77), "int64"),
            lambda a, i: a[i], high={1: 500},
        ),
        Case(
            "slice", _one(lambda a: topi.strided_slice(a, [0, 1, 3], [2, 30, 60], [1, 2, 1]), 2, 32, 64),
            lambda a: a[0:2, 1:30:2, 3:60],
        ),
        Case("split", _one(lambda a: list(topi.split(a, 3, axis=1)), 40, 96), lambda a: np.split(a, 3, axis=1)),
        Case(
            "shuffle", _one(_shuffle, 1, 58, 14, 14),
            lambda a: a.reshape(1, 2, 29, 14, 14).transpose(0, 2, 1, 3, 4).reshape(1, 58, 14, 14),
        ),
        Case("shared_slow", _shared_slow, lambda a, v: a / np.sqrt(v + 1e-3)[None, :, None], low=0.1),
    )


def test_a_chain_is_one_pass() -> None:
    sch = best_seed(ELEMENTWISE, te.create_prim_func(_chain()), TARGET)
    assert len(sch.get_child_blocks(sch.get_sblock("root"))) == 1


def test_a_slow_shared_value_is_stored() -> None:
    sch = best_seed(ELEMENTWISE, te.create_prim_func(_shared_slow()), TARGET)
    names = [str(sch.get(b).name_hint) for b in sch.get_child_blocks(sch.get_sblock("root"))]
    assert names == ["scale", "scaled"]


@pytest.mark.parametrize("shape", [(12, 55, 55, 16), (1, 12, 27, 27, 16), (3, 7, 7, 1000), (240, 240)])
def test_no_index_keeps_a_division(shape: tuple[int, ...]) -> None:
    """Fused and split again, a contiguous index must still be recognised as one; else every lane divides."""
    a, b = _p(*shape), _p(*shape)
    sch = best_seed(ELEMENTWISE, te.create_prim_func([a, b, topi.multiply(a, b)]), TARGET)
    passes = [
        s_tir.transform.LowerInitBlock(), s_tir.transform.ConvertBlocksToOpaque(), s_tir.transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(), s_tir.transform.LoopPartition(), tirx.transform.VectorizeLoop(True),
        tirx.transform.StmtSimplify(),
    ]
    script = tvm.transform.Sequential(passes)(sch.mod).script()
    assert "//" not in script and "%" not in script


def test_a_padded_channel_shuffle_steps_along_the_pixels() -> None:
    """In blocked layout the stored axis is gathered from everywhere and partly padded; the pixels are neither."""
    a = _p(1, 12, 14, 14, 16)
    plain = topi.reshape(topi.transpose(a, (0, 1, 4, 2, 3)), (1, 4, 48, 14, 14))
    used = topi.strided_slice(plain, [0, 0, 0, 0, 0], [1, 4, 34, 14, 14], [1] * 5)
    shuffled = topi.reshape(topi.transpose(used, (0, 2, 1, 3, 4)), (1, 4, 34, 14, 14))
    padded = topi.reshape(topi.nn.pad(shuffled, [0] * 5, [0, 0, 14, 0, 0]), (1, 12, 16, 14, 14))
    func = te.create_prim_func([a, topi.transpose(padded, (0, 1, 3, 4, 2))])
    sch = best_seed(ELEMENTWISE, func, TARGET)
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    *_, stored, pixels = [sch.get(loop) for loop in sch.get_loops(block)]
    assert int(stored.extent) == 16 and 196 % int(pixels.extent) == 0
    data = np.random.default_rng(0).normal(size=(1, 12, 14, 14, 16)).astype("float32")
    got = build_and_run(sch.mod, [data, np.zeros_like(data)])[1]
    channels = data.transpose(0, 1, 4, 2, 3).reshape(1, 4, 48, 14, 14)[:, :, :34]
    channels = channels.transpose(0, 2, 1, 3, 4).reshape(1, 4, 34, 14, 14)
    channels = np.pad(channels, ((0, 0), (0, 0), (0, 14), (0, 0), (0, 0))).reshape(1, 12, 16, 14, 14)
    np.testing.assert_array_equal(got, channels.transpose(0, 1, 3, 4, 2))


@pytest.mark.parametrize(("rows", "columns", "first"), [
    (64, 4096, 2),  # read rows of 16 KiB share a set of the cache: along them
    (4096, 64, 0),  # a tile that writes 16 such rows at once displaces itself
    (3136, 64, 1), (1024, 1024, 1), (64, 64, 1),
])
def test_tiles_of_a_transposition_follow_the_side_whose_lines_collide(rows: int, columns: int, first: int) -> None:
    a = _p(rows, columns)
    func = te.create_prim_func([a, topi.transpose(a)])
    found = [seed["shuffle"] for seed in ELEMENTWISE.seeds(func, tvm.target.Target("llvm"))]
    assert found[0] == first and set(found) == {0, 1, 2}


def test_duplication_is_bounded() -> None:
    """Twenty squarings of a sum would be a million terms if each were inlined into the next."""
    a = _p(64, 64)
    x = a
    for _ in range(20):
        x = topi.multiply(x, x)
    sch = best_seed(ELEMENTWISE, te.create_prim_func([a, x]), TARGET)
    assert len(str(sch.mod)) < 400_000


def test_choices_do_not_pile_up() -> None:
    """As of the lengths that a model of speech counts through its convolutions: TVM would simplify them for hours."""
    def counted(length: te.Tensor) -> te.Tensor:
        def halved(x: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda i: tirx.Select(
                x[i] < 0, tirx.floor(x[i] * 0.5 + 1), tirx.floor(x[i] * 0.25 - x[i] * 0.75)))

        for _ in range(7):
            length = halved(length)
        return length

    func = te.create_prim_func(_one(counted, 8)())
    sch = best_seed(ELEMENTWISE, func, TARGET)
    found: list[int] = []
    walk(sch.mod["main"].body, (s_tir.SBlock, lambda block: found.append(choices(block.body))))
    assert max(found[:-1]) < 20, "a block's own and those of what is inlined into it; the last block is the root"


@pytest.mark.parametrize("cores", [1])
def test_one_core_stays_serial(cores: int) -> None:
    target = tvm.target.Target({"kind": "llvm", "num-cores": cores})
    a = _p(1024, 1024)
    text = best_seed(ELEMENTWISE, te.create_prim_func([a, topi.nn.relu(a)]), target).mod.script()
    assert "T.parallel" not in text and "T.vectorized" in text


def test_each_piece_of_a_concatenation_has_code_of_its_own() -> None:
    parts = [_p(6, 1, 24) for _ in range(5)]
    func = te.create_prim_func([*parts, topi.concatenate(parts, axis=1)])
    text = best_seed(ELEMENTWISE, func, TARGET).mod["main"].script()
    assert "T.unroll(5)" in text, "whose part an element is must not be asked for every vector"
