"""Tuning logs that are damaged or crafted, made from the log of one small tuning run with invented times."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import tvm
from tvm import relax

from mlc.log import Record, TuningLog, Verdict, codec
from mlc.log.rows import row_of, sealed
from mlc.target import resolve
from mlc.testing.programs import program

__all__ = ["STRATEGIES", "TARGET", "TRIALS", "model", "prepare", "tasks_of", "written"]

TARGET = resolve("x86-64-v3", threads=2)
TRIALS = 36
_PAGE = 4096
#: values that no column, field or number should have
_ODD: tuple[Any, ...] = (
    None, -1, 0, 1, 2**31, 2**53, 2**63 - 1, -(2**63), 1e308, -1e-300, 1e-12, "", "x", "\0", "[red]x", "\x1b[31m",
    "9" * 400, b"", b"\xff\xfe", b"\0" * 64, "é" * 5000, "[]", "{}", "NaN",
)  # fmt: skip


def model() -> tvm.IRModule:
    """``softmax(relu(x y + z))``: two tasks."""
    def body(builder: Any, p: Any) -> list[Any]:
        product = builder.emit(relax.op.nn.relu(relax.op.add(relax.op.matmul(p[0], p[1]), p[2])))
        return [builder.emit(relax.op.nn.softmax(product))]

    shapes = {"x": (24, 64), "y": (64, 48), "z": (48,)}
    return program({name: (shape, "float32") for name, shape in shapes.items()}, body)


@cache
def tasks_of() -> list[Any]:
    """The tasks of :func:`model`, as compiling it finds them."""
    from mlc.compilation import Compilation

    return Compilation.of(model(), TARGET, substitutions=False).lowered().tasks


def prepare() -> None:
    """Make what every case needs, before the processes of the cases are forked."""
    tasks_of()
    _folder()


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="logs-")


@cache
def _folder() -> Path:
    """A whole log as ``log.db``, ``log.jsonl`` and MetaSchedule's ``database``, written by a process of its own."""
    name = _temporary().name
    subprocess.run([sys.executable, "-m", "tests.fuzz.log_files", name], check=True, capture_output=True)
    return Path(name)


def _write_whole(folder: Path) -> None:
    from mlc.log import export_jsonl
    from mlc.log.decision import GraphDecision
    from mlc.log.metaschedule import export_database
    from mlc.testing.measuring import FakeMeasurer
    from mlc.tuning import TuneOptions, tune_tasks

    def seconds(values: tuple[int, ...]) -> float:
        return 1e-5 * (1 + sum(values) % 17)

    with TuningLog(folder / "log.db") as log:
        tune_tasks(tasks_of(), TARGET, log, TuneOptions(trials=TRIALS, batch=6), FakeMeasurer(seconds))
        log.put_decisions([GraphDecision("model", "0" * 16, {"conv2d": 1.5}, 1e-3, 9e-4, 1.0)])
        export_jsonl(log, folder / "log.jsonl")
        export_database(log, folder / "database")


def written(strategy: str, rng: Random, path: Path) -> None:
    """Write the damaged log to ``path``; a strategy may make a ``.jsonl`` or a folder ``database`` beside it."""
    shutil.copy(_folder() / "log.db", path)
    STRATEGIES[strategy](rng, path)


# -- bytes


def _bytes(change: Callable[[Random, bytearray], None]) -> Callable[[Random, Path], None]:
    def damage(rng: Random, path: Path) -> None:
        data = bytearray(path.read_bytes())
        change(rng, data)
        path.write_bytes(data)

    return damage


def _flip(rng: Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 3, 30, 300))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(rng: Random, data: bytearray) -> None:
    del data[rng.choice((rng.randrange(200), rng.randrange(len(data)), len(data) - rng.randrange(1, 5000))) :]


