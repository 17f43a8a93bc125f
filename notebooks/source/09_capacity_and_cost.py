# %% [markdown]
# # 09 Capacity and cost
#
# A batch makes each byte of weights work for many users. How much money is that, how many GPUs does a load need, and
# what do the users notice? Many answers in circulation are wrong by a factor of three, and they look fine.
#
# At the end of this chapter you can price a million tokens, turn "so many users at so many tokens a second" into a
# number of GPUs without mixing up work and rate, say how long people queue, find the largest batch that memory and
# your promise to the users allow, and set and check an engine's options from that.
#
# It runs in about twelve seconds on two cores and needs nothing but this repository. All of it is arithmetic:
# `qwen/capacity.py` has money, load and queues, `qwen/roofline.py` the time and memory of a batch (chapter 05). GPU
# figures are put in by hand. Words and symbols are listed in the [glossary](GLOSSARY.md). Several
# cells ask for a prediction. The outputs are already below them: to predict honestly, choose
# *Edit > Clear Outputs of All Cells* first.

# %%
import math
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import torch

from qwen import capacity, figures, roofline, widgets
from qwen.cache import State
from qwen.chat import Chat, build_prompt
from qwen.exercises import check
from qwen.model import Model
from qwen.roofline import HARDWARE, LLAMA_3_8B, QWEN_0_8B
from qwen.sample import generate
from qwen.weights import find_model

figures.setup()
model = Model.from_pretrained(find_model(), device="cpu", dtype=torch.float32)
chat = Chat(model, find_model())

# %% [markdown]
# ## A million tokens
#
# Prices are quoted for a million tokens. A rented GPU costs \$2.50 an hour. Alone, a user gets 50 tokens a second out
# of it; a batch of 64 makes 2,000 a second for everyone together.
#
# **By hand:** what does one second cost, and how many tokens are made in it? **Predict** the price of a million, twice.

# %%
for speed in (50, 2000):
    dollars, tokens = 2.50 / 3600, speed                # of one second
    by_hand = dollars / tokens * 1e6
    assert math.isclose(by_hand, capacity.cost_per_million(2.50, speed))
    wrong = 2.50 / 1000 / speed * 1e6                   # wrong: an hour of 1,000 seconds
    print(f"{speed:5} tokens/s: ${by_hand:.4g} a million; popular and wrong: ${wrong:.4g}, "
          f"{wrong / by_hand:.1f} times too high")
print(f"the batch is {2000 / 50:.0f} times cheaper either way")

# %% [markdown]
# The wrong pair is easy to meet, because its *ratio* is right: the batch is 40 times cheaper either way. Whoever checks
# only the ratio misses it. The function refuses what cannot be meant, in one sentence.

# %% tags=["raises-exception"]
capacity.cost_per_million(2.50, 0)

# %% [markdown]
# That is the price at *full* use: every token somebody's, every hour. Rows that ride along until the longest answer
# ends (chapter 06) are computed and not useful, and the bill is for the computed ones.
#
# **By hand:** answers of 3 and 50 tokens, batched until both are done. How many tokens are computed, how many useful?

# %%
made, computed = capacity.useful([3, 50])
price = capacity.cost_per_million(2.50, 2000)
print(f"{made} useful of {computed} computed: ${price:.3f} becomes ${price * computed / made:.3f} "
      "for a million useful tokens")
for share in (1.0, 0.7, 0.3):
    print(f"GPU busy {share:4.0%} of the hour it is paid for: ${price / share:.3f}")

# %% [markdown]
# ## Which tokens a second?
#
# Of Llama-3-8B on an H100 (16 GB of weights in bf16, 3.35 TB/s, 989.4 TFLOPS dense) you may read "3,000 tokens a second
# at batch 64". The *roofline* (chapter 05) says how many at most: a step has to read the weights once, and every row's
# keys and values.
#
# **Predict:** is 3,000 near the bound, or far below it?

# %%
H100, llama = HARDWARE["H100 SXM"], LLAMA_3_8B
by_hand = 16e9 / 3.35e12                                # s: a round 8 billion weights, and nothing else
print(f"weights alone: {by_hand * 1000:.2f} ms a step, at most {round(64 / by_hand, -2):,.0f} tokens/s")
for tokens in (0, 1000, 2000):
    step = roofline.step_seconds(llama, H100, 64, tokens)
    print(f"{llama.name}, batch 64, {tokens:4} tokens each: {step * 1000:4.2f} ms a step, "
          f"at most {round(64 / step, -2):6,.0f} tokens/s; 3,000 is {3000 * step / 64:.0%} of that")

# %% [markdown]
# (The embedding is a table of which a step reads a few rows, so the real model's first line is above the round one.)
#
# Both kinds of figure, 3,000 and the bound, are honest, of different things. The first is what an engine got out of one
# workload: prefill, sampling, scheduling and the network are in it. The second is a bound for decode alone. Size a
# deployment with the first, measured on **your** traffic; use the second to see how much is left to win. Never divide
# one document's load by another document's bound. From here on 3,000 is the engine's figure.
#
# ## The load: rates first
#
# 100 users are being answered at any time. Each gets 20 tokens a second, 500 tokens in all. How many GPUs, at 3,000
# tokens a second each?
#
# Begin with rates, things per second. **By hand:** how many tokens a second must be made? How many GPUs make so many?
# (*Utilisation* is the share of the time in which a GPU is busy. Why not 100 %? That is the section on queues below.)

# %%
users, each, answer, per_gpu = 100, 20, 500, 3000       # users, tokens/s, tokens, tokens/s
demand = users * each                                   # users × tokens/s = tokens/s
print(f"demand {demand:,} tokens/s, {demand / per_gpu:.2f} of a GPU; at 70 % utilisation "
      f"{demand / per_gpu / 0.7:.2f}: {capacity.gpus_for_rate(demand, per_gpu, 0.7)} GPU")

