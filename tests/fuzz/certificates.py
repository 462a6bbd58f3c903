"""Forged certificates, none of which may be accepted: ``python -m tests.fuzz.certificates --count 1000 --seed 0``.

Each stands for a rule that evaluation shows to be wrong. Some were made for a right rule that the wrong one was, some
are built to deceive: by quotients of variables that may be 0, by guards that a step takes away, by terms that cancel
where they are not defined, by sizes that are none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from random import Random
from typing import Any

from mlc.errors import MlcError
from mlc.substitution.check import CertificateError, check
from mlc.substitution.codec import RuleError, content_hash, dump_rule, load_rule
from mlc.substitution.prove import Proved, Refuted, prove
from mlc.substitution.refute import find_counterexample
from mlc.substitution.shipped import shipped_rules
from tests.fuzz import harness
from tests.fuzz.harness import Case, Outcome
from tests.unit.substitution.mutants import KINDS, PARTIAL_KINDS, mutant
from tests.unit.substitution.small_rules import BY_CASES, NEARLY

__all__ = ["STRATEGIES", "check_case", "forged", "main"]

_TRIES = 60
Data = dict[str, Any]


class NoCase(MlcError):
    """The forgery came to nothing wrong."""


@cache
def _rules() -> list[Any]:
    return [rule for rule in shipped_rules() if len(str(rule.certificate)) < 12_000]


def _signed(rule: Any, certificate: Any) -> Data:
    """The rule with the certificate, bound to it as a forger would."""
    data = dump_rule(rule)
    data["certificate"] = json.loads(json.dumps(certificate, default=dict)) | {"rule": content_hash(rule)}
    return data


def _wrong(rng: Random, kinds: Sequence[str] = tuple(KINDS)) -> tuple[Any, Any]:
    """A wrong rule and the right one that it was."""
    for _ in range(_TRIES):
        right = rng.choice(_rules())
        found = mutant(rng, [right], rng.choice(kinds))
        try:
            if found is not None and isinstance(find_counterexample(found, tries=8), Refuted):
                return found, right
        except MlcError:
            continue
    raise NoCase("no wrong rule was found")


def _of_the_right_rule(rng: Random) -> Data:
    wrong, right = _wrong(rng)
    return _signed(wrong, right.certificate)


def _partial(rng: Random) -> Data:
    """The values are equal, and proved so; that the target is defined is not."""
    wrong, right = _wrong(rng, tuple(PARTIAL_KINDS))
    data = _signed(wrong, right.certificate)
    certificate = data["certificate"]
    for place, proof in enumerate(certificate["outputs"]):
        kind = rng.randrange(4)
        if kind == 0:
            proof["defined"][""] = [["sign", 0]]
        elif kind == 1:
            proof["defined"][""] = [["cover", 0, rng.randrange(-1, 4), [], [], [[0], [[]]]]]
        elif kind == 2:
            proof["defined"] = {name: [] for name in ("", *data["inputs"])}
        certificate["whole"]["forward"] = rng.choice(([], list(data["inputs"]), [""], ["", *data["inputs"]]))
        certificate["outputs"][place] = proof
    return data


def _another(rng: Random) -> Data:
    """Of any other rule."""
    wrong, _ = _wrong(rng)
    return _signed(wrong, rng.choice(_rules()).certificate)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def _edited(change: Callable[[Random, Any], Any]) -> Callable[[Random], Data]:
    """The right rule's certificate with some places changed."""
    def make(rng: Random) -> Data:
        data = _of_the_right_rule(rng)
        kept = data["certificate"]["rule"]
        for _ in range(rng.choice((1, 2, 5))):
            where, key = rng.choice(list(_places(data["certificate"])))
            where[key] = change(rng, where[key])
        data["certificate"] |= {"rule": kept, "format": 3}
        return data

    return make


_TEXTS = ("0", "1", "-1", "@0", "@1", "$0", "$1", "$0//@0", "$0//$0", "@0//@1", "0//$0", "n", "1//0", "(@0)%(1)", "$c0",
          "@0*" * 30 + "1", "(" * 90 + "1" + ")" * 90, "9" * 18, "9" * 60)
_JSON: tuple[Any, ...] = (None, True, False, -1, 0, 1, 10**9, 10**40, 1.5, float("inf"), "", "x", [], {}, [[]], [[[]]],
                          "1e9", "1/0", "-1/2", [["1", [0]]], [["-1", [0]]], [["1", [-1]]], [["0", [0]]],
                          [["1", [["lo", "@0//1"]]]], [["1", [["pos", "@0//2", []]]]])


