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
