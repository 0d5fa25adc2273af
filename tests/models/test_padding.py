"""Padding on the left: in every family it changes no gradient, no logit and no generated token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, VOCABULARY, module, module_grads, oracle

from rpfunc import Batch, generate, tree, value_and_grad
from rpfunc.models import hf
from rpfunc.objectives import sft
from rpfunc.testing.oracles import assert_close


def drawn(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def columns(texts, fill):
    """Returns texts (B, T) and where they are, padded on the left."""
    longest = max(map(len, texts))
    tokens = torch.tensor([[fill] * (longest - len(text)) + text for text in texts])
    return tokens, torch.tensor([[False] * (longest - len(text)) + [True] * len(text) for text in texts])


WAYS = [{}, {"chunk": 1}, {"chunk": 4}, {"chunk": 3, "order": "chunk"}, {"chunk": 2, "workers": 3, "microbatches": 2}]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_texts_alone(family):
    """Queries of the padding see nothing at all: a softmax over nothing must give no NaN."""

    @settings(max_examples=5)
    @given(FAMILIES[family](), st.integers(0, 99), st.integers(0, VOCABULARY - 1), st.sampled_from(WAYS))
    def check(config, seed, fill, way):
        made, texts = module(config, seed), drawn((5, 2, 4), seed)
        tokens, visible = columns(texts, fill)
        predicted = torch.cat((torch.zeros(3, 1, dtype=torch.bool), visible[:, :-1]), dim=1)
        row = {"tokens": tokens, "labels": tokens.masked_fill(~predicted, -100), "visible": visible}
        row["positions"] = (visible.cumsum(1) - 1).clamp(min=0)
        model, params = hf.load(made)
        logits = model(params, Batch(row=row))
        _, grads = value_and_grad(model, sft(), **way)(params, Batch(row=row))
        assert all(leaf.isfinite().all() for leaf in tree.leaves(grads))
        wanted = {name: torch.zeros_like(parameter) for name, parameter in made.named_parameters()}
        for index, text in enumerate(texts):
            alone = torch.tensor([text])
            found, _, each = oracle(made, Batch(row={"tokens": alone, "labels": alone}))
            assert (logits[index, -len(text) :] - found).abs().max() <= 1e-5 * max(1.0, float(found.abs().max()))
            for name, grad in each.items():
                wanted[name] = wanted[name] + grad * (len(text) - 1) / (4 + 1 + 3)
        hf.write_grads(made, grads)
        assert_close(module_grads(made), wanted, 1e-4)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family):
    """Without its cache: with it, 5.24's own answers change where a window is 1, or longer than the prompt."""

    @settings(max_examples=3)
    @given(FAMILIES[family](), st.integers(0, 99), st.sampled_from([None, 1, 4]))
    def check(config, seed, chunk):
        made, prompts = module(config, seed), drawn((7, 1, 4), seed)
        model, params = hf.load(made)
        tokens, visible = columns(prompts, 0)
        how = {"max_new_tokens": 6, "do_sample": False, "use_cache": False, "pad_token_id": 2, "eos_token_id": 2}
        wanted = made.generate(tokens, attention_mask=visible.long(), **how)[:, tokens.shape[1] :].tolist()
        found = [text.tolist() for text in generate(model, params, prompts, 6, stop=(2,), chunk=chunk)]
        assert [text + [2] * (len(theirs) - len(text)) for text, theirs in zip(found, wanted, strict=True)] == wanted
        assert found == [generate(model, params, [prompt], 6, stop=(2,))[0].tolist() for prompt in prompts]

    check()
