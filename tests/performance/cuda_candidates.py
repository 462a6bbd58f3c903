"""Whether random candidates of CUDA's spaces hold in the machine code what they promise, without a GPU.

    python -m tests.performance.cuda_candidates [--space cuda.mma] [--count 500] [--seeds] [--output FOLDER]

A candidate is a function, an architecture and decisions that its space carries out, all three drawn by its number: what
was looked at is not looked at again, and a number that failed fails again alone (``--only 17``). Each is a line in
``build/cuda-candidates/SPACE.jsonl``; the last line printed counts them. With ``--seeds`` all seeds of each function
are looked at instead, which must not spill. It takes nvcc and nvdisasm, which are given the kernels of many candidates
at once: both spend more on starting and on CUDA's headers than on a kernel. So each takes half a second of one core.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tvm import tirx

from mlc.codegen.cuda import distinct_shared
from mlc.codegen.inspection import DynamicShared, Kernel, find_nvdisasm, kernels
from mlc.errors import MlcError
from mlc.target import resolve
from mlc.testing import cuda_emulator
from mlc.testing.cases import Case
from mlc.testing.cuda_attention import attention_case
from mlc.testing.cuda_cases import epilogue_case, product_case
from mlc.testing.cuda_few_bits import PackedProduct
from mlc.testing.cuda_images import Image, Transposed
from mlc.testing.cuda_memory import layer_norm, narrow_norm, pooled, rms_norm, row_sums, row_times, softmax
from schedules.cuda.attention import Attention, ExactAttention, TensorFloatAttention, WarpgroupAttention
from schedules.cuda.columns import Columns
from schedules.cuda.few_bits import FewBitsProduct
from schedules.cuda.mma import TensorCoreGemm
from schedules.cuda.reduction import Reduce, Rows
from schedules.cuda.wgmma import WarpgroupGemm
from schedules.machine import gpu_of
from schedules.space import Decisions, InvalidDecision, Space, schedule_with
from tests.performance.table import ROOT

_SUMS = {"float16": "float32", "bfloat16": "float32", "int8": "int32", "tf32": "float32"}
#: what multiplies operands of each type
_OPCODES = {"float16": "HMMA.16816.F32", "bfloat16": "HMMA.16816.F32.BF16", "int8": "IMMA.16832.S8.S8",
            "tf32": "HMMA.1688.F32.TF32", "float32": "FFMA"}
#: how a kernel begins, and its name
_KERNEL = 'extern "C" __global__ '
_NAME = re.compile(r"\b(main_kernel(?:_\d+)?)\b")
#: a function that kernels of ours call
_FUNCTION = re.compile(r"^__forceinline__ __device__ .*?^}\n", re.MULTILINE | re.DOTALL)
#: candidates that are looked at together
_TOGETHER = 60
#: random decisions that may be refused before a function is given up for another
_TRIES = 200

#: a function, the space that takes it, the type of its operands, and opcodes of which each must be in the code
Drawn = tuple[Case, Space, str, tuple[str, ...]]


def _product(rng: random.Random) -> Drawn:
    """Products whose copies can take 16 bytes, and convolutions of images."""
    dtype = rng.choice(("float16", "bfloat16", "int8", "tf32"))
    # bytes that a bound may cut, or that lie across, threads copy by themselves
    copies = () if dtype == "int8" else ("LDGSTS.E.BYPASS.128", "LDGDEPBAR")
    promised = (_OPCODES[dtype], "LDSM", *copies)
    if rng.random() < 0.25 and dtype != "int8":
        if rng.random() < 0.3:
            stretched = _transposed(rng, (1, 2), (32, 64, 128), dtype)
            return stretched.case(str(stretched)), TensorCoreGemm(), dtype, promised
        window = rng.choice((1, 3))
        image = Image((rng.choice((1, 2)), *rng.choices((7, 14, 28, 30), k=2), rng.choice((32, 64, 128))),
                      rng.choice((64, 96, 128)), window, rng.choice((1, 2)), window // 2, 1, dtype, rng.random() < 0.3)
        return image.case(str(image)), TensorCoreGemm(), dtype, promised
    m, n = (16 * rng.choice((1, 3, 4, 8, 25, 32, 64, 128)) for _ in range(2))
    k = 128 * rng.choice((1, 2, 3, 6, 8, 16, 32))
    transposed = rng.random() < 0.5
    case = product_case(f"{m}x{n}x{k}", (m, k), (n, k) if transposed else (k, n), dtype, _SUMS[dtype], transposed)
    return case, TensorCoreGemm(), dtype, promised


def _transposed(rng: random.Random, images: Sequence[int], channels: Sequence[int], dtype: str) -> Transposed:
    """A transposed convolution that doubles an image: of kernels without overlap, with an odd or an even one."""
    size = (rng.choice(images), *rng.choices((7, 14, 28), k=2), rng.choice(channels))
    kernel, pad = rng.choice(((2, 0), (3, 1), (4, 1)))
    return Transposed(size, rng.choice((32, 64, 96)), (kernel, kernel), (2, 2), (pad, pad), dtype)


def _warpgroup_product(rng: random.Random) -> Drawn:
    """Of any row count, the others a multiple of 8; and convolutions of images."""
    dtype = rng.choice(("float16", "bfloat16"))
    if rng.random() < 0.25:
        if rng.random() < 0.3:
            stretched = _transposed(rng, (1, 8, 32), (64, 128, 192), dtype)
            return stretched.case(str(stretched), "cuda.wgmma"), WarpgroupGemm(), dtype, ("HGMMA", "UTMALDG")
        window = rng.choice((1, 3))
        image = Image((rng.choice((1, 8, 32)), *rng.choices((14, 28, 30), k=2), rng.choice((64, 128, 192))),
                      rng.choice((64, 104, 256)), window, rng.choice((1, 2)), window // 2, 1, dtype, rng.random() < 0.3)
        return image.case(str(image), "cuda.wgmma"), WarpgroupGemm(), dtype, ("HGMMA", "UTMALDG")
    m, n, k = rng.randint(64, 4096), 8 * rng.randint(8, 512), 8 * rng.randint(8, 512)
    transposed, epilogue = rng.random() < 0.5, rng.choice(("", "cast", "gelu", "residual"))
    if epilogue:
        case = epilogue_case("cuda.wgmma", epilogue, (m, n, k), dtype, transposed=transposed)
    else:
        case = product_case("", (m, k), (n, k) if transposed else (k, n), dtype, "float32", transposed, "cuda.wgmma")
    return replace(case, name=f"{m}x{n}x{k} {epilogue}".strip()), WarpgroupGemm(), dtype, ("HGMMA", "UTMALDG")


def _attention(rng: random.Random) -> Drawn:
    """Of heads whose copies can take 16 bytes."""
    dtype = rng.choice(("float16", "bfloat16", "tf32", "float32"))
    space = {"tf32": TensorFloatAttention(), "float32": ExactAttention()}.get(dtype, Attention())
    queries, keys = rng.randint(1, 1024), rng.randint(1, 1024)
    depth, features = rng.choice(((64, 64), (128, 128), (32, 32), (96, 96), (64, 128), (80, 80)))
    case = attention_case(
        f"{queries}x{keys}x{depth}x{features}", (1, 8), (queries, keys, depth, features), dtype,
        causal=rng.choice((None, keys - queries)) if keys >= queries else None, mask=rng.random() < 0.3,
        groups=rng.choice((1, 1, 4)))
    fetches = () if dtype == "float32" else ("LDSM",)
    return case, space, dtype, (_OPCODES[dtype], "LDGSTS.E.BYPASS.128", "LDGDEPBAR", *fetches)


def _warpgroup_attention(rng: random.Random) -> Drawn:
    """Of any number of queries and keys, some more than a warpgroup takes."""
    dtype, queries, keys = rng.choice(("float16", "bfloat16")), rng.randint(64, 2048), rng.randint(1, 2048)
    depth, features = rng.choice(((64, 64), (128, 128), (40, 40), (96, 96), (64, 128), (80, 80), (128, 64), (72, 104)))
    case = attention_case(
        f"{queries}x{keys}x{depth}x{features}", (1, 16), (queries, keys, depth, features), dtype,
        causal=rng.choice((None, keys - queries)) if keys >= queries else None, mask=rng.random() < 0.3,
        groups=rng.choice((1, 1, 4)), warpgroups=True)
    return case, WarpgroupAttention(), dtype, ("HGMMA", "UTMALDG")


def _few_bits(rng: random.Random) -> Drawn:
    """Few rows by packed weights, whose words are fetched as 16 bytes."""
    dtype = rng.choice(("float16", "bfloat16", "float32"))
    product = PackedProduct(
        rng.choice((1, 1, 2, 4, 8, 16, 24, 32, 64, 128)), rng.choice((1024, 4096, 4104, 11008, 14336)),
        rng.choice((1024, 4096, 4100, 11008)), rng.choice((2, 4, 4, 8)), rng.choice((16, 32, 64, 128, 256, 1 << 20)),
        dtype, rng.choice(("", "whole")), rng.choice((dtype, "float32")), rng.random() < 0.5)
    return product.case(), FewBitsProduct(), dtype, (_OPCODES[dtype], "LDG.E.128")


def _columns(rng: random.Random) -> Drawn:
    """A row times a weight, and pooling; what lies side by side is fetched as 16 bytes where it can be."""
    dtype = rng.choice(("float16", "bfloat16", "float32"))
    if rng.random() < 0.25:
        case = pooled((rng.choice((14, 28, 56)), rng.choice((14, 28, 56)), 8 * rng.choice((3, 8, 32))),
                      rng.choice((2, 3)), dtype)
    else:
        case = row_times(16 * rng.randint(4, 256), 8 * rng.randint(4, 512), dtype,
                         rng.choice((dtype, "float32")), rng.choice((1, 1, 2, 3)))
    return case, Columns(), dtype, ("LDG.E.128",)


def _rows(rng: random.Random) -> Drawn:
    rows, columns = rng.choice((1, 8, 200, 4096)), rng.choice((1, 4, 8)) * rng.randint(8, 1024)
    dtype = rng.choice(("float16", "bfloat16"))
    case = rng.choice((softmax(rows, columns), layer_norm(rows, columns), rms_norm(rows, columns),
                       narrow_norm(rows, columns, dtype)))
    return case, Rows(), "float32", ("LDG",)


def _sums(rng: random.Random) -> Drawn:
    dtype = rng.choice(("float16", "bfloat16", "float32"))
    case = row_sums(rng.choice((1, 8, 200, 4096)), rng.choice((1, 4, 8)) * rng.randint(8, 1024), dtype)
    return case, Reduce(), dtype, ("LDG",)


_MULTICAST = "UTMALDG.{}D.MULTICAST"

SPACES: dict[str, tuple[Callable[[random.Random], Drawn], tuple[str, ...]]] = {
    "cuda.mma": (_product, ("sm_80", "sm_90a")),
    "cuda.wgmma": (_warpgroup_product, ("sm_90a",)),
    "cuda.few_bits": (_few_bits, ("sm_80", "sm_90a")),
    "cuda.attention": (_attention, ("sm_80", "sm_90a")),
    "cuda.attention_wgmma": (_warpgroup_attention, ("sm_90a",)),
    "cuda.columns": (_columns, ("sm_80", "sm_90a")),
    "cuda.rows": (_rows, ("sm_80", "sm_90a")),
    "cuda.reduce": (_sums, ("sm_80", "sm_90a")),
}


def promised_by(decisions: Decisions) -> tuple[str, ...]:
    """Opcodes of which each must be in the code for what was decided."""
    stores = ("STSM", "UTMASTG") if decisions.get("boxed") else ()
    turns = ("BAR.ARV",) if decisions.get("turns") else ()
    return (*stores, *turns, *((_MULTICAST,) if decisions.get("cluster", 1) > 1 else ()))


@dataclass(frozen=True)
class Source:
    """A candidate as the compiler is given it: the CUDA source, the shared memory in bytes that its kernels ask for
    when they are launched, by their names, what was decided, and the opcodes of which each must be in its code."""

    arch: str
    text: str
    dynamic: Mapping[str, int]
    decisions: Decisions
    promised: tuple[str, ...]


def look_at(name: str, numbers: Sequence[int], seeds: bool = False) -> list[dict[str, Any]]:
    """The candidates of a space with these ``numbers``, a row each: what it is, its ``faults``, none where it can be
    launched and holds what it promises, and how many bytes of a thread lie in memory (``spilled``; tuning passes such
    candidates by). Or all ``seeds`` of a function for each number, whose bytes are added up and each a fault."""
    drawn = [_draw(name, number, seeds) for number in numbers]
    found = iter(_compiled([source for _, sources in drawn for source in sources]))
    for row, sources in drawn:
        for source in sources:
            made = next(found)
            if isinstance(made, str):
                row["faults"].append(made)
                continue
            spilled = sum(k.stack_bytes + k.spilled_bytes + k.count("LDL") + k.count("STL") for k in made)
            row["spilled"] += spilled
            row["faults"] += [*_faults(made, source.arch, source.promised),
                              *(["a seed spills"] if seeds and spilled else [])]
    return [row for row, _ in drawn]


def _draw(name: str, number: int, seeds: bool) -> tuple[dict[str, Any], list[Source]]:
    """A row that says what was drawn, and its source, or one for each seed."""
    rng = random.Random(f"{name} {number}")
    draw, architectures = SPACES[name]
    arch = rng.choice(architectures)
    target = resolve(f"cuda:{arch}").tvm
    while True:
        case, space, dtype, promised = draw(rng)
        func = case.func()
        if not space.matches(func, target):
            continue
        proposed = space.seeds(func, target) if seeds else _random(space, func, target, rng)
        drawn = list(islice(_carried_out(space, func, target, proposed), None if seeds else 1))
        if drawn:
            break
    row: dict[str, Any] = {"number": number, "arch": arch, "function": case.name, "dtype": dtype, "spilled": 0,
                           "decisions": [taken for taken, _ in drawn] if seeds else drawn[0][0], "faults": []}
    sources = []
    for taken, scheduled in drawn:
        shared = DynamicShared()
        text = cuda_emulator.cuda_source(scheduled, target, [shared])
        sources.append(Source(arch, text, shared.bytes, taken, (*promised, *promised_by(taken))))
    return row, sources


def _compiled(sources: Sequence[Source]) -> list[list[Kernel] | str]:
    """The kernels of each source, or why there are none. Those of one architecture and type share a compilation, in
    which each has names of its own; where the compiler refuses that, each has one to itself."""
    alike = defaultdict(list)
    for number, source in enumerate(sources):
        declared, kernel, body = source.text.partition(_KERNEL)
        common = "\n".join(filter(str.strip, _FUNCTION.sub("", declared).splitlines()))
        alike[source.arch, common].append((number, _FUNCTION.findall(declared), kernel + body))
    made: list[list[Kernel] | str] = [""] * len(sources)
    for (arch, declared), group in alike.items():
        numbers = [number for number, _, _ in group]
        functions = dict.fromkeys(function for _, called, _ in group for function in called)
        bodies = [_NAME.sub(rf"of{number}_\1", body) for number, _, body in group]
        dynamic = {f"of{number}_{name}": size for number in numbers for name, size in sources[number].dynamic.items()}
        try:
            found = kernels(distinct_shared("\n".join((declared, *functions, *bodies))), arch, dynamic)
        except (MlcError, RuntimeError, ValueError):
            for number in numbers:
                made[number] = _alone(sources[number])
            continue
        for number in numbers:
            mine = f"of{number}_"
            made[number] = [replace(k, name=k.name.removeprefix(mine)) for k in found if k.name.startswith(mine)]
    return made


def _alone(source: Source) -> list[Kernel] | str:
    try:
        return kernels(source.text, source.arch, source.dynamic)
    except (MlcError, RuntimeError, ValueError) as error:
        return f"not built: {str(error).strip().splitlines()[-1][:300]}"


def _random(space: Space, func: tirx.PrimFunc, target: Any, rng: random.Random) -> Iterator[Decisions]:
    knobs = space.knobs(func, target)
    for _ in range(_TRIES):
        yield {knob.name: rng.choice(knob.values) for knob in knobs}


def _carried_out(
    space: Space, func: tirx.PrimFunc, target: Any, proposed: Iterable[Decisions]
) -> Iterator[tuple[Decisions, tirx.PrimFunc]]:
    for decisions in proposed:
        try:
            yield dict(decisions), schedule_with(space, func, target, decisions).mod["main"]
        except InvalidDecision:
            continue


def _faults(found: Sequence[Kernel], arch: str, promised: Sequence[str]) -> Iterator[str]:
    """What is wrong with a function's kernels, of which the first promises the opcodes."""
    gpu = gpu_of(arch)
    assert gpu is not None
    for kernel in found:
        if kernel.serialised:
            yield f"{kernel.name}: its products are serialised"
        if not kernel.blocks or kernel.shared_bytes > gpu.shared_bytes:
            yield f"{kernel.name}: no block fits a multiprocessor ({kernel.shared_bytes} bytes of shared memory)"
    # a box that all blocks of a cluster share has as many dimensions as its operand
    opcodes = {opcode: [opcode.format(dimensions) for dimensions in "234"] for opcode in promised}
    missing = [opcode for opcode, forms in opcodes.items()
               if not any(kernel.count(form) for kernel in found for form in forms)]
    if missing:
        yield f"without {', '.join(missing)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Look at what was not looked at yet; 1 if a candidate breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--space", action="append", choices=SPACES, help="default: each")
    parser.add_argument("--count", type=int, default=500, help="candidates of a space (default: 500)")
    parser.add_argument("--seeds", action="store_true", help="all seeds of random functions, which must not spill")
    parser.add_argument("--only", type=int, help="look at this number again, and write nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "cuda-candidates")
    args = parser.parse_args(argv)
    if find_nvdisasm() is None:
        parser.error("nvdisasm must be there, got none; install nvidia-cuda-nvdisasm")
    spaces = args.space or list(SPACES)
    if args.only is not None:
        rows = [row for space in spaces for row in look_at(space, [args.only], args.seeds)]
        print(*map(json.dumps, rows), sep="\n")
        return int(any(row["faults"] for row in rows))
    counts = {space: _fill(space, args.count, args.output, args.seeds) for space in spaces}
    print(json.dumps(counts))
    return int(any(count["with faults"] for count in counts.values()))


def _fill(space: str, count: int, folder: Path, seeds: bool) -> dict[str, int]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{space}{'.seeds' if seeds else ''}.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    for first in range(len(rows), count, _TOGETHER):
        looked = look_at(space, range(first, min(first + _TOGETHER, count)), seeds)
        rows += looked
        with file.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in looked)
        for row in looked:
            if row["faults"] or row["spilled"]:
                print(f"{space} {json.dumps(row)}", file=sys.stderr, flush=True)
    faults, spilled = (sum(bool(row[what]) for row in rows) for what in ("faults", "spilled"))
    return {"candidates": len(rows), "with faults": faults, "with spilled": spilled}


if __name__ == "__main__":
    sys.exit(main())
