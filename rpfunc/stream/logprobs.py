"""Log-probabilities of a batch's tokens: what old and reference policies are remembered by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rpfunc.batch import Batch
from rpfunc.model import Layer, Model, Params
from rpfunc.objectives.checks import check_options, logits_problems
from rpfunc.objectives.logprob import score_logprob
from rpfunc.objectives.targets import prepare
from rpfunc.stream.layer_major import layer_forward
from rpfunc.stream.opaque import opaque
from rpfunc.stream.rowwise import RowWise, rowwise
from rpfunc.stream.streaming import Streaming


def logprobs(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    chunk: int | None = None,
    microbatches: int = 1,
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> Float[Tensor, "batch rows"]:
    """Returns log softmax(logits_{t-1})[label_t] at place t, (B, T), float32 or wider, without gradients.

    Aligned with the tokens, as objectives read `old_logprobs` and `reference_logprobs`: 0 at t = 0 and where the label
    is -100. `.sum(1)` gives what `dpo` and `kto` read. Reads row leaf `labels` (B, T), integer. The model's output is
    logits (B, T, V), or a dict that has them as "logits". One microbatch at a time, logits of `chunk` rows at a time.
    temperature, soft_cap: logits become soft_cap · tanh(logits / soft_cap) / temperature first.
    Raises ModelError, BatchError or OptionsError.
    """
    check_options("logprobs", [*Streaming(chunk).problems(microbatches), *logits_problems(temperature, soft_cap)])
    model.check(params)
    *body, head = model.layers
    score = score_logprob(temperature, soft_cap)

    def scored_head(selected: Any, x: Any, piece: Batch) -> Tensor:
        output = head.form.full(selected, x, piece)
        return score(output["logits"] if isinstance(output, Mapping) else output, piece)

    # scores are one number a row: where the head streams, so does the head with the score
    form = rowwise(scored_head) if isinstance(head.form, RowWise) else opaque(scored_head)
    layers = (*body, Layer(head.name, form, head.reads))
    scores = []
    with torch.no_grad():
        for piece in prepare("logprobs", batch).microbatches(microbatches):
            x = layer_forward(layers, params, (), piece, chunk, keep=[len(layers)])[len(layers)]
            scores.append(F.pad(x[:, :-1], (1, 0)))
    return torch.cat(scores)
