"""The deep linear pooling model against dense matrices, its printed gradients, and its mean Hessian."""

import math

import numpy as np
import pytest
import torch
from torch.func import functional_call, hessian

from biascope import nets
from biascope.nets.linear_pooling import box_prefilter

D, S = 24, 4
M = D // S


@pytest.fixture
def net():
    return nets.build("linear-pooling", seed=0, in_features=D, stride=S, s_theta=0.7, s_phi=1.3).double()


@pytest.fixture
def x():
    return torch.randn(5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def dense_a():
    a = torch.zeros(M, D, dtype=torch.float64)
    for t in range(M):
        for k in range(S):
            a[t, k * M + t] = 1 / math.sqrt(S)
    return a


def test_forward_is_the_dense_formula(net, x):
    torch.testing.assert_close(net.pooling_matrix(), dense_a())
    diagonal = torch.diag(net.prefilter) @ torch.diag(net.phi)
    torch.testing.assert_close(net(x), (x @ diagonal.T @ dense_a().T @ net.theta)[:, None])


def test_gradients_have_the_stated_forms(net, x):
    a, m = dense_a(), net.prefilter
    for row in x:
        row = row.clone().requires_grad_()
        g_theta, g_phi, g_x = torch.autograd.grad(net(row[None]).sum(), (net.theta, net.phi, row))
        torch.testing.assert_close(g_theta, a @ (net.phi * m * row))
        torch.testing.assert_close(g_phi, (a.T @ net.theta) * m * row)
        torch.testing.assert_close(g_x, (a.T @ net.theta) * net.phi * m)
        torch.testing.assert_close(g_x, net.input_gradient())


@pytest.mark.parametrize(("d", "s"), [(24, 4), (128, 4), (16, 2), (6, 6), (5, 1)])
def test_box_prefilter_is_the_dft_of_the_box(d, s):
    box = np.zeros(d)
    box[:s] = 1 / s
    m = box_prefilter(d, s).double()
    np.testing.assert_allclose(m.numpy(), np.abs(np.fft.fft(box)), atol=1e-6)
    torch.testing.assert_close(m.reshape(s, -1).pow(2).sum(0), torch.ones(d // s, dtype=m.dtype), atol=1e-6, rtol=0)
    assert not m[d // s :: d // s].any()  # exactly zero


def test_it_is_pooling_seen_in_frequency():
    """With theta and phi out of the way, A (m^ x^) is the unitary DFT of the filtered and decimated signal."""
    signal = np.random.default_rng(0).normal(size=D)
    box = np.zeros(D)
    box[:S] = 1 / S
    filtered = np.fft.ifft(np.fft.fft(signal) * np.fft.fft(box)).real
    pooled = np.fft.fft(filtered[::S]) / math.sqrt(M)
    spectral = dense_a().numpy() @ (np.fft.fft(box) * np.fft.fft(signal) / math.sqrt(D))
    np.testing.assert_allclose(spectral, pooled, atol=1e-12)


def test_mean_hessian_has_the_corrected_scale():
    """E Hess_phi = (2 s_theta^2 / S) (eps^2 m_l^2 e_l e_l^T + sigma^2 diag(m^2)): with 1/S, unlike the printed form."""
    eps, sigma, s_theta, label = 1.0, 0.5, 0.7, 3
    total, draws = torch.zeros(D, D, dtype=torch.float64), 400
    generator = torch.Generator().manual_seed(0)
    for seed in range(draws):
        net = nets.build("linear-pooling", seed=seed, in_features=D, stride=S, s_theta=s_theta).double()
        y = torch.sign(torch.randn(50, 1, generator=generator, dtype=torch.float64))
        x = sigma * torch.randn(50, D, generator=generator, dtype=torch.float64)
        x[:, label] += eps * y[:, 0]

        def loss(phi, net=net, x=x, y=y):
            return (y - functional_call(net, {"phi": phi}, (x,))).pow(2).mean()

        total += hessian(loss)(net.phi.detach()).detach() / draws
    m2 = box_prefilter(D, S).double() ** 2
    expected = 2 * s_theta**2 / S * sigma**2 * torch.diag(m2)
    expected[label, label] += 2 * s_theta**2 / S * eps**2 * m2[label]
    torch.testing.assert_close(total, expected, atol=0.15 * expected.max().item(), rtol=0)
    assert total.trace() == pytest.approx(expected.trace().item(), rel=0.1)


@pytest.mark.parametrize(("size", "stride"), [(9, 2), (10, 4), (12, 5), (7, 7), (5, 1), (12, 8)])
def test_the_box_filter_has_the_magnitudes_of_its_dft_where_the_stride_does_not_divide(size, stride):
    box = torch.zeros(size, dtype=torch.float64)
    box[:stride] = 1 / stride
    expected = torch.fft.fft(box).abs()
    found = box_prefilter(size, stride)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-7)  # float32
    assert found[expected < 1e-12].abs().sum() == 0
