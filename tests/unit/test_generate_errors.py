"""Whatever is handed to `generate` by mistake is refused in words, before a token is chosen."""

import math

import numpy
import pytest
import torch

from rpfunc import Layer, Model, generate, random, tree
from rpfunc.errors import BatchError, MemoryLimitError, ModelError, OptionsError
from rpfunc.models import decoder, mlp
from rpfunc.stream import attend, attending, rowwise

CONFIG = decoder.DecoderConfig(vocabulary=13, width=8, layers=2, heads=2, kv_heads=1, head_size=4, mlp_width=12)
MODEL, PARAMS = decoder.model(CONFIG), decoder.init(CONFIG, random.key(0))
KEY = random.key(1)


def logits_model(function):
    """A model of one row-wise layer."""
    return Model((Layer("only", rowwise(function), "table"),))


WHOLE = {
    "num_tokens": [0, -1, 2.5, "3", None, True, math.nan, 10**13, 2**62, 10**5000],
    "chunk": [0, 1.5, "2", True],
    "top_k": [0, 2.5, "2", True],
    "first_example": [-1, 1.5, "1", None, True, 2**63],
}


@pytest.mark.parametrize("name", WHOLE)
def test_counts_are_whole_numbers(name):
    for value in WHOLE[name]:
        options = {"num_tokens": 3, "key": KEY} | {name: value}
        with pytest.raises(
            OptionsError, match=rf"^generate: {name} is .*; it must be a whole number of at (least|most)"
        ):
            generate(MODEL, PARAMS, [[1, 2]], **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": "1"}, "temperature is '1'; it must be finite and at least 0, for example 1.0"),
        ({"temperature": None}, "temperature is None; it must be finite and at least 0, for example 1.0"),
        ({"temperature": math.nan}, "temperature is nan; it must be finite and at least 0, for example 1.0"),
        ({"top_p": "0.5"}, "top_p is '0.5'; it must be in (0, 1], for example 0.9"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be in (0, 1], for example 0.9"),
        ({"key": 0}, "key is 0; it must be a random key, for example rpfunc.random.key(0)"),
        ({"key": "x"}, "key is 'x'; it must be a random key, for example rpfunc.random.key(0)"),
        ({"stop": (True,)}, "stop is (True,); it must be a collection of tokens, for example (0,)"),
        ({"stop": (1.5,)}, "stop is (1.5,); it must be a collection of tokens, for example (0,)"),
        ({"stop": "ab"}, "stop is 'ab'; it must be a collection of tokens, for example (0,)"),
        ({"stop": (2**70,)}, f"stop is ({2**70},); it must be a collection of tokens, for example (0,)"),
        ({"stop": (-1,)}, "stop is (-1,); it must be a collection of tokens, for example (0,)"),
        ({"stop": (3, 13, 99)}, "stop has [13, 99]; the model's tokens are 0 to 12"),
    ],
)
def test_other_options(options, text):
    with pytest.raises(OptionsError) as error:
        generate(MODEL, PARAMS, [[1, 2]], 3, **{"key": KEY, **options})
    assert str(error.value) == f"generate: {text}"


