"""Slips of the hand in calls of public functions: each is refused by name, none gives a number."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from biascope import data, fields, geometry, information, nets, spectral
from biascope.data import images
from biascope.data.bases import complete_basis
from biascope.data.fourier import fourier_vectors
from biascope.ensembles import SGD, Networks, accuracy, outputs, train_ensemble
from biascope.ensembles.evaluate import scalar_of
from biascope.fields.fitting import psnr
from biascope.nets.coordinates import FourierFeatures
from biascope.nets.densenet import DenseNet
from biascope.nets.vgg import VGG
from biascope.support.errors import InputError

NAN = float("nan")
E = torch.eye(6)
LABELS = torch.tensor([0, 1, 0, 1])
IMAGES = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
TOY = data.Dataset(torch.zeros(10, 1, 2, 2), torch.arange(10), "toy")
TWO = Networks(nn.Linear(2, 2, bias=False), {"weight": torch.ones(3, 2, 2)}, {})
ONES = torch.ones(3)
MANIFOLDS = spectral.manifolds
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
    (lambda: data.sinusoids([1], phases=[NAN]), r"phases\[0\]=nan: a finite number"),
    (lambda: images.poison(IMAGES.expand(4, 3, 4, 4), LABELS, torch.eye(16), eps=NAN), "eps=nan"),
    (lambda: data.normalise(TOY, (0.5,), (0.0,)), r"std \[0\.0\]: .* std above 0"),
    (lambda: data.balanced_cells(LABELS, LABELS, per_cell=-1), "per_cell must be at least 1, not -1"),
    (lambda: data.cifar2(TOY, per_class=-1), "per_class must be at least 1"),
    (lambda: images.carriers(4, n_channels=-1), "n_channels must be at least 1"),
    (lambda: data.spurious(IMAGES, LABELS, patch=-1), "patch must be at least 1"),
    (lambda: data.disk(0), "n must be at least 1, not 0"),
    (lambda: geometry.data_directions.generalised_directions(E, E, k=-1), "k must be at least 1"),
    (lambda: geometry.average_geometry(lambda: nn.Linear(3, 1), (3,), 10).eigh(0), "k must be at least 1"),
    (lambda: geometry.dipole.learning_bound(ONES, ONES, alpha=NAN), "alpha=nan"),
    (lambda: geometry.dipole.markov_bound(E[0], E, eta=NAN), "eta=nan"),
    (lambda: geometry.average_geometry(lambda: nn.Linear(3, 1), (3,), 10, probe_std=NAN), "probe_std=nan"),
    (lambda: information.neighbours.ksg(E, E, algorithm=3), "algorithm=3"),
    (lambda: information.bounds.sample_size(10, NAN, 0.9, 1.0, 1.0, 1.0), "must be finite and positive"),
    (lambda: information.JointCritic(1, 1, depth=-1), "depth must be at least 0"),
    (lambda: psnr(ONES, 2 * ONES, peak=-1.0), "peak=-1.0: a finite number above 0"),
    (lambda: fields.recovery_bound(torch.rand(4, 4), 1.0, dims=0), "dims must be at least 1"),
    (lambda: fields.missing_bins(torch.ones(1), 2, 2, n=8, extent=-1.0), "extent=-1.0"),
    (lambda: fields.nyquist_check(torch.ones(1), math.inf), "rate=inf"),
    (lambda: fields.single_frequency(NAN), "f0=nan"),
    (lambda: spectral.radial_spectrum(torch.rand(4, 4), extent=0.0), "extent=0.0"),
    (lambda: SGD(lr=math.inf), "lr=inf"),
    (
        lambda: train_ensemble(lambda: nn.Linear(2, 2), [(torch.rand(4, 2), LABELS)], together=-1),
        "together must be at least",
    ),
    (lambda: nets.SIREN(w_h=0.0), "w_h=0.0: a finite number above 0"),
    (lambda: nets.LinearPooling(s_phi=NAN), "s_phi=nan"),
    (lambda: VGG(dropout=NAN), "dropout=nan"),
    (lambda: DenseNet(compression=0.0), "compression=0.0 leaves none"),
]

TENSORS: list[tuple[Call, str]] = [
    (lambda: accuracy(TWO, torch.rand(3, 4, 2), LABELS), r"y has shape \[4\]: .* \[3, 4\], is needed"),
    (lambda: accuracy(TWO, torch.rand(3, 4, 2), torch.zeros(3, 4, 2)), r"y has shape \[3, 4, 2\]"),
    (lambda: outputs(TWO, torch.rand(0, 2)), "x is empty"),
    (lambda: Networks(nn.Linear(2, 2), [ONES], {}), "params must be a dict of tensors"),  # type: ignore[arg-type]
    (lambda: scalar_of(torch.ones(2, 3), lambda out: out.tolist()), "scalarise gave"),
    (lambda: data.Dataset(ONES, torch.tensor(1.0), "toy"), "x has 3 examples, y has 0 examples"),
    (lambda: data.disk_labels(torch.rand(2, 3)), r"points of the plane \[n, 2\]"),
    (lambda: data.disk_labels(torch.tensor([[NAN, 0.0]])), "x has a NaN or infinity"),
    (lambda: data.yin_yang_labels(torch.rand(1, 2, 2)), "x has shape .* 2 dimension"),
    (lambda: data.directional(torch.arange(4), 4), r"v is torch\.int64"),
    (lambda: data.corrupt_labels(nn.functional.one_hot(LABELS)), "y has shape .* 1 dimension"),
    (lambda: data.corrupt_labels(LABELS + 0.5), r"labels must be whole numbers \(y\.long\(\)\)"),
    (lambda: data.balanced_cells(LABELS, E), "attribute has shape .* 1 dimension"),
    (lambda: data.spurious(IMAGES, nn.functional.one_hot(LABELS)), "y has shape .* 1 dimension"),
    (lambda: data.channel_stats(IMAGES[:0]), "x is empty"),
    (lambda: data.geometry_gaussian(E.clone().fill_diagonal_(NAN), 4), "g has a NaN"),
    (lambda: complete_basis(torch.full((1, 2), NAN)), "not orthonormal"),
    (lambda: fourier_vectors((4,), torch.tensor([[0.5]]), "re"), "whole numbers"),
    (lambda: geometry.correlation(E.to(torch.complex64), E), r"A is complex: pass A\.real"),
    (lambda: geometry.dipole.markov_bound(E[0], E[:3], 1.0), r"covariance \[3, 6\] do not fit"),
    (lambda: geometry.dipole.general_learning_bound(ONES * NAN, ONES, torch.square), "directional has a NaN"),
    (lambda: fields.harmonic_support(torch.tensor([NAN]), 2, 2), "frequencies has a NaN"),
    (lambda: fields.frozen_siren(torch.full((2, 2), NAN), hidden=(4,)), "frequencies has a NaN"),
    (lambda: spectral.spectral_norm(torch.full((2, 2), NAN)), "NaN or infinity"),
    (lambda: spectral.linear_regions_2d(nn.Linear(2, 1), (0.0,)), "2 numbers are needed"),
    (lambda: MANIFOLDS.max_latent_frequency(MANIFOLDS.flower(0), torch.rand(1, 3)), "do not fit"),
    (lambda: spectral.autoneb(nn.Identity(), E, E, torch.arange(1, 7)), "target goes from 1 to 6: the 6 classes"),
    (
        lambda: spectral.perturb.perturbation_robustness(nn.Linear(1, 1), LABELS[:, None], [1], [0.1]),
        r"x is torch\.int64",
    ),
    (lambda: FourierFeatures(torch.ones(3)), "frequencies has shape .* 2 dimension"),
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
