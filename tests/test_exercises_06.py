"""Chapter 06's exercises: untouched, right, differently right, and the wrong answers that tempt."""
import math

import torch

from chapter_exercises import exercise_tests
from qwen.batch import pad_left
from qwen.cache import slot_mapping
from qwen.rope import positions


def pad_loop(seqs, pad_id, multiple):
    width = max(map(len, seqs))
    while width % multiple:
        width += 1
    ids, mask = [], []
    for seq in seqs:
        pads = width - len(seq)
        ids.append(pads * [pad_id] + seq)
        mask.append([place >= pads for place in range(width)])
    return ids, mask


def pad_with_the_package(seqs, pad_id, multiple):           # one row of the wanted width, cut off again
    width = math.ceil(max(map(len, seqs)) / multiple) * multiple
    ids, mask = pad_left([*seqs, [1] * width], pad_id)
    return ids[:-1], mask[:-1]


def pad_mask_from_ids(seqs, pad_id, multiple):              # case 5
    ids, _ = pad_loop(seqs, pad_id, multiple)
    return ids, [[token != pad_id for token in row] for row in ids]


def pad_right(seqs, pad_id, multiple):                      # case 6
    ids, mask = pad_loop([seq[::-1] for seq in seqs], pad_id, multiple)
    return [row[::-1] for row in ids], [row[::-1] for row in mask]


def pad_right_mask_from_ids(seqs, pad_id, multiple):
    ids, _ = pad_right(seqs, pad_id, multiple)
    return ids, [[token != pad_id for token in row] for row in ids]


