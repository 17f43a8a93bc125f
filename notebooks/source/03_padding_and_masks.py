# %% [markdown]
# # 03 Padding and masks
#
# One user's prompt has 100 tokens, the other's has 5. A tensor is a box with straight sides. How do both fit into one
# step, what does the empty space cost, and how do you keep it out of the answers?
#
# The old way fills the box with *pads* and hides them with a *mask*, a grid that says who may look at what. At the end
# of this chapter you have seen each way in which that goes wrong, as numbers you can check on paper, and you have run
# the three ways around it: ragged batches, pages and continuous batching.
#
# It runs in about seven seconds on two cores and needs nothing but this repository; read chapter 02 first. Words and
# symbols are listed in the [glossary](GLOSSARY.md). Several cells ask for a prediction. The outputs are already below
# them: to predict honestly, choose *Edit > Clear Outputs of All Cells* first.

# %%
import logging
import warnings
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.patches import Polygon

from qwen import figures, rope, widgets
from qwen.batch import generate_batch, pad_left
from qwen.cache import State
from qwen.chat import Chat, build_prompt
from qwen.exercises import check
from qwen.model import Model
from qwen.weights import find_model

figures.setup()
sdpa, inf = F.scaled_dot_product_attention, float("inf")


def rounded(values, digits=4):
    """A tensor as nested lists of rounded numbers."""
    return [rounded(v, digits) for v in values] if values.dim() else round(values.item(), digits)


# %% [markdown]
# ## The bill for a box
#
# A *pad* is a place in the box that holds nobody's token. The box is as wide as its longest row, so user B, with 5
# tokens, gets pads beside user A's 100.
#
# In a prefill, every place of the box goes through the projections, every place's query meets every place's key, and
# every place leaves a key and a value in the cache. What is *needed* is less: the real tokens, and for each query the
# keys up to its own.
#
# **Predict:** which share of the projections' work is wasted? And which share of attention's: less, or more?

