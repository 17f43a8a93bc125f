# %% [markdown]
# # 04 Two tokens per user
#
# Two users share a step, and each brings *two* new tokens. Their rows now stand next to each other in the same matrices.
# What keeps user A from reading user B, and what keeps a token from reading the one that comes after it?
#
# Two rules do, and they are enforced in quite different ways. At the end of this chapter you can draw who may look at
# whom for any number of users, history and new tokens. You can say why projections need no mask and attention needs one,
# and see that reading a prompt, whole or in pieces, and checking guesses are the same picture in other sizes. You also
# run a small speculative decoder: it guesses tokens ahead (*drafts*), checks them in one step, and you see what a refused
# guess leaves behind.
#
# It runs in about five seconds on two cores and needs nothing but this repository. Words and symbols are listed in the
# [glossary](GLOSSARY.md). Several cells ask for a prediction. The outputs are already below them: to predict honestly,
# choose *Edit > Clear Outputs of All Cells* first.

# %%
from itertools import accumulate, pairwise

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from qwen import attention, figures
from qwen.cache import State
from qwen.chat import Chat, build_prompt
from qwen.exercises import check
from qwen.model import Model
from qwen.sample import generate
from qwen.weights import find_model
from qwen.widgets import play

figures.setup()

# %% [markdown]
# ## The projection needs no mask
#
# The matrix is that of chapter 01. So are each user's first new token and, from [chapter 02](02_batched_attention_with_bmm.ipynb),
# the *history*: the tokens of earlier steps, whose keys wait in the user's cache. A second new token comes behind each
# first one:
#
# $$W_q = \begin{pmatrix} 1 & 1 \\ 0 & 1 \end{pmatrix}, \qquad x_{A,1} = [1, 0], \quad x_{A,2} = [1, 1], \qquad
# x_{B,1} = [0, 1], \quad x_{B,2} = [2, 0]$$
#
# **By hand first.** Stack the four rows and multiply. Which of the four queries have you met before?

# %%
W_q = [[1, 1], [0, 1]]                              # (D, D)
X_rows = [[1, 0], [1, 1], [0, 1], [2, 0]]           # (4, D): A1, A2, B1, B2

Q_rows = [[sum(x[i] * W_q[i][j] for i in range(2)) for j in range(2)] for x in X_rows]
for name, x, q in zip(("A1", "A2", "B1", "B2"), X_rows, Q_rows):
    print(f"{name}: {x} @ W_q = {q}")

# %% [markdown]
# The same in torch, held as a box with a row for each user: (Batch, Seq_New, Dim). The matrix does not care about the
# shape. Two users with two tokens or one list of four, each output row comes from its own input row.

# %%
W_q = torch.tensor([[1.0, 1.0], [0.0, 1.0]])        # (D, D)
W_k = torch.eye(2)                                  # the identity: a new key is its embedding, easy to follow
X_batch = torch.tensor([[[1.0, 0.0], [1.0, 1.0]],   # user A: token 1, token 2
                        [[0.0, 1.0], [2.0, 0.0]]])  # user B: token 1, token 2   (B, T, D)

Q_batch = X_batch @ W_q                             # (B, T, D)
K_new = X_batch @ W_k                               # (B, T, D)
assert torch.equal(Q_batch, (X_batch.reshape(4, 2) @ W_q).reshape(2, 2, 2))     # flattened: the same rows
assert Q_batch.reshape(4, 2).tolist() == Q_rows
print("Q_batch (Batch, Seq_New, Dim):")
print(Q_batch)

# %% [markdown]
# **Predict:** $x_{A,2}$ becomes $[5, 5]$. Which of the four queries change: A's later one, A's earlier one, B's?

# %%
X_other = X_batch.clone()
X_other[0, 1] = 5.0                                 # another second token for user A
changed = (X_other @ W_q != Q_batch).any(-1)        # (B, T)
print("queries that change:", [name for name, hit in zip(("A1", "A2", "B1", "B2"), changed.flatten()) if hit])

# %% [markdown]
# There is nothing to mask here. The same is true of the other projections, the norms and the feed-forward layers: most of
# the weights work on one row at a time. Notice who is absent, too: the history. Its projections were made in earlier
# steps. The cost of a projection grows with the new tokens, not with the length of the conversation.
#
# ## The grid: who may look at whom
#
# In attention tokens meet. Each user has 3 history keys, the 2 new ones join them in the cache.

# %%
K_hist = torch.tensor([[[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]],                    # user A's history
                       [[0.0, 1.0], [2.0, 0.0], [1.0, 1.0]]])                   # user B's history  (B, 3, D)
