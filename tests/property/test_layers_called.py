"""Whatever runs a model calls its layers alike: an error says which layer, and a layer that writes in place is refused.

B examples, T rows.
"""

from dataclasses import fields, replace
from functools import partial
from itertools import product

import pytest
import torch
from broken_backward import identity
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Layer, Model, apply, generate, logprobs, tree, value, value_and_grad
from rpfunc.errors import ModelError
from rpfunc.stream import attending, recurrent, rowwise
from rpfunc.stream.calls import Calling
from rpfunc.stream.freeze import Frozen
from rpfunc.testing import exact

B, T = 2, 3


def carried(weight, x, state, batch):
    y = x * weight + state[:, None] + x.cumsum(1)
    return y, y[:, -1] - x[:, -1] * weight


def zero(weight, batch):
    return weight.new_zeros(batch.num_examples, exact.WIDTH)


def build(kinds):
    """Returns (a model that also has a recurrent layer before its head, its parameters)."""
    *body, head = exact.model(kinds).layers
    layers = (*body, Layer("recurrent", recurrent(carried, zero), "recurrent"), head)
    return Model(layers), exact.init(kinds) | {"recurrent": torch.ones(exact.WIDTH, dtype=torch.float64)}


ANY, STEPPING = build(("linear", "causal", "bidirectional", "opaque")), build(("linear", "causal"))


def inputs(num_examples=B):
    """Returns a batch with leaves of every kind, none of them a view."""
    row = {name: leaf.clone() for name, leaf in exact.batch(num_examples, T).row.items()}
    example = {"weight": torch.ones(num_examples, dtype=torch.float64)}
    return Batch(row=row, example=example, constant={"scale": torch.ones(3, dtype=torch.float64)})


STREAMINGS = {
    "whole rows": (ANY, {}),
    "layer by layer": (ANY, {"chunk": 2}),
    "chunk by chunk": (STEPPING, {"chunk": 2, "order": "chunk"}),
}


def forward_ways():
    """Yields (name, (model, its parameters), function of model, parameters and batch) of ways without gradients."""
    for name, (built, options) in STREAMINGS.items():
        by_plan = {
            plan: apply_by(plan=plan, microbatches=B, **options) for plan in (None, f"F0:2 F2:{built[0].num_layers}")
        }
        by_objective = {
            objective.name: partial(called, value, objective, microbatches=B, **options)
            for objective in (exact.linear(), exact.squared())
        }
        yield f"apply, {name}", built, by_plan
        yield f"value, {name}", built, by_objective
    yield "logprobs", ANY, {chunk: partial(logprobs, chunk=chunk, microbatches=B) for chunk in (None, 2)}
    yield "generate", STEPPING, {chunk: partial(texts, chunk=chunk) for chunk in (None, 2)}


def gradient_ways():
    """Yields the same of ways with gradients."""
    for name, (built, options) in STREAMINGS.items():
        num_layers, extras = built[0].num_layers, [{}]
        if name == "layer by layer":
            extras += [{"head_chunk": 1}, {"keep_attention": 1.0}]
        plans = (
            f"X0:{num_layers}",
            f"F0:1 F1:{num_layers - 1} X{num_layers - 1}:{num_layers} B0:2 B2:{num_layers - 1}",
            f"F0:2 F2:{num_layers} B0:2 B2:{num_layers}",
        )
        for recompute in ("layer", "stage") if name == "chunk by chunk" else ("none", "layer", "stage"):
            runs = {
                (plan, objective.name, *extra): partial(
                    called,
                    value_and_grad,
                    objective,
                    plan=plan,
                    recompute=recompute,
                    microbatches=B,
                    **options,
                    **extra,
                )
                for plan, objective, extra in product(plans, (exact.linear(), exact.squared()), extras)
                if not (recompute == "none" and "keep_attention" in extra)
            }
            yield f"gradient, {name}, recompute {recompute}", built, runs


def apply_by(**options):
    return lambda model, params, batch: apply(model, **options)(params, batch)


def called(function, objective, model, params, batch, **options):
    return function(model, objective, **options)(params, batch)


def texts(model, params, batch, chunk):
    return generate(model, params, list(batch.row["tokens"]), 2, chunk=chunk)


FORWARD = {name: way for name, *way in forward_ways()}
GRADIENT = {name: way for name, *way in gradient_ways()}


def draw_way(name, data):
    """Returns (model, parameters, function of model, parameters and batch)."""
    built, runs = (FORWARD | GRADIENT)[name]
    return *built, runs[data.draw(st.sampled_from(list(runs)))]


def around(model, index, wrap):
    """Returns the model with every function of the layer at `index` replaced by wrap(function)."""
    layer = model.layers[index]
    functions = {each.name: getattr(layer.form, each.name) for each in fields(layer.form)}
    form = replace(layer.form, **{name: wrap(each) for name, each in functions.items() if callable(each)})
    return Model((*model.layers[:index], replace(layer, form=form), *model.layers[index + 1 :]))


