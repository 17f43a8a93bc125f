"""Full attention: the layers in which a token looks back at every earlier token of its own row.

Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with a norm on each query and key
head, partial RoPE and an output gate. Keys and values live in the cache by slot, a row's real tokens
in slots 0, 1, 2 …; a pad has no slot, so nobody can look at one.
"""
from functools import partial

import torch
from torch import nn

from qwen.norm import RMSNorm
from qwen.rope import rotate


def visible(slots, num_slots: int):
    """Which key slots each query may look at: those up to its own.

    slots (B, T), -1 at pads -> bool (B, T, S), S = num_slots. This is the causal mask, aligned to the
    row's own history; slots beyond a row's end are later than all its tokens. A pad sees nothing.
    """
    return torch.arange(num_slots, device=slots.device) <= slots[..., None]


def masked_softmax(scores, seen):
    """scores (..., T, S), seen bool, broadcastable -> weights in fp32 that sum to 1 over S.

    The smallest finite number, not -inf: a query that sees nothing (a pad) then gets equal weights that
    nobody reads, where -inf would make NaN, and a NaN in the row's hidden state spreads.
    """
    return scores.float().masked_fill(~seen, torch.finfo(torch.float32).min).softmax(-1)


def attend(q, k, v, seen):
    """q (B, Hq, T, D), k and v (B, Hkv, S, D), seen bool (B, T, S) -> (B, Hq, T, D).

    Query heads h·G … h·G + G - 1 share KV head h, G = Hq / Hkv: their queries are laid under one another,
    so that a KV head is multiplied once and never copied.
    """
    batch, heads, tokens, dim = q.shape
    groups = heads // k.shape[1]
    q = q.reshape(batch, k.shape[1], groups * tokens, dim)                # (B, Hkv, G·T, D)
    scores = (q @ k.transpose(-1, -2)) * dim ** -0.5                      # (B, Hkv, G·T, S)
    weights = masked_softmax(scores.unflatten(2, (groups, tokens)), seen[:, None, None])
    out = weights.flatten(2, 3).to(v.dtype) @ v                           # (B, Hkv, G·T, D)
    return out.reshape(batch, heads, tokens, dim)


class Attention(nn.Module):
    """x (B, T, hidden) -> (B, T, hidden); reads and extends the rows' keys and values in `state`."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.q_proj = nn.Linear(config.hidden_size, 2 * self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x, call, state, layer: int):
        # q_proj's rows are [query, gate] head by head: split inside each head, not down the middle
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        look_back = partial(self.look_back, state=state, layer=layer)
        out = call.mix(look_back, self.q_norm(q), self.k_norm(k), v)      # (B, T, Hq, D)
        return self.o_proj((out * gate.sigmoid()).flatten(2))

    def look_back(self, call, q, k, v, state, layer: int):
        """q (B, T, Hq, D), k, v (B, T, Hkv, D) -> (B, T, Hq, D)."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, call.cos, call.sin), rotate(k, call.cos, call.sin)     # (B, Hq, T, D), (B, Hkv, T, D)
        keys, values = state.append(layer, k, v, call)                    # (B, Hkv, S, D)
        return attend(q, keys, values, visible(call.slots, keys.shape[2])).transpose(1, 2)
