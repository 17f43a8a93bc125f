"""Random checkpoints in every layout a published one may have, written by `transformers`."""
import json
from pathlib import Path

import torch
from helpers import FULL, LINEAR
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

TEXT = dict(
    vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    layer_types=[LINEAR, LINEAR, LINEAR, FULL], num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_conv_kernel_dim=4, rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.25,
                         mrope_section=[1, 1, 0], mrope_interleaved=True),
)  # fmt: skip
VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, spatial_merge_size=1,
    temporal_patch_size=1, out_hidden_size=32, num_position_embeddings=16,
)  # fmt: skip


def text_fields(**changes) -> dict:
    rope = TEXT["rope_parameters"] | changes.pop("rope_parameters", {})
    return TEXT | {"rope_parameters": rope} | changes


def reference_model(seed: int, multimodal: bool = False, spread: float = 0.1, **changes):
    """A random model of `transformers`, all of whose weights matter (norms are not one)."""
    torch.manual_seed(seed)
    text = Qwen3_5TextConfig(**text_fields(initializer_range=spread, **changes))
    if multimodal:
        tied = text.tie_word_embeddings
        whole = Qwen3_5Config(text_config=text.to_dict(), vision_config=VISION, tie_word_embeddings=tied)
        model = Qwen3_5ForConditionalGeneration(whole)
    else:
        model = Qwen3_5ForCausalLM(text)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(torch.randn_like(weight) * 0.3)
            elif name.endswith("dt_bias"):
                weight.copy_(torch.randn_like(weight))
    return model.eval()


def save_prefixed(model, folder: Path) -> Path:
    """One file, `model.language_model.` names, with the vision tower and a draft head beside the text."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"mtp.fc.weight": torch.ones(3, 3), "mtp.layers.0.mlp.up_proj.weight": torch.ones(2)}
    assert any(name.startswith("model.visual.") for name in tensors)
    assert any(name.startswith("model.language_model.layers.") for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_plain(model, folder: Path) -> Path:
    """One file with `model.` names and flat fields, as a text-only checkpoint has."""
    model.save_pretrained(folder)
    return folder


def save_bare(model, folder: Path) -> Path:
    """One file without any prefix."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def save_sharded(model, folder: Path) -> Path:
    """Several files and an index."""
    model.save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    return folder
