# %% [markdown]
# # 06 The Qwen batch chapter
#
# Four users ask four questions of different lengths. Can one forward pass serve all four, and does each of them get
# the answer they would have got alone?
#
# A batch is a rectangle, so the short questions get filler in front. This chapter puts the filler in, hides it, and then
# takes each hiding place away to see what breaks: answers to other questions, a wrong name, a conversation forgotten. At
# the end you can say where padding leaks in a model with two kinds of layers, which leaks a test does not see, and how
# to tell a leak from harmless rounding.
#
# It runs in about twenty seconds on two cores and needs nothing but this repository. The model is small and ships with
# it. Words and symbols stand in the [glossary](GLOSSARY.md). Several cells ask for a prediction. The outputs are already below them: to predict honestly, choose
# *Edit > Clear Outputs of All Cells* first.

# %%
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch

from qwen import attention, cache, deltanet, figures, measure, roofline, rope
from qwen.batch import generate_batch, pad_left
from qwen.cache import State
from qwen.chat import Chat, build_prompt
from qwen.config import Config
from qwen.exercises import check
from qwen.model import Model
from qwen.packed import pack
from qwen.sample import generate
from qwen.weights import find_model
from qwen.widgets import play

figures.setup()
path = find_model()                                             # or another model, see the end
model = Model.from_pretrained(path, device="cpu", dtype=torch.float32)
chat = Chat(model, path)
print(f"{model.num_parameters:,} parameters, a vocabulary of {model.config.vocab_size:,} tokens")
print("layers:", ", ".join(kind.split("_")[0] for kind in model.config.layer_types[:8]))

# %% [markdown]
# **What you have loaded is a memorised toy of the real architecture.** Its layers are those of Qwen3.5, its weights were
# trained on a page of questions and answers until it knew them by heart. It knows nothing else. For this chapter that is
# an advantage: every step of every right answer leads its runner-up by a wide gap, so a wrong token is never bad luck.
#
# Two kinds of layers matter below. A **full attention** layer keeps a key and a value of every past token. A **linear**
# layer (Gated DeltaNet) keeps one matrix a head, which every token changes.
#
# Here is the package as a map. The next cell draws it, then counts its files in reading order.

# %% tags=["nbval-ignore-output"]
import ast
import textwrap
from pathlib import Path

import qwen

