"""What cannot work is refused before any work, with text that says what would."""

import threading
from dataclasses import replace

import pytest
import torch

from rpfunc import Batch, Cpu, Layer, Model, Plan, Runtime, value_and_grad
from rpfunc.errors import BatchError, OptionsError, PlanError, ScheduleError
from rpfunc.objectives import sft
from rpfunc.schedule import Schedule, gpipe
from rpfunc.stream import opaque, rowwise
from rpfunc.testing import assert_computes, exact

PARAMS, BATCH, MODEL = exact.init(), exact.batch(2, 3), exact.model()


def run(**options):
    return value_and_grad(MODEL, exact.linear(), **options)(PARAMS, BATCH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "options: microbatches is 0, it must be at least 1"),
        ({"chunk": 0}, "options: chunk is 0, it must be at least 1 row (or None for whole rows)"),
        (
            {"microbatches": -1, "chunk": -2},
            "options: 2 problems\n"
            "  - microbatches is -1, it must be at least 1\n"
            "  - chunk is -2, it must be at least 1 row (or None for whole rows)",
        ),
    ],
)
def test_bad_options_are_refused_when_the_function_is_made(options, message):
    with pytest.raises(OptionsError) as caught:
        value_and_grad(MODEL, exact.linear(), **options)
    assert str(caught.value) == message


TWO_LINES = "0F0 0F1 0B0 0B1\n1X0 1X1"
HALF = Plan.parse("F0:2 X2:4 B0:2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 0}, "options: blocks is 0, it must be 1 to microbatches, which is 1"),
        ({"microbatches": 2, "blocks": 3}, "options: blocks is 3, it must be 1 to microbatches, which is 2"),
        (
            {"schedule": ["0X0"]},
            "options: schedule is a list, needs a Schedule, its text, or a function (work, num_workers) -> Schedule "
            "such as rpfunc.schedule.round_robin",
        ),
        (
            {"schedule": TWO_LINES, "microbatches": 2},
            "options: schedule runs the stages 0B, 0F, 1X, so it needs the plan that says which layers they are, as in "
            "plan='F0:4 X4:6 B0:2 B2:4'",
        ),
    ],
)
def test_schedules_and_blocks_that_cannot_work_are_refused_when_the_function_is_made(options, message):
    with pytest.raises(OptionsError) as caught:
        value_and_grad(MODEL, exact.linear(), **options)
    assert str(caught.value) == message


def test_text_that_is_no_schedule_is_refused_when_the_function_is_made():
    with pytest.raises(ScheduleError, match="'0Q0'"):
        value_and_grad(MODEL, exact.linear(), schedule="0X0 0Q0")


def test_a_plan_that_trains_nothing_is_refused():
    with pytest.raises(PlanError) as caught:
        value_and_grad(MODEL, exact.linear(), plan="F0:2 F2:4")
    assert str(caught.value) == (
        "plan 'F0:2 F2:4': has no backward stage, so it gives no gradient; needs some, as in 'F0:2 F2:4 B0:2 B2:4'"
    )


TOO_FEW = (
    "has 2 microbatches, the batch is cut into 1; a function (work, num_workers) -> Schedule, such as "
    "rpfunc.schedule.round_robin, makes one for each batch"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": None}, "schedule: has 2 lines, one a worker, and there is 1 worker; workers=2 would do"),
        (
            {"workers": 2, "schedule": TWO_LINES + "\n\n", "microbatches": 1},
            "schedule: 2 problems\n"
            "  - has 3 lines, one a worker, and there are 2 workers; workers=3 would do\n"
            f"  - {TOO_FEW}",
        ),
        ({"workers": 2, "microbatches": 1}, f"schedule: {TOO_FEW}"),
    ],
)
def test_a_schedule_that_does_not_fit_the_workers_or_the_batch_is_refused(options, message):
    before = threading.active_count()
    with pytest.raises(ScheduleError) as caught:
        run(**{"plan": HALF, "schedule": TWO_LINES, "microbatches": 2} | options)
    assert str(caught.value) == message
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("0F0 0F1 0B0 0B1\n1X0", "1X1 is missing"),
        ("0F0 0F1 0B0 0B1\n1X1 1X0", "1X1"),
        ("0F0 0F1 0I0 0B1\n1X0 1X1", "0W0 is missing"),
    ],
)
def test_a_schedule_that_does_not_do_the_work_is_refused_before_any(schedule, message):
    calls = []
    model = Model((Layer("watched", rowwise(lambda *inputs: calls.append(inputs) or 1 / 0)), *MODEL.layers[1:]))
    with pytest.raises(ScheduleError, match=message):
        value_and_grad(model, exact.linear(), plan=HALF, schedule=schedule, workers=2, microbatches=2)(PARAMS, BATCH)
    assert not calls


def test_a_generator_that_needs_another_plan_says_so_and_one_that_returns_no_schedule_is_named():
    with pytest.raises(ScheduleError, match="gpipe: "):
        run(schedule=gpipe, workers=2, microbatches=2)
    with pytest.raises(OptionsError) as caught:
        run(schedule=lambda work, num_workers: str(gpipe(work, num_workers)), plan=Plan.symmetric(4, [0, 2]), workers=2)
    assert str(caught.value) == "schedule: the function returned a str, it must return a Schedule"


def test_workers_that_a_schedule_has_no_line_for_are_idle():
    result, _ = run(schedule=TWO_LINES, plan=HALF, workers=4, microbatches=2)
    assert result.timeline.num_workers == 4
    assert {event.worker for event in result.timeline.events} == {0, 1}


def test_a_schedule_of_the_fused_stage_alone_needs_no_plan():
    function = value_and_grad(
        MODEL, exact.linear(), schedule=Schedule.parse("0X1\n0X0"), workers=2, microbatches=2, blocks=2
    )
    assert_computes(function, MODEL, exact.linear(), PARAMS, BATCH)


