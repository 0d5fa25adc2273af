"""Writing text with a trained model, a byte at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rpfunc import random
from rpfunc.batch import Batch
from rpfunc.errors import OptionsError
from rpfunc.model import Model, Params


def sample(
    model: Model, params: Params, prompt: bytes, num: int, *, rows: int, key: random.Key, temperature: float = 0.8
) -> Iterator[int]:
    """Yields `num` bytes that follow `prompt` (at least one byte), drawn from softmax(logits / temperature).

    Temperature 0 takes the likeliest byte. The model sees the last `rows` bytes, all of them anew for each byte.
    """
    if not prompt or num < 0 or not temperature >= 0.0:
        raise OptionsError(
            f"sample: needs a prompt of at least one byte, a number of bytes and a temperature of at least 0, "
            f"found {prompt!r}, {num} and {temperature}"
        )
    text = list(prompt)
    for index in range(num):
        with torch.no_grad():
            logits = model(params, Batch(row={"tokens": torch.tensor([text[-rows:]])}))[0, -1, :256]
        if temperature == 0.0:
            chosen = int(logits.argmax())
        else:
            chosen = int(random.categorical(random.fold_in(key, index), logits / temperature))
        text.append(chosen)
        yield chosen
