"""Translates the inline assembly of generated CUDA kernels to calls of the emulator (``cuda_ptx.h``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Statement", "emulated", "statements"]

_BEGIN = re.compile(r"\b(?:__asm__|asm)\s*(?:__volatile__|volatile)?\s*\(")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ACCESS = re.compile(r"\*\((float2|float4|uint2|uint4|int2|int4|half2|half4|u?longlong4)\*\)\(")
#: an array in shared memory, as the emulator declares it
_KERNEL = 'extern "C" __global__'
_SHARED = re.compile(r"(\w+)\* (\w+) = (?:\(\1\*\)emulator::own_shared|emulator::shared_array<)")
#: a copy, or zeros where a predicate does not hold
_GUARDED_COPY = re.compile(
    r"setp\.eq\.u32 p, %3, 1; .*@p cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], %2; *@!p st\.shared"
)
_PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k\d+\.row\.col\.([\w.]+?)\s*\{")
_WARPGROUP_PRODUCT = re.compile(
    r"\{ \.reg \.pred p; setp\.ne\.b32 p, %\d+, 0; wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.\2 "
    r"\{[^}]*\}, %\d+, %\d+, p, 1, 1, ([01]), ([01]); \}"
)
#: the same with the rows in four registers
_REGISTER_PRODUCT = re.compile(
    r"\{ \.reg \.pred p; setp\.ne\.b32 p, %\d+, 0; wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.\2 "
    r"\{[^}]*\}, \{%\d+, %\d+, %\d+, %\d+\}, %\d+, p, 1, 1, ([01]); \}"
)
_BOX = re.compile(
    r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::cluster\.global\.tile\.mbarrier::complete_tx::bytes"
    r"(\.multicast::cluster)? \[%0\], \[%1, \{[%\d, ]*\}\], \[%\d\](?(1), %\d);"
)
_STORED_BOX = re.compile(
    r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta\.tile\.bulk_group \[%0, \{[%\d, ]*\}\], \[%\d\];"
)
_ELEMENTS = {"f16": "half", "bf16": "nv_bfloat16"}
#: instructions that are calls of their inputs, the result first
_CALLS = {
    "mbarrier.init.shared::cta.b64 [%0], %1;": "barrier_init",
    "fence.mbarrier_init.release.cluster;": "fence_barrier_init",
    "mbarrier.arrive.shared::cta.b64 _, [%0];": "barrier_arrive",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": "barrier_arrive",
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }": "barrier_wait",
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
    "mbarrier.arrive.shared::cluster.b64 _, [there]; }": "barrier_arrive_at",
    "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;": "cluster_meet",
    "wgmma.fence.sync.aligned;": "wgmma_fence",
    "cp.async.bulk.commit_group;": "commit_stores",
    "fence.proxy.async.shared::cta;": "fence_copies",
    "wgmma.commit_group.sync.aligned;": "wgmma_commit",
    # a store that never comes to pass, wherever it would go
    "{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0; }": "never_negative",
}
#: what an instruction multiplies and adds in, by its name's last words ``d.a.b.c``
_SUMS = {"f32.f16.f16.f32": ("half", "double"), "f32.bf16.bf16.f32": ("nv_bfloat16", "double"),
         "f32.tf32.tf32.f32": ("tensor_float", "double"), "s32.s8.s8.s32": ("signed char", "int")}


@dataclass(frozen=True)
class Statement:
    """One ``asm`` statement: where it stands in the source, its text, and its operands' expressions."""

    begin: int
    end: int
    text: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]


def statements(source: str) -> Iterator[Statement]:
    """Every ``asm`` statement of a source, in order."""
    position = 0
    while found := _BEGIN.search(source, position):
        close = _closing(source, found.end() - 1)
        sections = _split(source[found.end() : close], ":")
        text = "".join(_TEXT.findall(sections[0])).replace("\\n", " ").strip()
        outputs, inputs = (tuple(_operands(section)) for section in (*sections[1:3], "", "")[:2])
        position = source.index(";", close) + 1
        yield Statement(found.start(), position, text, outputs, inputs)