# %%
def bill(lengths, d=1024):
    """A prefill through one attention layer of width d, in bf16: {item: (needed, what the box takes)}."""
    longest = max(lengths)
    tokens = sum(lengths), len(lengths) * longest
    pairs = sum(n * (n + 1) // 2 for n in lengths), len(lengths) * longest ** 2  # a query and a key
    return {
        "projection FLOPs": [4 * 2 * d * d * n for n in tokens],  # W_q, W_k, W_v, W_o
        "attention FLOPs": [2 * 2 * d * n for n in pairs],  # q·k, and weight times v
        "cache bytes": [2 * 2 * d * n for n in tokens],     # key and value, 2 bytes a number
    }


lengths = {"A": 100, "B": 5}
total, places = sum(lengths.values()), len(lengths) * max(lengths.values())
print(f"lengths {lengths}: {total} tokens in {places} places, {places - total} pads")
for item, (needed, box) in bill(list(lengths.values())).items():
    print(f"{item:17} needed {needed:13,}   box {box:13,}   wasted {1 - needed / box:.1%}")
square = sum(n * n for n in lengths.values())               # scores between real tokens, future ones too
needed, box = (n // 4096 for n in bill(list(lengths.values()))["attention FLOPs"])  # 4 d a score
print(f"of attention's scores: upper triangles {(square - needed) / box:.1%}, pads {1 - square / box:.1%}")
assert bill([1, 1])["cache bytes"] == [8192, 8192] and bill([3, 1], d=1)["attention FLOPs"] == [28, 72]

# %%
fig, axes = plt.subplots(1, 3, figsize=(9.5, 2.7), width_ratios=[1.5, 1, 1])
for row, (name, n) in enumerate(lengths.items()):
    figures.box(axes[0], 0, -26 * row, "pad", "", 100, 20)
    figures.box(axes[0], 100 - n, -26 * row, name, str(n), n, 20)
    axes[0].text(-3, 10 - 26 * row, f"user {name}", ha="right", va="center")
figures.bare(axes[0], "projections and cache")
figures.box(axes[1], 0, 0, "masked", "", 100, 100)
axes[1].add_patch(Polygon([(0, 0), (100, 0), (0, 100)], facecolor=figures.COLORS["A"]))
figures.box(axes[2], 0, 0, "pad", "", 100, 100)
figures.box(axes[2], 95, 0, "masked", " ", 5, 5)
axes[2].add_patch(Polygon([(95, 0), (100, 0), (95, 5)], facecolor=figures.COLORS["B"]))
for ax, name in zip(axes[1:], lengths):
    ax.text(-4, 50, "queries", rotation=90, ha="right", va="center", fontsize=9)
    ax.text(50, -4, "keys", ha="center", va="top", fontsize=9)
    figures.bare(ax, f"user {name}'s scores")
figures.show(fig, "Left: user A's row fills the box with 100 tokens, user B's row has 5 tokens at its right end and "
                  "hatched pads before them. Middle: of A's 100 by 100 scores, the lower triangle is needed. Right: of "
                  "B's 100 by 100 scores, only a tiny triangle of 5 by 5 in the lower right corner is needed.")

# %% [markdown]
# (Light stripes are pads; dark crosses are real pairs that may not look.)
#
# Attention wastes more for two reasons: the box scores the upper triangles too, and the pads' share grows with the
# square of the width. And the bill comes again: every decode step reads the cache, pads and all, and scores its new
# query against each of them. Your own users' lengths:

# %%
def in_words(A, B, C):
    parts = (f"{item}: {1 - needed / box:.0%} wasted" for item, (needed, box) in bill([A, B, C]).items())
    return f"lengths {A}, {B}, {C}. " + ", ".join(parts)


controls, sliders, text = widgets.play(in_words, A=(1, 300, 100), B=(1, 300, 5), C=(1, 300, 60))
controls

# %%
for values in ((100, 100, 100), (300, 5, 5)):
    for slider, value in zip(sliders.values(), values):
        slider.value = value
    print(text.value)

# %% [markdown]
# Even with equal lengths the box computes the upper triangles of attention. The rest of the waste is the pads.
#
# ## On which side do the pads stand?
#
# A decoder's next token comes from the logits of a row's *last token*. With the pads on the right, the last *column*
# of a short row is a pad. The mask below hides the pads perfectly; the question is only where you read.
#
# **Predict:** rows `[[5, P, P], [1, 2, 3]]`, pads hidden. Which rows are right if you read column -1?

# %%
path = find_model()
model = Model.from_pretrained(path, device="cpu", dtype=torch.float32)
chat = Chat(model, path)
_ = torch.set_grad_enabled(False)
P = 0                                                       # the id that fills a pad


def solo(ids):
    """Logits (vocab,) after one row alone: what every batch is held against."""
    return model(torch.tensor([ids]))[0, -1]


def same(found, right):
    return torch.allclose(found, right, rtol=1e-4, atol=1e-4)


rows = [[5], [1, 2, 3]]
right_ids, right_mask = torch.tensor([[5, P, P], [1, 2, 3]]), torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()
logits = model(right_ids, mask=right_mask)                  # (B, T, vocab)
print("right pads, column -1:      ", [same(logits[r, -1], solo(row)) for r, row in enumerate(rows)])
print("right pads, own last token: ", [same(logits[r, len(row) - 1], solo(row)) for r, row in enumerate(rows)])
left_ids, left_mask = pad_left(rows)
logits = model(left_ids, mask=left_mask)
print("left pads,  column -1:      ", [same(logits[r, -1], solo(row)) for r, row in enumerate(rows)], left_ids.tolist())

# %% [markdown]
# **What the wrong version says.** A question beside a long one, padded on the right, column -1. The second line also
# forgets the mask, as many a code example does.

# %%
def encode(question):
    return chat.tk.encode(build_prompt([{"role": "user", "content": question}])).ids


short, long = encode("What is 5 times 6?"), encode("In which country is Lake Baikal? " * 4)
pads = len(long) - len(short)
ids = torch.tensor([long, short + [P] * pads])
mask = torch.tensor([[True] * len(long), [True] * len(short) + [False] * pads])
for name, logits in (("right pads, own last token  ", model(ids, mask=mask)[1, len(short) - 1]),
                     ("wrong: column -1            ", model(ids, mask=mask)[1, -1]),
                     ("wrong: column -1 and no mask", model(ids)[1, -1])):
    best = logits.softmax(-1).max(-1)
    print(f"{name}: {chat.tk.decode([best.indices.item()])!r} with probability {best.values.item():.2f}")

# %% [markdown]
# A pad's logits are finite numbers that answer nobody's question, so nothing crashes. Pads on the left put every row's
# last token into column -1, and decode appends behind it.
#
# **The mask comes from the lengths, never from the ids.** A real prompt may contain the pad's id. The wrong version
# asks `ids != P`. **Predict:** for a row that is *nothing but* that id, what does the wrong mask leave?

# %%
for rows in ([[P, 7, P, 9], [1, 2, 3, 4, 5, 6]], [[P, P], [1, 2, 3]]):
    ids, mask = pad_left(rows, pad_id=P)
    for name, which in (("from lengths", mask), ("wrong, from ids", ids != P)):
        logits = model(ids, mask=which, last_only=True)[:, 0]
        print(f"{rows[0]} mask {name:15}", which[0].int().tolist(), "right:", same(logits[0], solo(rows[0])))

# %% [markdown]
# ## The pad column
#
# Now by hand, with the keys of two users who bring two new tokens each (chapter 04 is about those). The histories are
# chapter 02's, with B's third token gone. A new token x is its own key, as there, and its query is x @ W_q. User A has
# 3 keys of history and so 5 in all; user B has 2 and so 4. Stacking them into one tensor fails:

# %%
K_A = torch.tensor([[1., 0.], [1., 1.], [0., 1.], [1., 0.], [1., 1.]])  # 3 history + 2 new
K_B = torch.tensor([[0., 1.], [2., 0.], [0., 1.], [2., 0.]])  # 2 history + 2 new
Q = torch.tensor([[[1., 1.], [1., 2.]], [[0., 1.], [2., 2.]]])  # (B, new, D), two queries each

# %% tags=["raises-exception"]
torch.stack([K_A, K_B])

# %% [markdown]
# So user B gets a key that does not exist: a row of zeros in front.
#
# **Predict** B's first column of scores. Is it harmless? What weight does softmax give it in B's first row?

# %%
K_B_padded = torch.cat([torch.zeros(1, 2), K_B])            # (5, 2)
K_cache = torch.stack([K_A, K_B_padded])                    # (2, 5, 2)
scores = torch.bmm(Q, K_cache.transpose(1, 2))              # (2, 2, 5)
print(f"User B raw scores:\n{scores[1]}")

row = scores[1, 0].tolist()
e = [2.718281828 ** score for score in row]
print("e^score:", [round(x, 3) for x in e], "sum", round(sum(e), 3))
print("weight of the pad, e^0 / sum:", round(e[0] / sum(e), 4))
assert abs(e[0] / sum(e) - scores.softmax(-1)[1, 0, 0].item()) < 1e-6

# %% [markdown]
# A score of 0 is a score like any other: $e^0 = 1$. (The sum still holds the future key; the causal mask comes next.)
# The pad has to be *hidden*. B's rows need another mask than A's, so the mask has a row dimension: one `(new, keys)`
# grid for each user. Every query sees its history and itself, not what comes later (causal), and no pad.

# %%
def mask_by_hand(history, new, pads):
    """One user's grid [query][key], True = may look. Keys stand as pads, history, new tokens."""
    keys = pads + history + new
    return [[pads <= key <= pads + history + query for key in range(keys)] for query in range(new)]


by_hand = [mask_by_hand(history=3, new=2, pads=0), mask_by_hand(history=2, new=2, pads=1)]

key, query = torch.arange(5), torch.arange(2)[:, None]
real = torch.arange(5) >= torch.tensor([0, 1])[:, None]     # (B, keys): B's first is a pad
causal = key <= query + 3                                   # (new, keys): the same for both
mask = causal & real[:, None]                               # (B, new, keys)
assert mask.tolist() == by_hand
print("mask", tuple(mask.shape), *mask.int().tolist(), sep="\n")

weights = scores.masked_fill(~mask, -inf).softmax(-1)
print("B, hidden: ", rounded(weights[1]))
alone = (Q[1] @ K_B.T).masked_fill(~mask[1, :, 1:], -inf).softmax(-1)  # B without a pad
print("B, alone:          ", rounded(alone))
assert torch.equal(weights[1, :, 0], torch.zeros(2)) and torch.allclose(weights[1, :, 1:], alone)

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.5, 1.9))
for ax, name, grid, pads in zip(axes, "AB", mask.tolist(), (0, 1)):
    colors = [["pad" if key < pads else name if seen else "masked" for key, seen in enumerate(line)] for line in grid]
    figures.matrix(ax, [["" if c in ("pad", "masked") else 1 for c in line] for line in colors], f"user {name} may look",
                   colors, rows=["q0", "q1"], columns=["pad"] * pads + [f"k{i}" for i in range(5 - pads)])
