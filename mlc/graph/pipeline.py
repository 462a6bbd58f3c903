"""The graph pipeline: all passes from an imported Relax module to calls of fused tensor functions, in order.

:func:`lower` is the entry point: :func:`prepare` (precision, simplification), the search for substitutions, and
:func:`lowering` (layouts, packed weights, kernels, fusion).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import tvm
from tvm.relax import transform

from mlc.config import get
from mlc.graph import precision, simplify
from mlc.graph.algorithms.filters import Filters
from mlc.graph.algorithms.registry import check_options
from mlc.graph.ir.origins import NodeGraph, Origins, without_merged
from mlc.graph.ir.printed import as_script
from mlc.graph.ir.rewrite import check_straight_line
from mlc.graph.layout.blocked import BlockedLayouts
from mlc.graph.layout.channels_last import ChannelsLast
from mlc.graph.layout.packing import PackWeights
from mlc.graph.layout.transposed_weights import TransposeWeights
from mlc.graph.lowering.attention import FuseAttention
from mlc.graph.lowering.concat import PlaceConcats
from mlc.graph.lowering.extremes import JoinExtremes
from mlc.graph.lowering.fuse import GROUPING, MERGING, LowerInnerReshapes, check_lowered
from mlc.graph.lowering.heads import PlaceHeads
from mlc.graph.lowering.joins import JoinDequantised
from mlc.graph.lowering.legalise import Legalise
from mlc.graph.lowering.one_form import WriteSizesAlike
from mlc.graph.lowering.prologue import FoldPrologues
from mlc.graph.lowering.recurrent import LowerRecurrent
from mlc.graph.lowering.scans import DispatchScans
from mlc.graph.lowering.select import ChooseKernels, Price
from mlc.graph.lowering.sizes import NameSizes
from mlc.graph.lowering.slices import PlaceSlices
from mlc.graph.lowering.states import PlaceAppends
from mlc.graph.lowering.unpacked import UnpackWeights
from mlc.graph.substitute.choose import Substitutions, choose
from mlc.graph.task import Task
from mlc.graph.tasks import combined, extract_tasks, with_alternatives
from mlc.options import DEFAULT_OPTIONS, CompileOptions
from mlc.sizes import free_sizes, scope
from mlc.target import Target

__all__ = ["SIMPLIFY", "Lowered", "lower", "lowering", "optimise", "passes", "prepare", "simplified"]

#: one round of simplification; :func:`simplified` repeats rounds until nothing changes
SIMPLIFY: tuple[tvm.transform.Pass, ...] = (
    simplify.DropIdentities,
    simplify.FoldEmptyReductions,
    simplify.FoldConstants,
    simplify.UnstackReductions,
    simplify.RecogniseGelu,
    simplify.RecogniseLayerNorm,
    simplify.RecogniseSoftmax,
    simplify.ConvolveChannelWindows,
    simplify.CheaperArithmetic,
    simplify.ShrinkBroadcasts,
    simplify.MergeReductions,
    simplify.JoinPieces,
    simplify.DropUnread,
    simplify.FewQueries,
    simplify.SimplifyBatchNorm,
    simplify.FoldAffine,
    simplify.FoldPadding,
    simplify.LiftToImages,
    simplify.SliceVolumes,
    simplify.MovePointwise,
    simplify.SinkMovement,
    simplify.SinkShuffles,
)

_MAX_ROUNDS = 8


def simplified(mod: tvm.IRModule) -> tvm.IRModule:
    """Apply :data:`SIMPLIFY` until nothing changes, at most :data:`_MAX_ROUNDS` times."""
    for _ in range(_MAX_ROUNDS):
        before = mod
        for each in SIMPLIFY:
            mod = each(mod)
        if mod.same_as(before):
            break
    return mod


Simplify = tvm.transform.module_pass(lambda mod, _ctx: simplified(mod), opt_level=0, name="Simplify")


def prepare(target: Target, options: CompileOptions = DEFAULT_OPTIONS) -> tuple[tvm.transform.Pass, ...]:
    """The passes of :func:`lower` before the search for substitutions, which are also run on each graph it finds."""
    return (
        transform.ConvertToDataflow(),
        LowerRecurrent(target),
        transform.CanonicalizeBindings(),
        # here already: which activations are 16-bit floats is lost where a model converts them for a float32 weight
        *(() if target.kind == "llvm" else (precision.WeightOnlyProducts(target, options, converted=True),)),
        precision.WidenFloats if target.kind == "llvm" else precision.WidenSums,
        precision.DynamicQuantisation(target),
        precision.Quantisation(target, options, (simplify.LiftToImages, simplify.SliceVolumes)),
        precision.WeightOnlyProducts(target, options),
        Simplify,
        *((simplify.SinkQuantised,) if target.kind == "cuda" else ()),
        simplify.EliminateCommonSubexpressions,
    )


def lowering(
    target: Target, price: Price | None = None, options: CompileOptions = DEFAULT_OPTIONS, *,
    notify: Callable[[Task], None] | None = None, filters: MutableMapping[int, Filters] | None = None,
) -> tuple[tvm.transform.Pass, ...]:
    """The passes of :func:`lower` on the chosen graph; ``notify`` and ``filters`` are for :func:`ChooseKernels`."""
    return (
        simplify.ShareConcats,
        precision.RoundConstants(options),
        precision.NarrowOperands(
            target, options, (simplify.DropIdentities, simplify.EliminateCommonSubexpressions, simplify.SinkMovement)
        ),
        FuseAttention(target),
        BlockedLayouts(target, options),
        ChannelsLast(target, options),
        PackWeights(target, options),
        TransposeWeights(target),
        simplify.MergeMovement,
        PlaceHeads(target),
        LowerInnerReshapes,
        JoinDequantised,
        JoinExtremes,
        DispatchScans(target),
        Legalise(target),
        PlaceSlices(target),
        # not after PlaceConcats, since it would undo the copy of a constant into a concatenation
        transform.FoldConstant(),
        # not before FoldConstant, which would fold the unpacking of constant weights
        UnpackWeights(target, options),
        precision.AllowTensorFloat(options),
        PlaceConcats(target),
        PlaceAppends,
        WriteSizesAlike,
        *GROUPING,
        ChooseKernels(target, price, options, notify=notify, filters=filters),
        FoldPrologues(target),
        *MERGING,
        NameSizes,
    )


def passes(
    target: Target, price: Price | None = None, options: CompileOptions = DEFAULT_OPTIONS
) -> tuple[tvm.transform.Pass, ...]:
    """All passes of :func:`lower` without substitutions, in order."""
    return (*prepare(target, options), *lowering(target, price, options))


@dataclass(frozen=True)
class Lowered:
    """A model as calls of fused tensor functions.

    ``main`` of ``module`` contains only ``call_tir``, ``reshape`` (a view), tuples and constants. ``alternatives`` are
    tasks that were compared with each other; their ``weight`` is how often the model would call each. ``origins`` are
    the model's nodes that each call computes, by their positions (:mod:`mlc.frontend.origins`). ``filters`` are the
    untransformed 16-bit filters of transformed weights, by the addresses of the constants.
    """

    module: tvm.IRModule
    target: Target
    alternatives: tuple[Task, ...] = ()
    origins: Origins = field(default_factory=dict)
    filters: Mapping[int, Filters] = field(default_factory=dict)

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks that the module calls; see :func:`mlc.graph.tasks.extract_tasks`."""
        return extract_tasks(self.module, self.target)

    def with_alternatives(self) -> list[Task]:
        """:attr:`tasks`, followed by the alternatives that the module might call instead."""
        return with_alternatives(self.tasks, self.alternatives)


