"""The errors that users see: one line that says what must hold, what was given, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlc.text import one_line

__all__ = [
    "ArtifactError", "BuildError", "CodeGenerationError", "InputError", "InstallationError", "LogError",
    "MeasureError", "MlcError", "ModelError", "TargetError", "UnsupportedOperators", "UsageError",
    "ValuesNeededError",
]


class MlcError(Exception):
    """Base of every error raised on purpose. The command line prints it as one line and exits with 1.

    Messages quote files and models, so that what would command a terminal is shown and not obeyed.
    """

    exit_code = 1

    def __str__(self) -> str:
        return one_line(super().__str__())


class UsageError(MlcError):
    """The caller asked for something that does not exist or does not fit together (exit code 2)."""

    exit_code = 2


class TargetError(UsageError):
    """The target's name or its options cannot be understood."""


class ModelError(MlcError):
    """The model file is missing, broken, or outside what can be imported."""


class UnsupportedOperators(ModelError):
    """The model uses operators that cannot be imported; every one is listed with the nodes that use it."""

    def __init__(self, operators: dict[str, list[str]]) -> None:
        self.operators = operators
        parts = []
        for name, nodes in sorted(operators.items()):
            shown = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
            parts.append(f"{name} (used by {shown})")
        super().__init__(
            f"every operator must be importable, but {len(operators)} are not: {'; '.join(parts)}; "
            "replace them in the model or export it with another opset"
        )


class ValuesNeededError(ModelError):
    """Inputs decide shapes, so that their values must be known: ``names`` of all ``inputs`` of the model.

    Or it must be known what ``containers`` hold, sequences and optionals by name and kind, as of ``unknown`` it is not.
    ``outputs`` are the model's, by name and kind, and ``shapes`` what was said of inputs.
    """

    def __init__(
        self, model: str, inputs: list[str], names: list[str], containers: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None, unknown: str = "", shapes: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.inputs, self.names = model, inputs, names
        self.containers, self.outputs, self.shapes = containers or {}, outputs or {}, shapes or {}
        if unknown:
            kind = self.containers[unknown]
            article = "an" if kind.startswith("o") else "a"
            super().__init__(f"what inputs hold must be known when a model is compiled, but {unknown} of {model} is "
                             f"{article} {kind}; give the shape of each of its tensors: --shape {unknown}/0=…, or "
                             f"shapes={{{unknown!r}: …}}")
            return
        shown = ", ".join(names)
        super().__init__(f"shapes must be known when a model is compiled, but those of {model} depend on the values of "
                         f"its inputs {shown}; give them: --value {names[0]}=…, or values={{{names[0]!r}: …}}")


class InputError(MlcError):
    """An array given to a compiled model has the wrong name, shape or type."""


class ArtifactError(MlcError):
    """A compiled module cannot be read, or was not built for this machine."""


class LogError(MlcError):
    """The tuning log cannot be read or written."""


class MeasureError(MlcError):
    """Measuring cannot go on at all (no worker could be started); single candidates never raise this."""


class BuildError(MlcError):
    """Code generation failed for a function that should have built."""


class CodeGenerationError(BuildError):
    """TVM or nvcc refuses to make code of a module; finding and linking what makes it is another matter."""


class InstallationError(MlcError):
    """The installed packages do not work together."""
