"""Write a layer of your own, prove that it streams exactly, and see wrong ones refused.

    .venv/bin/python examples/own_layer.py

The layer is linear attention whose state fades, in the way of RetNet (arXiv 2307.08621) and gated linear attention
(arXiv 2312.06635): with queries, keys and values q, k, v and a gate 0 < f < 1 computed from each row,

    S[t] = f[t] S[t-1] + outer(k[t], v[t])        y[t] = x[t] + q[t] S[t]

A run of rows is worked at once; S between runs is all that later rows need of earlier ones.
Shapes: B examples, T rows of a run, W width.
"""

import torch

from rpfunc import Batch, Layer, Model, memory, random, reference, tree, value_and_grad
from rpfunc.objectives import sft
from rpfunc.stream import recurrent, rowwise
from rpfunc.testing import assert_streams, gradient_error

WIDTH, VOCABULARY, ROWS = 16, 50, 512


def fading(p, x, state, batch):
    """Returns (y, the state after the run) of a run of rows and the state (B, W, W) before it."""
    q, k, v = x @ p["query"], x @ p["key"], x @ p["value"]
    logs = torch.nn.functional.logsigmoid(x @ p["gate"]).cumsum(dim=1)  # (B, T): Σ log f up to each row
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    decay = (logs[:, :, None] - logs[:, None]).masked_fill(later, -torch.inf).exp()  # what t has left of what s wrote
    y = ((q @ k.mT) * decay) @ v + logs.exp()[:, :, None] * (q @ state)
    left = (logs[:, -1:] - logs).exp()[:, :, None]  # what is left of each row at the run's end
    return x + y, logs[:, -1, None, None].exp() * state + (k * left).mT @ v


def looking_ahead(p, x, state, batch):
    """As `fading`, but without the mask: rows see the ones after them."""
    q, k, v = x @ p["query"], x @ p["key"], x @ p["value"]
    return x + (q @ k.mT) @ v + q @ state, state + k.mT @ v


def forgetting(p, x, state, batch):
    """As `fading`, but the state that came in does not fade."""
    y, after = fading(p, x, torch.zeros_like(state), batch)
    return y + (x @ p["query"]) @ state, after + state


def empty(p, batch):
    """Returns the state before the first row."""
    return p["key"].new_zeros(batch.num_examples, WIDTH, WIDTH)


def draw(name, *shape):
    return random.normal(random.fold_in(random.key(0), name), shape, torch.float64) / WIDTH**0.5


def prove(params):
    """Checks the layer and its wrong variants on a small input: 3 examples of 9 rows show what can go wrong."""
    x = draw("x", 3, 9, WIDTH)
    assert_streams(recurrent(fading, empty), params, x, Batch(row={"x": x}))
    print("fading         exact: whatever chunk, order and microbatches were drawn, plain autograd's gradient")
    for wrong in (looking_ahead, forgetting):
        try:
            assert_streams(recurrent(wrong, empty), params, x, Batch(row={"x": x}))
        except AssertionError as error:
            print(f"{wrong.__name__:14} refused: {error}")


def stream(params):
    """Prints what a model of two such layers costs in memory by chunk size, and how exact its gradient is."""
    layers = [Layer(f"fading{index}", recurrent(fading, empty), "fading") for index in range(2)]
    embed = Layer("embed", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "table")
    head = Layer("head", rowwise(lambda p, x, batch: x @ p.mT), "table")
    model = Model((embed, *layers, head))
    params = {"table": draw("table", VOCABULARY, WIDTH), "fading": params}
    tokens = (random.uniform(random.key(1), (1, ROWS)) * VOCABULARY).long()
    batch = Batch(row={"tokens": tokens, "labels": tokens})

    plain = memory.peak(lambda: reference.value_and_grad(model, sft())(params, batch))
    loss, wanted = plain.result
    print(f"\n{ROWS} rows, loss {loss:.6f}          peak memory   error of the gradient")
    print(f"plain torch.func.vjp        {plain.peak_bytes / 2**20:8.1f} MiB")
    for chunk, order in ((128, "layer"), (64, "chunk")):
        function = value_and_grad(model, sft(), chunk=chunk, order=order)
        streamed = memory.peak(lambda function=function: function(params, batch))
        error = gradient_error(streamed.result[1], wanted)
        print(f"{order} by {order}, {chunk:3} rows   {streamed.peak_bytes / 2**20:8.1f} MiB   {error:.1e}")
    assert all(leaf.isfinite().all() for leaf in tree.leaves(wanted))


def main():
    params = {name: draw(name, WIDTH, WIDTH) for name in ("query", "key", "value")} | {"gate": draw("gate", WIDTH)}
    prove(params)
    stream(params)


if __name__ == "__main__":
    main()
