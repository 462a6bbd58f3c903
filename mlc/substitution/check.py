"""Checks certificates of rules again, without any of the code that found them.

Trusted are the operators' specifications, polynomials (:mod:`mlc.operators.index`) and the reader of rules. The
checker composes both sides itself, writes source minus target as terms (factor, index variables over all integers,
guards, atoms) and plays the steps of the certificate; at the end no term may be left. The steps:

- ``drop i w``: the guards contradict each other (or the factor is 0).
- ``division i q p low high``: the quotient ``q = n // d`` is ``p``, since ``0 <= n - d*p <= d - 1`` there.
- ``divide variable i k d w``: variable k is ``d*q + r`` with ``0 <= r < d``, for ``d >= 1``.
- ``guard i g w``: a guard that the others imply is added. ``split i g``: two or three cases, ``g`` and its opposites.
- ``fix i k p low high``: variable k has to be ``p``. ``count i k w``: variable k, which nothing uses, as a factor.
- ``merge i j map inverse forth back pairing equal``: a bijection of the variables under which guards imply each other
  and the atoms are equal in pairs; the factors are added up.
- ``context division | split | fact``: the same for the indices of the output, or of what is around a function.

A witness is a list of ``[factor > 0, facts]``; the products of facts add up to what is to be shown at least 0, or to
-1 with its opposite among the facts (number -1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import count
from math import lcm
from typing import Any, NamedTuple

from mlc.errors import MlcError
from mlc.operators import OPERATORS, Requirements, ShapeError, Tensor, tensor_input
from mlc.operators.index import Condition, FloorDiv, Mod, Poly, Symbol, as_poly
from mlc.operators.scalar import Add, Call, Const, Max, Mul, Read, Reciprocal, Scalar, Select, Size, Sum
from mlc.substitution.codec import RuleError, content_hash, load_rule, parse_size
from mlc.substitution.graph import Graph
from mlc.substitution.rule import Rule

__all__ = ["CertificateError", "check"]


class CertificateError(MlcError):
    """A certificate does not show that its rule holds: the step and the reason."""


class _Term(NamedTuple):
    factor: Fraction
    names: tuple[str, ...]
    guards: tuple[Condition, ...]
    #: ("read", tensor, indices), ("number", poly, inverse), ("call", name, sums), ("max", names, guards, sum)
    atoms: tuple[Any, ...]


_fresh = count()


def _name() -> str:
    return f"$c{next(_fresh)}"


def _need(true: Any, reason: str) -> None:
    if not true:
        raise CertificateError(reason)


def check(data: Mapping[str, Any]) -> None:
    """Checks the certificate of a rule in JSON; raises :class:`CertificateError` with the reason it is not valid, and
    :class:`~mlc.substitution.codec.RuleError` where the rule itself can't be read."""
    rule = load_rule(data)
    certificate = rule.certificate
    _need(isinstance(certificate, Mapping), f"rule {rule.name}: it has no certificate")
    assert certificate is not None
    try:
        _need(certificate.get("format") == 1, "its format must be 1")
        _need(certificate.get("rule") == content_hash(rule), "it was made for another rule: the hash differs")
        _check_side(rule, certificate)
    except CertificateError as error:
        raise CertificateError(f"rule {rule.name}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError, RecursionError, RuleError,
            ShapeError) as error:
        raise CertificateError(f"rule {rule.name}: the certificate is malformed: {type(error).__name__}: {error}"
                               ) from error


