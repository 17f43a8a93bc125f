"""Linear attention: the layers that keep one matrix a head instead of every past key and value.

Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464). For each token the matrix S decays,
is asked what it holds under the token's key, and is corrected by the difference to the value:

    S <- exp(g) S;   S <- S + k (beta (v - k S));   output q S

A matrix cannot be masked afterwards the way a key can: what a pad once wrote stays. So a pad must not
write (beta = 0), must not let the matrix fade (g = 0), and must not stand in the short convolution's
window of the tokens behind it.
"""
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from qwen.chunk import delta_rule_chunks
from qwen.norm import GatedRMSNorm


def window_index(mask, kernel: int):
    """For each token, which earlier inputs its convolution reads: the last K-1 real ones of its row.

    mask bool (B, T) -> int64 (B, T + 1, K-1), indices into the K-1 inputs carried over from the last call
    followed by this call's T. Entry T belongs to the token that comes next: the window to carry over.
    """
    real = F.pad(mask, (kernel - 1, 0), value=True)                       # (B, K-1+T): what is carried is real
    order = real.int().argsort(dim=1, descending=True, stable=True)       # real columns first, in their order
    before = F.pad(mask.cumsum(1), (1, 0))                                # (B, T+1): real tokens before each
    rank = before[..., None] + torch.arange(kernel - 1, device=mask.device)
    return order.gather(1, rank.flatten(1)).view(rank.shape)              # (B, T+1, K-1)


def short_conv(x, carried, weight, before):
    """Causal depthwise convolution over a row's real tokens, then silu.

    x (B, T, C), carried (B, K-1, C), weight (C, 1, K), before from `window_index`
    -> (B, T, C) and the window to carry over (B, K-1, C), which holds inputs, not outputs.
    """
    inputs = torch.cat([carried, x], 1)                                   # (B, K-1+T, C)
    first = torch.arange(len(x), device=x.device) * inputs.shape[1]
    before, rows = before + first[:, None, None], inputs.flatten(0, 1)    # embedding copies whole rows, indexing single numbers
    *taps, own = weight[:, 0].t().contiguous()                            # (C,) each
    out = x * own
    for i, tap in enumerate(taps):
        out = out.addcmul(F.embedding(before[:, :-1, i], rows), tap)
    return F.silu(out), F.embedding(before[:, -1], rows)


def gates(a, b, A_log, dt_bias, mask):
    """How much each head's matrix fades and how strongly a token writes.

    a, b (B, T, Hv), mask bool (B, T) -> g <= 0 (the log of the decay) and beta in (0, 1), fp32 (B, T, Hv);
    both 0 at pads, which leaves the matrix exactly as it was.
    """
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    beta = b.float().sigmoid()
    pad = ~mask[..., None]
    return g.masked_fill(pad, 0), beta.masked_fill(pad, 0)


def delta_rule_step(q, k, v, g, beta, S):
    """The rule above for one token. S is updated in place: with many rows it is most of what a decode step moves.

    q, k (B, H, Dk), v (B, H, Dv), g, beta (B, H), S (B, H, Dk, Dv), all fp32 -> output (B, H, Dv).
    Key and query read the old S together, in one pass; q (S + k w) = q S + (q·k) w gives the query its new one.
    """
    decay = g.exp()[..., None]                                            # (B, H, 1)
    held, read = (decay[..., None] * (torch.stack([k, q], 2) @ S)).unbind(2)
    write = (v - held) * beta[..., None]                                  # (B, H, Dv)
    S.mul_(decay[..., None]).addcmul_(k[..., None], write[:, :, None])
    return read + (q * k).sum(-1, keepdim=True) * write


def delta_rule_steps(q, k, v, g, beta, S):
    """Token after token: the definition that `delta_rule_chunks` must equal. S itself is left as it was.

    q, k (B, H, T, Dk), v (B, H, T, Dv), g, beta (B, H, T), S (B, H, Dk, Dv), all fp32
    -> outputs (B, H, T, Dv) and the new S.
    """
    S, tokens = S.clone(), (t.unbind(2) for t in (q, k, v, g, beta))
    outputs = [delta_rule_step(*token, S) for token in zip(*tokens)]
    return torch.stack(outputs, 2), S


def l2norm(x, eps: float = 1e-6):
    """x (..., D) to length one; eps stands inside the root."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


class GatedDeltaNet(nn.Module):
    """x (B, T, hidden) -> (B, T, hidden); reads and replaces the rows' window and matrix in `state`."""

    def __init__(self, config):
        super().__init__()
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        width, channels = self.value_heads * self.value_dim, config.conv_dim
        self.in_proj_qkv = nn.Linear(config.hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, width, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads))
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x, call, state, layer: int):
        remember = partial(self.remember, state=state, layer=layer)
        out = call.mix(remember, self.in_proj_qkv(x), self.in_proj_a(x), self.in_proj_b(x))     # (B, T, Hv, Dv)
        z = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.value_dim))
        return self.out_proj(self.norm(out, z).flatten(2))

    def remember(self, call, qkv, a, b, state, layer: int):
        """qkv (B, T, C), a, b (B, T, Hv) -> what the rows' matrices answer, (B, T, Hv, Dv)."""
        qkv, window = short_conv(qkv, call.take(state.conv, layer), self.conv1d.weight, call.before)
        call.put(state.conv, layer, window)
        batch, tokens, _ = qkv.shape
        keys = self.key_heads * self.key_dim
        q, k, v = qkv.float().split([keys, keys, self.value_heads * self.value_dim], -1)
        q = l2norm(q.view(batch, tokens, self.key_heads, self.key_dim)) * self.key_dim ** -0.5
        k = l2norm(k.view(batch, tokens, self.key_heads, self.key_dim))
        v = v.view(batch, tokens, self.value_heads, self.value_dim)
        if self.value_heads > self.key_heads:                             # each key head serves several value heads
            q, k = (t.repeat_interleave(self.value_heads // self.key_heads, 2) for t in (q, k))
        g, beta = gates(a, b, self.A_log, self.dt_bias, call.mask)

        S = call.take(state.recurrent, layer)                             # (B, Hv, Dk, Dv)
        if tokens == 1 and not qkv.requires_grad:                         # training needs the S that a step overwrites
            out = delta_rule_step(*(t[:, 0] for t in (q, k, v, g, beta)), S)[:, None]
        else:
            q, k, v, g, beta = (t.transpose(1, 2) for t in (q, k, v, g, beta))   # (B, H, T, …)
            out, S = delta_rule_chunks(q, k, v, g, beta, S)
            out = out.transpose(1, 2)
        call.put(state.recurrent, layer, S)
        return out
