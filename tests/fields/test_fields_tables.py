"""Results show their numbers in notebooks, and everything runs where the network is."""

import math

import pytest
import torch

from biascope import fields, nets
from biascope.support.tables import number, several
from tables_reader import Reader

R = fields.coordinates((6, 6))


def test_every_result_shows_its_numbers() -> None:
    siren = nets.build("siren", seed=0, hidden=(2, 5), w0=5.0, w_h=1.0)
    support = fields.harmonic_support(torch.tensor([3.0, 10.0]), 2, 3)
    assert {"21", "4", "40"} <= set(Reader(support._repr_html_()).cells)
    check = fields.nyquist_check(torch.tensor([1.0, 9.0]), 8.0)
    assert {"4", "0.5", "9"} <= set(Reader(check._repr_html_()).cells)
    series = fields.bessel_harmonics(siren, 4)
    assert str(len(series.s)) in Reader(series._repr_html_()).cells
    image = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))
    bound = fields.recovery_bound(image, 1.0)
    assert {number(bound.psnr), number(bound.missing)} <= set(Reader(bound._repr_html_()).cells)
    fit = fields.fit(siren, R, image, steps=2)
    assert {"2", number(fit.psnr), "nan"} <= set(Reader(fit._repr_html_()).cells)
    tone = fields.alias_test(nets.build("siren", seed=0, in_features=1, hidden=(4,)), steps=1)
    assert {"amplitude at 23", "at its alias 105", number(tone.amplitude)} <= set(Reader(tone._repr_html_()).cells)
    atoms = fields.dictionary(siren, R)
    assert {"36 of 36", "6 x 6", several(atoms.values)} <= set(Reader(atoms._repr_html_()).cells)
    energy = atoms.energy(torch.stack([image, image.T]), [0.1, 1e-3])
    cells = [number(m, s) for m, s in zip(energy.mean.tolist(), energy.standard_error.tolist())]
    assert {"Energy of 2 signals", *cells} <= set(Reader(energy._repr_html_()).cells)
    learned = fields.meta_learn(siren, R, image[None], steps=2)
    assert {"Meta-learning (maml)", number(float(learned.losses[-1]))} <= set(Reader(learned._repr_html_()).cells)
    change = fields.dictionary_change(atoms, fields.dictionary(learned.model, R), torch.stack([image, image.T]), k=3)
    assert {number(*change.gain), number(change.overlap)} <= set(Reader(change._repr_html_()).cells)


@pytest.mark.gpu
def test_a_gpu_gives_the_same() -> None:
    net = nets.build("siren", seed=0, hidden=(16, 16))
    images = torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(0))
    there = nets.build("siren", seed=0, hidden=(16, 16)).cuda()
    one, two = (fields.fit(m, R, images[0], steps=5, lr=1e-3, fitted=images[0] > 0.3) for m in (net, there))
    torch.testing.assert_close(one.losses, two.losses, rtol=1e-3, atol=1e-5)
    assert next(two.model.parameters()).is_cuda
    a, b = (fields.dictionary(m, R.to(next(m.parameters()).device)) for m in (net, there))
    torch.testing.assert_close(a.values, b.values)
    torch.testing.assert_close(a.energy(images).shares, b.energy(images.cuda()).shares, rtol=1e-5, atol=1e-6)
    c, d = (fields.meta_learn(m, R, images, steps=3) for m in (net, there))
    torch.testing.assert_close(c.losses, d.losses, rtol=1e-3, atol=1e-5)
    s, t = (fields.harmonics(nets.SIREN(hidden=(2, 3)).to(m), 3) for m in ("cpu", "cuda"))
    assert s.s.device == t.s.device
    assert math.isfinite(t.residual)
    bounds = [fields.recovery_bound(x, 1.0).psnr for x in (images[0], images[0].cuda())]
    assert bounds[0] == pytest.approx(bounds[1])
