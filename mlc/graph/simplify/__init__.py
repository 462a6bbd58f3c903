"""Simplifications of a Relax graph, one small named pass per file."""

from mlc.graph.simplify.affine import FoldAffine
from mlc.graph.simplify.arithmetic import CheaperArithmetic
from mlc.graph.simplify.batch_norm import SimplifyBatchNorm
from mlc.graph.simplify.broadcasts import ShrinkBroadcasts
from mlc.graph.simplify.channel_shuffles import SinkShuffles
from mlc.graph.simplify.channel_window import ConvolveChannelWindows
from mlc.graph.simplify.concat import ShareConcats
from mlc.graph.simplify.conv1d_as_conv2d import LiftToImages
from mlc.graph.simplify.conv3d_as_conv2d import SliceVolumes
from mlc.graph.simplify.cse import EliminateCommonSubexpressions
from mlc.graph.simplify.empty_reductions import FoldEmptyReductions
from mlc.graph.simplify.few_queries import FewQueries
from mlc.graph.simplify.fold_constants import FoldConstants
from mlc.graph.simplify.gelu import RecogniseGelu
from mlc.graph.simplify.identities import DropIdentities
from mlc.graph.simplify.layer_norm import RecogniseLayerNorm
from mlc.graph.simplify.movement import MergeMovement
from mlc.graph.simplify.padding import FoldPadding
from mlc.graph.simplify.pointwise import MovePointwise
from mlc.graph.simplify.reductions import MergeReductions
from mlc.graph.simplify.sinking import SinkMovement, SinkQuantised
from mlc.graph.simplify.slice_concat import JoinPieces
from mlc.graph.simplify.slice_pushdown import DropUnread
from mlc.graph.simplify.softmax import RecogniseSoftmax
from mlc.graph.simplify.variadic import UnstackReductions

__all__ = [
    "CheaperArithmetic",
    "ConvolveChannelWindows",
    "DropIdentities",
    "DropUnread",
    "EliminateCommonSubexpressions",
    "FewQueries",
    "FoldAffine",
    "FoldConstants",
    "FoldEmptyReductions",
    "FoldPadding",
    "JoinPieces",
    "LiftToImages",
    "MergeMovement",
    "MergeReductions",
    "MovePointwise",
    "RecogniseGelu",
    "RecogniseLayerNorm",
    "RecogniseSoftmax",
    "ShareConcats",
    "ShrinkBroadcasts",
    "SimplifyBatchNorm",
    "SinkMovement",
    "SinkQuantised",
    "SinkShuffles",
    "SliceVolumes",
    "UnstackReductions",
]
