"""Networks written here as plain ``torch.nn`` modules, for :mod:`mlc.testing.models`."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

__all__ = ["MobileNetV2", "VisionTransformer"]

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
