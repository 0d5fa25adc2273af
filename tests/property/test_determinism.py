"""With the same microbatches and chunks, every plan, worker count, recompute setting and repetition: the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpfunc import Batch, Cpu, Runtime, random, value_and_grad
from rpfunc.models import decoder, mlp
from rpfunc.objectives import sft
from rpfunc.testing import assert_equal_bits, strategies

CONFIG = decoder.DecoderConfig(
    vocabulary=7, width=6, layers=2, heads=2, kv_heads=1, head_size=4, mlp_width=5, dropout=0.25
)
MODEL = decoder.model(CONFIG)
PARAMS = decoder.init(CONFIG, random.key(0))
NUM_ROWS = 5
TOKENS = torch.randint(0, 7, (4, NUM_ROWS), generator=torch.Generator().manual_seed(0))
BATCH = Batch(row={"tokens": TOKENS, "labels": TOKENS}, constant={"key": random.key(1)})


def run(batch=BATCH, **options):
    result, grads = value_and_grad(MODEL, sft(), **options)(PARAMS, batch)
    return {"loss": result.loss, **grads}


@pytest.mark.parametrize("chunk", [None, 1, 2, NUM_ROWS])
def test_decoders_have_the_same_bits_however_they_run(chunk):
    wanted = run(chunk=chunk, microbatches=3)
    for index, plan in enumerate(strategies.every_plan(4)[(chunk or 0) :: 4]):
        found = run(chunk=chunk, microbatches=3, plan=plan, workers=(1, 2, 3, 4)[index % 4], recompute=index % 2 == 0)
        assert_equal_bits(found, wanted)


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_perceptrons_have_the_same_bits_however_they_run(data):
    config = mlp.MlpConfig(widths=(3, 5, 4, 3), activation="tanh")
    seed = data.draw(st.integers(0, 10_000), "seed")
    params, model = mlp.init(config, random.key(seed)), mlp.model(config)
    features = random.normal(random.key(seed + 1), (5, 4, 3))
    labels = (random.uniform(random.key(seed), (5, 4)) * 3).long()
    batch = Batch(row={"features": features, "labels": labels})
    same = {"chunk": data.draw(strategies.chunks(4)), "microbatches": data.draw(strategies.microbatches(5))}
    results = [
        value_and_grad(
            model,
            sft(),
            plan=data.draw(strategies.plans(3), "plan"),
            workers=data.draw(strategies.workers(), "workers"),
            recompute=data.draw(st.booleans(), "recompute"),
            **same,
        )(params, batch)
        for _ in range(2)
    ]
    assert_equal_bits(*[{"loss": result.loss, **grads} for result, grads in results])


def test_ten_repetitions_have_the_same_bits_wherever_the_cursor_stands():
    plan = strategies.Plan.parse("F0:1 F1:3 X3:4 B0:2 B2:3")
    with Runtime([Cpu(), Cpu(), Cpu()]) as runtime:
        results = [run(plan=plan, workers=runtime, microbatches=4, chunk=3) for _ in range(10)]
        assert runtime.cursor == 10 * 5 % 3
    for found in results[1:]:
        assert_equal_bits(found, results[0])


def test_the_chosen_plan_has_the_same_bits():
    assert_equal_bits(run(workers=3, microbatches=2), run(microbatches=2))


def test_labels_that_are_all_ignored_in_one_microbatch_change_nothing_for_the_others():
    labels = TOKENS.clone()
    labels[2:] = -100
    both = Batch(row={"tokens": TOKENS, "labels": labels})
    alone = Batch(row={"tokens": TOKENS[:2], "labels": labels[:2]})
    assert_equal_bits(run(both, microbatches=2), run(alone))