figures.show(fig, "Two grids of 2 queries and 5 keys. User A sees all keys but the last in the first row. User B the "
                  "same, and B's first column, the pad, is hatched and hidden in both rows.")

# %% [markdown]
# ## A row that sees nothing
#
# The pad itself is a query too, and a pad in front sees no key at all. Softmax divides by the sum of what is seen.
#
# **Predict:** scores `[1, 2, 3]`, all hidden. What comes out with -inf? With `finfo.min`, the smallest finite number?
# And from `scaled_dot_product_attention` (`sdpa` below)?

# %%
smallest = torch.finfo(torch.float32).min
s, nobody = torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(1, 3, dtype=torch.bool)
print("by hand, filled with -inf:     ", s.masked_fill(~nobody, -inf).softmax(-1).tolist())
print("by hand, filled with finfo.min:", rounded(s.masked_fill(~nobody, smallest).softmax(-1)))
half = torch.tensor([[1.0, 2.0, 64.0]]).half() + torch.finfo(torch.float16).min  # added, not filled
print("fp16, finfo.min added:         ", half.tolist(), "->", rounded(half.float().softmax(-1)))
print("fp16, added once more:         ", (half + torch.finfo(torch.float16).min).softmax(-1).tolist())

q, k, v = torch.ones(1, 1, 1), s[..., None], torch.eye(3)[None]  # v = 1: the output is the weights
blank = torch.zeros(1, 3)
for name, m in (("bool", nobody), ("float -inf", blank - inf), ("float finfo.min", blank + smallest)):
    print(f"sdpa, {name:16}         ", rounded(sdpa(q, k, v, attn_mask=m)[0]))

# %% [markdown]
# Three answers: NaN, equal weights, zeros. Equal weights are no silence: a query that should see nothing looks at all
# the keys, pads included. It is harmless only because nobody reads that query's row. *Added* instead of filled, in
# fp16, not even that holds: small scores are lost in rounding, a large hidden one wins (the third line has scores 1, 2
# and 64), and a second mask added to the first brings the NaN back.
#
# **Why a NaN does not stay where it is.** A layer adds attention's output to its input, the residual: `x + attention`.
# The pad's NaN is then the pad's input of the next layer, and so its *value*. A real token's weight on it is 0. Two
# pads and the tokens 1 and 2, one number each, two layers. Query, key and value are the number itself, no scale.
#
# **Predict:** 0 · NaN is what? So after which layer is the last token gone?

