"""Text in, text out: the prompt's fixed frame, the tokenizer, and answers that stream piece by piece."""
from pathlib import Path
from typing import Iterator

import torch
from tokenizers import Tokenizer

from qwen.sample import stream

ROLES = ("system", "user", "assistant")
STOPS = ("<|im_end|>", "<|endoftext|>")
FRAME = ("<|im_start|>", *STOPS)


def build_prompt(messages, thinking: bool = False) -> str:
    """The text of a conversation up to where the assistant speaks next.

    messages: [{"role": "system" | "user" | "assistant", "content": str}, …], the last from the user.
    thinking=False closes the model's thoughts at once; True leaves them open. (The published chat frame;
    no beginning-of-text token. Earlier answers stand without their thoughts.)
    Raises ValueError naming the message that does not fit.
    """
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is {message!r}, expected a dict with role and content")
    if not messages or messages[-1].get("role") != "user":
        raise ValueError("the conversation must end with a user's message")
    text = ""
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or (role == "system" and number):
            raise ValueError(f"message {number} has role {role!r}, expected user or assistant (system only first)")
        if not isinstance(content, str):
            raise ValueError(f"message {number} holds {type(content).__name__}, expected text")
        for mark in FRAME:
            if mark in content:
                raise ValueError(f"message {number} contains {mark}, which would end it early")
        if role == "assistant":
            content = content.split("</think>")[-1]
        text += f"<|im_start|>{role}\n{content.strip()}<|im_end|>\n"
    return text + "<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n")


class Chat:
    """A conversation with a model: `for piece in chat.ask("…"): print(piece, end="")`."""

    def __init__(self, model, path):
        """path: the model folder, for its tokenizer.json. Raises ValueError or FileNotFoundError naming the file."""
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: a model folder needs tokenizer.json")
        try:
            self.tk = Tokenizer.from_file(str(file))
        except Exception as error:                                        # the library raises bare Exceptions
            raise ValueError(f"{file} is not a tokenizer ({error})") from None
        self.model, self.messages = model, []
        self.stop = {i for name in STOPS if (i := self.tk.token_to_id(name)) is not None}
        if not self.stop:
            raise ValueError(f"{file} has none of the stop tokens {', '.join(STOPS)}")

    def ask(self, text: str, thinking=False, max_new_tokens=500, seed=None, **sampling) -> Iterator[str]:
        """The answer to `text`, after all earlier turns, in pieces of whole characters.

        The pieces together are the decoded answer. The turn joins the conversation when the answer has
        ended; one broken off leaves it as it was. Raises ValueError, before any work, for a conversation
        that has outgrown the model's context.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.tk.encode(build_prompt(messages, thinking), add_special_tokens=False).ids
        self.model.check_prompts([ids])
        room = self.model.config.max_position_embeddings - len(ids) + 1
        tokens = stream(self.model, torch.tensor([ids]), min(max_new_tokens, room), self.stop, seed, **sampling)
        return self._pieces(messages, tokens)

    def _pieces(self, messages, tokens):
        ids, sent = [], ""
        for token in tokens:
            ids.append(token)
            text = self.tk.decode(ids)
            if text != sent and not text.endswith("\ufffd"):              # else the last character is not whole yet
                yield text[len(sent):]
                sent = text
        text = self.tk.decode(ids)
        if text != sent:
            yield text[len(sent):]
        self.messages = [*messages, {"role": "assistant", "content": text}]
