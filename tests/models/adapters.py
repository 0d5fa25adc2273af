"""Small adapted decoders that the tests of adapters share."""

import torch

from rpfunc import Batch, random, tree
from rpfunc.models import decoder, lora

EVERYTHING = ("embedding", "attention.*", "mlp.*", "projection")


def config_of(tied=True, layers=3, **options):
    return decoder.DecoderConfig(
        vocabulary=7, width=6, layers=layers, heads=2, kv_heads=1, head_size=4, mlp_width=5, tied=tied, deviation=None,
        **options,
    )  # fmt: skip


def filled(params, seed=5):
    """The parameters with A and B drawn at random, so that both have gradients."""
    drawn = random.key(seed)

    def fill(path, leaf):
        if lora.frozen(path, leaf):
            return leaf
        return (random.normal(random.fold_in(drawn, path), tuple(leaf.shape), torch.float64) * 0.4).to(leaf.dtype)

    leaves, structure = tree.flatten(params)
    return tree.unflatten(structure, [fill(*pair) for pair in zip(tree.paths(params), leaves, strict=True)])


def adapted(config, targets=EVERYTHING, dtype=torch.float64, **options):
    options = {"rank": 2, "alpha": 3.0, **options}
    plain, params = decoder.model(config), decoder.init(config, random.key(0), dtype)
    model, params = lora.adapt(plain, params, lora.LoraConfig(targets, **options), random.key(1))
    return model, filled(params)


def tokens_of(num_examples=3, num_rows=6, seed=0, **constant):
    tokens = torch.randint(0, 7, (num_examples, num_rows), generator=torch.Generator().manual_seed(seed))
    return Batch(row={"tokens": tokens, "labels": tokens}, constant=constant)
