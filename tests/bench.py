"""`make bench`: decode steps of the published 0.8B shape with random weights, held against the machine and a library.

Everything is built in memory; nothing is downloaded. Prints one table, with the prediction of `qwen.roofline` beside
each row, and writes figures/batch_gain.svg. `transformers` runs the same weights with its own cache, its steps
alternating with ours so that a change in the machine's speed meets both.
"""
import argparse
import gc
import platform
import resource
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from qwen import attention, deltanet, measure, roofline
from qwen.batch import pad_left
from qwen.cache import State
from qwen.packed import PackedLinear, pack

ROOT = Path(__file__).resolve().parent.parent
SHAPE = replace(roofline.QWEN_CONFIG, max_position_embeddings=4096)
BATCHES, COMPARED, STEPS, CONTEXT = (1, 2, 4, 8, 16, 32), (1, 4, 16), 10, 32


def library_model(model):
    """`transformers`' model of the same shape around the very same weight tensors (before ours are packed)."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
             "linear_value_head_dim", "linear_conv_kernel_dim", "rms_norm_eps", "max_position_embeddings",
             "tie_word_embeddings")
    config = Qwen3_5TextConfig(**{name: getattr(SHAPE, name) for name in names}, layer_types=list(SHAPE.layer_types),
                               rope_parameters={"rope_type": "default", "rope_theta": SHAPE.rope_theta,
                                                "partial_rotary_factor": SHAPE.partial_rotary_factor})
    with torch.device("meta"):
        library = Qwen3_5ForCausalLM(config)
    library.load_state_dict({f"model.{name}": weight for name, weight in model.named_parameters()}, strict=False, assign=True)
    library.tie_weights()
    library.model.rotary_emb = Qwen3_5TextRotaryEmbedding(config).to(model.device)      # its buffer is no parameter
    return library.eval().requires_grad_(False)


class Ours:
    """One batch on our side: prefill once, then a step a call."""

    def __init__(self, model, ids, mask):
        self.model, self.state = model, State(model, len(ids), max_len=ids.shape[1] + STEPS + 2)
        self.next = model(ids, self.state, mask, last_only=True).argmax(-1)

    def __call__(self):
        self.next = self.model(self.next, self.state).argmax(-1)


class Library:
    """The same batch in `transformers`, left-padded, with its own cache."""

    def __init__(self, model, ids, mask):
        self.model, self.mask = model, mask.long().to(model.device)
        self.out = model(ids.to(model.device), attention_mask=self.mask, use_cache=True, logits_to_keep=1)

    def __call__(self):
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.out = self.model(self.out.logits.argmax(-1), attention_mask=self.mask, use_cache=True, logits_to_keep=1,
                              cache=self.out.cache)


def alternate(runs, steps=STEPS):
    """Median seconds of a step of each run, the runs taking turns; the first turn does not count."""
    taken = [[measure.clock(run) for run in runs] for _ in range(steps + 1)]
    return [median(column) for column in zip(*taken[1:])]


def prompts(batch, context):
    return pad_left([[(7 * row + i) % 1000 for i in range(n)] for row, n in enumerate(measure.unequal(batch, context))])


def row(name, batch, seconds, cost, machine, base=None, ratio=None):
    """One line of the table: measured beside predicted."""
    least, most = cost.seconds(*machine)
    gain = f"{base / seconds * batch:5.2f}x" if base else "      "
    other = f"{ratio:6.2f}x" if ratio else "       "
    print(f"{name:24}{batch:4}{seconds * 1e3:9.1f} ms{batch / seconds:8.1f}{gain:>9}{other:>10}"
          f"{least * 1e3:9.1f} to {most * 1e3:6.1f} ms{seconds / most:8.2f}{cost.bytes / seconds / machine[0]:9.0%} of {machine[0] / 1e9:.0f} GB/s", flush=True)


HEAD = (f"{'':24}{'rows':>4}{'a step':>12}{'tok/s':>8}{'gain':>9}{'library':>10}{'predicted':>22}{'/ sum':>8}{'memory':>9}\n"
        "gain: tokens a second over one row's; library: its time for the same step over ours; predicted: the larger of memory\n"
        "and compute time, and their sum; / sum: measured over it; memory: share of the measured bandwidth")


def decode_table(model, library, machine, name, element_bytes):
    """Decode steps over the batch size; returns tokens a second for ours, the library's and the predicted (most, least).

    The memory is read in turn with our steps, since on a shared machine its speed changes from minute to minute; the
    library's steps take turns with further ones of ours. The picture's prediction takes the median of those speeds.
    """
    ours, theirs, costs, speeds, base = {}, {}, {}, [], None
    array = torch.ones(1 << 26, device=model.device)        # 268 MB
    for batch in BATCHES:
        ids, mask = prompts(batch, CONTEXT)
        reading, seconds = alternate([array.sum, Ours(model, ids, mask)])
        base = base or seconds
        cost = roofline.total(roofline.step_cost(SHAPE, batch, CONTEXT, element_bytes=element_bytes))
        now, ratio = (array.nbytes / reading, machine[1]), None
        if library and batch in COMPARED:
            own, other = alternate([Ours(model, ids, mask), Library(library, ids, mask)])
            ratio, theirs[batch] = other / own, batch / other
        row(f"{name} decode", batch, seconds, cost, now, base, ratio)
        ours[batch] = batch / seconds
        costs[batch] = cost
        speeds.append(now[0])
    predicted = {batch: [batch / t for t in cost.seconds(median(speeds), machine[1])] for batch, cost in costs.items()}
    return ours, theirs, predicted


def prefill_table(model, library, machine, name, element_bytes, batch=4, tokens=256):
    ids, mask = pad_left([[5] * tokens] * batch)
    times = [[measure.clock(lambda: Ours(model, ids, mask)), measure.clock(lambda: Library(library, ids, mask))]
             for _ in range(2)] if library else [[measure.clock(lambda: Ours(model, ids, mask))]]
    seconds, *other = (min(column) for column in zip(*times))
    cost = roofline.total(roofline.step_cost(SHAPE, batch, 0, tokens, element_bytes))
    row(f"{name} prefill of {tokens}", batch, seconds, cost, machine, None, *(t / seconds for t in other))
    print(f"{'':24}{batch * tokens / seconds:.0f} prompt tokens a second")


def context_table(model, machine, element_bytes):
    for batch in (1, 4):
        short, long = (measure.decode_seconds(model, [context] * batch) for context in (64, 2048))
        costs = [roofline.step_cost(SHAPE, batch, context, element_bytes=element_bytes)["attention"].bytes for context in (64, 2048)]
        reading = (costs[1] - costs[0]) / machine[0]
        print(f"context 64 to 2048, {batch} rows: {short * 1e3:.1f} to {long * 1e3:.1f} ms, {(long - short) * 1e3:+.1f} ms; "
              f"reading the longer cache takes {reading * 1e3:.1f} ms, with a tenth of the step {(reading + short / 10) * 1e3:.1f} ms")


def parts_table(model, batch):
    """Where a step's time goes, each part timed inside the same steps."""
    taken, state = {}, measure.filled_state(model, measure.unequal(batch, CONTEXT), STEPS + 2)

    def timed(name, function):
        def call(*args):
            start = time.perf_counter()
            out = function(*args)
            key = name if name else ("head" if args[0] is model.lm_head else "projections")
            taken[key] = taken.get(key, 0) + time.perf_counter() - start
            return out
        return call

    ids = torch.zeros(batch, 1, dtype=torch.int64)
    model(ids, state)
    with (patch.object(PackedLinear, "forward", timed(None, PackedLinear.forward)),
          patch.object(torch.nn.Linear, "forward", timed("projections", torch.nn.Linear.forward)),
          patch.object(attention, "attend", timed("attention", attention.attend)),
          patch.object(deltanet, "delta_rule_step", timed("DeltaNet state", deltanet.delta_rule_step))):
        start = time.perf_counter()
        for _ in range(STEPS):
            model(ids, state)
        whole = time.perf_counter() - start
    taken["everything else"] = whole - sum(taken.values())
    print(f"where a step with {batch} rows goes: {whole / STEPS * 1e3:.1f} ms = " + ", ".join(
        f"{name} {t / STEPS * 1e3:.1f}" for name, t in sorted(taken.items(), key=lambda item: -item[1])))


