"""What serving costs and how much of it a load needs: money, memory, rows, GPUs, waiting.

Plain arithmetic, no torch. Seconds, bytes, FLOPs, tokens and dollars, never their multiples: TB/s and milliseconds
are converted at the door (`to_bytes`, `* 1e12`, `/ 1000`), and a value that can only be in another unit is refused.
GB is 1e9 bytes and GiB is 2**30.
"""
import heapq
from dataclasses import dataclass
from math import ceil, floor, isfinite

from qwen import roofline
from qwen.config import FULL

UNITS = {"B": 1, "KB": 10 ** 3, "MB": 10 ** 6, "GB": 10 ** 9, "TB": 10 ** 12,
         "KiB": 2 ** 10, "MiB": 2 ** 20, "GiB": 2 ** 30, "TiB": 2 ** 40}
SLACK = 1e-9                                                # 2100 / 3000 / 0.7 is one GPU, whatever the last bit says


def _positive(unit="", least=0.0, hint="", **values):
    for name, value in values.items():
        if type(value) is bool or not isinstance(value, (int, float)) or not isfinite(value) or value <= least:
            above = f"at least {least:g}" if least else "a number above 0"
            raise ValueError(f"{name} is {value!r} {unit}".rstrip() + f", expected {above}{hint}")


def _count(least=0, **values):
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")


def _share(**values):
    for name, value in values.items():
        if type(value) is bool or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise ValueError(f"{name} is {value!r}, expected a share above 0 and up to 1 (70 % is 0.7)")


def _machine(bandwidth, peak):
    _positive("bytes/s", 1e6, " (1 TB/s is 1e12 bytes/s)", bandwidth=bandwidth)
    _positive("FLOP/s", 1e6, " (1 TFLOPS is 1e12 FLOP/s), the dense peak", peak=peak)


def to_bytes(amount: float, unit: str) -> int:
    """Bytes of an amount in B, KB … TB (powers of 1000) or KiB … TiB (of 1024). (IEC 80000-13.)"""
    _positive(unit, amount=amount)
    if unit not in UNITS:
        raise ValueError(f"the unit is {unit!r}, expected one of {', '.join(UNITS)}")
    return round(amount * UNITS[unit])


# Money -----------------------------------------------------------------------------------------------------------

def cost_per_million(dollars_per_hour: float, tokens_per_second: float) -> float:
    """Dollars for a million tokens: price of a second, over tokens of a second. (An hour has 3600 seconds.)"""
    _positive("$/h", dollars_per_hour=dollars_per_hour)
    _positive("tokens/s", tokens_per_second=tokens_per_second)
    return dollars_per_hour / 3600 / tokens_per_second * 1e6


def useful(lengths) -> tuple[int, int]:
    """(useful, computed) tokens of one batch that runs until its longest answer ends; lengths: tokens of each answer."""
    _count(1, **{f"the length of row {row}": length for row, length in enumerate(lengths)})
    return sum(lengths), len(lengths) * max(lengths, default=0)


# Load ------------------------------------------------------------------------------------------------------------

def in_system(per_second: float, seconds: float) -> float:
    """How many are there at a time, on average: arrivals per second × seconds that each stays.

    Little 1961, doi 10.1287/opre.9.3.383: true of every queue that neither grows nor shrinks in the long run.
    """
    _positive("1/s", per_second=per_second)
    _positive("s", seconds=seconds)
    return per_second * seconds


def gpu_seconds(requests: int, tokens: float, tokens_per_second: float, utilisation: float = 1.0) -> float:
    """GPU-seconds to make `tokens` for each of `requests`: an amount of work, not a number of GPUs."""
    _count(1, requests=requests)
    _positive("tokens", tokens=tokens)
    _positive("tokens/s", tokens_per_second=tokens_per_second)
    _share(utilisation=utilisation)
    return requests * tokens / tokens_per_second / utilisation


def gpus_for_work(gpu_seconds: float, window: float) -> int:
    """GPUs that finish so many GPU-seconds within `window` seconds."""
    _positive("GPU-seconds", gpu_seconds=gpu_seconds)
    _positive("s", window=window)
    return ceil(gpu_seconds / window - SLACK)


