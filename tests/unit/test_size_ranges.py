"""How sizes and ranges are written, and what is said of those that make no sense."""

from __future__ import annotations

import pytest

from mlc.errors import UsageError
from mlc.frontend.model import merge_shapes
from mlc.shapes import Free, Range, from_json, parse_shape, parse_shapes, to_json, usual


def refused(action, *args) -> str:
    with pytest.raises(UsageError) as caught:
        action(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_spellings_of_a_shape_are_one():
    wanted = (Range(1, 32), Range(3, 3), Range(224, 224))
    for shape in ("1..32,3,224", ((1, 32), 3, 224), ("1..32", "3", Range(224, 224))):
        assert parse_shape(shape) == wanted
    assert parse_shapes(["x=1..32,3,224", "a=b=7"]) == {"x": wanted, "a=b": (Range(7, 7),)}
    assert parse_shape("") == ()


@pytest.mark.parametrize("text", ["32..1", "0..4", "-1..4", "0", "-3", "1..4294967296"])
def test_ranges_turned_round_zero_and_negative_are_refused(text):
    low, _, high = text.partition("..")
    assert f"got {low}..{high or low}" in refused(parse_shape, f"2,{text}")


@pytest.mark.parametrize("shape", ["1..", "a", "1...3", "1,,2", (1.5,), (True,), ((1, 2, 3),), (None,)])
def test_what_is_no_size_is_refused(shape):
    assert "size" in refused(parse_shape, shape)


def test_sizes_beyond_what_code_counts_are_refused():
    with pytest.raises(UsageError, match=r"1 <= LOW <= HIGH <= 2147483647, got 1\.\.4096000000"):
        Range.of("1..4096000000")


@pytest.mark.parametrize(("words", "said"), [(["1,2"], "NAME="), (["=1"], "NAME="), (["x=1", "x=2"], "twice")])
def test_words_of_a_command_line_that_make_no_sense_are_refused(words, said):
    assert said in refused(parse_shapes, words)


def test_decisions_are_taken_for_the_geometric_middle():
    assert [Range(*ends).middle for ends in ((1, 32), (1, 2048), (5, 7), (9, 9), (100, 120))] == [8, 64, 5, 9, 109]


def test_equal_symbols_are_one_size_and_others_have_the_default_range():
    own = {"x": ("batch", 3, None), "y": ("batch", "seq.len")}
    merged = merge_shapes(own, {"x": parse_shape("2..4,3,5..9")})
    batch = Free("batch", Range(2, 4), 4)
    assert merged["x"] == (batch, 3, Free("x_2", Range(5, 9), 8))
    assert merged["y"] == (batch, Free("seq_len", Range(1, 512), 32))
    assert merge_shapes(own, {"x": parse_shape("2,3,5")})["y"][0] == 2  # a range of one is a number


def test_shapes_that_contradict_each_other_or_the_model_are_refused():
    own = {"x": ("batch", 3), "y": ("batch", "seq")}
    both = {"x": parse_shape("1..4,3"), "y": parse_shape("1..8,16")}
    assert "batch is one size" in refused(merge_shapes, own, both)
    assert "must fit the model's (batch, 3), got (1..4, 4)" in refused(merge_shapes, own, {"x": parse_shape("1..4,4")})
    assert "got (1..4, 1..3)" in refused(merge_shapes, own, {"x": parse_shape("1..4,1..3")})


def test_free_sizes_survive_json():
    shape = (Free("batch", Range(1, 8), 4), 3)
    assert from_json(to_json(shape)) == shape
    assert usual(shape) == (4, 3)
    assert usual(shape, {"batch": 7}) == (7, 3)
