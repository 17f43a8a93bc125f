"""The chunked delta rule against the loop that defines it, and the convolution against torch's own."""
import math

import pytest
import torch
from helpers import TOLERANCE, far
from torch.nn import functional as F

from qwen import deltanet
from qwen.chunk import delta_rule_chunks
from qwen.deltanet import delta_rule_steps, gates, l2norm, short_conv, window_index

DECAYS = {
    "hardly any": (-1e-4, 0.0),
    "some": (-1.0, 0.0),
    "from none to all at once": (-40.0, 0.0),
    "beyond what exp can hold": (-300.0, -80.0),
}


def problem(tokens, decay, seed=0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    q, k = (l2norm(torch.randn(2, 3, tokens, 8, generator=rng)) for _ in range(2))
    v, S = torch.randn(2, 3, tokens, 6, generator=rng), torch.randn(2, 3, 8, 6, generator=rng) * 3
    low, high = decay
    g = torch.rand(2, 3, tokens, generator=rng) * (high - low) + low
    beta = torch.rand(2, 3, tokens, generator=rng)
    return [t.to(dtype) for t in (q, k, v, g, beta, S)]


@pytest.mark.parametrize("decay", DECAYS)
def test_steps_are_the_rule_as_it_is_written(decay):
    """S <- exp(g) S; S <- S + k (beta (v - k S)); output q S: the step reads key and query together, before the write."""
    q, k, v, g, beta, S = problem(9, DECAYS[decay])
    before, outputs = S.clone(), []
    found, last = delta_rule_steps(q, k, v, g, beta, S)
    assert torch.equal(S, before)
    for t in range(9):
        S = S * g[:, :, t, None, None].exp()
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, :, t], beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], S)))
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], S))
    assert far(found, torch.stack(outputs, 2)) <= 0.1 and far(last, S) <= 0.1


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_equal_steps(decay, chunk):
    """Case 10: T = 1, C - 1, C, C + 1, 2C + 3, a state to start from, decay that varies strongly."""
    for tokens in (1, chunk - 1, chunk, chunk + 1, 2 * chunk + 3):
        args = problem(tokens, DECAYS[decay], seed=tokens)
        wanted, S = delta_rule_steps(*args)
        found, T = delta_rule_chunks(*args, chunk=chunk)
        assert far(found, wanted) <= 1 and far(T, S) <= 1, tokens


def test_decay_jumps_within_a_chunk():
    """Case 10: tokens that wipe the matrix beside tokens that keep it; differences of sums lose their digits here."""
    q, k, v, g, beta, S = problem(67, (-1e-3, 0.0))
    g[:, :, 5::7], g[:, :, 6::7], g[:, 1] = -200.0, 0.0, -1e-5
    wanted, last = delta_rule_steps(*(t.double() for t in (q, k, v, g, beta, S)))
    found, T = delta_rule_chunks(q, k, v, g, beta, S)
    assert far(found, wanted) <= 1 and far(T, last) <= 1


def test_the_same_key_again_and_again():
    """The hardest triangular system: equal keys, beta one, no decay. The matrix then holds the last value."""
    q, k, v, g, beta, S = problem(130, (0.0, 0.0))
    k[:], beta[:] = k[:, :, :1], 1.0
    wanted, last = delta_rule_steps(q, k, v, g, beta, S)
    found, T = delta_rule_chunks(q, k, v, g, beta, S)
    assert far(found, wanted) <= 1 and far(T, last) <= 1
    assert far((k[:, :, -1:] @ T)[:, :, 0], v[:, :, -1]) <= 1


def test_one_step_by_hand():
    """Decay first, then the difference to the value is written, then the query reads."""
    one = torch.ones(1, 1, 1, 1)
    out, S = delta_rule_steps(2 * one, one, 10 * one, torch.full((1, 1, 1), math.log(0.5)),
                              torch.full((1, 1, 1), 0.25), 4 * one)
    assert S.item() == pytest.approx(4 * 0.5 + 0.25 * (10 - 2))     # 4
    assert out.item() == pytest.approx(8)


