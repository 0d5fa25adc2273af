"""Writing text of any length with a trained model, as far as it was trained to look back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rpfunc import random
from rpfunc.errors import OptionsError
from rpfunc.generation import generate
from rpfunc.model import Model, Params


def sample(
    model: Model,
    params: Params,
    prompt: Sequence[int],
    num: int,
    *,
    rows: int,
    key: random.Key,
    temperature: float = 0.8,
) -> Iterator[int]:
    """Yields `num` tokens that follow `prompt` (at least one), drawn from softmax(logits / temperature).

    Temperature 0 takes the likeliest token. The model never sees more than `rows` tokens (at least 2), the length that
    it was trained on: `generate` goes on until there are so many, then anew from the last half of them.
    """
    if not prompt or num < 0 or not temperature >= 0.0:
        raise OptionsError(
            f"sample: needs a prompt of at least one token, a number of tokens and a temperature of at least 0, "
            f"found {prompt!r}, {num} and {temperature}"
        )
    seen = list(prompt)[1 - rows :]
    while num:
        count = min(num, rows - len(seen))
        piece_key = random.fold_in(key, num)
        (text,) = generate(model, params, [seen], count, key=piece_key, temperature=temperature)
        yield from text.tolist()
        num -= count
        seen = [*seen, *text.tolist()][-max(1, rows // 2) :]