def pad_one_more(seqs, pad_id, multiple):
    width = (max(map(len, seqs)) // multiple + 1) * multiple
    ids, mask = pad_loop([*seqs, [0] * width], pad_id, multiple)
    return ids[:-1], mask[:-1]


def package_positions(mask, length):
    return positions(slot_mapping(torch.tensor([mask]), torch.tensor([length])))[0]


def counting_pads_on(mask, length):                         # a pad may have the next token's number
    out = []
    for real in mask:
        out.append(length)
        length += real
    return out


def leading_pads_only(mask, length):
    lead = next(place for place, real in enumerate(mask) if real)
    return [max(0, length + place - lead) for place in range(len(mask))]


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


def record_steps_as_rows(sampled, stop):
    answers = []
    for row in sampled:
        ends = [i for i, token in enumerate(row) if token in stop]
        answers.append(row[:ends[0] + 1] if ends else row)
    return answers


def record_all_stop(sampled, stop):
    kept = []
    for step in sampled:
        kept.append(step)
        if stop & set(step):
            break
    return [list(row) for row in zip(*kept)]


def count_loop(lengths, k):
    useful = computed = 0
    waiting = list(lengths)
    while waiting:
        batch, waiting = waiting[:k], waiting[k:]
        useful += sum(batch)
        computed += max(batch) * len(batch)
    return useful, computed


RIGHT = {
    "06.1": [pad_loop, pad_with_the_package],
    "06.2": [package_positions, counting_pads_on, lambda mask, length: tuple(counting_pads_on(mask, length))],
    "06.3": [[3, 4, 5, 8], (3.0, 4.0, 5.0, 8.0), torch.tensor([3, 4, 5, 8])],
    "06.4": [record_index],
    "06.5": [count_loop, lambda lengths, k: torch.tensor(count_loop(lengths, k))],
}
WRONG = {
    "06.1": [
        (pad_mask_from_ids, "only the lengths"),
        (pad_right, "on the right"),
        (pad_right_mask_from_ids, "Two slips"),
        (lambda seqs, pad_id, multiple: pad_loop(seqs, pad_id, 1), "Round its width up"),
        (pad_one_more, "too wide"),
        (lambda seqs, pad_id, multiple: pad_loop(seqs, 0, multiple), "`pad_id`"),
        (lambda seqs, pad_id, multiple: pad_loop(seqs, pad_id, multiple)[::-1], "(ids, mask)"),
        (lambda seqs, pad_id, multiple: pad_loop(seqs, pad_id, multiple)[0], "ids only"),
        (lambda seqs, pad_id, multiple: (pad_loop(seqs, pad_id, multiple)[0],
                                         [[not m for m in row] for row in pad_loop(seqs, pad_id, multiple)[1]]), "True means real"),
        (lambda seqs, pad_id, multiple: (pad_loop(seqs, pad_id, multiple)[0],
                                         torch.tensor(pad_loop(seqs, pad_id, multiple)[1]).int()), "True and False"),
        (lambda seqs, pad_id, multiple: pad_loop(seqs, 1, multiple), "Called with"),
    ],
    "06.2": [
        (lambda mask, length: [length + place for place in range(len(mask))], "pads get numbers"),      # case 1
        (lambda mask, length: [max(0, sum(mask[:place + 1]) - 1) for place in range(len(mask))], "start at 0 again"),
        (lambda mask, length: [length + sum(mask[:place + 1]) for place in range(len(mask))], "one too high"),
        (lambda mask, length: slot_mapping(torch.tensor([mask]), torch.tensor([length]))[0], "clamp at 0"),
        (lambda mask, length: range(len(mask)), "places of this call"),
        (leading_pads_only, "in front of the row only"),
        (lambda mask, length: [p for p, real in zip(counting_pads_on(mask, length), mask) if real], "each place"),
        (lambda mask, length: [length], "Called with"),
    ],
    "06.3": [
        ([2.5, 4, 5, 8], "after the write"), ([5, 4, 9, 8], "difference"), ([1, 4, 5, 8], "before it faded"),
        ([4, 4, 8, 8], "zero all the way"), ([3, 8, 5, 8], "still fades"), ([3, 5, 4, 8], "wrong way round"),
        ([3, 4, 5, 4], "nothing fades"), ([3, 4, 9, 8], "In (c)"), (8, "[a, b, c, d]"), (torch.tensor(3.0), "[a, b, c, d]"),
        ([8, 8, 8, 8], "not yet"),
    ],
    "06.4": [
        (record_after_the_first, "first token"),
        (lambda sampled, stop: [row[:-1] if row[-1] in stop else row for row in record_index(sampled, stop)], "drop the stop"),
        (record_all_stop, "own row only"),
        (lambda sampled, stop: [list(row) for row in zip(*sampled)], "after their stop"),
        (lambda sampled, stop: [[t for t in row if t not in stop] for row in zip(*sampled)], "take the stop tokens out"),
        (record_steps_as_rows, "steps as rows"),
        (lambda sampled, stop: sampled, "as they are"),
        (lambda sampled, stop: [[] for _ in sampled[0]], "Called with"),
    ],
    "06.5": [                                               # case 26
        (lambda lengths, k: (sum(lengths), max(lengths) * len(lengths)), "one batch"),
        (lambda lengths, k: (sum(lengths), sum(lengths)), "leave"),
        (lambda lengths, k: (sum(lengths), sum(k * max(lengths[i:i + k]) for i in range(0, len(lengths), k))), "last batch too"),
        (lambda lengths, k: count_loop(sorted(lengths), k), "sorted"),
        (lambda lengths, k: count_loop(sorted(lengths)[::-1], k), "sorted"),
        (lambda lengths, k: count_loop(lengths, k)[1:] * 2, "Not all computed"),
        (lambda lengths, k: count_loop(lengths, k)[::-1], "wrong way round"),
        (lambda lengths, k: (sum(lengths), sum(max(lengths[i:i + k]) for i in range(0, len(lengths), k))), "counted steps"),
        (lambda lengths, k: (sum(lengths), count_loop(lengths, k)[1] - sum(lengths)), "wasted"),
        (lambda lengths, k: (0, 0), "Called with"),
    ],
}


globals().update(exercise_tests("06", RIGHT, WRONG))
