"""The example of a schedule of one's own runs as written, and shows what it says."""

import re
import runpy
from pathlib import Path

import pytest

from rpfunc import Plan
from rpfunc.plan.costs import uniform_costs
from rpfunc.schedule import Workload, one_f_one_b, simulate, validate

PATH = Path(__file__).parents[2] / "examples" / "own_schedule.py"


def test_the_example_checks_simulates_draws_and_runs_its_schedule(capfd, tmp_path):
    example = runpy.run_path(str(PATH))
    example["main"](tmp_path / "waves.png")
    output = capfd.readouterr().out
    assert "0F0 0F1 1B0 0F2 1B1 1B2\n1F0 1F1 0B0 1F2 0B1 0B2\n" in output
    assert "worker 0 has 1B2 (place 3) before 1B1 (place 4): gradients are summed in microbatch order" in output
    idle = {name: float(share) for name, share in re.findall(r"(\w+) +workers are idle ([\d.]+)%", output)}
    assert idle["waves"] < idle["one_f_one_b"] <= idle["gpipe"]
    assert "\nworker 3 ..." in output
    assert (tmp_path / "waves.png").read_bytes()[:4] == b"\x89PNG"
    assert float(re.search(r"error of the gradient: (\S+)", output)[1]) < 1e-10
    assert output.endswith("the same bits as one worker without stages: yes\n")


@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_waves_are_valid_and_never_idle_more_than_one_f_one_b(num_stages, num_microbatches):
    plan = Plan.symmetric(num_stages, range(num_stages))
    work = Workload(plan.slots, num_microbatches)
    waves = runpy.run_path(str(PATH))["waves"](work, num_stages)
    validate(waves, work)
    costs = uniform_costs(plan)
    assert simulate(waves, costs).bubble <= simulate(one_f_one_b(work, num_stages), costs).bubble
