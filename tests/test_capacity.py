"""Capacity and cost: each formula again from first principles, and against tensors of the shipped model."""
import subprocess
import sys
from math import factorial, inf, nan

import pytest
import torch
from helpers import random_model, small_config
from test_roofline import PUBLISHED

from qwen import capacity, roofline
from qwen.cache import State
from qwen.capacity import Footprint
from qwen.model import Model
from qwen.weights import find_model

LLAMA = Footprint(weight_bytes=16 * 10 ** 9, token_bytes=131_072, token_flops=16 * 10 ** 9)
H100 = dict(bandwidth=3.35e12, peak=989.4e12)


def test_a_million_tokens():
    """Errata 2: counted second by second. Both popular values are an hour of 1,000 s."""
    for speed, right, wrong in ((50, 13.89, 50), (2000, 0.347, 1.25)):
        seconds = 1e6 / speed
        assert capacity.cost_per_million(2.5, speed) == pytest.approx(seconds * 2.5 / (60 * 60))
        assert capacity.cost_per_million(2.5, speed) == pytest.approx(right, rel=1e-3)
        assert capacity.cost_per_million(2.5, speed) * 3.6 == pytest.approx(wrong)


def test_the_load():
    """Errata 3 and 4."""
    assert capacity.gpu_seconds(100, 500, 3000) == pytest.approx(50_000 / 3000)
    assert round(capacity.gpu_seconds(100, 500, 3000), 1) == 16.7
    arrivals = 100 / 25                                     # Little: 100 present, each for 500 / 20 s
    assert capacity.in_system(arrivals, 25) == 100 and arrivals * 500 == 100 * 20 == 2000
    assert capacity.gpus_for_rate(2000, 3000) == 1
    assert capacity.gpus_for_rate(2000, 3000, 0.66) == 2
    work = capacity.gpu_seconds(200, 800, 2500, utilisation=0.7)
    assert 91 < work < 92 and capacity.gpus_for_work(work, 60) == 2 and capacity.gpus_for_work(work, 92) == 1


def test_a_gpu_that_is_just_enough_is_one():
    assert capacity.gpus_for_rate(2100, 3000, 0.7) == 1
    assert all(capacity.gpus_for_rate(n * 0.1 * 3, 0.1 * 3, 1) == n for n in range(1, 200))
    assert capacity.gpus_for_work(120, 60) == 2


def test_useful_and_computed():
    """Case 26."""
    assert capacity.useful([3, 50]) == (53, 100)
    assert capacity.useful([7]) == (7, 7) and capacity.useful([]) == (0, 0)


def test_units():
    """Case 26: GB and GiB, and the peak with and without sparsity."""
    assert capacity.to_bytes(80, "GB") == 80_000_000_000 and capacity.to_bytes(80, "GiB") == 85_899_345_920
    assert capacity.to_bytes(81_559, "MiB") == pytest.approx(85.5e9, rel=1e-3)
    assert round(989.4 / 3.35) == 295 and round(1979 / 3.0) == 660 and round(1979 / 2 / 3.35) == 295


@pytest.mark.parametrize("servers, offered", [(1, 0.5), (2, 1.5), (5, 4.9), (20, 12.3)])
def test_erlang_c_by_its_definition(servers, offered):
    """The stationary distribution of M/M/c written out: p_n ~ a^n / n! up to c, geometric from there on."""
    below = [offered ** n / factorial(n) for n in range(servers)]
    tail = offered ** servers / factorial(servers) / (1 - offered / servers)
    assert capacity.erlang_c(servers, offered) == pytest.approx(tail / (sum(below) + tail))


def test_one_server_waits_as_the_textbook_says():
    assert capacity.erlang_c(1, 0.8) == pytest.approx(0.8)
    assert capacity.mean_wait(0.8, 1, 1) == pytest.approx(0.8 / 0.2)


def test_erlang_c_with_many_servers_does_not_overflow():
    assert 0 < capacity.erlang_c(2000, 1950) < 1


