"""Which tier the KV of an edited request came from, by view position."""

from __future__ import annotations

from dataclasses import dataclass, field

from leyline_lmcache.ops import Tier
from leyline_lmcache.ranges import Range, merge, subtract


@dataclass(slots=True)
class Origins:
    """View ranges that were loaded from a stored tier; whatever else was cached lay on the GPU."""

    _ranges: dict[Tier, list[Range]] = field(default_factory=dict)

    def add(self, start: int, end: int, tier: Tier) -> None:
        """``[start, end)`` was loaded from a tier, last of all."""
        for each, ranges in self._ranges.items():
            self._ranges[each] = subtract(ranges, [(start, end)])
        self._ranges[tier] = merge([*self._ranges.get(tier, []), (start, end)])

    def update(self, other: Origins) -> None:
        """Everything that another has, last of all."""
        for tier, ranges in other._ranges.items():
            for start, end in ranges:
                self.add(start, end, tier)

    def tokens(self, tier: Tier, end: int) -> int:
        """Tokens of ``[0, end)`` from a stored tier."""
        return sum(max(0, min(high, end) - low) for low, high in self._ranges.get(tier, ()))

    def clear(self) -> None:
        self._ranges.clear()