def _page(rng: Random, data: bytearray) -> slice:
    start = rng.randrange(len(data) // _PAGE) * _PAGE
    return slice(start, start + _PAGE)


def _zero(rng: Random, data: bytearray) -> None:
    data[_page(rng, data)] = bytes(_PAGE)


def _swap(rng: Random, data: bytearray) -> None:
    one, other = _page(rng, data), _page(rng, data)
    data[one], data[other] = data[other], data[one]


def _noise(rng: Random, data: bytearray) -> None:
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice((4, 64, _PAGE)))
    data[start:stop] = rng.randbytes(stop - start)


def _header(rng: Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 2, 8))):
        data[rng.randrange(112)] = rng.choice((0, 1, 2, 0x0D, 0x7F, 0xFF, rng.randrange(256)))


def _journal(rng: Random, path: Path) -> None:
    """A write-ahead log or a rollback journal of another time beside the file."""
    suffix = rng.choice(("-wal", "-journal", "-shm"))
    path.with_name(path.name + suffix).write_bytes(rng.choice((
        b"", rng.randbytes(5000), path.read_bytes()[:9000], b"\x37\x7f\x06\x82" + rng.randbytes(9000),
        b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + rng.randbytes(8192),
    )))


# -- rows


def _sql(path: Path, statement: str, *values: Any) -> None:
    db = sqlite3.connect(path)
    try:
        db.executescript(statement) if not values else db.execute(statement, values)
        db.commit()
    finally:
        db.close()


def _column(rng: Random, path: Path) -> None:
    columns = {"records": "uid task_key session seconds body kept", "sessions": "id started options trials seconds",
               "state": "name value", "workloads": "task_key uid body"}
    for _ in range(rng.choice((1, 4, 16))):
        table = rng.choice(sorted(columns))
        column, number = rng.choice(columns[table].split()), rng.choice((1, 2, 5, 100))
        sql = f"UPDATE OR IGNORE {table} SET {column} = ? WHERE rowid % ? = 0"
        _sql(path, sql, rng.choice(_ODD[(table, column) != ("records", "seconds") :]), number)


def _schema(rng: Random, path: Path) -> None:
    _sql(path, rng.choice((
        "CREATE TRIGGER t AFTER INSERT ON sessions BEGIN DELETE FROM records; END",
        "DROP TABLE records; CREATE VIEW records AS WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) "
        "SELECT i AS id, x'00' AS uid, 'k' AS task_key, 's' AS session, 1.0 AS seconds, zeroblob(100000000) AS body, "
        "1 AS kept FROM c",
        "DROP TABLE state; CREATE VIEW state AS SELECT load_extension('x') AS name, x'00' AS value",
        "DROP TABLE workloads", "CREATE VIRTUAL TABLE more USING fts5(a)", "CREATE TABLE more (a)",
        "DROP INDEX records_kept; CREATE INDEX records_kept ON records (hex(zeroblob(100000000))) WHERE kept",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage = 1 + abs(random() % 9)",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE TABLE records (a)' WHERE name = 'records'",
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage = 3", "PRAGMA user_version = 2",
        "PRAGMA user_version = -1", "PRAGMA application_id = 1",
    )))  # fmt: skip


def _session(rng: Random, path: Path) -> None:
    options = rng.choice(("{}", "[]", "null", "{", "[" * 100_000, '{"tasks": 5, "trials": "x"}', "\0"))
    _sql(path, "INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", rng.choice(("s", "\x1b[2J", "[bold]")),
         rng.choice((0.0, 1e300, -1e300, "x", 2e12)), options, rng.choice((-5, 2**62, "x", 3)), rng.choice(_ODD) or 0)
    blob = rng.choice((b"", b"PK\3\4" + rng.randbytes(99), rng.randbytes(999), b"[" * 100_000, b"{}", b'{"a": 5}'))
    blob = sealed(blob) if rng.random() < 0.7 else blob
    names = ("models", f"cost_model/{TARGET.canonical}", "substitution/model", "substitution/x")
    _sql(path, "INSERT OR REPLACE INTO state VALUES (?, ?)", rng.choice(names), blob)


# -- records that are whole and say something bad


