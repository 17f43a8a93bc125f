"""From logits to a token: order of the settings, their edges, their errors."""
from collections import Counter

import pytest
import torch

from qwen.sample import sample

LOGITS = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()


def draws(logits, number=400, **settings) -> Counter:
    rng = torch.Generator().manual_seed(0)
    return Counter(sample(logits, generator=rng, **settings) for _ in range(number))


def test_temperature_zero_is_argmax():
    """Case 17; the first of equals, without a generator, whatever top_k and top_p say."""
    assert sample(torch.tensor([1.0, 3.0, 2.0])) == 1
    assert sample(torch.tensor([1.0, 3.0, 3.0]), top_k=1, top_p=0.0) == 1
    assert type(sample(torch.tensor([1.0, 3.0]))) is int


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-310])
def test_small_temperatures_do_not_overflow(temperature):
    """Case 17."""
    assert draws(torch.tensor([-50.0, 80.0, 79.0]), 20, temperature=temperature) == {1: 20}


def test_large_temperature_flattens():
    assert all(70 < count < 130 for count in draws(LOGITS, temperature=1e6).values())


def test_draws_follow_the_probabilities():
    counts = draws(LOGITS, 4000, temperature=1.0)
    for token, expected in enumerate([2000, 1200, 400, 400]):
        assert abs(counts[token] - expected) < 5 * expected ** 0.5
    hot = draws(LOGITS, 4000, temperature=0.5)               # squares: .25 .09 .01 .01 of .36
    assert abs(hot[0] - 4000 * 0.25 / 0.36) < 5 * 2778 ** 0.5


@pytest.mark.parametrize("top_p, kept", [(0.0, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.85, 3), (0.95, 4), (1.0, 4)])
def test_top_p(top_p, kept):
    """Case 17: the fewest that reach it, at least one (0.8 would be a rounding boundary)."""
    order = torch.tensor([2, 0, 3, 1])
    assert set(draws(LOGITS[order], temperature=1.0, top_p=top_p)) == set(order.argsort()[:kept].tolist())


@pytest.mark.parametrize("top_k, kept", [(0, 4), (1, 1), (2, 2), (4, 4), (5, 4), (10**6, 4)])
def test_top_k(top_k, kept):
    """Case 17: 0 is off, more than the vocabulary is all of it."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert set(draws(logits, temperature=1.0, top_k=top_k)) == set(logits.argsort(descending=True)[:kept].tolist())


def test_top_k_comes_before_top_p():
    """Of .5 .3 .1 .1, top_k 2 leaves .625 .375: top_p 0.6 then keeps one; the other way round it would keep two."""
    assert set(draws(LOGITS, temperature=1.0, top_k=2, top_p=0.6)) == {0}
    assert set(draws(LOGITS, temperature=1.0, top_p=0.6)) == {0, 1}


def test_temperature_comes_before_top_p():
    """At temperature 0.5 the best has .69: top_p 0.6 keeps it alone."""
    assert set(draws(LOGITS, temperature=0.5, top_p=0.6)) == {0}


@pytest.mark.parametrize("penalty, token", [(1.0, 0), (1.9, 0), (2.1, 1), (0.5, 0)])
def test_repetition_penalty(penalty, token):
    """Scores above zero are divided, below multiplied; how often a token came makes no difference."""
    logits = torch.tensor([2.0, 1.0, -3.0])
    assert sample(logits, [0], repetition_penalty=penalty) == token
    assert sample(logits, [0, 0, 0], repetition_penalty=penalty) == token
    assert logits.tolist() == [2.0, 1.0, -3.0]              # the caller's logits are not written to


def test_repetition_penalty_counts_every_token_that_came():
    logits = torch.tensor([4.0, 3.0, 2.5, 2.0])
    assert [sample(logits, [2, 1, 0][n:], repetition_penalty=2.0) for n in range(4)] == [0, 2, 1, 0]
    assert sample(logits, [3, 2, 0, 1], repetition_penalty=1.2) == 0


def test_repetition_penalty_makes_negative_scores_smaller():
    assert sample(torch.tensor([-1.0, -1.5]), [0], repetition_penalty=2.0) == 1
    assert sample(torch.tensor([-1.0, -1.5]), [0], repetition_penalty=0.5) == 0
    assert sample(torch.tensor([float("-inf"), -1.5]), [0], repetition_penalty=2.0) == 1


def test_same_generator_same_tokens_whatever_the_dtype_of_the_caller():
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(500, generator=rng).bfloat16()
    assert draws(logits, 50, temperature=1.0) == draws(logits.float(), 50, temperature=1.0)


def test_a_draw_does_not_hang_on_the_order_of_near_ties():
    """A batch moves logits in the last digit. That may not change which random number a token gets:
    with the numbers dealt out by rank, two tokens that change ranks would change places in every draw."""
    rng = torch.Generator().manual_seed(6)
    logits = torch.randn(1000, generator=rng)
    logits[500] = logits[3]
    moved = logits.clone()
    logits[3] += 1e-6
    moved[500] += 1e-6
    for settings in (dict(), dict(top_k=900), dict(top_p=0.99)):
        first, second = logits[[3, 500]], moved[[3, 500]]
        pair = (torch.cat([first, logits[:5] - 9]), torch.cat([second, logits[:5] - 9]))
        for one, other in [(logits, moved), pair]:
            changed = sum(sample(one, temperature=1.0, generator=torch.Generator().manual_seed(seed), **settings)
                          != sample(other, temperature=1.0, generator=torch.Generator().manual_seed(seed), **settings)
                          for seed in range(100))
            assert changed == 0


BAD = {
    "temperature": [-1.0, float("nan"), float("inf")],
    "top_k": [-1, 1.5, True],
    "top_p": [-0.1, 1.1, float("nan")],
    "repetition_penalty": [0.0, -1.0, float("nan"), float("inf")],
}


@pytest.mark.parametrize("name, value", [(name, value) for name in BAD for value in BAD[name]])
def test_bad_settings(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        sample(LOGITS, **{name: value})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [
    [1.0, float("nan")], [float("-inf")] * 2, [1.0, float("inf")], [[1.0, 2.0]], [[1.0], [2.0]],
], ids=str)  # fmt: skip
def test_logits_that_are_no_numbers(logits, temperature):
    with pytest.raises(ValueError, match="logits"):
        sample(torch.tensor(logits), temperature=temperature)
