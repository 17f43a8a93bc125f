"""The arithmetic of a step against the tensors and the products of a real one."""
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import random_model, small_config
from torch.utils.flop_counter import FlopCounterMode

from qwen import roofline
from qwen.cache import State
from qwen.config import Config
from qwen.roofline import Cost, step_cost, total

PUBLISHED = Config(                                         # Qwen3.5-0.8B
    vocab_size=248_320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6, num_attention_heads=8, num_key_value_heads=2,
    head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, rope_theta=1e7, partial_rotary_factor=0.25,
    rms_norm_eps=1e-6, max_position_embeddings=262_144, tie_word_embeddings=True,
)


def test_the_published_numbers():
    """Case 25: KV per token from head_dim, KV heads and full-attention layers only."""
    assert roofline.kv_bytes_per_token(PUBLISHED, 2) == 12_288
    assert roofline.recurrent_bytes(PUBLISHED) == 18 * 2 ** 20
    for slip, wrong in (({"head_dim": 1024 // 8}, 6_144), ({"num_key_value_heads": 8}, 49_152),
                        ({"layer_types": 24 * ["full_attention"]}, 49_152)):
        assert roofline.kv_bytes_per_token(replace(PUBLISHED, **slip), 2) == wrong
    assert roofline.QWEN_CONFIG == PUBLISHED
    matrices = roofline.projection_weights(PUBLISHED) + 248_320 * 1024
    assert 0.999 < matrices / 752_393_024 < 1               # the rest are norms, convolutions and two numbers a head


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1, "linear_num_value_heads": 2, "head_dim": 24}])
def test_bytes_are_those_of_real_tensors(changes):
    model, config = random_model(**changes), small_config(**changes)
    matrices = sum(w.nbytes for name, w in model.named_parameters() if w.dim() == 2)
    parts = step_cost(config, batch=3, context=7)
    assert parts["projections"].bytes + parts["head"].bytes == matrices
    state = State(model, 3, max_len=8)
    assert parts["state"].bytes == 2 * sum(S.nbytes for S in state.recurrent.values())
    assert parts["attention"].bytes == sum(c[:, :, :8].nbytes for cache in (state.k, state.v) for c in cache.values())


@pytest.mark.parametrize("batch, context, tokens", [(1, 0, 1), (5, 9, 1), (2, 0, 1)])
def test_flops_are_those_of_real_products(batch, context, tokens):
    """Within 2 %; the state's products of one row and one matrix are counted apart: the counter sees only the matmuls."""
    model = random_model(intermediate_size=256)
    state = State(model, batch)
    if context:
        model(torch.ones(batch, context, dtype=torch.int64), state)
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(batch, tokens, dtype=torch.int64), state, last_only=True)
    parts = step_cost(model.config, batch, context, tokens)
    state_products = 4 * batch * tokens * roofline.recurrent_bytes(model.config) // 4       # [k; q] S
    counted = parts["projections"].flops + parts["head"].flops + parts["attention"].flops + state_products
    assert abs(counter.get_total_flops() / counted - 1) < 0.02


def test_a_prompt_by_first_principles():
    """Every part of one step of the published model, counted layer by layer from its sizes."""
    batch, context, tokens = 3, 11, 5
    linear = 1024 * (2 * 16 * 128 + 16 * 128) + 1024 * 16 * 128 + 2 * 1024 * 16 + 16 * 128 * 1024   # qkv, z, b and a, out
    full = 1024 * 2 * 8 * 256 + 2 * 1024 * 2 * 256 + 8 * 256 * 1024                                 # q and gate, k, v, o
    matrices = 18 * linear + 6 * full + 24 * 3 * 1024 * 3584
    rows = batch * tokens
    keys = batch * sum(context + i + 1 for i in range(tokens))
    assert step_cost(PUBLISHED, batch, context, tokens, element_bytes=2) == {
        "projections": Cost(2 * matrices, 2 * matrices * rows),
        "attention": Cost(batch * (context + tokens) * 12_288, keys * 6 * 8 * (2 * 256 + 2 * 256)),
        "state": Cost(batch * 2 * 18 * 16 * 128 * 128 * 4, rows * 18 * 16 * 7 * 128 * 128),
        "head": Cost(2 * 248_320 * 1024, batch * 2 * 248_320 * 1024),
    }


def test_weights_are_read_once_and_states_once_a_row():
    one, ten = (step_cost(PUBLISHED, batch, context=100) for batch in (1, 10))
    for part in ("projections", "head"):
        assert ten[part].bytes == one[part].bytes and ten[part].flops == 10 * one[part].flops
    for part in ("attention", "state"):
        assert ten[part].bytes == 10 * one[part].bytes


def test_a_prompt_of_several_tokens():
    """Two tokens at once do the work of two steps, and read weights and state once."""
    both, first, second = (step_cost(PUBLISHED, 1, *call) for call in ((5, 2), (5, 1), (6, 1)))
    assert both["attention"].flops == first["attention"].flops + second["attention"].flops
    assert both["projections"].flops == 2 * first["projections"].flops
    assert both["projections"].bytes == first["projections"].bytes


def test_seconds():
    assert Cost(100, 30).seconds(bandwidth=10, peak=10) == (10, 13)
    assert total({"a": Cost(1, 2), "b": Cost(3, 4)}) == Cost(4, 6)
    with pytest.raises(ValueError, match="bandwidth is 0 bytes/s, expected a number above 0"):
        Cost(1, 1).seconds(0, 1)
    with pytest.raises(ValueError, match="peak is -1 FLOP/s, expected a number above 0"):
        Cost(1, 1).seconds(1, -1)


@pytest.mark.parametrize("call, found", [((0, 5), "batch is 0"), ((1, -1), "context is -1"), ((1, 1, 0), "tokens is 0"),
                                         ((1.5, 1), "batch is 1.5"), ((True, 1), "batch is True")])
def test_what_is_no_count(call, found):
    with pytest.raises(ValueError, match=found):
        step_cost(PUBLISHED, *call)


def test_it_needs_no_torch():
    code = "import qwen.roofline, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
