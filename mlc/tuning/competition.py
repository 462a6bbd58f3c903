"""Several graphs of one model that share a tuning budget: how likely each still is to become the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["chances"]

Calls = Mapping[int, int]


def chances(
    graphs: Sequence[Calls], choices: Sequence[str], times: Sequence[float], hopes: Sequence[float], call: float = 0.0
) -> list[float]:
    """For each graph a number from 0 (it cannot win any more) to 1 (it is ahead).

    ``graphs`` say how often each graph calls which task, ``choices`` name the group of alternatives that a task is one
    of (empty: none), of which a graph calls the fastest. ``times`` are seconds of one call as far as known, ``hopes``
    what tuning is expected to take off them, ``call`` what a call takes besides. A graph that is behind can win by what
    is hoped for in those of its tasks that the leader does not have; the part of that hope which catching up leaves is
    its chance.
    """
    groups = [_grouped(graph, choices) for graph in graphs]
    totals = [sum(_fastest(group, times, call) for group in each.values()) for each in groups]
    leader = min(range(len(graphs)), key=totals.__getitem__)
    found = []
    for graph, each, total in zip(graphs, groups, totals, strict=True):
        gap = total - totals[leader]
        hope = sum(max(_further(graph, graphs[leader], i) * hopes[i] for i in group) for group in each.values())
        found.append(1.0 if gap <= 0.0 else max(0.0, 1.0 - gap / hope) if hope > 0.0 else 0.0)
    return found


def _grouped(graph: Calls, choices: Sequence[str]) -> Mapping[object, dict[int, int]]:
    """A graph's calls by the alternatives that stand for each other."""
    groups: dict[object, dict[int, int]] = {}
    for index, count in graph.items():
        groups.setdefault(choices[index] or index, {})[index] = count
    return groups


def _fastest(group: Calls, times: Sequence[float], call: float) -> float:
    return (min(times[i] for i in group) + call) * max(group.values())


def _further(graph: Calls, leader: Calls, index: int) -> int:
    return max(0, graph[index] - leader.get(index, 0))
