"""Chapter 04's exercises (untouched, right, differently right, each tempting wrong answer) and its grid picture."""
from itertools import accumulate

import matplotlib
import pytest
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from chapter_exercises import exercise_tests
from qwen import attention, figures


def mask_torch(history, new):
    mask = torch.ones(new, history + new, dtype=torch.bool)
    mask[:, history:] = torch.tril(torch.ones(new, new, dtype=torch.bool))
    return mask


def mask_package(history, new):
    return attention.visible(history + torch.arange(new)[None], history + new)[0]


def offsets_accumulate(history, new):
    return [0, *accumulate(new)], [0, *accumulate(map(sum, zip(history, new)))]


def offsets_torch(history, new):
    q, k = torch.tensor(new), torch.tensor(new) + torch.tensor(history)
    return tuple(torch.nn.functional.pad(n.cumsum(0), (1, 0)) for n in (q, k))


def verify_loop(drafts, found):
    new, place = [], 0
    while place < len(drafts) and drafts[place] == found[place]:
        new.append(drafts[place])
        place += 1
    return [*new, found[place]]


def verify_cumprod(drafts, found):
    agree = torch.tensor([d == f for d, f in zip(drafts, found)], dtype=torch.int64)
    return torch.tensor(found)[:int(agree.cumprod(0).sum()) + 1]


def causal(history, new):
    return mask_torch(history, new).tolist()


def pairs(history, new):
    return tuple(map(list, offsets_accumulate(history, new)))


RIGHT = {
    "04.1": [54, 54.0, torch.tensor(54), 3 * sum(sum(row) for row in causal(4, 3))],
    "04.2": [mask_torch, mask_package, lambda history, new: tuple(map(tuple, causal(history, new)))],
    "04.3": [offsets_accumulate, offsets_torch],
    "04.4": [verify_loop, verify_cumprod],
    "04.5": [22, 22.0, torch.tensor([22])],
}
WRONG = {
    "04.1": [(18, "one user's"), (63, "triangle"), (189, "flat grid"), (45, "itself"), (36, "history columns"),
             (9, "masked"), (135, "forbidden"), (126, "cross-user"), (162, "alone"), (7, "not it")],
    "04.2": [                                               # case 4: the first is what is_causal=True does
        (lambda history, new: torch.ones(new, history + new, dtype=torch.bool).tril(), "top left"),
        (lambda history, new: torch.ones(new, history + new, dtype=torch.bool).tril(history - 1), "itself"),
        (lambda history, new: ~mask_torch(history, new), "wrong way round"),
        (lambda history, new: mask_torch(0, new), "history columns are missing"),
        (lambda history, new: mask_torch(history, new) & (torch.arange(history + new) >= history), "hide the history"),
        (lambda history, new: torch.ones(new, history + new, dtype=torch.bool), "hides nothing"),
        (lambda history, new: mask_torch(history, new).T, "exchanged"),
        (lambda history, new: mask_torch(0, history + new), "every token"),
        (lambda history, new: mask_torch(history, new).int(), "True and False"),
        (lambda history, new: [[True]], "Called with"),
    ],
    "04.3": [
        (lambda history, new: (offsets_accumulate(history, new)[0], [0, *accumulate(history)]), "history alone"),
        (lambda history, new: (list(accumulate(new)), pairs(history, new)[1][1:]), "leading 0"),
        (lambda history, new: tuple(c[:-1] for c in pairs(history, new)), "end of the last"),
        (lambda history, new: (new, list(map(sum, zip(history, new)))), "Those are the lengths"),
        (lambda history, new: ([0] + new, [0, *map(sum, zip(history, new))]), "After the 0"),
        (lambda history, new: pairs(history, new)[::-1], "exchanged"),
        (lambda history, new: (pairs(history, new)[1], pairs(history, new)[1]), "no queries"),
        (lambda history, new: pairs(history, new)[0], "alone"),
        (lambda history, new: (pairs(history, new)[0],
                               [user * max(map(sum, zip(history, new))) for user in range(len(new) + 1)]), "pads"),
        (lambda history, new: ([0], [0]), "Called with"),
    ],
    "04.4": [
        (lambda drafts, found: verify_loop(drafts, found)[:-1], "comes for free"),
        (lambda drafts, found: verify_loop(drafts, found)[:max(len(drafts), 1) if drafts else 0] , "after the last one"),
        (lambda drafts, found: found, "first refusal"),
        (lambda drafts, found: [f for d, f in zip(drafts, found) if d == f] + found[-1:], "behind a refused one"),
        (lambda drafts, found: [f for d, f in zip(drafts, found) if d == f], "own token is missing"),
        (lambda drafts, found: found if drafts == found[:-1] else drafts[:len(verify_loop(drafts, found))], "refused draft itself"),
        (lambda drafts, found: verify_loop(drafts, found)[:-1] + found[-1:], "found[accepted]"),
        (lambda drafts, found: len(verify_loop(drafts, found)) - 1, "how many drafts"),
        (lambda drafts, found: len(verify_loop(drafts, found)), "how many tokens"),
        (lambda drafts, found: [0], "Called with"),
    ],
    "04.5": [(24, "refused"), (23, "not been fed"), (21, "two, not one"), (20, "before the step"), (25, "Refused drafts"),
             (3, "not it")],                                # case 12
}


globals().update(exercise_tests("04", RIGHT, WRONG))


@pytest.mark.parametrize("history, new", [([3, 3], [2, 2]), ([0], [4]), ([7, 2, 0], [1, 3, 2])])
def test_the_grid_picture_shows_the_mask(history, new):
    figures.setup()
    _, ax = plt.subplots()
    counts = figures.attention_grid(ax, history, new)
    own = [n * (h + n) for h, n in zip(history, new)]
    allowed = sum(int(mask_torch(h, n).sum()) for h, n in zip(history, new))
    assert counts == {"allowed": allowed, "masked": sum(own) - allowed, "other": sum(new) * (sum(history) + sum(new)) - sum(own)}
    cells = iter(matplotlib.colors.to_hex(patch.get_facecolor()) for patch in ax.patches)
    seen = torch.block_diag(*[mask_torch(h, n) for h, n in zip(history, new)])
    for query, line in enumerate(seen.tolist()):
        user = next(u for u in range(len(new)) if query < sum(new[:u + 1]))
        assert [next(cells) == figures.COLORS["ABCD"[user]] for _ in line] == line
    plt.close("all")
