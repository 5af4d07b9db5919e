"""The timed pilot."""

import time

import pytest
import torch
from torch import nn

from biascope.reports.panels.pace import measure, per_example, timed, worthwhile_threads

CPU = torch.device("cpu")


def spin(seconds: float) -> None:
    """Busy for so long, by the clock of this process: other jobs do not disturb it."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_slow_thing_is_timed_once_and_a_fast_one_in_a_batch() -> None:
    sizes: list[int] = []

    def slow(n: int) -> None:
        sizes.append(n)
        spin(0.05 * n)

    assert per_example(slow, CPU, 1024) == pytest.approx(0.05, rel=0.2)
    assert sizes == [4, 4, 4]
    sizes.clear()
    per_example(sizes.append, CPU, largest=50)
    assert sizes == [4, 4, 4, 16, 16, 16, 50, 50, 50]


class Busy(nn.Module):
    """Takes a millisecond per example."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spin(0.001 * len(x))
        return self.w * x


def test_the_pace_of_a_network_is_per_example_and_leaves_it_alone() -> None:
    network = Busy()
    pace = measure(network, torch.ones(3, 1))
    assert pace.evaluate == pytest.approx(0.001, rel=0.3)
    assert 0.001 <= pace.train < 0.003
    assert 0.001 <= pace.gradient < 0.01
    assert network.w.grad is None


def test_a_network_without_parameters_has_a_pace() -> None:
    assert measure(nn.Flatten(), torch.ones(3, 2, 2)).train >= 0


def test_waiting_for_the_processor_does_not_count() -> None:
    """Where other jobs hold the cores, the wall clock is many times what the work takes."""

    def disturbed() -> None:
        spin(0.05)
        time.sleep(0.4)

    assert timed(disturbed, CPU) < 0.2


class Crowded(nn.Module):
    """Slow with several threads, as where others hold the cores."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spin(0.002 if torch.get_num_threads() > 1 else 0.0)
        return self.w * x


def test_one_thread_where_several_are_slower_and_the_setting_comes_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with worthwhile_threads(Crowded(), torch.ones(3, 1)):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with worthwhile_threads(nn.Linear(9, 9), torch.ones(3, 1)):  # does not fit: the panels will say so
            pass
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
