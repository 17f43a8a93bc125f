# %% [markdown]
# # 01 One weight matrix
#
# Two people use a language model at the same moment. Serving both takes twice the arithmetic. Why, then, does it take
# hardly more *time* than serving one?
#
# Because the time goes into something else: carrying the model's weights from memory to the place where they are
# multiplied. Two users can share one trip. At the end of this chapter you can work out a batch on paper, prove that
# each user gets the answer they would get alone, count the bytes that a step moves, and see the effect on your own
# machine's clock.
#
# It runs in about 10 seconds on two cores and needs nothing but this repository: matrix multiplication, a little torch,
# no GPU. Words and symbols of the whole series stand in the [glossary](GLOSSARY.md). Several cells ask for a prediction. The outputs are already below them: to predict honestly, choose
# *Edit > Clear Outputs of All Cells* first.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F

from qwen import figures, widgets
from qwen.exercises import check

figures.setup()

# %% [markdown]
# ## Two users, one matrix
#
# A *user* is one conversation. Writing an answer means producing one *new token* after another. Each of them takes one
# *step*: one forward pass through all of the model's weight matrices. (The pass that reads the prompt is a step as well.)
# Inside the model a token is a vector of $d$ numbers. Here $d = 2$, and of all the matrices you look at one, the one
# that makes queries:
#
# $$W_q = \begin{pmatrix} 1 & 1 \\ 0 & 1 \end{pmatrix}, \qquad x_A = \begin{pmatrix} 1 & 0 \end{pmatrix}, \qquad
# x_B = \begin{pmatrix} 0 & 1 \end{pmatrix}$$
#
# $x_A$ is user A's new token and $x_B$ user B's. Neither conversation knows of the other. What was said before sits in
# each user's cache; this matrix never sees it, so leave it aside until chapter 02.
#
# **By hand first.** Take a pencil: what is $q_A = x_A W_q$, and what is $q_B = x_B W_q$?

# %%
W_q = [[1, 1],
       [0, 1]]                                      # (d, d)
x_A, x_B = [1, 0], [0, 1]                           # (d,) each


def vector_times_matrix(x, W):
    """x (d_in,) times W (d_in, d_out) -> (d_out,): multiply down each column and add up."""
    return [sum(x[i] * W[i][j] for i in range(len(x))) for j in range(len(W[0]))]


q_A = vector_times_matrix(x_A, W_q)
q_B = vector_times_matrix(x_B, W_q)
print("q_A =", q_A)
print("q_B =", q_B)

# %% [markdown]
# That was *unbatched*: first A, then B, each time the whole matrix. Now put the two tokens under one another, one
# *row* for each user, and multiply once:
#
# $$X_{batch} W_q = \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix} \begin{pmatrix} 1 & 1 \\ 0 & 1 \end{pmatrix} = \; ?$$
#
# **Predict** the result before you run the cell. Which of its numbers come from A, which from B?

# %%
X_batch = [x_A, x_B]                                # (users, d)


def matrix_times_matrix(X, W):
    """X (rows, d_in) times W (d_in, d_out) -> (rows, d_out), one row after the other."""
    return [vector_times_matrix(x, W) for x in X]


Q_batch = matrix_times_matrix(X_batch, W_q)
print("Q_batch =", Q_batch)
assert Q_batch == [q_A, q_B]

fig, axes = plt.subplots(1, 5, figsize=(8.5, 2.2), width_ratios=[4, 1, 4, 1, 4])
figures.matrix(axes[0], X_batch, "X_batch", colors=["A", "B"], rows=["user A", "user B"])
figures.sign(axes[1], "×")
figures.matrix(axes[2], W_q, "W_q, for everyone", colors="weights")
figures.sign(axes[3], "=")
figures.matrix(axes[4], Q_batch, "Q_batch", colors=["A", "B"], rows=["user A", "user B"])
figures.show(fig, "X_batch has user A's row 1 0 and user B's row 0 1; times the shared W_q, "
                  "1 1 over 0 1, it gives Q_batch, a row for each user: 1 1 for A, 0 1 for B.")

