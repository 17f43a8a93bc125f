"""Chapter 08's exercises: empty slots, growth, who copies, and how much of a prefix a hybrid can reuse."""
from qwen.exercises import Function, Value

# 08.1 ---------------------------------------------------------------- empty slots


def _blocks(n, size):
    return -(-n // size)


WASTE = Function(
    right=lambda lengths, size: sum(_blocks(n, size) * size - n for n in lengths),
    calls=(([5, 100], 8), ([16, 1, 17], 16), ([3, 3, 3], 2), ([7, 8, 9], 1)),
    slips=(
        (lambda lengths, size: _blocks(sum(lengths), size) * size - sum(lengths),
         "You rounded the sum up. Each row rounds up for itself: two rows do not meet in one block."),
        (lambda lengths, size: sum((n // size + 1) * size - n for n in lengths),
         "A row that fills its last block exactly takes no further one: round up, don't add one."),
        (lambda lengths, size: sum(n % size for n in lengths),
         "Those are the tokens in the last, partly filled blocks. Asked are the slots left empty there."),
        (lambda lengths, size: sum(_blocks(n, size) * size for n in lengths),
         "Those are all slots taken, the full ones too."),
        (lambda lengths, size: sum(_blocks(n, size) for n in lengths),
         "Those are the blocks taken. Asked are the empty slots."),
        (lambda lengths, size: len(lengths) * max(lengths) - sum(lengths),
         "Those are a box's pads. In blocks, a short row does not pay for the longest."),
        (lambda lengths, size: len(lengths) * (size - 1),
         "That is the most that it can be. Count what these rows leave empty."),
        (lambda lengths, size: sum(_blocks(n, size) * size - n for n in lengths) / sum(_blocks(n, size) * size for n in lengths),
         "That is the share. Asked is the number of slots."),
    ),
)

# 08.2 ---------------------------------------------------------------- blocks to take before new tokens

MISSING = Function(
    right=lambda length, new, size: _blocks(length + new, size) - _blocks(length, size),
    calls=((7, 1, 8), (8, 1, 8), (15, 3, 8), (0, 17, 8), (5, 20, 4), (16, 0, 16)),
    slips=(
        (lambda length, new, size: _blocks(new, size),
         "You give the new tokens blocks of their own. The row's last block may have room left."),
        (lambda length, new, size: _blocks(length + new, size),
         "Those are all blocks of the row. It holds some already."),
        (lambda length, new, size: (length + new) // size - length // size,
         "You round down, so a block is taken when the old one is full, before a token needs it. "
         "Take it with the first token that does."),
        (lambda length, new, size: _blocks(length + new + 1, size) - _blocks(length, size),
         "One token too many: nothing is taken for a token that is not there yet."),
        (lambda length, new, size: int((length + new) % size == 1),
         "Several blocks may be crossed at once, and a row may step over the boundary: compare the "
         "counts before and after."),
        (lambda length, new, size: int(_blocks(length + new, size) > _blocks(length, size)),
         "At most one? A chunk of a prompt may need several blocks at once."),
        (lambda length, new, size: _blocks(max(0, new - (size - length % size)), size),
         "Where length is a multiple of size, size - length % size gives a whole block of room; there is none left then."),
        (lambda length, new, size: int(length % size == 0),
         "A full last block is no reason by itself, and an open one may be filled and passed: compare the counts before "
         "and after."),
        (lambda length, new, size: 0,
         "Never taking a block is the famous bug: the row then writes into somebody else's."),
    ),
)

# 08.3 ---------------------------------------------------------------- who copies a shared block

HELD = Value([3, 4, 5, 5], (
    ([3, 3, 3, 3], "Nobody copies? Then B's token overwrites the slot that A and C read too."),
    ([3, 4, 5, 6], "When A writes, B and C have left the old last block: A is its only holder and writes without a copy."),
    ([9, 9, 9, 9], "A fork copies nothing: it counts two more holders for each of the same 3 blocks."),
    ([9, 10, 11, 11], "A fork copies nothing: the three rows hold the same 3 blocks."),
    ([9, 10, 11, 12], "A fork copies nothing: the three rows hold the same 3 blocks. And A, alone at the end, need not copy."),
    ([3, 6, 9, 9], "Only the block that is written is copied. The two full blocks stay shared."),
    ([3, 6, 9, 12], "Only the block that is written is copied. And A, alone at the end, need not copy at all."),
    ([3, 4, 4, 4], "B's copy is B's alone. C still shares the old block with A and needs a copy too."),
    ([3, 4, 4, 5], "Two rows besides A write: B copies, C copies, and then A is alone in the old block."),
    ([4, 5, 6, 6], "20 tokens take 3 blocks of 8: 8 + 8 + 4."),
))

# 08.4 ---------------------------------------------------------------- how much of a prefix can be reused


def _common(prompt, cached):
    return next((i for i, (a, b) in enumerate(zip(prompt, cached)) if a != b), min(len(prompt), len(cached)))


def _reuse(prompt, cached, snapshots, size):
    most = min(_common(prompt, cached), len(prompt) - 1)
    return max([n for n in snapshots if n <= most // size * size], default=0)


_LONG = list(range(10, 50))
REUSE = Function(
    right=_reuse,
    calls=((_LONG[:20] + [1, 2], _LONG, [8, 16, 32], 8), (_LONG[:30], _LONG, [8, 32], 8), (_LONG[:16], _LONG[:16], [8, 16], 8),
           (_LONG[:23], _LONG, [], 8), ([1, 2, 3, 4, 5], _LONG, [4, 8], 4), (_LONG, _LONG[:12], [4, 12], 4),
           (_LONG[:8] + [1, 2], _LONG, [4, 8, 12], 4)),
    slips=(
        (lambda prompt, cached, snapshots, size: _common(prompt, cached),
         "Those are the tokens in common. Blocks hold their keys and values, but the linear layers "
         "can only start from a snapshot."),
        (lambda prompt, cached, snapshots, size: _common(prompt, cached) // size * size,
         "Right for a model of attention alone. On a hybrid the blocks up to there need a snapshot "
         "at their end as well."),
        (lambda prompt, cached, snapshots, size: min(_common(prompt, cached), len(prompt) - 1) // size * size,
         "Right for a model of attention alone. On a hybrid the blocks up to there need a snapshot "
         "at their end as well."),
        (lambda prompt, cached, snapshots, size: max([n for n in snapshots if n <= _common(prompt, cached)], default=0),
         "If the whole prompt is reused, no token is left to run, and nothing gives the logits of "
         "the next. The last token always runs."),
        (lambda prompt, cached, snapshots, size: max(snapshots, default=0),
         "The newest snapshot may lie behind the tokens in common: it then remembers somebody else's words."),
        (lambda prompt, cached, snapshots, size: max([n for n in snapshots if n <= len(prompt) - 1], default=0),
         "You never compare the tokens: the snapshot of another text is not this prompt's."),
        (lambda prompt, cached, snapshots, size: min([n for n in snapshots if n <= min(_common(prompt, cached), len(prompt) - 1)],
                                                     default=0),
         "That is the shortest snapshot that fits; the longest saves more."),
        (lambda prompt, cached, snapshots, size: len(prompt) - _reuse(prompt, cached, snapshots, size),
         "Those are the tokens still to run. Asked are those reused."),
    ),
)

EXERCISES = {"08.1": WASTE, "08.2": MISSING, "08.3": HELD, "08.4": REUSE}
