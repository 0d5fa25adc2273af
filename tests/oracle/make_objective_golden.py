"""Writes objective_golden.json: losses and gradients of trl and liger-kernel, for test_objective_golden.py to compare.

Run it where torch 2.13.0, trl 1.16.0 and liger-kernel 0.8.5 are installed; the tests need neither of the last two:

    python make_objective_golden.py

The model is an embedding table and a head, logits = table[tokens] @ head.T; its gradients are those of both. trl's loss
methods are called on stand-ins for the trainer and the model, so that no trainer has to be set up.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import liger_kernel.chunked_loss as liger
import torch
import trl
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

VOCABULARY, WIDTH, PROMPT = 7, 3, 2
TOKENS = [[1, 4, 2, 6, 3, 5], [1, 4, 5, 5, 0, 2], [3, 0, 6, 1, 1, 4], [3, 0, 2, 2, 5, 6]]
LENGTHS = [4, 2, 3, 4]  # of the completions, which follow the prompt
KL_TOKENS = [[1, 4, 2, 2, 5, 6], [3, 0, 5, 5, 0, 2], [1, 4, 6, 1, 1, 4], [3, 0, 2, 6, 3, 5]]
KL_LENGTHS = [4, 2, 3, 4]
DESIRABLE = [True, False, False, True]
ADVANTAGES = [1.5, -0.5, 0.75, -2.0]


def waves(*shape, offset):
    """Numbers that change sign and size with the place, without a random generator."""
    size = torch.Size(shape).numel()
    return torch.sin(torch.arange(size, dtype=torch.float64) * 1.7 + offset).reshape(shape)


def labels_of(tokens, lengths):
    labels = torch.full_like(tokens, -100)
    for i, length in enumerate(lengths):
        labels[i, PROMPT : PROMPT + length] = tokens[i, PROMPT : PROMPT + length]
    return labels


PARAMS = {"table": 2 * waves(VOCABULARY, WIDTH, offset=0.3), "head": 1.5 * waves(VOCABULARY, WIDTH, offset=0.9)}
REFERENCE = {"table": 2 * waves(VOCABULARY, WIDTH, offset=0.4), "head": 1.5 * waves(VOCABULARY, WIDTH, offset=1.1)}
OLD = {"table": 2 * waves(VOCABULARY, WIDTH, offset=0.35), "head": 1.5 * waves(VOCABULARY, WIDTH, offset=0.95)}
BATCH = torch.tensor(TOKENS)
LABELS = labels_of(BATCH, LENGTHS)
EQUAL = labels_of(BATCH, [3, 3, 3, 3])
MASKED = labels_of(BATCH, [4, 0, 3, 4])
KL_BATCH = torch.tensor(KL_TOKENS)
KL_LABELS = labels_of(KL_BATCH, KL_LENGTHS)
CHOSEN_FIRST = [0, 2, 1, 3]
"""trl and liger want all chosen examples before all rejected ones."""


def token_logprobs(params, tokens, labels):
    """(B, T-1), 0 where there is no label."""
    logits = params["table"][tokens[:, :-1]] @ params["head"].T
    found = logits.log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found * (labels[:, 1:] != -100)


def means(params, labels):
    return token_logprobs(params, BATCH, labels).sum(1) / (labels[:, 1:] != -100).sum(1)


def golden(loss):
    """loss(params) -> (), and its gradients."""
    params = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    value = loss(params)
    grads = torch.autograd.grad(value, list(params.values()))
    return {"loss": value.item(), "grads": {n: g.tolist() for n, g in zip(params, grads, strict=True)}}


# trl


class Model:
    """What trl's trainers call: gives log-probabilities of labels."""

    def __init__(self, params):
        self.params, self.training = params, False

    def __call__(self, input_ids, labels, **_):
        logprobs = token_logprobs(self.params, input_ids, labels)
        zeros = torch.zeros_like(logprobs)
        unused = {"entropy": zeros, "mean_logits": zeros, "is_top1": zeros.bool()}
        return SimpleNamespace(log_probs=logprobs, **unused)


def trainer(params, **options):
    gather = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        gather_for_metrics=lambda x: x,
        gather=lambda x: x,
        reduce=lambda x, **_: x,
    )
    common = {"accelerator": gather, "model": Model(params), "_metrics": defaultdict(lambda: defaultdict(list))}
    off = {"aux_loss_enabled": False, "_total_train_tokens": 0, "label_smoothing": 0.0}
    return SimpleNamespace(**common, **off, **options)


