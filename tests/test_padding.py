"""A pad changes nothing: left, right, between, a whole row of them, whatever id and mask it comes with."""
import pytest
import torch
from helpers import far, random_model, same_row, solo, states_far, tokens

from qwen.attention import masked_softmax, visible
from qwen.batch import pad_left
from qwen.cache import State, slot_mapping
from qwen.deltanet import window_index
from qwen.rope import positions


def lay(prompt, pattern, pad=0):
    """prompt laid into the R places of a pattern such as '.R.RR' -> ids and mask, lists."""
    left = iter(prompt)
    return [next(left) if c == "R" else pad for c in pattern], [c == "R" for c in pattern]


def batch(prompts, patterns, pad=0):
    rows = [lay(prompt, pattern, pad) for prompt, pattern in zip(prompts, patterns, strict=True)]
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([mask for _, mask in rows])


PATTERNS = {
    "case 5: left": ["....R", "RRRRR", "..RRR"],
    "case 6: right": ["R....", "RRRRR", "RRR.."],
    "between": ["R...R", "R.R.R", "RR..R"],
    "all at once": ["..R..", ".R.R.", "R.R.."],
}


@pytest.mark.parametrize("name", PATTERNS)
def test_every_place_of_a_pad(model, name):
    """Cases 5 and 6: logits at every real token, all cached state, and a padded continuation, equal solo."""
    patterns = PATTERNS[name]
    first = tokens(1, *(p.count("R") for p in patterns))
    second = tokens(2, *(p.count("R") for p in reversed(patterns)))
    state = State(model, 3)
    ids, mask = batch(first, patterns)
    logits = model(ids, state, mask)
    for row, prompt in enumerate(first):
        wanted, alone = solo(model, prompt)
        assert far(logits[row, mask[row]], wanted) <= 1
        assert states_far(state, row, alone) <= 1
    ids, mask = batch(second, patterns[::-1])
    logits = model(ids, state, mask)
    for row, prompt in enumerate(second):
        wanted, alone = solo(model, first[row] + prompt)
        assert far(logits[row, mask[row]], wanted[len(first[row]):]) <= 1
        assert states_far(state, row, alone) <= 1


def test_decode_positions_after_a_padded_prefill(model):
    """Case 1: [[5], [1, 2, 3, 4, 5]], prefill, then 3 decode steps: row 0 stands at positions 1, 2, 3."""
    ids, mask = pad_left([[5], [1, 2, 3, 4, 5]])
    state = State(model, 2)
    model(ids, state, mask)
    for step, token in enumerate([7, 8, 9], start=1):
        slots = slot_mapping(torch.ones(2, 1, dtype=torch.bool), state.length)
        assert positions(slots).tolist() == [[step], [step + 4]]
        logits = model(torch.tensor([[token], [token]]), state)
        for row, prompt in enumerate([[5], [1, 2, 3, 4, 5]]):
            wanted, alone = solo(model, prompt + [7, 8, 9][:step])
            assert far(logits[row, -1], wanted[-1]) <= 1
            assert states_far(state, row, alone) <= 1


