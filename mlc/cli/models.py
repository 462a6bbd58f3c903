"""The argument MODEL: a file, or the name of a built-in network."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlc.errors import ModelError, UsageError

if TYPE_CHECKING:
    import onnx

__all__ = ["ModelArgument", "find_model"]


@dataclass(frozen=True)
class ModelArgument:
    """``text`` is what the user wrote, ``stem`` names files made from it; ``path`` is None for a built-in network."""

    text: str
    stem: str
    path: Path | None
    builtin: str | None = None

    @property
    def is_artifact(self) -> bool:
        """Whether it is a compiled module."""
        return self.path is not None and self.path.suffix == ".so"

    def source(self) -> Path | onnx.ModelProto:
        """The model in a form that :func:`mlc.compile` takes."""
        if self.path is not None:
            return self.path
        from mlc.networks.models import model_named

        return model_named(str(self.builtin))


def find_model(text: str) -> ModelArgument:
    """Raises :class:`ModelError` for a missing file and :class:`UsageError` for an unknown built-in name."""
    from mlc.networks.light import LIGHT_MODELS
    from mlc.networks.models import BATCHED_MODELS, EXPORTED_MODELS

    builtin = {name.replace("_", "-"): name for name in (*EXPORTED_MODELS, *BATCHED_MODELS)}
    if text in builtin:
        return ModelArgument(text, text, None, builtin[text])
    if text.startswith("light:"):
        name = text.removeprefix("light:")
        if name in LIGHT_MODELS:
            return ModelArgument(text, name, None, name)
        near = difflib.get_close_matches(name, LIGHT_MODELS, n=2) or LIGHT_MODELS
        raise UsageError(f"a light model must be one that the onnx package has, got {name!r}; try {', '.join(near)}")
    path = Path(text)
    if not path.is_file():
        names = difflib.get_close_matches(text, builtin, n=1)
        hint = f"did you mean {names[0]}?" if names else "give an .onnx file, light:squeezenet, bert-base or gpt2-small"
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ModelError(f"the model must be a file or a built-in name, but {text} {what}; {hint}")
    return ModelArgument(text, path.stem, path)