# %% [markdown]
# **Wrong version.** The popular way multiplies instead: "2,500 token-seconds a request, 250,000 in all, 83 GPU-seconds,
# 3.5 GPUs". Watch the units.

# %%
seconds = answer / each                                 # 25 s of generation
print(f"each answer takes {seconds:.0f} s; 100 users × 25 s = {users * seconds:,.0f} user-seconds, "
      "and that is all users")
twice = users * seconds * users                         # wrong: the users are in there twice
print(f"× 100 users again = {twice:,.0f} 'token-seconds'; "
      f"/ 3,000 = {twice / per_gpu:.0f} 'GPU-seconds'; "
      f"/ 25 s = {twice / per_gpu / seconds:.1f} 'GPUs', told as 3.5")
work = capacity.gpu_seconds(users, answer, per_gpu)
print(f"right: {users} answers × {answer} tokens = {users * answer:,} tokens; / 3,000 tokens/s = "
      f"{work:.1f} GPU-seconds; / 25 s = {work / seconds:.2f} GPUs")

# %% [markdown]
# "Token-seconds" is not a unit of work: time stands in it already and is divided by a rate again. One way to such a
# 2,500 is above, and it is already all users'; others exist, for a wrong unit cannot be traced. The right work is 16.7
# GPU-seconds, and spread over the 25 seconds in which it is wanted it gives the same share of a GPU as the rates did.
# **GPU-seconds are an amount, GPUs a rate; between them stands a window of time.**
#
# The same in code, as it circulates. It is called `estimate_gpus`. **Predict:** what does it return for 200 users, 800
# tokens each, 2,500 tokens a second: GPUs? (In the picture below it, an amount of work is an area, time times GPUs. The
# window is its width, and so it decides the height.)

# %%
def estimate_gpus(concurrent_users, avg_output_tokens, tokens_per_sec_per_gpu, target_util=0.7):
    total = concurrent_users * avg_output_tokens        # tokens, though often called "token-seconds"
    return math.ceil(total / tokens_per_sec_per_gpu / target_util)


returned = estimate_gpus(200, 800, 2500)
work = capacity.gpu_seconds(200, 800, 2500, utilisation=0.7)
print(f"estimate_gpus returns {returned}, and those are GPU-seconds: {work:.1f} before rounding")
for window in (60, 30, 10):
    rented = capacity.gpus_for_work(work, window)
    print(f"to be done in {window} s: {work / window:.2f}, so {rented} GPUs")
bound = 32 / (14e9 / H100.bandwidth)
print(f"(2,500 is an engine's figure too, 7B at batch 32; the weights alone allow {bound:,.0f})")
figures.show(*figures.work_and_windows())

# %% [markdown]
# ## Little's law
#
# If $\lambda$ requests arrive a second and each stays $W$ seconds, then on average $L = \lambda W$ are there. It asks
# nothing of how they arrive; only that the queue neither grows nor shrinks in the long run
# (Little 1961, doi 10.1287/opre.9.3.383). It turns "concurrent users" into arrivals and back.
#
# **By hand:** 100 are there, each stays 25 s. How many arrive a second? And how many rows of the batch are taken, if
# the GPU gives each row its full speed, 3,000 / 64 tokens a second, instead of 20?

# %%
ROWS = 64
arrivals = users / seconds                              # requests/s
row_speed = per_gpu / ROWS                              # tokens/s of one row in the full batch
stay = answer / row_speed                               # s
busy = capacity.in_system(arrivals, stay)
print(f"{arrivals:.0f} requests/s × {answer} tokens = {arrivals * answer:,.0f} tokens/s, the demand")
print(f"a row makes {row_speed:.1f} tokens/s, so an answer takes {stay:.1f} s "
      f"and {busy:.1f} of {ROWS} rows are taken: {busy / ROWS:.0%}")

# %% [markdown]
# Three ways, one answer: 67 % of one GPU. The 100 read at 20 tokens a second for 25 s; the GPU is done with each after
# 10.7 s. 42.7 are being computed; the others read text that is already there.
#
# (A batch that is not full steps faster, so its rows are, if anything, faster. And users who wait for their answer
# before they ask again slow down when the server does; this chapter lets them arrive regardless, which is the harder
# case.)
#
# ## Queues: why not 100 %?
#
# On average 42.7 rows are busy. But requests do not arrive on average. In the *M/M/c* queue they arrive at random (M),
# take random, exponential time (M), and there are c equal servers; here c is the rows of the batch. Erlang's C formula
# gives the probability that an arrival has to wait (Kleinrock 1975, *Queueing Systems* 1, §3.5–3.6). Beside it runs a
# simulation, a list of the times at which each row becomes free (`capacity.waits`, ten lines).
#
# "Agrees" means: the share that waits within 5 points, the mean within a quarter of it and 0.1 s. Near the limit a
# simulation needs very many arrivals to settle, and so does a real server.
#
# **Predict:** at 90 % utilisation, how many of ten arrivals wait? At 98 %?

# %%
def simulate(load, rows=ROWS, seconds=stay, n=100_000, seed=0):
    """Waits in s of n requests that keep `load` of the rows busy."""
    rng = np.random.default_rng(seed)
    times = rng.exponential(seconds / (load * rows), n).cumsum()
    return np.array(capacity.waits(times.tolist(), rng.exponential(seconds, n).tolist(), rows))


for load in (0.67, 0.8, 0.9, 0.95):
    formula = capacity.erlang_c(ROWS, load * ROWS)
    wait = capacity.mean_wait(load * ROWS / stay, stay, ROWS)
    drawn = simulate(load, n=400_000)
    close = abs((drawn > 0).mean() - formula) < 0.05 and abs(drawn.mean() - wait) < 0.1 + wait / 4
    print(f"{load:.0%} busy: {formula:6.1%} wait, {wait:5.2f} s on average; "
          f"the simulation agrees: {close}")
