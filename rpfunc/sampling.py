"""Choosing a token from logits: the likeliest, or one drawn by example and place."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rpfunc import generation_checks as checks
from rpfunc import random


@dataclass(frozen=True)
class Sampler:
    """How tokens are chosen; see `rpfunc.generate`."""

    key: random.Key | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def problems(self) -> list[str | None]:
        """Returns, in words, what cannot work; None where nothing is wrong."""
        most = sys.float_info.max
        found = [
            checks.draws_with(self.key),
            checks.number("temperature", self.temperature, 0.0, most, "finite and at least 0", 1.0),
        ]
        if self.top_k is not None:
            found.append(checks.count("top_k", self.top_k, 1, checks.MOST_COUNT, 50))
        if self.top_p is not None:
            found.append(checks.number("top_p", self.top_p, math.ulp(0.0), 1.0, "in (0, 1]", 0.9))
        given = [name for name in ("top_k", "top_p") if getattr(self, name) is not None]
        given += ["temperature"] if self.temperature not in (0.0, 1.0) else []
        if self.key is None and given:
            found.append(f"{' and '.join(given)} needs a key to draw with, for example key=rpfunc.random.key(0)")
        return found

    def choose(
        self, logits: Float[Tensor, "batch vocabulary"], examples: Int[Tensor, " batch"], places: Int[Tensor, " batch"]
    ) -> Int[Tensor, " batch"]:
        """Returns a token of each example; a draw depends on the key, the example and the place alone.

        One number in [0, 1) is drawn, and looked up in the distribution function of softmax(logits / temperature) after
        the cuts, in float64. Where logits are equal, the lower token counts as the likelier.
        """
        if self.key is None or self.temperature == 0.0:
            return logits.argmax(dim=-1)
        logits = logits.double()
        # the largest is 0 before the division: however small the temperature, nothing overflows
        weights = torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / float(self.temperature), dim=-1)
        order = None
        if self.top_k is not None or self.top_p is not None:
            weights, order = weights.sort(dim=-1, descending=True, stable=True)
            if self.top_k is not None:
                weights = weights[:, : int(self.top_k)]
            if self.top_p is not None:
                before = weights.cumsum(dim=-1) - weights
                weights = weights.where(before < float(self.top_p) * weights.sum(dim=-1, keepdim=True), 0.0)
        reached = weights.cumsum(dim=-1)
        drawn = _uniform(random.bits(self.key, examples.cpu(), places.cpu())).to(logits.device)
        # the first token whose sum is beyond the draw: never one of weight 0
        chosen = torch.searchsorted(reached, drawn[:, None] * reached[:, -1:], right=True)
        return (chosen if order is None else order.gather(-1, chosen)).squeeze(-1)


def _uniform(bits: Tensor) -> Tensor:
    """Returns numbers in [0, 1), float64, from the 53 leading bits of each."""
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
