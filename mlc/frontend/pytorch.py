"""PyTorch to Relax: through ``torch.onnx`` and the ONNX importer, or directly where ONNX lacks an operator.

Both start from ``torch.export``. The exporter to ONNX simplifies what tracing leaves behind (masks, positions), so that
one set of graph patterns serves both formats; TVM's direct importer decomposes what ONNX keeps whole, an LSTM say.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlc.errors import MlcError, ModelError, UnsupportedOperators, UsageError, ValuesNeededError
from mlc.frontend.model import ImportedModel, imported
from mlc.frontend.origins import name_by_scopes
from mlc.frontend.static_shapes import fold_shapes
from mlc.shapes import DEFAULT_RANGE, Linear, Range, Shape, parse_shape, shape_text

if TYPE_CHECKING:
    import onnx
    import tvm

__all__ = ["export_module", "exported_ranges", "first_line", "import_torch", "input_shapes", "is_symbolic", "quiet",
           "to_onnx"]


def import_torch(
    source: Any, example_inputs: Sequence[Any] | None, name: str, shapes: Mapping[str, Shape] | None = None
) -> ImportedModel:
    """Import a ``torch.nn.Module`` in evaluation mode at the shapes of ``example_inputs``, or an exported program.

    The free dimensions of a program have the ranges that it was exported for, or what ``shapes`` says of some inputs.
    Inputs are named as the parameters of ``forward``; outputs ``output_0, …`` in order, nested structures flattened.
    """
    import torch

    if isinstance(source, torch.nn.Module):
        source = export_module(source, example_inputs, name)
    _check_determined(source, name)
    inputs = list(source.graph_signature.user_inputs)
    try:
        through = _through_onnx(source, name, shapes)
        return replace(imported(through.mod, name, inputs), nodes=through.nodes)
    except (MlcError, ImportError) as first:
        if isinstance(first, UsageError) or any(map(is_symbolic, input_shapes(source).values())):
            raise
        try:
            mod = _direct(source, name)
        except UnsupportedOperators as second:
            if isinstance(first, UnsupportedOperators):
                raise first from None
            # why it could not be translated is neither ours nor PyTorch's order of effects
            ours = {*map(str, _translations()), "with_effects"}
            left = {operator: nodes for operator, nodes in second.operators.items() if operator not in ours}
            raise (UnsupportedOperators(left) if left else first) from None
        except ModelError:  # what the other importer says is of its own way
            raise first from None
        return imported(mod, name, inputs)


def _check_determined(program: Any, name: str) -> None:
    """Raise :class:`ModelError` for operators that draw random numbers. Some that do so by numbers that are constant
    would be computed once, when the model is compiled."""
    for node in program.graph.nodes:
        drawn = getattr(getattr(node.target, "overloadpacket", None), "__name__", "").removesuffix("_")
        if drawn in _RANDOM:
            raise ModelError(f"every operator of {name} must compute the same each time, but {node.target} ({node.name}"
                             ") draws random numbers; make them an input")


_RANDOM = frozenset({
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal_functional",
    "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random", "randperm", "uniform",
})


def export_module(
    module: Any, example_inputs: Sequence[Any] | None, name: str, dynamic_shapes: Any = None
) -> Any:
    """``torch.export`` of the module in evaluation mode; refuses what cannot be traced, in one line."""
    import torch

    from mlc.frontend.torch_traceable import traceable

    if example_inputs is None:
        raise UsageError(
            f"a torch.nn.Module needs example inputs to fix its shapes, got none for {name}; pass "
            "example_inputs=(tensor, ...)"
        )
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not all(isinstance(value, torch.Tensor) for value in example_inputs):
        kinds = ", ".join(type(value).__name__ for value in example_inputs)
        raise UsageError(f"example_inputs must be tensors, got {kinds}; wrap the module so that it takes tensors only")
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), quiet(), traceable(module, example_inputs):
            return torch.export.export(module, tuple(example_inputs), dynamic_shapes=dynamic_shapes)
    except Exception as error:
        raise ModelError(
            f"torch.export must be able to trace {name}, but: {first_line(error)}; see its documentation for what a "
            "module may do"
        ) from error
    finally:
        module.train(training)


def _through_onnx(program: Any, name: str, shapes: Mapping[str, Shape] | None) -> ImportedModel:
    from mlc.frontend.onnx_relax import import_onnx

    try:
        return import_onnx(name_by_scopes(to_onnx(program, name)), name, exported_ranges(program, name, shapes or {}))
    except ValuesNeededError as error:  # which only models of ONNX are given
        raise ModelError(f"shapes must be known when a model is compiled, but those of {name} depend on the numbers of "
                         f"its inputs {', '.join(error.names)}; make these a part of the module") from error


def input_shapes(program: Any) -> dict[str, tuple[Any, ...]]:
    """The shapes of the user's inputs as they were exported, in order: numbers and PyTorch's symbolic sizes."""
    names = program.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    return {each: tuple(getattr(values.get(each), "shape", ())) for each in names if isinstance(each, str)}


def is_symbolic(shape: Iterable[Any]) -> bool:
    """Whether a shape has sizes that PyTorch left free."""
    import torch

    return any(isinstance(size, torch.SymInt) for size in shape)


def exported_ranges(program: Any, name: str, given: Mapping[str, Shape]) -> dict[str, tuple[Range, ...]]:
    """The ranges of the inputs that have free sizes: those of ``torch.export``, within which ``given`` may narrow them.

    A range from 2 is one from 1: PyTorch reasons about sizes as if they were neither 0 nor 1, and takes 1 at run time.
    One without an end goes to that of :data:`mlc.shapes.DEFAULT_RANGE`. Raises :class:`UsageError` for what was not
    exported, and :class:`ModelError` for sizes that no input has by itself.
    """
    inputs = input_shapes(program)
    alone = {str(size) for shape in inputs.values() for size in shape if is_symbolic([size])}
    allowed = {each: [_exported_range(program, name, each, size, alone) for size in shape]
               for each, shape in inputs.items()}
    ranges = {each: tuple(_to_default_end(own) for own in allowed[each])
              for each, shape in inputs.items() if is_symbolic(shape)}
    for each, words in given.items():
        if each not in inputs:
            raise UsageError(f"shapes must name inputs of {name} ({', '.join(inputs)}), got {each}")
        own, wanted = allowed[each], parse_shape(words)
        fits = len(own) == len(wanted) and all(
            a.low <= b.low and b.high <= a.high for a, b in zip(own, wanted, strict=True))
        if not fits:
            raise UsageError(f"shapes[{each!r}] must lie within what {name} was exported for, {shape_text(own)}, got "
                             f"{shape_text(wanted)}; export it with wider dimensions (torch.export.Dim)")
        ranges[each] = wanted
    return ranges


def _exported_range(program: Any, name: str, owner: str, size: Any, alone: AbstractSet[str]) -> Range:
    """The range of one size; of what follows from others, all that there is."""
    if not is_symbolic([size]):
        return Range(int(size), int(size))
    linear = Linear.parse(str(size))
    if linear is not None and alone >= {symbol for symbol, _ in linear.terms}:
        return Range(0, _ANY)
    if linear is not None or not str(size).isidentifier():
        raise ModelError(f"a free size must be a whole dimension of some input, but {owner} of {name} has {size} and "
                         "no input has what it follows from; export that dimension by itself (torch.export.Dim)")
    found = program.range_constraints.get(size.node.expr)
    low, high = (_bound(found.lower, 1), _bound(found.upper, _ANY)) if found is not None else (1, _ANY)
    return Range(1 if low <= 2 else low, high)


def _to_default_end(own: Range) -> Range:
    """A range that goes to the end of the default one where it has none, unless it begins behind that."""
    if own.high < _ANY or not own.low:
        return own
    return Range(own.low, max(DEFAULT_RANGE.high, 2 * own.low))


_ANY = 2**31 - 1


def _bound(value: Any, unknown: int) -> int:
    """A bound of PyTorch's as a number; ``unknown`` for one that is infinite."""
    return min(int(value), _ANY) if getattr(value, "is_Integer", isinstance(value, int)) else unknown


