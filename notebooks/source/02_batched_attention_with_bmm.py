# %% [markdown]
# # 02 Batched attention with bmm
#
# A weight matrix treats every row alike, so ten users share one trip of it. Attention does not: each user looks back at
# their *own* past. Can it be batched all the same, and does the batch still save anything?
#
# It can, with one call (`bmm`), but batching the look back saves no bytes of keys and values. At the end of this chapter you can write the attention of
# a decode step on paper for two users, do it in one line of torch, name three ways in which users get mixed up without
# an error, and count what the batch shares and what it never shares.
#
# It runs in about 5 seconds on two cores and needs nothing but this repository. It goes on where
# [chapter 01](01_one_weight_matrix.ipynb) stopped; symbols and terms of the whole series stand in the
# [glossary](GLOSSARY.md). Several cells ask for a prediction. The outputs are already below them: to predict honestly,
# choose *Edit > Clear Outputs of All Cells* first.

# %%
from collections import Counter
from math import exp, sqrt
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from qwen import attention, figures, widgets
from qwen.exercises import check

figures.setup()

# %% [markdown]
# ## Two users, two caches
#
# User A and user B are in the middle of their conversations. The tokens a user has already put through the model are the
# user's *history*. Here it is 3 tokens long for both. In every attention layer each of them has left a *key* $k$, which
# says what can be found there, and a *value* $v$, which is what is found. The place where a user's keys and values wait
# is the user's *cache*, and a token's place in it is a *slot*: slots 0, 1 and 2 are taken.
#
# Now each user has one *new token*, the $x_A$ and $x_B$ of chapter 01. It makes three vectors, each a row times a weight
# matrix. Its *query* asks, and is then thrown away. Its key and its value join the cache first, in slot 3: a token looks
# back at its history **and at itself**. Take $W_k = I$, so the new key is the token itself.
#
# **By hand first:** what do the two caches hold after that?

# %%
W_q, W_k = [[1, 1], [0, 1]], [[1, 0], [0, 1]]       # (d, d) each, for everyone
X_batch = [[1, 0], [0, 1]]                          # (users, d): x_A, x_B
K_hist = [[[1, 0], [1, 1], [0, 1]],                 # user A's history
          [[0, 1], [2, 0], [1, 1]]]                 # user B's; together (users, hist, d)


def project(X, W):
    """Chapter 01: X (rows, d_in) times W (d_in, d_out) -> (rows, d_out), row by row."""
    return [[sum(n * w for n, w in zip(x, column)) for column in zip(*W)] for x in X]


Q_batch = project(X_batch, W_q)                     # (users, d)
K_new = project(X_batch, W_k)                       # (users, d)
K_cache = [hist + [new] for hist, new in zip(K_hist, K_new)]       # (users, hist + 1, d)
print("queries:", Q_batch)
print("cache A:", K_cache[0])
print("cache B:", K_cache[1])

# %%
fig, axes = plt.subplots(1, 5, figsize=(9, 2.9), width_ratios=[3, 3.6, 1.2, 3, 3.6])
for user, (query, cache) in enumerate(zip(axes[[0, 3]], axes[[1, 4]])):
    name = "AB"[user]
    figures.matrix(query, [Q_batch[user]], f"q_{name}", colors=name)
    query.margins(0.05)                             # room for the frame
    figures.matrix(cache, K_cache[user], f"keys of user {name}", colors=name,
                   rows=["slot 0", "slot 1", "slot 2", "3, new"])
axes[2].axis("off")
figures.show(fig, f"User A's query {Q_batch[0]} beside A's four keys {K_cache[0]}, the last one new; "
                  f"user B's query {Q_batch[1]} beside B's four keys {K_cache[1]}. Nothing is shared.")

# %% [markdown]
# ## Scores: a loop over users
#
# A *score* says how well a key fits a query: the two are multiplied number by number and added up. User A's query meets
# the four keys of user A, user B's query the four of user B.
#
# **By hand:** $q_A = [1, 1]$ and $q_B = [0, 1]$, four keys each in the picture. **Predict** the two rows of four scores.

# %%
def dot(q, k):
    return sum(a * b for a, b in zip(q, k))


scores = []
for q, keys in zip(Q_batch, K_cache):               # one user after the other
    scores.append([dot(q, k) for k in keys])
print("scores of A:", scores[0])
print("scores of B:", scores[1])

