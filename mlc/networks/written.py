"""Networks as their authors' code defines them, where that leaves something to substitutions.

What is the same for all points of a set is repeated for each of them, products of three are taken in the dear order,
and a convolution is trained as a sum of several. Sizes are published ones, weights are random; each is a plain
``torch.nn`` module, its inputs f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

__all__ = ["ACNet", "ConditionalNeuralProcess", "DeepSDF", "FoldingNet", "GraphSAGE", "NonLocalBlock",
           "PointNetSegmentation"]


def _perceptron(*widths: int) -> nn.Sequential:
    """ReLUs between linear layers."""
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class ConditionalNeuralProcess(nn.Module):
    """Garnelo et al. (2018), one-dimensional regression: pairs of the context ``(N, points, 2)`` and targets ``(N,
    others, 1)`` to means and deviations ``(N, others, 2)``."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.encoder = _perceptron(2, width, width, width, width)
        self.decoder = _perceptron(width + 1, width, width, 2)

    def forward(self, context: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        representation = self.encoder(context).mean(dim=1)
        repeated = representation.unsqueeze(1).repeat(1, targets.shape[1], 1)
        mean, deviation = self.decoder(torch.cat([repeated, targets], dim=-1)).chunk(2, dim=-1)
        return torch.cat([mean, 0.1 + 0.9 * nn.functional.softplus(deviation)], dim=-1)


class PointNetSegmentation(nn.Module):
    """Qi et al. (2017) without the learnt transform: points ``(N, 3, points)`` to scores ``(N, points, classes)``."""

    def __init__(self, classes: int = 50) -> None:
        super().__init__()
        self.local = self._layers(3, 64)
        self.rest = self._layers(64, 128, 1024)
        self.head = self._layers(1088, 512, 256, 128)
        self.classifier = nn.Conv1d(128, classes, 1)

    @staticmethod
    def _layers(*widths: int) -> nn.Sequential:
        return nn.Sequential(*(layer for i, o in pairwise(widths)
                               for layer in (nn.Conv1d(i, o, 1), nn.BatchNorm1d(o), nn.ReLU())))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        local = self.local(points)
        whole = self.rest(local).max(2, keepdim=True)[0].repeat(1, 1, points.shape[2])
        scores = self.classifier(self.head(torch.cat([whole, local], 1)))
        return scores.transpose(2, 1).log_softmax(-1)


class DeepSDF(nn.Module):
    """Park et al. (2019): a code ``(1, 256)`` and places ``(places, 3)`` to signed distances ``(places, 1)``."""

    def __init__(self, code: int = 256, width: int = 512) -> None:
        super().__init__()
        given = code + 3
        inputs = [given, width, width, width, width, width, width, width]
        outputs = [width, width, width, width - given, width, width, width, width]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(inputs, outputs, strict=True))
        self.last = nn.Linear(width, 1)

    def forward(self, code: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        given = x = torch.cat([code.expand(places.shape[0], -1), places], 1)
        for number, layer in enumerate(self.layers):
            x = torch.cat([x, given], 1) if number == 4 else x
            x = layer(x).relu()
        return self.last(x).tanh()


class FoldingNet(nn.Module):
    """The decoder of Yang et al. (2018): a code ``(1, 512)`` and places of the plane ``(places, 2)``, folded twice, to
    points ``(places, 3)``."""

    def __init__(self, code: int = 512) -> None:
        super().__init__()
        self.first, self.second = (_perceptron(code + given, code, code, 3) for given in (2, 3))

    def forward(self, code: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        repeated = code.repeat(grid.shape[0], 1)
        points = self.first(torch.cat([repeated, grid], 1))
        folded: torch.Tensor = self.second(torch.cat([repeated, points], 1))
        return folded


class NonLocalBlock(nn.Module):
    """Wang et al. (2018), the dot product of embeddings, keys and values of a quarter of the places: ``(N, channels,
    frames, height, width)`` to the same."""

    def __init__(self, channels: int = 512) -> None:
        super().__init__()
        inner = self.inner = channels // 2
        self.g = nn.Sequential(nn.Conv3d(channels, inner, 1), nn.MaxPool3d((1, 2, 2)))
        self.phi = nn.Sequential(nn.Conv3d(channels, inner, 1), nn.MaxPool3d((1, 2, 2)))
        self.theta = nn.Conv3d(channels, inner, 1)
        self.out = nn.Sequential(nn.Conv3d(inner, channels, 1), nn.BatchNorm3d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        g = self.g(x).view(n, self.inner, -1).permute(0, 2, 1)
        theta = self.theta(x).view(n, self.inner, -1).permute(0, 2, 1)
        f = torch.matmul(theta, self.phi(x).view(n, self.inner, -1))
        y = torch.matmul(f / f.size(-1), g).permute(0, 2, 1).contiguous()
        mixed: torch.Tensor = self.out(y.view(n, self.inner, *x.size()[2:]))
        return mixed + x


class GraphSAGE(nn.Module):
    """Hamilton et al. (2017), means of neighbours by an adjacency matrix: nodes ``(nodes, features)`` and ``(nodes,
    nodes)`` to scores ``(nodes, classes)``. Sizes are those of Cora."""

    def __init__(self, features: int = 1433, hidden: int = 64, classes: int = 7) -> None:
        super().__init__()
        pairs = list(pairwise((features, hidden, classes)))
        self.of_neighbours = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in pairs)
        self.of_itself = nn.ModuleList(nn.Linear(i, o) for i, o in pairs)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        for number, (others, own) in enumerate(zip(self.of_neighbours, self.of_itself, strict=True)):
            x = x.relu() if number else x
            mean = torch.matmul(adjacency, x) / adjacency.sum(dim=-1, keepdim=True).clamp(min=1)
            x = others(mean) + own(x)
        return x


class ACNet(nn.Module):
    """Ding et al. (2019), blocks as they are trained: ``(N, 64, H, W)`` to ``(N, widths[-1], …)``."""

    def __init__(self, widths: Sequence[int] = (64, 64, 128, 128, 256)) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_AsymmetricBlock(i, o, 1 if i == o else 2) for i, o in pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(x)
        return y


class _AsymmetricBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inputs, outputs, (h, w), stride, (h // 2, w // 2), bias=False),
                          nn.BatchNorm2d(outputs)) for h, w in ((3, 3), (3, 1), (1, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square, vertical, horizontal = (part(x) for part in self.parts)
        y: torch.Tensor = (square + vertical + horizontal).relu()
        return y
