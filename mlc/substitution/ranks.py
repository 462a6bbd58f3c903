"""Instantiates rules for many ranks as rules of single ranks, for those who apply them.

What a block of axes may be is for :mod:`mlc.substitution.check.ranks` to say.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from mlc.errors import MlcError
from mlc.substitution.check import CertificateError
from mlc.substitution.check.ranks import Ranked, ranked
from mlc.substitution.codec import dump_rule
from mlc.substitution.rule import Rule

__all__ = ["RANK", "expansions", "instances"]

#: the ranks up to which a search has the rules, if no tensor of a graph has a higher one
RANK = 5


def instances(rules: Iterable[Rule], rank: int = RANK) -> tuple[Rule, ...]:
    """The rules with those for many ranks at each choice of ranks, up to ``rank`` for every tensor; all certified."""
    return tuple(one for rule in rules
                 for one in (_instances(rule, rank, id(rule.certificate)) if rule.blocks else (rule,)))


@lru_cache(maxsize=4096)
def _instances(rule: Rule, rank: int, _certificate: int) -> tuple[Rule, ...]:
    """None, with a warning, for blocks that an operator does not take. ``_certificate`` is the identity of the rule's
    own: rules that say the same are equal whatever theirs are."""
    stated = dump_rule(rule)
    try:
        found = ranked(rule)
    except (MlcError, ValueError, TypeError, LookupError) as error:
        warnings.warn(f"a rule must be one at every rank to be applied, but {rule.name} is not: {error}; it is left "
                      "out", stacklevel=3)
        return ()
    return tuple(_certified(rule, stated, lengths, one) for lengths, one in _expansions(rule, found, rank))


def expansions(rule: Rule, rank: int = RANK) -> Iterator[tuple[tuple[int, ...], Rule]]:
    """The rule at every choice of ranks at which it says something, few axes first."""
    return _expansions(rule, ranked(rule), rank)


def _expansions(rule: Rule, made: Ranked, rank: int) -> Iterator[tuple[tuple[int, ...], Rule]]:
    seen = set[str]()
    for lengths in sorted(product(range(rank + 1), repeat=len(rule.blocks)), key=sum):
        named = dict(zip(sorted(rule.blocks), lengths, strict=True))
        if not 1 <= made.rank(named) <= rank or not _has_ones(rule, named):
            continue
        try:
            one = made.at(_axes(rule, lengths))
        except CertificateError:  # a sum over no axis
            continue
        text = _unnamed(one)
        if text not in seen and one.source != one.target and not _idle(one):
            seen.add(text)
            yield lengths, one


def _has_ones(rule: Rule, lengths: Mapping[str, int]) -> bool:
    """Whether every input that has ones has them: others are spoken of by other rules."""
    ones = ((name, lengths[block]) for block, places in rule.blocks.items() for name in places)
    kept: dict[str, int] = {}
    for name, length in ones:
        kept[name] = kept.get(name, 0) + length
    return all(kept.values())


def _unnamed(rule: Rule) -> str:
    """A text that is the same for blocks that follow on one another and for one as long as both."""
    text = f"{[*rule.shapes.values()]} {[node.attributes for node in (*rule.source.nodes, *rule.target.nodes)]}"
    names: dict[str, str] = {}
    return re.sub(r"[A-Za-z_]\w*", lambda found: names.setdefault(found[0], f"s{len(names)}"), text)


def _axes(rule: Rule, lengths: Sequence[int]) -> dict[str, list[str]]:
    """Names for the sizes of each block's axes: its own for one axis, and that with letters for several."""
    return {block: [block] if length == 1 else [f"{block.translate(_LETTERS)}_{place}" for place in range(length)]
            for block, length in zip(sorted(rule.blocks), lengths, strict=True)}


#: names of sizes are letters and then a number
_LETTERS = {ord(str(digit)): f"_{letter}" for digit, letter in enumerate("abcdefghij")}


def _idle(rule: Rule) -> bool:
    """Whether a transpose moves nothing."""
    return any(node.op == "transpose" and list(node.attributes["perm"]) == sorted(node.attributes["perm"])  # type: ignore
               for side in (rule.source, rule.target) for node in side.nodes)


def _certified(rule: Rule, stated: Mapping[str, Any], lengths: Sequence[int], one: Rule) -> Rule:
    one = replace(one, name=f"{rule.name}:{','.join(map(str, lengths))}")
    proof = rule.certificate
    if proof is None:
        return one
    certificate = {"general": stated, "axes": _axes(rule, lengths), "whole": proof["whole"],
                   "backward": None if proof["backward"] is None else []}
    return replace(one, certificate=certificate)
