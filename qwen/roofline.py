"""What one step costs on paper: bytes to move, FLOPs to do, and the time the slower of the two takes.

Plain arithmetic, no torch. A step runs T new tokens of each of B rows through the model; decode is T = 1.
Weights are read once a step, whatever B is; keys, values and recurrent matrices once a row.
(Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785; for inference Pope et al. 2022, arXiv 2211.05102.)
"""
from dataclasses import dataclass
from math import inf

from qwen.config import LINEAR, Config

RECURRENT_BYTES = 4                                         # the recurrent matrix is fp32 whatever the weights are


def number(unit: str, least: float = 0.0, most: float = inf, advice: str = "", **values):
    """Refuse each value that is no number from least to most, above 0 and finite: almost always a slip of the unit."""
    for name, value in values.items():
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (real and 0 < value < inf and least <= value <= most):
            allowed = f"a number from {least:g} to {most:g}" if least else "a number above 0"
            raise ValueError(f"{name} is {value!r} {unit}, expected {allowed}{advice and ': ' + advice}")


def count(least: int, **values):
    """Refuse each value that is no whole number of at least `least`."""
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least {least}")


def share(**values):
    """Refuse each value that is no share of a whole."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise ValueError(f"{name} is {value!r}, expected a share above 0 and up to 1 (70 % is 0.7)")


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
        number("bytes/s", bandwidth=bandwidth), number("FLOP/s", peak=peak)
        memory, compute = self.bytes / bandwidth, self.flops / peak
        return max(memory, compute), memory + compute


def projection_weights(config) -> int:
    """Weights of all matrices that every token is multiplied by, head and embedding apart."""
    c = config
    values = c.linear_num_value_heads * c.linear_value_head_dim
    linear = c.hidden_size * (c.conv_dim + values + 2 * c.linear_num_value_heads) + values * c.hidden_size
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    full = c.hidden_size * (2 * heads + 2 * kv) + heads * c.hidden_size         # queries and gates, keys, values, out
    mlp = 3 * c.hidden_size * c.intermediate_size
    return sum((linear if kind == LINEAR else full) + mlp for kind in c.layer_types)


def kv_bytes_per_token(config, element_bytes: int = 2) -> int:
    """Bytes of keys and values that one token leaves in the cache, full-attention layers only."""
    layers = sum(kind != LINEAR for kind in config.layer_types)
    return 2 * layers * config.num_key_value_heads * config.head_dim * element_bytes


def recurrent_bytes(config) -> int:
    """Bytes of one row's recurrent matrices (fp32), whatever its length."""
    layers = sum(kind == LINEAR for kind in config.layer_types)
    entries = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    return layers * entries * RECURRENT_BYTES


def total(parts: dict[str, Cost]) -> Cost:
    """The sum of all parts."""
    return sum(parts.values(), Cost(0, 0))


# What follows predicts from a data sheet. GB and TB are powers of ten; GiB and MiB of two.


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
        number("FLOP/s", 1e9, 1e17, "a TFLOPS is 1e12 FLOP/s, dense", **{f"{self.name}: peak": self.peak})
        number("bytes/s", 1e8, 1e15, "a TB/s is 1e12 bytes/s", **{f"{self.name}: bandwidth": self.bandwidth})
        number("bytes", 1e8, 1e14, "a GB is 1e9 bytes, a GiB 2**30", **{f"{self.name}: capacity": self.capacity})

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

    def __post_init__(self):
        count(1, parameters=self.parameters, element_bytes=self.element_bytes)
        for name in ("projections", "head", "kv_bytes", "attention_flops", "recurrent_bytes", "window_bytes"):
            count(0, **{name: getattr(self, name)})

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
        count(0, tokens=tokens)
        return self.fixed_bytes + tokens * self.kv_bytes

    def parts(self, batch: int, context: int, tokens: int = 1) -> dict[str, Cost]:
        """What one step moves and does, part by part: batch rows, `context` tokens behind each, `tokens` new ones.

        The head runs on one token a row. Activations are left out: they stay in the cache.
        Attention of token i covers context + i + 1 keys; a token's read and write of a Dk × Dv matrix are 6·Dk·Dv
        FLOPs (what the key finds, the correction, what the query reads) and Dk·Dv for the decay.
        Raises ValueError for sizes that are no counts.
        """
        count(1, batch=batch, tokens=tokens), count(0, context=context)
        rows, entries = batch * tokens, self.recurrent_bytes // RECURRENT_BYTES
        keys_seen = tokens * context + tokens * (tokens + 1) // 2                # over a row's new tokens
        return {
            "projections": Cost(self.projections * self.element_bytes, 2 * self.projections * rows),
            "attention": Cost(batch * (context + tokens) * self.kv_bytes, batch * keys_seen * self.attention_flops),
            "state": Cost(2 * batch * self.recurrent_bytes, 7 * rows * entries),
            "head": Cost(self.head * self.element_bytes, 2 * self.head * batch),
        }

    def step(self, batch: int, context: int, tokens: int = 1) -> Cost:
        """The sum of `parts`."""
        return total(self.parts(batch, context, tokens))


