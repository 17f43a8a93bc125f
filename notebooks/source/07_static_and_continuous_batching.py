# %% [markdown]
# # 07 Static and continuous batching
#
# One user asks a question that ten tokens answer. Beside it, in the same batch, another asks for a poem. When does
# the first user's seat become free for the next one, and what is computed in it until then?
#
# A batch that is put together once keeps its seats until its longest answer ends. A batch that is put together *again
# in every step* gives a seat away the moment it is free. In this chapter you write that loop in under 25 lines,
# compare it with the engine of this package on real text, repair a batcher with four bugs, keep a long prompt from
# holding up everybody else, and choose who goes first without letting anybody starve.
#
# It runs in about 20 seconds on two cores and needs nothing but this repository; chapters 03, 05 and 06 come first.
# Words and symbols are listed in the [glossary](GLOSSARY.md). Several cells ask for a prediction. The outputs are
# already below them: to predict honestly, choose *Edit > Clear Outputs of All Cells* first.

# %%
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch

from qwen import figures, roofline
from qwen.cache import State
from qwen.chat import Chat, build_prompt
from qwen.engine import AGING, PATIENCE, Engine, Request, StaticBatcher
from qwen.exercises import check
from qwen.model import Model
from qwen.sample import generate
from qwen.weights import find_model
from qwen.widgets import play

figures.setup()
_ = torch.set_grad_enabled(False)
path = find_model()
model = Model.from_pretrained(path, device="cpu", dtype=torch.float32)
chat = Chat(model, path)


# %% [markdown]
# ## The seat that sits empty
#
# A place in the batch is a **seat**; whoever sits in it is a row. **Static batching** seats as many users as fit,
# runs all of them until the last has ended, and only then seats the next. Below are eight users, for four seats. User
# A may have 10 tokens, all others as many as the model writes until its stop token, which counts as one.

# %%
QUESTIONS = {
    "A": "What is the capital of France?", "B": "Write a poem about a cat.",
    "C": "Why does batching help?", "D": "Write a poem about the sea.", "E": "Is Rome in Spain?",
    "F": "What is continuous batching?", "G": "What is decode?", "H": "Which animal is the largest?"}


def ask(question):
    """The tokens of a question, in the frame that the model was trained in."""
    return chat.tk.encode(build_prompt([{"role": "user", "content": question}])).ids


def text(tokens):
    return chat.tk.decode(tokens)


def solo(prompt, most):
    """What the model answers to this prompt alone: the truth that every schedule is held against."""
    return generate(model, torch.tensor([prompt]), most, stop=chat.stop)


users = {name: (ask(question), 10 if name == "A" else 120) for name, question in QUESTIONS.items()}
alone = {name: solo(*user) for name, user in users.items()}
for name, answer in alone.items():
    print(f"{name}: {len(answer):3} tokens, {text(answer)[:80]!r}{' …' * (len(text(answer)) > 80)}")

# %% [markdown]
# Here is the first batch, step by step, with nobody allowed to leave. Steps are counted from 0, as the engine below
# counts them: A's ten tokens come in steps 0 to 9. The model does not know that A is done, so it goes on.
# **Predict:** what stands in A's seat from step 10 on? Of all tokens computed, how many are in somebody's answer?

# %%
state, seats = State(model, 4), "ABCD"
cu_seqlens = torch.tensor([0, *(len(users[name][0]) for name in seats)]).cumsum(0)
flat = torch.tensor(sum((users[name][0] for name in seats), []))            # (N,): four prompts
logits = model.ragged(flat, cu_seqlens, state, last_only=True)              # (B, vocab)
written = {name: [token] for name, token in zip(seats, logits.argmax(-1).tolist())}
while len(written["B"]) < len(alone["B"]):
    fed = torch.tensor([[written[name][-1]] for name in seats])             # (B, 1): the last tokens
    for name, token in zip(seats, model(fed, state)[:, -1].argmax(-1).tolist()):
        written[name].append(token)

print("A, steps 0 to 9:", repr(text(written["A"][:10])))
print(f"A, steps 10 to {len(written['A']) - 1}: {len(written['A']) - 10} more tokens, none of them A's; "
      "the first is", repr(chat.tk.decode(written["A"][10:11], skip_special_tokens=False)))
print("B, all steps:   ", repr(text(written["B"])))
assert all(written[name][:len(alone[name])] == alone[name] for name in seats)
useful, computed = sum(len(alone[name]) for name in seats), 4 * len(written["B"])
print(f"in the answers: {useful} tokens; computed: {computed}; {100 * useful // computed} % useful")

# %% [markdown]
# It is often said that the seat "sits empty" or that it "keeps generating pad tokens". Nothing sits empty: the row
# **rides along**. Whether it is fed pads, its last token or what it writes next changes nothing in the bill. The row
# goes through every matrix, and what comes out is thrown away.
#
# ## One update per iteration
#
# **Continuous batching** decides anew in every step, which is why it is also called *iteration-level scheduling*
# (Orca: Yu et al. 2022). One iteration is four lines of thought:
#
# 1. **admit**: whoever waits takes a free seat, and brings the whole prompt as fresh tokens;
# 2. **forward**: one pass over all fresh tokens, flat (chapter 03's ragged step): prompts and single tokens together;
# 3. **give** each row its next token;
# 4. **leave**: whoever has ended frees the seat, *now*, not when the others have ended.
#
# **Predict:** two fixed batches, A to D and E to H, take as many steps as the longest answer of each. How many does
# the loop take? And are the answers still the ones each user would get alone?

