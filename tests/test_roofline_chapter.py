"""Data sheets, shapes and limits of chapter 05, against first principles and a real model."""
import math
import subprocess
import sys
from dataclasses import replace

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
from helpers import random_model, small_config
from test_roofline import PUBLISHED

from qwen import figures, roofline
from qwen.cache import State
from qwen.model import Model
from qwen.roofline import HARDWARE, LLAMA_3_8B, Hardware, Shape, hybrid, step_cost, total
from qwen.weights import find_model

H100 = HARDWARE["H100 SXM"]
QWEN = hybrid("Qwen3.5-0.8B", PUBLISHED)
ROUND = Shape("a round 8 billion", 8 * 10 ** 9, 0, 8 * 10 ** 9, 2, 131_072, 0)


def test_the_table():
    ridges = {"H100 SXM": 295, "H200 SXM": 206, "B200": 292, "A100 SXM 80 GB": 153, "L4": 403, "T4": 203}
    assert {name: round(h.ridge) for name, h in HARDWARE.items()} == ridges
    assert all(name == h.name and h.dtype in ("bf16", "fp16") for name, h in HARDWARE.items())
    assert HARDWARE["T4"].dtype == "fp16"
    assert round(replace(HARDWARE["B200"], bandwidth=8.0e12).ridge) == 281


@pytest.mark.parametrize("change, found", [
    ({"peak": 989.4}, "peak is 989.4 FLOP/s.*TFLOPS is 1e12 FLOP/s, dense"), ({"bandwidth": 3.35}, "bandwidth is 3.35 bytes/s.*TB/s is 1e12"),
    ({"capacity": 80}, "capacity is 80 bytes.*GB is 1e9"), ({"peak": -1e12}, "peak is -1"), ({"bandwidth": 0}, "bandwidth is 0"),
    ({"bandwidth": 3350}, "bandwidth is 3350"), ({"peak": math.nan}, "peak is nan"), ({"capacity": math.inf}, "capacity is inf"),
    ({"peak": "989 TFLOPS"}, "peak is '989 TFLOPS'"), ({"capacity": True}, "capacity is True"),
])
def test_wrong_units_and_impossible_values_are_refused(change, found):
    with pytest.raises(ValueError, match=found):
        Hardware(**{"name": "a card", "dtype": "bf16", "peak": 1e14, "bandwidth": 1e12, "capacity": 1e11, **change})


def test_llama_from_first_principles():
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    assert LLAMA_3_8B.projections == 32 * layer and LLAMA_3_8B.head == 128_256 * 4096
    assert LLAMA_3_8B.parameters == 8_030_261_248           # as published
    assert (LLAMA_3_8B.kv_bytes, LLAMA_3_8B.fixed_bytes) == (131_072, 0)
    assert LLAMA_3_8B.attention_flops / LLAMA_3_8B.kv_bytes == 4    # query heads that share a KV head, in bf16
    one, many = LLAMA_3_8B.step(1, 99), LLAMA_3_8B.step(10, 99)
    weights = 2 * (LLAMA_3_8B.projections + LLAMA_3_8B.head)
    assert (one.bytes, many.bytes) == (weights + 100 * 131_072, weights + 1000 * 131_072)
    assert many.flops == 10 * one.flops == 10 * (weights + 100 * 4 * 32 * 32 * 128)


def test_the_hybrid_in_memory():
    """Case 25, and affine in tokens."""
    assert QWEN.parameters == 752_393_024
    assert (QWEN.kv_bytes, QWEN.recurrent_bytes, QWEN.window_bytes) == (12_288, 18 * 2 ** 20, 663_552)
    assert QWEN.row_bytes(0) == QWEN.fixed_bytes == 18 * 2 ** 20 + 663_552
    assert QWEN.row_bytes(1000) - QWEN.row_bytes(0) == 1000 * 12_288


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1, "linear_num_value_heads": 2, "head_dim": 24},
                                     {"tie_word_embeddings": False}])
def test_a_shape_is_a_real_model(changes):
    assert_a_real_state_has_these_bytes(random_model(**changes), hybrid("real", small_config(**changes), element_bytes=4))


