"""KV of a token sequence with its keys before RoPE, on transformers' own modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .rules import Edit, Served, apply_edits, serve


@dataclass(frozen=True)
class Context:
    """Tokens and what the model computed for them.

    Attributes:
        tokens: token ids.
        keys: per layer, the part of the key that RoPE turns, before it is turned: ``[T, heads, rotary dim]``.
        values: per layer, what has no position: MLA's normed latent ``[T, rank]``, else ``[T, heads, dim]``.
    """

    tokens: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, start: int, end: int) -> Context:
        """The tokens of ``[start, end)``, as they were computed."""
        return Context(
            self.tokens[start:end],
            [layer[start:end] for layer in self.keys],
            [layer[start:end] for layer in self.values],
        )

    def join(self, other: Context) -> Context:
        """This, then ``other``, whatever either was computed from."""
        return Context(
            self.tokens + other.tokens,
            [torch.cat(pair) for pair in zip(self.keys, other.keys, strict=True)],
            [torch.cat(pair) for pair in zip(self.values, other.values, strict=True)],
        )


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        ids: the generated tokens.
        logprobs: of each.
        context: prompt and answer without its last token: what the response leaves in the cache.
        first: log-probabilities of the first generated token, over the vocabulary.
    """

    ids: list[int]
    logprobs: list[float]
    context: Context
    first: torch.Tensor


