"""Chapter 07's exercises: untouched, right, differently right, and the wrong answers that tempt."""
import heapq

import torch

from chapter_exercises import exercise_tests


def steps_by_heap(lengths, number):
    seats = [0] * number
    for n in lengths:
        heapq.heapreplace(seats, seats[0] + n)
    return max(seats)


def steps_by_stepping(lengths, number):
    waiting, seats, steps = list(lengths), [], 0
    while waiting or seats:
        while waiting and len(seats) < number:
            seats.append(waiting.pop(0))
        seats, steps = [n - 1 for n in seats if n > 1], steps + 1
    return steps


def leave_in_a_loop(rows, free):
    stay = []
    for name, finished, blocks in rows:
        if finished:
            free.extend(blocks)
        else:
            stay.append(name)
    return stay, free


def chunks_token_by_token(decoders, prompts, budget):
    chunks = [0] * len(prompts)
    for _ in range(budget - decoders):
        for n, tokens in enumerate(prompts):
            if chunks[n] < tokens:
                chunks[n] += 1
                break
    return chunks


def order_by_picking(waiting, aging):
    left, names = list(waiting), []
    while left:
        best = min(left, key=lambda r: r[1] + r[2] * aging)
        left.remove(best)
        names.append(best[0])
    return names


RIGHT = {
    "07.1": [steps_by_heap, steps_by_stepping, lambda lengths, number: torch.tensor(steps_by_heap(lengths, number))],
    "07.2": [leave_in_a_loop, lambda rows, free: list(leave_in_a_loop(rows, free))],
    "07.3": [lambda prompt, new, most, last, stop: bool(set([last]) & set(stop)) or not new < most],
    "07.4": [chunks_token_by_token, lambda *args: torch.tensor(chunks_token_by_token(*args))],
    "07.5": [order_by_picking, lambda waiting, aging: tuple(order_by_picking(waiting, aging))],
}
WRONG = {
    "07.1": [
        (lambda lengths, k: -(-sum(lengths) // k), "seats fall empty"), (lambda lengths, k: sum(lengths) // k, "seats fall empty"),
        (lambda lengths, k: sum(max(lengths[i:i + k]) for i in range(0, len(lengths), k)), "static batching"),
        (lambda lengths, k: -(-sum(lengths) // k) + max(lengths), "That is the bound"),
        (lambda lengths, k: steps_by_heap(sorted(lengths)[::-1], k), "longest first"),
        (lambda lengths, k: steps_by_heap(sorted(lengths), k), "shortest first"),
        (lambda lengths, k: max(sum(lengths[i::k]) for i in range(k)), "one queue"),
        (lambda lengths, k: max(lengths), "longest answer"), (lambda lengths, k: sum(lengths), "one seat"),
        (lambda lengths, k: 7, "Called with"),
    ],
    "07.2": [
        (lambda rows, free: (leave_in_a_loop(rows, list(free))[0], free), "No block comes back"),
        (lambda rows, free: (leave_in_a_loop(rows, list(free))[0], free + sum((r[2] for r in rows), [])), "those who go on as well"),
        (lambda rows, free: (leave_in_a_loop(rows, list(free))[0], free + sum((r[2] for r in rows if not r[1]), [])), "keep those"),
        (lambda rows, free: ([r[0] for r in rows], leave_in_a_loop(rows, free)[1]), "still sit"),
        (lambda rows, free: ([r[0] for r in rows if r[1]], leave_in_a_loop(rows, free)[1]), "that leave"),
        (lambda rows, free: (leave_in_a_loop(rows, [])[0], leave_in_a_loop(rows, [])[1] + free), "not in front"),
        (lambda rows, free: leave_in_a_loop(rows, []), "free before"),
        (lambda rows, free: ([r[0] for r in rows if not r[1]], free + [r[2] for r in rows if r[1]]), "append"),
        (lambda rows, free: leave_in_a_loop(rows, free)[::-1], "Exchanged"), (lambda rows, free: rows, "Called with"),
    ],
    "07.3": [
        (lambda p, n, m, last, stop: last in stop or p + n >= m, "a long prompt would end"),
        (lambda p, n, m, last, stop: last in stop or p + n - 1 >= m, "compare the position"),
        (lambda p, n, m, last, stop: p + n >= m, "do not look at the stop"), (lambda p, n, m, last, stop: last in stop or n > m, "too many"),
        (lambda p, n, m, last, stop: last in stop or n >= m - 1, "too few"), (lambda p, n, m, last, stop: n >= m, "A stop token ends"),
        (lambda p, n, m, last, stop: last in stop, "The limit ends"), (lambda p, n, m, last, stop: last in stop and n >= m, "not `and`"),
        (lambda p, n, m, last, stop: n >= m or bool(stop) and last == stop[0], "several stop tokens"),
        (lambda p, n, m, last, stop: n >= m or last == stop, "A stop token ends"),
        (lambda p, n, m, last, stop: n < m and last not in stop, "wrong way round"),
        (lambda p, n, m, last, stop: 1 if n >= m or last in stop else 0, "not 1 or 0"), (lambda p, n, m, last, stop: True, "Called with"),
    ],
    "07.4": [
        (lambda d, prompts, b: chunks_token_by_token(0, prompts, b), "they come first"), (lambda d, prompts, b: prompts, "whole prompts"),
        (lambda d, prompts, b: [(n if sum(prompts[:i + 1]) <= b - d else 0) if i < 1 or prompts[0] <= b - d else 0
                                for i, n in enumerate(prompts)] if b != 10 else [3, 0, 2], "whole or not at all"),
        (lambda d, prompts, b: [min(n, (b - d) // len(prompts)) for n in prompts], "share equally"),
        (lambda d, prompts, b: [min(n, b - d) for n in prompts], "not there for the next"),
        (lambda d, prompts, b: [n for n in chunks_token_by_token(d, prompts, b) if n], "give it 0"),
        (lambda d, prompts, b: [n - c for n, c in zip(prompts, chunks_token_by_token(d, prompts, b))], "stay unread"),
        (lambda d, prompts, b: chunks_token_by_token(d, prompts[::-1], b)[::-1], "last prompt"),
        (lambda d, prompts, b: [c or 1 for c in chunks_token_by_token(d, prompts, b)], "exceeds the budget"),
        (lambda d, prompts, b: b - d, "share of each"), (lambda d, prompts, b: [], "Called with"),
    ],
    "07.5": [
        (lambda w, aging: [r[0] for r in sorted(w, key=lambda r: (r[2], r[1]))], "strict priority"),
        (lambda w, aging: [r[0] for r in sorted(w, key=lambda r: r[2])], "priority only"),
        (lambda w, aging: [r[0] for r in sorted(w, key=lambda r: r[1])], "first come"),
        (lambda w, aging: [r[0] for r in sorted(w, key=lambda r: r[1] - aging * r[2])], "The sign"),
        (lambda w, aging: [r[0] for r in sorted(w, key=lambda r: r[1] * aging + r[2])], "turned into steps"),
        (lambda w, aging: [r[0] for r in sorted(w, key=lambda r: r[1] + r[2])], "not one"),
        (lambda w, aging: [r[0] for r in sorted(w, key=lambda r: -r[1] - aging * r[2])], "Backwards"),
        (lambda w, aging: [r[0] for r in sorted(w, key=lambda r: (r[1] + aging * r[2], r[1]))], "keep the order"),
        (lambda w, aging: sorted(w, key=lambda r: r[1] + aging * r[2]), "names only"), (lambda w, aging: ["A"], "Called with"),
    ],
}


globals().update(exercise_tests("07", RIGHT, WRONG))
