"""Chapter 03's exercises: the bill of a box, the pad's weight, the mask of each user, offsets, and a window without pads."""
from qwen.exercises import Function, Value

# 03.1 ---------------------------------------------------------------- scores computed for nothing


def _causal(n):
    return n * (n + 1) // 2


def _box(lengths):
    return len(lengths) * max(lengths) ** 2


WASTE = Function(
    right=lambda lengths: _box(lengths) - sum(map(_causal, lengths)),
    calls=(([3, 1],), ([4, 4],), ([7, 2, 5],), ([100, 5],)),
    slips=(
        (lambda lengths: _box(lengths) - sum(n * n for n in lengths),
         "You count every key of a row as useful. A query needs the keys up to its own; the upper triangle is wasted as well."),
        (lambda lengths: _box(lengths) - sum(n * (n - 1) // 2 for n in lengths),
         "You left the diagonal out: a token may look at itself, so the first query needs one key, not none."),
        (lambda lengths: sum(_causal(max(lengths)) - _causal(n) for n in lengths),
         "The box computes its upper triangles too: its width squared for every row."),
        (lambda lengths: len(lengths) * max(lengths) - sum(lengths),
         "Those are the pads. The question is about scores, one for each query and key."),
        (lambda lengths: (len(lengths) * max(lengths) - sum(lengths)) ** 2,
         "Do not square the pads: a pad's query meets real keys too, and the other way round."),
        (lambda lengths: max(lengths) ** 2 - sum(map(_causal, lengths)), "The box has its width squared for every row, not once."),
        (lambda lengths: sum(lengths) ** 2 - sum(map(_causal, lengths)),
         "Rows do not meet each other in a box: its width squared for every row, not all tokens squared."),
        (lambda lengths: sum(map(_causal, lengths)), "Those are the useful scores. The question is what is computed beyond them."),
        (lambda lengths: 1 - sum(map(_causal, lengths)) / _box(lengths), "That is the wasted share. The question is how many scores."),
        (lambda lengths: sum(_causal(n - 1) for n in lengths),
         "Those are the upper triangles of the real tokens. The scores of pads, as queries and as keys, are wasted too."),
        (_box, "That is the whole box, useful scores included."),
    ),
)

# 03.2 ---------------------------------------------------------------- four ways to treat a pad's score of 0

OUTPUTS = Value([5.25, 4, 5.25, 3], (
    ([4, 4, 4, 4], "A score of 0 is not hidden: e^0 = 1, so unless it is -inf the pad takes its share."),
    ([5.25, 4, 4, 4], "In (c) 0 times 0 is a score of 0, and e^0 = 1. In (d) the remaining weights no longer sum to one."),
    ([5.25, 4, 4, 3], "In (c) 0 times 0 is a score of 0, and e^0 = 1: nothing is hidden."),
    ([5.25, 4, 5.25, 4], "In (d) the softmax came first: three weights of 1/4 are left, and they do not sum to one."),
    ([5.25, 3, 5.25, 3], "In (b) softmax divides by the sum over what is left, three scores: weights of 1/3."),
    ([5.25, 3, 3, 3], "In (b) softmax divides by the sum over three scores; and in (c) 0 times 0 is a score of 0, hidden by nothing."),
    ([5.25, 4, 3, 3], "In (c) the mask comes before the softmax: 0 times 0 is a score of 0, and e^0 = 1."),
    ([5.25, 4, 3, 5.25], "(c) and (d) are exchanged: a score of 0 still gets its weight, a weight of 0 gets none."),
    ([5.25, 4, 3, 4], "In (c) 0 times 0 is a score of 0, and e^0 = 1. In (d) the three weights of 1/4 are not scaled up again."),
    ([4, 4, 4, 3], "A score of 0 is not hidden: e^0 = 1, so in (a) and (c) the pad takes its share."),
    ([0, 4, 0, 0], "Scores of 0 do not give weights of 0: e^0 = 1, so all four weights are equal."),
    ([21, 12, 21, 12], "Those are sums of values; softmax makes weights that sum to one, a quarter or a third each."),
    ([0.25, 0, 0.25, 0], "Those are the pad's weights. The question is the output: weights times values, summed."),
))

# 03.3 ---------------------------------------------------------------- the mask of each user


def _masks(lengths, new, may):
    """may(query, key, n, keys) for every cell."""
    keys = max(lengths)
    return [[[may(query, key, n, keys) for key in range(keys)] for query in range(new)] for n in lengths]


def _mask(lengths, new):
    return _masks(lengths, new, lambda q, k, n, keys: keys - n <= k <= keys - new + q)


MASK = Function(
    right=_mask,
    calls=(([5, 4], 2), ([3, 1, 2], 1), ([4, 4], 4), ([6, 3], 3)),
    slips=(
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: k <= keys - new + q),
         "Your pads are visible. Row r's first max(lengths) - lengths[r] keys are nobody's."),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: keys - n <= k),
         "Your queries see the future: query i of the new ones must not see the new ones after it."),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: True),
         "Your mask hides nothing: neither the pads nor the future."),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: keys - n <= k <= q),
         "Your triangle is aligned top-left, as is_causal would do it. The last query sees the last key."),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: keys - n <= k <= keys - n + q),
         "Your first query sees one key only. It stands behind the row's history and sees all of that."),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: keys - n <= k < keys - new + q),
         "Your queries do not see themselves: a token may look at its own key."),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: k <= n - new + q),
         "Your pads stand behind the keys. Here they stand in front, so that the last column is everybody's last token."),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: keys - n <= k <= n - new + q),
         "Your last visible key counts from the row's first real key; the pads in front move it to the right."),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: keys - n <= k <= keys - new + q + 1),
         "Your queries see one key too many: the token right after their own."),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: 0.0 if keys - n <= k <= keys - new + q else float("-inf")),
         "That is the float mask, which is added to the scores. Asked is True = may look."),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: not keys - n <= k <= keys - new + q),
         "The wrong way round: here True means may look. (Some interfaces mean the opposite; always check.)"),
        (lambda lengths, new: _masks(lengths, new, lambda q, k, n, keys: int(keys - n <= k <= keys - new + q)),
         "Your mask holds 0 and 1. Use True and False: numbers may be added to the scores, truth values cannot."),
        (lambda lengths, new: _mask(lengths, new)[0],
         "That is one grid. Rows have different pads, so each needs its own: mask[row][query][key]."),
        (lambda lengths, new: [[list(column) for column in zip(*grid)] for grid in _mask(lengths, new)],
         "Queries and keys are exchanged: mask[row][query][key]."),
    ),
)