def trl_dpo(params, loss_type, beta):
    reference = token_logprobs(REFERENCE, BATCH, LABELS).sum(1)
    stand_in = trainer(
        params,
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
    )
    inputs = {
        "input_ids": BATCH[CHOSEN_FIRST],
        "attention_mask": torch.ones_like(BATCH),
        "completion_mask": (LABELS != -100).long()[CHOSEN_FIRST],
        "ref_chosen_logps": reference[0::2],
        "ref_rejected_logps": reference[1::2],
    }
    return DPOTrainer._compute_loss(stand_in, stand_in.model, inputs, False)


def trl_cpo(params, loss_type, beta, label_smoothing=0.0, gamma=0.0, average=False):
    stand_in = trainer(params, loss_type=loss_type, beta=beta, alpha=0.0, simpo_gamma=gamma)
    stand_in.label_smoothing = label_smoothing
    logprobs = means(params, LABELS) if average else token_logprobs(params, BATCH, LABELS).sum(1)
    return CPOTrainer.cpo_loss(stand_in, logprobs[0::2], logprobs[1::2])[0].mean()


def trl_orpo(params, beta):
    logprobs = means(params, LABELS)
    terms = ORPOTrainer.odds_ratio_loss(trainer(params, beta=beta), logprobs[0::2], logprobs[1::2])[0]
    return -logprobs[0::2].mean() - terms.mean()


def trl_kto(params, beta, desirable_weight, undesirable_weight):
    stand_in = trainer(
        params,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        loss_type="kto",
        calculate_KL=True,
        precompute_ref_logps=True,
    )
    stand_in._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(stand_in, model, batch)
    inputs = {
        "input_ids": BATCH,
        "attention_mask": torch.ones_like(BATCH),
        "completion_mask": (LABELS != -100).long(),
        "KL_input_ids": KL_BATCH,
        "KL_attention_mask": torch.ones_like(KL_BATCH),
        "KL_completion_mask": (KL_LABELS != -100).long(),
        "label": torch.tensor(DESIRABLE),
        "ref_logps": token_logprobs(REFERENCE, BATCH, LABELS).sum(1),
        "ref_KL_logps": token_logprobs(REFERENCE, KL_BATCH, KL_LABELS).sum(1),
    }
    return KTOTrainer._compute_loss(stand_in, stand_in.model, inputs, False)


def trl_grpo(params, loss_type, labels=LABELS, level="token", beta=0.1):
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    stand_in = trainer(
        params,
        args=args,
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=0.1,
        epsilon_high=0.3,
        max_completion_length=8,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
    )
    completion = slice(PROMPT - 1, None)
    logprobs = token_logprobs(params, BATCH, labels)[:, completion]
    stand_in._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    inputs = {
        "prompt_ids": BATCH[:, :PROMPT],
        "prompt_mask": torch.ones_like(BATCH[:, :PROMPT]),
        "completion_ids": BATCH[:, PROMPT:],
        "completion_mask": (labels != -100).long()[:, PROMPT:],
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": token_logprobs(OLD, BATCH, labels)[:, completion],
        "ref_per_token_logps": token_logprobs(REFERENCE, BATCH, labels)[:, completion],
        "num_items_in_batch": (labels != -100).sum(),
    }
    return GRPOTrainer._compute_loss(stand_in, stand_in.model, inputs)


# liger-kernel: hidden states and head in, targets shifted by the caller, float32 inside


def liger_pairs(params, loss, labels=LABELS, reference=False):
    tokens, targets = BATCH[CHOSEN_FIRST, :-1], labels[CHOSEN_FIRST, 1:]
    given = {"ref_input": REFERENCE["table"][tokens], "ref_weight": REFERENCE["head"]} if reference else {}
    return loss(params["head"], params["table"][tokens], targets, **given)[0]


def liger_kto(params, beta):
    gain = token_logprobs(PARAMS, KL_BATCH, KL_LABELS) - token_logprobs(REFERENCE, KL_BATCH, KL_LABELS)
    loss = liger.LigerFusedLinearKTOLoss(beta=beta, compiled=False, use_ref_model=True)
    tokens = BATCH[:, :-1]
    return loss(
        params["table"][tokens],
        params["head"],
        LABELS[:, 1:],
        preference_labels=torch.tensor(DESIRABLE),
        ref_input=REFERENCE["table"][tokens],
        ref_weight=REFERENCE["head"],
        kl=gain.sum(1).mean().clamp(min=0),
    )[0]


