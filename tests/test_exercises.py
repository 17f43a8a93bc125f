"""`check` answers in one line whatever it is given; chapter 01's exercises tell right from each tempting wrong answer."""
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from qwen.exercises import check, same
from qwen.exercises.ch01 import EXERCISES

SOURCE = Path(__file__).resolve().parent.parent / "notebooks" / "source" / "01_one_weight_matrix.py"


def ask(capsys, name, answer):
    """(what check returned, the one line it printed)"""
    result = check(name, answer)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and printed.endswith("\n")
    return result, printed


class Hostile:
    """An answer on which everything fails."""

    def fail(self, *_):
        raise RuntimeError("no\nno")

    __eq__ = __len__ = __iter__ = __float__ = __repr__ = __bool__ = __call__ = tolist = fail


def leave(*_):
    raise SystemExit(1)


NESTED = []
NESTED.append(NESTED)
STRANGE = [
    None, True, float("nan"), float("inf"), -1, 2 ** 2000, 1j, Fraction(7, 3), "", "33\n33", b"3", [], [[]], [[1, 1], [1]],
    [float("nan")] * 2, {}, {1: 2}, {9}, {1, "a"}, NESTED, object(), Hostile(), Hostile, int, leave, lambda: 1, lambda *_: 1 / 0,
    lambda *_: Hostile(), lambda *_: None, np.zeros(0), np.array(["x"]), np.array([None]), np.float32("nan"),
    torch.zeros(0, 3), torch.zeros(2, 2, requires_grad=True), torch.eye(2).to_sparse(), torch.zeros(2, device="meta"),
]  # fmt: skip


@pytest.mark.parametrize("name", EXERCISES)
@pytest.mark.parametrize("number", range(len(STRANGE)))
def test_any_answer_gets_one_line_and_no_exception(capsys, name, number):
    result, printed = ask(capsys, name, STRANGE[number])
    assert result is False and printed.startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["01.9", "99.1", "ch01", "", "1", "01.1\n", "../x", 1.1, None, [], Hostile()])
def test_a_name_without_exercise(capsys, name):
    result, printed = ask(capsys, name, 1)
    assert result is False and "there is no exercise of this name" in printed


@pytest.mark.parametrize("name", EXERCISES)
def test_untouched(capsys, name):
    result, printed = ask(capsys, name, ...)
    assert result is False and "not answered yet" in printed


def test_an_untouched_function(capsys):
    for untouched in (lambda users, steps, d, batched: ..., lambda users, steps, d, batched: None):
        result, printed = ask(capsys, "01.3", untouched)
        assert result is False and "not answered yet" in printed


def dots(users, steps, d, batched):
    """A docstring."""
    ...


def dots_in_a_name(users, steps, d, batched):
    trips = ...
    return trips


def printing(users, steps, d, batched):
    print(users * steps * d * d * 2, end="")


def forgetting(users, steps, d, batched):
    trips = steps if batched else steps * users
    trips * d * d * 2


def test_a_function_without_return_is_told_so_but_a_stub_is_not(capsys):
    for untouched in (dots, dots_in_a_name):
        assert "not answered yet" in ask(capsys, "01.3", untouched)[1]
    for answer in (printing, forgetting):
        result, printed = ask(capsys, "01.3", answer)
        assert result is False and "`return`" in printed


def test_same():
    assert same(3, 3.0) and same(np.int64(3), 3) and same(torch.tensor([3.0]), 3) and same(Fraction(3), 3)
    assert same(torch.tensor([[1.0, 1.0]]), [1, 1]) and same(((1, 1),), [1, 1]) and same([np.float32(1), 1], [1, 1])
    assert same(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), [1, 2]) and same(" Paris ", "paris")
    assert not same(True, 1) and not same([1, 1], [[1, 1]]) and not same([1], [1, 1]) and not same("1", 1)
    assert same({3, 1}, {1, 3}) and same([3, 1], {1, 3}) and same(set(), set()) and same([], set())
    assert not same({1, 3}, [1, 3]) and not same([{1, 3}], [1, 3]) and not same(1, {1}) and not same([1, 1], {1})
    assert not same(float("nan"), float("nan")) and not same([1, 2], [2, 1]) and not same([], 0)


def loop(users, steps, d, batched):
    total = 0.0
    for _ in range(steps):
        for _ in range(1 if batched else users):
            total += 2.0 * d ** 2
    return total


