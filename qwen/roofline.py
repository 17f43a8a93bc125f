"""What one step costs on paper: bytes to move, FLOPs to do, and the time the slower of the two takes.

Plain arithmetic, no torch. A step runs T new tokens of each of B rows through the model; decode is T = 1.
Weights are read once a step, whatever B is; keys, values and recurrent matrices once a row.
(Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785; for inference Pope et al. 2022, arXiv 2211.05102.)
"""
from dataclasses import dataclass

from qwen.config import LINEAR

RECURRENT_BYTES = 4                                         # the recurrent matrix is fp32 whatever the weights are


@dataclass(frozen=True)
class Cost:
    """Bytes moved between memory and processor, and floating-point operations (a multiply-add is two)."""

    bytes: int
    flops: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, bandwidth: float, peak: float) -> tuple[float, float]:
        """(the larger of memory and compute time, their sum) in seconds: perfect overlap, and none.

        bandwidth in bytes/s, peak in FLOP/s, both above 0. A real step lies between the two, or a little above.
        """
        if not (bandwidth > 0 and peak > 0):
            raise ValueError(f"bandwidth is {bandwidth} bytes/s and peak {peak} FLOP/s, expected both above 0")
        memory, compute = self.bytes / bandwidth, self.flops / peak
        return max(memory, compute), memory + compute


def projection_weights(config) -> int:
    """Weights of all matrices that every token is multiplied by, head and embedding apart."""
    c = config
    values = c.linear_num_value_heads * c.linear_value_head_dim
    conv = 2 * c.linear_num_key_heads * c.linear_key_head_dim + values          # q, k, v
    linear = c.hidden_size * (conv + values + 2 * c.linear_num_value_heads) + values * c.hidden_size
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    full = c.hidden_size * (2 * heads + 2 * kv) + heads * c.hidden_size         # queries and gates, keys, values, output
    mlp = 3 * c.hidden_size * c.intermediate_size
    return sum((linear if kind == LINEAR else full) + mlp for kind in c.layer_types)


def kv_bytes_per_token(config, element_bytes: int = 2) -> int:
    """Bytes of keys and values that one token leaves in the cache, full-attention layers only."""
    layers = sum(kind != LINEAR for kind in config.layer_types)
    return 2 * layers * config.num_key_value_heads * config.head_dim * element_bytes


def recurrent_bytes(config) -> int:
    """Bytes of one row's recurrent matrices (fp32), whatever its length."""
    layers = sum(kind == LINEAR for kind in config.layer_types)
    return layers * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * RECURRENT_BYTES