# %%
def serve(users, number):
    """users: {name: (prompt, most new tokens)} -> ({name: answer}, the seats of each step)."""
    waiting, seats, fresh = list(users), [None] * number, [[]] * number
    answers, taken, state = {name: [] for name in users}, [], State(model, number)
    while waiting or any(seats):
        for s in range(number):                                 # 1. admit
            if seats[s] is None and waiting:
                seats[s] = waiting.pop(0)
                fresh[s] = users[seats[s]][0]
                state.reset(s)                                  # nothing of the last user stays
        taken.append(list(seats))
        cu_seqlens = torch.tensor([0, *map(len, fresh)]).cumsum(0)                      # 2. one forward
        logits = model.ragged(torch.tensor(sum(fresh, [])), cu_seqlens, state)       # (N, vocab)
        for s, name in enumerate(seats):
            if name is not None:
                answers[name].append(logits[cu_seqlens[s + 1] - 1].argmax().item())     # 3. a token each
                fresh[s] = answers[name][-1:]
                if fresh[s][0] in chat.stop or len(answers[name]) == users[name][1]:    # 4. leave
                    seats[s], fresh[s] = None, []
    return answers, taken


# %%
answers, taken = serve(users, 4)
assert answers == alone
outputs = {name: len(answer) for name, answer in alone.items()}
static_steps = max(outputs[name] for name in "ABCD") + max(outputs[name] for name in "EFGH")
print(f"continuous: {len(taken)} steps, two fixed batches: {static_steps} steps; "
      "every answer equals its solo run")
for step in (0, 9, 10, 11, 12):
    print(f"step {step:2}: seats {taken[step]}")
print("E:", repr(text(answers["E"])), "  F:", repr(text(answers["F"])))

# %% [markdown]
# A leaves after step 9, and E, who asked *Is Rome in Spain?*, sits down in step 10 and is gone after step 11. Under
# static batching E waits for B's poem. That is **head-of-line blocking**: a short job stuck behind a long one that it
# has nothing to do with.
#
# ## The engine
#
# `qwen/engine.py` is the same loop with what a server needs: a budget of tokens for each step, a cache cut into
# blocks (chapter 08), policies, and a record of each step: who sat where, and how many tokens of each row ran. Its
# `StaticBatcher` is static batching with the same bookkeeping. Both take the same `Request`s and use the same forward
# pass; only the decision who sits where is different.
#
# The picture is drawn from these records. A tall box reads a prompt, a low one in the user's colour decodes, hatched
# rides along, blank is nobody's. (Four colours for eight users: E to H have those of D to A.) **Predict:** where will
# you see E in the two halves?

# %%
def requests(users):
    """A Request for each user."""
    return [Request(prompt, most, chat.stop, id=name) for name, (prompt, most) in users.items()]


static, engine = StaticBatcher(model, max_num_seqs=4), Engine(model, max_num_seqs=4)
for batcher in (static, engine):
    assert batcher.generate(requests(users)) == list(alone.values())
assert [list(record.seats) for record in engine.records] == taken       # the loop above, seat for seat

