# %% [markdown]
# # 08 The paged KV cache
#
# Nobody knows how long an answer will be when it begins. So how much memory do you set aside for it, and what becomes
# of the memory that it does not use?
#
# The answer of every engine today is an operating system's: cut the memory into small *blocks*, hand them out one by
# one, and keep a list for each row of where its tokens are. At the end of this chapter you can keep that list by hand,
# attend through it, share it between rows without one spoiling the other, and say why all of this is only half of a
# prefix on a hybrid model. You will have seen what each rule prevents, twice as a wrong answer in words.
#
# It runs in about fifteen seconds on two cores and needs nothing but this repository; read chapter 06 first. The
# machinery is `qwen/paged.py` and `qwen/engine.py`, two files to read beside this text. Words and symbols are listed in
# the [glossary](GLOSSARY.md). Several cells ask for a prediction. The outputs are already below them: to predict
# honestly, choose *Edit > Clear Outputs of All Cells* first.

# %%
from dataclasses import replace
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch

from qwen import figures, widgets
from qwen.cache import State
from qwen.chat import Chat, build_prompt
from qwen.engine import Engine, Request
from qwen.exercises import check
from qwen.model import Model
from qwen.paged import BlockPool, PagedCache, slot_mapping
from qwen.roofline import HARDWARE, LLAMA_3_8B, QWEN_0_8B, hybrid, rows_in_memory
from qwen.sample import generate
from qwen.weights import find_model

figures.setup()
path = find_model()
model = Model.from_pretrained(path, device="cpu", dtype=torch.float32)
chat = Chat(model, path)
_ = torch.set_grad_enabled(False)
print("layers:", ", ".join(kind.split("_")[0] for kind in model.config.layer_types))

# %% [markdown]
# ## What a reservation costs
#
# A row's keys and values lie one after another, so the simple way is to *reserve*: the longest row that may ever come,
# for everybody. The shipped model's own questions and answers are real lengths to try that on: each answer is a row
# with its prompt before it.
#
# **Predict:** the context is 1,024 tokens. If every row reserves that, which share of the memory ever holds a token?

