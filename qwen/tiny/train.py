"""Make the shipped model: `python -m qwen.tiny.train` (4 to 6 minutes).

Reads `corpus.txt`, trains a byte-level BPE tokenizer and then the model on it, until every
answer is learned by heart: greedy decoding must return it exactly, and at every step the best
logit must lead the second by `WANTED_GAP`, so that no CPU's rounding prints another token.
Writes `config.json`, `model.safetensors` and `tokenizer.json` in the published layout.

Seed and thread count are fixed, so one machine makes the same files twice; another machine may
round differently and make other weights with the same answers.
"""
import json
import math
import os
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm

from qwen.batch import generate_batch
from qwen.chat import build_prompt
from qwen.config import Config
from qwen.model import Model

FOLDER = Path(__file__).parent
SEED, THREADS = 0, 1                   # matrices this small gain nothing from a second thread
STEPS, MAX_STEPS, CHECK_EVERY = 500, 1600, 50
BATCH, LEARNING_RATE, WEIGHT_DECAY = 32, 3e-3, 0.01
TRAINED_GAP, WANTED_GAP = 4.0, 1.5      # logits: what the loss pushes for, what every step must reach
BPE_SIZE = 768                          # 256 bytes and 512 merges; the special tokens follow

# Published Qwen splits text like this before the merges: contractions, words with the one
# character in front of them, single digits, punctuation, line breaks, spaces.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def read_corpus(file=FOLDER / "corpus.txt") -> list[list[tuple[str, str]]]:
    """All conversations, each a list of (question, answer).

    Raises ValueError naming the block whose lines are not "Q: " and "A: " in turn.
    """
    conversations = []
    for number, block in enumerate(re.split(r"\n\s*\n", Path(file).read_text(encoding="utf-8")), start=1):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if [line[:3] for line in lines] != ["Q: ", "A: "] * (len(lines) // 2):
            raise ValueError(f"corpus block {number} starts {lines[0]!r}, expected lines 'Q: ' and 'A: ' in turn")
        texts = [line[3:].replace("\\n", "\n") for line in lines]
        if texts:
            conversations.append(list(zip(texts[::2], texts[1::2])))
    return conversations


def examples(conversations) -> list[tuple[list[dict], str]]:
    """One (messages, answer) for each turn of each conversation; messages end with the question."""
    found = []
    for turns in conversations:
        messages = []
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            found.append((list(messages), answer))
            messages.append({"role": "assistant", "content": answer})
    return found


def train_tokenizer(conversations) -> Tokenizer:
    """A byte-level BPE in Qwen's manner: any text encodes, special tokens have the last ids."""
    tk = Tokenizer(models.BPE())
    tk.normalizer = normalizers.NFC()
    tk.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tk.decoder = decoders.ByteLevel()
    texts = [text for turns in conversations for turn in turns for text in turn]
    texts += [text for text in texts if len(text) < 6 and text.isalpha()] * 6      # "Paris", "Yes", "是": one token each
    tk.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=BPE_SIZE, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    tk.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tk.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
    return tk


def config_json(tk: Tokenizer) -> dict:
    """The fields of `config.json`, flat as in a published text-only checkpoint."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "vocab_size": tk.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,                                     # not hidden_size / num_attention_heads
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 1024,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "eos_token_id": tk.token_to_id("<|im_end|>"),
        "pad_token_id": tk.token_to_id("<|endoftext|>"),
    }


@torch.no_grad()
def initialise(model: Model) -> None:
    """Starting values: matrices normal(0, 0.02), norms scale by one, the heads' memories from less than a token to a hundred.

    A head's matrix shrinks by exp(-exp(A_log) softplus(dt_bias)) a token while its input is zero. Were all
    heads quick to forget, the linear layers would learn nothing but their convolution.
    """
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.copy_(torch.linspace(1, 16, weight.numel()).log())
        elif name.endswith("dt_bias"):
            weight.copy_(torch.logspace(-2, 0, weight.numel()).expm1().log())     # softplus gives 0.01 to 1
        elif name.endswith("linear_attn.norm.weight"):
            weight.fill_(1.0)
        elif name.endswith("norm.weight"):
            weight.zero_()                                  # RMSNorm scales by 1 + w
        else:
            weight.normal_(0.0, 0.2 if name.endswith("conv1d.weight") else 0.02)


def make_batch(rows: list[tuple[list[int], list[int]]]):
    """Right-padded inputs, next tokens and which of them are answer (or stop): each (B, T).

    Pads follow the real tokens and no earlier token sees them, so they need no mask.
    """
    T = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    ids, target = torch.zeros(2, len(rows), T, dtype=torch.long)        # (B, T)
    counted = torch.zeros(len(rows), T, dtype=torch.bool)               # (B, T)
    for row, (prompt, answer) in enumerate(rows):
        tokens = torch.tensor(prompt + answer)
        ids[row, :len(tokens) - 1] = tokens[:-1]
        target[row, :len(tokens) - 1] = tokens[1:]
        counted[row, len(prompt) - 1:len(tokens) - 1] = True
    return ids, target, counted


def gaps(logits, target):
    """How far each target's logit lies above the best other one, negative where it loses: (N, V), (N,) -> (N,)."""
    own = logits.gather(1, target[:, None])                             # (N, 1)
    return (own - logits.scatter(1, target[:, None], -math.inf)).amin(1)     # (N,)


@torch.no_grad()
def smallest_gap(model, batches) -> float:
    """The least gap over every greedy step of every answer, the stop step included (in logits)."""
    return min(gaps(model(ids)[counted], target[counted]).min().item() for ids, target, counted in batches)


def in_batches(rows) -> list[list]:
    """Rows of about equal length together, `BATCH` at a time."""
    rows = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    return [rows[i:i + BATCH] for i in range(0, len(rows), BATCH)]


def train(model, rows) -> float:
    """Train in place until the smallest gap reaches `WANTED_GAP`; returns it. RuntimeError if it never does."""
    batches = [make_batch(part) for part in in_batches(rows)]
    matrices = [w for w in model.parameters() if w.dim() >= 2]
    vectors = [w for w in model.parameters() if w.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": WEIGHT_DECAY},
                                   {"params": vectors, "weight_decay": 0.0}], lr=LEARNING_RATE, betas=(0.9, 0.98))
    gap, order = -math.inf, []
    with tqdm(total=STEPS, unit="step") as bar:
        for step in range(1, MAX_STEPS + 1):
            done = min(step / STEPS, 1.0)
            for group in optimizer.param_groups:            # a short warm-up, then a cosine down to a tenth
                group["lr"] = LEARNING_RATE * min(step / 20, 0.1 + 0.45 * (1 + math.cos(math.pi * done)))
            order = order or torch.randperm(len(batches)).tolist()
            ids, target, counted = batches[order.pop()]
            logits, target = model(ids)[counted], target[counted]       # (N, V), (N,)
            loss = F.cross_entropy(logits, target) + F.relu(TRAINED_GAP - gaps(logits, target)).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % CHECK_EVERY == 0:
                gap = smallest_gap(model, batches)
            bar.total = max(STEPS, step)
            bar.set_postfix(loss=f"{loss.item():.3f}", gap=f"{gap:.2f}", refresh=False)
            bar.update()
            if step >= STEPS and gap >= WANTED_GAP:
                return gap
    raise RuntimeError(f"after {MAX_STEPS} steps the smallest gap is {gap:.2f}, expected at least {WANTED_GAP}")