class Reference:
    """One model in fp32. DeepSeek-V2 (MLA) and Llama (MHA, GQA) architectures."""

    def __init__(self, folder: Path | str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.config = self.model.config
        self.mla = hasattr(self.config, "kv_lora_rank")
        self._layers = list(self.model.model.layers)

    # ------------------------------------------------------------------ the model

    @torch.no_grad()
    def empty(self) -> Context:
        """No tokens."""
        keys, values = [], []
        for _ in self._layers:
            if self.mla:
                keys.append(torch.empty(0, 1, self.config.qk_rope_head_dim))
                values.append(torch.empty(0, self.config.kv_lora_rank))
            else:
                heads, dim = self.config.num_key_value_heads, self.config.head_dim
                keys.append(torch.empty(0, heads, dim))
                values.append(torch.empty(0, heads, dim))
        return Context([], keys, values)

    @torch.no_grad()
    def extend(self, context: Context, tokens: Sequence[int]) -> tuple[Context, torch.Tensor]:
        """Compute ``tokens`` after ``context``; also returns the log-probabilities of what follows, fp32."""
        if not tokens:
            raise ValueError("tokens: nothing to compute")
        return self._run(self._cache(context), context, list(tokens))

    def prefill(self, tokens: Sequence[int]) -> Context:
        """All of it computed from the text, as any engine does."""
        return self.extend(self.empty(), tokens)[0] if tokens else self.empty()

    def answer(self, context: Context, tail: Sequence[int], count: int = 8) -> Answer:
        """Compute the prompt's ``tail`` after ``context``, then ``count`` greedy tokens."""
        ids: list[int] = []
        logprobs: list[float] = []
        cache = self._cache(context)
        first: torch.Tensor | None = None
        step = list(tail)
        for _ in range(count):
            context, after = self._run(cache, context, step)
            first = after if first is None else first
            best = int(after.argmax())
            ids.append(best)
            logprobs.append(float(after[best]))
            step = [best]
        assert first is not None
        return Answer(ids, logprobs, context, first)

    def _run(self, cache: Any, context: Context, tokens: list[int]) -> tuple[Context, torch.Tensor]:
        found: dict[str, list[torch.Tensor]] = {"keys": [], "values": []}
        hooks = [
            hook
            for layer in self._layers
            for hook in (self._hooks_mla if self.mla else self._hooks_gqa)(layer.self_attn, found)
        ]
        start = len(context)
        positions = torch.arange(start, start + len(tokens))[None]
        try:
            with torch.no_grad():
                out = self.model(
                    torch.tensor([tokens]),
                    past_key_values=cache,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=1,
                )
        finally:
            for hook in hooks:
                hook.remove()
        new = Context(tokens, found["keys"], found["values"])
        return context.join(new), torch.log_softmax(out.logits[0, -1].float(), -1)

    def _hooks_mla(self, attention: Any, found: dict[str, list[torch.Tensor]]) -> list[Any]:
        rank = self.config.kv_lora_rank

        def keys(_module: Any, _args: Any, out: torch.Tensor) -> None:
            found["keys"].append(out[0, :, None, rank:].clone())

        def values(_module: Any, _args: Any, out: torch.Tensor) -> None:
            found["values"].append(out[0].clone())

        return [
            attention.kv_a_proj_with_mqa.register_forward_hook(keys),
            attention.kv_a_layernorm.register_forward_hook(values),
        ]

    def _hooks_gqa(self, attention: Any, found: dict[str, list[torch.Tensor]]) -> list[Any]:
        shape = (-1, self.config.num_key_value_heads, self.config.head_dim)

        def keep(name: str) -> Any:
            def hook(_module: Any, _args: Any, out: torch.Tensor) -> None:
                found[name].append(out[0].reshape(shape).clone())

            return hook

        return [
            attention.k_proj.register_forward_hook(keep("keys")),
            attention.v_proj.register_forward_hook(keep("values")),
        ]

    # ------------------------------------------------------------------ keys at their positions

    @torch.no_grad()
    def turned(self, keys: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Keys before RoPE ``[T, heads, dim]``, turned by the model for positions from ``start``.

        Returns them as transformers caches them: ``[1, heads, T, dim]``.
        """
        positions = torch.arange(start, start + len(keys))[None]
        embedding = self.model.model.rotary_emb(keys.new_zeros(1, 1, 1), positions)
        heads = keys.transpose(0, 1)[None]
        if self.mla:
            from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb

            return apply_rotary_emb(heads, heads, embedding)[1]
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        return apply_rotary_pos_emb(heads, heads, *embedding)[1]

    def _cache(self, context: Context) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        if not len(context):
            return cache
        for layer, (keys, values) in enumerate(zip(context.keys, context.values, strict=True)):
            turned = self.turned(keys)
            if self.mla:
                cache.update(values[None, None].clone(), turned, layer)
            else:
                cache.update(turned, values.transpose(0, 1)[None].clone(), layer)
        return cache

    # ------------------------------------------------------------------ edits

    def edited(
        self,
        base: Context,
        edits: Sequence[Edit],
        computed: Sequence[tuple[int, int]],
        upto: int | None = None,
    ) -> Context:
        """The edited sequence: ``computed`` ranges (edited positions) prefilled at their place, left to
        right, all other tokens with the KV they have in ``base``; the first ``upto`` of them.

        Raises:
            ValueError: a replacement's token is in no computed range.
        """
        tokens, sources = apply_edits(base.tokens, edits)
        out = self.empty()
        at = 0
        total = len(tokens) if upto is None else upto
        for start, end in [*computed, (total, total)]:
            while at < start:
                source = sources[at]
                if source is None:
                    raise ValueError(f"position {at} is new and in no computed range")
                run = 1
                while at + run < start and sources[at + run] == source + run:
                    run += 1
                out = out.join(base.cut(source, source + run))
                at += run
            if end > start:
                out = self.extend(out, tokens[start:end])[0]
                at = end
        return out

    def serve(
        self,
        base: Context,
        edits: Sequence[Edit],
        prompt: Sequence[int],
        count: int = 8,
        *,
        page_size: int = 1,
        min_reuse: int = 16,
    ) -> tuple[Answer, Served]:
        """What the engine has to answer to an edited request: kept KV as far as the rules go, then a tail."""
        served = serve(base.tokens, edits, prompt, page_size=page_size, min_reuse=min_reuse)
        kept = self.edited(base, edits, served.computed, served.target)
        return self.answer(kept, prompt[served.target :], count), served

    def reprefill(self, prompt: Sequence[int], count: int = 8) -> Answer:
        """What a server that knows nothing of the edit answers."""
        return self.answer(self.empty(), prompt, count)
