"""Gradient functions, orders and comparisons that are wrong on purpose: the suite's checks must refuse each of them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from precedence import violations

from rpfunc import Batch, Model, Plan, random, reference, tree, value_and_grad
from rpfunc.errors import PlanError
from rpfunc.models import mlp
from rpfunc.objectives import sft
from rpfunc.schedule import Task, Workload
from rpfunc.testing import assert_close, assert_computes, assert_equal, assert_equal_bits, exact, gradient_error

CONFIG = mlp.MlpConfig(widths=(3, 4, 3), activation="tanh")
MODEL, PARAMS = mlp.model(CONFIG), mlp.init(CONFIG, random.key(0), torch.float64)
LABELS = torch.tensor([[0, 1, 2, 0, 1], [1, -100, -100, -100, 2], [2, 1, -100, 0, 0]])
BATCH = Batch(row={"features": random.normal(random.key(1), (3, 5, 3), torch.float64), "labels": LABELS})
RIGHT = reference.value_and_grad(MODEL, sft())


def mean(results):
    losses, grads = zip(*results, strict=True)
    return torch.stack(losses).mean(), tree.map(lambda *leaves: torch.stack(leaves).mean(0), *grads)


def mean_of_microbatch_means(params, batch):
    return mean([RIGHT(params, piece) for piece in batch.microbatches(3)])


def mean_of_chunk_means(params, batch):
    shifted = replace(sft(), prepare=lambda prepared: prepared)
    prepared = sft().prepare(batch)
    return mean([reference.value_and_grad(MODEL, shifted)(params, prepared.rows(*span)) for span in ((0, 2), (2, 5))])


def score_shifting_in_chunks(logits, batch):
    targets = F.pad(batch.row["labels"][:, 1:], (0, 1), value=-100)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    return losses.view(targets.shape)


def labels_shifted_in_chunks(params, batch):
    return value_and_grad(MODEL, replace(sft(), score=score_shifting_in_chunks), chunk=2)(params, batch)


def divided_by_all_rows(params, batch):
    return value_and_grad(MODEL, sft())(params, batch, total=torch.tensor(12.0, dtype=torch.float64))


def last_microbatch_alone(params, batch):
    total = sft().total(sft().prepare(batch))
    results = [value_and_grad(MODEL, sft())(params, piece, total=total) for piece in batch.microbatches(3)]
    return sum(result.loss for result, _ in results), results[-1][1]


def writes_into_params(params, batch):
    result = RIGHT(params, batch)
    params["linear0"]["bias"].add_(1e-3)
    return result


def narrow_gradients(params, batch):
    loss, grads = RIGHT(params, batch)
    return loss, tree.map(torch.Tensor.float, grads)


def right(params, batch):
    return value_and_grad(MODEL, sft(), chunk=2, microbatches=3)(params, batch)


WRONG = [
    mean_of_microbatch_means, mean_of_chunk_means, labels_shifted_in_chunks, divided_by_all_rows, last_microbatch_alone,
    writes_into_params, narrow_gradients,
]  # fmt: skip


@pytest.mark.parametrize("function", WRONG)
def test_a_wrong_function_is_refused(function):
    with pytest.raises(AssertionError):
        assert_computes(function, MODEL, sft(), tree.map(torch.clone, PARAMS), BATCH, tolerance=1e-6)


def test_the_right_function_passes_the_same_check():
    assert_computes(right, MODEL, sft(), PARAMS, BATCH, tolerance=1e-10)


def counting_shared_once(model):
    """As `Model.sum_grad`, but the last layer's gradient replaces the sum."""

    class Once(Model):
        def sum_grad(self, name, grads, params):
            return super().sum_grad(name, [(), *grads[1:]], params)

    return Once(model.layers)


def skipping(model):
    return Model(tuple(layer for layer in model.layers if layer.name != "relu1"))


@pytest.mark.parametrize("change", [counting_shared_once, skipping])
def test_a_wrong_model_is_refused(change):
    model, params, batch = exact.model(("square", "relu")), exact.init(("square", "relu"), seed=0), exact.batch(3, 4)

    def function(params, batch):
        changed = change(model)
        read = {name for layer in changed.layers for name in layer.subtrees}
        result, grads = value_and_grad(changed, exact.linear())({name: params[name] for name in read}, batch)
        return result, {name: grads.get(name, tree.zeros_like(params[name])) for name in params}

    assert_computes(value_and_grad(model, exact.linear()), model, exact.linear(), params, batch)
    with pytest.raises(AssertionError):
        assert_computes(function, model, exact.linear(), params, batch)


