"""Shared by all tests: no test may disturb another through threads, seeds or global torch settings."""

from collections.abc import Iterator

import pytest
import torch

from biascope.studies import environment
from ranks import Ranks

collect_ignore_glob = ["conftest.py", "*/conftest.py"]  # several share a name; they hold no fences


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    # runs of tests can be kept whatever the state of the checkout that they are tested in
    monkeypatch.setattr(environment, "git_state", lambda: {"commit": "0" * 40, "dirty": False})
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