def test_a_given_schedule_leaves_the_cursor_where_it_is():
    with Runtime([Cpu(), Cpu(), Cpu()]) as runtime:
        run(workers=runtime, plan=HALF)
        assert runtime.cursor == 0
        run(workers=runtime, plan="F0:1 F1:2 X2:4 B0:2")
        assert runtime.cursor == 1
        run(workers=runtime, plan=HALF, schedule=TWO_LINES, microbatches=2)
        assert runtime.cursor == 1


def test_no_workers_at_all_are_refused():
    with pytest.raises(OptionsError) as caught:
        run(workers=0)
    assert str(caught.value) == "workers: found 0, it must be at least 1 (or None for the caller's thread)"


def test_a_worker_without_threads_is_refused():
    with pytest.raises(OptionsError) as caught:
        Cpu(threads=0)
    assert str(caught.value) == "worker: threads is 0, it must be at least 1"


@pytest.mark.parametrize("workers", [None, 2])
def test_a_plan_for_another_model_is_refused_and_no_thread_remains(workers):
    before = threading.active_count()
    with pytest.raises(PlanError) as caught:
        run(plan=Plan.parse("F0:2 X2:3 B0:2"), workers=workers)
    assert str(caught.value) == (
        "plan 'F0:2 X2:3 B0:2': 2 problems\n"
        "  - forward ends at layer 3, the model has 4 layers\n"
        "  - backward ends at layer 3, the model has 4 layers"
    )
    assert threading.active_count() == before


def test_an_infinite_total_is_refused():
    with pytest.raises(BatchError) as caught:
        value_and_grad(MODEL, exact.linear())(PARAMS, BATCH, total=torch.tensor(float("inf")))
    assert str(caught.value) == "batch: the exact_linear objective's total is inf, it must be finite"


def test_an_empty_batch_is_refused():
    with pytest.raises(BatchError, match="cannot cut 0 groups into 2 microbatches"):
        value_and_grad(MODEL, exact.linear(), microbatches=2)(PARAMS, exact.batch(0, 3), total=torch.ones(()))


def test_a_refused_call_leaves_the_runtime_usable():
    with Runtime([Cpu(), Cpu()]) as runtime:
        with pytest.raises(PlanError):
            run(plan=Plan.single(9), workers=runtime)
        function = value_and_grad(MODEL, exact.linear(), workers=runtime)
        assert_computes(function, MODEL, exact.linear(), PARAMS, BATCH)


@pytest.mark.parametrize("workers", [None, 2])
def test_layers_may_read_what_the_objective_prepared(workers):
    """Also while a plan is being chosen."""

    def weigh(weight, x, batch):
        return weight.expand(*batch.row["targets"].shape, 3) * (batch.row["targets"] != -100).unsqueeze(-1)

    model = Model((Layer("weigh", rowwise(weigh), "weight"), Layer("head", rowwise(lambda params, x, batch: x))))
    params = {"weight": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}
    batch = Batch(row={"labels": torch.tensor([[0, 1, 2], [2, -100, 0]])})
    assert_computes(value_and_grad(model, sft(), workers=workers), model, sft(), params, batch, tolerance=1e-10)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_model_without_parameters_has_a_loss_and_no_gradients(chunk):
    model = Model((Layer("given", rowwise(lambda params, x, batch: batch.row["logits"])),))
    batch = Batch(row={"logits": torch.zeros(1, 3, 2), "labels": torch.zeros(1, 3, dtype=torch.long)})
    result, grads = value_and_grad(model, sft(), chunk=chunk)({}, batch)
    assert result.loss.item() == pytest.approx(torch.tensor(2.0).log().item())
    assert grads == {}


@pytest.mark.parametrize("plan", [None, Plan.parse("F0:1 X1:3 B0:1")])
def test_opaque_layers_need_no_row_dimension(plan):
    layers = (
        Layer("pool", opaque(lambda w, x, batch: (batch.row["x"] * w).sum(1)), "w"),
        Layer("square", opaque(lambda w, x, batch: x.square()), ()),
        Layer("head", opaque(lambda w, x, batch: x.unsqueeze(1).expand(-1, 3, -1) * batch.row["x"]), ()),
    )
    objective = replace(
        exact.linear(), score=lambda output, batch: output.sum(-1), loss=lambda sums, batch, total: sums.sum() / total
    )
    batch = Batch(row={"x": torch.arange(12, dtype=torch.float64).reshape(2, 3, 2)})
    for chunk in (None, 1, 2):
        function = value_and_grad(Model(layers), objective, plan=plan, chunk=chunk, workers=2, microbatches=2)
        assert_computes(function, Model(layers), objective, {"w": torch.ones(2, dtype=torch.float64)}, batch)


@pytest.mark.parametrize("workers", [None, 2])
def test_layers_whose_shapes_depend_on_data_need_no_plan_given(workers):
    """Costs are counted without data, which such a layer cannot do."""

    def positive_sum(w, x, batch):
        scaled = batch.row["x"] * w
        return scaled + scaled[batch.row["x"] > 0].sum() * batch.example["first"].reshape(-1, 1)

    model = Model((Layer("pick", opaque(positive_sum), "w"), Layer("head", rowwise(lambda params, x, batch: x))))
    objective = replace(exact.linear(), score=lambda output, batch: output, loss=lambda sums, batch, total: sums.sum())
    batch = Batch(row={"x": torch.tensor([[1.0, -1.0, 2.0]])}, example={"first": torch.ones(1)})
    function = value_and_grad(model, objective, workers=workers)
    assert_computes(function, model, objective, {"w": torch.tensor(2.0)}, batch)