def test_little_holds_of_the_formula_and_the_simulation_agrees():
    """Waiting by formula against a seeded run of the queue."""
    rng = torch.Generator().manual_seed(0)
    n, rate, service, servers = 60_000, 3.0, 1.0, 4

    def draws():
        return torch.empty(n, dtype=torch.float64).exponential_(1, generator=rng)

    arrivals = (draws() / rate).cumsum(0).tolist()
    services = (draws() * service).tolist()
    queued = capacity.waits(arrivals, services, servers)
    assert sum(w > 0 for w in queued) / n == pytest.approx(capacity.erlang_c(servers, rate * service), abs=0.03)
    assert sum(queued) / n == pytest.approx(capacity.mean_wait(rate, service, servers), rel=0.1)


def test_waits_by_hand():
    assert capacity.waits([0, 1, 2, 3], [5, 5, 1, 1], 2) == [0, 0, 3, 3]
    assert capacity.waits([0, 0, 10], [4, 2, 1], 1) == [0, 4, 0]
    assert capacity.waits([], [], 3) == []


def test_goodput_counts_who_got_both():
    assert capacity.goodput([0.1, 0.1, 9, 0.5], [0.02, 0.2, 0.02, 0.05], 2, 0.5, 0.05) == 1
    assert capacity.end_to_end(0.5, 0.02, 1) == 0.5 and capacity.end_to_end(0.5, 0.02, 500) == pytest.approx(0.5 + 499 * 0.02)