figures.show(*figures.package_map())
total = 0
for name in qwen.READING_ORDER:
    text = (Path(qwen.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    lines = sum(bool(line.strip()) for line in text.splitlines())
    total += lines
    about = ast.get_docstring(ast.parse(text)).splitlines()[0]
    print(f"{name:10}{lines:4} lines  {textwrap.shorten(about, 78, placeholder=' …')}")
print(f"{'together':10}{total:4} lines, docstrings included")

# %% [markdown]
# ## Four prompts, one box
#
# A **user** asks a question. The user's tokens are one **row** of the batch. The four questions mean: *introduce the
# Transformer in one sentence*, *which country is Beijing in?*, *write a sentence about autumn*, *what is 1+1?* The text
# around a question is the same for all; the model was trained inside this frame.

# %%
def user(text):
    return {"role": "user", "content": text}

def encode(*messages):
    return chat.tk.encode(build_prompt(list(messages))).ids

QUESTIONS = {"A": "用一句话介绍一下 Transformer。", "B": "北京在哪个国家？", "C": "写一句关于秋天的话。", "D": "1+1 等于几？"}
seqs = [encode(user(question)) for question in QUESTIONS.values()]
print(build_prompt([user(QUESTIONS["D"])]))
print("user D's tokens:", [chat.tk.decode([i], skip_special_tokens=False) for i in seqs[3]])
print("user D's ids:   ", seqs[3])
lengths = [len(seq) for seq in seqs]
print("lengths:", dict(zip(QUESTIONS, lengths)))
assert len(set(lengths)) > 1

# %% [markdown]
# A **pad** is filler: a place in the box that holds nobody's token. The **mask** says which places are real. It is made
# from the lengths, never from the ids, because a real question may contain the id that stands in for a pad.
#
# **Predict** from the lengths above: how many of the box's places are pads?

# %%
width = max(lengths)
ids_by_hand, mask_by_hand = [], []
for seq in seqs:                                                # by hand: one user after another
    pads = width - len(seq)
    ids_by_hand.append([0] * pads + seq)
    mask_by_hand.append([False] * pads + [True] * len(seq))

ids, mask = pad_left(seqs)                                      # (B, T) and (B, T)
assert ids.tolist() == ids_by_hand and mask.tolist() == mask_by_hand
for name, row in zip(QUESTIONS, mask):
    print(name, "".join(str(int(real)) for real in row))
print(f"box {tuple(mask.shape)}: {mask.numel()} places, {int(mask.sum())} real, {int((~mask).sum())} pads")

figure, ax = plt.subplots(figsize=(9.5, 1.6))
ax.set_axis_off()
figures.padded_box(ax, lengths)
for text in ax.texts:
    text.set_fontsize(6 if text.get_text().isdigit() else 9)
figures.show(figure, f"Four rows of {lengths} tokens in one box {width} wide; hatched pads on the left.")

# %% [markdown]
# The pads stand on the left so that the last column holds every user's last token, the one whose logits give the next.
#
# ## One at a time against one batch
#
# **Prefill** runs the whole prompt in one pass and gives the first **new token**. **Decode** then feeds one new token a
# row and gets the next. Each such pass is a **step**, the prefill included. What a row has in the caches from earlier
# calls is its **history**.
#
# Below, `prefill` and `decode` are the loop of `qwen/batch.py` written out. `decode` also notes each token's **lead**:
# how far the best logit stands above the second best. `alone` is the truth this chapter holds everything against.
#
# **Predict:** four answers alone, then the four in one batch. At how many tokens do they differ?

# %%
NEW = 120                                                       # new tokens at most

@torch.no_grad()
def prefill(seqs, state=None):
    """One padded box: logits (B, vocab) at each row's last token, and the rows' state."""
    state = State(model, len(seqs)) if state is None else state
    ids, mask = pad_left(seqs)
    return model(ids, state, mask, last_only=True)[:, -1], state

@torch.no_grad()
def decode(logits, state):
    """The best token of each row, fed back until all have stopped: each row's tokens, and the lead of each."""
    rows, leads = [[] for _ in logits], [[] for _ in logits]
    while True:
        best, second = logits.topk(2).values.T.tolist()
        for row, token in enumerate(logits.argmax(-1).tolist()):
            if not rows[row] or (rows[row][-1] not in chat.stop and len(rows[row]) < NEW):
                rows[row].append(token)
                leads[row].append(best[row] - second[row])
        if all(row[-1] in chat.stop or len(row) == NEW for row in rows):
            return rows, leads
        logits = model(torch.tensor([row[-1:] for row in rows]), state)[:, -1]

# %%
alone = [generate(model, torch.tensor([seq]), max_new_tokens=NEW, stop=chat.stop) for seq in seqs]
batched, leads = decode(*prefill(seqs))
assert generate_batch(model, seqs, max_new_tokens=NEW, stop=chat.stop) == batched == alone
for name, answer in zip(QUESTIONS, batched):
    print(f"{name}: {len(answer):3} tokens, {chat.tk.decode(answer)!r}")
differ = sum(a != b for one, other in zip(alone, batched) for a, b in zip(one, other))
print(f"tokens that differ, alone and in the batch: {differ} of {sum(map(len, alone))} (the stop token counts as one)")

# %% [markdown]
# The next cell asks the same of the logits the tokens were picked from. `trace` keeps them: one set after the prefill,
# one after each column of tokens fed to it. `within` is the bound of this whole series: 1e-4, times the size of the
# number where that is larger than 1.

# %%
@torch.no_grad()
def trace(logits, state, feed=()):
    """Logits (B, vocab) after the prefill, then after every column of fed tokens (B,)."""
    seen = [logits]
    for column in feed:
        seen.append(model(column[:, None], state)[:, -1])
    return seen

def within(found, right, bound=1e-4):
    return ((found - right).abs() <= bound * right.abs().clamp(min=1)).all().item()

batch_logits, alone_logits = prefill(seqs)[0], torch.cat([prefill([seq])[0] for seq in seqs])
for row, name in enumerate(QUESTIONS):
    top = alone_logits[row].topk(3).indices
    print(name, *(f"{how} {[f'{x:.1f}' for x in logits[row, top]]}  " for how, logits in
                  (("alone", alone_logits), ("batch", batch_logits))), "within the bound:",
          within(batch_logits[row], alone_logits[row]))

# %% tags=["nbval-ignore-output"]
print("bit for bit the same on this machine:", torch.equal(batch_logits, alone_logits))
print(f"largest difference: {(batch_logits - alone_logits).abs().max().item():.1e}")

# %% [markdown]
# The tokens are the same, and the logits are the same up to the bound. The last cell speaks about your machine alone;
# why the last digits may differ is a section of its own, further down.
#
# ## What a linear layer does with a token
#
# Two things in a linear layer let one token reach another.
#
# 1. A short **convolution** mixes each token's input with the K - 1 inputs before it, its **window**. (K is the kernel,
#    4 in this model.) Key, value and query are made from that mix.
# 2. The **matrix** S of each head. A token first lets S **fade**, S ← exp(g) · S with g ≤ 0; this is the **decay**. Then
#    it **writes**: it asks S what it holds under the token's key, and adds the difference to the token's value, times a
#    strength beta between 0 and 1. With one number instead of a matrix: S ← S + key · beta · (value − key · S).
#
# Window and S are all the layer remembers. What was written into S, or faded from it, cannot be taken back later. An attention
# layer can leave out a key when it looks back; a linear layer has to get it right at the moment the pad passes by.
#
# ## The padding is hidden in three places
#
# Most of the model needs no hiding. Embedding, norms, projections and MLP work on one token at a time and cannot see a
# pad. Tokens meet in the two kinds of layers only, and attention also asks how far apart they stand. So there are three
# places, the second with two parts:
#
# | | place | what a pad would do | where it is hidden |
# |---|---|---|---|
# | 1 | attention: keys | be looked at | `cache.slot_mapping`: a pad gets no slot (-1), so its key is never stored |
# | 2 | linear layer: window | stand among the inputs of the convolution | `deltanet.window_index`: skips pads |
# | 2 | linear layer: write and decay | write to S, and let it fade | `deltanet.gates`: beta and g are 0 at a pad |
# | 3 | attention: positions | push the row's tokens to later positions | `rope.positions`: only real tokens count |
#
# Here they are on two rows of five places, small enough to check on paper. The kernel is 3, so a token's window holds
# 2 earlier inputs; the numbers 0 and 1 stand for the inputs carried over from before, 2 to 6 for the five places. The
# gates get zeros as inputs, so a real token has beta = sigmoid(0) = 0.5 and a decay of exp(-ln 2) = 0.5.

# %%
small = torch.tensor([[False, False, True, True, True], [True] * 5])
slots = cache.slot_mapping(small, length=torch.tensor([0, 0]))                 # (B, T)
zeros = torch.zeros(2, 5, 1)
g, beta = deltanet.gates(zeros, zeros, torch.zeros(1), torch.zeros(1), small)  # (B, T, 1)
print("slots        ", slots.tolist())
print("positions    ", rope.positions(slots).tolist())
print("window, row 0", deltanet.window_index(small, kernel=3)[0, :5].tolist())
print("beta,   row 0", [round(x, 2) for x in beta[0, :, 0].tolist()])
print("decay,  row 0", [round(x, 2) for x in g[0, :, 0].exp().tolist()], "(1 = nothing fades)")
print("what row 0 sees:   slot 0  1  2  3  4")
for place, line in enumerate(attention.visible(slots, num_slots=5)[0].int().tolist()):
    print(f"   place {place} {'      ' if small[0, place] else '(pad) '}       ", "  ".join(map(str, line)))

# %% [markdown]
# ## Pads before real tokens
#
# To break the hiding visibly you need many pads. So user A comes back for a second question, *who proposed it?* The row
# holds A's whole conversation: first question, answer, second question. B, C and D ask their first, beside this long
# row.
#
# `batch_to_break` prepares a batch: how it starts, and the truth, each row's whole conversation alone and without a pad.

# %%
def batch_to_break(names, start, whole):
    """A batch and its truth. names: its users; start() -> its prefill; whole: each row's tokens, all in one piece."""
    rows, leads = [], []
    for seq in whole:
        (row,), (lead,) = decode(*prefill([seq]))
        rows, leads = rows + [row], leads + [lead]
    feed = [torch.tensor([row[i % len(row)] for row in rows]) for i in range(3)]            # (B,) each
    steps = zip(*(trace(*prefill([seq]), [column[r:r + 1] for column in feed]) for r, seq in enumerate(whole)))
    return SimpleNamespace(names=names, start=start, rows=rows, leads=leads, feed=feed,
                           right=[torch.cat(step) for step in steps])                       # (B, vocab) each

def conversation(first, second):
    """Ask the model `first`: token ids of (that and its answer, the question `second`)."""
    answer = generate(model, torch.tensor([encode(user(first))]), max_new_tokens=NEW, stop=chat.stop)
    answer = {"role": "assistant", "content": chat.tk.decode(answer)}
    whole, new = encode(user(first), answer, user(second)), encode(user(second))
    assert whole[-len(new):] == new
    return whole[:-len(new)], new

A = conversation(QUESTIONS["A"], "是谁提出的？")
crowd = [A[0] + A[1], *seqs[1:]]
before = batch_to_break(list(QUESTIONS), lambda: prefill(crowd), crowd)
print("lengths:", [len(seq) for seq in crowd], "pads:", [len(crowd[0]) - len(seq) for seq in crowd])
assert decode(*before.start())[0] == before.rows and before.rows[1:] == alone[1:]
print("A, second answer:", repr(chat.tk.decode(before.rows[0])))

# %% [markdown]
# Now break it, one place at a time. `patch.object` replaces one function while a `with` block runs; the package has no
# switch for this and does not notice. `report` runs a batch with one function replaced. It says whether the logits are
# still those of the solo run, and prints an answer that changed beside the right one.
#
# **The wrong version, place 1: a pad gets a slot like everybody else.** Its key is stored, and every later token of the
# row looks at it.
#
# **Predict:** which user's answer is safe whatever you break?

# %%
BREAKS = {"nothing": (cache, "slot_mapping", cache.slot_mapping)}               # replaced by itself
answers = {}

def report(name, batch):
    with patch.object(*BREAKS[name]):
        rows, leads = decode(*batch.start())
        steps = list(zip(trace(*batch.start(), batch.feed), batch.right))
    answers[name] = rows                                                        # the last batch's
    same = sum(row == right for row, right in zip(rows, batch.rows))
    print(f"--- broken: {name}. Logits within the bound: prefill {within(*steps[0])}, "
          f"decode {all(within(a, b) for a, b in steps[1:])}. Answers the same: {same} of {len(rows)}")
    for user, row, lead, right in zip(batch.names, rows, leads, batch.rows):
        if row != right:
            wide = min(lead) > 0.3                                              # no CPU's rounding changes these
            wrong = repr(chat.tk.decode(row)[:60]) if wide else "another answer"
            print(f"    {user} gets {wrong} instead of {chat.tk.decode(right)[:60]!r}")

def every_place_a_slot(mask, length):
    return length[:, None] + torch.arange(mask.shape[1])                        # (B, T), no -1

BREAKS["keys"] = (cache, "slot_mapping", every_place_a_slot)
report("nothing", before)
report("keys", before)

# %% [markdown]
# The longest row has no pads, so nothing can leak into it; that is why a test with equal lengths passes every bug.
#
# **Place 2: the linear layer.** Four wrong versions. The window takes the places straight before a token, pads or not.
# Or the gates forget the mask, so that pads write *and* let S fade. Or they forget one half of it: pads only write, or S
# only fades.
#
# **Predict:** which of the four does no harm here?

# %%
gates = deltanet.gates

def straight_window(mask, kernel):
    tokens, taps = torch.arange(mask.shape[1] + 1)[:, None], torch.arange(kernel - 1)
    return (tokens + taps).expand(len(mask), -1, -1)                            # (B, T+1, K-1)

def open_gates(a, b, A_log, dt_bias, mask):
    return gates(a, b, A_log, dt_bias, torch.ones_like(mask))

def pads_write(a, b, A_log, dt_bias, mask):
    return gates(a, b, A_log, dt_bias, mask)[0], open_gates(a, b, A_log, dt_bias, mask)[1]

def pads_fade(a, b, A_log, dt_bias, mask):
    return open_gates(a, b, A_log, dt_bias, mask)[0], gates(a, b, A_log, dt_bias, mask)[1]

BREAKS["window"] = (deltanet, "window_index", straight_window)
BREAKS["pads write and fade"] = (deltanet, "gates", open_gates)
BREAKS["pads write"] = (deltanet, "gates", pads_write)
BREAKS["pads fade"] = (deltanet, "gates", pads_fade)
for name in ("window", "pads write and fade", "pads write", "pads fade"):
    report(name, before)

# %% [markdown]
# *Pads fade* did no harm at all, and that is luck: the pads came first, when S was still zero, and a zero that fades
# stays zero. Keep that in mind.
#
# **Place 3: positions.** The wrong version counts columns: a row's tokens of this call get the numbers after its
# history, pads included. (In decode there are no pads, and it is right.)
#
# **Predict:** do the logits of the prefill change? Those of the first decode step?

# %%
def numbered_by_column(slots):
    history = slots.amax(1, keepdim=True) + 1 - (slots >= 0).sum(1, keepdim=True)           # (B, 1)
    return history + torch.arange(slots.shape[1])                                           # (B, T), pads count

BREAKS["positions"] = (rope, "positions", numbered_by_column)
report("positions", before)

table = torch.tensor([10, 11, 12, 13])                                          # a table of angles, say
print("cumsum(mask) - 1 at a leading pad is -1, and table[-1] is", table[-1].item())

# %% [markdown]
# In prefill the mistake is invisible. Rotary positions only matter as differences, and all tokens of a row were moved by
# the same amount. The first decode step puts a new token at its right place, and now the differences are wrong. So a
# test of positions must decode.
#
# The last line is a neighbouring trap: an index of -1 raises nothing and reads a table's last row. `rope.positions`
# clamps pads to 0.
#
# Now look back at the answers. The logits broke nearly every time; on the shipped model the answers came out right all
# the same. It knows them so well that a push from the side does not reach the runner-up. **A test that compares answers
# passes all of these. Compare logits.**
#
# ## Pads after real tokens
#
# Was it harmless, then? Pads before a row's first token meet an empty memory. Now let them stand *after* real tokens,
# between a row's history and its question. It happens in every server: four users have talked to the model. They come
# back with a second question, and in the same call a new user, N, arrives with a long prompt. N has pasted a whole
# earlier conversation. The box is as wide as N's row, so everybody else gets a long run of pads.
#
# A's second question you know. E asked *What is 5 times 6?* and goes on *And plus 3?* F said *My name is Lucy*, and asks
# *What is my name?* G asked *What is 10 minus 4?*, then also *And plus 3?* None of these second questions can be
# answered without the first.

# %%
returning = {"A": A, "E": conversation("What is 5 times 6?", "And plus 3?"),
             "F": conversation("My name is Lucy.", "What is my name?"),
             "G": conversation("What is 10 minus 4?", "And plus 3?")}
histories, questions = map(list, zip(*returning.values()))
N = sum(conversation("Write a poem about a cat.", "Now one about a dog."), [])

def second_call():
    _, past = prefill(histories)                                                # the first call, four rows
    state = State(model, batch=5)                                               # row 4 is N's, and new
    state.restore(range(4), past)
    return prefill([*questions, N], state)

whole = [history + question for history, question in zip(histories, questions)] + [N]
after = batch_to_break([*returning, "N"], second_call, whole)
print("tokens before this call: ", [len(history) for history in histories] + [0])
print("pads after them:         ", [len(N) - len(question) for question in questions] + [0])
assert len(N) == max(map(len, [*questions, N]))
report("nothing", after)
for name, row in zip(after.names, after.rows):
    print(f"    {name}: {chat.tk.decode(row)[:60]!r}")

# %% [markdown]
# With the padding hidden, all five get their solo answer. (The first call had pads too, in front of the shorter histories.)
#
# **Predict:** *pads fade* did no harm before. What will E be told now, if the pads let the memory fade?

# %%
for name in [name for name in BREAKS if name != "nothing"]:
    report(name, after)

# %% [markdown]
# On the shipped model each of the three places now shows in what a user reads:
#
# - **Keys.** F looks for a name among keys that mostly belong to pads, and is called by the name of somebody who is not
#   even in the batch.
# - **Decay.** E and A are answered as if their first question had never been asked. The row did not misread its history,
#   it has **forgotten** it. (*Pads write* alone breaks logits, but no answer.)
# - **Positions.** G's question stands further from its history than anything G wrote.
# - **Window.** Still in the logits only: pads stand in the windows of just the first few tokens after them.
#
# How much of the memory is left? The next cell takes E's row after the first call, runs 100 pads over it and nothing
# else, and measures the size (the norm) of each head's matrix S, in percent of what it was.
#
# **Predict** the three tables: the pads hidden, *pads fade*, *pads write and fade*. Which of them are empty?

# %%
def size_left(name, pads=100):
    """The norm of each head's S after nothing but pads, in percent of its norm before: (linear layers, heads)."""
    _, state = prefill([histories[1]])
    old = [S.norm(dim=(-2, -1)) for S in state.recurrent.values()]              # (1, heads) each
    with patch.object(*BREAKS[name]), torch.no_grad():
        model(torch.zeros(1, pads, dtype=torch.int64), state, torch.zeros(1, pads, dtype=torch.bool))
    return 100 * torch.cat([S.norm(dim=(-2, -1)) / norm for S, norm in zip(state.recurrent.values(), old)])

figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.6))
words = []
for ax, (name, title) in zip(axes, (("nothing", "pads hidden"), ("pads fade",) * 2, ("pads write and fade",) * 2)):
    percent = [[round(x) for x in layer] for layer in size_left(name)[:3, :4].tolist()]
    figures.matrix(ax, percent, title, colors=[["plain" if x == 100 else "wrong" for x in layer] for layer in percent],
                   rows=[f"layer {i}" for i in range(3)], columns=[f"head {i}" for i in range(4)])
    for text in ax.texts[-7:]:
        text.set_fontsize(8)
    words.append(f"{title}: {percent}")