# %% [markdown]
# ## What the batch saves
#
# The answers are the same, and so is the number of multiplications. And so far nothing is saved: the loop above still
# goes through the whole of $W_q$ for user A, and then again for user B.
#
# A processor cannot multiply in the memory where the weights lie. It fetches a piece of the matrix, a *tile*, uses it,
# and fetches the next one into the same place. Here a tile is one row of $W_q$. `Memory` hands out tiles and counts the
# bytes (in fp32 a weight has 4). The two functions after it do the same multiplications in another order: one has the
# loop over users outside, the other the loop over tiles.
#
# **Predict:** which of the two has to fetch a tile again for every user? How many bytes does each fetch for two users?
# Then ten users: what grows, and what shrinks? The next two cells answer that.

# %%
class Memory:
    """Holds a matrix W, hands out its rows as tiles, and counts what travels."""

    def __init__(self, W, bytes_per_weight=4):
        self.W, self.bytes = W, 0
        self.tile_bytes = len(W[0]) * bytes_per_weight

    def fetch(self, i):
        self.bytes += self.tile_bytes
        return self.W[i]

    def trips(self):
        """How often the whole matrix came."""
        return self.bytes // (len(self.W) * self.tile_bytes)


def add(q, number, tile):
    """q += number * tile: what one row of W contributes to one user's result."""
    for j, weight in enumerate(tile):
        q[j] += number * weight


# %%
def users_outside(X, memory):
    """X (users, d_in) -> (users, d_out). One user after another, each through all the tiles."""
    Q = [[0] * len(memory.W[0]) for _ in X]
    for x, q in zip(X, Q):
        for i, number in enumerate(x):
            add(q, number, memory.fetch(i))         # tile i, for this user alone
    return Q


def tiles_outside(X, memory):
    """The same numbers. One tile after another, each for all the users."""
    Q = [[0] * len(memory.W[0]) for _ in X]
    for i in range(len(memory.W)):
        tile = memory.fetch(i)                      # tile i, once
        for x, q in zip(X, Q):
            add(q, x[i], tile)                      # every user takes it before it is overwritten
    return Q


alone, batch = Memory(W_q), Memory(W_q)
assert users_outside(X_batch, alone) == tiles_outside(X_batch, batch) == Q_batch
print(f"users outside: {alone.trips()} trips, {alone.bytes} bytes of weights")
print(f"tiles outside: {batch.trips()} trip,  {batch.bytes} bytes of weights")

# %%
print("users   users outside   tiles outside   share of a user   (bytes)")
for users in (1, 2, 4, 10, 64):
    alone, batch = Memory(W_q), Memory(W_q)
    X = [[user, 1] for user in range(users)]
    assert users_outside(X, alone) == tiles_outside(X, batch)
    assert (alone.trips(), batch.trips()) == (users, 1)
    print(f"{users:5}   {alone.bytes:13}   {batch.bytes:13}   {batch.bytes / users:15.2f}")

# %% [markdown]
# That exchange of two loops is batching. It needs all the users' rows at the same time, which is why a server collects
# them. And it is what a matrix-matrix routine does inside: bring a tile, use it for every row, go on to the next.
#
# ## The same in numpy and in torch
#
# The loop over users disappears into one `@`. Nothing else changes. The torch version prints the two scenarios one
# after the other.

# %%
W, X = np.array(W_q), np.array(X_batch)             # (d, d), (users, d)
print(X @ W)
assert (X @ W).tolist() == Q_batch

# %%
W_q = torch.tensor([[1.0, 1.0], [0.0, 1.0]])        # (d, d)
x_A = torch.tensor([[1.0, 0.0]])                    # (1, d): a batch of one
x_B = torch.tensor([[0.0, 1.0]])                    # (1, d)

print("=== SCENARIO 1: UNBATCHED ===")
q_A = x_A @ W_q                                     # first trip of W_q
q_B = x_B @ W_q                                     # second trip of the same W_q
print(f"User A Query: {q_A}")
print(f"User B Query: {q_B}")

# %%
print("=== SCENARIO 2: BATCHED ===")
X_batch = torch.cat([x_A, x_B])                     # (users, d)
Q_batch = X_batch @ W_q                             # one trip, two rows
print(f"X_batch shape: {X_batch.shape}")
print(f"Q_batch shape: {Q_batch.shape}")
print(f"Batched Queries:\n{Q_batch}")

for user, q in enumerate((q_A, q_B)):
    assert torch.equal(Q_batch[user:user + 1], q)   # whole numbers: equal to the last bit
print("SUCCESS: Batched output perfectly matches sequential output!")

# %% [markdown]
# A row must have as many numbers as the matrix has rows. If one user's token comes from a model with $d = 3$, the
# multiplication refuses, and the message names both shapes:

