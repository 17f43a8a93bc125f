"""The comparisons have teeth: replace one function by a well-known mistake and the tolerance is crossed tenfold.

Each fault is one that some implementation has had. The scenario is small and fixed: two rows with pads left and
between, a padded second call and two decode steps, held against solo runs of the right model.
"""
import copy
from unittest.mock import patch

import pytest
import torch
from helpers import far, random_model, solo, states_far
from torch.nn import functional as F

from qwen import attention, cache, deltanet, norm, rope
from qwen.cache import State

ROWS = [[5, 9, 12, 7, 3, 8], [1, 2, 3, 4, 5, 6, 7, 8]]
CALLS = [                                                   # what each row sees in each call, None = pad
    [[None, 5, None, 9], [1, 2, 3, 4]],
    [[12, 7, None], [None, None, 5]],
    [[None], [6]],
    [[3], [7]],
    [[8], [8]],
]  # fmt: skip


@pytest.fixture(scope="module")
def right():
    return random_model(40)


@pytest.fixture(scope="module")
def truth(right):
    return [solo(right, row) for row in ROWS]


def distances(model, truth) -> tuple[float, float]:
    """The largest distance of logits and of cached state from the truth, in units of the tolerance."""
    state, done, logits_far = State(model, 2), [0, 0], []
    for call in CALLS:
        ids = torch.tensor([[token or 0 for token in row] for row in call])
        mask = torch.tensor([[token is not None for token in row] for row in call])
        logits = model(ids, state, mask)
        for row in range(2):
            real = int(mask[row].sum())
            logits_far.append(far(logits[row, mask[row]], truth[row][0][done[row]:done[row] + real]))
            done[row] += real
    return max(logits_far), max(states_far(state, row, truth[row][1]) for row in range(2))


def test_without_a_fault(right, truth):
    assert max(distances(right, truth)) < 1


def window_by_columns(mask, kernel):
    """The last K-1 columns, pads and all."""
    start = torch.arange(mask.shape[1] + 1)[:, None] + torch.arange(kernel - 1)
    return start.expand(len(mask), *start.shape)


def gates_without_mask(*silent):
    """Pads decay (no mask on g), write (none on beta), or both."""
    def gates(a, b, A_log, dt_bias, mask, right=deltanet.gates):
        g, beta = right(a, b, A_log, dt_bias, mask)
        all_g, all_beta = right(a, b, A_log, dt_bias, torch.ones_like(mask))
        return g if "g" in silent else all_g, beta if "beta" in silent else all_beta
    return gates


def gates_swapped(a, b, A_log, dt_bias, mask, right=deltanet.gates):
    g, beta = right(b, a, A_log, dt_bias, mask)
    return g, beta


def gates_without_bias(a, b, A_log, dt_bias, mask, right=deltanet.gates):
    return right(a, b, A_log, torch.zeros_like(dt_bias), mask)


def positions_by_columns(slots):
    """Every column counts, as if pads were tokens."""
    return torch.arange(slots.shape[1]).expand(slots.shape)


def positions_from_zero(slots):
    """Each call starts at 0 again: hidden in a prefill, seen in decode (case 1)."""
    return (slots - slots.masked_fill(slots < 0, 10**6).amin(1, keepdim=True)).clamp(min=0)


def slots_for_pads(mask, length):
    """A pad is stored like a token (and pushes the later ones on)."""
    return length[:, None] + torch.arange(mask.shape[1]).expand(mask.shape)


def slots_shared_by_pads(mask, length):
    """A pad gets the slot of the token before it and overwrites its key and value."""
    return (length[:, None] + mask.cumsum(1) - 1).clamp(min=0)


def sees_everything(slots, num_slots):
    return torch.ones(*slots.shape, num_slots, dtype=torch.bool)


def causal_at_top_left(slots, num_slots):
    """The causal mask of a call that has no past (case 4)."""
    tokens = slots.shape[1]
    return torch.ones(tokens, num_slots, dtype=torch.bool).tril().expand(len(slots), tokens, num_slots)


def tiled_heads(q, k, v, seen, right=attention.attend):
    """Query head i uses KV head i mod Hkv."""
    groups = q.shape[1] // k.shape[1]
    return right(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), seen)


def plain_weight(self, x):
    return (norm.rms(x.float(), self.eps) * self.weight.float()).to(x.dtype)


def one_plus_weight(self, x, gate):
    return (norm.rms(x.float(), self.eps) * (1 + self.weight) * F.silu(gate)).to(gate.dtype)


def gate_by_sigmoid(self, x, gate):
    return norm.rms(x.float(), self.eps) * self.weight * gate.sigmoid()


def window_of_outputs(x, carried, weight, before, right=deltanet.short_conv):
    out, _ = right(x, carried, weight, before)
    rows = torch.arange(len(x))[:, None]
    return out, torch.cat([carried, out], 1)[rows, before[:, -1]]


