"""What a budget of memory is worth where networks have many features, outputs or inputs: the peak of a process."""

import subprocess
import sys

import pytest

PEAK = """
import resource, sys
from torch import nn
from biascope.geometry import nads

def narrow():
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 1))

def wide():  # few parameters, many outputs
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten())

def large():
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 1))

def run(networks):
    if sys.argv[1] == "inputs":
        side = 8 if networks < 5 else 64
        return nads(large, (3, side, side), 4, top=4, max_memory="200MB")
    if sys.argv[1] == "marginal":
        return nads(narrow, (1, 12, 12), networks, head="marginal", max_memory="100MB")
    return nads(wide, (1, 12, 12), networks, scalarise=lambda out: out[:, 0], max_memory="100MB")

run(4)  # what torch itself holds
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(256)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["marginal", "outputs"])
def test_features_and_outputs_count_against_the_budget(kind: str) -> None:
    """256 networks with 2304 features at 288 inputs: 0.68 GB, several times over if all are held at once."""
    done = subprocess.run([sys.executable, "-c", PEAK, kind], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 150  # MiB more than four networks need


@pytest.mark.slow
def test_perturbed_inputs_count_against_the_budget() -> None:
    """All 2 D inputs of D = 12,288 entries are 1.2 GB; half of them were held at once, whatever the budget."""
    done = subprocess.run([sys.executable, "-c", PEAK, "inputs"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200  # MiB more than inputs of 192 entries need
