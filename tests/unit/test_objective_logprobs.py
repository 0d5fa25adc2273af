"""Log-probabilities of tokens: aligned with them, equal for any cut, and never more than a chunk of logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import dense_objective as dense

from rpfunc import Batch, Layer, Model
from rpfunc.errors import BatchError, ModelError, OptionsError
from rpfunc.objectives import dpo, grpo
from rpfunc.reference import value_and_grad
from rpfunc.stream import opaque, rowwise
from rpfunc.stream.logprobs import logprobs
from rpfunc.testing.objectives import table


def draw(num_examples, num_rows, seed=0, vocabulary=4):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(vocabulary, (num_examples, num_rows), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    logits = torch.randn(*labels.shape, vocabulary, generator=generator, dtype=torch.float64)
    return logits, Batch(row={"labels": labels})


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 7)),
    chunk=st.none() | st.integers(1, 9),
    microbatches=st.integers(1, 5),
    options=st.sampled_from([{}, {"temperature": 0.7}, {"soft_cap": 1.5, "temperature": 2.0}]),
    seed=st.integers(0, 1000),
)
def test_place_t_holds_the_log_probability_of_token_t(shape, chunk, microbatches, options, seed):
    logits, batch = draw(*shape, seed)
    found = logprobs(table(), {"output": logits}, batch, chunk=chunk, microbatches=microbatches, **options)
    wanted = torch.zeros(shape, dtype=torch.float64)
    for i in range(shape[0]):
        for t in dense.targets_of(batch, i):
            wanted[i, t] = dense.log_p(logits, batch, i, t, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert not torch.signbit(found[wanted == 0]).any()


@pytest.mark.parametrize(("chunk", "most"), [(None, 10), (3, 3), (4, 4)])
def test_logits_exist_for_one_chunk_of_one_microbatch(chunk, most):
    logits, batch = draw(5, 10)
    shapes = []

    def head(params, x, piece):
        shapes.append(x.shape[:2])
        return x @ params

    model = Model((Layer("rows", table().layers[0].form, "output"), Layer("head", rowwise(head), "weight")))
    params = {"output": logits, "weight": torch.eye(4, dtype=torch.float64)}
    found = logprobs(model, params, batch, chunk=chunk, microbatches=3)
    torch.testing.assert_close(found, logprobs(table(), {"output": logits}, batch))
    assert max(rows for _, rows in shapes) == most
    assert [examples for examples, _ in shapes][:: len(shapes) // 3] == [2, 2, 1]


def test_a_head_that_does_not_stream_is_taken_whole():
    logits, batch = draw(2, 6)
    model = Model((Layer("table", opaque(table().layers[0].form.function), "output"),))
    found = logprobs(model, {"output": logits}, batch, chunk=2)
    torch.testing.assert_close(found, logprobs(table(), {"output": logits}, batch))


def test_a_model_with_a_value_head_has_its_logits_read():
    logits, batch = draw(2, 6)
    params = {"output": {"logits": logits, "values": logits[..., 0]}}
    found = logprobs(table(), params, batch, chunk=2)
    torch.testing.assert_close(found, logprobs(table(), {"output": logits}, batch))


def test_no_gradient_is_kept():
    logits, batch = draw(1, 4)
    assert not logprobs(table(), {"output": logits.requires_grad_()}, batch).requires_grad


def test_old_log_probabilities_of_the_same_parameters_make_every_ratio_1():
    logits, batch = draw(2, 6)
    old = logprobs(table(), {"output": logits}, batch, chunk=4)
    full = Batch(row={**batch.row, "old_logprobs": old}, example={"advantages": torch.tensor([2.0, 2.0])})
    loss, _ = value_and_grad(table(), grpo())({"output": logits}, full)
    assert loss.item() == pytest.approx(-2.0, abs=1e-12)


def test_reference_log_probabilities_of_the_same_parameters_make_dpo_log_2():
    logits, batch = draw(4, 9, seed=1)
    reference = logprobs(table(), {"output": logits}, batch, chunk=4).sum(1)
    full = Batch(row=batch.row, example={"reference_logprobs": reference}, group_size=2)
    loss, _ = value_and_grad(table(), dpo())({"output": logits}, full)
    assert loss.item() == pytest.approx(0.6931471805599453, abs=1e-12)


def test_16_bit_logits_give_float32():
    logits, batch = draw(1, 4)
    assert logprobs(table(), {"output": logits.bfloat16()}, batch).dtype == torch.float32


def test_refusals():
    logits, batch = draw(1, 4)
    with pytest.raises(OptionsError, match=r"logprobs: temperature is -1\.0; it must be finite and above 0, for"):
        logprobs(table(), {"output": logits}, batch, temperature=-1.0)
    with pytest.raises(BatchError, match="logprobs: needs row leaf 'labels'"):
        logprobs(table(), {"output": logits}, Batch(row={"tokens": batch.row["labels"]}))
    with pytest.raises(ModelError, match="params lacks subtree 'output'"):
        logprobs(table(), {}, batch)
    with pytest.raises(OptionsError, match="logprobs: chunk is 0, it must be at least 1 row"):
        logprobs(table(), {"output": logits}, batch, chunk=0)
    with pytest.raises(OptionsError, match="microbatches is 0"):
        logprobs(table(), {"output": logits}, batch, microbatches=0)
