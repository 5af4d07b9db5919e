"""The trainings per direction: exact data, steps to a loss, resuming, and the same numbers as a plain ensemble."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from biascope.data import directional
from biascope.ensembles import train_ensemble
from biascope.studies import Run
from biascope.support.errors import InputError
from biascope.support.seeds import derive
from biascope_papers.nad.directional import (
    DirectionalTasks,
    Protocol,
    architecture,
    resolve_precision,
    train_directions,
)
from biascope_papers.nad.speed import steps_to_loss


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    v = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return v / v.flatten(1).norm(dim=1).view(-1, 1, 1)


@pytest.mark.parametrize(("gap", "offset"), [("half", 1.0), ("full", 2.0)])
def test_inputs_carry_the_label_along_v_exactly(gap: str, offset: float) -> None:
    v = unit(3, 8, 8)
    tasks = DirectionalTasks(5.0 * v, 1000, Protocol(eps=2.0, sigma=3.0, gap=gap), (7, "train"))  # type: ignore[arg-type]
    x, y = tasks[1]
    assert x.shape == (1000, 1, 8, 8)
    assert y.sum() == 500
    along = x.flatten(1).double() @ v[1].flatten().double()
    assert torch.allclose(along, offset * (2 * y - 1).double(), atol=1e-5)


def test_noise_has_the_covariance_of_the_paper() -> None:
    v, sigma, n = unit(1, 3, 3), 3.0, 200_000
    x, _ = DirectionalTasks(v, n, Protocol(eps=0.0, sigma=sigma), (0, "c"))[0]
    w, u = x.flatten(1).double(), v.flatten().double()
    expected = sigma**2 * (torch.eye(9, dtype=torch.float64) - torch.outer(u, u))
    assert (w.T @ w / n - expected).abs().max() < 5 * sigma**2 * (2 / n) ** 0.5
    library = directional(v[0].double(), n, eps=0.0, sigma=sigma, seed=1).x.flatten(1)  # the library's own generator
    assert (library.T @ library / n - expected).abs().max() < 5 * sigma**2 * (2 / n) ** 0.5


def test_draws_depend_on_seed_and_place_alone() -> None:
    v, protocol = unit(4, 4, 4), Protocol()
    one, two = (DirectionalTasks(v, 20, protocol, (3, name)) for name in ("train", "test"))
    assert torch.equal(one[2][0], one[2][0])
    assert not torch.equal(one[2][0], one[3][0])
    assert not torch.equal(one[2][0], two[2][0])
    assert len(one) == 4
    with pytest.raises(InputError, match=r"\[k, side, side\]"):
        DirectionalTasks(v[0], 20, protocol, (3,))


def test_steps_to_loss() -> None:
    losses = np.ones((3, 30))
    losses[0, 10:] = 0.0  # the mean of ten falls below 0.45 with the sixth zero
    losses[1, :] = 0.0
    assert steps_to_loss(losses, 0.45).tolist() == [16.0, 10.0, 30.0]


def test_architecture() -> None:
    x = torch.zeros(2, 3, 16, 16)
    assert architecture("densenet121", 16, 3, 10, width=2)()(x).shape == (2, 10)
    assert architecture("mlp", 16, 3, 2, width=8)()(x).shape == (2, 2)
    thin, wide = (sum(p.numel() for p in architecture("resnet18", 16, width=w)().parameters()) for w in (2, 4))
    assert thin < wide
    with pytest.raises(InputError, match="width"):
        architecture("logreg", 16, width=4)


OWN = """
from torch import nn
def net(outputs=2): return nn.Sequential(nn.Flatten(), nn.Linear(16, outputs))
def one(): return net(1)
def images(): return nn.Sequential(nn.Flatten(), nn.Linear(48, 10))
def wrong():
    size = 25
    raise ValueError("no checkpoint")
def leaves(): raise SystemExit(3)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN)
    return f"{tmp_path / 'mine.py'}"


def test_an_own_network_is_tried_out(mine: str) -> None:
    state = torch.get_rng_state()
    factory = architecture(f"{mine}:net", 4)
    assert torch.equal(state, torch.get_rng_state())
    assert factory()(torch.zeros(3, 1, 4, 4)).shape == (3, 2)
    assert architecture(f"{mine}:images", 4, channels=3, outputs=10)()(torch.zeros(3, 3, 4, 4)).shape == (3, 10)
    assert architecture(f"{mine}:one", 4, outputs=1)()(torch.zeros(3, 1, 4, 4)).shape == (3, 1)
    with pytest.raises(InputError, match=r"mine\.py:one gives 1 output; this study needs 2 logits"):
        architecture(f"{mine}:one", 4)
    with pytest.raises(InputError, match=r"mine\.py:net gives 2 outputs; this study needs 10 logits"):
        architecture(f"{mine}:net", 4, outputs=10)
    with pytest.raises(InputError, match=r"cannot take inputs \[n, 1, 8, 8\]"):
        architecture(f"{mine}:net", 8)


