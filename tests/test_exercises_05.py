"""Chapter 05's exercises: untouched, right, differently right, and the wrong answers that tempt."""
import math

from chapter_exercises import exercise_tests
from qwen import roofline


def memory_ms_by_rows(weights, element_bytes, kv_bytes, batch, context, bandwidth):
    total = weights * element_bytes
    for _ in range(batch):
        total += context * kv_bytes
    return 1000 * total / bandwidth


def kv_by_layers(config):
    total = 0
    for kind in config["layer_types"]:
        if kind == "full_attention":
            for _ in ("key", "value"):
                total += config["num_key_value_heads"] * config["head_dim"] * config["element_bytes"]
    return total


def fit_by_floor(capacity, weights, fixed, per_token, context):
    return math.floor(max(0, capacity - weights) / (fixed + per_token * context))


def kv_wrong(**changes):
    """The right formula on a config with one field read wrongly."""
    return lambda config: kv_by_layers({**config, **{name: read(config) for name, read in changes.items()}})


RIGHT = {
    "05.1": [292, 292.0, round(roofline.HARDWARE["B200"].ridge)],
    "05.2": [12, 12.0],
    "05.3": [memory_ms_by_rows,
             lambda w, e, kv, b, c, bw: roofline.Cost(w * e + b * c * kv, 0).seconds(bw, 1.0)[0] * 1e3],
    "05.4": [kv_by_layers, lambda config: float(kv_by_layers(config))],
    "05.5": [fit_by_floor, lambda m, w, f, t, c: next(n for n in range(10 ** 6) if w + (n + 1) * (f + t * c) > m)],
}
WRONG = {
    "05.1": [(584, "sparse peak"), (584.4155844, "sparse peak, and not yet rounded"), (281, "8 TB/s"), (292.2077922, "not yet rounded"),
             (1169, "halve it"), (0.0034222, "other way round"), (292e12, "cancels"), (292.2, "not yet rounded"),
             (584.4, "sparse peak, and not yet rounded"), (0.003, "other way round"), (660, "read the sentence")],
    "05.2": [(6, "2-byte weights"), (3, "more rows, not fewer"), (24, "two FLOPs"), (1.5, "solve it"), ("twelve", "read the sentence")],
    "05.3": [
        (lambda *a: memory_ms_by_rows(*a) / 1000, "Those are seconds"),
        (lambda *a: memory_ms_by_rows(*a) * 1000, "microseconds"),
        (lambda w, e, kv, b, c, bw: memory_ms_by_rows(w, e, 0, b, c, bw), "caches are missing"),
        (lambda w, e, kv, b, c, bw: memory_ms_by_rows(w, e, kv, 1, c, bw), "once for every row"),
        (lambda w, e, kv, b, c, bw: memory_ms_by_rows(w * b, e, kv, b, c, bw), "once for all rows"),
        (lambda w, e, kv, b, c, bw: memory_ms_by_rows(w, e, kv, b, c, bw) / b, "each row's share"),
        (lambda w, e, kv, b, c, bw: memory_ms_by_rows(w, e, kv, b, 1, bw), "not the new one alone"),
        (lambda w, e, kv, b, c, bw: memory_ms_by_rows(w, 1, kv, b, c, bw), "element_bytes bytes"),
        (lambda w, e, kv, b, c, bw: memory_ms_by_rows(w, e, kv * e, b, c, bw), "bytes already"),
        (lambda w, e, kv, b, c, bw: max(w * e, b * c * kv) / bw * 1000, "Called with"),
        (lambda w, e, kv, b, c, bw: (w * e + kv) / bw * 1000, "Called with"),
        (lambda w, e, kv, b, c, bw: 5.0, "Called with"),
    ],
    "05.4": [                                               # case 25
        (kv_wrong(head_dim=lambda c: c["hidden_size"] // c["num_attention_heads"]), "field of its own"),
        (kv_wrong(num_key_value_heads=lambda c: c["num_attention_heads"]), "query heads leave nothing"),
        (kv_wrong(layer_types=lambda c: len(c["layer_types"]) * ["full_attention"]), "Only full-attention layers"),
        (kv_wrong(layer_types=lambda c: len(c["layer_types"]) * ["full_attention"],
                  num_key_value_heads=lambda c: c["num_attention_heads"]), "Two slips"),
        (kv_wrong(layer_types=lambda c: len(c["layer_types"]) * ["full_attention"],
                  head_dim=lambda c: c["hidden_size"] // c["num_attention_heads"]), "Two slips: only full-attention layers count"),
        (kv_wrong(layer_types=lambda c: c["layer_types"].count("linear_attention") * ["full_attention"]), "keep no keys and values"),
        (kv_wrong(layer_types=lambda c: ["full_attention"]), "one layer"),
        (kv_wrong(element_bytes=lambda c: 1), "Those are numbers"),
        (lambda config: kv_by_layers(config) // 2 + 1, "Called with"),
        (lambda config: sum(kv_by_layers({**config, "layer_types": [kind]}) for kind in config["layer_types"]) / 2, "a key and a value"),
    ],
    "05.5": [
        (lambda m, w, f, t, c: fit_by_floor(m, 0, f, t, c), "subtract them first"),
        (lambda m, w, f, t, c: fit_by_floor(m, w, 0, t, c), "fixed part as well"),
        (lambda m, w, f, t, c: fit_by_floor(m, w + f, 0, t, c), "not once"),
        (lambda m, w, f, t, c: fit_by_floor(m, w, f * c, t, c), "does not grow"),
        (lambda m, w, f, t, c: math.floor((m - w) / (f + t * c)), "not a negative number"),
        (lambda m, w, f, t, c: max(0, (m - w) / (f + t * c)), "A whole number"),
        (lambda m, w, f, t, c: math.ceil(max(0, m - w) / (f + t * c)), "Round down"),
        (lambda m, w, f, t, c: max(0, round((m - w) / (f + t * c))), "Round down"),
        (lambda m, w, f, t, c: fit_by_floor(m, w, f, t, 1), "context tokens"),
        (lambda m, w, f, t, c: 7, "Called with"),
    ],
}


globals().update(exercise_tests("05", RIGHT, WRONG))