# 03.4 ---------------------------------------------------------------- the line of each row's next token


def _pairs(cu_seqlens):
    return list(zip(cu_seqlens, cu_seqlens[1:]))


LAST = Function(
    right=lambda cu_seqlens: [end - 1 if end > start else None for start, end in _pairs(cu_seqlens)],
    calls=(([0, 100, 105],), ([0, 3, 3, 4],), ([0, 0, 2, 9],), ([0, 1, 2, 3],)),
    slips=(
        (lambda cu_seqlens: [end - 1 for start, end in _pairs(cu_seqlens)],
         "A row without a token gets the line before it, which is its neighbour's last token. Give it None."),
        (lambda cu_seqlens: [end if end > start else None for start, end in _pairs(cu_seqlens)],
         "One too far: cu_seqlens[r + 1] is where the next row starts."),
        (lambda cu_seqlens: [end for start, end in _pairs(cu_seqlens)],
         "One too far: cu_seqlens[r + 1] is where the next row starts. And a row without a token has no line."),
        (lambda cu_seqlens: [start if end > start else None for start, end in _pairs(cu_seqlens)],
         "That is each row's first token; its last one gives the next."),
        (lambda cu_seqlens: [start for start, end in _pairs(cu_seqlens)],
         "That is where each row starts. Its last token gives the next, and a row without a token has none."),
        (lambda cu_seqlens: [end - start - 1 if end > start else None for start, end in _pairs(cu_seqlens)],
         "You count inside each row. The buffer is flat: add where the row starts."),
        (lambda cu_seqlens: [end - start - 1 for start, end in _pairs(cu_seqlens)],
         "You count inside each row. The buffer is flat: add where the row starts. And a row without a token has no line."),
        (lambda cu_seqlens: [end - 1 for start, end in _pairs(cu_seqlens) if end > start],
         "The rows without a token are missing, so the others move up and get their neighbours' places. Give them None."),
        (lambda cu_seqlens: [end - 1 if end > start else -1 for start, end in _pairs(cu_seqlens)],
         "As an index, -1 reads the buffer's last line, another row's. Give a row without a token None."),
        (lambda cu_seqlens: [end - 1 if end > start else 0 for start, end in _pairs(cu_seqlens)],
         "Line 0 belongs to a row that brought a token. Give a row without a token None."),
        (lambda cu_seqlens: [-1 for _ in cu_seqlens[1:]], "-1 is the last line of the whole buffer, the last row's. "
         "The others end earlier."),
    ),
)

