"""The loops: stops, limits, seeds, neighbours, and errors that come before any work."""
import pytest
import torch
from helpers import random_model, small_config, tokens

from qwen.batch import generate_batch
from qwen.model import Model
from qwen.sample import generate, stream

PROMPTS = tokens(1, 2, 9, 1, 70)


def alone(model, prompt, *args, **settings):
    return generate(model, torch.tensor([prompt]), *args, **settings)


@pytest.fixture(scope="module")
def answers(model):
    """Twelve greedy tokens of every prompt, alone."""
    return [alone(model, prompt, 12) for prompt in PROMPTS]


@pytest.fixture
def idle(model, monkeypatch):
    """A model that must not be run."""
    def forward(*args, **kwargs):
        raise AssertionError("the model ran")
    monkeypatch.setattr(type(model), "forward", forward)
    return model


def cut(answer, stop):
    """What is left of an answer that ends with the first of the stop tokens."""
    for i, token in enumerate(answer):
        if token in stop:
            return answer[:i + 1]
    return answer


def test_answers_differ(answers):
    """Otherwise the tests below show nothing."""
    assert len({tuple(answer) for answer in answers}) == len(answers)
    assert len({token for answer in answers for token in answer}) > 10


@pytest.mark.parametrize("kind", [int, list, set, tuple, frozenset])
def test_kinds_of_stop(model, answers, kind):
    """Case 13: an id or any collection of ids."""
    token = answers[1][4]
    stop = token if kind is int else kind([token])
    wanted = [cut(answer, {token}) for answer in answers]
    assert generate_batch(model, PROMPTS, 12, stop=stop) == wanted
    assert [alone(model, prompt, 12, stop=stop) for prompt in PROMPTS] == wanted


@pytest.mark.parametrize("stop", [(), [], set(), None], ids=str)
def test_no_stop(model, answers, stop):
    """Case 13."""
    assert generate_batch(model, PROMPTS, 12, stop=stop) == answers
    assert alone(model, PROMPTS[0], 12, stop=stop) == answers[0]


def test_token_zero_can_stop():
    """stop=0 is an id, not "none"."""
    script = [[3, 0, 5]]
    assert generate_batch(Always(script), [[1]], 5, stop=0) == [[3, 0]]
    assert alone(Always(script), [1], 5, stop=0) == [3, 0]


def test_each_stop_ends_its_own_row(model, answers):
    """Case 13: two stops, in different rows, at different steps; the stop is listed, nothing behind it is."""
    stop = {answers[0][1], answers[3][5]}
    wanted = [cut(answer, stop) for answer in answers]
    assert len({len(answer) for answer in wanted}) > 1
    assert generate_batch(model, PROMPTS, 12, stop=stop) == wanted


@pytest.mark.parametrize("row", range(4))
def test_first_token_is_a_stop(model, answers, row):
    """Case 14: such a row has that one token; its neighbours are as they were."""
    stop = answers[row][0]
    wanted = [cut(answer, {stop}) for answer in answers]
    assert wanted[row] == [stop]
    assert generate_batch(model, PROMPTS, 12, stop=stop) == wanted


def test_all_rows_stop_at_once(model, answers):
    """Case 14: and then the model is not run again."""
    stop, counted = {answer[0] for answer in answers}, []
    hook = model.register_forward_hook(lambda *call: counted.append(1))
    assert generate_batch(model, PROMPTS, 12, stop=stop) == [[answer[0]] for answer in answers]
    hook.remove()
    assert len(counted) == 1


@pytest.mark.parametrize("new", [0, 1, 2, 12])
def test_max_new_tokens(model, answers, new):
    """Case 14: 0 gives no token, without a run; n tokens take n runs."""
    counted = []
    hook = model.register_forward_hook(lambda *call: counted.append(1))
    assert generate_batch(model, PROMPTS, new) == [answer[:new] for answer in answers]
    assert len(counted) == new
    assert alone(model, PROMPTS[0], new) == answers[0][:new]
    assert len(counted) == 2 * new
    hook.remove()


@pytest.mark.parametrize("rows", [[0], [3], [1, 1, 1], [3, 0], [2, 1, 0, 3, 2]], ids=str)
def test_neighbours_never_matter(model, answers, rows):
    assert generate_batch(model, [PROMPTS[row] for row in rows], 12) == [answers[row] for row in rows]


