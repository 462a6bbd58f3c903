"""One file for several targets: what is picked, what is stored once, and what damage and malice come to."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mlc
from mlc.artifact import Bundle, artifact, cpu_features, executable
from mlc.artifact import metadata as description
from mlc.artifact.checksum import checksum
from mlc.artifact.cuda import _runs_on
from mlc.cli.main import main
from mlc.errors import ArtifactError, TargetError
from mlc.target import resolve

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86")

RNG = np.random.default_rng(3)
LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
#: what a CPU of each level shows
FLAGS = {level: frozenset(cpu_features.required_features(resolve(level).tvm)) for level in LEVELS}


class Model:
    """A product with a bias and one more, whose weights are packed alike for some levels only."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self._w, self._b = rng.standard_normal((96, 80)), rng.standard_normal(80)
        self._v = rng.standard_normal((80, 40))
        weights = [numpy_helper.from_array(a.astype("float32"), n) for n, a in
                   (("w", self._w), ("b", self._b), ("v", self._v))]
        nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["s"]),
                 helper.make_node("Relu", ["s"], ["r"]), helper.make_node("MatMul", ["r", "v"], ["y"])]
        border = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                  for name, shape in (("x", [8, 96]), ("y", [8, 40]))]
        graph = helper.make_graph(nodes, "small", border[:1], border[1:], weights)
        self.path = folder / "small.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), self.path)

    def agrees(self, exe: mlc.Executable) -> None:
        x = RNG.standard_normal((8, 96), dtype="float32")
        w, b, v = (each.astype("float32").astype("float64") for each in (self._w, self._b, self._v))
        (y,) = exe(x)
        np.testing.assert_allclose(y, np.maximum(x.astype("float64") @ w + b, 0) @ v, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundle")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model(folder)


@pytest.fixture(scope="module")
def bundle(model: Model) -> Bundle:
    built = mlc.compile(model.path, target=list(LEVELS), log=False)
    assert isinstance(built, Bundle)
    return built


@pytest.fixture(scope="module")
def path(bundle: Bundle, folder: Path) -> Path:
    bundle.save(folder / "bundle.so")
    return folder / "bundle.so"


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes this machine show the features of a level alone."""
    def shows(flags: frozenset[str]) -> None:
        monkeypatch.setattr(cpu_features, "usable_flags", lambda: flags)

    yield shows


def test_every_variant_computes_the_same(model: Model, bundle: Bundle, path: Path) -> None:
    assert [exe.metadata["target"].split("/")[1] for exe in bundle.variants] == list(LEVELS)
    model.agrees(bundle)
    for exe in bundle.variants:
        try:
            loaded = executable.load(path, target=exe.metadata["target"])
        except ArtifactError:
            continue  # this machine is of an older level
        assert loaded.metadata["target"] == exe.metadata["target"]
        model.agrees(loaded)
    for verify in (True, False):
        model.agrees(mlc.load(path, verify=verify))


@pytest.mark.parametrize("level", LEVELS)
def test_the_best_that_the_machine_shows_is_picked(path: Path, cpu: Any, level: str) -> None:
    if cpu_features.missing_features("x86_64", tuple(FLAGS[level])):
        pytest.skip("this machine cannot run it")
    cpu(FLAGS[level])
    assert mlc.load(path).metadata["target"].split("/")[1] == level


@pytest.mark.parametrize(("archs", "gpu", "best"), [
    (("sm_80", "sm_90a"), "9.0", 1), (("sm_90a", "sm_80"), "9.0", 0), (("sm_80", "sm_90a"), "8.6", 0),
    (("sm_80", "sm_90a"), "12.0", 0), (("sm_90a", "sm_90"), "9.0", 0), (("sm_90", "sm_100"), "12.0", 1),
    # the kernels of the least, but code that its driver need not compile
    (("sm_80,sm_90a", "sm_90a"), "9.0", 1), (("sm_80", "sm_80,sm_90a"), "9.0", 1), (("sm_70,sm_90", "sm_80"), "9.0", 1),
])
def test_a_gpu_takes_the_latest_architecture_that_it_runs(
    monkeypatch: pytest.MonkeyPatch, archs: tuple[str, ...], gpu: str, best: int
) -> None:
    def place(metadata: dict[str, Any]) -> None:
        if not any(_runs_on(arch, gpu) for arch in json.loads(metadata["target_attrs"])["arch"].split(",")):
            raise ArtifactError("another GPU")

    monkeypatch.setattr(executable, "check_machine", lambda _: None)
    monkeypatch.setattr(executable, "device_of", place)
    described = [{"kind": "cuda", "features": [], "target": f"cuda/{each}", "target_attrs": json.dumps({"arch": each})}
                 for each in archs]
    assert executable.pick(described, "model") == best


def test_none_fits(path: Path, cpu: Any) -> None:
    cpu(frozenset({"pni"}))
    with pytest.raises(ArtifactError) as caught:
        mlc.load(path)
    line = str(caught.value)
    assert "\n" not in line and "must have code that this machine can run" in line
    assert all(level in line for level in LEVELS) and "sse4_2" in line


def test_equal_weights_are_stored_once(bundle: Bundle, path: Path, folder: Path) -> None:
    alone, distinct, every = 0, set(), 0
    for exe in bundle.variants:
        exe.save(folder / "one.so")
        alone += (folder / "one.so").stat().st_size
        for entry, data in zip(exe.metadata["weights"], exe.variant.weights, strict=True):
            distinct.add((tuple(entry["shape"]), data.tobytes()))
            every += data.nbytes
    assert 0 < bundle.shared_bytes == every - sum(len(data) for _, data in distinct)
    assert path.stat().st_size < alone - bundle.shared_bytes // 2
    found = artifact.read(path)
    for exe, variant in zip(bundle.variants, found.variants, strict=True):
        assert variant.code == exe.variant.code
        for ours, theirs in zip(variant.weights, exe.variant.weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_every_part_is_checked(path: Path, folder: Path) -> None:
    data = path.read_bytes()
    copy = folder / "copy.so"
    for at in [*range(0, len(data), 1499), len(data) - 1]:
        copy.write_bytes(data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :])
        with pytest.raises(ArtifactError) as caught:
            artifact.read(copy)
        assert "\n" not in str(caught.value)
    for size in (len(data) - 1, len(data) // 2, 5000):
        copy.write_bytes(data[:size])
        with pytest.raises(ArtifactError):
            artifact.read(copy)


def test_code_is_checked_where_weights_are_not(path: Path, folder: Path) -> None:
    data, copy = bytearray(path.read_bytes()), folder / "copy.so"
    at = artifact.read(path).weights_at - 4096  # in the last of the libraries
    data[at] ^= 1
    copy.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"the others in .* must match its checksum"):
        artifact.read(copy, verify=False)


def _crafted(path: Path, change: Any) -> bytes:
    """The file with other metadata under a checksum that fits."""
    data = path.read_bytes()
    start = artifact._aligned(len(artifact.read(path).code), 4096)
    _, version, size, total = artifact._HEADER.unpack_from(data, start)
    text_at = start + artifact._HEADER.size + artifact._CHECKSUM.size
    metadata = json.loads(data[text_at : text_at + size])
    change(metadata)
    text = json.dumps(metadata, separators=(",", ":")).encode()
    rest_at, before = artifact._aligned(text_at + len(text), 4096), artifact._aligned(text_at + size, 4096)
    header = artifact._HEADER.pack(artifact._MAGIC, version, len(text), rest_at + total - before)
    sealed = header + artifact._CHECKSUM.pack(checksum(header + text)) + text
    return data[:start] + sealed.ljust(rest_at - start, b"\0") + data[before:]


def _set(*place: Any) -> Any:
    *keys, value = place

    def change(metadata: Any) -> None:
        for key in keys[:-1]:
            metadata = metadata[key]
        metadata[keys[-1]] = value

    return change


@pytest.mark.parametrize(("change", "words"), [
    (lambda m: None, ""),
    (_set("variants", []), "variants must be 1 to 64"),
    (_set("variants", None), "variants must be a list"),
    (lambda m: m["variants"].extend(m["variants"] * 30), "variants must be 1 to 64"),
    (_set("variants", 1, "weights", [10**6]), r"variants\[1\].weights\[0\] must be a whole number"),
    (_set("variants", 1, "weights", [-1]), r"variants\[1\].weights\[0\] must be a whole number"),
    (_set("variants", 1, "weights", {}), r"variants\[1\].weights must be a list"),
    (_set("variants", 0, "code", 64), r"variants\[0\].code must be"),
    (_set("variants", 1, "code", 1 << 62), r"variants\[1\].code must be a whole number"),
    (_set("variants", 1, "code", 1 << 39), "weights must take"),
    (_set("variants", 1, "code", 0), r"variants\[1\].code must be a whole number"),
    (_set("variants", 2, "inputs", 0, "shape", [9, 96]), "inputs and outputs must be alike"),
    (_set("variants", 2, "outputs", 0, "name", "z"), "inputs and outputs must be alike"),
    (_set("variants", 2, "features", None), "features must be a list"),
    (lambda m: m["variants"][1].update(target=m["variants"][0]["target"]), "targets must be distinct"),
    (lambda m: m["checksums"].pop("others"), "checksums must be an object with others"),
    (lambda m: m["variants"].pop(), "must take"),
], ids=range(17))
def test_crafted_metadata(path: Path, folder: Path, change: Any, words: str) -> None:
    copy = folder / "crafted.so"
    copy.write_bytes(_crafted(path, change))
    if not words:
        mlc.load(copy)
        return
    with pytest.raises(ArtifactError, match=words) as caught:
        mlc.load(copy)
    assert "\n" not in str(caught.value)


def test_weights_of_another_variant_are_refused_by_the_code(path: Path, folder: Path) -> None:
    """Indices that exist and mean something else: the virtual machine compares shapes before anything is read."""
    def swap(metadata: Any) -> None:
        for variant in metadata["variants"]:
            variant["weights"] = variant["weights"][::-1]

    copy = folder / "crafted.so"
    copy.write_bytes(_crafted(path, swap))
    with pytest.raises(ArtifactError, match="must run on what its metadata describes, but TVM") as caught:
        mlc.load(copy)
    assert "\n" not in str(caught.value)


def test_what_a_variant_says_is_checked_before_it_is_written(bundle: Bundle) -> None:
    described = [exe.metadata for exe in bundle.variants]
    with pytest.raises(ValueError, match="targets must be distinct"):
        description.check_variants([*described, described[0]])


def test_the_commands(model: Model, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "cli.so"
    targets = ",".join(LEVELS[:2])
    assert main(["compile", str(model.path), "--target", targets, "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["target"].split("/")[1] for each in document["targets"]] == list(LEVELS[:2])
    assert document["shared_bytes"] > 0 and document["bytes"] == out.stat().st_size and document["ran"]
    assert main(["run", str(out), "--repeat", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["latency"]["runs"] == 2
    assert main(["compile", str(model.path), "--target", targets, "--report", str(folder / "r")]) == 2
    assert "show one target" in capsys.readouterr().err


def test_a_target_that_comes_twice(model: Model) -> None:
    with pytest.raises(TargetError, match="each target must be given once, but llvm -mcpu=x86-64-v3 is"):
        mlc.compile(model.path, target="x86-64-v3,llvm -mcpu=x86-64-v3", log=False)