# %%
def encode(*turns):
    """Token ids of a conversation: question, answer, question …, up to where the model speaks next."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return chat.tk.encode(build_prompt(messages)).ids


rows = []                                               # (prompt, answer) in tokens, stop included
for conversation in (path / "corpus.txt").read_text(encoding="utf-8").split("\n\n"):
    lines = [line for line in conversation.splitlines() if line[:3] in ("Q: ", "A: ")]
    turns = [line[3:].replace("\\n", "\n") for line in lines]
    for i in range(1, len(turns), 2):
        rows.append((len(encode(*turns[:i])), len(chat.tk.encode(turns[i]).ids) + 1))
lengths = [prompt + answer for prompt, answer in rows]
print(f"{len(rows)} rows, {sum(lengths):,} tokens; shortest {min(lengths)}, longest {max(lengths)}, "
      f"mean {sum(lengths) / len(rows):.0f}")

# %%
LIMIT = 120                                             # a usual max_new_tokens
ways = {"the context, 1,024": 1024 * len(rows), "the longest row": max(lengths) * len(rows),
        "prompt + max_new_tokens": sum(prompt + LIMIT for prompt, _ in rows),
        "blocks of 16": sum(-(-n // 16) * 16 for n in lengths), "the tokens alone": sum(lengths)}
print(f"{'each row takes':24} {'slots':>8} {'used':>5}   {QWEN_0_8B.name}, {LLAMA_3_8B.name}")
for way, slots in ways.items():
    gb = [slots * shape.kv_bytes / 1e9 for shape in (QWEN_0_8B, LLAMA_3_8B)]
    print(f"{way:24} {slots:8,} {sum(lengths) / slots:5.0%}   {gb[0]:9.2f} GB, {gb[1]:7.2f} GB")

# %% [markdown]
# (The last columns are the keys and values these rows would take in two published shapes, in bf16, GB = 1e9 bytes.)
#
# What is reserved and not used lies *inside* somebody's piece: **internal fragmentation**. There is also waste
# *between* the pieces. **Predict:** A, B, C and D have 8 slots each; B and D leave, so 16 of 32 are free. E wants 12.
# Does E get in?
#
# "A 5-token user occupies 5 tokens' worth of pages, not 100", says the usual explanation, and that is nearly true.
# **Predict** the slots that 5 tokens take in blocks of 1, 4, 8, 16 and 64. When does the sentence become false?

# %%
memory = ["A"] * 8 + ["."] * 8 + ["C"] * 8 + ["."] * 8
gaps = [len(gap) for gap in "".join(memory).replace("C", "A").split("A") if gap]
print("".join(memory), "free:", memory.count("."), "in gaps of", gaps)
print("E wants 12 in one piece:", max(gaps) >= 12)
free = [b for b in range(8) if set(memory[4 * b:4 * b + 4]) == {"."}]   # the same memory in blocks of 4
print(f"E wants {-(-12 // 4)} blocks of 4; free are blocks {free}:", len(free) >= 3)
print()
for size in (1, 4, 8, 16, 64, 128):
    blocks = {n: -(-n // size) for n in (5, 100)}
    print(f"blocks of {size:3}: 5 tokens take {blocks[5]} = {blocks[5] * size:3} slots, "
          f"100 take {blocks[100]:3} = {blocks[100] * size:3}; at most {size - 1:3} empty in a row")

# %% [markdown]
# Enough memory in the wrong pieces: that is **external fragmentation**. Pieces of one size have none of it, because
# every free piece fits every row. What remains is the end of each row's last block; with blocks of 128 user B pays for
# 128.
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
# The last `assert` is the package's `slot_mapping`, the same line for many rows at once. The picture has that row, and
# a second user whose table begins with the same block; how two rows come to share one is a later section.
#
# **The wrong versions.** Three slips that raise no error. (a) `table[t // 8] + t % 8`: the block size is forgotten. (b)
# `table[t % 3] * 8 + t // 3`: the tokens are dealt out to the blocks in turn. (c) A row with a shorter table is filled
# up with -1, and somebody looks there.
#
# The memory has 6 blocks; A has blocks 5, 0, 3 and B has 1, 2. A's token t is 10 + t, B's is 110 + t. B is stored
# first, rightly; then A with each formula. **Predict:** which one spoils B's tokens? Which one gives each of A's tokens
# a slot of its own, and is wrong all the same?

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

# %% [markdown]
# (a) squeezes 17 tokens into fewer slots, so the row loses its own, and some of B's. (b) is the treacherous one:
# everything has its own slot, and a cache that also *reads* with this formula works, until the table grows and each
# token moves. (c) is Python's -1, the last block, whoever has it. `PagedRows` fills up with 0 and never reads there.
#
# ## Growth
#
# Room is taken when a token needs it, not before. A row of 7 tokens in blocks of 8 grows one by one.
#
# **Predict:** after which tokens does the table get longer?

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

# %% [markdown]
# Tokens 9 and 17, that is positions 8 and 16: a full block is no reason to take one, the next token is.
#
# A batcher that goes round as sample code allocates `prompt_len + 1` tokens when a request enters and never again.
# (Chapter 07 looks at its other bugs.) With a prompt of 14 it has 2 blocks of 8. **Predict:** which new token is the
# first without a place? In this package the row is refused, by name, before anything is written:

# %% tags=["raises-exception"]
cache = PagedCache(model, num_rows=1, num_blocks=6, block_size=8)
cache.grow(0, 14 + 1)                                   # once, when it enters
rows = cache.rows([0])
for token in range(17):
    model.ragged(torch.tensor([token]), torch.tensor([0, 1]), rows)

# %% [markdown]
# In the sample code nobody asks. Its kernel would follow the table past its end, into whatever stands there.
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
table, size, query = torch.tensor([2, 0, 1]), 2, 1.0
memory_k, memory_v = torch.zeros(8), torch.zeros(8)                     # 4 blocks of 2
slots = slot_mapping(torch.arange(5), table, size)
memory_k[slots], memory_v[slots] = keys, values
print("keys in the memory:", memory_k.tolist(), "- slots", slots.tolist())

top, bottom = 0.0, 0.0
for t in range(5):                                      # by hand: follow the table token by token
    slot = int(table[t // size]) * size + t % size
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
# The attention layer of `qwen/attention.py` does not know what a block is. It asks the rows' memory to do three things:
# `reserve` the call's slots, `append` new keys and give all of them back, `advance` the lengths. `State` (contiguous)
# and `PagedRows` both do. Two users, one prefill, eight decode steps, three ways.
#
# **Predict:** how often do the tokens differ?

# %%
prompts = [encode("Why does the Moon shine?"), encode("What is the capital of Spain?")]


def cut(parts):
    """Rows as a flat buffer and its offsets."""
    return torch.tensor(sum(parts, [])), torch.tensor([0, *map(len, parts)]).cumsum(0)


def both(state, box):
    """Prefill and 8 steps: each row's tokens, and every step's logits. box: as (B, T), else flat."""
    new, seen, feed = [[], []], [], prompts
    for step in range(9):
        flat = step == 0 or not box                     # unequal prompts go in flat
        logits = (model.ragged(*cut(feed), state, last_only=True) if flat
                  else model(torch.tensor(feed), state)[:, -1])         # (B, vocab)
        seen.append(logits)
        feed = [[token] for token in logits.argmax(-1).tolist()]
        new = [row + one for row, one in zip(new, feed)]
    return new, torch.stack(seen)

# %%
def within(found, right, bound=1e-4):
    return ((found - right).abs() <= bound * right.abs().clamp(min=1)).all().item()


cache = PagedCache(model, num_rows=2, num_blocks=12, block_size=8)
for token in range(0, 40, 8):                           # taken in turn, so that the blocks lie mixed
    for row in (1, 0):
        cache.grow(row, 8)
        cache.length[row] += 8
cache.length = [0, 0]
print("tables", cache.tables)

runs = {"contiguous, a box": both(State(model, 2), True),
        "contiguous, flat": both(State(model, 2), False),
        "paged, flat": both(cache.rows([0, 1]), False)}
tokens, logits = runs["contiguous, a box"]
for name, (new, seen) in runs.items():
    print(f"{name:18} the same tokens: {new == tokens}, the same logits: {within(seen, logits)}")
print(*(repr(chat.tk.decode(row)) for row in tokens))
print("one interface:", all(hasattr(kind, name) for kind in (State, type(cache.rows([0])))
                            for name in ("reserve", "append", "advance")))

# %% [markdown]
# **What an earlier owner left behind.** A freed block is not wiped: that would cost a write of the whole block for
# nothing. Its next owner fills slot after slot, and behind the last token the old numbers still lie. To see whether
# they matter, make them as bad as can be: NaN in every block.
#
# **Predict:** the score of a slot behind the end is masked, so its weight is 0. Is that enough?

# %%
k, v = torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([10.0, 20.0, torch.nan])
weights = k.masked_fill(torch.tensor([False, False, True]), -torch.inf).softmax(-1)
print("weights", [round(w, 3) for w in weights.tolist()], "weights @ values", (weights @ v).item())


def feed(cache, row, tokens):
    """Run tokens of one row through the model; the logits (vocab,) at the last."""
    cache.grow(row, len(tokens))
    rows = cache.rows([row])
    logits = model.ragged(*cut([tokens]), rows, last_only=True)
    rows.commit()
    return logits[0]


def go_on(cache, row, tokens, limit=60):
    """Feed tokens, then each best next token, until one is a stop: the new ones."""
    new = []
    while len(new) < limit and not (new and new[-1] in chat.stop):
        new.append(feed(cache, row, new[-1:] or tokens).argmax().item())
    return new


def solo(prompt):
    return generate(model, torch.tensor([prompt]), 60, stop=chat.stop)


# %%
cache = PagedCache(model, num_rows=1, num_blocks=8, block_size=8)
print("first owner:", repr(chat.tk.decode(go_on(cache, 0, encode("Is Rome in Spain?")))))
cache.release(0)
for memory in (*cache.k.values(), *cache.v.values()):
    memory[:-1] = torch.nan                             # all blocks; the last slot is the spare
new = go_on(cache, 0, prompts[1])
print("next owner: ", repr(chat.tk.decode(new)), "equals solo:", new == solo(prompts[1]))
last = cache.tables[0][-1] * 8 + 7                      # the last slot of its last block
print("NaN still in its last block:", bool(next(iter(cache.v.values()))[last].isnan().any()))

# %% [markdown]
# A weight of 0 is not enough, since 0 · NaN is NaN. The next owner is unharmed because `append` never reads there: for
# a place behind the row's last token it reads the spare slot, which is finite, and the mask then hides that.
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
prompt = encode("What is the opposite of hot?")
best, second = feed(cache, 0, prompt).topk(2).indices.tolist()
fig, axes = plt.subplots(3, 1, figsize=(9.5, 6))
words = []


def draw(ax, title):
    tables, held = dict(zip("AB", cache.tables)), dict(zip("AB", cache.length))
    words.append(f"{title}. " + figures.pages(ax, tables, held, 8, 8, title))
    print(f"{title:22} tables {cache.tables}, holders {cache.pool.holders}, used {cache.pool.num_used}")


cache.fork(0, into=1)
draw(axes[0], f"forked, {len(prompt)} tokens")
feed(cache, 1, [second])
draw(axes[1], "B writes its own token")
feed(cache, 0, [best])
draw(axes[2], "A writes its own token")
figures.show(fig, " ".join(words))

# %% [markdown]
# (Yellow is shared by both.) When B writes into the last block, A holds it too: B gets a **copy** and writes there.
# That is *copy-on-write*. When A writes afterwards, it is the only holder and needs none. The full blocks are never
# written again, so they stay shared for good.
#
# **The wrong version** writes without the copy. Two users' prompts begin alike: the row is forked where they part, in
# the middle of a block (of 64), and both go on, in turns. **Predict:** who is harmed?

# %%
def two_users(prompts):
    """One row for what the prompts have in common, forked there; each user's new tokens."""
    common = next(i for i, (a, b) in enumerate(zip(*prompts)) if a != b)
    cache = PagedCache(model, num_rows=2, num_blocks=8, block_size=64)
    feed(cache, 0, prompts[0][:common])
    cache.fork(0, into=1)
    parts, new = [prompt[common:] for prompt in prompts], [[], []]
    while any(not row or row[-1] not in chat.stop for row in new):
        for r, row in enumerate(new):
            if not row or row[-1] not in chat.stop:
                row.append(feed(cache, r, row[-1:] or parts[r]).argmax().item())
    return new


