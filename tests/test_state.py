"""What a row carries: prefill in any cut, rows that come, go and move, snapshots, limits, errors."""
from itertools import pairwise

import pytest
import torch
from helpers import far, random_model, same_row, solo, states_far, tokens

from qwen.batch import pad_left
from qwen.cache import State


def feed(model, state, rows: dict[int, list[int]]):
    """One call in which only some rows have tokens (the others are all pads) -> logits (B, T, vocab)."""
    ids, mask = pad_left([rows.get(row) or [0] for row in range(state.batch)])
    for row in range(state.batch):
        mask[row] &= row in rows
    return model(ids, state, mask)


@pytest.mark.parametrize("parts", [
    [1, 22], [2, 21], [3, 20], [7, 7, 7, 2], [1] * 23, [22, 1], [4, 19], [23], [1, 1, 1, 20],
], ids=str)  # fmt: skip
def test_any_cut_of_the_prefill(model, parts):
    """Case 8: 23 tokens in parts: logits, window and matrix equal the one call; a neighbour is cut elsewhere."""
    prompt, neighbour = tokens(1, 23, 30)
    wanted, alone = solo(model, prompt)
    state, logits = State(model, 2), []
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part)
    for i, (start, end) in enumerate(pairwise(ends)):
        rows = {0: prompt[start:end]} | ({1: neighbour[15 * i:15 * i + 15]} if i < 2 else {})
        logits.append(feed(model, state, rows)[0, -(end - start):])
    assert far(torch.cat(logits), wanted) <= 1
    assert states_far(state, 0, alone) <= 1
    assert state.length[0] == 23


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 128, 140])
def test_cuts_around_the_chunk(model, cut):
    prompt = tokens(2, 141)[0]
    wanted, alone = solo(model, prompt)
    state = State(model)
    logits = torch.cat([model(torch.tensor([part]), state)[0] for part in (prompt[:cut], prompt[cut:])])
    assert far(logits, wanted) <= 1 and states_far(state, 0, alone) <= 1


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_window_holds_the_inputs(model, length):
    """Case 9: the last 3 inputs of the convolution, zeros on the left where the prompt is shorter."""
    prompts = tokens(3, *range(1, 6))
    ids, mask = pad_left(prompts)
    state = State(model, 5)
    seen = {}
    linear = model.layers[0].linear_attn
    hook = linear.in_proj_qkv.register_forward_hook(lambda *call: seen.update(inputs=call[2]))
    model(ids, state, mask)
    hook.remove()
    wanted = torch.nn.functional.pad(seen["inputs"][length - 1, -length:], (0, 0, 3, 0))[-3:]
    assert torch.equal(state.conv[0][length - 1], wanted)
    assert not state.conv[0][length - 1, :max(0, 3 - length)].any()


def test_a_new_state_is_empty(model):
    state = State(model, 3, max_len=10)
    assert state.batch == 3 and state.length.tolist() == [0, 0, 0]
    config = model.config
    for i, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            assert state.k[i].shape == state.v[i].shape == (3, 2, 11, 16)
        else:
            assert state.conv[i].shape == (3, 3, config.conv_dim) and state.recurrent[i].shape == (3, 4, 8, 12)
            assert not state.conv[i].any() and not state.recurrent[i].any()


def test_rows_come_go_and_move(model):
    """Case 11: remove the middle one, reorder, put a new one beside a full one; everything of a row moves together."""
    a, b, c, d = tokens(4, 9, 70, 3, 5)
    more = tokens(5, 4, 4, 4)
    state = State(model, 3)
    feed(model, state, {0: a, 1: b, 2: c})
    kept = state.select([2, 0])                             # b leaves, c and a change places
    assert kept.length.tolist() == [3, 9] and state.length.tolist() == [9, 70, 3]
    wide = State(model, 3)
    wide.restore([2, 0], kept)                              # the new row 1 is empty beside two full ones
    logits = feed(model, wide, {0: more[0], 1: d, 2: more[2]})
    for row, prompt, new in ((0, a, more[0]), (1, [], d), (2, c, more[2])):
        wanted, alone = solo(model, prompt + new)
        assert far(logits[row, -len(new):], wanted[len(prompt):]) <= 1
        assert states_far(wide, row, alone) <= 1
    logits = feed(model, state, {1: more[1]})               # the source goes on, untouched
    assert far(logits[1], solo(model, b + more[1])[0][70:]) <= 1
    for row, prompt in ((0, a), (2, c)):
        assert states_far(state, row, solo(model, prompt)[1]) <= 1


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1], [1, 1, 0, 1], []], ids=str)
def test_select_copies_in_order(model, order):
    prompts = tokens(6, 2, 66, 5)
    state = State(model, 3)
    feed(model, state, dict(enumerate(prompts)))
    chosen = state.select(order)
    assert chosen.batch == len(order)
    for row, source in enumerate(order):
        assert same_row(chosen, row, state, source)
    chosen.reset()                                          # a copy: the source must not notice
    for row, prompt in enumerate(prompts):
        assert states_far(state, row, solo(model, prompt)[1]) <= 1
    for row, source in enumerate(order):                    # and it is a State of its own, which can grow
        feed(model, chosen, {row: prompts[source]})
        assert states_far(chosen, row, solo(model, prompts[source])[1]) <= 1


