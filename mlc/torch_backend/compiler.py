"""From a graph that Dynamo captured to an executable: functionalise, export with :func:`torch.export`, compile."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend, register_backend
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import InvalidBackend
from torch._functorch.aot_autograd import make_boxed_func

from mlc.artifact.inputs import Fit
from mlc.errors import MlcError, ModelError, UsageError
from mlc.shapes import Free
from mlc.text import one_line
from mlc.torch_backend.dynamic_shapes import Symbols, computed, is_symbol, numbers, ranges_of, sized, symbols_of
from mlc.torch_backend.frozen import Frozen, composed
from mlc.torch_backend.tracing import trace_recurrent_layers
from mlc.torch_backend.weights import Weights, is_weight

if TYPE_CHECKING:
    from mlc.artifact import Executable

__all__ = ["Options", "backend", "register"]


@dataclass(frozen=True)
class Options:
    """What ``torch.compile(..., options={...})`` may say; the names mean what they do for :func:`mlc.compile`.

    With ``seconds`` or ``trials`` each graph is tuned for so long before it is compiled, into ``log`` (default: your
    own log for the target), from which it is compiled in any case.
    """

    target: str = "native"
    threads: int | None = None
    log: str | None = None
    seconds: float | None = None
    trials: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Options:
        """Raises :class:`mlc.errors.UsageError` for an option that does not exist."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given or {}) - set(known))
        if unknown:
            raise UsageError(f"an option of the backend mlc must be one of {', '.join(known)}, got {unknown[0]}")
        options = cls(**(given or {}))
        for name, kinds in (("target", str), ("log", str), ("threads", int), ("trials", int), ("seconds", int | float)):
            value = getattr(options, name)
            bad = not isinstance(value, kinds) or isinstance(value, bool) or (not isinstance(value, str) and value <= 0)
            if value is not None and bad:
                what = "text" if kinds is str else "a number above zero"
                raise UsageError(f"the option {name} of the backend mlc must be {what}, got {value!r}")
        return options


def register() -> None:
    """Make ``backend="mlc"`` known to ``torch.compile``; needless where mlc is installed."""
    try:
        lookup_backend("mlc")
    except InvalidBackend:
        register_backend(backend, name="mlc")


