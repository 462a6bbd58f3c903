"""Which rules a compile may apply: those whose certificates were checked, here or by this checker before.

What was checked is remembered by the hash of all that a rule says, its certificate included, and of the files that
decide about it: in the process, and in a file of the user's data folder, so that a rule is checked once on a machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from functools import cache
from pathlib import Path

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
    try:
        text = json.dumps(dump_rule(rule), sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):
        text = ""
    digest = hashlib.sha256(f"{_checker()} {text}".encode()).hexdigest()
    if text and digest not in _verdicts:
        _verdicts[digest] = digest in _remembered() or _checked(rule, digest)
    return _verdicts.get(digest, False)


def _checked(rule: Rule, digest: str) -> bool:
    from mlc.substitution.check import check_instance, check_proof, general_of

    try:
        general = general_of(rule)
        if general is None:
            check_proof(rule)
        elif trusted(general):  # once for all of its instances
            check_instance(rule, general)
        else:
            return False
    except MlcError as error:
        warnings.warn(f"a rule must have a valid certificate to be applied, but {error}; it is left out", stacklevel=4)
        return False
    _remember(digest)
    return True


@cache
def _checker() -> str:
    """The hash of what a verdict rests on: the checker, the reader of rules, the specifications."""
    room = Path(__file__).parent
    files = [*sorted((room / "check").glob("*.py")), *(room / f"{n}.py" for n in ("codec", "graph", "rule", "trust")),
             *sorted((room.parent / "operators").glob("*.py"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _remembered() -> set[str]:
    try:
        place = _place()
        return set(place.read_text("ascii").split()) if place.stat().st_size <= _MOST_BYTES else set()
    except (OSError, ValueError):
        return set()


def _remember(digest: str) -> None:
    """Note it for the next process; a folder that cannot be written to costs time alone."""
    known = _remembered()
    known.add(digest)
    place = _place()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if len(known) > _MOST else os.O_APPEND)
        handle = os.open(place, flags, 0o600)
        try:
            os.write(handle, f"{digest}\n".encode("ascii"))
        finally:
            os.close(handle)
    except OSError:
        pass


def _place() -> Path:
    return user_data_dir() / _FILE
