"""``mlc log train``, ``evaluate``, ``prune`` and the plots, over a log whose times follow a rule."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tvm import te

from cost_model.pretrained import Pretrained
from mlc.cli.main import main
from mlc.graph.task import Task, normalise
from mlc.log import Record, TuningLog, Workload
from mlc.target import resolve
from mlc.tuning.candidate import TaskSpace
from mlc.tuning.learn import cold_of, note_origin, origins_of, pretrained, samples_of

EACH = 12


def _task(rows: int, columns: int) -> Task:
    a, b = te.placeholder((rows, 48), name="a"), te.placeholder((48, columns), name="b")
    k = te.reduce_axis((0, 48), name="k")
    func = te.create_prim_func([a, b, te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=[k]))])
    return Task(f"gemm{rows}", normalise(func), resolve("x86-64-v3", threads=1), constants=(1,), constant_bytes=1 << 30)


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four small products whose candidates are the faster, the larger the register tile."""
    path = tmp_path_factory.mktemp("model") / "log.db"
    rng = random.Random(0)
    with TuningLog(path) as log:
        for rows, columns in ((16, 32), (24, 64), (32, 48), (40, 96)):
            task = _task(rows, columns)
            space, found = TaskSpace(task), {}
            while len(found) < EACH:
                candidate = space.realise(space.sample(rng))
                if candidate is not None:
                    found[candidate.code] = candidate
            log.put_workloads([Workload.of(task)])
            log.append(
                Record(task.key, task.name, c.space, dict(c.decisions), c.trace, (1e-3 / (c.decisions["m"] + i / 99),),
                       session="s", trial=i, when=1e9 + i)
                for i, c in enumerate(found.values())
            )
            log.append([Record(task.key, task.name, "cpu.gemm", {}, "[[],[]", failure="build", detail="torn")])
    return path


def _json(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict:  # type: ignore[type-arg]
    assert main([*map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_samples_are_the_schedules_that_replay(log_path: Path) -> None:
    with TuningLog(log_path, readonly=True) as log:
        samples, task = list(samples_of(log)), next(log.workloads()).task()
        assert not list(samples_of(log, "cuda"))
    assert len(samples) == 4 * EACH and not any(s.failed for s in samples)
    assert cold_of(task) == (1,) and any(s.features.vector[-1] >= 0 for s in samples)


def test_a_model_is_trained_and_evaluated_on_tasks_it_has_not_seen(
    log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _json(capsys, "log", "train", log_path, "-o", tmp_path / "model.npz", "--evaluate", "--folds", 2)
    assert (found["tasks"], found["samples"]) == (4, 4 * EACH) and found["bytes"] == len(
        (tmp_path / "model.npz").read_bytes()
    )
    held_out = found["held_out"]
    assert set(held_out) == {"learned", "roofline", "random"} and held_out["learned"]["tasks"] == 4
    assert held_out["learned"]["pairs"] > held_out["random"]["pairs"] and abs(held_out["random"]["pairs"] - 0.5) < 0.1
    assert _json(capsys, "log", "evaluate", log_path, "--folds", 2)["held_out"] == held_out
    Pretrained.load((tmp_path / "model.npz").read_bytes())
    assert main(["log", "evaluate", str(log_path)]) == 0
    text = capsys.readouterr().out
    assert "analytic estimate alone" in text and "seen none of its samples" in " ".join(text.split())


def test_models_are_left_out_one_by_one(
    log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "log.db"
    with TuningLog(log_path, readonly=True) as log, TuningLog(copy) as other:
        other.put_workloads(log.workloads())
        other.append(log.records())
        keys = [workload.task_key for workload in log.workloads()]
        assert main(["log", "evaluate", str(copy), "--by-model"]) == 1
        assert "two of them" in capsys.readouterr().err
        note_origin(other, "first", keys[:2])
        note_origin(other, "second", keys[1:])
        assert origins_of(other)[keys[1]] == {"first", "second"} and origins_of(other)[keys[0]] == {"first"}
    found = _json(capsys, "log", "evaluate", copy, "--by-model")["held_out"]
    assert found["learned"]["tasks"] == 4 and found["learned"]["spread"]["tasks"] == 4


def test_a_log_that_does_not_say_what_its_tasks_compute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TuningLog(tmp_path / "log.db") as log:
        log.append([Record("0-llvm-tvm1-llvm1", "t", "s", {}, "[]", (1.0,))])
    assert main(["log", "train", str(tmp_path / "log.db"), "-o", str(tmp_path / "m.npz")]) == 1
    assert "must say what its tasks compute" in capsys.readouterr().err
    with TuningLog(tmp_path / "empty.db"):
        pass
    assert main(["log", "evaluate", str(tmp_path / "empty.db")]) == 1
    error = capsys.readouterr().err
    assert "give logs with more tasks" in error and error.count("\n") == 1
    assert main(["log", "train", str(tmp_path / "log.db"), "-o", str(tmp_path / "no" / "m.npz")]) == 2


def test_prune_and_plot(log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "log", "prune", tmp_path / "new.db", "--log", log_path, "--keep", 2, "--sample", 3)
    assert (found["before"], found["after"]) == (4 * (EACH + 1), 4 * 5)
    assert main(["log", "prune", str(tmp_path / "new.db"), "--log", str(log_path)]) == 1
    assert "give another name" in capsys.readouterr().err
    page = tmp_path / "log.html"
    assert _json(capsys, "log", "show", "--log", log_path, "--plot", page)["records"] == 4 * (EACH + 1)
    assert page.read_text().count("<svg") == 2
    picture = tmp_path / "one.png"
    assert _json(capsys, "log", "show", "--log", log_path, "--task", "gemm16", "--plot", picture)["records"] == EACH + 1
    assert main(["log", "show", "--log", str(log_path), "--plot", str(tmp_path / "x.gif")]) == 2


def test_a_metaschedule_database_goes_out_and_in(
    log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = _json(capsys, "log", "export", tmp_path / "theirs", "--metaschedule", "--log", log_path)
    assert (out["records"], out["tasks"]) == (4 * 8, 4)
    target = ("--target", "x86-64-v3 -num-cores=1")
    back = _json(capsys, "log", "import", tmp_path / "theirs", "--log", tmp_path / "back.db", *target)
    assert back["tasks"] == 4 and back["records"] >= 4 * 8
    assert main(["log", "import", str(tmp_path), "--log", str(tmp_path / "back.db"), *target]) == 1
    assert "is a folder with database_workload" in capsys.readouterr().err


def test_the_shipped_model_is_of_this_version() -> None:
    model, problem = pretrained(resolve("x86-64-v4", threads=2))
    assert model is not None and problem == ""
    assert pretrained(resolve("cuda:sm_90")) == (None, "")


def test_a_shipped_model_of_other_features_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlc.tuning import learn

    learn._read.cache_clear()
    monkeypatch.setattr("cost_model.pretrained.LOOP_FEATURES", ("other",))
    model, problem = pretrained(resolve("x86-64-v4", threads=2))
    learn._read.cache_clear()
    assert model is None and "is not used" in problem and "this version's features" in problem
