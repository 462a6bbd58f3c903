"""Files of rules that ask for too much, or say nothing that can be read: one line, or undecided, soon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlc.cli.main import main
from mlc.substitution.codec import graph_text, load_rule, parse_fraction, parse_size


def _rule(**changes: Any) -> dict[str, Any]:
    side = {"nodes": [{"op": "relu", "inputs": ["x"]}], "outputs": ["%0"]}
    return {"name": "r", "inputs": {"x": ["n", "m"]}, "source": side, "target": side, **changes}


def _verify(path: Path, text: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    path.write_text(text)
    code = main(["rules", "verify", str(path), *words])
    seen = capsys.readouterr()
    assert seen.err.count("\n") <= 1
    return code, seen.err or seen.out


@pytest.mark.parametrize(("text", "says"), [
    (json.dumps(_rule(inputs={"x": ["*".join(["(a+b+c+d+e)"] * 30)]})), "at most 200 terms"),
    (json.dumps(_rule(inputs={"x": ["n" + "//2" * 1000]})), "at most 1000 letters"),
    (json.dumps(_rule(inputs={"x": ["*".join(["n"] * 400)]})), "at most 16 factors"),
    (json.dumps(_rule(inputs={"x": ["9" * 900]})), "18 digits"),
    (json.dumps(_rule(inputs={"x": ["n"] * 99})), "at most 16 dimensions"),
    (json.dumps(_rule(conditions=[7])), "a condition is a text"),
    (json.dumps(_rule(source={"nodes": [{"op": "relu", "inputs": ["x"]}] * 99, "outputs": ["x"]})), "at most 64 nodes"),
    (json.dumps(_rule()).replace('"name"', '"name": "s", "name"'), "has a key twice"),
    (json.dumps(_rule(inputs={"x": [1]})).replace("[1]", "[" + "1" * 5000 + "]"), "must be JSON"),
    ("[" * 100_000, "must be JSON"),
    (json.dumps(_rule(source={"nodes": [{"op": "relu", "inputs": ["x"], "attributes": {"a": {"fraction":
                      "1e999999999"}}}], "outputs": ["%0"]})), "a fraction is two integers"),
])  # fmt: skip
def test_a_rule_that_is_too_large_is_refused(text, says, tmp_path, capsys) -> None:
    code, line = _verify(tmp_path / "r.json", text, capsys)
    assert code == 1 and says in line and line.startswith("mlc: error: ")


def test_a_proof_that_takes_too_long_is_undecided(tmp_path, capsys) -> None:
    nodes = [{"op": "mul", "inputs": ["x", "x"] if not i else [f"%{i - 1}"] * 2} for i in range(40)]
    side = {"nodes": nodes, "outputs": ["%39"]}
    code, text = _verify(tmp_path / "r.json", json.dumps(_rule(source=side, target=side)), capsys, "--seconds", "0.5",
                         "--json")
    (found,) = json.loads(text)["rules"]
    assert code == 1 and found["status"] == "undecided" and found["reason"] == "it took longer than 0.5 s"


def test_names_of_rules_do_not_command_the_terminal(tmp_path, capsys) -> None:
    code, text = _verify(tmp_path / "r.json", json.dumps(_rule(name="[red]\x1b[31m")), capsys)
    assert code == 0 and "[red]\\x1b[31m  proved" in text and "\x1b" not in text


def test_a_graph_that_doubles_is_shown_with_names() -> None:
    nodes = [{"op": "add", "inputs": ["x", "x"] if not i else [f"%{i - 1}"] * 2} for i in range(40)]
    side = {"nodes": nodes, "outputs": ["%39"]}
    text = graph_text(load_rule(_rule(source=side, target=side)).source)
    assert text.startswith("%0 = add(x, x); %1 = add(%0, %0); ") and text.endswith("%39 = add(%38, %38); %39")


def test_numbers_that_are_read() -> None:
    assert parse_fraction("-3/4") * 4 == -3 and parse_fraction(7) == 7
    assert str(parse_size("(n+1)*(n-1)")) == "-1+n*n"
    for text in ("1e9", "1/0/2", "0x1", 1.5, None, "1" * 19):
        with pytest.raises(ValueError, match="a fraction is"):
            parse_fraction(text)