# %%
x0 = torch.tensor([[0.0], [0.0], [1.0], [2.0]])             # (T, 1): pad, pad, 1, 2
seen = torch.tril(torch.ones(4, 4)).bool() & torch.tensor([False, False, True, True])


def hand(fill):
    return lambda x: (x @ x.T).masked_fill(~seen, fill).softmax(-1) @ x


ways = {"-inf by hand": hand(-inf), "finfo.min by hand": hand(smallest),
        "sdpa, bool mask": lambda x: sdpa(x[None], x[None], x[None], attn_mask=seen[None])[0]}
for name, attention in ways.items():
    x1 = x0 + attention(x0)
    x2 = x1 + attention(x1)
    print(f"{name:18} after layer 1 {rounded(x1[:, 0], 2)}   after layer 2 {rounded(x2[:, 0], 2)}")

# %% [markdown]
# All agree on the real tokens after layer 1. Then -inf loses them. So it is not enough to hide a pad; what stands in it
# must be *finite*. `scaled_dot_product_attention` avoids making the NaN, but does not survive one that is there
# already:

# %%
def with_nan(tensor):
    return tensor.index_fill(1, torch.tensor([0]), float("nan"))  # in place 0, a pad


x, m = x0[None], seen[None]
scores = (x @ with_nan(x).transpose(1, 2)).masked_fill(~m, smallest)
print("NaN in a hidden V row, sdpa:            last token", sdpa(x, x, with_nan(x), attn_mask=m)[0, -1].tolist())
print("NaN in a hidden K row, sdpa:            last token", sdpa(x, with_nan(x), x, attn_mask=m)[0, -1].tolist())
print("NaN in a hidden K row, filled by hand:  last token", rounded((scores.softmax(-1) @ x)[0, -1], 2))

# %% [markdown]
# A weight of 0 times a NaN value is NaN. With a NaN key, it is the score that is NaN: `sdpa` *adds* -inf to what is
# hidden, and NaN - inf is NaN; `masked_fill` overwrites it.
#
# ## Bool, integer, float
#
# The mask's type changes its meaning. **A bool mask** says who may look. **A float mask** is *added* to the scores: 0
# leaves a score alone, -inf hides it. So what does a float mask of 1 and 0 do?
#
# Here is B's block with values 1, 10, 100, 1000, 10000, so that a leak shows. `scale=1.0` leaves out the division by
# sqrt(D), as above, so the bool row is 10 · 0.4223 + 100 · 0.1554 + 1000 · 0.4223. **Predict** the float row before
# you run it.

# %%
V = torch.tensor([[1.], [10.], [100.], [1000.], [10000.]])  # key 4 is q0's future
q, k, v = Q[1:, :1], K_cache[1:], V[None]                   # user B, first query
for name, m in (("bool", mask[1:, :1]), ("float 0 and -inf", torch.zeros(1, 1, 5).masked_fill(~mask[1:, :1], -inf)),
                ("wrong: float 1 and 0", mask[1:, :1].float())):
    future = v.clone()
    future[0, 4] = 20000.0                                  # another last token
    out, other = (sdpa(q, k, values, attn_mask=m, scale=1.0).item() for values in (v, future))
    print(f"{name:21} {out:8.1f}   last token changed: {other:8.1f}   leak: {out != other}")

# %% [markdown]
# 1 is added to what should be seen and 0 to what should not: everything stays visible, no warning appears, and the
# first token knows the last. An integer mask at least raises:

# %% tags=["raises-exception"]
sdpa(q, k, v, attn_mask=mask[1:, :1].long())

# %% [markdown]
# The model of this repository takes bool and refuses the rest. With bool, another last token moves no earlier logit:

# %%
other = left_ids.clone()
other[:, -1] = 210
before, after = model(left_ids, mask=left_mask), model(other, mask=left_mask)
print("row 1, logits moved at its tokens 0, 1, 2:", [not same(a, b) for a, b in zip(before[1], after[1])])

# %% tags=["raises-exception"]
model.forward(left_ids, mask=left_mask.float())             # .forward: the traceback skips torch's own lines

# %% [markdown]
# ## `is_causal` with a cache
#
# With a cache there are fewer queries than keys. Two triangles come to mind: aligned top-left (query 0 sees key 0) or
# bottom-right (the last query sees the last key). With the identity as values the output *is* the weights.
#
# **Predict:** one decode query, five keys, `is_causal=True`. Which keys does it see?

# %%
k, v = K_A[None], torch.eye(5)[None]                        # (1, 5, D), (1, 5, 5)
full = sdpa(K_A[None], k, v, is_causal=True)[0]             # 5 queries, 5 keys: no doubt here
for new in (1, 3):
    q = K_A[None, -new:]                                    # the last queries only
    wrong = sdpa(q, k, v, is_causal=True)[0]
    bottom_right = torch.ones(new, 5).tril(diagonal=5 - new).bool()  # the first sees 5 - new more
    right = sdpa(q, k, v, attn_mask=bottom_right)[0]
    print(f"{new} new, is_causal sees", (wrong > 0).int().tolist(), "equals the full forward:", same(wrong, full[-new:]))
    print(f"{new} new, mask sees     ", (right > 0).int().tolist(), "equals the full forward:", same(right, full[-new:]))

