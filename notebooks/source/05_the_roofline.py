# %% [markdown]
# # 05 The roofline
#
# How long does a decode step take, for one user, for ten, for three hundred? And where does a larger batch stop paying?
#
# Two numbers of a data sheet and a little arithmetic answer that, before anything runs. At the end of this chapter you
# can predict a step's time from a data sheet, say which of three things takes the time and when the memory is full, and
# you will have held the prediction against the clock of the machine in front of you.
#
# It runs in about 20 seconds on two cores and needs nothing but this repository. Symbols and terms stand in the
# [glossary](GLOSSARY.md). Several cells ask for a prediction. The outputs are already below them: to predict honestly,
# choose *Edit > Clear Outputs of All Cells* first.

# %%
import gc
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from qwen import figures, measure, roofline, widgets
from qwen.cache import State
from qwen.exercises import check
from qwen.packed import PackedLinear, pack, packable
from qwen.roofline import HARDWARE, LLAMA_3_8B, QWEN_CONFIG, Cost, Hardware

device = "cuda" if torch.cuda.is_available() else "cpu"           # what is measured below
figures.setup()

# %% [markdown]
# ## Where the weights lie
#
# A GPU has three memories, each larger and slower than the one before: *SRAM* on the chip, which the compute units
# read, a shared cache called *L2*, and *HBM* beside the chip, where the model lies. Take one large GPU (H100 SXM;
# numbers of its data sheet) and a model of 8 billion weights in bf16, 2 bytes each.
#
# **Predict:** 132 compute units have 256 KiB of SRAM each. How many times must it be filled to let every weight through
# once?

# %%
levels = {"SRAM": 132 * 256 * 1024, "L2": 50e6, "HBM": 80e9}       # bytes; 132 compute units of 256 KiB
weights = 8e9
traffic = 2 * weights                               # bytes of weights in a step
for name, size in {**levels, "weights": traffic}.items():
    print(f"{name:8}{size / 1e6:10,.1f} MB")
print(f"SRAM: {levels['SRAM'] / 2 ** 20:.0f} MiB, filled {traffic / levels['SRAM']:.0f} times in a step")

# %%
figure, ax = plt.subplots(figsize=(8, 2.2))
sizes = {"SRAM": levels["SRAM"], "L2": levels["L2"], "weights": traffic, "HBM": levels["HBM"]}
for name, size in sizes.items():
    meaning = "weights" if name == "weights" else "plain"
    ax.barh(name, size / 1e6, color=figures.COLORS[meaning], edgecolor=figures.INK)
    ax.text(size / 1e6, name, f" {size / 1e6:,.0f} MB", va="center")
ax.set(xscale="log", xlim=(10, 1e6), xlabel="MB, each mark ten times the one before",
       title="What fits where")
ax.invert_yaxis()
words = ", ".join(f"{n} {s / 1e6:,.0f} MB" for n, s in sizes.items())
figures.show(figure, f"Bars on a logarithmic scale: {words}")

# %% [markdown]
# Nothing of the model stays on the chip from one step to the next. Each step fetches all of it from HBM, whether one
# user waits for it or a hundred. (Elsewhere you may read "roughly 500 fills", which is 462 rounded, and that weights
# "stay in cache", which they cannot.)
#
# ## One FLOP a byte
#
# Count what a fetched weight is used for. **By hand:** one row times a 2×2 matrix in bf16. How many bytes of weights
# come, and how many multiplications and additions are done? (A *FLOP* is one of either.) And with 10 rows?

# %%
def count(rows, W, element_bytes=2):
    """Rows times W (d_in, d_out), counted one by one -> (bytes of weights, FLOPs)."""
    moved = done = 0
    for row in W:
        for weight in row:
            moved += element_bytes                  # it comes once
            for _ in range(rows):
                done += 2                           # a multiplication and an addition for each row
    return moved, done


def formula(rows, number, element_bytes=2):
    return number * element_bytes, 2 * number * rows


for rows in (1, 2, 10):
    moved, done = count(rows, [[1, 1], [0, 1]])
    assert (moved, done) == formula(rows, 4)
    print(f"{rows:2} rows: {moved} bytes, {done:2} FLOP, {done / moved:g} FLOP a byte")
for rows in (1, 32):
    moved, done = formula(rows, 7_000_000_000)
    print(f"7 billion weights, {rows:2} rows: {moved / 1e9:.0f} GB, {done / 1e9:.0f} GFLOP, "
          f"{done / moved:g} FLOP a byte")

