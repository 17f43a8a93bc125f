"""Chapter 05's exercises: a ridge point, the rows that reach it, the memory time of a step, keys and values, and who fits."""
from qwen.exercises import Function, Value


def _memory_ms(weights, element_bytes, kv_bytes, batch, context, bandwidth):
    return (weights * element_bytes + batch * context * kv_bytes) / bandwidth * 1e3


def _kv(config, layers=None, heads="num_key_value_heads", head_dim=None, pair=2):
    layers = config["layer_types"].count("full_attention") if layers is None else layers
    return pair * layers * config[heads] * (head_dim or config["head_dim"]) * config["element_bytes"]


def _fit(capacity, weights, fixed, per_token, context):
    return max(0, (capacity - weights) // (fixed + per_token * context))


HYBRID = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
          "layer_types": 6 * (3 * ["linear_attention"] + ["full_attention"]), "element_bytes": 2}
DENSE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "layer_types": 32 * ["full_attention"], "element_bytes": 2}

EXERCISES = {
    "05.1": Value(292, (
        (584, "That is the sparse peak. A dense model does half of it."),
        (281, "That takes 8 TB/s; the data sheet of the question says 7.7."),
        (292.2, "Right, but not yet rounded to a whole number."),
        (2250 / 7.7, "Right, but not yet rounded to a whole number."),
        (584.4, "That is the sparse peak, and not yet rounded."),
        (4500 / 7.7, "That is the sparse peak, and not yet rounded."),
        (1169, "Sparsity doubles the printed peak: halve it, do not double it again."),
        (0, "The other way round: FLOP/s divided by bytes/s."),
        (0.003, "The other way round: FLOP/s divided by bytes/s."),
        (7.7 / 2250, "The other way round: FLOP/s divided by bytes/s."),
        (292e12, "TFLOPS and TB/s both have their 1e12; it cancels."),
    )),
    "05.2": Value(12, (
        (6, "That holds for 2-byte weights, where N rows give N FLOP a byte. Here a weight has 4 bytes."),
        (3, "The other way round: 4-byte weights are more bytes for the same FLOPs, so it takes more rows, not fewer."),
        (24, "A row does two FLOPs for each weight, a multiplication and an addition."),
        (1.5, "FLOP a byte is 2 N / 4; solve it for N."),
    )),
    "05.3": Function(
        right=_memory_ms,
        calls=((8e9, 2, 131_072, 1, 1000, 3.35e12), (8e9, 2, 131_072, 64, 1000, 3.35e12), (752e6, 4, 24_576, 8, 500, 30e9),
               (7e9, 1, 1000, 10, 0, 1e12), (1_000_000, 2, 100_000, 8, 100, 1e9)),
        slips=(
            (lambda w, e, kv, b, c, bw: _memory_ms(w, e, kv, b, c, bw) / 1e3, "Those are seconds; the question is milliseconds."),
            (lambda w, e, kv, b, c, bw: _memory_ms(w, e, kv, b, c, bw) * 1e3, "Those are microseconds; 1e3 milliseconds are a second."),
            (lambda w, e, kv, b, c, bw: w * e / bw * 1e3, "The caches are missing: each row's keys and values come along."),
            (lambda w, e, kv, b, c, bw: _memory_ms(w, e, kv, 1, c, bw), "The caches come once for every row: nobody shares them."),
            (lambda w, e, kv, b, c, bw: b * _memory_ms(w, e, kv, 1, c, bw), "The weights come once for all rows, not once a row."),
            (lambda w, e, kv, b, c, bw: _memory_ms(w, e, kv, b, c, bw) / b, "That is each row's share. The step takes the whole."),
            (lambda w, e, kv, b, c, bw: _memory_ms(w, e, kv, b, 1, bw), "All tokens behind a row are read in every step, not the new one alone."),
            (lambda w, e, kv, b, c, bw: _memory_ms(w, 1, kv, b, c, bw), "A weight has element_bytes bytes."),
            (lambda w, e, kv, b, c, bw: _memory_ms(w, e, kv * e, b, c, bw), "kv_bytes are bytes already."),
        )),
    "05.4": Function(
        right=_kv,
        calls=((HYBRID,), (DENSE,), ({**HYBRID, "num_key_value_heads": 1, "element_bytes": 4},)),
        slips=(
            (lambda c: _kv(c, head_dim=c["hidden_size"] // c["num_attention_heads"]),
             "head_dim is a field of its own; hidden_size / num_attention_heads is something else here."),
            (lambda c: _kv(c, heads="num_attention_heads"), "The cache holds the KV heads; query heads leave nothing behind."),
            (lambda c: _kv(c, layers=len(c["layer_types"])), "Only full-attention layers keep keys and values."),
            (lambda c: _kv(c, len(c["layer_types"]), "num_attention_heads"),
             "Two slips: only full-attention layers keep keys and values, and only for their KV heads."),
            (lambda c: _kv(c, len(c["layer_types"]), head_dim=c["hidden_size"] // c["num_attention_heads"]),
             "Two slips: only full-attention layers count, and head_dim is a field of its own."),
            (lambda c: _kv(c, c["layer_types"].count("linear_attention")), "Those are the layers that keep no keys and values."),
            (lambda c: _kv(c, pair=1), "A token leaves a key and a value: twice as much."),
            (lambda c: _kv(c) / c["element_bytes"], "Those are numbers; each has element_bytes bytes."),
            (lambda c: _kv(c, layers=1), "That is one layer; sum over all full-attention layers."),
        )),
    "05.5": Function(
        right=_fit,
        calls=((80_000_000_000, 16_000_000_000, 0, 131_072, 1000), (80_000_000_000, 1_504_786_048, 19_537_920, 12_288, 1000),
               (1000, 400, 50, 10, 5), (1000, 2000, 50, 10, 5), (1000, 400, 110, 10, 5)),
        slips=(
            (lambda m, w, f, t, c: max(0, m // (f + t * c)), "The weights take up memory too: subtract them first."),
            (lambda m, w, f, t, c: max(0, (m - w) // (t * c)), "Each user has a fixed part as well, at any length."),
            (lambda m, w, f, t, c: max(0, (m - w - f) // (t * c)), "The fixed part is needed for every user, not once."),
            (lambda m, w, f, t, c: max(0, (m - w) // ((f + t) * c)), "The fixed part does not grow with the tokens: fixed + per_token * context."),
            (lambda m, w, f, t, c: (m - w) // (f + t * c), "A model that does not fit has no users: not a negative number, 0."),
            (lambda m, w, f, t, c: max(0, (m - w) / (f + t * c)), "A whole number: part of a user does not fit."),
            (lambda m, w, f, t, c: max(0, round((m - w) / (f + t * c))), "Round down: the last one does not fit entirely."),
            (lambda m, w, f, t, c: max(0, -(-(m - w) // (f + t * c))), "Round down: the last one does not fit entirely."),
            (lambda m, w, f, t, c: max(0, (m - w) // (f + t)), "Each of a user's context tokens takes its bytes."),
        )),
}