def _insert(path: Path, task_key: str, text: str) -> None:
    """A record of any text, with the digest of it, that is its task's best."""
    _sql(path, "INSERT OR IGNORE INTO records (uid, task_key, session, seconds, body, kept) "
               "VALUES (?, ?, '', 1e-9, ?, 1)", codec.digest(text), task_key, codec.pack(text))


def _best(path: Path) -> list[Record]:
    with TuningLog(path, readonly=True) as log:
        return [found for task in tasks_of() if (found := log.best(task.key)) is not None]


def _signed(path: Path, record: Record) -> None:
    with TuningLog(path) as log:
        log.append_rows([row_of(replace(record, times=(1e-9,), session="", verdict=Verdict.KEPT))])


def _field(rng: Random, path: Path) -> None:
    for record in _best(path):
        values = json.loads(codec.canonical_text(replace(record, times=(1e-9,), session="", verdict=Verdict.KEPT)))
        name = rng.choice(sorted(values))
        values[name] = rng.choice([v for v in _ODD if not isinstance(v, bytes)] + [[], {}, [[]], float("nan"), 10**400])
        sys.set_int_max_str_digits(0)
        _insert(path, record.task_key, json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True))
        sys.set_int_max_str_digits(4300)


def _times(rng: Random, path: Path) -> None:
    for record in _best(path):
        text = codec.canonical_text(replace(record, times=(1e-9,), session="", verdict=Verdict.KEPT))
        time = rng.choice((
            "NaN", "Infinity", "-Infinity", "-1e-9", "0", "1e999", "5e-324", '"1"', "[1]", "null", "true",
        ))
        _insert(path, record.task_key, text.replace('"times":[1e-09]', f'"times":[{time}]'))


def _text(rng: Random, path: Path) -> None:
    text = rng.choice((
        "[" * 100_000, '{"a":' * 50_000, "", "null", '"' + "x" * 5_000_000 + '"', "[" + "0," * 5_000_000 + "0]", "\0",
        "[" * (63 << 20), " " * (65 << 20), '{"trace": "\\ud800"}', "1" * 100_000,
    ))
    for record in _best(path):
        _insert(path, record.task_key, text)


def _trace(change: Callable[[Random, list[Any]], object]) -> Callable[[Random, Path], None]:
    """Records whose traces ``change`` has been at: ``[instructions, decisions]``."""
    def damage(rng: Random, path: Path) -> None:
        for record in _best(path):
            steps = json.loads(record.trace)
            changed = change(rng, steps)
            _signed(path, replace(record, trace=json.dumps(steps if changed is None else changed)))

    return damage


def _defined(steps: list[Any], kind: str) -> list[str]:
    return [name for step in steps[0] for name in step[3] if name[0] == kind] or ["b0"]


def _annotation(rng: Random, steps: list[Any]) -> None:
    key = rng.choice((
        "pragma_import_llvm", "pragma_import_c", "pragma_debug_skip_region", "software_pipeline_stage", "pragma_unroll",
        "software_pipeline_order", "double_buffer_scope", "warp_execution", "explicit_read_region", "mlc.prefetch",
        "mlc.prefetch_rows", "pragma_auto_unroll_max_step", "buffer_dim_align", "disable_lower_builtin",
        "meta_schedule.auto_tensorize", "hide_buffer_access", "pragma_loop_partition_hint",
    ))  # fmt: skip
    value = rng.choice((
        1, 0, -1, 2**40, True, None, "x", '"x"', '"define void @f() { unreachable }"', [0, 0, 1], [1, 4, 20], [9, 9, 9],
        [-1, 2**31, 2**31], [[1]], {}, 0.5, [1, 0, 2**31],
    ))
    place = rng.choice(_defined(steps, rng.choice("bl")))
    at = rng.choice((len(steps[0]), next((i + 1 for i, step in enumerate(steps[0]) if place in step[3]), 0)))
    steps[0].insert(at, ["Annotate", [place, value], [key], []])
    steps[1][:] = [[i + (i >= at), d] for i, d in steps[1]]