# %% tags=["raises-exception"]
torch.tensor([[1.0, 0.0, 1.0]]) @ W_q

# %% [markdown]
# ## Each row minds its own business
#
# A *projection* (a row times a weight matrix) is a per-row operation: output row $i$ is made of input row $i$ and the
# weights, and of nothing else. This is the whole reason why a batch is safe.
#
# **Predict:** user B's token becomes $[2, 0]$. Which numbers of `Q_batch` change?

# %%
X_other = X_batch.clone()
X_other[1] = torch.tensor([2.0, 0.0])               # another token for user B, row 1
Q_other = X_other @ W_q
print(Q_other)
print("rows that changed:", (Q_other != Q_batch).any(dim=1).nonzero().flatten().tolist())

# %% [markdown]
# **Break it.** The wrong version puts the matrix on the left, $W_q X$. With two users and $d = 2$ the shapes fit, and
# on the first batch it even gives the right numbers:

# %%
def wrong_projection(X):
    return W_q @ X                                  # wrong: mixes the rows of X, the users


print("first batch:     right?", torch.equal(wrong_projection(X_batch), Q_batch))
print("B's other token: right?", torch.equal(wrong_projection(X_other), Q_other))
print("user A's query:", Q_other[0].tolist(), "wrong:", wrong_projection(X_other)[0].tolist())

# %% [markdown]
# User A's query is now $[3, 0]$, and A's own token did not change: B's token leaked into A's answer. The first batch
# could not show it because its $X$ is the identity. Two lessons for the rest of the series: in a leak the shapes fit,
# and a test needs numbers that can tell right from wrong.
#
# ## What travels where
#
# On a GPU the weights lie in *HBM*, the large memory beside the chip. The compute units read from *SRAM*, the small
# memory on the chip. A tile of weights comes in, is multiplied *with every user's row* while the next tile travels, and is
# overwritten. The weights never stay: they are far larger than SRAM, so **every step fetches the whole model again**,
# batched or not. A batch does not shrink that traffic; it serves more users with it. And what sits idle with one user is
# the compute, not the memory: the memory works all the time.

# %%
figures.show(*figures.one_trip())

# %% [markdown]
# Here are the numbers of one large GPU (H100 SXM, data sheet, 16-bit without sparsity) and a model of 8 billion weights.

# %%
hbm, flops = 3.35e12, 989.4e12              # bytes/s, FLOP/s
sram = 132 * 256 * 1024                     # bytes: 132 units of 256 KiB
weights = 8e9
traffic = 2 * weights                       # bytes a step, 2 a weight (bf16), for all users
trip = traffic / hbm                        # seconds
print(f"SRAM {sram / 1e6:.1f} MB, weights {traffic / 1e9:.0f} GB: filled {traffic / sram:.0f} times")
print(f"one trip: {trip * 1e3:.2f} ms, so at most {1 / trip:.0f} tokens a second for one user")
for users in (1, 10, 100):
    step_flops = 2 * weights * users        # a multiplication and an addition per weight and row
    work = step_flops / flops               # seconds
    print(f"{users:3} users: arithmetic {work * 1e3:.3f} ms, {step_flops / traffic:.0f} FLOP a byte, "
          f"compute idle {1 - work / trip:.2%} of the trip")
print(f"ridge point: {flops / hbm:.0f} FLOP a byte; below it, the step waits for memory")

# %% [markdown]
# That is the answer to the opening question. Ten users need ten times the arithmetic, and all of it fits into the wait
# for the weights. A *ridge point* is where the two take equally long; chapter 05 is about it. (Each user's own
# cache has to be fetched as well, and that part is not shared: chapter 02.)
#
# ## Prefill and decode
#
# The matrix does not ask whose rows it gets. Two users with one token each, or one user with two tokens: the same
# multiplication. So a prompt, whose tokens are all known, goes through in one step with many rows: the *prefill*. The
# answer's tokens become known one at a time, so each needs a step of its own with a single row: *decode*.
#
# **Predict:** user A's prompt has 3 tokens and the answer has 3. How many trips does $W_q$ make?

# %%
prompt = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])     # (3, d): all known
answer = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])     # (3, d): known one by one
memory = Memory(W_q.tolist())