# %% [markdown]
# The decode query looked at key 0 alone. `is_causal` is safe only with as many queries as keys; with a cache, hand over
# the mask. (A single query that may see every key needs none.)
#
# ## Position numbers
#
# A token's position counts the real tokens before it, so pads must not count. The usual line is
# `mask.cumsum(-1) - 1`. **Predict** what it gives at leading pads.

# %%
mask_row = torch.tensor([0, 0, 1, 1, 1])
print("by column:         ", list(range(5)))
print("cumsum(mask) - 1:  ", (mask_row.cumsum(-1) - 1).tolist())
print("clamped at 0:      ", (mask_row.cumsum(-1) - 1).clamp(min=0).tolist())

table, first = torch.tensor([[10.], [11.], [12.], [13.]]), torch.tensor([-1])  # one row a position
print("table[-1] is", table[first].item(), "- the last row, and no error")
looks = {"gather": lambda: table.gather(0, first[:, None]), "embedding": lambda: F.embedding(first, table)}
for name, look in looks.items():
    try:
        look()
    except (IndexError, RuntimeError) as error:
        print(f"{name}: {type(error).__name__}")

# %% [markdown]
# Clamp at 0. Now the wrong version that counts columns: a row with 2 pads starts at 2 instead of 0. Rotary positions
# turn queries and keys by an angle, and a score depends on the *difference* of two positions only. With one pair of
# numbers and vectors of length one, it is the cosine of that difference.
#
# **Predict:** prefill at 2, 3, 4 instead of 0, 1, 2: which scores change? Then decode, at position 3, which is right.

# %%
def score(query, keys):
    return (query[:, None] - keys).cos()                    # (queries, keys)


right, columns = torch.tensor([0., 1., 2.]), torch.tensor([2., 3., 4.])
new = torch.tensor([3.])                                    # its own count of tokens
for name, places in (("right    ", right), ("by column", columns)):
    print(f"{name} prefill, last query: {rounded(score(places, places)[-1], 3)}   "
          f"decode at 3: {rounded(score(new, places)[0], 3)}")

# %% [markdown]
# The offset is the same for query and key in prefill and cancels. It shows when a number without it meets keys with it,
# so a test of positions must decode with the true count. On the model: rows `[[5], [1, 2, 3, 4, 5]]`, a prefill and
# three decode steps, once as it is and once with positions by column. A spy notes each call's positions.

# %%
def by_column(slots):
    """Wrong: numbers a call's places after the row's history, pads included."""
    history = slots.amax(1, keepdim=True) + 1 - (slots >= 0).sum(1, keepdim=True)
    return history + torch.arange(slots.shape[1])


def run(rows, fed=(10, 110, 210)):
    """Logits (rows, vocab) after the prefill and after each of three fed tokens."""
    ids, mask = pad_left(rows)
    state = State(model, len(rows))
    out = [model(ids, state, mask)[:, -1]]
    for token in fed:
        out.append(model(torch.full((len(rows), 1), token), state)[:, -1])
    return out


truth = run([[5]])
for name, positions in (("real tokens", rope.positions), ("wrong: columns", by_column)):
    with patch.object(rope, "positions", side_effect=positions) as spy:
        found = run([[5], [1, 2, 3, 4, 5]])
    places = [positions(call.args[0])[0, -1].item() for call in spy.call_args_list]
    print(f"{name:15} 5 and the fed tokens at {places}; equals solo: prefill {same(found[0][0], truth[0][0])}, "
          f"decode {[same(a[0], b[0]) for a, b in zip(found[1:], truth[1:])]}")

# %% [markdown]
# ## Padding in a linear-attention layer
#
# Most layers of this model are *linear-attention* layers, here a Gated DeltaNet. They keep no keys but a *window*, the
# last K - 1 inputs (K is now a convolution's width), and a matrix S (not chapter 02's slots), which every token changes:
# S fades (the decay), then a write corrects it. A pad can do harm in three ways: stand in the window of later tokens,
# write, and let S fade.
#
# Here is that layer in single numbers. K = 3, so the window holds 2 inputs; each token mixes
# $u$ = (two before) + (one before) + 2 · (own); then S halves, and half of the difference to $u$ is written:
# S ← S/2, S ← S + 0.5 · (u − S). The 0.5 of the write is *beta*; S fades by the factor $e^g$, so g = 0 means no fading.
#
# **Predict:** tokens 4 and 8, two pads. A popular repair sets the *input* to zero at pads and does nothing else. Is it
# right with the pads before 4? Between 4 and 8? And where can you afford to hide only two of the three harms?