K_cache = torch.cat([K_hist, K_new], dim=1)                                     # (B, S, D)
print(f"K_cache shape: {K_cache.shape} -> (Batch, Hist + Seq_New, Dim)")

# %% [markdown]
# Lay all queries under one another, all keys side by side: a grid with a cell for each (query, key) pair. Two rules say
# which pairs are allowed.
#
# 1. **Same user.** The key belongs to the query's own user.
# 2. **Not later.** The key does not come after the query in that user's sequence. A token may look at itself.
#
# **Predict:** write the grid down on paper. Of its 40 cells, how many are allowed?

# %%
queries = [("A", 3), ("A", 4), ("B", 3), ("B", 4)]                              # (user, position in the user's sequence)
keys = [(user, position) for user in "AB" for position in range(5)]

same_user = [[q[0] == k[0] for k in keys] for q in queries]                     # rule 1, (4, 10)
not_later = [[k[1] <= q[1] for k in keys] for q in queries]                     # rule 2, (4, 10)
grid = [[a and b for a, b in zip(*rows)] for rows in zip(same_user, not_later)]


def block(row):
    return "".join(f"  {cell:d}" for cell in row[:3]) + "  " + "".join(f"  {cell:d}" for cell in row[3:])


print("              User A's keys           User B's keys")
print("             hist      new           hist      new")
print("            k0 k1 k2   k3 k4        k0 k1 k2   k3 k4")
for number, ((user, position), row) in enumerate(zip(queries, grid)):
    if number == 2:
        print("          ---------------------+----------------------")
    print(f"{user}{number % 2 + 1} (q{position})   [{block(row[:5])}    |  {block(row[5:])}  ]")
print("allowed:", sum(map(sum, grid)), "of", sum(map(len, grid)))
figures.show(*figures.two_per_user())

# %% [markdown]
# Read the first line: A1 stands at position 3. It sees A's history and itself, not A2 at position 4, and nothing of B's.
# The two rules leave different *fingerprints*. Which cells does each one alone forbid? Count in the picture, then run:

# %%
def count(cells):
    return int(cells.sum())


rule_1, rule_2 = torch.tensor(same_user), torch.tensor(not_later)               # (4, 10) each
diagonal = torch.block_diag(torch.ones(2, 5), torch.ones(2, 5)).bool()
assert torch.equal(rule_1, diagonal)
print("same user forbids", count(~rule_1), "cells: the two off-diagonal 2x5 blocks, whole")
print("not later forbids", count(~rule_2 & rule_1), "more: one in each diagonal block,",
      [f"q{queries[q][1]} against k{keys[k][1]} of {keys[k][0]}" for q, k in (~rule_2 & rule_1).nonzero().tolist()])
print("history columns that 'not later' touches:", count(~rule_2[:, [0, 1, 2, 5, 6, 7]]))

# %% [markdown]
# "Same user" cuts whole blocks away. "Not later" cuts a triangle out of the *new* columns; history is always in the
# past. That is why they get different cures: a block can be left uncomputed, a triangle is masked.
#
# ## The flat grid wastes blocks
#
# The direct way is **wasteful**: flatten everything, score every query against every key, then mask. Count what it
# computes for nothing as the number of users grows. **Predict:** with 10 users, what share of the cells is wasted?

# %%
flat_scores = Q_batch.reshape(4, 2) @ K_cache.reshape(10, 2).T                  # (4, 10): every query, every key
print(flat_scores)
print("users   computed   in own blocks   wasted blocks   wasted cells")
for users in (1, 2, 4, 10, 64):
    computed, own = (users * 2) * (users * 5), users * 2 * 5
    print(f"{users:5}   {computed:8}   {own:13}   {users * users - users:13}   {1 - own / computed:12.1%}")

# %% [markdown]
# ## First way: keep the batch dimension
#
# A *batch dimension* is a wall. `torch.bmm` multiplies A's queries with A's keys and B's with B's; the cross-user blocks
# cannot be reached. First by hand, as loops: users, then queries, then keys.

# %%
by_hand = [[[sum(a * b for a, b in zip(q, k)) for k in K_cache[user].tolist()]  # one score
            for q in Q_batch[user].tolist()] for user in range(2)]              # [user][new token][key]

