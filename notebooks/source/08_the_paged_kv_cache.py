# %% [markdown]
# # 08 The paged KV cache
#
# Nobody knows how long an answer will be when it begins. So how much memory do you set aside for it, and what becomes
# of the memory that it does not use?
#
# The answer of every engine today is an operating system's: cut the memory into small *blocks*, hand them out one by
# one, and keep a list for each row of where its tokens are. At the end of this chapter you can keep that list by hand,
# attend through it, share it between rows without one spoiling the other, and say why all of this is only half of a
# prefix on a hybrid model. You will have seen what each rule prevents, four times in what the model says.
#
# It runs in about fifteen seconds on two cores and needs nothing but this repository; read chapters 06 and 07 first.
# The machinery is `qwen/paged.py` and `qwen/engine.py`, two files to read beside this text. Words and symbols are
# listed in the [glossary](GLOSSARY.md). Several cells ask for a prediction. The outputs are already below them: to
# predict honestly, choose *Edit > Clear Outputs of All Cells* first.

# %%
from dataclasses import replace
from time import perf_counter
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch

from qwen import figures, widgets
from qwen.cache import State
from qwen.chat import Chat, build_prompt
from qwen.engine import Engine, Request
from qwen.exercises import check
from qwen.model import Model
from qwen.paged import BlockPool, PagedCache, PagedRows, slot_mapping
from qwen.roofline import HARDWARE, LLAMA_3_8B, QWEN_0_8B, hybrid, rows_in_memory
from qwen.sample import generate
from qwen.weights import find_model

figures.setup()
path = find_model()
model = Model.from_pretrained(path, device="cpu", dtype=torch.float32)
chat = Chat(model, path)
_ = torch.set_grad_enabled(False)
print("layers:", ", ".join(kind.split("_")[0] for kind in model.config.layer_types))

# %%
def encode(*turns):
    """Token ids of a conversation: question, answer, question …, up to where the model speaks next."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return chat.tk.encode(build_prompt(messages)).ids


def cut(parts):
    """Rows as a flat buffer and its offsets."""
    return torch.tensor(sum(parts, [])), torch.tensor([0, *map(len, parts)]).cumsum(0)


def run(cache, rows, parts):
    """Run these tokens of these rows through the model; the logits (B, vocab) at the last of each."""
    for row, tokens in zip(rows, parts):
        cache.grow(row, len(tokens))
    call = cache.rows(rows)
    logits = model.ragged(*cut(parts), call, last_only=True)
    call.commit()                                       # what the call wrote becomes the cache's
    return logits


# %%
def go_on(cache, row, tokens, limit=60):
    """Run tokens of one row, then each best next token, until one is a stop: the new ones."""
    new = []
    while len(new) < limit and not (new and new[-1] in chat.stop):
        new.append(run(cache, [row], [new[-1:] or tokens]).argmax().item())
    return new


def solo(prompt):
    """The new tokens that the prompt gets alone, without blocks: what every way is held against."""
    return generate(model, torch.tensor([prompt]), 60, stop=chat.stop)


def in_common(a, b):
    """How many tokens at the start are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


France = ("What is the capital of France?", "The capital of France is Paris.")
Japan = (*France, "And of Japan?", "The capital of Japan is Tokyo.")

# %% [markdown]
# ## What a reservation costs
#
# A row's keys and values lie one after another, so the simple way is to *reserve*: the longest row that may ever come,
# for everybody. The shipped model's own questions and answers are real lengths to try that on: each answer is a row
# with its prompt before it.
#
# **Predict:** the context is 1,024 tokens. If every row reserves that, which share of the memory ever holds a token?

# %%
served = []                                             # (prompt, answer) in tokens, stop included
for conversation in (path / "corpus.txt").read_text(encoding="utf-8").split("\n\n"):
    lines = [line for line in conversation.splitlines() if line[:3] in ("Q: ", "A: ")]
    turns = [line[3:].replace("\\n", "\n") for line in lines]
    for i in range(1, len(turns), 2):
        served.append((len(encode(*turns[:i])), len(chat.tk.encode(turns[i]).ids) + 1))
lengths = [prompt + answer for prompt, answer in served]
print(f"{len(served)} rows, {sum(lengths):,} tokens; shortest {min(lengths)}, longest {max(lengths)}, "
      f"mean {sum(lengths) / len(served):.0f}")