def _shifted(rng: Random) -> Data:
    """Numbers of terms, variables, facts and conditions that are one off: neighbours that are there as well."""
    data = _of_the_right_rule(rng)
    certificate = data["certificate"]
    found = [(where, key) for part in ("assume", "demands", "outputs", "backward") if certificate[part]
             for where, key in _places(certificate[part]) if type(where[key]) is int]
    for where, key in rng.sample(found, min(len(found), rng.choice((1, 2, 4)))):
        where[key] += rng.choice((-1, 1))
    return data


def _exchanged(rng: Random) -> Data:
    """Two parts of proofs that are of one kind stand in each other's place: witnesses, mappings, cases, atoms."""
    data = _of_the_right_rule(rng)
    places = [(where, key) for where, key in _places(data["certificate"]["outputs"]) if isinstance(where[key], list)]
    for _ in range(rng.choice((1, 2))):
        (one, i), (other, j) = rng.sample(places, 2)
        one[i], other[j] = (json.loads(json.dumps(each)) for each in (other[j], one[i]))
    return data


def _steps(change: Callable[[Random, list[Any]], None]) -> Callable[[Random], Data]:
    """The steps of one output changed as a list."""
    def make(rng: Random) -> Data:
        data = _of_the_right_rule(rng)
        proof = rng.choice(data["certificate"]["outputs"])
        change(rng, rng.choice([proof["steps"], *proof["defined"].values()]))
        return data

    return make


def _left_out(rng: Random, steps: list[Any]) -> None:
    if steps:
        steps.pop(rng.randrange(len(steps)))


def _doubled(rng: Random, steps: list[Any]) -> None:
    if steps:
        steps.insert(rng.randrange(len(steps)), rng.choice(steps))


def _added(rng: Random, steps: list[Any]) -> None:
    word = rng.choice((["drop", 0, None], ["drop", 1, []], ["split", 0, "$0", "=="], ["split", 0, "0", ">="],
                       ["guard", 0, "-1", ">=", [[]]], ["fix", 0, 0, "0", [], []], ["count", 0, 0, []],
                       ["merge", 0, 1, [], [], [], [], [0], [[]]], ["context fact", "-1", []], ["sign", 0],
                       ["cover", 0, 1, [], [], []], ["division", 0, "@0//1", "0", [], []], ["run", []], ["end"],
                       ["__init__"], ["context split", 0, "0", []]))
    steps.insert(rng.randrange(len(steps) + 1), word)


def _shuffled(rng: Random, steps: list[Any]) -> None:
    rng.shuffle(steps)


def _emptied(rng: Random) -> Data:
    data = _of_the_right_rule(rng)
    certificate = data["certificate"]
    for key in rng.sample(("assume", "demands", "outputs", "backward", "whole"), rng.randrange(1, 4)):
        certificate[key] = type(certificate[key])() if certificate[key] is not None else None
    return data


# --- built to deceive ------------------------------------------------------------------------------------------------


def _node(op: str, *inputs: str, **attributes: Any) -> Data:
    return {"op": op, "inputs": list(inputs), "attributes": attributes}


def _rule(inputs: Data, source: list[Data], target: list[Data], **more: Any) -> Any:
    sides = [{"nodes": nodes, "outputs": [f"%{len(nodes) - 1}"]} for nodes in (source, target)]
    return load_rule({"name": "forged", "inputs": inputs, "source": sides[0], "target": sides[1],
                      "conditions": [], **more})


def _honest(rule: Any) -> Data:
    """The certificate of a right rule."""
    proof = prove(rule, refute=False)
    assert isinstance(proof, Proved)
    return dict(json.loads(json.dumps(proof.certificate)))


def _product(rng: Random, target: list[Data], inner: Any = None) -> tuple[Any, Data, str]:
    """A rule about ``a @ b``, and a certificate whose sizes and demands are right for it; the inner size."""
    inner = inner or rng.choice(("k", 4, 6, 9))
    sizes = {"a": ["m", inner], "b": [inner, "n"]}
    source = [_node("matmul", "a", "b")]
    certificate = _honest(_rule(sizes, source, source))
    return _rule(sizes, source, target), certificate, str(inner)


_OTHERS = ([_node("matmul", "a", "b"), _node("neg", "%0")], [_node("matmul", "a", "b"), _node("add", "%0", "%0")],
           [_node("matmul", "a", "b"), _node("sub", "%0", "%0")])


