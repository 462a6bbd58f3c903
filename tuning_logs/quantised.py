"""The quantised benchmark models: networks that onnxruntime's own tools make smaller, of random data with a seed.

``resnet50-qdq`` is the network calibrated and quantised, each channel of its weights by itself; ``bert_base-dynamic``
is what ``quantize_dynamic`` makes of it. onnxruntime comes with the benchmark extra.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import onnx

__all__ = ["MODELS", "original", "quantised"]

MODELS = ("resnet50-qdq", "mobilenet_v2-qdq", "inception_v1-qdq", "bert_base-qdq", "bert_base-dynamic")
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


def quantised(name: str, folder: Path) -> Path:
    """The file of a model, made if it is not there: the network's name and ``-qdq`` or ``-dynamic``."""
    network, _, how = name.rpartition("-")
    path = folder / f"{name}.onnx"
    if not path.exists():
        {"qdq": _static, "dynamic": _dynamic}[how](original(network, folder), path)
    return path


def _float32(network: str) -> onnx.ModelProto:
    from onnx import version_converter

    from mlc.networks.models import model_named

    model = model_named(network)
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
