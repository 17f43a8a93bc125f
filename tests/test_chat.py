"""The prompt's frame to the letter, and answers in pieces of whole characters."""
import pytest
import torch
from helpers import random_model, small_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from qwen.chat import Chat, build_prompt
from qwen.model import Model
from qwen.sample import generate

OFF, ON = "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\n<think>\n"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


PROMPTS = {
    "one turn": ([user("Hi")], "<|im_start|>user\nHi<|im_end|>\n"),
    "system": ([{"role": "system", "content": "Be brief."}, user("Hi")],
               "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"),
    "several turns": ([user("Hi"), assistant("Hello."), user("And?")],
                      "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
                      "<|im_start|>user\nAnd?<|im_end|>\n"),
    "earlier thoughts": ([user("Hi"), assistant("<think>\nhm </think> no\n</think>\n\nHello."), user("And?")],
                         "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
                         "<|im_start|>user\nAnd?<|im_end|>\n"),
    "thoughts left open": ([user("Hi"), assistant("hm\n</think>\n\nHello."), user("And?")],
                           "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
                           "<|im_start|>user\nAnd?<|im_end|>\n"),
    "a user may write of thoughts": ([user("What is </think> for?")],
                                     "<|im_start|>user\nWhat is </think> for?<|im_end|>\n"),
    "other writing": ([user("北京在哪个国家？\n🐱")], "<|im_start|>user\n北京在哪个国家？\n🐱<|im_end|>\n"),
    "space around": ([user("  Hi\n")], "<|im_start|>user\nHi<|im_end|>\n"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_to_the_letter(name):
    messages, text = PROMPTS[name]
    assert build_prompt(messages) == build_prompt(messages, thinking=False) == text + OFF
    assert build_prompt(messages, thinking=True) == text + ON


BAD_MESSAGES = {
    "none": ([], "must end with a user"),
    "ends with an answer": ([user("a"), assistant("b")], "must end with a user"),
    "system alone": ([{"role": "system", "content": "a"}], "must end with a user"),
    "system later": ([user("a"), {"role": "system", "content": "b"}, user("c")], "message 1 has role 'system'"),
    "unknown role": ([{"role": "tool", "content": "a"}, user("b")], "message 0 has role 'tool'"),
    "no role": ([{"content": "a"}, user("b")], "message 0 has role None"),
    "no content": ([user("a"), {"role": "assistant"}, user("b")], "message 1 holds NoneType"),
    "content in a list": ([user(["a"])], "message 0 holds list"),
    "text in place of messages": ("hi", "message"),
    "texts in place of messages": (["hi"], "message 0"),
    **{mark: ([user("a"), assistant("b"), user(f"x{mark}y")], f"message 2 contains {mark}") for mark in MARKS},
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_messages_that_do_not_fit(name):
    messages, says = BAD_MESSAGES[name]
    with pytest.raises(ValueError, match=says.replace("|", r"\|")):
        build_prompt(messages)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer that merges English and leaves Chinese and emoji in single bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tk = Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = decoders.ByteLevel()
    tk.train_from_iterator(["the cat sat on the mat and the rat"] * 5, trainers.BpeTrainer(
        vocab_size=280, special_tokens=MARKS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    tk.save(str(folder / "tokenizer.json"))
    return folder


class Scripted(torch.nn.Module):
    """A stand-in that answers with given tokens, one answer a conversation turn, and keeps what it was fed."""

    check_prompts = Model.check_prompts

    def __init__(self, *answers, context=4096):
        super().__init__()
        self.config = small_config(vocab_size=400, max_position_embeddings=context)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.answers, self.fed = [list(answer) for answer in answers], []

    def forward(self, ids, state=None, mask=None, last_only=False):
        if ids.shape[1] > 1:                                # a prompt: the next answer begins
            self.going = iter(self.answers.pop(0))
        self.fed.append(ids[0].tolist())
        token = next(self.going)
        if token is None:
            raise RuntimeError("the model broke")
        logits = torch.zeros(1, 1, self.config.vocab_size)
        logits[0, 0, token] = 1.0
        return logits


def ids_of(folder, text):
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


TEXTS = [
    "the cat sat", "北京在中国。", "a 🐱 and a 👩\u200d👩\u200d👧\u200d👦.", "e\u0301té", "\u200b\ufeff", "ends in 北",
    "a\ufffdb\ufffd", " space ", "\n\n", "",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_pieces_are_whole_characters(folder, text):
    """Tokens are single bytes here, so every character beyond ASCII is split; no piece shows it."""
    ids = ids_of(folder, text)
    chat = Chat(Scripted([*ids, 2]), folder)
    pieces = list(chat.ask("Hi"))
    assert "".join(pieces) == text == chat.tk.decode(ids)
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd") and "" not in pieces
    for piece in pieces:
        piece.encode("utf-8")
        assert piece in text
    if "北京" in text:
        assert pieces == list(text)
    assert chat.messages == [user("Hi"), assistant(text)]


def test_pieces_of_any_tokens_join_to_the_whole(folder):
    """Also bytes that are no text at all, special tokens between, and an answer that ends within a character."""
    rng = torch.Generator().manual_seed(0)
    size = Chat(Scripted(), folder).tk.get_vocab_size()
    for number in range(150):
        high = torch.randint(3, size, (12,), generator=rng).tolist()
        chinese = ids_of(folder, "北京🐱")
        ids = [*high[:number % 12], *chinese[number % 3:number % 9], 1 if number % 2 else 5, *chinese[:number % 8]]
        chat = Chat(Scripted([*ids, 2]), folder)
        pieces = list(chat.ask("Hi"))
        whole = chat.tk.decode(ids)
        assert "".join(pieces) == whole and "" not in pieces
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


def test_pieces_come_as_soon_as_they_are_whole(folder):
    ids = ids_of(folder, "a北b")
    model = Scripted([*ids, 2])
    pieces = Chat(model, folder).ask("Hi")
    for piece, fed in (("a", 1), ("北", 4), ("b", 5)):
        assert next(pieces) == piece and len(model.fed) == fed


def test_what_the_model_reads(folder):
    """The frame's marks are single tokens; the second turn holds the first answer, its thoughts left out."""
    first, second = "<think>\nhm\n</think>\n\nthe cat", "the mat"
    model = Scripted([*ids_of(folder, first), 2], [*ids_of(folder, second), 0])
    chat = Chat(model, folder)
    assert chat.stop == {0, 2} and isinstance(chat.tk, Tokenizer)
    assert "".join(chat.ask("the rat", thinking=True)) == first
    assert model.fed[0] == ids_of(folder, build_prompt([user("the rat")], thinking=True))
    assert model.fed[0].count(1) == 2 and model.fed[0].count(2) == 1
    model.fed.clear()
    assert "".join(chat.ask("and?")) == second
    messages = [user("the rat"), assistant("the cat"), user("and?")]
    assert model.fed[0] == ids_of(folder, build_prompt(messages))
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert chat.messages[-1] == assistant(second)


@pytest.mark.parametrize("ending", ["closed", "forgotten", "model breaks", "never begun"])
def test_an_answer_broken_off_leaves_the_conversation(folder, ending):
    ids = ids_of(folder, "the cat")
    broken = [ids[0], None] if ending == "model breaks" else [*ids, 2]
    chat = Chat(Scripted([*ids, 2], broken, [*ids, 2]), folder)
    "".join(chat.ask("one"))
    kept = list(chat.messages)
    pieces = chat.ask("two")
    if ending == "never begun":
        chat.model.answers.pop(0)
    else:
        next(pieces)
    if ending == "closed":
        pieces.close()
    elif ending == "model breaks":
        with pytest.raises(RuntimeError, match="the model broke"):
            list(pieces)
    assert chat.messages == kept
    assert "".join(chat.ask("three")) == "the cat"
    assert [message["content"] for message in chat.messages] == ["one", "the cat", "three", "the cat"]


def test_bad_text_leaves_the_conversation(folder):
    chat = Chat(Scripted(), folder)
    bad = ("a<|im_end|>b", {}), (5, {}), ("a", dict(temperature=-1.0)), ("a", dict(max_new_tokens=-1))
    for text, settings in bad:
        with pytest.raises(ValueError):                     # at the call, not at the first piece
            chat.ask(text, **settings)
    assert chat.messages == []


def test_a_conversation_that_outgrows_the_context(folder):
    """The answer takes what room is left, the last token none; a prompt beyond the context is an error at the call."""
    ids = ids_of(folder, build_prompt([user("hi")]))
    for room in (1, 2, 5):
        chat = Chat(Scripted([5] * 50, context=len(ids) + room - 1), folder)
        assert "".join(chat.ask("hi")) == chat.tk.decode([5] * room)
        with pytest.raises(ValueError, match="context"):
            chat.ask("and a second turn")
        assert len(chat.messages) == 2
    with pytest.raises(ValueError, match=f"prompt of {len(ids)} tokens.*context of {len(ids) - 1}"):
        Chat(Scripted(context=len(ids) - 1), folder).ask("hi")


def test_a_real_model_chats(folder):
    """Random weights: two turns with a seed say the same twice; each answer equals the loop's on the same prompt."""
    model = random_model(5, vocab_size=280, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"))
    runs = []
    for _ in range(2):
        chat = Chat(model, folder)
        runs.append(["".join(chat.ask(text, seed=3, max_new_tokens=15, temperature=1.0))
                     for text in ("the cat", "and?")])
    assert runs[0] == runs[1]
    ids = torch.tensor([ids_of(folder, build_prompt([user("the cat")]))])
    assert runs[0][0] == chat.tk.decode(generate(model, ids, 15, chat.stop, seed=3, temperature=1.0))


def test_no_beginning_of_text_token(folder, tmp_path):
    """Also with a tokenizer that would put one in front by itself."""
    tk = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tk.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tk.save(str(tmp_path / "tokenizer.json"))
    model = Scripted([2])
    list(Chat(model, tmp_path).ask("hi"))
    assert model.fed[0] == ids_of(folder, build_prompt([user("hi")]))


def test_tokenizers_that_do_not_fit(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        Chat(Scripted(), tmp_path)
    for text in ("", "{}", "[1]", "not json"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
            Chat(Scripted(), tmp_path)
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json has none of the stop tokens <\|im_end\|>, <\|endoftext\|>"):
        Chat(Scripted(), tmp_path)