print(f"98% busy: {capacity.erlang_c(ROWS, 0.98 * ROWS):6.1%} wait, "
      f"{capacity.mean_wait(0.98 * ROWS / stay, stay, ROWS):5.2f} s on average")

# %% [markdown]
# Nothing, nothing, and then a wall. That is what the reserve is for. The 70 % is no law of nature: it depends on how
# many rows share the load. **Predict:** at the same 80 %, who waits longer, the users of one row or of 64?

# %%
loads = [x / 100 for x in range(30, 100)]
fig, ax = plt.subplots()
for rows, line in ((1, ":"), (8, "-."), (64, "-")):
    curve = [capacity.mean_wait(x * rows, 1, rows) for x in loads]
    ax.plot(loads, curve, line, color=figures.COLORS["predicted"],
            label=f"{rows} row{'s' * (rows > 1)}, formula")
some = (0.5, 0.7, 0.8, 0.9, 0.95)
drawn = [simulate(x, rows=8, seconds=1, n=400_000).mean() for x in some]
ax.plot(some, drawn, "o", color=figures.COLORS["measured"], label="8 rows, simulated")
ax.set(xlabel="busy share of the rows", ylabel="mean wait, in answers' time", ylim=(0, 4),
       title="Many rows wait later, and all of them wait at the wall")
ax.legend()
at = {rows: round(capacity.mean_wait(0.8 * rows, 1, rows), 3) for rows in (1, 8, 64)}
figures.show(fig, f"Mean wait over the busy share, in units of an answer's time. At 80 % it is {at} for "
                  "1, 8 and 64 rows; all curves go up steeply near 100 %. "
                  "Simulated points for 8 rows lie near their curve.")
print("at 80 %:", at)

# %% [markdown]
# A big batch is not only cheaper, it also queues less, because a hundred users' bursts fill each other's gaps. The
# formula needs exponential answers; yours are not. Simulate with your own log, by handing its times to the same
# function.
#
# And all of it holds for a steady load. If more arrives than is served, no formula for the long run helps; then
# count. **By hand:** with answers of 300 tokens, 10 requests a second are served; 11.2 arrive, for 15 minutes. How many
# wait at the end, and how long until the queue is gone, when only 6 a second arrive afterwards?

# %%
served, burst, after, minutes = per_gpu / 300, 11.2, 6, 15              # requests/s
queue = (burst - served) * minutes * 60
print(f"{served:.0f} served a second; {queue:,.0f} wait; the last of them for {queue / served:.0f} s; "
      f"gone after {queue / (served - after):.0f} s more")

# %% [markdown]
# ## What a user sees
#
# *Time to first token* (TTFT): waiting, plus the prefill. *Time per output token* (TPOT): one step, shared with all
# rows. *End to end*: the first, plus one step for each further token.
#
# "p99 latency < 500 ms" (99 of 100 are faster) stands in one such plan, next to answers of 25 s. **Predict:** which of
# the three can it mean?

# %%
prefill = roofline.step_seconds(llama, H100, 1, 0, 2000)                # s, at least
tpot = 1 / row_speed
whole = capacity.end_to_end(prefill, tpot, answer)
print(f"first token: {prefill * 1000:.0f} ms or more for a prompt of 2,000, plus the wait before it")
print(f"per token: {tpot * 1000:.1f} ms (20 tokens/s would be {1000 / 20:.0f} ms)")
print(f"end to end: {whole:.1f} s for {answer} tokens, "
      f"and {capacity.end_to_end(prefill, 1 / 20, answer):.1f} s at 20 tokens/s")
print(f"in 500 ms: {int((0.5 - prefill) / tpot) + 1} tokens")

# %% [markdown]
# As a promise, only the first token. End to end is out of reach, and 500 ms for each token would be 2 tokens a second,
# not 20. Say which latency, of which share of the requests, at which load.
#
# *Throughput* counts all that is finished. *Goodput* counts the requests that kept **every** promise (Zhong et al.
# 2024, DistServe, arXiv 2401.09670). Promise a first token within 500 ms and 50 ms a token (this model always keeps the
# second: 21.3 ms).
#
# **Predict:** the load grows past what one GPU can serve. Throughput stays at its maximum. And goodput?

# %%
offered = (0.6, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1)
rate = [x * ROWS / stay for x in offered]               # requests/s
good, done = [], []
for x, r in zip(offered, rate):
    first = simulate(x, n=400_000) + prefill
    span = 400_000 / r                                  # s in which they arrived
    good.append(capacity.goodput(first.tolist(), [tpot] * len(first), span, 0.5, 0.05))
    done.append(min(r, ROWS / stay))
fig, ax = plt.subplots()
ax.plot(rate, done, "--s", color=figures.COLORS["predicted"], label="throughput")
ax.plot(rate, good, "-o", color=figures.COLORS["measured"],
        label="goodput: first token in 500 ms, 50 ms a token")
ax.set(xlabel="requests a second that arrive", ylabel="requests a second", ylim=(0, None),
       title="Throughput holds, goodput collapses")
ax.legend()
figures.show(fig, "Throughput rises with the load up to the GPU's limit and stays there. Goodput rises "
                  "with it, leaves it before the limit and falls to nearly nothing beyond it.")
print("goodput is highest at a load of", offered[good.index(max(good))],
      "and at 1.1 below a tenth of throughput:", good[-1] < done[-1] / 10)

# %% [markdown]
# ## The largest batch
#
# Two things bound the batch (chapter 05). *Memory*: what the weights leave of the share that the engine may use (0.9
# here), over what a row keeps. *Time*: the step must not take longer than you promised for a token. The smaller bound
# is yours.
#
# First units. A vendor's "80 GB" may be 80 GB ($10^9$ bytes each) or 80 GiB ($2^{30}$); the difference is a whole small
# model.