def step_cost(config, batch: int, context: int, tokens: int = 1, element_bytes: int = 4) -> dict[str, Cost]:
    """The cost of one step, part by part.

    batch rows, each with `context` tokens behind it and `tokens` new ones; element_bytes of a weight, a key or a
    value (fp32 4, bf16 2). The head runs on one token a row. Activations are left out: they stay in the cache.
    Attention of token i covers context + i + 1 keys; a token's read and write of a Dk × Dv matrix are 6·Dk·Dv FLOPs
    (what the key finds, the correction, what the query reads) and Dk·Dv for the decay.
    Raises ValueError for sizes that are no counts.
    """
    for name, value, least in (("batch", batch, 1), ("context", context, 0), ("tokens", tokens, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")
    rows = batch * tokens
    weights, head = projection_weights(config), config.vocab_size * config.hidden_size
    keys_seen = tokens * context + tokens * (tokens + 1) // 2                    # over a row's new tokens
    full = sum(kind != LINEAR for kind in config.layer_types)
    return {
        "projections": Cost(weights * element_bytes, 2 * weights * rows),
        "attention": Cost(batch * (context + tokens) * kv_bytes_per_token(config, element_bytes),
                          4 * batch * keys_seen * full * config.num_attention_heads * config.head_dim),
        "state": Cost(2 * batch * recurrent_bytes(config), 7 * rows * recurrent_bytes(config) // RECURRENT_BYTES),
        "head": Cost(head * element_bytes, 2 * head * batch),
    }


def total(parts: dict[str, Cost]) -> Cost:
    """The sum of all parts."""
    return sum(parts.values(), Cost(0, 0))


# What follows predicts from a data sheet. GB and TB are powers of ten; GiB and MiB of two.


def _positive(what: str, value, unit: str, least: float, most: float, advice: str):
    """Refuse a value outside the range in which any real one lies: almost always a slip of the unit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{what} is {value!r} {unit}, expected a number from {least:.0e} to {most:.0e}: {advice}")


def _count(what: str, value, least: int):
    if type(value) is not int or value < least:
        raise ValueError(f"{what} is {value!r}, expected a whole number of at least {least}")


@dataclass(frozen=True)
class Hardware:
    """One data sheet row: peak in FLOP/s (dense, no sparsity), bandwidth in bytes/s, capacity in bytes.

    Raises ValueError where a number cannot be in these units (989.4 for a peak is TFLOPS, not FLOP/s).
    """

    name: str
    dtype: str
    peak: float
    bandwidth: float
    capacity: float

    def __post_init__(self):
        _positive(f"{self.name}: peak", self.peak, "FLOP/s", 1e9, 1e17, "a TFLOPS is 1e12 FLOP/s")
        _positive(f"{self.name}: bandwidth", self.bandwidth, "bytes/s", 1e8, 1e15, "a TB/s is 1e12 bytes/s")
        _positive(f"{self.name}: capacity", self.capacity, "bytes", 1e8, 1e14, "a GB is 1e9 bytes")

    @property
    def ridge(self) -> float:
        """The ridge point in FLOP per byte: above it the arithmetic takes longer, below it the memory."""
        return self.peak / self.bandwidth


# From the vendors' data sheets; capacity as printed there (GB = 1e9 bytes). A row of your own goes in the same way.
HARDWARE = {h.name: h for h in (
    Hardware("H100 SXM", "bf16", 989.4e12, 3.35e12, 80e9),
    Hardware("H200 SXM", "bf16", 989.4e12, 4.8e12, 141e9),
    Hardware("B200", "bf16", 2250e12, 7.7e12, 180e9),       # 8.0 TB/s in some sheets
    Hardware("A100 SXM 80 GB", "bf16", 312e12, 2.039e12, 80e9),
    Hardware("L4", "bf16", 121e12, 0.300e12, 24e9),
    Hardware("T4", "fp16", 65e12, 0.320e12, 16e9),          # no native bf16
)}


@dataclass(frozen=True)
class Shape:
    """A model on paper: what a step reads and does, and what it keeps in memory.

    projections, head: weights multiplied by every token, and by one token a row. parameters: all that lie in memory.
    element_bytes: of a weight, a key or a value. kv_bytes: of keys and values that a token leaves. attention_flops:
    of one query over one key, all layers. recurrent_bytes, window_bytes: of a row's linear layers, at any length.
    """

    name: str
    projections: int
    head: int
    parameters: int
    element_bytes: int
    kv_bytes: int
    attention_flops: int
    recurrent_bytes: int = 0
    window_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes that all parameters take up in memory."""
        return self.parameters * self.element_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes that a row takes up before its first token."""
        return self.recurrent_bytes + self.window_bytes

    def row_bytes(self, tokens: int) -> int:
        """Bytes that a row with this many tokens keeps in memory: affine in them."""
        _count("tokens", tokens, 0)
        return self.fixed_bytes + tokens * self.kv_bytes

    def step(self, batch: int, context: int, tokens: int = 1) -> Cost:
        """The cost of one step, as `step_cost` counts it. batch rows, `context` tokens behind each, `tokens` new ones."""
        _count("batch", batch, 1), _count("context", context, 0), _count("tokens", tokens, 1)
        keys_seen = tokens * context + tokens * (tokens + 1) // 2
        moved = ((self.projections + self.head) * self.element_bytes
                 + batch * ((context + tokens) * self.kv_bytes + 2 * self.recurrent_bytes))
        done = batch * (2 * self.projections * tokens + 2 * self.head + self.attention_flops * keys_seen
                        + 7 * tokens * self.recurrent_bytes // RECURRENT_BYTES)
        return Cost(moved, done)


def dense(name: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
          element_bytes: int = 2) -> Shape:
    """A Llama-like model: every layer has attention (q, k, v, o) and a gated MLP; head and embedding are two matrices.

    All sizes as in its published config.json (arXiv 2407.21783 for Llama 3); element_bytes of a weight, key or value.
    """
    for what, value in locals().copy().items():
        if what != "name":
            _count(what, value, 1)
    layer = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * intermediate
    norms = (2 * layers + 1) * hidden
    return Shape(name, layers * layer, vocab * hidden, layers * layer + 2 * vocab * hidden + norms, element_bytes,
                 2 * layers * kv_heads * head_dim * element_bytes, 4 * layers * heads * head_dim)


def hybrid(name: str, config, element_bytes: int = 2) -> Shape:
    """The shape of a `qwen.config.Config`: full attention in some layers, Gated DeltaNet in the others."""
    c = config
    linear = sum(kind == LINEAR for kind in c.layer_types)
    full = len(c.layer_types) - linear
    head = c.vocab_size * c.hidden_size
    small = (linear * (c.conv_dim * c.linear_conv_kernel_dim + 2 * c.linear_num_value_heads + c.linear_value_head_dim)
             + full * 2 * c.head_dim + (2 * len(c.layer_types) + 1) * c.hidden_size)
    parameters = projection_weights(c) + small + head * (1 if c.tie_word_embeddings else 2)
    return Shape(name, projection_weights(c), head, parameters, element_bytes, kv_bytes_per_token(c, element_bytes),
                 4 * full * c.num_attention_heads * c.head_dim, recurrent_bytes(c),
                 linear * c.conv_dim * (c.linear_conv_kernel_dim - 1) * element_bytes)


LLAMA_3_8B = dense("Llama-3-8B", hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, head_dim=128,
                   vocab=128_256)


def intensity(cost: Cost) -> float:
    """Arithmetic intensity: FLOP for each byte moved."""
    return cost.flops / cost.bytes


def step_seconds(model: Shape, hardware: Hardware, batch: int, context: int, tokens: int = 1) -> float:
    """Seconds of one step at best: memory and arithmetic at work at the same time. Prefill: context 0, many tokens."""
    return model.step(batch, context, tokens).seconds(hardware.bandwidth, hardware.peak)[0]


def bound_by(model: Shape, hardware: Hardware, batch: int, context: int) -> str:
    """What takes longest in a decode step: "weights" or "caches" (both memory), or "arithmetic"."""
    cost = model.step(batch, context)
    if intensity(cost) >= hardware.ridge:
        return "arithmetic"
    shared = (model.projections + model.head) * model.element_bytes
    return "weights" if shared >= cost.bytes - shared else "caches"


def rows_in_memory(model: Shape, hardware: Hardware, context: int, usable: float = 1.0) -> int:
    """The largest batch whose weights and caches fit; 0 if not even one row does.

    context: tokens of each row; usable: the share of the memory that weights and caches may take, up to 1.
    """
    _positive("usable", usable, "of the memory", 0.01, 1, "it is a share, 0.9 for 90 %")
    return max(0, int(usable * hardware.capacity - model.weight_bytes) // max(1, model.row_bytes(context)))


def rows_in_time(model: Shape, hardware: Hardware, context: int, promise: float) -> int:
    """The largest batch whose decode step takes at most `promise` seconds, at best; 0 if not even one row does."""
    _positive("promise", promise, "seconds a token", 1e-6, 10, "50 ms are 0.05")
    rows, more = 0, 1 << 40
    while more:                                             # the step takes longer with every row: try large strides first
        if step_seconds(model, hardware, rows + more, context) <= promise:
            rows += more
        else:
            more //= 2
    return rows


def largest_batch(model: Shape, hardware: Hardware, context: int, promise: float, usable: float = 1.0) -> tuple[int, str]:
    """(the largest batch, what binds: "memory" or "time") for rows of `context` tokens and `promise` seconds a token."""
    memory = rows_in_memory(model, hardware, context, usable)
    time = rows_in_time(model, hardware, context, promise)
    return (memory, "memory") if memory <= time else (time, "time")


def report(model: Shape, hardware: Hardware, batch: int, context: int) -> str:
    """One decode step in words: its time and who waits for what, or why it does not fit."""
    need = model.weight_bytes + batch * model.row_bytes(context)
    if need > hardware.capacity:
        return (f"{need / 1e9:.1f} GB do not fit into {hardware.capacity / 1e9:.0f} GB: out of memory; "
                f"at most {rows_in_memory(model, hardware, context)} rows of {context:,} tokens")
    cost, seconds = model.step(batch, context), step_seconds(model, hardware, batch, context)
    return (f"{need / 1e9:.1f} of {hardware.capacity / 1e9:.0f} GB; a step takes {seconds * 1e3:.2f} ms: "
            f"{1 / seconds:,.0f} tokens a second for each user, {batch / seconds:,.0f} for all; "
            f"{intensity(cost):.1f} FLOP a byte, ridge {hardware.ridge:.0f}; "
            f"most time: {bound_by(model, hardware, batch, context)}")
