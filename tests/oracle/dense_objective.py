"""Every objective once more, as its docstring has it: loops over examples and tokens, whole logits, plain torch.

Each is a function (output, batch, options) -> loss () that torch.autograd differentiates. Shares nothing with rpfunc
but the class Batch.
"""

from __future__ import annotations

import torch

ZERO = torch.zeros((), dtype=torch.float64)


def targets_of(batch, i):
    """Places of example i that are predicted."""
    return [t for t in range(1, batch.num_rows) if batch.row["labels"][i, t] != -100]


def shaped(logits, temperature=1.0, soft_cap=None):
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return logits / temperature


def log_p(logits, batch, i, t, **options):
    """log p of the token at place t of example i, given by the row before it."""
    x = shaped(logits[i, t - 1], **options)
    return x[batch.row["labels"][i, t]] - torch.log(torch.exp(x).sum())


def mean(terms, count):
    return sum(terms, ZERO) / count if count else ZERO


def sft(logits, batch, label_smoothing=0.0, z_loss=0.0, **options):
    losses, weights = [], 0.0
    for i in range(batch.num_examples):
        for t in targets_of(batch, i):
            x = shaped(logits[i, t - 1], **options)
            log_z = torch.log(torch.exp(x).sum())
            nll = log_z - x[batch.row["labels"][i, t]]
            loss = (1 - label_smoothing) * nll + label_smoothing * (log_z - x.mean()) + z_loss * log_z**2
            weight = batch.row["weights"][i, t] if "weights" in batch.row else 1.0
            losses.append(weight * loss)
            weights = weights + weight
    return mean(losses, weights)


def completions(logits, batch, **options):
    """(sum of log p, number of tokens) of each example."""
    places = [targets_of(batch, i) for i in range(batch.num_examples)]
    return [(sum((log_p(logits, batch, i, t, **options) for t in p), ZERO), len(p)) for i, p in enumerate(places)]


def pairs(logits, batch, loss, **options):
    """Mean over pairs whose completions both have tokens."""
    found = completions(logits, batch, **options)
    both = [i for i in range(0, len(found), 2) if found[i][1] and found[i + 1][1]]
    return mean([loss(i, *found[i], *found[i + 1]) for i in both], len(both))


def log_sigmoid(x):
    return -torch.log(1 + torch.exp(-x))


def dpo(logits, batch, beta=0.1, label_smoothing=0.0, variant="sigmoid", **options):
    reference = batch.example["reference_logprobs"]

    def loss(i, chosen, num_chosen, rejected, num_rejected):
        chosen, rejected = chosen - reference[i], rejected - reference[i + 1]
        if variant == "ipo":
            return (chosen / num_chosen - rejected / num_rejected - 1 / (2 * beta)) ** 2
        margin = beta * (chosen - rejected)
        return -(1 - label_smoothing) * log_sigmoid(margin) - label_smoothing * log_sigmoid(-margin)

    return pairs(logits, batch, loss, **options)


def simpo(logits, batch, beta=2.0, gamma=0.5, **options):
    def loss(i, chosen, num_chosen, rejected, num_rejected):
        return -log_sigmoid(beta * (chosen / num_chosen - rejected / num_rejected) - gamma)

    return pairs(logits, batch, loss, **options)


def orpo(logits, batch, beta=0.1, **options):
    def log_odds(m):
        return m - torch.log(1 - torch.exp(m))

    def loss(i, chosen, num_chosen, rejected, num_rejected):
        chosen, rejected = chosen / num_chosen, rejected / num_rejected
        return -chosen - beta * log_sigmoid(log_odds(chosen) - log_odds(rejected))

    return pairs(logits, batch, loss, **options)


def kto(logits, batch, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, **options):
    found = completions(logits, batch, **options)
    gains = [total - batch.example["reference_logprobs"][i] for i, (total, _) in enumerate(found)]
    scored = [i for i, (_, count) in enumerate(found) if count]
    kl = [gains[i].detach() for i in scored if batch.example["kl"][i]]
    baseline = max(ZERO, mean(kl, len(kl)))
    losses = []
    for i in scored:
        if not batch.example["kl"][i]:
            if batch.example["desirable"][i]:
                losses.append(desirable_weight * (1 - torch.sigmoid(beta * (gains[i] - baseline))))
            else:
                losses.append(undesirable_weight * (1 - torch.sigmoid(beta * (baseline - gains[i]))))
    return mean(losses, len(losses))


def surrogate(log_ratio, advantage, low, high):
    ratio = torch.exp(log_ratio)
    return -torch.min(ratio * advantage, torch.clip(ratio, 1 - low, 1 + high) * advantage)


def grpo(
    logits,
    batch,
    clip_low=0.2,
    clip_high=0.2,
    kl=0.0,
    normalisation="token",
    max_length=None,
    ratio="token",
    **options,
):
    by_example = []
    for i in range(batch.num_examples):
        places = targets_of(batch, i)
        new = {t: log_p(logits, batch, i, t, **options) for t in places}
        log_ratios = {t: new[t] - batch.row["old_logprobs"][i, t] for t in places}
        losses = []
        for t in places:
            whole = mean(log_ratios.values(), len(places))
            log_ratio = whole if ratio == "sequence" else log_ratios[t]
            loss = surrogate(log_ratio, batch.example["advantages"][i], clip_low, clip_high)
            if kl:
                r = batch.row["reference_logprobs"][i, t] - new[t]
                loss = loss + kl * (torch.exp(r) - r - 1)
            losses.append(loss)
        if losses:
            by_example.append(losses)
    if normalisation == "sequence":
        return mean([mean(losses, len(losses)) for losses in by_example], len(by_example))
    flat = [loss for losses in by_example for loss in losses]
    return mean(flat, len(flat) if normalisation == "token" else len(by_example) * max_length)


def ppo(output, batch, clip=0.2, value_clip=0.2, value_coefficient=0.5, entropy_coefficient=0.0, **options):
    losses = []
    for i in range(batch.num_examples):
        for t in targets_of(batch, i):
            row = {name: leaf[i, t] for name, leaf in batch.row.items()}
            log_ratio = log_p(output["logits"], batch, i, t, **options) - row["old_logprobs"]
            value = output["values"][i, t - 1]
            value_loss = (value - row["returns"]) ** 2
            if value_clip is not None:
                clipped = row["old_values"] + torch.clip(value - row["old_values"], -value_clip, value_clip)
                value_loss = torch.max(value_loss, (clipped - row["returns"]) ** 2)
            p = torch.softmax(shaped(output["logits"][i, t - 1], **options), dim=-1)
            bonus = entropy_coefficient * -(p * torch.log(p)).sum()
            losses.append(surrogate(log_ratio, row["advantages"], clip, clip) + value_coefficient * value_loss - bonus)
    return mean(losses, len(losses))