def _zero_divisor(rng: Random) -> Data:
    """Both cases of a split by a quotient whose divisor may be 0 are dropped: of it, everything follows at 0."""
    rule, certificate, _ = _product(rng, rng.choice(_OTHERS))
    variable = rng.choice(("$0", "@0", "@1"))
    quotient = f"1//{variable}" if rng.random() < 0.5 else f"({variable}+1)//{variable}"
    lows = [[["1", [["lo", quotient]]], ["1", [["hi", quotient]]]], [["1", [["hi", quotient]], ["1", []]]]]
    steps: list[Any] = []
    for term in (0, 1, 2):
        steps += [["split", term, quotient, rng.choice(("==", ">="))], ["drop", term, rng.choice(lows)],
                  ["drop", term + 2, rng.choice(lows)], ["drop", term + 3, rng.choice(lows)]]
    certificate["outputs"][0]["steps"] = steps
    return _signed(rule, certificate)


def _eaten_guard(rng: Random) -> Data:
    """``a @ b = 2 (a @ b)``: the part where ``k // d`` is 0 becomes the whole, since resolving the quotient resolves it
    in the very guard that says so; and so does the part where it is 1."""
    d = rng.randrange(2, 8)
    rule, certificate, _ = _product(rng, _OTHERS[1], 2 * d)
    certificate["outputs"][0]["steps"] = eaten_guard_steps(d, 6)
    return _signed(rule, certificate)


def eaten_guard_steps(d: int, facts: int) -> list[Any]:
    """The steps where ``facts`` are those of sizes and context; the range of the variable comes behind them."""
    q = f"(($0) // ({d}))"
    low, high, guard = facts, facts + 1, facts + 2
    lo, hi = ["lo", q], ["hi", q]

    def merge(i: int, j: int) -> list[Any]:
        ranges = [[[["1", [low]]]], [[["1", [high]]]]]
        return ["merge", i, j, ["$0"], ["$0"], ranges, ranges, [0, 1], [[[[], []], [[], []]]] * 2]

    return [["split", 0, q, "=="],
            ["division", 0, q, "0", [["1", [lo]], [str(d), [guard]]], [["1", [hi]], [str(d), [guard + 1]]]],
            ["drop", 3, [["1", [["pos", q, [["1", [low]]]]]], ["1", [guard]]]],
            ["division", 4, q, "1", [["1", [lo]], [str(d), [guard]]], [["1", [high]]]],
            merge(0, 1), merge(4, 2)]


def _unbound_size(rng: Random) -> Data:
    """A size that nothing binds, or a negative one, as divisor or value."""
    rule, certificate, _ = _product(rng, rng.choice(_OTHERS))
    size = rng.choice(("z", "m-n", "k-1", "$9", "@9", "m//n"))
    certificate["outputs"][0]["steps"] = [["divide variable", 0, 0, size, [["1", [0]]]], ["fix", 0, 0, size, [], []],
                                          ["drop", 0, [["1", [0]]]], ["drop", 1, [["1", [0]]]]]
    return _signed(rule, certificate)


def _target_first(rng: Random) -> Data:
    """Terms of the target that are not defined everywhere cancel each other."""
    sizes = {"x": ["m", "n"]}
    function = rng.choice(("reciprocal", "log", "sqrt", "rsqrt"))
    source = [_node("relu", "x")]
    bad = [_node("relu", "x"), _node(function, "x"), _node("sub", "%1", "%1"), _node("add", "%0", "%2")]
    certificate = _honest(_rule(sizes, source, source))
    same = ["merge", 0, 1, [], [], [], [], [0], [[[[], []], [[], []]]]]
    merge = ["merge", 1, 2, [], [], [], [], [0], [[same]]]
    proof = certificate["outputs"][0]
    kept = [["merge", 0, 3, *proof["steps"][0][3:]]] if rng.random() < 0.5 else proof["steps"]
    proof["steps"] = [merge, *kept]
    proof["defined"][""] = rng.choice(([], [["sign", 0]], [["drop", 0, []]], [["cover", 0, 0, [], [], [[0], [[]]]]]))
    return _signed(_rule(sizes, source, bad), certificate)


