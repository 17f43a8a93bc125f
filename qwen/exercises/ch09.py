"""Exercises of chapter 09, capacity and cost."""
from math import ceil, floor

from qwen.exercises import Function, Value


# 09.1 ---------------------------------------------------------------- dollars for a million tokens

def cost(dollars_per_hour, tokens_per_second):
    return dollars_per_hour / 3600 / tokens_per_second * 1e6


COST = Function(cost, ((2.5, 50), (4, 800), (1.8, 2000)), (
    (lambda d, t: d / 1000 / t * 1e6, "3.6 times too much: an hour has 3600 seconds, not 1000."),
    (lambda d, t: d / 60 / t * 1e6, "An hour has 3600 seconds; you divided by 60."),
    (lambda d, t: d / t * 1e6, "The price is for an hour and the speed for a second: bring both to one second."),
    (lambda d, t: d / 3600 / t, "That is the price of one token; a million were asked for."),
    (lambda d, t: d / 3600 / t * 1e3, "That is the price of a thousand tokens; a million were asked for."),
    (lambda d, t: d / 3600 * t, "A faster GPU makes a token cheaper: divide by the speed."),
    (lambda d, t: t * 3600 / d / 1e6, "Upside down: those are millions of tokens for a dollar."),
    (lambda d, t: round(cost(d, t), 2), "Do not round inside the function."),
))


# 09.2 ---------------------------------------------------------------- case 25: bytes of one token in the cache

def kv(layers, full_layers, hidden, heads, kv_heads, head_dim, element_bytes):
    return 2 * full_layers * kv_heads * head_dim * element_bytes


