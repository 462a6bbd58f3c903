"""Architectures that nothing was tuned for, to reveal what the benchmark models do not.

Each name stands for a configuration with seeded random weights, of ``transformers``, of ``torch.nn`` or of
:mod:`mlc.networks.modules`; nothing is downloaded. :data:`BENCHMARK_ARCHITECTURES` have a size worth timing,
:data:`SMALL_ARCHITECTURES`, chosen for what their graphs do rather than for their fame, take seconds to build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from mlc.networks.models import Network

__all__ = ["BENCHMARK_ARCHITECTURES", "SMALL_ARCHITECTURES", "TRANSFORMERS_ARCHITECTURES"]

_Shapes = dict[str, tuple[int, ...]]


def _transformers(model: str, inputs: _Shapes, **config: Any) -> Network:
    """A class of ``transformers``, or ``CLASS.PART`` of it, of its default configuration but for ``config``."""

    def build() -> Any:
        name, _, part = model.partition(".")
        cls = getattr(import_module("transformers"), name)
        # Attention in plain operators; the state for the next call would be outputs that nobody compares.
        module = cls(cls.config_class(**{"attn_implementation": "eager", "use_cache": False, **config}))
        return getattr(module, part) if part else module

    return _network(build, inputs)


def _module(source: str, inputs: _Shapes, **arguments: Any) -> Network:
    """A class of ``torch.nn`` or of our own networks."""

    def build() -> Any:
        library, _, name = source.rpartition(".")
        return getattr(import_module(library or "mlc.networks.modules"), name)(**arguments)

    return _network(build, inputs)


def _network(build: Callable[[], Any], inputs: _Shapes) -> Network:
    def alive() -> Any:
        """As modules are when training starts, signals may fade on their way through them, and a wrong program would
        pass: weights are drawn anew, and norms get statistics by which they keep the magnitude of random inputs.
        """
        import torch
        from torch import nn

        from mlc.networks.modules import First

        def adapt(norm: Any, inputs: Any) -> None:
            # One magnitude of all channels: with one of each channel, deep networks amplify rounding a hundred times.
            power = inputs[0].square().mean()
            nn.init.uniform_(norm.running_var, 0.6, 1.6).mul_(power)
            nn.init.normal_(norm.running_mean, std=0.1).mul_(power.sqrt())

        module = build().eval()
        hooks = []
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            elif isinstance(layer, nn.modules.conv._ConvNd):
                nn.init.kaiming_normal_(layer.weight)
            elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.reset_parameters()
                hooks.append(layer.register_forward_pre_hook(adapt))
        if hooks:  # and no input is whole numbers
            module(**{name: torch.randn(shape) for name, shape in inputs.items()})
        for hook in hooks:
            hook.remove()
        return First(module, list(inputs))

    return Network(alive, inputs)


def _text(length: int, batch: int = 1) -> _Shapes:
    return {"input_ids": (batch, length)}


def _image(size: int) -> _Shapes:
    return {"pixel_values": (1, 3, size, size)}


def _video(frames: int, size: int) -> _Shapes:
    return {"pixel_values": (1, frames, 3, size, size)}


def _wave(samples: int) -> _Shapes:
    return {"input_values": (1, samples)}


_VOCABULARY: dict[str, Any] = {"vocab_size": 1000}  # embeddings are looked up: more rows would be larger files only
_LLAMA: dict[str, Any] = {
    **_VOCABULARY, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
#: the width of ViT-Tiny and of ViT-Small
_TINY: dict[str, Any] = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
_SMALL: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}

BENCHMARK_ARCHITECTURES: Mapping[str, Network] = {
    # convolutions on images
    "convnext": _transformers("ConvNextModel", _image(224)),
    "efficientnet": _transformers(
        "EfficientNetModel", _image(224), width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280),
    "mobilenet_v1": _transformers("MobileNetV1Model", _image(224)),
    "poolformer": _transformers("PoolFormerModel", _image(224)),
    "regnet": _transformers(
        "RegNetModel", _image(224), embedding_size=32, hidden_sizes=[48, 104, 208, 440], depths=[2, 4, 11, 1],
        groups_width=8),
    "unet": _module("UNet", {"image": (1, 3, 128, 128)}),
    "dcgan": _module("DCGAN", {"input": (1, 100, 1, 1)}),
    # attention on images, with and without convolutions
    "clip_vision": _transformers("CLIPVisionModel", _image(224), num_hidden_layers=4),
    "cvt": _transformers("CvtModel", _image(224)),
    "levit": _transformers("LevitModel", _image(224)),
    "mixer": _module("Mixer", {"image": (1, 3, 224, 224)}),
    "mobilevit": _transformers(
        "MobileViTModel", _image(256), hidden_sizes=[96, 120, 144], neck_hidden_sizes=[16, 32, 64, 96, 128, 160, 640]),
    "pvt": _transformers("PvtModel", _image(224)),
    "swin": _transformers("SwinModel", _image(224)),
    "vit_small": _transformers("ViTModel", _image(224), num_hidden_layers=6, **_SMALL),
    # from images to images, classes of pixels, boxes
    "dpt": _transformers(
        "DPTForDepthEstimation", _image(224), image_size=224, neck_hidden_sizes=[48, 96, 192, 192],
        fusion_hidden_size=64, **_TINY),
    "segformer": _transformers("SegformerForSemanticSegmentation", _image(256)),
    "swin2sr": _transformers(
        "Swin2SRForImageSuperResolution", _image(64), embed_dim=60, depths=[2, 2], num_heads=[6, 6]),
    "yolos": _transformers(
        "YolosModel", _image(256), image_size=[256, 256], use_mid_position_embeddings=False, **_TINY),
    # text
    "albert": _transformers(
        "AlbertModel", _text(128), hidden_size=768, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=3072, **_VOCABULARY),
    "bart_encoder": _transformers(
        "BartModel.encoder", _text(128), d_model=512, encoder_layers=4, encoder_ffn_dim=2048,
        encoder_attention_heads=8, decoder_layers=1, **_VOCABULARY),
    "bert_b8": _transformers("BertModel", _text(64, batch=8), num_hidden_layers=4, **_SMALL, **_VOCABULARY),
    "deberta": _transformers("DebertaV2Model", _text(128), num_hidden_layers=6, **_SMALL, **_VOCABULARY),
    "distilbert": _transformers("DistilBertModel", _text(128), **_VOCABULARY),
    "llama_prefill": _transformers("LlamaModel", _text(128), **_LLAMA),
    "llama_token": _transformers("LlamaModel", _text(1), **_LLAMA),
    "mamba": _transformers("MambaModel", _text(32), hidden_size=256, num_hidden_layers=2, **_VOCABULARY),
    "mobilebert": _transformers("MobileBertModel", _text(128), num_hidden_layers=6, **_VOCABULARY),
    "t5_encoder": _transformers("T5EncoderModel", _text(128), num_layers=6, d_model=512, **_VOCABULARY),
    # sound, time, video, tables
    "wav2vec2": _transformers("Wav2Vec2Model", _wave(16000), num_hidden_layers=4),
    "whisper_encoder": _transformers(
        "WhisperModel.encoder", {"input_features": (1, 80, 1000)}, d_model=384, encoder_layers=4,
        encoder_attention_heads=6, encoder_ffn_dim=1536, decoder_layers=1, decoder_attention_heads=6,
        max_source_positions=500),
    "lstm": _module(
        "torch.nn.LSTM", {"input": (1, 32, 128)}, input_size=128, hidden_size=256, num_layers=2, batch_first=True),
    "gru": _module(
        "torch.nn.GRU", {"input": (1, 32, 128)}, input_size=128, hidden_size=256, bidirectional=True,
        batch_first=True),
    "tcn": _module("TemporalConvolutions", {"input": (1, 64, 256)}),
    "c3d": _module("C3D", {"input": (1, 3, 8, 56, 56)}),
    "dlrm": _module("DLRM", {"dense": (32, 13), "category_ids": (32, 26)}),
}

#: the well-known ones of ``transformers`` at their own sizes, which other benchmarks have from elsewhere
TRANSFORMERS_ARCHITECTURES: Mapping[str, Network] = {
    "resnet50": _transformers("ResNetModel", _image(224)),
    "mobilenet_v2": _transformers("MobileNetV2Model", _image(224)),
    "vit_base": _transformers("ViTModel", _image(224)),
}

#: two layers of 64 channels and 4 heads
_LAYERS: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "initializer_range": 0.125,
}
_WORDS: dict[str, Any] = {**_LAYERS, "vocab_size": 100}
_PATCHES: dict[str, Any] = {**_LAYERS, "image_size": 64}
_FRAMES: dict[str, Any] = {**_LAYERS, "image_size": 32, "num_frames": 4}
_SOUND: dict[str, Any] = {
    **_LAYERS, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}
_STAGES: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}

SMALL_ARCHITECTURES: Mapping[str, Network] = {
    # convolutions on images: grouped, depthwise, squeezed and excited, transposed, through pyramids
    "convnextv2": _transformers("ConvNextV2Model", _image(64), **_STAGES),
    "efficientnet": _transformers(
        "EfficientNetModel", _image(64), width_coefficient=0.5, depth_coefficient=1.0, hidden_dim=640,
        in_channels=[32, 16, 24], out_channels=[16, 24, 40], kernel_sizes=[3, 3, 5], strides=[1, 2, 2],
        num_block_repeats=[1, 2, 2], expand_ratios=[1, 6, 6]),
    "focalnet": _transformers("FocalNetModel", _image(64), image_size=64, embed_dim=24, depths=[1, 1, 2, 1]),
    "poolformer": _transformers("PoolFormerModel", _image(64), depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64]),
    "regnet": _transformers("RegNetModel", _image(64), groups_width=8, **_STAGES),
    "resnet": _transformers("ResNetModel", _image(64), **_STAGES),
    "superpoint": _transformers("SuperPointForKeypointDetection.encoder", {"input": (1, 1, 64, 64)}),
    "unet": _module("UNet", {"image": (1, 3, 32, 32)}, widths=(8, 16, 32)),
    "upernet": _transformers(
        "UperNetForSemanticSegmentation", _image(64), hidden_size=32, backbone_config={
            "model_type": "convnext", "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1],
            "out_features": ["stage1", "stage2", "stage3", "stage4"]}),
    "csrnet": _module("CSRNet", {"input": (1, 3, 64, 72)}, width=16),
    "dcgan": _module("DCGAN", {"input": (1, 16, 1, 1)}, noise=16, widths=(32, 16)),
    # attention on images: windows, pooled and convolved keys, relative positions
    "beit": _transformers("BeitModel", _image(64), use_relative_position_bias=True, **_PATCHES),
    "cvt": _transformers(
        "CvtModel", _image(64), embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    "depth_anything": _transformers(
        "DepthAnythingForDepthEstimation", _image(56), reassemble_hidden_size=64, neck_hidden_sizes=[16, 32, 48, 64],
        fusion_hidden_size=32, head_in_index=-1, backbone_config={
            "model_type": "dinov2", **_LAYERS, "num_hidden_layers": 4, "image_size": 56, "patch_size": 14,
            "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}),
    "hiera": _transformers("HieraModel", _image(64), embed_dim=24, image_size=[64, 64], depths=[1, 1, 2, 1]),
    "levit": _transformers(
        "LevitModel", _image(64), image_size=64, hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1], key_dim=[8, 8, 8]),
    "mixer": _module("Mixer", {"image": (1, 3, 64, 64)}, image=64, dim=32, depth=2),
    "mobilevit": _transformers(
        "MobileViTModel", _image(64), hidden_sizes=[32, 48, 64], neck_hidden_sizes=[8, 16, 24, 32, 48, 64, 128]),
    "mobilevitv2": _transformers("MobileViTV2Model", _image(64), width_multiplier=0.5),
    "pvt": _transformers(
        "PvtModel", _image(64), image_size=64, hidden_sizes=[16, 32, 48, 64], num_attention_heads=[1, 2, 3, 4],
        depths=[1, 1, 1, 1]),
    "sam_encoder": _transformers("SamModel.vision_encoder", _image(64), vision_config={
        **_PATCHES, "patch_size": 8, "output_channels": 32, "window_size": 4, "global_attn_indexes": [1],
        "mlp_dim": 128}),
    "segformer": _transformers(
        "SegformerForSemanticSegmentation", _image(64), hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
        decoder_hidden_size=32),
    "swiftformer": _transformers(
        "SwiftFormerModel", _image(64), depths=[1, 1, 2, 1], embed_dims=[16, 32, 48, 64]),
    "swinv2": _transformers(
        "Swinv2Model", _image(64), embed_dim=24, depths=[2, 2], num_heads=[2, 4], image_size=64, window_size=4),
    "swin2sr": _transformers(
        "Swin2SRForImageSuperResolution", _image(32), image_size=32, embed_dim=24, depths=[2], num_heads=[2],
        window_size=4),
    "vit": _transformers("ViTModel", _image(64), **_PATCHES),
    # text, one position after the other: rotary and linear positions, shared keys, soft caps, states
    "bloom": _transformers("BloomModel", _text(24), **_WORDS),
    "falcon": _transformers("FalconModel", _text(24), **_WORDS),
    "gemma2": _transformers("Gemma2Model", _text(24), head_dim=16, num_key_value_heads=2, **_WORDS),
    "gptj": _transformers(
        "GPTJModel", _text(24), vocab_size=100, n_embd=64, n_layer=2, n_head=4, rotary_dim=8,
        initializer_range=0.125),
    "qwen2": _transformers("Qwen2Model", _text(24), num_key_value_heads=2, **_WORDS),
    "mamba": _transformers("MambaModel", _text(8), **_WORDS),
    "mamba2": _transformers(
        "Mamba2Model", _text(24), num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=8, **_WORDS),
    "rwkv": _transformers("RwkvModel", _text(24), attention_hidden_size=64, **_WORDS),
    # text at once: positions counted, shifted, in buckets, disentangled; spectra, pools, convolutions
    "albert": _transformers("AlbertModel", _text(24), embedding_size=32, **_WORDS),
    "convbert": _transformers("ConvBertModel", _text(24), embedding_size=64, **_WORDS),
    "deberta": _transformers(
        "DebertaV2Model", _text(24), relative_attention=True, pos_att_type=["p2c", "c2p"], **_WORDS),
    "fnet": _transformers("FNetModel", _text(24), **_WORDS),
    "funnel": _transformers(
        "FunnelModel", _text(24), vocab_size=100, block_sizes=[1, 1], num_decoder_layers=1, d_model=64, n_head=4,
        d_head=16, d_inner=128),
    "mobilebert": _transformers(
        "MobileBertModel", _text(24), embedding_size=32, intra_bottleneck_size=32, **_WORDS),
    "modernbert": _transformers(
        "ModernBertModel", _text(24), pad_token_id=0, reference_compile=False, **_WORDS),
    "roberta": _transformers("RobertaModel", _text(24), **_WORDS),
    "squeezebert": _transformers("SqueezeBertModel", _text(24), embedding_size=64, **_WORDS),
    "t5": _transformers(
        "T5Model", {"input_ids": (1, 24), "decoder_input_ids": (1, 8)}, vocab_size=100, d_model=64, d_kv=16, d_ff=128,
        num_layers=2, num_heads=4),
    "xlnet": _transformers("XLNetModel", _text(24), vocab_size=100, d_model=64, n_layer=2, n_head=4, d_inner=128),
    # sound
    "ast": _transformers(
        "ASTModel", {"input_values": (1, 64, 32)}, max_length=64, num_mel_bins=32, **_LAYERS),
    "dac_encoder": _transformers(
        "DacModel.encoder", {"hidden_state": (1, 1, 3200)}, encoder_hidden_size=16, decoder_hidden_size=64),
    "hifigan": _transformers("SpeechT5HifiGan", {"spectrogram": (1, 20, 80)}, upsample_initial_channel=64),
    "hubert": _transformers("HubertModel", _wave(8000), **_SOUND),
    "wavlm": _transformers("WavLMModel", _wave(8000), **_SOUND),
    "whisper": _transformers(
        "WhisperModel", {"input_features": (1, 80, 100), "decoder_input_ids": (1, 8)}, vocab_size=100, d_model=64,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, max_source_positions=50, max_target_positions=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1),
    # video, series, tables
    "c3d": _module("C3D", {"input": (1, 3, 8, 16, 16)}, width=8),
    "timesformer": _transformers("TimesformerModel", _video(4, 32), patch_size=8, **_FRAMES),
    "videomae": _transformers("VideoMAEModel", _video(4, 32), patch_size=8, **_FRAMES),
    "gru": _module(
        "torch.nn.GRU", {"input": (1, 8, 16)}, input_size=16, hidden_size=32, bidirectional=True, batch_first=True),
    "lstm": _module(
        "torch.nn.LSTM", {"input": (1, 8, 16)}, input_size=16, hidden_size=32, num_layers=2, batch_first=True),
    "patchtst": _transformers(
        "PatchTSTModel", {"past_values": (1, 64, 3)}, num_input_channels=3, context_length=64, patch_length=8,
        patch_stride=8, d_model=32, num_attention_heads=4, num_hidden_layers=2, ffn_dim=64),
    "patchtsmixer": _transformers(
        "PatchTSMixerModel", {"past_values": (1, 64, 3)}, context_length=64, patch_length=8, patch_stride=8,
        num_input_channels=3, d_model=16, num_layers=2),
    "perceiver": _transformers(
        "PerceiverModel", {"inputs": (1, 20, 32)}, num_latents=16, d_latents=64, d_model=32, num_blocks=1,
        num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4),
    "tcn": _module("TemporalConvolutions", {"input": (1, 16, 64)}, width=16, depth=4),
    "dlrm": _module("DLRM", {"dense": (4, 13), "category_ids": (4, 6)}, tables=6, rows=100, dim=16, hidden=32),
}
