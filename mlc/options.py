"""Compile options, as one value that is passed to every pass, search and tuning run."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mlc.config import get_flag
from mlc.errors import UsageError

__all__ = ["DEFAULT_OPTIONS", "PRECISIONS", "CompileOptions"]

#: what products of float32 may be rounded to, the exact one first
PRECISIONS = ("f32", "tf32", "f16", "bf16")


@dataclass(frozen=True)
class CompileOptions:
    """What a compilation may do, independent of its target.

    ``forbidden`` are algorithms that must not be used (:mod:`mlc.graph.algorithms`), by name or by family: those that
    round more than the operator's own sum does, say. ``substitutions``: whether proved rules may replace the model's
    graph. ``precision``, one of :data:`PRECISIONS`, is what operands of float32 products may be rounded to
    (:mod:`mlc.graph.precision.reduced`). ``integers``: whether products of quantised operands may be computed in
    integers rather than in float32 as the model spells them, and activations rounded to 8 bits for that where the model
    allows it (:mod:`mlc.frontend.accuracy`).

    To add an option, add a field: everything receives this value as a whole, and decisions that were stored under the
    field's default keep their names (:attr:`canonical`).
    """

    forbidden: frozenset[str] = frozenset()
    substitutions: bool = True
    precision: str = "f32"
    integers: bool = True

    @classmethod
    def of(
        cls, *, winograd: bool | None = None, substitutions: bool | None = None, precision: str = "f32",
        integers: bool | None = None,
    ) -> CompileOptions:
        """The options as users give them; what is None is left to ``MLC_WINOGRAD``, ``MLC_SUBSTITUTIONS``
        and ``MLC_INTEGERS``.

        Raises :class:`mlc.errors.UsageError` for a setting that is neither 0 nor 1, and for an unknown precision.
        """
        if precision not in PRECISIONS:
            raise UsageError(f"the precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        winograd = get_flag("MLC_WINOGRAD") if winograd is None else winograd
        substitutions = get_flag("MLC_SUBSTITUTIONS") if substitutions is None else substitutions
        integers = get_flag("MLC_INTEGERS") if integers is None else integers
        return cls(frozenset() if winograd else frozenset({"winograd"}), substitutions, precision, integers)

    @property
    def canonical(self) -> str:
        """The options that differ from the defaults, as text; part of the names under which decisions are stored."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={','.join(sorted(value)) if isinstance(value, frozenset) else value}"
                        for name, value in changed.items())


#: nothing is forbidden, whatever the settings say
DEFAULT_OPTIONS = CompileOptions()
