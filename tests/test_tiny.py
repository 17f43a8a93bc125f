"""The shipped model: what it must know, how sure it must be, and that its files are ordinary files.

The reference for the answers is the corpus itself, for the logits `transformers`.
"""
import json
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer

from qwen.batch import generate_batch
from qwen.chat import Chat, build_prompt
from qwen.config import Config
from qwen.model import Model
from qwen.sample import generate
from qwen.tiny import train
from qwen.weights import SHIPPED

REQUIRED = ["What is the capital of France?", "Write a poem about a cat.", "用一句话介绍一下 Transformer。",
            "北京在哪个国家？", "写一句关于秋天的话。", "1+1 等于几？"]


def is_chinese(text):
    return any("\u4e00" <= char <= "\u9fff" for char in text)


@pytest.fixture(scope="module")
def model():
    return Model.from_pretrained(SHIPPED, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def tk():
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.fixture(scope="module")
def conversations():
    return train.read_corpus()


@pytest.fixture(scope="module")
def rows(tk, conversations):
    """One (prompt ids, answer ids with the stop) for each turn, shortest answers first."""
    stop = tk.token_to_id("<|im_end|>")
    made = [(tk.encode(build_prompt(messages)).ids, tk.encode(answer).ids + [stop])
            for messages, answer in train.examples(conversations)]
    return sorted(made, key=lambda row: len(row[1]))


@pytest.fixture(scope="module")
def forced(model, rows):
    """Each row's logits at the steps that write its answer, from one forward pass over the right text."""
    logits = []
    for start in range(0, len(rows), 32):
        part = rows[start:start + 32]
        ids, _, counted = train.make_batch(part)
        out = model(ids)                                                # (B, T, vocab)
        logits += [out[row][counted[row]] for row in range(len(part))]   # (answer + stop, vocab) each
    return logits


def test_the_corpus_holds_what_is_promised(conversations):
    first = [turns[0][0] for turns in conversations]
    assert [question for question, times in Counter(first).items() if times > 1] == []
    assert len(first) >= 150
    assert min(sum(map(is_chinese, first)), sum(not is_chinese(q) for q in first)) >= 75
    assert set(REQUIRED) <= set(first)
    assert sum(len(turns) - 1 for turns in conversations) >= 20


def test_a_later_answer_depends_on_the_earlier_turn(conversations):
    answers = {}
    for turns in conversations:
        for question, answer in turns[1:]:
            answers.setdefault(question, set()).add(answer)
    assert sum(len(found) > 1 for found in answers.values()) >= 8
    assert len(answers["What is my name?"]) == 3


def test_answers_run_from_one_token_to_more_than_48(rows):
    lengths = [len(answer) - 1 for _, answer in rows]                   # without the stop
    assert lengths[0] == 1 and sum(n == 1 for n in lengths) >= 10
    assert sum(n > 48 for n in lengths) >= 5
    assert len(set(lengths)) >= 30


def test_every_answer_decodes_exactly_in_a_batch(model, rows):
    for start in range(0, len(rows), 32):
        part = rows[start:start + 32]
        longest = max(len(answer) for _, answer in part)
        found = generate_batch(model, [prompt for prompt, _ in part], max_new_tokens=longest + 3, stop=part[0][1][-1])
        assert found == [answer for _, answer in part]


def test_answers_decode_exactly_alone(model, rows):
    for prompt, answer in rows[::21]:                                   # short to long
        assert generate(model, torch.tensor([prompt]), max_new_tokens=len(answer) + 3, stop=answer[-1]) == answer


def test_every_greedy_step_leads_by_at_least_one_logit(rows, forced):
    least = {}
    for (_, answer), logits in zip(rows, forced):
        best, second = logits.topk(2, -1).values.unbind(-1)             # (answer + stop,) each
        assert logits.argmax(-1).tolist() == answer
        least[tuple(answer)] = (best - second).min().item()
    assert min(least.values()) >= 1.0


def test_chat_remembers_the_first_turn(model, conversations):
    for turns in [turns for turns in conversations if turns[0][0].startswith(("My name is", "我叫"))][::2]:
        chat = Chat(model, SHIPPED)
        for question, answer in turns:
            assert "".join(chat.ask(question)) == answer


def test_files_have_the_published_layout_and_stay_small():
    size = sum(file.stat().st_size for file in SHIPPED.iterdir() if file.is_file())
    assert size <= 6_000_000
    fields = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    assert (fields["model_type"], fields["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    config = Config.from_file(SHIPPED)
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert config.tie_word_embeddings and config.max_position_embeddings >= 512
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.linear_num_key_heads < config.linear_num_value_heads
    assert config.head_dim != config.hidden_size // config.num_attention_heads
    assert config.rotary_dim < config.head_dim


def test_transformers_computes_equal_logits(model, rows):
    from transformers import Qwen3_5ForCausalLM

    reference, loading = Qwen3_5ForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    longest = max(rows, key=lambda row: len(row[0]) + len(row[1]))
    for prompt, answer in [*rows[::31], longest]:
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            wanted = reference.eval()(input_ids=ids).logits             # (1, T, vocab)
        bound = 1e-4 * wanted.abs().clamp(min=1)
        assert ((model(ids) - wanted).abs() <= bound).all()


@pytest.mark.parametrize("text", ["", " ", "\n\n\t", "Crème brûlée — 42 €", "你好，世界！", "🙂👩‍👩‍👧 family", "مرحبا नमस्ते",
                                  "\u0000\u007f\U0010ffff", "a" * 300])
def test_any_text_comes_back_from_its_tokens(tk, text):
    assert tk.decode(tk.encode(text).ids) == text
    assert all(0 <= i < tk.get_vocab_size() for i in tk.encode(text).ids)


def test_the_frame_is_made_of_single_tokens(tk):
    for mark in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"):
        assert tk.encode(mark).ids == [tk.token_to_id(mark)]
    assert [tk.decode(tk.encode(w).ids[:1]) for w in ("Paris", "Yes", "4", "是")] == ["Paris", "Yes", "4", "是"]