figures.show(figure, f"Percent of the norm of S left after 100 pads, a row for each linear layer: {'; '.join(words)}.")

# %% [markdown]
# A fade is a factor, and a hundred pads multiply a hundred of them. Hidden pads leave S exactly as it was. Pads that
# fade empty it: on the shipped model only one head a layer, the one with the longest memory, keeps anything that shows.
# In the third table S has a size again, but it is no memory of E: nearly all it holds now was written by pads.
#
# ## What a test sees
#
# One more wrong version belongs here, because it is widely used: **zero the layer's input at pads and do nothing else.**
# With an input of zero the pad's key and value are zero, so it seems to write nothing.
#
# The next cell runs every wrong version on both batches, and compares logits. **Predict:** which ones pass with pads
# before the tokens, and fail with pads after them?

# %%
forward = deltanet.GatedDeltaNet.forward
def zeroed_input(layer, x, call, state, index):
    before = straight_window(call.mask, call.before.shape[-1] + 1)              # hidden from nothing else
    blind = replace(call, mask=torch.ones_like(call.mask), before=before)
    return forward(layer, x * call.mask[..., None], blind, state, index)

BREAKS["input zeroed"] = (deltanet.GatedDeltaNet, "forward", zeroed_input)

def survives(name):
    found = []
    for batch, full in ((before, 0), (after, 4)):                               # full: the row without a pad
        with patch.object(*BREAKS[name]):
            steps = list(zip(trace(*batch.start(), batch.feed), batch.right))
        assert all(within(a[full], b[full]) for a, b in steps)                  # it stays right, whatever is broken
        good = [within(a, b) for a, b in steps]
        found += [good[0], all(good[1:])]                                       # the prefill, three decode steps
    return found

