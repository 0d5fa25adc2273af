"""A gated linear recurrence in place of attention: however many rows there are, they leave one vector for later ones.

Sources: the recurrence h[t] = g[t] h[t-1] + (1 - g[t]) v[t] and its parallel scan are those of GILR (arXiv 1709.04057);
the layers around it, an output gate and gated MLPs, are Griffin's (arXiv 2402.19427, section 2); gates start with
memories of many lengths, as in chrono initialisation (arXiv 1804.11188), here even in their logarithm.
Shapes: B batch, T rows, W width, S state width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rpfunc import random
from rpfunc.batch import Batch
from rpfunc.errors import ModelError
from rpfunc.model import Form, Layer, Model
from rpfunc.models import checks, feedforward, norms, transformer
from rpfunc.stream import recurrent, rowwise


@dataclass(frozen=True)
class RecurrenceConfig:
    """The shape of a recurrent model. Raises ModelError listing every value that cannot work."""

    vocabulary: int = 256
    """Different tokens."""
    width: int = 128
    """Of the residual stream."""
    layers: int = 4
    """Recurrences, each followed by an MLP."""
    state_width: int = 128
    """Of what rows leave for later ones, in each recurrence."""
    mlp_width: int = 384
    """Of an MLP's hidden layer."""
    memory: int = 1024
    """Rows that the slowest gates remember at the start."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in every norm."""
    tied: bool = True
    """The head is the embedding: one subtree, one gradient."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("vocabulary", "width", "state_width", "mlp_width")}
        problems = [
            *checks.counts(sizes),
            *checks.counts({"layers": self.layers}, most=checks.MOST_LAYERS),
            *checks.counts({"memory": self.memory}, least=2),
            *checks.positives({"norm_epsilon": self.norm_epsilon}),
            *checks.flags({"tied": self.tied}),
        ]
        if problems:
            raise ModelError.listing("recurrence", problems)


def model(config: RecurrenceConfig) -> Model:
    """Returns layers `embedding`, `recurrence0`, `mlp0` ..., `head`. Reads row leaf `tokens` (B, T) int64, and where
    there is one `visible` (B, T) bool: other rows leave the state as it was. Gives logits (B, T, V).
    """
    norm, mlp = norms.rms(config.norm_epsilon), feedforward.gated(F.gelu)
    forms = {"recurrence": mixing(norm), "mlp": rowwise(lambda p, x, batch: x + mlp(p, norm(p["norm"], x)))}
    middle = [Layer(f"{kind}{i}", form, f"{kind}{i}") for i in range(config.layers) for kind, form in forms.items()]
    return Model(transformer.stack(middle, transformer.Ends(norm, config.tied)))


def init(config: RecurrenceConfig, key: random.Key, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns parameters: weights (out, in) normal of deviation 1 / sqrt(in), those that write into the residual stream
    smaller by sqrt(2 layers); embedding and head of deviation 0.02; norms 1; gates' biases such that their memories
    reach from 2 rows to the config's, as many in each octave.
    """
    width, state, hidden = config.width, config.state_width, config.mlp_width
    shrink = 1 / math.sqrt(2 * config.layers)

    def weight(name: str, out: int, inputs: int, scale: float = 1.0) -> Tensor:
        drawn = random.normal(random.fold_in(key, name), (out, inputs), torch.float64)
        return (drawn * (scale / math.sqrt(inputs))).to(dtype)

    params: dict[str, Any] = {"norm": torch.ones(width, dtype=dtype)}
    for name in ("embedding",) if config.tied else ("embedding", "head"):
        params[name] = weight(name, config.vocabulary, width, 0.02 * math.sqrt(width))
    for name in (f"recurrence{i}" for i in range(config.layers)):
        share = random.uniform(random.fold_in(key, f"{name}.forget_bias"), (state,), torch.float64)
        params[name] = {
            "norm": torch.ones(width, dtype=dtype),
            "forget": weight(f"{name}.forget", state, width),
            # the gate sigmoid(log(k - 1)) is 1 - 1/k: what a row leaves fades over k rows
            "forget_bias": (share * math.log(config.memory - 1)).to(dtype),
            "value": weight(f"{name}.value", state, width),
            "gate": weight(f"{name}.gate", state, width),
            "output": weight(f"{name}.output", width, state, shrink),
        }
    for name in (f"mlp{i}" for i in range(config.layers)):
        params[name] = {
            "norm": torch.ones(width, dtype=dtype),
            "gate": weight(f"{name}.gate", hidden, width),
            "up": weight(f"{name}.up", hidden, width),
            "down": weight(f"{name}.down", width, hidden, shrink),
        }
    return params


def mixing(norm: norms.Norm) -> Form:
    """Returns x + output(gelu(gate(x)) * h), h the recurrence over rows. Its state (B, S) is float32 or wider."""

    def body(params: dict[str, Any], x: Tensor, state: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = norm(params["norm"], x)
        forget = F.linear(hidden, params["forget"], params["forget_bias"]).to(state.dtype)
        value = F.linear(hidden, params["value"]).to(state.dtype)
        if "visible" in batch.row:  # where not, gates forget nothing and take nothing
            visible = checks.check_leaf(batch, "row", "visible", ("batch", "rows"), torch.bool)
            forget = forget.masked_fill(~visible[..., None], torch.inf)
        states = scan(forget.sigmoid(), (-forget).sigmoid() * value, state[:, None])
        gated = F.gelu(F.linear(hidden, params["gate"])) * states.to(x.dtype)
        return x + F.linear(gated, params["output"]), states[:, -1]

    def empty(params: dict[str, Any], batch: Batch) -> Tensor:
        bias: Tensor = params["forget_bias"]
        # small steps would vanish in a state of 16 bits
        return bias.new_zeros(batch.num_examples, len(bias), dtype=torch.promote_types(bias.dtype, torch.float32))

    return recurrent(body, empty)


def scan(
    keep: Float[Tensor, "batch rows state"],
    add: Float[Tensor, "batch rows state"],
    state: Float[Tensor, "batch 1 state"],
) -> Float[Tensor, "batch rows state"]:
    """Returns h[t] = keep[t] h[t-1] + add[t] of all rows, h[-1] being `state`.

    Two steps are one of the same kind: half as many steps give every second row, and one more the rows between. Cost:
    2 log2(T) operations one after the other, work and memory of about 3 T; nothing is divided, so nothing overflows.

    >>> scan(torch.full((1, 4, 1), 0.5), torch.ones(1, 4, 1), torch.zeros(1, 1, 1)).flatten().tolist()
    [1.0, 1.5, 1.75, 1.875]
    """
    num_rows, half = keep.shape[1], keep.shape[1] // 2
    if half == 0:
        return keep * state + add
    even, odd = slice(0, 2 * half, 2), slice(1, None, 2)
    odds = scan(keep[:, odd] * keep[:, even], keep[:, odd] * add[:, even] + add[:, odd], state)
    before = torch.cat((state, odds), dim=1)[:, : num_rows - half]
    evens = keep[:, ::2] * before + add[:, ::2]
    pairs = torch.stack((evens[:, :half], odds), dim=2).flatten(1, 2)
    return torch.cat((pairs, evens[:, half:]), dim=1)
