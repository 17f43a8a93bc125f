"""Projections whose weights lie in the order in which the CPU's matrix kernel reads them.

A matrix is kept row by row, but oneDNN, the kernel library behind torch on a CPU, reads it in blocks. With one
row of input it manages without; with a few rows it rearranges the whole weight on every call, which takes longer
than the product and hides what batching gains. Rearranged once, after loading, a step with several rows takes
little longer than with one. The numbers are the same up to the order of summation.
"""
import time

import torch
from torch import nn
from torch.nn import functional as F

ROWS = 16                                                   # rows of input the order is chosen for; it serves any number
FEW = 4                                                     # some CPUs read fastest for so many
LARGE = 1 << 20                                             # bytes: a smaller matrix stays in the cache as it is
BEYOND_CACHE = 1 << 28                                      # bytes


class PackedLinear(nn.Module):
    """x (..., in) -> (..., out), for a weight (out, in) of which only the rearranged copy is kept.

    It stays where and as it is: no `.to`, no copying, no saving; load the model again with another dtype or device.
    """

    least = 1                                               # rows of input below which zeros are added, see `least_rows`

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)    # opaque: shape, but no elements

    def forward(self, x):
        rows = x.shape[:-1].numel()
        if rows >= self.least:
            return self.product(x)
        filled = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, self.least - rows))      # (least, in)
        return self.product(filled)[:rows].view(*x.shape[:-1], self.weight.shape[0])

    def product(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")


def least_rows(layers) -> int:
    """FEW where this CPU's kernel takes less time over FEW rows than over one and over two, on average; otherwise 1.

    Timed on layers (PackedLinear, of one dtype) that together pass any cache; with fewer there is nothing to gain.
    """
    chosen, read = [], 0
    for layer in layers:
        if read < BEYOND_CACHE:
            chosen.append(layer)
            read += layer.weight.nbytes
    if read < BEYOND_CACHE:
        return 1

    def seconds(rows):
        start = time.perf_counter()
        for layer in chosen:
            layer.product(torch.ones(rows, layer.weight.shape[1], dtype=layer.weight.dtype))
        return time.perf_counter() - start

    one, two, few = (min(times) for times in zip(*[[seconds(rows) for rows in (1, 2, FEW)] for _ in range(3)]))
    return FEW if 2 * few < one + two else 1


def packable(weight) -> bool:
    """Whether this weight is large, lies on a CPU, and this torch build and CPU have the kernel for its dtype."""
    if weight.device.type != "cpu" or weight.nbytes < LARGE or not torch.backends.mkldnn.is_available():
        return False
    try:
        PackedLinear(weight.new_zeros(16, 16))(weight.new_zeros(1, 16))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


def pack(model) -> None:
    """Replace every large projection of a `model.Model` in place. The embedding is read by row and stays;
    where it is also the head, the head becomes a packed copy. Trained weights are needed no more after it: no gradients.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and packable(child.weight):
                setattr(parent, name, PackedLinear(child.weight))
    if model.lm_head is None and packable(model.embed_tokens.weight):
        model.lm_head = PackedLinear(model.embed_tokens.weight)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    least = least_rows(layers)
    for layer in layers:
        layer.least = least