def test_a_plan_that_skips_a_layer_is_refused():
    for text in ("F0:1 F2:3 X3:4 B0:3", "F0:3 X3:4 B0:1 B2:3", "F1:3 X3:4 B1:3"):
        with pytest.raises(PlanError):
            value_and_grad(exact.model(), exact.linear(), plan=Plan.parse(text))(exact.init(), exact.batch(1, 1))


def test_sums_in_another_microbatch_order_have_other_bits():
    params, features = mlp.init(CONFIG, random.key(0)), BATCH.row["features"].float()
    batch = Batch(row={"features": features, "labels": LABELS})
    total = sft().total(sft().prepare(batch))
    parts = [value_and_grad(MODEL, sft())(params, piece, total=total)[1] for piece in batch.microbatches(3)]

    def added(order):
        return tree.add(tree.add(parts[order[0]], parts[order[1]]), parts[order[2]])

    _, wanted = value_and_grad(MODEL, sft(), microbatches=3, workers=2)(params, batch)
    assert_equal_bits(added((0, 1, 2)), wanted)
    with pytest.raises(AssertionError, match="bits differ in"):
        assert_equal_bits(added((2, 1, 0)), wanted)


def hastiest_order(waits_for, plan, num_microbatches):
    """The order of one task after another in which whatever may run and stands last in the plan runs first."""
    waiting = [Task(stage, kind, m) for m in reversed(range(num_microbatches)) for kind, stage in reversed(plan.slots)]
    order = {}
    while waiting:
        task = next(task for task in waiting if all(needed in order for needed in waits_for(plan, task)))
        order[task] = len(order), len(order) + 1
        waiting.remove(task)
    return order


def dependencies(plan, task):
    return Workload(plan.slots, 3).dependencies(task)


def waits_for_nothing_from_its_own_microbatch(plan, task):
    return [needed for needed in dependencies(plan, task) if needed.microbatch != task.microbatch]


def waits_not_for_the_microbatch_before(plan, task):
    return [needed for needed in dependencies(plan, task) if needed.microbatch == task.microbatch]


def waits_not_for_the_cotangent(plan, task):
    return [needed for needed in dependencies(plan, task) if task.kind != "B" or needed.kind != "X"]


@pytest.mark.parametrize("plan", ["F0:2 F2:3 X3:5 B0:1 B1:3", "F0:1 X1:5 B0:1"])
def test_an_order_that_skips_a_wait_is_refused(plan):
    plan = Plan.parse(plan)
    assert violations(hastiest_order(dependencies, plan, 3), plan) == []
    for wrong in (
        waits_for_nothing_from_its_own_microbatch,
        waits_not_for_the_microbatch_before,
        waits_not_for_the_cotangent,
    ):
        assert violations(hastiest_order(wrong, plan, 3), plan)


@pytest.mark.parametrize(
    "found",
    [
        {"a": torch.tensor([1.0, 2.0 + 1e-3]), "b": torch.zeros(1)},
        {"a": torch.tensor([1.0, float("nan")]), "b": torch.zeros(1)},
        {"a": torch.tensor([1.0, float("inf")]), "b": torch.zeros(1)},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.full((1,), 1e-4)},
        {"a": torch.tensor([1.0, 2.0])},
        {"a": torch.tensor([[1.0, 2.0]]), "b": torch.zeros(1)},
    ],
)
def test_comparisons_refuse_what_differs(found):
    wanted = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(1)}
    for compare in (assert_equal, assert_equal_bits, lambda found, wanted: assert_close(found, wanted, 1e-5)):
        with pytest.raises(AssertionError):
            compare(found, wanted)


def test_bits_see_the_sign_of_zero_and_values_do_not():
    assert_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(AssertionError):
        assert_equal_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert_equal_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_an_error_in_an_all_zero_gradient_is_measured_against_the_others():
    """A key bias has no gradient: its rounding noise must not be divided by zero."""
    wanted = {"bias": torch.zeros(1), "weight": torch.full((1,), 10.0)}
    noisy = {"bias": torch.full((1,), 1e-9), "weight": torch.full((1,), 10.0)}
    assert gradient_error(noisy, wanted) == pytest.approx(1e-9 / (1e-3 * 10 / 2**0.5))
    assert gradient_error({"a": torch.ones(1)}, {"a": torch.zeros(1)}) == float("inf")
    assert gradient_error({"a": torch.zeros(1)}, {"a": torch.zeros(1)}) == 0.0