# %% [markdown]
# ## The same in one call
#
# Stack the two caches along a *batch dimension*: `K_cache` becomes (2, 4, 2), which is (users, keys, d). Then
# `torch.bmm`, the batched matrix multiplication, multiplies matrix 0 of one stack with matrix 0 of the other, matrix 1
# with matrix 1, and never 0 with 1. Nobody has to be told to keep out.
#
# A user's query has to be a matrix too, of one row: (2, 1, 2). And the keys are turned on their side, so that each
# becomes a column. **Predict** the shape of the scores.

# %%
W_q, W_k = torch.as_tensor(W_q).float(), torch.eye(2)          # (d, d)
X_batch = torch.as_tensor(X_batch).float()          # (B, d)
K_hist = torch.as_tensor(K_hist).float()            # (B, hist, d)
Q_batch = X_batch @ W_q                             # (B, d): one trip for all

print("=== BATCHED ATTENTION (BONUS) ===")
K_new = (X_batch @ W_k).unsqueeze(1)                # (B, d) -> (B, 1, d)
K_cache = torch.cat([K_hist, K_new], dim=1)         # (B, hist + 1, d)
Q_3D = Q_batch.unsqueeze(1)                         # (B, d) -> (B, 1, d)
attention_scores = torch.bmm(Q_3D, K_cache.transpose(1, 2))        # (B, 1, d) x (B, d, hist + 1)

print(f"Attention Scores Shape: {attention_scores.shape} -> (Batch, 1, Hist + 1)")
print(f"Scores:\n{attention_scores}")
assert attention_scores[:, 0].tolist() == scores    # the loop's, to the last bit

# %% [markdown]
# From here on the letters of the [glossary](GLOSSARY.md): $B$ users in the batch, $T$ new tokens each (here 1), $S$ keys
# each (here 4), $D$ numbers in a query or key. (With one head, $D$ is the $d$ of the cells above.)
#
# `einsum` says the same with one letter for each dimension. A letter in both inputs **and** in the output goes in step
# (`b`: user with user). A letter in both inputs but not in the output is multiplied and added up (`d`). A letter in one
# input gets combined with all the others (`t`, `s`).
#
# **Predict:** what would it mean to write the users of the keys with a letter of their own, `tbd,csd`? How many scores?

# %%
by_einsum = torch.einsum("btd,bsd->bts", Q_3D, K_cache)            # (B, T, S)
everybody = torch.einsum("btd,csd->btcs", Q_3D, K_cache)           # (B, T, B, S)
print("btd,bsd->bts  same as bmm:", torch.equal(by_einsum, attention_scores))
print("@             same as bmm:", torch.equal(Q_3D @ K_cache.mT, attention_scores))
print("btd,csd->btcs", tuple(everybody.shape), f"{everybody.numel()} scores, {by_einsum.numel()} of them legal")
print(everybody[:, 0])

# %% [markdown]
# With two letters every user's query meets every user's keys: half of these scores belong to nobody. `bmm` never
# computes them.
#
# Forget the turn, and the shapes refuse. (They do so only while $S \neq D$.)

# %% tags=["raises-exception"]
torch.bmm(Q_3D, K_cache)

# %% [markdown]
# ## From scores to an answer
#
# Three more steps. **Scale:** divide by $\sqrt{D}$, because a sum of $D$ products grows with $D$. **Softmax:** $e$ to
# each score, divided by the row's sum, so that a query's *weights* are positive and add up to 1. **Values:** the output
# is the mix of the user's values in these weights.
#
# The values below are *marked*. The first number says which token it is: 10, 20, 30, 40 for A, 110 to 140 for B. The
# second number is 0 in all of A's values and 1 in all of B's. So the second number of an output tells **what share of it
# came from user B**.
#
# **Predict:** what must it be for A, and for B? First by hand, one user after the other.

# %%
V_cache = [[[10, 0], [20, 0], [30, 0], [40, 0]],    # user A: three values of the history and the new one
           [[110, 1], [120, 1], [130, 1], [140, 1]]]               # user B; together (B, S, D)


def look_back(q, keys, values):
    """One query q (D,) over one user's keys and values (S, D) -> weights (S,), output (D,)."""
    raised = [exp(dot(q, k) / sqrt(len(q))) for k in keys]
    weights = [e / sum(raised) for e in raised]
    return weights, [sum(w * v[d] for w, v in zip(weights, values)) for d in range(len(values[0]))]


