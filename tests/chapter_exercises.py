"""The tests that every chapter's exercises get: `globals().update(exercise_tests("02", RIGHT, WRONG))`."""
import ast
import re
from importlib import import_module
from pathlib import Path

import nbformat
import pytest

from qwen.exercises import check

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def cells(chapter: str):
    (path,) = NOTEBOOKS.glob(f"{chapter}_*.ipynb")
    return nbformat.read(path, as_version=4).cells


def exercise_tests(chapter: str, right: dict, wrong: dict) -> dict:
    """right: {name: answers}, wrong: {name: [(answer, words of its hint)]} -> {test name: test}."""
    exercises = import_module(f"qwen.exercises.ch{chapter}").EXERCISES
    code = [cell.source for cell in cells(chapter) if cell.cell_type == "code"]
    text = [cell.source for cell in cells(chapter) if cell.cell_type == "markdown"]

    def test_every_exercise_is_tried_and_stands_in_the_chapter():
        asked = re.findall(rf'^_ = check\("({chapter}\.\d)"', "\n".join(code), re.M)
        assert list(exercises) == list(right) == list(wrong) == asked

    @pytest.mark.parametrize("name, answer", [(name, answer) for name, answers in right.items() for answer in answers])
    def test_right(name, answer, capsys):
        assert check(name, answer) is True
        assert capsys.readouterr().out == f"{name}: right.\n"

    @pytest.mark.parametrize("name, answer, hint", [(name, *pair) for name, pairs in wrong.items() for pair in pairs])
    def test_wrong_answers_get_their_hint(name, answer, hint, capsys):
        assert check(name, answer) is False
        out = capsys.readouterr().out
        assert out.startswith(f"{name}: ") and hint in out and out.count("\n") == 1, out

    @pytest.mark.parametrize("name", exercises)
    def test_untouched(name, capsys):
        exec(next(cell for cell in code if f'check("{name}"' in cell), {"check": check})
        out = capsys.readouterr().out
        assert out.startswith(f"{name}: not answered yet") and out.count("\n") == 1

    @pytest.mark.parametrize("name", exercises)
    def test_the_folded_solution_is_right(name, capsys):
        question = next(cell for cell in text if f"**{name}**" in cell)
        solution = re.search(r"<summary>Solution</summary>.*?```python\n(.*?)```", question, re.S)[1]
        names = {}
        exec(solution, names)
        (defined,) = [n.name if isinstance(n, ast.FunctionDef) else n.targets[0].id for n in ast.parse(solution).body]
        assert check(name, names[defined]) is True
        assert capsys.readouterr().out == f"{name}: right.\n"

    return {name: test for name, test in locals().items() if name.startswith("test_")}