scores = torch.bmm(Q_batch, K_cache.transpose(1, 2))                            # (B, T, S) = (2, 2, 5)
assert scores.tolist() == by_hand
assert torch.equal(scores[0], flat_scores[:2, :5]) and torch.equal(scores[1], flat_scores[2:, 5:])
print("Raw scores (Batch, Seq_New, Hist + Seq_New):")
print(scores)

# %% [markdown]
# These are exactly the two diagonal blocks of the flat grid. A1's first three scores are chapter 02's: same query, same
# history. The price of the wall: a box is rectangular. Take one history token away from user B.

# %% tags=["raises-exception"]
K_A = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])    # 3 history + 2 new = 5 keys
K_B = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 1.0], [2.0, 0.0]])                # 2 history + 2 new = 4 keys

torch.stack([K_A, K_B])

# %% [markdown]
# So B gets a *pad*, a key that does not exist: a row of zeros in front
# ([chapter 03](03_padding_and_masks.ipynb) says why in front).
#
# **Predict:** what score does a key of zeros get, and does a zero score mean that nobody looks at it?

# %%
K_B_padded = torch.cat([torch.zeros(1, 2), K_B])                                # (5, D)
K_padded = torch.stack([K_A, K_B_padded])                                       # (B, 5, D): works
padded_scores = torch.bmm(Q_batch, K_padded.transpose(1, 2))                    # (B, T, 5)
print("User B raw scores:")
print(str(padded_scores[1]).removeprefix("tensor(").removesuffix(")").replace(" " * 8, " "))
print("   ^ pad column")

causal = torch.tensor([[True, True, True, True, False], [True] * 5])            # (T, S), causal only
wrong = padded_scores.masked_fill(~causal, float("-inf")).softmax(-1)           # wrong: the pad is a key like any other
print("user B's weights with the causal mask alone:", wrong[1], sep="\n")
by_paper = torch.e ** 0 / sum(torch.e ** score for score in (0, 1, 0, 1))
print(f"the pad's weight in B1, on paper: e^0 / (e^0 + e^1 + e^0 + e^1) = {by_paper:.4f}")

# %% [markdown]
# That zero is a score, not a silence: $e^0 = 1$ in the sum. The pad needs a mask of its own on top of the causal one, and
# this changes the mask's *shape*. One (2, 5) mask no longer serves both users; it becomes a (2, 2, 5), one for each.

# %%
real = torch.tensor([[True] * 5, [False] + [True] * 4])                         # (B, S): B's first key is a pad
mask_per_user = causal & real[:, None]                                          # (B, T, S)
right = padded_scores.masked_fill(~mask_per_user, float("-inf")).softmax(-1)    # (B, T, S)
print("mask", tuple(mask_per_user.shape), "user B:", mask_per_user[1].int().tolist())
print("user B's weights:", right[1], sep="\n")

solo = (Q_batch[1] @ K_B.T).masked_fill(~causal[:, 1:], float("-inf")).softmax(-1)   # B alone, 4 keys, no pad
assert torch.allclose(right[1, :, 1:], solo) and not torch.allclose(wrong[1, :, 1:], solo)
assert (right[1, :, 0] == 0).all()

# %% [markdown]
# ## Second way: flat rows and two lists of offsets
#
# The other way drops the box. All queries lie end to end in one buffer, all keys in another, and two lists say where each
# user's part begins: `cu_seqlens_q` and `cu_seqlens_k`, *cumulative sequence lengths*. They are the row groups and the
# column groups of the grid. A kernel that reads them (ragged, or *varlen*, attention) computes the diagonal blocks only.
#
# **By hand:** what are the two lists for two users with 2 queries and 5 keys each? And if B has only 4 keys?

# %%
def offsets(lengths):
    """Where each row begins in a flat buffer, and where the last one ends."""
    return [0, *accumulate(lengths)]


def ragged_scores(Q_flat, K_flat, cu_seqlens_q, cu_seqlens_k):
    """Q (tokens, D), K (keys, D) -> one (T, S) block a user: what a varlen kernel computes, as a loop."""
    return [Q_flat[q0:q1] @ K_flat[k0:k1].T
            for (q0, q1), (k0, k1) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k))]


cu_seqlens_q, cu_seqlens_k = offsets([2, 2]), offsets([5, 5])
print("cu_seqlens_q =", cu_seqlens_q, " cu_seqlens_k =", cu_seqlens_k)
blocks = ragged_scores(Q_batch.reshape(4, 2), K_cache.reshape(10, 2), cu_seqlens_q, cu_seqlens_k)
assert torch.equal(torch.stack(blocks), scores)                                 # the loop over offsets equals bmm

