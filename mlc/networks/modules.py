"""Networks written here as plain ``torch.nn`` modules, for the tables of models and of architectures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

__all__ = [
    "C3D", "DCGAN", "DLRM", "CSRNet", "Detector", "First", "Mixer", "MobileNetV2", "TemporalConvolutions", "UNet",
    "VisionTransformer",
]

#: expansion, output channels, repeats and first stride of each stage (Sandler et al., 2018, table 2)
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, active: bool = True
                 ) -> nn.Sequential:
    layers: list[tuple[str, nn.Module]] = [
        ("conv", nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)),
        ("norm", nn.BatchNorm2d(outputs)),
    ]
    if active:
        layers.append(("act", nn.ReLU6()))
    return nn.Sequential(OrderedDict(layers))


class _InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers = [_convolution(inputs, hidden)] if expansion > 1 else []
        layers += [_convolution(hidden, hidden, 3, stride, hidden), _convolution(hidden, outputs, active=False)]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (2018), at width 1.

    f32 ``(N, 3, 224, 224)`` to scores ``(N, 1000)``. Weights and the statistics of its norms are drawn from torch's
    generator so that activations stay near one.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 32, 3, 2)]
        channels = 32
        for expansion, outputs, repeats, stride in _STAGES:
            for index in range(repeats):
                layers.append(_InvertedResidual(channels, outputs, stride if index == 0 else 1, expansion))
                channels = outputs
        self.features = nn.Sequential(*layers, _convolution(channels, 1280))
        self.classifier = nn.Linear(1280, 1000)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
                nn.init.uniform_(module.running_var, 0.6, 1.6)
                nn.init.normal_(module.running_mean, std=0.1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.features(image).mean((2, 3)))
        return scores


class Detector(nn.Module):
    """SSDLite (Sandler et al., 2018) on MobileNetV2's features at strides of 16 and 32, and two coarser levels.

    f32 ``(N, 3, H, W)`` to offsets ``(N, anchors, 4)`` and scores ``(N, anchors, 21)``, six anchors at each place.
    """

    def __init__(self, classes: int = 21, anchors: int = 6) -> None:
        super().__init__()
        features = MobileNetV2().features
        self.fine, self.coarse = features[:14], features[14:]
        self.extras = nn.ModuleList([_InvertedResidual(1280, 512, 2, 1), _InvertedResidual(512, 256, 2, 1)])
        widths = (96, 1280, 512, 256)
        self.boxes, self.scores = (
            nn.ModuleList(nn.Sequential(_convolution(width, width, 3, groups=width),
                                        nn.Conv2d(width, anchors * numbers, 1)) for width in widths)
            for numbers in (4, classes))
        self.numbers = 4, classes

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        levels = [self.fine(image)]
        levels.append(self.coarse(levels[0]))
        for extra in self.extras:
            levels.append(extra(levels[-1]))
        return tuple(
            torch.cat([head(level).permute(0, 2, 3, 1).reshape(level.shape[0], -1, numbers)
                       for head, level in zip(heads, levels, strict=True)], 1)
            for heads, numbers in zip((self.boxes, self.scores), self.numbers, strict=True))


class _Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values, written out in plain operators."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(n, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = ((q * (dim // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(-1)
        y: torch.Tensor = self.out((weights @ v).transpose(1, 2).reshape(n, tokens, dim))
        return y


class _Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attention = _Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class VisionTransformer(nn.Module):
    """Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020): f32 ``(N, 3, image, image)`` to ``(N, 1000)``.

    The defaults are the Tiny of Touvron et al., "Training data-efficient image transformers" (2021).
    """

    def __init__(self, image: int = 224, patch: int = 16, dim: int = 192, depth: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(0.5 * torch.randn(1, (image // patch) ** 2 + 1, dim))
        self.layers = nn.Sequential(*(_Layer(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, 1000)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        scores: torch.Tensor = self.head(self.norm(self.layers(x))[:, 0])
        return scores


class First(nn.Module):
    """``module`` called with its inputs by name; the first of its outputs."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)

    def forward(self, *inputs: torch.Tensor) -> Any:
        outputs = self.module(**dict(zip(self.names, inputs, strict=True)))
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


