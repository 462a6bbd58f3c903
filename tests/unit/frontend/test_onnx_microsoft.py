"""onnxruntime's own operators: as its CPU kernels compute them, and as their definition does in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
from microsoft_nodes import Arrays, Case, numbers_of, wide
from onnx import helper
from quantised_nodes import MICROSOFT, extremes, imported_numbers, model_of, onnxruntime_numbers

import mlc
from mlc.errors import ModelError, UnsupportedOperators
from mlc.frontend import load_model


def _real(x: np.ndarray, scale: Any, zero: Any) -> np.ndarray:
    return (wide(x) - wide(zero)) * wide(scale)


def _steps(value: np.ndarray, scale: Any, zero: np.ndarray) -> np.ndarray:
    info = np.iinfo(zero.dtype)
    return np.clip(np.rint(value / wide(scale)) + wide(zero), info.min, info.max)


def _parameters(dtype: str) -> dict[str, np.ndarray]:
    """Scales and zero points of two operands and a result, at the ends of the type and inside."""
    info = np.iinfo(dtype)
    return {
        "as": np.float32(0.02), "az": np.array(info.min, dtype),
        "bs": np.float32(0.03), "bz": np.array(info.max, dtype),
        "cs": np.float32(0.05), "cz": np.array((info.min + info.max) // 2, dtype),
    }


def _quantised_cases(dtype: str) -> dict[str, Case]:
    rng, p = np.random.default_rng(0), _parameters(dtype)
    a, b = extremes(rng, (2, 3, 4), dtype), extremes(rng, (3, 4), dtype)
    image = extremes(rng, (2, 3, 7, 6), dtype)
    real, other, pixels = _real(a, p["as"], p["az"]), _real(b, p["bs"], p["bz"]), _real(image, p["as"], p["az"])
    narrow = {**p, "cs": np.float32(1 / 256), "cz": np.array(np.iinfo(dtype).min, dtype)}
    condition = rng.integers(0, 2, (3, 4)).astype(bool)

    def steps(value: np.ndarray, parameters: Arrays = p) -> np.ndarray:
        return _steps(value, parameters["cs"], parameters["cz"])

    def case(operator: str, inputs: str, feeds: Arrays, wanted: Callable[[], np.ndarray], constants: Arrays = p,
             here: bool = True, rank: int = 3, **attributes: Any) -> Case:
        return Case(operator, inputs, feeds, constants, (dtype, rank), wanted, attributes, here)

    two, one, both = "a as az b bs bz cs cz", "a as az cs cz", {"a": a, "b": b}
    exponent = np.exp(real)
    flat = exponent.reshape(2, -1)
    padded = np.pad(pixels, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    return {
        "add": case("QLinearAdd", two, both, lambda: steps(real + other)),
        "mul": case("QLinearMul", two, both, lambda: steps(real * other)),
        "where": case("QLinearWhere", f"k {two}", {"k": condition, **both},
                      lambda: steps(np.where(condition, real, other))),
        "concat": case("QLinearConcat", "cs cz a as az b bs bz", {"a": a, "b": a[:, :2]},
                       lambda: steps(np.concatenate([real, _real(a[:, :2], p["bs"], p["bz"])], 1)), axis=1),
        "sigmoid": case("QLinearSigmoid", one, {"a": a}, lambda: steps(1 / (1 + np.exp(-real)), narrow), narrow),
        "leaky": case("QLinearLeakyRelu", one, {"a": a}, lambda: steps(np.where(real < 0, 0.2 * real, real)),
                      alpha=0.2),
        "leaky default": case("QLinearLeakyRelu", one, {"a": a},
                              lambda: steps(np.where(real < 0, 0.01 * real, real))),
        "softmax": case("QLinearSoftmax", one, {"a": a},
                        lambda: steps(exponent / exponent.sum(-1, keepdims=True), narrow), narrow, axis=-1, opset=13),
        "old softmax": case("QLinearSoftmax", one, {"a": a},
                            lambda: steps((flat / flat.sum(-1, keepdims=True)).reshape(a.shape), narrow), narrow,
                            axis=1, opset=12),
        "global average": case("QLinearGlobalAveragePool", one, {"a": image},
                               lambda: steps(pixels.mean((2, 3), keepdims=True)), rank=4, channels_last=0),
        "average": case("QLinearAveragePool", one, {"a": image}, lambda: steps(windows.mean((-1, -2))), rank=4,
                        kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2], count_include_pad=1),
        "mean": case("QLinearReduceMean", one, {"a": a}, lambda: steps(real.mean(1)), here=False, rank=2, axes=[1],
                     keepdims=0),
    }


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("name", list(_quantised_cases("uint8")))
def test_between_quantised_tensors(name: str, dtype: str) -> None:
    """Off by a step only where the result is half-way between two, as float32 sees it."""
    case = _quantised_cases(dtype)[name]
    found = numbers_of(case)
    apart = np.abs(found - case.wanted())
    assert apart.max() <= 1 and (apart > 0).mean() <= 0.1
    assert len(np.unique(found)) > 3


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_zero_points_that_are_left_out(dtype: str) -> None:
    """They are zero, and the result is of the type of the input."""
    a, constants = extremes(np.random.default_rng(13), (3, 40), dtype), {"as": np.float32(0.02), "cs": np.float32(0.03)}
    real = _real(a, 0.02, 0)
    case = Case("QLinearLeakyRelu", "a as - cs -", {"a": a}, constants, (dtype, 2), lambda: real, {"alpha": 0.5})
    wanted = _steps(np.where(real < 0, real / 2, real), 0.03, np.array(0, dtype))
    assert np.abs(numbers_of(case) - wanted).max() <= 1


@pytest.mark.parametrize("columns", [False, True], ids=["tensor", "columns"])
@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_gemm(dtype: str, turned: int, columns: bool) -> None:
    """With a bias in steps of the product, to integers and to float32."""
    rng, p = np.random.default_rng(1), _parameters(dtype)
    a, w = extremes(rng, (4, 16), dtype), extremes(rng, (16, 5), "int8")
    constants = {
        **p, "w": w.T.copy() if turned else w, "bias": rng.integers(-2000, 2000, 5).astype("int32"),
        "ws": rng.uniform(0.01, 0.02, 5).astype("float32") if columns else np.float32(0.015),
        "wz": np.zeros(5, "int8") if columns else np.array(0, "int8"),
    }
    product = 0.5 * _real(a, p["as"], p["az"]) @ _real(w, constants["ws"], constants["wz"])
    product += constants["bias"] * 0.5 * wide(p["as"]) * wide(constants["ws"])
    attributes = {"transB": turned, "alpha": 0.5}
    case = Case("QGemm", "a as az w ws wz bias cs cz", {"a": a}, constants, (dtype, 2), lambda: product, attributes)
    assert np.abs(numbers_of(case) - _steps(product, p["cs"], p["cz"])).max() <= 1
    case = Case("QGemm", "a as az w ws wz bias", {"a": a}, constants, ("float32", 2), lambda: product, attributes)
    np.testing.assert_allclose(numbers_of(case), product, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("w_type", ["uint8", "int8"])
def test_products_of_integers_in_float32(w_type: str) -> None:
    rng = np.random.default_rng(2)
    w, wz = extremes(rng, (16, 5), w_type), extremes(rng, (5,), w_type)
    a, x = extremes(rng, (2, 4, 16), "uint8"), rng.standard_normal((2, 4, 16)).astype("float32")
    constants = {**_parameters("uint8"), "w": w, "wz": wz, "ws": rng.uniform(0.01, 0.02, 5).astype("float32"),
                 "bias": rng.standard_normal(5).astype("float32")}
    weights = _real(w, constants["ws"], wz)
    wanted = _real(a, constants["as"], constants["az"]) @ weights + constants["bias"]
    case = Case("MatMulIntegerToFloat", "a w as ws az wz bias", {"a": a}, constants, ("float32", 3), lambda: wanted, {})
    np.testing.assert_allclose(numbers_of(case), wanted, rtol=1e-5, atol=1e-5)
    case = Case("DynamicQuantizeMatMul", "x w ws wz bias", {"x": x}, constants, ("float32", 3), lambda: wanted, {})
    step = (x.max() - x.min()) / 255
    zero = np.rint(-x.min() / step)
    rounded = (np.clip(np.rint(x / step) + zero, 0, 255) - zero) * wide(step)
    np.testing.assert_allclose(numbers_of(case), rounded @ weights + constants["bias"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", ["", "lengths", "places"])
def test_attention(mask: str, causal: int) -> None:
    rng, size, heads = np.random.default_rng(4), 32, 4
    feeds = {"x": extremes(rng, (2, 5, size), "uint8")}
    lengths = np.array([3, 5], "int32")
    seen = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], "int32")
    if mask:
        feeds["m"] = lengths if mask == "lengths" else seen
    constants = {"w": extremes(rng, (size, 3 * size), "int8"), "bias": rng.standard_normal(3 * size).astype("float32"),
                 "xs": np.float32(0.01), "ws": np.float32(0.004), "xz": np.array(120, "uint8"),
                 "wz": np.array(3, "int8")}
    projected = _real(feeds["x"], constants["xs"], 120) @ _real(constants["w"], constants["ws"], 3) + constants["bias"]
    scores, value = _scores_and_values(projected, heads, [size] * 3)
    allowed = {"": np.ones((2, 5)), "lengths": np.arange(5) < lengths[:, None], "places": seen}[mask]
    scores = scores + np.where(allowed, 0, -10000.0)[:, None, None]
    if causal:
        scores = np.where(np.tri(5), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = (weights / weights.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3).reshape(2, 5, size)
    case = Case("QAttention", f"x w bias xs ws {'m' if mask else '-'} xz wz", feeds, constants, ("float32", 3),
                lambda: wanted, {"num_heads": heads, "unidirectional": causal})
    np.testing.assert_allclose(numbers_of(case), wanted, rtol=1e-4, atol=1e-4)


def _scores_and_values(projected: np.ndarray, heads: int, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    batch, length = projected.shape[:2]
    query, key, value = (part.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
                         for part in np.split(projected, np.cumsum(sizes)[:2], axis=2))
    return query @ key.swapaxes(2, 3) / np.sqrt(sizes[0] // heads), value


@pytest.mark.parametrize("mask", ["", "lengths", "places", "pairs"])
def test_attention_in_float32(mask: str) -> None:
    """With values of another size than the keys and something that is added to the scores."""
    rng, heads, sizes = np.random.default_rng(10), 4, [16, 16, 24]
    masks = {"lengths": np.array([3, 5], "int32"), "places": np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], "int32"),
             "pairs": np.tril(np.ones((2, 5, 5), "int32"))}
    feeds = {"x": rng.standard_normal((2, 5, 12)).astype("float32")} | ({"m": masks[mask]} if mask else {})
    constants = {"w": rng.standard_normal((12, 56)).astype("float32"), "b": rng.standard_normal(56).astype("float32"),
                 "added": rng.standard_normal((2, heads, 5, 5)).astype("float32")}
    scores, value = _scores_and_values(wide(feeds["x"]) @ constants["w"] + constants["b"], heads, sizes)
    seen = {"": np.ones((1, 1, 1, 1)), "lengths": (np.arange(5) < masks["lengths"][:, None])[:, None, None],
            "places": masks["places"][:, None, None], "pairs": masks["pairs"][:, None]}[mask]
    weights = np.exp(scores + constants["added"] + np.where(seen, 0, -10000.0))
    wanted = (weights / weights.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3).reshape(2, 5, -1)
    case = Case("Attention", f"x w b {'m' if mask else '-'} - added", feeds, constants, ("float32", 3), lambda: wanted,
                {"num_heads": heads, "qkv_hidden_sizes": sizes})
    np.testing.assert_allclose(numbers_of(case), wanted, rtol=1e-4, atol=1e-4)


def _normalised(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray | float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred ** 2).mean(-1, keepdims=True) + 1e-5) * gamma + beta


@pytest.mark.parametrize("inputs", ["x y g", "x y g b", "x y g b c", "x y g - c"])
@pytest.mark.parametrize("opset", [15, 17])
def test_skip_layer_normalisation(inputs: str, opset: int) -> None:
    rng = np.random.default_rng(11)
    feeds = {name: rng.standard_normal((2, 3, 16)).astype("float32") for name in "xy"}
    weights = {name: rng.standard_normal(16).astype("float32") for name in "gbc"}
    node = helper.make_node("SkipLayerNormalization", ["" if name == "-" else name for name in inputs.split()],
                            ["n", "", "", "t"], domain=MICROSOFT, epsilon=1e-5)
    constants = {name: array for name, array in weights.items() if name in inputs}
    model = model_of([node], feeds, constants, {"n": ("float32", 3), "t": ("float32", 3)}, opset=opset)
    total = wide(feeds["x"]) + feeds["y"] + (weights["c"] if "c" in inputs else 0)
    wanted = [_normalised(total, weights["g"], weights["b"] if "b" in inputs else 0), total]
    for numbers in (imported_numbers(model, feeds), onnxruntime_numbers(model, feeds)):
        for found, each in zip(numbers, wanted, strict=True):
            np.testing.assert_allclose(found, each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_embeddings(quantised: bool, segments: bool) -> None:
    """The tables in float32, or bytes with a scale and a zero point each."""
    rng, size = np.random.default_rng(12), 8
    feeds = {"i": rng.integers(0, 20, (2, 5)).astype("int32"), "m": np.tri(2, 5, 2, dtype="int32")}
    feeds |= {"j": rng.integers(0, 2, (2, 5)).astype("int32")} if segments else {}
    shapes = {"word": (20, size), "pos": (9, size), "seg": (2, size), "gamma": (size,), "beta": (size,)}
    names = [name for name in shapes if segments or name != "seg"]
    tables = {name: extremes(rng, shapes[name], "uint8") if quantised
              else rng.standard_normal(shapes[name]).astype("float32") for name in names}
    constants, real = dict(tables), tables
    listed = [name if name in names else "" for name in shapes]
    inputs = ["i", "j" if segments else "", *listed, "m"]
    if quantised:
        scales = {f"{name}_s": np.float32(0.01 * (k + 1)) for k, name in enumerate(names)}
        zeros = {f"{name}_z": np.array(40 * k, "uint8") for k, name in enumerate(names)}
        constants |= {**scales, **zeros}
        real = {name: _real(tables[name], scales[f"{name}_s"], zeros[f"{name}_z"]) for name in names}
        inputs += [f"{name}_{kind}" if name else "" for kind in "sz" for name in listed]
    operator = "QEmbedLayerNormalization" if quantised else "EmbedLayerNormalization"
    node = helper.make_node(operator, inputs, ["n", "l"], domain=MICROSOFT, epsilon=1e-5)
    model = model_of([node], feeds, constants, {"n": ("float32", 3), "l": ("int32", 1)}, opset=17)
    total = wide(real["word"])[feeds["i"]] + real["pos"][:5] + (real["seg"][feeds["j"]] if segments else 0)
    wanted = [_normalised(total, real["gamma"], real["beta"]), feeds["m"].sum(1)]
    for numbers in (imported_numbers(model, feeds), onnxruntime_numbers(model, feeds)):
        for found, each in zip(numbers, wanted, strict=True):
            np.testing.assert_allclose(found, each, rtol=1e-4, atol=1e-4)


_X = np.random.default_rng(5).standard_normal((2, 3, 4, 5)).astype("float32")
_W = np.random.default_rng(6).standard_normal((6, 3, 1, 1)).astype("float32")
_BIAS = _W[:, 0, 0, 0].copy()

_FLOATS: dict[str, tuple[str, str, Arrays, Callable[[], np.ndarray], dict[str, Any]]] = {
    "transposed": ("FusedMatMul", "x v", {"v": _X[:, :, :, :4].copy()},
                   lambda: 0.5 * _X.swapaxes(2, 3) @ _X[:, :, :, :4].swapaxes(2, 3),
                   {"transA": 1, "transB": 1, "alpha": 0.5}),
    "batches moved": ("FusedMatMul", "x v", {"v": _X.copy()},
                      lambda: _X.transpose(1, 2, 0, 3) @ _X.transpose(1, 2, 0, 3).swapaxes(2, 3),
                      {"transBatchA": 1, "transBatchB": 1, "transB": 1}),
    "conv relu": ("FusedConv", "x w b", {"w": _W, "b": _BIAS},
                  lambda: np.maximum(np.einsum("nchw,oc->nohw", _X, _W[:, :, 0, 0]) + _BIAS.reshape(-1, 1, 1), 0),
                  {"activation": "Relu"}),
    "conv clip": ("FusedConv", "x w", {"w": _W},
                  lambda: np.clip(np.einsum("nchw,oc->nohw", _X, _W[:, :, 0, 0]), -0.5, 1),
                  {"activation": "Clip", "activation_params": [-0.5, 1.0]}),
    "gelu": ("Gelu", "x", {}, lambda: _X * (1 + scipy.special.erf(_X / np.sqrt(2))) / 2, {}),
    "bias gelu": ("BiasGelu", "x u", {"u": _X[0, 0, 0].copy()}, lambda: (
        (_X + _X[0, 0, 0]) * (1 + scipy.special.erf((_X + _X[0, 0, 0]) / np.sqrt(2))) / 2), {}),
    "fast gelu": ("FastGelu", "x", {},
                  lambda: _X * (1 + np.tanh(np.sqrt(2 / np.pi) * (_X + 0.044715 * _X ** 3))) / 2, {}),
    "quick gelu": ("QuickGelu", "x", {}, lambda: _X / (1 + np.exp(-1.5 * _X)), {"alpha": 1.5}),
}


@pytest.mark.parametrize("name", list(_FLOATS))
def test_what_the_optimiser_writes(name: str) -> None:
    operator, inputs, constants, wanted, attributes = _FLOATS[name]
    case = Case(operator, inputs, {"x": _X}, constants, ("float32", 4), wanted, attributes)
    np.testing.assert_allclose(numbers_of(case), wanted(), rtol=1e-5, atol=1e-5)


def test_gemm_with_an_activation() -> None:
    rng = np.random.default_rng(7)
    x, w, b = (rng.standard_normal(shape).astype("float32") for shape in ((3, 8), (6, 8), (6,)))
    product = 0.5 * x @ w.T + 2 * b
    case = Case("FusedGemm", "x w b", {"x": x}, {"w": w, "b": b}, ("float32", 2),
                lambda: np.where(product < 0, 0.2 * product, product),
                {"activation": "LeakyRelu", "activation_alpha": 0.2, "alpha": 0.5, "beta": 2.0, "transB": 1})
    np.testing.assert_allclose(numbers_of(case), case.wanted(), rtol=1e-5, atol=1e-5)


def test_16_bits_before_opset_21() -> None:
    """As onnxruntime's quantiser writes them, under its own domain."""
    rng = np.random.default_rng(8)
    x = (rng.standard_normal((3, 40)) * 100).astype("float32")
    constants = {"s": np.float32(0.01), "z": np.array(30000, "uint16")}
    case = Case("QuantizeLinear", "x s z", {"x": x}, constants, ("uint16", 2), lambda: x, {})
    quantised = numbers_of(case)
    np.testing.assert_array_equal(quantised, np.clip(np.rint(x / np.float32(0.01)) + 30000, 0, 65535))
    feeds = {"q": quantised.astype("uint16")}
    back = Case("DequantizeLinear", "q s z", feeds, constants, ("float32", 2), lambda: x, {})
    np.testing.assert_allclose(numbers_of(back), _real(quantised, constants["s"], 30000), rtol=1e-6)


