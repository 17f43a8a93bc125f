"""`check("01.1", answer)`: is an exercise's answer right, and if not, which slip does it show?

A chapter's exercises stand in `chNN.py` as `EXERCISES = {"NN.1": judge, ...}`. A judge is a function
that takes the answer and returns "" when it is right, else a hint, or UNTOUCHED; `Value` and `Function` make one.
"""
import dis
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from math import isclose
from numbers import Real
from re import fullmatch

UNTOUCHED = "not answered yet; put your answer in place of the dots and run the cell again."
OTHER = "That is not it; read the sentence above the cell once more, or unfold the solution."


def check(name: str, answer) -> bool:
    """Print one line about the answer to exercise `name`, such as "01.1", and return whether it is right.

    Never raises: an answer of any type, one that cannot be compared, or a function that fails gets a line too.
    """
    judge = _find(name)
    if judge is None:
        print("check: there is no exercise of this name; names look like '01.1'.")
        return False
    try:
        hint = UNTOUCHED if answer is ... or _stub(answer) else judge(answer)
    except (Exception, SystemExit) as error:
        hint = f"The check stopped with {type(error).__name__}; is the answer of the kind that was asked for?"
    verdict = "right." if not hint else hint if hint is UNTOUCHED else f"not yet. {' '.join(hint.split())}"
    print(f"{name}: {verdict}")
    return not hint


def _find(name):
    if not isinstance(name, str) or not fullmatch(r"\d\d\.\d+", name):
        return None
    try:
        return import_module(f"qwen.exercises.ch{name[:2]}").EXERCISES.get(name)
    except ModuleNotFoundError:
        return None


def _stub(function) -> bool:
    """Is its body nothing but dots, `pass` or a docstring? (It loads None and returns it, and does nothing else.)"""
    code = getattr(function, "__code__", None)
    steps = [] if code is None else [i for i in dis.get_instructions(code) if i.opname not in ("RESUME", "NOP", "CACHE")]
    nothing = ("LOAD_CONST", "RETURN_VALUE", "RETURN_CONST")
    return bool(steps) and all(i.opname in nothing and i.argval is None for i in steps)


def plain(x):
    """Tensors, arrays, tuples and ranges as nested lists of Python numbers; anything else as it is."""
    if hasattr(x, "tolist"):
        return x.tolist()
    return [plain(item) for item in x] if isinstance(x, (list, tuple, range)) else x


def same(answer, right) -> bool:
    """Equal as nested lists of numbers (1 and 1.0 are equal, True and 1 are not), text without regard to case.

    Brackets too many around the answer are forgiven: a row [[1, 1]] is the vector [1, 1]. NaN equals nothing.
    A set on the right stands for a list in any order; a set equals nothing else.
    """
    answer, right = plain(answer), plain(right)
    if isinstance(right, set):
        right = sorted(right)
        answer = sorted(answer) if isinstance(answer, (set, frozenset, list)) and _depth(answer) < 2 else answer
    while isinstance(answer, list) and len(answer) == 1 and _depth(answer) > _depth(right):
        answer = answer[0]
    if isinstance(right, list):
        return isinstance(answer, list) and len(answer) == len(right) and all(map(same, answer, right))
    if isinstance(right, str):
        return isinstance(answer, str) and answer.strip().lower() == right.lower()
    if isinstance(right, Real) and not isinstance(right, bool):
        return (isinstance(answer, Real) and not isinstance(answer, bool)
                and isclose(answer, right, rel_tol=1e-5, abs_tol=1e-9))
    return type(answer) is type(right) and bool(answer == right)


def _depth(x):
    return 1 + max(map(_depth, x), default=0) if isinstance(x, list) else 0


@dataclass(frozen=True)
class Value:
    """A judge for a number, text, list, array or tensor. slips: (wrong answer, hint) pairs."""

    right: object
    slips: tuple = ()

    def __call__(self, answer):
        if same(answer, self.right):
            return ""
        return next((hint for wrong, hint in self.slips if same(answer, wrong)), OTHER)


@dataclass(frozen=True)
class Function:
    """A judge for a function. calls: argument tuples; right: a correct function; slips: (wrong function, hint) pairs."""

    right: object
    calls: tuple
    slips: tuple = ()

    def __call__(self, answer):
        if not callable(answer):
            return "Hand over the function itself: its name, without parentheses."
        got = []
        for call in self.calls:
            try:
                got.append(answer(*deepcopy(call)))
            except (Exception, SystemExit) as error:
                return f"Your function raised {type(error).__name__} ({error}) when called with {call}."
        if all(result is ... for result in got):
            return UNTOUCHED
        if all(result is None for result in got):
            return "Your function returns nothing; print shows a value, `return` hands it over."
        for function, hint in ((self.right, ""), *self.slips):
            if all(same(result, function(*deepcopy(call))) for result, call in zip(got, self.calls)):
                return hint
        call = next(c for c, r in zip(self.calls, got) if not same(r, self.right(*deepcopy(c))))
        return f"Called with {call} it does not return {plain(self.right(*deepcopy(call)))}."
