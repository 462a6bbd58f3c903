"""The points of a space in the order of their analytic price, for tuning without the device.

A space's seeds are a few of them, some the best of a kind; here all points are priced, or of a large space a sample.
Seeds and others come in turn: the best by price are often alike, and what is wrong with one is wrong with all. A
decision that the price says nothing of (how a loop is unrolled, in which order blocks are numbered) has the value
that the first seed gives it: it would multiply the points and put none before another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, product, zip_longest
from math import prod

from mlc.tuning.candidate import Point, TaskSpace

__all__ = ["MOST", "by_price"]

#: points of a space that are priced; it takes some 50 microseconds each
MOST = 1 << 15
#: points, beside as many seeds, at which it is looked whether a decision changes the price
_PROBES = 8


def by_price(space: TaskSpace, most: int = MOST) -> list[tuple[float, Point]]:
    """Seconds by the space's price and the points that fit the machine, best first, its seeds in turn with the others;
    the seeds alone, at no price, where the space has none. Of more than ``most`` points a sample, always the same."""
    seeds = list(space.seeds())
    if not seeds or space.price(seeds[0]) is None:
        return [(0.0, seed) for seed in seeds]
    rng = random.Random(space.task.key)
    probes = [*seeds[:_PROBES], *(space.sample(rng) for _ in range(_PROBES))]
    domains = [knob.values if _counts(space, place, probes) else (seeds[0][place],)
               for place, knob in enumerate(space.knobs)]
    every = product(*domains) if prod(map(len, domains)) <= most else (
        tuple(map(rng.choice, domains)) for _ in range(most))
    prices = {point: price for point in dict.fromkeys(chain(seeds, every)) if (price := space.price(point)) is not None}
    others = sorted(prices.keys() - set(seeds), key=lambda point: (prices[point], point))
    turns = chain.from_iterable(zip_longest(seeds, others))
    return [(prices[point], point) for point in turns if point in prices]


def _counts(space: TaskSpace, place: int, probes: Sequence[Point]) -> bool:
    """Whether the decision at a place changes the price of one of the points, or whether it fits the machine."""
    values = space.knobs[place].values
    return any(
        len({space.price((*point[:place], value, *point[place + 1:])) for value in values}) > 1 for point in probes
    )
