"""A log tuned here speeds up plain TVM, and a database tuned there compiles here: the functions both graphs have."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from log_records import record
from tvm import relax, te, tirx
from tvm.s_tir.meta_schedule.database import JSONDatabase

from cost_model.features import extract
from mlc.errors import LogError
from mlc.graph.task import Task, normalise
from mlc.log import Record, TuningLog, Workload
from mlc.log.metaschedule import SPACE, export_database, import_database, is_database
from mlc.target import Target, resolve
from mlc.testing.programs import program
from mlc.tuning.candidate import TaskSpace
from schedules.trace import replay

ROWS, COLUMNS = 37, 96


@pytest.fixture(scope="module")
def target() -> Target:
    return resolve("native", threads=1)


@pytest.fixture(scope="module")
def graph() -> tvm.IRModule:
    return program({"x": ((ROWS, COLUMNS), "float32"), "y": ((COLUMNS, 64), "float32")},
                   lambda builder, p: [builder.emit(relax.op.nn.softmax(builder.emit(relax.op.matmul(*p))))])


def _tasks(graph: tvm.IRModule, target: Target) -> list[Task]:
    """The functions of plain TVM's graph as tasks of ours."""
    passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(), relax.transform.FoldConstant(),
              relax.transform.FuseOps(), relax.transform.FuseTIR()]
    with target.tvm:
        mod = tvm.transform.Sequential(passes)(graph)
    functions = [(v.name_hint, f) for v, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    return [Task(name, normalise(f), target) for name, f in sorted(functions)]


def _tuned(tasks: list[Task], path: Path) -> None:
    with TuningLog(path) as log:
        log.put_workloads(map(Workload.of, tasks))
        for task in tasks:
            best = TaskSpace(task).default
            assert best is not None
            log.append([Record(task.key, task.name, best.space, dict(best.decisions), best.trace, (1e-5, 2e-5))])
        log.append([record(0)])  # of a task that the log knows nothing else of


def test_a_log_tuned_here_is_found_by_plain_tvm(tmp_path: Path, graph: tvm.IRModule, target: Target) -> None:
    from tvm.s_tir.meta_schedule.database import JSONDatabase
    from tvm.s_tir.meta_schedule.relax_integration import compile_relax

    tasks = _tasks(graph, target)
    _tuned(tasks, tmp_path / "log.db")
    with TuningLog(tmp_path / "log.db") as log:
        done = export_database(log, tmp_path / "theirs")
    assert (done.records, done.tasks) == (len(tasks), len(tasks)) and len(tasks) == 2
    assert done.skipped == {"without what their tasks compute": 1}
    database = JSONDatabase(work_dir=str(tmp_path / "theirs"))
    with target.tvm, database:
        fused = tvm.transform.Sequential([
            relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(), relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
        ])(graph)
        applied = relax.transform.MetaScheduleApplyDatabase()(fused)
    scheduled = [f for _, f in applied.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert all("tirx.is_scheduled" in f.attrs for f in scheduled) and len(scheduled) == 2
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(s, dtype="float32") for s in ((ROWS, COLUMNS), (COLUMNS, 64)))
    exe = compile_relax(database, graph, target.tvm, None)
    out = relax.VirtualMachine(exe, tvm.cpu())["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y)).numpy()
    product = x.astype("float64") @ y
    expected = np.exp(product - product.max(-1, keepdims=True))
    np.testing.assert_allclose(out, expected / expected.sum(-1, keepdims=True), atol=1e-5)


def test_a_database_tuned_there_compiles_here(tmp_path: Path, graph: tvm.IRModule, target: Target) -> None:
    """Their record is made by hand, by a trace of theirs with a sampled tile, as their search would commit it."""
    from tvm import s_tir
    from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

    passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()]
    func = tvm.transform.Sequential(passes)(graph)["matmul"].with_attr("global_symbol", "main")
    mod = tvm.IRModule({"main": func.with_attr("tirx.noalias", True)})
    sch = s_tir.Schedule(mod)
    i, j, k = sch.get_loops(sch.get_sblock("matmul"))
    _, inner = sch.split(j, sch.sample_perfect_tile(j, 2, 16, decision=[4, 16]))
    sch.reorder(k, inner)
    sch.vectorize(inner)
    sch.parallel(i)
    (tmp_path / "theirs").mkdir()
    database = JSONDatabase(work_dir=str(tmp_path / "theirs"))
    workload = database.commit_workload(mod)
    database.commit_tuning_record(TuningRecord(sch.trace, workload, [3e-6, 5e-6], target.tvm))
    database.commit_tuning_record(TuningRecord(sch.trace, workload, [1e10], target.tvm))
    other = resolve("x86-64-v2").tvm
    database.commit_tuning_record(TuningRecord(sch.trace, workload, [1e-6], other))
    (task,) = [t for t in _tasks(program(
        {"x": ((ROWS, COLUMNS), "float32"), "y": ((COLUMNS, 64), "float32")},
        lambda builder, p: [builder.emit(relax.op.matmul(*p))],
    ), target)]
    assert is_database(tmp_path / "theirs")
    with TuningLog(tmp_path / "log.db") as log:
        done = import_database(log, tmp_path / "theirs", target)
        found, known = log.best(task.key), log.workload(task.key)
    assert (done.records, done.tasks) == (1, 1) and done.skipped == {"failed": 1, "of another target": 1}
    assert found is not None and found.space == SPACE and found.times == (3e-6, 5e-6)
    assert known is not None and known.task().key == task.key
    built = tvm.compile(replay(task.func, found.trace).mod, target.tvm)
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(s, dtype="float32") for s in ((ROWS, COLUMNS), (COLUMNS, 64)))
    arrays = [tvm.runtime.tensor(a) for a in (x, y, np.zeros((ROWS, 64), "float32"))]
    built["main"](*arrays)
    np.testing.assert_allclose(arrays[2].numpy(), x.astype("float64") @ y, rtol=1e-4, atol=1e-4)


