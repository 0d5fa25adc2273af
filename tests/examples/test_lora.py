"""The adapter example, shortened: what it claims happens, and its gradients are the exact ones."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from rpfunc import random, tree, value_and_grad
from rpfunc.models import lora as adapters
from rpfunc.objectives import sft
from rpfunc.testing import assert_computes

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def lora(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # where a script finds its siblings
    for name in ("arithmetic", "lora"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("lora")
    for name in ("arithmetic", "lora"):
        sys.modules.pop(name, None)


def test_adapters_learn_and_the_base_keeps_its_bits(lora, capsys):
    measured = lora.main(lora.Options(sum_steps=100, product_steps=100))
    assert measured.products_with > 0.5 > measured.products_without
    assert measured.products_merged == measured.products_with
    assert measured.trained < measured.frozen / 6
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 50: loss ")
    assert lines[-3] == "14,592 numbers trained, 102,720 frozen"


def test_a_run_repeats(lora):
    options = lora.Options(sum_steps=3, product_steps=3)
    assert lora.main(options) == lora.main(options)


@pytest.mark.parametrize(("prompt", "text"), [("9*6=", "54\n"), ("0*7=", "0\n"), ("3*3=", "9\n")])
def test_answers_are_products(lora, prompt, text):
    assert lora.answer(prompt) == text
    assert prompt in lora.PRODUCTS


def test_the_gradient_is_the_references(lora):
    plain = tree.map(torch.Tensor.double, lora.decoder.init(lora.arithmetic.CONFIG, random.key(0)))
    config = adapters.LoraConfig(("attention.*", "mlp.*"), rank=2)
    model, params = adapters.adapt(lora.PLAIN, plain, config, random.key(1))
    prompts = ["3*4=", "9*8=", "1*1="]
    batch = lora.arithmetic.labelled(prompts, [lora.answer(prompt) for prompt in prompts])
    function = value_and_grad(model, sft(), chunk=3, microbatches=2)
    assert_computes(function, model, sft(), params, batch, tolerance=1e-9)
