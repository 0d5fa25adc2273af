"""What each layer costs, counted in floating-point operations without running anything."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from rpfunc import tree
from rpfunc.batch import Batch
from rpfunc.model import Model, Params


def forward_flops(model: Model, params: Params, batch: Batch) -> list[int]:
    """Returns the forward FLOPs of each layer on `batch`: matrix products and attention, by shapes alone.

    Runs the layers on meta tensors, so it takes milliseconds and no memory whatever their size. Layers without a
    product (a look-up, a norm) count 0.
    """
    params = tree.map(_to_meta, dict(params))
    batch = Batch(
        row=tree.map(_to_meta, batch.row),
        example=tree.map(_to_meta, batch.example),
        group=tree.map(_to_meta, batch.group),
        constant=tree.map(_to_meta, batch.constant),
        group_size=batch.group_size,
    )
    x: Any = ()
    flops = []
    with torch.no_grad(), torch.device("meta"):
        for layer in model.layers:
            with FlopCounterMode(display=False) as counter:
                x = layer(params, x, batch)
            flops.append(counter.get_total_flops())
    return flops


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