blocks = ragged_scores(Q_batch.reshape(4, 2), torch.cat([K_A, K_B]), cu_seqlens_q, offsets([5, 4]))
print("B with 4 keys: cu_seqlens_k =", offsets([5, 4]), " blocks", [tuple(b.shape) for b in blocks])
assert torch.equal(blocks[1], padded_scores[1, :, 1:])                          # no pad column, no pad's mask

# %% [markdown]
# Either way the layout keeps the users apart. What no layout does is the triangle *inside* a block: both ways have
# computed $q_{A,1} \cdot k_{A,2}$.
#
# ## The causal mask has to be said
#
# New token $i$ may see all history and the new tokens up to itself. Both users have the same amount of history, so one
# (2, 5) mask serves them both.

# %%
hist_len, new_len = K_hist.shape[1], X_batch.shape[1]
mask = torch.ones(new_len, hist_len + new_len, dtype=torch.bool)                # (T, S)
mask[:, hist_len:] = torch.tril(torch.ones(new_len, new_len, dtype=torch.bool))
assert mask.tolist() == [row[:5] for row in grid[:2]] == [row[5:] for row in grid[2:]]     # the grid's blocks
print("Causal mask (True = may attend):")
print(mask)

# %% [markdown]
# **Predict:** which scores turn into $-\infty$, and what weight does $e^{-\infty}$ give?

# %%
masked_scores = scores.masked_fill(~mask, float("-inf"))                        # (B, T, S), the mask broadcasts
print("Masked scores:")
print(masked_scores)

weights = torch.softmax(masked_scores, dim=-1)                                  # (B, T, S)
print("Attention weights (top-right of each user is exactly 0):")
print(weights)
assert (weights[:, 0, 4] == 0).all()

# %% [markdown]
# **Break it.** The wrong version leaves the mask out. Take the embeddings as values as well ($W_v = I$) and change A's
# *second* token to $[5, 5]$ again.
#
# **Predict:** which of the four outputs should change, and which do without the mask?

# %%
def attend(X, seen):
    """New embeddings X (B, T, D), seen (T, S) -> (B, T, D). Keys and values: history, then the new tokens."""
    K = torch.cat([K_hist, X @ W_k], dim=1)                                     # (B, S, D), also the values
    scores = torch.bmm(X @ W_q, K.transpose(1, 2))                              # (B, T, S)
    return torch.bmm(scores.masked_fill(~seen, float("-inf")).softmax(-1), K)


everything = torch.ones_like(mask)                                              # wrong: nothing is hidden
for name, seen in (("causal mask", mask), ("no mask (wrong)", everything)):
    before, after = attend(X_batch, seen), attend(X_other, seen)
    moved = ((before - after).abs() > 1e-4).any(-1).flatten()
    print(f"{name:16} changed: {[n for n, m in zip(('A1', 'A2', 'B1', 'B2'), moved) if m]}, "
          f"A1: {[round(v, 2) for v in before[0, 0].tolist()]} -> {[round(v, 2) for v in after[0, 0].tolist()]}")

# %% [markdown]
# Without the mask A1's output depends on a token that comes after it: **a leaked future key**. And both versions keep B
# untouched; that is the batch dimension's work, not the mask's. In decode the leak could not show, because a single new
# token has no later one beside it.
#
# ## The same picture in other sizes
#
# Nothing above needs the number two. With $h$ history tokens and $T$ new ones a user's block is $T \times S$ with
# $S = h + T$, the triangle in its last $T$ columns. Equivalently: **the last $T$ lines of the full causal triangle**,
# aligned at the bottom right.

# %%
def causal_mask(history, new):
    """(T, S) bool, True = may attend: query i stands at position history + i."""
    return torch.arange(history + new) <= history + torch.arange(new)[:, None]


assert torch.equal(causal_mask(3, 2), mask)
full = torch.ones(5, 5, dtype=torch.bool).tril()
q5 = torch.arange(10.0).reshape(1, 5, 2) / 10                                   # (1, 5, D): five queries, keys and values
out = F.scaled_dot_product_attention(q5, q5, q5, attn_mask=full)
for new in (1, 3):
    step = F.scaled_dot_product_attention(q5[:, -new:], q5, q5, attn_mask=causal_mask(5 - new, new))
    top_left = F.scaled_dot_product_attention(q5[:, -new:], q5, q5, is_causal=True)      # wrong: aligned top-left
    print(f"{new} new against 5 keys, equal to the full forward: our mask {torch.allclose(step, out[:, -new:])}, "
          f"is_causal {torch.allclose(top_left, out[:, -new:])} (wrong)")