# %%
def linear_layer(places, hide=()):
    """places: inputs in order, None = pad (its input is 3). hide: what a pad may not do. -> S's path."""
    window, S, path = [0, 0], 0.0, []
    for x in places:
        pad = x is None
        if pad:
            x = 0 if "input" in hide else 3
        u = window[0] + window[1] + 2 * x
        if not (pad and "decay" in hide):                   # hidden: g = 0, and e^0 = 1
            S = S / 2
        if not (pad and "write" in hide):                   # hidden: beta = 0
            S = S + 0.5 * (u - S)
        if not (pad and "window" in hide):
            window = [window[1], x]
        path.append(S)
    return path


print("solo          ", linear_layer([4, 8]))
for title, places in (("pads before", [None, None, 4, 8]), ("pads between", [4, None, None, 8])):
    for hide in ("", "input", "write decay", "window decay", "window write", "window write decay"):
        path = linear_layer(places, hide.split())
        print(f"{title:12} hidden: {hide or 'nothing':18}  S = {path}  right: {path[-1] == 11}")

# %% [markdown]
# Before the first real token, window and S are zero: a zero input adds nothing, and zero fades to zero, so the decay
# alone does no harm there. That is luck. After the 4, a pad with zero input still sees the 4 in its window, so it
# writes, and S fades at every pad. Between the tokens each harm alone, the other two hidden, is enough for a wrong S. A
# row needs all three: a window that skips pads, no write (beta = 0), no decay (g = 0). Chapter 06 breaks them one by
# one in the model, and a user's memory goes with them.
#
# ## Way out 1: ragged
#
# Drop the pads. All users' tokens lie end to end in one *flat buffer*, and a list of offsets says where each row
# starts: `cu_seqlens`, cumulative sequence lengths. Projections work row by row and do not care (chapter 01). Attention
# runs on one user's slice at a time; here a loop does it, in an engine one kernel.
#
# **Predict** the offsets for 100 and 5 tokens.

# %%
cu_seqlens = torch.tensor([0, 100, 5]).cumsum(0)            # (B + 1,)
print("cu_seqlens =", cu_seqlens.tolist())

generator = torch.Generator().manual_seed(0)
x, W = torch.randn(105, 16, generator=generator), torch.randn(16, 3 * 16, generator=generator) / 4
q, k, v = (x @ W).chunk(3, -1)                              # (105, 16) each: no pad


def varlen(q, k, v, cu_seqlens):
    """Flat (N, D) -> (N, D): causal attention inside each row's slice."""
    slices = [slice(a, b) for a, b in zip(cu_seqlens, cu_seqlens[1:])]
    return torch.cat([sdpa(q[s][None], k[s][None], v[s][None], is_causal=True)[0] for s in slices])


flat = varlen(q, k, v, cu_seqlens.tolist())

real = torch.arange(100) >= torch.tensor([0, 95])[:, None]  # (2, 100): the box, pads left
padded = torch.zeros(2, 100, 16)
padded[real] = x
seen = torch.ones(100, 100).tril().bool() & real[:, None]   # (2, 100, 100)
boxed = sdpa(*(padded @ W).chunk(3, -1), attn_mask=seen)
print("flat", tuple(x.shape), "box", tuple(padded.shape), "- the same result:", same(boxed[real], flat))
print("rows through W: flat", len(x), "box", padded.shape[:2].numel())
print("scores: flat", 100 ** 2 + 5 ** 2, "box", seen.numel())

# %% [markdown]
# torch has such tensors of its own, called *jagged*: a flat buffer with offsets that behaves like one tensor. Below,
# 105 keys of two users are projected, and each user's newest query looks back: a decode step with unequal histories,
# without pad or mask. (`torch.nn.attention.varlen` takes `cu_seqlens` as they are, but needs a GPU.)

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore")                         # jagged tensors are a prototype
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    jagged = torch.nested.nested_tensor_from_jagged
    both = F.linear(jagged(x, cu_seqlens), W.T)             # (2, ragged, 48)
    print("jagged", type(both).__name__, "holds", tuple(both.values().shape))
    keys, values = (jagged(t[:, None].contiguous(), cu_seqlens).transpose(1, 2) for t in (k, v))
    newest = jagged(q[cu_seqlens[1:] - 1][:, None], torch.tensor([0, 1, 2])).transpose(1, 2)
    decoded = sdpa(newest, keys, values).transpose(1, 2).values()[:, 0]  # (2, D), one query each
print("equals the flat buffer's last tokens:", same(decoded, flat[cu_seqlens[1:] - 1]))

# %% [markdown]
# ## On the real thing
#
# `model.ragged` (`qwen/model.py`) is this step for the whole model: all weight matrices see the flat buffer.
# `model.ragged` puts rows into a box inside attention and DeltaNet only; an engine's kernels do without even there. A
# hook counts what goes through the first feed-forward matrix. The prefill, then one decode step.
#
# **Predict** both counts, flat and padded.

