"""Slips of the hand in calls of public functions: each is refused by name, none gives a number."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from biascope import data, fields, geometry, information, nets, spectral
from biascope.ensembles import SGD, Networks, accuracy, outputs, scalar_of, train_ensemble
from biascope.errors import InputError

NAN = float("nan")
E = torch.eye(6)
LABELS = torch.tensor([0, 1, 0, 1])
IMAGES = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
TOY = data.Dataset(torch.zeros(10, 1, 2, 2), torch.arange(10), "toy")
TWO = Networks(nn.Linear(2, 2, bias=False), {"weight": torch.ones(3, 2, 2)}, {})
ONES = torch.ones(3)
Call = Callable[[], object]

NUMBERS: list[tuple[Call, str]] = [  # gave NaN, or silently another number
    (lambda: data.circles(E[0], E[1], 4, radii=(NAN, 1.0)), "radii must be two different numbers"),
    (lambda: data.circles(E[0], E[1], 4, sigma=-1.0), "sigma=-1.0: a finite number from 0 on"),
    (lambda: data.simplicity_contest(*E[:3], 4, sigma=NAN), "sigma=nan"),
    (lambda: data.directional(E[0], 4, eps=math.inf), "eps=inf"),
    (lambda: data.directional(E[0], 4, sigma=NAN), "sigma=nan"),
    (lambda: data.isotropic(E[0], 4, sigma=-1.0), "sigma=-1.0"),
    (lambda: data.noisy_function(4, sigma=math.inf), "sigma=inf"),
    (lambda: data.noisy_function(4, dim=0), "dim must be at least 1"),
    (lambda: data.sinusoid_classes(3, threshold=NAN), "threshold=nan"),
    (lambda: data.sinusoids([1], phases=[NAN]), "must be finite"),
    (lambda: data.poison(IMAGES.expand(4, 3, 4, 4), LABELS, torch.eye(16), eps=NAN), "eps=nan"),
    (lambda: data.normalise(TOY, (0.5,), (0.0,)), r"std \[0\.0\] above 0"),
    (lambda: data.balanced_cells(LABELS, LABELS, per_cell=-1), "per_cell must be at least 1, not -1"),
    (lambda: data.cifar2(TOY, per_class=-1), "per_class must be at least 1"),
    (lambda: data.carriers(4, n_channels=-1), "n_channels must be at least 1"),
    (lambda: data.spurious(IMAGES, LABELS, patch=-1), "patch=-1 must be between 1"),
    (lambda: data.disk(0), "n must be at least 1, not 0"),
    (lambda: geometry.generalised_directions(E, E, k=-1), "k must be between 1 and 6, not -1"),
    (lambda: geometry.average_geometry(lambda: nn.Linear(3, 1), (3,), 10).eigh(0), "k must be at least 1"),
    (lambda: geometry.learning_bound(ONES, ONES, alpha=NAN), "alpha=nan"),
    (lambda: geometry.markov_bound(E[0], E, eta=NAN), "eta=nan"),
    (lambda: geometry.average_geometry(lambda: nn.Linear(3, 1), (3,), 10, probe_std=NAN), "probe_std=nan"),
    (lambda: information.local_information(E, E, algorithm=3), "algorithm=3"),
    (lambda: information.local_information(E, E, k=1000), "k=1000, n=6"),
    (lambda: information.sample_size(10, NAN, 0.9, 1.0, 1.0, 1.0), "must be finite"),
    (lambda: information.JointCritic(1, 1, depth=-1), "depth must be at least 0"),
    (lambda: fields.psnr(ONES, 2 * ONES, peak=-1.0), "peak=-1.0: a finite number above 0"),
    (lambda: fields.recovery_bound(torch.rand(4, 4), 1.0, dims=0), "dims must be at least 1"),
    (lambda: fields.missing_bins(torch.ones(1), 2, 2, n=8, extent=-1.0), "extent=-1.0"),
    (lambda: fields.nyquist_check(torch.ones(1), math.inf), "rate=inf"),
    (lambda: fields.single_frequency(NAN), "f0=nan"),
    (lambda: spectral.radial_spectrum(torch.rand(4, 4), extent=0.0), "extent=0.0"),
    (lambda: SGD(lr=math.inf), "lr=inf"),
    (lambda: train_ensemble(lambda: nn.Linear(2, 2), [(torch.rand(4, 2), LABELS)], group=-1), "group must be at least"),
    (lambda: nets.SIREN(w_h=0.0), "w_h=0.0: a finite number above 0"),
    (lambda: nets.LinearPooling(s_phi=NAN), "s_phi=nan"),
    (lambda: nets.VGG(dropout=NAN), "dropout=nan"),
    (lambda: nets.DenseNet(compression=0.0), r"compression=0.0 must lie in \(0, 1\]"),
]

TENSORS: list[tuple[Call, str]] = [
    (lambda: accuracy(TWO, torch.rand(3, 4, 2), LABELS), r"y has shape \[4\]: .* \[3, 4\], is needed"),
    (lambda: accuracy(TWO, torch.rand(3, 4, 2), torch.zeros(3, 4, 2)), r"y has shape \[3, 4, 2\]"),
    (lambda: outputs(TWO, torch.rand(0, 2)), "x is empty"),
    (lambda: TWO.module(3), "network 3 of 3: they are numbered from 0 to 2"),
    (lambda: Networks(nn.Linear(2, 2), [ONES], {}), "params must be a dict of tensors"),  # type: ignore[arg-type]
    (lambda: scalar_of(torch.ones(2, 3), lambda out: out.tolist()), "scalarise gave a list"),
    (lambda: data.Dataset(ONES, torch.tensor(1.0), "toy"), "y is a scalar"),
    (lambda: data.disk_labels(torch.rand(2, 3)), r"points of the plane \[n, 2\]"),
    (lambda: data.disk_labels(torch.tensor([[NAN, 0.0]])), "x has a NaN or infinity"),
    (lambda: data.yin_yang_labels(torch.rand(1, 2, 2)), "x has shape .* 2 dimension"),
    (lambda: data.directional(torch.arange(4), 4), r"v must be a floating|direction 0 is torch.int64"),
    (lambda: data.corrupt_labels(nn.functional.one_hot(LABELS)), "y has shape .* 1 dimension"),
    (lambda: data.corrupt_labels(LABELS + 0.5), r"classes are whole numbers, e\.g\. y\.long\(\)"),
    (lambda: data.balanced_cells(LABELS, LABELS[:3]), "a label and an attribute for each example"),
    (lambda: data.spurious(IMAGES, nn.functional.one_hot(LABELS)), "y has shape .* 1 dimension"),
    (lambda: data.underspecified(IMAGES, LABELS[:3], torch.rand(4, 4)), "x has 4 examples, y has 3"),
    (lambda: data.zero_channels(IMAGES, [3]), r"channels \[3\] are not all in x"),
    (lambda: data.channel_stats(IMAGES[:0]), r"expected images \[n, c, h, w\]"),
    (lambda: data.geometry_gaussian(E.clone().fill_diagonal_(NAN), 4), "the matrix has a NaN"),
    (lambda: data.complete_basis(torch.full((1, 2), NAN)), "not orthonormal"),
    (lambda: data.fourier_vectors((4,), torch.tensor([[0.5]]), "re"), "whole numbers"),
    (lambda: data.quadratic_task(E, torch.ones(5), "toy", torch.zeros(5)), "x has 6 rows, y 5 entries"),
    (lambda: geometry.correlation(E.to(torch.complex64), E), r"A is complex: pass A\.real"),
    (lambda: geometry.markov_bound(E[0], E[:3], 1.0), r"covariance the shape \[3, 6\]: it must be \[D, D\]"),
    (lambda: geometry.general_learning_bound(ONES * NAN, ONES, torch.square), "directional has a NaN"),
    (lambda: information.donsker_varadhan(LABELS, LABELS), r"joint is torch\.int64"),
    (lambda: information.local_information(E, E[:3]), "one row for each sample"),
    (lambda: fields.harmonic_support(torch.tensor([NAN]), 2, 2), "frequencies has a NaN"),
    (lambda: fields.frozen_siren(torch.full((2, 2), NAN), hidden=(4,)), "frequencies has a NaN"),
    (lambda: fields.mutual_coherence(torch.zeros(3, 0)), "there is no atom"),
    (lambda: spectral.spectral_norm(torch.full((2, 2), NAN)), "NaN or infinity"),
    (lambda: spectral.linear_regions_2d(nn.Linear(2, 1), (0.0,)), "two numbers each"),
    (lambda: spectral.transform_from_jumps(ONES, ONES[:2], ONES), r"\[m\], \[m\] and \[n\]"),
    (lambda: spectral.sphere_directions({}, 2, torch.Generator()), "params must be a dict of floating-point"),
    (lambda: spectral.max_latent_frequency(spectral.flower(0), torch.rand(1, 3)), "of one d"),
    (lambda: spectral.autoneb(nn.Identity(), E, E, torch.arange(1, 7)), "target goes from 1 to 6: the 6 classes"),
    (lambda: spectral.perturbation_robustness(nn.Linear(1, 1), LABELS[:, None], [1], [0.1]), r"x is torch\.int64"),
    (lambda: information.jensen_shannon(LABELS, LABELS), r"joint is torch\.int64"),
    (lambda: TOY.subset(torch.zeros(2)), "index is torch.float32: positions are whole numbers"),
    (lambda: nets.FourierFeatures(torch.ones(3)), "frequencies has shape .* 2 dimension"),
]


@pytest.mark.parametrize(("call", "words"), NUMBERS + TENSORS)
def test_slips_are_named(call: Call, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


SIZES = ("in_features", "in_channels", "outputs", "width", "patch")


@pytest.mark.parametrize(
    ("name", "option"), [(name, key) for name in nets.names() for key in SIZES if key in nets.info(name).defaults]
)
def test_sizes_of_networks_start_at_one(name: str, option: str) -> None:
    for size in (0, -1):
        with pytest.raises(InputError, match=f"{option} must be at least 1, not {size}"):
            nets.build(name, **{option: size})


def test_labels_between_classes_are_no_hits() -> None:
    sign = Networks(nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1, 1)}, {})
    x = torch.tensor([[[1.0], [-1.0]]])
    assert accuracy(sign, x, torch.tensor([[1.0, 0.0]])).item() == 1.0
    assert accuracy(sign, x, torch.tensor([[1.5, 0.5]])).item() == 0.0  # was 1: they were rounded down
