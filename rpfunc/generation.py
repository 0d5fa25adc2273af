"""Generation: prompts in chunks, then one row at a time, with what earlier rows left kept for the later ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rpfunc import generation_checks as checks
from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import MemoryLimitError, ModelError, OptionsError
from rpfunc.model import Model, Params
from rpfunc.objectives.checks import check_options
from rpfunc.random import Key
from rpfunc.sampling import Sampler
from rpfunc.stream import RowWise, Stepping
from rpfunc.stream.calls import Calling
from rpfunc.stream.flat import rows, spans


def generate(
    model: Model,
    params: Params,
    prompts: Iterable[Tensor | Sequence[int]],
    num_tokens: int,
    *,
    key: Key | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    chunk: int | None = None,
    first_example: int = 0,
) -> list[Tensor]:
    """Returns what follows each prompt: (n,) int64, n <= `num_tokens`, up to and including its first `stop` token.

    prompts      (n,) integers each, n >= 1; the model reads them as row leaf `tokens`
    key          draws each token from softmax(logits / temperature), cut to the `top_k` likeliest and then to the
                 fewest whose probability reaches `top_p`; None: the likeliest token, as at temperature 0
    chunk        rows of prompts worked on at a time; None: all
    first_example  where these prompts stand in a larger batch. A draw depends on the key, the example and the token's
                 place in its own text alone: no cut or order of a batch changes a sample by more than rounding does

    The model gives logits (B, T, V), or a dict that has them as "logits"; its layers are row-wise, causal or recurrent,
    and what rows leave (keys and values, states) is kept, in buffers made once. Logits exist for one row of an example.

    Shorter prompts are padded on the left. Then there are two more row leaves, and the model must read them: `visible`
    (B, T) bool, False where no row may look (as `attend` takes it; it has to be handed on as part of kv), and
    `positions` (B, T) int64, which count from 0 at the first token. A model that never looks at `visible` is refused.

    Cost: a forward pass over the prompts, and one over B rows for each further token, until all have stopped.
    Raises ModelError (parameters that are not finite, too: each is looked at once), BatchError, OptionsError, or
    MemoryLimitError where the buffers are too large.

    >>> from rpfunc import random
    >>> from rpfunc.models import decoder
    >>> config = decoder.DecoderConfig(vocabulary=16)
    >>> params = decoder.init(config, random.key(0))
    >>> [len(text) for text in generate(decoder.model(config), params, [[1, 2], [3, 4]], 5)]
    [5, 5]
    """
    sampler = Sampler(key, temperature, top_k, top_p)
    options = [
        checks.count("num_tokens", num_tokens, 1, checks.MOST_TOKENS, 64),
        None if chunk is None else checks.count("chunk", chunk, 1, checks.MOST_COUNT, 512),
        checks.count("first_example", first_example, 0, checks.MOST_COUNT, 0),
        *sampler.problems(),
        checks.stops(stop),
    ]
    check_options("generate", options)
    checks.check_model(model, params)
    device = next((leaf.device for leaf in tree.leaves(dict(params))), torch.device("cpu"))
    texts = checks.texts(prompts, device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    examples = torch.arange(first_example, first_example + len(texts), device=device)
    stops = torch.tensor(sorted(stop), dtype=torch.long, device=device)
    batch = _padded(texts, lengths, first_example)
    memory = _Memories(model, params, batch.num_rows + int(num_tokens) - 1)

    with torch.no_grad():
        logits = _first_logits(memory, batch, chunk or batch.num_rows)
        unknown = stops[stops >= logits.shape[1]].tolist()
        if unknown:
            raise OptionsError(f"generate: stop has {unknown}; the model's tokens are 0 to {logits.shape[1] - 1}")
        chosen = [sampler.choose(logits, examples, lengths)]
        stopped = torch.isin(chosen[0], stops)
        while len(chosen) < num_tokens and not stopped.all():
            logits = memory.read(_next(batch, chosen[-1], lengths, len(chosen)), 1)
            chosen.append(sampler.choose(logits, examples, lengths + len(chosen)))
            stopped = stopped | torch.isin(chosen[-1], stops)
    return [_cut(text, stops) for text in torch.stack(chosen, dim=1)]


class _Memories:
    """The model's layers, and what the rows read so far have left in each."""

    def __init__(self, model: Model, params: Params, num_rows: int) -> None:
        *body, last = model.layers
        # a row-wise head is needed for one row of each example
        self._head = last if isinstance(last.form, RowWise) else None
        self._body = body if self._head else [*model.layers]
        self._params, self.num_rows = params, num_rows
        self._memories = [layer.form.memory() for layer in self._body if isinstance(layer.form, Stepping)]

    def read(self, batch: Batch, chunk: int) -> Tensor:
        """Returns the logits (B, V) of the last row of `batch`, `chunk` rows at a time, after the rows before it."""
        x: Any = ()
        looked = "visible" not in batch.row
        for start, stop in spans(batch.num_rows, chunk):
            piece = batch.rows(start, stop)
            with _Look(piece.row.get("visible")) as look:
                x = self._advance(piece)
            looked = looked or look.found
        if not looked:
            raise ModelError(
                "generate: the prompts are of different lengths, and no layer of the model reads row leaf 'visible', "
                "which says what is padding; use prompts of one length at a time, or a model that reads it"
            )
        if self._head is not None:
            x, piece = rows(x, stop - start - 1, stop - start), batch.rows(stop - 1, stop)
            with Calling(self._head, "forward", self._head.select(self._params), x, piece):
                x = self._head(self._params, x, piece)
        logits = checks.logits_of(x)[:, -1]
        finite = torch.isfinite(logits.amax(dim=-1))
        if not finite.all():
            example = batch.first_example + int(finite.long().argmin())
            raise ModelError(f"generate: the largest logit of example {example} is not finite, no token can be chosen")
        return logits

    def _advance(self, piece: Batch) -> Any:
        start, stop = piece.first_row, piece.first_row + piece.num_rows
        x: Any = ()
        for layer, memory in zip(self._body, self._memories, strict=True):
            assert isinstance(layer.form, Stepping)  # `check_model`'s own rule
            selected = layer.select(self._params)
            with Calling(layer, "forward", selected, x, piece):
                x = layer.form.advance(selected, x, piece, memory, start, stop, self.num_rows)
        return x