def _instruction(rng: Random, steps: list[Any]) -> None:
    block, loop = rng.choice(_defined(steps, "b")), rng.choice(_defined(steps, "l"))
    steps[0].append(rng.choice((
        ["UnsafeSetDType", [block], [0, "float16"], []], ["UnsafeHideBufferAccess", [block], ["read", [0]], []],
        ["SetScope", [block], [0, rng.choice(("shared", "texture", "warp", "local", "shared.dyn", ""))], []],
        ["Split", [loop, "None", 3], [True, True], ["l900", "l901"]], ["Bind", [loop], ["threadIdx.x"], []],
        ["Split", [loop, 7, 5], [True, True], ["l900", "l901"]], ["Vectorize", [loop], [], []],
        ["Parallel", [loop], [], []], ["Unroll", [loop], [], []], ["Blockize", [loop, True], [], ["b900"]],
        ["Tensorize", [loop], ["mlc.transpose8_f32", 1], []], ["Tensorize", [block], ["wmma_sync", 1], []],
        ["DecomposeReduction", [block, loop], [], ["b900"]], ["RFactor", [loop], [0], ["b900"]],
        ["TransformLayout", [block, "{}"], [0, 1, None, 1], []], ["TransformBlockLayout", [block], ["{}"], []],
        ["StorageAlign", [block], [0, 0, rng.choice((2, 2**20, 2**30, -4)), rng.choice((0, 1, -7))], []],
        ["PadEinsum", [block], [[1, 16, 16, 4]], []], ["CacheInplace", [block], [0, "local"], ["b900", "b901"]],
        ["CacheRead", [block, []], [rng.choice((0, 1, 9)), "local"], ["b900"]], ["RollingBuffer", [block], [0], []],
        ["ReindexCacheWrite", [block, "{}"], [0, "local"], ["b900"]], ["Nothing", [], [], []],
        ["ComputeAt", [block, loop], [1, rng.choice((-1, -2, 0, 99))], []], ["Reorder", [loop, loop], [], []],
        ["ReverseComputeAt", [block, loop], [1, -1], []], ["ComputeInline", [block], [], []],
        ["EnterPostproc", [], [], []],
        ["GetSBlock", [], ["root", "other"], ["b900"]], ["SampleCategorical", [], [[1, 2], [0.5, 0.5]], ["v900"]],
    )))  # fmt: skip


def _number(rng: Random, steps: list[Any]) -> None:
    """Numbers anywhere in it: factors, extents, positions, decisions."""
    for _ in range(rng.choice((1, 2, 6))):
        part = rng.choice([p for step in steps[0] for p in step[1:3] if any(type(v) is int for v in p)] + steps[1])
        places = [i for i, value in enumerate(part) if type(value) is int]
        part[rng.choice(places)] = rng.choice((0, -1, 1, 2, 3, 5, 7, 1000, 2**20, 2**31 - 1, 2**31, 2**63, 10**30, 2.5))


def _shuffle(rng: Random, steps: list[Any]) -> None:
    """Instructions that are allowed, dropped, repeated, exchanged or with other inputs."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, other = rng.randrange(len(steps[0])), rng.randrange(len(steps[0]))
        match rng.randrange(4):
            case 0:
                if steps[0][at][0] != "SampleCategorical":
                    del steps[0][at]
                    steps[1][:] = [[i - (i > at), d] for i, d in steps[1]]
            case 1:
                steps[0].append(steps[0][at])
            case 2:
                steps[0][at], steps[0][other] = steps[0][other], steps[0][at]
            case _:
                for i, name in enumerate(steps[0][at][1]):
                    if isinstance(name, str) and name[0] in "bl":
                        steps[0][at][1][i] = rng.choice(_defined(steps, name[0]))
        if not steps[0]:
            return


def _other_task(rng: Random, path: Path) -> None:
    records = _best(path)
    for record, other in zip(records, records[1:] + records[:1], strict=True):
        _signed(path, replace(record, trace=other.trace, space=rng.choice((other.space, record.space, "cpu.none"))))


def _workload(rng: Random, path: Path) -> None:
    """A task's function with something else in it, under its own digest."""
    from mlc.log.workload import workload_text

    with TuningLog(path, readonly=True) as log:
        workload = rng.choice(list(log.workloads()))
    graph = json.loads(workload.func)
    for _ in range(rng.choice((1, 3))):
        node = rng.choice([n for n in graph["nodes"] if "data" in n])
        if isinstance(node["data"], dict) and node["data"]:
            values = (0, 1, 5, 10**6, -1, None, "x", len(graph["nodes"]) - 1)
            node["data"][rng.choice(sorted(node["data"]))] = rng.choice(values)
        elif isinstance(node["data"], list) and node["data"]:
            node["data"][rng.randrange(len(node["data"]))] = rng.choice((0, 1, 10**6, -1, len(graph["nodes"]) - 1))
        else:
            node["type"] = rng.choice(("ir.IRModule", "ffi.Map", "None", "tirx.Any", "x"))
    text = workload_text(replace(workload, func=json.dumps(graph)))
    _sql(path, "UPDATE workloads SET uid = ?, body = ? WHERE task_key = ?", codec.digest(text), codec.pack(text),
         workload.task_key)


