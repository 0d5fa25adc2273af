"""Models of transformers in and out: `load` a folder or a live module, `save` a folder, `write_grads` to a module."""

from rpfunc.models.hf.gguf import packaged
from rpfunc.models.hf.pretrained import PretrainedModel, from_config
from rpfunc.models.hf.tokenizer import load_tokenizer
from rpfunc.models.hf.transfer import load, save, write_grads

__all__ = ["PretrainedModel", "from_config", "load", "load_tokenizer", "packaged", "save", "write_grads"]
