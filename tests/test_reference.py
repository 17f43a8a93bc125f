"""Against `transformers`: our padded batch equals its unpadded runs, logits and all cached state.

The reference never sees a pad: with pads behind real tokens it is wrong itself.
"""
import checkpoints
import pytest
import torch
from checkpoints import reference_model
from helpers import FULL, LINEAR, far, tokens

from qwen.batch import pad_left
from qwen.cache import State
from qwen.model import Model

STEPS = 20
CASES = {
    "grouped value heads, prefixed": dict(
        save=checkpoints.save_prefixed, multimodal=True, linear_num_value_heads=6, linear_value_head_dim=12,
        lengths=[1, 7, 70, 3],
    ),
    "one kv head, half rotary, bare": dict(
        save=checkpoints.save_bare, num_key_value_heads=1, linear_num_value_heads=4, lengths=[66, 1, 2, 64, 5],
        rope_parameters=dict(rope_theta=1_000_000.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
    ),
    "untied head, sharded, five layers": dict(
        save=checkpoints.save_sharded, tie_word_embeddings=False, num_hidden_layers=5, hidden_size=48,
        layer_types=[FULL, LINEAR, LINEAR, FULL, LINEAR], linear_num_value_heads=4, lengths=[9, 40, 1, 17],
    ),
    "longer than two chunks, plain": dict(
        save=checkpoints.save_plain, linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=16,
        layer_types=[LINEAR, FULL, LINEAR, LINEAR], lengths=[150, 4, 128, 65, 1],
    ),
    "untied head, kernel 3, prefixed": dict(
        save=checkpoints.save_prefixed, multimodal=True, tie_word_embeddings=False, linear_conv_kernel_dim=3,
        num_attention_heads=6, num_key_value_heads=3, linear_num_value_heads=2, lengths=[2, 30, 1],
    ),
}  # fmt: skip


def reference_run(reference, prompt, forced):
    """The prompt alone, then one call a forced token -> logits (T + steps, vocab) and the cache's layers."""
    logits, cache = [], None
    for part in [prompt, *([token] for token in forced)]:
        out = reference(input_ids=torch.tensor([part]), cache=cache, use_cache=True)
        logits, cache = [*logits, out.logits[0]], out.cache
    return torch.cat(logits), cache.layers


def cached_far(state, row, layers, kernel):
    """The largest distance over all that this row has cached."""
    distances, length = [], state.length[row]
    for i in state.k:
        distances += [far(state.k[i][row, :, :length], layers[i].keys[0])]
        distances += [far(state.v[i][row, :, :length], layers[i].values[0])]
    for i in state.conv:                                    # the reference keeps one column more, channels first
        distances += [far(state.conv[i][row], layers[i].conv_states[0][0].T[-(kernel - 1):])]
        distances += [far(state.recurrent[i][row], layers[i].recurrent_states[0][0])]
    return max(distances)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_padded_batch_equals_unpadded_reference(name, tmp_path):
    case = dict(CASES[name])
    save, lengths = case.pop("save"), case.pop("lengths")
    reference = reference_model(len(name), **case)
    model = Model.from_pretrained(save(reference, tmp_path), device="cpu", dtype=torch.float32)
    prompts, forced = tokens(1, *lengths, vocab=80), tokens(2, *[STEPS] * len(lengths), vocab=80)

    ids, mask = pad_left(prompts)
    state = State(model, len(prompts))
    logits = [model(ids, state, mask)]
    for step in zip(*forced):
        logits.append(model(torch.tensor(step)[:, None], state))
    logits = torch.cat(logits, 1)

    kernel = model.config.linear_conv_kernel_dim
    for row, (prompt, more) in enumerate(zip(prompts, forced)):
        wanted, layers = reference_run(reference, prompt, more)
        assert wanted.std() > 0.3, "logits this small would hide an error"
        assert far(logits[row, -len(wanted):], wanted) <= 1, f"row {row}"
        assert cached_far(state, row, layers, kernel) <= 1, f"row {row}"
        assert state.length[row] == len(wanted)


@torch.no_grad()
def test_cache_after_prefill_alone(tmp_path):
    """Case 9: prompts of 1 to 5 tokens in one batch, convolution kernel 4."""
    reference = reference_model(9)
    model = Model.from_pretrained(checkpoints.save_plain(reference, tmp_path), device="cpu")
    prompts = tokens(3, 1, 2, 3, 4, 5, vocab=80)
    ids, mask = pad_left(prompts)
    state = State(model, 5)
    model(ids, state, mask)
    for row, prompt in enumerate(prompts):
        assert cached_far(state, row, reference_run(reference, prompt, [])[1], kernel=4) <= 1
        short = max(0, 3 - len(prompt))
        assert not state.conv[0][row, :short].any() and state.conv[0][row, short:].all()


@torch.no_grad()
def test_bfloat16_follows_the_reference(tmp_path):
    """The same code in bfloat16, held loosely: off by at most twice what the reference in bfloat16 is off.

    Both round, each at its own places, so that no element has a tight bound; means are compared.
    """
    reference = reference_model(10, linear_num_value_heads=4)
    folder = checkpoints.save_plain(reference, tmp_path)
    half = Model.from_pretrained(folder, device="cpu", dtype=torch.bfloat16)
    prompts = tokens(4, 3, 70, 1, vocab=80)
    ids, mask = pad_left(prompts)
    state = State(half, 3)
    logits = half(ids, state, mask)
    assert logits.dtype == torch.bfloat16
    assert {t.dtype for t in (*state.k.values(), *state.v.values(), *state.conv.values())} == {torch.bfloat16}
    assert {t.dtype for t in state.recurrent.values()} == {torch.float32}
    assert half.layers[0].linear_attn.A_log.dtype == half.layers[0].linear_attn.dt_bias.dtype == torch.float32
    fp32 = [reference_run(reference, prompt, [])[0] for prompt in prompts]
    reference.to(torch.bfloat16)
    for row, (prompt, wanted) in enumerate(zip(prompts, fp32)):
        allowed = 2 * (reference_run(reference, prompt, [])[0].float() - wanted).abs().mean()
        assert allowed < 0.1 * wanted.std()
        assert (logits[row, -len(prompt):].float() - wanted).abs().mean() < allowed, f"row {row}"