def _check_side(rule: Rule, certificate: Mapping[str, Any]) -> None:
    values, facts = _assume(rule, rule.source, certificate["assume"])
    sources, _ = _outputs(rule, rule.source, values)
    targets, demands = _outputs(rule, rule.target, values)
    _demands(facts, demands, certificate["demands"], "the target's demand")
    _need(len(sources) == len(targets) == len(certificate["outputs"]), "the sides differ in their number of outputs")
    for source, target, proof in zip(sources, targets, certificate["outputs"], strict=True):
        _need(len(source.shape) == len(target.shape), "outputs differ in rank")
        equal = [Condition(a - b, "==") for a, b in zip(source.shape, target.shape, strict=True)]
        _demands(facts, equal, proof["shape"], "the equality of output shapes")
        context = [_name() for _ in source.shape]
        indices = tuple(map(Poly.symbol, context))
        ranges = [p for i, s in zip(indices, source.shape, strict=True) for p in (i, _plain(s) - 1 - i)]
        left, right = _terms(source[indices], {}), _terms(target[indices], {})
        _Play(context, [*facts, *ranges], left, right).run(proof["steps"])
    reverse = certificate.get("reverse")
    if reverse is not None:
        values, facts = _assume(rule, rule.target, reverse["assume"])
        _demands(facts, _outputs(rule, rule.source, values)[1], reverse["demands"], "the source's demand")


# --- sizes ---------------------------------------------------------------------------------------------------------


def _outputs(rule: Rule, graph: Graph, values: Mapping[str, Poly]) -> tuple[list[Tensor], list[Condition]]:
    """The side's tensors at sizes ``values``, and what its operators demand."""
    def put(value: Any) -> Any:
        if isinstance(value, Poly):
            return value.substitute(values)
        return tuple(put(v) for v in value) if isinstance(value, tuple) else value

    unbound = {s for node in graph.nodes for v in node.attributes.values() for s in _free(v)} - set(rule.symbols)
    _need(not unbound, f"the sizes {sorted(unbound)} are unbound")
    require = Requirements()
    at: dict[Any, Tensor] = {n: tensor_input(n, [as_poly(s).substitute(values) for s in shape])
                             for n, shape in rule.shapes.items()}
    for place, node in enumerate(graph.nodes):
        given = {k: put(v) for k, v in node.attributes.items()}
        for k, tensor in enumerate(OPERATORS[node.op](require, [at[r] for r in node.inputs], given)):
            at[place, k] = tensor
    return [at[r] for r in graph.outputs], [c for c, _ in require.conditions]


def _free(value: Any) -> set[str]:
    if isinstance(value, Poly):
        return set(value.symbols)
    return {s for v in value for s in _free(v)} if isinstance(value, tuple) else set()


def _assume(rule: Rule, graph: Graph, steps: Sequence[Any]) -> tuple[dict[str, Poly], list[Poly]]:
    """What holds of all sizes that the rule admits and for which a side is well-formed: solved, and as facts."""
    symbols = rule.symbols
    names = set(symbols)
    values: dict[str, Poly] = {}
    facts = [Poly.symbol(s) - 1 for s in symbols]
    _need(not any(s[0] in "$@" for s in symbols), "sizes must have names that begin with letters")
    for step in steps:
        conditions = [c.substitute(values) for c in rule.conditions] + _outputs(rule, graph, values)[1]
        condition = conditions[step[1]]
        if step[0] == "fact":
            poly = _divided(condition.poly, facts, step[2])
            facts += [poly] if condition.relation == ">=" else [poly, -poly]
            continue
        name, value = step[2], parse_size(step[3])
        _need(condition.relation == "==" and name not in value.symbols, "an equality must be solved")
        if step[0] == "multiple":
            said = Poly.symbol(name) % value
            _need(condition.poly in (said, -said), f"{condition} does not say that {value} divides {name}")
            _need(step[4] not in names and step[4][0] not in "$@", f"{step[4]} must be a new name")
            _witness(step[5], value - 1, facts)
            names.add(step[4])
            change = {name: value * Poly.symbol(step[4])}
        else:
            _need(step[0] == "equal", f"unknown step {step[0]!r}")
            poly = _divided(condition.poly, facts, step[4])
            _need(poly in (Poly.symbol(name) - value, value - Poly.symbol(name)), f"{condition} is not {name}={value}")
            change = {name: value}
        values = {n: p.substitute(change) for n, p in values.items()} | change
        facts = [p.substitute(change) for p in facts]
        if step[0] == "multiple":
            facts.append(Poly.symbol(step[4]) - 1)
    return values, facts


