"""The jobs file: what it says, and what is wrong in it by its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlc.cli.main import main
from mlc.errors import UsageError
from mlc.jobs.file import Jobs, read
from mlc.shapes import Range

FULL = """\
# what the rack does at night
seconds = 3600
missing = "wait"
executor = "ray://10.0.0.5:6379/rack"
report = "night.html"

models = [
    "light:squeezenet",
    { model = "net.onnx", priority = 3, shape = { x = "1,3,224,224" } },
]

[[targets]]
target = "x86-64-v4"
trials = 20_000
patience = 60

[[targets]]
target = "native"
executor = "local"
missing = "skip"
log = "native.db"
"""


def _read(folder: Path, text: str, **more: Any) -> Jobs:
    (folder / "jobs.toml").write_text(text)
    return read(folder / "jobs.toml", **more)


def test_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").touch()
    jobs = _read(tmp_path, FULL)
    assert [(m.model, m.priority, m.line) for m in jobs.models] == [
        ("light:squeezenet", 1, 7), (str(tmp_path / "net.onnx"), 3, 7)]
    assert jobs.models[1].shapes == {"x": tuple(Range(n, n) for n in (1, 3, 224, 224))}
    rack, here = jobs.targets
    assert (rack.target, rack.executor, rack.trials, rack.seconds, rack.missing, rack.patience, rack.line) == (
        "x86-64-v4", "ray://10.0.0.5:6379/rack", 20_000, 3600.0, "wait", 60.0, 12)
    assert (here.executor, here.missing, here.log, here.trials, here.line) == (
        "local", "skip", tmp_path / "native.db", None, 17)
    assert jobs.report == tmp_path / "night.html" and jobs.results == tmp_path / "night.json"


def test_the_least_that_it_can_say(tmp_path: Path) -> None:
    jobs = _read(tmp_path, 'models = ["a.onnx"]\ntargets = ["native"]\n', executor="ray")
    assert [m.model for m in jobs.models] == ["a.onnx"] and jobs.targets[0].executor == "ray"
    assert jobs.targets[0].missing == "skip" and jobs.report == tmp_path / "jobs.html"


def test_what_all_targets_wait_for_is_nothing_for_a_local_one(tmp_path: Path) -> None:
    jobs = _read(tmp_path, 'missing = "wait"\nmodels = ["a"]\ntargets = ["native", '
                           '{ target = "x86-64-v3", executor = "rpc://h:9190/board" }]\n')
    assert [target.missing for target in jobs.targets] == ["skip", "wait"]


def test_the_identity_is_that_of_the_work_and_not_of_the_budget(tmp_path: Path) -> None:
    base = 'models = ["a"]\ntargets = ["native"]\n'
    names = {}
    for name, text in (("base", base), ("budget", f"seconds = 5\n{base}"), ("comment", f"#\n{base}"),
                       ("seed", f"seed = 1\n{base}"), ("model", base.replace('"a"', '"a", "b"')),
                       ("priority", base.replace('"a"', '{ model = "a", priority = 2 }'))):
        jobs = _read(tmp_path, text)
        names[name] = jobs.identity(jobs.targets[0])
    assert names["base"] == names["budget"] == names["comment"]
    assert len({names[name] for name in ("base", "seed", "model", "priority")}) == 4


BASE = 'models = ["a"]\ntargets = ["native"]\n'
WRONG = [
    ("seconds = 5\nsecnds = 6\n" + BASE, 2, "got secnds; did you mean seconds?"),
    (FULL.replace("priority = 3", "prority = 3"), 7, "a key here must be one of model, priority, shape"),
    (FULL.replace("patience = 60", "patiense = 60"), 15, "did you mean patience?"),
    (FULL.replace('missing = "skip"', 'missing = "no"'), 20, "missing must be one of skip, wait, got 'no'"),
    (FULL.replace('missing = "skip"', 'missing = "wait"'), 20, 'missing = "wait" is for devices that may come'),
    (FULL.replace("trials = 20_000", "trials = 0"), 14, "trials must be a whole number from 1 on, got 0"),
    (FULL.replace("trials = 20_000", "trials = true"), 14, "trials must be a whole number from 1 on, got True"),
    (FULL.replace("seconds = 3600", "seconds = inf"), 2, "seconds must be a number of seconds above 0, got inf"),
    (FULL.replace("ray://10", "http://10"), 4, "the executor must be one of local, ray"),
    (FULL.replace('x = "1,3,224,224"', 'x = "1,3,,224"'), 7, "a size must be a number or a range such as 1..32"),
    (FULL.replace('x = "1,3,224,224"', "x = [1, 3]"), 7, "shape must be a table of shapes"),
    ('models = ["a", 3]\ntargets = ["native"]\n', 1, "an entry of models must be text or a table, got 3"),
    ('models = ["a"]\n\n# without its target\n[[targets]]\ntrials = 3\n', 4, "must have the key target, got trials"),
    ('models = "a"\ntargets = ["native"]\n', 1, "models must be a list, got 'a'"),
    ('models = ["a",\n  "b",\n  "a"]\ntargets = ["native"]\n', 1, "each of models must be given once, but a came"),
    (BASE + 'report = """\nx\n"""\n', 3, "report must name a file that ends in .html"),
    (BASE + 'note = """\nseconds = 1\n"""\n\nstrategy = "best"\n', 3, "got note"),
    ('models = ["a"]\n[[targets]]\ntarget = "x"\n[targets.more]\ny = 1\n', 4, "got more"),
]


@pytest.mark.parametrize(("text", "line", "says"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        _read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'jobs.toml'}:{line}: ") and says in message and "\n" not in message


@pytest.mark.parametrize(("text", "says"), [
    ('models = ["a"]\n', "must name targets, but has none"), ("", "must name models, but has none"),
    ("models = [\n", "must be TOML, but"), ("a = 1\na = 2\n", "line 2"), ("#" * 100_000, "at most 65536 bytes"),
    ("models = []\ntargets = ['native']\n", "must name models"),
])
def test_what_is_no_jobs_file(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        _read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_file_of_many_lines_is_told_of_soon(tmp_path: Path) -> None:
    text = BASE + "\n" * 20_000 + "x = 1\n"
    with pytest.raises(UsageError, match=r"jobs\.toml:20003: "):
        _read(tmp_path, text)


@pytest.mark.parametrize(("words", "says"), [
    (["tune", "none.toml"], "must exist, but none.toml does not"),
    (["jobs", "show", "none.toml"], "must exist, but none.toml does not"),
    (["tune", "jobs.toml", "--trials", "5"], "--trials is for one model"),
    (["tune", "jobs.toml", "--target", "llvm"], "--target is for one model"),
    (["tune", "jobs.toml", "--shape", "x=1"], "--shape is for one model"),
    (["tune", "light:squeezenet", "--dry-run"], "--dry-run is for jobs files"),
    (["tune", "wrong.toml"], "wrong.toml:1: a key here must be one of"),
    (["jobs", "show", "wrong.toml"], "wrong.toml:1: a key here must be one of"),
])
def test_the_command_line(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("jobs.toml").write_text(BASE)
    Path("wrong.toml").write_text("modles = []\n" + BASE)
    assert main(words) == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.err.count("\n") == 1