def conv_backwards(x, carried, weight, before, right=deltanet.short_conv):
    return right(x, carried, weight.flip(-1), before)


def write_before_decay(q, k, v, g, beta, S):
    outputs = []
    for t in range(q.shape[2]):
        write = (v[:, :, t] - (k[:, :, t, None] @ S)[:, :, 0]) * beta[:, :, t, None]
        S = (S + k[:, :, t, :, None] * write[:, :, None]) * g[:, :, t, None, None].exp()
        outputs.append(q[:, :, t, None] @ S)
    return torch.cat(outputs, 2), S


def add_without_delta(q, k, v, g, beta, S):
    """Plain gated linear attention: the value is written, not its difference to what is held."""
    outputs = []
    for t in range(q.shape[2]):
        S = S * g[:, :, t, None, None].exp() + k[:, :, t, :, None] * (v * beta[..., None])[:, :, t, None]
        outputs.append(q[:, :, t, None] @ S)
    return torch.cat(outputs, 2), S


def one_token(rule):
    """A rule for many tokens as one for a single token that updates S in place."""
    def step(q, k, v, g, beta, S):
        out, new = rule(*(t[:, :, None] for t in (q, k, v, g, beta)), S.clone())
        S.copy_(new)
        return out[:, :, 0]
    return step


def neighbouring_pairs(x, cos, sin):
    """RoPE on pairs (2i, 2i + 1)."""
    dim = cos.shape[-1]
    turned, half = x[..., :dim], dim // 2
    first, second, cos, sin = turned[..., ::2], turned[..., 1::2], cos[..., :half], sin[..., :half]
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    return torch.cat([turned, x[..., dim:]], -1)


def angles_of_whole_head(position, rotary_dim, theta, right=rope.angles):
    """partial_rotary_factor forgotten."""
    return right(position, 2 * rotary_dim, theta)


def tile(tensor, times, dim):
    assert dim == 2 and times > 1
    return tensor.repeat(1, 1, times, 1)


FAULTS = {
    "window by columns": (deltanet, "window_index", window_by_columns),
    "pads write": (deltanet, "gates", gates_without_mask("g")),
    "pads decay": (deltanet, "gates", gates_without_mask("beta")),
    "pads write and decay": (deltanet, "gates", gates_without_mask()),
    "beta in place of g": (deltanet, "gates", gates_swapped),
    "no dt_bias": (deltanet, "gates", gates_without_bias),
    "positions by columns": (rope, "positions", positions_by_columns),
    "positions start again": (rope, "positions", positions_from_zero),
    "pads take slots": (cache, "slot_mapping", slots_for_pads),
    "pads overwrite slots": (cache, "slot_mapping", slots_shared_by_pads),
    "no causal mask": (attention, "visible", sees_everything),
    "causal mask at top left": (attention, "visible", causal_at_top_left),
    "KV heads tiled": (attention, "attend", tiled_heads),
    "key heads tiled": (torch.Tensor, "repeat_interleave", tile),
    "w in place of 1 + w": (norm.RMSNorm, "forward", plain_weight),
    "1 + w in the gated norm": (norm.GatedRMSNorm, "forward", one_plus_weight),
    "sigmoid in place of silu": (norm.GatedRMSNorm, "forward", gate_by_sigmoid),
    "window of outputs": (deltanet, "short_conv", window_of_outputs),
    "convolution backwards": (deltanet, "short_conv", conv_backwards),
    "write before decay": (deltanet, "delta_rule_step", one_token(write_before_decay)),
    "no delta": (deltanet, "delta_rule_step", one_token(add_without_delta)),
    "chunks: write before decay": (deltanet, "delta_rule_chunks", write_before_decay),
    "no l2 norm": (deltanet, "l2norm", lambda x: x),
    "rope on neighbouring pairs": (attention, "rotate", neighbouring_pairs),
    "rope on all dimensions": (rope, "angles", angles_of_whole_head),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_crosses_the_tolerance(right, truth, name):
    owner, function, wrong = FAULTS[name]
    with patch.object(owner, function, wrong):
        logits_far, state_far = distances(right, truth)
    assert 10 < logits_far < float("inf")
    assert state_far > 10


def test_query_and_gate_split_down_the_middle(right, truth):
    """q_proj holds [query, gate] head by head; the wrong reading is the right one of permuted rows."""
    wrong = copy.deepcopy(right)
    for layer in wrong.layers:
        if layer.kind == "full_attention":
            query, gate = layer.self_attn.q_proj.weight.chunk(2)
            heads = [t.unflatten(0, (layer.self_attn.heads, -1)) for t in (query, gate)]
            layer.self_attn.q_proj.weight.copy_(torch.cat(heads, 1).flatten(0, 1))
    assert distances(wrong, truth)[0] > 10