def _divided(poly: Poly, facts: Sequence[Poly], steps: Sequence[Any]) -> Poly:
    poly = _plain(poly)
    for quotient, by, low, high in steps:
        atom, value = _quotient(parse_size(quotient)), parse_size(by)
        _division(atom, value, low, high, facts, parse_size)
        poly = _swap(poly, atom, value)
    return poly


def _demands(facts: Sequence[Poly], conditions: Sequence[Condition], proofs: Sequence[Any], what: str) -> None:
    _need(len(conditions) == len(proofs), f"{what} has no proof")
    for condition, (divisions, witnesses) in zip(conditions, proofs, strict=True):
        poly = _divided(condition.poly, facts, divisions)
        _holds(Condition(poly, condition.relation), witnesses, facts)


# --- witnesses -----------------------------------------------------------------------------------------------------


def _holds(condition: Condition, witnesses: Sequence[Any], facts: Sequence[Poly],
           read: Callable[[str], Poly] = parse_size) -> None:
    goals = [condition.poly] if condition.relation == ">=" else [condition.poly, -condition.poly]
    _need(len(witnesses) == len(goals), f"{condition} has {len(witnesses)} witnesses")
    for goal, witness in zip(goals, witnesses, strict=True):
        _witness(witness, goal, facts, read)


def _witness(witness: Sequence[Any], goal: Poly | None, facts: Sequence[Poly], read: Callable[[str], Poly] = parse_size
             ) -> None:
    """Shows ``goal >= 0``; without a goal, that the facts contradict each other."""
    factors = [Fraction(factor) for factor, _ in witness]
    _need(all(f > 0 for f in factors), "the factors of a witness must be positive")
    scale = lcm(*(f.denominator for f in factors)) if factors else 1
    total, opposite = as_poly(0), False
    for factor, (_, refs) in zip(factors, witness, strict=True):
        product = as_poly(int(factor * scale))
        for ref in refs:
            if ref == -1 and goal is not None:
                opposite, fact = True, -goal - 1
            elif isinstance(ref, int):
                _need(0 <= ref < len(facts), "a witness must refer to facts")
                fact = facts[ref]
            else:
                fact = _axiom(ref, facts, read)
            product = product * fact
        total = total + product
    direct = goal is not None and not opposite and total == goal * scale
    _need(direct or total == as_poly(-scale), f"a witness of {goal} >= 0 adds up to {total}")


def _axiom(ref: Sequence[Any], facts: Sequence[Poly], read: Callable[[str], Poly]) -> Poly:
    """What holds of a quotient by its definition, for a divisor that is plainly at least 1."""
    value = read(ref[1])
    atom = _quotient(value)
    n, d = atom.numerator, atom.denominator
    _need(d.terms and all(c > 0 and all(isinstance(a, Symbol) and a.name[0] not in "$@" for a in m)
                          for m, c in d.terms), f"the divisor {d} must be plainly positive")
    if ref[0] == "lo":
        return n - d * value
    if ref[0] == "hi":
        return d * value + d - 1 - n
    _need(ref[0] == "pos", f"unknown fact {ref[0]!r}")
    _witness(ref[2], n, facts, read)
    return value


def _division(atom: FloorDiv, value: Poly, low: Any, high: Any, facts: Sequence[Poly], read: Callable[[str], Poly]
              ) -> None:
    rest = atom.numerator - atom.denominator * value
    _witness(low, rest, facts, read)
    _witness(high, atom.denominator - 1 - rest, facts, read)


def _quotient(poly: Poly) -> FloorDiv:
    _need(len(poly.terms) == 1 and poly.terms[0][1] == 1 and len(poly.terms[0][0]) == 1, f"{poly} is no quotient")
    atom = poly.terms[0][0][0]
    _need(isinstance(atom, FloorDiv), f"{poly} is no quotient")
    assert isinstance(atom, FloorDiv)
    return atom