fig, axes = plt.subplots(2, 1, figsize=(9.5, 4.6), sharex=True)
alts = []
for ax, name, batcher in zip(axes, ("static", "continuous"), (static, engine)):
    title = f"{name}: {len(batcher.records)} steps"
    counts = figures.timeline(ax, batcher.records, title, len(static.records), dict(zip("EFGH", "DCBA")))
    alts.append(f"{title}, " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
axes[0].set_xlabel("")
figures.show(fig, "Four seats over the steps, under both batchers. Seats in steps, by what they did: "
                  + "; ".join(alts) + ". Static: E to H start when B has ended. "
                  "Continuous: each starts when a seat is free.")

# %% [markdown]
# The figures that people compare can be read from such records. *Latency* is counted in steps here, from a request's
# arrival up to the step that gave its last token, that one counted; the time *to the first token* likewise.
# *Occupancy* is the share of seats, over all steps, that worked for somebody's answer. *p50* is the latency that half
# of the requests keep to, *p99* the one that 99 of 100 keep to: the *tail*. Of a few requests that is the slowest.
#
# The load is 18 questions, one every four steps; the static batcher starts a batch with whoever is there when the last
# one has ended. Counting needs no answers, only their lengths, so from here on a model of one layer of zeros fills
# the seats where nobody reads the text. **Predict:** which of the columns improves most?

# %%
MORE = ["Write a short poem about snow.", "Why do we have seasons?", "Say hello.",
        "What is the capital of Spain?", "Can a bat fly?", "What does a cow eat?",
        "Is the Earth flat?", "What is the capital of Canada?",
        "Why does the Moon shine?", "What is the opposite of hot?"]
right = alone | {question: solo(ask(question), 120) for question in MORE}
right = dict(random.Random(7).sample(list(right.items()), len(right)))      # in another order
mean = sum(map(len, right.values())) / len(right)
print(f"{len(right)} questions, {mean:.0f} tokens of answer on average")
shape = replace(model.config, hidden_size=8, num_hidden_layers=1, layer_types=("full_attention",))
counter = Model(shape)
for weight in counter.parameters():
    weight.zero_()


def percentile(values, p):
    """The smallest of the values that at least p percent of them do not exceed."""
    return sorted(values)[-(-len(values) * p // 100) - 1]


# %%
print("            steps  occ. %   latency: mean  p50  p99   first token: mean  p50  p99")
for name, kind in (("static", StaticBatcher), ("continuous", Engine)):
    batcher = kind(counter, max_num_seqs=4)
    batcher.generate([Request(ask(QUESTIONS.get(key, key)), len(answer), id=key, arrival=4 * n)
                      for n, (key, answer) in enumerate(right.items())])
    done, steps = list(batcher.sequences.values()), len(batcher.records)
    line = [steps, 100 * sum(len(s.new) for s in done) // (4 * steps)]
    for values in ([s.latency for s in done], [s.time_to_first_token for s in done]):
        line += [round(sum(values) / len(values), 1), percentile(values, 50), percentile(values, 99)]
    print(f"{name:10}", *(f"{value:{width}}" for value, width in zip(line, (6, 7, 17, 4, 4, 19, 4, 4))))
    worst = max(done, key=lambda s: s.time_to_first_token)
    print(f"           longest wait for a first token: {worst.time_to_first_token} steps, {worst.id!r}")

# %% [markdown]
# The median wait for the first token improves most, from 96 steps to 1: half of the users are seated at once. So
# "batching helps throughput, not latency" is half of the story. Against a *static* batch, continuous batching improves
# both, because most of what a user waits for there is other people's tokens.
#
# **How many steps at most?** 64 requests are all there at the start, answers of 1 to 64 tokens, 8 seats, and neither
# blocks nor budget are short. As long as somebody waits, all 8 seats work. So when the last request sits down at most
# (sum of answers) / 8 steps have passed, and from then on it takes at most the longest answer. **By hand:** what is
# the bound for 1 + 2 + … + 64?

# %%
lengths = list(range(1, 65))
random.Random(0).shuffle(lengths)
steps = {}
for name, batcher in (("static", StaticBatcher(counter, 8)), ("continuous", Engine(counter, 8))):
    batcher.generate([Request(ask("Say hello.")[:1 + n % 7], n) for n in lengths])
    steps[name] = len(batcher.records)
bound = -(-sum(lengths) // 8) + max(lengths)
print(f"{sum(lengths)} tokens: continuous {steps['continuous']} steps, "
      f"at most {-(-sum(lengths) // 8)} + {max(lengths)} = {bound}; static {steps['static']} steps")
assert steps["continuous"] <= bound < steps["static"]
assert steps["static"] == sum(max(lengths[i:i + 8]) for i in range(0, 64, 8))

# %% [markdown]
# ## A batcher with four bugs
#
# A short continuous batcher goes round that looks right and is wrong in four places. Here is a version of it on a
# fixture that shows the damage: the cache is a Python dict from slots to tokens, and the "model" answers with the sum
# of all tokens that a row finds in its slots, modulo 1000. None of its own may be missing in that sum, and nobody
# else's may be in it. A block is 4 slots; a row's `blocks` say where its tokens lie, as chapter 03's table does. The
# three users' tokens are far apart, so that a wrong sum shows whose it is.
#
# **Predict:** read the next two cells once before you run them. How many of the four do you find?

# %%
class Toy:
    """The fixture: a pool of blocks, a memory, and a forward pass."""

    def __init__(self, number=2, blocks=12, size=4):
        self.number, self.size, self.free, self.memory = number, size, list(range(blocks)), {}
        self.waiting, self.running = [], []

    def take(self, count):
        if count > len(self.free):
            raise RuntimeError(f"the pool is empty: {count} blocks wanted, {len(self.free)} free")
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def slot(self, row, p):
        return row.blocks[p // self.size] * self.size + p % self.size

    def forward(self, row, tokens):
        for token in tokens:
            self.memory[self.slot(row, row.position)] = token
            row.position += 1
        return sum(self.memory.get(self.slot(row, p), 0) for p in range(row.position)) % 1000


# %%
class Batcher(Toy):
    """Continuous batching. Wrong in four places."""

    def step(self):
        self.leave()
        while self.waiting and len(self.running) < self.number:
            row = self.waiting.pop(0)
            row.blocks = self.take(-(-(len(row.prompt) + 1) // self.size))  # the prompt and one token
            row.position = len(row.prompt) - 1                              # where the next token goes
            self.running.append(row)
        for row in self.running:
            row.answer.append(self.forward(row, self.feed(row)))
            row.finished = self.done(row)

    def leave(self):
        self.running = [row for row in self.running if not row.finished]
        for row in self.running:
            if row.finished:
                self.free = row.blocks + self.free

    def feed(self, row):
        return (row.prompt + row.answer)[-1:]

    def done(self, row):
        return row.position >= row.most


# %%
FIXTURE = {"A": ([10, 20, 30], 6), "B": ([101, 102, 103, 104, 105, 106], 3), "C": ([7], 9)}


def trial(kind, **more):
    """Run the fixture and print what each user got, the truth, and what the pool lacks at the end."""
    batcher = kind(**more)
    blocks = len(batcher.free)
    rows = {name: SimpleNamespace(prompt=prompt, most=most, answer=[], finished=False)
            for name, (prompt, most) in FIXTURE.items()}
    batcher.waiting = list(rows.values())
    try:
        while not all(row.finished for row in rows.values()):
            batcher.step()
        batcher.leave()
    except (IndexError, RuntimeError) as error:
        return print(f"  {type(error).__name__}: {error}")
    for name, row in rows.items():
        truth = []
        while len(truth) < row.most:
            truth.append(sum(row.prompt + truth) % 1000)
        print(f"  {name}: {'right' if row.answer == truth else 'WRONG'} {row.answer}, expected {truth}")
    print(f"  blocks lost: {blocks - len(batcher.free)} of {blocks}")


trial(Batcher)

# %% [markdown]
# **Bug 1: nobody takes a block when a row grows across a block's end.** The blocks taken at the start hold the prompt
# and one token. A's 3 + 1 tokens fill one block, and the next has no place. Python raises, above; a GPU kernel that
# does not check the index would read past the end of the table and write into somebody's block. So a row takes what
# its next tokens need, before they run:

# %%
class Grows(Batcher):
    def feed(self, row):
        tokens = super().feed(row)
        need = -(-(row.position + len(tokens)) // self.size)
        row.blocks += self.take(max(0, need - len(row.blocks)))
        return tokens


print("rows grow:")
trial(Grows)
print("rows grow, in a pool of 6 blocks:")
trial(Grows, blocks=6)

# %% [markdown]
# Three bugs are left, and you see all of them: blocks that never came back, too few tokens for A and B, wrong sums.
#
# **Bug 2: no block is ever freed.** `leave` first throws the finished rows out of `running`, then looks for finished
# rows *in* `running`. There are none. Nothing fails until the pool is empty. Free first, filter afterwards.
#
# **Bug 3: the position is held against `max_tokens`.** A position counts the prompt too. B's prompt has 6 tokens and
# B may get 3 new ones: after the first, the position is 6, and 6 ≥ 3. Count the answer instead. **Predict:** with
# `max_tokens` 10, how many tokens does the wrong rule give to a prompt of 2, of 6, of 100?

# %%
for prompt in (2, 6, 100):
    given = next(n for n in range(1, 11) if prompt - 1 + n >= 10)       # the position after n tokens
    print(f"prompt of {prompt:3}, max_tokens 10: the wrong rule gives {given} tokens")


class Counts(Grows):
    def leave(self):
        for row in self.running:
            if row.finished:
                self.free = row.blocks + self.free
        self.running = [row for row in self.running if not row.finished]

    def done(self, row):
        return len(row.answer) >= row.most


print("blocks come back, answers are counted, in a pool of 6 blocks:")
trial(Counts, blocks=6)

# %% [markdown]
# **Bug 4: the prompt is never read.** `feed` hands over the last token and no other, so the slots before it hold what
# was there: nothing, or what an *earlier owner* left. C is right, its prompt is one token. A row's first step has to
# feed the whole prompt.
#
# **Predict:** one seat and few blocks, so that B gets the blocks that A had, with A's 30 and A's first two answers
# still in them. What is B's first answer, with its own last token, 106?

# %%
print("one seat, few blocks, no prompt read:")
trial(Counts, number=1, blocks=3)


class Prefills(Counts):
    def feed(self, row):
        if row.answer:
            return super().feed(row)
        row.position = 0
        return row.prompt


print("all four repaired, one seat, few blocks:")
trial(Prefills, number=1, blocks=3)
print("all four repaired:")
trial(Prefills)

# %% [markdown]
# B's 226 was 106 + 30 + 30 + 60: an answer made of another user's tokens, the worst fault a server can have, from a
# line that is not there.
#
# **Two slips in a description of serving.** It says: eight requests run, one ends, and *two* enter. And its long
# request, which has `max_tokens` 500 in the text and 2000 in the JSON, makes a static batch "wait for 2000 steps".
# But `max_tokens` is a limit, not a length. **Predict:** ten requests, eight seats, A ends after step 9: how many
# enter in step 10? How many steps does B's poem take with a limit of 500? What does the engine say to 2000, on a
# model with a context of 1,024?

# %%
eight, letters = Engine(counter, max_num_seqs=8), "ABCDEFGHIJ"
eight.generate([Request(ask("Say hello."), 10 if name == "A" else 20, id=name) for name in letters])
for record in eight.records[9:11]:
    print(f"step {record.step:2}: {record.batch_size} rows, entered {list(record.admitted)}, "
          f"ended {list(record.finished)}, still waiting {record.queue_depth}")
for name, kind in (("static", StaticBatcher), ("continuous", Engine)):
    batcher = kind(model, max_num_seqs=8)
    batcher.generate(requests({"A": users["A"], "B": (users["B"][0], 500)}))
    ends = {s.id: s.latency for s in batcher.sequences.values()}
    print(f"max_tokens 500, {name:10}: steps until they had ended {ends}, "
          f"blocks taken at most {max(r.blocks_used for r in batcher.records)}")
try:
    eight.add(Request(users["B"][0], 2000, id="B"))
except ValueError as error:
    print("max_tokens 2000:", error)

# %% [markdown]
# One seat, one newcomer. And the answer ends where it ends. What the limit does cost is *room*, where a batcher
# reserves for the longest possible answer, as the static one does; that is chapter 08.
#
# ## A long prompt and the stall it makes
#
# Three users are reading their answers, a token a step. A fourth comes with a long conversation. Its prefill has to
# happen, and everybody's next token comes out of the same step, so everybody waits until that step is done.
#
# With **chunked prefill** (Agrawal et al. 2023) a step has a *budget* of tokens, `max_num_batched_tokens`. Each row
# that decodes takes one, and what is left goes to the prompt, a chunk in each step. (Chapter 04 cuts a prompt by
# hand.)
#
# **Predict:** with a budget of 64, how many steps does the prompt below take beside three decoders?

# %%
talk = []
for name in "DCBFGH":
    talk += [{"role": "user", "content": QUESTIONS[name]},
             {"role": "assistant", "content": text(alone[name])}]
talk += [{"role": "user", "content": "What is the capital of Spain?"}]
long = chat.tk.encode(build_prompt(talk)).ids
truth = solo(long, 20)
print(f"L's prompt: {len(long)} tokens, its answer: {text(truth)!r}")


def beside_decoders(budget, chunked=True):
    """C, D and F decode; L comes at step 10: the engine, after all have ended."""
    batcher = Engine(model, 4, budget, enable_chunked_prefill=chunked)
    coming = requests({name: users[name] for name in "CDF"})
    coming += [Request(long, 20, chat.stop, id="L", arrival=10)]
    assert batcher.generate(coming) == [alone["C"], alone["D"], alone["F"], truth]
    return batcher


chunking = {"whole": beside_decoders(256, False), "64": beside_decoders(64), "16": beside_decoders(16)}

# %%
print("budget  most tokens in a step in which C decodes   L's first token   all steps   all tokens")
fig, axes = plt.subplots(1, 3, figsize=(9.5, 2.8), sharey=True)
for ax, (name, batcher) in zip(axes, chunking.items()):
    gap, L = max(r.computed for r in batcher.records if r.rows.get("C") == 1), batcher.sequences["L"]
    print(f"{name:>6} {gap:34} {L.time_to_first_token:20} steps {len(batcher.records):10}"
          f"{sum(r.computed for r in batcher.records):12}")
    records = batcher.records[6:60]                     # from where C, D and F all decode
    read = [r.rows.get("L", 0) * (r.step <= L.first_token) for r in records]
    ax.bar([r.step for r in records], read, 1, color=figures.COLORS["D"], label="L's prompt")
    ax.bar([r.step for r in records], [r.computed - n for r, n in zip(records, read)], 1, read,
           color=figures.COLORS["A"], label="all others")
    ax.text(12, gap + 8, f"at most {gap}")
    ax.set(title="no chunks" if name == "whole" else f"budget {name}", xlabel="step", ylim=(0, 600))
axes[0].set_ylabel("tokens in the step")
axes[2].legend(fontsize=9)
figures.show(fig, "Tokens of each step as bars: L's prompt below, the others on top. Without chunks one "
                  "step towers above all others; with a budget the prompt is a low, wide block. The "
                  "numbers are in the table above.")

# %% tags=["nbval-ignore-output"]
for name, batcher in chunking.items():
    seconds = [r.seconds for r in batcher.records if r.rows.get("C") == 1]
    print(f"{name:>6}: C's longest gap between two tokens {max(seconds) * 1000:5.1f} ms, the usual one "
          f"{sorted(seconds)[len(seconds) // 2] * 1000:.1f} ms")

# %% [markdown]
# Unchunked, one step carries the whole prompt, and C's next token takes as long as that. In chunks, no step exceeds
# the budget: the stall is spread over many steps of bounded length, and L pays with a later first token. The work is
# the same, as the last column shows. A small budget protects those who decode, a large one those who arrive. But it can
# be too small: at 16 the prompt sits in 39 steps, most of those in which C decodes. Then the usual gap grows too, and
# the longest hardly shrinks any more, because a step of a few tokens fetches all the weights as well.
#
# ## Who goes first
#
# Seats are short, so somebody decides who gets the next one. That rule is the **policy**. *fcfs*, first come first
# served, needs no explanation. *priority* lets the important go first, a smaller number meaning more important. The
# obvious way to write it has a hole.
#
# `simulate` is the batcher reduced to counting: a job takes a seat for as many steps as its answer has tokens. `rank`
# says who goes first. The cell checks it against the engine's run of the 18 questions from above.

# %%
def simulate(jobs, number, rank=lambda arrival, priority: arrival):
    """jobs: (arrival, steps, priority) -> (when each sits down, how many wait after each step)."""
    start, free_at, depth, step = [None] * len(jobs), [0] * number, [], 0
    while None in start or step < max(free_at, default=0):
        waiting = [n for n, job in enumerate(jobs) if start[n] is None and job[0] <= step]
        waiting.sort(key=lambda n: (rank(jobs[n][0], jobs[n][2]), n))
        for seat in range(number):
            if free_at[seat] <= step and waiting:
                n = waiting.pop(0)
                start[n], free_at[seat] = step, step + jobs[n][1]
        depth.append(len(waiting))
        step += 1
    return start, depth


jobs = [(4 * n, len(answer), 0) for n, answer in enumerate(right.values())]
start, depth = simulate(jobs, 4)
assert start == [s.admitted for s in done]                      # of the table above, continuous
print(f"{len(depth)} steps, longest queue {max(depth)}; everybody sits down when the engine says")

# %% [markdown]
# **The wrong version: always the lowest number first.** Two seats, answers of 10 tokens, an important request every
# 5 steps: exactly what two seats can do. At step 1 comes a request Z of priority 2, after the first three.
# **Predict:** when does Z get a seat?
#
# The right version is called **aging**: rank by *arrival + AGING · priority*, a sum that is fixed when the request
# arrives. A level of priority is worth a head start of AGING steps and no more. AGING is 16 here, and the stream has
# priority 0. Newcomers have ever larger sums, so at some point all of them rank behind Z. **Predict** its wait, too.
#
# The engine's *priority* policy ages like this, and states a bound: with k requests ranked ahead of one and M tokens
# (prompt and new) in the longest request, it ends at most 2·M·(k + 1) steps after it and those k have come. The bound
# is loose, because it holds for any budget and any pool of blocks. The second cell runs the engine on real text.

# %%
def strict(arrival, priority):
    return priority, arrival


def aging(arrival, priority):
    return arrival + AGING * priority


print("AGING =", AGING)
for stream in (16, 32, 64):
    jobs = [(max(0, 5 * (n - 2)), 10, 0) for n in range(stream)] + [(1, 10, 2)]
    waits = [simulate(jobs, 2, rank)[0][-1] - 1 for rank in (strict, aging)]
    print(f"{stream:2} important requests: Z waits {waits[0]:3} steps under strict priority, "
          f"{waits[1]} with aging")

# %%
def stated(batcher, id):
    """By the engine's bound: (the step by which this request has ended, how many are ranked ahead)."""
    every, own = batcher.sequences.values(), batcher.sequences[id]
    ahead = [s for s in every if s.rank < own.rank]
    longest = max(len(s.request.prompt) + s.request.max_new_tokens for s in every)
    return max(s.arrival for s in [own, *ahead]) + 2 * longest * (len(ahead) + 1), len(ahead)


for stream in (12, 24):
    ranked = Engine(model, max_num_seqs=2, policy="priority")
    bat = ask("Can a bat fly?")
    coming = [Request(bat, 10, id=n, arrival=max(0, 5 * (n - 2))) for n in range(stream)]
    coming.append(Request(ask("Say hello."), 10, chat.stop, id="Z", arrival=1, priority=2))
    assert ranked.generate(coming)[-1] == right["Say hello."]
    z, (bound, ahead) = ranked.sequences["Z"], stated(ranked, "Z")
    print(f"{stream:2} important requests: Z's rank {z.due}, {ahead} ranked ahead, "
          f"seated at step {z.admitted}, ended at {z.finished}, at most {bound}: {text(z.new)!r}")
    assert z.finished <= bound

# %% [markdown]
# Under strict priority Z waits as long as the stream lasts. That is **starvation**: no rule is broken, and somebody
# never gets a turn. With aging the length of the stream does not matter.
#
# **Deadlines.** With *deadline* the rank is the step by which the answer is wanted, at most PATIENCE steps after the
# arrival, so that a request without a deadline ages too. Six users come at once, for two seats; the long ones stand
# first in the queue and have time, the short ones have not. **Predict:** how many does fcfs serve in time?
#
# **The tightest case** is the second cell. A budget of 8, two users who decode, and a stream of prompts of 40 tokens;
# then the reverse, the two coming into the stream. Must anybody stand still? The engine gives each running row at
# least one token in each step, and the first in the policy's order what is left. **Predict:** beside two decoders, at
# most how many prompt tokens does a step read? How many steps at least for 40?

# %%
print("PATIENCE =", PATIENCE)
wanted = {"C": 120, "H": 100, "F": 80, "G": 60, "A": 20, "E": 12}        # step
for policy in ("fcfs", "deadline"):
    timed = Engine(model, max_num_seqs=2, policy=policy)
    coming = [Request(*users[name], chat.stop, id=name, deadline=step) for name, step in wanted.items()]
    assert timed.generate(coming) == [alone[name] for name in wanted]
    met = [name for name, step in wanted.items() if timed.sequences[name].finished <= step]
    print(f"{policy:8}: {len(met)} of {len(wanted)} in time {met}, "
          f"missed {sorted(set(wanted) - set(met))}, {len(timed.records)} steps in all")

# %%
STREAM = ['How do you say "good morning" in Spanish?', "跑得最快的陆地动物是什么？", "哪种鸟不会飞却很会游泳？"]
assert all(len(ask(question)) == 40 for question in STREAM)
truth = [alone["G"], alone["H"], *(solo(ask(question), 20) for question in STREAM)]
for title, decoders, stream in (("decoders first", 0, 8), ("stream first", 8, 0)):
    for policy in ("fcfs", "deadline"):
        tight = Engine(model, 4, 8, policy=policy)
        coming = [Request(*users[name], chat.stop, id=name, arrival=decoders) for name in "GH"]
        coming += [Request(ask(STREAM[n]), 20, chat.stop, id=n, arrival=at, deadline=at + 60)
                   for n, at in enumerate((stream, stream + 4, stream + 8))]
        assert tight.generate(coming) == truth
        idle = sum(not r.rows.get(name) for r in tight.records for name in r.seats if name is not None)
        ends = {s.id: (s.finished, stated(tight, s.id)[0]) for s in tight.sequences.values()}
        most, last = max(r.computed for r in tight.records), max(ends.values())
        read = [r.rows[0] for r in tight.records[stream:tight.sequences[0].first_token + 1]]
        print(f"{title}, {policy}: the first prompt takes {len(read)} steps, of up to {max(read)} "
              f"tokens of it and {most} in all;\n    a row stands still {idle} times, the last one ends "
              f"at step {last[0]}, at most {last[1]}")
        assert most <= 8 and idle == 0 and all(end <= bound for end, bound in ends.values())

# %% [markdown]
# The policy changes who waits, and so it may change how many steps all need together: under *deadline* the longest
# answer started last. It never changes an answer; the cells would have raised an error.
#
# ## More seats
#
# More seats mean more tokens out of each trip of the weights. What do they cost? In *steps*, nothing: a row gets a
# token in each. The price is the length of a step. The tiny model on a CPU says little about that, so here are
# chapter 05's bytes: each step of the 64 requests from above, costed for Llama-3-8B on an H100 with 8,000 tokens of
# history a row.
#
# **Predict:** from 8 seats to 64, what happens to the time between two tokens? To the whole wait?

# %%
H100, llama = roofline.HARDWARE["H100 SXM"], roofline.LLAMA_3_8B
print("seats  steps  tokens/s   ms a token   first token after   whole answer after (means)")
for number in (1, 2, 4, 8, 16, 32, 64):
    start, depth = simulate([(0, n, 0) for n in lengths], number)
    clock, stays = [0.0], list(zip(start, lengths))
    for step in range(len(depth)):
        batch = sum(s <= step < s + n for s, n in stays)
        clock.append(clock[-1] + roofline.step_seconds(llama, H100, batch, 8000))
    first = sum(clock[s + 1] for s in start) / 64
    whole = sum(clock[s + n] for s, n in stays) / 64
    between = sum(clock[s + n] - clock[s] for s, n in stays) / sum(lengths)
    speed = sum(lengths) / clock[-1]
    print(f"{number:5} {len(depth):6} {speed:9.0f} {1000 * between:12.1f} {first:17.2f} s "
          f"{whole:15.2f} s")

# %% [markdown]
# Two truths at once. As long as there is a queue, more seats shorten the whole wait, because the queue is most of it.
# And each user, once seated, gets tokens more slowly, because every row brings its own history to each step. "Latency
# per request rises with the batch" is the second, "continuous batching lowers latency" the first. Once nobody waits,
# more seats change nothing: then it is more *users* that make each step longer. Chapter 09 turns that into money and
# promises.
#
# ## Without pages
#
# "Continuous batching requires paged attention", some say; without it, everything is copied in every step, "and the
# copy kills the benefit". **Predict:** how many bytes have to be copied when somebody leaves?
#
# Here are two ways to keep the rows of a changing batch in one contiguous `State`, both on the schedule that `serve`
# wrote down. *Every step* makes a new state and copies all rows into it; *in place* resets the row of whoever sits
# down and leaves the others where they are.

# %%
ROOM = max(len(prompt) + most - 1 for prompt, most in users.values())   # the longest a row could become
for way in ("every step", "in place"):
    state, before, answers, copied = State(model, 4, ROOM), [None] * 4, {name: [] for name in users}, 0
    buffers = [*state.k.values(), *state.v.values()]
    for seats in taken:
        if way == "every step":
            kept, state = state.snapshot(), State(model, 4, ROOM)
            parts = kept.k, kept.v, kept.conv, kept.recurrent
            copied += sum(tensor.nbytes for part in parts for tensor in part.values())
            state.restore(range(4), kept)
        state.reset([s for s in range(4) if seats[s] != before[s]])
        fresh = [answers[name][-1:] or users[name][0] if name else [] for name in seats]
        cu_seqlens = torch.tensor([0, *map(len, fresh)]).cumsum(0)
        logits = model.ragged(torch.tensor(sum(fresh, [])), cu_seqlens, state)       # (N, vocab)
        for s in (s for s, name in enumerate(seats) if name):
            answers[seats[s]].append(logits[cu_seqlens[s + 1] - 1].argmax().item())
        before = seats
    same = all(old is new for old, new in zip(buffers, [*state.k.values(), *state.v.values()]))
    print(f"{way:10}: {copied:10,} bytes copied; keys and values stayed where they were: {same}")
    assert answers == alone and same == (way == "in place")
blocks = max(record.blocks_used for record in engine.records)
print(f"room: 4 × {ROOM} = {4 * ROOM} slots; pages: at most {blocks} blocks of 16, {16 * blocks} slots")

# %% [markdown]
# **False**, then. Continuous batching needs no pages, and nobody has to copy everything in every step. What the
# second way needs is *room*: each row sets aside what the longest could become. That is what pages save, and chapter
# 08 is about them.
#
# ## Something to play with
#
# Requests arrive at random; `rate` is how many in 100 steps. Their answers are as long as those of the 18 questions.
# Watch the queue: the bar has a mark for every ten steps, from ▁ (nobody waits) to █ (about this run's longest queue).
# Arrivals stop after 400 steps. **Predict:** an answer of theirs takes a seat for 29 steps on average (printed
# above). How many seats do 20 requests in 100 steps need? What happens with one seat less?

# %%
def watch(rate, seats):
    """`rate` requests in 100 steps, at random, for 400 steps, on `seats` seats: what the queue does."""
    draw, sizes = random.Random(1), [len(answer) for answer in right.values()]
    jobs = [(step, draw.choice(sizes), 0) for step in range(400) if draw.random() < rate / 100]
    start, depth = simulate(jobs, seats)
    waits = sorted(s - job[0] for s, job in zip(start, jobs)) or [0]
    wanted = sum(job[1] for job in jobs) / 400
    bars = "".join("▁▂▃▄▅▆▇█"[-(-7 * waiting // max(*depth, 1))] for waiting in depth[:400:10])
    return (f"<pre>{len(jobs)} requests want {wanted:.1f} of {seats} seats "
            f"({100 * wanted / seats:.0f} %)\nqueue {bars} longest {max(depth, default=0)}\n"
            f"wait: mean {sum(waits) / len(waits):.0f} steps, p99 {percentile(waits, 99)}; "
            f"the last ends at step {len(depth)}</pre>")


controls, sliders, line = play(watch, rate=(1, 50, 10), seats=(1, 16, 4))
for rate, number in ((10, 4), (20, 4), (20, 5), (20, 6), (20, 8)):
    print(watch(rate, number).removeprefix("<pre>").removesuffix("</pre>"))
assert line.value == watch(sliders["rate"].value, sliders["seats"].value)
controls

# %% [markdown]
# With fewer seats than are wanted, the queue grows, if not in every moment, for as long as requests come, and no policy
# helps. With a few more, chance makes queues that come and go. (Chance also drew 71 requests here, not 80, so they want
# a little less than you worked out.) Chapter 09 has the formula.
#
# ## On the real thing: a chat endpoint's log
#
# A server gets JSON. Below are five entries of a log as a `/v1/chat/completions` endpoint would see them, with the step
# of arrival added: `messages` is the conversation so far, `max_tokens` the limit. There are two seats and a budget of
# 32 tokens a step. A is short, B is long, and the others come while B is being answered. D asks, in Chinese, what
# continuous batching is. **Predict** the order in which the answers end.

# %%
LOG = r"""
{"id": "A", "at": 0, "max_tokens": 10, "messages": [{"role": "user", "content": "Say hello."}]}
{"id": "B", "at": 0, "max_tokens": 500,
 "messages": [{"role": "user", "content": "Write a poem about a cat."}]}
{"id": "C", "at": 2, "max_tokens": 20, "messages": [{"role": "user", "content": "My name is Lucy."},
 {"role": "assistant", "content": "Hello Lucy, nice to meet you."},
 {"role": "user", "content": "What is my name?"}]}
{"id": "D", "at": 3, "max_tokens": 60, "messages": [{"role": "user", "content": "什么是连续批处理？"}]}
{"id": "E", "at": 5, "max_tokens": 12,
 "messages": [{"role": "user", "content": "Count from one to ten."}]}
"""


def from_log(log):
    """The log's entries as Requests. An entry may go over several lines."""
    entries = [json.loads(entry) for entry in log.strip().replace("\n ", " ").splitlines()]
    return [Request(chat.tk.encode(build_prompt(entry["messages"])).ids, entry["max_tokens"], chat.stop,
                    id=entry["id"], arrival=entry["at"]) for entry in entries]


# %%
server = Engine(model, max_num_seqs=2, max_num_batched_tokens=32)
log = from_log(LOG)
outputs = server.generate(log)
for request, output in zip(log, outputs):
    s = server.sequences[request.id]
    assert output == solo(request.prompt, request.max_new_tokens)
    print(f"{s.id}: came in step {s.arrival}, seated {s.admitted}, first token {s.first_token}, ended "
          f"{s.finished} ({s.reason}), {len(output)} tokens\n   {text(output)!r}")
order = sorted(server.sequences.values(), key=lambda s: s.finished)
print("ended in this order:", [s.id for s in order], "- every answer as alone")

fig, ax = plt.subplots(figsize=(9.5, 1.8))
counts = figures.timeline(ax, server.records, f"two seats, {len(server.records)} steps")
figures.show(fig, f"Two seats. B keeps one for {server.sequences['B'].latency} steps; A, C, D and E "
                  "follow each other on the other. Seats in steps, by what they did: "
                  + ", ".join(f"{n} {kind}" for kind, n in counts.items()) + ".")

# %% [markdown]
# With `QWEN_MODEL=Qwen/Qwen3.5-0.8B make lab` the same engine runs the published model; paste your own log into
# `LOG`, and take out the comparisons with answers that the small model knows by heart.
#
# ## Your turn
#
# Replace the dots, run the cell, and `check` tells you at once.
#
# **07.1** All requests are there at the start, in this order. `lengths` are their answers in tokens. A request sits
# down in the first step in which one of the `number` seats is free, and takes it for as many steps as its answer has
# tokens. How many steps does continuous batching take in all?
#
# <details><summary>Solution</summary>
#
# The next in line takes the seat that is free first.
# ```python
# def my_steps(lengths, number):
#     free_at = [0] * number
#     for n in lengths:
#         seat = free_at.index(min(free_at))
#         free_at[seat] += n
#     return max(free_at)
# ```
# </details>

# %%
def my_steps(lengths, number):
    ...


_ = check("07.1", my_steps)

# %% [markdown]
# **07.2** Let the finished leave. `rows` is a list of `(name, finished, blocks)`, `free` a list of free blocks.
# Return `(names that go on, free blocks afterwards)`; new free blocks stand behind the old ones, in the order of the
# rows. (The engine gives a row's last block back first; chapter 08 says why.)
#
# <details><summary>Solution</summary>
#
# ```python
# def my_leave(rows, free):
#     for name, finished, blocks in rows:
#         if finished:
#             free = free + blocks
#     return [name for name, finished, blocks in rows if not finished], free
# ```
# </details>

# %%
def my_leave(rows, free):
    ...


_ = check("07.2", my_leave)

# %% [markdown]
# **07.3** Has the row ended? It has put `prompt` tokens and `new` new ones together so far, its limit is `max_tokens`
# new ones; `last` is the newest token, `stop` a list of ids that end an answer. Return True or False.
#
# <details><summary>Solution</summary>
#
# ```python
# def my_end(prompt, new, max_tokens, last, stop):
#     return last in stop or new >= max_tokens
# ```
# </details>

# %%
def my_end(prompt, new, max_tokens, last, stop):
    ...


_ = check("07.3", my_end)

# %% [markdown]
# **07.4** Share a step's budget with chunked prefill. `decoders` rows decode, one token each, and they come first.
# `prompts` are the tokens that are still to be read of each prompt, in the policy's order. Return how many tokens of
# each prompt this step reads. (The budget is at least `decoders`; a prompt may get 0.)
#
# <details><summary>Solution</summary>
#
# ```python
# def my_chunks(decoders, prompts, budget):
#     left, chunks = budget - decoders, []
#     for tokens in prompts:
#         chunks.append(min(tokens, left))
#         left -= chunks[-1]
#     return chunks
# ```
# </details>

# %%
def my_chunks(decoders, prompts, budget):
    ...


_ = check("07.4", my_chunks)

# %% [markdown]
# **07.5** In which order do they sit down? `waiting` is a list of `(name, arrival, priority)`, a lower priority is
# more important, and `aging` steps of waiting make up for one level. Equal ones keep their order. Return the names.
#
# <details><summary>Solution</summary>
#
# ```python
# def my_order(waiting, aging):
#     ranked = sorted(waiting, key=lambda request: request[1] + aging * request[2])
#     return [name for name, arrival, priority in ranked]
# ```
# </details>

# %%
def my_order(waiting, aging):
    ...


_ = check("07.5", my_order)

# %% [markdown]
# ## In an interview
#
# > Static batching keeps a seat until the longest answer of its batch has ended: rows ride along, and a short request
# > waits behind a long one. Continuous batching decides in every step: admit, one forward over prompts and single
# > tokens together, a token each, let the finished leave and free their blocks; with all requests there it needs at
# > most (sum of outputs) / seats plus the longest. Chunked prefill bounds what a step costs those who decode, aging
# > bounds how long anybody waits, and none of it may change an answer.
#
# **In production.** The loop is vLLM's scheduler: `max_num_seqs` is the seats, `max_num_batched_tokens` the budget,
# `enable_chunked_prefill` and `scheduling_policy` (`fcfs` or `priority`) the rest, as options `--max-num-seqs` and so
# on. Its `priority` sorts by the number and, among equals, by arrival: it does not age, so bound the wait outside if
# you use it. `deadline`, AGING and the bound are this engine's own. SGLang calls the settings
# `--max-running-requests`, `--chunked-prefill-size` and `--schedule-policy` (among others `fcfs` and `lpm`, longest
# matching prefix first). The idea is Orca's (Yu et al. 2022, OSDI); the chunks are Sarathi's (Agrawal et al. 2023,
# arXiv 2308.16369).
#
# **Next:** [08 The paged KV cache](08_the_paged_kv_cache.ipynb): where the rows that come and go keep their keys and
# values. **Before:** [06 The Qwen batch chapter](06_the_qwen_batch_chapter.ipynb).