def to_onnx(
    program: Any, name: str, inputs: Sequence[str] | None = None, outputs: Sequence[str] | None = None
) -> onnx.ModelProto:
    """An exported program as ONNX, its ``inputs`` and ``outputs`` named so; :class:`ModelError` where PyTorch has no
    translation."""
    import torch

    from mlc.frontend.torch_complex import in_reals
    from mlc.frontend.torch_composed import composed
    from mlc.frontend.torch_numbers import with_exact_numbers

    try:
        with quiet():
            program = with_exact_numbers(composed(in_reals(program, name), name), name)
            made = torch.onnx.export(program, dynamo=True, verbose=False, custom_translation_table=_translations(),
                                     input_names=inputs, output_names=outputs)
            return _of_one_type(made.model_proto)
    except torch.onnx.errors.OnnxExporterError as error:
        raise ModelError(f"torch.onnx must be able to export {name}, but: {first_line(_cause(error))}") from error


def _cause(error: BaseException) -> BaseException:
    """The exception that all others of the chain were raised for."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """ONNX translations of operators that PyTorch's exporter lacks."""
    import torch

    from mlc.frontend.torch_attention import scaled_dot_product_attention
    from mlc.frontend.torch_experts import expert_translations
    from mlc.frontend.torch_recurrent import TRANSLATIONS
    from mlc.frontend.torch_resize import resize_translations
    from mlc.frontend.torch_triangular import solve_triangular
    from mlc.frontend.torch_windows import window_translations

    return {**TRANSLATIONS, **expert_translations(), **window_translations(), **resize_translations(),
            torch.ops.aten.linalg_solve_triangular.default: solve_triangular,
            torch.ops.aten.scaled_dot_product_attention.default: scaled_dot_product_attention}