# %%
USABLE = 0.9
for unit in ("GB", "GiB"):
    memory = capacity.to_bytes(80, unit)
    rows = roofline.rows_in_memory(llama, replace(H100, capacity=memory), 2000, USABLE)
    print(f"80 {unit:3} = {memory:,} bytes: {rows} rows of 2,000 tokens")
may, taken = USABLE * H100.capacity / 1e9, llama.weight_bytes / 1e9
print(f"of 80 GB: {may:.0f} − {taken:.1f} = {may - taken:.1f} GB for rows")
print("an H100 reports 81,559 MiB =", f"{capacity.to_bytes(81_559, 'MiB') / 1e9:.1f} GB")

# %% [markdown]
# We stay with 80 GB, the careful reading.
#
# **Predict:** rows of 2,000 tokens, and 20 ms promised for a token: which of the two binds? And with 50 ms?

# %%
for tokens in (200, 2000, 8000):
    for limit in (0.01, 0.02, 0.05):
        rows, binds = roofline.largest_batch(llama, H100, tokens, limit, USABLE)
        print(f"{tokens:5} tokens a row, {limit * 1000:2.0f} ms a token: {rows:5} rows, {binds} binds")

# %% [markdown]
# These are bounds for decode alone, as in chapter 05; leave room for prefill and for what the engine adds.
#
# ## On the real thing
#
# What does a row of *this* model keep? Only its full-attention layers keep keys and values; its linear layers keep one
# matrix and a window, however long the conversation. So a row's bytes are a fixed part plus a part for each token.
# A real `State` must have as many bytes as the formula says. (The shipped model is fp32: 4 bytes.)
#
# The published Qwen3.5-0.8B has 24 layers, 6 of them with full attention, hidden size 1024, 8 query heads, 2 KV heads
# of width 256. **By hand:** bytes of a token in bf16? Three slips that tempt stand below the right value.

# %%
config, rows, tokens = model.config, 3, 100
state = State(model, rows, max_len=tokens)              # one spare slot in each row
kept = sum(t[:, :, :tokens].nbytes for cache in (state.k, state.v) for t in cache.values())
fixed = sum(t.nbytes for cache in (state.conv, state.recurrent) for t in cache.values())
paper = roofline.hybrid("shipped", config, element_bytes=4)
print(f"keys and values {kept:,} = {rows} rows × {tokens} tokens × {paper.kv_bytes:,}")
print(f"fixed {fixed:,} = {rows} rows × {paper.fixed_bytes:,}")
assert kept == rows * tokens * paper.kv_bytes and fixed == rows * paper.fixed_bytes
assert sum(w.nbytes for w in model.parameters()) == paper.weight_bytes
print(f"{2 * 6 * 2 * 256 * 2:6,}  right: full-attention layers, KV heads, head_dim; a key and a value")
print(f"{2 * 6 * 2 * (1024 // 8) * 2:6,}  wrong: hidden / heads instead of head_dim")
print(f"{2 * 6 * 8 * 256 * 2:6,}  wrong: query heads")
print(f"{2 * 24 * 2 * 256 * 2:6,}  wrong: all layers")
small = QWEN_0_8B
assert small.kv_bytes == 2 * 6 * 2 * 256 * 2
for tokens in (100, 1000, 10_000, 100_000):
    row = small.row_bytes(tokens)
    fits = [roofline.rows_in_memory(m, H100, tokens, USABLE) for m in (small, llama)]
    print(f"{tokens:7,} tokens: {row / 1e6:7.1f} MB a row ({small.fixed_bytes / row:3.0%} fixed), "
          f"{fits[0]:5,} rows; {llama.name} {fits[1]:4,}")

# %% [markdown]
# At 100 tokens the model with a tenth of the weights fits *fewer* rows than the 8B: its fixed part is 94 % of a row. At
# 1,000 it is five times ahead.
#
# ## Something to play with
#
# Your own load on the 8B model: users at a time, tokens of an answer, tokens a second for each user, dollars an hour
# (in cents). Where does the second GPU come in? The cell first moves the sliders itself, then they are yours.

# %%
def plan(users, answer, each, cents):
    """GPUs, utilisation, waiting and price of a load on GPUs of 3,000 tokens/s and 64 rows."""
    demand = users * each
    gpus = capacity.gpus_for_rate(demand, per_gpu, 0.7)
    load = demand / per_gpu / gpus
    waiting = capacity.erlang_c(ROWS * gpus, load * ROWS * gpus)
    price = capacity.cost_per_million(cents / 100 * gpus, demand)
    return (f"{demand:,} tokens/s, {users * each / answer:.1f} requests/s: "
            f"{gpus} GPU{'s' * (gpus > 1)}, {load:.0%} busy, "
            f"{waiting:.1%} wait, ${price:.3f} a million tokens")


controls, sliders, line = widgets.play(plan, users=(1, 1000, 100),
                                       answer=(50, 2000, 500), each=(5, 50, 20), cents=(50, 1000, 250))
for n in (10, 105, 106, 1000, 100):
    sliders["users"].value = n
    print(f"{n} users: {line.value}")
assert line.value == plan(100, 500, 20, 250)
controls

# %% [markdown]
# ## What to watch: a simulated day
#
# One GPU with 64 rows and the 8B model. Fewer requests at night, most in the afternoon, and a burst in the evening.
# Answers of 300 tokens on average, prompts of 2,000. A follow-up comes a minute after its conversation's last answer,
# on average. Keys and values of a finished answer stay until their room is needed: a follow-up that comes before that
# finds its *prefix* there, a *hit*, and need not prefill it. Every request counts as a follow-up. (Prefill time is left
# out of this model; the seed is fixed.)
#
# **Predict:** when is the hit rate lowest?