Q_prefill = tiles_outside(prompt.tolist(), memory)  # (3, d); the last row leads to answer token 0
print(f"prefill: {len(prompt)} rows, 1 trip, {2 * len(prompt) * W_q.numel()} FLOP")
for token in answer[:-1]:                           # the last token is never fed back
    q = tiles_outside([token.tolist()], memory)     # (1, d)
    print(f"decode:  1 row,  1 trip, {2 * W_q.numel()} FLOP, q = {q[0]}")
print(f"{memory.trips()} trips, {memory.bytes} bytes for an answer of {len(answer)} tokens")
assert Q_prefill == (prompt @ W_q).tolist()

# %% [markdown]
# Prefill already has many rows for a trip. Decode has one, and the only rows it can borrow are other users'. This is
# why batching is above all a matter of decode.
#
# ## On your machine's clock
#
# A 2×2 matrix sits in the processor's cache; nothing travels. So take 80 different matrices, too many for any ordinary
# cache, and send 1 to 16 rows through all of them: a step of a small model. torch stores a weight as
# $(d_{out}, d_{in})$, and `F.linear` multiplies by its transpose. First what does not depend on the machine.
#
# **Predict** before you run the second cell: if only the trip counted, how much longer would 16 rows take than 1? And if
# only arithmetic counted?

# %%
d, layers = 1024, 80
generator = torch.Generator().manual_seed(0)
matrices = torch.randn(layers, d, d, generator=generator).mul_(d ** -0.5)  # (layers, d_out, d_in), fp32
rows = [1, 2, 4, 8, 16]

weight_bytes = matrices.nbytes
print(f"one step fetches {weight_bytes:,} bytes of weights, whatever the number of rows")
for n in rows:
    step_flops = 2 * n * matrices.numel()
    print(f"{n:2} rows: {step_flops / 1e9:.2f} GFLOP, {step_flops / weight_bytes:.1f} FLOP a byte")
assert weight_bytes == 80 * 1024 * 1024 * 4 == 335_544_320
assert step_flops == 16 * 2 * 80 * 1024 ** 2

# %% [markdown]
# A clock also shows *how* the weights are read. A kernel for many rows wants its tiles in one piece each; a plain matrix
# has them scattered over its rows, so the kernel gathers them anew on every call. Inference engines rearrange the
# weights once, when they load the model: the weights are *packed*. torch has this for many CPUs (oneDNN). The next cell
# defines a step both ways and checks that the numbers agree.

# %%
def stored_step(X):
    """X (rows, d) through every matrix, as torch stores it."""
    for W in matrices:
        X = F.linear(X, W)                          # X @ W.T
    return X


def packed_step(X):
    """The same through the rearranged matrices."""
    for W in packed:
        X = torch.ops.mkldnn._linear_pointwise(X, W, None, "none", [], "")
    return X


steps = {"as stored": stored_step}
if torch.backends.mkldnn.is_available():
    packed = [torch.ops.mkldnn._reorder_linear_weight(W, max(rows)) for W in matrices]
    steps = {"packed": packed_step, "as stored": stored_step}
X = torch.randn(16, d, generator=generator)
assert all(torch.allclose(step(X), stored_step(X), rtol=1e-4, atol=1e-4) for step in steps.values())

# %% tags=["nbval-ignore-output"]
def clock(step, n):
    """Milliseconds of one step with n rows."""
    X, start = torch.ones(n, d), time.perf_counter()
    step(X)
    return (time.perf_counter() - start) * 1e3


torch.set_num_threads(1)                            # one core; other programs disturb it less
ms = {name: [float("inf")] * len(rows) for name in steps}
for _ in range(7):                                  # the best of seven rounds
    for name, step in steps.items():
        ms[name] = [min(best, clock(step, n)) for best, n in zip(ms[name], rows)]
print("16 rows against 1: 1x if only the trip counts, 16x if only arithmetic counts")
for name, times in ms.items():
    print(f"  {name:9}  {times[0]:.0f} ms -> {times[-1]:.0f} ms: {times[-1] / times[0]:.1f}x")

# %% tags=["nbval-ignore-output"]
one = min(times[0] for times in ms.values())        # ms, the trip for one row
share = {name: [t / n for t, n in zip(times, rows)] for name, times in ms.items()}
fig, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2))
figures.throughput(left, rows, ms, [one] * 5, "ms", "Time per step")
figures.throughput(right, rows, share, [one / n for n in rows], "ms", "Time per user")
words = "; ".join(f"{name}: a step takes {t[0]:.0f} ms with 1 row and {t[-1]:.0f} ms with 16, a user's "
                  f"share falls to {t[-1] / 16:.1f} ms" for name, t in ms.items())