same = {name: survives(name) for name in BREAKS}
assert all(same["nothing"]) and not any(row[3] for name, row in same.items() if name != "nothing")
words = "; ".join(f"{name}: " + ", ".join("same" if s else "different" for s in row) for name, row in same.items())
figure, ax = plt.subplots(figsize=(9, 4))
figures.outcomes(ax, list(same), [f"pads {where}:\n{call}" for where in ("before", "after") for call in
                                  ("prefill", "decode")], list(same.values()))
figures.show(figure, f"Logits against the solo run, prefill and decode with pads before tokens, then after. {words}.")

# %% [markdown]
# Read the table from the right. With pads after real tokens every wrong version shows. With pads before them, two
# pass everything: *pads fade* and *input zeroed*. Both rest on the same luck, an empty window and a zero matrix.
#
# After real tokens a zeroed input is not enough. The convolution still mixes in the inputs before the pad, so the pad's
# key and value are not zero; its write strength is sigmoid(0) = 0.5; and the matrix fades. It is changed, not kept. You
# need all three: a window that skips pads, no write, no decay.
#
# ## Why not minus infinity
#
# A pad's query sees no key at all. The model still computes a softmax for it, over scores that are all hidden.
# `attention.masked_softmax` hides with the smallest finite number. **Predict:** what does the softmax of a row of minus
# infinities give?

