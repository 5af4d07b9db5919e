"""Leakage, localisation, linearity and the shape of vectors, against dense Jacobians and closed forms (E5, E6)."""

import math
import warnings

import pytest
import torch
from torch import nn

import biascope as bs
from biascope.editing import TaskVector, leakage, linearity, localisation
from biascope.support.errors import InputError
from editing.editing_nets import Gated, mlp, points, random_vector


def test_leakage_is_that_of_the_dense_jacobian() -> None:
    net = mlp()
    taus = {k: random_vector(net, s) for s, k in enumerate("abc")}
    data = {k: points(10 + s, s) for s, k in enumerate("abc")}
    found = leakage(net, taus, data, batch_size=4)
    for s, x in enumerate(data.values()):
        jac = torch.func.jacrev(lambda p, x=x: torch.func.functional_call(net, p, (x,)))(dict(net.named_parameters()))
        for t, tau in enumerate(taus.values()):
            moved = sum(jac[k].flatten(2) @ tau[k].flatten() for k in jac).detach().norm(dim=1)  # type: ignore[union-attr]
            assert float(found.values[s, t]) == pytest.approx(float(moved.mean()), rel=1e-10)
            error = float(moved.std() / math.sqrt(len(moved)))
            assert float(found.standard_errors[s, t]) == pytest.approx(error, rel=1e-10)
    lin = random_vector(net, 7).apply_to(bs.linearize(net))  # wherever it is, its Jacobian is that of the start
    torch.testing.assert_close(leakage(lin, taus, data).values, found.values)
    assert "vector of b" in found._repr_html_()
    with pytest.raises(InputError, match="the closed form is for two tasks, not 3"):
        found.xi([0.0])


def test_gated_networks_do_not_leak_and_their_eigenfunctions_are_local() -> None:
    """E4: block-diagonal kernel, E_loc 1 and 0."""
    net = Gated()
    x, z = net.data(20)
    leaks = leakage(net, dict(zip("ab", net.vectors())), {"a": x, "b": z}).values
    assert leaks[0, 1] == leaks[1, 0] == 0
    assert leaks.diagonal().min() > 0.1
    found = localisation(net, x, z, precision="float64")
    assert found.task[0] == pytest.approx(1.0, abs=1e-9)
    assert found.control[0] == pytest.approx(0.0, abs=1e-9)
    assert found.contrast == pytest.approx(1.0, abs=1e-9)


def test_energy_is_shared_between_task_and_control() -> None:
    """E6: values in [0, 1], total = rank, means that sum to 1 for equal sizes and full rank."""
    net = mlp(width=32)
    found = localisation(net, points(12, 1), points(12, 2), outputs=1, precision="float64")
    values = found.energy.values
    assert float(values.min()) >= -1e-12
    assert float(values.max()) <= 1 + 1e-12
    assert found.energy.rank == 12
    assert float(values.sum()) == pytest.approx(12, rel=1e-9)
    assert found.task[0] + found.control[0] == pytest.approx(1.0, rel=1e-9)
    assert found.task[1] == pytest.approx(float(values[:12].std() / 12**0.5))
    few = localisation(net, points(12, 1), points(12, 2), outputs=1, rank=3, precision="float64")
    assert float(few.energy.values.sum()) == pytest.approx(3, rel=1e-9)
    every = localisation(net, points(12, 1), points(12, 2), precision="float64")
    assert every.energy.values.shape == (3, 24)
    assert "<td>" in every._repr_html_()
    with pytest.raises(InputError, match="outputs='full' is not known; there is diagonal"):
        localisation(net, points(12, 1), points(12, 2), outputs="full")


