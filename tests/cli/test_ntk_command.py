"""`biascope ntk`: the kernel of bs.ntk in a folder, by one command or several."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import biascope as bs
from biascope.cli.app import run
from biascope.kernels import open_kernel, store

SCRIPT = """
import torch
from torch import nn

def build(width=8):
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 2))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 3), nn.Linear(3, 2)
    def forward(self, tokens, scale):
        return self.head(self.table(tokens).mean(1)) * scale[:, None]
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SCRIPT)
    np.savez("data.npz", x=torch.randn(20, 5, generator=torch.Generator().manual_seed(1)).numpy())


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 2))


def test_it_is_the_kernel_of_ntk(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.from_numpy(np.load("data.npz")["x"])
    common = ["--data", "data.npz", "--store", "k", "--seed", "4", "--precision", "float64", "--max-memory", "20KB"]
    assert run(["ntk", "mine.py:build", *common]) == 0
    assert 'open_kernel("k")' in capsys.readouterr().out
    exact = bs.ntk(net(), x, precision="float64").tensor
    torch.testing.assert_close(open_kernel("k").tensor, exact, rtol=1e-12, atol=1e-14)
    assert run(["ntk", "mine.py:build", *common, "--set", "width=9"]) == 1
    assert "holds another kernel: its parameters is" in capsys.readouterr().err
    common[3] = "sum"
    assert run(["ntk", "mine.py:build", *common, "--outputs", "sum", "--against", "data.npz", "--examples", "6"]) == 0
    exact = bs.ntk(net(), x[:6], x[:6], outputs="sum", precision="float64").tensor
    torch.testing.assert_close(open_kernel("sum").tensor, exact, rtol=1e-12, atol=1e-14)


def test_weights_and_keyword_tensors() -> None:
    data = {"tokens": torch.randint(0, 7, (6, 4)), "scale": torch.rand(6)}
    save_file(data, "words.safetensors")
    assert run(["ntk", "mine.py:Words", "--data", "words.safetensors", "--store", "w", "--outputs", "1"]) == 0
    assert open_kernel("w").tensor.shape == (6, 6)
    torch.save(net().state_dict(), "net.pt")
    options = ["--data", "data.npz", "--weights", "net.pt", "--params", "0", "--outputs", "trace"]
    assert run(["ntk", "mine.py:build", *options, "--store", "k"]) == 0
    x = torch.from_numpy(np.load("data.npz")["x"])
    torch.testing.assert_close(open_kernel("k").tensor, bs.ntk(net(), x, params="0", outputs="trace").tensor)


def test_slips_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for slip, words in (
        (["--precision", "half"], "--precision 'half' should be"),
        (["--outputs", "all"], "--outputs 'all' should be"),
        (["--max-memory", "much"], "max_memory='much'"),
        (["--data", "digit"], "did you mean digits"),
    ):
        assert run(["ntk", "mine.py:build", "--data", "data.npz", "--store", "k", *slip]) == 1
        assert words in capsys.readouterr().err
    assert not Path("k").exists()


def test_without_waiting_it_ends_when_others_have_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.Store, "_verify", lambda self: False)  # as if somebody else were about to
    assert run(["ntk", "mine.py:build", "--data", "data.npz", "--store", "k", "--no-wait"]) == 0
    assert "in the hands of other processes" in capsys.readouterr().out


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "mine.py:build", "ntk", "--data", "data.npz", "--examples", "100", "--world-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "ntk of 100 examples, 66 parameters, 2 process(es)" in out
    assert "512" in out
    for slip, words in (
        (["hessian"], "'hessian' cannot be planned"),
        (["kfac", "--outputs", "trace"], "--outputs is for ntk"),
    ):
        assert run(["plan", "mine.py:build", *slip, "--data", "data.npz"]) == 1
        assert words in capsys.readouterr().err
