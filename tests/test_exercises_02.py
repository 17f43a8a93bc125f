"""Chapter 02's exercises: untouched, right, differently right, and the wrong answers that tempt; and its slider's function."""
import ast
import math

import numpy as np
import torch
import torch.nn.functional as F

from chapter_exercises import cells, exercise_tests
from qwen.exercises.ch02 import EXERCISES

CELLS = cells("02")


def scores_by_loop(q, k):
    return [[[sum(a * b for a, b in zip(x, y)) / math.sqrt(len(y)) for y in keys] for x in queries]
            for queries, keys in zip(q.tolist(), k.tolist())]


def scores_by_sdpa(q, k):                                   # the logarithm of the weights, less what softmax took off
    weights = F.scaled_dot_product_attention(q.double(), k.double(), torch.eye(k.shape[1]).double().expand(len(k), -1, -1))
    first = (q[:, :, None].double() * k[:, None, :1].double()).sum(-1) / k.shape[-1] ** 0.5
    return (weights / weights[..., :1]).log() + first


RIGHT = {
    "02.1": [[2, 6, 5, 7], (2.0, 6.0, 5.0, 7.0), np.array([2, 6, 5, 7]), torch.tensor([[[2.0, 6.0, 5.0, 7.0]]])],
    "02.2": [(5, 3, 10), [5, 3, 10], torch.Size([5, 3, 10]), np.array([5, 3, 10]), torch.tensor([5, 3, 10])],
    "02.3": [lambda q, k: torch.bmm(q, k.transpose(1, 2)) / math.sqrt(k.shape[2]), scores_by_loop, scores_by_sdpa,
             lambda q, k: torch.einsum("btd,bsd->bts", q, k) * q.shape[-1] ** -0.5,
             lambda q, k: (q / q.shape[-1] ** 0.5) @ k.mT],
    "02.4": [458_752_000, 458_752_000.0, np.int64(458_752_000), torch.tensor(458_752_000), 8 * 1000 * 57_344],
    "02.5": [[1, 4], (4, 1), {1, 4}, np.array([1, 4]), torch.tensor([[1], [4]]).flatten()],
}
WRONG = {
    "02.1": [([2, 6, 5], "own key joins"), ([2, 6, 5, 13], "Your last key is q_C"), ([2, 2, 3, 5], "asked with x_C;"),
             (torch.tensor([2, 2, 3]), "left out"), ([7, 2, 6, 5], "at the end"), (20, "score of its own"),
             (18, "score of its own"), ([1.4142136, 4.2426407, 3.5355339, 4.9497475], "before scaling"),
             ([1, 2, 3, 4], "read the sentence")],
    "02.2": [((5, 3, 7), "more than 7"), ((5, 3, 8), "All 3"), ((5, 1, 8), "each user has 3"), ((5, 1, 10), "3 queries"),
             ((5, 10, 3), "before keys"), ((5, 3, 16), "counts keys"), ((5, 10, 16), "shape of the keys"),
             ((15, 50), "flat grid"), ((15, 10), "loses the users"), ((5, 1, 3, 10), "no dimension"),
             (150, "number of scores"), ((1,), "read the sentence")],
    "02.3": [(lambda q, k: q @ k.mT, "not scaled"), (lambda q, k: q @ k.mT / k.shape[-1], "root of D"),
             (lambda q, k: q @ k.mT / k.shape[1] ** 0.5, "root of S"), (lambda q, k: q @ k.mT * 2, "does not return"),
             (lambda q, k: q @ k.mT * k.shape[-1] ** 0.5, "multiplied"),
             (lambda q, k: q @ k.view(k.shape[0], k.shape[2], -1) / k.shape[-1] ** 0.5, "new borders"),
             (lambda q, k: k @ q.mT / k.shape[-1] ** 0.5, "turn it round"),
             (lambda q, k: q.flip(0) @ k.mT / k.shape[-1] ** 0.5, "another user's queries"),
             (lambda q, k: q @ k.flip(0).mT / k.shape[-1] ** 0.5, "another user's keys"),
             (lambda q, k: (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1), "before the softmax"),
             (lambda q, k: q.flatten(0, 1) @ k.flatten(0, 1).T / k.shape[-1] ** 0.5, "flattened the users"),
             (lambda q, k: torch.einsum("btd,csd->btcs", q, k) / k.shape[-1] ** 0.5, "letter"),
             (lambda q, k: torch.bmm(q, k), "raised RuntimeError"), (lambda q, k: print(end=""), "returns nothing"),
             (torch.zeros(2, 1, 3), "without parentheses")],
    "02.4": [(1_835_008_000, "query heads"), (229_376_000, "A factor of 2"), (114_688_000, "A factor of 4"),
             (917_504_000, "twice too much"), (57_344_000, "never shared"), (458_293_248, "1000 slots"), (458_752, "one slot"),
             (16_384_000, "one layer"), (3_584_000, "128 numbers"), (458.752, "megabytes"), (437.5, "MiB"),
             (0.458752, "gigabytes"), (0.4272461, "GiB"), (1, "read the sentence")],
    "02.5": [([0, 2, 3, 5], "stay right"), ([1, 2], "4 query heads"), ([1, 3, 5], "read KV head 1 when tiled"),
             ([3, 4, 5], "should read KV head 1"), ([2, 5], "from 0"), (range(6), "by luck"), ([], "shapes agree"),
             (2, "which"), ([0], "read the sentence")],
}


globals().update(exercise_tests("02", RIGHT, WRONG))


def test_no_two_wrong_answers_share_a_value():
    for name in ("02.1", "02.2", "02.4", "02.5"):
        wrong = [str(value) for value, _ in EXERCISES[name].slips]
        assert len(wrong) == len(set(wrong)), name


def test_what_the_sliders_show():
    names = {}
    for start in ("def kv_bytes_per_token", "def step_bytes"):
        cell = next(cell.source for cell in CELLS if cell.source.startswith(start))
        exec("".join(ast.unparse(node) + "\n" for node in ast.parse(cell).body if isinstance(node, ast.FunctionDef)), names)
    weights = 8_030_261_248 - 128_256 * 4096                # Llama-3-8B's parameters less its embedding table
    assert names["step_bytes"](1, 0, 8) == (2 * weights, 131_072)
    assert names["step_bytes"](10, 99, 8) == (2 * weights, 10 * 100 * 131_072)
    more = 32 * 2 * 4096 * 128 * 24                         # wider k_proj and v_proj for 32 KV heads
    assert names["step_bytes"](3, 7, 32) == (2 * (weights + more), 3 * 8 * 524_288)
    assert "KV 0.00 GB" not in names["in_words"](1, 500, 8) and "15.01 GB for all" in names["in_words"](64, 500, 8)
