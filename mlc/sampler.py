"""How a generator's next token is drawn."""

from __future__ import annotations

import numpy as np

from mlc.errors import UsageError

__all__ = ["Sampler"]


class Sampler:
    """Draws token ids: of logits divided by ``temperature``, the ``top_k`` largest (0: all), and of these the likeliest
    that together have the probability ``top_p``. Equal seeds draw equally.

    Before that, logits of tokens that were in the prompt or have been drawn are divided by ``repetition_penalty`` where
    they are positive and multiplied by it where they are not, as transformers does (Keskar et al., 2019)."""

    def __init__(
        self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0,
        repetition_penalty: float = 1.0,
    ) -> None:
        """Raises :class:`mlc.errors.UsageError` unless ``temperature > 0``, ``top_k >= 0``, ``0 < top_p <= 1`` and
        ``repetition_penalty > 0``."""
        if not (temperature > 0 and top_k >= 0 and 0 < top_p <= 1 and repetition_penalty > 0):
            raise UsageError("a sampler needs temperature > 0, top_k >= 0, 0 < top_p <= 1 and repetition_penalty > 0, "
                             f"got {temperature}, {top_k}, {top_p} and {repetition_penalty}")
        self._temperature, self._top_k, self._top_p, self._penalty = temperature, top_k, top_p, repetition_penalty
        self._rng = np.random.default_rng(seed)
        self._said = np.zeros((0, 0), np.bool_)

    def begin(self, prompt: np.ndarray, widths: np.ndarray, vocabulary: int, resume: bool = False) -> None:
        """A generator is about to go on from ``prompt``, ``[batch, tokens]``, of which the last ``widths`` of each
        sequence are tokens; ``resume`` says that what was said before still counts."""
        if not resume or self._said.shape != (len(prompt), vocabulary):
            self._said = np.zeros((len(prompt), vocabulary), np.bool_)
        for said, row, width in zip(self._said, prompt, widths, strict=True):
            said[row[len(row) - width:]] = True

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """``[batch, vocabulary]`` --> ``[batch]``."""
        scaled = np.asarray(logits, np.float64)
        if self._penalty != 1 and self._said.shape == scaled.shape:
            less = np.where(scaled < 0, scaled * self._penalty, scaled / self._penalty)
            scaled = np.where(self._said, less, scaled)
        drawn = self._drawn(scaled / self._temperature)
        if self._said.shape == scaled.shape:
            self._said[np.arange(len(drawn)), drawn] = True
        return drawn

    def _drawn(self, scaled: np.ndarray) -> np.ndarray:
        order = np.argsort(-scaled, axis=-1, kind="stable")
        ranked = np.take_along_axis(scaled, order, axis=-1)
        likely = np.exp(ranked - ranked[:, :1])
        if self._top_k:
            likely[:, self._top_k:] = 0
        likely /= likely.sum(-1, keepdims=True)
        likely[likely.cumsum(-1) - likely >= self._top_p] = 0  # the first always stays
        likely /= likely.sum(-1, keepdims=True)
        drawn = (likely.cumsum(-1) <= self._rng.random((len(likely), 1))).sum(-1)
        drawn = np.minimum(drawn, (likely > 0).sum(-1) - 1)  # where rounding leaves the sum below 1
        return np.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]