# %% [markdown]
# FLOPs for each byte moved: that is a step's **arithmetic intensity**. In bf16, $N$ rows give $2N / 2 = N$. The size of
# the matrix cancels, so this holds for the whole model.
#
# The machine has such a number too. An H100 does at most 989.4 TFLOPS in bf16 (*dense*, that is, without skipped
# zeros) and reads 3.35 TB/s. The quotient is its **ridge point**: the FLOPs that fit into the time of a byte.
#
# **Predict:** how much of the time do the compute units idle with one user? How long does a step take with 1 user, with
# 10, with 300?

# %%
peak, bandwidth = 989.4e12, 3.35e12                 # FLOP/s, bytes/s
ridge = peak / bandwidth
trip = traffic / bandwidth
print(f"ridge point: {ridge:.0f} FLOP a byte")
print(f"the weights: {trip * 1e3:.2f} ms, so at most {1 / trip:.0f} tokens a second for one user")
for users in (1, 10, 64, 100, 300, 600):
    cost = Cost(*map(int, formula(users, weights)))
    best, _ = cost.seconds(bandwidth, peak)         # the slower of memory and arithmetic
    print(f"{users:3} users: {users:3} FLOP a byte, ridge is {ridge / users:6.2f} times that, "
          f"step {best * 1e3:.2f} ms, compute idle {1 - cost.flops / peak / best:.2%}, "
          f"{users / best:,.0f} tokens a second")

# %% [markdown]
# You may meet these numbers rounded, and rounded they are right:

# %%
print(f"990 TFLOPS / 3.35 TB/s = {990 / 3.35:.1f} FLOP a byte, told as 295; "
      f"one user is {ridge:.0f} times below, told as 300")
print(f"idle {1 - 1 / ridge:.1%}; {trip * 1e3:.1f} ms; {round(1 / trip, -1):.0f} tokens a second; "
      f"10 users {round(ridge / 10):.0f} times below; equal near {round(ridge, -2):.0f} users")
print(f"SRAM holds 1/{traffic / levels['SRAM']:.0f} of the weights, told as a five-hundredth")

# %% [markdown]
# One user leaves 99.66 % of the arithmetic unused, and ten still leave nearly all of it: the step takes the same time.
# Past the ridge it takes longer with every user, and tokens a second stand still.
#
# Draw what the machine can do at most over the intensity. On the left the memory feeds it: twice the FLOPs a byte,
# twice the FLOP/s. On the right the arithmetic is full. That is the **roofline**.
#
# ## Two numbers for the ridge
#
# A popular text has another ridge for the same card: "1,979 TFLOPS, 3 TB/s, about 660", and says that "at batch size
# 256, you approach compute saturation". **Predict:** how far up its own ridge is 256? Which of the numbers is right?

# %%
sparse, rounded = 1979e12, 3.0e12
wrong = sparse / rounded
print(f"wrong ridge {wrong:.0f} ({sparse / bandwidth:.0f} with the right bandwidth), "
      f"right ridge {ridge:.0f}; 1,979 / 989.4 = {sparse / peak:.2f}")
for batch in (32, 64, 128, 256):
    of_right, of_wrong = batch / ridge, batch / wrong
    print(f"batch {batch:3}: {of_right:4.0%} of the right ridge, {of_wrong:4.0%} of the wrong one")
figures.show(*figures.two_ridges())

# %% [markdown]
# 1,979 is what the card does with *2:4 sparsity*: two of every four weights are zero and skipped. Data sheets print
# that number with the note *with sparsity* and leave the halving to you. Language models are dense, so the half
# counts. And 3 TB/s is 3.35 rounded down, which alone would move the ridge as well. Of the right ridge a batch of 128
# reaches 43 % and 256 reaches 87 %. Elsewhere you may read "64 or 128 requests approach the peak": too early by far.
#
# Rows of a table, dense, each with the type of number it holds for:

# %%
for h in HARDWARE.values():
    print(f"{h.name:15} {h.dtype}  {h.peak / 1e12:6.1f} TFLOPS  {h.bandwidth / 1e12:.3f} TB/s  "
          f"{h.capacity / 1e9:3.0f} GB  ridge {h.ridge:3.0f} FLOP a byte")