def liger_grpo(params, **options):
    loss = liger.LigerFusedLinearGRPOLoss(beta=0.1, compiled=False, epsilon_low=0.1, epsilon_high=0.3, **options)
    return loss(
        params["table"][BATCH[:, :-1]],
        params["head"],
        LABELS[:, 1:].clamp(min=0),
        (LABELS[:, 1:] != -100).double(),
        torch.tensor(ADVANTAGES, dtype=torch.float64),
        ref_per_token_logps=token_logprobs(REFERENCE, BATCH, LABELS),
        old_per_token_logps=token_logprobs(OLD, BATCH, LABELS),
    )[0]


CASES = {
    "trl_dpo": lambda p: trl_dpo(p, "sigmoid", 0.3),
    "trl_ipo": lambda p: trl_dpo(p, "ipo", 0.3),
    "trl_cpo_smooth": lambda p: trl_cpo(p, "sigmoid", 0.3, label_smoothing=0.1),
    "trl_simpo": lambda p: trl_cpo(p, "simpo", 2.0, gamma=0.5, average=True),
    "trl_orpo": lambda p: trl_orpo(p, 0.5),
    "trl_kto": lambda p: trl_kto(p, 0.2, 1.2, 0.7),
    "trl_grpo_token": lambda p: trl_grpo(p, "bnpo"),
    "trl_grpo_dapo": lambda p: trl_grpo(p, "dapo"),
    "trl_grpo_sequence": lambda p: trl_grpo(p, "grpo"),
    "trl_grpo_length": lambda p: trl_grpo(p, "dr_grpo"),
    "trl_gspo": lambda p: trl_grpo(p, "grpo", level="sequence"),
    "trl_gspo_token": lambda p: trl_grpo(p, "bnpo", level="sequence"),
    "trl_grpo_token_masked": lambda p: trl_grpo(p, "bnpo", labels=MASKED),
    "trl_grpo_sequence_masked": lambda p: trl_grpo(p, "grpo", labels=MASKED),
    "trl_grpo_length_masked": lambda p: trl_grpo(p, "dr_grpo", labels=MASKED),
    "liger_dpo": lambda p: liger_pairs(
        p, liger.LigerFusedLinearDPOLoss(beta=0.3, compiled=False, compute_nll_loss=False), reference=True
    ),
    "liger_simpo": lambda p: liger_pairs(
        p, liger.LigerFusedLinearSimPOLoss(beta=2.0, gamma=0.5, compiled=False, compute_nll_loss=False)
    ),
    "liger_orpo_equal": lambda p: liger_pairs(
        p, liger.LigerFusedLinearORPOLoss(beta=0.5, compiled=False), labels=EQUAL
    ),
    "liger_orpo": lambda p: liger_pairs(p, liger.LigerFusedLinearORPOLoss(beta=0.5, compiled=False)),
    "liger_kto": lambda p: liger_kto(p, 0.2),
    "liger_grpo_token": lambda p: liger_grpo(p, loss_type="bnpo"),
    "liger_grpo_sequence": lambda p: liger_grpo(p, loss_type="grpo"),
    "liger_grpo_length": lambda p: liger_grpo(p, loss_type="dr_grpo", max_completion_length=8),
    "liger_gspo": lambda p: liger_grpo(p, loss_type="grpo", importance_sampling_level="sequence"),
}


def main():
    everything = {
        "versions": {"torch": torch.__version__, "trl": trl.__version__, "liger_kernel": "0.8.5"},
        "params": {name: leaf.tolist() for name, leaf in PARAMS.items()},
        "reference": {name: leaf.tolist() for name, leaf in REFERENCE.items()},
        "old": {name: leaf.tolist() for name, leaf in OLD.items()},
        "tokens": TOKENS,
        "labels": LABELS.tolist(),
        "labels_equal": EQUAL.tolist(),
        "labels_masked": MASKED.tolist(),
        "kl_tokens": KL_TOKENS,
        "kl_labels": KL_LABELS.tolist(),
        "desirable": DESIRABLE,
        "advantages": ADVANTAGES,
        "cases": {name: golden(loss) for name, loss in CASES.items()},
    }
    path = Path(__file__).with_name("objective_golden.json")
    path.write_text(json.dumps(everything, separators=(",", ":")) + "\n")
    sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
