"""The feed-forward half of a layer (SwiGLU, Shazeer 2020, arXiv 2002.05202): no token sees another."""
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    """x (B, T, hidden) -> (B, T, hidden): down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