def _of_one_type(model: onnx.ModelProto) -> onnx.ModelProto:
    """The exporter folds norms into convolutions of bfloat16 and leaves the weights in float32; they are rounded to the
    type of the result, as all weights of such a module are."""
    from onnx import helper, numpy_helper

    graph = model.graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        kind = kinds.get(node.output[0]) if node.op_type in ("Conv", "ConvTranspose") else None
        for name in node.input[1:] if kind else ():
            if name in weights and weights[name].data_type != kind:
                array = numpy_helper.to_array(weights[name]).astype(helper.tensor_dtype_to_np_dtype(kind))
                weights[name].CopyFrom(numpy_helper.from_array(array, name))
    for value in graph.value_info:  # which says the former type of weights, too
        if value.name in weights:
            value.type.tensor_type.elem_type = weights[value.name].data_type
    return model


def _direct(program: Any, name: str) -> tvm.IRModule:
    import torch
    from tvm.relax.frontend.torch import from_exported_program

    from mlc.frontend.torch_complex import in_reals
    from mlc.frontend.torch_composed import composed
    from mlc.frontend.torch_numbers import with_exact_numbers
    from mlc.frontend.torch_recurrent import TAKEN_APART

    with quiet():
        program = with_exact_numbers(composed(in_reals(program, name), name), name)
        # Here rather than in TVM, so that what is missing is looked up among the operators that will be converted.
        try:
            program = program.run_decompositions({**torch.export.default_decompositions(), **TAKEN_APART})
        except Exception as error:  # a shape that data decides, say
            raise ModelError(f"PyTorch must be able to take {name} apart, but: {first_line(error)}; replace what it "
                             "names in the model") from error
        _check_operators(program)
        try:
            mod = from_exported_program(program, unwrap_unit_return_tuple=True, run_ep_decomposition=False)
        except Exception as error:
            raise ModelError(f"{name} must be importable, but TVM failed: {first_line(error)}") from error
    return fold_shapes(mod)


def _check_operators(program: Any) -> None:
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    known = ExportedProgramImporter().create_convert_map()
    missing: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target.__name__ not in known:
            missing.setdefault(str(node.target), []).append(node.name)
    if missing:
        raise UnsupportedOperators(missing)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' notes on their own internals and on packages that they do not need."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
