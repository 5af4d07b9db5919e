"""Costs of linearised networks: ratios of the clock's readings, and on a GPU of its allocator's."""

from pathlib import Path

import pytest
import torch
from torch import nn

from biascope.studies import Run, configure, execute
from biascope_papers.editing import costs


def test_ratios_are_of_rounds_and_the_first_round_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    def measured(net: nn.Module, x: torch.Tensor, learn: bool) -> tuple[float, float]:
        taken.append(learn)
        cold = 100.0 if len(taken) <= 4 else 1.0  # a round: plain and linearised, outputs and gradients
        return cold * (1.0, 2.5, 4.0, 7.0)[(len(taken) - 1) % 4], 0.0

    monkeypatch.setattr(costs, "measured", measured)
    numbers = execute(Run.create(tmp_path / "r", configure("editing/costs", "smoke"))).numbers
    assert taken == [False, False, True, True] * 4
    assert [each.value for each in numbers.values()] == [2.5, 1.75]
    assert all(each.n == 3 for each in numbers.values())


@pytest.mark.gpu
def test_what_is_kept_is_what_the_backward_pass_needs() -> None:
    net, x = nn.Sequential(nn.Linear(256, 256), nn.Tanh()).cuda(), torch.ones(1024, 256, device="cuda")
    _, held = costs.measured(net, x, True)
    assert held == 1024 * 256 * 4  # tanh keeps its output; the linear layer keeps x, which was there before
