"""Gradient blocks: microbatches summed apart, block by block, then in the order of blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpfunc import Batch, Cpu, Plan, Runtime, random, tree, value_and_grad
from rpfunc.models import mlp
from rpfunc.objectives import sft
from rpfunc.schedule import Schedule, Workload
from rpfunc.testing import assert_computes, assert_equal_bits, exact, strategies

MODEL = mlp.model(mlp.MlpConfig(widths=(3, 5, 4, 3), activation="tanh"))
PARAMS = mlp.init(mlp.MlpConfig(widths=(3, 5, 4, 3), activation="tanh"), random.key(0))
LABELS = (random.uniform(random.key(2), (8, 4)) * 3).long()
BATCH = Batch(row={"features": random.normal(random.key(1), (8, 4, 3)), "labels": LABELS})


def run(batch=BATCH, total=None, **options):
    result, grads = value_and_grad(MODEL, sft(), **options)(PARAMS, batch, total)
    return {"loss": result.loss, **grads}


@given(st.integers(1, 8), st.data())
def test_blocks_are_the_sums_of_their_own_microbatches_added_in_order(num_microbatches, data):
    """The oracle runs each block as a batch of its own and adds the gradients up."""
    blocks = data.draw(st.integers(1, num_microbatches), "blocks")
    total = sft().total(sft().prepare(BATCH))
    starts = Workload(Plan.single(3).slots, num_microbatches, blocks).block_starts
    pieces = BATCH.microbatches(num_microbatches)
    wanted = None
    for start, stop in zip(starts, [*starts[1:], num_microbatches], strict=True):
        first = pieces[start].first_example
        block = BATCH.examples(first, pieces[stop - 1].first_example + pieces[stop - 1].num_examples)
        found = run(block, total, microbatches=stop - start)
        del found["loss"]
        wanted = found if wanted is None else tree.map(torch.add, wanted, found)
    found = run(
        microbatches=num_microbatches,
        blocks=blocks,
        plan=data.draw(strategies.plans(3), "plan"),
        workers=data.draw(strategies.workers(), "workers"),
    )
    del found["loss"]
    assert_equal_bits(found, wanted)


def test_the_number_of_blocks_changes_last_bits_and_so_belongs_to_what_decides_them():
    one, four = run(microbatches=8), run(microbatches=8, blocks=4)
    with pytest.raises(AssertionError, match="bits differ"):
        assert_equal_bits(four, one)


@given(st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_any_number_of_blocks_is_exact(num_microbatches, blocks, tied):
    model, params, batch = exact.model(tied=tied), exact.init(tied=tied), exact.batch(5, 3)
    function = value_and_grad(
        model, exact.linear(), microbatches=num_microbatches, blocks=min(blocks, num_microbatches), workers=2
    )
    assert_computes(function, model, exact.linear(), params, batch)


def test_blocks_of_one_stage_run_at_once_on_many_workers_and_never_change_a_bit():
    """The heavy slot is dealt to all workers, each with a block."""
    plan = Plan.single(3)
    schedule = Schedule.parse("\n".join(f"0X{2 * block} 0X{2 * block + 1}" for block in range(4)))
    wanted = run(microbatches=8, blocks=4)
    with Runtime([Cpu()] * 4) as runtime:
        for _ in range(20):
            assert_equal_bits(run(plan=plan, schedule=schedule, workers=runtime, microbatches=8, blocks=4), wanted)


def test_a_batch_with_fewer_examples_than_blocks_has_fewer_blocks():
    two = BATCH.examples(0, 2)
    assert_equal_bits(run(two, microbatches=8, blocks=4), run(two, microbatches=2, blocks=2))