def test_there_and_back(tmp_path: Path, graph: tvm.IRModule, target: Target) -> None:
    tasks = _tasks(graph, target)
    _tuned(tasks, tmp_path / "log.db")
    with TuningLog(tmp_path / "log.db") as log, TuningLog(tmp_path / "back.db") as back:
        export_database(log, tmp_path / "theirs")
        done = import_database(back, tmp_path / "theirs", target)
        assert done.tasks == len(tasks)
        for task in tasks:
            ours, again = log.best(task.key), back.best(task.key)
            assert ours is not None and again is not None and again.times == ours.times
            # not structurally equal: their file knows no truth values, and an annotation's True comes back as 1
            one, other = (extract(replay(task.func, r.trace).mod, target.tvm).vector for r in (ours, again))
            assert (one == other).all()


def test_what_is_no_database(tmp_path: Path, target: Target) -> None:
    with TuningLog(tmp_path / "log.db") as log, pytest.raises(LogError, match=r"is a folder with database_workload"):
        import_database(log, tmp_path, target)
    (tmp_path / "database_workload.json").write_text("[torn\n")
    (tmp_path / "database_tuning_record.json").write_text("")
    with TuningLog(tmp_path / "log.db") as log, pytest.raises(LogError, match="must be whole") as caught:
        import_database(log, tmp_path, target)
    assert "\n" not in str(caught.value)


def test_what_tvm_must_not_read_is_left_out(tmp_path: Path, graph: tvm.IRModule, target: Target) -> None:
    """TVM applies each trace of a database as it reads it, and makes any object of a function's text."""
    _tuned(_tasks(graph, target), tmp_path / "log.db")
    with TuningLog(tmp_path / "log.db") as log:
        written = export_database(log, tmp_path / "theirs")
    file = tmp_path / "theirs" / "database_tuning_record.json"
    lines = file.read_text().splitlines()
    bad = []
    for line in lines:
        place, (trace, *rest) = json.loads(line)
        block = next(step[3][0] for step in trace[0] if step[3] and step[3][0][0] == "b")
        trace[0].append(["Annotate", [block, "define void @f() { unreachable }"], ["pragma_import_llvm"], []])
        bad.append(json.dumps([place, [trace, *rest]]))
    extra = [lines[0][:40], "null", json.dumps([10**9, json.loads(lines[0])[1]])]
    file.write_text("\n".join([*bad, *extra, *lines]) + "\n")
    with TuningLog(tmp_path / "again.db") as log:
        done = import_database(log, tmp_path / "theirs", target)
        assert done.skipped["that are damaged or say what no search space says"] == len(bad) + len(extra)
        assert done.records >= written.records > 0
        assert all("pragma_import_llvm" not in record.trace for record in log.records())
    workloads = tmp_path / "theirs" / "database_workload.json"
    workloads.write_text(workloads.read_text().replace("A", "B"))
    with TuningLog(tmp_path / "none.db") as log, pytest.raises(LogError, match="must be whole"):
        import_database(log, tmp_path / "theirs", target)


def _square(x: te.Tensor, *index: tirx.Var) -> Any:
    return x(*index) * x(*index)


def test_a_trace_that_inlines_without_end_is_left_out(tmp_path: Path, target: Target) -> None:
    """TVM would apply it as it reads the database: 10^12 loads."""
    a = x = te.placeholder((4, 4), "float32", "a")
    for number in range(40):
        x = te.compute((4, 4), partial(_square, x), f"b{number}")
    folder = tmp_path / "theirs"
    folder.mkdir()
    JSONDatabase(work_dir=str(folder)).commit_workload(tvm.IRModule({"main": te.create_prim_func([a, x])}))
    steps = []
    for number in range(39):
        steps += [["GetSBlock", [], [f"b{number}", "main"], [f"b{number}"]], ["ComputeInline", [f"b{number}"], [], []]]
    line = json.dumps([0, [[steps, []], [1e-3], {"kind": "llvm"}, None]])
    (folder / "database_tuning_record.json").write_text(line + "\n")
    with TuningLog(tmp_path / "log.db") as log:
        done = import_database(log, folder, target)
    assert done.skipped == {"that are damaged or say what no search space says": 1} and not done.records


def test_a_function_that_is_another_object_is_refused(graph: tvm.IRModule, target: Target) -> None:
    workload = Workload.of(_tasks(graph, target)[0])
    assert workload.task().key == workload.task_key
    changes = {'"tirx.For"': '"ffi.Function"', '"root_index": ': '"root_index": 9', '"span": 0': '"span": -1'}
    for old, new in changes.items():
        text = workload.func.replace(old, new)
        with pytest.raises(ValueError):
            replace(workload, func=text if text != workload.func else "[]").task()


def test_a_damaged_function_is_not_exported(tmp_path: Path, graph: tvm.IRModule, target: Target) -> None:
    tasks = _tasks(graph, target)
    bad = Workload.of(tasks[0])
    with TuningLog(tmp_path / "log.db") as log:
        log.put_workloads([replace(bad, func=bad.func.replace('"s_tir.SBlock"', '"ir.PrimType"'))])
    _tuned(tasks, tmp_path / "log.db")
    with TuningLog(tmp_path / "log.db") as log:
        done = export_database(log, tmp_path / "theirs")
    assert done.skipped["whose functions are damaged"] == 1 and done.tasks == len(tasks) - 1 > 0
