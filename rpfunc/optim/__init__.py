"""Optimizers in the manner of optax: pure transformations of gradients, composed by `chain`."""

from rpfunc.optim.accumulate import accumulate
from rpfunc.optim.adam import scale_by_adam
from rpfunc.optim.base import Transformation, apply_updates, from_leafwise
from rpfunc.optim.chain import chain
from rpfunc.optim.clip import clip_by_global_norm, global_norm
from rpfunc.optim.decay import add_decayed_weights
from rpfunc.optim.donatable import check_donatable
from rpfunc.optim.leafwise import Leafwise, LeafwiseState, advance, from_linear, measure, prepare
from rpfunc.optim.linear import Linear
from rpfunc.optim.masked import masked
from rpfunc.optim.optimizers import adam, adamw, sgd
from rpfunc.optim.scale import identity, scale, scale_by_learning_rate, scale_by_schedule
from rpfunc.optim.schedules import Schedule, constant, cosine_decay, join, linear, warmup_cosine
from rpfunc.optim.step import advance_donated, step, step_donated
from rpfunc.optim.trace import trace

__all__ = [
    "Leafwise",
    "LeafwiseState",
    "Linear",
    "Schedule",
    "Transformation",
    "accumulate",
    "adam",
    "adamw",
    "add_decayed_weights",
    "advance",
    "advance_donated",
    "apply_updates",
    "chain",
    "check_donatable",
    "clip_by_global_norm",
    "constant",
    "cosine_decay",
    "from_leafwise",
    "from_linear",
    "global_norm",
    "identity",
    "join",
    "linear",
    "masked",
    "measure",
    "prepare",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "sgd",
    "step",
    "step_donated",
    "trace",
    "warmup_cosine",
]
