"""Every family against transformers: logits, loss and all gradients, by every way of running."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, batch, module, module_grads, oracle

from rpfunc import reference, value_and_grad
from rpfunc.models import hf
from rpfunc.objectives import sft
from rpfunc.testing.oracles import assert_close, assert_untouched

WAYS = [
    {"chunk": None},
    {"order": "layer"},
    {"order": "chunk"},
    {"order": "layer", "workers": 3, "microbatches": 2},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(family):
    @settings(max_examples=8)
    @given(FAMILIES[family](), st.integers(0, 99), st.integers(1, 3), st.integers(2, 12), st.data())
    def check(config, seed, num_examples, num_rows, data):
        made, rows = module(config, seed), batch(num_examples, num_rows, seed)
        logits, loss, grads = oracle(made, rows)
        model, params = hf.load(made)
        with assert_untouched(params, rows):
            assert (model(params, rows) - logits).abs().max() <= 1e-5 * max(1.0, float(logits.abs().max()))
        chunk = data.draw(st.sampled_from([1, 3, max(num_rows - 1, 1), num_rows, num_rows + 5]), "chunk")
        way = {"chunk": chunk, **data.draw(st.sampled_from(WAYS), "way")}
        for function in (reference.value_and_grad(model, sft()), value_and_grad(model, sft(), **way)):
            result, found = function(params, rows)
            hf.write_grads(made, found)
            assert abs(float(getattr(result, "loss", result)) - float(loss)) <= 1e-5 * max(1.0, float(loss))
            assert_close(module_grads(made), grads, 1e-4)

    check()
