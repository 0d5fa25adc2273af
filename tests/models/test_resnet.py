"""The residual network against torch.nn's modules, by every cut that its norm allows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rpfunc import Batch, random, tree, value_and_grad
from rpfunc.errors import ModelError
from rpfunc.models import resnet
from rpfunc.objectives import Objective
from rpfunc.testing import assert_close, assert_computes, assert_equal_bits

NORMS = ("batch", "frozen", "group")


def config_of(norm, **options):
    return resnet.ResnetConfig(**{"channels": 2, "classes": 3, "widths": (4, 6), "groups": 2, "norm": norm, **options})


def drawn(config, seed=0):
    """Parameters with nothing at a special value: no scale is 0, no mean 0, no variance 1."""
    params = resnet.init(config, random.key(seed), torch.float64)
    leaves, structure = tree.flatten(params)
    moved = [
        leaf + random.uniform(random.fold_in(random.key(seed), path), tuple(leaf.shape), torch.float64) / 2
        for path, leaf in zip(tree.paths(params), leaves, strict=True)
    ]
    return tree.unflatten(structure, moved)


def images_of(num=4, size=6, channels=2, seed=0):
    images = random.normal(random.key(seed), (num, channels, size, size), torch.float64)
    return Batch(example={"images": images, "labels": torch.arange(num) % 3})


def squares():
    """Σ over examples of (logit of the label)², halved: smooth, and different for every example."""

    def score(logits, batch):
        return logits.squeeze(1).gather(1, batch.example["labels"][:, None]).square() / 2

    return Objective(
        "squares",
        prepare=lambda batch: batch,
        total=lambda batch: torch.tensor(1.0, dtype=torch.float64),
        score=score,
        loss=lambda sums, batch, total: sums.sum() / total,
    )


class Block(nn.Module):
    """A residual block as torch.nn has its parts."""

    def __init__(self, norm, inputs, out, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, out, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = norm(out), norm(out)
        if stride > 1 or inputs != out:
            self.shortcut, self.shortcut_norm = nn.Conv2d(inputs, out, 1, stride, bias=False), norm(out)

    def forward(self, x):
        hidden = self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))
        return torch.relu(hidden + (self.shortcut_norm(self.shortcut(x)) if hasattr(self, "shortcut") else x))


def oracle(config, params):
    """The network in torch.nn with these parameters, and each of its tensors by the path of the parameter."""

    def norm(width):
        if config.norm == "group":
            return nn.GroupNorm(config.groups, width, config.norm_epsilon)
        return nn.BatchNorm2d(width, config.norm_epsilon)

    widths = [width for width in config.widths for _ in range(config.blocks)]
    module = nn.Module()
    module.stem = nn.Conv2d(config.channels, widths[0], 3, padding=1, bias=False)
    module.stem_norm = norm(widths[0])
    for index, (inputs, out) in enumerate(zip([widths[0], *widths], widths, strict=False)):
        stride = 2 if index > 0 and index % config.blocks == 0 else 1
        module.add_module(f"block{index}", Block(norm, inputs, out, stride))
    module.head = nn.Linear(widths[-1], config.classes)
    module = module.double().train(config.norm == "batch")
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    endings = {"scale": ".weight", "shift": ".bias", "mean": ".running_mean", "variance": ".running_var"}
    places = {}
    for path in tree.paths(params):
        layer, *rest = path.split(".")
        if layer == "stem":
            name = "stem.weight" if rest == ["weight"] else f"stem_norm{endings[rest[1]]}"
        elif layer == "head":
            name = path
        else:
            name = f"{layer}.{rest[0]}" + (endings[rest[1]] if len(rest) == 2 else ".weight")
        places[path] = named[name]
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        places[path].data.copy_(leaf)
    return module, places


def run_oracle(module, config, images):
    x = torch.relu(module.stem_norm(module.stem(images)))
    for index in range(len(config.widths) * config.blocks):
        x = getattr(module, f"block{index}")(x)
    return module.head(x.mean((2, 3)))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("widths", [(4,), (4, 6), (4, 4, 2)])
def test_logits_and_gradients_are_those_of_torch_nn(norm, blocks, widths):
    config = config_of(norm, blocks=blocks, widths=widths)
    params, batch = drawn(config), images_of()
    module, places = oracle(config, params)
    logits = run_oracle(module, config, batch.example["images"])
    found = resnet.model(config)(params, batch)
    assert found.shape == (4, 1, 3)
    assert_close(found.squeeze(1), logits.detach(), 1e-10)
    loss = logits.gather(1, batch.example["labels"][:, None]).square().sum() / 2
    trained = {path: place for path, place in places.items() if isinstance(place, nn.Parameter)}
    wanted = dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
    result, grads = value_and_grad(resnet.model(config), squares())(params, batch)
    by_path = dict(zip(tree.paths(grads), tree.leaves(grads), strict=True))
    assert_close(result.loss, loss.detach(), 1e-10)
    assert_close({path: by_path[path] for path in wanted}, wanted, 1e-9)
    assert all(not by_path[path].any() for path in by_path.keys() - wanted.keys())  # means and variances


@settings(max_examples=12)
@given(
    norm=st.sampled_from(["group", "frozen"]),
    num=st.integers(1, 5),
    microbatches=st.integers(1, 5),
    workers=st.sampled_from([None, 2]),
    chunk=st.sampled_from([None, 1, 3]),
)
def test_norms_within_an_example_take_any_cut(norm, num, microbatches, workers, chunk):
    config = config_of(norm)
    function = value_and_grad(resnet.model(config), squares(), microbatches=microbatches, workers=workers, chunk=chunk)
    assert_computes(function, resnet.model(config), squares(), drawn(config), images_of(num), tolerance=1e-10)


@pytest.mark.parametrize(
    "options", [{}, {"workers": 2}, {"workers": 3, "plan": "F0:1 F1:2 X2:4 B0:1 B1:2"}, {"recompute": False}], ids=str
)
def test_batch_norm_takes_any_plan_of_one_microbatch(options):
    config = config_of("batch")
    function = value_and_grad(resnet.model(config), squares(), **options)
    assert_computes(function, resnet.model(config), squares(), drawn(config), images_of(), tolerance=1e-10)


@pytest.mark.parametrize("workers", [None, 2])
def test_batch_norm_refuses_microbatches(workers):
    config = config_of("batch")
    function = value_and_grad(resnet.model(config), squares(), microbatches=2, workers=workers)
    with pytest.raises(ModelError) as error:
        function(drawn(config), images_of())
    assert str(error.value) == (
        "resnet: norm='batch' takes statistics over the whole batch, and was given a microbatch that begins at example "
        "2; use microbatches=1, or norm='group' or 'frozen', in which no example depends on another"
    )


def test_statistics_of_a_microbatch_would_be_another_function():
    """Why they are refused: the very images, in two halves that each believe to be whole, give another gradient."""
    config, batch = config_of("batch"), images_of()
    params, function = drawn(config), value_and_grad(resnet.model(config), squares())
    halves = [
        Batch(example={name: leaf[part] for name, leaf in batch.example.items()}) for part in (slice(2), slice(2, 4))
    ]
    whole = function(params, batch)[1]
    summed = tree.add(*(function(params, half)[1] for half in halves))
    with pytest.raises(AssertionError):
        assert_close(summed, whole, 1e-2)


def test_frozen_statistics_of_a_batch_give_its_logits_and_cut_freely():
    config, batch = config_of("batch"), images_of()
    params = drawn(config)
    wanted = resnet.model(config)(params, batch)
    frozen_config, frozen = resnet.freeze_statistics(config, params, batch)
    assert frozen_config.norm == "frozen"
    assert tree.same_structure(frozen, resnet.init(frozen_config, random.key(0)))
    model = resnet.model(frozen_config)
    assert_close(model(frozen, batch), wanted, 1e-12)
    assert_close(model(frozen, batch.examples(1, 3)), wanted[1:3], 1e-12)
    module, _ = oracle(config, params)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 1.0
    run_oracle(module, config, batch.example["images"])
    assert_close(frozen["stem"]["norm"]["mean"], module.stem_norm.running_mean, 1e-12)
    assert_close(frozen["block0"]["second_norm"]["mean"], module.block0.second_norm.running_mean, 1e-10)
    n = 4 * 6 * 6
    assert_close(frozen["stem"]["norm"]["variance"], module.stem_norm.running_var * (n - 1) / n, 1e-12)


def test_frozen_statistics_get_no_gradient_under_their_mask():
    config = config_of("frozen")
    params = drawn(config)
    _, grads = value_and_grad(resnet.model(config), squares(), frozen=resnet.statistics)(params, images_of())
    lost = set(tree.paths(params)) - set(tree.paths(grads))
    assert lost == {path for path in tree.paths(params) if path.split(".")[-1] in ("mean", "variance")}
    assert lost


def test_blocks_add_nothing_at_the_start_and_the_seed_decides_all():
    config = config_of("group", widths=(4,), blocks=2)
    params, batch = resnet.init(config, random.key(0), torch.float64), images_of()
    layers = resnet.model(config).layers
    stem = layers[0](params, (), batch)
    assert torch.equal(layers[2](params, layers[1](params, stem, batch), batch), stem)
    assert_equal_bits(params, resnet.init(config, random.key(0), torch.float64))
    assert not torch.equal(params["block0"]["first"], params["block1"]["first"])


def test_values_that_cannot_work_are_listed():
    with pytest.raises(ModelError) as error:
        resnet.ResnetConfig(channels=0, widths=(6, 0), groups=4, norm_epsilon=0.0)
    assert str(error.value) == (
        "resnet: 4 problems\n"
        "  - channels is 0, it must be at least 1\n"
        "  - widths is (6, 0), it needs at least one number, each at least 1\n"
        "  - widths is (6, 0), group norm needs multiples of groups, which is 4\n"
        "  - norm_epsilon is 0.0, it must be positive and finite"
    )
    config = config_of("group")
    with pytest.raises(ModelError) as error:
        resnet.freeze_statistics(config, drawn(config), images_of())
    assert str(error.value) == "resnet: norm is 'group'; statistics are found for a model with norm='batch'"