class BrokenError(Exception):
    """What no code but this test's raises."""


def layer_notes(error):
    return [note for note in getattr(error, "__notes__", []) if note.startswith("rpfunc: in layer")]


@pytest.mark.parametrize("name", [*FORWARD, *GRADIENT])
@given(data=st.data())
def test_an_error_in_any_call_of_any_layer_names_it_once(name, data):
    model, params, run = draw_way(name, data)
    index = data.draw(st.integers(0, model.num_layers - 1))
    error = data.draw(st.sampled_from([BrokenError, StopIteration, RuntimeError]))("broken")
    calls, fails_at = [], None

    def wrap(function):
        def called(*arguments):
            calls.append(function)
            if len(calls) - 1 == fails_at:
                raise error
            return function(*arguments)

        return called

    broken = around(model, index, wrap)
    run(broken, params, inputs())
    fails_at = data.draw(st.integers(0, len(calls) - 1), "call that fails")
    calls.clear()
    with pytest.raises(type(error), match="broken") as caught:
        run(broken, params, inputs())
    assert caught.value is error
    (note,) = layer_notes(error)
    assert note.rpartition(",")[0] == f"rpfunc: in layer {model.layers[index].name!r}"


def fail():
    raise BrokenError("backward")


@pytest.mark.parametrize("name", GRADIENT)
@given(data=st.data())
def test_an_error_in_the_backward_pass_of_any_layer_names_it_once(name, data):
    model, params, run = draw_way(name, data)
    index = data.draw(st.integers(0, model.num_layers - 1))

    def wrap(function):
        return lambda *arguments: tree.map(lambda leaf: identity(leaf, fail), function(*arguments))

    with pytest.raises(BrokenError) as caught:
        run(around(model, index, wrap), params, inputs())
    assert layer_notes(caught.value) == [f"rpfunc: in layer {model.layers[index].name!r}, backward pass"]


WRITTEN = {
    "parameter": lambda arguments: tree.leaves(arguments[0])[0],
    "x": lambda arguments: arguments[1],
    "batch.row.tokens": lambda arguments: arguments[-1].row["tokens"],
    "batch.example.weight": lambda arguments: arguments[-1].example["weight"],
    "batch.constant.scale": lambda arguments: arguments[-1].constant["scale"],
}


def writing(target):
    """Returns what makes a function write to one of its arguments first, so that no autograd sees it."""

    def wrap(function):
        def called(*arguments):
            if target != "x" or len(arguments) > 2:  # what makes a first state gets no x
                WRITTEN[target](arguments).detach().add_(0)
            return function(*arguments)

        return called

    return wrap


def draw_write(model, params, data, targets):
    """Returns (the model with a layer that writes, the layer's name, what the leaf is called)."""
    target = data.draw(st.sampled_from(targets))
    index = data.draw(st.integers(1 if target == "x" else 0, model.num_layers - 1))
    layer = model.layers[index]
    first = tree.paths({layer.reads: params[layer.reads]})[0]
    return around(model, index, writing(target)), layer.name, f"parameter {first}" if target == "parameter" else target


@pytest.mark.parametrize("name", FORWARD)
@given(data=st.data())
def test_a_layer_that_writes_in_place_is_refused_in_forward_passes(name, data):
    model, params, run = draw_way(name, data)
    targets = [*WRITTEN][: 3 if "generate" in name else None]  # a text has tokens alone
    writes, layer, leaf = draw_write(model, params, data, targets)
    with pytest.raises(ModelError) as caught:
        run(writes, params, inputs(1))  # of one example, rows are views
    assert str(caught.value) == (
        f"layer {layer!r}: has written in place to {leaf}, which others read and which no longer has the values that "
        "it was given with; make a new tensor, as x * 2 does and x.mul_(2) does not, or write to a clone"
    )
    assert not layer_notes(caught.value)


@pytest.mark.parametrize("name", GRADIENT)
@given(data=st.data())
def test_a_layer_that_writes_in_place_is_refused_with_gradients_too(name, data):
    """By torch, which will not write to what a function that is differentiated captures, or by rpfunc."""
    model, params, run = draw_way(name, data)
    writes, layer, leaf = draw_write(model, params, data, [*WRITTEN])
    with pytest.raises((ModelError, RuntimeError)) as caught:
        run(writes, params, inputs(1))
    if isinstance(caught.value, ModelError):
        assert f"layer {layer!r}: has written in place to {leaf}, which" in str(caught.value)
    else:
        assert "in-place" in str(caught.value)
        assert any(f"in layer {layer!r}" in note for note in caught.value.__notes__)


def double(weight, x, batch):
    return batch.row["x"] * weight.mul_(2)


