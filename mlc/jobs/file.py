"""Parses and validates a jobs file: TOML with models, targets, budgets and priorities. Errors name the line.

::

    seconds = 3600                    # of each target; trials as well; with neither, until nothing gains any more
    missing = "wait"                  # for a target whose devices are not there; "skip" leaves it out

    [[models]]                        # or models = ["resnet.onnx", "light:squeezenet"]
    model = "resnet.onnx"             # a file, from this one's folder, or a built-in name
    priority = 3                      # how often it runs beside the others
    shape = { x = "1,3,224,224" }

    [[targets]]                       # or targets = ["x86-64-v3", "x86-64-v4"]
    target = "x86-64-v4"
    executor = "ray://10.0.0.5:6379/rack"
    trials = 20000
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from mlc.errors import UsageError
from mlc.measure.executors import parse
from mlc.shapes import Range, parse_shapes
from mlc.tuning.strategy import strategy_names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["MISSING", "JobModel", "JobTarget", "Jobs", "read"]

MISSING = ("skip", "wait")
_LONGEST = 1 << 16  # bytes of a file that people write


@dataclass(frozen=True)
class JobModel:
    """``model`` as on the command line. Its runs count ``priority`` times. ``line`` is where the file has it."""

    model: str
    priority: int = 1
    shapes: Mapping[str, tuple[Range, ...]] | None = None
    winograd: bool | None = None
    substitutions: bool | None = None
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class JobTarget:
    """One run: all models tuned for ``target`` by ``executor`` within ``trials`` and ``seconds``.

    ``missing`` says what becomes of it where no device is there: ``skip``, or ``wait`` for at most ``patience``
    seconds, for ever if that is None.
    """

    target: str
    executor: str = "local"
    trials: int | None = None
    seconds: float | None = None
    log: Path | None = None
    missing: str = "skip"
    patience: float | None = None
    line: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return self.target if self.executor == "local" else f"{self.target} on {self.executor}"


@dataclass(frozen=True)
class Jobs:
    """A file that was read. ``report`` is where the page goes, :attr:`results` where what it shows is kept."""

    path: Path
    models: tuple[JobModel, ...]
    targets: tuple[JobTarget, ...]
    report: Path
    seed: int = 0
    strategy: str = "evolutionary"

    @property
    def results(self) -> Path:
        """The results of the targets, as JSON."""
        return self.report.with_suffix(".json")

    def identity(self, target: JobTarget) -> str:
        """Equal where the same models are tuned for the same target by the same executor, whatever the budget."""
        models = [{**asdict(model), "shapes": repr(model.shapes), "line": 0} for model in self.models]
        text = json.dumps([models, target.target, target.executor, str(target.log), self.seed, self.strategy])
        return sha256(text.encode()).hexdigest()[:16]


def read(path: str | Path, executor: str = "local") -> Jobs:
    """Read a jobs file; ``executor`` measures for the targets that name none.

    Raises :class:`UsageError` in one line with the file and the line in it.
    """
    source = Path(path)
    try:
        text = source.read_bytes()[: _LONGEST + 1].decode()
    except FileNotFoundError:
        raise UsageError(f"a jobs file must exist, but {source} does not; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"a jobs file must be text that can be read, but {source} is not ({error})") from error
    if len(text) > _LONGEST:
        raise UsageError(f"a jobs file must have at most {_LONGEST} bytes, but {source} has more; is it one?")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: a jobs file must be TOML, but {error}") from error
    return _Reader(source, text, values, executor).jobs()


class _Wrong(Exception):
    """A value that cannot be meant; the message says what must hold and what came."""


Check = Callable[[Any], Any]


class _Reader:
    def __init__(self, path: Path, text: str, values: dict[str, Any], executor: str) -> None:
        self._path, self._lines, self._values = path, [line + "\n" for line in text.split("\n")], values
        self._executor = executor

    def jobs(self) -> Jobs:
        top = self._fields(self._values, (), {**_TARGET, **_TOP})
        given = {name: top[name] for name in _TARGET if name in top}
        models = self._list("models", top, lambda value, at: self._model(value, at))
        targets = self._list("targets", top, lambda value, at: self._target(value, at, given))
        for name, several in (("models", [(m.model, m.shapes) for m in models]),
                              ("targets", [(t.target, t.executor) for t in targets])):
            again = next((i for i, each in enumerate(several) if each in several[:i]), None)
            if again is not None:
                raise self._error((name, again), f"each of {name} must be given once, but {several[again][0]} came "
                                                 "twice")
        report = self._path.parent / top.get("report", f"{self._path.stem}.html")
        if report.suffix != ".html":
            raise self._error(("report",), f"report must name a file that ends in .html, got {report.name!r}")
        return Jobs(self._path, tuple(models), tuple(targets), report, top.get("seed", 0),
                    top.get("strategy", "evolutionary"))

    def _list(self, name: str, top: dict[str, Any], build: Callable[[Any, tuple[Any, ...]], Any]) -> list[Any]:
        values = top.get(name, [])
        if not values:
            raise UsageError(f"{self._path}: a jobs file must name {name}, but has none; add {name} = [...]")
        return [build(value, (name, i)) for i, value in enumerate(values)]

    def _model(self, value: Any, at: tuple[Any, ...]) -> JobModel:
        fields = self._fields({"model": value} if isinstance(value, str) else value, at, _MODEL, "model")
        shapes = fields.pop("shape", None)
        try:
            found = parse_shapes([f"{name}={shape}" for name, shape in shapes.items()]) if shapes else None
        except UsageError as error:
            raise self._error((*at, "shape"), str(error)) from error
        beside = self._path.parent / fields["model"]
        fields["model"] = str(beside) if beside.is_file() else fields["model"]
        return JobModel(**fields, shapes=found, line=self._line(at))

    def _target(self, value: Any, at: tuple[Any, ...], given: dict[str, Any]) -> JobTarget:
        fields = self._fields({"target": value} if isinstance(value, str) else value, at,
                              {"target": _text, **_TARGET}, "target")
        fields = {"executor": self._executor, **given, **fields}
        if fields.get("missing") == "wait" and parse(fields["executor"]) is None:
            if "missing" not in (value if isinstance(value, dict) else ()):
                del fields["missing"]  # said of all targets, and this one has nothing to wait for
            else:
                raise self._error((*at, "missing"), 'missing = "wait" is for devices that may come, but the executor '
                                                    'is local; give an executor, or "skip"')
        if "log" in fields:
            fields["log"] = self._path.parent / Path(fields["log"]).expanduser()
        return JobTarget(**fields, line=self._line(at))

    def _fields(
        self, values: Any, at: tuple[Any, ...], checks: Mapping[str, Check], needed: str = ""
    ) -> dict[str, Any]:
        """The values of a table, each checked."""
        if not isinstance(values, dict):
            raise self._error(at, f"an entry of {at[0]} must be text or a table, got {values!r}")
        found = {}
        for name, value in values.items():
            if name not in checks:
                near = difflib.get_close_matches(name, checks, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise self._error((*at, name), f"a key here must be one of {', '.join(checks)}, got {name}{hint}")
            try:
                found[name] = checks[name](value)
            except _Wrong as error:
                raise self._error((*at, name), f"{name} must be {error}, got {value!r}") from None
            except UsageError as error:
                raise self._error((*at, name), str(error)) from None
        if needed and needed not in found:
            raise self._error(at, f"an entry of {at[0]} must have the key {needed}, got {', '.join(values) or 'none'}")
        return found

    def _error(self, at: Sequence[Any], message: str) -> UsageError:
        return UsageError(f"{self._path}:{self._line(at)}: {message}")

    def _line(self, at: Sequence[Any]) -> int:
        """The line on which the statement begins that sets what is at a place of the document.

        TOML tells no lines of values, but what stands before the end of a statement is a document too: the first such
        part that has the place ends with its statement.
        """
        begins = 1
        for end, line in enumerate(self._lines, 1):
            if begins == end and not line.partition("#")[0].strip():
                begins = end + 1
                continue  # an empty one between two statements
            try:
                values = tomllib.loads("".join(self._lines[:end]))
            except tomllib.TOMLDecodeError:
                continue  # in the middle of a statement
            if _has(values, at):
                return begins
            begins = end + 1
        return begins


def _has(values: Any, at: Sequence[Any]) -> bool:
    for step in at:
        if isinstance(step, int):
            if not isinstance(values, list) or step >= len(values):
                return False
        elif not isinstance(values, dict) or step not in values:
            return isinstance(values, str)  # an entry that is text alone stands for its table
        values = values[step]
    return True


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise _Wrong(what)


def _text(value: Any) -> str:
    _must(isinstance(value, str) and value.strip() != "", "text")
    return str(value)


def _whole(least: int) -> Check:
    def check(value: Any) -> int:
        _must(type(value) is int and value >= least, f"a whole number from {least} on")
        return int(value)

    return check


def _seconds(value: Any) -> float:
    _must(type(value) in (int, float) and 0 < value < float("inf"), "a number of seconds above 0")
    return float(value)


def _boolean(value: Any) -> bool:
    _must(isinstance(value, bool), "true or false")
    return bool(value)


def _one_of(names: Sequence[str]) -> Check:
    def check(value: Any) -> str:
        _must(value in names, f"one of {', '.join(names)}")
        return str(value)

    return check


def _executor(value: Any) -> str:
    parse(_text(value))
    return str(value)


def _entries(value: Any) -> list[Any]:
    _must(isinstance(value, list), "a list")
    return list(value)


def _shapes(value: Any) -> dict[str, str]:
    _must(isinstance(value, dict) and all(isinstance(shape, str) for shape in value.values()),
          'a table of shapes such as { x = "1,3,224,224" }')
    return dict(value)


_MODEL: Mapping[str, Check] = {
    "model": _text, "priority": _whole(1), "shape": _shapes, "winograd": _boolean, "substitutions": _boolean,
}
_TARGET: Mapping[str, Check] = {
    "executor": _executor, "trials": _whole(1), "seconds": _seconds, "log": _text, "missing": _one_of(MISSING),
    "patience": _seconds,
}
_TOP: Mapping[str, Check] = {
    "models": _entries, "targets": _entries, "report": _text, "seed": _whole(0),
    "strategy": _one_of(strategy_names()),
}