class UNet(nn.Module):
    """Ronneberger et al., "U-Net" (2015), with padding and norms: f32 ``(N, 3, H, W)`` to ``(N, 2, H, W)``."""

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(self._pair(i, o) for i, o in [(3, widths[0]), *pairs])
        self.widen = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, 2) for i, o in reversed(pairs))
        self.up = nn.ModuleList(self._pair(2 * i, i) for i, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(_convolution(inputs, outputs, 3), _convolution(outputs, outputs, 3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x, kept = self.down[0](image), []
        for down in self.down[1:]:
            kept.append(x)
            x = down(nn.functional.max_pool2d(x, 2))
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([widen(x), kept.pop()], 1))
        scores: torch.Tensor = self.head(x)
        return scores


class DCGAN(nn.Sequential):
    """The generator of Radford et al. (2016): f32 ``(N, noise, 1, 1)`` to images of ``4 * 2 ** len(widths)`` pixels."""

    def __init__(self, noise: int = 100, widths: Sequence[int] = (512, 256, 128, 64)) -> None:
        layers: list[nn.Module] = []
        for index, (i, o) in enumerate(zip((noise, *widths), widths, strict=False)):
            stride, pad = (2, 1) if index else (1, 0)
            layers += [nn.ConvTranspose2d(i, o, 4, stride, pad, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        super().__init__(*layers, nn.ConvTranspose2d(widths[-1], 3, 4, 2, 1), nn.Tanh())


class TemporalConvolutions(nn.Sequential):
    """Convolutions over time whose dilation doubles (Bai et al., 2018): f32 ``(N, width, time)`` to the same."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        convolutions = (nn.Conv1d(width, width, 3, padding=2**n, dilation=2**n) for n in range(depth))
        super().__init__(*(layer for conv in convolutions for layer in (conv, nn.ReLU())))


class C3D(nn.Sequential):
    """Three-dimensional convolutions, as in Tran et al. (2015): f32 ``(N, 3, frames, H, W)`` to ``(N, 10)``."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv3d(3, width, 3, (1, 2, 2), 1), nn.ReLU(), nn.Conv3d(width, 2 * width, 3, 1, 1), nn.ReLU(),
            nn.MaxPool3d(2), nn.Conv3d(2 * width, 2 * width, 3, 1, 1), nn.ReLU(),
            nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2 * width, 10),
        )


class CSRNet(nn.Sequential):
    """Li et al., "CSRNet: Dilated Convolutional Neural Networks for Understanding the Highly Congested Scenes" (2018).

    f32 ``(N, 3, H, W)`` to densities ``(N, 1, H/8, W/8)``: the first ten layers of VGG-16, ``width`` channels wide at
    the first, and six convolutions of dilation 2.
    """

    def __init__(self, width: int = 64) -> None:
        front = (width, width, 0, 2 * width, 2 * width, 0, *[4 * width] * 3, 0, *[8 * width] * 3)
        layers: list[nn.Module] = []
        channels = 3
        for outputs, dilation in [(each, 1) for each in front] + [(each * width, 2) for each in (8, 8, 8, 4, 2, 1)]:
            if outputs:
                layers += [nn.Conv2d(channels, outputs, 3, padding=dilation, dilation=dilation), nn.ReLU()]
            else:
                layers.append(nn.MaxPool2d(2))
            channels = outputs or channels
        super().__init__(*layers, nn.Conv2d(channels, 1, 1))
        for layer in self:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)


class DLRM(nn.Module):
    """Naumov et al., "Deep Learning Recommendation Model" (2019): f32 ``(N, 13)`` and int64 ``(N, tables)`` to one
    probability; the products of each pair of embeddings between two perceptrons."""

    def __init__(self, tables: int = 26, rows: int = 1000, dim: int = 64, hidden: int = 512) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(tables))
        self.bottom = self._perceptron(13, hidden, hidden // 2, dim)
        self.top = self._perceptron(dim + tables * (tables + 1) // 2, hidden, hidden // 2)
        self.head = nn.Linear(hidden // 2, 1)
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", first * (tables + 1) + second)

    @staticmethod
    def _perceptron(*widths: int) -> nn.Sequential:
        return nn.Sequential(*(layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())))

    def forward(self, dense: torch.Tensor, category_ids: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(category_ids[:, n]) for n, table in enumerate(self.embeddings))], 1)
        products = (rows @ rows.transpose(1, 2)).flatten(1)[:, self.pairs]
        scores: torch.Tensor = self.head(self.top(torch.cat([x, products], 1)))
        return scores.sigmoid()


class Mixer(nn.Module):
    """Tolstikhin et al., "MLP-Mixer" (2021), patches of 16 pixels: f32 ``(N, 3, image, image)`` to ``(N, dim)``."""

    def __init__(self, image: int = 224, dim: int = 256, depth: int = 4) -> None:
        super().__init__()
        tokens = (image // 16) ** 2
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.tokens = nn.ModuleList(self._perceptron(tokens, dim // 2) for _ in range(depth))
        self.channels = nn.ModuleList(self._perceptron(dim, 4 * dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))

    @staticmethod
    def _perceptron(width: int, hidden: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for n, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * n](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * n + 1](x))
        return x.mean(1)