by_hand = []
for user in (0, 1):
    weights, out = look_back(Q_batch[user].tolist(), K_cache[user].tolist(), V_cache[user])
    by_hand.append(out)
    print(f"user {'AB'[user]}: weights {[round(w, 4) for w in weights]}, output {[round(o, 2) for o in out]}")

# %%
V_cache = torch.as_tensor(V_cache).float()          # (B, S, D)


def attend(q, k, v):
    """q (B, T, D), k and v (B, S, D) -> (B, T, D): each user's queries over that user's keys."""
    scores = torch.bmm(q, k.transpose(1, 2)) / k.shape[-1] ** 0.5  # (B, T, S)
    return torch.bmm(scores.softmax(-1), v)         # (B, T, S) x (B, S, D)


output = attend(Q_3D, K_cache, V_cache)
print([[round(n, 2) for n in row] for row in output[:, 0].tolist()])
assert torch.allclose(output[:, 0], torch.tensor(by_hand))
print("torch's own agrees:", torch.allclose(F.scaled_dot_product_attention(Q_3D, K_cache, V_cache), output))

# %% [markdown]
# This is the whole of a decode step's attention. There is no mask in it. One new token may look at everything in its
# cache, since all of it is older than the token or the token itself; and `bmm` does not let it look anywhere else. Masks
# come with unequal histories (chapter 03) and with more than one new token (chapter 04).
#
# ## Break it: users mixed up
#
# **Wrong version 1: flatten.** A projection takes all users' rows in one flat matrix, so do the same here: queries
# (2, 2), all keys (8, 2), one plain `@`, one softmax. The shapes fit.
#
# **Predict:** what share of A's output comes from B?

# %%
def flattened(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))  # wrong: (B·T, D), (B·S, D): whose is whose is gone
    return ((q @ k.T / k.shape[-1] ** 0.5).softmax(-1) @ v)[:, None]


weights = (Q_3D.flatten(0, 1) @ K_cache.flatten(0, 1).T / 2 ** 0.5).softmax(-1)        # (B·T, B·S)
fig, ax = plt.subplots(figsize=(8, 2.4))
legal = [["A"] * 4 + ["wrong"] * 4, ["wrong"] * 4 + ["B"] * 4]
shown = [[f"{w:.2f}" + " ✗" * (c == "wrong") for w, c in zip(*row)] for row in zip(weights.tolist(), legal)]
figures.matrix(ax, shown, "Flattened: each query's weights over all eight keys", colors=legal,
               rows=["query of A", "query of B"], columns=[f"{u}{s}" for u in "AB" for s in range(4)])
figures.show(fig, f"Weights of A's and B's query over the keys A0 to A3 and B0 to B3: {shown}. "
                  "Those marked ✗ lie on the other user's keys.")
for name, row in zip("AB", flattened(Q_3D, K_cache, V_cache)[:, 0].tolist()):
    print(f"output of {name}: {row[0]:.2f}, share that came from B: {row[1]:.0%}")

# %% [markdown]
# More than half of A's answer is B's conversation. It is a leak between two customers, and nothing raised an error. To
# flatten is allowed only with a mask over the cells marked ✗, or with offsets that tell a kernel where each user starts:
# chapters 03 and 04.
#
# **Wrong version 2: reshape where it should be transpose.** A cache is often written step by step: every step adds one
# key of each user, so the buffer is (steps, users, D). Attention wants (users, steps, D). Both `transpose` and `reshape`
# give that shape.
#
# **Predict:** whose keys does user A get after the reshape?

# %%
def by_step(t):
    return t.transpose(0, 1).contiguous()           # (B, S, D) -> (S, B, D), as a buffer written step by step


names = torch.tensor([[10, 11, 12, 13], [110, 111, 112, 113]])[..., None]    # (B, S, 1)
buffer = by_step(names)                             # (S, B, 1)
right, wrong = buffer.transpose(0, 1), buffer.reshape(2, 4, 1)     # (B, S, 1) both
fig, axes = plt.subplots(1, 3, figsize=(9, 2.9), width_ratios=[3.2, 4.6, 4.6])
for ax, table, title in ((axes[0], buffer, "the buffer, step by step"), (axes[1], right, "transpose"),
                         (axes[2], wrong, "reshape (wrong)")):
    table = table[..., 0].tolist()
    figures.matrix(ax, table, title, colors=[["A" if n < 100 else "B" for n in row] for row in table],
                   rows=[f"step {s}" for s in range(4)] if ax is axes[0] else ["user A", "user B"])
