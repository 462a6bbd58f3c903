"""Families of convolutions with average pooling or with a batch: partially equivalent rules, which differ at the edges
of images, and equivalent ones without padding.

What near misses multiply less must pay for the edges, which are computed as before. Images of a batch side by side are
one image of which a convolution reads the neighbours where it should read zeros ("batch folded into space" of PET). The
mean of a convolution's windows is a convolution by a mean of its filter, at the stride of the mean: but windows of the
mean that reach beyond the edge take zeros, where the convolution would go on.
"""

from __future__ import annotations

from dataclasses import replace

from mlc.substitution.family import Family, family, stated

__all__ = ["families"]

_CONVOLUTION = "conv2d stride={0},{0} padding={1} dilation=1,1 groups=1"
_MEAN = "avg_pool2d kernel={0},{0} stride={1},{1} padding={2},{2},{2},{2} count_include_pad=1"


def families() -> list[Family]:
    """What is equal, then near misses."""
    return [*_equal(), _beside(), _means()]


def _equal() -> list[Family]:
    """Means of a convolution by single elements, whatever their padding; means without padding of any other."""
    windows = "avg_pool2d kernel=K,L stride=S,T padding={} count_include_pad={}"
    single, padding = _CONVOLUTION.format(1, "0,0,0,0"), "P-1,Q-1,U-1,V-1"
    found = [stated(f"windows-first-{counts}", {"x": "n c h w", "v": "o c 1 1"},
                    (windows.format(padding, counts), (single, "x", "v")),
                    (single, (windows.format(padding, counts), "x"), "v")) for counts in (0, 1)]
    filters = ("avg_pool2d kernel=K,L stride=1,1 padding=K-1,L-1,K-1,L-1 count_include_pad=1", "v")
    # padding that counts is no mean of the bias
    found += [stated(f"windows-bias-{counts}", {"x": "n c h w", "s": "1 c 1 1"},
                     (windows.format(sides, counts), ("add", "x", "s")),
                     ("add", (windows.format(sides, counts), "x"), "s"))
              for counts, sides in ((0, padding), (1, "0,0,0,0"))]
    return [*found, stated("windows-of-filters", {"x": "n c h w", "v": "o c k l"},
                           (windows.format("0,0,0,0", 1), (_CONVOLUTION.format(1, padding), "x", "v")),
                           (f"conv2d stride=S,T padding={padding} dilation=1,1 groups=1", "x", filters))]


def _beside() -> Family:
    world = {"N": 2, "C": 2, "H": 6, "W": 7, "O": 3, "P": 1, "U": 1, "Q": 1, "V": 1}
    steps = [_CONVOLUTION.format(1, "P,Q,U,V"), "transpose perm=1,2,0,3", "reshape shape=1,C,H,N*W",
             "reshape shape=O,H,N,W", "transpose perm=2,0,1,3"]
    found = family("beside-batch", 5, {"x": "N C H W", "w": "O C P+U+1 Q+V+1"}, ";".join(steps), world, conv2d=1,
                   transpose=2, reshape=2)
    return replace(found, filters=frozenset("w"), near=True)


def _means() -> Family:
    """Windows of 3 at every other place, of images of even extents: the usual ones that have padding."""
    world = {"N": 1, "C": 2, "O": 3, "I": 9, "J": 10, "P": 2, "U": 2, "Q": 2, "V": 2}
    steps = [_CONVOLUTION.format(1, "P-1,Q-1,U-1,V-1"), _CONVOLUTION.format(2, "P,Q,U,V"), _MEAN.format(3, 2, 1),
             _MEAN.format(3, 1, 2)]
    found = family("windows-corrected", 2, {"x": "N C 2*I 2*J", "w": "O C P+U-1 Q+V-1"}, ";".join(steps), world,
                   conv2d=1, avg_pool2d=1)
    return replace(found, filters=frozenset("w"), near=True)