# 03.5 ---------------------------------------------------------------- a window without pads


def _last(inputs, count):
    """The last `count` of inputs, with zeros in front."""
    return ([0] * count + list(inputs))[len(inputs):]


def _kept(inputs, real, t):
    return [x for x, is_real in zip(inputs[:t], real) if is_real]


WINDOW = Function(
    right=lambda inputs, real, t, kernel: _last(_kept(inputs, real, t), kernel - 1),
    calls=(([10, 110, 99, 210, 98, 97, 310], [True, True, False, True, False, False, True], 6, 4),
           ([10, 99, 110], [True, False, True], 2, 4),
           ([99, 98, 10, 110], [False, False, True, True], 3, 3),
           ([10, 110, 210, 310, 410], [True, True, True, True, True], 4, 3),
           ([10, 110], [True, True], 0, 3)),
    slips=(
        (lambda inputs, real, t, kernel: _last(inputs[:t], kernel - 1),
         "You take the places straight before t, pads and all. Only real inputs belong to a row."),
        (lambda inputs, real, t, kernel: _last([x * is_real for x, is_real in zip(inputs[:t], real)], kernel - 1),
         "You put a zero where a pad stands. It still takes a place in the window and pushes a real input out: skip it."),
        (lambda inputs, real, t, kernel: _last(_kept(inputs[:t][1 - kernel:], real[:t][1 - kernel:], t), kernel - 1),
         "You cut the window first and dropped its pads afterwards, so real inputs further back are lost: drop the pads first."),
        (lambda inputs, real, t, kernel: _last(_kept(inputs, real, t), kernel),
         "One too many: the kernel covers the token itself and kernel - 1 inputs before it."),
        (lambda inputs, real, t, kernel: _last(_kept(inputs, real, t + 1), kernel - 1),
         "You include place t itself. The window holds the inputs before it."),
        (lambda inputs, real, t, kernel: _last(_kept(inputs, real, t + 1), kernel),
         "That is the window and the token itself. Asked are the kernel - 1 inputs before place t."),
        (lambda inputs, real, t, kernel: _kept(inputs, real, t)[-(kernel - 1):],
         "Too short where the row has just begun: fill with zeros in front."),
        (lambda inputs, real, t, kernel: (_kept(inputs, real, t)[-(kernel - 1):] + [0] * kernel)[:kernel - 1],
         "Your zeros stand behind. What came before the row's first token is missing, so they go in front."),
        (lambda inputs, real, t, kernel: _last(_kept(inputs, real, t), kernel - 1)[::-1], "Newest first; the oldest comes first."),
        (lambda inputs, real, t, kernel: ([0] * kernel + _kept(inputs, real, t)[:kernel - 1])[-(kernel - 1):],
         "Those are the row's first inputs; the window slides: the last kernel - 1."),
        (lambda inputs, real, t, kernel: _last([x for x, is_real in zip(inputs, real) if is_real], kernel - 1),
         "You look at the whole row. At place t, what stands behind it is the future."),
        (lambda inputs, real, t, kernel: _last([x for x, is_real in zip(inputs[:t], real) if not is_real], kernel - 1),
         "You kept the pads. `real` is True where a token stands."),
    ),
)

EXERCISES = {"03.1": WASTE, "03.2": OUTPUTS, "03.3": MASK, "03.4": LAST, "03.5": WINDOW}
