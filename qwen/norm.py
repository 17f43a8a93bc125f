"""RMSNorm, twice: the ordinary one scales by 1 + w, the gated one inside DeltaNet by w.

Zhang and Sennrich 2019, arXiv 1910.07467. Both work in fp32 and on one token at a time,
so neither can mix rows or see a pad.
"""
import torch
from torch import nn
from torch.nn import functional as F


def rms(x, eps: float):
    """x (..., D) float32 divided by the root of its mean square over D."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """x (..., D) -> same shape and dtype; a weight of zero leaves the scale at one."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        return (rms(x.float(), self.eps) * (1 + self.weight.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """x, gate (..., D) -> norm(x) * w * silu(gate): DeltaNet's output gate."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x, gate):
        return (rms(x.float(), self.eps) * self.weight.float() * F.silu(gate.float())).to(gate.dtype)