def held(model) -> int:
    """Bytes of all weights, plain and packed."""
    tensors = [*model.parameters(), *(m.weight for m in model.modules() if isinstance(m, PackedLinear))]
    return sum(t.numel() * t.element_size() for t in tensors)


def peak() -> int:
    """The process's largest resident size so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (fp32, then bf16) or cuda (bf16)")
    parser.add_argument("--without-library", action="store_true", help="leave transformers out")
    options = parser.parse_args()
    device, started = options.device, time.time()
    on_cpu = torch.device(device).type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    machine = measure.bandwidth(device), measure.matmul_peak(dtype, device)
    print(f"{measure.machine(device)}; torch {torch.__version__}, Python {platform.python_version()}")
    print(f"memory {machine[0] / 1e9:.1f} GB/s, matrix product {machine[1] / 1e9:.0f} GFLOP/s in {str(dtype)[6:]}")

    model = measure.random_model(SHAPE, device, dtype)
    library = None
    if not options.without_library:
        import transformers
        transformers.logging.set_verbosity_error()
        print(f"library: transformers {transformers.__version__}")
        library = library_model(model)
    pack(model)
    gc.collect()
    print(HEAD)
    name = str(dtype)[6:]
    ours, theirs, predicted = decode_table(model, library, machine, name, dtype.itemsize)
    prefill_table(model, library, machine, name, dtype.itemsize)
    context_table(model, machine, dtype.itemsize)
    if on_cpu:
        for batch in (1, 16):
            parts_table(model, batch)
        print(f"weights {held(model) / 1e9:.2f} GB; peak of this process, library's weights included, {peak() / 1e9:.2f} GB")
        from qwen import figures
        figures.setup()
        picture = figures.svg(*figures.batch_gain(measure.machine(device), ours, theirs, predicted))
        (ROOT / "figures" / "batch_gain.svg").write_text(picture, encoding="utf-8", newline="\n")
        del library, model
        gc.collect()
        half = measure.random_model(SHAPE, device, torch.bfloat16)
        pack(half)
        machine = machine[0], measure.matmul_peak(torch.bfloat16)
        print(f"matrix product {machine[1] / 1e9:.0f} GFLOP/s in bfloat16")
        decode_table(half, None, machine, "bfloat16", 2)
    print(f"{time.time() - started:.0f} s in all")


if __name__ == "__main__":
    main()