def backend(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend itself, as ``torch.compile`` calls it for each graph.

    A graph that needs gradients runs eagerly, with a warning. Raises :class:`mlc.errors.UsageError` for wrong options
    (which Dynamo wraps) and :class:`mlc.errors.TargetError` for a wrong target.
    """
    from mlc.target import resolve

    if mode is not None:
        raise UsageError(f"the backend mlc must be called without a mode, got {mode}; options={{'seconds': 60}} tunes")
    parsed = Options.of(options)
    resolve(parsed.target, parsed.threads)
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs):
        _warn(graph, "it is called where gradients are recorded, and mlc compiles inference alone; call it under "
                     "torch.inference_mode() or torch.no_grad()")
        return graph.forward

    def compiler(functional: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(_Graph(functional, parsed))

    # ONNX's normalisation by the statistics of a batch is not what all converters make of it; arithmetic is
    aten = torch.ops.aten
    plain = get_decompositions([aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit,
                                aten.native_batch_norm])
    compiled: Callable[..., Any] = aot_autograd(fw_compiler=compiler, decompositions=plain)(graph, example_inputs)
    return compiled


trace_recurrent_layers(backend)


def _warn(graph: torch.fx.GraphModule, reason: str, what: str = "runs eagerly") -> None:
    count = sum(node.op.startswith("call") for node in graph.graph.nodes)
    warnings.warn(f"a graph of {count} operators {what}: {reason}", stacklevel=2)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, MlcError) else one_line(str(error))


class _Graph:
    """A functional graph; it is compiled for the weights that it is called with, and for its sizes.

    Where Dynamo left sizes free, one artifact serves their range; where that is impossible, each size is compiled when
    it first comes.
    """

    def __init__(self, graph: torch.fx.GraphModule, options: Options) -> None:
        self._graph, self._options = graph, options
        # for sizes, a program for each set of weights: Dynamo gives modules of one class the same graph; None if eager
        self._made: dict[tuple[Any, ...], tuple[_Specialised, ...] | None] = {}
        self._ranged: tuple[_Specialised, ...] = ()  # for ranges of sizes
        tuned = options.seconds is not None or options.trials is not None
        self._symbols = {} if tuned else symbols_of(graph)  # what is measured has sizes
        self._changes: Counter[int] = Counter()  # of the weights in place, by argument
        self._one_by_one = ""  # why no artifact serves a range of sizes, until that is said
        self._warned = False
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Sequence[Any]:
        key = tuple(arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args)
        made = self._known(key, args)
        if made is _MISSING:
            with self._lock:
                made = self._known(key, args)
                if made is _MISSING:
                    made = self._specialised(key, args)
        return self._graph(*args) if made is None else made(args)

    def _known(self, key: tuple[Any, ...], args: Sequence[Any]) -> Any:
        found = _found(self._ranged, args)
        return _found(self._made.get(key, ()), args) if found is _MISSING else found

    def _forranges_of(self, args: Sequence[Any], inputs: Collection[int]) -> _Specialised | None:
        """Compiled for all sizes that Dynamo left free; None where that is impossible, from then on."""
        if not self._symbols:
            return None
        try:
            made = _in_fresh_thread(lambda: _Specialised(self._graph, args, inputs, self._options, self._symbols))
        except UsageError:
            raise
        except Exception as error:  # a size that must be a number, say: then each size is compiled for itself
            self._symbols, self._one_by_one = {}, _reason(error)
            return None
        self._ranged = (made, *(each for each in self._ranged if each.current()))
        return cast(_Specialised, made)

    def _specialised(self, key: tuple[Any, ...], args: Sequence[Any]) -> _Specialised | None:
        """Compiled for these sizes and weights; None where that is impossible, said once."""
        try:
            _check(self._graph, args)
            self._changes.update({i for each in self._ranged for i in each.changed(args)})
            ranged = self._forranges_of(args, {i for i, count in self._changes.items() if count >= _MOST_CHANGES})
            if ranged is not None:
                return ranged
            if key not in self._made and len(self._made) >= _MOST_SIZES:
                raise ModelError(f"a graph must be called with at most {_MOST_SIZES} sets of sizes, each of which has "
                                 "an artifact of its own, but here is another; pad inputs to a few sizes")
            former = self._made.get(key) or ()
            self._changes.update({i for each in former for i in each.changed(args)})
            inputs = {i for i, count in self._changes.items() if count >= _MOST_CHANGES}
            # AOTAutograd's wrapper has changed how this thread dispatches operators, and tracing wants that untouched
            made = _in_fresh_thread(lambda: _Specialised(self._graph, args, inputs, self._options))
        except UsageError:
            raise
        except Exception as error:  # whatever PyTorch or TVM has to say of an operator that they do not know
            if not self._warned:
                self._warned = True
                _warn(self._graph, _reason(error))
            self._made[key] = None
            return None
        if self._one_by_one:
            _warn(self._graph, self._one_by_one, "is compiled for each set of sizes by itself")
            self._one_by_one = ""
        self._made[key] = (made, *(each for each in former if each.current()))
        return cast(_Specialised, made)


def _found(made: Sequence[_Specialised] | None, args: Sequence[Any]) -> Any:
    """What was made for the weights among the arguments; None where all runs eagerly, :data:`_MISSING` for nothing."""
    return None if made is None else next((each for each in made if each.holds(args)), _MISSING)


_MISSING: Any = object()
_MOST_SIZES = 8  # of one graph, since each holds its packed weights
_MOST_SIGNATURES = 64  # of an artifact for a range, of which it is remembered what they return
_MOST_CHANGES = 2  # of a weight in place; then it is an input, as statistics are that each call updates


def _in_fresh_thread(function: Callable[[], Any]) -> Any:
    """What the function returns or raises. Meanwhile no other thread traces: what Dynamo does there would be taken for
    a part of this program."""
    result: list[Any] = []
    raised: list[BaseException] = []
    lock = contextlib.nullcontext() if compile_lock._is_owned() else compile_lock

    def run() -> None:
        try:
            with lock:
                result.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="mlc-compile")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return result[0]


def _check(graph: torch.fx.GraphModule, args: Sequence[Any]) -> None:
    """Raise :class:`ModelError` for what export would take and mlc would get wrong."""
    elsewhere = next((a for a in args if isinstance(a, torch.Tensor) and a.device.type != "cpu"), None)
    if elsewhere is not None:
        raise ModelError(f"every tensor must be in this machine's memory, but one is on {elsewhere.device}")
    for node in graph.graph.nodes:
        if composed(node) is None and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ModelError(f"every operator must compute the same each time, but {node.target} draws random numbers")


    given = {_storage(node): node for node in graph.graph.find_nodes(op="placeholder")}
    for node in graph.graph.output_node().all_input_nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and is_symbol(value.storage_offset()) and _storage(node) in given:
            raise ModelError("where a result lies in an input must not depend on a free number")  # AOTAutograd reads it


def _storage(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


class _Specialised:
    """A graph compiled for given sizes, its weights inside but for the arguments ``given``; or, with ``symbols``, for
    all sizes that these leave free."""

    def __init__(
        self, graph: torch.fx.GraphModule, args: Sequence[Any], given: Collection[int], options: Options,
        symbols: Symbols | None = None,
    ) -> None:
        self._weights = Weights({i: arg for i, arg in enumerate(args) if i not in given and is_weight(arg)})
        frozen = self._weights.places
        self._inputs = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and i not in frozen]
        self._numbers = numbers(symbols or {}, self._inputs)
        wrong = computed(graph, self._numbers)
        if wrong is not None:
            raise ModelError(f"free numbers must only be added and multiplied, but the graph computes {wrong} of one")
        self._graph = graph
        # the arguments that are no tensors and must be these
        self._others = None if not symbols else [
            (i, arg) for i, arg in enumerate(args)
            if not isinstance(arg, torch.Tensor) and not is_symbol(symbols.get(i))]
        self._results_of: dict[tuple[Any, ...], list[Any]] = {}
        self._unseen = frozenset[int]()  # arguments on which the types of the results do not depend
        with torch.inference_mode(False), torch.no_grad():
            results = self._results_for(args)
            frozen_graph = Frozen(graph, args, self._inputs, symbols or {})
            tensors = self._given(args)
            axes = [{axis: size for axis, size in enumerate((symbols or {}).get(i, ())) if is_symbol(size)}
                    for i in self._inputs]
            self._executable = _executable(frozen_graph, tensors, [*axes, *({} for _ in self._numbers)], options)
        exe = self._executable
        if any("length" in output for output in exe.metadata["outputs"]):
            raise ModelError("the shapes of a graph's results must follow from those of its inputs, but numbers decide "
                             "some")
        sizes = {each.name: size for tensor, spec in zip(tensors, exe.inputs, strict=True)
                 for each, size in zip(spec.shape, tensor.shape, strict=True) if isinstance(each, Free)}
        takes = [(spec.sized(sizes), spec.dtype) for spec in exe.inputs]
        made = [result for result in results if isinstance(result, _Result)]
        gives = [(tuple(sized(each, sizes, now) for each, now in zip(spec.shape, result.shape, strict=True)),
                  spec.dtype) for spec, result in zip(exe.outputs, made, strict=True)]
        told = all(sized(each, sizes, -1) >= 0 for spec in exe.outputs for each in spec.shape)
        if told and len(made) == len(results):
            self._unseen = frozenset(self._numbers)
        self._fits = [Fit(spec) for spec in exe.inputs] if symbols else []
        if (takes, gives) != ([_type(tensor) for tensor in tensors], [_type(result) for result in made]):
            raise ModelError("the graph's inputs and outputs must be of types that arrays have, but some are complex "
                             "or of another type that is imported as something else")

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether the weights among the arguments are those inside, and the sizes such as it was compiled for."""
        if self._others is not None:
            shapes = ((fit, args[i]) for fit, i in zip(self._fits, self._inputs, strict=False))
            if not (all(args[i] == value for i, value in self._others)
                    and all(fit.takes_shape(tuple(arg.shape)) for fit, arg in shapes)):
                return False
        return self._weights.are(args)

    def changed(self, args: Sequence[Any]) -> list[int]:
        """The arguments that are weights inside, but have been written to."""
        return self._weights.changed(args)

    def current(self) -> bool:
        """Whether the weights inside are still what somebody has."""
        return self._weights.are_unchanged()

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        results = self._results_for(args)
        tensors = [torch.empty(r.shape, dtype=r.dtype) for r in results if isinstance(r, _Result)]
        self._executable.run(self._given(args), tensors)
        made = iter(tensors)
        return [result.laid_out(next(made)) if isinstance(result, _Result) else result for result in results]

    def _given(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The arguments of the executable."""
        return [*(args[i].detach() for i in self._inputs), *(_number(args[i]) for i in self._numbers)]

    def _results_for(self, args: Sequence[Any]) -> list[Any]:
        """The graph's results for inputs of these sizes."""
        if self._others is None and self._results_of:
            return next(iter(self._results_of.values()))
        key = tuple((arg.shape, arg.stride()) if isinstance(arg, torch.Tensor) else arg
                    for i, arg in enumerate(args) if i not in self._unseen)
        found = self._results_of.get(key)
        if found is None:
            if len(self._results_of) >= _MOST_SIGNATURES:
                self._results_of.clear()  # which another thread may do at any time
            found = self._results_of[key] = _results(self._graph, args)
        return found


@dataclass(frozen=True)
class _Result:
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None  #: None for rows one after the other

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with the strides that PyTorch computed with; what follows may go by them."""
        if self.strides is None:
            return tensor
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype).copy_(tensor)


def _type(tensor: torch.Tensor | _Result) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _results(graph: torch.fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """The graph's results: a :class:`_Result` for each tensor, and the value itself for anything else."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args
        ]
        values = graph(*fakes)
    return [
        _Result(tuple(v.shape), v.dtype, None if v.is_contiguous() else tuple(v.stride()))
        if isinstance(v, torch.Tensor) else v for v in values
    ]


def _number(value: int | float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


_executables: weakref.WeakValueDictionary[str, Executable] = weakref.WeakValueDictionary()


def _executable(
    frozen: Frozen, given: Sequence[torch.Tensor], free: Sequence[Mapping[int, Any]], options: Options
) -> Executable:
    """Compiled for inputs like ``given``, each with its ``free`` axes, or found where an equal graph with equal weights
    was compiled with the same options."""
    import mlc
    from mlc.frontend.pytorch import export_module

    examples = tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in given)
    auto = (tuple(dict.fromkeys(axes, torch.export.Dim.AUTO) for axes in free),) if any(free) else None
    program = export_module(frozen, examples, "a graph of torch.compile", auto)
    shapes = ranges_of(program, list(zip(given, free, strict=True))) if auto else {}
    key = f"{_digest(program, options)} {shapes}"
    found = _executables.get(key)
    if found is not None:
        return found
    where: dict[str, Any] = {"target": options.target, "threads": options.threads}
    if options.seconds is not None or options.trials is not None:
        mlc.tune(program, log=options.log, seconds=options.seconds, trials=options.trials, **where)
    made = mlc.compile(program, log=options.log, shapes=shapes or None, **where)
    _executables[key] = made
    return made


def _digest(program: Any, options: Options) -> str:
    """Names what a program computes: its operators, the elements of its weights, the types of its inputs."""
    digest = hashlib.blake2b(repr(options).encode(), digest_size=20)
    weights = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target is not None}
    held = {**program.constants, **program.state_dict}
    _add_graph(digest, program.graph_module, {name: held[target] for name, target in weights.items()})
    return digest.hexdigest()


def _add_graph(digest: Any, module: torch.fx.GraphModule, weights: Mapping[str, torch.Tensor]) -> None:
    order: dict[torch.fx.Node, str] = {}
    for node in module.graph.nodes:
        order[node] = f"%{len(order)}"
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: order[n])
        value = node.meta.get("val")
        held = weights.get(node.name)
        if node.op == "get_attr":  # a branch, say
            held = operator.attrgetter(node.target)(module)
        if isinstance(held, torch.fx.GraphModule):
            said = "graph"
        elif held is not None:
            said = _content(held)
        elif node.op == "placeholder":
            said = f"{value.shape} {value.dtype}" if isinstance(value, torch.Tensor) else f"{value}"
        else:
            said = f"{node.target} {arguments}"
        digest.update(f"{node.op} {said}\n".encode())
        if isinstance(held, torch.fx.GraphModule):
            _add_graph(digest, held, {})


def _content(value: torch.Tensor) -> str:
    import xxhash

    flat = value.detach().contiguous().view(-1)
    array = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return f"{tuple(value.shape)} {value.dtype} {xxhash.xxh3_128_hexdigest(array)}"
