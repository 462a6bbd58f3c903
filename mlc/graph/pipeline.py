"""The graph pipeline: simplify, choose layouts, pack weights, lower and fuse."""

from __future__ import annotations

from pathlib import Path

import tvm
from tvm.relax import transform
from tvm.relax.backend import DispatchSortScan

from mlc.config import get, get_flag
from mlc.graph import simplify
from mlc.graph.attention import FuseAttention
from mlc.graph.concat import PlaceConcats
from mlc.graph.fuse import GROUPING, MERGING, LowerInnerReshapes, check_lowered
from mlc.graph.layout import BlockedLayouts
from mlc.graph.legalise import Legalise
from mlc.graph.packing import PackWeights
from mlc.graph.prologue import FoldPrologues
from mlc.graph.rewrite import check_straight_line
from mlc.graph.select import ChooseKernels, Price
from mlc.graph.slices import PlaceSlices
from mlc.graph.substitute.choose import Substitutions, choose
from mlc.target import Target

__all__ = ["SIMPLIFY", "lowering", "optimise", "passes", "prepare", "simplified"]

#: one round of simplification; rounds repeat until nothing changes
SIMPLIFY: tuple[tvm.transform.Pass, ...] = (
    simplify.DropIdentities,
    simplify.FoldConstants,
    simplify.UnstackReductions,
    simplify.RecogniseGelu,
    simplify.RecogniseLayerNorm,
    simplify.RecogniseSoftmax,
    simplify.ConvolveChannelWindows,
    simplify.CheaperArithmetic,
    simplify.SimplifyBatchNorm,
    simplify.FoldAffine,
    simplify.FoldPadding,
    simplify.LiftToImages,
    simplify.SliceVolumes,
    simplify.SinkMovement,
    simplify.SinkShuffles,
)

_MAX_ROUNDS = 8


def simplified(mod: tvm.IRModule) -> tvm.IRModule:
    """The module after as many rounds of :data:`SIMPLIFY` as change something."""
    for _ in range(_MAX_ROUNDS):
        before = mod
        for each in SIMPLIFY:
            mod = each(mod)
        if mod.same_as(before):
            break
    return mod


Simplify = tvm.transform.module_pass(lambda mod, _ctx: simplified(mod), opt_level=0, name="Simplify")


def prepare() -> tuple[tvm.transform.Pass, ...]:
    """What :func:`optimise` runs before substitutions, and on what they make."""
    return transform.ConvertToDataflow(), transform.CanonicalizeBindings(), Simplify, simplify.ShareCommon


def lowering(target: Target, price: Price | None = None, *, winograd: bool = True) -> tuple[tvm.transform.Pass, ...]:
    """What :func:`optimise` runs on the graph that is taken."""
    return (
        simplify.ShareConcats,
        FuseAttention(target),
        BlockedLayouts(target, winograd=winograd),
        PackWeights(target),
        simplify.MergeMovement,
        LowerInnerReshapes,
        DispatchSortScan(),
        Legalise(target),
        PlaceSlices(target),
        transform.FoldConstant(),  # not later: it would undo the copy of a constant that becomes part of a whole
        PlaceConcats(target),
        *GROUPING,
        ChooseKernels(target, price, winograd=winograd),
        FoldPrologues(target),
        *MERGING,
    )


def passes(target: Target, price: Price | None = None, *, winograd: bool = True) -> tuple[tvm.transform.Pass, ...]:
    """What :func:`optimise` runs without substitutions, in order."""
    return (*prepare(), *lowering(target, price, winograd=winograd))


def optimise(
    mod: tvm.IRModule, target: Target, price: Price | None = None, *, winograd: bool | None = None,
    substitutions: Substitutions | None = None, dump: str | Path | None = None,
) -> tvm.IRModule:
    """Lower ``mod`` to calls of fused tensor functions.

    ``main`` of the result holds ``call_tir``, ``reshape`` (a view), tuples and constants only. ``price`` gives the
    seconds of a task, None where it is not known; alternatives without prices are chosen by an analytic estimate.
    ``winograd`` says whether convolutions may round as :func:`mlc.graph.winograd.error_bound` states; left out,
    ``MLC_WINOGRAD`` does. ``substitutions`` are the rules that may make another graph of the model; left out, none
    are. ``dump`` names a folder that gets the module as text after each pass; left out, ``MLC_DUMP_DIR`` says. Raises
    :class:`mlc.errors.ModelError` for control flow or symbolic shapes and :class:`mlc.errors.BuildError` for an
    operator that cannot be lowered.
    """
    folder = dump or get("MLC_DUMP_DIR")
    allowed = get_flag("MLC_WINOGRAD") if winograd is None else winograd
    check_straight_line(mod)  # what passes raise loses its type on the way through TVM

    def run(mod: tvm.IRModule, each: tuple[tvm.transform.Pass, ...], first: int = 0) -> tvm.IRModule:
        for index, step in enumerate(each, first):
            mod = step(mod)
            if folder:
                _dump(mod, Path(folder) / f"{index:02d}_{step.info.name}.py")
        return mod

    def lower(mod: tvm.IRModule) -> tvm.IRModule:
        return run(mod, lowering(target, price, winograd=allowed), len(prepare()))

    with target.tvm:
        mod = run(mod, prepare())
        if substitutions is None:
            mod = lower(mod)
        else:
            mod = choose(mod, target, substitutions, price, lambda m: lower(run(m, prepare())), winograd=allowed)
    check_lowered(mod)
    return mod


def _dump(mod: tvm.IRModule, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(mod.script(show_meta=False))
