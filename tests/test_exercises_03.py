"""Chapter 03's exercises: untouched, right, differently right, and the wrong answers that tempt."""
import torch

from chapter_exercises import exercise_tests
from qwen.deltanet import window_index


def waste_by_counting(lengths):
    width, wasted = max(lengths), 0
    for n in lengths:
        first = width - n
        for query in range(width):
            for key in range(width):
                wasted += not (first <= key <= query)
    return wasted


def mask_in_torch(lengths, new, align="right", see_pads=False, see_future=False):
    keys = max(lengths)
    causal = torch.ones(new, keys).tril(0 if align == "left" else keys - new).bool() | see_future
    real = (torch.arange(keys) >= keys - torch.tensor(lengths)[:, None]) | see_pads
    return causal & real[:, None]


def last_by_slices(cu_seqlens, empty=None):
    flat = list(range(cu_seqlens[-1]))
    rows = [flat[a:b] for a, b in zip(cu_seqlens, cu_seqlens[1:])]
    return [row[-1] if row else empty for row in rows]


def window_of_the_package(inputs, real, t, kernel):
    carried = torch.cat([torch.zeros(kernel - 1, dtype=torch.int64), torch.tensor(inputs)])
    return carried[window_index(torch.tensor([real]), kernel)[0, t]]


def window_loop(inputs, real, t, kernel, zero=False, own=0, size=None):
    window = [0] * (size or kernel - 1)
    for x, is_real in zip(inputs[:t + own], real):
        if is_real or zero:
            window = window[1:] + [x if is_real else 0]
    return window


