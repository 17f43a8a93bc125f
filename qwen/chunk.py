"""The delta rule on many tokens at once: a chunk of C tokens in a few matrix products.

Written out, the writes w_i = beta_i (v_i - k_i S_i) of a chunk depend on one another only through the
matrix between them. With c_i the decay summed from the start of the chunk,

    w_i + sum_{j<i} beta_i (k_i·k_j) exp(c_i - c_j) w_j  =  beta_i (v_i - exp(c_i) k_i S)

is one triangular system per chunk (Yang et al. 2024, arXiv 2406.06484, section 3; with decay
arXiv 2412.06464, section 3.3). Solved, it gives all writes; outputs and the next S are plain products.
"""
import torch
from torch.nn import functional as F

CHUNK = 64


def delta_rule_chunks(q, k, v, g, beta, S, chunk: int = CHUNK):
    """Same arguments and results as `delta_rule_steps` (fp32; only the order of summation differs).

    q, k (B, H, T, Dk), v (B, H, T, Dv), g, beta (B, H, T), S (B, H, Dk, Dv) -> (B, H, T, Dv) and the new S.
    """
    tokens = q.shape[2]
    chunk = min(chunk, tokens)
    fill = -tokens % chunk                                                # g = beta = 0: filled tokens do nothing
    q, k, v = (F.pad(t, (0, 0, 0, fill)).unflatten(2, (-1, chunk)) for t in (q, k, v))          # (B, H, N, C, D)
    g, beta = (F.pad(t, (0, fill)).unflatten(2, (-1, chunk))[..., None] for t in (g, beta))     # (B, H, N, C, 1)

    total = g.cumsum(3)                                                   # c_i, at most 0
    # c_i - c_j, summed over the tokens between and not subtracted: strong decays would cancel digits
    between = g.expand(*g.shape[:-1], chunk).tril(-1).cumsum(3)           # (…, C, C)
    apart = between.exp().tril()                                          # exp(c_i - c_j) for j <= i
    kk = (k @ k.transpose(3, 4)) * apart * beta                           # its diagonal is not used
    qk = (q @ k.transpose(3, 4)) * apart
    # Two right-hand sides: what the values ask to be written, and what S already answers
    sides = torch.cat([v * beta, k * beta * total.exp()], -1)             # (…, C, Dv + Dk)
    values, reads = torch.linalg.solve_triangular(kk, sides, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1)

    q_in, k_out = q * total.exp(), k.transpose(3, 4) * apart[..., -1:, :]  # decayed from the start, to the end
    end = total[..., -1:, :].exp()                                        # (…, 1, 1): decay over the whole chunk
    outputs = []
    for n in range(q.shape[2]):                                           # chunk after chunk, S between them
        writes = values[:, :, n] - reads[:, :, n] @ S                     # (B, H, C, Dv)
        outputs.append(q_in[:, :, n] @ S + qk[:, :, n] @ writes)
        S = S * end[:, :, n] + k_out[:, :, n] @ writes
    return torch.cat(outputs, 2)[:, :, :tokens], S
