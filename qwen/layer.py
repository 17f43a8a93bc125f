"""One layer: a token mixer (full attention or DeltaNet), then the MLP, each on a normed residual stream."""
from torch import nn

from qwen.attention import Attention
from qwen.config import FULL
from qwen.deltanet import GatedDeltaNet
from qwen.mlp import MLP
from qwen.norm import RMSNorm


class Layer(nn.Module):
    """x (B, T, hidden) -> (B, T, hidden). Only the mixer sees other tokens, and only of the same row."""

    def __init__(self, config, index: int):
        super().__init__()
        self.index, self.kind = index, config.layer_types[index]
        if self.kind == FULL:
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, call, state):
        """call: this call's `model.Call` or `RaggedCall`, the same for every layer."""
        h = self.input_layernorm(x)
        if self.kind == FULL:
            x = x + self.self_attn(h, call, state, self.index)
        else:
            x = x + self.linear_attn(h, call, state, self.index)
        return x + self.mlp(self.post_attention_layernorm(x))