def test_a_shape_is_the_shipped_model():
    model = Model.from_pretrained(find_model())
    assert_a_real_state_has_these_bytes(model, hybrid("shipped", model.config, element_bytes=4))


def assert_a_real_state_has_these_bytes(model, paper):
    rows, tokens = 3, 8
    assert paper.parameters == sum(p.numel() for p in model.parameters())
    assert paper.weight_bytes == sum(p.nbytes for p in model.parameters())
    state = State(model, rows, max_len=tokens)              # + 1 spare slot in each row
    kv = sum(cache[:, :, :tokens].nbytes for kind in (state.k, state.v) for cache in kind.values())
    conv, recurrent = (sum(t.nbytes for t in kind.values()) for kind in (state.conv, state.recurrent))
    assert (kv, conv, recurrent) == (rows * tokens * paper.kv_bytes, rows * paper.window_bytes, rows * paper.recurrent_bytes)
    assert conv + recurrent == rows * paper.fixed_bytes
    assert kv + conv + recurrent == rows * paper.row_bytes(tokens)


def test_an_untied_head_takes_memory_and_no_time():
    tied, untied = (hybrid("", small_config(tie_word_embeddings=tie)) for tie in (True, False))
    assert untied.weight_bytes - tied.weight_bytes == 64 * 32 * 2 and untied.step(2, 5) == tied.step(2, 5)


def test_the_round_8_billion():
    """Errata 11 and 12: the bound, with the weights alone."""
    assert roofline.step_seconds(ROUND, H100, 1, 0) == pytest.approx(4.776e-3, rel=1e-3)
    assert round(64 * 3.35e12 / 16e9, -2) == 13_400
    assert roofline.step_seconds(ROUND, H100, 1, 0, 2000) == pytest.approx(2000 * 16e9 / 989.4e12)
    assert roofline.step_seconds(ROUND, H100, 1, 0, 10) == pytest.approx((16e9 + 10 * 131_072) / 3.35e12)


@pytest.mark.parametrize("batch, context, tokens", [(1, 0, 1), (3, 7, 1), (64, 1000, 1), (2, 0, 33), (2, 5, 4)])
def test_a_step_is_the_sum_of_its_parts(batch, context, tokens):
    assert QWEN.step(batch, context, tokens) == total(step_cost(PUBLISHED, batch, context, tokens, element_bytes=2))


def test_what_binds_a_step():
    assert roofline.bound_by(LLAMA_3_8B, H100, 1, 1000) == "weights"
    assert roofline.bound_by(LLAMA_3_8B, H100, 64, 4000) == "caches"
    assert roofline.bound_by(LLAMA_3_8B, H100, 1024, 64) == "arithmetic"
    assert roofline.bound_by(LLAMA_3_8B, H100, 10 ** 9, 400) == "caches"    # beyond about 393 tokens the ridge is out of reach
    assert roofline.bound_by(LLAMA_3_8B, H100, 10 ** 9, 380) == "arithmetic"


def test_prefill_is_bound_by_arithmetic():
    prompt = LLAMA_3_8B.step(1, 0, 1000)
    assert roofline.intensity(prompt) > H100.ridge > 1.1 > roofline.intensity(LLAMA_3_8B.step(1, 1000))
    assert roofline.step_seconds(LLAMA_3_8B, H100, 1, 0, 1000) == prompt.flops / H100.peak


@pytest.mark.parametrize("model", [LLAMA_3_8B, QWEN])
@pytest.mark.parametrize("context", [1, 500, 8000])
@pytest.mark.parametrize("promise", [0.005, 0.010, 0.1])
def test_one_row_more_breaks_a_limit(model, context, promise):
    memory, time = roofline.rows_in_memory(model, H100, context), roofline.rows_in_time(model, H100, context, promise)
    need = [model.weight_bytes + n * model.row_bytes(context) for n in (memory, memory + 1)]
    assert need[0] <= H100.capacity < need[1]
    assert roofline.step_seconds(model, H100, time + 1, context) > promise >= roofline.step_seconds(model, H100, max(1, time), context)
    batch, binds = roofline.largest_batch(model, H100, context, promise)
    assert batch == min(memory, time) and binds == ("memory" if memory <= time else "time")