KV = Function(kv, ((24, 6, 1024, 8, 2, 256, 2), (32, 32, 4096, 32, 8, 128, 2), (4, 1, 128, 4, 2, 48, 4)), (
    (lambda n, f, d, h, k, w, b: 2 * f * k * (d // h) * b,
     "You took hidden / heads for the size of a head. The config gives head_dim, and it need not be that quotient."),
    (lambda n, f, d, h, k, w, b: 2 * f * h * w * b,
     "You counted query heads. Only KV heads leave something in the cache; several query heads share one."),
    (lambda n, f, d, h, k, w, b: 2 * n * k * w * b,
     "You counted all layers. A linear layer keeps a matrix of fixed size and no key of a token."),
    (lambda n, f, d, h, k, w, b: 2 * n * h * w * b,
     "Two slips: only KV heads, and only layers with full attention, leave something in the cache."),
    (lambda n, f, d, h, k, w, b: 2 * n * d * b,
     "Three slips: neither all layers nor all query heads count, and a head is not hidden / heads wide."),
    (lambda n, f, d, h, k, w, b: 2 * f * d * b,
     "Two slips: not the query heads but the KV heads count, and a head is head_dim wide."),
    (lambda n, f, d, h, k, w, b: f * k * w * b, "Half of it: a token leaves a key and a value."),
    (lambda n, f, d, h, k, w, b: 2 * f * k * w, "Those are numbers; each has `element_bytes` bytes."),
    (lambda n, f, d, h, k, w, b: 2 * k * w * b, "That is one layer; `full_layers` of them keep keys and values."),
))


# 09.3 ---------------------------------------------------------------- case 26: rows that fit

def rows(gib, share, weight_bytes, fixed_bytes, token_bytes, tokens):
    return floor((gib * 2 ** 30 * share - weight_bytes) / (fixed_bytes + token_bytes * tokens))


ROWS = Function(rows, ((80, 0.9, 16e9, 0, 131_072, 2000), (24, 0.8, 1.5e9, 19_537_920, 12_288, 8000), (16, 0.9, 3e9, 1e7, 20_000, 50)), (
    (lambda g, s, w, f, t, n: floor((g * 1e9 * s - w) / (f + t * n)), "A GiB is 2**30 bytes; you took a GB, 1e9."),
    (lambda g, s, w, f, t, n: floor(g * 2 ** 30 * s / (f + t * n)), "The weights live in the same memory; take them off first."),
    (lambda g, s, w, f, t, n: floor((g * 2 ** 30 - w) * s / (f + t * n)),
     "The share is of the whole memory, weights included: multiply first, then take the weights off."),
    (lambda g, s, w, f, t, n: floor((g * 2 ** 30 - w) / (f + t * n)), "The engine may use only `share` of the memory."),
    (lambda g, s, w, f, t, n: floor((g * 2 ** 30 * s - w) / (t * n)), "A row has a fixed part too, whatever its length."),
    (lambda g, s, w, f, t, n: floor((g * 2 ** 30 * s - w - f) / (t * n)), "Every row has a fixed part, not the batch as a whole."),
    (lambda g, s, w, f, t, n: floor((g * 2 ** 30 * s - w) / ((f + t) * n)), "The fixed part is there once a row, not once a token."),
    (lambda g, s, w, f, t, n: ceil((g * 2 ** 30 * s - w) / (f + t * n)), "Rounded up, the last row does not fit."),
    (lambda g, s, w, f, t, n: round((g * 2 ** 30 * s - w) / (f + t * n)), "Round down: half a row does not fit."),
    (lambda g, s, w, f, t, n: (g * 2 ** 30 * s - w) / (f + t * n), "Round down: a part of a row does not fit."),
    (lambda g, s, w, f, t, n: floor((g * 2 ** 30 * s - w) / t), "Those are tokens, without the fixed part; how many rows?"),
))


# 09.4 ---------------------------------------------------------------- GPUs for a load

def gpus(users, speed, per_gpu, utilisation):
    return ceil(users * speed / per_gpu / utilisation - 1e-9)


GPUS = Function(gpus, ((100, 20, 3000, 0.7), (240, 15, 4000, 0.7), (1000, 10, 2500, 0.5), (700, 3, 3000, 0.7), (70, 30, 1000, 0.7)), (
    (lambda u, s, p, r: ceil(u * s / p), "That keeps every GPU busy all the time, and the queue grows: leave the reserve."),
    (lambda u, s, p, r: ceil(u * s / p * r), "Less utilisation needs more GPUs: divide by it."),
    (lambda u, s, p, r: max(1, floor(u * s / p / r)), "Round up: rounded down, the load does not fit."),
    (lambda u, s, p, r: floor(u * s / p / r), "Round up: rounded down, the load does not fit."),
    (lambda u, s, p, r: round(u * s / p / r), "Round up: a third of a GPU is a GPU."),
    (lambda u, s, p, r: u * s / p / r, "A part of a GPU cannot be rented here: round up."),
    (lambda u, s, p, r: ceil(u / p / r), "You left out how many tokens a second each user gets."),
    (lambda u, s, p, r: ceil(u * s), "That is the demand in tokens a second; how many GPUs make so many?"),
    (lambda u, s, p, r: ceil(u * s / p / r), "This load fits exactly 3; take 1e-9 off before rounding up."),
    (lambda u, s, p, r: ceil(ceil(u * s / p) / r), "Round once, at the end."),
    (lambda u, s, p, r: ceil(u * s / p / r) + 1, "One too many."),
    (lambda u, s, p, r: gpus(u, s, p, r) + 1, "One too many."),
    (lambda u, s, p, r: floor(u * s / p / r) + 1, "One too many where the load fits exactly: round up, do not add."),
))


# 09.5 ---------------------------------------------------------------- case 26: sparse and dense peak

RIDGE = Value(295, (
    (591, "Twice too high: the sheet's figure holds with sparsity, every other weight zero. Halve it."),
    (590, "Twice too high: the sheet's figure holds with sparsity, every other weight zero. Halve it."),
    (660, "That is the sparse peak over a rounded 3.0 TB/s. Halve the peak, and take the 3.35."),
    (330, "You halved the peak, rightly; but the memory moves 3.35 TB/s."),
    (1979 / 2 / 3.35, "Right, but a whole number was asked for: round it."),
    (295.37, "Right, but a whole number was asked for: round it."),
    (295.4, "Right, but a whole number was asked for: round it."),
    (1979 / 3.35, "Twice too high: the sheet's figure holds with sparsity. Halve it, then round."),
    (989.5, "That is the dense peak in TFLOPS; divide it by the memory's TB/s."),
    (0, "Upside down, or a unit lost: TFLOPS over TB/s is FLOP a byte."),
    (148, "You halved twice, or counted a multiply-add as one; the sheet counts it as two, as we do."),
))


EXERCISES = {"09.1": COST, "09.2": KV, "09.3": ROWS, "09.4": GPUS, "09.5": RIDGE}