h100 = HARDWARE["H100 SXM"]
assert (h100.peak, h100.bandwidth) == (peak, bandwidth)
mine = replace(HARDWARE["B200"], name="B200, another data sheet", bandwidth=8.0e12)
print(f"{mine.name}: ridge {mine.ridge:.0f}")

# %% [markdown]
# A row of your own needs FLOP/s, bytes/s and bytes. A slip of the unit is refused:

# %% tags=["raises-exception"]
Hardware("my card", "bf16", peak=989.4, bandwidth=3.35e12, capacity=80e9)

# %% [markdown]
# ## A real shape
#
# Llama-3-8B (published sizes: 32 layers of width 4096, MLP 14336, 32 query heads, 8 KV heads of 128, 128,256 tokens).
# **Predict:** are all its 8 billion weights fetched in a step?

# %%
hidden, inter, layers, heads, kv_heads, head_dim, vocab = 4096, 14336, 32, 32, 8, 128, 128_256
attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim           # q and o, k and v
mlp = 3 * hidden * inter                                                               # gate, up, down
body, head = layers * (attention + mlp), vocab * hidden
norms = (2 * layers + 1) * hidden
everything = body + 2 * head + norms                # head, and an embedding of the same size
print(f"parameters {everything:,}, multiplied by every token {body + head:,}")
assert (body, head, everything) == (LLAMA_3_8B.projections, LLAMA_3_8B.head, LLAMA_3_8B.parameters)
exact = 2 * (body + head) / h100.bandwidth
print(f"bf16: {2 * everything / 1e9:.1f} GB in memory, {2 * (body + head) / 1e9:.1f} GB a step, "
      f"{exact * 1e3:.2f} ms, {1 / exact:.0f} tokens a second")

# %% [markdown]
# The embedding is a table: a step reads one row of it for each user, not the whole. So 4.78 ms is a round
# number for "8 billion", a little too high. (The formulas leave out norms and activations, which are small.)
#
# ## The caches travel too
#
# Each user's keys and values come along in every step, and nobody shares them (chapter 02). Per token that is 2 ·
# layers · KV heads · head_dim · bytes. **Predict:** at a context of 1,000 tokens, how many users double the bytes of a
# step?

# %%
kv = 2 * layers * kv_heads * head_dim * 2           # bytes a token leaves in the cache
assert kv == LLAMA_3_8B.kv_bytes
print(f"{kv:,} bytes a token")
print("context   users that double the step   ms a step at 1, 16, 64, 256 users")
for context in (0, 300, 1000, 8000):
    double = "none" if not context else f"{2 * (body + head) / (kv * context):.0f}"
    ms = [roofline.step_seconds(LLAMA_3_8B, h100, users, context) * 1e3 for users in (1, 16, 64, 256)]
    print(f"{context:7,}   {double:>26}   {', '.join(f'{t:.2f}' for t in ms)}")

# %%
batches = [2 ** n for n in range(11)]
dashes = {0: "-", 300: "--", 1000: "-.", 8000: ":"}
figure, ax = plt.subplots(figsize=(8, 3.4))
words = []
for context, line in dashes.items():
    speeds = [n / roofline.step_seconds(LLAMA_3_8B, h100, n, context) for n in batches]
    ax.plot(batches, speeds, line, color=figures.COLORS["predicted"], label=f"context {context:,}")
    words.append(f"{context}: {speeds[0]:.0f} at 1 and {speeds[-1]:.0f} at {batches[-1]}")
ax.set(xscale="log", yscale="log", xlabel="rows in the batch", ylabel="tokens a second, all users",
       title="Llama-3-8B on an H100, predicted (as if memory had no end)")
ax.set_xticks(batches, batches)
ax.minorticks_off()
ax.grid(True)
ax.legend()
figures.show(figure, f"Predicted tokens a second over the batch, by context: {'; '.join(words)}. "
                     "Every curve rises in proportion and then bends; "
                     "the longer the context, the earlier and lower.")

# %% [markdown]
# Each curve rises with the batch and then bends. The first bends where the arithmetic is full. The others bend where
# the caches overtake the weights, and that comes earlier, the longer the context.
#
# One often reads that the caches move the ridge to smaller batches. The gain of a batch ends earlier, yes. But count
# what a cached key is used for: each of its numbers has 2 bytes, and a query head does a multiplication and an addition
# with it. That is one FLOP a byte for each query head that shares the key (4 here; values alike), and nobody else uses
# it. So from a few rows on, extra *bytes* lower the intensity, and arithmetic fills up **later**, or never.
# **Predict:** which intensity does an endless batch reach at 1,000 tokens?