@pytest.mark.parametrize("rows", [1, [1], (1,), range(1, 2), torch.tensor([1]), {1}], ids=str)
def test_reset_leaves_nothing_of_the_last_user(model, rows):
    """A slot used again equals a new one, exactly; the other rows are exactly as they were."""
    state = State(model, 3)
    feed(model, state, dict(enumerate(tokens(7, 70, 71, 72))))
    kept = state.snapshot()
    state.reset(rows)
    assert same_row(state, 1, State(model))
    for tensor in (*state.k.values(), *state.v.values(), *state.conv.values(), *state.recurrent.values()):
        assert not tensor[1].any()
    assert same_row(state, 0, kept, 0) and same_row(state, 2, kept, 2)
    prompt = tokens(8, 5)[0]
    assert far(feed(model, state, {1: prompt})[1], solo(model, prompt)[0]) <= 1
    state.reset()
    assert all(same_row(state, row, State(model)) for row in range(3))


def test_no_row_is_no_row(model):
    """reset([]) and snapshot([]) touch nothing; only None means all."""
    state = State(model, 2)
    feed(model, state, dict(enumerate(tokens(9, 3, 4))))
    kept = state.snapshot()
    state.reset([])
    state.restore([], state.snapshot([]))
    assert state.snapshot([]).batch == 0
    assert same_row(state, 0, kept, 0) and same_row(state, 1, kept, 1)


def test_reuse_needs_a_snapshot(model):
    """Case 12: 7 of 10 tokens again, from a snapshot; it survives being used and moves to any row."""
    prompt, other, neighbour = tokens(10, 10, 4, 6)
    state = State(model, 2)
    feed(model, state, {0: prompt[:7], 1: neighbour})
    kept = state.snapshot([0])
    feed(model, state, {0: prompt[7:]})
    wanted, alone = solo(model, prompt[:7] + other)
    for row in (0, 1, 0):
        state.restore(row, kept)
        assert same_row(state, row, kept)
        assert far(feed(model, state, {row: other})[row], wanted[7:]) <= 1
        assert states_far(state, row, alone) <= 1
    assert states_far(kept, 0, solo(model, prompt[:7])[1]) <= 1


def test_restore_into_an_empty_and_into_a_small_state(model):
    prompt = tokens(11, 90)[0]
    kept = solo(model, prompt)[1].snapshot()
    for state in (State(model, 2), State(model, 2, max_len=91)):
        state.restore([1], kept)
        assert same_row(state, 1, kept) and same_row(state, 0, State(model))
        assert far(feed(model, state, {1: [5]})[1], solo(model, prompt + [5])[0][90:]) <= 1
        assert state.length.tolist() == [0, 91]


@pytest.mark.parametrize("max_len", [None, 5])
def test_restore_from_a_state_with_a_longer_buffer(model, max_len):
    """Room that the other state has and does not use is none of ours."""
    prompt = [1, 2, 3]
    source = State(model, max_len=100)
    model(torch.tensor([prompt]), source)
    state = State(model, 2, max_len=max_len)
    state.restore([1], source)
    assert same_row(state, 1, source)
    assert far(feed(model, state, {1: [4]})[1], solo(model, [1, 2, 3, 4])[0][3:]) <= 1


def test_restore_names_the_row_that_does_not_fit(model):
    state = State(model, 4, max_len=5)
    kept = solo(model, [1] * 9)[1]
    with pytest.raises(ValueError, match="row 2 would hold 9 tokens, the limit is 5"):
        state.restore([2], kept)
    assert same_row(state, 2, State(model))