class _Look(TorchFunctionMode):
    """Finds whether a tensor is used in any torch function meanwhile."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._tensor, self.found = tensor, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.found and self._tensor is not None:
            self.found = any(leaf is self._tensor for leaf in tree.leaves((args, kwargs)))
        return function(*args, **kwargs)


def _first_logits(memory: _Memories, prompts: Batch, chunk: int) -> Tensor:
    """Returns the logits (B, V) that follow the prompts, once there are buffers for all rows."""
    try:
        return memory.read(prompts, chunk)
    except RuntimeError as error:
        # torch has no class of its own for memory of the host
        words = ("can't allocate memory", "Storage size calculation overflowed")
        if isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in words):
            raise MemoryLimitError(
                f"generate: there is no memory for {prompts.num_examples} texts of {memory.num_rows} rows; use fewer "
                f"prompts at a time, a smaller num_tokens, or chunk below {chunk}"
            ) from error
        raise
    except KeyError as error:
        raise ModelError(
            f"generate: the model asks for {error}; a text has the row leaf 'tokens', and where it is padded "
            "'visible' and 'positions'"
        ) from error


def _padded(texts: list[Tensor], lengths: Tensor, first_example: int) -> Batch:
    """Returns the prompts as one batch; padding, where there is any, repeats a prompt's first token."""
    num_rows = max(map(len, texts))
    places = torch.arange(num_rows, device=lengths.device) - (num_rows - lengths)[:, None]
    tokens = torch.stack([text[row.clamp(min=0)] for text, row in zip(texts, places, strict=True)])
    row = {"tokens": tokens}
    if (places < 0).any():
        row |= {"visible": places >= 0, "positions": places.clamp(min=0)}
    return Batch(row=row, first_example=first_example)


def _next(prompts: Batch, token: Tensor, lengths: Tensor, num_chosen: int) -> Batch:
    """Returns the row of the token chosen last, after the prompts' and those chosen before."""
    row = {"tokens": token[:, None]}
    if "visible" in prompts.row:
        places = (lengths + num_chosen - 1)[:, None]
        row |= {"visible": torch.ones_like(places, dtype=torch.bool), "positions": places}
    return Batch(row=row, first_example=prompts.first_example, first_row=prompts.num_rows + num_chosen - 1)


def _cut(text: Tensor, stops: Tensor) -> Tensor:
    """Returns the text up to and including its first stop token."""
    found = torch.isin(text, stops).nonzero()
    return text[: int(found[0]) + 1] if len(found) else text
