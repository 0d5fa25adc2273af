"""The digits example: what it claims happens, and its batches and gradients are what they should be."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

from rpfunc import random, value_and_grad
from rpfunc.errors import ModelError
from rpfunc.models import resnet
from rpfunc.testing import assert_computes

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def digits(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    yield importlib.import_module("digits")
    sys.modules.pop("digits", None)


def test_over_95_percent_of_the_held_out_digits_are_right(digits, capsys):
    assert digits.main(digits.Options(epochs=8)) > 0.95
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("epoch 1: loss ")
    assert lines[-1].endswith("of 359 held-out digits are right")


def test_group_norm_learns_in_microbatches_and_a_run_repeats(digits):
    options = digits.Options(norm="group", epochs=2, microbatches=3)
    first = digits.main(options)
    assert first > 0.2
    assert digits.main(options) == first


def test_batch_norm_with_microbatches_is_refused(digits):
    with pytest.raises(ModelError, match="resnet: norm='batch' takes statistics over the whole batch"):
        digits.main(digits.Options(epochs=1, microbatches=2))


def test_no_held_out_image_is_trained_on(digits):
    train, held_out = digits.digits(random.key(0))
    assert (train.num_examples, held_out.num_examples) == (1438, 359)
    images = [{image.numpy().tobytes() for image in part.example["images"]} for part in (train, held_out)]
    assert not images[0] & images[1]
    assert train.example["images"].aminmax() == (-1.0, 1.0)
    assert train.example["labels"].bincount().min() > 100


def test_every_epoch_takes_other_images_and_moves_them_by_a_pixel(digits):
    train, _ = digits.digits(random.key(0))
    batches = list(digits.batches(train, random.key(1), digits.Options(epochs=2)))
    assert len(batches) == 2 * 14
    assert all(batch.num_examples == 96 and batch.first_example == 0 for batch in batches)
    assert not torch.equal(batches[0].example["labels"], batches[14].example["labels"])
    stretched = [image for batch in batches[:14] for image in batch.example["images"]]
    known = {
        image.roll((down, right), (1, 2)).numpy().tobytes()
        for image in train.example["images"]
        for down in (-1, 0, 1)
        for right in (-1, 0, 1)
    }
    assert {image.numpy().tobytes() for image in stretched} <= known


def test_the_gradient_is_the_references(digits):
    train, _ = digits.digits(random.key(0))
    batch = train.examples(0, 6).map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf)
    config = resnet.ResnetConfig()
    params = resnet.init(config, random.key(0), torch.float64)
    function = value_and_grad(resnet.model(config), digits.classification(), microbatches=3)
    assert_computes(function, resnet.model(config), digits.classification(), params, batch, tolerance=1e-10)
