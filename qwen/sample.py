"""From logits to the next token, and the plain loop for one prompt: the truth every batch is held against."""
import math

import torch

from qwen.cache import State


def check_sampling(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0):
    """Refuse settings that mean nothing, with a ValueError that names the setting."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature!r}, expected 0 (argmax) or more")
    if type(top_k) is not int or top_k < 0:
        raise ValueError(f"top_k is {top_k!r}, expected a whole number of at least 0 (0 = off)")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p is {top_p!r}, expected 0 to 1 (1 = off)")
    if not 0 < repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty is {repetition_penalty!r}, expected more than 0 (1 = off)")


def sample(logits, generated=(), temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, generator=None) -> int:
    """Draw one token from logits (vocab,).

    Applied in this order: repetition_penalty (Keskar et al. 2019, arXiv 1909.05858) on the tokens in
    `generated`; the prompt does not count as generated. temperature, 0 = argmax. top_k, 0 = off. top_p
    (Holtzman et al. 2020, arXiv 1904.09751): the fewest most likely tokens that reach it, at least one.
    generator: a CPU `torch.Generator`. The draw is made in fp32 on the CPU, so a row's neighbours cannot move it.
    Raises ValueError for a setting out of range or logits that are not numbers.
    """
    check_sampling(temperature, top_k, top_p, repetition_penalty)
    logits = logits.detach().float().cpu()
    if logits.dim() != 1:
        raise ValueError(f"logits have shape {tuple(logits.shape)}, expected (vocab,)")
    if logits.isnan().any() or logits.amax().isinf():
        raise ValueError("logits hold NaN, or infinity at their best, expected numbers")
    if repetition_penalty != 1 and len(generated):
        seen = torch.tensor(sorted(set(generated)))
        score = logits[seen]
        logits = logits.clone()
        logits[seen] = torch.where(score > 0, score / repetition_penalty, score * repetition_penalty)
    if temperature == 0:
        return logits.argmax().item()
    logits = (logits - logits.max()).double() / temperature               # the best is 0: nothing overflows
    ranked, tokens = logits.sort(descending=True, stable=True)
    if top_k:
        ranked, tokens = ranked[:top_k], tokens[:top_k]
    probs = ranked.softmax(0)
    kept = max(1, int((probs.cumsum(0) - probs < top_p).sum()))           # those whose predecessors fall short of top_p
    # Drawn in the vocabulary's order: by rank, two near-equal logits that rounding swaps would swap the token
    probs = torch.zeros_like(logits).scatter(0, tokens[:kept], probs[:kept])
    return torch.multinomial(probs, 1, generator=generator).item()


def stop_set(stop) -> set[int]:
    """stop as a set of ids, given as an int, a list, a set, empty or None."""
    return {stop} if isinstance(stop, int) else set(stop or ())


def seeded(seed):
    """A generator of its own for a seed, or None (torch's global one)."""
    return None if seed is None else torch.Generator().manual_seed(seed)


def stream(model, ids, max_new_tokens=100, stop=(), seed=None, **sampling):
    """`generate`, token by token: an iterator over one prompt's new tokens. Checks its arguments at once."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1:
        raise ValueError(f"ids have shape {tuple(getattr(ids, 'shape', ()))}, expected (1, T): one prompt")
    model.check_prompts(ids.tolist(), max_new_tokens)
    check_sampling(**sampling)
    return _stream(model, ids, max_new_tokens, stop_set(stop), seeded(seed), sampling)


@torch.no_grad()
def _stream(model, ids, max_new_tokens, stop, generator, sampling):
    state, new = State(model), []
    while len(new) < max_new_tokens:
        logits = model(ids, state, last_only=True)[0, -1]
        new.append(sample(logits, new, generator=generator, **sampling))
        yield new[-1]
        if new[-1] in stop:
            return
        ids = torch.tensor([[new[-1]]])


def generate(model, ids, max_new_tokens=100, stop=(), seed=None, **sampling) -> list[int]:
    """One prompt's new tokens, ids (1, T): at most max_new_tokens; the stop token, if one comes, is the last.

    stop: an id, several, or none. seed: the draw's own, needed where temperature > 0 is to be repeatable.
    sampling: `sample`'s settings. Raises ValueError or TypeError before any work.
    """
    return list(stream(model, ids, max_new_tokens, stop, seed, **sampling))