def test_numbers_of_numpy_are_numbers():
    options = {"num_tokens": numpy.int64(3), "top_k": numpy.int32(4), "temperature": numpy.float32(0.5)}
    found = generate(MODEL, PARAMS, [numpy.array([1, 2])], key=KEY, stop=(numpy.int64(5),), **options)
    wanted = generate(MODEL, PARAMS, [[1, 2]], 3, key=KEY, top_k=4, temperature=0.5, stop=(5,))
    assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        (None, "prompts is a NoneType, it must be a list of prompts"),
        (["abc"], "prompts: prompt 0 is 'abc', needs a list of integers"),
        ([1, 2], "prompts: 2 problems\n  - prompt 0 is 1, needs a list of integers\n  - prompt 1 is 2, needs"),
        ([[1], None], "prompts: prompt 1 is None, needs a list of integers"),
        ([[1, True]], "prompts: prompt 0 is [1, True], needs a list of integers"),
        ([torch.ones(2).bool()], "prompts: prompt 0 is torch.bool, needs integers"),
        ([[1.0, 2.0]], "prompts: prompt 0 is torch.float32, needs integers"),
        ([[1, [2]]], "prompts: prompt 0 is [1, [2]] ("),
        ([[2**70]], f"prompts: prompt 0 is [{2**70}] ("),
        (torch.tensor(3), "prompts is a Tensor, it must be a list of prompts"),
    ],
)
def test_prompts_that_are_no_lists_of_tokens(prompts, text):
    with pytest.raises(BatchError) as error:
        generate(MODEL, PARAMS, prompts, 3)
    assert str(error.value).startswith(f"generate: {text}")


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_parameters_that_are_not_finite_are_named(wrong, dtype):
    """Attention makes zeros of a query of NaN, so no logits would tell."""
    params = decoder.init(CONFIG, random.key(0), dtype)
    for block, part in (("block0", "query"), ("block1", "output")):
        leaf = params[block]["attention"][part]
        leaf[-1, -1] = wrong
    with pytest.raises(ModelError) as error:
        generate(MODEL, params, [[1, 2]], 3)
    assert str(error.value) == (
        "generate: params: 2 problems\n"
        "  - block0.attention.query has numbers that are not finite\n"
        "  - block1.attention.output has numbers that are not finite"
    )


def test_parameters_without_numbers_and_models_that_are_none():
    with pytest.raises(ModelError, match="embedding is on the meta device, it has no numbers; load it first"):
        generate(MODEL, tree.map(lambda leaf: leaf.to("meta"), PARAMS), [[1]], 3)
    with pytest.raises(ModelError, match=r"generate: model is a NoneType, it must be a rpfunc.Model"):
        generate(None, PARAMS, [[1]], 3)


def test_models_that_read_no_tokens():
    config = mlp.MlpConfig(widths=(4, 4))
    with pytest.raises(BatchError, match=r"batch: lacks row leaf 'features', .*; of row leaves it has 'tokens'"):
        generate(mlp.model(config), mlp.init(config, random.key(0)), [[1]], 3)
    own = logits_model(lambda p, x, batch: batch.row["pixels"] @ p)
    with pytest.raises(ModelError, match="generate: the model asks for 'pixels'; a text has the row leaf 'tokens'"):
        generate(own, {"table": torch.ones(3, 3)}, [[1]], 3)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda p, x, batch: p[batch.row["tokens"]][..., 0], r"\(1, 1\) torch.float32"),
        (lambda p, x, batch: batch.row["tokens"][..., None], r"\(1, 1, 1\) torch.int64"),
        (lambda p, x, batch: {"scores": p[batch.row["tokens"]]}, "a NoneType"),
    ],
)
def test_outputs_that_are_no_logits(function, found):
    with pytest.raises(ModelError, match=rf"^generate: the model gives {found}; it must give floating-point logits"):
        generate(logits_model(function), {"table": torch.ones(4, 4)}, [[1]], 3)


def test_buffers_that_no_machine_holds():
    """9 million rows of keys of 2^22 numbers each, of which none is written."""

    def kv(p, x, batch):
        wide = x[:, :, None].expand(-1, -1, 1, 2**22)
        return {"key": wide, "value": wide}

    def rows(p, x, kv, batch):
        return attend(x[:, :, None], kv["key"][..., :4], kv["value"][..., :4]).flatten(2)

    embed = Layer("embed", rowwise(lambda p, x, batch: p[batch.row["tokens"]][..., :1]), "table")
    model = Model(
        (embed, Layer("wide", attending(kv, rows)), Layer("head", rowwise(lambda p, x, batch: x @ p), "table"))
    )
    with pytest.raises(MemoryLimitError, match="generate: there is no memory for 1 texts of 9000000 rows; use fewer"):
        generate(model, {"table": torch.ones(4, 4)}, [[1]], 9_000_000)
