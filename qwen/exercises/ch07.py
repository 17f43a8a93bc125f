"""Chapter 07's exercises: steps by seats, leaving, the end of an answer, the budget's shares, and who goes first."""
from qwen.exercises import Function

# 07.1 ---------------------------------------------------------------- steps of continuous batching


def _steps(lengths, number):
    free_at = [0] * number
    for n in lengths:
        free_at[free_at.index(min(free_at))] += n
    return max(free_at)


def _rounded(lengths, number):
    return -(-sum(lengths) // number)


STEPS = Function(
    right=_steps,
    calls=(([3, 50], 2), ([10, 104, 63, 56, 43, 2, 32, 35], 4), ([5, 1, 1, 1, 6], 2), ([2, 2, 2, 9], 2), ([4], 3)),
    slips=(
        (_rounded, "That would need every seat to work to the end. When nobody waits any more, seats fall empty while the last go on."),
        (lambda lengths, number: sum(lengths) // number,
         "That would need every seat to work to the end. When nobody waits any more, seats fall empty while the last go on."),
        (lambda lengths, number: sum(max(lengths[i:i + number]) for i in range(0, len(lengths), number)),
         "That is static batching: in your count a seat is free only when the longest of its batch has ended."),
        (lambda lengths, number: _rounded(lengths, number) + max(lengths), "That is the bound. The question is how many steps it takes."),
        (lambda lengths, number: _steps(sorted(lengths, reverse=True), number),
         "You seat the longest first. They sit down in the order given; nobody knows how long an answer will be."),
        (lambda lengths, number: _steps(sorted(lengths), number),
         "You seat the shortest first. They sit down in the order given; nobody knows how long an answer will be."),
        (lambda lengths, number: max(sum(lengths[i::number]) for i in range(number)),
         "You deal them out in turn, so some wait for their own seat while another is free. All wait in one queue."),
        (lambda lengths, number: max(lengths), "That is the longest answer. It may have waited before it sat down."),
        (lambda lengths, number: sum(lengths), "That is one seat. There are `number` of them, side by side."),
    ),
)

# 07.2 ---------------------------------------------------------------- the finished leave


def _leave(rows, free, stay=lambda finished: not finished, back=lambda finished: finished):
    return ([name for name, finished, _ in rows if stay(finished)],
            free + [block for _, finished, blocks in rows if back(finished) for block in blocks])


LEAVE = Function(
    right=_leave,
    calls=(([("A", True, [5, 0]), ("B", False, [3]), ("C", True, [1])], [7, 2]), ([("A", False, [1, 2])], [0]),
           ([("A", False, [4]), ("B", True, [6, 9])], [])),
    slips=(
        (lambda rows, free: (_leave(rows, free)[0], free),
         "No block comes back. Did you filter the finished out first, and then look for finished ones among the rest?"),
        (lambda rows, free: _leave(rows, free, back=lambda finished: True),
         "You free the blocks of those who go on as well; the next user would write over theirs."),
        (lambda rows, free: _leave(rows, free, back=lambda finished: not finished),
         "You free the blocks of those who go on, and keep those of the finished."),
        (lambda rows, free: _leave(rows, free, stay=lambda finished: True), "The finished still sit in their seats: return the names that go on."),
        (lambda rows, free: _leave(rows, free, stay=lambda finished: finished), "Those are the names that leave; asked are those that go on."),
        (lambda rows, free: (_leave(rows, free)[0], _leave(rows, [])[1] + free), "The new free blocks stand behind the old ones, not in front."),
        (lambda rows, free: (_leave(rows, free)[0], _leave(rows, [])[1]), "The blocks that were free before are still free: add to them."),
        (lambda rows, free: (_leave(rows, free)[0], free + [blocks for _, finished, blocks in rows if finished]),
         "You put lists into the list of free blocks (append). Add their blocks one by one (extend, or +)."),
        (lambda rows, free: _leave(rows, free)[::-1], "Exchanged: first the names that go on, then the free blocks."),
    ),
)

# 07.3 ---------------------------------------------------------------- has it ended?

END = Function(
    right=lambda prompt, new, max_tokens, last, stop: last in stop or new >= max_tokens,
    calls=((6, 1, 3, 50, [7]), (3, 3, 3, 50, [7]), (3, 1, 9, 7, [7]), (100, 2, 10, 50, [7, 8]), (5, 2, 9, 8, [7, 8]),
           (1, 2, 3, 50, []), (3, 1, 4, 50, [7]), (2, 1, 1, 7, [7]), (1, 1, 9, 50, [7]), (1, 4, 3, 50, [7])),
    slips=(
        (lambda prompt, new, max_tokens, last, stop: last in stop or prompt + new >= max_tokens,
         "You count the prompt. max_tokens is a limit for new tokens; a long prompt would end after one."),
        (lambda prompt, new, max_tokens, last, stop: last in stop or prompt + new - 1 >= max_tokens,
         "You compare the position, which counts the prompt. max_tokens is a limit for new tokens."),
        (lambda prompt, new, max_tokens, last, stop: prompt + new >= max_tokens,
         "You count the prompt, and you do not look at the stop tokens."),
        (lambda prompt, new, max_tokens, last, stop: last in stop or new > max_tokens,
         "One token too many: with `max_tokens` new ones the limit is reached."),
        (lambda prompt, new, max_tokens, last, stop: last in stop or new + 1 >= max_tokens,
         "One token too few: the newest token is counted in `new` already."),
        (lambda prompt, new, max_tokens, last, stop: new >= max_tokens, "A stop token ends an answer too. (`stop` is a list: ask whether the token is in it.)"),
        (lambda prompt, new, max_tokens, last, stop: last in stop, "The limit ends an answer too, also without a stop token."),
        (lambda prompt, new, max_tokens, last, stop: last in stop and new >= max_tokens, "Either is enough: `or`, not `and`."),
        (lambda prompt, new, max_tokens, last, stop: last in stop[:1] or new >= max_tokens,
         "There may be several stop tokens, and each of them ends an answer."),
        (lambda prompt, new, max_tokens, last, stop: not (last in stop or new >= max_tokens),
         "The wrong way round: True means that the row has ended."),
        (lambda prompt, new, max_tokens, last, stop: int(last in stop or new >= max_tokens), "Return True or False, not 1 or 0."),
    ),
)

# 07.4 ---------------------------------------------------------------- the budget of a step


def _chunks(decoders, prompts, budget):
    left, chunks = budget - decoders, []
    for tokens in prompts:
        chunks.append(min(tokens, left))
        left -= chunks[-1]
    return chunks


def _whole(decoders, prompts, budget):
    left, chunks = budget - decoders, []
    for tokens in prompts:
        chunks.append(tokens if tokens <= left else 0)
        left -= chunks[-1]
    return chunks


CHUNKS = Function(
    right=_chunks,
    calls=((3, [400], 64), (2, [40, 40], 8), (0, [10, 20, 30], 35), (4, [5, 5], 4), (1, [3, 9, 2], 10)),
    slips=(
        (lambda decoders, prompts, budget: _chunks(0, prompts, budget),
         "You give the whole budget to the prompts; each row that decodes needs one token of it, and they come first."),
        (lambda decoders, prompts, budget: list(prompts), "Those are whole prompts: the step exceeds its budget and everybody waits for it."),
        (_whole, "You read a prompt whole or not at all. A prompt that is longer than any budget would never start: read a part."),
        (lambda decoders, prompts, budget: [min(n, (budget - decoders) // len(prompts)) for n in prompts],
         "You share equally. The first in order gets what it can use, the next what is left; else all first tokens come late."),
        (lambda decoders, prompts, budget: [min(n, budget - decoders) for n in prompts],
         "Each of your prompts gets what is left after the decoders. What one takes is not there for the next."),
        (lambda decoders, prompts, budget: [n for n in _chunks(decoders, prompts, budget) if n],
         "A prompt that gets nothing is missing in the list, so the others move up: give it 0."),
        (lambda decoders, prompts, budget: [n - c for n, c in zip(prompts, _chunks(decoders, prompts, budget))],
         "Those are the tokens that stay unread. Asked are those that this step reads."),
        (lambda decoders, prompts, budget: _chunks(decoders, prompts[::-1], budget)[::-1],
         "You begin with the last prompt; they are in the policy's order, the first goes first."),
        (lambda decoders, prompts, budget: [max(1, c) for c in _chunks(decoders, prompts, budget)],
         "Your step exceeds the budget: where nothing is left, a waiting prompt gets 0."),
        (lambda decoders, prompts, budget: budget - decoders, "That is what all prompts together may get. Asked is the share of each, as a list."),
    ),
)

# 07.5 ---------------------------------------------------------------- who goes first


def _by(key):
    return lambda waiting, aging: [r[0] for r in sorted(waiting, key=lambda r: key(r[1], r[2], aging))]


ORDER = Function(
    right=_by(lambda arrival, priority, aging: arrival + aging * priority),
    calls=(([("A", 0, 1), ("B", 10, 0), ("C", 20, 0)], 16), ([("X", 0, 3), ("Y", 5, 0), ("Z", 40, 1), ("W", 2, 2)], 16),
           ([("P", 0, 0), ("Q", 1, 5)], 2), ([("P", 0, 5), ("Q", 1, 0)], 2), ([("P", 0, 5), ("Q", 4, 0)], 2), ([("M", 4, 0), ("N", 0, 1)], 4), ([("G", 9, 0), ("H", 3, 0), ("I", 5, 1)], 3)),
    slips=(
        (_by(lambda arrival, priority, aging: (priority, arrival)),
         "That is strict priority: as long as important requests come, the others starve. Waiting has to count: arrival + aging · priority."),
        (_by(lambda arrival, priority, aging: priority),
         "You look at the priority only: as long as important requests come, the others starve. Waiting has to count."),
        (_by(lambda arrival, priority, aging: arrival), "That is first come, first served. A level of priority is worth `aging` steps."),
        (_by(lambda arrival, priority, aging: (arrival, priority)),
         "That is first come, first served. A level of priority is worth `aging` steps."),
        (_by(lambda arrival, priority, aging: arrival - aging * priority),
         "The sign: a larger priority number is less important, so it counts as a later arrival."),
        (_by(lambda arrival, priority, aging: aging * arrival + priority), "You aged the arrival. It is the priority that is turned into steps."),
        (_by(lambda arrival, priority, aging: arrival + priority), "A level is worth `aging` steps, not one."),
        (lambda waiting, aging: [r[0] for r in sorted(waiting, key=lambda r: -(r[1] + aging * r[2]))], "Backwards: the smallest sum goes first."),
        (lambda waiting, aging: [r[0] for r in sorted(waiting, key=lambda r: (r[1] + aging * r[2], r[1]))],
         "Where sums are equal you look at the arrival; equal ones keep the order in which they wait."),
        (lambda waiting, aging: sorted(waiting, key=lambda r: r[1] + aging * r[2]), "The order is right; return the names only."),
    ),
)

EXERCISES = {"07.1": STEPS, "07.2": LEAVE, "07.3": END, "07.4": CHUNKS, "07.5": ORDER}
