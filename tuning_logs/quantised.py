"""The quantised benchmark models: networks that onnxruntime's own tools make smaller, of random data with a seed.

``resnet50-qdq`` is the network calibrated and quantised, each channel of its weights by itself; ``bert_base-dynamic``
is what ``quantize_dynamic`` makes of it; ``llama_token-4bit`` has weights of 4 bits with a scale for 32 of them, and
computes in float32. onnxruntime comes with the benchmark extra.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import onnx

__all__ = ["MODELS", "SAMPLED", "model_or_file", "original", "quantised", "smaller"]

MODELS = ("resnet50-qdq", "mobilenet_v2-qdq", "inception_v1-qdq", "bert_base-qdq", "bert_base-dynamic")
#: what a cost model learns from: these, and products with weights of 4 bits
SAMPLED = (*MODELS, "llama_token-4bit", "bert_base-4bit")
#: what onnxruntime's quantiser needs: per-channel scales came with 13, and its fusions know up to 17
_OPSET = 17
_CALIBRATED = 4


def original(network: str, folder: Path) -> Path:
    """The file of the float32 network, made if it is not there."""
    import onnx

    path = folder / f"{network}.onnx"
    if not path.exists():
        onnx.save(_float32(network), path)
    return path


def model_or_file(name: str, folder: Path) -> onnx.ModelProto | Path:
    """What :func:`mlc.compile` takes for the name of a model of :mod:`mlc.networks.models` or of :data:`SAMPLED`; the
    latter are files in the folder, made if they are not there."""
    from mlc.networks.models import model_named

    if name not in SAMPLED:
        return model_named(name)
    folder.mkdir(parents=True, exist_ok=True)
    return quantised(name, folder)


def quantised(name: str, folder: Path) -> Path:
    """The file of a model, made if it is not there: the network's name and ``-qdq``, ``-dynamic`` or ``-4bit``."""
    network, _, how = name.rpartition("-")
    path = folder / f"{name}.onnx"
    if not path.exists():
        smaller(original(network, folder), path, how)
    return path


def smaller(plain: Path, small: Path, how: str) -> None:
    """Write a network of float32 as onnxruntime's tools make it smaller: ``qdq``, ``dynamic`` or ``4bit``."""
    {"qdq": _static, "dynamic": _dynamic, "4bit": _four_bits}[how](plain, small)


def _float32(network: str) -> onnx.ModelProto:
    from onnx import version_converter

    from mlc.networks.architectures import BENCHMARK_ARCHITECTURES
    from mlc.networks.models import model_named

    architecture = BENCHMARK_ARCHITECTURES.get(network)
    model = model_named(network) if architecture is None else architecture.onnx()
    opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    return version_converter.convert_version(model, _OPSET) if opset < _OPSET else model


def _static(plain: Path, small: Path) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    from mlc.bench.engines import onnx_inputs
    from mlc.networks.inputs import random_inputs

    def feeds() -> Iterator[Mapping[str, np.ndarray]]:
        for seed in range(_CALIBRATED):
            yield random_inputs(onnx_inputs(str(plain)), seed=seed)

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._feeds = feeds()

        def get_next(self) -> Any:
            return next(self._feeds, None)

    prepared = _prepared(plain)
    nodes = onnx.load(prepared, load_external_data=False).graph.node
    last = [node.name for node in nodes if node.op_type == "Softmax"] if _is_image(plain) else []
    quantize_static(
        prepared, small, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, nodes_to_exclude=last,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)
    prepared.unlink()


def _dynamic(plain: Path, small: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    prepared = _prepared(plain)
    quantize_dynamic(prepared, small, per_channel=True, weight_type=QuantType.QInt8)
    prepared.unlink()


def _four_bits(plain: Path, small: Path) -> None:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.getLogger(MatMulNBitsQuantizer.__module__).setLevel(logging.ERROR)
    quantiser = MatMulNBitsQuantizer(onnx.load(plain), bits=4, block_size=32, is_symmetric=True)
    quantiser.process()
    onnx.save(quantiser.model.model, small)


def _prepared(plain: Path) -> Path:
    """The model after onnxruntime's own preparation, which folds batch norms."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    logging.getLogger().setLevel(logging.ERROR)
    prepared = plain.with_suffix(".prepared.onnx")
    quant_pre_process(plain, prepared, skip_symbolic_shape=True)
    return prepared


def _is_image(plain: Path) -> bool:
    from mlc.bench.engines import onnx_inputs

    return len(onnx_inputs(str(plain))[0].shape) == 4
