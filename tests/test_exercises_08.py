"""Chapter 08's exercises: untouched, right, differently right, and the wrong answers that tempt."""
import math

import torch

from chapter_exercises import exercise_tests


def waste_by_filling(lengths, size):
    return sum(-n % size for n in lengths)


def missing_by_growing(length, new, size):
    taken = 0
    for t in range(length, length + new):
        taken += t % size == 0
    return taken


def common(prompt, cached):
    n = 0
    while n < min(len(prompt), len(cached)) and prompt[n] == cached[n]:
        n += 1
    return n


def reuse(prompt, cached, snapshots, size):
    for n in sorted(snapshots, reverse=True):
        if n < len(prompt) and prompt[:n] == cached[:n]:
            return n
    return 0


def ceil(n, size):
    return math.ceil(n / size)


RIGHT = {
    "08.1": [waste_by_filling, lambda lengths, size: float(waste_by_filling(lengths, size))],
    "08.2": [missing_by_growing, lambda length, new, size: ceil(length + new, size) - ceil(length, size)],
    "08.3": [[3, 4, 5, 5], (3, 4, 5, 5), torch.tensor([3, 4, 5, 5])],
    "08.4": [reuse],
}
WRONG = {
    "08.1": [
        (lambda lengths, size: -sum(lengths) % size, "rounded the sum up"),
        (lambda lengths, size: sum(size - n % size for n in lengths), "don't add one"),
        (lambda lengths, size: sum(n % size for n in lengths), "tokens in the last"),
        (lambda lengths, size: sum(ceil(n, size) for n in lengths) * size, "all slots taken"),
        (lambda lengths, size: sum(ceil(n, size) for n in lengths), "blocks taken"),
        (lambda lengths, size: len(lengths) * max(lengths) - sum(lengths), "box's pads"),
        (lambda lengths, size: len(lengths) * (size - 1), "the most"),
        (lambda lengths, size: waste_by_filling(lengths, size) / sum(ceil(n, size) * size for n in lengths),
         "the share"),
        (lambda lengths, size: -1, "Called with"),
    ],
    "08.2": [                                               # what a batcher without growth gets wrong
        (lambda length, new, size: ceil(new, size), "room left"),
        (lambda length, new, size: ceil(length + new, size), "all blocks of the row"),
        (lambda length, new, size: (length + new) // size - length // size, "round down"),
        (lambda length, new, size: ceil(length + new + 1, size) - ceil(length, size), "One token too many"),
        (lambda length, new, size: int((length + new) % size == 1), "compare the counts"),
        (lambda length, new, size: min(1, missing_by_growing(length, new, size)), "At most one"),
        (lambda length, new, size: ceil(max(0, new - (size - length % size)), size), "a whole block of room"),
        (lambda length, new, size: 1 if length % size == 0 else 0, "no reason by itself"),
        (lambda length, new, size: 0, "famous bug"),
        (lambda length, new, size: -1, "Called with"),
    ],
    "08.3": [
        ([3, 3, 3, 3], "overwrites"), ([3, 4, 5, 6], "only holder"), ([9, 9, 9, 9], "copies nothing"), ([9, 10, 11, 11], "the same 3"),
        ([9, 10, 11, 12], "need not copy"), ([3, 6, 9, 9], "stay shared"), ([3, 6, 9, 12], "Only the block"),
        ([3, 4, 4, 4], "B's alone"), ([3, 4, 4, 5], "alone in the old block"), ([4, 5, 6, 6], "8 + 8 + 4"), (5, "read the sentence"),
    ],
    "08.4": [                                               # case 12
        (lambda prompt, cached, snapshots, size: common(prompt, cached), "only start from a snapshot"),
        (lambda prompt, cached, snapshots, size: common(prompt, cached) // size * size, "attention alone"),
        (lambda prompt, cached, snapshots, size: min(common(prompt, cached), len(prompt) - 1) // size * size,
         "attention alone"),
        (lambda prompt, cached, snapshots, size: max([0, *(n for n in snapshots if n <= common(prompt, cached))]),
         "last token always runs"),
        (lambda prompt, cached, snapshots, size: max([0, *snapshots]), "somebody else's words"),
        (lambda prompt, cached, snapshots, size: max([0, *(n for n in snapshots if n < len(prompt))]), "never compare"),
        (lambda prompt, cached, snapshots, size: min([n for n in snapshots if n <= min(common(prompt, cached), len(prompt) - 1)] or [0]),
         "the longest saves more"),
        (lambda prompt, cached, snapshots, size: len(prompt) - reuse(prompt, cached, snapshots, size), "still to run"),
        (lambda prompt, cached, snapshots, size: -1, "Called with"),
    ],
}


globals().update(exercise_tests("08", RIGHT, WRONG))