figures.show(fig, f"Keys named 10 to 13 for A and 110 to 113 for B. Buffer by step: {buffer[..., 0].tolist()}. Transposed, "
                  f"each user has their own four: {right[..., 0].tolist()}. Reshaped: {wrong[..., 0].tolist()}, mixed.")

# %% [markdown]
# `reshape` keeps the order in memory and only draws new borders: user A gets the first two steps of *both* users, user B
# the last two. `transpose` moves the dimensions with their numbers.
#
# A test for leaks needs no right answer. Change everything that belongs to B; A's output must not move. Then the other
# way round. Here it is, on both wrong versions and on a third, the queries of one user against the keys of the other.

# %%
def reshaped(q, k, v):
    k, v = (by_step(t).reshape(t.shape) for t in (k, v))           # wrong: borders in the wrong places
    return attend(q, k, v)


def swapped(q, k, v):
    return attend(q, k.flip(0), v.flip(0))          # wrong: the caches in another order than the queries


def leaks(function):
    """Which users' outputs move when only the other user's query, keys and values change."""
    before, moved = function(Q_3D, K_cache, V_cache), []
    for user in (0, 1):
        changed = [t.clone() for t in (Q_3D, K_cache, V_cache)]
        for t in changed:
            t[1 - user] += torch.arange(t[0].numel()).view(t[0].shape)                 # the other user's
        moved += ["AB"[user]] if not torch.allclose(function(*changed)[user], before[user]) else []
    return moved


for function in (attend, flattened, reshaped, swapped):
    share = function(Q_3D, K_cache, V_cache)[:, 0, 1].tolist()
    print(f"{function.__name__:10} B's share in A {share[0]:4.0%}, in B {share[1]:4.0%}; leaks into {leaks(function)}")

# %% [markdown]
# The last one is the smallest slip and the worst leak. For example, one user leaves the batch, the rows move up, the
# caches do not.
# Every per-user tensor has to move together (`qwen/cache.py`, `select`).
#
# ## What the batch does not share
#
# Count again what travels from memory, as in chapter 01. `fetch` hands out one row of numbers and adds up its bytes
# under a name, 4 a number (fp32). The step below is the whole attention step by hand: three projections with the tiles
# outside and the users inside, so that all share the trip, and then every user's look back.
#
# **Predict:** for 1 user the weights are $W_q, W_k, W_v$, 2×2 each, and the cache holds 4 keys and 4 values of 2
# numbers. How many bytes of each? And for 10 users?

# %%
class Memory:
    """Hands out rows of numbers and counts the bytes that travel, under a name."""

    def __init__(self):
        self.bytes = Counter()

    def fetch(self, name, row):
        self.bytes[name] += 4 * len(row)
        return row


def project_batch(X, W, memory):
    """Tiles outside: each row of W comes once and serves all users. X (B, d) -> (B, d)."""
    out = [[0] * len(W[0]) for _ in X]
    for i, row in enumerate(W):
        tile = memory.fetch("W", row)
        for x, o in zip(X, out):
            o[:] = [total + x[i] * w for total, w in zip(o, tile)]
    return out


# %%
W_v = [[40, 0], [140, 1]]                           # makes the new values: [40, 0] of x_A, [140, 1] of x_B
W_qkv = W_q.tolist(), W_k.tolist(), W_v


def attention_step(X, K_hist, V_hist, memory):
    """X (B, d), histories (B, hist, d) -> outputs (B, d)."""
    Q, K_new, V_new = (project_batch(X, W, memory) for W in W_qkv)
    outputs = []
    for q, k, v, keys, values in zip(Q, K_new, V_new, K_hist, V_hist):
        keys = [memory.fetch("KV", row) for row in keys + [k]]     # this user's, of no use to anybody else
        values = [memory.fetch("KV", row) for row in values + [v]]
        outputs.append(look_back(q, keys, values)[1])
    return outputs


# %%
def crowd(users):
    """A, B, A, B, …: tokens (users, d), histories of keys and of values (users, hist, d) each, as lists."""
    return [torch.cat([t] * 32)[:users].tolist() for t in (X_batch, K_hist, V_cache[:, :3])]