# %%
assert LLAMA_3_8B.attention_flops == 4 * layers * heads * head_dim     # key and value, 2 FLOP each
per_key = LLAMA_3_8B.attention_flops / kv           # FLOP for each byte of the cache
print(f"attention alone: {per_key:g} FLOP a byte, at any batch")
for context in (100, 300, 1000, 8000):
    flops = 2 * (body + head) + LLAMA_3_8B.attention_flops * context
    never = flops / (kv * context)                  # what one more row adds: FLOPs by bytes
    one, many = (roofline.intensity(LLAMA_3_8B.step(n, context)) for n in (1, 256))
    print(f"context {context:5,}: one row {one:.2f}, 256 rows {many:5.1f}, "
          f"at most {never:5.1f} FLOP a byte")
last = 2 * (body + head) / (kv * (h100.ridge - per_key))
print(f"beyond {last:.0f} tokens of context no batch reaches the ridge of {h100.ridge:.0f}")

# %% [markdown]
# So there are three regions, and a wall. **Predict** where they lie before you look: few users and short contexts; many
# users and very short contexts; long contexts; and where both are large?

# %%
contexts = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]


def region(batch, context):
    if batch > roofline.rows_in_memory(LLAMA_3_8B, h100, context):
        return "out of memory"
    return roofline.bound_by(LLAMA_3_8B, h100, batch, context)


kinds = [[region(n, context) for n in batches] for context in contexts]
figure, ax = plt.subplots(figsize=(6.2, 5))
figures.regions(ax, batches, contexts, kinds, "W weights, C caches, A arithmetic, × out of memory")
runs = [", ".join(f"{kind} {row.count(kind)}" for kind in dict.fromkeys(row)) for row in kinds]
words = "; ".join(f"context {context}: {run}" for context, run in zip(contexts, runs))
figures.show(figure, f"What takes longest for batches of 1 to 1024, in runs from the left. {words}.")
assert kinds[0][-1] == "arithmetic" and kinds[4][0] == "weights" and kinds[-1][-1] == "out of memory"

# %% [markdown]
# Read it from the bottom left. Weights decide for few users or short contexts, and arithmetic only for
# many users with very short contexts. Where both are large the caches overtake the weights, and about two doublings
# later the memory is full: the caches' region is a narrow band.
#
# ## The wall
#
# Weights and caches have to fit. For Llama-3-8B a row's memory is proportional to its tokens. Qwen3.5-0.8B is a
# *hybrid*: only 6 of its 24 layers keep keys and values, the other 18 keep one matrix a head and a short window,
# whatever the length. So a row's memory is **affine**: a fixed part and a part for each token.
#
# **Predict:** at 100 tokens, which of the two models needs more for a row? And at 8,000?

# %%
c = QWEN_CONFIG                                     # the published sizes of the text model
print(f"{c.num_hidden_layers} layers, every fourth with {c.num_key_value_heads} KV heads of {c.head_dim}")
print(f"the others with {c.linear_num_value_heads} matrices of",
      f"{c.linear_key_head_dim} × {c.linear_value_head_dim}")
qwen = roofline.hybrid("Qwen3.5-0.8B", QWEN_CONFIG)
print(f"{qwen.parameters:,} parameters, {qwen.weight_bytes / 1e9:.2f} GB in bf16")
print(f"matrices {qwen.recurrent_bytes:,} bytes (fp32), windows {qwen.window_bytes:,}, "
      f"then {qwen.kv_bytes:,} a token")
print(" tokens   MB a row: Llama-3-8B   Qwen3.5-0.8B   rows in 80 GB: Llama-3-8B   Qwen3.5-0.8B")
for tokens in (100, 1000, 8000, 100_000):
    a, b = (m.row_bytes(tokens) / 1e6 for m in (LLAMA_3_8B, qwen))
    n, m = (roofline.rows_in_memory(model, h100, tokens) for model in (LLAMA_3_8B, qwen))
    print(f"{tokens:7,}   {a:20,.1f}   {b:12,.1f}   {n:25,}   {m:12,}")

# %%
figure, ax = plt.subplots(figsize=(7.5, 3))
tokens = list(range(0, 601, 50))
for model, line in ((LLAMA_3_8B, "-"), (qwen, "--")):
    kept = [model.row_bytes(n) / 1e6 for n in tokens]
    ax.plot(tokens, kept, line, color=figures.COLORS["predicted"], label=model.name)