def test_slots_positions_and_windows_by_hand():
    """The three bookkeepers on masks small enough to do on paper."""
    mask = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    slots = slot_mapping(mask, torch.tensor([10, 110, 210]))
    assert slots.tolist() == [[-1, -1, 10, 11], [110, -1, 111, -1], [-1, -1, -1, -1]]
    assert positions(slots).tolist() == [[0, 0, 10, 11], [110, 0, 111, 0], [0, 0, 0, 0]]
    # K = 3: columns 0 and 1 are what is carried, 2 to 5 this call's; the last entry is what to carry on
    before = window_index(mask, 3)
    assert before[0, 2:].tolist() == [[0, 1], [1, 4], [4, 5]]
    assert before[1, [0, 2, 4]].tolist() == [[0, 1], [1, 2], [2, 4]]
    assert before[2, 4].tolist() == [0, 1]
    assert visible(torch.tensor([[-1, 0, 2]]), 4).int().tolist() == [[[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]]


def test_masked_softmax_makes_no_nan():
    """Case 2: what sees nothing gets finite weights, what sees something gives exactly nothing to the rest."""
    seen = torch.tensor([[False, False, False], [False, True, True], [True, False, False]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scores = torch.tensor([[1.0, 2.0, 3.0], [9.0, 1.0, 1.0], [-3e4, 3e4, 3e4]]).to(dtype)
        weights = masked_softmax(scores, seen)
        assert weights.dtype == torch.float32 and weights.isfinite().all()
        assert weights[1:].tolist() == [[0, 0.5, 0.5], [1, 0, 0]]


@pytest.mark.parametrize("pads", [1, 2, 7])
def test_leading_pads_leave_no_nan_anywhere(model, pads):
    """Case 2: logits at pads are finite, so is everything cached, also in the spare slot the pads fall into."""
    prompt = [3, 1, 2]
    state = State(model, 2)
    ids, mask = batch([prompt, prompt + [5] * pads], ["." * pads + "RRR", "RRR" + "R" * pads])
    assert model(ids, state, mask).isfinite().all()
    for cache in (state.k, state.v, state.conv, state.recurrent):
        assert all(tensor.isfinite().all() for tensor in cache.values())
    assert states_far(state, 0, solo(model, prompt)[1]) <= 1


def test_row_of_pads_leaves_its_state_exactly_as_it_was(model):
    """Bit for bit, for every kind of cached tensor, on the first call and later; the neighbour equals solo."""
    state = State(model, 2)
    nothing = state.snapshot([0])
    mask = torch.tensor([[False] * 3, [True] * 3])
    logits = model(torch.tensor([[1, 2, 3], [4, 5, 6]]), state, mask)
    assert logits.isfinite().all() and same_row(state, 0, nothing)
    model(torch.tensor([[9, 9], [7, 8]]), state)
    kept = state.snapshot([0])
    logits = model(torch.tensor([[1, 2, 3], [4, 5, 6]]), state, mask)
    assert same_row(state, 0, kept)
    wanted, alone = solo(model, [4, 5, 6, 7, 8, 4, 5, 6])
    assert far(logits[1], wanted[5:]) <= 1 and states_far(state, 1, alone) <= 1


def test_nothing_but_pads(model):
    """Every row all pads, with and without a state: finite, nothing kept."""
    ids, mask = torch.tensor([[1, 2], [3, 4]]), torch.zeros(2, 2, dtype=torch.bool)
    state = State(model, 2)
    for logits in (model(ids, state, mask), model(ids, None, mask), model(ids, state, mask, last_only=True)):
        assert logits.isfinite().all()
    assert state.length.tolist() == [0, 0]


@pytest.mark.parametrize("pad", [-100, -1, 63, 64, 2**40])
def test_id_under_a_pad_makes_no_difference(model, pad):
    """Any id at all, also one outside the vocabulary: the same logits, bit for bit, and the same state."""
    prompts, patterns = tokens(1, 3, 6), ["..R.RR", "RRRRRR"]
    runs = []
    for filler in (0, pad):
        state = State(model, 2)
        runs.append((model(*batch(prompts, patterns, filler)[:1], state, batch(prompts, patterns)[1]), state))
    (wanted, reference), (logits, state) = runs
    assert torch.equal(logits, wanted)
    assert same_row(state, 0, reference, 0) and same_row(state, 1, reference, 1)


@pytest.mark.parametrize("prompts", [[[0, 7, 0, 9], [1, 2, 3, 4, 5, 6]], [[0], [1, 2, 3]], [[0, 0, 0, 0], [0]]])
def test_prompt_that_contains_the_pad_id(model, prompts):
    """Case 5: pad_left masks by length, so a real 0 in front, between or alone is read."""
    ids, mask = pad_left(prompts, pad_id=0)
    assert mask.sum(1).tolist() == [len(p) for p in prompts]
    logits = model(ids, None, mask)
    for row, prompt in enumerate(prompts):
        assert far(logits[row, mask[row]], solo(model, prompt)[0]) <= 1


def test_pad_left_by_hand():
    ids, mask = pad_left([[10], [110, 111, 112]], pad_id=210)
    assert ids.dtype == torch.int64 and mask.dtype == torch.bool
    assert ids.tolist() == [[210, 210, 10], [110, 111, 112]]
    assert mask.tolist() == [[False, False, True], [True, True, True]]


def test_pad_left_of_nothing():
    ids, mask = pad_left([])
    assert ids.shape == mask.shape == (0, 0)


@pytest.mark.parametrize("seqs, row", [([[]], 0), ([[], [1, 2]], 0), ([[1], [2, 3], []], 2)])
def test_pad_left_names_an_empty_row(seqs, row):
    """Case 15."""
    with pytest.raises(ValueError, match=f"row {row} is empty"):
        pad_left(seqs)


LAST = ["...RR", "R....", "RR.R.", ".....", "RRRRR", ".R.R."]


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_last_only_is_the_last_real_token(model, chunk):
    """Case 6: one logit row a row, at its own last real token, whichever pads stand behind it."""
    prompts = tokens(4, *(p.count("R") for p in LAST))
    ids, mask = batch(prompts, LAST)
    for start in range(0, 5, chunk):
        part = slice(start, start + chunk)
        before = [sum(row) for row in mask[:, :start].tolist()]
        wanted, reference = replay(model, prompts, before), replay(model, prompts, before)
        full = model(ids[:, part], wanted, mask[:, part])
        last = model(ids[:, part], reference, mask[:, part], last_only=True)
        assert last.shape == (len(LAST), 1, 64) and last.isfinite().all()
        for row, real in enumerate(mask[:, part].tolist()):
            if any(real):
                assert far(last[row, 0], full[row, max(i for i, r in enumerate(real) if r)]) <= 1
                assert far(last[row, 0], solo(model, prompts[row])[0][before[row] + sum(real) - 1]) <= 1
            assert states_far(reference, row, wanted, row) <= 1


def replay(model, prompts, counts):
    """A state in which each row has processed the first so many tokens of its prompt."""
    state = State(model, len(prompts))
    for row, (prompt, count) in enumerate(zip(prompts, counts)):
        if count:
            state.restore([row], solo(model, prompt[:count])[1])
    return state


BAD_MASKS = {
    "int64": (TypeError, torch.ones(2, 3, dtype=torch.int64), "int64"),
    "float": (TypeError, torch.ones(2, 3), "float32"),
    "uint8": (TypeError, torch.ones(2, 3, dtype=torch.uint8), "uint8"),
    "list": (TypeError, [[True] * 3] * 2, "list"),
    "longer": (ValueError, torch.ones(2, 4, dtype=torch.bool), r"\(2, 4\).*\(2, 3\)"),
    "fewer rows": (ValueError, torch.ones(1, 3, dtype=torch.bool), r"\(1, 3\).*\(2, 3\)"),
    "flat": (ValueError, torch.ones(3, dtype=torch.bool), r"\(3,\).*\(2, 3\)"),
    "four dimensions": (ValueError, torch.ones(2, 1, 3, 3, dtype=torch.bool), r"\(2, 3\)"),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_mask_of_another_kind(model, name):
    """Case 3: a mask is bool and of the ids' shape, or refused; nothing has happened to the state."""
    error, mask, says = BAD_MASKS[name]
    state = State(model, 2)
    with pytest.raises(error, match=says):
        model(torch.tensor([[1, 2, 3], [4, 5, 6]]), state, mask)
    assert state.length.tolist() == [0, 0]


@pytest.mark.parametrize("length", [2, 5, 65, 130])
def test_no_token_sees_a_later_one(model, length):
    """Case 3: changing the last token, and the pads behind it, moves no earlier logit."""
    prompt = tokens(5, length)[0]
    other = prompt[:-1] + [(prompt[-1] + 1) % 64]
    logits = [model(*batch([p, [1]], ["R" * length + "..", "." * length + ".R"])[:1], None,
                    batch([p, [1]], ["R" * length + "..", "." * length + ".R"])[1])[0] for p in (prompt, other)]
    assert far(logits[0][:length - 1], logits[1][:length - 1]) <= 1
    assert far(logits[0][length - 1], logits[1][length - 1]) > 10


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("kept", [5, 64])
def test_new_tokens_against_kept_ones(model, new, kept):
    """Case 4: T tokens against S keys, T < S: the causal mask stands at the row's own end."""
    prompt = tokens(6, kept + new)[0]
    wanted, alone = solo(model, prompt)
    state = State(model)
    model(torch.tensor([prompt[:kept]]), state)
    assert far(model(torch.tensor([prompt[kept:]]), state)[0], wanted[kept:]) <= 1
    assert states_far(state, 0, alone) <= 1


@pytest.mark.parametrize("changes", [
    dict(linear_conv_kernel_dim=1), dict(linear_conv_kernel_dim=2), dict(linear_conv_kernel_dim=7),
    dict(num_hidden_layers=1, layer_types=("full_attention",)),
    dict(num_hidden_layers=2, layer_types=("linear_attention",) * 2),
    dict(num_key_value_heads=4, partial_rotary_factor=1.0), dict(linear_num_key_heads=4),
])  # fmt: skip
def test_other_shapes_of_the_architecture(changes):
    """Every kernel width, one kind of layer only, no grouping at all, all dimensions turned."""
    model = random_model(3, **changes)
    prompts, patterns = tokens(7, 1, 4, 8), ["...R....", "R.R..R.R", "RRRRRRRR"]
    ids, mask = batch(prompts, patterns)
    state = State(model, 3)
    logits = model(ids, state, mask)
    step = model(torch.tensor([[1], [2], [3]]), state)
    for row, prompt in enumerate(prompts):
        wanted, alone = solo(model, [*prompt, row + 1])
        assert far(logits[row, mask[row]], wanted[:-1]) <= 1 and far(step[row, 0], wanted[-1]) <= 1
        assert states_far(state, row, alone) <= 1


BAD_IDS = {
    "float": (TypeError, torch.ones(1, 2), "float32"),
    "bool": (TypeError, torch.ones(1, 2, dtype=torch.bool), "bool"),
    "list": (TypeError, [[1, 2]], "list"),
    "flat": (ValueError, torch.tensor([1, 2]), r"\(2,\)"),
    "no token": (ValueError, torch.zeros(2, 0, dtype=torch.int64), r"\(2, 0\)"),
    "no row": (ValueError, torch.zeros(0, 2, dtype=torch.int64), r"\(0, 2\)"),
    "beyond the vocabulary": (ValueError, torch.tensor([[1, 2], [3, 64]]), "row 1 holds token 64"),
    "negative": (ValueError, torch.tensor([[1, 2], [-1, 3], [64, 0]]), "row 1 holds token -1"),
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_bad_ids(model, name):
    error, ids, says = BAD_IDS[name]
    with pytest.raises(error, match=says):
        model(ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_ids_of_other_integer_kinds(model, dtype):
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids.to(dtype)), model(ids))
