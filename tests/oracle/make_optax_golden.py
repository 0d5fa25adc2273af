"""Writes optax_golden.json: what optax does with a few fixed gradients, for test_optax_golden.py to compare with.

Run it where jax 0.10.2 and optax 0.2.8 are installed; the tests need neither:

    JAX_PLATFORMS=cpu python make_optax_golden.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

jax.config.update("jax_enable_x64", True)

PARAMS = {"block": {"bias": [0.5, -1.0], "weight": [[1.0, -2.0], [0.25, 3.0]]}, "head": [2.0, -0.5, 1.5]}
MASK = {"block": {"bias": False, "weight": True}, "head": True}
NUM_STEPS = 8


def as_arrays(values):
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, jnp.float64), values, is_leaf=lambda node: isinstance(node, list)
    )


def as_lists(arrays):
    return jax.tree.map(lambda leaf: leaf.tolist(), arrays)


def gradient(step):
    """A gradient that changes sign and size with the step and the place, without a random generator."""

    def leaf(values, offset):
        return jnp.sin(jnp.arange(values.size, dtype=jnp.float64) * 1.7 + 2.3 * step + offset).reshape(values.shape)

    params = as_arrays(PARAMS)
    return {
        "block": {"bias": leaf(params["block"]["bias"], 0.1), "weight": 3 * leaf(params["block"]["weight"], 0.2)},
        "head": leaf(params["head"], 0.3),
    }


def run(optimizer):
    params = as_arrays(PARAMS)
    state = optimizer.init(params)
    history = []
    for step in range(NUM_STEPS):
        updates, state = optimizer.update(gradient(step), state, params)
        params = optax.apply_updates(params, updates)
        history.append(as_lists(params))
    return history


warmup_cosine = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6, 0.01)
accumulated = optax.MultiSteps(
    optax.adamw(0.1, weight_decay=0.1),
    every_k_schedule=lambda count: jnp.where(count < 1, 2, 3),
    accumulator_dtype=jnp.float64,
)

SCHEDULES = {
    "linear": optax.linear_schedule(0.0, 1.0, 4),
    "cosine_decay": optax.cosine_decay_schedule(0.5, 5, alpha=0.1),
    "warmup_cosine": warmup_cosine,
    "join": optax.join_schedules([optax.linear_schedule(0.0, 1.0, 4), optax.linear_schedule(1.0, 0.5, 3)], [4]),
}

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "sgd_nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1, b1=0.8, b2=0.95),
    "adamw_schedule": optax.adamw(warmup_cosine, weight_decay=0.1),
    "adamw_mask": optax.adamw(0.1, weight_decay=0.1, mask=MASK),
    "clip_adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.1)),
    "clip_second": optax.chain(optax.trace(0.9), optax.clip_by_global_norm(1.0), optax.scale(-0.1)),
    "masked_sgd": optax.masked(optax.sgd(0.1, momentum=0.9), MASK),
    "accumulate_schedule": optax.GradientTransformation(accumulated.init, accumulated.update),
}


def main():
    golden = {
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
        "params": PARAMS,
        "mask": MASK,
        "gradients": [as_lists(gradient(step)) for step in range(NUM_STEPS)],
        "schedules": {
            name: [float(schedule(jnp.asarray(count))) for count in range(10)] for name, schedule in SCHEDULES.items()
        },
        "parameters_after_each_step": {name: run(optimizer) for name, optimizer in OPTIMIZERS.items()},
    }
    path = Path(__file__).with_name("optax_golden.json")
    path.write_text(json.dumps(golden, indent=None, separators=(",", ":")) + "\n")
    sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
