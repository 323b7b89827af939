"""What a policy is, how several make one, and how one is applied safely."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from leyline_lmcache.policies.pairs import problems

Message = Mapping[str, Any]
"""A chat message as the OpenAI endpoints take it."""

Messages = Sequence[Message]

CountTokens = Callable[[str], int]
"""How many tokens a text has, or about how many."""


class PolicyError(RuntimeError):
    """A policy did what it must not; the message names it and the first message that is wrong."""


class OptionError(ValueError):
    """An option of a policy is wrong.

    Attributes:
        field: its name, with indices and keys of what is inside it: ``("patterns", 2)``.
    """

    def __init__(self, field: str, detail: str, *inside: str | int) -> None:
        super().__init__(detail)
        self.field: tuple[str | int, ...] = (field, *inside)


@runtime_checkable
class Policy(Protocol):
    """Says what a conversation looks like to the model.

    The harness keeps its messages whole and hands all of them over in every turn, so a policy needs no
    memory: what it returns is a function of its arguments. To make edits cheap it should be *stable*: what it
    makes of a message in one turn is what it makes of it in the next ones, save for the few whose time came.
    """

    def transform(self, messages: Messages, turn_idx: int) -> Messages:
        """The messages to send.

        Args:
            messages: all of the conversation, which must not be changed.
            turn_idx: answers of the model so far, see :func:`turn_of`.

        Returns:
            Messages in which every tool call still has its result. Those that stay as they are may be the
            same objects.
        """
        ...


@runtime_checkable
class Counting(Protocol):
    """A policy that decides by numbers of tokens."""

    def counting(self, count: CountTokens) -> Policy:
        """The same policy with another way to count."""
        ...


@runtime_checkable
class Erasing(Protocol):
    """A policy that takes out what must leave no trace in what the model says later.

    Messages of others it changes before they are first sent. What the model wrote itself was in its context
    already, and so is in the KV of all that came after it; no splice may carry that KV on.
    """

    def erased(self, messages: Messages) -> str:
        """A name for all that is taken out of the model's own messages; empty if that is nothing.

        Whoever sends the messages adds it to the session's name, so that a session with other contents taken
        out finds nothing to splice from.
        """
        ...


def erased(policy: Policy, messages: Messages) -> str:
    """:meth:`Erasing.erased` of any policy."""
    return policy.erased(messages) if isinstance(policy, Erasing) else ""


def estimate_tokens(text: str) -> int:
    """Tokens of a text where no tokenizer is at hand: four characters each, rounded up."""
    return -(-len(text) // 4)


def turn_of(messages: Messages) -> int:
    """The number of the coming turn: the answers of the model that the conversation already has."""
    return sum(message.get("role") == "assistant" for message in messages)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Policies one after another; without any, messages stay as they are."""

    policies: tuple[Policy, ...] = ()

    def transform(self, messages: Messages, turn_idx: int) -> Messages:
        """Apply each to what the one before it returned."""
        for policy in self.policies:
            messages = apply(policy, messages, turn_idx)
        return messages

    def counting(self, count: CountTokens) -> Pipeline:
        """The same policies with another way to count."""
        return Pipeline(tuple(_counting(policy, count) for policy in self.policies))

    def erased(self, messages: Messages) -> str:
        """What all of them erase, see :class:`Erasing`."""
        return "".join(erased(policy, messages) for policy in self.policies)


def apply(policy: Policy, messages: Messages, turn_idx: int | None = None) -> Messages:
    """Transform messages, and check that no tool call lost its result nor a result its call.

    Args:
        policy: any policy, also one that is not ours.
        messages: all of the conversation.
        turn_idx: by default :func:`turn_of` the messages.

    Raises:
        PolicyError: the result is worse than what came in.
    """
    made = policy.transform(messages, turn_of(messages) if turn_idx is None else turn_idx)
    if made is messages or isinstance(policy, Pipeline):
        return made
    found = problems(made)
    if len(found) > len(problems(messages)):
        raise PolicyError(f"{type(policy).__name__}: {found[0]}")
    return made


def _counting(policy: Policy, count: CountTokens) -> Policy:
    return policy.counting(count) if isinstance(policy, Counting) else policy