ax.set(xlabel="tokens of a row", ylabel="MB", title="What a row keeps in memory", ylim=(0, None))
ax.grid(True)
ax.legend()
equal = qwen.fixed_bytes / (LLAMA_3_8B.kv_bytes - qwen.kv_bytes)
fixed = qwen.fixed_bytes / 1e6
print(f"equal at {equal:.0f} tokens; at 0 tokens Qwen3.5-0.8B keeps {fixed:.1f} MB")
figures.show(figure, f"Llama-3-8B starts at 0 and rises steeply; Qwen3.5-0.8B starts at {fixed:.1f} MB "
                     f"and rises slowly; they cross at {equal:.0f} tokens.")

# %% [markdown]
# Two slips: `hidden_size / num_attention_heads` for the width of a head (it is a field of its own in the config), and
# counting all layers, or all query heads. And a unit: GB is $10^9$ bytes, GiB is $2^{30}$; a card's "80 GB" may be
# either.

# %%
kv_heads, queries, head_dim = c.num_key_value_heads, c.num_attention_heads, c.head_dim
print(f"right                 {2 * 6 * kv_heads * head_dim * 2:7,} bytes a token")
print(f"hidden / heads (wrong){2 * 6 * kv_heads * (c.hidden_size // queries) * 2:7,}")
print(f"query heads (wrong)   {2 * 6 * queries * head_dim * 2:7,}")
print(f"all layers (wrong)    {2 * 24 * kv_heads * head_dim * 2:7,}")
print(f"80 GB = {80e9 / 2 ** 30:.1f} GiB; 80 GiB = {80 * 2 ** 30 / 1e9:.1f} GB")

# %% [markdown]
# ## How large a batch?
#
# Two limits: the memory, and the time **per token** that users were promised. The smaller one *binds*. **Predict**
# which one for a promise of 10 ms a token, at 500 tokens of context and at 8,000. And with 30 ms?

# %%
print("promise   context   in memory   in time   largest batch")
for promise in (0.006, 0.010, 0.030):
    for context in (500, 2000, 8000):
        memory = roofline.rows_in_memory(LLAMA_3_8B, h100, context)
        time = roofline.rows_in_time(LLAMA_3_8B, h100, context, promise)
        batch, binds = roofline.largest_batch(LLAMA_3_8B, h100, context, promise)
        print(f"{promise * 1e3:4.0f} ms   {context:7,}   {memory:9}   {time:7,}   {batch:13}, "
              f"{binds} binds")
print(f"all of the memory, read once: {h100.capacity / h100.bandwidth * 1e3:.1f} ms")

# %% [markdown]
# A Llama step cannot read more than the memory holds (a hybrid also writes its matrices back, which counts again). So
# as long as the memory is the slower part, no step takes longer than the last line says, and a promise of 30 ms is
# kept by whatever fits. A stricter promise binds first. (These are best times: a promise to customers needs room for
# an engine that is slower than the roof.)
#
# ## Prefill apart
#
# Prefill has all the prompt's tokens as rows, so the intensity is high even for one user. **Predict:** from about how
# many prompt tokens does the arithmetic decide? (The head runs on the last token only.)

# %%
for tokens in (1, 100, 300, 400, 1000, 8000):
    cost = LLAMA_3_8B.step(1, 0, tokens)
    ms = roofline.step_seconds(LLAMA_3_8B, h100, 1, 0, tokens) * 1e3
    side = "arithmetic" if roofline.intensity(cost) > h100.ridge else "memory"
    print(f"prompt of {tokens:5,}: {roofline.intensity(cost):7.1f} FLOP a byte, {ms:7.2f} ms, {side}")

# %% [markdown]
# A prompt of three to four hundred tokens fills the arithmetic by itself, and batching prompts then saves no time.
# That is why prefill and decode are planned apart, and why engines mix a piece of a prompt with others' decode steps
# (chapter 04).
#
# ## Your machine
#
# Now the same for the machine in front of you. Its data sheet is measured: the bytes a second of a sum over an array
# larger than any cache, and the FLOP/s of a product of large matrices, in 32 and in 16 bits. (On a CPU, with as many
# threads as the first line says; with a CUDA device, that device, and the clock waits until it is idle.) **Predict:**
# is a CPU's ridge higher or lower than that of a GPU?