def test_published_bytes():
    """Case 25 and the fixed part."""
    assert capacity.kv_bytes_per_token(6, 2, 256) == 12_288 == capacity.footprint(PUBLISHED).token_bytes
    assert capacity.kv_bytes_per_token(6, 2, 1024 // 8) == 6_144
    assert capacity.kv_bytes_per_token(6, 8, 256) == 49_152 == capacity.kv_bytes_per_token(24, 2, 256)
    assert capacity.kv_bytes_per_token(32, 8, 128) == 131_072
    assert capacity.conv_bytes(PUBLISHED) == 663_552
    assert capacity.footprint(PUBLISHED).fixed_bytes == 18 * 2 ** 20 + 663_552


def assert_a_real_state_has_these_bytes(model):
    config, rows, tokens = model.config, 3, 11
    state = State(model, rows, max_len=tokens)              # + 1 spare slot in each row
    row = capacity.footprint(config, element_bytes=4)
    kv = sum(c[:, :, :tokens].nbytes for cache in (state.k, state.v) for c in cache.values())
    fixed = sum(t.nbytes for cache in (state.conv, state.recurrent) for t in cache.values())
    assert kv == rows * tokens * row.token_bytes
    assert sum(t.nbytes for t in state.conv.values()) == rows * capacity.conv_bytes(config, 4)
    assert fixed == rows * row.fixed_bytes
    assert kv + fixed == rows * row.row_bytes(tokens)
    matrices = sum(w.nbytes for w in model.parameters() if w.dim() == 2)
    assert row.weight_bytes == matrices


def test_bytes_of_the_shipped_model():
    assert_a_real_state_has_these_bytes(Model.from_pretrained(find_model()))


def test_bytes_of_another_shape():
    assert_a_real_state_has_these_bytes(random_model(num_key_value_heads=1, head_dim=24, linear_num_value_heads=2))


def test_an_untied_head_is_counted():
    tied, untied = (capacity.footprint(small_config(tie_word_embeddings=tie)) for tie in (True, False))
    assert untied.weight_bytes - tied.weight_bytes == 64 * 32 * 2 and untied.token_flops == tied.token_flops


def test_step_time_is_the_rooflines():
    """The two files count the same step, windows apart, which the roofline leaves out."""
    parts = roofline.step_cost(PUBLISHED, 16, context=499, element_bytes=2)
    ours = capacity.decode_seconds(capacity.footprint(PUBLISHED), 16, 500, **H100)
    assert ours == pytest.approx(roofline.total(parts).seconds(**H100)[0], rel=0.02)
    assert capacity.decode_seconds(LLAMA, 1, 0, **H100) == pytest.approx(4.776e-3, rel=1e-3)
    assert round(64 / capacity.decode_seconds(LLAMA, 64, 0, **H100), -2) == 13_400


@pytest.mark.parametrize("tokens, limit", [(2000, 0.02), (2000, 0.05), (100, 0.03), (8000, 0.0101)])
@pytest.mark.parametrize("model", [LLAMA, capacity.footprint(PUBLISHED)])
def test_the_largest_batches_by_trying(model, tokens, limit):
    memory = 80e9
    by_memory = next(b for b in range(10 ** 6) if model.weight_bytes + (b + 1) * model.row_bytes(tokens) > 0.9 * memory)
    by_latency = next(b for b in range(10 ** 6) if capacity.decode_seconds(model, b + 1, tokens, **H100) > limit)
    assert capacity.batch_by_memory(model, tokens, memory) == by_memory
    assert capacity.batch_by_latency(model, tokens, limit, **H100) == by_latency
    assert capacity.largest_batch(model, tokens, memory, limit, **H100) == (
        (by_memory, "memory") if by_memory <= by_latency else (by_latency, "latency"))


def test_tokens_and_blocks():
    assert capacity.kv_tokens(LLAMA, 80e9) == int(56e9 / 131_072)
    assert [capacity.blocks(n, 8) for n in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]
    assert capacity.prefill_seconds(LLAMA, 2000, **H100) == pytest.approx(2000 * 16e9 / 989.4e12)
    assert capacity.prefill_seconds(LLAMA, 10, **H100) == pytest.approx(16e9 / 3.35e12)
    assert capacity.batch_by_latency(LLAMA, 10, 0.004, **H100) == 0


@pytest.mark.parametrize("call, found", [
    (lambda: capacity.cost_per_million(2.5, 0), "tokens_per_second is 0 tokens/s, expected a number above 0"),
    (lambda: capacity.cost_per_million(-1, 5), "dollars_per_hour is -1"),
    (lambda: capacity.cost_per_million(nan, 5), "dollars_per_hour is nan"),
    (lambda: capacity.cost_per_million("2.5", 5), "dollars_per_hour is '2.5'"),
    (lambda: capacity.cost_per_million(2.5, True), "tokens_per_second is True"),
    (lambda: capacity.gpu_seconds(100.5, 500, 3000), "requests is 100.5, expected a whole number"),
    (lambda: capacity.gpus_for_rate(2000, 3000, 70), r"utilisation is 70, expected a share above 0 and up to 1 \(70 % is 0.7\)"),
    (lambda: capacity.gpus_for_rate(inf, 3000), "demand is inf"),
    (lambda: capacity.erlang_c(2, 2.5), "2.5 servers' work is offered to 2"),
    (lambda: capacity.to_bytes(80, "gb"), "the unit is 'gb', expected one of B, KB"),
    (lambda: capacity.decode_seconds(LLAMA, 1, 0, 3.35, 989.4e12), r"bandwidth is 3.35 bytes/s, .* \(1 TB/s is 1e12"),
    (lambda: capacity.decode_seconds(LLAMA, 1, 0, 3.35e12, 989.4), r"peak is 989.4 FLOP/s, .*dense"),
    (lambda: capacity.batch_by_memory(LLAMA, 10, 80), r"memory_bytes is 80 bytes, .* \(1 GB is 1e9"),
    (lambda: capacity.batch_by_memory(LLAMA, 10, 17e9), "the weights take 16.00 GB and the engine may use 15.30 GB"),
    (lambda: capacity.batch_by_memory(LLAMA, 10, 80e9, 90), "share is 90"),
    (lambda: capacity.waits([1], [1, 2], 1), "1 arrivals and 2 services"),
    (lambda: capacity.goodput([1], [], 1, 1, 1), "1 first-token times and 0 token times"),
    (lambda: capacity.useful([3, 0]), "the length of row 1 is 0"),
    (lambda: capacity.blocks(0), "tokens is 0"),
    (lambda: Footprint(0, 1), "weight_bytes is 0"),
])
def test_what_is_refused(call, found):
    with pytest.raises(ValueError, match=found) as error:
        call()
    assert "\n" not in str(error.value)


def test_it_needs_no_torch():
    code = "import qwen.capacity, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