def gpus_for_rate(demand: float, tokens_per_second: float, utilisation: float = 0.7) -> int:
    """GPUs that keep up with `demand` tokens/s, each busy for at most the share `utilisation` of its time."""
    _positive("tokens/s", demand=demand, tokens_per_second=tokens_per_second)
    _share(utilisation=utilisation)
    return ceil(demand / tokens_per_second / utilisation - SLACK)


# Waiting ---------------------------------------------------------------------------------------------------------

def erlang_c(servers: int, offered: float) -> float:
    """The probability that an arrival has to wait, M/M/c: random arrivals, exponential service, c equal servers.

    offered: arrivals/s × mean service seconds, the servers that are busy on average; below `servers`, or the queue
    grows for ever. Erlang 1917; the recursion for Erlang B and B -> C as in Kleinrock 1975, Queueing Systems 1, §3.5–3.6.
    """
    _count(1, servers=servers)
    _positive("busy servers", offered=offered)
    if offered >= servers:
        raise ValueError(f"{offered:g} servers' work is offered to {servers}, expected less: the queue would grow for ever")
    blocked = 1.0                                           # Erlang B with 0 servers
    for n in range(1, servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def mean_wait(per_second: float, service: float, servers: int) -> float:
    """Mean seconds in the queue, M/M/c; service: mean seconds on a server. (Kleinrock 1975, §3.5.)"""
    offered = in_system(per_second, service)
    return erlang_c(servers, offered) * service / (servers - offered)


def waits(arrivals, services, servers: int) -> list[float]:
    """Seconds that each request queues for one of `servers` (rows of a batch, say), first come, first served.

    arrivals: ascending times in s; services: seconds on a server. Nothing random in here: draw the two yourself.
    """
    _count(1, servers=servers)
    if len(arrivals) != len(services):
        raise ValueError(f"there are {len(arrivals)} arrivals and {len(services)} services, expected as many")
    free, queued = [0.0] * servers, []                      # when each server becomes free
    for arrival, service in zip(arrivals, services):
        start = max(arrival, free[0])
        heapq.heapreplace(free, start + service)
        queued.append(start - arrival)
    return queued


# What a user sees ------------------------------------------------------------------------------------------------

def end_to_end(first: float, per_token: float, tokens: int) -> float:
    """Seconds from question to last token: time to first token, then one step for each further token."""
    _positive("s", first=first, per_token=per_token)
    _count(1, tokens=tokens)
    return first + (tokens - 1) * per_token


def goodput(first, per_token, seconds: float, first_limit: float, per_token_limit: float) -> float:
    """Requests per second that kept *both* promises. (Zhong et al. 2024, DistServe, arXiv 2401.09670.)

    first, per_token: seconds of each request; seconds: how long they were counted; limits in s.
    """
    _positive("s", seconds=seconds, first_limit=first_limit, per_token_limit=per_token_limit)
    if len(first) != len(per_token):
        raise ValueError(f"there are {len(first)} first-token times and {len(per_token)} token times, expected as many")
    return sum(a <= first_limit and b <= per_token_limit for a, b in zip(first, per_token)) / seconds


# Memory and time of a batch --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Footprint:
    """A model as a server sees it: bytes of its weights; per row a fixed part and one for each token; FLOPs of a token.

    A row's bytes are affine in its tokens: token_bytes · tokens + fixed_bytes, the latter 0 without linear layers.
    """

    weight_bytes: int
    token_bytes: int
    fixed_bytes: int = 0
    token_flops: int = 0

    def __post_init__(self):
        _count(1, weight_bytes=self.weight_bytes)
        _count(0, token_bytes=self.token_bytes, fixed_bytes=self.fixed_bytes, token_flops=self.token_flops)

    def row_bytes(self, tokens: int) -> int:
        """Bytes that a row of so many tokens keeps."""
        _count(0, tokens=tokens)
        return self.token_bytes * tokens + self.fixed_bytes


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, element_bytes: int = 2) -> int:
    """2 (key, value) · full-attention layers · KV heads · head_dim · bytes. (Pope et al. 2022, arXiv 2211.05102.)"""
    _count(1, layers=layers, kv_heads=kv_heads, head_dim=head_dim, element_bytes=element_bytes)
    return 2 * layers * kv_heads * head_dim * element_bytes


def conv_bytes(config, element_bytes: int = 2) -> int:
    """Bytes of one row's convolution windows: K-1 columns of q, k and v in each linear layer. (`qwen.cache.State.conv`)"""
    layers = sum(kind != FULL for kind in config.layer_types)
    columns = (2 * config.linear_num_key_heads * config.linear_key_head_dim
               + config.linear_num_value_heads * config.linear_value_head_dim)
    return layers * columns * (config.linear_conv_kernel_dim - 1) * element_bytes