figures.show(fig, f"Time over the number of rows. {words}. The ideal, one shared trip, is {one:.0f} ms "
                  f"a step and {one / 16:.1f} ms a user at 16 rows.")

# %% [markdown]
# The dashed line is the trip alone: the time of one row, shared by all. With the weights in the kernel's own layout the
# clock stays close to it, far nearer to 1x than to 16x. **The trip is shared, and you can see it.** (A point may lie below the
# line, where a kernel for a few rows reads faster than the one for a single row.) What keeps the curves above it:
#
# - **The layout.** "As stored" pays for gathering its tiles, as soon as there is more than one row. (If your torch has
#   no packing, this is the only curve you see.)
# - **The arithmetic.** A CPU core has far less of it for each byte of memory speed than a GPU, so a few rows already fill
#   the wait, and from there on the curve rises. Your core's own ridge point:

# %% tags=["nbval-ignore-output"]
square, times = torch.ones(1024, 1024), []
for _ in range(5):
    start = time.perf_counter()
    square @ square
    times.append(time.perf_counter() - start)
compute, bandwidth = 2 * 1024 ** 3 / min(times), weight_bytes / (one / 1e3)
print(f"arithmetic {compute / 1e9:.0f} GFLOP/s, memory {bandwidth / 1e9:.0f} GB/s: "
      f"ridge point {compute / bandwidth:.1f} FLOP a byte, {2 * compute / bandwidth:.0f} rows in fp32")
print(f"the H100 above: {flops / hbm:.0f} FLOP a byte, {flops / hbm:.0f} rows in bf16")

# %% [markdown]
# ## Play with it
#
# How many bytes of one $d \times d$ matrix does a step fetch, in bf16? Drag the sliders. The function is plain Python;
# the cell after it moves a slider from code.

# %%
def weight_traffic(users, d):
    """Bytes fetched of a d×d matrix (2 a weight) in a step: one user at a time, in a batch."""
    return users * d * d * 2, d * d * 2


def in_words(users, d):
    alone, batch = weight_traffic(users, d)
    return f"one at a time {alone:,} bytes, batched {batch:,}, a user's share {batch / users:,.0f}"


assert weight_traffic(users=2, d=2) == (16, 8)
box, sliders, text = widgets.play(in_words, users=(1, 64, 2), d=[2, 128, 1024, 4096])
box

# %%
sliders["users"].value, sliders["d"].value = 10, 128
print(text.value)
assert weight_traffic(10, 128)[0] == 10 * weight_traffic(10, 128)[1]

# %% [markdown]
# ## On the real thing
#
# The model in this repository is a toy that has learned some answers by heart, but its architecture, its file and its
# code are those of a real Qwen3.5 (`qwen/model.py`). Its matrix for queries is `q_proj` in the attention layer
# (`qwen/attention.py`). It is wider than $d$ because it makes a query and a gate, each of `head_dim` numbers,
# for every head. Four users, one new token each: listen to what `q_proj`
# receives, one at a time and stacked.

# %%
from qwen.model import Model
from qwen.weights import find_model

model = Model.from_pretrained(find_model(), device="cpu", dtype=torch.float32)
layer = model.layers[model.config.layer_types.index("full_attention")]
q_proj = layer.self_attn.q_proj
heads, head_dim = model.config.num_attention_heads, model.config.head_dim
print("q_proj.weight:", tuple(q_proj.weight.shape), f"{q_proj.weight.nbytes:,} bytes")
print(f"query and gate, {heads} heads, head_dim {head_dim}: 2 x {heads} x {head_dim} = {2 * heads * head_dim}")
assert q_proj.out_features == 2 * heads * head_dim

ids = torch.tensor([[10], [110], [210], [310]])     # (users, 1): any ids will do
received = []
hook = q_proj.register_forward_hook(lambda _, args, out: received.append((args[0], out)))
with torch.no_grad():
    for one in ids:
        model(one[None])                            # one user at a time
    model(ids)                                      # stacked
hook.remove()
for x, q in received:
    print("rows in", tuple(x.shape), "-> queries and gates out", tuple(q.shape))

