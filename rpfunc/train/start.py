"""What a run starts from: a decoder of bytes made from the seed, or a pretrained model with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rpfunc import random, tree
from rpfunc.errors import OptionsError
from rpfunc.model import Model, Params
from rpfunc.models import decoder, lora
from rpfunc.models.hf import PretrainedModel, load, load_tokenizer, packaged, save
from rpfunc.models.lora_peft import save as save_adapters
from rpfunc.train.options import TrainOptions

PACKAGE = "package:"
"""What `pretrained` begins with where it names an installed package that holds a GGUF file."""


@dataclass(frozen=True)
class Start:
    """A model, its parameters before the first step, and its language.

    frozen  selects the leaves that are not trained; None: all are
    encode  bytes of text -> tokens
    decode  tokens -> bytes of text
    export  (params, folder) -> the folders written there that transformers, or PEFT, load
    """

    model: Model
    params: Params
    frozen: tree.Mask | None
    encode: Callable[[bytes], list[int]]
    decode: Callable[[Sequence[int]], bytes]
    export: Callable[[Params, Path], list[Path]]


def read_start(options: TrainOptions) -> Start:
    """Returns what a run of these options starts from; the same one each time.

    Raises OptionsError, ModelError or CheckpointError where the options, the model or its files cannot work.
    """
    if options.pretrained:
        return _pretrained(options)
    key = random.fold_in(random.key(options.seed), "parameters")
    params = decoder.init(options.model, key)
    return Start(decoder.model(options.model), params, None, list, bytes, lambda params, folder: [])


def _pretrained(options: TrainOptions) -> Start:
    source = _source(options.pretrained)
    tokenizer = load_tokenizer(source)
    # frozen weights may stay in a mapped file; trained ones are overwritten, so they are read into memory
    base, params = load(source, mapped=options.lora is not None)
    model: Model = base
    if options.lora is not None:
        key = random.fold_in(random.key(options.seed), "adapters")
        model, params = lora.adapt(base, params, options.lora, key)

    def encode(text: bytes) -> list[int]:
        try:
            return list(tokenizer(text.decode(), add_special_tokens=False, verbose=False)["input_ids"])
        except UnicodeDecodeError as error:
            raise OptionsError(f"text: is not UTF-8, which the model's tokenizer reads: {error}") from error

    def decode(tokens: Sequence[int]) -> bytes:
        text: str = tokenizer.decode(list(tokens))
        return text.encode()

    def export(params: Params, folder: Path) -> list[Path]:
        written = [folder / "model"]
        merged = lora.merge(model, params)
        save(*_as_stored(*merged), written[0])
        tokenizer.save_pretrained(written[0])
        if options.lora is not None:
            written.append(folder / "adapters")
            save_adapters(model, params, written[1])
        return written

    return Start(model, params, None if options.lora is None else lora.frozen, encode, decode, export)


def _as_stored(model: Model, params: Params) -> tuple[Model, Params]:
    """Returns the model with a config that says so if merging has untied its head."""
    if not isinstance(model, PretrainedModel) or "head" not in params or not model.config.get("tie_word_embeddings"):
        return model, params
    return replace(model, config={**model.config, "tie_word_embeddings": False}), params


def _source(pretrained: str) -> Path:
    if pretrained.startswith(PACKAGE):
        return packaged(pretrained.removeprefix(PACKAGE))
    return Path(pretrained)