# %% tags=["nbval-ignore-output"]
speed = measure.bandwidth(device, megabytes=512)
size = 1024 if device == "cpu" else 4096
peaks = {dtype: measure.matmul_peak(dtype, device, size) for dtype in (torch.float32, torch.bfloat16)}
print(measure.machine(device))
print(f"memory {speed / 1e9:.1f} GB/s")
for dtype, flops in peaks.items():
    bits = torch.finfo(dtype).bits
    print(f"{bits} bits: {flops / 1e9:,.0f} GFLOP/s, ridge {flops / speed:.1f} FLOP a byte, "
          f"which {flops / speed * bits / 16:.0f} rows reach")
here = Hardware("this machine", "fp32", peaks[torch.float32], speed, 16e9)     # 16 GB: not used below

# %% [markdown]
# A CPU's ridge is far lower: a few rows fill its arithmetic, where a GPU needs hundreds.
#
# In fp32 a weight has 4 bytes, so $N$ rows make $2N / 4$ FLOP a byte: it takes twice as many rows to reach the same
# ridge. (A CPU without 16-bit arithmetic may be slower in 16 bits than in 32.) Where 16 bits also double the peak, the
# ridge doubles as well, and both need about the same number of rows, as above.
#
# **One weight matrix at 1 to 256 rows.** It is large, so that no cache holds it. First the counts.

# %%
d_in, d_out = 8192, 12288
rows = [1, 4, 16, 64, 256]
counts = [Cost(4 * d_in * d_out, 2 * d_in * d_out * n) for n in rows]
for n, cost in zip(rows, counts):
    print(f"{n:3} rows: {cost.bytes / 1e6:.0f} MB, {cost.flops / 1e9:6.2f} GFLOP, "
          f"{roofline.intensity(cost):5.1f} FLOP a byte")

# %% tags=["nbval-ignore-output"]
layer = nn.Linear(d_in, d_out, bias=False, device="meta")
layer = layer.to_empty(device=device).requires_grad_(False)
layer.weight.fill_(0.01)
assert layer.weight.nbytes == counts[0].bytes
layer = PackedLinear(layer.weight) if packable(layer.weight) else layer
matrix_seconds = []
for n, cost in zip(rows, counts):
    x = torch.ones(n, d_in, device=device)
    took = min(measure.seconds(lambda: layer(x), times=3))
    matrix_seconds.append(took)
    best, least = cost.seconds(here.bandwidth, here.peak)
    print(f"{n:3} rows: measured {took * 1e3:6.1f} ms, predicted {best * 1e3:6.1f} to "
          f"{least * 1e3:6.1f}, measured / sum {took / least:.2f}")
del layer
_ = gc.collect()

# %% [markdown]
# The prediction has two ends: memory and arithmetic at the same time (their maximum), or one after the other (their
# sum). One matrix should come near that range (a single row may miss it, see below); a whole step may take longer. The
# column *measured / sum* shows by how much.
#
# **A whole decode step.** A model with six layers of the widths of Qwen3.5-0.8B and random weights: it says nothing
# sensible and costs what a trained one costs. Each row brings its keys and values, and its matrices twice: a step reads
# them and writes them back. **Predict:** from 1 row to 32, how do the bytes grow, and how the FLOPs?

# %%
small_config = replace(QWEN_CONFIG, num_hidden_layers=6, layer_types=c.layer_types[:6], vocab_size=4096)
shape = roofline.hybrid("six layers", small_config, element_bytes=4)
model = measure.random_model(small_config, device)
assert sum(p.numel() for p in model.parameters()) == shape.parameters
batches = [1, 2, 4, 8, 16, 32]
steps = [shape.step(n, 64) for n in batches]
print(f"{shape.parameters:,} parameters, {shape.weight_bytes / 1e6:.0f} MB in fp32")
for n, cost in zip(batches, steps):
    print(f"{n:2} rows: {cost.bytes / 1e6:5.0f} MB, {cost.flops / 1e9:5.2f} GFLOP, "
          f"{roofline.intensity(cost):4.1f} FLOP a byte")
    assert cost == roofline.total(roofline.step_cost(small_config, n, 64))

# %% tags=["nbval-ignore-output"]
pack(model)
step_seconds = [measure.decode_seconds(model, measure.unequal(n, 64), steps=5) for n in batches]
print("rows   measured ms   predicted ms: maximum, sum   measured / sum   tokens a second")
for n, cost, took in zip(batches, steps, step_seconds):
    best, least = cost.seconds(here.bandwidth, here.peak)
    print(f"{n:4}   {took * 1e3:11.1f}   {best * 1e3:21.1f}, {least * 1e3:5.1f}   "
          f"{took / least:14.2f}   {n / took:15.1f}")