def _member_forgotten(rng: Random) -> Data:
    """A maximum of three is one of two: of the third's values something else is said."""
    sizes = {name: ["m", "n"] for name in "abc"}
    two = _node("maximum", "a", "b")
    three = [two, _node("maximum", "%0", "c")]
    certificate = _honest(_rule(sizes, three, three))
    read = ["merge", 0, 1, [], [], [], [], [0], [[[[], []], [[], []]]]]
    true = [[0, [], [], [read]], [1, [], [], [read]]]
    fact = [["1", [rng.randrange(-2, 9)]]]
    place, steps = rng.choice((0, 1, 2, -1, True, None, "0")), rng.choice(([], [read], [["drop", 0, None]]))
    more: Any = rng.choice(([place, [], [], steps], ["none", rng.choice(([], fact))], None))
    for _ in range(rng.randrange(3)):
        text = rng.choice(("@0", "m", "0", "-1", "@0-1", "@1//m", "$0"))
        more = ["split", text, rng.choice((">=", "==")), [rng.choice((more, ["none", fact]))
                                                          for _ in range(rng.randrange(4))]]
    forth = [*true, *([] if more is None else [more])]
    certificate["outputs"][0]["steps"] = [["merge", 0, 1, [], [], [], [], [0], [[forth, true]]]]
    return _signed(_rule(sizes, three, [two]), certificate)


def _wrong_assumption(rng: Random) -> Data:
    """Two sizes that have to be equal are two, and what the certificate assumes is of other conditions or of none."""
    wrong, right = _wrong(rng, ("size",))
    data = _signed(wrong, right.certificate)
    steps = data["certificate"]["assume"]
    if steps and rng.random() < 0.7:
        rng.choice(steps)[1] = rng.randrange(-3, 6)
    elif sizes := sorted(wrong.symbols):
        steps.append(["equal", rng.randrange(-2, 3), rng.choice(sizes), rng.choice(sizes), []])
    return data


def _hidden_attribute(rng: Random) -> Data:
    """A number that is written as text says another thing than the number, to those who ask whether it is empty."""
    op = rng.choice(("sum", "max", "mean"))
    text, other = rng.choice((("0", 1), ("1-1", 1)))
    sizes = {"x": ["m", 1]}
    source = [_node(op, "x", axes=[1], keepdims=text)]
    target = [_node("add", "x", "x")]
    certificate = _honest(_rule(sizes, [_node(op, "x", axes=[1], keepdims=other)], [_node("relu", "x"), _node(
        op, "x", axes=[1], keepdims=other)]))
    return _signed(_rule(sizes, source, target), certificate)


def _divisor(rng: Random) -> Data:
    """A quotient cancels that the source does not have, or has of something else."""
    sizes = {"a": ["m", "n"], "b": ["m", "n"]}
    row = {"axes": [1], "keepdims": 1}
    source, target = rng.choice((
        ([_node("add", "a", "b")], [_node("div", "a", "a"), _node("add", "a", "b"), _node("mul", "%0", "%1")]),
        ([_node("div", "b", "b"), _node("mul", "a", "%0")], [_node("div", "a", "b")]),
        ([_node("exp", "a"), _node("div", "%0", "%0"), _node("mul", "b", "%1")],
         [_node("div", "a", "a"), _node("mul", "b", "%0")]),
        ([_node("sum", "a", **row), _node("reciprocal", "a"), _node("sum", "%1", **row), _node("mul", "%0", "%2"),
          _node("mul", "b", "%3")], [_node("sub", "a", "a"), _node("add", "b", "%0")]),
        ([_node("sum", "a", **row), _node("div", "b", "%0"), _node("mul", "a", "%1")],
         [_node("sub", "a", "a"), _node("add", "b", "%0")]),
    ))
    rule = _rule(sizes, source, target)
    certificate = _honest(_rule(sizes, source, source))
    proof = certificate["outputs"][0]
    words: list[Any] = [["unit", k, j, value, rng.choice(([], [[[]], [[]]], [[], []]))] for k in range(4)
                        for j in (0, 1, 2, -1) for value in ([], ["@0"], ["@1"], ["0"])]
    words += ([["nonzero", j, path] for j in (0, 1, -1) for path in ([0, 0], [0, 0, 0, 0], [1, 0], [0, 1], [-1, 0])]
             + [["merge", i, j, [], [], [], [], pairs, [[[[], []], [[], []]]] * len(pairs)]
                for i in range(3) for j in range(5) for pairs in ([0], [0, 1], [1, 0], [0, 1, 2])])
    steps = [rng.choice(words) for _ in range(rng.randrange(1, 6))]
    proof["steps"] = [*steps, *proof["steps"]] if rng.random() < 0.5 else steps
    if rng.random() < 0.5:
        merge = ["merge", 0, 1, [], [], [], [], [0], [[[[], []], [[], []]]]]
        proof["defined"][""] = [rng.choice((["nonzero", 0, [0, 0]], ["factors", 0], ["sign", 0],
                                            ["cover", 0, 1, [], [], [merge]])) for _ in range(2)]
    return _signed(rule, certificate)


