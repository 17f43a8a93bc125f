"""Chapter 06's exercises: the mask, positions, a pad against the recurrent state, stops, and riding along."""
from qwen.exercises import Function, Value, plain


# 06.1 ---------------------------------------------------------------- pad and mask

def _pad(seqs, pad_id, left=True, mask_row=None):
    width = max(map(len, seqs))
    ids, mask = [], []
    for seq in seqs:
        pads = width - len(seq)
        real = [True] * len(seq)
        ids.append([pad_id] * pads + list(seq) if left else list(seq) + [pad_id] * pads)
        mask.append([False] * pads + real if left else real + [False] * pads)
    return ids, mask_row(ids, mask) if mask_row else mask


PAD = Function(
    right=lambda seqs, pad_id: _pad(seqs, pad_id),
    calls=(([[7, 0, 9], [1, 2, 3, 4]], 0), ([[0], [0, 0], [5, 6, 7]], 0), ([[3, 5], [6]], 5)),
    slips=(
        (lambda seqs, pad_id: _pad(seqs, pad_id, mask_row=lambda ids, mask: [[i != pad_id for i in r] for r in ids]),
         "Your mask asks which ids equal pad_id. A real prompt may hold that id; only the lengths know the pads."),
        (lambda seqs, pad_id: _pad(seqs, pad_id, left=False),
         "Your pads stand on the right. The last column of a short row is then a pad, and a decoder that reads the "
         "last column continues from it."),
        (lambda seqs, pad_id: _pad(seqs, pad_id, mask_row=lambda ids, mask: [[not m for m in r] for r in mask]),
         "Your mask is the wrong way round: here True means real."),
        (lambda seqs, pad_id: _pad(seqs, pad_id, mask_row=lambda ids, mask: [[int(m) for m in r] for r in mask]),
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


_POSITIONS = Function(
    right=_positions,
    calls=(([False, False, True, True, True], 0), ([True], 3), ([False, True, True], 5), ([True, False, True], 2)),
    slips=(
        (lambda mask, length: [length + i if real else 0 for i, real in enumerate(mask)],
         "Your pads get numbers too: a real token's position must not grow because something stands in front of it."),
        (lambda mask, length: [p - length if real else 0 for p, real in zip(_positions(mask, length), mask)],
         "You start at 0 again in every call. The row has processed `length` tokens already, and decode calls "
         "with one token at a time."),
        (lambda mask, length: [p + 1 if real else 0 for p, real in zip(_positions(mask, length), mask)],
         "You are one too high: the first token of a row has position 0."),
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
        return [p if real else 0 for p, real in zip(found, mask)]

    hint = _POSITIONS(real_only if callable(answer) else answer)
    if not hint and negative:
        return ("The real tokens are right, but a pad gets a number below 0, and table[-1] silently reads "
                "a table's last row: clamp at 0.")
    return hint


# 06.3 ---------------------------------------------------------------- one pad against S = 8

STATE = Value(
    right=[3, 4, 5, 8],
    slips=(
        ([2.5, 4, 5, 8], "You let S fade after the write. Decay comes first; then S is asked what it holds."),
        ([5, 4, 9, 8], "You wrote beta v k. The write is only the difference: beta (v - what S holds) k."),
        ([1, 4, 5, 8], "You asked S what it holds before it faded. Decay comes first."),
        ([4, 4, 8, 8], "You took k = v = 0, a pad whose input is zero all the way. Here the pad's key is 1, its value 2."),
        ([3, 8, 5, 8], "With only beta = 0 nothing is written, but S still fades."),
        ([3, 5, 4, 8], "You have the two halves the wrong way round: beta = 0 stops the write, g = 0 stops the decay."),
    ),
)


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
        (lambda sampled, stop: _record(sampled, stop, first=1),
         "You do not look at a row's first token. It comes from the prefill, and it may be a stop already."),
        (_all_stop_together, "One row's stop ends all rows. It ends its own row only."),
        (lambda sampled, stop: [list(row) for row in zip(*sampled)],
         "You record rows after their stop. Those tokens are computed, but they are nobody's answer."),
        (lambda sampled, stop: [_record([step], stop)[0] for step in sampled],
         "You read the steps as rows: sampled[step][row]."),
    ),
)


# 06.5 ---------------------------------------------------------------- useful and computed

COUNT = Function(
    right=lambda lengths: (sum(lengths), len(lengths) * max(lengths)),
    calls=(([3, 50],), ([4, 4],), ([7],), ([81, 9, 38, 2],)),
    slips=(
        (lambda lengths: (sum(lengths), sum(lengths)),
         "You let finished rows leave. Here they ride along until the longest answer ends, and are computed."),
        (lambda lengths: (len(lengths) * max(lengths), len(lengths) * max(lengths)),
         "Not all computed tokens are useful: a row's own answer ends at its own length."),
        (lambda lengths: (len(lengths) * max(lengths), sum(lengths)), "You have them the wrong way round: (useful, computed)."),
        (lambda lengths: (sum(lengths), max(lengths)),
         "You counted steps. Each step computes one token for every row of the batch."),
        (lambda lengths: (sum(lengths), len(lengths) * max(lengths) - sum(lengths)),
         "Your second number is what is wasted. Computed is the whole box, useful part included."),
    ),
)

EXERCISES = {"06.1": PAD, "06.2": positions, "06.3": STATE, "06.4": RECORD, "06.5": COUNT}