RIGHT = {
    "03.1": [waste_by_counting, lambda lengths: torch.tensor(waste_by_counting(lengths)), lambda lengths: float(waste_by_counting(lengths))],
    "03.2": [[5.25, 4, 5.25, 3], (21 / 4, 12 / 3, 21 / 4, 12 / 4), torch.tensor([5.25, 4.0, 5.25, 3.0])],
    "03.3": [mask_in_torch, lambda lengths, new: mask_in_torch(lengths, new).tolist()],
    "03.4": [last_by_slices, lambda cu_seqlens: tuple(last_by_slices(cu_seqlens))],
    "03.5": [window_of_the_package, window_loop],
}
WRONG = {
    "03.1": [
        (lambda lengths: len(lengths) * max(lengths) ** 2 - sum(n ** 2 for n in lengths), "upper triangle is wasted"),
        (lambda lengths: waste_by_counting(lengths) + sum(lengths), "diagonal"),
        (lambda lengths: waste_by_counting(lengths) - len(lengths) * max(lengths) * (max(lengths) - 1) // 2, "upper triangles too"),
        (lambda lengths: sum(max(lengths) - n for n in lengths), "Those are the pads"),
        (lambda lengths: sum(max(lengths) - n for n in lengths) ** 2, "Do not square"),
        (lambda lengths: waste_by_counting(lengths) - (len(lengths) - 1) * max(lengths) ** 2, "for every row, not once"),
        (lambda lengths: sum(lengths) ** 2 - sum(sum(range(n + 1)) for n in lengths), "do not meet"),
        (lambda lengths: sum(sum(range(n + 1)) for n in lengths), "useful scores"),
        (lambda lengths: len(lengths) * max(lengths) ** 2, "whole box"),
        (lambda lengths: waste_by_counting(lengths) / (len(lengths) * max(lengths) ** 2), "share"),
        (lambda lengths: sum(sum(range(n)) for n in lengths), "upper triangles of the real tokens"),
        (lambda lengths: 7, "Called with"),
    ],
    "03.2": [
        ([4, 4, 4, 4], "e^0 = 1"), ([5.25, 4, 4, 4], "no longer sum"), ([5.25, 4, 4, 3], "nothing is hidden"),
        ([5.25, 4, 5.25, 4], "three weights of 1/4"), ([5.25, 3, 5.25, 3], "weights of 1/3"), ([5.25, 3, 3, 3], "hidden by nothing"),
        ([4, 4, 4, 3], "in (a) and (c)"), ([0, 4, 0, 0], "all four weights are equal"), ([21, 12, 21, 12], "sums of values"),
        ([0.25, 0, 0.25, 0], "pad's weights"), ([5.25, 4, 3, 3], "before the softmax"),
        ([5.25, 4, 3, 5.25], "exchanged"), ([5.25, 4, 3, 4], "not scaled up"), (5.25, "read the sentence"),
    ],
    "03.3": [                                               # cases 3, 4
        (lambda lengths, new: mask_in_torch(lengths, new, see_pads=True), "pads are visible"),
        (lambda lengths, new: mask_in_torch(lengths, new, see_future=True), "see the future"),
        (lambda lengths, new: mask_in_torch(lengths, new, see_pads=True, see_future=True), "hides nothing"),
        (lambda lengths, new: mask_in_torch(lengths, new, align="left"), "top-left"),
        (lambda lengths, new: [[[max(lengths) - n <= k <= max(lengths) - n + q for k in range(max(lengths))] for q in range(new)]
                               for n in lengths], "first query sees one key"),
        (lambda lengths, new: [[[max(lengths) - n <= k < max(lengths) - new + q for k in range(max(lengths))] for q in range(new)]
                               for n in lengths], "own key"),
        (lambda lengths, new: [[[k <= n - new + q for k in range(max(lengths))] for q in range(new)] for n in lengths], "in front"),
        (lambda lengths, new: ~mask_in_torch(lengths, new), "wrong way round"),
        (lambda lengths, new: mask_in_torch(lengths, new).int(), "True and False"),
        (lambda lengths, new: mask_in_torch(lengths, new)[0], "one grid"),
        (lambda lengths, new: mask_in_torch(lengths, new).mT, "exchanged"),
        (lambda lengths, new: [[[max(lengths) - n <= k <= n - new + q for k in range(max(lengths))] for q in range(new)]
                               for n in lengths], "move it to the right"),
        (lambda lengths, new: [[[max(lengths) - n <= k <= max(lengths) - new + q + 1 for k in range(max(lengths))]
                                for q in range(new)] for n in lengths], "one key too many"),
        (lambda lengths, new: torch.where(mask_in_torch(lengths, new), 0.0, -torch.inf), "float mask"),
        (lambda lengths, new: [], "Called with"),
    ],
    "03.4": [
        (lambda cu_seqlens: (torch.tensor(cu_seqlens)[1:] - 1), "neighbour's last token"),
        (lambda cu_seqlens: [None if last is None else last + 1 for last in last_by_slices(cu_seqlens)], "One too far"),
        (lambda cu_seqlens: cu_seqlens[1:], "And a row without"),
        (lambda cu_seqlens: [a if b > a else None for a, b in zip(cu_seqlens, cu_seqlens[1:])], "first token"),
        (lambda cu_seqlens: cu_seqlens[:-1], "where each row starts"),
        (lambda cu_seqlens: [b - a - 1 if b > a else None for a, b in zip(cu_seqlens, cu_seqlens[1:])], "inside each row"),
        (lambda cu_seqlens: torch.tensor(cu_seqlens).diff() - 1, "inside each row"),
        (lambda cu_seqlens: [last for last in last_by_slices(cu_seqlens) if last is not None], "move up"),
        (lambda cu_seqlens: [-1] * (len(cu_seqlens) - 1), "whole buffer"),
        (lambda cu_seqlens: last_by_slices(cu_seqlens, empty=-1), "last line, another row's"),
        (lambda cu_seqlens: last_by_slices(cu_seqlens, empty=0), "Line 0"),
        (lambda cu_seqlens: cu_seqlens[1:] - 1, "raised TypeError"),
        (lambda cu_seqlens: last_by_slices(cu_seqlens, empty=99), "Called with"),
    ],
    "03.5": [                                               # case 9 and the input zeroed at pads
        (lambda inputs, real, t, kernel: window_loop(inputs, [True] * len(real), t, kernel), "pads and all"),
        (lambda inputs, real, t, kernel: window_loop(inputs, real, t, kernel, zero=True), "skip it"),
        (lambda inputs, real, t, kernel: window_loop(inputs, real, t, kernel, size=kernel), "One too many"),
        (lambda inputs, real, t, kernel: window_loop(inputs, real, t, kernel, own=1), "include place t"),
        (lambda inputs, real, t, kernel: window_loop(inputs, real, t, kernel, own=1, size=kernel), "and the token itself"),
        (lambda inputs, real, t, kernel: [x for x, r in zip(inputs[:t], real) if r][1 - kernel:], "Too short"),
        (lambda inputs, real, t, kernel: ([x for x, r in zip(inputs[:t], real) if r][1 - kernel:] + [0] * 9)[:kernel - 1], "behind"),
        (lambda inputs, real, t, kernel: window_loop(inputs, real, t, kernel)[::-1], "oldest comes first"),
        (lambda inputs, real, t, kernel: window_loop(inputs, real, len(inputs), kernel), "the future"),
        (lambda inputs, real, t, kernel: ([0] * 9 + [x for x, r in zip(inputs[:t], real) if r][:kernel - 1])[1 - kernel:], "slides"),
        (lambda inputs, real, t, kernel: window_loop(inputs, [not r for r in real], t, kernel), "kept the pads"),
        (lambda inputs, real, t, kernel: window_loop(inputs[max(0, t + 1 - kernel):t], real[max(0, t + 1 - kernel):t], t, kernel),
         "cut the window first"),
        (lambda inputs, real, t, kernel: [0] * (kernel - 1), "Called with"),
    ],
}


globals().update(exercise_tests("03", RIGHT, WRONG))
