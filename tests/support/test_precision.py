"""Settings of torch's float32 arithmetic: in force inside, put back after, whichever way the user set them."""

import subprocess
import sys

import pytest

SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import torch

B = torch.backends
PLACES = {"all": B, "gpu": B.cudnn, "matmul": B.cuda.matmul, "conv": B.cudnn.conv, "rnn": B.cudnn.rnn,
          "cpu": B.mkldnn, "cpu matmul": B.mkldnn.matmul, "cpu conv": B.mkldnn.conv}

def tried(question):
    try:
        return question()
    except RuntimeError:
        return "raises"

def state():
    return {
        **{name: place.fp32_precision for name, place in PLACES.items()},
        "old matmul": tried(torch.get_float32_matmul_precision),
        "old cublas": tried(lambda: B.cuda.matmul.allow_tf32),
        "old cudnn": tried(lambda: B.cudnn.allow_tf32),
        "enabled": B.cudnn.enabled,
    }

def inherited():  # what children say when their parents change; torch's default of the first three cannot be put back
    found, lost = [], ("conv", "rnn", "old cudnn")
    for value in ("ieee", "tf32"):
        for name in ("all", "gpu", "cpu"):
            before = PLACES[name].fp32_precision
            PLACES[name].fp32_precision = value
            found.append({name: value for name, value in state().items() if name not in lost})
            PLACES[name].fp32_precision = before
    return found

SETTING
if LOOK:
    print(inherited())
    raise SystemExit

from torch import nn
import biascope as bs
from biascope.support.precision import arithmetic, without_cudnn

def check():
    before = state()
    for precision, value in (("float32", "ieee"), ("tf32", "tf32")):
        with arithmetic(precision):
            for name in ("matmul", "conv", "rnn"):
                assert PLACES[name].fp32_precision == value, (precision, name)
            assert PLACES["cpu matmul"].fp32_precision == "ieee"
            inside = state()
            assert "raises" not in inside.values(), inside
            assert inside["old cudnn"] == inside["old cublas"] == (value == "tf32")
            with torch.backends.cudnn.flags(enabled=False):  # as others may do
                pass
            assert state() == inside
            with without_cudnn():
                assert not B.cudnn.enabled
                assert {**state(), "enabled": True} == {**inside, "enabled": True}
        assert state() == before, (before, state())

check()
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
x, before = torch.randn(3, 1, 4, 4), state()
bs.fisher(net, x, "kfac")
bs.ntk(net, x)
bs.hessian(net, (x, torch.tensor([0, 1, 0]))) @ torch.ones(38)
bs.linearize(net)(x)
assert state() == before, (before, state())
print(inherited())
"""

SETTINGS = [
    "pass",
    'torch.set_float32_matmul_precision("high")',
    'torch.set_float32_matmul_precision("medium")',
    "B.cudnn.allow_tf32 = False",
    "B.cuda.matmul.allow_tf32 = True",
    'B.fp32_precision = "tf32"',
    'B.fp32_precision = "ieee"',
    'B.cudnn.fp32_precision = "tf32"',
    'B.cuda.matmul.fp32_precision = "tf32"',
    'B.cudnn.conv.fp32_precision = "ieee"',
    'B.cudnn.conv.fp32_precision = "ieee"; B.cuda.matmul.fp32_precision = "tf32"; B.cudnn.allow_tf32 = False',
    'B.mkldnn.matmul.fp32_precision = "bf16"',
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_hold_inside_and_are_put_back(setting: str) -> None:
    """In a process of its own, beside one that only looks: later settings of what is inherited from act the same."""
    found = []
    for look in ("False", "True"):
        command = [sys.executable, "-c", SCRIPT.replace("SETTING", setting).replace("LOOK", look)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(done.stdout)
    assert found[0] == found[1]
    assert found[0].count("matmul") >= 12