SAMPLING = {
    "plain": dict(temperature=1.0),
    "hot": dict(temperature=2.5),
    "top_k": dict(temperature=1.0, top_k=5),
    "top_p": dict(temperature=1.5, top_p=0.7),
    "penalty": dict(temperature=1.0, repetition_penalty=1.5),
    "all": dict(temperature=1.3, top_k=20, top_p=0.9, repetition_penalty=1.2),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_seeds_give_each_row_its_solo_tokens(model, name):
    """In any order, beside any neighbour, with rows that end early; equal prompts with unequal seeds differ."""
    settings, seeds = SAMPLING[name], [11, 22, 33, 11]
    stop = alone(model, PROMPTS[1], 12, seed=22, **settings)[6]
    prompts = [*PROMPTS[:3], PROMPTS[1]]
    for ending in ((), stop):
        wanted = [alone(model, p, 12, ending, seed=s, **settings) for p, s in zip(prompts, seeds)]
        assert generate_batch(model, prompts, 12, ending, seeds, **settings) == wanted
        assert generate_batch(model, prompts[::-1], 12, ending, seeds[::-1], **settings) == wanted[::-1]
        assert wanted[1] != wanted[3]


def test_seeds_leave_the_global_generator_alone(model):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generate_batch(model, PROMPTS[:2], 4, seeds=[1, 2], temperature=1.0)
    alone(model, PROMPTS[0], 4, seed=0, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)
    first = alone(model, PROMPTS[0], 12, temperature=1.0)    # without a seed the global one is used
    torch.manual_seed(0)
    assert alone(model, PROMPTS[0], 12, temperature=1.0) == first


@pytest.mark.parametrize("seeds", [[0, 0, 0], range(3), (1, 2, 3)], ids=str)
def test_kinds_of_seeds(model, seeds):
    """Seed 0 is a seed."""
    first, again = (generate_batch(model, PROMPTS[:3], 6, seeds=seeds, temperature=1.0) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("prompts", [[[5], [1] * 10], [[5, 0], [0], [1] * 10]], ids=str)
def test_repetition_penalty_does_not_count_pads_or_prompts(prompts):
    """Case 16: the pad id 0 is a plausible next token; equal to solo, greedy and drawn."""
    model = random_model(2)
    model.embed_tokens.weight[0] *= 2                        # token 0 wins or loses by much
    for settings in (dict(), dict(temperature=1.0)):
        seeds = list(range(len(prompts)))
        wanted = [alone(model, p, 12, seed=s, repetition_penalty=1.3, **settings) for p, s in zip(prompts, seeds)]
        assert any(0 in answer for answer in wanted)
        assert generate_batch(model, prompts, 12, seeds=seeds, repetition_penalty=1.3, **settings) == wanted


def test_penalty_does_not_count_the_prompt():
    fixed = Always([[3, 4], [4, 3]], second=0.9)             # 3 ten times in the prompt, and still the first choice
    assert alone(fixed, [3] * 10, 2, repetition_penalty=2.0) == [3, 4]


class Always(torch.nn.Module):
    """A stand-in whose n-th new token is fixed: row r's best token at step n is script[r][n]."""

    check_prompts = Model.check_prompts

    def __init__(self, script, vocab=8, second=0.0):
        super().__init__()
        self.script, self.vocab, self.second, self.step = script, vocab, second, 0
        self.config, self.device, self.dtype = small_config(vocab_size=vocab), torch.device("cpu"), torch.float32

    def forward(self, ids, state=None, mask=None, last_only=False):
        logits = torch.full((len(ids), 1, self.vocab), self.second)
        for row in range(len(ids)):
            logits[row, 0, self.script[row][self.step % len(self.script[row])]] = 1.0
        self.step += 1
        return logits


@pytest.mark.parametrize("length, new", [(16, 1), (15, 2), (16, 0), (1, 16)])
def test_prompts_that_just_fit(small_context, length, new):
    """Case 7: the last token needs no position."""
    prompt = tokens(2, length)[0]
    answer = alone(small_context, prompt, new)
    assert len(answer) == new
    assert generate_batch(small_context, [[1], prompt], new)[1] == answer


@pytest.mark.parametrize("length, new", [(15, 3), (17, 1), (17, 0), (1, 17), (16, 2)])
def test_prompts_that_do_not_fit(small_context, length, new, idle):
    """Case 7: an error that names the row, before any work."""
    prompt = tokens(2, length)[0]
    for row, prompts in ((0, [prompt]), (0, [prompt, [1]]), (1, [[1], prompt])):
        if new < 17 or row == 0:
            with pytest.raises(ValueError, match=f"row {row}: .*{length} tokens.*{new} new.*context of 16"):
                generate_batch(small_context, prompts, new)
    with pytest.raises(ValueError, match="row 0: .*context of 16"):
        alone(small_context, prompt, new)


@pytest.mark.parametrize("prompts, row", [([[]], 0), ([[], [1, 2]], 0), ([[1], []], 1)], ids=str)
def test_empty_rows(idle, prompts, row):
    """Case 15."""
    for new in (0, 5):
        with pytest.raises(ValueError, match=f"row {row} is empty"):
            generate_batch(idle, prompts, new)
    with pytest.raises(ValueError, match="row 0 is empty"):
        generate(idle, torch.zeros(1, 0, dtype=torch.int64))


def test_no_rows(idle):
    """Case 15."""
    assert generate_batch(idle, []) == []
    assert generate_batch(idle, [], 0) == []
    assert generate_batch(idle, [], seeds=[]) == []


BAD_CALLS = {
    "token beyond the vocabulary": (ValueError, [[1], [2, 64]], {}, "row 1 holds token 64.*0 to 63"),
    "negative token": (ValueError, [[-1]], {}, "row 0 holds token -1"),
    "token that is no int": (TypeError, [[1], [2.0]], {}, "row 1 holds 2.0"),
    "token that is a bool": (TypeError, [[True]], {}, "row 0 holds True"),
    "row that is no list": (TypeError, [[1], 2], {}, "row 1 is 2"),
    "row that is text": (TypeError, ["hello"], {}, "row 0 is 'hello'"),
    "negative max_new_tokens": (ValueError, [[1]], dict(max_new_tokens=-1), "max_new_tokens is -1"),
    "max_new_tokens a fraction": (ValueError, [[1]], dict(max_new_tokens=1.5), "max_new_tokens is 1.5"),
    "temperature": (ValueError, [[1]], dict(temperature=-0.1), "temperature is -0.1"),
    "top_k": (ValueError, [[1]], dict(top_k=-1), "top_k is -1"),
    "top_p": (ValueError, [[1]], dict(top_p=2.0), "top_p is 2.0"),
    "repetition_penalty": (ValueError, [[1]], dict(repetition_penalty=0.0), "repetition_penalty is 0.0"),
    "unknown setting": (TypeError, [[1]], dict(topp=0.9), "topp"),
    "seeds": (ValueError, [[1], [2]], dict(seeds=[1]), "seeds has 1 entries for 2 rows"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors_come_before_any_work(idle, name):
    error, prompts, settings, says = BAD_CALLS[name]
    with pytest.raises(error, match=says):
        generate_batch(idle, prompts, **settings)
    if "seeds" not in settings and len(prompts) == 1 and isinstance(prompts[0], list):
        for loop in (generate, stream):                      # stream too at the call, not at the first token
            with pytest.raises(error, match=says):
                loop(idle, torch.tensor(prompts), **settings)


@pytest.mark.parametrize("ids", [[[1, 2]], torch.tensor([1, 2]), torch.tensor([[1], [2]])], ids=str)
def test_generate_takes_one_prompt(idle, ids):
    with pytest.raises(ValueError, match=r"expected \(1, T\)"):
        generate(idle, ids)


def test_again_and_after_an_exception(model, answers):
    """Case 21: A, B, A; A again after a run that broke in the middle; nothing is left over from it."""
    assert alone(model, PROMPTS[0], 12) == answers[0]
    assert alone(model, PROMPTS[3], 12) == answers[3]
    handle = model.layers[2].register_forward_hook(lambda *call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate_batch(model, PROMPTS, 12)
    handle.remove()
    assert generate_batch(model, PROMPTS, 12) == answers
    assert alone(model, PROMPTS[0], 12) == answers[0]


def test_stream_gives_tokens_as_they_come(model, answers):
    counted = []
    hook = model.register_forward_hook(lambda *call: counted.append(1))
    tokens_ = stream(model, torch.tensor([PROMPTS[0]]), 12)
    assert counted == []
    assert [next(tokens_), next(tokens_)] == answers[0][:2] and len(counted) == 2
    tokens_.close()
    hook.remove()


def test_nothing_tracks_gradients():
    """A model still in training generates without building a graph."""
    model = random_model(4).requires_grad_(True)
    assert generate_batch(model, [[1, 2], [3]], 3) == [alone(model, [1, 2], 3), alone(model, [3], 3)]
    assert torch.is_grad_enabled()
