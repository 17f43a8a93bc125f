"""Exercises of chapter 04, two tokens per user: the grid, its mask, its offsets, and what a verification yields."""
from qwen.exercises import Function, Value


def _mask(history, new):
    """(new, history + new) nested lists: True where query i, at position history + i, may see the key."""
    return [[key <= history + i for key in range(history + new)] for i in range(new)]


MASK = Function(
    right=_mask,
    calls=((3, 2), (0, 3), (5, 1), (2, 4)),
    slips=(
        (lambda history, new: [[key <= i for key in range(history + new)] for i in range(new)],
         "Your triangle is aligned at the top left, so history is hidden. Query i stands at position history + i."),
        (lambda history, new: [[key < history + i for key in range(history + new)] for i in range(new)],
         "A token may look at itself: compare with <=, not <."),
        (lambda history, new: [[key > history + i for key in range(history + new)] for i in range(new)],
         "Your mask is the wrong way round: here True means may attend."),
        (lambda history, new: [[key <= i for key in range(new)] for i in range(new)],
         "The history columns are missing: a line has history + new keys."),
        (lambda history, new: [[key >= history and key <= history + i for key in range(history + new)] for i in range(new)],
         "You hide the history; it is always in the past, so every query sees all of it."),
        (lambda history, new: [[True] * (history + new)] * new,
         "That hides nothing: a query must not see the new tokens after its own."),
        (lambda history, new: [list(column) for column in zip(*_mask(history, new))],
         "Queries and keys are exchanged: a line for each query, a column for each key."),
        (lambda history, new: [[key <= query for key in range(history + new)] for query in range(history + new)],
         "You have a line for every token; only the new ones bring a query. Take the last `new` lines."),
        (lambda history, new: [[int(cell) for cell in line] for line in _mask(history, new)],
         "Your mask holds 0 and 1. Use True and False: a number may be added to the scores by mistake."),
    ),
)


def _offsets(lengths):
    out = [0]
    for length in lengths:
        out.append(out[-1] + length)
    return out


def _both(history, new):
    """(cu_seqlens_q, cu_seqlens_k): a user's queries are the new tokens, the keys history and new together."""
    return _offsets(new), _offsets([h + n for h, n in zip(history, new)])


OFFSETS = Function(
    right=_both,
    calls=(([3, 3], [2, 2]), ([3, 2], [2, 2]), ([0, 7, 4], [5, 1, 3]), ([6], [1])),
    slips=(
        (lambda history, new: (_offsets(new), _offsets(history)),
         "Your keys are the history alone; the new tokens' own keys join the cache before attention."),
        (lambda history, new: tuple(c[1:] for c in _both(history, new)),
         "The leading 0 is missing: the first user's part begins there."),
        (lambda history, new: tuple(c[:-1] for c in _both(history, new)),
         "You list the beginnings only; the end of the last user's part is wanted too."),
        (lambda history, new: (new, [h + n for h, n in zip(history, new)]),
         "Those are the lengths; add them up one after the other, starting with 0."),
        (lambda history, new: ([0, *new], [0, *(h + n for h, n in zip(history, new))]),
         "After the 0 those are lengths; each entry is the sum of all lengths before it."),
        (lambda history, new: _both(history, new)[::-1], "The two lists are exchanged: queries first, then keys."),
        (lambda history, new: (_both(history, new)[1],) * 2,
         "History brings no queries: only the new tokens are projected in this step."),
        (lambda history, new: _both(history, new)[0], "That is cu_seqlens_q alone; return both lists, (q, k)."),
        (lambda history, new: (_offsets(new), _offsets([max(h + n for h, n in zip(history, new))] * len(new))),
         "You pad every user to the longest; flat buffers need no pads, so take each user's own number."),
    ),
)


def _accepted(drafts, found):
    return next((i for i, draft in enumerate(drafts) if draft != found[i]), len(drafts))


def _verify(drafts, found):
    """The accepted drafts and the model's own token after them."""
    return list(found[:_accepted(drafts, found) + 1])


VERIFY = Function(
    right=_verify,
    calls=(([5, 6, 7], [5, 6, 7, 8]), ([5, 6, 7], [5, 6, 9, 8]), ([5, 6, 7], [5, 9, 7, 8]), ([5, 6, 7], [4, 6, 7, 8]), ([], [3])),
    slips=(
        (lambda drafts, found: list(drafts[:_accepted(drafts, found)]),
         "The model's own token after the last accepted draft is missing: it comes for free, and it keeps the loop going."),
        (lambda drafts, found: list(found[:_accepted(drafts, found) + 1]) if _accepted(drafts, found) < len(drafts) else list(drafts),
         "When all drafts are accepted, the model's token after the last one is new too."),
        (lambda drafts, found: list(found),
         "What the model says after a refused draft follows a token that is not in the answer; stop at the first refusal."),
        (lambda drafts, found: [t for d, t in zip(drafts, found) if d == t] + [found[-1]],
         "You keep drafts behind a refused one. The model saw the refused token before them, so they mean nothing."),
        (lambda drafts, found: [t for d, t in zip(drafts, found) if d == t],
         "You keep drafts behind a refused one, and the model's own token is missing."),
        (lambda drafts, found: list(drafts[:_accepted(drafts, found) + 1]) if _accepted(drafts, found) < len(drafts) else list(found),
         "You hand out the refused draft itself; in its place stands the model's own token."),
        (lambda drafts, found: list(found[:_accepted(drafts, found)]) + [found[-1]],
         "The token after the accepted drafts is found[accepted]; the last of found follows all drafts, refused ones too."),
        (_accepted, "That is how many drafts are accepted; the list of new tokens is wanted."),
        (lambda drafts, found: len(_verify(drafts, found)), "That is how many tokens are new; the list of them is wanted."),
    ),
)


EXERCISES = {
    # allowed cells, 3 users, 4 history and 3 new tokens each
    "04.1": Value(54, (
        (18, "That is one user's block; there are three users."),
        (63, "Those are the blocks' cells; the causal triangle hides some of them."),
        (189, "That is the whole flat grid; users do not meet, and later tokens are hidden."),
        (45, "A token may look at itself."),
        (36, "Those are the history columns; the new tokens see new ones as well."),
        (9, "Those are the cells that are computed and masked; the allowed ones are wanted."),
        (135, "That is what is forbidden; the rest of the grid is wanted."),
        (126, "Those are the cells of the wasted cross-user blocks."),
        (162, "You applied 'not later' alone; other users' keys are forbidden too."),
    )),
    "04.2": MASK,
    "04.3": OFFSETS,
    "04.4": VERIFY,
    # tokens processed before the next verification: 20 before, 1 last token, 1 of 3 drafts accepted
    "04.5": Value(22, (
        (24, "Two of the drafts were refused; their traces have to go."),
        (23, "The model's own new token has not been fed yet; the next step begins with it."),
        (21, "The last token and the accepted draft have both been processed: two, not one."),
        (20, "That is the state before the step; the last token and the accepted draft count as processed."),
        (25, "Refused drafts do not stay, and the model's own new token has not been fed yet."),
    )),
}