LIMIT = 120                                             # a usual max_new_tokens
ways = {"the context, 1,024": 1024 * len(served), "the longest row": max(lengths) * len(served),
        "prompt + max_new_tokens": sum(prompt + LIMIT for prompt, _ in served),
        "blocks of 16": sum(-(-n // 16) * 16 for n in lengths), "the tokens alone": sum(lengths)}
print(f"{'each row takes':24} {'slots':>8} {'used':>5}   {QWEN_0_8B.name}, {LLAMA_3_8B.name}")
for way, slots in ways.items():
    gb = [slots * shape.kv_bytes / 1e9 for shape in (QWEN_0_8B, LLAMA_3_8B)]
    print(f"{way:24} {slots:8,} {sum(lengths) / slots:5.0%}   {gb[0]:9.2f} GB, {gb[1]:7.2f} GB")

# %%
fig, ax = plt.subplots(figsize=(8, 2.6))
used = [100 * sum(lengths) / slots for slots in ways.values()]
look = {"edgecolor": figures.INK, "linewidth": 0.8}
ax.barh(list(ways), used, color=figures.COLORS["predicted"], **look)
ax.barh(list(ways), [100 - u for u in used], left=used, color=figures.COLORS["pad"],
        hatch=figures.HATCH["pad"], **look)
ax.invert_yaxis()
ax.set(title="Of 100 slots: with a token (blue), empty (hatched)", xlim=(0, 100))
figures.show(fig, "One bar a way of 100 slots. With a token: "
                  + ", ".join(f"{way} {u:.0f}" for way, u in zip(ways, used)) + "; the rest is empty.")

# %% [markdown]
# (The last columns are the keys and values these rows would take in two published shapes, in bf16, GB = 1e9 bytes.)
#
# What is reserved and not used lies *inside* somebody's piece: **internal fragmentation**. There is also waste
# *between* the pieces. **Predict:** A, B, C and D have 8 slots each; B and D leave, so 16 of 32 are free. E wants 12.
# Does E get in?
#
# "A 5-token user occupies 5 tokens' worth of pages, not 100", says the usual explanation. The second half of the cell
# counts how true that is, for several block sizes.

# %%
memory = ["A"] * 8 + ["."] * 8 + ["C"] * 8 + ["."] * 8
gaps = [len(gap) for gap in "".join(memory).replace("C", "A").split("A") if gap]
print("".join(memory), "free:", memory.count("."), "in gaps of", gaps)
print("E wants 12 in one piece:", max(gaps) >= 12)
free = [b for b in range(8) if set(memory[4 * b:4 * b + 4]) == {"."}]   # the same memory in blocks of 4
print(f"E wants {-(-12 // 4)} blocks of 4; free are blocks {free}:", len(free) >= 3)
print()
for block in (1, 4, 8, 16, 64, 128):
    taken = {n: -(-n // block) for n in (5, 100)}
    print(f"blocks of {block:3}: 5 tokens take {taken[5]} = {taken[5] * block:3} slots, "
          f"100 take {taken[100]:3} = {taken[100] * block:3}; at most {block - 1:3} empty in a row")

# %% [markdown]
# Enough memory in the wrong pieces: that is **external fragmentation**. Pieces of one size have none of it, because
# every free piece fits every row. What remains is the end of each row's last block; with blocks of 128 the 5-token user
# pays for 128, more than 100.
#
# ## A block table, by hand
#
# A row's **block table** names its blocks in the order of its tokens. With blocks of 8 and the table [5, 0, 3], tokens
# 0 to 7 lie in block 5, 8 to 15 in block 0, 16 to 23 in block 3. So token $t$ has its slot at
#
# $$\text{slot}(t) = \text{table}[\,t // 8\,] \cdot 8 + t \bmod 8$$
#
# **On paper:** in which slots are tokens 0, 7, 8 and 16?

# %%
table, size, length = [5, 0, 3], 8, 17
on_paper = {0: 5 * 8 + 0, 7: 5 * 8 + 7, 8: 0 * 8 + 0, 16: 3 * 8 + 0}

by_loop = []
for t in range(length):
    by_loop.append(table[t // size] * size + t % size)

t = torch.arange(length)
by_torch = torch.tensor(table)[t // size] * size + t % size             # (T,)

assert by_loop == by_torch.tolist() and all(by_loop[t] == slot for t, slot in on_paper.items())
assert slot_mapping(torch.arange(length), torch.tensor(table), size).tolist() == by_loop
print("slots:", by_loop)
print("token 16 is in slot", by_loop[16])
figures.show(*figures.two_tables())

# %% [markdown]
# The last `assert` is the package's `slot_mapping`, the same line for many rows at once. The picture has that row, A,
# and a second user B with the table [1, 2].
#
# **The wrong versions.** Three slips that raise no error. (a) `table[t // 8] + t % 8`: the block size is forgotten. (b)
# `table[t % 3] * 8 + t // 3`: the tokens are dealt out to the blocks in turn. (c) A row with a shorter table is filled
# up with -1, and somebody looks there.
#
# A and B are those of the picture. A's token t is 10 + t, B's is 110 + t. B is stored first, rightly; then A with each
# formula. **Predict:** which one spoils B's tokens? Which one gives each of A's tokens a slot of its own, and is wrong
# all the same?

# %%
A, B = torch.tensor([5, 0, 3]), torch.tensor([1, 2])
t = torch.arange(17)
formulas = {"right": A[t // 8] * 8 + t % 8, "(a) no size": A[t // 8] + t % 8,
            "(b) in turn": A[t % 3] * 8 + t // 3}
for name, slots in formulas.items():
    memory = torch.zeros(48, dtype=torch.int64)
    memory[slot_mapping(torch.arange(13), B, 8)] = 110 + torch.arange(13)
    memory[slots] = 10 + t
    read = {"A": memory[slot_mapping(t, A, 8)], "B": memory[slot_mapping(torch.arange(13), B, 8)]}
    right = {"A": 10 + t, "B": 110 + torch.arange(13)}
    lost = {user: int((read[user] != right[user]).sum()) for user in read}
    print(f"{name:12} different slots {len(set(slots.tolist())):2}; "
          f"read through the tables, wrong tokens: {lost}")

padded = torch.tensor([[5, 0, 3], [1, 2, -1]])          # B's table, filled up to A's width
memory = torch.arange(48) // 8                          # each slot holds its block's number
print("(c) B's token 16, in block -1, reads block", memory[padded[1, 16 // 8] * 8 + 16 % 8].item(),
      "- which is A's")
old = t[:16]
two, three = A[:2][old % 2] * 8 + old // 2, A[old % 3] * 8 + old // 3
print("(b) read with (b) too: when the table grows from 2 to 3 blocks,",
      int((two != three).sum()), "of 16 tokens are looked for elsewhere")

# %% [markdown]
# (a) squeezes 17 tokens into fewer slots, so the row loses its own, and some of B's. (b) is the treacherous one:
# everything has its own slot, and a cache that also *reads* with this formula works, until the table grows and nearly
# every token is looked for elsewhere. (c) is Python's -1, the last block, whoever has it. The package's `PagedRows`
# (below) fills tables up with 0 and never reads there.
#
# ## Growth
#
# Room is taken when a token needs it, not before. A row of 7 tokens in blocks of 8 grows one by one.
#
# **Predict:** with which token does the table get longer?

# %%
cache = PagedCache(model, num_rows=2, num_blocks=6, block_size=8)
cache.grow(0, 7)
cache.length[0] = 7                                     # as if 7 tokens had been run
print(f"{cache.length[0]:2} tokens, table {cache.tables[0]}, free {cache.pool.num_free}")
while cache.length[0] < 17:
    missing = cache.missing(0, 1)                       # blocks to take for one token more
    cache.grow(0, 1)
    cache.length[0] += 1
    if missing:
        print(f"{cache.length[0]:2} tokens, table {cache.tables[0]}, free {cache.pool.num_free}")
assert cache.tables[0] == [0, 1, 2]

cache.release(0)
cache.grow(0, 14 + 1)                                   # once, when it enters
call = cache.rows([0])
try:
    for token in range(14 + 3):
        model.ragged(torch.tensor([token]), torch.tensor([0, 1]), call)
except ValueError as error:
    print(f"token {token + 1}: {error}")

# %% [markdown]
# Tokens 9 and 17, that is positions 8 and 16: a full block is no reason to take one, the next token is. The last lines
# are a batcher often seen in sample code, which allocates `prompt_len + 1` tokens when a request enters and never
# again: a prompt of 14 has 16 slots, and the third new token, the 17th of the row, has no place. Here the call is
# refused by name.
#
# ## Attention through a table
#
# The keys lie scattered. Attention needs them in order, so it *gathers* them: look up the slots, read. Five tokens of
# one number each for key and value, blocks of 2, table [2, 0, 1].
#
# **On paper:** in which slots are the five keys? The query is 1. Do you expect the same result as from a contiguous
# list?

# %%
keys, values = torch.tensor([0., 1., 0., 2., 1.]), torch.tensor([10., 20., 30., 40., 50.])
place, query = torch.tensor([2, 0, 1]), 1.0            # the table
memory_k, memory_v = torch.zeros(8), torch.zeros(8)                     # 4 blocks of 2
slots = slot_mapping(torch.arange(5), place, 2)
memory_k[slots], memory_v[slots] = keys, values
print("keys in the memory:", memory_k.tolist(), "- slots", slots.tolist())

top, bottom = 0.0, 0.0
for t in range(5):                                      # by hand: follow the table token by token
    slot = int(place[t // 2]) * 2 + t % 2
    weight = 2.718281828 ** (query * memory_k[slot].item())
    top, bottom = top + weight * memory_v[slot].item(), bottom + weight
print("by hand   ", round(top / bottom, 4))


def attend(k, v):
    return (query * k).softmax(-1) @ v


gathered = attend(memory_k[slots], memory_v[slots])     # one line: gather, then attend
assert torch.equal(gathered, attend(keys, values)) and abs(gathered - top / bottom) < 1e-4
print("gathered  ", round(gathered.item(), 4), "- equal to contiguous, bit for bit")

# %% [markdown]
# A gather changes where numbers lie, not what is computed. (A GPU kernel does not copy them together first; it follows
# the table while it reads, block by block. The numbers are the same.)
#
# ## On the real thing
#
# The attention layer of `qwen/attention.py` does not know what a block is. It hands new keys and values to the rows'
# memory (`append`) and gets all of them back; before the layers the model lets that memory `reserve` the call's slots,
# after them `advance` the lengths. `State` (contiguous) and `PagedRows` (some rows of a `PagedCache`) can do all three;
# what a call wrote into `PagedRows` becomes the cache's with `commit`.
#
# Two users, one prefill, eight decode steps, three ways, and B's blocks lie between A's.

# %%
prompts = [encode("Why does the Moon shine?"), encode("What is the capital of Spain?")]


def both(state, box):
    """Prefill and 8 steps: each row's tokens, and every step's logits. box: as (B, T), else flat."""
    new, seen, fed = [[], []], [], prompts
    for step in range(9):
        logits = (model(torch.tensor(fed), state)[:, -1] if box and step            # (B, vocab)
                  else model.ragged(*cut(fed), state, last_only=True))  # unequal prompts go in flat
        seen.append(logits)
        fed = [[token] for token in logits.argmax(-1).tolist()]
        new = [row + one for row, one in zip(new, fed)]
    return new, torch.stack(seen)


cache = PagedCache(model, num_rows=2, num_blocks=12, block_size=8)
mixed = cache.pool.allocate(10)
cache.tables = [mixed[1::2], mixed[::2]]
runs = {"contiguous, a box": both(State(model, 2), True),
        "contiguous, flat": both(State(model, 2), False), "paged, flat": both(cache.rows([0, 1]), False)}
tokens, logits = runs["contiguous, a box"]
for name, (new, seen) in runs.items():
    close = torch.allclose(seen, logits, rtol=1e-4, atol=1e-4)
    print(f"{name:18} the same tokens: {new == tokens}, the same logits within 1e-4: {close}")
print("tables", cache.tables, *(repr(chat.tk.decode(row)) for row in tokens))

# %% [markdown]
# **What an earlier owner left behind.** A freed block is not wiped: that would cost a write of the whole block for
# nothing. Its next owner fills slot after slot, and behind the last token the old numbers still lie. To see whether
# they matter, fill every block with NaN.
#
# In one call with a longer row, the short row is gathered up to the longer one's length, behind its own end too. There
# the package reads a **spare slot** instead, one more slot at the memory's end, which no row owns and which stays
# finite. The wrong version reads what the table says.
#
# **Predict:** the score of a slot behind the end is masked, so its weight is 0. Is that enough without the spare?

# %%
k, v = torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([10.0, 20.0, torch.nan])
weights = k.masked_fill(torch.tensor([False, False, True]), -torch.inf).softmax(-1)
print("weights", [round(w, 3) for w in weights.tolist()], "weights @ values", (weights @ v).item())

places = PagedRows._places


def without_spare(rows, call):
    """Wrong: the places behind a row's end are read like the others."""
    table = rows.table if call.rows is None else rows.table[call.rows]  # (B, N)
    position = torch.arange(call.span).expand(len(table), -1)           # (B, S)
    rows.places[id(call)] = places(rows, call)[0], slot_mapping(position, table, 8)
    return rows.places[id(call)]

# %%
def in_one_call(prompts, steps=14):
    """Two rows in blocks full of NaN: each one's tokens of so many steps."""
    cache = PagedCache(model, num_rows=2, num_blocks=20, block_size=8)
    for memory in (*cache.k.values(), *cache.v.values()):
        memory[:-1] = torch.nan                         # all blocks; the last slot is the spare
    new, fed = [[], []], prompts
    for _ in range(steps):
        fed = [[token] for token in run(cache, [0, 1], fed).argmax(-1).tolist()]
        new = [row + one for row, one in zip(new, fed)]
    return new


pair = [encode(*France, "And of Japan?"), encode("What is the capital of Spain?")]
with patch.object(PagedRows, "_places", without_spare):
    wrong = in_one_call(pair)
for name, new in (("spare slot", in_one_call(pair)), ("wrong: without", wrong)):
    for user, row, prompt in zip("AB", new, pair):
        right = solo(prompt)
        print(f"{name:14} {user}, prompt of {len(prompt)}: {chat.tk.decode(row[:len(right)])!r}, "
              f"equal solo: {row[:len(right)] == right}")

# %% [markdown]
# A weight of 0 is not enough, since 0 · NaN is NaN: B's logits are all NaN, and the best of them is token 0, the "!".
# (The "." comes where its last block is just full: what lies behind is then looked up in block 0, which A has filled.)
# A, the longest row of the call, is gathered no farther than its own end, so a test of one row would find nothing.
#
# ## Sharing
#
# One prompt, two answers: why keep its keys twice? `fork` gives a second row the same table and counts one more
# **holder** for each block. Nothing is copied, except what a linear layer keeps, which has one fixed size.
#
# **Predict:** 30 tokens in blocks of 8. How many blocks does the pair hold? And after each has got one token of its
# own?

# %%
cache = PagedCache(model, num_rows=2, num_blocks=8, block_size=8)
opposite = encode("What is the opposite of hot?")
best, second = run(cache, [0], [opposite])[0].topk(2).indices.tolist()
fig, axes = plt.subplots(3, 1, figsize=(9.5, 6))
words = []


def draw(ax, title, written=""):
    tables, held = dict(zip("AB", cache.tables)), dict(zip("AB", cache.length))
    words.append(f"{title}. " + figures.pages(ax, tables, held, 8, 8, title, written))
    print(f"{title:22} tables {cache.tables}, holders {cache.pool.holders}, used {cache.pool.num_used}")


cache.fork(0, into=1)
draw(axes[0], f"forked, {len(opposite)} tokens")
run(cache, [1], [[second]])
draw(axes[1], "B writes its own token", "B")
run(cache, [0], [[best]])
draw(axes[2], "A writes its own token", "A")
figures.show(fig, " ".join(words))

# %% [markdown]
# (Yellow is shared by both; a thick frame marks the slot just written.) When B writes into the last block, A holds it
# too: B gets a **copy** and writes there. That is *copy-on-write*. When A writes afterwards, it is the only holder and
# needs none. The full blocks are never written again, so they stay shared for good.
#
# **The wrong version** writes without the copy. Two users' prompts begin alike: the row is forked where they part, in
# the middle of a block (of 64), and both go on, in turns. **Predict:** who is harmed? (The patch takes the copy out,
# and with it the guard in `reserve`, which asks the same `_shared`.)

# %%
def two_users(prompts):
    """One row for what the prompts have in common, forked there; each user's new tokens."""
    common = in_common(*prompts)
    cache = PagedCache(model, num_rows=2, num_blocks=8, block_size=64)
    run(cache, [0], [prompts[0][:common]])
    cache.fork(0, into=1)
    parts, new = [prompt[common:] for prompt in prompts], [[], []]
    while any(not row or row[-1] not in chat.stop for row in new):
        for r, row in enumerate(new):
            if not row or row[-1] not in chat.stop:
                row.append(run(cache, [r], [row[-1:] or parts[r]]).argmax().item())
    return new


pair = [encode("Which ocean is the largest?"), encode("Which animal is the largest?")]
with patch.object(PagedCache, "_shared", lambda self, row, tokens: []):
    wrong = two_users(pair)
for name, new in (("copy on write", two_users(pair)), ("wrong: no copy", wrong)):
    for user, row, prompt in zip("AB", new, pair):
        print(f"{name:14} {user}: {chat.tk.decode(row)[:48]!r:52} equal solo: {row == solo(prompt)}")

# %% [markdown]
# B wrote last, so B's keys and values stand where A's were. A asked about oceans and gets B's whale: a leak from one
# user to another.
#
# ## Half of a prefix
#
# Now share between *requests*. Many begin alike: the same instructions, or the same conversation one turn later. An
# engine finds the longest run of full blocks whose tokens it has seen, and starts behind it. It looks a block up by a
# **prefix key**, a hash of all tokens from the start to the block's end, because a key vector depends on everything
# before it.
#
# In a model of attention alone that is all. This one has linear layers too, with a window and a matrix that sit in no
# block. A user's third question, after two answers:
#
# **Predict:** the blocks of the first 80 tokens are shared. What does the model say if window and matrix start from
# zero? Does anything fail?

# %%
question = "And of Italy?"
prompt, whole = encode(*Japan, question), 80
cache = PagedCache(model, num_rows=3, num_blocks=24, block_size=16, num_snapshots=4)
prefix_keys = []
cache.extend(prefix_keys, prompt)                       # add a key for each full block of the prompt
prefix_keys = prefix_keys[:whole // 16]                 # those of its first 80 tokens
run(cache, [0], [prompt[:whole]])
cache.remember(0, prefix_keys, snapshot=True)           # file blocks, and window and matrix as they are

cache.pool.share(cache.tables[0])                       # wrong: the blocks alone
cache.tables[1], cache.length[1] = list(cache.tables[0]), whole
cache.reuse(2, prefix_keys)                             # right: row 2 gets blocks and snapshot
answers = {"computed whole": solo(prompt), "blocks alone": go_on(cache, 1, prompt[whole:]),
           "blocks and snapshot": go_on(cache, 2, prompt[whole:])}
print(f"{len(prompt)} tokens, {whole} of them shared. {question}")
for name, new in answers.items():
    print(f"{name:20} {chat.tk.decode(new)!r}, equal: {new == answers['computed whole']}")

# %% [markdown]
# No error, a well-formed sentence, and the wrong one: it is the answer to the question before.
#
# So a prefix is reused only where a **snapshot** of window and matrix was kept, together with the blocks before it. And
# a snapshot cannot be cut: of keys and values you can drop the last, but the matrix is one sum into which all tokens
# were written, and each write fades the ones before.
#
# One user asks about France and Japan, another about France and Italy; the prompts have the start in common. Take the
# first one's blocks up to there (blocks of 1, so that it is not the block size that forbids it) and its snapshot, which
# was taken at its end. **Predict:** what does the model say to the second user? The last line asks the package for the
# same.

# %% tags=["raises-exception"]
first, second = encode(*France, "And of Japan?"), encode(*France, question)
common = in_common(first, second)
cache = PagedCache(model, num_rows=3, num_blocks=200, block_size=1, num_snapshots=4)
first_keys = []
cache.extend(first_keys, first)
run(cache, [0], [first])
cache.remember(0, first_keys, snapshot=True)
there, reusable = cache.match(first_keys[:common])
print(f"prompt of {len(first)}, in common {common}: blocks there {there}, reusable {reusable}")

cache.pool.share(cache.tables[0][:common])              # wrong: a matrix from later on
cache.tables[1], cache.length[1] = cache.tables[0][:common], common
cache.fixed.restore([1], cache.snapshots[first_keys[-1]])
print(f"{question} {chat.tk.decode(go_on(cache, 1, second[common:]))!r}; "
      f"alone {chat.tk.decode(solo(second))!r}")
cache.reuse(2, first_keys[:common])

# %% [markdown]
# ## Where the snapshots are taken
#
# A snapshot after every block would be easy and expensive. The engine (`enable_prefix_caching=True`) takes them at two
# places. One is the last full block that ends before the prompt's last token: the next turn of the chat begins with all
# of the prompt but the last few tokens of the frame, so that place is usually inside. The other is the **branch
# point**, where a prompt leaves the tokens that some earlier request had: somebody who goes along up to there may well
# be followed by another. To stop there the prompt is cut into chunks. The last token of a prompt is never reused: it
# has to run to give logits.
#
# Six requests, one after another, blocks of 16. *In common* are the tokens at the start that some earlier request had
# too, its answer included. **Predict:** the third and the fourth have much in common with the second. Which of them is
# the first that can use it?

# %%
requests = {"France": encode(France[0]), "+ Japan": first, "+ Italy": second,
            "+ Japan + Italy": encode(*Japan, question), "+ Italy again": second,
            "+ Paris": encode(*France, "Is Paris in France?")}


def serve(size, snapshots=16, requests=requests, limit=60):
    """One request after another through one engine: their sequences, and {snapshot: who left it}."""
    taken, engine = {}, Engine(model, block_size=size, num_blocks=512 // size,
                               enable_prefix_caching=True, num_snapshots=snapshots)
    for name, ids in requests.items():
        engine.generate([Request(ids, limit, chat.stop, id=name)])
        taken |= {key: name for key in engine.cache.snapshots if key not in taken}
    return list(engine.sequences.values()), taken


done, taken = serve(16)
asked = list(requests.values())
shared = [max([in_common(ids, old.tokens) for old in done[:i]] + [0]) for i, ids in enumerate(asked)]
print("                 prompt  in common  reused  run  leaves snapshots at, answer")
for s, most, n in zip(done, shared, map(len, asked)):
    left = sorted(16 * (s.keys.index(key) + 1) for key, name in taken.items() if name == s.id)
    print(f"{s.id:16} {n:6} {most:10} {s.reused:7} {n - s.reused:4}  {left}, {chat.tk.decode(s.new)}")
saved, total = sum(s.reused for s in done), sum(map(len, asked))
print(f"not computed: {saved} of {total} prompt tokens, {saved / total:.0%}; "
      f"all equal solo: {[s.new for s in done] == list(map(solo, asked))}")

# %% [markdown]
# The fourth is the first: it goes on through the second's prompt and finds its snapshot at 48. The third has 41 tokens
# in common and gets 16. Two full blocks are there, but no snapshot at their end: it runs the rest, and stops at the
# branch point, 32, to leave one. The last request branches there too and finds it. **The first to branch pays, the next
# one saves.** A common system prompt works the same way: its end is where the second user branches, and from the third
# user on it costs only the rest of its last block. (This model has learned no system prompt, so a shared first turn
# stands in.)
#
# (The second has less in common with the first than its whole conversation, although it continues it: the chat frame
# leaves the thoughts out of earlier answers, so the tokens differ from there on.)
#
# ## Eviction
#
# A block that nobody holds is free, but its contents stay until somebody else needs the place. The free ones form a
# queue, the longest unused first to go. A row gives its last block back first: a prefix is found from its start, so its
# end is what one can do without. And a row that frees a block twice takes it from the next owner, so the pool counts
# and refuses.
#
# **Predict:** in a pool of 6 blocks, one row had blocks 0, 1, 2, another 3 and 4, and both have left, in this order.
# Which four are handed out next?

# %%
gone = []                                               # blocks whose contents, if any, are given up
pool = BlockPool(num_blocks=6, block_size=8, forget=gone.append)
mine, other = pool.allocate(3), pool.allocate(2)
gone.clear()                                            # the first owners of a block lose nothing
pool.free(mine[::-1])                                   # the last block in front
pool.free(other[::-1])
print("had", mine, "and", other, "- the queue of free ones:", list(pool.queue))
try:
    pool.free(mine)
except ValueError as error:
    print(error)
print("allocate 4:", pool.allocate(4), "- given up:", gone)

# %% [markdown]
# Block 5 goes first, nobody ever had it; then the first row's, its last block in front.
#
# Now on the engine. A chat comes back after a pause, and in between another user came, with a short row, or with one
# that needs the whole pool. Then users A and B in turns, with room for no snapshot, for one, for two.
#
# **Predict:** what does one place for a snapshot save?

# %%
users = {"A": encode("What is the capital of Spain?"), "B": encode("Why does the Moon shine?")}


def again(between):
    """Tokens reused by A's second run, with another prompt between."""
    engine = Engine(model, block_size=8, num_blocks=8, enable_prefix_caching=True)
    for ids in (users["A"], between, users["A"]):
        engine.generate([Request(ids, 2)])
        assert engine.pool.num_used == 0                # nobody holds anything between requests
    return list(engine.sequences.values())[-1].reused


print("reused after a short row:", again(encode("Say hello.")),
      f"- after one of {len(first)} tokens:", again(first))
in_turns = {f"{user}{n}": ids for n in (1, 2, 3) for user, ids in users.items()}
for budget in (0, 1, 2):
    reused = {s.id: s.reused for s in serve(8, budget, in_turns, limit=8)[0]}
    print(f"{budget} snapshots, A and B in turns: reused {reused}")

# %% [markdown]
# With one place for a snapshot, each user throws out the other's just before it is wanted: a budget one too small saves
# nothing at all. That is the worst case of every cache that drops the longest unused.
#
# ## Preemption
#
# Blocks taken on demand can run out while rows are running. Then somebody has to go: the engine takes the row its
# policy ranks last, of equals the youngest, frees its blocks and puts it back into the queue with its tokens. Later
# everything is computed again. Four questions and 9 blocks of 8. **Predict:** no answer changes; but how many more
# tokens are computed than with blocks enough?
#
# A request that could *never* fit is another matter: waiting would not help, and it would block those behind it. It is
# refused when it is added (last line).

# %%
questions = {"A": "What is the capital of Spain?", "B": "Is Rome in Spain?",
             "C": "Why does the Moon shine?", "D": "What is 5 times 6?"}
for blocks in (32, 9):
    engine = Engine(model, max_num_seqs=3, block_size=8, num_blocks=blocks)
    new = engine.generate([Request(encode(q), 40, chat.stop, id=user) for user, q in questions.items()])
    useful, computed = (sum(getattr(r, what) for r in engine.records) for what in ("useful", "computed"))
    print(f"{blocks} blocks: {len(engine.records)} steps, {useful} tokens useful, {computed} computed, "
          f"equal solo: {new == [solo(encode(q)) for q in questions.values()]}")
events = [(r, ", ".join(f"{what} {' '.join(names)}" for what, names in
                        (("in:", r.admitted), ("out:", r.preempted), ("done:", r.finished)) if names))
          for r in engine.records]
for r, event in events:
    if event:
        print(f"  step {r.step:2}: ran {r.rows}, {r.blocks_used} blocks, {event}")
fig, ax = plt.subplots(figsize=(9.5, 2.8))
figures.timeline(ax, engine.records, "9 blocks: C is preempted and reads all again")
figures.show(fig, f"A lane for each seat. {'; '.join(f'step {r.step}: {e}' for r, e in events if e)}.")
try:
    Engine(model, block_size=4, num_blocks=4).add(Request(first[:17], 1, id="17 tokens"))
except ValueError as error:
    print(error)

# %% [markdown]
# C waits at first, since A and B hold 8 of the 9 blocks and its prompt needs 4. In step 5 it has to go: A has 5 blocks,
# C needs a fifth too, that makes 10, and C is the younger. The 32 tokens that it had run by then are computed twice:
# its prompt of 30 and two of its new ones. No answer changes. (Seat 2 is free all the time: it is blocks that are
# short, not seats.)
#
# ## Which block size?
#
# Small blocks waste less and, with attention alone, share finer. Large ones make shorter tables, and a gather of fewer,
# longer pieces. Count that on the lengths of the first section and the six requests above, and time the gather of
# 16,384 tokens whose blocks lie anywhere.
#
# **Predict:** which of the three counts shrinks most, by what factor, between 1 and 16? Which one drops to nothing
# between 16 and 64?

# %%
sizes, TINY = (1, 2, 4, 8, 16, 32, 64), hybrid("tiny", model.config, element_bytes=4)
empty, entries, reuses, alone = [], [], [], []
for n in sizes:
    blocks = [-(-length // n) for length in lengths]
    empty.append(100 * (1 - sum(lengths) / (sum(blocks) * n)))
    entries.append(sum(blocks) / len(blocks))
    reuses.append(sum(s.reused for s in serve(n, limit=1)[0]))
    alone.append(sum(min(c, len(ids) - 1) // n * n for c, ids in zip(shared, asked)))
    print(f"blocks of {n:2}: {empty[-1]:2.0f} % of the slots empty, {entries[-1]:4.1f} pieces a row of "
          f"{n * TINY.kv_bytes:6,} bytes; tokens reused {reuses[-1]:3}, attention alone {alone[-1]:3}")

fig, axes = plt.subplots(1, 3, figsize=(9.5, 2.8))
titles = ("empty slots, %", "table entries a row", "prompt tokens reused")
for ax, counts, title in zip(axes, (empty, entries, alone), titles):
    ax.plot(range(7), counts, "--s", color=figures.COLORS["predicted"], label="attention alone")
    ax.axvline(sizes.index(16), color=figures.INK, linewidth=1, linestyle=":")
    ax.set(title=title, xlabel="block size (dotted: 16)", ylim=(0, None))
    ax.set_xticks(range(7), sizes)
axes[2].plot(range(7), reuses, "-o", color=figures.COLORS["measured"], label="hybrid, run")
axes[2].legend(loc="lower left")
figures.show(fig, f"Three pictures over block sizes {sizes}: {list(map(round, empty))} % empty slots; "
                  f"entries {[round(x, 1) for x in entries]}; reused {reuses}, attention alone {alone}.")

# %% tags=["nbval-ignore-output"]
memory_k = torch.randn(16384, 2, 256)                   # (slots, Hkv, D): one layer of the 0.8B shape
for n in (1, 16, 64):
    anywhere = torch.randperm(16384 // n, generator=torch.Generator().manual_seed(0))
    slots = slot_mapping(torch.arange(16384), anywhere, n)
    seconds = []
    for _ in range(5):
        start = perf_counter()
        memory_k[slots]
        seconds.append(perf_counter() - start)
    print(f"gather 16,384 tokens, blocks of {n:2}: {1e3 * min(seconds):.1f} ms")

# %% [markdown]
# Up to 16 it is the tables that shrink, to a fourteenth; beyond, it is the reuse that goes, because no two of these
# prompts have 64 tokens in common. These rows are short, so 64 is too much here; on rows of thousands the empty end of
# the last block no longer shows, but a table with an entry for every token would. 16 is where most of both is gained,
# and engines begin there. (The gather's time depends on the machine; compare your own three lines before you believe
# that large blocks are needed for it.)
#
# Did you expect the third curve to fall all the way? In a model of attention alone (dashed) it does. Here the place of
# the snapshots counts too: *+ Japan + Italy* has 55 tokens in common with *+ Japan*, a prompt of 61. Blocks of 16 put
# that prompt's snapshot at 48, inside; blocks of 8 at 56, one token too late, and it cannot be cut back.
#
# ## Capacity with a fixed part
#
# With attention alone a row costs bytes in proportion to its tokens. A hybrid's row costs a fixed amount, and then less
# for each token: **affine**, not proportional. The fixed amount is also what a snapshot of it takes. Compare the 0.8B
# shape with a model of the same weights whose 24 layers all kept keys and values (an invention, to have one difference
# only), in the memory of an L4, 90 % of it usable.
#
# **Predict:** 64 times the tokens, a 64th of the rows? For which of the two?

# %%
ALL_FULL = replace(QWEN_0_8B, name="all 24 layers full", kv_bytes=4 * QWEN_0_8B.kv_bytes,
                   recurrent_bytes=0, window_bytes=0)
counts, per_row = (16, 64, 256, 512, 1024, 4096, 16384, 65536), {}
cross = QWEN_0_8B.fixed_bytes / (ALL_FULL.kv_bytes - QWEN_0_8B.kv_bytes)
print("tokens a row:      ", *(f"{n:7,}" for n in counts))
for shape in (QWEN_0_8B, ALL_FULL):
    fits = per_row[shape.name] = [rows_in_memory(shape, HARDWARE["L4"], n, usable=0.9) for n in counts]
    print(f"{shape.name:19}", *(f"{n:7,}" for n in fits), f" 64 to 4,096: 1/{fits[1] / fits[5]:.1f}")
print(f"they cross at {cross:.0f} tokens")
for shape in (TINY, QWEN_0_8B):
    fixed, equal = shape.fixed_bytes, shape.fixed_bytes / shape.kv_bytes
    print(f"{shape.name}: a snapshot, {fixed:,} bytes, is {equal:.0f} tokens' keys and values, "
          f"{equal / 16:.0f} blocks of 16")

fig, ax = plt.subplots()
for (name, fits), line in zip(per_row.items(), ("--o", ":s")):
    ax.plot(counts, fits, line, color=figures.COLORS["predicted"], label=name)
ax.axvline(cross, color=figures.INK, linewidth=1, linestyle=":")
ax.annotate(f"{cross:.0f} tokens", (cross, 1.2e4), (5, 0), textcoords="offset points")
ax.set(xscale="log", yscale="log", title="24 GB (L4), 90 % usable", xlabel="tokens a row", ylabel="rows")
ax.legend()
figures.show(fig, f"Rows that fit over tokens a row, {counts}: {per_row}. They cross at {cross:.0f}.")

# %% [markdown]
# A snapshot after every block of 16 would cost the 0.8B model about a hundred times the block. Taken at the end of long
# prefixes that come again it is cheap, and without it the blocks are worth nothing. That is why snapshots have a budget
# of their own (`num_snapshots`) and why *where* matters.
#
# Short rows are what a hybrid is bad at: each brings its matrices, even for ten tokens. An engine therefore has two
# limits, blocks *and* places for states; here `num_blocks` and `max_num_seqs`. Your own numbers, with 90 % of the
# memory usable again. The last choice of the block size, 544, is what a real engine's rule gives for this shape; the
# last line shows where it comes from.

# %%
def in_words(gigabytes, tokens, block_size):
    """Rows that fit beside the weights: the hybrid's, and those with full attention everywhere."""
    words = []
    for shape in (QWEN_0_8B, ALL_FULL):
        room = max(0, int(0.9 * gigabytes * 10 ** 9 - shape.weight_bytes))
        taken = shape.row_bytes(-(-tokens // block_size) * block_size)
        words.append(f"{shape.name}: {room // taken:,} rows, of a row's bytes "
                     f"{shape.fixed_bytes / taken:.0%} fixed")
    return f"{gigabytes} GB, {tokens:,} tokens a row, blocks of {block_size}. " + "; ".join(words) + "."


controls, sliders, text = widgets.play(in_words, gigabytes=(2, 80, 24), block_size=[16, 1, 64, 544],
                                       tokens=[1000, 10, 100, 530, 10_000, 100_000])
for n, block in ((10, 544), (10_000, 16), (530, 1), (10, 16)):
    sliders["tokens"].value, sliders["block_size"].value = n, block
    print(text.value)
state, per_token = QWEN_0_8B.fixed_bytes // 18, QWEN_0_8B.kv_bytes // 6  # of one layer, bytes
print(f"a linear layer's state {state:,} bytes, a token in an attention layer {per_token:,}: "
      f"{state / per_token:.0f} tokens, in multiples of 16: {-(-state // per_token // 16) * 16}")
controls

# %% [markdown]
# The last line explains the 544. An engine that keeps states and blocks in *one* pool of equal pages makes a block of
# one attention layer as large as the state of one linear layer. (530 is the crossing above once more, and not by
# chance: 18 linear layers stand there in place of 3 · 6 attention layers.) That costs a prompt of 500 tokens its prefix
# hits, because no block is ever full: a trade-off that you can now read out of a log.
#
# ## Your turn
#
# Replace the dots, run the cell, and `check` tells you at once.
#
# **08.1** Rows of `lengths` tokens lie in blocks of `size`. How many slots are taken but hold no token?
#
# <details><summary>Solution</summary>
#
# Each row rounds up for itself; `-n % size` is what is missing to the next multiple.
# ```python
# def my_waste(lengths, size):
#     return sum(-n % size for n in lengths)
# ```
# </details>

# %%
def my_waste(lengths, size):
    ...


_ = check("08.1", my_waste)

# %% [markdown]
# **08.2** A row holds `length` tokens and gets `new` more. How many blocks must it take first? (None is shared.)
#
# <details><summary>Solution</summary>
#
# ```python
# def my_missing(length, new, size):
#     return -(-(length + new) // size) - -(-length // size)
# ```
# </details>

# %%
def my_missing(length, new, size):
    ...


_ = check("08.2", my_missing)

# %% [markdown]
# **08.3** Row A has 20 tokens in blocks of 8. B and C are forked from it. Then B gets a token, then C, then A. How many
# different blocks are in use after the forks, and after each of the three tokens?
#
# <details><summary>Solution</summary>
#
# Three blocks, the last one shared by all. B copies it, C copies it, and then A is its only holder.
# ```python
# blocks_in_use = [3, 4, 5, 5]
# ```
# </details>

# %%
blocks_in_use = ...                                     # [after the forks, after B, after C, after A]
_ = check("08.3", blocks_in_use)

# %% [markdown]
# **08.4** How many tokens can a hybrid reuse? `cached` are the tokens of an earlier row whose full blocks of `size` are
# all still there, `snapshots` the lengths at which a snapshot of that row was kept (multiples of `size`). At least one
# token of `prompt` has to run.
#
# <details><summary>Solution</summary>
#
# The longest snapshot that lies inside the tokens in common, and leaves one to run.
# ```python
# def my_reuse(prompt, cached, snapshots, size):
#     fit = [n for n in snapshots if n < len(prompt) and prompt[:n] == cached[:n]]
#     return max(fit, default=0)
# ```
# </details>

# %%
def my_reuse(prompt, cached, snapshots, size):
    ...


_ = check("08.4", my_reuse)

# %% [markdown]
# ## In an interview
#
# > Reserving the longest possible row wastes most of the KV memory, so it is cut into blocks of, say, 16 tokens, taken
# > when a token needs one; a block table maps position to slot, attention gathers through it, and at most one block of
# > a row is partly empty. Blocks have reference counts: forks and equal prefixes share them, a shared block is copied
# > before it is written, and when the pool runs dry a row is preempted and computed again. On a hybrid the blocks are
# > half of a prefix: the recurrent state cannot be cut back, so reuse needs a snapshot, which costs, on the 0.8B shape,
# > as much as 1,590 tokens of keys and values, and is worth it at the end of long prefixes that come again.
#
# **In production.** vLLM introduced the scheme as PagedAttention; the setting is `--block-size` (16 by default), the
# switch `--enable-prefix-caching`. Its [hybrid KV cache
# manager](https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager/) serves layers of several kinds from one pool,
# with a `MambaManager` for recurrent states, and `mamba_cache_mode` (`none`, `align`, `all`) says which of them are
# kept. To make the pages equal it raises the attention block, to [528 tokens for
# Qwen3.5-4B](https://github.com/vllm-project/vllm/issues/40696), and shorter prompts never hit. SGLang finds prefixes
# in a radix tree (RadixAttention); `MambaRadixCache` hangs states on some of the tree's nodes, with an LRU list of
# their own, and [cannot roll a state back
# either](https://pytorch.org/blog/hybrid-models-meet-sglang-more-than-full-attention). What is called preemption here
# is `retract_decode` there. Names move between versions.
#
# **Next:** [09 Capacity and cost](09_capacity_and_cost.ipynb): what all of this is worth in money, and how many GPUs a
# load needs. **Before:** [07 Static and continuous batching](07_static_and_continuous_batching.ipynb).
