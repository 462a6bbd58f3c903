"""The space that the generator searches: families of inputs and operators, and the number of operators a side.

A family names its inputs with their sizes and the steps (operators with attributes) that graphs are made of. Sizes are
texts: a number is that size, a name in small letters is a symbol of that input's own, a name in capitals is one symbol
for the whole family (an amount of padding, the place where a tensor is divided). Enumeration runs in one *world*
where every letter has the value of ``world``, equal for what may meet; the most general sizes are found afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from mlc.substitution import space_gathers, space_near, space_products, space_reductions, space_rows, space_uniform
from mlc.substitution.family import Family, family

__all__ = ["AREAS", "FAMILIES", "UNIFORM", "area_of"]


#: functions of one element whose concatenations and slices are searched: a choice, since every one takes time
FUNCTIONS = ("relu", "sigmoid", "tanh")
_CONV = "conv2d stride=S,T padding=P-1,Q-1,U-1,V-1 dilation=D,E groups={}"
#: strides, dilations and paddings under which a 3 x 3 window keeps the size
_KEEP = {"S": 1, "T": 1, "P": 2, "Q": 2, "U": 2, "V": 2, "D": 1, "E": 1, "G": 2, "F": 1}


def _image(*names: str, channels: str = "c") -> dict[str, str]:
    return dict.fromkeys(names, f"n {channels} h w")


def _families() -> tuple[Family, ...]:
    areas = {"pointwise": _pointwise(), "products": _products(), "convolutions": _convolutions(),
             "poolings": _poolings(), "reshapes": _reshapes(), "reductions": space_reductions.families(),
             "orders": space_products.families(), "rows": space_rows.families(), "windows": space_near.families(),
             "gathers": space_gathers.families()}
    # four operands of one shape, which the sides of an interchange read in different orders
    return tuple(replace(each, area=area, all_orders=each.name.startswith("join-"))
                 for area, families in areas.items() for each in families)


def _pointwise() -> list[Family]:
    """Sums, products, functions, concatenations and slices, with axes before and behind: proved, laws are of any."""
    found = []
    letters, axis = ["n", "c", "h"], 1
    shape, world = " ".join(letters), {**dict.fromkeys(letters, 2), "A": 2, "B": 2}
    head, tail, whole = (" ".join([*letters[:axis], size, *letters[axis + 1:]]) for size in ("A", "B", "A+B"))
    ends = {"x": head, "y": tail}
    both = {**ends, "u": head, "v": tail}
    concat = f"concat axis={axis}"
    cut = f"slice axis={axis} begin=0 end=A;slice axis={axis} begin=A end=A+B"
    inner = " ".join([*letters[:axis], "I+J+K-2", *letters[axis + 1:]])
    middle, behind = (f"slice axis={axis} begin={at}I-1 end={at}I+J-1" for at in ("", "A+"))
    parts = {**world, "I": 2, "J": 2, "K": 2}
    found += [
        family("elementwise", 3, dict.fromkeys("xyz", shape), "add;mul", world),
        family("join", 2, dict.fromkeys("xyz", shape), concat, world),
        family("slice", 2, {**ends, "s": whole, "t": inner}, f"{concat};{cut};{middle};{behind}", parts),
        family("undo", 3, {"s": whole}, f"{concat};{cut}", world),
    ]
    for op in ("add", "mul"):
        found.append(family(f"{op}-concat", 3, both, f"{concat};{op}", world))
        found.append(family(f"{op}-slice", 3, {"s": inner, "t": inner}, f"{middle};{op}", parts))
    for op in FUNCTIONS:
        found.append(family(f"{op}-concat", 3, ends, f"{concat};{op}", world))
        found.append(family(f"{op}-slice", 2, {"s": inner}, f"{middle};{op}", parts))
    # two axes, what is before, between and behind
    found.append(family("join-both", 3, dict.fromkeys("xyzv", "n c h w e"), "concat axis=3;concat axis=1",
                        dict.fromkeys("nchwe", 2), concat=3))
    found.append(family("scale", 3, {"x": "n c h", "y": "n c h", "s": "1 c 1", "t": "1 c 1"}, "add;mul"))
    bias, whole, twos = "1 {} 1", "I+J+K-2", {**dict.fromkeys(("n", "h", "I", "J", "K", "A"), 2), "B": 3}
    ends = {"x": head, "y": tail, "s": bias.format("A"), "t": bias.format("B")}
    for op in ("add", "mul"):
        found.append(family(f"{op}-bias", 3, {"s": inner, "t": bias.format(whole)}, f"{middle};{op}", twos, **{op: 1}))
        found.append(family(f"{op}-bias-concat", 3, ends, f"{concat};{op}", twos, **{op: 2, "concat": 2}))
    found.append(family("functions", 3, {"x": "n c", "y": "n c"}, ";".join([*FUNCTIONS, "maximum"]), maximum=1))
    return found


def _products() -> list[Family]:
    """Products of one batch axis, and so of any number of them."""
    square = {"n": 2, "m": 2, "k": 2, "b": 2, "A": 2, "B": 2}
    tensors = dict.fromkeys("abcd", "b m k")
    three = {name: tensors[name] for name in "abc"}
    found = [
        family("products", 3, three, "matmul;add;transpose perm=0,2,1", square),
        family("join-products", 3, tensors, "matmul;add;concat axis=1;concat axis=2", square, add=1),
        family("scaled-products", 2, {"a": "b m k", "b": "b m k", "r": "", "s": "b 1 k", "t": "b m 1"}, "matmul;mul",
               square),
        family("cut-products", 2, {"a": "b m k", "l": "b m A+B", "u": "b A+B m"},
               "matmul;slice axis=2 begin=0 end=A;slice axis=2 begin=A end=A+B;"
               "slice axis=1 begin=0 end=A;slice axis=1 begin=A end=A+B", square),
    ]
    found += [family(f"turned-{op.split()[0]}", 3, {"x": "n m", "y": "n m"}, f"transpose perm=1,0;{op}", square,
                     transpose=2, add=1, mul=1, relu=1, concat=1)
              for op in ("add", "mul", "relu", "concat axis=0;concat axis=1")]
    found.append(family("identity", 2, {"a": "m K"}, "matmul;identity_matrix size=K", {"m": 2, "K": 2}))
    return found


def _convolutions() -> list[Family]:
    # batches are 3, so that images and filters are not taken for each other
    world = {"n": 3, "c": 2, "h": 4, "w": 4, "k": 3, "l": 3, "o": 2, **_KEEP}
    ones = {**world, "c": 1, "o": 1}
    conv, grouped = _CONV.format(1), _CONV.format("G")
    filters = {"v": "o c k l", "w": "o c k l"}
    images, groups = _image("x", "y", channels="G*c"), {"v": "G*o c k l", "w": "G*o c k l"}
    cuts = ("slice axis=0 begin=0 end=A;slice axis=0 begin=A end=A+B;slice axis=1 begin=0 end=A;"
            "slice axis=1 begin=A end=A+B")
    families = [
        family("linear-convolutions", 3, {**images, **groups}, f"{grouped};add", ones, conv2d=2),
        family("batch-convolutions", 3, {**images, "w": "G*o c k l"}, f"{grouped};concat axis=0", ones, conv2d=2),
        family("join-convolutions", 3, {**_image("x", "y"), **filters}, f"{conv};concat axis=0;concat axis=1", world,
                conv2d=2, concat=2),
        family("sum-convolutions", 3, {**_image("x", "y"), **filters}, f"{conv};add;concat axis=1", world, conv2d=2,
                add=1),
        family("pair-convolutions", 3,
                {"x": "n G*c h w", "y": "n F*c h w", "v": "G*o c k l", "w": "F*o c k l"},
                f"{grouped};{_CONV.format('F')};{_CONV.format('G+F')};concat axis=0;concat axis=1",
                {**ones, "G": 1, "F": 2}, conv2d=2, concat=2),
        family("cut-convolutions", 2, {"x": "n c h w", "w": "o c k l", "v": "A+B c k l", "y": "A+B c h w"},
                f"{conv};{cuts}", {**world, "A": 2, "B": 2}),
        family("cut-channels", 2, {"x": "n I+J+K-2 h w", "w": "o J k l"},
                f"{conv};slice axis=1 begin=I-1 end=I+J-1;pad before=0,I-1,0,0 after=0,K-1,0,0",
                {**world, "I": 2, "J": 2, "K": 2}),
        family("enlarge", 2, {"x": "n c h w", "w": "o c K L"},
                f"{conv};conv2d stride=S,T padding=P-1+D*M-D,Q-1+E*N-E,U-1+D*M-D,V-1+E*N-E dilation=D,E groups=1;"
                "enlarge kernel=K+2*M-2,L+2*N-2", {**world, "K": 3, "L": 3, "M": 2, "N": 2, "P": 3, "Q": 3, "U": 3,
                                                   "V": 3, "h": 6, "w": 6}, conv2d=1),
        family("scaled-convolutions", 3, {"x": "n c h w", "w": "o c k l", "s": "1 o 1 1", "r": ""},
                f"{conv};mul;transpose perm=1,0,2,3", world, transpose=1, conv2d=1, mul=1),
        family("identity-kernel", 2, {"x": "n C h w"}, "conv2d dilation=D,E;identity_kernel channels=C kernel=1,1",
                {**world, "C": 2}),
        family("one-by-one", 4, {"x": "n c h w", "w": "o c k l", "i": "o c 1 1"},
                f"{conv};conv2d;transpose perm=1,0,2,3", world, conv2d=2, transpose=2),
    ]
    # one-by-one folds filters by convolving one with another; the general convolution is there once. Scales belong to
    # filters: the result of a convolution by a scaled filter is a scaled one
    return [replace(f, once=frozenset({0})) if f.name == "one-by-one" else f if f.name == "cut-convolutions"
            else replace(f, filters=frozenset("vwsr" if f.name == "scaled-convolutions" else "vw")) for f in families]


def _poolings() -> list[Family]:
    window = "kernel=K,L stride=S,T padding=P-1,Q-1,U-1,V-1"
    world = {"n": 2, "c": 2, "h": 4, "w": 4, "K": 3, "L": 3, **_KEEP}
    return [family("poolings", 3, _image("x", "y"), f"max_pool2d {window};avg_pool2d {window} count_include_pad=0;"
                    f"avg_pool2d {window} count_include_pad=1;add;concat axis=0;concat axis=1;relu", world, add=1,
                    concat=1)]


def _reshapes() -> list[Family]:
    """Shapes of one number of elements, then an axis made of two.

    Laws between any two shapes have a condition (equal products), which no size of one side tells. They are found of
    two axes and proved of any number.
    """
    world = {"N": 4, "M": 6, "P": 3, "Q": 8, "R": 12, "S": 2}
    own, other, third = ("reshape shape=" + shape for shape in ("N,M", "P,Q", "R,S"))
    found = [family("reshape", 2, {"x": "N M"}, f"{own};{other};{third}", world)]
    for op in ("add", "mul"):
        found.append(family(f"{op}-reshape", 3, dict.fromkeys("xy", "N M"), f"{op};{other}", world,
                            **{op: 1, "reshape": 2}))
        found.append(family(f"{op}-number-reshape", 2, {"x": "N M", "s": ""}, f"{op};{other}", world))
    found += [family(f"{op}-reshape", 2, {"x": "N M"}, f"{op};{other}", world) for op in FUNCTIONS]
    return [*found, *_merged_axes(), *_unit_axes(), *_moved_axes()]


def _merged_axes() -> list[Family]:
    """Two axes that are one, and the other way round: what joins or cuts another axis or the outer of both, and what
    is added to all."""
    found = []
    for rank, pairs in ((2, (0,)), (3, (0, 1)), (4, (0, 2))):
        for pair in pairs:
            for axis in range(rank):
                if axis != pair + 1:
                    found += _joined_and_cut(rank, pair, axis)
    found += _biased("N M C", "N*M C", "1 1 C", "1 C") + _biased("N M C R", "N*M C R", "1 1 1 R", "1 1 R")
    return found + _biased("N C M R", "N C M*R", "1 C 1 1", "1 C 1")


#: a shape for each size of an axis, the place of the axis there, and how many elements an index of it is
_Axis: TypeAlias = "tuple[Callable[[str], list[str]], int, str]"


def _joined_and_cut(rank: int, pair: int, axis: int) -> list[Family]:
    def long(size: str) -> list[str]:
        return [f"({size})" if place == axis else letter for place, letter in enumerate("NMCR"[:rank])]

    def short(size: str) -> list[str]:
        shape = long(size)
        return [*shape[:pair], f"{shape[pair]}*{shape[pair + 1]}", *shape[pair + 2:]]

    inner = "NMCR"[pair + 1] if axis == pair else "1"
    return _between((long, axis, "1"), (short, axis - (axis > pair), inner), f"{rank}-{pair}-{axis}")


def _between(one: _Axis, other: _Axis, at: str) -> list[Family]:
    """From tensors of one shape to those of another and back, joined and cut along an axis that both have."""
    world = {"N": 2, "M": 3, "C": 2, "R": 3, "X": 2, "Y": 3, "I": 2, "J": 2, "K": 2}
    whole, found = "I+J+K-2", []
    for name, (old, axis, step), (new, place, stride) in (("merge", one, other), ("split", other, one)):
        to = {size: f"reshape shape={','.join(new(size))}{',' * (len(new(size)) == 1)}"
              for size in ("X", "Y", "X+Y", "J", whole)}
        concats = ";".join(dict.fromkeys(f"concat axis={each}" for each in (axis, place)))
        cuts = ";".join(dict.fromkeys(f"slice axis={each} begin=(I-1)*{by} end=(I+J-1)*{by}"
                                      for each, by in ((axis, step), (place, stride))))
        found.append(family(f"concat-{name}-{at}", 3, {"x": " ".join(old("X")), "y": " ".join(old("Y"))},
                             f"{concats};{to['X']};{to['Y']};{to['X+Y']}", world, concat=1, reshape=2))
        found.append(family(f"slice-{name}-{at}", 2, {"s": " ".join(old(whole))},
                             f"{cuts};{to['J']};{to[whole]}", world, slice=1))
    return found


def _biased(long: str, short: str, long_bias: str, short_bias: str) -> list[Family]:
    world = {"N": 2, "M": 3, "C": 4, "R": 5}
    found, axis = [], next(place for place, size in enumerate(long_bias.split()) if size != "1")
    for op in ("add", "mul"):
        for name, old, new in (("merge", (long, long_bias), (short, short_bias)),
                               ("split", (short, short_bias), (long, long_bias))):
            to = ";".join(f"reshape shape={shape.replace(' ', ',')}" for shape in (*new, old[1]))
            found.append(family(f"{op}-bias-{name}-{len(long.split())}-{axis}", 3,
                                 {"x": old[0], "s": old[1], "t": new[1]}, f"{op};{to}", world, **{op: 1, "reshape": 2}))
    return found


def _unit_axes() -> list[Family]:
    """Axes of length 1: transposes that move nothing else, a batch of one product."""
    found = []
    for rank in (2, 3, 4):
        kept = "NMC"[: rank - 1]
        orders = [" ".join((*kept[:place], "1", *kept[place:])) for place in range(rank)]
        reshapes = ";".join(f"reshape shape={order.replace(' ', ',')}" for order in orders)
        for place, order in enumerate(orders):
            others = [axis for axis in range(rank) if axis != place]
            moves = [(*others[:to], place, *others[to:]) for to in range(rank) if to != place]
            transposes = ";".join(f"transpose perm={','.join(map(str, perm))}" for perm in moves)
            found.append(family(f"unit-transpose-{rank}-{place}", 1, {"x": order}, f"{reshapes};{transposes}",
                                 {"N": 2, "M": 3, "C": 4}))
    square = {"M": 2, "K": 3, "N": 4}
    reshapes = ";".join(f"reshape shape={shape}" for shape in ("M,K", "K,N", "M,N", "1,M,K", "1,K,N", "1,M,N"))
    for x, y in (("1 M K", "1 K N"), ("1 M K", "K N"), ("M K", "1 K N")):
        found.append(family(f"batch-of-one-{len(x.split())}-{len(y.split())}", 3, {"a": x, "b": y},
                             f"matmul;{reshapes}", square, matmul=1))
    return found


def _moved_axes() -> list[Family]:
    """Transposes that exchange neighbours of which one is two axes, which may be one."""
    found = []
    for rank in (3, 4):
        for pair in range(rank - 1):
            long = "NMCR"[:rank]
            short = [*long[:pair], f"{long[pair]}*{long[pair + 1]}", *long[pair + 2:]]
            for first in range(rank - 2):
                order = [*range(first), first + 1, first, *range(first + 2, rank - 1)]
                after = [short[place] for place in order]
                apart = [place + (place > pair) for place in order]
                where = order.index(pair)
                perm = (*apart[: where + 1], pair + 1, *apart[where + 1:])
                moves = [f"transpose perm={','.join(map(str, each))}" for each in (perm, order)]
                for name, x, made, other in (("merge", list(long), after, short),
                                             ("split", short, [long[place] for place in perm], list(long))):
                    found.append(family(f"turned-{name}-{rank}-{pair}-{''.join(map(str, order))}", 2,
                                         {"x": " ".join(x)}, f"{moves[0]};{moves[1]};reshape shape={','.join(made)};"
                                         f"reshape shape={','.join(other)}", {"N": 2, "M": 3, "C": 4, "R": 5}))
    return found


FAMILIES: tuple[Family, ...] = _families()
#: what is searched beyond the library, with no choice of what may meet
UNIFORM: tuple[Family, ...] = tuple(replace(each, area="uniform") for each in space_uniform.families())
#: the parts of the library, in the order of generation
AREAS = tuple(dict.fromkeys(each.area for each in (*FAMILIES, *UNIFORM)))
_FAMILY_AREAS = {each.name: each.area for each in (*FAMILIES, *UNIFORM)}


def area_of(rule: str) -> str:
    """The area of a rule by the name that the generator gave it."""
    return _FAMILY_AREAS.get(rule.partition("/")[0], "other")