# %%
def softmax_with_inf(scores, seen):
    return scores.float().masked_fill(~seen, -torch.inf).softmax(-1)

scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
nobody, two = torch.tensor([[False] * 4]), torch.tensor([[True, True, False, False]])
for name, softmax in (("finfo.min", attention.masked_softmax), ("-inf", softmax_with_inf)):
    print(f"{name:10}two keys seen {[round(w, 2) for w in softmax(scores, two)[0].tolist()]}",
          f"no key seen {[round(w, 2) for w in softmax(scores, nobody)[0].tolist()]}")
nan = float("nan")
print("0 x NaN + 1 x 3 =", (torch.tensor([0.0, 1.0]) @ torch.tensor([nan, 3.0])).item())

# %% [markdown]
# Now follow a NaN through the layers. In the loaded toy the only full attention layer is the last of four, so nothing
# comes after it. A second model, of eight layers with random weights, shows what the next layers make of it; the cell
# after the count asks that model for a token.

# %%
@torch.no_grad()
def nans_by_layer(model):
    """For each layer, how many tokens hold a NaN: (pads, real tokens)."""
    seen = []
    hooks = [layer.register_forward_hook(lambda layer, x, out: seen.append(out.isnan().any(-1)))
             for layer in model.layers]
    with patch.object(attention, "masked_softmax", softmax_with_inf):
        model(ids, mask=mask)
    for hook in hooks:
        hook.remove()
    return [(int((nan & ~mask).sum()), int((nan & mask).sum())) for nan in seen]

_ = torch.manual_seed(0)
deeper = Model(replace(model.config, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
                       layer_types=model.config.layer_types[:4] * 2)).requires_grad_(False)
real_with_pads = sum(length for length in lengths if length < width)
for name, which in (("loaded model", model), ("eight layers", deeper)):
    print(f"{name}, tokens with NaN as (pads, real):")
    for kind, counts in list(zip(which.config.layer_types, nans_by_layer(which)))[:8]:
        print(f"  {kind:17} {counts}")
print(f"pads in the box: {int((~mask).sum())}; real tokens in rows that have pads: {real_with_pads}")

