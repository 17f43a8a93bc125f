"""The first and the last step of the model: token ids become vectors, vectors become logits."""
import torch
from torch import nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """One vector a token. Row `i` of `weight` (vocab, hidden) is token `i`'s vector.

    Reading it by id gives the model's input; multiplying by it gives one logit a token, which
    is why small models use the same matrix for both ("tied", Press and Wolf 2017, arXiv 1608.05859).
    """

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, ids):
        """ids (B, T) int64 -> (B, T, hidden)."""
        return F.embedding(ids, self.weight)

    def logits(self, x):
        """x (..., hidden) -> (..., vocab): how well each token's vector matches."""
        return F.linear(x, self.weight)