# %% [markdown]
# torch's `is_causal=True` puts the triangle at the top left: with history in the cache it hides the past.
#
# Here are the sizes an engine meets. **Prefill**: a whole prompt, no history. **Chunked prefill**: a long prompt in
# pieces, so that other users need not wait for it; each piece finds the earlier ones as history. **Decode**: one new token.
# **Speculative verification**: the last token and a few *drafts*, guesses of what comes next, checked in one step.

# %%
KINDS = {"prefill": (0, 4), "second chunk": (4, 3), "decode": (7, 1), "verify 3 drafts": (4, 4)}

fig, axes = plt.subplots(1, 4, figsize=(9.5, 2.6), width_ratios=[sum(size) for size in KINDS.values()])
for ax, (name, (history, new)) in zip(axes, KINDS.items()):
    figures.attention_grid(ax, [history], [new], title=name)
    print(f"{name:16} history {history}, new {new}: {new * (history + new):2} scores, "
          f"{count(causal_mask(history, new)):2} allowed")
figures.show(fig, "Four blocks for one user. Prefill: 4 queries, 4 keys, a triangle. Second chunk: 3 queries, 4 history "
                  "keys all visible, then a triangle of 3. Decode: one query sees all 8 keys. Verifying 3 drafts: 4 "
                  "queries, 4 history keys, then a triangle of 4.")

# %% [markdown]
# ## Play with it
#
# Choose the sizes. The text gives the counts and one user's block. Which sizes need no causal mask at all?

# %%
def in_words(users, history, new):
    """One step in counts, and one user's block: 1 = allowed, 0 = masked."""
    keys, seen = history + new, causal_mask(history, new)
    lines = "\n".join(" ".join(str(int(cell)) for cell in row) for row in seen)
    return (f"flat grid {users * new} x {users * keys} = {users * new * users * keys} cells, own blocks "
            f"{users * new * keys}, allowed {users * count(seen)}<pre>{lines}</pre>")


assert "= 40 cells, own blocks 20, allowed 18" in in_words(2, 3, 2)
controls, sliders, text = play(in_words, users=(1, 16, 2), history=(0, 12, 3), new=(1, 6, 2))
sliders["users"].value, sliders["history"].value, sliders["new"].value = 10, 0, 4
print(text.value)
controls

# %% [markdown]
# ## On the real thing: a prompt in uneven chunks
#
# Load the shipped model, a toy of the real architecture (Qwen3.5) that has learned some answers by heart. Its mask is
# `visible` in `qwen/attention.py`: a key's slot in the cache against the query's own slot. It comes per user. B, one token
# shorter, has an unused slot at the *end* instead of a pad in front, and the same comparison hides it.

# %%
path = find_model()
model = Model.from_pretrained(path, device="cpu", dtype=torch.float32)
chat = Chat(model, path)
slots = torch.tensor([[3, 4], [2, 3]])                                          # A has 3 history tokens, B has 2
print(attention.visible(slots, num_slots=5).int())                              # (B, T, S)
assert torch.equal(attention.visible(slots, 5)[0], mask)

QUESTIONS = {"A": "What is the capital of France?", "B": "List the first ten prime numbers."}
prompts = [chat.tk.encode(build_prompt([{"role": "user", "content": q}])).ids for q in QUESTIONS.values()]
print("lengths:", [len(prompt) for prompt in prompts])

# %% [markdown]
# The model also has *linear* layers (Gated DeltaNet). They keep no keys. A short convolution reads the last few inputs, the
# *window*, and each head has one matrix, the *recurrent state*, into which every token writes. Both are carried from
# chunk to chunk like the keys.
#
# Cut 23 tokens into chunks. **Predict:** which cuts give other logits or another cached state than one shot?
# "Same" is the series' bound: $10^{-4}$, times the size of the number where that is above 1.

# %%
def same(found, right, bound=1e-4):
    return bool(((found - right).abs() <= bound * right.abs().clamp(min=1)).all())


@torch.no_grad()
def prefill(tokens, cuts):
    """tokens (n,) in chunks of the given lengths -> logits (n, vocab), state."""
    state, logits = State(model), []
    for first, last in pairwise(offsets(cuts)):
        logits.append(model(torch.tensor([tokens[first:last]]), state)[0])      # (chunk, vocab)
    return torch.cat(logits), state


