"""Language models that generate: every step against onnxruntime with an explicit past, and against eager PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.errors import InputError, MlcError, ModelError, UsageError

CAPACITY, VOCABULARY, WIDTH, HEADS, GROUPS, SIZE = 48, 61, 64, 4, 2, 16
MICROSOFT, BLOCK = "com.microsoft", 32


class Decoder:
    """A layer of a decoder with grouped heads as an ONNX model, its sizes computed as exporters do."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def constant(self, values: object) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def weight(self, *shape: int) -> str:
        return self.constant((self.rng.standard_normal(shape) * 1.5 / np.sqrt(shape[0])).astype(np.float32))

    def add(self, operator: str, *inputs: str, out: str = "", **attributes: object) -> str:
        name = out or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def product(self, x: str, depth: int, columns: int, out: str = "") -> str:
        return self.add("MatMul", x, self.weight(depth, columns), out=out)

    def normalised(self, x: str) -> str:
        return x

    def size(self, value: str, axis: int) -> str:
        return self.add("Gather", self.add("Shape", value), self.constant(np.array(axis, np.int64)), axis=0)

    def heads(self, x: str, count: int) -> str:
        split = self.add("Reshape", self.product(x, WIDTH, count * SIZE),
                         self.constant(np.array([0, 0, count, SIZE], np.int64)))
        return self.add("Transpose", split, perm=[0, 2, 1, 3])

    def repeated(self, x: str) -> str:
        """(batch, groups, tokens, size) --> each group as often as it has heads."""
        many = self.constant(np.array([HEADS // GROUPS], np.int64))
        shape = self.add("Concat", self.add("Unsqueeze", self.size(x, 0), self.constant(np.array([0], np.int64))),
                         self.constant(np.array([GROUPS], np.int64)), many,
                         self.add("Unsqueeze", self.size(x, 2), self.constant(np.array([0], np.int64))),
                         self.constant(np.array([SIZE], np.int64)), axis=0)
        wide = self.add("Expand", self.add("Unsqueeze", x, self.constant(np.array([2], np.int64))), shape)
        return self.add("Reshape", wide, self.constant(np.array([0, HEADS, -1, SIZE], np.int64)))

    def model(self) -> onnx.ModelProto:
        table = self.weight(VOCABULARY, WIDTH)
        x = self.add("Add", self.add("Gather", table, "input_ids"),
                     self.add("Gather", self.weight(CAPACITY, WIDTH), "position_ids"))
        query, key, value = self.heads(x, HEADS), self.heads(x, GROUPS), self.heads(x, GROUPS)
        keys = self.add("Concat", "past_key_values.0.key", key, out="present.0.key", axis=2)
        values = self.add("Concat", "past_key_values.0.value", value, out="present.0.value", axis=2)
        past, total = self.size("past_key_values.0.key", 2), self.size(keys, 2)
        zero, one = (self.constant(np.array(n, np.int64)) for n in (0, 1))
        column = self.add("Unsqueeze", self.add("Range", past, total, one), self.constant(np.array([1], np.int64)))
        causal = self.add("LessOrEqual", self.add("Range", zero, total, one), column)
        given = self.add("Unsqueeze", self.add("Cast", "attention_mask", to=TensorProto.BOOL),
                         self.constant(np.array([1, 2], np.int64)))
        hidden = self.add("Where", self.add("And", causal, given), self.constant(np.array(0, np.float32)),
                          self.constant(np.array(-1e30, np.float32)))
        scores = self.add("MatMul", query, self.add("Transpose", self.repeated(keys), perm=[0, 1, 3, 2]))
        scores = self.add("Add", self.add("Mul", scores, self.constant(np.array(SIZE ** -0.5, np.float32))), hidden)
        mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), self.repeated(values))
        joined = self.add("Reshape", self.add("Transpose", mixed, perm=[0, 2, 1, 3]),
                          self.constant(np.array([0, 0, WIDTH], np.int64)))
        x = self.add("Add", x, self.product(joined, WIDTH, WIDTH))
        self.product(self.normalised(x), WIDTH, VOCABULARY, out="logits")
        cache = ["batch", GROUPS, "past_sequence_length", SIZE]
        grown = ["batch", GROUPS, "total_sequence_length", SIZE]
        whole = TensorProto.INT64
        inputs = [helper.make_tensor_value_info("input_ids", whole, ["batch", "sequence_length"]),
                  helper.make_tensor_value_info("attention_mask", whole, ["batch", "total_sequence_length"]),
                  helper.make_tensor_value_info("position_ids", whole, ["batch", "sequence_length"])]
        sides = ("0.key", "0.value")
        inputs += [helper.make_tensor_value_info(f"past_key_values.{s}", TensorProto.FLOAT, cache) for s in sides]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence_length", VOCABULARY])]
        outputs += [helper.make_tensor_value_info(f"present.{s}", TensorProto.FLOAT, grown) for s in sides]
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


class WeightOnly(Decoder):
    """The same with weights of few bits and LLaMA's norm before the logits."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def product(self, x: str, depth: int, columns: int, out: str = "") -> str:
        integers = self.rng.integers(0, 256, (columns, depth // BLOCK, BLOCK * self.bits // 8)).astype(np.uint8)
        scale = self.rng.uniform(0.5, 1.5, (columns, depth // BLOCK)) * 4 / (1 << self.bits) / np.sqrt(depth)
        return self.add("MatMulNBits", x, self.constant(integers), self.constant(scale.astype(np.float32)), out=out,
                        domain=MICROSOFT, K=depth, N=columns, bits=self.bits, block_size=BLOCK)

    def normalised(self, x: str) -> str:
        gain = self.constant(self.rng.uniform(0.5, 1.5, WIDTH).astype(np.float32))
        return self.add("SimplifiedLayerNormalization", x, gain, axis=-1, epsilon=1e-5)


class Reference:
    """onnxruntime with the past that it gave back, copied in and out."""

    def __init__(self, model: onnx.ModelProto, batch: int) -> None:
        self._session = onnxruntime.InferenceSession(model.SerializeToString())
        self._past = {name: np.zeros((batch, GROUPS, 0, SIZE), np.float32)
                      for name in ("past_key_values.0.key", "past_key_values.0.value")}
        self._mask = np.ones((batch, 0), np.int64)

    def logits(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        self._mask = np.concatenate([self._mask, np.ones_like(ids) if mask is None else mask], axis=1)
        positions = np.maximum(self._mask.cumsum(-1) - 1, 0)[:, -ids.shape[1]:]
        found, *present = self._session.run(None, {"input_ids": ids, "attention_mask": self._mask,
                                                   "position_ids": positions, **self._past})
        self._past = dict(zip(self._past, present, strict=True))
        return found


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return Decoder().model()


@pytest.fixture(scope="module")
def generator(model) -> mlc.Generator:
    return mlc.Generator(model, capacity=CAPACITY, batch=2, log=False)


@pytest.mark.parametrize("lengths", [[5, 1, 1, 1], [1, 1, 1], [17, 3, 1, 20, 1], [CAPACITY - 1, 1], [CAPACITY]],
                         ids=str)
def test_every_step_is_that_of_onnxruntime_with_an_explicit_past(model, generator, lengths):
    rng, reference = np.random.default_rng(len(lengths)), Reference(model, 2)
    generator.reset()
    for length in lengths:
        ids = rng.integers(0, VOCABULARY, (2, length))
        np.testing.assert_allclose(generator.logits(ids), reference.logits(ids), rtol=1e-4, atol=1e-4)
    assert generator.length == sum(lengths)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_weights_stay_integers(bits):
    """One artifact with the integers of the file serves prompts and single tokens."""
    model = WeightOnly(bits).model()
    generator, reference = mlc.Generator(model, capacity=CAPACITY, log=False), Reference(model, 1)
    functions = generator.executable.metadata["functions"]
    products = [entry for entry in functions if entry["space"] in ("cpu.gemm_weight_only", "cpu.gemm_digits")]
    assert sum(entry["calls"] for entry in products) == 5
    rng = np.random.default_rng(bits)
    for length in (7, 1, 1, 20, 2, 1):
        ids = rng.integers(0, VOCABULARY, (1, length))
        np.testing.assert_allclose(generator.logits(ids), reference.logits(ids), rtol=1e-4, atol=1e-4)


def test_sequences_of_different_lengths_are_padded_on_the_left(model, generator):
    rng, reference = np.random.default_rng(7), Reference(model, 2)
    long, short = (rng.integers(0, VOCABULARY, n) for n in (9, 4))
    ids, mask = np.stack([long, np.concatenate([np.zeros(5, np.int64), short])]), np.ones((2, 9), np.int64)
    mask[1, :5] = 0
    wanted, found = [], list(generator([long, short], 6))
    logits = reference.logits(ids, mask)
    for _ in range(6):
        wanted.append(logits[:, -1].argmax(-1))
        logits = reference.logits(wanted[-1][:, None])
    np.testing.assert_array_equal(found, wanted)


def test_the_state_is_written_in_place_and_nothing_behind_it_is_touched(generator):
    generator.reset()
    rows = generator._rows["past_key_values.0.key"]
    place = rows.ctypes.data
    rows[...] = 7.0
    generator.logits(np.ones((2, 3), np.int64))
    before = rows[:3].copy()
    assert not (before == 7.0).any() and (rows[3:] == 7.0).all()
    generator.logits(np.ones((2, 1), np.int64))
    np.testing.assert_array_equal(rows[:3], before)
    assert not (rows[3] == 7.0).any() and (rows[4:] == 7.0).all()
    assert generator._rows["past_key_values.0.key"].ctypes.data == place


def test_a_prompt_starts_anew_or_goes_on(generator):
    first = [list(map(int, row)) for row in np.random.default_rng(3).integers(0, VOCABULARY, (2, 6))]
    once = np.array(list(generator(first, 5)))
    np.testing.assert_array_equal(list(generator(first, 5)), once)
    assert generator.length == 10  # the last token is not in the state
    whole = np.concatenate([first, once.T, [[1], [2]]], axis=1)
    on = list(generator(np.concatenate([once[-1][:, None], [[1], [2]]], axis=1), 4, resume=True))
    np.testing.assert_array_equal(on, list(generator(whole, 4)))


def test_stop_tokens_end_each_sequence(generator):
    prompt = [[3, 5], [8, 2]]
    free = np.array(list(generator(prompt, 8)))
    stop = int(free[2, 0])
    found = np.array(list(generator(prompt, 8, stop=stop)))
    ends = [int(np.argmax(free[:, i] == stop)) if stop in free[:, i] else 7 for i in (0, 1)]
    assert len(found) == max(ends) + 1
    for i, end in enumerate(ends):
        np.testing.assert_array_equal(found[:end + 1, i], free[:end + 1, i])
        assert (found[end:, i] == found[end, i]).all()


def test_what_was_saved_generates_alike(generator, tmp_path):
    prompt = [[3, 5, 9], [8, 2, 1]]
    generator.save(tmp_path / "decoder.so")
    again = mlc.Generator(tmp_path / "decoder.so")
    assert (again.capacity, again.batch, again.vocabulary) == (CAPACITY, 2, VOCABULARY)
    np.testing.assert_array_equal(list(again(prompt, 5)), list(generator(prompt, 5)))
    with pytest.raises(UsageError, match=r"what it was compiled for, 48, got 64"):
        mlc.Generator(tmp_path / "decoder.so", capacity=64)


def test_a_sampler_chooses(generator):
    seen: list[np.ndarray] = []

    def least(logits: np.ndarray) -> np.ndarray:
        seen.append(logits)
        return logits.argmin(-1)

    found = list(generator([[1, 2], [3, 4]], 3, least))
    assert [each.shape for each in seen] == [(2, VOCABULARY)] * 3
    np.testing.assert_array_equal(found, [each.argmin(-1) for each in seen])
    drawn = [list(map(list, generator([[1], [1]], 6, mlc.Sampler(0.8, 20, 0.9, seed=s)))) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_sampler_draws_by_temperature_and_among_the_likeliest():
    logits = np.log(np.tile(np.array([[0.1, 0.5, 0.15, 0.25]]), (20000, 1)))
    shares = np.bincount(mlc.Sampler()(logits), minlength=4) / 20000
    np.testing.assert_allclose(shares, [0.1, 0.5, 0.15, 0.25], atol=0.02)
    two = np.bincount(mlc.Sampler(top_k=2)(logits), minlength=4) / 20000
    np.testing.assert_allclose(two, [0, 2 / 3, 0, 1 / 3], atol=0.02)
    most = np.bincount(mlc.Sampler(top_p=0.76)(logits), minlength=4) / 20000
    np.testing.assert_allclose(most, [0, 0.5 / 0.9, 0.15 / 0.9, 0.25 / 0.9], atol=0.02)
    assert set(mlc.Sampler(temperature=0.01)(logits)) == {1}


@pytest.mark.parametrize(("prompt", "options", "said"), [
    ([[1] * 49] * 2, {}, "must fit into the capacity of 48 tokens, got 49"),
    ([[1] * 40] * 2, {"max_new_tokens": 10}, "ask for at most 9"),
    ([[1, VOCABULARY], [1, 2]], {}, f"from 0 to {VOCABULARY - 1}, got {VOCABULARY}"),
    ([[1, -1], [1, 2]], {}, "got -1"),
    ([[1.5], [2.0]], {}, "must be whole numbers, got float64"),
    ([[], []], {}, "one token id or more"),
    ([1, 2, 3], {}, "must have 2 sequences, got 1"),
    (7, {}, "got int"),
    ([[1], [2]], {"max_new_tokens": -1}, "got -1"),
])
def test_prompts_that_do_not_fit_are_refused_in_one_line(generator, prompt, options, said):
    with pytest.raises(InputError) as caught:
        generator(prompt, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_models_without_a_past_and_bad_settings_are_refused(model, tmp_path):
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    del plain.graph.output[1:]
    with pytest.raises(ModelError, match="has no such input"):
        mlc.Generator(plain, capacity=8, log=False)
    path = tmp_path / "decoder.onnx"
    onnx.save(model, path)
    with pytest.raises(UsageError, match="capacity=1024"):
        mlc.Generator(path, log=False)
    for options in ({"capacity": 0}, {"capacity": 8, "batch": 0}, {"capacity": True}):
        with pytest.raises(UsageError, match="at least 1"):
            mlc.Generator(model, log=False, **options)
    with pytest.raises(UsageError, match="temperature > 0"):
        mlc.Sampler(temperature=0)
    with pytest.raises(MlcError, match="token ids, a mask"):
        renamed = onnx.ModelProto()
        renamed.CopyFrom(model)
        renamed.graph.input.append(helper.make_tensor_value_info("extra", TensorProto.FLOAT, [1]))
        mlc.Generator(renamed, capacity=8, log=False)
