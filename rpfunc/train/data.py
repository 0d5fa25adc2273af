"""Text as tokens: read, split, and cut into batches that depend on a key and a step alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rpfunc import random
from rpfunc.batch import Batch
from rpfunc.errors import OptionsError
from rpfunc.objectives import IGNORED


def read_bytes(path: Path) -> bytes:
    """Returns the file's bytes. Raises OptionsError if it is missing or no file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise OptionsError(f"data.text: cannot read {path}: {error.strerror}") from error


def to_tokens(path: Path, text: bytes, encode: Callable[[bytes], list[int]], rows: int) -> Tensor:
    """Returns the text's tokens, (N,) int32. Raises OptionsError if there are fewer than `rows`."""
    tokens = encode(text)
    if len(tokens) < rows:
        raise OptionsError(f"data.text: {path} has {len(tokens)} tokens, one row of data.rows needs {rows}")
    return torch.tensor(tokens, dtype=torch.int32)


def split_held_out(text: Tensor, fraction: float, rows: int) -> tuple[Tensor, Tensor]:
    """Returns (training text, held-out text): the last `fraction` of the tokens is held out.

    Raises OptionsError where the training part is shorter than `rows`, or the held-out part than 2 tokens.
    """
    cut = len(text) - round(len(text) * fraction)
    if cut < rows or len(text) - cut < 2:
        raise OptionsError(
            f"data.held_out: {fraction} of {len(text)} tokens leaves {cut} to train on and {len(text) - cut} held "
            f"out; one row of {rows} tokens and 2 held-out tokens are needed"
        )
    return text[:cut], text[cut:]


def training_batch(text: Tensor, key: random.Key, step: int, examples: int, rows: int) -> Batch:
    """Returns the batch of a step: `examples` windows of `rows` tokens that start anywhere in the text.

    A pure function of its arguments: resuming needs the step's number and nothing else. The batch's constant `key`,
    for dropout, depends on the step too.
    """
    step_key = random.fold_in(key, step)
    starts = random.uniform(random.fold_in(step_key, "windows"), (examples, 1), torch.float64)
    offsets = (starts * (len(text) - rows + 1)).long()
    tokens = text[offsets + torch.arange(rows)].long()
    return Batch(row={"tokens": tokens, "labels": tokens}, constant={"key": random.fold_in(step_key, "dropout")})


def held_out_batch(text: Tensor, rows: int) -> Batch:
    """Returns the whole text in windows of `rows` tokens that overlap by one, so that each token but the first is
    predicted exactly once; the last window is filled up with rows that do not count.
    """
    rows = min(rows, len(text))
    starts = torch.arange(0, len(text) - 1, rows - 1).unsqueeze(1)
    padding = int(starts[-1]) + rows - len(text)
    tokens = F.pad(text, (0, padding))[starts + torch.arange(rows)].long()
    labels = tokens.clone()
    if padding:
        labels[-1, -padding:] = IGNORED
    return Batch(row={"tokens": tokens, "labels": labels})