# %% tags=["raises-exception"]
with patch.object(attention, "masked_softmax", softmax_with_inf):
    generate_batch(deeper, seqs, max_new_tokens=1)

# %% [markdown]
# `finfo.min` gives a row that sees nobody *equal* weights. They mean nothing; it is harmless only because nobody reads
# that row. Minus infinity gives NaN, and a weight of zero does not silence a NaN, so it need not be read on purpose.
#
# The NaN is born at the pads of the first full attention layer. There it stays with them: a pad has no slot, so no query
# can reach its value. The linear layer straight after it lets it out. The pad's write strength is 0, but 0 times NaN is
# NaN, and the matrix it lands in is the row's: at the end of that layer every real token of every row with pads is gone.
# Sampling then refuses to choose, which is the error a reader would get.
#
# ## Why the last digits differ at all
#
# Batch and solo agree within a bound, not bit for bit. Nothing leaks; the sums are added up in another order. A float
# has room for so many digits, each addition rounds, and *where* it rounds depends on the order.
#
# A matrix product picks its order by shape: how many rows, how many threads, which CPU. A kernel that sums each row in
# the same order whatever stands beside it is called **batch-invariant**. Most are not.
#
# On paper: logit A is a sum of three numbers, 16777216 + 1 - 16777216; logit B is 0.5. In fp32 there is no 16777217.
# **Predict:** which logit is the best when A is added up in this order? And as 16777216 - 16777216 + 1?
#
# The number type matters as much as the order: bf16 keeps 8 significant bits where fp32 keeps 24. Now A is
# 256 + 1 + 1 + 1 + 1, and B is 258. **Predict:** who is best in fp32, who in bf16?

# %%
def add(numbers, dtype=torch.float32):
    total = torch.tensor(0.0, dtype=dtype)
    for number in numbers:
        total = total + torch.tensor(number, dtype=dtype)                       # rounds every time
    return total.item()

big = 2.0 ** 24
print("the fp32 number after", big, "is", torch.nextafter(torch.tensor(big), torch.tensor(torch.inf)).item())
for order in ([big, 1.0, -big], [big, -big, 1.0]):
    a = add(order)
    print(f"A = {a}, B = 0.5, best {'A' if a > 0.5 else 'B'}   order {order}")

parts = [256.0, 1.0, 1.0, 1.0, 1.0]                                             # A; B is 258
for dtype in (torch.float32, torch.bfloat16):
    a = add(parts, dtype)
    print(f"{str(dtype)[6:]:8} A = {a}, B = 258.0, best {'A' if a > 258 else 'B'}")

close = torch.tensor([17.03, 17.05])                                            # two logits, a near-tie
print("fp32 tells them apart:", bool(close[0] != close[1]))
print("bf16 tells them apart:", bool(close.bfloat16()[0] != close.bfloat16()[1]), close.bfloat16().tolist())

# %% [markdown]
# So rounding *can* flip a token: when two logits lie closer together than the error. In fp32 that takes a near-tie. In
# bf16 the steps between neighbouring numbers are far wider, so ties are common and answers drift apart sooner. (Real
# bf16 kernels add in fp32 and round once at the end; the last two lines are the part that remains.)
#
# That gives you two questions to ask when a batch prints another token than the solo run:
#
# 1. **How large is the error, measured in bounds?** In fp32 rounding stays below one. A fault that reaches the logits
#    does not. (One that does not reach them stays unseen, as *pads fade* did with pads before the tokens.)
# 2. **What was the lead of the token that flipped?** Rounding flips near-ties (a lead below 1e-3 in fp32). A fault
#    overturns tokens that led by a wide gap.
#
# Here are both, for the batch with pads after real tokens. The prefill is step 1.

# %%
def verdict(name, batch):
    with patch.object(*BREAKS[name]):
        steps = list(zip(trace(*batch.start(), batch.feed), batch.right))
    print(f"{name:20} error below one bound: {all(within(a, b) for a, b in steps)}")
    for user, row, right, leads in zip(batch.names, answers[name], batch.rows, batch.leads):
        step = next((i for i, (a, b) in enumerate(zip(row, right)) if a != b), None)
        if step is not None:
            what = "a near-tie" if leads[step] < 1e-3 else "a fault"
            print(f"    {user} flips at step {step + 1}, where the right token led by {leads[step]:.1f}: {what}")

for name in answers:
    verdict(name, after)
print("every step of the right answers led by more than 1:", min(map(min, after.leads)) > 1)

# %% [markdown]
# ## Rows that ride along
#
# All rows step until the longest answer ends. A row that is done **rides along**: it is computed, and its tokens are
# thrown away. Count both: **useful** tokens are those in the answers, **computed** ones fill the box of rows times
# steps.
#
# **Predict:** two users, answers of 3 and 50 tokens. How many are useful, how many computed? And for our first four?

# %%
def useful_and_computed(lengths):
    return sum(lengths), len(lengths) * max(lengths)

print("outputs of 3 and 50 tokens: %d useful, %d computed" % useful_and_computed([3, 50]))
outputs = [len(answer) for answer in alone]
useful, computed = useful_and_computed(outputs)
print(f"our first four users, {outputs}: {useful} useful, {computed} computed, {100 * useful // computed} % useful")
print(f"their prompts: {sum(lengths)} tokens in {mask.numel()} places, {100 * sum(lengths) // mask.numel()} % useful")
assert useful_and_computed([3, 50]) == (53, 100)

figure, ax = plt.subplots(figsize=(8.5, 2.5))
figures.riding(ax, outputs)
figures.show(figure, f"A bar for each user: {outputs} tokens in colour, then hatched until step {max(outputs)}; "
                     f"the prefill is step 1.")