def test_restore_refuses_what_does_not_match(model):
    state = State(model, 3)
    kept = State(model, 2).snapshot()
    for rows in ([0], [0, 1, 2], [1, 1], None):
        with pytest.raises(ValueError, match="2 rows"):
            state.restore(rows, kept)
    with pytest.raises(ValueError, match="another shape"):
        state.restore([0], State(random_model(0)))


@pytest.mark.parametrize("method", ["reset", "select", "snapshot"])
def test_rows_that_do_not_exist(model, method):
    state = State(model, 2)
    for rows in (2, -1, [0, 5]):
        with pytest.raises(IndexError, match="the state has 2 rows"):
            getattr(state, method)(rows)
    for rows in (torch.tensor([True, False]), [0.5]):
        with pytest.raises(TypeError, match="row numbers"):
            getattr(state, method)(rows)


@pytest.mark.parametrize("changes", [
    dict(batch=-1), dict(batch=1.0), dict(max_len=0), dict(max_len=-3), dict(max_len=513),
], ids=str)  # fmt: skip
def test_state_of_an_impossible_size(model, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        State(model, **changes)


def test_state_that_does_not_belong(model):
    with pytest.raises(ValueError, match="state holds 3 rows, ids have 2"):
        model(torch.tensor([[1], [2]]), State(model, 3))
    with pytest.raises(ValueError, match="another shape"):
        model(torch.tensor([[1]]), State(random_model(0, rope_theta=5.0)))


def test_limit_of_a_state(model):
    """max_len counts real tokens only, names the row, and an attempt beyond it changes nothing."""
    state = State(model, 2, max_len=4)
    mask = torch.tensor([[True] * 3 + [False] * 5, [True] * 4 + [False] * 4])
    model(torch.ones(2, 8, dtype=torch.int64), state, mask)
    kept = state.snapshot()
    with pytest.raises(ValueError, match="row 1 would hold 5 tokens, the limit is 4"):
        model(torch.tensor([[1], [1]]), state)
    assert same_row(state, 0, kept, 0) and same_row(state, 1, kept, 1)
    model(torch.tensor([[1], [1]]), state, torch.tensor([[True], [False]]))
    assert state.length.tolist() == [4, 4]


def test_context_of_a_model(small_context):
    """Case 7: 16 positions, with a state or none; a call may be longer if the rest is pads, a prompt may not."""
    sixteen = tokens(12, 16)[0]
    ids, mask = pad_left([sixteen, [1]])
    padded = torch.cat([ids, ids[:, :4]], 1), torch.cat([mask, torch.zeros(2, 4, dtype=torch.bool)], 1)
    for state in (None, State(small_context, 2)):
        logits = small_context(padded[0], state, padded[1])
        assert far(logits[0, :16], solo(small_context, sixteen)[0]) <= 1
        with pytest.raises(ValueError, match="row 0 would hold (17|32) tokens, the limit is 16"):
            small_context(torch.ones(2, 16 if state else 17, dtype=torch.int64), state)


def test_a_cache_that_grows_is_the_cache(model):
    """Beyond 64, beyond twice that, with and without a fixed size, from an empty selection too."""
    prompt = tokens(13, 150)[0]
    wanted, alone = solo(model, prompt)
    for state in (State(model), State(model, max_len=150), State(model).select([0])):
        logits = [model(torch.tensor([prompt[i:i + 30]]), state)[0] for i in range(0, 150, 30)]
        assert far(torch.cat(logits), wanted) <= 1
        assert states_far(state, 0, alone) <= 1


def test_a_poisoned_row_stays_alone_and_can_be_used_again(model):
    """NaN in all that one row carries: the others do not notice; reset and restore leave nothing of it."""
    a, b = tokens(14, 5, 70)
    state = State(model, 2)
    feed(model, state, {0: a, 1: b})
    for cache in (state.k, state.v, state.conv, state.recurrent):
        for tensor in cache.values():
            tensor[0] = float("nan")
    logits = feed(model, state, {0: [1], 1: [2]})
    assert logits[0].isnan().all()
    wanted, alone = solo(model, b + [2])
    assert far(logits[1], wanted[-1:]) <= 1 and states_far(state, 1, alone) <= 1
    spare = state.select([0])
    state.reset(0)
    assert far(feed(model, state, {0: a})[0], solo(model, a)[0]) <= 1
    spare.restore(0, solo(model, a[:2])[1])                 # fewer tokens than the poisoned row had
    assert far(feed(model, spare, {0: a[2:]})[0], solo(model, a)[0][2:]) <= 1