def same_state(state, right):
    """Per part of a State, over all layers: the same? Keys and values up to the length of `right`."""
    end = {"k": right.length.item(), "v": right.length.item(), "conv": None, "recurrent": None}
    return {part: all(same(getattr(state, part)[layer][:, :, :last], found[:, :, :last])
                      for layer, found in getattr(right, part).items()) for part, last in end.items()}

# %%
tokens = prompts[1][:23]
one_shot, one_state = prefill(tokens, [23])
for cuts in ([1, 22], [2, 21], [3, 20], [7, 7, 7, 2], [1] * 23):
    logits, state = prefill(tokens, cuts)
    kept = same_state(state, one_state)
    print(f"{str(cuts) if len(cuts) < 9 else '23 ones':14} logits {same(logits, one_shot)}, {kept}")
    assert same(logits, one_shot) and all(kept.values()) and state.length.tolist() == [23]

# %% [markdown]
# ## A mixed step
#
# Engines mix the sizes in one step: A decodes one token while a chunk of B's prompt goes through. `model.ragged` takes
# the rows end to end with their `cu_seqlens`, as above; it keeps each row's history in the `State`.

# %%
forwards = []                                                                   # what each forward is for, to count them


def step(rows, state, purpose="new tokens"):
    """Each row's new tokens (a row may bring none) in one forward -> one (tokens, vocab) of logits a row."""
    cu_seqlens = offsets(map(len, rows))
    with torch.no_grad():
        logits = model.ragged(torch.tensor(sum(rows, [])), torch.tensor(cu_seqlens), state)
    forwards.append(purpose)
    return [logits[first:last] for first, last in pairwise(cu_seqlens)]


alone = [generate(model, torch.tensor([prompt]), max_new_tokens=60, stop=chat.stop) for prompt in prompts]
state = State(model, batch=2)
step([prompts[0], prompts[1][:9]], state)                                       # A's prompt, and B's first 9 tokens
history = state.length.tolist()
new = [alone[0][:1], prompts[1][9:16]]                                          # A decodes, B brings 7 more
found = step(new, state)
print("history:", history, " new:", [len(row) for row in new])
print("cu_seqlens_q =", offsets(map(len, new)), " cu_seqlens_k =", offsets(state.length.tolist()))
print("A's next token right:", found[0].argmax(-1).tolist() == alone[0][1:2])
print("B's logits those of one shot:", same(found[1], one_shot[9:16]))

# %% [markdown]
# ## Speculative verification
#
# Decode makes one token a step, because the next one is not known. But it can be *guessed*. Feed the last token and
# three drafts in one step: four rows instead of one, hardly more time (chapter 01). Causality does the rest. The logits of
# each row are what the model says after exactly the tokens up to it, so **one forward checks all drafts**. Accept drafts
# from the left as long as each one is what the model says itself. After the last accepted one the model's own token comes
# for free, so no step is lost.
#
# Where do drafts come from? Here from *prompt lookup*: find where the last token stood before, in prompt or answer, and
# draft what followed it there.

# %%
def lookup(tokens, k=3):
    """k drafts: what followed the last token where it stood before, k tokens or more ago; the latest place counts, [] if none."""
    for place in range(len(tokens) - 1 - k, -1, -1):
        if tokens[place] == tokens[-1]:
            return tokens[place + 1:place + 1 + k]
    return []