# %%
rng, minute = np.random.default_rng(9), np.arange(24 * 60)
per_second = 4.25 - 2.75 * np.cos((minute / 60 - 3) / 24 * 2 * np.pi)  # requests/s, lowest at 3 o'clock
per_second[20 * 60:20 * 60 + 15] = 11.2                 # 15 minutes of burst
counts = rng.poisson(per_second * 60)
arrive = np.sort(np.repeat(minute * 60.0, counts) + rng.uniform(0, 60, counts.sum()))
outputs, prompts = rng.exponential(300, len(arrive)), rng.exponential(2000, len(arrive))
service = outputs * ROWS / per_gpu                      # s on a row
start = arrive + np.array(capacity.waits(arrive.tolist(), service.tolist(), ROWS))
end = start + service

# %%
# Look once a minute. The batch: what has begun so far, less what has finished; the queue: what has
# arrived, less what has begun; the tokens held: as the batch, counted in tokens.
look = minute * 60 + 30.0                               # s


def so_far(times, amounts):
    """What has come to pass at each look: the sum of the amounts whose time is before it."""
    order = np.argsort(times)
    return np.concatenate([[0], amounts[order].cumsum()])[np.searchsorted(times[order], look)]


ones, tokens = np.ones(len(arrive)), prompts + outputs
batch = so_far(start, ones) - so_far(end, ones)
depth = so_far(arrive, ones) - so_far(start, ones)
held = so_far(start, tokens) - so_far(end, tokens)      # tokens, in full from the start: an upper bound
pool = roofline.tokens_in_memory(llama, H100, USABLE)   # tokens
stays = (pool - held) / (per_second * 2300)             # s until its room is needed; 2,000 + 300 tokens
again = rng.exponential(60, len(arrive)) < stays[(arrive // 60).astype(int)]
hits = np.array([again[(arrive >= a) & (arrive < a + 900)].mean() for a in range(0, 86_400, 900)])

# %%
fig, axes = plt.subplots(2, 2, figsize=(9, 5))
hours, ink = look / 3600, figures.COLORS["measured"]
night, day = (batch[(hours >= a) & (hours < b)] for a, b in ((1, 5), (13, 17)))
axes[0, 0].hist([night, day], bins=range(0, 69, 4), color=[figures.COLORS["pad"], ink],
                label=["1 to 5 h", "13 to 17 h"])
axes[0, 0].set(title="Batch size, minutes at each", xlabel="rows")
axes[0, 0].legend()
axes[0, 1].plot((hours - 20) * 60, depth, color=ink)
axes[1, 0].plot(hours, held / pool * 100, color=ink, linewidth=0.6)
axes[1, 0].set(title="KV in use by running rows, % of the pool", ylim=(0, 100))
axes[1, 1].plot(np.arange(0, 24, 0.25), hits * 100, color=ink)
axes[1, 1].set(title="Hit rate of follow-ups, %", ylim=(0, 100))
for ax in axes[1]:
    ax.set(xlabel="hour", xticks=range(0, 25, 4))
axes[0, 1].set(title="Queue depth in the evening", xlabel="minutes after 20 h", xlim=(-10, 35),
               ylabel="requests")
figures.show(fig, "Four pictures of a day. Batch sizes are small at night and centred below the limit "
                  "in the afternoon. The queue is empty but for the burst at 20 o'clock, where it grows "
                  "in a straight line and drains in another. KV in use follows the batch, far below "
                  "full. The hit rate is high at night, low in the afternoon and lowest in the burst.")

# %%
told = {
    "a typical batch at night is under a third of that by day": np.median(night) < np.median(day) / 3,
    f"longest queue within a third of {queue:,.0f}, counted above": abs(depth.max() / queue - 1) < 1 / 3,
    "KV in use stays below 60 %": held.max() < 0.6 * pool,
    "hit rate above 80 % at night": hits[8:20].mean() > 0.8,
    "hit rate below 40 % by day": hits[52:68].mean() < 0.4,
    f"hit rate is lowest at {hits.argmin() / 4:.0f} h, in the burst": hits.min() < hits[48:72].min(),
}
for claim, holds in told.items():
    print(f"{claim}: {bool(holds)}")

# %% [markdown]
# Read them together:
#
# * **Batch size often at its limit, queue deep:** you need rows. If memory has room (KV in use is low, as here), raise
#   the limit, as far as the time for a token allows; if not, a second GPU.
# * **Batch size at its limit, GPU idle:** the time goes elsewhere, to the scheduler or the tokeniser on the CPU.
# * **Queue deep, batch small:** something other than rows is full: the KV pool, or the tokens of a step.
# * **KV in use near full:** not yet an error. Engines that take the pool at the start cannot run out of memory with it;
#   they *preempt*, throw a row's blocks away and compute them again later. The user sees a pause.
# * **Hit rate falls when load rises,** just when you need it: more answers finish and want the room, so each prefix is
#   kept for a shorter time. Running rows take a little of it too.
#
# The hit rate is not the KV use, though the two are often named in one breath. The first is saved prefill, the second
# room.
#
# ## Five claims, tested
#
# Each of these is met as a *misconception*, with a correction. Both sides get a test.
#
# **1. "Batching helps throughput only, not latency."** Against: short requests leave early under continuous batching;
# but a request takes longer than on a GPU of its own.
#
# Eight rows, mixed answers. *Static* takes up to eight who wait and runs them to the longest answer; *continuous* gives
# away each row as soon as it is free. **Predict:** how many times as long does the middle user take under static:
# 2, 5 or more than 20?

# %%
rng = np.random.default_rng(1)
lengths = np.where(rng.random(2000) < 0.8, 20, 400)     # tokens = steps; four of five are short
when = rng.exponential(60, 2000).cumsum()               # a request every 60 steps
continuous = np.array(capacity.waits(when.tolist(), lengths.tolist(), 8)) + lengths
static, free, i = np.zeros(2000), 0.0, 0
while i < 2000:
    begin = max(free, when[i])                          # the batch before is done, and somebody is there
    n = min(8, np.searchsorted(when, begin, "right") - i)
    free = begin + lengths[i:i + n].max()
    static[i:i + n] = free - when[i:i + n]              # all of them wait for the longest
    i += n
for name, p in (("the middle user", 50), ("the 99th of 100", 99)):
    ratio = np.percentile(static, p) / np.percentile(continuous, p)
    print(f"{name}: static takes {ratio:.2g} times as long")
one, many = (roofline.step_seconds(llama, H100, b, 1000) for b in (1, 64))
print(f"a step alone {one * 1000:.2f} ms, with 63 others {many * 1000:.2f} ms: "
      f"{many / one:.1f} times as long for 64 times the tokens")

# %% [markdown]
# **False.** It helps both, against a queue or a static batch. Against a GPU of your own it costs: the step is longer.
# The correction is right in both halves.
#
# **2. "A larger batch is always better."** Against: past the ridge point throughput stays and latency grows, and the KV
# cache may run out of memory; elsewhere, "32, 64 or 128 rows approach peak". **Predict:** at 2,000 tokens a row, what
# does going from 128 to 1,024 rows gain?

# %%
ridge, wrong = H100.ridge, 1979 / 3.0                   # FLOP/byte
print(f"ridge {ridge:.0f} (wrong: {wrong:.0f}, a peak with every other weight zero over a round 3.0)")
for b in (32, 64, 128, 256, 512):
    print(f"batch {b:3}: {min(1, b / ridge):4.0%} of the ridge, {b / wrong:4.0%} of the wrong one")
for tokens in (0, 2000):
    for b in (128, 256, 512, 1024):
        step = roofline.step_seconds(llama, H100, b, tokens)
        fits = b <= roofline.rows_in_memory(llama, H100, tokens, USABLE)
        print(f"{tokens:4} tokens a row, batch {b:4}: {step * 1000:6.2f} ms, "
              f"{b / step / 1000:5.1f} thousand tokens/s{'' if fits else ', does not fit'}")

# %% [markdown]
# **False**, and the correction is **partly** right. Without keys and values throughput stands still past the ridge, and
# memory does run out. But with 2,000 tokens a row it flattens long before the ridge: each row brings its own bytes, and
# eight times the rows gain less than half as much again. A batch of 128 is not near the peak; even 256 is not there.
#
# Two looser sentences stand near this claim. "The cache has `num_heads` heads." "Without batching the memory's
# bandwidth sits idle; with it the weights stay in a cache." **Predict:** what is wrong?
#
# And an example goes round of an endpoint with eight rows. A has a prompt of 100 tokens and may answer 10; B has a
# prompt of 2,000 and may answer 500, says the text, or 2000, says the request printed below it. "After 10 steps A ends,
# and two enter." A static batch there waits up to 100 ms for its eight. **Predict:** which of these numbers contradict
# each other?
#
# Three more, from descriptions of serving: "`max_tokens` is 500" above a request that says 2000; "p50 under 200 ms";
# "at 90 % of the KV pool you are one spike from out of memory". **Predict:** what does each leave out?

# %%
by_queries = 2 * 32 * 32 * 128 * 2                      # Llama-3-8B has 32 query heads and 8 KV heads
print(f"by query heads {by_queries:,} bytes a token, by KV heads {llama.kv_bytes:,}: "
      f"{by_queries // llama.kv_bytes} times too much")
read, work = 14e9 / H100.bandwidth, 14e9 / H100.peak    # 7B in bf16: 14 GB, 14 GFLOP a token
print(f"one row, 7B: memory works {read * 1000:.2f} ms, compute {work * 1000:.3f} ms: "
      f"idle {1 - work / read:.1%}, and it is the compute")
fills = 14e9 / capacity.to_bytes(33, "MiB")
print(f"14 GB against 33 MiB on the chip: they fill it {fills:.0f} times a step; shared is the trip")

# %%
print(f"padded to B: {2000 - 100:,} of A's 2,000 columns are pads; waiting for eight costs up to 100 ms")
for limit in (500, 2000):                               # the two say so of one request
    print(f"B may answer {limit:4}: static, A's 10 tokens are held for {limit:4} steps, "
          f"{limit * tpot:4.1f} s")
print(f"either way: continuous, A leaves after step 10, {10 * tpot:.1f} s")
rows = 8 - 1 + 2
print(f"one of 8 ends and 2 enter: {rows} rows in 8 (wrong); one enters: {8 - 1 + 1} rows (right)")
print(f"max_tokens 500 or 2000: up to {500 * tpot:.1f} s or {2000 * tpot:.1f} s on a row;\n"
      "    a limit, not the length: size by measured lengths")
print(f"p50 under 200 ms: of what? first token {prefill * 1000:.0f} ms or more and the wait,\n"
      f"    {answer} tokens {whole:.1f} s; and half the users may wait any time")
print(f"10% of the pool is {pool // 10:,} tokens, {pool // 10 // 2000} rows of 2,000 more;\n"
      "    then the engine preempts: a pause, not out of memory")

# %% [markdown]
# **3. "Continuous batching requires paged attention."** Against: it works without, "but the copy kills the benefit".
# Below, rows lie in one contiguous `State` without pages. One row leaves, a new one takes its place while the others go
# on.

# %%
def ask(question):
    return chat.tk.encode(build_prompt([{"role": "user", "content": question}])).ids


questions = ["What is the capital of France?", "Which ocean is the largest?",
             "What is the capital of Spain?"]
A, B, C = (ask(q) for q in questions)
with torch.no_grad():
    state, new = State(model, 2), {0: [], 1: []}
    for row, prompt in ((0, A), (1, B)):                # prefill each alone, put it into its row
        alone = State(model)
        new[row].append(model(torch.tensor([prompt]), alone, last_only=True)[0, -1].argmax().item())
        state.restore(row, alone.snapshot())
    for step in range(8):
        if step == 3:                                   # B leaves, C enters row 1
            alone, left = State(model), new[1]
            new[1] = [model(torch.tensor([C]), alone, last_only=True)[0, -1].argmax().item()]
            state.restore(1, alone.snapshot())
        ids = torch.tensor([[new[0][-1]], [new[1][-1]]])
        for row, token in enumerate(model(ids, state)[:, -1].argmax(-1).tolist()):
            new[row].append(token)
for name, prompt, got in (("A", A, new[0]), ("B", B, left), ("C", C, new[1])):
    print(f"{name} equals its solo run: {got == generate(model, torch.tensor([prompt]), len(got))}")

# %%
tokens, longest = 1000, 8192
copy = 2 * llama.row_bytes(tokens) / H100.bandwidth     # read and written once, when a row enters
step = roofline.step_seconds(llama, H100, 64, tokens)
print(f"copying one row of {tokens:,} tokens: {copy * 1000:.2f} ms once, "
      f"beside {step * 1000:.2f} ms for every step; copying all 64 each time: {64 * copy * 1000:.1f} ms")
slots = (longest, capacity.blocks(tokens, 16) * 16)
room = [roofline.rows_in_memory(llama, H100, n, USABLE) for n in slots]
print(f"room for {longest:,} tokens set aside for each row: {room[0]} rows; "
      f"blocks of 16 as needed: {room[1]}")
for size in (16, 32, 64):
    table = capacity.blocks(tokens, size)
    print(f"block size {size}: {table * size - tokens} of {tokens:,} slots empty, a table of {table}")

# %% [markdown]
# **False**, as the run shows. The correction is **partly** right: to copy everything at each step would indeed cost
# more than half the step again, but nobody has to; a row is copied when it enters. What pages really buy is *room*:
# without them each row reserves its longest possible length. (Chapter 08 is about pages.)
#
# **4. "Batching works the same for prefill and decode."** Against: prefill is limited by compute, decode by memory.
# Count FLOP for each byte of the shipped model's projections, with 2-byte weights.

# %%
for name, batch, context, tokens in (("decode, 1 row", 1, 512, 1), ("decode, 64 rows", 64, 512, 1),
                                     ("prefill of 32", 1, 0, 32), ("prefill of 2,000", 1, 0, 2000)):
    cost = roofline.step_cost(config, batch, context, tokens, element_bytes=2)["projections"]
    side = "compute" if cost.flops / cost.bytes > ridge else "memory"
    print(f"{name:16} {cost.flops / cost.bytes:6,.0f} FLOP a weight byte: limited by {side} on an H100")
decoding = roofline.step_seconds(llama, H100, 64, 1000)
for chunk in (256, 512, 2048, 8192):
    both = roofline.step_seconds(llama, H100, 1, 0, chunk)
    print(f"a prompt's chunk of {chunk:5,} tokens takes {both * 1000:5.1f} ms or more; "
          f"64 decoders' step alone {decoding * 1000:.1f} ms")

# %% [markdown]
# **False**, and the correction is **partly** right: a short prefill is limited by memory as well. Where the border
# lies is a matter of tokens in the step, not of its name. The last lines show why long prompts are read in chunks: a
# prompt that enters whole makes every decoder wait that long for one token.
#
# **5. "My framework handles batching for me."** Against: you choose the limits, and a wrong one runs out of memory.

# %%
for limit in (64, 256, 1024):
    need = limit * capacity.blocks(2000, 16) * 16
    print(f"max_num_seqs {limit:4}, rows of 2,000 tokens: {need:9,} tokens wanted of {pool:,}: "
          f"{'fits' if need <= pool else 'does not fit'}")
print(f"the pool holds {pool // 16:,} blocks of 16")

# %% [markdown]
# **Partly.** The mechanism is the framework's: who enters, who leaves, which block. The numbers are yours. But the
# warning is loose too: an engine with a pool of fixed size does not run out of memory when too many rows are admitted;
# it preempts, and you see pauses instead of an error ([vLLM: optimization and
# tuning](https://docs.vllm.ai/en/stable/configuration/optimization/)).
#
# ## From formulas to settings
#
# What this chapter computes is what an engine asks for. A promise of 20 ms a token and rows of 2,000 tokens:

# %%
limit, tokens = 0.020, 2000
rows, binds = roofline.largest_batch(llama, H100, tokens, limit, USABLE)
left = limit - roofline.step_seconds(llama, H100, ROWS, tokens)         # s
budget = int(left * H100.peak / (2 * llama.projections))
print(f"share of memory {USABLE}, pool {pool:,} tokens; rows at most {rows} ({binds} binds)")
print(f"with {ROWS} rows decoding, a step has room for about {budget} prompt tokens more "
      "(nothing overlapping)")
print(f"512 tokens a step: {ROWS} decoders and {512 - ROWS} prompt tokens")

# %% [markdown]
# | what the formula gives | vLLM | SGLang |
# |---|---|---|
# | rows: `roofline.largest_batch` | `--max-num-seqs` | `--max-running-requests` |
# | tokens of a step: decoders + a chunk of prompt | `--max-num-batched-tokens` | `--chunked-prefill-size`, `--max-prefill-tokens` |
# | share of the memory: `usable` | `--gpu-memory-utilization` | `--mem-fraction-static` (weights and pool) |
# | slots of a block: `capacity.blocks` | `--block-size` | `--page-size` |
# | read prompts in chunks | `--enable-chunked-prefill` (on by default in V1) | `--chunked-prefill-size` (-1: off) |
# | batch, queue | `vllm:num_requests_running`, `…_waiting` | `sglang:num_running_reqs`, `sglang:num_queue_reqs` |
# | KV in use; hits | `vllm:kv_cache_usage_perc`; `vllm:prefix_cache_hits` over `…_queries` | `sglang:token_usage`; `sglang:cache_hit_rate` |
#
# Names move between versions; ask `--help` and `/metrics` of yours (SGLang has them with `--enable-metrics`; Prometheus
# adds `_total` to a counter's name, such as `vllm:prefix_cache_hits`). vLLM puts decoders and a chunk into one step;
# SGLang takes turns, unless `--enable-mixed-chunk` is set. Then **check the numbers against the running server** with
# its own client. (Not run here: it needs a GPU and the engine.)
#
# 198 rows is the bound's. The engine's figure was measured at 64 rows: 21.3 ms a token, already over 20. So start at
# 64, promise 50 ms, take 512 (64 decoders and 448 prompt tokens, inside 64 + 744), and raise only what the measurement
# allows.
#
# ```
# vllm serve MODEL --max-num-seqs 64 --max-num-batched-tokens 512 --gpu-memory-utilization 0.9
# vllm bench serve --model MODEL --dataset-name random --random-input-len 2000 --random-output-len 300 \
#     --ignore-eos --num-prompts 1000 --request-rate 7 --goodput ttft:500 tpot:50
# ```
#
# (`--ignore-eos`, because answers to random tokens may end at once; the goodput's limits are in milliseconds.) The same
# for SGLang:
#
# ```
# python -m sglang.launch_server --model-path MODEL --max-running-requests 64 --chunked-prefill-size 448 \
#     --enable-mixed-chunk --mem-fraction-static 0.9 --enable-metrics
# python -m sglang.bench_serving --backend sglang --dataset-name random --random-input-len 2000 \
#     --random-output-len 300 --random-range-ratio 1 --num-prompts 1000 --request-rate 7
# ```
#
# (Its random lengths vary unless the range ratio is 1; 7 a second is 70 % of the 10 that answers of 300 tokens allow.)
# Raise `--request-rate` in steps, as in the goodput picture, and compare: output tokens a second with your 3,000, TPOT
# with `step_seconds` (never below it: then a unit is wrong), TTFT with prefill plus `mean_wait`, rows running with
# `in_system`. Goodput's maximum is the load to plan for.
#
# ## Your turn
#
# Replace the dots, run the cell, and `check` tells you at once.
#
# **09.1** Dollars for a million tokens.
#
# <details><summary>Solution</summary>
#
# ```python
# def my_cost(dollars_per_hour, tokens_per_second):
#     return dollars_per_hour / 3600 / tokens_per_second * 1e6
# ```
# </details>

# %%
def my_cost(dollars_per_hour, tokens_per_second):
    ...

_ = check("09.1", my_cost)

# %% [markdown]
# **09.2** Bytes of keys and values that one token leaves in the cache. `layers` is all layers, `full_layers` those with
# full attention.
#
# <details><summary>Solution</summary>
#
# A key and a value, in each full-attention layer, for each KV head. Neither `hidden` nor `heads` is needed.
# ```python
# def my_kv(layers, full_layers, hidden, heads, kv_heads, head_dim, element_bytes):
#     return 2 * full_layers * kv_heads * head_dim * element_bytes
# ```
# </details>

# %%
def my_kv(layers, full_layers, hidden, heads, kv_heads, head_dim, element_bytes):
    ...

_ = check("09.2", my_kv)

# %% [markdown]
# **09.3** How many rows of `tokens` tokens fit? The memory has `gib` GiB, of which the engine may use `share`. A row
# keeps
# `fixed_bytes`, and `token_bytes` for each token.
#
# <details><summary>Solution</summary>
#
# ```python
# def my_rows(gib, share, weight_bytes, fixed_bytes, token_bytes, tokens):
#     room = gib * 2 ** 30 * share - weight_bytes
#     return int(room // (fixed_bytes + token_bytes * tokens))
# ```
# </details>

# %%
def my_rows(gib, share, weight_bytes, fixed_bytes, token_bytes, tokens):
    ...

_ = check("09.3", my_rows)

# %% [markdown]
# **09.4** GPUs for `users` at a time who each get `speed` tokens a second. A GPU makes `per_gpu` tokens a second and
# shall be busy for at most the share `utilisation`. (A load that fits exactly fits: take 1e-9 off before you round up.)
#
# <details><summary>Solution</summary>
#
# ```python
# def my_gpus(users, speed, per_gpu, utilisation):
#     needed = users * speed / per_gpu / utilisation
#     return int(-(-(needed - 1e-9) // 1))
# ```
# </details>

# %%
def my_gpus(users, speed, per_gpu, utilisation):
    ...

_ = check("09.4", my_gpus)

# %% [markdown]
# **09.5** A datasheet says "1,979 TFLOPS BF16, with sparsity" and "3.35 TB/s". Your weights are dense. The ridge point
# in FLOP a byte, as a whole number?
#
# <details><summary>Solution</summary>
#
# With sparsity means that two of four weights are zero and skipped: dense is half.
# ```python
# ridge_point = round(1979 / 2 / 3.35)
# ```
# </details>

# %%
ridge_point = ...
_ = check("09.5", ridge_point)

# %% [markdown]
# ## In an interview
#
# > Start from rates: users times tokens a second is the demand, over the measured tokens a second of a GPU, over a
# > utilisation that the queue allows; Little's law turns users into arrivals and rows. GPU-seconds are an amount of work
# > and become GPUs only over a window. The batch is bounded by memory (a row's bytes are affine in its tokens) and by the
# > step time that was promised, and what counts is goodput: requests that kept every promise, each promise saying which
# > latency it means.
#
# **In production.** The same numbers come out of `/metrics` and the benchmark client; plan with those, and keep the
# formulas to notice when one of them cannot be true.
#
# **Next:** this is the last chapter. The engines' own code is now readable: in vLLM, the scheduler and the block
# manager; in SGLang, the radix cache. **Before:** [08 The paged KV cache](08_the_paged_kv_cache.ipynb).
