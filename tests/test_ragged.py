"""Rows laid end to end give what the padded box gives, and what each row gives alone."""
from unittest.mock import patch

import pytest
import torch
from helpers import far, random_model, tokens
from hypothesis import given, settings, strategies as st

from qwen.batch import pad_left
from qwen.cache import State
from qwen.model import Model
from qwen.weights import SHIPPED

MODELS = {"shipped": Model.from_pretrained(SHIPPED, device="cpu", dtype=torch.float32),
          "grouped": random_model(seed=1), "one KV head": random_model(seed=2, num_key_value_heads=1, tie_word_embeddings=False)}


def lay(seqs):
    """Flat ids (N,) and offsets (B + 1,)."""
    return torch.tensor(sum(seqs, []), dtype=torch.int64), torch.tensor([0, *map(len, seqs)]).cumsum(0)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(lengths=st.lists(st.one_of(st.integers(1, 8), st.integers(1, 300)), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_ragged_padded_and_solo_agree(name, lengths, seed):
    model, seqs = MODELS[name], tokens(seed, *lengths)
    ids, offsets = lay(seqs)
    flat = model.ragged(ids, offsets)
    box, mask = pad_left(seqs)
    padded = model(box, mask=mask)
    for row, seq in enumerate(seqs):
        solo, part = model(torch.tensor([seq]))[0], flat[offsets[row]:offsets[row + 1]]
        assert far(part, solo) <= 1 and far(padded[row, -len(seq):], solo) <= 1


@pytest.mark.parametrize("name", MODELS)
def test_calls_of_any_shape_with_a_state(name):
    """A prompt beside decode tokens beside a row that brings nothing; then a padded call on the same state."""
    model, seqs = MODELS[name], tokens(3, 90, 7, 5)
    state, seen = State(model, 3), [0, 0, 0]
    for call in ([70, 5, 0], [1, 1, 3], [18, 0, 1]):
        parts = [seq[start:start + n] for seq, start, n in zip(seqs, seen, call)]
        ids, offsets = lay(parts)
        flat = model.ragged(ids, offsets, state)
        seen = [start + n for start, n in zip(seen, call)]
        for row, n in enumerate(call):
            if n:
                solo = model(torch.tensor([seqs[row][:seen[row]]]))[0, -n:]
                assert far(flat[offsets[row]:offsets[row + 1]], solo) <= 1
        assert state.length.tolist() == seen
    ids, mask = pad_left([seq[start:] or seq[-1:] for seq, start in zip(seqs, seen)])
    mask[[row for row, (seq, start) in enumerate(zip(seqs, seen)) if start == len(seq)]] = False
    logits = model(ids, state, mask, last_only=True)
    for row, seq in enumerate(seqs):
        if seen[row] < len(seq):
            assert far(logits[row, -1], model(torch.tensor([seq]), last_only=True)[0, -1]) <= 1


def test_no_pad_goes_through_a_projection():
    model, seen = MODELS["grouped"], set()
    hooks = [m.register_forward_hook(lambda m, args, out: seen.add(args[0].shape[:-1].numel()))
             for m in model.modules() if isinstance(m, torch.nn.Linear)]
    model.ragged(*lay(tokens(0, 100, 5)))
    for hook in hooks:
        hook.remove()
    assert seen == {105}


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 4, 3], [0], [0, 3, 2, 3]])
def test_offsets_that_do_not_fit(offsets):
    with pytest.raises(ValueError, match="cu_seqlens .* does not cut"):
        MODELS["grouped"].ragged(torch.tensor([1, 2, 3]), torch.tensor(offsets))


def test_a_token_outside_the_vocabulary_is_named_with_its_row():
    with pytest.raises(ValueError, match="row 1 holds token 64"):
        MODELS["grouped"].ragged(torch.tensor([1, 2, 64]), torch.tensor([0, 2, 3]))


def test_the_last_token_of_each_row():
    model, seqs = MODELS["grouped"], tokens(5, 3, 1, 70)
    ids, offsets = lay(seqs)
    last = model.ragged(ids, offsets, last_only=True)
    assert far(last, model.ragged(ids, offsets)[offsets[1:] - 1]) <= 1
    with pytest.raises(ValueError, match="row 1 brings no token and has no last one"):
        model.ragged(ids, torch.tensor([0, 3, 3, 74]), last_only=True)


def test_long_prompts_do_not_pad_the_rows_that_decode():
    """What the mixers see: a box of the decoding rows, one token wide, and a box of the prompts."""
    model, boxes = MODELS["grouped"], []
    mixer = next(layer.linear_attn for layer in model.layers if hasattr(layer, "linear_attn"))
    with patch.object(mixer, "remember", lambda call, *args, right=mixer.remember, **rest: (
            boxes.append(tuple(call.mask.shape)), right(call, *args, **rest))[1]):
        model.ragged(*lay(tokens(6, 1, 200, 1, 30, 1)))
    assert boxes == [(3, 1), (2, 200)]


@pytest.mark.parametrize("lengths", [(1, 1), (4, 1, 2)])
def test_gradients_flow_through_a_ragged_call(lengths):
    model = random_model(3).requires_grad_(True)
    ids, offsets = lay(tokens(7, *lengths))
    model.ragged(ids, offsets).square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    sum(model(torch.tensor([seq])).square().sum() for seq in tokens(7, *lengths)).backward()
    assert all(far(found[name] / 1e3, p.grad / 1e3) <= 1 for name, p in model.named_parameters())


@pytest.mark.parametrize("ids, offsets", [([1, 2], [0, 2]), (torch.tensor([1, 2]), [0.0, 2.0])])
def test_other_things_than_integers(ids, offsets):
    with pytest.raises(TypeError, match="expected tensors of integers"):
        MODELS["grouped"].ragged(ids, offsets)


def test_ids_that_are_no_integers_are_refused_not_cut():
    with pytest.raises(TypeError, match="ids are torch.float32"):
        MODELS["grouped"].ragged(torch.tensor([1.5, 2.0]), torch.tensor([0, 2]))
