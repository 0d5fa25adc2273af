"""What every test runs under: checked shapes, one intra-op thread, Hypothesis profiles."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

sys.path.insert(0, str(Path(__file__).parent))  # for `oracle.dense`, `typecheck`

# Before rpfunc is imported, and only where shapes are annotated: checking every call would take four times as long.
install_import_hook(["rpfunc.models", "rpfunc.objectives", "rpfunc.stream.attention"], "typecheck.check")

settings.register_profile("dev", max_examples=10, deadline=None)
settings.register_profile(
    "ci", max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("RPFUNC_HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