def _not_the_largest(rng: Random) -> Data:
    """A maximum is one of its members, of which another may be above it."""
    sizes = {"a": ["m", "n"], "b": ["m", "n"]}
    row = {"axes": [1], "keepdims": 1}
    source, target = rng.choice((
        ([_node("maximum", "a", "b")], [_node("sub", "b", "b"), _node("add", "a", "%0")]),
        ([_node("max", "a", **row), _node("maximum", "a", "%0")], [_node("add", "a", "a"), _node("sub", "%0", "a")]),
        ([_node("exp", "a"), _node("maximum", "a", "%0")], [_node("add", "a", "a"), _node("sub", "%0", "a")]),
        ([_node("relu", "a")], [_node("add", "a", "a"), _node("sub", "%0", "a")]),
    ))
    rule = _rule(sizes, source, target)
    certificate = _honest(_rule(sizes, source, source))
    lower = [[["lower", rng.randrange(2), rng.randrange(2), rng.choice(([], ["@1"], ["0"])), []]], [],
             [["merge", 0, 1, [], [], [], [], [0], [[[[], []], [[], []]]]]]]
    proofs = [rng.choice(lower) for _ in range(rng.randrange(1, 4))]
    step = ["largest", 0, rng.choice((0, -1, 1)), rng.choice((0, 1, -1)), rng.choice(([], ["@1"], ["0"])),
            rng.choice(([], [[], []])), proofs]
    merge = ["merge", 1, 2, [], [], [], [], [0], [[[[], []], [[], []]]]]
    certificate["outputs"][0]["steps"] = rng.choice(([step, merge], [step, ["merge", 0, 1, *merge[3:]], merge], [step]))
    return _signed(rule, certificate)


@cache
def _by_cases(name: str) -> str:
    return json.dumps(_honest(BY_CASES[name]))


def _words(value: Any) -> Iterator[list[Any]]:
    """Every list of steps in a certificate."""
    for where, key in list(_places(value)):
        found = where[key]
        if isinstance(found, list) and found and all(isinstance(each, list) and each and isinstance(each[0], str)
                                                     and each[0].replace(" ", "").isalpha() for each in found):
            yield found


_NEW = (["case", "@0", ">=", [[], []]], ["case", "@0-@1", "==", [[], [], []]], ["void", 0, [], []], ["void", 1, [], []],
        ["order", [0, 0], [], [0], [[], []]], ["order", [1, 0], [], [0], [[], []]], ["negate", 0], ["parts", 0],
        ["insert", 0, [0], [], "1", [], []], ["insert", 0, [0], [0], "1", ["0"], [[[]], [[]]]], ["extract", 0, 0],
        ["insert", 1, [0, 1], [0], "-1", ["@0"], [[[["1", [0]]]], [[["1", [1]]]]]], ["value", 0, 0], ["value", 1, 1],
        ["lose", 0, 0, 0, []], ["lose", 0, 0, 1, [["given", None, 0, [], [], "1"]]], ["lose", 1, 0, 1, []],
        ["loosen", 0, 0, [[]]], ["loosen", 0, 0, [[["1", [0]]]]], ["part", 0, 0, 0, "$0", "==", [["none", []]] * 3],
        ["part", 0, 0, 0, "$0-1", ">=", [["some", ["0"], [[]]], ["some", ["1"], [[]]]]], ["climb", 0, 0, []],
        ["climb", 0, 0, [[0, ["$0"], [[[]], [[]]], []]]], ["above", 0, None, []], ["above", 0, [0, [], []], []],
        ["above", 1, [0, ["0"], [[[]], [[]]]], []], ["drop", 0, None], ["drop", 1, None],
        ["ratio", 0, 0, [], [[0, [], []]], "1", []], ["ratio", 0, 1, [[0, [], []]], [[0, [], []]], "-1", []],
        ["ratio", 1, 0, [[1, [], []]], [[0, [], []]] * 2, "2", [["merge", 0, 1, [], [], [], [], [0], [[]]]]],
        ["some", 0, 0, 0, [], [], [[]], [[0, [], []]]], ["some", 0, 1, 0, [], [], [[["given", None, 0, [], [], "1"]]], [
            [0, ["@0"], [[[]], [[]]]]]], ["some", 1, 0, 1, [], [], [], []], ["larger", 0, 0, 0], ["larger", 0, 0, 1],
        ["rooted", 0], ["rooted", 1], ["groups", 0], ["common", 0, []], ["common", 0, [[]]], ["sizes", [0], []],
        ["sizes", [0, 1], [["1", [0]]]],
        ["attain", [0, 0], 0, [], [], [[], []]], ["attain", [0, 0], 0, ["0"], [[[]], [["1", [0]]]], [[]]],
        ["attain", [1, 0, 0, 0, 0], 0, ["@1"], [[[["1", [1]]]]], [[["largest", 0, 0, 0, ["@2"], [[]], [[]]]]]],
        ["both", [], []], ["both", [["lower", 0, 0, [], []]], [["each", 1, 0, [[], []]]]], ["each", 0, 0, [[], []]],
        ["rise", 0, 1, [], []], ["rise", 1, 0, [], [0, [], [], []]], ["gentle", 0, 1], ["gentle", 1, 0])


