"""What this machine does: memory bandwidth, matrix-product peak, and the time of a decode step.

Wall-clock times with the device synchronised; medians or best of several, which is said at each.
`qwen.roofline` predicts from the first two what the third should be.
"""
import platform
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from qwen.cache import State
from qwen.model import Model
from qwen.packed import PackedLinear, packable


def machine(device="cpu") -> str:
    """A name for the processor that computes, with its number of threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines()
             if line.startswith("model name")] if cpuinfo.exists() else []
    name, threads = names[0] if names else platform.processor() or platform.machine(), torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def clock(function) -> float:
    """Wall-clock seconds of one call, on an idle device before and after."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def seconds(function, times: int = 5) -> list[float]:
    """`clock` of several calls, after one that does not count."""
    clock(function)
    return [clock(function) for _ in range(times)]


def bandwidth(device="cpu", megabytes: int = 1024) -> float:
    """Bytes a second read from memory: the best of several sums over an array larger than any cache."""
    array = torch.ones(megabytes * 250_000, device=device)
    return array.nbytes / min(seconds(array.sum))


def matmul_peak(dtype=torch.float32, device="cpu", size: int = 2048) -> float:
    """FLOP a second of a square matrix product, the best of several and of the two forms of weight."""
    x = torch.randn(size, size, device=device).to(dtype)
    layers = [nn.Linear(size, size, bias=False, device=device, dtype=dtype).requires_grad_(False)]
    if packable(layers[0].weight):
        layers.append(PackedLinear(layers[0].weight))
    return 2 * size ** 3 / min(min(seconds(lambda: layer(x))) for layer in layers)


def random_model(config, device="cpu", dtype=torch.float32) -> Model:
    """A model of any size with arbitrary weights, in seconds: it says nothing sensible, and costs what a trained one costs."""
    with torch.device("meta"):
        model = Model(config)
    noise = torch.empty(1 << 20).uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        repeats = -(-parameter.numel() // noise.numel())
        filled = noise.repeat(repeats)[:parameter.numel()].clone().view(parameter.shape)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(filled, requires_grad=False))
    return model.eval()


def filled_state(model, lengths, room: int) -> State:
    """A State whose rows already hold `lengths` tokens of arbitrary keys, values and matrices, with room for more."""
    state = State(model, len(lengths), max_len=max(lengths) + room)
    for cache in (state.k, state.v, state.conv, state.recurrent):
        for tensor in cache.values():
            tensor.uniform_(-0.1, 0.1)
    state.length.copy_(torch.tensor(lengths))
    return state


@torch.no_grad()
def decode_seconds(model, lengths, steps: int = 10) -> float:
    """The median wall-clock time of a decode step: one new token for each of rows with `lengths` tokens behind them."""
    state = filled_state(model, lengths, steps + 1)
    ids = torch.zeros(len(lengths), 1, dtype=torch.int64, device=model.device)
    return median(seconds(lambda: model(ids, state), steps))


def unequal(batch: int, context: int) -> list[int]:
    """`batch` lengths between about three quarters of `context` and all of it, the first the longest."""
    return [context - context * (row % 4) // 16 for row in range(batch)]
