"""What each layer costs, in floating-point operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.errors import note
from rpfunc.model import Model, Params


def forward_flops(model: Model, params: Params, batch: Batch) -> list[int]:
    """Returns the forward FLOPs of each layer on the first group of examples: matrix products and attention.

    Found from shapes alone, on meta tensors, in milliseconds whatever their size; where a layer's shapes depend on
    data, by really running that group. Layers without a product (a look-up, a norm) count 0. `batch` is what the
    objective has prepared.
    """
    batch = batch.examples(0, batch.group_size)
    try:
        with torch.device("meta"):
            return _count(model, tree.map(_to_meta, dict(params)), batch.map(_to_meta))
    except Exception:
        return _count(model, params, batch)


def _count(model: Model, params: Params, batch: Batch) -> list[int]:
    x: Any = ()
    flops = []
    for layer in model.layers:
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                x = layer(params, x, batch)
        except Exception as error:
            note(error, f"in layer {layer.name!r}, while its cost was counted to choose a plan")
            raise
        flops.append(counter.get_total_flops())
    return flops


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
