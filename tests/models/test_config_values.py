"""What a config, or a batch of a small model, cannot be is refused in words."""

import dataclasses
import math

import numpy
import pytest
import torch

from rpfunc import Batch, random
from rpfunc.errors import BatchError, ModelError
from rpfunc.models import LoraConfig, MlpConfig, RecurrenceConfig, ResnetConfig, mlp, recurrence, resnet
from rpfunc.models.decoder import DecoderConfig

NO_COUNTS = ["8", 2.5, 4.0, True, None, math.nan, [3], 0, -1, 10**13, 10**5000]
NO_WIDTHS = ["ab", 4, None, (4.5, 8), ("4", 8), (True, 8), (0, 4), (10**13, 4), {4, 8}, ()]
NO_NUMBERS = ["1", None, True, math.nan, math.inf, 0, -1, 10**400]
NO_RATES = ["0.1", None, True, math.nan, -0.1, 1.0, 10**400]
NO_FLAGS = [1, "no", None]

WRONG = {
    (MlpConfig, "widths"): [*NO_WIDTHS, (4,)],
    (MlpConfig, "activation"): [["relu"], None, "gelu"],
    **{(ResnetConfig, name): NO_COUNTS for name in ("channels", "classes", "blocks", "groups")},
    (ResnetConfig, "widths"): NO_WIDTHS,
    (ResnetConfig, "norm"): [["group"], None, "layer"],
    (ResnetConfig, "norm_epsilon"): NO_NUMBERS,
    **{(RecurrenceConfig, name): NO_COUNTS for name in ("vocabulary", "width", "layers", "state_width", "mlp_width")},
    (RecurrenceConfig, "memory"): [*NO_COUNTS, 1],
    (RecurrenceConfig, "norm_epsilon"): NO_NUMBERS,
    (RecurrenceConfig, "tied"): NO_FLAGS,
    **{
        (DecoderConfig, name): NO_COUNTS
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_size", "mlp_width")
    },
    **{(DecoderConfig, name): NO_NUMBERS for name in ("rope_theta", "norm_epsilon")},
    (DecoderConfig, "deviation"): [each for each in NO_NUMBERS if each is not None],
    (DecoderConfig, "dropout"): NO_RATES,
    **{(DecoderConfig, name): NO_FLAGS for name in ("qk_norm", "bias", "tied")},
    (LoraConfig, "targets"): [(), "query", (3,), ("query", None), None, 3],
    (LoraConfig, "rank"): NO_COUNTS,
    (LoraConfig, "alpha"): NO_NUMBERS,
    (LoraConfig, "dropout"): NO_RATES,
    (LoraConfig, "rank_stabilised"): NO_FLAGS,
}


def made(config, **values):
    """A config as programs make it: where tests make one, its annotations are checked before its own checks run."""
    new = object.__new__(config)
    for field in dataclasses.fields(config):
        object.__setattr__(new, field.name, values.get(field.name, field.default))
    new.__post_init__()
    return new


@pytest.mark.parametrize(("config", "name"), WRONG, ids=str)
def test_values_of_another_kind_are_refused_by_name(config, name):
    for value in WRONG[config, name]:
        needed = {"targets": ("query",)} if config is LoraConfig else {}
        with pytest.raises(
            ModelError, match=rf"(?s)^(mlp|resnet|recurrence|decoder|lora): .*{name} is .{{1,70}}, it (must|needs) "
        ):
            made(config, **needed | {name: value})


def test_all_of_them_at_once():
    with pytest.raises(ModelError) as error:
        made(LoraConfig, targets=(3,), rank="8", alpha="16", dropout=None, rank_stabilised=1)
    assert str(error.value) == (
        "lora: 5 problems\n"
        "  - targets is (3,), it must be a tuple of patterns, such as ('query', 'value')\n"
        "  - rank is '8', it must be a whole number\n"
        "  - alpha is '16', it must be positive and finite\n"
        "  - dropout is None, it must be at least 0 and below 1\n"
        "  - rank_stabilised is 1, it must be True or False"
    )
    with pytest.raises(ModelError, match="rank is 10000000000000, it must be at most 65536"):
        LoraConfig(("query",), rank=10**13)


