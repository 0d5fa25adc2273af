"""Importing rpfunc does nothing but define names."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import gc, json, sys, threading, time
    import torch
    gc.freeze()  # torch's objects are not rpfunc's to collect, wherever the collector's turn happens to come
    state, seeds = torch.get_rng_state(), torch.initial_seed()
    threads = torch.get_num_threads(), torch.get_num_interop_threads()
    before = set(sys.modules)
    began = time.process_time()  # the work it takes, however busy the machine is
    import rpfunc
    seconds = time.process_time() - began
    print(json.dumps({
        "seconds": seconds,
        "python_threads": threading.active_count(),
        "rng_unchanged": torch.equal(torch.get_rng_state(), state) and torch.initial_seed() == seeds,
        "threads_unchanged": (torch.get_num_threads(), torch.get_num_interop_threads()) == threads,
        "cuda": torch.cuda.is_initialized(),
        "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
    }))
"""


@pytest.fixture(scope="module")
def reports():
    def report():
        program = textwrap.dedent(PROGRAM)
        # the first run compiles what no one has imported before
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50, check=True
        )
        assert run.stderr == ""
        return json.loads(run.stdout)

    return [report() for _ in range(3)]


def test_import_starts_no_thread_and_changes_no_state(reports):
    assert reports[0]["python_threads"] == 1
    assert reports[0]["rng_unchanged"]
    assert reports[0]["threads_unchanged"]


def test_import_needs_no_device(reports):
    assert not reports[0]["cuda"]


def test_import_leaves_optional_and_heavy_packages_alone(reports):
    heavy = {"hypothesis", "pytest", "beartype", "matplotlib", "cyclopts", "rich", "transformers", "tokenizers"}
    assert not heavy & set(reports[0]["modules"])


def test_import_takes_less_than_a_third_of_a_second_beyond_torch(reports):
    assert min(report["seconds"] for report in reports) < 0.3