pair = [encode("Which ocean is the largest?"), encode("Which animal is the largest?")]
with patch.object(PagedCache, "_shared", lambda self, row, tokens: []):
    wrong = two_users(pair)
for name, new in (("copy on write", two_users(pair)), ("wrong: no copy", wrong)):
    for user, row, prompt in zip("AB", new, pair):
        print(f"{name:14} {user}: {chat.tk.decode(row)[:48]!r:52} equal solo: {row == solo(prompt)}")

# %% [markdown]
# B wrote last, so B's keys and values stand where A's were. A asked about oceans and gets B's whale: a leak from one
# user to another. Many other pairs of questions survive this fault, so a test of a few answers may miss it.
#
# **Freeing.** The last holder to leave makes a block free. One who gives it back twice would take it from its next
# owner, so the pool counts and refuses:

# %% tags=["raises-exception"]
pool = BlockPool(num_blocks=4, block_size=8)
mine = pool.allocate(2)
pool.share(mine)                                        # two holders
pool.free(mine)
pool.free(mine)                                         # the last one
print("free:", pool.num_free)
pool.free(mine)

# %% [markdown]
# ## Half of a prefix
#
# Now share between *requests*. Many begin alike: the same instructions, or the same conversation one turn later. An
# engine finds the longest run of full blocks whose tokens it has seen, and starts behind it. The key that it looks a
# block up by covers all tokens from the start to the block's end, because a key vector depends on everything before it.
#
# In a model of attention alone that is all. This one has linear layers too, with a window and a matrix that sit in no
# block. A user's third question, after two answers:
#
# **Predict:** the blocks of the first 80 tokens are shared. What does the model say if window and matrix start from
# zero? Does anything fail?

