"""Generation equals recomputing the whole text for every token, padded or not; a sample is its example's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Layer, Model, random, tree
from rpfunc.errors import BatchError, ModelError, OptionsError
from rpfunc.generation import generate
from rpfunc.models import decoder
from rpfunc.stream import attend, attending, opaque, recurrent, rowwise
from rpfunc.testing.oracles import assert_untouched

VOCABULARY, WIDTH = 13, 8
CONFIG = decoder.DecoderConfig(
    vocabulary=VOCABULARY, width=WIDTH, layers=2, heads=4, kv_heads=2, head_size=4, mlp_width=12, deviation=None
)


def draw(name, *shape):
    return random.normal(random.fold_in(random.key(3), name), shape, torch.float64)


def padding_aware():
    """Learned positions, attention with a window below and without above, all reading `visible` and `positions`."""

    def embed(p, x, batch):
        rows = torch.arange(batch.first_row, batch.first_row + batch.num_rows).expand(batch.num_examples, -1)
        return p["tokens"][batch.row["tokens"]] + p["places"][batch.row.get("positions", rows)]

    def kv(p, x, batch):
        visible = {"visible": batch.row["visible"]} if "visible" in batch.row else {}
        return {
            "key": (x @ p["key"]).unflatten(-1, (2, -1)),
            "value": (x @ p["value"]).unflatten(-1, (2, -1)),
            **visible,
        }

    def rows(window):
        def function(p, x, kv, batch):
            query = (x @ p["query"]).unflatten(-1, (2, -1))
            return x + attend(query, kv["key"], kv["value"], window=window, visible=kv.get("visible")).flatten(-2)

        return function

    layers = (
        Layer("embedding", rowwise(embed), {"tokens": "table", "places": "places"}),
        Layer("near", attending(kv, rows(3), window=3), "near"),
        Layer("far", attending(kv, rows(None)), "far"),
        Layer("head", rowwise(lambda p, x, batch: x @ p.mT), "table"),
    )
    params = {"table": draw("table", VOCABULARY, WIDTH), "places": draw("places", 40, WIDTH)}
    for name in ("near", "far"):
        params[name] = {part: draw(name + part, WIDTH, WIDTH) / 2 for part in ("query", "key", "value")}
    return Model(layers), params


def fading():
    """A recurrent model: the state is a running mean of what came before."""

    def body(p, x, state, batch):
        outputs = []
        for row in x.unbind(1):
            state = 0.5 * state + row @ p
            outputs.append(row + state)
        return torch.stack(outputs, dim=1), state

    def empty(p, batch):
        return p.new_zeros(batch.num_examples, WIDTH)

    embed = Layer("embedding", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "table")
    head = Layer("head", rowwise(lambda p, x, batch: {"logits": x @ p.mT}), "table")
    params = {"table": draw("table", VOCABULARY, WIDTH), "mixing": draw("mixing", WIDTH, WIDTH)}
    return Model((embed, Layer("state", recurrent(body, empty), "mixing"), head)), params


MODELS = {
    "decoder": (decoder.model(CONFIG), decoder.init(CONFIG, random.key(0), torch.float64)),
    "padding_aware": padding_aware(),
    "fading": fading(),
}


def recomputed(model, params, prompt, num_tokens, stop=()):
    """The oracle: the whole text through the whole model for every token, one prompt at a time."""
    text = list(prompt)
    for _ in range(num_tokens):
        output = model(params, Batch(row={"tokens": torch.tensor([text])}))
        logits = output["logits"] if isinstance(output, dict) else output
        text.append(int(logits[0, -1].argmax()))
        if text[-1] in stop:
            break
    return text[len(prompt) :]


def lists(texts):
    return [text.tolist() for text in texts]


@given(st.sampled_from(sorted(MODELS)), st.data())
def test_the_likeliest_tokens_are_those_of_recomputing_everything(name, data):
    model, params = MODELS[name]
    length = data.draw(st.integers(1, 7))
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=length, max_size=length), min_size=1, max_size=3)
    )
    num_tokens = data.draw(st.integers(1, 6))
    chunk = data.draw(st.sampled_from([None, 1, 2, 3, 9]))
    stop = data.draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=3))
    found = generate(model, params, prompts, num_tokens, chunk=chunk, stop=stop)
    assert lists(found) == [recomputed(model, params, prompt, num_tokens, stop) for prompt in prompts]


@given(st.data())
def test_a_padded_prompt_gives_the_tokens_of_the_unpadded_one(data):
    model, params = MODELS["padding_aware"]
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9), min_size=2, max_size=4)
    )
    chunk = data.draw(st.sampled_from([None, 1, 2, 4]))
    found = generate(model, params, prompts, 5, chunk=chunk)
    assert lists(found) == [recomputed(model, params, prompt, 5) for prompt in prompts]


@given(st.data())
def test_a_sample_depends_on_the_key_and_its_example_alone(data):
    model, params = MODELS["padding_aware"]
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6), min_size=2, max_size=4)
    )
    how = {"key": random.key(data.draw(st.integers(0, 99))), "temperature": 2.0, "top_k": 9, "top_p": 0.95}
    together = lists(generate(model, params, prompts, 6, **how))
    for index, prompt in enumerate(prompts):
        for chunk in (None, 2):
            alone = generate(model, params, [prompt], 6, first_example=index, chunk=chunk, **how)
            assert alone[0].tolist() == together[index]


def test_equal_prompts_are_sampled_apart_and_other_keys_draw_otherwise():
    model, params = MODELS["decoder"]
    texts = [
        lists(generate(model, params, [[1, 2]] * 20, 8, key=random.key(seed), temperature=3.0)) for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len({tuple(text) for text in texts[0]}) == 20


def test_a_place_has_its_own_draw_whatever_the_prompts_length():
    """A model that does not look back: what is drawn at a place is the same for every prompt that ends before it."""
    head = Layer("head", rowwise(lambda p, x, batch: p.expand(*batch.row["tokens"].shape, -1)), "logits")
    params = {"logits": torch.zeros(1000)}
    whole = generate(Model((head,)), params, [[0]], 9, key=random.key(1))[0].tolist()
    later = generate(Model((head,)), params, [[0] * 4], 6, key=random.key(1))[0].tolist()
    assert later == whole[3:]
    assert len(set(whole)) > 5


def test_temperature_zero_is_the_likeliest():
    model, params = MODELS["decoder"]
    plain = generate(model, params, [[1, 2, 3]], 6)
    assert lists(generate(model, params, [[1, 2, 3]], 6, key=random.key(0), temperature=0.0)) == lists(plain)
    assert lists(generate(model, params, [[1, 2, 3]], 6, key=random.key(0), top_k=1)) == lists(plain)
    assert lists(generate(model, params, [[1, 2, 3]], 6, key=random.key(0), top_p=1e-9)) == lists(plain)


def test_every_prompt_stops_by_itself_and_all_end_early_together():
    rows_read = []

    def counting(p, x, batch):  # the token after t is t + 1
        rows_read.append(batch.num_rows)
        return torch.nn.functional.one_hot(batch.row["tokens"] + 1, 20).double() * p

    model = Model((Layer("head", rowwise(counting), "scale"),))
    found = generate(model, {"scale": torch.ones((), dtype=torch.float64)}, [[3], [6], [8]], 10, stop=(7, 9))
    assert lists(found) == [[4, 5, 6, 7], [7], [9]]
    assert rows_read == [1] * 4


def test_the_head_sees_one_row_and_the_body_a_chunk():
    seen = {"body": [], "head": []}

    def body(p, x, batch):
        seen["body"].append((batch.first_row, batch.num_rows))
        return p[batch.row["tokens"]]

    def head(p, x, batch):
        seen["head"].append((batch.first_row, tuple(x.shape)))
        return x @ p.mT

    model = Model((Layer("body", rowwise(body), "table"), Layer("head", rowwise(head), "table")))
    generate(model, {"table": draw("table", VOCABULARY, WIDTH)}, [[1] * 5, [2] * 5], 3, chunk=2)
    assert seen["body"] == [(0, 2), (2, 2), (4, 1), (5, 1), (6, 1)]
    assert seen["head"] == [(4, (2, 1, WIDTH)), (5, (2, 1, WIDTH)), (6, (2, 1, WIDTH))]


def test_nothing_is_written_to_and_nothing_asks_for_gradients():
    model, params = MODELS["decoder"]
    prompts = torch.tensor([[1, 2], [3, 4]])
    live = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    with assert_untouched(live, {"prompts": prompts}):
        found = generate(model, live, prompts, 4)
    assert all(text.dtype == torch.int64 and not text.requires_grad for text in found)


def test_models_that_look_ahead_are_refused_by_name():
    embed = Layer("embedding", rowwise(lambda p, x, batch: p[batch.row["tokens"]]), "table")
    both = attending(lambda p, x, batch: x, lambda p, x, kv, batch: x, causal=False)
    model = Model((embed, Layer("both", both), Layer("head", opaque(lambda p, x, batch: x @ p.mT), "table")))
    with pytest.raises(ModelError) as error:
        generate(model, {"table": draw("table", VOCABULARY, WIDTH)}, [[1]], 2)
    assert str(error.value) == (
        "generate needs row-wise, causal or recurrent layers: 2 problems\n"
        "  - layer 'both' is bidirectional, its rows may depend on later rows\n"
        "  - layer 'head' is opaque, its rows may depend on later rows"
    )


def test_prompts_of_two_lengths_are_refused_where_padding_is_not_read():
    model, params = MODELS["fading"]
    with pytest.raises(ModelError) as error:
        generate(model, params, [[1, 2], [1]], 2)
    assert str(error.value) == (
        "generate: the prompts are of different lengths, and no layer of the model reads row leaf 'visible', which "
        "says what is padding; use prompts of one length at a time, or a model that reads it"
    )


def test_every_option_that_cannot_work_is_listed():
    model, params = MODELS["decoder"]
    with pytest.raises(OptionsError) as error:
        generate(model, params, [[1]], 0, temperature=-1.0, top_k=0, top_p=1.5, stop=3, chunk=0)
    assert str(error.value) == (
        "generate: 7 problems\n"
        "  - num_tokens is 0; it must be a whole number of at least 1, for example 64\n"
        "  - chunk is 0; it must be a whole number of at least 1, for example 512\n"
        "  - temperature is -1.0; it must be finite and at least 0, for example 1.0\n"
        "  - top_k is 0; it must be a whole number of at least 1, for example 50\n"
        "  - top_p is 1.5; it must be in (0, 1], for example 0.9\n"
        "  - top_k and top_p and temperature needs a key to draw with, for example key=rpfunc.random.key(0)\n"
        "  - stop is 3; it must be a collection of tokens, for example (0,)"
    )


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([], "there is none, at least one is needed"),
        ([[1], []], "prompt 1 has shape (0,), needs (n,) with n at least 1"),
        ([torch.ones(1, 2, dtype=torch.long)], "prompt 0 has shape (1, 2), needs (n,) with n at least 1"),
        ([[0.5]], "prompt 0 is torch.float32, needs integers"),
    ],
)
def test_prompts_that_are_none(prompts, text):
    model, params = MODELS["decoder"]
    with pytest.raises(BatchError) as error:
        generate(model, params, prompts, 2)
    assert str(error.value) == f"generate: prompts: {text}"


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_are_refused(wrong):
    def head(p, x, batch):
        return torch.where(batch.row["tokens"][..., None] == 1, p * wrong, p).expand(*batch.row["tokens"].shape, -1)

    model = Model((Layer("head", rowwise(head), "logits"),))
    with pytest.raises(ModelError, match="generate: the largest logit of example 6 is not finite, no token"):
        generate(model, {"logits": torch.ones(4)}, [[0], [1]], 3, first_example=5)
