"""Money, load, queues and what a user sees: each formula again from first principles."""
import subprocess
import sys
from math import factorial, inf, nan

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
import torch

from qwen import capacity, figures


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


def test_blocks():
    assert [capacity.blocks(n, 8) for n in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]


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
    (lambda: capacity.waits([1], [1, 2], 1), "1 arrivals and 2 services"),
    (lambda: capacity.goodput([1], [], 1, 1, 1), "1 first-token times and 0 token times"),
    (lambda: capacity.useful([3, 0]), "the length of row 1 is 0"),
    (lambda: capacity.blocks(0), "tokens is 0"),
    (lambda: capacity.blocks(10, 2.5), "block_size is 2.5, expected a whole number of at least 1"),
    (lambda: capacity.in_system(0, 25), "per_second is 0 1/s, expected a number above 0"),
    (lambda: capacity.end_to_end(0.5, -0.02, 500), "per_token is -0.02 s, expected"),
])
def test_what_is_refused(call, found):
    with pytest.raises(ValueError, match=found) as error:
        call()
    assert "\n" not in str(error.value)


def test_it_needs_no_torch():
    code = "import qwen.capacity, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_picture_has_boxes_of_one_area():
    figure, alt = figures.work_and_windows()
    areas = [patch.get_width() * patch.get_height() for patch in figure.axes[0].patches]
    assert areas == pytest.approx(3 * [200 * 800 / 2500 / 0.7])
    assert "60 seconds wide and 1.52 GPUs high, 2 rented" in alt and "10 seconds wide and 9.14 GPUs high, 10 rented" in alt
    plt.close(figure)