del model
_ = gc.collect()

# %% [markdown]
# Both series in one picture: the roof is the maximum, drawn from the two measured speeds alone; each mark is a
# measurement.

# %% tags=["nbval-ignore-output"]
figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True, sharey=True)
seen = [roofline.intensity(cost) for cost in counts + steps] + [here.ridge]
for ax, name, costs, times, numbers in ((axes[0], "One matrix", counts, matrix_seconds, rows),
                                        (axes[1], "A decode step", steps, step_seconds, batches)):
    marks = [(str(n), roofline.intensity(cost), cost.flops / took, "measured")
             for n, cost, took in zip(numbers, costs, times)]
    figures.roofline(ax, here, marks, f"{name}, by rows", left=min(seen) / 3, right=max(seen) * 3)
axes[1].set_ylabel("")
share = [took / cost.seconds(here.bandwidth, here.peak)[0] for took, cost in zip(step_seconds, steps)]
figures.show(figure, f"This machine's roof with its ridge at {here.ridge:.1f} FLOP a byte. "
                     "The matrix's marks follow it up the slope and along the top; decode steps take "
                     f"{min(share):.2f} to {max(share):.2f} of its time.")

# %% [markdown]
# One matrix climbs the slope and turns at the ridge; the decode step bends the same way below it. Three things keep
# marks below the roof. Memory and arithmetic do not fully overlap: near the ridge the time is closer to the sum than to
# the maximum (look at 16 rows). The kernel for a single row may read more slowly than the one for four. And a decode
# step has norms, convolutions and Python, which take time that the counts do not have. The quotients differ from
# machine to machine, and from run to run when others use it; the bytes and FLOPs do not. (`make bench` does this with
# the whole 0.8B shape.)
#
# ## Play with it
#
# Choose hardware, model, rows and context. The function makes words and the roof with the step's mark; the cell after
# it moves the sliders. Which choice of yours gets past the ridge?

# %%
models = {m.name: m for m in (LLAMA_3_8B, qwen)}


def explore(hardware, model, batch, context):
    return figures.explorer(models[model], HARDWARE[hardware], batch, context)


box, sliders, text = widgets.play(explore, hardware=list(HARDWARE), model=list(models),
                                  batch=(1, 512, 1), context=[128, 1000, 8000, 32_000])
box

# %%
for choice in (("H100 SXM", "Llama-3-8B", 64, 1000), ("H100 SXM", "Llama-3-8B", 512, 128),
               ("H100 SXM", "Llama-3-8B", 512, 8000), ("L4", "Qwen3.5-0.8B", 64, 1000)):
    for name, value in zip(("hardware", "model", "batch", "context"), choice):
        sliders[name].value = value
    hardware, model, batch, context = choice
    words = roofline.report(models[model], HARDWARE[hardware], batch, context)
    assert words in text.value and "<svg" in text.value
    print(f"{hardware}, {model}, {batch} rows, context {context:,}: {words}")

# %% [markdown]
# ## On the real thing
#
# Do the formulas count what the model in this repository does? Its weights and its `State` (`qwen/cache.py`) have
# sizes, and torch can count the FLOPs of its matrix products. Three rows, 20 tokens behind each.

# %%
from qwen.model import Model
from qwen.weights import find_model

model = Model.from_pretrained(find_model(), device="cpu", dtype=torch.float32)
paper = roofline.hybrid("shipped", model.config, element_bytes=4)
state = State(model, 3, max_len=21)
kept = sum(cache[:, :, :21].nbytes for kind in (state.k, state.v) for cache in kind.values())
kept += sum(t.nbytes for kind in (state.conv, state.recurrent) for t in kind.values())
parameters = sum(p.numel() for p in model.parameters())
print("parameters:", parameters == paper.parameters, f"{parameters:,}")
print("bytes of three rows:", kept == 3 * paper.row_bytes(21), f"{kept:,}")
with torch.no_grad(), FlopCounterMode(display=False) as counter:
    model(torch.full((3, 20), 10), state)                          # prefill
    prefill = counter.get_total_flops()
    model(torch.full((3, 1), 10), state)                           # decode
    decode = counter.get_total_flops() - prefill