# %% [markdown]
# ## What the batch buys
#
# A decode step reads every weight once, however many rows it serves. To *see* that on a clock the weights must be too
# large for the CPU's cache; the shipped model sits in the cache and would only show the overhead of Python. So here are
# six layers of the published widths with random weights. Nothing they say makes sense, and each of the six costs what a
# real one does. (The published model has 24, and a far larger vocabulary.)
#
# First the counts, which are the same everywhere. `roofline.step_cost` works them out from the sizes alone: what a step
# must read, and what it must calculate. The weights are read once; keys, values and matrices S once for every row.
#
# **Predict:** from 1 row to 16, what grows 16 times, and what stays?

# %%
wide_config = Config(
    vocab_size=2048, hidden_size=1024, intermediate_size=3584, num_hidden_layers=6,
    layer_types=(2 * (3 * ["linear_attention"] + ["full_attention"]))[:6], num_attention_heads=8,
    num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, rope_theta=1e7, partial_rotary_factor=0.25,
    rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=True)
wide = measure.random_model(wide_config)
for batch in (1, 4, 16):
    parts = roofline.step_cost(wide_config, batch, context=32)                  # {part: Cost(bytes, flops)}
    weights = parts["projections"].bytes + parts["head"].bytes
    rest = parts["attention"].bytes + parts["state"].bytes
    print(f"{batch:2} rows: {weights / 1e6:.0f} MB of weights, {rest / 1e6:5.1f} MB of the rows' own, "
          f"{roofline.total(parts).flops / 1e9:.2f} GFLOP; bytes a token {(weights + rest) / batch / 1e6:.0f} MB")
    assert weights == sum(p.nbytes for p in wide.parameters() if p.dim() == 2)  # the matrices of the real model

# %% [markdown]
# Now your machine's clock. It times the model twice: with the weights as torch stores them, and *packed*, that is,
# rearranged once into the order in which the CPU's kernel reads them (`qwen/packed.py`; a large model loaded on a CPU is
# packed from the start). The dashed line is the prediction: what the bytes take at your memory's speed plus what the
# arithmetic takes at your processor's, both just measured.
#
# **Predict:** where does the packed model leave the straight line of "16 rows, 16 times the tokens"?

# %% tags=["nbval-ignore-output"]
batches = [1, 2, 4, 8, 16]

def tokens_a_second():
    return [batch / measure.decode_seconds(wide, measure.unequal(batch, 32), steps=3) for batch in batches]

stored = tokens_a_second()
pack(wide)
packed = tokens_a_second()
speeds = measure.bandwidth(megabytes=256), measure.matmul_peak(size=1024)       # bytes/s, FLOP/s
costs = [roofline.total(roofline.step_cost(wide_config, batch, 32)) for batch in batches]
predicted = [batch / cost.seconds(*speeds)[1] for batch, cost in zip(batches, costs)]
figure, ax = plt.subplots()
figures.throughput(ax, batches, {"packed": packed, "as stored": stored}, predicted, "tokens a second", name="predicted")
figures.show(figure, f"Tokens a second at {batches} rows: packed {[round(s) for s in packed]}, as stored "
                     f"{[round(s) for s in stored]}, predicted {[round(s) for s in predicted]}.")
print(f"memory {speeds[0] / 1e9:.0f} GB/s, arithmetic {speeds[1] / 1e9:.0f} GFLOP/s")
print(f"16 rows make {packed[-1] / packed[0]:.1f} times the tokens of one row packed, {stored[-1] / stored[0]:.1f} as stored")

# %% [markdown]
# The counts promise nearly a factor of the batch size. Two things can keep a curve below it. One is how the kernel reads
# the weights: chapter 01 shows that a layout made for a single row costs time with several. The other is the arithmetic,
# which takes the time itself once there are enough rows; a CPU has little of it to spare, and the prediction knows. A GPU
# has far more arithmetic for each byte it reads and goes on much further. `make bench` runs this for the whole 0.8B shape.
#
# ## Something to play with
#
# Choose how many pads stand between user E's history and second question, and what is broken. The line below the
# controls gives the answer, and compares the logits with those of the solo run. The cell first moves the sliders itself,
# then they are yours. At how many pads is the first question forgotten?

# %%
E = after.names.index("E")

def between(pads, broken):
    """E's second question after `pads` pads: the answer, and what a test of prefill or of decode would say."""
    with patch.object(*BREAKS[broken]), torch.no_grad():
        _, past = prefill([histories[E]])
        ids = torch.tensor([[0] * pads + questions[E]])                         # (1, pads + T)
        mask = torch.tensor([[False] * pads + [True] * len(questions[E])])
        first = model(ids, past, mask, last_only=True)[:, -1]
        (answer,), (leads,) = decode(first, past.snapshot())
        same = [within(a, b[E:E + 1]) for a, b in
                zip(trace(first, past, [column[E:E + 1] for column in after.feed]), after.right)]
    text = repr(chat.tk.decode(answer)[:40]) if min(leads) > 0.3 else "hangs on a near-tie"
    return (f"{pads} pads, broken: {broken}. Answer: {text}. Logits: prefill {'same' if same[0] else 'different'}, "
            f"decode {'same' if all(same[1:]) else 'different'}")

controls, sliders, line = play(between, pads=(0, 160, 0), broken=list(BREAKS))
for pads, broken in ((0, "keys"), (1, "keys"), (100, "nothing"), (8, "pads fade"), (100, "pads fade")):
    sliders["pads"].value, sliders["broken"].value = pads, broken
    print(line.value)