# -- files for exchange


def _json_lines(rng: Random, path: Path) -> None:
    lines = (_folder() / "log.jsonl").read_bytes().splitlines()
    for _ in range(rng.choice((1, 3, 9))):
        at = rng.randrange(len(lines))
        line = bytearray(lines[at] or b"x")
        lines[at] = rng.choice((
            bytes(line[: rng.randrange(len(line))]), b"null", b"[" * 100_000, b"\xff\xfe\0", b"{}", b'{"uid": 5}',
            b"9" * 5000,
            line.replace(b'"times":[', b'"times":[1e999,'), line.replace(b'"seed"', b'"sead"'), rng.randbytes(200),
            line.replace(b"1", b"7", 3), b'{"workload": {}}', b'{"decision": [1]}', line.replace(b'"uid"', b'"uld"'),
            bytes(line[:50]) + b"\n" + bytes(line[50:]), b'{"trace":"\\ud800"}', line.replace(b"cpu.", b"\\u001b[31m"),
        ))
    path.with_suffix(".jsonl").write_bytes(b"\n".join(lines))


def _metaschedule(rng: Random, path: Path) -> None:
    target = path.parent / "database"
    shutil.copytree(_folder() / "database", target)
    file = target / rng.choice(("database_tuning_record.json",) * 4 + ("database_workload.json",))
    lines = file.read_text().splitlines()
    at = rng.randrange(len(lines))
    if rng.random() < 0.6 and "tuning" in file.name:
        values = json.loads(lines[at])
        rng.choice((_annotation, _instruction, _number, _shuffle))(rng, values[1][0])
        if rng.random() < 0.2:
            values[1][1] = rng.choice(([], [-1], [1e300], None, ["x"], [[]]))
        if rng.random() < 0.2:
            values[0] = rng.choice((-1, 10**9, "x", None))
        lines[at] = json.dumps(values)
    else:
        data = bytearray(lines[at].encode())
        rng.choice((_flip, lambda rng, data: data.__delitem__(slice(rng.randrange(len(data)), None))))(rng, data)
        lines[at] = data.decode("latin1")
    file.write_text("\n".join(lines) + "\n", encoding="latin1")


STRATEGIES: dict[str, Callable[[Random, Path], None]] = {
    "bits flipped": _bytes(_flip), "cut": _bytes(_cut), "page zeroed": _bytes(_zero), "pages swapped": _bytes(_swap),
    "noise": _bytes(_noise), "header": _bytes(_header), "journal": _journal, "column": _column, "schema": _schema,
    "session, state": _session, "field": _field, "times": _times, "text": _text, "annotation": _trace(_annotation),
    "instruction": _trace(_instruction), "numbers": _trace(_number), "shuffled": _trace(_shuffle),
    "another task's": _other_task, "workload": _workload, "JSON lines": _json_lines, "MetaSchedule": _metaschedule,
}  # fmt: skip

if __name__ == "__main__":
    _write_whole(Path(sys.argv[1]))
