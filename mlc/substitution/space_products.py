"""Families of products of three operands, of products of repeated operands, and of what is added to those.

Which order of a product of three takes fewest multiplications is told by the sizes at hand: such rules go both ways,
and a search takes the way that leaves less. What is the same all along an axis is multiplied once; where it is a part
of a concatenation, that is taken apart first.
"""

from __future__ import annotations

from mlc.substitution.family import Family, family, stated

__all__ = ["families"]

_LETTERS = {"N": 2, "C": 3, "M": 3, "H": 5, "W": 6, "K": 4, "O": 4}


def families() -> list[Family]:
    """Chains, then products of parts, then what is repeated."""
    return _chains() + _parts() + _repeated()


def _chains() -> list[Family]:
    """Families with a scale between the products, of everything or of rows; or with a quotient, which nothing else
    covers."""
    chain = {"x": "b m k", "y": "b k l", "z": "b l n"}
    first, last = ("matmul", "x", "y"), ("matmul", "y", "z")
    left = {"number": ("", "mul"), "rows": ("b m 1", "mul"), "quotient": ("b m 1", "div")}
    right = {"number": ("", "mul"), "columns": ("b 1 n", "mul")}
    found = [stated(f"chain-left-{name}", {**chain, "s": side}, ("matmul", (join, first, "s"), "z"),
                    (join, ("matmul", "x", last), "s")) for name, (side, join) in left.items()]
    found += [stated(f"chain-right-{name}", {**chain, "s": side}, ("matmul", "x", (join, last, "s")),
                     (join, ("matmul", first, "z"), "s")) for name, (side, join) in right.items()]
    return [*found, stated("chain-between", {**chain, "s": "b 1 l"}, ("matmul", ("mul", first, "s"), "z"),
                           ("matmul", "x", ("matmul", ("mul", "y", "s"), "z")))]


def _parts() -> list[Family]:
    """The sum that a product of a concatenation is."""
    def parts(name: str, inputs: dict[str, str], product: str, axis: int, of: int) -> Family:
        cuts = [(f"slice axis={of} begin={begin} end={end}", "u") for begin, end in (("0", "A"), ("A", "A+B"))]
        return stated(f"parts-{name}", inputs, (product, (f"concat axis={axis}", "x", "y"), "u"),
                      ("add", (product, "x", cuts[0]), (product, "y", cuts[1])))

    convolution = "conv2d stride=S,T padding=P-1,Q-1,U-1,V-1 dilation=D,E groups=1"
    return [parts("product", {"x": "b m A", "y": "b m B", "u": "b A+B n"}, "matmul", 2, 1),
            parts("convolution", {"x": "n A h w", "y": "n B h w", "u": "o A+B k l"}, convolution, 1, 1)]


def _repeated() -> list[Family]:
    """Products and reshapes of what is repeated along an axis, and sums with it."""
    found = [family(f"repeated-product-{len(x.split())}", 2, {"x": x, "w": w},
                    f"matmul;expand shape={spread};expand shape={made}", _LETTERS, matmul=1, expand=1)
             for x, w, spread, made in (("1 K", "K C", "M,K", "M,C"), ("N 1 K", "N K C", "N,M,K", "N,M,C"))]
    found.append(family("repeated-convolution", 2, {"x": "N C 1 1", "w": "O C 1 1"},
                        "conv2d;expand shape=N,C,H,W;expand shape=N,O,H,W", _LETTERS, conv2d=1, expand=1))
    for x, spread, short, whole in (
        ("1 1 C", "1,M,C", "1,C", "M,C"), ("N 1 1 C", "N,1,M,C", "N,1,C", "N,M,C"),
        ("N C 1", "N,C,M", "N,C,1,1", "N,C,1,M"), ("N 1 C", "N,M,C", "N,1,1,C", "N,M,1,C"),
        ("1 C", "M,C", "1,1,C", "1,M,C"),
        ("N C 1 1", "N,C,H,W", "N,C,1", "N,C,H*W"), ("N C 1", "N,C,H*W", "N,C,1,1", "N,C,H,W"),
    ):
        found.append(family(f"repeated-reshape-{x.replace(' ', '')}-{spread.replace(',', '').replace('*', '')}", 2,
                            {"x": x}, f"expand shape={spread};expand shape={whole};reshape shape={short};"
                            f"reshape shape={whole}", _LETTERS, expand=1, reshape=1))
    for x, y in (("M C", "1 C"), ("M C", "M 1"), ("N M C", "N 1 C"), ("N M C", "1 1 C"), ("N C M", "N C 1"),
                 ("N C H W", "N C 1 1"), ("N C H W", "1 C 1 1")):
        found += [family(f"repeated-{op}-{x.replace(' ', '')}-{y.replace(' ', '')}", 2, {"x": x, "y": y, "z": y},
                         f"{op};expand shape={x.replace(' ', ',')}", _LETTERS, expand=1, **{op: 1})
                  for op in ("add", "mul")]
    return found