def test_numbers_of_numpy_and_lists_of_patterns_are_taken():
    config = made(LoraConfig, targets=["query"], rank=numpy.int64(2), alpha=numpy.float32(3.0))
    assert config == LoraConfig(("query",), rank=2, alpha=3.0)
    assert (type(config.scale), hash(config)) == (float, hash(LoraConfig(("query",), rank=2, alpha=3.0)))


SMALL = {
    "mlp": (mlp, MlpConfig(widths=(4, 3)), "row", "features", torch.zeros(2, 3, 4), "(batch, rows, 4)"),
    **{
        f"resnet {norm}": (
            *(resnet, ResnetConfig(widths=(4, 8), channels=2, norm=norm), "example", "images"),
            *(torch.zeros(2, 2, 6, 6), "(batch, 2, height, width)"),
        )
        for norm in ("batch", "frozen", "group")
    },
}


def asked(name, change):
    """Runs a small model on its leaf, changed."""
    module, config, part, leaf, good, _ = SMALL[name]
    return module.model(config)(module.init(config, random.key(0)), Batch(**{part: {leaf: change(good)}}))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x[..., 0], "dims"),
        (lambda x: x[..., None], "dims"),
        (lambda x: torch.cat((x, x), dim=2 if x.dim() == 3 else 1)[:, :, :0], "an empty dimension"),
        (lambda x: torch.cat((x, x), dim=-1 if x.dim() == 3 else 1), "another width"),
        (lambda x: x.to(torch.uint8), "torch.uint8"),
        (lambda x: x.long(), "torch.int64"),
        (lambda x: x.double(), "torch.float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_leaves_of_another_shape_or_kind(name, change, said):
    _, _, part, leaf, good, shape = SMALL[name]
    if part == "row" and said == "an empty dimension":
        change = lambda x: x[..., :0]  # noqa: E731  (a batch has no 0 rows)
    with pytest.raises(BatchError) as error:
        asked(name, change)
    found = change(good)
    assert str(error.value) == (
        f"batch: {part} leaf {leaf!r} is {tuple(found.shape)} {found.dtype}; it must be {shape} torch.float32"
    )
    assert asked(name, lambda x: x).isfinite().all()


def test_leaves_that_are_missing_or_elsewhere():
    config = ResnetConfig()
    model, params = resnet.model(config), resnet.init(config, random.key(0))
    needed = "it must be (batch, 1, height, width) torch.float32"
    with pytest.raises(BatchError) as error:
        model(params, Batch(example={"pixels": torch.zeros(1, 1, 4, 4)}))
    assert str(error.value) == f"batch: lacks example leaf 'images', {needed}; of example leaves it has 'pixels'"
    with pytest.raises(BatchError, match="'images' is on meta; the parameters are on cpu"):
        model(params, Batch(example={"images": torch.zeros(1, 1, 4, 4, device="meta")}))
    config = ResnetConfig(norm="batch")
    with pytest.raises(BatchError, match=r"lacks example leaf 'images', .* of example leaves it has none"):
        resnet.freeze_statistics(config, params, Batch(row={"x": torch.zeros(1, 1)}))


@pytest.mark.parametrize(
    "change",
    [torch.Tensor.long, torch.Tensor.byte, torch.Tensor.float, lambda x: x[..., None]],
    ids=["long", "byte", "float", "three dimensions"],
)
def test_a_recurrence_reads_which_rows_are_visible_as_booleans(change):
    config = RecurrenceConfig(vocabulary=5, width=4, layers=1, state_width=3, mlp_width=4)
    visible = change(torch.tensor([[False, True, True]]))
    batch = Batch(row={"tokens": torch.tensor([[1, 2, 3]]), "visible": visible})
    with pytest.raises(BatchError) as error:
        recurrence.model(config)(recurrence.init(config, random.key(0)), batch)
    found = f"{tuple(visible.shape)} {visible.dtype}"
    assert str(error.value) == f"batch: row leaf 'visible' is {found}; it must be (batch, rows) torch.bool"