print("users   bytes of W   bytes of KV   for each user: W    KV")
for users in (1, 2, 4, 10, 64):
    memory = Memory()
    found = attention_step(*crowd(users), memory)
    assert torch.allclose(torch.tensor(found), output[:, 0].repeat(32, 1)[:users])
    W_bytes, kv_bytes = memory.bytes["W"], memory.bytes["KV"]
    print(f"{users:5}   {W_bytes:10}   {kv_bytes:11}   {W_bytes / users:16.2f}   {kv_bytes / users:5.2f}")

# %% [markdown]
# $W$ is the same for everybody: one trip, and a user's share shrinks. A key is of use to exactly one user's query, so no
# order of loops can share its trip. **The batch divides the weights' bytes by the users; it never divides the cache's.**
# `bmm` saves calls and Python loops, not bytes. Here is a step of one to four users, drawn from the counter:

# %%
fig, ax = plt.subplots(figsize=(8.5, 2.8))
words = []
for y, users in enumerate((1, 2, 3, 4)):
    memory = Memory()
    _ = attention_step(*crowd(users), memory)
    shared, private = memory.bytes["W"], memory.bytes["KV"] // users
    figures.box(ax, 0, -y - 0.9, "weights", f"W, {shared}", width=shared, height=0.8)
    for user in range(users):
        figures.box(ax, shared + user * private, -y - 0.9, "ABCD"[user], f"{'ABCD'[user]}, {private}", private, 0.8)
    words.append(f"{users} of them: W {shared}, caches {users} x {private}")
ax.set(title="Bytes of one step: shared and private", xlim=(0, 310), ylim=(-4.1, 0),
       yticks=[-0.5 - y for y in range(4)], yticklabels=["1 user", "2 users", "3 users", "4 users"], xlabel="bytes")
figures.show(fig, f"Bars of bytes for one to four users. {'; '.join(words)}. The yellow part is the same in all four.")

# %% [markdown]
# What a byte is used for says the same. **Predict:** with 10 users, how many floating-point operations does the step do
# for each byte of $W$, and how many for each byte of the cache? (A fetched number is used for one multiplication and one
# addition each time; a score's softmax is left out.)

# %%
d, keys = 2, 4
for users in (1, 10, 100):
    W_flops, W_bytes = 2 * 3 * d * d * users, 4 * 3 * d * d
    kv_flops, kv_bytes = 2 * 2 * keys * d * users, 4 * 2 * keys * d * users            # keys and values
    print(f"{users:3} users: W {W_flops / W_bytes:4.1f} FLOP a byte, KV {kv_flops / kv_bytes:.1f} FLOP a byte")

# %% [markdown]
# A larger batch moves the projections towards the ridge point of chapter 01. Attention in decode stays where it is,
# whatever the batch: far on the side where the memory decides. (Grouped heads, below, lift it by a fixed factor.)
#
# ## Several heads
#
# A layer looks back several times at once. It cuts query, key and value into $H$ *heads* of $D$ numbers, and each head
# does its own attention. `bmm` takes three dimensions only, so users and heads are folded into one: head after head, one
# "batch" of $B \cdot H$. (`@` does the folding itself.) Two users, four heads, marked with small whole numbers:

# %%
B, H, T, S, D = 2, 4, 1, 4, 2
q = torch.arange(B * H * T * D).view(B, T, H * D) % 5 - 2.0        # (B, T, H·D), as a projection makes them
k = torch.arange(B * S * H * D).view(B, S, H * D) % 7 - 3.0        # (B, S, H·D)


def heads_first(t):
    return t.unflatten(-1, (-1, D)).transpose(1, 2)    # (B, n, H·D) -> (B, H, n, D)


q, k = heads_first(q), heads_first(k)
by_loop = [[[dot(q[b, h, 0].tolist(), key) for key in k[b, h].tolist()] for h in range(H)] for b in range(B)]
folded = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)            # (B·H, T, S)
print("folded:", tuple(folded.shape), "-> unfolded:", tuple(folded.unflatten(0, (B, H)).shape))
assert folded.unflatten(0, (B, H))[:, :, 0].tolist() == by_loop
assert torch.equal(q @ k.mT, folded.unflatten(0, (B, H)))
print("user B's head 2:", by_loop[1][2])

