"""Tests of models against transformers: without it they are skipped, and say so."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `tiny_models`
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
