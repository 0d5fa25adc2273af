"""The tokenizer that lies beside a model's weights, by transformers; none of its code comes from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpfunc.errors import CheckpointError


def load_tokenizer(source: str | Path) -> Any:
    """Returns transformers' tokenizer of a model folder, or of a GGUF file.

    Raises CheckpointError where transformers is missing, or reads none there without running the folder's own code.
    """
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"tokenizer {path}: there is no such file or folder")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(f"tokenizer {path}: needs transformers; pip install 'rpfunc[hf]'") from error
    folder, file = (path.parent, path.name) if path.is_file() else (path, None)
    try:
        return AutoTokenizer.from_pretrained(
            folder, gguf_file=file, local_files_only=True, trust_remote_code=False, use_fast=True
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise CheckpointError(f"tokenizer {path}: transformers cannot read it ({error})") from error