@pytest.mark.parametrize("rule", [delta_rule_steps, delta_rule_chunks])
def test_silent_tokens_change_nothing(rule):
    """g = beta = 0 leaves the matrix exactly as it was, whatever stands in q, k and v."""
    q, k, v, g, beta, S = problem(70, (0.0, 0.0))
    assert torch.equal(rule(q, k, v, torch.zeros_like(g), torch.zeros_like(beta), S)[1], S)


def test_gates_by_hand():
    """g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), both exactly 0 at the pad, fp32 for any input."""
    a, b = torch.tensor([[[1.0], [5.0], [-2.0]]]), torch.tensor([[[0.0], [5.0], [2.0]]])
    mask = torch.tensor([[True, False, True]])
    for dtype in (torch.float32, torch.bfloat16):
        g, beta = gates(a.to(dtype), b.to(dtype), torch.tensor([math.log(3.0)]), torch.tensor([0.5]), mask)
        assert g.dtype == beta.dtype == torch.float32
        softplus = math.log1p(math.exp(1.5)), math.log1p(math.exp(-1.5))
        assert g[0, :, 0].tolist() == pytest.approx([-3 * softplus[0], 0, -3 * softplus[1]])
        assert beta[0, :, 0].tolist() == pytest.approx([0.5, 0, 1 / (1 + math.exp(-2))])
        assert g[0, 1].item() == beta[0, 1].item() == 0


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_convolution_equals_torch(kernel):
    """A carried window is what stood before; without pads the whole is torch's depthwise convolution."""
    rng = torch.Generator().manual_seed(kernel)
    x, weight = torch.randn(2, 9, 5, generator=rng), torch.randn(5, 1, kernel, generator=rng)
    wanted = F.silu(F.conv1d(F.pad(x.transpose(1, 2), (kernel - 1, 0)), weight, groups=5)).transpose(1, 2)
    carried, out = torch.zeros(2, kernel - 1, 5), []
    for part in (x[:, :1], x[:, 1:3], x[:, 3:]):
        before = window_index(torch.ones(part.shape[:2], dtype=torch.bool), kernel)
        got, carried = short_conv(part, carried, weight, before)
        out.append(got)
    assert far(torch.cat(out, 1), wanted) <= 1
    assert torch.equal(carried, x[:, 9 - (kernel - 1):])


def test_window_skips_pads_by_hand():
    """Marker numbers: 10 and 20 are carried, the pad's 999 reaches nobody."""
    x = torch.tensor([[[30.0], [999.0], [40.0]]])
    carried = torch.tensor([[[10.0], [20.0]]])
    before = window_index(torch.tensor([[True, False, True]]), 3)
    weight = torch.tensor([[[1.0, 0.01, 0.0001]]])
    out, window = short_conv(x, carried, weight, before)
    wanted = F.silu(torch.tensor([10 + 0.2 + 0.003, 20 + 0.3 + 0.004]))
    assert out[0, [0, 2], 0].tolist() == pytest.approx(wanted.tolist())
    assert window.tolist() == [[[30.0], [40.0]]]


def test_tolerance_is_crossed_without_the_decay_between():
    """Planted fault: chunks that forget the decay between two of their tokens."""
    q, k, v, g, beta, S = problem(40, DECAYS["some"])
    wrong, wanted = delta_rule_chunks(q, k, v, torch.zeros_like(g), beta, S), delta_rule_steps(q, k, v, g, beta, S)
    assert far(wrong[0], wanted[0]) > 10 and far(wrong[1], wanted[1]) > 10


def test_one_token_takes_the_loop_and_more_the_chunks(model, monkeypatch):
    """Both are really used, so that comparing a cut prefill with a whole one compares the two."""
    used = []
    for name in ("delta_rule_step", "delta_rule_chunks"):
        rule = getattr(deltanet, name)
        monkeypatch.setattr(deltanet, name, lambda *args, rule=rule, name=name: used.append(name) or rule(*args))
    model(torch.tensor([[1]]))
    model(torch.tensor([[1, 2]]))
    assert used == ["delta_rule_step"] * 2 + ["delta_rule_chunks"] * 2
    assert TOLERANCE == 1e-4