def check_greedy(model, rows, stop: int) -> None:
    """Decode every prompt and compare with its answer; RuntimeError naming the first that differs."""
    for part in tqdm(in_batches(rows), desc="decode", unit="batch"):
        wanted = [answer[:-1] for _, answer in part]
        found = generate_batch(model, [prompt for prompt, _ in part], max_new_tokens=max(map(len, wanted)) + 1, stop=[stop])
        for row, (got, answer) in enumerate(zip(found, (answer for _, answer in part))):
            if got != answer:
                raise RuntimeError(f"row {row} decodes to {got}, expected {answer}")


def write(name: str, data: bytes) -> None:
    """Write beside the file, then rename: an interrupted run leaves the old file whole."""
    beside = FOLDER / f"{name}.new"
    beside.write_bytes(data)
    os.replace(beside, FOLDER / name)


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    conversations = read_corpus()
    tk = train_tokenizer(conversations)
    stop = tk.token_to_id("<|im_end|>")
    rows = [(tk.encode(build_prompt(messages)).ids, tk.encode(answer).ids + [stop])
            for messages, answer in examples(conversations)]
    fields = config_json(tk)
    flat = {**fields, **fields["rope_parameters"]}
    model = Model(Config(**{name: flat[name] for name in Config.__dataclass_fields__}))
    initialise(model)
    gap = train(model, rows)
    check_greedy(model, rows, stop)
    tensors = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    write("config.json", (json.dumps(fields, indent=2) + "\n").encode())
    write("tokenizer.json", (tk.to_str(pretty=True) + "\n").encode())
    write("model.safetensors", save(tensors, {"format": "pt"}))
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters:,} parameters, {len(rows)} answers exact, smallest gap {gap:.2f} logits")


if __name__ == "__main__":
    main()