# %% [markdown]
# ## Grouped heads
#
# The cache is what does not shrink, so models make it smaller: several query heads share one *KV head*. With 4 query
# heads and 2 KV heads, query heads 0 and 1 use KV head 0, and 2 and 3 use KV head 1. (This is *GQA*, grouped-query
# attention.)
#
# To write it with one KV head for each query head, the KV heads are repeated. **The wrong version** tiles them.
# **Predict:** which query heads get the wrong KV head when `repeat` stands for `repeat_interleave`? Would a shape show it?

# %%
kv = torch.tensor([10.0, 110.0]).view(1, 2, 1, 1)                  # (B, Hkv, S, D), KV heads 0 and 1, marked
groups = H // 2                                                    # query heads for each KV head
right = kv.repeat_interleave(groups, dim=1)                        # (B, H, S, D)
wrong = kv.repeat(1, groups, 1, 1)                                 # (B, H, S, D) too
print("query head            ", list(range(H)))
print("repeat_interleave gets", right.flatten().tolist())
print("repeat (tile) gets    ", wrong.flatten().tolist(), "(wrong)")
print("same shape:", right.shape == wrong.shape, " wrong heads:", (right != wrong).flatten().nonzero().flatten().tolist())

# %% [markdown]
# The first and the last head are right either way, the shapes agree, and a small test may well look at head 0 only.
#
# Repeating also makes copies of what you wanted to keep small. It is better to turn it round: lay the queries of a group
# *under one another*. To the KV head they look like $G \cdot T$ new tokens of one user, and the cache stays as it is. It is
# what `qwen.attention.attend` does. In decode this is the only sharing there is: not between users, but between the
# query heads of one user. **Predict:** which of the two ways fetches more bytes of keys, and by what factor?

# %%
k_small = k[:, :2]                                                 # (B, Hkv, S, D): two KV heads a user
copied = q @ k_small.repeat_interleave(groups, dim=1).mT           # (B, H, T, S), four heads of keys
under = q.reshape(B, 2, groups * T, D) @ k_small.mT                # (B, Hkv, G·T, S), two heads of keys
assert torch.equal(copied, under.reshape(B, H, T, S))