def test_width_is_not_for_own_networks(mine: str) -> None:
    with pytest.raises(InputError, match=r"width = 16 is for networks of the registry, and .*mine\.py:net would not"):
        architecture(f"{mine}:net", 4, width=16)


def test_errors_of_an_own_factory_name_its_line(mine: str) -> None:
    with pytest.raises(InputError, match=r"no checkpoint \(line 8 of mine\.py: raise ValueError"):
        architecture(f"{mine}:wrong", 4)
    with pytest.raises(InputError, match=r"mine\.py:leaves ended the program \(exit 3\)"):
        architecture(f"{mine}:leaves", 4)


def test_precision() -> None:
    assert resolve_precision("bf16", "cpu", False) == "float32"
    assert resolve_precision("auto", "cuda", True) == "tf32"
    assert resolve_precision("auto", "cuda", False) == "bf16"
    assert resolve_precision("float32", "cuda", False) == "float32"


def test_training_is_the_ensembles_and_resumes(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {"study": "nad/fig1", "seed": 5})
    protocol = Protocol(n=64, n_test=40, sigma=0.2, eps=4.0, epochs=3, chunk=2)
    v, factory = unit(3, 4, 4), architecture("logreg", 4)
    found = train_directions(run, "a", factory, v, protocol, keep_losses=True)
    assert found.test.shape == found.train.shape == (3,)
    assert found.losses.shape == (3, 3)

    seed = derive(5, "a", 2)  # the second piece holds direction 2 alone
    tasks = DirectionalTasks(v[2:], 64, protocol, (seed, "train"))
    plain = train_ensemble(factory, tasks, epochs=3, seed=seed, engine="loop", keep=False)
    assert np.allclose(found.losses[2], plain.losses[0].numpy(), atol=1e-6)

    (run.path / "arrays" / "a 2.safetensors").unlink()
    again = train_directions(run, "a", factory, v, protocol, keep_losses=True)
    assert np.array_equal(again.test, found.test)
    assert np.array_equal(again.losses, found.losses)
    first = (run.path / "arrays" / "a 0.safetensors").stat().st_mtime_ns
    train_directions(run, "a", factory, v, protocol)
    assert (run.path / "arrays" / "a 0.safetensors").stat().st_mtime_ns == first  # not trained again


def test_pieces_of_another_length_are_read_as_they_are(tmp_path: Path) -> None:
    """A run made with one chunk per 256 directions is judged where chunks have 8: nothing is trained again."""
    run = Run.create(tmp_path / "run", {"study": "nad/fig1", "seed": 5})
    protocol, v, factory = Protocol(n=8, n_test=8, epochs=1, chunk=3), unit(5, 4, 4), architecture("logreg", 4)
    found = train_directions(run, "a", factory, v, protocol)
    assert run.arrays() == ["a 0", "a 3"]
    again = train_directions(run, "a", factory, v, replace(protocol, chunk=1))
    assert np.array_equal(again.test, found.test)
    assert run.arrays() == ["a 0", "a 3"]


def test_logistic_regression_learns_every_direction(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {"study": "nad/fig1", "seed": 0})
    protocol = Protocol(n=1000, n_test=500, sigma=1.0, eps=4.0, epochs=10)
    found = train_directions(run, "logreg", architecture("logreg", 8), unit(4, 8, 8, seed=3), protocol)
    assert found.test.min() > 0.99
    nothing = train_directions(
        run, "nothing", architecture("logreg", 8), unit(4, 8, 8, seed=3), Protocol(1000, 500, 1.0, eps=0.0, epochs=2)
    )
    assert abs(nothing.test.mean() - 0.5) < 0.05  # no signal: chance


@pytest.mark.gpu
@pytest.mark.parametrize("net", ["lenet", "resnet18"])
def test_training_on_a_gpu(net: str, tmp_path: Path) -> None:
    """Data made there carry the label exactly; the first Fourier direction is learnt, by graph or by vmap."""
    run = Run.create(tmp_path / "run", {"study": "nad/fig1", "seed": 0, "device": "cuda"})
    protocol = Protocol(n=2000, n_test=1000, sigma=1.0, eps=8.0, epochs=10, chunk=4)
    v = torch.ones(1, 16, 16) / 16
    x, y = DirectionalTasks(v, 100, protocol, (0, "train"), "cuda")[0]
    assert x.device.type == "cuda"
    assert torch.allclose(x.sum((1, 2, 3)) / 16, 8.0 * (2 * y - 1), atol=1e-4)
    width = 8 if net == "resnet18" else 0
    found = train_directions(run, net, architecture(net, 16, width=width), v.expand(4, 16, 16), protocol)
    assert found.test.min() > 0.95
