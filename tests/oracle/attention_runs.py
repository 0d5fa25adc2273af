"""One attention case run densely, and streamed by an attending layer: outputs and gradients by name."""

import torch
from oracle import dense_attention

from rpfunc import Batch
from rpfunc.stream import attend, attending

NAMES = ("q", "k", "v", "sinks")


def dense(tensors, options, attend=dense_attention.attend):
    """Output and gradients by torch.autograd on dense attention."""
    *leaves, dy = [None if leaf is None else leaf.detach().clone().requires_grad_() for leaf in tensors]
    output = attend(*leaves[:3], sinks=leaves[3], **options)
    trained = [leaf for leaf in leaves if leaf is not None]
    grads = torch.autograd.grad(output, trained, dy.detach(), allow_unused=True, materialize_grads=True)
    return named(output.detach(), grads)


def streamed(tensors, options, chunk, attend=attend):
    """Output and gradients of an attending layer whose kv has segment ids and visibility, `chunk` rows at a time."""
    q, k, v, sinks, dy = tensors
    row = {name: options[name] for name in ("segments", "visible") if options[name] is not None}
    batch = Batch(row={"q": q, **row})

    def kv(sinks, x, batch):
        return {"k": x["k"], "v": x["v"], **{name: batch.row[name] for name in row}}

    def rows(sinks, x, kv, batch):
        return attend(
            x["q"],
            kv["k"],
            kv["v"],
            causal=options["causal"],
            window=options["window"],
            soft_cap=options["soft_cap"],
            query_segments=batch.row.get("segments"),
            key_segments=kv.get("segments"),
            visible=kv.get("visible"),
            sinks=None if isinstance(sinks, tuple) else sinks,
        )

    form = attending(kv, rows, causal=options["causal"], window=options["window"])
    params, x = () if sinks is None else sinks, {"q": q, "k": k, "v": v}
    output = form.forward(params, x, batch, chunk)
    (dk, dq, dv), dparams = form.backward(params, x, batch, chunk, (dy.clone(),), None)
    return named(output, (dq, dk, dv, *dparams), order=("q", "k", "v", "sinks"))


def named(output, grads, order=NAMES):
    return {"output": output, **dict(zip(order, grads, strict=False))}
