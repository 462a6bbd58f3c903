"""Which rules a compile may apply: those whose certificates were checked, here or by this checker before.

What was checked is remembered by the hash of all that a rule says, its certificate included, and of the files that
decide about it: in the process, and in a file of the user's data folder, so that a rule is checked once on a machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mlc.config import user_data_dir
from mlc.errors import MlcError
from mlc.substitution.codec import dump_rule
from mlc.substitution.rule import Rule

__all__ = ["trusted"]

#: hashes in the file at which it is begun anew
_MOST = 20_000
_MOST_BYTES = 80 * _MOST
_FILE = "checked-rules.txt"
_verdicts: dict[str, bool] = {}


def trusted(rule: Rule) -> bool:
    """Whether the rule's certificate is valid; a warning with the reason where it is not."""
    return _valid(rule, _checked)


def _valid(rule: Rule, check: Callable[[Rule], bool]) -> bool:
    """What was found of the rule before, or else what ``check`` finds, which may raise an error with the reason."""
    try:
        text = json.dumps(dump_rule(rule), sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):
        text = ""
    digest = hashlib.sha256(f"{_checker()} {text}".encode()).hexdigest()
    if text and digest not in _verdicts:
        found = digest in _remembered().digests
        if not found:
            try:
                found = check(rule)
            except MlcError as error:
                warnings.warn(f"a rule must have a valid certificate to be applied, but {error}; it is left out",
                              stacklevel=4)
            if found:
                _remember(digest)
        _verdicts[digest] = found
    return _verdicts.get(digest, False)


def _checked(rule: Rule) -> bool:
    from mlc.substitution.check import check_instance, general_of

    general = general_of(rule)
    if general is None:
        return _proved(rule)
    if not _valid(general, _proved):  # once for all of its instances
        return False
    check_instance(rule, general)
    return True


def _proved(rule: Rule) -> bool:
    from mlc.substitution.check import check_proof

    check_proof(rule)
    return True


@cache
def _checker() -> str:
    """The hash of what a verdict rests on: the checker, the reader of rules, the specifications."""
    room = Path(__file__).parent
    files = [*sorted((room / "check").glob("*.py")), *(room / f"{n}.py" for n in ("codec", "graph", "rule", "trust")),
             *sorted((room.parent / "operators").glob("*.py"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


class _Remembered(NamedTuple):
    place: Path
    digests: set[str]


@cache
def _remembered() -> _Remembered:
    place = user_data_dir() / _FILE
    try:
        known = place.read_text("ascii").split() if place.stat().st_size <= _MOST_BYTES else ()
    except (OSError, ValueError):
        known = ()
    return _Remembered(place, set(known))


def _remember(digest: str) -> None:
    """Note it for the next process; a folder that cannot be written to costs time alone."""
    place, known = _remembered()
    known.add(digest)
    try:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if len(known) > _MOST else os.O_APPEND)
        try:
            handle = os.open(place, flags, 0o600)
        except FileNotFoundError:  # the folder is not there yet
            place.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(place, flags, 0o600)
        try:
            os.write(handle, f"{digest}\n".encode("ascii"))
        finally:
            os.close(handle)
    except OSError:
        pass
