"""Merges rules that are the same rule at several ranks into one rule with blocks of axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any

from mlc.operators import ShapeError
from mlc.operators.index import Poly, as_poly
from mlc.substitution.candidates import canonical
from mlc.substitution.check import CertificateError
from mlc.substitution.check.ranks import check_blocks, expanded
from mlc.substitution.codec import content_hash
from mlc.substitution.compose import with_sizes
from mlc.substitution.prove import Proved, prove
from mlc.substitution.ranks import expansions
from mlc.substitution.rule import Rule, symbols_of

__all__ = ["general_rule", "general_rules", "said"]


def general_rules(rules: Sequence[Rule]) -> list[Rule]:
    """``rules`` with those that are one rule at several ranks replaced by it, in the place of the first.

    Every rule of one rank that is gone is an instance, word for word, of one that is there, and so is one for many
    ranks at each of up to five axes.
    """
    made = [general for rule in rules if (general := rule if rule.blocks else _general(rule)) is not None]
    made.sort(key=lambda rule: -len(rule.blocks))
    kept: dict[str, Rule] = {}
    known: dict[str, str] = {}
    for rule in made:
        found = [one for _, one in expansions(rule)]
        if not all(said(one) in known for one in found) and (proved := _proved(rule)) is not None:
            kept[rule.name] = proved
            for one in found:
                for way in (one, one.turned) if one.two_way else (one,):
                    known.setdefault(said(way), rule.name)
    left: dict[str, Rule] = {}
    for rule in rules:
        if not rule.blocks or rule.name in kept:
            name = rule.name if rule.blocks else known.get(said(rule), rule.name)
            left.setdefault(name, kept.get(name, rule))
    return list(left.values())


def general_rule(rule: Rule) -> Rule | None:
    """The rule for as many ranks as can be shown, with its certificate; None for one that is of its rank alone."""
    found = _general(rule)
    return None if found is None else _proved(found)


def _proved(rule: Rule) -> Rule | None:
    if rule.certificate is not None:
        return rule
    proof = prove(rule, refute=False)
    return replace(rule, certificate=proof.certificate) if isinstance(proof, Proved) else None


def said(rule: Rule) -> str:
    """A text of a rule of one rank that is the same whatever its inputs and sizes are called."""
    rule = canonical(rule)
    names = [name for shape in rule.shapes.values() for size in shape for name in sorted(symbols_of(size))]
    names += [name for node in rule.source.nodes for _, value in sorted(node.attributes.items())
              for each in (value if isinstance(value, tuple) else (value,)) for name in sorted(symbols_of(each))]
    put = {name: Poly.symbol(f"s{place:03d}") for place, name in enumerate(dict.fromkeys(names))}
    return content_hash(with_sizes(rule, put))


def _general(rule: Rule) -> Rule | None:
    """The rule with as many blocks as it can have, none of which is a part of another."""
    blocks: dict[str, dict[str, int]] = {}
    for name in rule.symbols:
        if _movable(rule, name):
            places = next((each for each in _ones(rule) if _right(replace(rule, blocks={name: each}))), None)
            if places is not None and _right(replace(rule, blocks={**blocks, name: places})):
                blocks[name] = places
    if not blocks:
        return None
    found = _merged(replace(rule, blocks=blocks, certificate=None))
    return replace(found, name=f"{rule.name.partition('/')[0]}/{content_hash(found)[:8]}")


def _moved(rule: Rule, ones: Mapping[str, int], gone: str) -> dict[str, int]:
    """Where axes are when those of a block are gone."""
    found = {}
    for name, place in ones.items():
        before = [str(size) == gone for size in rule.shapes[name][:place]]
        at = rule.blocks[gone].get(name)
        found[name] = place - sum(before) - (at is not None and at < place)
    return found


def _movable(rule: Rule, name: str) -> bool:
    """Whether a size is one of a shape, and among shapes and attributes only ever as it stands. Conditions may speak of
    it as they like: to them it is how many elements there are."""
    size = Poly.symbol(name)
    values: list[Any] = [each for shape in rule.shapes.values() for each in shape]
    for node in (*rule.source.nodes, *rule.target.nodes):
        for key, value in node.attributes.items():
            values += value if key == "shape" and isinstance(value, tuple) else (value,)
    return size in values and all(value == size or name not in symbols_of((value,)) for value in values)


def _ones(rule: Rule) -> Iterator[dict[str, int]]:
    """The axes of length 1 that may stand for ones of a block: of each input one or none."""
    axes = [[None, *(place for place, size in enumerate(shape) if as_poly(size) == 1)]
            for shape in rule.shapes.values()]
    for places in product(*axes):
        yield {name: place for name, place in zip(rule.shapes, places, strict=True) if place is not None}


def _right(rule: Rule) -> bool:
    try:
        check_blocks(rule)
    except (CertificateError, ShapeError):
        return False
    return True


def _merged(rule: Rule) -> Rule:
    """The rule without blocks that always stand behind another one: both are one."""
    for one, other in permutations(sorted(rule.blocks), 2):
        left = {block: [] if block == other else [block] for block in rule.blocks}
        try:
            short = replace(expanded(rule, left), blocks={})
        except CertificateError:
            continue
        for ones in _ones(short):
            blocks = {block: _moved(rule, places, other) for block, places in rule.blocks.items() if block != other}
            found = replace(short, blocks={**blocks, one: ones})
            back = {block: [one, other] if block == one else [block] for block in blocks}
            try:
                if content_hash(expanded(found, back)) == content_hash(replace(rule, blocks={})):
                    return _merged(found)
            except (CertificateError, ShapeError):
                continue
    return rule