memory = Memory()
for b in range(B):
    for h in range(H):
        _ = [memory.fetch("copied", key) for key in k_small[b, h // groups].tolist()]  # once for each query head
    for h in range(2):
        _ = [memory.fetch("laid under", key) for key in k_small[b, h].tolist()]        # once for each KV head
print(dict(memory.bytes))

v = V_cache[:, None].expand(B, 2, S, D)                            # (B, Hkv, S, D)
everything = torch.ones(B, T, S, dtype=torch.bool)                 # who may look where: everyone at all of it
ours = attention.attend(q, k_small, v, everything)                 # (B, H, T, D)
print("torch's own agrees:", torch.allclose(F.scaled_dot_product_attention(q, k_small, v, enable_gqa=True), ours))

# %% [markdown]
# So the size of a cache follows the **KV heads**. A formula you will meet elsewhere has the query heads in it, and makes
# the cache too large by $H / H_{kv}$. The slip is easy: in older models the two numbers were the same. Here is a
# published shape, Llama-3-8B: 32 layers, 32 query heads, 8 KV heads of 128 numbers, 2 bytes each (bf16).

# %%
def kv_bytes_per_token(layers, kv_heads, head_dim, element_bytes=2):
    return 2 * layers * kv_heads * head_dim * element_bytes        # 2: a key and a value


right, wrong = kv_bytes_per_token(32, 8, 128), kv_bytes_per_token(32, 32, 128)
print(f"by KV heads {right:,} bytes a token; by query heads (wrong) {wrong:,}, {wrong / right:.0f} times too much")

# %% [markdown]
# ## Play with it
#
# How many bytes of weights, and how many of keys and values, does one decode step of that model fetch? Drag users,
# history and KV heads (8 as published, 32 without groups). The embedding table is left out: a step reads one row of it
# for each user. Try to find the batch in which the caches overtake the weights.

# %%
def step_bytes(users, history, kv_heads):
    """(weights, keys and values) in bytes of one decode step of the Llama-3-8B shape, bf16."""
    hidden, inter, layers, vocab = 4096, 14336, 32, 128_256
    layer = 2 * hidden ** 2 + 2 * hidden * kv_heads * 128 + 3 * hidden * inter + 2 * hidden
    weights = layers * layer + hidden + vocab * hidden             # layers, last norm, head
    return 2 * weights, users * (history + 1) * kv_bytes_per_token(layers, kv_heads, 128)


def in_words(users, history, kv_heads):
    W, KV = step_bytes(users, history, kv_heads)
    return (f"W {W / 1e9:.2f} GB for all, {W / users / 1e9:.3f} GB a user<br>"
            f"KV {KV / 1e9:.2f} GB for all, {KV / users / 1e9:.3f} GB a user<br>"
            f"of the step's bytes, the caches are {KV / (W + KV):.0%}")


box, sliders, text = widgets.play(in_words, users=(1, 128, 1), history=[500, 1000, 2000, 4000, 8000],
                                   kv_heads=[8, 16, 32])
box

# %%
for users, history, kv_heads in ((1, 1000, 8), (64, 1000, 8), (64, 4000, 8), (64, 1000, 32)):
    sliders["users"].value, sliders["history"].value, sliders["kv_heads"].value = users, history, kv_heads
    print(f"users {users}, history {history}, KV heads {kv_heads}: {text.value.replace('<br>', '; ')}")

# %% [markdown]
# With one user the weights are nearly everything, and a batch saves nearly everything. With many users and long
# histories the caches rule, and a larger batch then buys little: the step grows with every user it takes in.
#
# ## On the real thing
#
# In the model of this repository one layer in four is a full-attention layer (`qwen/attention.py`). Two users with
# 3 tokens of history each take one decode step. Listen to what `attend` receives there: the queries, and all keys and
# values out of the cache.
#
# **Predict** the two shapes, from 4 query heads, 2 KV heads and a head of 48 numbers.

# %%
from qwen.cache import State
from qwen.model import Model
from qwen.weights import find_model

model = Model.from_pretrained(find_model(), device="cpu", dtype=torch.float32)
print("layers:", ", ".join(kind.split("_")[0] for kind in model.config.layer_types[:4]))
print("query heads, KV heads, head_dim:", model.config.num_attention_heads, model.config.num_key_value_heads,
      model.config.head_dim)
history, new = torch.tensor([[10, 110, 210], [20, 120, 220]]), torch.tensor([[310], [320]])       # (B, hist), (B, 1)

# %%
@torch.no_grad()
def decode_step(history, new):
    """history (B, hist) and new (B, 1) token ids -> what `attend` received and returned, and the logits."""
    state, calls, real = State(model, batch=len(history)), [], attention.attend
    model(history, state)                                          # prefill

    def listen(*inputs):
        calls.append((*inputs, real(*inputs)))
        return calls[-1][-1]

    with patch.object(attention, "attend", listen):
        logits = model(new, state)
    return *calls[0], logits                                       # the first full-attention layer


q, keys, values, seen, out, logits = decode_step(history, new)
print("queries", tuple(q.shape), "(B, Hq, T, D)\nkeys   ", tuple(keys.shape), "(B, Hkv, S, D)")
print("everything in the cache may be looked at:", bool(seen.all()))

# %%
heads, kv_heads = q.shape[1], keys.shape[1]
groups = heads // kv_heads
by_loop = torch.tensor([[look_back(q[b, h, 0].tolist(), keys[b, h // groups].tolist(),
                                   values[b, h // groups].tolist())[1]             # this chapter's loop
                         for h in range(heads)] for b in range(2)])                # (B, Hq, D)
print("the loop over users and heads agrees:", torch.allclose(by_loop, out[:, :, 0], rtol=1e-4, atol=1e-4))

folded = attend(q.flatten(0, 1), *(t.repeat_interleave(groups, 1).flatten(0, 1) for t in (keys, values)))
print("this chapter's bmm agrees:           ", torch.allclose(folded.view_as(out), out, rtol=1e-4, atol=1e-4))
tiled = attend(q.flatten(0, 1), *(t.repeat(1, groups, 1, 1).flatten(0, 1) for t in (keys, values))).view_as(out)
print("query heads that tiling gets wrong:  ",
      [h for h in range(heads) if not torch.allclose(tiled[:, h], out[:, h], rtol=1e-4, atol=1e-4)])

other = decode_step(torch.stack([history[0], history[1] + 300]), new)[-1]          # another history for B
print("A's logits stay, B's change:         ", [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(other, logits)])
layer = model.layers[model.config.layer_types.index("full_attention")].self_attn
W_bytes = sum(p.nbytes for n, p in layer.named_parameters() if n.endswith("proj.weight"))
print(f"in this layer: {W_bytes:,} bytes of W for both, {(keys[0].nbytes + values[0].nbytes):,} bytes of KV for each")

# %% [markdown]
# "Agrees" means within $10^{-4}$, as in chapter 01. The layer does three things more: it norms queries and keys, turns
# them by their positions, and multiplies the output by a gate. None of them lets one user see another.
#
# ## Your turn
#
# Replace the dots, run the cell, and `check` tells you at once.
#
# **02.1** User C comes with $x_C = [2, 1]$, so $q_C = x_C W_q = [2, 3]$, and three keys in the cache: $[1, 0]$, $[0, 2]$,
# $[1, 1]$. $W_k = I$ as before. Give C's scores in this step (before scaling).
#
# <details><summary>Solution</summary>
#
# The new key is $x_C$ itself and joins first: four keys, four scores. The first is $2 \cdot 1 + 3 \cdot 0$, the last
# $2 \cdot 2 + 3 \cdot 1$.
# ```python
# scores_C = [2, 6, 5, 7]
# ```
# </details>

# %%
scores_C = ...
_ = check("02.1", scores_C)

# %% [markdown]
# **02.2** Five users, 7 tokens of history each, 3 new tokens each, $D = 16$, one head. Give the shape of the scores.
#
# <details><summary>Solution</summary>
#
# (B, T, S), and the new keys join the cache first: $S = 7 + 3$.
# ```python
# shape = (5, 3, 7 + 3)
# ```
# </details>

# %%
shape = ...
_ = check("02.2", shape)

# %% [markdown]
# **02.3** Write the scaled scores of a batch without a loop: `q` (B, T, D) and `k` (B, S, D) are tensors, the result
# is (B, T, S).
#
# <details><summary>Solution</summary>
#
# ```python
# def scaled_scores(q, k):
#     return q @ k.transpose(1, 2) / k.shape[-1] ** 0.5
# ```
# </details>

# %%
def scaled_scores(q, k):
    return ...


_ = check("02.3", scaled_scores)

# %% [markdown]
# **02.4** Eight users with 999 tokens of history each take one decode step. The model has 28 layers, 16 query heads,
# 4 KV heads of 128 numbers, and a cache in bf16 (2 bytes). How many bytes of keys and values does the step's attention
# fetch, the new token's included?
#
# <details><summary>Solution</summary>
#
# 1000 slots a user; in each, a key and a value for each layer and KV head. Nothing of it is shared.
# ```python
# kv_bytes = 8 * 1000 * 2 * 28 * 4 * 128 * 2
# ```
# </details>

# %%
kv_bytes = ...
_ = check("02.4", kv_bytes)

# %% [markdown]
# **02.5** Six query heads (0 to 5), two KV heads. Somebody wrote `k.repeat(1, 3, 1, 1)` instead of
# `k.repeat_interleave(3, 1)`. Give the list of query heads that read a wrong KV head.
#
# <details><summary>Solution</summary>
#
# Right is 0 0 0 1 1 1, tiled is 0 1 0 1 0 1.
# ```python
# wrong_heads = [1, 4]
# ```
# </details>

# %%
wrong_heads = ...
_ = check("02.5", wrong_heads)

# %% [markdown]
# ## In an interview
#
# > Projections flatten all users into rows of one matrix; attention keeps a batch dimension, and `bmm` multiplies each
# > user's queries with that user's keys alone, so one new token a user needs no mask. The batch shares the weights' trip
# > but never the caches': key and value bytes grow with users and history, and decode attention stays memory-bound at
# > any batch size. Grouped-query attention cuts those bytes, because they follow the KV heads.
#
# **In production.** No engine calls `bmm` on a rectangle of caches. FlashAttention and FlashInfer do the same
# multiplication user by user inside one kernel, with scores that never leave the chip; vLLM and SGLang hand it each
# user's length and *block table*, so that the caches need not be equally long nor lie in one piece. The group trick is
# there too: a decode kernel loads a KV head once for all the query heads that share it. One exception to "never shared":
# users who begin with the very same text have the same keys and values there, and *prefix caching* keeps those once.
#
# **Next:** [03 Padding and masks](03_padding_and_masks.ipynb): here both histories were 3 tokens long. What if one user
# has 100 and the other 5? **Before:** [01 One weight matrix](01_one_weight_matrix.ipynb).