def dense(name: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
          element_bytes: int = 2) -> Shape:
    """A Llama-like model: every layer has attention (q, k, v, o) and a gated MLP; head and embedding are two matrices.

    All sizes as in its published config.json (arXiv 2407.21783 for Llama 3); element_bytes of a weight, key or value.
    """
    count(1, **{what: value for what, value in locals().items() if what != "name"})
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


def step_cost(config, batch: int, context: int, tokens: int = 1, element_bytes: int = 4) -> dict[str, Cost]:
    """`Shape.parts` of a `qwen.config.Config`; element_bytes of a weight, a key or a value (fp32 4, bf16 2)."""
    return hybrid("", config, element_bytes).parts(batch, context, tokens)


QWEN_CONFIG = Config(                                       # Qwen3.5-0.8B, the text model, as published
    vocab_size=248_320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
    layer_types=6 * (3 * ["linear_attention"] + ["full_attention"]), num_attention_heads=8, num_key_value_heads=2,
    head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, rope_theta=1e7, partial_rotary_factor=0.25,
    rms_norm_eps=1e-6, max_position_embeddings=262_144, tie_word_embeddings=True)
QWEN_0_8B = hybrid("Qwen3.5-0.8B", QWEN_CONFIG)
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


def _room(model, hardware, usable):
    """Bytes that the weights leave of the usable share of the memory; 0 if they do not fit themselves."""
    share(usable=usable)
    return max(0, int(usable * hardware.capacity - model.weight_bytes))


def rows_in_memory(model: Shape, hardware: Hardware, context: int, usable: float = 1.0) -> int:
    """The largest batch whose weights and caches fit; 0 if not even one row does.

    context: tokens of each row; usable: the share of the memory that weights and caches may take, up to 1
    (vLLM's gpu_memory_utilization; the rest is for activations and the driver).
    """
    return _room(model, hardware, usable) // max(1, model.row_bytes(context))


def tokens_in_memory(model: Shape, hardware: Hardware, usable: float = 1.0) -> int:
    """Tokens for whose keys and values there is room beside the weights, in no rows in particular: an engine's pool."""
    count(1, kv_bytes=model.kv_bytes)
    return _room(model, hardware, usable) // model.kv_bytes


def rows_in_time(model: Shape, hardware: Hardware, context: int, promise: float) -> int:
    """The largest batch whose decode step takes at most `promise` seconds, at best; 0 if not even one row does."""
    number("seconds a token", 1e-6, 10, "50 ms are 0.05", promise=promise)
    rows, more = 0, 1 << 40
    while more:                                             # the step takes longer with every row: large strides first
        if step_seconds(model, hardware, rows + more, context) <= promise:
            rows += more
        else:
            more //= 2
    return rows


def largest_batch(model: Shape, hardware: Hardware, context: int, promise: float,
                  usable: float = 1.0) -> tuple[int, str]:
    """(the largest batch, what binds: "memory" or "time"): rows of `context` tokens, `promise` seconds a token."""
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
