"""Chapter 06's exercises: the mask, positions, a pad against the recurrent state, stops, and riding along."""
from numbers import Real

from qwen.exercises import Function, Value, plain


# 06.1 ---------------------------------------------------------------- pad and mask

def _pad(seqs, pad_id, multiple, left=True, width=None, mask_row=None):
    longest = max(map(len, seqs))
    width = width(longest, multiple) if width else longest + -longest % multiple
    ids, mask = [], []
    for seq in seqs:
        pads, real = [pad_id] * (width - len(seq)), [True] * len(seq)
        ids.append(pads + list(seq) if left else list(seq) + pads)
        mask.append([False] * len(pads) + real if left else real + [False] * len(pads))
    return ids, mask_row(ids, mask) if mask_row else mask


PAD = Function(
    right=_pad,
    calls=(([[7, 0, 9], [1, 2, 3, 4]], 0, 4), ([[0], [0, 0], [5, 6, 7]], 0, 2), ([[3, 5], [6]], 5, 8), ([[2], [4, 4, 4]], 1, 1)),
    slips=(
        (lambda seqs, pad_id, multiple: _pad(seqs, pad_id, multiple,
                                             mask_row=lambda ids, mask: [[i != pad_id for i in r] for r in ids]),
         "Your mask asks which ids equal pad_id. A real prompt may hold that id; only the lengths know the pads."),
        (lambda seqs, pad_id, multiple: _pad(seqs, pad_id, multiple, left=False),
         "Your pads stand on the right. The last column of a short row is then a pad, and a decoder that reads the "
         "last column continues from it."),
        (lambda seqs, pad_id, multiple: _pad(seqs, pad_id, multiple, left=False,
                                             mask_row=lambda ids, mask: [[i != pad_id for i in r] for r in ids]),
         "Two slips: your pads stand on the right, and your mask asks which ids equal pad_id. Only the lengths know the pads."),
        (lambda seqs, pad_id, multiple: _pad(seqs, pad_id, multiple, width=lambda longest, multiple: longest),
         "Your box is as wide as the longest prompt. Round its width up to a multiple of `multiple`."),
        (lambda seqs, pad_id, multiple: _pad(seqs, pad_id, multiple,
                                             width=lambda longest, multiple: (longest // multiple + 1) * multiple),
         "Your box is one multiple too wide where the longest prompt fits already."),
        (lambda seqs, pad_id, multiple: _pad(seqs, 0, multiple), "You fill with 0. The id that fills is `pad_id`."),
        (lambda seqs, pad_id, multiple: _pad(seqs, pad_id, multiple)[::-1],
         "You have them the wrong way round: return (ids, mask)."),
        (lambda seqs, pad_id, multiple: _pad(seqs, pad_id, multiple)[0], "You return the ids only. The mask is wanted too."),
        (lambda seqs, pad_id, multiple: _pad(seqs, pad_id, multiple, mask_row=lambda ids, mask: [[not m for m in r] for r in mask]),
         "Your mask is the wrong way round: here True means real."),
        (lambda seqs, pad_id, multiple: _pad(seqs, pad_id, multiple, mask_row=lambda ids, mask: [[int(m) for m in r] for r in mask]),
         "Your mask holds 0 and 1. Use True and False: a number may be added to the scores by mistake, "
         "a truth value cannot."),
    ),
)


# 06.2 ---------------------------------------------------------------- positions of one row

def _positions(mask, length):
    seen, out = 0, []
    for real in mask:
        out.append(length + seen if real else 0)
        seen += real
    return out


def _real(numbers, mask):
    return [p if real else 0 for p, real in zip(numbers, mask)]


_POSITIONS = Function(
    right=_positions,
    calls=(([False, False, True, True, True], 0), ([True], 3), ([False, True, True], 5), ([True, False, True], 2)),
    slips=(
        (lambda mask, length: _real(range(len(mask)), mask),
         "You number the places of this call. Pads must not count, and the row has processed `length` tokens already."),
        (lambda mask, length: _real(range(length, length + len(mask)), mask),
         "Your pads get numbers too: a real token's position must not grow because something stands in front of it."),
        (lambda mask, length: _real([length + i - mask.index(True) for i in range(len(mask))], mask),
         "You leave out the pads in front of the row only. A pad may also stand between real tokens."),
        (lambda mask, length: _real([p - length for p in _positions(mask, length)], mask),
         "You start at 0 again in every call. The row has processed `length` tokens already, and decode calls "
         "with one token at a time."),
        (lambda mask, length: _real([p + 1 for p in _positions(mask, length)], mask),
         "You are one too high: the first token of a row has position 0."),
        (lambda mask, length: [p for p, real in zip(_positions(mask, length), mask) if real],
         "You return the real tokens' positions only. Give a number for each place; at a pad any from 0 up will do."),
    ),
)


def positions(answer):
    """A judge: positions at pads are free, but an index below 0 silently reads a table from its end."""
    negative = []

    def real_only(mask, length):
        found = plain(answer(mask, length))
        if not isinstance(found, list) or len(found) != len(mask):
            return found
        negative.extend(p for p, real in zip(found, mask) if not real and p < 0)
        return _real(found, mask)

    hint = _POSITIONS(real_only if callable(answer) else answer)
    if not hint and negative:
        return ("The real tokens are right, but a pad gets a number below 0, and table[-1] silently reads "
                "a table's last row: clamp at 0.")
    return hint


# 06.3 ---------------------------------------------------------------- one pad against S = 8

_STATE = Value(
    right=[3, 4, 5, 8],
    slips=(
        ([2.5, 4, 5, 8], "You let S fade after the write. Decay comes first; then S is asked what it holds."),
        ([5, 4, 9, 8], "You wrote beta · value. The write is only the difference: beta · (value - key · S)."),
        ([3, 4, 9, 8], "(a) is right. In (c) you wrote beta · value; there too only the difference to what S holds is written."),
        ([1, 4, 5, 8], "You asked S what it holds before it faded. Decay comes first."),
        ([4, 4, 8, 8], "You took key = value = 0, a pad whose input is zero all the way. Here the key is 1, the value 2."),
        ([3, 8, 5, 8], "With only beta = 0 nothing is written, but S still fades."),
        ([3, 4, 5, 4], "In (d) the decay is off too: nothing is written, and nothing fades."),
        ([3, 5, 4, 8], "You have the two halves the wrong way round: beta = 0 stops the write; without decay S does not fade."),
    ),
)


def state(answer):
    """A judge that first asks for four numbers."""
    if isinstance(plain(answer), Real):
        return "One number is not enough: the four cases make a list, [a, b, c, d]."
    return _STATE(answer)


# 06.4 ---------------------------------------------------------------- which sampled tokens are the answer

def _record(sampled, stop, first=0, keep=True):
    rows = []
    for row in zip(*sampled):
        end = next((i for i, token in enumerate(row) if i >= first and token in stop), len(row))
        rows.append(list(row[:end + keep]))
    return rows


def _all_stop_together(sampled, stop):
    steps = next((i + 1 for i, step in enumerate(sampled) if any(token in stop for token in step)), len(sampled))
    return [list(row[:steps]) for row in zip(*sampled)]


RECORD = Function(
    right=_record,
    calls=(([[5, 9, 3], [6, 1, 9], [9, 2, 4], [7, 7, 7]], {9}), ([[1, 2], [8, 3], [4, 9]], {8, 9}), ([[9], [9]], {9}),
           ([[4, 5], [6, 7]], set())),
    slips=(
        (lambda sampled, stop: _record(sampled, stop, keep=False),
         "You drop the stop token. Here it is the last one listed, so that a row that stopped differs from one cut off."),
        (lambda sampled, stop: [[token for token in row if token not in stop] for row in zip(*sampled)],
         "You take the stop tokens out and go on after them. The first one ends the row, and is the last token listed."),
        (lambda sampled, stop: _record(sampled, stop, first=1),
         "You do not look at a row's first token. It comes from the prefill, and it may be a stop already."),
        (_all_stop_together, "One row's stop ends all rows. It ends its own row only."),
        (lambda sampled, stop: [list(row) for row in zip(*sampled)],
         "You record rows after their stop. Those tokens are computed, but they are nobody's answer."),
        (lambda sampled, stop: [_record([[token] for token in step], stop)[0] for step in sampled],
         "You read the steps as rows: sampled[step][row]."),
        (lambda sampled, stop: sampled, "You return the steps as they are: sampled[step][row]. A list for each row is wanted."),
    ),
)


# 06.5 ---------------------------------------------------------------- useful and computed, k rows at a time

def _count(lengths, k, last=len):
    batches = [lengths[i:i + k] for i in range(0, len(lengths), k)]
    return sum(lengths), sum(last(batch) * max(batch) for batch in batches)


COUNT = Function(
    right=_count,
    calls=(([3, 50, 4, 2, 7], 2), ([4, 4], 2), ([7], 4), ([81, 9, 38, 2], 3), ([5, 1, 6], 1)),
    slips=(
        (lambda lengths, k: (sum(lengths), len(lengths) * max(lengths)),
         "You put everybody into one batch. Only k rows fit; the next batch starts when this one has ended."),
        (lambda lengths, k: (sum(lengths), sum(lengths)),
         "You let finished rows leave. Here they ride along until the longest answer of their batch ends, and are computed."),
        (lambda lengths, k: _count(lengths, k, last=lambda batch: k),
         "You count k rows in the last batch too, but it may have fewer."),
        (lambda lengths, k: (sum(lengths), _count(sorted(lengths), k)[1]),
         "You sorted the answers first. That wastes less, but nobody knows the lengths beforehand: keep the order given."),
        (lambda lengths, k: (sum(lengths), _count(sorted(lengths, reverse=True), k)[1]),
         "You sorted the answers first. That wastes less, but nobody knows the lengths beforehand: keep the order given."),
        (lambda lengths, k: (_count(lengths, k)[1],) * 2,
         "Not all computed tokens are useful: a row's own answer ends at its own length."),
        (lambda lengths, k: _count(lengths, k)[::-1], "You have them the wrong way round: (useful, computed)."),
        (lambda lengths, k: (sum(lengths), _count(lengths, k, last=lambda batch: 1)[1]),
         "You counted steps. Each step computes one token for every row of the batch."),
        (lambda lengths, k: (sum(lengths), _count(lengths, k)[1] - sum(lengths)),
         "Your second number is what is wasted. Computed is the whole box, useful part included."),
    ),
)

EXERCISES = {"06.1": PAD, "06.2": positions, "06.3": state, "06.4": RECORD, "06.5": COUNT}