def emulated(source: str) -> str:
    """The source with calls of the emulator for its assembly, and with vector accesses that it takes note of.

    Raises ``ValueError`` for an instruction that the emulator does not know.
    """
    parts, last, place = [], 0, 0
    for place, statement in enumerate(statements(source)):
        parts += [source[last : statement.begin], _call(statement, place)]
        last = statement.end
    return _noted("".join([*parts, source[last:]]), 2 * place + 2)


def _call(statement: Statement, place: int) -> str:
    text, inputs = statement.text, statement.inputs
    if match := re.fullmatch(r"cp\.async\.wait_group (\d+);", text):
        return f"ptx::wait_group({match[1]});"
    if re.fullmatch(r"cp\.async\.wait_all;", text):
        return "ptx::wait_all();"
    if re.fullmatch(r"cp\.async\.commit_group;", text):
        return "ptx::commit();"
    if re.fullmatch(r"cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], %2;", text):
        return f"ptx::copy({place}, {', '.join(inputs)});"
    if _GUARDED_COPY.search(text):
        return f"ptx::copy({place}, {', '.join(inputs[:3])}, ({inputs[3]}) == 1);"
    if match := re.match(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16\s*\{", text):
        transposed = "true" if match[1] else "false"
        return f"ptx::ldmatrix<{transposed}>({place}, {inputs[0]}, {', '.join(statement.outputs)});"
    if re.fullmatch(r"st\.global\.v4\.b32 \[%0\], \{%1, %2, %3, %4\};", text):
        return f"ptx::store({place}, {', '.join(inputs)});"
    if re.fullmatch(r"cvt\.rna\.tf32\.f32 %0, %1;", text):
        return f"ptx::to_tf32({statement.outputs[0]}, {inputs[0]});"
    if match := re.fullmatch(r"fma\.rn\.(b?f16)x2 %0, %1, %2, %3;", text):
        return f"{statement.outputs[0]} = ptx::multiply_add<{_ELEMENTS[match[1]]}>({', '.join(inputs)});"
    if re.fullmatch(r"ex2\.approx\.ftz\.f32 %0, %1;", text):
        return f"{statement.outputs[0]} = ptx::power_of_two({inputs[0]});"
    return _hopper_call(statement, place) or _product(statement)


def _product(statement: Statement) -> str:
    match = _PRODUCT.match(statement.text)
    if match and match[1] in _SUMS:
        types = ", ".join(_SUMS[match[1]])
        return f"ptx::mma<{types}>({', '.join((*statement.outputs, *statement.inputs))});"
    raise ValueError(f"the emulator must know each instruction, but it does not know {statement.text[:80]!r}")


def _hopper_call(statement: Statement, place: int) -> str:
    """What is defined in ``cuda_hopper.h``; empty for any other instruction."""
    text, inputs = statement.text, statement.inputs
    if text in _CALLS:
        result = f"{statement.outputs[0]} = " if statement.outputs else ""
        return f"{result}ptx::{_CALLS[text]}({', '.join(inputs)});"
    if match := re.fullmatch(r"wgmma\.wait_group\.sync\.aligned (\d+);", text):
        return f"ptx::wgmma_wait({match[1]});"
    if match := re.fullmatch(r"bar\.(arrive|sync) %0, (\d+);", text):
        return f"ptx::bar_{match[1]}({inputs[0]}, {match[2]});"
    if re.fullmatch(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32 \d+;", text):
        return ";"  # how many registers a thread may have changes nothing here
    if (match := _BOX.fullmatch(text)) and match[1]:
        to, tensor, *at, barrier, blocks = inputs
        return f"ptx::fetch_box_of_all({to}, {tensor}, {{{', '.join(at)}}}, {barrier}, {blocks});"
    if match:
        to, tensor, *at, barrier = inputs
        return f"ptx::fetch_box({to}, {tensor}, {{{', '.join(at)}}}, {barrier});"
    match = _REGISTER_PRODUCT.fullmatch(text)
    if match and len(statement.outputs) == int(match[1]) // 2:
        across = "true" if match[3] == "1" else "false"
        return (f"ptx::wgmma_registers<{_ELEMENTS[match[2]]}, {across}>("
                f"{place}, {', '.join((*inputs, *statement.outputs))});")
    if _STORED_BOX.fullmatch(text):
        tensor, *at, source = inputs
        return f"ptx::store_box({source}, {tensor}, {{{', '.join(at)}}});"
    if match := re.fullmatch(r"cp\.async\.bulk\.wait_group\.read (\d+);", text):
        return f"ptx::wait_stores({match[1]});"
    if re.fullmatch(r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16 \[%0\], \{%1, %2, %3, %4\};", text):
        return f"ptx::stmatrix({place}, {', '.join(inputs)});"
    match = _WARPGROUP_PRODUCT.fullmatch(text)
    if match and len(statement.outputs) == int(match[1]) // 2:
        across = ", ".join("true" if flag == "1" else "false" for flag in match.groups()[2:])
        return f"ptx::wgmma<{_ELEMENTS[match[2]]}, {across}>({place}, {', '.join((*inputs, *statement.outputs))});"
    return ""


def _noted(source: str, place: int) -> str:
    """Accesses of whole vectors through pointers, and of elements of arrays in shared memory, except in an index."""
    parts = []
    for kernel in re.split(f"(?={_KERNEL})", source):  # an array of the same name may lie elsewhere in another
        noted, place = _noted_in_kernel(kernel, place)
        parts.append(noted)
    return "".join(parts)


def _noted_in_kernel(source: str, place: int) -> tuple[str, int]:
    arrays = {name: element for element, name in _SHARED.findall(source)}
    named = "|".join(arrays) or "(?!)"
    element = rf"(?<!&)(?<!&\()(?<!\w)(?:\(\((?:volatile )?(\w+)\*\)({named})\)|({named}))\["
    which = re.compile(f"{_ACCESS.pattern}|{element}")
    parts, last = [], 0
    while found := which.search(source, last):
        vector, cast, *names = found.groups()
        close = _closing(source, found.end() - 1)
        kind = vector or cast or arrays[names[1]]
        place_of = source[found.end() - 1 : close + 1] if vector else f"&{source[found.start() : close + 1]}"
        noted = f'*ptx::note({place}, "{kind}", ({kind}*){place_of})'
        parts += [source[last : found.start()], noted if vector else f"({noted})"]
        last, place = close + 1, place + 2  # wide ones are two accesses
    return "".join([*parts, source[last:]]), place


def _closing(source: str, opening: int) -> int:
    """The parenthesis or bracket that closes the one at ``opening``; texts are passed by."""
    depth, quoted = 0, False
    for position in range(opening, len(source)):
        letter = source[position]
        if letter == '"':
            quoted = not quoted
        elif not quoted:
            depth += (letter in "([") - (letter in ")]")
            if depth == 0:
                return position
    raise ValueError("the source must close each parenthesis")


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside of parentheses and texts."""
    parts, depth, quoted, last = [], 0, False, 0
    for position, letter in enumerate(text):
        if letter == '"':
            quoted = not quoted
        elif not quoted:
            depth += (letter in "([") - (letter in ")]")
            if letter == separator and depth == 0:
                parts.append(text[last:position])
                last = position + 1
    return [*parts, text[last:]]


def _operands(section: str) -> Iterator[str]:
    for operand in _split(section, ","):
        if "(" in operand:
            yield operand[operand.index("(") + 1 : operand.rindex(")")].strip()