products = paper.step(3, 20).flops - 3 * 3 * paper.recurrent_bytes // 4     # less decay and correction
print("FLOPs of the decode step within 2 %:", abs(decode / products - 1) < 0.02)

# %% [markdown]
# ## Your turn
#
# Replace the dots, run the cell, and `check` tells you at once.
#
# **05.1** A data sheet says: 4,500 TFLOPS in bf16 *with sparsity*, 7.7 TB/s. What is the ridge point for a dense model,
# in FLOP a byte, rounded to a whole number?
#
# <details><summary>Solution</summary>
#
# Dense is half of it.
# ```python
# ridge_point = round(4500e12 / 2 / 7.7e12)
# ```
# </details>

# %%
ridge_point = ...
_ = check("05.1", ridge_point)

# %% [markdown]
# **05.2** A CPU has a ridge of 6 FLOP a byte. The weights are fp32 (4 bytes). How many rows bring a weight matrix to
# the ridge?
#
# <details><summary>Solution</summary>
#
# $N$ rows do $2N$ FLOPs for 4 bytes: $N / 2$ FLOP a byte.
# ```python
# rows_at_ridge = 6 * 4 / 2
# ```
# </details>

# %%
rows_at_ridge = ...
_ = check("05.2", rows_at_ridge)

# %% [markdown]
# **05.3** Write the memory time of one decode step in milliseconds: `weights` weights of `element_bytes` bytes, `batch`
# rows with `context` tokens each, `kv_bytes` a token, `bandwidth` in bytes a second.
#
# <details><summary>Solution</summary>
#
# ```python
# def memory_ms(weights, element_bytes, kv_bytes, batch, context, bandwidth):
#     shared, private = weights * element_bytes, batch * context * kv_bytes
#     return (shared + private) / bandwidth * 1e3
# ```
# </details>

# %%
def memory_ms(weights, element_bytes, kv_bytes, batch, context, bandwidth):
    ...


_ = check("05.3", memory_ms)

# %% [markdown]
# **05.4** Bytes of keys and values that one token leaves, from the fields of a config as a dict: `hidden_size`,
# `num_attention_heads`, `num_key_value_heads`, `head_dim`, `layer_types` (a list), and `element_bytes`.
#
# <details><summary>Solution</summary>
#
# ```python
# def kv_per_token(config):
#     layers = config["layer_types"].count("full_attention")
#     return 2 * layers * config["num_key_value_heads"] * config["head_dim"] * config["element_bytes"]
# ```
# </details>

# %%
def kv_per_token(config):
    ...


_ = check("05.4", kv_per_token)

# %% [markdown]
# **05.5** How many users fit? `capacity` and `weights` in bytes, `fixed` bytes for each user, `per_token` bytes for
# each token, `context` tokens for each user. Return a whole number, 0 if nobody fits.
#
# <details><summary>Solution</summary>
#
# ```python
# def users_that_fit(capacity, weights, fixed, per_token, context):
#     return max(0, (capacity - weights) // (fixed + per_token * context))
# ```
# </details>

# %%
def users_that_fit(capacity, weights, fixed, per_token, context):
    ...


_ = check("05.5", users_that_fit)

# %% [markdown]
# ## In an interview
#
# > A step takes the longer of two times: bytes over bandwidth, and FLOPs over dense peak; with bf16 weights and N rows
# > the weights give N FLOP a byte, so up to the ridge point (295 on an H100) a larger batch costs almost nothing. The
# > caches are bytes that nobody shares: at long contexts they end the gain earlier, and the ridge is never reached. The
# > batch is capped by memory or by the promised time a token, whichever comes first.
#
# **In production.** vLLM's `gpu_memory_utilization` says what share of the memory the engine may take (weights,
# activations and caches), and `max_num_seqs` caps the batch; SGLang's names are `--mem-fraction-static` and
# `--max-running-requests`. An engine's measured speed is lower than the roof, because kernels, sampling and scheduling
# take time too. "3,000 tokens a second at batch 64", which you may read about an 8B model on this card, is an engine's
# figure; the roof allows 13,400 with a round 8 billion weights alone, and 9,160 for Llama-3-8B with 1,000 tokens of
# context. Say which of the two you quote.
#
# **Next:** [06 The Qwen batch chapter](06_the_qwen_batch_chapter.ipynb) runs a whole model in a batch and holds every
# answer against the solo run. **Before:** [04 Two tokens per user](04_two_tokens_per_user.ipynb).