def _cases(rng: Random) -> Data:
    """The certificate of a law that is proved in cases, changed, for a wrong neighbour of it."""
    name = rng.choice(sorted(NEARLY))
    data = _signed(NEARLY[name], json.loads(_by_cases(rng.choice((name, name, rng.choice(sorted(BY_CASES)))))))
    certificate = data["certificate"]
    for _ in range(rng.randrange(5)):
        steps = rng.choice(list(_words(certificate["outputs"])) or [[]])
        kind = rng.randrange(5)
        if kind < 2:
            steps.insert(rng.randrange(len(steps) + 1), json.loads(json.dumps(rng.choice(_NEW))))
        elif kind == 2:
            _left_out(rng, steps)
        elif kind == 3:
            _doubled(rng, steps)
        else:
            where, key = rng.choice(list(_places(certificate["outputs"])))
            where[key] = rng.choice((*_TEXTS, *_JSON))
    return data


def _new_steps(rng: Random) -> Data:
    """Steps that end a goal, or that are of what is known, where nothing is."""
    wrong, right = _wrong(rng)
    data = _signed(wrong, right.certificate)
    proof = rng.choice(data["certificate"]["outputs"])
    steps = rng.choice([proof["steps"], *proof["defined"].values()])
    for _ in range(rng.randrange(1, 4)):
        steps.insert(rng.randrange(len(steps) + 1), json.loads(json.dumps(rng.choice(_NEW))))
    return data


_FORGERIES: dict[str, Callable[[Random], Data]] = {
    "of the right rule": _of_the_right_rule, "of another rule": _another, "partial function": _partial,
    "text": _edited(lambda rng, _: rng.choice(_TEXTS)), "value": _edited(lambda rng, _: rng.choice(_JSON)),
    "step left out": _steps(_left_out), "step doubled": _steps(_doubled), "step added": _steps(_added),
    "steps shuffled": _steps(_shuffled), "part emptied": _emptied, "divisor of 0": _zero_divisor,
    "guard eaten": _eaten_guard, "unbound size": _unbound_size, "target cancels": _target_first,
    "member forgotten": _member_forgotten, "assumption": _wrong_assumption, "hidden attribute": _hidden_attribute,
    "divisor": _divisor, "not the largest": _not_the_largest, "cases": _cases,
    "cases again": _cases, "new steps": _new_steps, "numbers shifted": _shifted, "parts exchanged": _exchanged,
}
STRATEGIES = tuple(_FORGERIES)


def forged(case: Case) -> Data:
    """A wrong rule with a certificate; raises :class:`NoCase` where none was found."""
    return _FORGERIES[case.strategy](case.rng())


def check_case(case: Case) -> Outcome:
    """A certificate that is accepted is wrong; so is any other ending than a refusal."""
    data = forged(case)
    try:
        check(data)
    except (CertificateError, RuleError):
        return Outcome.RIGHT
    return Outcome.WRONG


def main(argv: Sequence[str] | None = None) -> int:
    _rules()
    return harness.main(STRATEGIES, check_case, argv, seconds=60)


if __name__ == "__main__":
    sys.exit(main())