def alone(function, reads="weight"):
    return Layer("double", rowwise(function), reads)


def calling(layer, params, x, batch):
    return Calling(layer, "forward", params, x, batch)


def test_a_frozen_parameter_is_looked_after_too():
    batch, weight = Batch(row={"x": torch.ones(1, 2)}), torch.ones(2)
    given = {"a": Frozen(weight), "b": weight.clone()}
    with pytest.raises(ModelError, match=r"to parameter weight\.a, which"), calling(alone(double), given, (), batch):
        double(weight, (), batch)


def test_all_that_was_written_to_is_named():
    batch = Batch(row={"x": torch.ones(1, 2)}, group={"g": [torch.ones(1)]}, constant={"n": 3, "none": None})
    given = {"a": torch.ones(2), "b": torch.ones(2)}
    wanted, y = r"to parameter weight\.b, x\.0\.y, batch\.group\.g\.0, which", torch.ones(2)
    with pytest.raises(ModelError, match=wanted), calling(alone(double), given, ({"y": y},), batch):
        torch._foreach_zero_([given["b"], y, batch.group["g"][0]])


def test_subtrees_are_called_by_their_own_names():
    norm, table, batch = torch.ones(2), torch.ones(2), Batch(row={"x": torch.ones(1, 2)})
    layer = alone(double, {"first": "norm", "second": "embedding"})
    selected = layer.select({"norm": norm, "embedding": table})
    with pytest.raises(ModelError, match="to parameter embedding, which"), calling(layer, selected, (), batch):
        table.zero_()


def test_a_write_to_the_parameter_beside_one_in_the_same_memory_is_not_the_layers():
    """An optimizer may be stepping through views of one flat tensor while layers read those that are done."""
    weight, beside = torch.ones(4).split(2)

    def steps(params, x, batch):
        beside.mul_(2)
        return batch.row["x"] * params

    batch = Batch(row={"x": torch.ones(1, 2)})
    output, _ = apply(Model((alone(steps),)))({"weight": weight}, batch)
    assert torch.equal(output, torch.ones(1, 2))


def test_tensors_without_a_counter_are_left_alone():
    with torch.inference_mode():
        batch, params = Batch(row={"x": torch.ones(1, 2)}), {"weight": torch.ones(2)}
        output, _ = apply(Model((alone(double),)))(params, batch)
    assert torch.equal(output, torch.full((1, 2), 2.0))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_run_on_purpose_gets_no_note(interrupt):
    def stops(params, x, batch):
        raise interrupt

    with pytest.raises(interrupt) as caught:
        value(Model((alone(stops),)), exact.linear())({"weight": torch.ones(2)}, exact.batch(1, 2))
    assert not layer_notes(caught.value)


def test_looking_for_writes_is_no_use_of_a_tensor():
    """A model that never reads `visible` is refused by `generate`, which asks for every use of it."""
    (model, params), prompts = STEPPING, [[0], [1, 2]]
    with pytest.raises(ModelError, match="no layer of the model reads row leaf 'visible'"):
        generate(model, params, prompts, 1)


def writes_to_kv(params, x, kv, batch):
    return x + kv.mul_(2).sum(1, keepdim=True)


def writes_to_a_part_of_kv(params, x, kv, batch):
    kv[:, :1] += 1
    return x + kv.sum(1, keepdim=True)


def writes_to_state(params, x, state, batch):
    return x + state[:, None], state.add_(x.sum(1))


WRITING = {
    "causal": (attending(lambda params, x, batch: x * params, writes_to_kv), "kv"),
    "part": (attending(lambda params, x, batch: x * params, writes_to_a_part_of_kv), "kv"),
    "bidirectional": (attending(lambda params, x, batch: x * params, writes_to_kv, causal=False), "kv"),
    "recurrent": (recurrent(writes_to_state, zero), "state"),
}


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("how", [{}, {"chunk": 1}, {"chunk": 2}, {"chunk": 2, "order": "chunk"}], ids=str)
def test_what_earlier_rows_have_left_is_not_written_to(name, gradient, how):
    form, what = WRITING[name]
    *body, head = exact.model(("linear",)).layers
    model = Model((*body, Layer("writer", form, "writer"), head))
    params = exact.init(("linear",)) | {"writer": torch.ones(exact.WIDTH, dtype=torch.float64)}
    if name == "bidirectional" and "order" in how:
        return  # has no such order
    run = value_and_grad(model, exact.linear(), **how) if gradient else apply(model, **how)
    with pytest.raises((ModelError, RuntimeError) if gradient else ModelError) as caught:
        run(params, inputs())
    words = str(caught.value)
    assert f"has written in place to {what}" in words or "in-place" in words  # the latter is torch's
    assert "rpfunc: in layer 'writer', forward pass" in caught.value.__notes__