def test_a_chain_whose_shapes_follow_one_another() -> None:
    """``FusedMatMul`` must know the rank of what another of these operators gives; compiled."""
    rng = np.random.default_rng(9)
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((2, 3, 4), (4, 5)))
    nodes = [helper.make_node("FusedMatMul", ["x", "w"], ["a"], domain=MICROSOFT, transA=0),
             helper.make_node("QuickGelu", ["a"], ["g"], domain=MICROSOFT),
             helper.make_node("FusedMatMul", ["g", "x"], ["y"], domain=MICROSOFT, transA=1)]
    model = model_of(nodes, {"x": x}, {"w": w}, {"y": ("float32", 3)}, opset=17)
    product = wide(x) @ w
    wanted = (product / (1 + np.exp(-1.702 * product))).swapaxes(1, 2) @ x
    np.testing.assert_allclose(mlc.compile(model, log=False)(x)[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", ["DynamicQuantizeGRU", "QLinearBinary"])
def test_others_are_refused(operator: str) -> None:
    x = np.ones((2, 3), "float32")
    model = model_of([helper.make_node(operator, ["x"], ["y"], domain=MICROSOFT)], {"x": x}, {}, {"y": ("float32", 2)})
    with pytest.raises(UnsupportedOperators, match=f"com.microsoft.{operator}") as caught:
        load_model(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("operator", "inputs", "attributes", "message"), [
    ("QLinearGlobalAveragePool", "x s z s z", {"channels_last": 1}, "channels_last must be 0"),
    ("QLinearConcat", "s z x s", {"axis": 1}, "threes of a tensor, a scale and a zero point, got 2"),
    ("QLinearAdd", "x bad z x s z s z", {}, "scale must be finite and positive, got 0"),
    ("MatMulIntegerToFloat", "x w s bad", {}, "scale must be finite and positive, got 0; quantise the model again"),
    ("MatMulIntegerToFloat", "x w nan s", {}, "scale must be finite and positive, got nan; quantise"),
    ("DynamicQuantizeMatMul", "f w inf", {}, "scale must be finite and positive, got inf; quantise"),
    ("QAttention", "x w f bad s", {"num_heads": 1}, "scale must be finite and positive, got 0; quantise"),
    ("FusedConv", "f w", {"activation": "Mish"}, "its activation must be one of .*, got Mish"),
    ("QAttention", "x w f s s - z z p", {"num_heads": 2}, "without past and present keys"),
    ("Attention", "f w", {}, "its inputs and attributes must be those of the operator"),
    ("Attention", "f w", {"num_heads": 4}, r"must be those of query, key and value for 4 heads, got \[0, 0, 0\]"),
])
def test_forms_that_are_refused(operator: str, inputs: str, attributes: dict[str, Any], message: str) -> None:
    feeds = {"x": np.zeros((1, 2, 4, 4), "uint8"), "f": np.zeros((1, 2, 4, 4), "float32")}
    constants = {"s": np.float32(1), "z": np.array(0, "uint8"), "bad": np.float32(0), "w": _W[:, :2].copy(),
                 "p": np.float32(0), "nan": np.float32("nan"), "inf": np.float32("inf")}
    names = inputs.split()
    node = helper.make_node(operator, ["" if name == "-" else name for name in names], ["y"], domain=MICROSOFT,
                            **attributes)
    used = ({k: v for k, v in group.items() if k in names} for group in (feeds, constants))
    with pytest.raises(ModelError, match=message) as caught:
        load_model(model_of([node], *used, {"y": ("float32" if "f" in names else "uint8", 4)}, opset=17))
    assert "\n" not in str(caught.value)
