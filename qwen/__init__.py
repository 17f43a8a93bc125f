"""A small Qwen3.5 in plain PyTorch, written to be read: see the files in the order of `qwen.READING_ORDER`."""

READING_ORDER = (
    "config", "weights", "embedding", "norm", "mlp", "rope", "attention", "deltanet", "chunk",
    "layer", "model", "cache", "sample", "chat", "batch",
)
