"""Chapter 06's exercises: untouched, right, differently right, and the wrong answers that tempt."""
import ast
import re
from pathlib import Path

import jupytext
import pytest
import torch

from qwen.batch import pad_left
from qwen.cache import slot_mapping
from qwen.exercises import check
from qwen.exercises.ch06 import EXERCISES
from qwen.rope import positions

SOURCE = Path(__file__).resolve().parent.parent / "notebooks" / "source" / "06_the_qwen_batch_chapter.py"
CELLS = jupytext.read(SOURCE, fmt="py:percent").cells


def pad_loop(seqs, pad_id):
    ids, mask = [], []
    for seq in seqs:
        pads = max(map(len, seqs)) - len(seq)
        ids.append(pads * [pad_id] + seq)
        mask.append([place >= pads for place in range(pads + len(seq))])
    return ids, mask


def pad_mask_from_ids(seqs, pad_id):                        # case 5
    ids, _ = pad_loop(seqs, pad_id)
    return ids, [[token != pad_id for token in row] for row in ids]


def pad_right(seqs, pad_id):                                # case 6
    width = max(map(len, seqs))
    return ([seq + [pad_id] * (width - len(seq)) for seq in seqs],
            [[True] * len(seq) + [False] * (width - len(seq)) for seq in seqs])


def package_positions(mask, length):
    return positions(slot_mapping(torch.tensor([mask]), torch.tensor([length])))[0]


def counting_pads_on(mask, length):                         # a pad may have the next token's number
    out = []
    for real in mask:
        out.append(length)
        length += real
    return out


def record_index(sampled, stop):
    answers = []
    for row in range(len(sampled[0])):
        column = [step[row] for step in sampled]
        ends = [i for i, token in enumerate(column) if token in stop]
        answers.append(column[:ends[0] + 1] if ends else column)
    return answers


def record_after_the_first(sampled, stop):                  # case 14
    answers = [[token] for token in sampled[0]]
    done = [False] * len(answers)
    for step in sampled[1:]:
        for row, token in enumerate(step):
            if not done[row]:
                answers[row].append(token)
                done[row] = token in stop
    return answers


def record_all_stop(sampled, stop):
    kept = []
    for step in sampled:
        kept.append(step)
        if stop & set(step):
            break
    return [list(row) for row in zip(*kept)]


RIGHT = {
    "06.1": [pad_loop, pad_left],
    "06.2": [package_positions, counting_pads_on, lambda mask, length: tuple(counting_pads_on(mask, length))],
    "06.3": [[3, 4, 5, 8], (3.0, 4.0, 5.0, 8.0), torch.tensor([3, 4, 5, 8])],
    "06.4": [record_index],
    "06.5": [lambda lengths: (sum(lengths), max(lengths) * len(lengths)),
             lambda lengths: torch.tensor([sum(lengths), max(lengths) * len(lengths)])],
}
WRONG = {
    "06.1": [
        (pad_mask_from_ids, "only the lengths"),
        (pad_right, "on the right"),
        (lambda seqs, pad_id: (pad_loop(seqs, pad_id)[0], [[not m for m in row] for row in pad_loop(seqs, pad_id)[1]]),
         "True means real"),
        (lambda seqs, pad_id: (pad_left(seqs, pad_id)[0], pad_left(seqs, pad_id)[1].int()), "True and False"),
        (lambda seqs, pad_id: pad_loop(seqs, 0), "Called with"),
    ],
    "06.2": [
        (lambda mask, length: [length + place for place in range(len(mask))], "pads get numbers"),      # case 1
        (lambda mask, length: [max(0, sum(mask[:place + 1]) - 1) for place in range(len(mask))], "start at 0 again"),
        (lambda mask, length: [length + sum(mask[:place + 1]) for place in range(len(mask))], "one too high"),
        (lambda mask, length: slot_mapping(torch.tensor([mask]), torch.tensor([length]))[0], "clamp at 0"),
        (lambda mask, length: [length], "Called with"),
    ],
    "06.3": [
        ([2.5, 4, 5, 8], "after the write"), ([5, 4, 9, 8], "difference"), ([1, 4, 5, 8], "before it faded"),
        ([4, 4, 8, 8], "zero all the way"), ([3, 8, 5, 8], "still fades"), ([3, 5, 4, 8], "wrong way round"),
        ([8, 8, 8, 8], "not yet"),
    ],
    "06.4": [
        (record_after_the_first, "first token"),
        (lambda sampled, stop: [row[:-1] if row[-1] in stop else row for row in record_index(sampled, stop)], "drop the stop"),
        (record_all_stop, "own row only"),
        (lambda sampled, stop: [list(row) for row in zip(*sampled)], "after their stop"),
        (lambda sampled, stop: sampled, "Called with"),
    ],
    "06.5": [                                               # case 26
        (lambda lengths: (sum(lengths), sum(lengths)), "leave"),
        (lambda lengths: (len(lengths) * max(lengths),) * 2, "Not all computed"),
        (lambda lengths: (len(lengths) * max(lengths), sum(lengths)), "wrong way round"),
        (lambda lengths: (sum(lengths), max(lengths)), "counted steps"),
        (lambda lengths: (sum(lengths), len(lengths) * max(lengths) - sum(lengths)), "wasted"),
    ],
}


def test_every_exercise_is_tried_and_stands_in_the_chapter():
    asked = re.findall(r'^_ = check\("(06\.\d)"', "\n".join(cell.source for cell in CELLS if cell.cell_type == "code"), re.M)
    assert list(EXERCISES) == list(RIGHT) == list(WRONG) == asked


@pytest.mark.parametrize("name, answer", [(name, answer) for name, answers in RIGHT.items() for answer in answers])
def test_right(name, answer, capsys):
    assert check(name, answer) is True
    assert capsys.readouterr().out == f"{name}: right.\n"


@pytest.mark.parametrize("name, answer, hint", [(name, *pair) for name, pairs in WRONG.items() for pair in pairs])
def test_wrong_answers_get_their_hint(name, answer, hint, capsys):
    assert check(name, answer) is False
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: ") and hint in out and out.count("\n") == 1


@pytest.mark.parametrize("name", EXERCISES)
def test_untouched(name, capsys):
    cell = next(cell.source for cell in CELLS if cell.cell_type == "code" and f'check("{name}"' in cell.source)
    exec(cell, {"check": check})
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: not answered yet") and out.count("\n") == 1


@pytest.mark.parametrize("name", EXERCISES)
def test_the_folded_solution_is_right(name, capsys):
    text = next(cell.source for cell in CELLS if f"<summary>Solution {name}</summary>" in cell.source)
    code = re.search(rf"Solution {re.escape(name)}</summary>.*?```python\n(.*?)```", text, re.S)[1]
    names = {}
    exec(code, names)
    (defined,) = [node.name if isinstance(node, ast.FunctionDef) else node.targets[0].id for node in ast.parse(code).body]
    assert check(name, names[defined]) is True
    assert capsys.readouterr().out == f"{name}: right.\n"