def test_energy_of_a_network_counts_every_eigenfunction() -> None:
    """Singular values of a LeNet fall below 200 eps of float32, and are real: the projection by QR of J J^T."""
    images = bs.data.load("digits", "train").x
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:200]
    x = nn.functional.interpolate(images[order].float(), size=32, mode="bilinear")
    net = bs.nets.build("lenet", seed=0, outputs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = localisation(net, x[:100], x[100:], outputs=1)
    assert found.rank == 100
    assert found.task[0] + found.control[0] == pytest.approx(1.0, abs=1e-9)
    wide = bs.nets.build("lenet", seed=0, outputs=2).double()
    p = dict(wide.named_parameters())
    per_example = torch.func.vmap(
        torch.func.grad(lambda p, x: torch.func.functional_call(wide, p, (x[None],))[0, 1]), (None, 0)
    )
    J = torch.cat([g.flatten(1) for g in per_example(p, x.double()).values()], 1).detach()
    Q = torch.linalg.qr((J[:100] @ J.T).T).Q  # no cut: the whole row space
    # rounding of K, 1e-15 of its largest singular value, over the smallest
    torch.testing.assert_close(found.energy.values, Q.square().sum(1), rtol=0, atol=1e-8)
    assert "100 of 100" in found._repr_html_()


def test_energies_that_do_not_add_up_are_said() -> None:
    net, x, z = nn.Linear(4, 1, bias=False), points(6, 1), points(6, 2)
    with pytest.warns(UserWarning, match="6 task points has 4 eigenfunctions above rounding .their gradients are lin"):
        found = localisation(net, x, z, outputs=0)
    assert found.rank == 4
    assert float(found.energy.values.sum()) == pytest.approx(4, rel=1e-12)
    assert "4 of 6" in found._repr_html_()
    steep = 10.0 ** -torch.arange(0.0, 8.0)[:, None] * torch.eye(8)
    with pytest.warns(UserWarning, match="the bound on the rounding of float32"):
        assert localisation(nn.Linear(8, 1, bias=False), steep, steep, outputs=0, precision="float32").rank == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert localisation(nn.Linear(8, 1, bias=False), steep, steep, outputs=0).rank == 8
        assert localisation(net, x, z, outputs=0, rank=3, precision="bf16").rank == 3
    with pytest.raises(InputError, match="precision='bf16': its rounding would count"):
        localisation(net, x, z, precision="bf16")


@pytest.mark.parametrize(("rho", "task", "control"), [(0.0, 0.96, 0.04), (0.3, 0.89, 0.11), (0.9, 0.55, 0.45)])
def test_correlated_features_are_less_local(rho: float, task: float, control: float) -> None:
    """E6: the numbers of the specification, m = 5,000 features of 200 points."""
    x, fresh = points(200, 1, 5000), points(200, 2, 5000)
    z = rho * x + math.sqrt(1 - rho**2) * fresh
    found = localisation(nn.Linear(5000, 1, bias=False).double(), x, z)
    assert found.task[0] == pytest.approx(task, abs=0.011)
    assert found.control[0] == pytest.approx(control, abs=0.011)


def test_linearity_of_a_move() -> None:
    net, x = mlp(), points(50, 3)
    tau = random_vector(net, 1)
    found = linearity(net, tau, x)
    assert found.residual == pytest.approx(bs.tangent.taylor_residual(net, tau.apply_to(net), x), rel=1e-9)
    straight = bs.tangent.posthoc(net, tau.apply_to(net))(x)
    same = float((straight.argmax(1) == tau.apply_to(net)(x).argmax(1)).double().mean())
    assert found.agreement[0] == pytest.approx(same)
    assert same < 1
    assert "agreement" in found._repr_html_()
    # smooth activations: the residual is of first order in the size of the move
    small = [linearity(net, s * tau, x).residual for s in (1e-3, 1e-4)]
    assert small[0] / small[1] == pytest.approx(10, rel=0.02)
    assert math.isnan(linearity(net, 0 * tau, x).residual)


def test_shapes_of_vectors() -> None:
    net = mlp()
    taus = {k: random_vector(net, s) for s, k in enumerate("abc")}
    assert taus["a"].cosine(taus["a"]) == pytest.approx(1)
    assert taus["a"].cosine(taus["b"]) == taus["b"].cosine(taus["a"])
    flat = TaskVector.from_tensors({"w": torch.ones(4, 5), "b": torch.full((10,), -1.0)})
    assert flat.sparsity(0.9) == pytest.approx(0.9)
    assert flat.sparsity(1.0) == 1.0
    assert TaskVector.from_tensors({"w": torch.eye(10)[0]}).sparsity() == 0.1
    assert math.isnan((0 * flat).sparsity())
    u, v = points(6, 1, 1), points(5, 2, 1)
    known = TaskVector.from_tensors({"one": u @ v.T, "all": torch.eye(4), "conv": torch.ones(3, 2, 2)})
    assert known.effective_ranks() == pytest.approx({"one": 1.0, "all": 4.0, "conv": 1.0})
    s = torch.linalg.svdvals(taus["a"]["0.weight"])
    assert taus["a"].effective_ranks()["0.weight"] == pytest.approx(float(s.sum() ** 2 / s.square().sum()))
    assert math.isnan((0 * taus["a"]).effective_ranks()["0.weight"])