RIGHT = {
    "01.1": [[2, 3], (2.0, 3.0), np.array([2, 3]), torch.tensor([[2.0, 3.0]]), [np.float32(2), torch.tensor(3)]],
    "01.2": [7_340_032, 7_340_032.0, np.int64(7_340_032), torch.tensor(7_340_032), [7_340_032]],
    "01.3": [loop, lambda users, steps, d, batched: np.int64(steps * 2 * d * d) * (1 if batched else users),
             lambda users, steps, d, batched: torch.tensor(steps * 2 * d * d * [users, 1][batched])],
    "01.4": [[2], (2,), {2}, range(2, 3), np.array([2]), torch.tensor([2]), torch.tensor([[2]])],
    "01.5": [3, 3.0, np.int8(3), torch.tensor(3)],
}  # fmt: skip
WRONG = {
    "01.1": [([3, 1], "on the left"), ([[3], [1]], "on the left"), (torch.tensor([2, 1]), "x_C itself"),
             ([[2, 2], [0, 1]], "add them up"), ([3, 2], "order"), ({3, 2}, "no order"),
             ([2, 0], "add them up"), ([2, 2], "row 1"), ([2, 4], "read the sentence"), (5, "read the sentence")],
    "01.2": [(88_080_384, "share one"), (7_340_032 / 12, "one user's share"), (3_670_016, "counted weights"),
             (14_680_064, "fp32"), (7168, "one row"), (2048, "one column"), (44_040_192, "Two slips"),
             (176_160_768, "Two slips"), (7, "MiB"), (7.34, "megabytes"), (2_097_152, "not square"), (25_690_112, "not square"),
             (7_364_608, "the weights alone"), (7_450_624, "the weights alone"), (1, "read the sentence")],
    "01.3": [(lambda users, steps, d, batched: 2 * d * d * (1 if batched else users), "do not stay"),
             (lambda users, steps, d, batched: loop(users, steps - 1, d, batched), "take none off"),
             (lambda users, steps, d, batched: loop(users, steps + 1, d, batched), "prefill"),
             (lambda users, steps, d, batched: 2 * d * d * steps * (users if batched else 1), "exchanged"),
             (lambda users, steps, d, batched: 2 * d * d * steps, "Without a batch"),
             (lambda users, steps, d, batched: 2 * d * d * steps * users, "users share the trip"),
             (lambda users, steps, d, batched: loop(users, steps, d, batched) / 2, "number of weights"),
             (lambda users, steps, d, batched: loop(users, steps, d, batched) * 2, "not 4"),
             (lambda users, steps, d, batched: loop(users, steps, d, batched) / d, "d * d"),
             (lambda users, steps, d, batched: 7, "does not return 160"),
             (lambda users, steps: 7, "raised TypeError"),
             (160, "without parentheses")],
    "01.4": [([0, 1, 2, 3], "its own row"), (range(4), "its own row"), (2, "as a list"), (3, "count from 0"), (1, "which"),
             ({2, 3}, "Later rows"), ([3, 2], "Later rows"), ([7], "read the sentence"), ([2, 3], "Later rows"),
             ([0, 1, 2], "Earlier rows"), ([3], "count from 0"), ([1], "count from 0"), ([0, 1, 3], "stay the same"),
             ([], "One row does")],
    "01.5": [(8, "for each token"), (4, "not fed back"), (7, "beforehand"), (1, "second and third"), (2, "prefill out"),
             (5, "share one trip"), (0, "read the sentence")],
}  # fmt: skip


@pytest.mark.parametrize("name", EXERCISES)
def test_right_answers_in_several_forms(capsys, name):
    for answer in RIGHT[name]:
        assert ask(capsys, name, answer) == (True, f"{name}: right.\n")


@pytest.mark.parametrize("name", EXERCISES)
def test_tempting_wrong_answers_are_told_their_slip(capsys, name):
    for answer, hint in WRONG[name]:
        result, printed = ask(capsys, name, answer)
        assert result is False and hint in printed and printed.startswith(f"{name}: "), (answer, printed)


def test_the_folded_solutions_are_right(capsys):
    text = SOURCE.read_text(encoding="utf-8")
    solutions = re.findall(r"^# ```python\n((?:#.*\n)+?)# ```\n# </details>\n\n# %%\n(?:.*\n)+?_ = check\((.*), (\w+)\)", text, re.M)
    assert [eval(name) for _, name, _ in solutions] == sorted(EXERCISES)
    for solution, name, variable in solutions:
        names = {}
        exec(re.sub(r"^# ?", "", solution, flags=re.M), names)
        assert ask(capsys, eval(name), names[variable])[0]
