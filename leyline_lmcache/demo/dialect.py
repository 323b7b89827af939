"""Messages as the tokens of a model, one message at a time.

An edit replaces whole messages, so the demo needs to know where each message's tokens lie. Both kinds of
model it can serve put messages one after another with nothing in between, so a message's tokens do not depend
on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_lmcache.demo.scenario import Message


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes messages.

    Attributes:
        tokenizer: of the `tokenizers` package.
        first: what stands before the first message.
        before: what stands before a message's text; `{role}` is its role.
        after: what ends a message.
        asking: what follows the last message for the model to answer.
        answer_tokens: how many tokens an answer has.
        trained: the model's answers mean something.
    """

    tokenizer: Any
    first: str
    before: str
    after: str
    asking: str
    answer_tokens: int
    trained: bool

    @classmethod
    def of_model(cls, folder: Path) -> Dialect:
        """The dialect of the model in `folder`, which holds a `tokenizer.json`."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if tokenizer.token_to_id("<|assistant|>") is not None:
            return cls(tokenizer, "<|bos|>", "<|{role}|> ", "<|end|>", "<|assistant|>", 1, True)
        return cls(tokenizer, "<s>", "{role}: ", "\n", "assistant: ", 4, False)

    def opening(self) -> tuple[int, ...]:
        """Tokens before the first message."""
        return self._ids(self.first)

    def message(self, message: Message) -> tuple[int, ...]:
        """Tokens of one message."""
        return self._ids(self.text(message))

    def text(self, message: Message) -> str:
        """One message as the text of a prompt."""
        return f"{self.before.format(role=message.role)}{message.content}{self.after}"

    def prompt_end(self) -> tuple[int, ...]:
        """Tokens that make the model answer."""
        return self._ids(self.asking)

    def answered(self, output: Sequence[int]) -> tuple[int, ...]:
        """An answer's tokens as they stand in the history: up to the first end of message, with it."""
        end = self._ids(self.after)
        for at in range(len(output) - len(end) + 1):
            if tuple(output[at : at + len(end)]) == end:
                return tuple(output[: at + len(end)])
        return (*output, *end)

    def read(self, output: Sequence[int]) -> str:
        """An answer's text, on one line; what cannot be shown is a dot."""
        tokens = self.answered(output)[: -len(self._ids(self.after))]
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
        return "".join(letter if letter.isprintable() else "·" for letter in text)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