def footprint(config, element_bytes: int = 2) -> Footprint:
    """Of a `qwen.config.Config`: matrices only (norms and the like are 0.1 %), an untied embedding counted in."""
    head = config.vocab_size * config.hidden_size
    matrices = roofline.projection_weights(config) + head
    stored = matrices if config.tie_word_embeddings else matrices + head
    return Footprint(stored * element_bytes, roofline.kv_bytes_per_token(config, element_bytes),
                     roofline.recurrent_bytes(config) + conv_bytes(config, element_bytes), 2 * matrices)


def decode_seconds(model: Footprint, batch: int, tokens: int, bandwidth: float, peak: float) -> float:
    """The least a decode step of `batch` rows with `tokens` each can take: the slower of memory and compute.

    bandwidth in bytes/s, peak in dense FLOP/s. Keys and values are read once a row, the fixed part is read and written.
    FLOPs of attention are left out. (Roofline: Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785.)
    """
    _count(1, batch=batch)
    _machine(bandwidth, peak)
    moved = model.weight_bytes + batch * (model.row_bytes(tokens) + model.fixed_bytes)
    return max(moved / bandwidth, batch * model.token_flops / peak)


def prefill_seconds(model: Footprint, tokens: int, bandwidth: float, peak: float) -> float:
    """The least that reading one prompt of `tokens` can take: its FLOPs, or one trip of the weights if that is longer."""
    _count(1, tokens=tokens)
    _machine(bandwidth, peak)
    return max(model.weight_bytes / bandwidth, tokens * model.token_flops / peak)


def kv_tokens(model: Footprint, memory_bytes: float, share: float = 0.9) -> int:
    """Tokens for which keys and values find room, in no rows in particular: memory · share - weights, over token_bytes.

    share: of the memory that the engine may use, vLLM's gpu_memory_utilization; the rest is for activations and the driver.
    """
    return floor(_room(model, memory_bytes, share) / model.token_bytes)


def batch_by_memory(model: Footprint, tokens: int, memory_bytes: float, share: float = 0.9) -> int:
    """The most rows of `tokens` each that fit beside the weights."""
    _count(1, tokens=tokens)
    return floor(_room(model, memory_bytes, share) / model.row_bytes(tokens))


def _room(model, memory_bytes, share):
    _positive("bytes", 1e6, " (1 GB is 1e9 bytes)", memory_bytes=memory_bytes)
    _share(share=share)
    room = memory_bytes * share - model.weight_bytes
    if room <= 0:
        raise ValueError(f"the weights take {model.weight_bytes / 1e9:.2f} GB and the engine may use "
                         f"{memory_bytes * share / 1e9:.2f} GB, expected room for at least one row")
    return room


def batch_by_latency(model: Footprint, tokens: int, limit: float, bandwidth: float, peak: float) -> int:
    """The most rows of `tokens` each whose decode step may take at most `limit` seconds; 0 if one row is too slow.

    `decode_seconds` solved for the batch.
    """
    _count(1, tokens=tokens)
    _positive("s", limit=limit)
    _machine(bandwidth, peak)
    by_memory = (limit * bandwidth - model.weight_bytes) / (model.row_bytes(tokens) + model.fixed_bytes)
    by_compute = limit * peak / model.token_flops if model.token_flops else by_memory
    return max(0, floor(min(by_memory, by_compute) + SLACK))


def largest_batch(model, tokens, memory_bytes, limit, bandwidth, peak, share=0.9) -> tuple[int, str]:
    """(rows, "memory" or "latency"): the smaller of the two batches, and which of them binds. Units as above."""
    by_memory = batch_by_memory(model, tokens, memory_bytes, share)
    by_latency = batch_by_latency(model, tokens, limit, bandwidth, peak)
    return (by_memory, "memory") if by_memory <= by_latency else (by_latency, "latency")


def blocks(tokens: int, block_size: int = 16) -> int:
    """Blocks that a row of `tokens` takes, the last one perhaps partly empty. (Kwon et al. 2023, arXiv 2309.06180.)"""
    _count(1, tokens=tokens, block_size=block_size)
    return -(-tokens // block_size)