def lower(
    mod: tvm.IRModule, target: Target, price: Price | None = None, options: CompileOptions | None = None, *,
    substitutions: Substitutions | None = None, dump: str | Path | None = None,
) -> Lowered:
    """Lower ``mod`` to calls of fused tensor functions.

    ``price`` returns the seconds of a task, or None if unknown; alternatives without prices are chosen by an analytic
    estimate. ``options`` restrict the choices (default: those of the environment's settings). ``substitutions`` are the
    rules that may replace the model's graph (default: none). ``dump`` names a folder to write the module to, as text,
    after each pass (default: ``MLC_DUMP_DIR``). If sizes are free (:func:`mlc.sizes.free_sizes`), a rule is applied
    only if it holds for all of them, and graphs are priced at the usual sizes.

    Raises :class:`mlc.errors.ModelError` for control flow and data-dependent shapes, and
    :class:`mlc.errors.BuildError` for an operator that cannot be lowered.
    """
    folder = dump or get("MLC_DUMP_DIR")
    options = CompileOptions.of() if options is None else options
    check_options(options)
    precision.check_precision(options, target)
    free = free_sizes(mod)
    check_straight_line(mod)  # here, since an exception that a pass raises loses its type on its way through TVM
    nodes = NodeGraph.of(mod)
    graphs: list[Lowered] = []  # several, with substitutions

    def run(mod: tvm.IRModule, each: tuple[tvm.transform.Pass, ...], first: int = 0) -> tvm.IRModule:
        for index, step in enumerate(each, first):
            mod = step(mod)
            if folder:
                _dump(mod, Path(folder) / f"{index:02d}_{step.info.name}.py")
        return mod

    def lowered(mod: tvm.IRModule) -> tvm.IRModule:
        weighed, filters = list[Task](), dict[int, Filters]()
        steps = lowering(target, price, options, notify=weighed.append, filters=filters)
        module = run(mod, steps, len(prepare(target, options)))
        graphs.append(Lowered(module, target, tuple(combined(weighed)), filters=filters))
        return graphs[-1].module

    with target.tvm, scope(free):
        mod = run(mod, prepare(target, options))
        if substitutions is None:
            mod = lowered(mod)
        else:
            others = partial(run, each=prepare(target, options))
            mod = choose(mod, target, substitutions, price, lambda m: lowered(others(m)), options)
    check_lowered(mod)
    taken = next(graph for graph in graphs if graph.module.same_as(mod))
    return replace(taken, module=without_merged(mod), origins=nodes.origins(mod))


def optimise(
    mod: tvm.IRModule, target: Target, price: Price | None = None, options: CompileOptions | None = None, *,
    substitutions: Substitutions | None = None, dump: str | Path | None = None,
) -> tvm.IRModule:
    """The ``module`` of :func:`lower`."""
    return lower(mod, target, price, options, substitutions=substitutions, dump=dump).module


def _dump(mod: tvm.IRModule, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_script(mod), encoding="utf-8")