def accept(drafts, found):
    """How many drafts agree with the model, from the left; found: the model's tokens, one more than drafts."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == found[accepted]:
        accepted += 1
    return accepted


def words(ids):
    return [chat.tk.decode([i], skip_special_tokens=False) for i in ids]

# %% [markdown]
# One step, slowly. User A asks *What is the capital of France?*; take the first place in the answer where the lookup finds
# something. **Predict** from the question: where could that be, and how many of the 3 drafts will the model accept?

# %%
start = next(n for n in range(1, len(alone[0])) if lookup(prompts[0] + alone[0][:n]))      # answer tokens so far
drafts = lookup(prompts[0] + alone[0][:start])
_, before = prefill(prompts[0] + alone[0][:start - 1], [len(prompts[0]) + start - 1])
fed = [alone[0][start - 1], *drafts]
state = before.snapshot()
verified = step([fed], state)[0]                                                # (4, vocab), one forward
state = before.snapshot()
singles = torch.cat([step([[token]], state)[0] for token in fed])               # the same four, one by one
found = verified.argmax(-1).tolist()
print("so far:  ", repr(chat.tk.decode(alone[0][:start])))
print("drafts:  ", words(drafts))
print("model:   ", words(found))
good = accept(drafts, found)
print("accepted:", good, " new tokens from one step:", good + 1)
print("logits those of four steps of one token:", same(verified, singles))
assert same(verified, singles) and found[:good + 1] == alone[0][start:start + good + 1]

# %% [markdown]
# Now the whole loop, for both users in one batch. A row brings its last token and its drafts, or nothing when it is done.
# When a draft is *refused*, it has left its traces in the row's cache already. `put_back` has to undo that: here by a
# snapshot from before the step, and one more forward over what the refusing rows have accepted.

# %%
def restore(state, before, refused):
    """The right way: these rows as they were before the step, then their accepted tokens once more."""
    state.restore(list(refused), before.select(list(refused)))
    step([refused.get(row, []) for row in range(state.batch)], state, "put back")

# %%
def speculate(prompts, put_back):
    """Greedy decode with drafts: the answers, and how many of 3 drafts each verification accepted."""
    state, accepted = State(model, len(prompts)), [[] for _ in prompts]
    answers = [logits.argmax(-1).tolist()[-1:] for logits in step(prompts, state)]        # prefill
    while not all(done := [answer[-1] in chat.stop or len(answer) >= 60 for answer in answers]):
        drafts = [[] if d else lookup(p + a) for d, p, a in zip(done, prompts, answers)]
        fed = [[] if d else [a[-1], *draft] for d, a, draft in zip(done, answers, drafts)]
        before, refused = state.snapshot(), {}
        for row, logits in enumerate(step(fed, state)):
            found = logits.argmax(-1).tolist()
            good = accept(drafts[row], found)
            accepted[row] += [good] if drafts[row] else []
            if good < len(drafts[row]):
                refused[row] = fed[row][:good + 1]                              # what the row keeps of this step
            for token in found[:good + 1]:
                answers[row] += [token] if answers[row][-1] not in chat.stop else []
        if refused:
            put_back(state, before, refused)
    return answers, accepted

# %% [markdown]
# **Predict:** are the tokens those of one-by-one decode?

# %%
forwards.clear()
answers, accepted = speculate(prompts, restore)
for name, answer, right, counts in zip(QUESTIONS, answers, alone, accepted):
    print(f"{name}: {chat.tk.decode(answer)!r}, the tokens of one-by-one steps: {answer == right}")
    print(f"   accepted of 3 drafts: {counts}, in all {sum(counts)}")
assert answers == alone
both = accepted[0] + accepted[1]
print("how often 0, 1, 2, 3 accepted:", [both.count(n) for n in range(4)])
print(f"forwards: one by one {max(map(len, alone))}, with drafts {forwards.count('new tokens')} and "
      f"{forwards.count('put back')} to put the state back")
assert set(both) == {0, 1, 2, 3}

# %% [markdown]
# Every count occurs, and no token differs. Drafts can make a step worth more, or be refused; they cannot change the
# answer. The price is in the last line. A step with a refusal needs a second forward to put the state back, and with so
# many refusals that eats the whole gain. Without those forwards the drafts would pay; the next section shows why they
# are needed, and the last one what an engine does instead.
#
# ## A recurrent state cannot be cut back
#
# For a model with attention layers only, putting back is cheap. Keys lie in slots; set the row's length back, and the
# refused ones are out of sight and soon overwritten. **The wrong version** does only that. Take 10 tokens and ask
# for the first 7 back.
#
# **Predict:** which parts of the state are then those of a run over 7 tokens: keys, values, window, recurrent state?

# %%
_, seven = prefill(tokens, [7])
_, cut = prefill(tokens, [10])
saved = prefill(tokens, [7])[1].snapshot()                                      # the right way: taken before the other 3
cut.length[:] = 7                                                               # wrong: the length alone

for name, state in (("cut back", cut), ("snapshot", saved)):
    kept = same_state(state, seven)
    logits = step([tokens[7:9]], state)[0]
    print(f"{name}: {kept}, next logits right: {same(logits, one_shot[7:9])}")

# %% [markdown]
# The window still holds the inputs of the three later tokens. What they wrote into the matrix, and what they let fade,
# is mixed with everything before. There is no slot to forget: a recurrent state is put back from a copy, or made again.
#
# **Predict:** in the loop above, at which of user A's tokens does the wrong version begin to show? (A's verifications
# accepted the numbers of drafts printed above, the first time all three.)

# %%
def cut_back(state, before, refused):
    """Wrong: forgets the refused keys and values, but not what the refused drafts did to the linear layers."""
    for row, kept in refused.items():
        state.length[row] = before.length[row] + len(kept)


broken, _ = speculate(prompts, cut_back)
for name, answer, right in zip(QUESTIONS, broken, alone):
    first = next(i for i, (a, b) in enumerate(zip(answer, right)) if a != b)
    print(f"{name}: right up to {chat.tk.decode(answer[:first])!r}, then {words(answer[first:first + 1])} "
          f"instead of {words(right[first:first + 1])}")
    assert answer != right

# %% [markdown]
# A's first refusal comes after *France*. That step still gives the right ` is`: the model says it before it has read a
# refused draft. The next step starts from the spoilt state. Its first token, a space, survives by luck; the one after it
# does not. No error was raised.
#
# ## Your turn
#
# Replace the dots, run the cell, and `check` tells you at once.
#
# **04.1** Three users, each with 4 history tokens and 3 new ones. How many cells of the grid are allowed?
#
# <details><summary>Solution</summary>
#
# A user's new tokens see 4 + 1, 4 + 2 and 4 + 3 keys: 18 cells, and there are three users.
# ```python
# allowed = 3 * (5 + 6 + 7)
# ```
# </details>

# %%
allowed = ...
_ = check("04.1", allowed)

# %% [markdown]
# **04.2** Write the causal mask of one user as nested lists of `True` (may attend) and `False`: a line for each of `new`
# queries, a column for each of `history + new` keys.
#
# <details><summary>Solution</summary>
#
# Query i stands at position `history + i` and sees the keys up to there.
# ```python
# def my_mask(history, new):
#     return [[key <= history + i for key in range(history + new)] for i in range(new)]
# ```
# </details>

# %%
def my_mask(history, new):
    return ...


_ = check("04.2", my_mask)

# %% [markdown]
# **04.3** From each user's `history` and `new` token counts (two lists), make `(cu_seqlens_q, cu_seqlens_k)`.
#
# <details><summary>Solution</summary>
#
# A user's queries are the new tokens; the keys are history and new together.
# ```python
# def my_offsets(history, new):
#     q, k = [0], [0]
#     for h, n in zip(history, new):
#         q.append(q[-1] + n)
#         k.append(k[-1] + h + n)
#     return q, k
# ```
# </details>

# %%
def my_offsets(history, new):
    return ...


_ = check("04.3", my_offsets)

# %% [markdown]
# **04.4** One verification: `drafts` are k tokens, `found` are the model's k + 1 tokens (`found[i]` is what it says in
# place of `drafts[i]`; the last one comes after all drafts). Return the list of new tokens that the step yields.
#
# <details><summary>Solution</summary>
#
# The accepted drafts, then the model's own next token.
# ```python
# def my_verify(drafts, found):
#     new = []
#     for draft, token in zip(drafts, found):
#         new.append(token)
#         if token != draft:
#             return new
#     return new + [found[-1]]
# ```
# </details>

# %%
def my_verify(drafts, found):
    return ...


_ = check("04.4", my_verify)

# %% [markdown]
# **04.5** A row has processed 20 tokens. A step feeds its last token and 3 drafts, and 1 draft is accepted. How many
# tokens must the row's state have processed when the next verification begins?
#
# <details><summary>Solution</summary>
#
# The last token and the accepted draft. The model's own new token has not been fed yet: it is the next step's first.
# ```python
# processed = 20 + 1 + 1
# ```
# </details>

# %%
processed = ...
_ = check("04.5", processed)

# %% [markdown]
# ## In an interview
#
# > Projections work row by row, so any mix of users and tokens shares them without a mask. Attention has two rules: the
# > layout (a batch dimension, or flat buffers with `cu_seqlens`) keeps users apart and never computes the cross-user blocks; a causal
# > mask aligned at the bottom right hides later new tokens, and history is never masked. Prefill, chunked prefill, decode
# > and speculative verification differ only in how many history and new tokens a row has, and refused drafts must be undone,
# > which for a recurrent state takes a snapshot.
#
# **In production.** FlashAttention's varlen kernels take `cu_seqlens_q` and `cu_seqlens_k`; vLLM calls the first
# `query_start_loc`. Chunked prefill is `--enable-chunked-prefill` in vLLM and `--chunked-prefill-size` in SGLang. Prompt
# lookup is vLLM's `ngram` method of `speculative_config`; for a model
# with recurrent layers it keeps a state after each draft, so that a refusal picks one instead of running again.
#
# **Next:** [05 The roofline](05_the_roofline.ipynb) measures where a step's time goes. **Before:**
# [03 Padding and masks](03_padding_and_masks.ipynb).