# %%
rows = [[(7 * i) % 700 for i in range(100)], [11, 12, 13, 14, 15]]
counted = []
hook = model.layers[0].mlp.gate_proj.register_forward_hook(lambda _, args, out: counted.append(args[0][..., 0].numel()))
ids, mask = pad_left(rows)
state, ragged_state = State(model, 2), State(model, 2)
padded = [model(ids, state, mask)[:, -1], model(torch.tensor([[10], [110]]), state)[:, -1]]
print("padded: tokens through gate_proj", counted)
counted.clear()
ragged = [model.ragged(torch.tensor(rows[0] + rows[1]), cu_seqlens, ragged_state)[cu_seqlens[1:] - 1],
          model.ragged(torch.tensor([10, 110]), torch.tensor([0, 1, 2]), ragged_state)]
print("ragged: tokens through gate_proj", counted)
hook.remove()
alone = [torch.stack([solo(row) for row in rows]), torch.stack([solo(rows[0] + [10]), solo(rows[1] + [110])])]
for step, a, b, c in zip(("prefill", "decode"), padded, ragged, alone):
    print(f"{step:7}: ragged equals padded: {same(b, a)}, ragged equals solo: {same(b, c)}")

# %% [markdown]
# ## Way out 2: pages
#
# A ragged buffer removes pads from a *step*. The cache lives on, and rows in it grow. So cut it into small *blocks* and
# give each user blocks as needed, listed in a *block table*. A first look; chapter 08 builds it.
#
# **Predict:** how many blocks of 8 does the 5-token user take? And of 16?