# %%
chat_so_far = ("What is the capital of France?", "The capital of France is Paris.",
               "And of Japan?", "The capital of Japan is Tokyo.", "And of Italy?")
prompt = encode(*chat_so_far)
cache = PagedCache(model, num_rows=3, num_blocks=24, block_size=16, num_snapshots=4)
whole, keys = 80, []
cache.extend(keys, prompt)                              # a key for each of its full blocks
feed(cache, 0, prompt[:whole])
cache.remember(0, keys[:whole // 16], snapshot=True)    # blocks, and window and matrix as they are now

cache.pool.share(cache.tables[0])                       # wrong: the blocks alone
cache.tables[1], cache.length[1] = list(cache.tables[0]), whole
cache.reuse(2, keys[:whole // 16])                      # right: the blocks and the snapshot
answers = {"computed whole": solo(prompt), "blocks alone": go_on(cache, 1, prompt[whole:]),
           "blocks and snapshot": go_on(cache, 2, prompt[whole:])}
print(f"{len(prompt)} tokens, {whole} of them shared. {chat_so_far[-1]}")
for name, new in answers.items():
    print(f"{name:20} {chat.tk.decode(new)!r}, equal: {new == answers['computed whole']}")

# %% [markdown]
# No error, a well-formed sentence, and the wrong one: it is the answer to the question before.
#
# So a prefix is reused only where a **snapshot** of window and matrix was kept, together with the blocks before it. And
# a snapshot cannot be cut: from keys and values of 10 tokens you can drop the last three, but the matrix is one sum
# into which all ten were written, each fading what was there. Ask for the first 7 of 10 tokens (blocks of 1, so that it
# is not the block size that forbids it):

# %% tags=["raises-exception"]
cache = PagedCache(model, num_rows=2, num_blocks=24, block_size=1, num_snapshots=4)
keys, ten = [], prompt[:10]
cache.extend(keys, ten)
feed(cache, 0, ten)
cache.remember(0, keys, snapshot=True)
print("blocks there, reusable:", cache.match(keys), "- of the first seven:", cache.match(keys[:7]))
cache.reuse(1, keys[:7])

# %% [markdown]
# ## Where the snapshots are taken
#
# A snapshot after every block would be easy and expensive. The engine (`enable_prefix_caching=True`) takes them at two
# places: at the last full block of a prompt, because the next turn of the same chat begins with it; and where a prompt
# leaves a known path, the **branch point**, because somebody who goes along up to there may well be followed by
# another. To stop there the prompt is cut into chunks. The last token of a prompt is never reused: it has to run to
# give logits.
#
# Six requests, one after another, blocks of 16. *In common* are the tokens at the start that some earlier request had
# too, its answer included. **Predict:** the third and the fourth have much in common with the second. Which of them is
# the first that can use it?

# %%
France, Japan = chat_so_far[:2], chat_so_far[:4]
requests = {"France": encode(France[0]),
            "+ Japan": encode(*France, "And of Japan?"),
            "+ Italy": encode(*France, "And of Italy?"),
            "+ Japan + Italy": encode(*Japan, "And of Italy?"),
            "+ Italy again": encode(*France, "And of Italy?"),
            "+ Paris": encode(*France, "Is Paris in France?")}


def serve(size, snapshots=16, requests=requests, limit=60):
    """The requests one after another through one engine; their sequences, and the engine."""
    engine = Engine(model, block_size=size, num_blocks=512 // size, enable_prefix_caching=True,
                    num_snapshots=snapshots)
    for name, prompt in requests.items():
        engine.generate([Request(prompt, limit, chat.stop, id=name)])
    return list(engine.sequences.values()), engine


def in_common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# %%
done, engine = serve(16)
print("                 prompt  in common  reused  run  answer")
for i, s in enumerate(done):
    prompt = s.request.prompt
    most = max([in_common(prompt, earlier.tokens) for earlier in done[:i]], default=0)
    print(f"{s.id:16} {len(prompt):6} {most:10} {s.reused:7} {len(prompt) - s.reused:4}  "
          f"{chat.tk.decode(s.new)}")
print("all equal solo:", all(s.new == solo(s.request.prompt) for s in done))
prompt_tokens, saved = sum(len(s.request.prompt) for s in done), sum(s.reused for s in done)
print(f"not computed: {saved} of {prompt_tokens} prompt tokens, {saved / prompt_tokens:.0%}")
ends = {s.keys[n]: 16 * (n + 1) for s in done for n in range(len(s.keys))}
print("snapshots kept, after tokens:", [ends[key] for key in engine.cache.snapshots])

# %% [markdown]
# The third request finds 2 full blocks of what it has in common with the second, but no snapshot at their end: it
# starts from 16, runs the rest, and stops at the branch point, 32, for a snapshot. The last request branches there too
# and finds it. **The first to branch pays, the next one saves.** A common system prompt works the same way: its end is
# where the second user branches, and from the third user on it costs nothing. (This model has learned no system prompt,
# so a shared first turn stands in.)
#
# (The second has less in common with the first than its whole conversation, although it continues it: the chat frame
# leaves the thoughts out of earlier answers, so the tokens differ from there on.)
#
# Is a snapshot worth its bytes? It has one size; the keys and values of the prefix that it completes grow with each
# token. **Predict:** at how many tokens are they equal, for the tiny model and for the 0.8B one?

# %%
TINY = hybrid("tiny", model.config, element_bytes=4)
for shape in (TINY, QWEN_0_8B):
    equal = shape.fixed_bytes / shape.kv_bytes
    print(f"{shape.name:13} snapshot {shape.fixed_bytes:10,} bytes, a token {shape.kv_bytes:6,}: "
          f"as much as {equal:5.0f} tokens of keys and values")
one = engine.cache.rows([0])                            # a row's window and matrices, as they are copied
assert sum(t.nbytes for kept in (one.conv, one.recurrent) for t in kept.values()) == TINY.fixed_bytes
for tokens in (16, 64, 1000, 10_000):
    kv, extra = tokens * QWEN_0_8B.kv_bytes / 1e6, QWEN_0_8B.fixed_bytes / 1e6
    print(f"{tokens:6,} tokens: {kv:6.1f} MB in blocks + {extra:.1f} MB = {kv + extra:6.1f} MB; "
          f"the snapshot is {extra / (kv + extra):4.0%}, {tokens / (kv + extra):5.1f} tokens saved a MB")

# %% [markdown]
# A snapshot after every block of 16 would cost the 0.8B model a hundred times the block. Taken at the end of long
# prefixes that come again, it is small change, and without it the blocks are worth nothing. That is why snapshots have
# a budget of their own (`num_snapshots`) and why *where* matters.
#
# ## Eviction
#
# A block that nobody holds is free, but its contents stay until somebody else needs the place. The free ones form a
# queue, the longest unused first to go. A row gives its last block back first: a prefix is found from its start, so its
# end is what one can do without. **Predict** which blocks are handed out at the end.
#
# Then on the engine: a chat comes back after a pause. In between another user comes, with a short row, or with one that
# needs the whole pool. And two users in turns, with room for no snapshot, for one, for two. **Predict** how many tokens
# are reused each time.

# %%
gone = []
pool = BlockPool(num_blocks=6, block_size=8, forget=gone.append)
first, other = pool.allocate(3), pool.allocate(2)
gone.clear()
pool.free(first[::-1])                                  # first leaves, its last block in front
pool.free(other[::-1])
print("first had", first, "other had", other, "- the queue of free ones:", list(pool.queue))
print("allocate 4:", pool.allocate(4), "- contents lost:", gone)


def again(between, prompt=encode("What is the capital of Spain?")):
    """Tokens reused by a prompt's second run, with another prompt between."""
    engine = Engine(model, block_size=8, num_blocks=8, enable_prefix_caching=True)
    for ids in (prompt, between, prompt):
        engine.generate([Request(ids, 2)])
        assert engine.pool.num_used == 0                # nobody holds anything between requests
    return list(engine.sequences.values())[-1].reused


print("reused after a short row:", again(encode("Say hello.")),
      "- after one of 61 tokens:", again(requests["+ Japan"]))

# %%
users = {"A": encode("What is the capital of Spain?"), "B": encode("Why does the Moon shine?")}
turns = {f"{user}{n}": prompt for n in (1, 2, 3) for user, prompt in users.items()}
for budget in (0, 1, 2):
    reused = {s.id: s.reused for s in serve(8, budget, turns)[0]}
    print(f"{budget} snapshots, A and B in turns: reused {reused}")

# %% [markdown]
# With one place for a snapshot, each user throws out the other's just before it is wanted: a budget one too small saves
# nothing at all. That is the worst case of every cache that drops the longest unused.
#
# ## Preemption
#
# Blocks taken on demand can run out while rows are running. Then somebody has to go: the engine takes the row its
# policy ranks last, frees its blocks and puts it back into the queue with its tokens. Later everything is computed
# again. Four questions and 9 blocks of 8, which is little. **Predict:** is any answer different?
#
# A request that could *never* fit is another matter: waiting would not help, and it would block those behind it. It is
# refused when it is added (second cell). Pool of 4 blocks of 4; a prompt of 17; a prompt of 10 with 20 new tokens; and
# a small one behind each.

# %%
questions = {"A": "What is the capital of Spain?", "B": "Is Rome in Spain?",
             "C": "Why does the Moon shine?", "D": "What is 5 times 6?"}
for blocks in (32, 9):
    engine = Engine(model, max_num_seqs=4, block_size=8, num_blocks=blocks)
    new = engine.generate([Request(encode(q), 40, chat.stop, id=name) for name, q in questions.items()])
    useful, computed = (sum(getattr(r, what) for r in engine.records) for what in ("useful", "computed"))
    print(f"{blocks} blocks: {len(engine.records)} steps, {useful} tokens useful, {computed} computed, "
          f"equal solo: {new == [solo(encode(q)) for q in questions.values()]}")
for r in engine.records:
    if r.admitted or r.preempted or r.finished:
        print(f"  step {r.step:2}: ran {r.rows}, {r.blocks_used} blocks"
              + "".join(f", {what} {', '.join(names)}" for what, names in
                        (("in:", r.admitted), ("out:", r.preempted), ("done:", r.finished)) if names))

# %%
engine = Engine(model, block_size=4, num_blocks=4)
for name, prompt, new in (("17 tokens", prompt[:17], 1), ("10 and 20", prompt[:10], 20)):
    try:
        engine.add(Request(prompt, new, id=name))
    except ValueError as error:
        print(error)
    print(f"   the small one behind it: {len(engine.generate([Request(prompt[:3], 5)])[0])} tokens, "
          f"{engine.pool.num_used} blocks used at the end")

# %% [markdown]
# Preemption loses nothing but time: C's 3 new tokens and its prompt are run again as one prefill, which is cheap
# compared with the steps that made them one by one.
#
# ## Which block size?
#
# Small blocks waste less and share finer. Large ones make shorter tables, and a gather of fewer, longer pieces. Count
# all three on the lengths of the first section and the six requests above.
#
# **Predict:** which of the three moves most between 1 and 16, and which between 16 and 64?

# %%
sizes = (1, 2, 4, 8, 16, 32, 64)
empty, entries, reused = [], [], []
for size in sizes:
    blocks = [-(-n // size) for n in lengths]
    empty.append(1 - sum(lengths) / (sum(blocks) * size))
    entries.append(sum(blocks) / len(blocks))
    reused.append(sum(s.reused for s in serve(size, limit=1)[0]))
    print(f"blocks of {size:2}: {empty[-1]:3.0%} of the slots empty, {entries[-1]:4.1f} pieces a row "
          f"of {size * TINY.kv_bytes:6,} bytes, {reused[-1]:3} of {prompt_tokens} prompt tokens reused")
assert empty[0] == 0 and empty == sorted(empty) and entries == sorted(entries, reverse=True)

fig, axes = plt.subplots(1, 3, figsize=(9.5, 2.8))
for ax, numbers, title in zip(axes, ([100 * x for x in empty], entries, reused),
                              ("empty slots, %", "table entries a row", "prompt tokens reused")):
    ax.plot(range(len(sizes)), numbers, "-o", color=figures.COLORS["measured"])
    ax.set(title=title, xlabel="block size", ylim=(0, None))
    ax.set_xticks(range(len(sizes)), sizes)
figures.show(fig, f"Three curves over block sizes {sizes}. Empty slots in percent: "
                  f"{[round(100 * x) for x in empty]}. Table entries a row: "
                  f"{[round(x, 1) for x in entries]}. Prompt tokens reused: {reused}.")

# %% [markdown]
# These rows are short, so 64 is too much here; on rows of thousands the empty end of the last block does not show, and
# tables of single slots would. 16 is where most of both is gained, and engines begin there.
#
# Did you expect the third curve to fall all the way? In a model of attention alone it would. Here the place of the
# snapshots counts too: *+ Japan + Italy* has 55 tokens in common with *+ Japan*, a prompt of 61. Blocks of 16 put that
# prompt's snapshot at 48, inside; blocks of 8 at 56, one token too late, and it cannot be cut back.
#
# ## Capacity with a fixed part
#
# A dense model's row costs bytes in proportion to its tokens. A hybrid's row costs a fixed amount, and then less for
# each token: **affine**, not proportional. Compare the 0.8B shape with a model of the same weights whose 24 layers all
# kept keys and values (an invention, to have one difference only), in the memory of an L4.
#
# **Predict:** ten times the tokens, a tenth of the rows? For which of the two, and where do they cross?

# %%
ALL_FULL = replace(QWEN_0_8B, name="all 24 layers full", kv_bytes=4 * QWEN_0_8B.kv_bytes,
                   recurrent_bytes=0, window_bytes=0)
L4 = HARDWARE["L4"]
cross = QWEN_0_8B.fixed_bytes / (ALL_FULL.kv_bytes - QWEN_0_8B.kv_bytes)
counts = (16, 64, 256, 512, 1024, 4096, 16384, 65536)
fits = {shape.name: [rows_in_memory(shape, L4, n, usable=0.9) for n in counts]
        for shape in (QWEN_0_8B, ALL_FULL)}
print("tokens a row:      ", *(f"{n:7,}" for n in counts))
for name, numbers in fits.items():
    print(f"{name:19}", *(f"{n:7,}" for n in numbers))
print(f"they cross at {cross:.0f} tokens; for 64 times the tokens (64, 4,096) the hybrid has "
      f"{fits[QWEN_0_8B.name][1] / fits[QWEN_0_8B.name][5]:.1f} times fewer rows, the other "
      f"{fits[ALL_FULL.name][1] / fits[ALL_FULL.name][5]:.1f} times")

# %%
fig, ax = plt.subplots()
for (name, numbers), line, meaning in zip(fits.items(), ("-o", "--s"), ("measured", "predicted")):
    ax.plot(counts, numbers, line, color=figures.COLORS[meaning], label=name)
ax.set(xscale="log", yscale="log", title="24 GB", xlabel="tokens a row", ylabel="rows that fit")
ax.legend()
figures.show(fig, f"Rows that fit over tokens a row, {counts}: {fits}. The hybrid's curve falls slowly "
                  f"up to about a thousand tokens; the other in a straight line from the start. "
                  f"They cross at {cross:.0f}.")

# %% [markdown]
# Short rows are what a hybrid is bad at: each brings its matrices, even for ten tokens. An engine therefore has two
# limits, blocks *and* places for states; here `num_blocks` and `max_num_seqs`. Your own numbers:

# %%
def in_words(gigabytes, tokens, block_size):
    """Rows that fit beside the weights: the hybrid's, and those with full attention everywhere."""
    words = []
    for shape in (QWEN_0_8B, ALL_FULL):
        room = max(0, gigabytes * 10 ** 9 - shape.weight_bytes)
        slots = -(-tokens // block_size) * block_size
        rows = room // (shape.fixed_bytes + slots * shape.kv_bytes)
        words.append(f"{shape.name}: {rows:,} rows, of a row's bytes "
                     f"{shape.fixed_bytes / (shape.fixed_bytes + slots * shape.kv_bytes):.0%} fixed")
    return f"{gigabytes} GB, {tokens:,} tokens a row, blocks of {block_size}. " + "; ".join(words) + "."


controls, sliders, text = widgets.play(in_words, gigabytes=(2, 80, 24), block_size=[16, 1, 64, 544],
                                       tokens=[1000, 10, 100, 530, 10_000, 100_000])
controls

# %%
for gigabytes, tokens, block_size in ((24, 10, 16), (24, 530, 1), (24, 10_000, 16), (24, 10, 544)):
    sliders["gigabytes"].value, sliders["tokens"].value = gigabytes, tokens
    sliders["block_size"].value = block_size
    print(text.value)
state, per_token = QWEN_0_8B.fixed_bytes // 18, QWEN_0_8B.kv_bytes // 6  # of one layer, bytes
print(f"a linear layer's state {state:,} bytes, a token in an attention layer {per_token:,}: "
      f"{state / per_token:.0f} tokens, in multiples of 16: {-(-state // per_token // 16) * 16}")

# %% [markdown]
# The last line explains the 544. An engine that keeps states and blocks in *one* pool of equal pages makes a block of
# one attention layer as large as the state of one linear layer. That costs a prompt of 500 tokens its prefix hits,
# because no block is ever full: a trade-off that you can now read out of a log.
#
# ## Your turn
#
# Replace the dots, run the cell, and `check` tells you at once.
#
# **08.1** The slots of a row's first `length` tokens, as a list. `table` is its block table.
#
# <details><summary>Solution</summary>
#
# ```python
# def my_slots(table, length, size):
#     return [table[t // size] * size + t % size for t in range(length)]
# ```
# </details>

# %%
def my_slots(table, length, size):
    ...


_ = check("08.1", my_slots)

# %% [markdown]
# **08.2** Rows of `lengths` tokens lie in blocks of `size`. How many slots are taken and empty?
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


_ = check("08.2", my_waste)

# %% [markdown]
# **08.3** A row holds `length` tokens and gets `new` more. How many blocks must it take first? (None is shared.)
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


_ = check("08.3", my_missing)

# %% [markdown]
# **08.4** Row A has 20 tokens in blocks of 8. B and C are forked from it. Then B gets a token, then C, then A. How many
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
_ = check("08.4", blocks_in_use)

# %% [markdown]
# **08.5** How many tokens can a hybrid reuse? `cached` are the tokens of an earlier row whose full blocks of `size` are
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


_ = check("08.5", my_reuse)

# %% [markdown]
# ## In an interview
#
# > Reserving the longest possible row wastes most of the KV memory, so it is cut into blocks of, say, 16 tokens, taken
# > when a token needs one; a block table maps position to slot, attention gathers through it, and at most one block of
# > a row is partly empty. Blocks have reference counts: forks and equal prefixes share them, a shared block is copied
# > before it is written, and when the pool runs dry a row is preempted and computed again. On a hybrid the blocks are
# > half of a prefix: the recurrent state cannot be cut back, so reuse needs a snapshot, which costs as much as hundreds
# > of tokens and is worth it at the end of long prefixes that come again.
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
