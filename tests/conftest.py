"""What all tests of the package share: one thread, no model named by the environment, some small models."""
import pytest
import torch
from helpers import random_model


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small models are faster on one thread, and a second pytest beside this one does not fight for cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_model_from_outside(monkeypatch):
    monkeypatch.delenv("QWEN_MODEL", raising=False)


@pytest.fixture(scope="session")
def model():
    """Both kinds of layer, grouped heads in both, a head of its own."""
    return random_model(0, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def small_context():
    """The same with room for 16 tokens."""
    return random_model(1, max_position_embeddings=16)