assert line.value == between(100, "pads fade")
controls

# %% [markdown]
# ## On the real thing
#
# Everything above runs unchanged on the published Qwen3.5-0.8B. Start the notebook with
#
# ```
# QWEN_MODEL=Qwen/Qwen3.5-0.8B make lab
# ```
#
# or write `find_model("Qwen/Qwen3.5-0.8B")` in the first cell. The files are fetched once, with a progress bar; the
# weights in fp32 take 4 bytes a parameter of memory, and the cells take minutes, not seconds. Lengths and answers will
# differ from those printed here, the comparisons are the same. That model did not learn its answers by heart: its leads
# are smaller, and a lead below 1e-3 would be a near-tie that you may see flip. To try bf16, change `dtype` in the first
# cell and expect the bound to be crossed and an `assert` to say so: the bound is one for fp32.
#
# ## Your turn
#
# Replace the dots, run the cell, and `check` tells you at once.
#
# **06.1** Pad on the left, to a width that is a multiple of `multiple` (some kernels like such widths best): the
# smallest one into which the longest prompt fits. Return `(ids, mask)` as nested lists, True = real. A prompt may
# contain `pad_id`.
#
# <details><summary>Solution</summary>
#
# ```python
# def my_pad(seqs, pad_id, multiple):
#     longest = max(len(seq) for seq in seqs)
#     width = longest + -longest % multiple
#     ids = [[pad_id] * (width - len(seq)) + seq for seq in seqs]
#     mask = [[False] * (width - len(seq)) + [True] * len(seq) for seq in seqs]
#     return ids, mask
# ```
# </details>

# %%
def my_pad(seqs, pad_id, multiple):
    ...

_ = check("06.1", my_pad)

# %% [markdown]
# **06.2** Number one row's tokens for one call. `mask` is a list of booleans, `length` is how many tokens the row has
# processed before. Return a position for each place; a pad may get any number from 0 up.
#
# <details><summary>Solution</summary>
#
# Only a real token moves the count on.
# ```python
# def my_positions(mask, length):
#     positions = []
#     for real in mask:
#         positions.append(length)
#         length += real
#     return positions
# ```
# </details>

# %%
def my_positions(mask, length):
    ...

_ = check("06.2", my_positions)

# %% [markdown]
# **06.3** A linear layer's matrix, shrunk to one number: S = 8. A pad arrives with key 1, value 2, beta 0.5 and a decay
# that halves S. First S fades, then S ← S + key · beta · (value − key · S). What is S after the pad if (a) nothing is
# hidden, (b) only beta is set to 0, (c) only the decay is switched off, (d) both?
#
# <details><summary>Solution</summary>
#
# (a) 8 fades to 4, then 4 + 0.5 · (2 − 4) = 3. (b) 4. (c) 8 + 0.5 · (2 − 8) = 5. (d) 8, the only right one.
# ```python
# after_the_pad = [3, 4, 5, 8]
# ```
# </details>

# %%
after_the_pad = ...                                             # [a, b, c, d]
_ = check("06.3", after_the_pad)

# %% [markdown]
# **06.4** Keep what belongs to an answer: of each row all tokens up to and with its own first stop token.
# `sampled[step][row]` is the token a row got at a step, computed for all rows at all steps; `stop` is a set of ids.
# Return a list for each row.
#
# <details><summary>Solution</summary>
#
# ```python
# def my_record(sampled, stop):
#     answers = [[] for _ in sampled[0]]
#     for step in sampled:
#         for answer, token in zip(answers, step):
#             if not answer or answer[-1] not in stop:
#                 answer.append(token)
#     return answers
# ```
# </details>

# %%
def my_record(sampled, stop):
    ...

_ = check("06.4", my_record)

# %% [markdown]
# **06.5** Answers of `lengths` tokens are wanted, but only `k` rows fit into a batch. They are served k at a time, in
# the order given; a batch ends when its longest answer ends, and the last batch may have fewer rows. Return `(useful,
# computed)` tokens over all batches.
#
# <details><summary>Solution</summary>
#
# Each batch is a box of its own. Short answers that share a batch do not wait for a long one elsewhere.
# ```python
# def my_count(lengths, k):
#     batches = [lengths[i:i + k] for i in range(0, len(lengths), k)]
#     return sum(lengths), sum(len(batch) * max(batch) for batch in batches)
# ```
# </details>

# %%
def my_count(lengths, k):
    ...

_ = check("06.5", my_count)

# %% [markdown]
# ## In an interview
#
# > A decode step reads all weights once and serves every row of the batch, so a batch makes more tokens for each byte
# > read; a batched answer must equal the solo answer, up to rounding. Padding has to be hidden wherever tokens meet:
# > from attention's keys, from the linear layer's window, write and decay, and from the positions; test it by its
# > logits, with unequal lengths, with decode, and with pads after real tokens, where a recurrent state forgets. Batched
# > and solo logits differ in the last digits because sums run in another order; a near-tie may flip by that, a token
# > that led by a wide gap flips only by a fault.
#
# **In production.** vLLM has the same `slot_mapping`: the place in the cache that each new token is written to.
# vLLM and SGLang do not pad prompts to a box; they lay the rows end to end and pass where each one starts
# (`cu_seqlens`). Rows do not ride along either: finished ones leave and waiting ones enter between two steps, which is
# **continuous batching**. Kernels with a fixed order of summation are called batch-invariant there too.
#
# **Next:** [07 Static and continuous batching](07_static_and_continuous_batching.ipynb) gives away the places that ride
# along here. A row that is done leaves, and a waiting user takes its slot. **Before:** [05 The roofline](05_the_roofline.ipynb).
