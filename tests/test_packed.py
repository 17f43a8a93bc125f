"""Packed projections give what plain ones give, wherever they are used and wherever they are not."""
import json
from dataclasses import asdict
from unittest.mock import patch

import pytest
import torch
from helpers import far, random_model
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from qwen import packed
from qwen.batch import generate_batch
from qwen.cache import State
from qwen.packed import PackedLinear, pack, packable
from qwen.sample import generate

if not packable(torch.zeros(1024, 512)):
    pytest.skip("this torch build or CPU has no packed kernel", allow_module_level=True)

WIDE = dict(                                                # matrices of 1 MiB and more, a tied head among them
    vocab_size=2000, hidden_size=256, intermediate_size=1100, head_dim=128, partial_rotary_factor=0.25,
    linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1), (torch.bfloat16, 200)])
def test_a_product(dtype, bound):
    """Any number of rows, any leading shape. In bf16 both round at 2^-9; 200 tolerances are 0.02."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(1500, 700, generator=rng).mul(700 ** -0.5).to(dtype)
    layer = PackedLinear(weight)
    for shape in ((1, 1), (3, 1), (2, 5), (16, 1), (1, 130)):
        x = torch.randn(*shape, 700, generator=rng).to(dtype)
        assert layer(x).shape == (*shape, 1500) and layer(x).dtype == dtype
        assert far(layer(x).float(), F.linear(x, weight).float()) <= bound


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1), (torch.bfloat16, 200)])
def test_few_rows_filled_up_with_zeros(dtype, bound):
    """As on a CPU whose kernel wants at least four rows; a row's neighbours make no difference either way."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(1500, 700, generator=rng).mul(700 ** -0.5).to(dtype)
    layer, seen = PackedLinear(weight), []
    layer.least = 4
    with patch.object(PackedLinear, "product", lambda self, x, right=PackedLinear.product: seen.append(len(x)) or right(self, x)):
        for shape in ((1, 1), (3, 1), (1, 2), (), (2,), (0,), (2, 0), (4, 1), (5, 1)):
            x = torch.randn(*shape, 700, generator=rng).to(dtype)
            assert layer(x).shape == (*shape, 1500) and far(layer(x).float(), F.linear(x, weight).float()) <= bound
    assert seen == [4] * 16 + [5] * 2


@pytest.mark.parametrize("seconds, least", [((3, 3, 2), 4), ((2, 2, 3), 1)])
def test_how_many_rows_is_what_the_clock_says(seconds, least):
    """One, two and four rows, three times over; models that fit a cache are not timed."""
    ticks = iter([t for one in seconds * 3 for t in (0, one)])
    layers = [PackedLinear(torch.zeros(600, 700))]
    with patch.object(packed.time, "perf_counter", lambda: next(ticks)):
        assert packed.least_rows(layers) == 1
        with patch.object(packed, "BEYOND_CACHE", 1):
            assert packed.least_rows(layers) == least


def models():
    plain, fast = random_model(**WIDE), random_model(**WIDE)
    pack(fast)
    return plain, fast


def test_what_is_packed():
    plain, fast = models()
    names = {name for name, module in fast.named_modules() if isinstance(module, PackedLinear)}
    assert "lm_head" in names and "layers.0.mlp.up_proj" in names
    assert "layers.0.linear_attn.in_proj_b" not in names          # small
    kept = dict(fast.named_parameters())
    assert torch.equal(kept["embed_tokens.weight"], plain.embed_tokens.weight)      # read by row, so it stays
    assert not {f"{name}.weight" for name in names} & set(kept)                     # weights once


def test_logits_state_and_answers_are_the_plain_ones():
    plain, fast = models()
    prompts = [[5], [7, 8, 9] * 30, list(range(40))]
    assert generate_batch(fast, prompts, 8) == generate_batch(plain, prompts, 8)
    assert generate_batch(fast, prompts, 8) == [generate(fast, torch.tensor([p]), 8) for p in prompts]
    states, logits = (State(plain, 2), State(fast, 2)), []
    for model, state in zip((plain, fast), states):
        mask = torch.tensor([[True] * 4, [False] * 2 + [True] * 2])
        prefill = model(torch.tensor([[1, 2, 3, 4], [0, 0, 9, 8]]), state, mask, last_only=True)
        logits.append(torch.cat([prefill, model(torch.tensor([[5], [6]]), state)], 1))
    assert far(logits[1], logits[0]) <= 1
    for one, other in zip(*(state.select([0, 1])._tensors() for state in states)):
        assert far(other, one) <= 1


def test_loading_packs_large_matrices(tmp_path):
    from qwen.model import Model
    plain = random_model(**WIDE)
    assert not any(isinstance(module, PackedLinear) for module in plain.modules())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text", **asdict(plain.config)}))
    save_file({f"model.{name}": weight.detach() for name, weight in plain.named_parameters()}, tmp_path / "model.safetensors")
    loaded = Model.from_pretrained(tmp_path, device="cpu")
    assert any(isinstance(module, PackedLinear) for module in loaded.modules())
    ids = torch.tensor([[1, 2, 3]])
    assert far(loaded(ids), plain(ids)) <= 1


def test_where_there_is_no_kernel_the_model_stays_plain():
    assert not packable(torch.zeros(2048, 2048, device="meta")) and not packable(torch.zeros(8, 8))
    model = random_model(**WIDE)
    with patch.object(packed.PackedLinear, "__init__", side_effect=RuntimeError("no such kernel")):
        pack(model)
    assert model.lm_head is None and isinstance(model.layers[0].mlp.up_proj, nn.Linear)
