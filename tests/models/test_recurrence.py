"""The recurrent model against one row after the other in plain Python, by every way of running, and in generation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc import Batch, generate, random, reference, tree, value_and_grad
from rpfunc.models import lora, recurrence
from rpfunc.models.recurrence import RecurrenceConfig
from rpfunc.objectives import sft
from rpfunc.testing import assert_close, assert_streams
from rpfunc.testing.oracles import assert_equal_bits, assert_untouched

VOCABULARY = 11
CONFIG = RecurrenceConfig(vocabulary=VOCABULARY, width=6, layers=2, state_width=5, mlp_width=7, memory=20)
MODEL = recurrence.model(CONFIG)


def parameters(config=CONFIG, seed=0):
    """Parameters whose norms and embedding say something, too."""
    params = recurrence.init(config, random.key(seed), torch.float64)
    generator = torch.Generator().manual_seed(seed)
    return tree.map(lambda leaf: leaf + 0.3 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64), params)


def tokens_of(num_examples, num_rows, seed=0):
    tokens = (random.uniform(random.key(seed), (num_examples, num_rows)) * VOCABULARY).long()
    return Batch(row={"tokens": tokens, "labels": tokens})


# --- the oracle: a row at a time, numbers of the state with it ---


def normed(x, scale):
    return x / torch.sqrt((x * x).mean() + 1e-5) * scale


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def plain_logits(params, text, config=CONFIG):
    """Logits (T, V) of one text; hidden states are lists of what each block remembers."""
    states = [torch.zeros(config.state_width, dtype=torch.float64) for _ in range(config.layers)]
    head = params["embedding" if config.tied else "head"]
    found = []
    for token in text:
        x = params["embedding"][token]
        for index in range(config.layers):
            p = params[f"recurrence{index}"]
            hidden = normed(x, p["norm"])
            forget = 1 / (1 + torch.exp(-(p["forget"] @ hidden + p["forget_bias"])))
            states[index] = forget * states[index] + (1 - forget) * (p["value"] @ hidden)
            x = x + p["output"] @ (gelu(p["gate"] @ hidden) * states[index])
            p = params[f"mlp{index}"]
            hidden = normed(x, p["norm"])
            x = x + p["down"] @ (gelu(p["gate"] @ hidden) * (p["up"] @ hidden))
        found.append(head @ normed(x, params["norm"]))
    return torch.stack(found)


def plain_loss_and_gradients(params, batch, config=CONFIG):
    leaves, structure = tree.flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    made = tree.unflatten(structure, leaves)
    losses = [
        -plain_logits(made, text[:-1], config).log_softmax(-1)[range(len(text) - 1), text[1:]]
        for text in batch.row["tokens"].tolist()
    ]
    loss = torch.cat(losses).mean()
    return loss.detach(), tree.unflatten(structure, torch.autograd.grad(loss, leaves))


# --- one function, by every way ---


@given(st.integers(1, 9), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_logits_are_those_of_one_row_after_the_other(num_rows, num_examples, tied, seed):
    config = RecurrenceConfig(**(vars(CONFIG) | {"tied": tied}))
    params, batch = parameters(config, seed), tokens_of(num_examples, num_rows, seed)
    wanted = torch.stack([plain_logits(params, text, config) for text in batch.row["tokens"].tolist()])
    with assert_untouched(params, batch):
        assert_close([recurrence.model(config)(params, batch)], [wanted], 1e-12)


WAYS = {
    "full": {},
    "streamed": {"order": "layer"},
    "chunk-major": {"order": "chunk"},
    "3 workers": {"order": "layer", "workers": 3, "microbatches": 2, "plan": "F0:3 X3:6 B0:1 B1:3"},
}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=10)
@given(num_rows=st.integers(2, 9), num_examples=st.integers(1, 3), seed=st.integers(0, 99), data=st.data())
def test_gradients_are_those_of_one_row_after_the_other(way, num_rows, num_examples, seed, data):
    params, batch = parameters(seed=seed), tokens_of(num_examples, num_rows, seed)
    chunk = None if way == "full" else data.draw(st.sampled_from([1, 3, num_rows - 1, num_rows, num_rows + 5]))
    loss, wanted = plain_loss_and_gradients(params, batch)
    for function in (reference.value_and_grad(MODEL, sft()), value_and_grad(MODEL, sft(), chunk=chunk, **WAYS[way])):
        result, grads = function(params, batch)
        torch.testing.assert_close(getattr(result, "loss", result), loss, rtol=1e-12, atol=1e-12)
        assert_close(grads, wanted, 1e-10)


def some_rows():
    """Rows of which some are not visible, a first one, a last one and whole chunks among them."""
    x = random.normal(random.key(1), (3, 11, CONFIG.width), torch.float64)
    visible = torch.ones(3, 11, dtype=torch.bool)
    visible[0, :5], visible[1, 3:6], visible[2, 9:] = False, False, False
    return x, visible


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["recurrence0", "mlp0"])
def test_its_layers_can_be_cut(name, padded):
    x, visible = some_rows()
    (layer,) = (layer for layer in MODEL.layers if layer.name == name)
    assert_streams(layer, parameters(), x, Batch(row={"visible": visible} if padded else {"tokens": x[..., 0]}))


def test_rows_that_are_not_visible_leave_nothing():
    x, visible = some_rows()
    layer, params = MODEL.layers[1], parameters()
    found = layer(params, x, Batch(row={"visible": visible}))
    for example in range(len(x)):
        seen = x[example : example + 1, visible[example]]
        assert_close(
            [found[example : example + 1, visible[example]]], [layer(params, seen, Batch(row={"x": seen}))], 1e-12
        )


# --- the scan ---


def in_turn(keep, add, state):
    states = [state[:, 0]]
    for row in range(keep.shape[1]):
        states.append(keep[:, row] * states[-1] + add[:, row])
    return torch.stack(states[1:], dim=1)


@given(st.integers(1, 40), st.integers(1, 2), st.integers(0, 99))
def test_a_scan_is_one_step_after_the_other(num_rows, num_examples, seed):
    shapes = [(num_examples, num_rows, 3)] * 2 + [(num_examples, 1, 3)]
    inputs = [
        random.normal(random.fold_in(random.key(seed), i), shape, torch.float64) for i, shape in enumerate(shapes)
    ]
    found = torch.func.vjp(recurrence.scan, *inputs)
    wanted = torch.func.vjp(in_turn, *inputs)
    assert_close([found[0]], [wanted[0]], 1e-12)
    cotangent = torch.arange(wanted[0].numel(), dtype=torch.float64).cos().reshape(wanted[0].shape)
    assert_close(list(found[1](cotangent)), list(wanted[1](cotangent)), 1e-12)


@pytest.mark.parametrize("gate", [0.0, 1e-30, 0.5, 1.0])
def test_a_scan_of_many_rows_stays_finite(gate):
    add = torch.ones(1, 5000, 1)
    output, pull = torch.func.vjp(recurrence.scan, torch.full_like(add, gate), add, torch.ones(1, 1, 1))
    wanted = 5001.0 if gate == 1.0 else 1 / (1 - gate)
    assert output[0, -1, 0] == pytest.approx(wanted, rel=1e-5)
    assert all(leaf.isfinite().all() for leaf in pull(torch.ones_like(output)))


WRONG = {
    "no state": lambda scan: lambda keep, add, state: scan(keep, add, torch.zeros_like(state)),
    "fades before it is added to": lambda scan: lambda keep, add, state: scan(keep, keep * add, state),
    "the state after the row before": lambda scan: lambda *step: torch.cat((step[2], scan(*step)[:, :-1]), dim=1),
    "gates of the next row": lambda scan: lambda keep, add, state: scan(keep.roll(-1, dims=1), add, state),
    "no gradient through time": lambda scan: lambda keep, add, state: scan(keep, add, state.detach()),
    "an average of the chunk": lambda scan: lambda *step: scan(*step).mean(dim=1, keepdim=True).expand_as(step[0]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_oracle_sees_wrong_recurrences(wrong, monkeypatch):
    params, batch = parameters(), tokens_of(2, 6)
    _, wanted = plain_loss_and_gradients(params, batch)
    monkeypatch.setattr(recurrence, "scan", WRONG[wrong](recurrence.scan))
    _, grads = value_and_grad(MODEL, sft(), chunk=2)(params, batch)
    with pytest.raises(AssertionError):
        assert_close(grads, wanted, 1e-10)


# --- what it starts from, and what else a model does ---


@pytest.mark.parametrize("tied", [True, False])
def test_initial_parameters_are_what_the_model_reads(tied):
    config = RecurrenceConfig(vocabulary=40, width=30, layers=3, state_width=400, mlp_width=50, memory=100, tied=tied)
    params = recurrence.init(config, random.key(0), torch.float64)
    recurrence.model(config).check(params)
    assert ("head" in params) is not tied
    first = params["recurrence0"]
    memories = 1 / (1 - first["forget_bias"].sigmoid())
    assert 2 <= float(memories.min()) < 2.1 < 90 < float(memories.max()) < 100
    assert float(memories.median()) == pytest.approx(1 + math.sqrt(99), rel=0.2)
    assert float(first["value"].std() * math.sqrt(30)) == pytest.approx(1, rel=0.05)
    assert float(first["output"].std() * math.sqrt(400 * 6)) == pytest.approx(1, rel=0.05)
    assert not torch.equal(first["value"], params["recurrence1"]["value"])
    assert_equal_bits(params, recurrence.init(config, random.key(0), torch.float64))


def test_the_state_of_16_bit_parameters_has_32():
    """10,000 rows that take a thousandth each: in bfloat16 the state would stand still at about a half."""
    params = recurrence.init(CONFIG, random.key(0), torch.bfloat16)
    first = params["recurrence0"]
    first |= {"forget": 0 * first["forget"], "forget_bias": torch.full_like(first["forget_bias"], math.log(999))}
    form = MODEL.layers[1].form
    x = torch.ones(1, 10_000, CONFIG.width, dtype=torch.bfloat16)
    output, state = form.step(first, x, None, Batch(row={"tokens": x[..., 0].long()}))
    value = first["value"].float().sum(dim=1) * float(torch.rsqrt(torch.tensor(1 + 1e-5)))
    torch.testing.assert_close(state[0], value, rtol=1e-2, atol=1e-2)
    assert (output.dtype, state.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("chunk", [None, 2])
def test_generation_goes_on_where_the_text_ends_padded_or_not(chunk):
    params = parameters()
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
    wanted = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(5):
            text.append(int(plain_logits(params, text)[-1].argmax()))
        wanted.append(text[len(prompt) :])
    assert [text.tolist() for text in generate(MODEL, params, prompts, 5, chunk=chunk)] == wanted


def test_adapters_train_and_merge():
    model, params = lora.adapt(MODEL, parameters(), lora.LoraConfig(targets=("*forget", "*down")), random.key(0))
    params = tree.map(lambda leaf: leaf + 0.1 * (leaf == 0), params)  # B is zero at the start
    batch = tokens_of(2, 6)
    _, grads = value_and_grad(model, sft(), frozen=lora.frozen, chunk=4)(params, batch)
    adapters = lora.split(grads)[1]
    assert len(tree.leaves(adapters)) == 2 * 2 * 2
    assert all(leaf.any() for leaf in tree.leaves(adapters))
    merged, weights = lora.merge(model, params)
    assert_close([merged(weights, batch)], [model(params, batch)], 1e-12)


def test_every_value_that_cannot_work_is_listed():
    with pytest.raises(ValueError, match="recurrence") as caught:
        RecurrenceConfig(vocabulary=0, width=-1, layers=0, state_width=0, mlp_width=0, memory=1, norm_epsilon=math.nan)
    assert str(caught.value) == (
        "recurrence: 7 problems\n"
        "  - vocabulary is 0, it must be at least 1\n"
        "  - width is -1, it must be at least 1\n"
        "  - state_width is 0, it must be at least 1\n"
        "  - mlp_width is 0, it must be at least 1\n"
        "  - layers is 0, it must be at least 1\n"
        "  - memory is 1, it must be at least 2\n"
        "  - norm_epsilon is nan, it must be positive and finite"
    )
