"""Chapter 09's exercises: untouched, right, differently right, and the wrong answers that tempt (cases 25 and 26)."""
from dataclasses import replace
from math import ceil, floor

import torch
from chapter_exercises import exercise_tests

from qwen import capacity, roofline


def gpus_by_counting(users, speed, per_gpu, utilisation):
    n = 1
    while n * per_gpu * utilisation < users * speed - 1e-6:
        n += 1
    return n


def rows_by_filling(gib, share, weight_bytes, fixed_bytes, token_bytes, tokens):
    left, n = gib * 1024 ** 3 * share - weight_bytes, 0
    while left >= fixed_bytes + tokens * token_bytes:
        left, n = left - fixed_bytes - tokens * token_bytes, n + 1
    return n


def rows_of_the_package(gib, share, weight_bytes, fixed_bytes, token_bytes, tokens):
    model = roofline.Shape("", 0, 0, int(weight_bytes), 1, token_bytes, 0, int(fixed_bytes))
    hardware = replace(roofline.HARDWARE["H100 SXM"], capacity=capacity.to_bytes(gib, "GiB"))
    return roofline.rows_in_memory(model, hardware, tokens, share)


RIGHT = {
    "09.1": [capacity.cost_per_million, lambda d, t: 1e6 / (t * 60 * 60) * d],
    "09.2": [lambda n, f, d, h, k, w, b: roofline.dense("", d, 1, f, h, k, w, 1, b).kv_bytes,
             lambda n, f, d, h, k, w, b: sum(torch.zeros(k, w).numel() * b for _ in range(2 * f))],
    "09.3": [rows_of_the_package, rows_by_filling, lambda g, s, w, f, t, n: (g * 2 ** 30 * s - w) // (f + t * n)],
    "09.4": [lambda u, s, p, r: capacity.gpus_for_rate(u * s, p, r), gpus_by_counting],
    "09.5": [295, 295.0, round(989.4 / 3.35), torch.tensor(295)],
}

WRONG = {
    "09.1": [
        (lambda d, t: d / t / 1000 * 1e6, "not 1000"),      # errata 2
        (lambda d, t: d * 1e6 / (60 * t), "divided by 60"),
        (lambda d, t: d / t * 1e6, "to one second"),
        (lambda d, t: d / t / 3600, "price of one token"),
        (lambda d, t: d / t / 3.6, "price of a thousand"),
        (lambda d, t: d / 3600 * t, "divide by the speed"),
        (lambda d, t: 3600 * t / d * 1e-6, "Upside down"),
        (lambda d, t: round(d / 3600 / t * 1e6, 2), "Do not round"),
        (lambda d, t: 13.89, "Called with"),
        (13.89, "function itself"),
        (lambda d, t: {}.clear(), "returns nothing"),
    ],
    "09.2": [                                               # case 25
        (lambda n, f, d, h, k, w, b: 2 * f * k * d / h * b, "hidden / heads"),
        (lambda n, f, d, h, k, w, b: 2 * f * h * w * b, "query heads"),
        (lambda n, f, d, h, k, w, b: 2 * n * k * w * b, "all layers"),
        (lambda n, f, d, h, k, w, b: 2 * n * h * w * b, "Two slips"),
        (lambda n, f, d, h, k, w, b: 2 * n * d * b, "Three slips"),
        (lambda n, f, d, h, k, w, b: 2 * f * d * b, "Two slips"),
        (lambda n, f, d, h, k, w, b: f * k * w * b, "a key and a value"),
        (lambda n, f, d, h, k, w, b: 2 * f * k * w, "element_bytes"),
        (lambda n, f, d, h, k, w, b: 2 * k * w * b, "one layer"),
        (lambda n, f, d, h, k, w, b: 12_288, "Called with"),
    ],
    "09.3": [                                               # case 26
        (lambda g, s, w, f, t, n: int((g * 1e9 * s - w) / (f + t * n)), "2**30"),
        (lambda g, s, w, f, t, n: int(g * 2 ** 30 * s / (f + t * n)), "same memory"),
        (lambda g, s, w, f, t, n: int((g * 2 ** 30 - w) * s / (f + t * n)), "multiply first"),
        (lambda g, s, w, f, t, n: int((g * 2 ** 30 - w) / (f + t * n)), "may use only"),
        (lambda g, s, w, f, t, n: int((g * 2 ** 30 * s - w) / (t * n)), "fixed part too"),
        (lambda g, s, w, f, t, n: int((g * 2 ** 30 * s - w - f) / (t * n)), "Every row"),
        (lambda g, s, w, f, t, n: int((g * 2 ** 30 * s - w) / (f + t) / n), "once a row"),
        (lambda g, s, w, f, t, n: ceil((g * 2 ** 30 * s - w) / (f + t * n)), "does not fit"),
        (lambda g, s, w, f, t, n: round((g * 2 ** 30 * s - w) / (f + t * n)), "half a row"),
        (lambda g, s, w, f, t, n: (g * 2 ** 30 * s - w) / (f + t * n), "part of a row"),
        (lambda g, s, w, f, t, n: (g * 2 ** 30 * s - w) // t, "Those are tokens"),
        (lambda g, s, w, f, t, n: 233, "Called with"),
    ],
    "09.4": [
        (lambda u, s, p, r: ceil(u * s / p), "leave the reserve"),
        (lambda u, s, p, r: ceil(r * u * s / p), "divide by it"),
        (lambda u, s, p, r: floor(u * s / p / r), "Round up"),
        (lambda u, s, p, r: max(1, int(u * s / p / r)), "Round up"),
        (lambda u, s, p, r: round(u * s / p / r), "Round up"),
        (lambda u, s, p, r: u * s / p / r, "part of a GPU"),
        (lambda u, s, p, r: ceil(u / p / r), "each user gets"),
        (lambda u, s, p, r: u * s, "the demand"),
        (lambda u, s, p, r: ceil(u * s / p / r), "take 1e-9 off"),
        (lambda u, s, p, r: ceil(ceil(u * s / p) / r), "Round once"),
        (lambda u, s, p, r: ceil(u * s / p / r) + 1, "One too many."),
        (lambda u, s, p, r: ceil(u * s / p / r - 1e-9) + 1, "One too many."),
        (lambda u, s, p, r: int(u * s / p / r) + 1, "fits exactly"),
        (lambda u, s, p, r: 3.5, "Called with"),
    ],
    "09.5": [                                               # case 26
        (round(1979 / 3.35), "Halve it"), (1979 / 3.35, "Halve it"), (590, "Halve it"),
        (round(1979 / 3.0), "3.0 TB/s"), (330, "3.35 TB/s"), (1979 / 2 / 3.35, "whole number"), (295.37, "whole number"), (295.4, "whole number"),
        (989.5, "divide it"), (0, "Upside down"), (148, "halved twice"), ("295", "That is not it"), (7, "That is not it"),
    ],
}


globals().update(exercise_tests("09", RIGHT, WRONG))
