"""The language of stored traces: exactly the instructions that the spaces' programs and MetaSchedule use.

Logs are shared, and TVM believes a trace: an annotation may carry assembly, an index map any object graph, a split
may drop the check of its bounds. So a trace is read as hostile input before TVM sees it. Every instruction, the kinds
of its inputs, the range of each attribute, each annotation's key and value, and every decision must be in the tables
below. A space whose program needs another primitive adds a line here, and says there why it keeps what is computed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schedules.amx_tiles import is_tiles
from schedules.intrin import PREFIX
from schedules.space import InvalidDecision
from schedules.tvm_json import check_index_map

__all__ = ["Instruction", "parse_trace"]

#: ``[name, inputs, attributes, outputs]``
Instruction = list[Any]
Check = Callable[[Any], bool]

_MAX_TEXT = 1 << 20  # characters of a trace; the longest of 3,000 has 6,163
_MAX_STEPS = 4096  # instructions; at most 118
_MAX_FACTOR = 1 << 24
_VARIABLE = re.compile(r"[blv][0-9]{1,6}")


@dataclass(frozen=True)
class _Form:
    """``inputs`` is a regular expression over the kinds of an instruction's inputs: a block ``b``, a loop ``l``, a
    variable ``v``, a whole number ``i``, None ``n``, a list of blocks ``B``, a text ``t``, anything else ``o``.
    ``outputs`` is the kind of its results.
    """

    inputs: str = ""
    attributes: tuple[Check, ...] = ()
    outputs: str = ""


def _int(low: int, high: int) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _ints(low: int, high: int, longest: int = 64) -> Check:
    each = _int(low, high)
    return lambda value: isinstance(value, list) and len(value) <= longest and all(map(each, value))


def _one_of(*values: object) -> Check:
    return lambda value: any(type(value) is type(known) and value == known for known in values)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256 and value.isprintable()


def _is_index_map(value: Any) -> bool:
    check_index_map(value)
    return True


def _is_intrinsic(value: Any) -> bool:
    return _is_name(value) and value.startswith(PREFIX)  # `use` knows which of them there are


_FLAG = _one_of(0, 1, False, True)
_OFF = _one_of(0, False)  # of flags that switch one of TVM's checks off
_BUFFER = _int(0, 63)
_SCOPE = _one_of("global", "local", "shared", "shared.dyn", "warp")
_MAIN = _one_of("main")
_THREADS = _one_of(*(f"{kind}.{axis}" for kind in ("blockIdx", "threadIdx", "vthread") for axis in "xyz"))
_POSITION = _int(-2, _MAX_STEPS)  # among a loop's children; -1 is the last, -2 the first that is possible

_FORMS: Mapping[str, _Form] = {
    "AddUnitLoop": _Form("[bl]", (), "l"),
    "Annotate": _Form("[bl].", (_is_name,)),
    "Bind": _Form("l", (_THREADS,)),
    "Blockize": _Form("l", (_FLAG,), "b"),  # TVM proves that the blocks are whole
    "CacheRead": _Form("bB", (_BUFFER, _SCOPE), "b"),
    "CacheWrite": _Form("bB", (_BUFFER, _SCOPE), "b"),
    "ComputeAt": _Form("bl", (_FLAG, _POSITION)),
    "ComputeInline": _Form("b"),
    "DecomposeReduction": _Form("bl", (), "b"),
    "EnterPostproc": _Form(),
    "Fuse": _Form("l+", (_FLAG,), "l"),
    "GetChildBlocks": _Form("[bl]", (), "b"),
    "GetConsumers": _Form("b", (), "b"),
    "GetLoops": _Form("b", (), "l"),
    "GetOutputBlocks": _Form("b", (), "b"),
    "GetProducers": _Form("b", (), "b"),
    "GetSBlock": _Form("", (_is_name, _MAIN), "b"),
    "PadEinsum": _Form("b", (_ints(1, 4096, 16),)),
    "Parallel": _Form("l"),
    "RFactor": _Form("l", (_int(-16, 16),), "b"),
    "ReIndex": _Form("b", (_BUFFER, _FLAG), "b"),
    "Reorder": _Form("l+"),
    "ReverseComputeAt": _Form("bl", (_FLAG, _POSITION)),
    "ReverseComputeInline": _Form("b"),
    "SampleCategorical": _Form("", (_ints(-_MAX_FACTOR, _MAX_FACTOR, 4096), lambda value: True), "v"),
    "SampleComputeLocation": _Form("b", (), "l"),
    "SamplePerfectTile": _Form("l", (_int(1, 16), _int(-1, _MAX_FACTOR)), "v"),
    "SetScope": _Form("b", (_BUFFER, _SCOPE)),
    "Split": _Form("l[niv]{1,16}", (_FLAG, _OFF), "l"),  # the second flag drops the check of bounds
    "StorageAlign": _Form("b", (_BUFFER, _int(-16, 16), _int(1, 1024), _int(0, 1023))),
    "Tensorize": _Form("[bl]", (_is_intrinsic, _FLAG)),
    "TransformBlockLayout": _Form("b", (_is_index_map,)),
    # no padding, and TVM proves that the map is one to one
    "TransformLayout": _Form("bt", (_BUFFER, _FLAG, _one_of(None), _OFF)),
    "Unannotate": _Form("[bl]", (_is_name,)),
    "Unroll": _Form("l"),
    "Vectorize": _Form("l"),
}


def _is_prefetch(value: Any) -> bool:
    return _ints(0, 1 << 31, 3)(value) and len(value) == 3


def _is_attention(value: Any) -> bool:
    split = _ints(1, 128, 4)(value) and len(value) == 4 and value[3] > 1
    tiles = value[:3] if split else value
    return tiles in [[w, k, s] for w in (1, 2, 4, 8) for k in (16, 32, 64, 128) for s in (2, 3, 4)]


def _is_group_attention(value: Any) -> bool:
    turns = isinstance(value, list) and value[3:] == [1, 1]  # which takes two warpgroups, or one would wait for ever
    tiles = value[:3] if turns else value
    return tiles in [[w, k, s] for w in ((8,) if turns else (4, 8)) for k in (64, 96, 128) for s in (2, 3, 4)]


def _is_wgmma(value: Any) -> bool:
    tiles: list[Any] = [[64, 128, 256], [64, 128, 192, 256], [64, 128], [1, 2], [3, 4, 5, 6], [1, 4, 8, 16],
                        [0, 1], [1, 2]]
    whole = _ints(0, 1 << 30, 9)(value) and len(value) == 9 and value[8] > 0 and not value[8] % max(1, value[7])
    known = whole and all(each in of_it for each, of_it in zip(value[:8], tiles, strict=True))
    return known and value[0] % (64 * value[3]) == 0  # or a warpgroup would have no rows, and some no warpgroup


def _is_few_bits(value: Any) -> bool:
    tiles: list[Any] = [[8, 16, 32, 64], [1, 2, 4], [1, 2, 4, 8], [1, 2, 4, 8, 16], [1, 2, 3, 4, 6, 8, 16], [1, 2, 4],
                        [0, 1]]
    known = _ints(0, 64, 7)(value) and len(value) == 7 and all(
        each in of_it for each, of_it in zip(value, tiles, strict=True))
    return known and value[2] * value[3] <= 32  # warps of a block


def _is_prefetch_of_rows(value: Any) -> bool:
    return _ints(0, 1 << 31, 33)(value) and len(value) % 2 == 1 and value[0] <= 64


_UNROLLED = _int(0, 1024)
#: says what a function's products may be rounded to: a trace may take it off, never put it on
_PRECISION = "mlc.precision"
#: what the lowering reads, and what MetaSchedule leaves for its own later steps
_ANNOTATIONS: Mapping[str, Check] = {
    "permuted_layout": _FLAG,  # schedules.permuted_layout refuses it where some access of a buffer lacks it
    # a copy and its use, or two copies and what a pipeline of three becomes; TVM refuses what breaks a dependence, and
    # waits for asynchronous copies by itself
    "software_pipeline_async_stages": _one_of([0]),
    "software_pipeline_order": _one_of([0, 1, 2], [0, 1, 2, 3, 4]),
    "software_pipeline_stage": _one_of([0, 0, 1], *([0, 0, last, last, last] for last in range(1, 5))),
    "mlc.attention": _is_attention,  # of these tiles the kernel computes the same; check_marked sees to the rest
    "mlc.attention_wgmma": _is_group_attention,  # likewise
    "mlc.wgmma": _is_wgmma,  # likewise, and check_marked_product
    "mlc.few_bits": _is_few_bits,  # likewise, and check_marked_few_bits
    "mlc.few_bits_weights": lambda value: _ints(1, 8, 2)(value) and len(value) == 2,
    "mlc.tiles": is_tiles,  # check_tiles sees to it that what is in the loop takes tiles of these shapes
    "mlc.prefetch": _is_prefetch,
    "mlc.prefetch_rows": _is_prefetch_of_rows,
    "pragma_loop_partition_hint": _FLAG,
    "pragma_auto_unroll_max_step": _UNROLLED,
    "pragma_unroll_explicit": _FLAG,
    "meta_schedule.cooperative_fetch": _int(0, 1024),
    "meta_schedule.parallel": _int(0, 1 << 16),
    "meta_schedule.random_compute_producer": _FLAG,
    "meta_schedule.thread_extent_high_inclusive": _int(0, 1024),
    "meta_schedule.thread_extent_low_inclusive": _int(0, 1024),
    "meta_schedule.tiling_structure": _is_name,
    "meta_schedule.unroll_explicit": _UNROLLED,
    "meta_schedule.unroll_implicit": _UNROLLED,
    "meta_schedule.vectorize": _int(0, 1024),
}


def parse_trace(text: str, params: int) -> list[Any]:
    """The instructions and decisions in a trace's JSON, for a function of ``params`` parameters.

    Raises :class:`InvalidDecision` for anything that the tables of this module do not allow.
    """
    if len(text) > _MAX_TEXT:
        raise InvalidDecision(f"a trace must have at most {_MAX_TEXT} characters, got {len(text)}")
    try:
        trace = json.loads(text)
        instructions, decisions = trace
        taken = {index: value for index, value in decisions}
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidDecision("a trace must fit its function, but this one is no list of instructions and decisions "
                              f"({error})") from None
    if not isinstance(instructions, list) or len(instructions) > _MAX_STEPS or len(taken) != len(decisions):
        raise InvalidDecision(f"a trace must be a list of at most {_MAX_STEPS} instructions and one decision for each")
    reader = _Reader(params)
    for index, instruction in enumerate(instructions):
        reader.read(instruction, taken.pop(index, None))
    if taken:
        raise InvalidDecision("a trace must take decisions in its sampling instructions only")
    return trace


@dataclass
class _Reader:
    """Goes through a trace and knows which variables are defined, and the numbers among them."""

    params: int
    defined: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)

    def read(self, instruction: Any, decision: Any) -> None:
        if not isinstance(instruction, list) or [type(part) for part in instruction] != [str, list, list, list]:
            raise InvalidDecision("an instruction must be a name, inputs, attributes and outputs")
        name, inputs, attributes, outputs = instruction
        form = _FORMS.get(name)
        if form is None:
            raise InvalidDecision(f"a trace must use the instructions of search spaces, got {name[:40]!r}")
        kinds = "".join(map(self._kind, inputs))
        accepted = len(attributes) == len(form.attributes) and all(
            check(value) for check, value in zip(form.attributes, attributes, strict=True)
        )
        if not re.fullmatch(form.inputs, kinds) or not accepted:
            raise InvalidDecision(f"{name} must have inputs and attributes as search spaces give them")
        self._check_inputs(name, inputs, attributes)
        self._define(name, form, outputs)
        self._decide(name, attributes, outputs, decision)

    def _kind(self, value: Any) -> str:
        if isinstance(value, str):
            if value == "None":
                return "n"
            return value[0] if value in self.defined else "t"
        if isinstance(value, int) and not isinstance(value, bool):
            return "i"
        if isinstance(value, list) and all(isinstance(v, str) and v in self.defined and v[0] == "b" for v in value):
            return "B"
        return "n" if value is None else "o"

    def _check_inputs(self, name: str, inputs: list[Any], attributes: list[Any]) -> None:
        if name == "Annotate":
            self._check_annotation(attributes[0], self._number(inputs[1]))
        elif name == "Unannotate" and attributes[0] not in (*_ANNOTATIONS, _PRECISION):
            raise InvalidDecision(f"a trace must use the annotations of search spaces, got {attributes[0][:60]!r}")
        elif name == "TransformLayout":
            check_index_map(inputs[1])
        elif name == "Split":
            factors = [self._number(value) for value in inputs[1:]]
            if not all(value in (None, "None") or _int(1, _MAX_FACTOR)(value) for value in factors):
                raise InvalidDecision(f"a loop must be split by factors from 1 to {_MAX_FACTOR}, got {factors}")

    def _number(self, value: Any) -> Any:
        """The number that a variable holds, anything else as it is."""
        return self.numbers.get(value, value) if isinstance(value, str) else value

    def _check_annotation(self, key: str, value: Any) -> None:
        check = _ANNOTATIONS.get(key)
        if check is None:
            raise InvalidDecision(f"a trace must use the annotations of search spaces, got {key[:60]!r}")
        wanted = {"mlc.prefetch": slice(0, 1), "mlc.prefetch_rows": slice(1, None, 2)}.get(key)
        if not check(value) or (wanted and any(param >= self.params for param in value[wanted])):
            raise InvalidDecision(f"the annotation {key} must have a value as search spaces give it")

    def _define(self, name: str, form: _Form, outputs: list[Any]) -> None:
        for output in outputs:
            if not isinstance(output, str) or not _VARIABLE.fullmatch(output) or output[0] != form.outputs:
                raise InvalidDecision(f"{name} must define variables of its kind, got {str(output)[:40]!r}")
            if output in self.defined:
                raise InvalidDecision(f"a trace must define each variable once, got {output} twice")
            self.defined.add(output)

    def _decide(self, name: str, attributes: list[Any], outputs: list[str], decision: Any) -> None:
        """Every sample must be decided: what a trace leaves open, TVM draws at random."""
        if name == "SampleCategorical":
            values, odds = attributes
            known = isinstance(odds, list) and len(odds) == len(values) and all(map(_is_odds, odds))
            fits = known and len(outputs) == 1 and _int(0, len(values) - 1)(decision)
            self.numbers.update({outputs[0]: values[decision]} if fits else {})
        elif name == "SamplePerfectTile":
            fits = _ints(1, _MAX_FACTOR)(decision) and len(decision) == len(outputs) == attributes[0]
            self.numbers.update(zip(outputs, decision, strict=True) if fits else {})
        elif name == "SampleComputeLocation":
            fits = _POSITION(decision)
        else:
            fits = decision is None
        if not fits:
            raise InvalidDecision(f"{name} must have a decision within its choices, got {str(decision)[:40]}")


def _is_odds(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1