def _walk(poly: Poly, of: Callable[[FloorDiv | Mod, Poly, Poly], Poly]) -> Poly:
    """The polynomial with quotients and remainders replaced, inner ones first."""
    total = as_poly(0)
    for monomial, factor in poly.terms:
        product = as_poly(factor)
        for atom in monomial:
            if isinstance(atom, Symbol):
                product = product * Poly.atom(atom)
            else:
                product = product * of(atom, _walk(atom.numerator, of), _walk(atom.denominator, of))
        total = total + product
    return total


def _plain(poly: Poly) -> Poly:
    """Remainders as ``n - d * (n // d)``."""
    return _walk(poly, lambda atom, n, d: n - d * (n // d) if isinstance(atom, Mod) else n // d)


def _swap(poly: Poly, quotient: FloorDiv, by: Poly) -> Poly:
    return _walk(poly, lambda atom, n, d: by if atom == quotient else n // d)


# --- terms ---------------------------------------------------------------------------------------------------------


def _term(factor: Fraction, names: Iterable[str], guards: Iterable[Condition], atoms: Iterable[Any]) -> _Term:
    """Leaves out guards that hold anyway and repeated ones; a size cancels its reciprocal."""
    kept = []
    for guard in guards:
        constant = guard.poly.constant
        if guard not in kept and not (constant is not None and guard.evaluate({})):
            kept.append(guard)
    powers: dict[Poly, int] = {}
    others = []
    for atom in atoms:
        if atom[0] == "number" and atom[1].constant is not None and (atom[1].constant or not atom[2]):
            factor = factor / atom[1].constant if atom[2] else factor * atom[1].constant
        elif atom[0] == "number" and _size(atom[1]):
            powers[atom[1]] = powers.get(atom[1], 0) + (-1 if atom[2] else 1)
        else:
            others.append(atom)
    numbers = [("number", p, k < 0) for p, k in powers.items() for _ in range(abs(k))]
    return _Term(factor, tuple(names), tuple(kept), (*others, *numbers))


def _size(poly: Poly) -> bool:
    (monomial, factor), *more = poly.terms or (((), 0),)
    return not more and factor == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol) \
        and monomial[0].name[0] not in "$@"


def _call(name: str, sums: tuple[Any, ...]) -> Any:
    """relu is idempotent; increasing functions go into a maximum (over at least one value)."""
    if name in ("relu", "sigmoid", "tanh", "exp", "erf") and len(sums[0]) == 1:
        (only,) = sums[0]
        if only.factor == 1 and not only.names and not only.guards and len(only.atoms) == 1:
            (atom,) = only.atoms
            if name == "relu" and atom[:2] == ("call", "relu"):
                return atom
            if atom[0] == "max":
                return ("max", atom[1], atom[2], (_Term(Fraction(1), (), (), (_call(name, (atom[3],)),)),))
    return ("call", name, sums)


def _change(term: _Term, of: Callable[[Poly], Poly]) -> _Term:
    return _term(term.factor, term.names, [Condition(of(g.poly), g.relation) for g in term.guards],
                 [_change_atom(a, of) for a in term.atoms])


def _change_atom(atom: Any, of: Callable[[Poly], Poly]) -> Any:
    if atom[0] == "read":
        return ("read", atom[1], tuple(map(of, atom[2])))
    if atom[0] == "number":
        return ("number", of(atom[1]), atom[2])
    if atom[0] == "call":
        return _call(atom[1], tuple(tuple(_change(t, of) for t in terms) for terms in atom[2]))
    return ("max", atom[1], tuple(Condition(of(g.poly), g.relation) for g in atom[2]),
            tuple(_change(t, of) for t in atom[3]))


def _put(term: _Term, values: Mapping[str, Poly]) -> _Term:
    return _change(term, lambda p: _plain(p.substitute(values)))


def _symbols(atom: Any) -> set[str]:
    if atom[0] == "read":
        return {s for p in atom[2] for s in p.symbols}
    if atom[0] == "number":
        return set(atom[1].symbols)
    guards, terms = ((), [t for part in atom[2] for t in part]) if atom[0] == "call" else (atom[2], atom[3])
    inner = {s for t in terms for g in t.guards for s in g.poly.symbols} | {s for g in guards for s in g.poly.symbols}
    return inner.union(*(_symbols(a) for t in terms for a in t.atoms))


def _undefined(atoms: Iterable[Any]) -> bool:
    """Whether a reciprocal, a logarithm or a root is among or inside the atoms."""
    calls = [a for a in atoms if a[0] == "call"]
    inner = [t for a in calls for terms in a[2] for t in terms] + [t for a in atoms if a[0] == "max" for t in a[3]]
    return any(a[1] in ("1/", "log", "sqrt") for a in calls) or any(_undefined(t.atoms) for t in inner)


def _minus(terms: Iterable[_Term]) -> list[_Term]:
    return [t._replace(factor=-t.factor) for t in terms]


def _opposites(guards: Sequence[Condition]) -> list[tuple[Condition, ...]]:
    """Cases that exclude each other and together say that some guard fails."""
    cases = []
    for k, guard in enumerate(guards):
        cases.append((*guards[:k], Condition(-guard.poly - 1, ">=")))
        if guard.relation == "==":
            cases.append((*guards[:k], Condition(guard.poly - 1, ">=")))
    return cases


def _terms(value: Scalar, names: Mapping[str, Poly]) -> list[_Term]:
    """The scalar as a sum of terms, by distribution."""
    one = Fraction(1)

    def poly(p: Poly) -> Poly:
        return _plain(p.substitute(names))

    match value:
        case Const(number):
            return [_Term(number, (), (), ())] if number else []
        case Read(tensor, indices):
            return [_Term(one, (), (), (("read", tensor, tuple(map(poly, indices))),))]
        case Size(size):
            return [_term(Fraction(c), (), (), [("number", Poly.atom(a), False) for a in m])
                    for m, c in poly(size).terms]
        case Add(parts):
            return [t for part in parts for t in _terms(part, names)]
        case Mul(parts):
            product = [_Term(one, (), (), ())]
            for part in parts:
                right = _terms(part, names)
                product = [_term(a.factor * b.factor, a.names + b.names, a.guards + b.guards, a.atoms + b.atoms)
                           for a in product for b in right]
            return product
        case Select(conditions, then, otherwise):
            guards = [Condition(poly(c.poly), c.relation) for c in conditions]
            found = [_under(t, guards) for t in _terms(then, names)]
            return found + [_under(t, case) for case in _opposites(guards) for t in _terms(otherwise, names)]
        case Sum(variables, body):
            bound, inner, ranges = _bound(variables, names)
            return [_term(t.factor, (*bound, *t.names), (*ranges, *t.guards), t.atoms) for t in _terms(body, inner)]
        case Max(variables, conditions, body):
            bound, inner, ranges = _bound(variables, names)
            ranges += [Condition(_plain(c.poly.substitute(inner)), c.relation) for c in conditions]
            return _largest(tuple(bound), tuple(ranges), _terms(body, inner))
        case Reciprocal(divisor):
            return _reciprocal(tuple(_terms(divisor, names)))
        case Call(function, args):
            return [_Term(one, (), (), (_call(function, tuple(tuple(_terms(a, names)) for a in args)),))]


def _largest(names: tuple[str, ...], guards: tuple[Condition, ...], body: list[_Term]) -> list[_Term]:
    """Terms that are the same for all variables of a maximum are added outside of it."""
    same = [t for t in body if not set(names) & set().union(*(g.poly.symbols for g in t.guards),
                                                            *(_symbols(a) for a in t.atoms))]
    rest = tuple(t for t in body if t not in same)
    return [_Term(Fraction(1), (), (), (("max", names, guards, rest),)), *same] if rest else same


def _under(term: _Term, guards: Iterable[Condition]) -> _Term:
    return _term(term.factor, term.names, (*guards, *term.guards), term.atoms)


def _bound(variables: Any, names: Mapping[str, Poly]) -> tuple[list[str], dict[str, Poly], list[Condition]]:
    inner, bound, ranges = dict(names), [], []
    for variable, extent in variables:
        bound.append(_name())
        inner[variable] = Poly.symbol(bound[-1])
        top = _plain(extent.substitute(names)) - inner[variable] - 1
        ranges += [Condition(inner[variable], ">="), Condition(top, ">=")]
    return bound, inner, ranges


def _reciprocal(terms: tuple[_Term, ...]) -> list[_Term]:
    """Of a product without variables and guards, the product of the reciprocals."""
    one = Fraction(1)
    if len(terms) != 1 or terms[0].names or terms[0].guards or not terms[0].factor:
        return [_Term(one, (), (), (("call", "1/", (terms,)),))]
    atoms = [("number", a[1], not a[2]) if a[0] == "number" and _size(a[1])
             else ("call", "1/", ((_Term(one, (), (), (a,)),),)) for a in terms[0].atoms]
    return [_term(1 / terms[0].factor, (), (), atoms)]


def _facts(guards: Iterable[Condition]) -> list[Poly]:
    return [p for g in guards for p in ([g.poly] if g.relation == ">=" else [g.poly, -g.poly])]


# --- steps ---------------------------------------------------------------------------------------------------------


class _Play:
    """Plays steps on the terms of ``terms - others``, which have to end empty.

    ``others`` come from the target: what may be undefined there does not cancel among them.
    """

    def __init__(self, context: Sequence[str], facts: Sequence[Poly], terms: Sequence[_Term] = (),
                 others: Sequence[_Term] = ()) -> None:
        self.context, self.facts = list(context), list(facts)
        self.terms = dict(enumerate([*terms, *_minus(others)]))
        self.next = len(self.terms)
        self.new = set(range(len(terms), self.next))

    def run(self, steps: Sequence[Any]) -> None:
        for name, *words in steps:
            method = getattr(self, "do_" + str(name).replace(" ", "_"), None)
            _need(method is not None, f"unknown step {name!r}")
            assert method is not None
            method(*words)
        _need(not self.terms, f"{len(self.terms)} terms are left")

    def reader(self, names: Sequence[str] = ()) -> Callable[[str], Poly]:
        """Reads texts in which ``@k`` is variable k of the context and ``$k`` variable k of ``names``."""
        values = {f"@{k}": Poly.symbol(n) for k, n in enumerate(self.context)}
        values |= {f"${k}": Poly.symbol(n) for k, n in enumerate(names)}

        def read(text: str) -> Poly:
            poly = parse_size(text)
            odd = [s for s in poly.symbols if s[0] in "$@" and s not in values]
            _need(not odd, f"{odd} are no variables here")
            return poly.substitute(values)

        return read

    def at(self, i: int) -> tuple[_Term, list[Poly], Callable[[str], Poly]]:
        term = self.terms[i]
        return term, [*self.facts, *_facts(term.guards)], self.reader(term.names)

    def add(self, origin: int, term: _Term) -> None:
        if origin in self.new:
            self.new.add(self.next)
        self.terms[self.next] = term
        self.next += 1

    def do_drop(self, i: int, witness: Any) -> None:
        term, facts, read = self.at(i)
        if witness is None:
            _need(term.factor == 0, f"term {i} is not zero")
        else:
            _witness(witness, None, facts, read)
        del self.terms[i]

    def do_division(self, i: int, quotient: str, by: str, low: Any, high: Any) -> None:
        term, facts, read = self.at(i)
        atom, value = _quotient(read(quotient)), read(by)
        _division(atom, value, low, high, facts, read)
        self.terms[i] = _change(term, lambda p: _swap(p, atom, value))

    def do_divide_variable(self, i: int, k: int, divisor: str, witness: Any) -> None:
        term, facts, read = self.at(i)
        d, old, q, r = read(divisor), term.names[k], _name(), _name()
        _need(old not in d.symbols, "a divisor must not depend on the variable")
        _witness(witness, d - 1, facts, read)
        new = _put(term, {old: d * Poly.symbol(q) + Poly.symbol(r)})
        names = [*(q if n == old else n for n in term.names), r]
        ranges = (Condition(Poly.symbol(r), ">="), Condition(d - 1 - Poly.symbol(r), ">="))
        self.terms[i] = _term(new.factor, names, (*new.guards, *ranges), new.atoms)

    def do_guard(self, i: int, poly: str, relation: str, witnesses: Any) -> None:
        term, facts, read = self.at(i)
        guard = _condition(read(poly), relation)
        _holds(guard, witnesses, facts, read)
        self.terms[i] = term._replace(guards=(*term.guards, guard))

    def do_split(self, i: int, poly: str, relation: str) -> None:
        term, _, read = self.at(i)
        guard = _condition(read(poly), relation)
        cases = [_term(term.factor, term.names, (*term.guards, *case), term.atoms)
                 for case in ((guard,), *_opposites([guard]))]
        self.terms[i] = cases[0]
        for case in cases[1:]:
            self.add(i, case)

    def do_fix(self, i: int, k: int, value: str, low: Any, high: Any) -> None:
        term, facts, read = self.at(i)
        name, poly = term.names[k], read(value)
        _need(name not in poly.symbols, "a variable must not be fixed by itself")
        _witness(low, poly - Poly.symbol(name), facts, read)
        _witness(high, Poly.symbol(name) - poly, facts, read)
        new = _put(term, {name: poly})
        self.terms[i] = _term(new.factor, [n for n in term.names if n != name], new.guards, new.atoms)

    def do_count(self, i: int, k: int, witness: Any) -> None:
        term, _, read = self.at(i)
        name = term.names[k]
        using = [g for g in term.guards if name in g.poly.symbols]
        _need(len(using) == 2 and using[0] == Condition(Poly.symbol(name), ">=") and using[1].relation == ">=",
              "a counted variable must have a plain range")
        extent = using[1].poly + Poly.symbol(name) + 1
        _need(name not in extent.symbols and not any(name in _symbols(a) for a in term.atoms),
              "a counted variable must not be read")
        rest = [g for g in term.guards if g not in using]
        _witness(witness, extent, [*self.facts, *_facts(rest)], read)
        del self.terms[i]
        for monomial, factor in extent.terms:
            sizes = [("number", Poly.atom(a), False) for a in monomial]
            self.add(i, _term(term.factor * factor, [n for n in term.names if n != name], rest, [*term.atoms, *sizes]))

    def do_merge(self, i: int, j: int, mapping: Any, inverse: Any, forth: Any, back: Any, pairing: Any, equal: Any
                 ) -> None:
        _need(i != j, "a term is not merged with itself")
        _need(not (i in self.new and j in self.new and _undefined(self.terms[i].atoms)),
              "what may be undefined in the target must be in the source")
        one, facts, read = self.at(i)
        other, _, read_other = self.at(j)
        names = [_name() for _ in other.names]
        there = dict(zip(other.names, map(Poly.symbol, names), strict=True))
        into = dict(zip(names, map(read, mapping), strict=True))
        outof = {n: read_other(t).substitute(there) for n, t in zip(one.names, inverse, strict=True)}
        moved = self.moved(one.names, _put(other, there), names, into, outof)
        self.implied(moved.guards, forth, facts, read)
        self.implied(one.guards, back, [*self.facts, *_facts(moved.guards)], read)
        _need(sorted(pairing) == list(range(len(one.atoms))) and len(pairing) == len(moved.atoms) == len(equal),
              "atoms must meet in pairs")
        inner = _Play([*self.context, *one.names], facts)
        for atom, partner, proof in zip(moved.atoms, pairing, equal, strict=True):
            inner.same(one.atoms[partner], atom, proof, read)
        factor = one.factor + self.terms.pop(j).factor
        if j not in self.new:
            self.new.discard(i)
        if factor:
            self.terms[i] = one._replace(factor=factor)
        else:
            del self.terms[i]

    @staticmethod
    def moved(names: Sequence[str], other: _Term, others: Sequence[str], into: Mapping[str, Poly],
              outof: Mapping[str, Poly]) -> _Term:
        """``other`` in the variables ``names``, for a bijection between all integers of the one and of the other."""
        _need(len(names) == len(others), "terms must have as many variables")
        _need(all(p.substitute(outof) == Poly.symbol(n) for n, p in into.items())
              and all(p.substitute(into) == Poly.symbol(n) for n, p in outof.items()), "variables must map one to one")
        return _put(other, into)

    @staticmethod
    def implied(guards: Sequence[Condition], witnesses: Sequence[Any], facts: Sequence[Poly],
                read: Callable[[str], Poly]) -> None:
        _need(len(guards) == len(witnesses), "every guard must be implied")
        for guard, found in zip(guards, witnesses, strict=True):
            _holds(guard, found, facts, read)

    def same(self, a: Any, b: Any, proof: Any, read: Callable[[str], Poly]) -> None:
        """Two atoms are equal, given the facts."""
        _need(a[0] == b[0], "atoms must be of one kind")
        if a[0] in ("read", "number"):
            rows, columns = (a[2], b[2]) if a[0] == "read" else ((a[1],), (b[1],))
            _need(a[1] == b[1] if a[0] == "read" else a[2] == b[2], "reads must be of one tensor")
            _need(len(rows) == len(columns) == len(proof), "every index must be equal")
            for x, y, witnesses in zip(rows, columns, proof, strict=True):
                _holds(Condition(x - y, "=="), witnesses, self.facts, read)
        elif a[0] == "call":
            order, proofs = proof
            plain = list(range(len(a[2])))
            _need(a[1] == b[1] and len(b[2]) == len(plain) == len(proofs), "functions must be the same")
            _need(order == plain or (a[1] == "max" and order == [1, 0]), "arguments must be in order")
            for x, k, steps in zip(a[2], order, proofs, strict=True):
                _Play(self.context, self.facts, x, b[2][k]).run(steps)
        else:
            self.same_largest(a, b, proof)

    def same_largest(self, a: Any, b: Any, proof: Any) -> None:
        mapping, inverse, forth, back, steps = proof
        names = [_name() for _ in b[1]]
        there = dict(zip(b[1], map(Poly.symbol, names), strict=True))
        inner = _Play([*self.context, *a[1]], [*self.facts, *_facts(a[2])])
        read = inner.reader()
        into = dict(zip(names, map(read, mapping), strict=True))
        outof = {n: self.reader(names)(t) for n, t in zip(a[1], inverse, strict=True)}
        whole = _Term(Fraction(1), tuple(names), b[2], (("call", "", (b[3],)),))
        moved = self.moved(a[1], _put(whole, there), names, into, outof)
        self.implied(moved.guards, forth, inner.facts, read)
        self.implied(a[2], back, [*self.facts, *_facts(moved.guards)], read)
        _Play(inner.context, inner.facts, a[3], moved.atoms[0][2][0]).run(steps)

    def everywhere(self, of: Callable[[Poly], Poly]) -> None:
        self.facts = [of(p) for p in self.facts]
        self.terms = {i: _change(t, of) for i, t in self.terms.items()}

    def do_context_division(self, quotient: str, by: str, low: Any, high: Any) -> None:
        read = self.reader()
        atom, value = _quotient(read(quotient)), read(by)
        _division(atom, value, low, high, self.facts, read)
        self.everywhere(lambda p: _swap(p, atom, value))

    def do_context_split(self, k: int, divisor: str, witness: Any) -> None:
        read = self.reader()
        d, old, q, r = read(divisor), self.context[k], _name(), _name()
        _need(old not in d.symbols, "a divisor must not depend on the variable")
        _witness(witness, d - 1, self.facts, read)
        change = {old: d * Poly.symbol(q) + Poly.symbol(r)}
        self.everywhere(lambda p: p.substitute(change))
        self.context[k] = q
        self.context.append(r)
        self.facts += [Poly.symbol(r), d - 1 - Poly.symbol(r)]

    def do_context_fact(self, poly: str, witness: Any) -> None:
        read = self.reader()
        _witness(witness, read(poly), self.facts, read)
        self.facts.append(read(poly))


def _condition(poly: Poly, relation: str) -> Condition:
    _need(relation in ("==", ">="), f"unknown relation {relation!r}")
    return Condition(poly, relation)