# %%
alone = torch.cat([q for _, q in received[:4]])     # (users, 1, d_out)
stacked = received[4][1]
print("same queries:", torch.allclose(alone, stacked, rtol=1e-4, atol=1e-4))

x, W = received[4][0][:, 0], q_proj.weight.T        # (users, d_in), (d_in, d_out)
assert torch.allclose(x @ W, stacked[:, 0], rtol=1e-4, atol=1e-4)       # this chapter's line
for name, order in (("users outside", users_outside), ("tiles outside", tiles_outside)):
    memory = Memory(W.tolist())
    by_hand = torch.tensor(order(x.tolist(), memory))                   # this chapter's loops
    assert torch.allclose(by_hand, stacked[:, 0], rtol=1e-4, atol=1e-4)
    print(f"{name}: {memory.bytes:,} bytes, trips: {memory.trips()}")

# %% [markdown]
# "Same" now means within $10^{-4}$, not to the last bit: with fractions the order of the additions shows in the last
# digits, and a kernel may choose another order for four rows than for one. Chapter 06 looks at this closely. The same
# holds for every other matrix of the model: projections and feed-forward layers, nearly all of its weights, work row by
# row.
#
# ## Your turn
#
# Replace the dots, run the cell, and `check` tells you at once.
#
# **01.1** A third user comes with $x_C = [2, 1]$. What is $q_C = x_C W_q$, with the $W_q$ of the beginning?
#
# <details><summary>Solution</summary>
#
# Column 0 gives $2 \cdot 1 + 1 \cdot 0$, column 1 gives $2 \cdot 1 + 1 \cdot 1$.
# ```python
# q_C = [2, 3]
# ```
# </details>

# %%
q_C = ...
_ = check("01.1", q_C)

# %% [markdown]
# **01.2** Twelve users, one batch, one decode step, one matrix of 1024 × 3584 in bf16 (2 bytes). How many bytes of
# weights are fetched?
#
# <details><summary>Solution</summary>
#
# One trip for all twelve: 7,340,032 bytes.
# ```python
# fetched = 1024 * 3584 * 2
# ```
# </details>

# %%
fetched = ...
_ = check("01.2", fetched)

# %% [markdown]
# **01.3** Write a function: `users` users make `steps` decode steps each, through one $d \times d$ matrix of 2-byte
# weights, either as one batch or one user at a time. How many bytes of weights are fetched in all?
#
# <details><summary>Solution</summary>
#
# Nothing stays on the chip, so each step is a trip, and without a batch each user's step is one.
# ```python
# def bytes_moved(users, steps, d, batched):
#     trips = steps if batched else steps * users
#     return trips * d * d * 2
# ```
# </details>

# %%
def bytes_moved(users, steps, d, batched):
    return ...


_ = check("01.3", bytes_moved)

# %% [markdown]
# **01.4** Four users, rows 0 to 3. The third user's token changes. Give the list of output rows of $X W$ that change.
#
# <details><summary>Solution</summary>
#
# Only the user's own row, and rows count from 0.
# ```python
# changed = [2]
# ```
# </details>

# %%
changed = ...
_ = check("01.4", changed)

# %% [markdown]
# **01.5** One user, a prompt of 5 tokens, an answer of 3. How many trips does a weight matrix make?
#
# <details><summary>Solution</summary>
#
# The prefill is one trip and ends with answer token 0. Tokens 0 and 1 are fed back, one trip each, and give tokens 1
# and 2. Token 2 is the last; nobody feeds it back.
# ```python
# trips = 1 + 2
# ```
# </details>

# %%
trips = ...
_ = check("01.5", trips)

# %% [markdown]
# ## In an interview
#
# > A decode step fetches every weight from memory and uses it for one multiplication and one addition per user, so with
# > one user the compute units wait. Stacking users as rows of one matrix shares that trip: the traffic stays, the
# > arithmetic grows, and up to the ridge point the step takes hardly longer. It is exact, up to rounding, because a
# > projection works row by row; only the layers that look back, at each user's own history, need more care.
#
# **In production.** vLLM calls the rows of a step *batched tokens*, prefill and decode together, and limits them with
# `max_num_batched_tokens`; `max_num_seqs` limits the users in a step. SGLang's names are `--chunked-prefill-size` (a
# limit on the prefill rows of a step) and `--max-running-requests`.
#
# **Next:** [02 Batched attention with bmm](02_batched_attention_with_bmm.ipynb): the one part of a step in which users share
# nothing.
