"""Small random models, the solo run that is the truth, and the one bound every comparison uses."""
import torch

from qwen.cache import State
from qwen.config import Config
from qwen.model import Model

TOLERANCE = 1e-4                                            # times max(1, |reference|), fp32
GAIN = 0.5                                                  # of every matrix inside the layers
NEAR_TIE = 1e-3                                             # greedy tokens are compared up to the first such gap
LINEAR, FULL = "linear_attention", "full_attention"

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    layer_types=(LINEAR, FULL, LINEAR, FULL), num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
    linear_conv_kernel_dim=4, rope_theta=10_000.0, partial_rotary_factor=0.5, rms_norm_eps=1e-6,
    max_position_embeddings=512, tie_word_embeddings=True,
)


def small_config(**changes) -> Config:
    return Config(**{**SMALL, **changes})


@torch.no_grad()
def random_model(seed=0, decay=(0.01, 2.0), **changes) -> Model:
    """A model in which every weight matters and rounding is not blown up: norms are not one, logits spread by about 2.

    decay: the range of exp(A_log); a small one keeps what was written for long, a large one forgets at once.
    """
    rng = torch.Generator().manual_seed(seed)
    model = Model(small_config(**changes))
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.copy_(torch.linspace(*decay, len(weight)).log())
        elif name.endswith("dt_bias"):
            weight.copy_(torch.randn(weight.shape, generator=rng))
        elif name.endswith("norm.weight"):
            weight.add_(torch.randn(weight.shape, generator=rng) * 0.3)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weight.copy_(torch.randn(weight.shape, generator=rng) * 0.4)
        else:
            fan_in = weight[0].numel()
            weight.copy_(torch.randn(weight.shape, generator=rng) * GAIN * fan_in ** -0.5)
    return model.requires_grad_(False).eval()


def tokens(seed: int, *lengths: int, vocab: int = 64) -> list[list[int]]:
    """One random prompt for each length."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=rng).tolist() for n in lengths]


def far(found, reference) -> float:
    """How far two tensors are apart, in units of the tolerance: at most 1 passes. Shapes and NaN count as infinite."""
    if found.shape != reference.shape or not found.isfinite().all():
        return float("inf")
    if not found.numel():
        return 0.0
    found, reference = found.double(), reference.double()
    return ((found - reference).abs() / (TOLERANCE * reference.abs().clamp(min=1))).max().item()


def row_of(state: State, row: int) -> dict:
    """Everything a row carries, by name: keys and values only up to its own length."""
    length = state.length[row].item()
    kept = {"length": state.length[row]}
    for name in ("k", "v"):
        kept |= {f"{name}.{layer}": t[row, :, :length] for layer, t in getattr(state, name).items()}
    for name in ("conv", "recurrent"):
        kept |= {f"{name}.{layer}": t[row] for layer, t in getattr(state, name).items()}
    return kept


def states_far(state: State, row: int, reference: State, reference_row: int = 0) -> float:
    """The largest `far` over all that the two rows carry."""
    found, wanted = row_of(state, row), row_of(reference, reference_row)
    return max(far(found[name], wanted[name]) for name in wanted)


def same_row(state: State, row: int, reference: State, reference_row: int = 0) -> bool:
    """Exactly equal, bit for bit."""
    found, wanted = row_of(state, row), row_of(reference, reference_row)
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


@torch.no_grad()
def solo(model, prompt) -> tuple[torch.Tensor, State]:
    """The truth: the prompt alone, in one call -> logits (T, vocab) and the state of its one row."""
    state = State(model)
    return model(torch.tensor([prompt]), state)[0], state