def test_limits_that_nobody_meets():
    small = replace(HARDWARE["T4"], capacity=10e9)
    assert roofline.rows_in_memory(LLAMA_3_8B, small, 10) == 0
    assert roofline.rows_in_time(LLAMA_3_8B, H100, 10, 0.001) == 0
    assert roofline.largest_batch(LLAMA_3_8B, small, 10, 0.1) == (0, "memory")
    assert roofline.rows_in_memory(ROUND, replace(H100, capacity=17e9), 10, usable=0.9) == 0
    assert roofline.tokens_in_memory(ROUND, replace(H100, capacity=17e9), usable=0.9) == 0
    assert roofline.tokens_in_memory(ROUND, H100, usable=0.9) == int(56e9 / 131_072)
    assert roofline.rows_in_memory(LLAMA_3_8B, H100, 1000, usable=0.9) == int((72e9 - 2 * 8_030_261_248) // 131_072_000)


@pytest.mark.parametrize("call, found", [
    (lambda: roofline.rows_in_time(LLAMA_3_8B, H100, 10, 50), "promise is 50 seconds.*50 ms are 0.05"),
    (lambda: roofline.rows_in_memory(LLAMA_3_8B, H100, 10, 90), r"usable is 90, expected a share .* \(70 % is 0.7\)"),
    (lambda: roofline.tokens_in_memory(LLAMA_3_8B, H100, 0), "usable is 0, expected a share above 0"),
    (lambda: roofline.tokens_in_memory(replace(LLAMA_3_8B, kv_bytes=0), H100), "kv_bytes is 0, expected"),
    (lambda: replace(LLAMA_3_8B, parameters=0), "parameters is 0, expected a whole number of at least 1"),
    (lambda: replace(LLAMA_3_8B, kv_bytes=-1), "kv_bytes is -1"), (lambda: replace(LLAMA_3_8B, head=1.5), "head is 1.5"),
    (lambda: roofline.step_seconds(LLAMA_3_8B, H100, 0, 10), "batch is 0"),
    (lambda: roofline.step_seconds(LLAMA_3_8B, H100, 1, 10.5), "context is 10.5"),
    (lambda: roofline.dense("x", 8, 8, 0, 1, 1, 8, 8), "layers is 0"),
    (lambda: LLAMA_3_8B.step(1, 1, 0), "tokens is 0"), (lambda: LLAMA_3_8B.row_bytes(-1), "tokens is -1"),
])
def test_impossible_questions_are_refused(call, found):
    with pytest.raises(ValueError, match=found):
        call()


def test_the_explorer():
    figures.setup()
    words = roofline.report(LLAMA_3_8B, H100, 64, 1000)
    assert "24.4 of 80 GB" in words and "9,160 for all" in words and words.endswith("most time: weights")
    html, other = (figures.explorer(LLAMA_3_8B, H100, batch, 1000) for batch in (64, 128))
    assert words in html and html.count("<svg") == 1 and html != other
    assert "out of memory" in roofline.report(LLAMA_3_8B, H100, 512, 8000)
    assert "at most 60 rows" in figures.explorer(LLAMA_3_8B, H100, 512, 8000)
    assert not plt.get_fignums()


def test_pictures_show_what_they_are_given():
    figures.setup()
    _, (left, right) = plt.subplots(1, 2)
    figures.roofline(left, H100, [("one", 1, 3.35e12, "predicted"), ("_no", 2, 6e12, "measured")], ghost=("sparse", 1979e12))
    roof = left.lines[0].get_xydata()
    assert roof[1].tolist() == [H100.ridge, H100.peak] and roof[0][1] == pytest.approx(roof[0][0] * H100.bandwidth)
    assert [text.get_text() for text in left.texts] == ["roof: ridge 295", "sparse: ridge 591", "one"]
    figures.regions(right, [1, 2], [64], [["weights", "out of memory"]])
    assert [text.get_text() for text in right.texts][:2] == ["W", "×"]
    plt.close("all")


def test_it_still_needs_no_torch():
    code = "import qwen.roofline as r, sys; r.report(r.LLAMA_3_8B, r.HARDWARE['L4'], 1, 1); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
