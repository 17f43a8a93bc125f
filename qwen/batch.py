"""Several prompts in one forward pass: pad them to a box, mask the pads, give every row its next token."""
import torch

from qwen.cache import State
from qwen.sample import check_sampling, sample, seeded, stop_set


def pad_left(seqs, pad_id: int = 0):
    """Token lists of unequal length -> ids int64 (B, T) with pads on the left, mask bool (B, T), True = real.

    The mask comes from the lengths: a prompt may contain pad_id. Raises ValueError naming an empty row.
    """
    for row, seq in enumerate(seqs):
        if len(seq) == 0:
            raise ValueError(f"row {row} is empty, expected at least one token")
    longest = max(map(len, seqs), default=0)
    ids = [[pad_id] * (longest - len(seq)) + list(seq) for seq in seqs]
    mask = [[False] * (longest - len(seq)) + [True] * len(seq) for seq in seqs]
    box = len(seqs), longest
    return torch.tensor(ids, dtype=torch.int64).view(box), torch.tensor(mask, dtype=torch.bool).view(box)


@torch.no_grad()
def generate_batch(model, seqs, max_new_tokens=100, stop=(), seeds=None, **sampling) -> list[list[int]]:
    """`sample.generate` for every prompt at once: each row gets the tokens it would get alone.

    seqs: token lists. stop: an id, several, or none; it ends its own row only and is the last token listed.
    A row that is done rides along, its further tokens unrecorded, until all are. seeds: one a row.
    Raises ValueError or TypeError naming the row, before any work.
    """
    model.check_prompts(seqs, max_new_tokens)
    check_sampling(**sampling)
    if seeds is not None and len(seeds) != len(seqs):
        raise ValueError(f"seeds has {len(seeds)} entries for {len(seqs)} rows, expected one a row")
    new = [[] for _ in seqs]
    if not seqs or max_new_tokens == 0:
        return new
    stop, generators = stop_set(stop), [seeded(seed) for seed in seeds or [None] * len(seqs)]
    ids, mask = pad_left(seqs)
    state = State(model, len(seqs), max_len=ids.shape[1] + max_new_tokens - 1)
    logits = model(ids, state, mask, last_only=True)[:, -1]               # prefill: (B, vocab)
    done = [False] * len(seqs)
    while True:
        for row, tokens in enumerate(new):
            if not done[row]:
                tokens.append(sample(logits[row], tokens, generator=generators[row], **sampling))
                done[row] = tokens[-1] in stop or len(tokens) == max_new_tokens
        if all(done):
            return new
        ids = torch.tensor([[tokens[-1]] for tokens in new])              # a row that is done repeats its last token
        logits = model(ids, state)[:, -1]                                 # decode: one token a row
