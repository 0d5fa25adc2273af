"""The models of rpfunc.models written again, densely, on plain torch and torch.autograd; shares nothing with rpfunc.

Loops over examples and heads, whole T x T masks, formulas spelled out: slow, and easy to check by reading.
"""

import math

import torch


def linear(x, weight, bias=None):
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def rms_norm(x, scale, epsilon):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + epsilon) * scale


def rotate(x, theta):
    """x (T, size): the pair (i, i + size/2) of row t is a complex number, turned by t * theta^(-2i/size)."""
    num_rows, size = x.shape
    real, imaginary = [], []
    for i in range(size // 2):
        angles = torch.tensor([t * theta ** (-2 * i / size) for t in range(num_rows)], dtype=torch.float64)
        turned = torch.complex(x[:, i], x[:, i + size // 2]) * torch.polar(torch.ones_like(angles), angles)
        real.append(turned.real)
        imaginary.append(turned.imag)
    return torch.stack(real + imaginary, dim=1)


def attention(query, key, value):
    """One head, (T, size) each: softmax over the keys at or before each query."""
    num_rows, size = query.shape
    scores = query @ key.T / math.sqrt(size)
    mask = torch.tensor([[column <= row for column in range(num_rows)] for row in range(num_rows)])
    weights = torch.where(mask, scores.exp(), 0.0)
    return weights / weights.sum(-1, keepdim=True) @ value


def block(params, x, config):
    """x (T, W)."""
    attn, mlp = params["attention"], params["mlp"]
    hidden = rms_norm(x, attn["norm"], config.norm_epsilon)
    size, outputs = config.head_size, []
    for head in range(config.heads):
        kv_head = head * config.kv_heads // config.heads
        parts = {}
        for name, index in (("query", head), ("key", kv_head), ("value", kv_head)):
            part = slice(index * size, (index + 1) * size)
            bias = attn[f"{name}_bias"][part] if config.bias else None
            parts[name] = linear(hidden, attn[name][part], bias)
            if config.qk_norm and name != "value":
                parts[name] = rms_norm(parts[name], attn[f"{name}_norm"], config.norm_epsilon)
            if name != "value":
                parts[name] = rotate(parts[name], config.rope_theta)
        outputs.append(attention(parts["query"], parts["key"], parts["value"]))
    x = x + linear(torch.cat(outputs, dim=-1), attn["output"])
    hidden = rms_norm(x, mlp["norm"], config.norm_epsilon)
    gate = linear(hidden, mlp["gate"])
    return x + linear(gate / (1 + torch.exp(-gate)) * linear(hidden, mlp["up"]), mlp["down"])


def decoder_logits(params, tokens, config):
    """tokens (T) -> (T, V)."""
    x = torch.stack([params["embedding"][token] for token in tokens.tolist()])
    for index in range(config.layers):
        x = block(params[f"block{index}"], x, config)
    x = rms_norm(x, params["norm"], config.norm_epsilon)
    return linear(x, params["embedding"] if config.tied else params["head"])


def mlp_outputs(params, features, activation):
    functions = {
        "relu": lambda x: x * (x > 0),
        "square": lambda x: x * x,
        "tanh": lambda x: 1 - 2 / (torch.exp(2 * x) + 1),
    }
    x = features
    for index in range(len(params)):
        x = linear(x, params[f"linear{index}"]["weight"], params[f"linear{index}"]["bias"])
        x = x if index == len(params) - 1 else functions[activation](x)
    return x


def next_token_loss(logits_of_examples, labels):
    """Mean over all scored places of -log softmax(logits[t])[label[t + 1]]; label -100 is not scored."""
    losses = []
    for logits, row in zip(logits_of_examples, labels.tolist(), strict=True):
        for t in range(len(row) - 1):
            if row[t + 1] != -100:
                shifted = logits[t] - logits[t].max()  # exp of a large number would overflow
                losses.append(torch.log(torch.exp(shifted).sum()) - shifted[row[t + 1]])
    return torch.stack(losses).mean()


def polynomial_attention_loss(params, x, labels):
    """x (B, T, W) through x + ((x Wq)(x Wk)^T, masked) (x Wv), then logits x W^T: the mean of logit[label]."""
    total = 0.0
    for example, row in zip(x, labels.tolist(), strict=True):
        query, key, value = (linear(example, params["attention"][name]) for name in ("query", "key", "value"))
        for t in range(len(row)):
            seen = example[t] + sum((query[t] @ key[s]) * value[s] for s in range(t + 1))
            total = total + seen @ params["head"][row[t]]
    return total / labels.numel()


def value_and_grad(loss, params):
    """loss(params) and its gradient by torch.autograd, for nested dicts of tensors."""
    leaves = []

    def fresh(tree):
        if isinstance(tree, dict):
            return {name: fresh(part) for name, part in tree.items()}
        leaves.append(tree.detach().clone().requires_grad_())
        return leaves[-1]

    value = loss(fresh(params))
    grads = iter(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))

    def rebuilt(tree):
        return {name: rebuilt(part) for name, part in tree.items()} if isinstance(tree, dict) else next(grads)

    return value.detach(), rebuilt(params)