# %%
def slot(t, table, size):
    """Where in the pool a row's token t lies."""
    return table[t // size] * size + t % size


for size in (8, 16):
    pool = sum(-(-n // size) for n in lengths.values())     # blocks in all: each length / size, rounded up
    free, tables = list(range(pool))[::-1], {"A": [], "B": []}
    for t in range(max(lengths.values())):
        for name, n in lengths.items():
            if t < n and t % size == 0:
                tables[name].append(free.pop())             # a new block, when one is full
    taken = sum(map(len, tables.values())) * size
    print(f"blocks of {size}: A {len(tables['A'])}, B {len(tables['B'])}; {taken} slots taken, "
          f"box {len(lengths) * max(lengths.values())}")
    print(f"   tables {tables}, B's token 4 lies in slot {slot(4, tables['B'], size)}")
    slots = [slot(t, tables[name], size) for name, n in lengths.items() for t in range(n)]
    assert len(set(slots)) == sum(lengths.values()) and max(slots) < pool * size

# %% [markdown]
# At most one block per user is partly empty. A's and B's blocks lie among each other; the table finds them.
#
# ## Way out 3: continuous batching
#
# Answers differ in length as well. A row that is done leaves its place in the batch, its *seat*, and a waiting user
# takes it in the next step. With a ragged step that is little work: a new user brings the prompt, an old one a single
# token, in one flat buffer. A first look; chapter 07 builds it. An answer's count includes its stop token.
# **Predict:** how often must a seat stand empty while somebody waits?

# %%
prompts = {"A": encode("Hello"), "B": encode("What is 5 times 6?"), "C": encode("Is Rome in Spain?"),
           "D": encode("What is the capital of France?")}
waiting, answers, timeline = list(prompts), {name: [] for name in prompts}, []
seats, fresh, state = [None, None], [[], []], State(model, 2)
while waiting or any(seats):
    for s in (0, 1):
        if seats[s] is None and waiting:
            seats[s] = waiting.pop(0)
            fresh[s] = prompts[seats[s]]
            state.reset(s)                                  # nothing of the last user stays
    cu = torch.tensor([0, *map(len, fresh)]).cumsum(0)
    logits = model.ragged(torch.tensor(fresh[0] + fresh[1]), cu, state)
    timeline.append([name or "." for name in seats])
    for s in (0, 1):
        if seats[s]:
            fresh[s] = [logits[cu[s + 1] - 1].argmax().item()]
            answers[seats[s]] += fresh[s]
            if fresh[s][0] in chat.stop:
                seats[s], fresh[s] = None, []

# %%
outputs = {name: len(answer) for name, answer in answers.items()}
static = max(outputs["A"], outputs["B"]) + max(outputs["C"], outputs["D"])
print(f"answers of {outputs} tokens: {len(timeline)} steps, two fixed batches {static} steps")
right = generate_batch(model, list(prompts.values()), max_new_tokens=60, stop=chat.stop)
print("every answer equals the padded batch's:", list(answers.values()) == right)
last = max(next(i for i, names in enumerate(timeline) if name in names) for name in prompts)  # then nobody waits
print("empty seats while somebody waits: continuous", sum(names.count(".") for names in timeline[:last]),
      "- fixed", abs(outputs["A"] - outputs["B"]))

# %%
turn = max(outputs["A"], outputs["B"])                      # when a fixed second batch starts
fixed = [["."] * static for _ in (0, 1)]                    # "." is an empty seat
for name, seat, start in (("A", 0, 0), ("B", 1, 0), ("C", 0, turn), ("D", 1, turn)):
    fixed[seat][start:start + outputs[name]] = [name] * outputs[name]
titles = f"two fixed batches, {static} steps", f"continuous, {len(timeline)} steps"
fig, axes = plt.subplots(2, 1, figsize=(9.5, 2.2), sharex=True)
words = []
for ax, seats, title in zip(axes, (fixed, list(zip(*timeline))), titles):
    for s, seat in enumerate(seats):
        for step, name in enumerate(seat):
            figures.box(ax, step, -1.2 * s, *(("pad", "") if name == "." else (name, name)))
        ax.text(-0.5, 0.5 - 1.2 * s, f"seat {s}", ha="right", va="center")
        words.append(f"{title}, seat {s}: " + ", ".join(f"{seat.count(n)} steps of {n}" for n in "ABCD" if n in seat)
                     + (f", {seat.count('.')} empty" if "." in seat else ""))
    figures.bare(ax, title)
    ax.set_ylim(-1.3, 1.1)
figures.show(fig, "Steps of two seats. " + "; ".join(words) + ".")

# %% [markdown]
# ## Your turn
#
# Replace the dots, run the cell, and `check` tells you at once.
#
# **03.1** How many scores (a query with a key) does a padded prefill compute for nothing? Useful are a real query's
# real keys up to its own. `lengths` is a list.
#
# <details><summary>Solution</summary>
#
# A row of n tokens needs 1 + 2 + … + n scores; the box has its width squared for every row.
# ```python
# def my_waste(lengths):
#     box = len(lengths) * max(lengths) ** 2
#     return box - sum(n * (n + 1) // 2 for n in lengths)
# ```
# </details>

# %%
def my_waste(lengths):
    ...


_ = check("03.1", my_waste)

# %% [markdown]
# **03.2** Four scores are all 0; the first belongs to a pad. The values are 9 (the pad's), 3, 3, 6. What is attention's
# output if (a) nothing is hidden, (b) the pad's score is set to -inf, (c) the scores are *multiplied* by a mask 0, 1,
# 1, 1 before the softmax, (d) the *weights* are multiplied by it, after the softmax?
#
# <details><summary>Solution</summary>
#
# (a) Equal weights of 1/4: 21/4. (b) Weights of 1/3: 12/3. (c) 0 times 0 is 0, a score like any other: as (a). (d) The
# rest keeps 1/4 each and no longer sums to one: 12/4.
# ```python
# outputs_abcd = [5.25, 4, 5.25, 3]
# ```
# </details>

# %%
outputs_abcd = ...                                          # [a, b, c, d]
_ = check("03.2", outputs_abcd)

# %% [markdown]
# **03.3** Build the mask of a decode or chunk step with left-padded keys: row r has `lengths[r]` keys, the last `new`
# of them are this call's tokens. Return `mask[row][query][key]`, True = may look, over `max(lengths)` keys.
#
# <details><summary>Solution</summary>
#
# The triangle is aligned bottom-right: the last query sees the last key.
# ```python
# def my_mask(lengths, new):
#     keys = max(lengths)
#     return [[[keys - n <= key <= keys - new + query for key in range(keys)] for query in range(new)]
#             for n in lengths]
# ```
# </details>

# %%
def my_mask(lengths, new):
    ...


_ = check("03.3", my_mask)

# %% [markdown]
# **03.4** `logits` of a ragged step lie end to end. Which line of the flat buffer gives each row's next token? Return
# the indices as a list. A row that brought no token in this step has none: give it None. `cu_seqlens` is
# a list here.
#
# <details><summary>Solution</summary>
#
# A row's last token stands one place before the next row's first.
# ```python
# def my_last(cu_seqlens):
#     return [end - 1 if end > start else None for start, end in zip(cu_seqlens, cu_seqlens[1:])]
# ```
# </details>

# %%
def my_last(cu_seqlens):
    ...


_ = check("03.4", my_last)

# %% [markdown]
# **03.5** The window of a linear layer: the last `kernel - 1` *real* inputs before place `t`, oldest first, zeros in
# front where there are fewer. `inputs` and `real` are lists of the same length.
#
# <details><summary>Solution</summary>
#
# ```python
# def my_window(inputs, real, t, kernel):
#     before = [0] * (kernel - 1) + [x for x, is_real in zip(inputs[:t], real) if is_real]
#     return before[-(kernel - 1):]
# ```
# </details>

# %%
def my_window(inputs, real, t, kernel):
    ...


_ = check("03.5", my_window)

# %% [markdown]
# ## In an interview
#
# > Padding makes unequal rows rectangular and pays for it: projections and cache grow with the width, attention with
# > its square. Pads stand on the left, are hidden by a bool mask made from lengths, are not counted in positions and
# > must stay finite; in a linear-attention layer they may not enter the window, write, or let the state fade. Engines avoid
# > them: a flat buffer with `cu_seqlens` for the step, pages for the cache, continuous batching for the seats.
#
# **In production.** FlashAttention's `flash_attn_varlen_func` takes `cu_seqlens_q` and `cu_seqlens_k`. vLLM's
# `block_table` and `slot_mapping` are the pages; SGLang's table is `req_to_token_pool`. Both admit and retire requests
# between two steps, which they call continuous batching.
#
# **Next:** [04 Two tokens per user](04_two_tokens_per_user.ipynb): several new tokens a row, and the grid of who may
# look at whom. **Before:** [02 Batched attention with bmm](02_batched_attention_with_bmm.ipynb).
