"""No copy is read, and no memory used again, before it is done with (ROCm/pytorch#3194, pytorch/pytorch#137878)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from offloading import offload

ROUNDS = 200


@pytest.mark.parametrize(
    "channels", [("parameter_upload", "gradient_download"), ("activation_upload", "activation_download")]
)
def test_200_rounds_have_no_error(channels):
    assert offload(ROUNDS, channels)["max_error"] == 0.0


def test_the_bits_are_those_of_launches_that_wait():
    program = Path(__file__).with_name("offloading.py")
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
    run = subprocess.run(
        [sys.executable, program, str(ROUNDS)], env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert json.loads(run.stdout.splitlines()[-1]) == offload(ROUNDS)
