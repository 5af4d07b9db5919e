"""The atlas: distances, the plane, files, and the networks that come with it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from biascope.atlas import Atlas, Fingerprint, fingerprint
from biascope.atlas.build import Entry, build, entries
from biascope.atlas.distances import ASPECTS, apart, between, distances, distances_to, noise, place, plane
from biascope.atlas.kept import PACKAGED
from biascope.atlas.page import COLUMNS, atlas_page, row_of
from biascope.support.errors import CorruptError, InputError


@pytest.fixture(scope="module")
def three() -> list[Fingerprint]:
    small = [("logreg", (1, 8, 8), {}), ("mlp", (1, 8, 8), {"hidden": (32, 32)}), ("siren", (2,), {"hidden": (32, 32)})]
    return [fingerprint(name, shape, options=options) for name, shape, options in small]


def test_points_of_a_plane_are_found_again() -> None:
    points = np.random.default_rng(0).normal(size=(12, 2))
    D = apart(points, points)
    found, stress = plane(D)
    assert stress < 1e-10
    assert apart(found, found) == pytest.approx(D, abs=1e-4)
    new = np.array([0.3, -0.4])
    spot = place(found, apart(new[None], points)[0])
    assert apart(spot[None], found)[0] == pytest.approx(apart(new[None], points)[0], abs=1e-2)


def test_distances_are_symmetric_and_zero_to_oneself(three: list[Fingerprint]) -> None:
    known = distances(three)
    assert known.total == pytest.approx(known.total.T)
    assert np.diagonal(known.total) == pytest.approx(0)
    assert np.isnan(known.aspects["directions"][0, 2])  # an image and coordinates
    assert np.isfinite(known.total).all()
    assert distances_to(three, three[1]) == pytest.approx(known.total[1])


def test_noise_is_the_difference_of_whole_measurements(three: list[Fingerprint]) -> None:
    # two fingerprints of other seeds differ by about the noise that each estimates from its halves
    a, b = (fingerprint("mlp", (1, 8, 8), seed=seed, options={"hidden": (32, 32)}) for seed in (1, 2))
    for aspect in ASPECTS:
        estimate = (noise(a, aspect) + noise(b, aspect)) / 2
        assert estimate / 4 < between(a, b, aspect) < 4 * estimate, aspect


def test_files(three: list[Fingerprint], tmp_path: Path) -> None:
    Atlas(tuple(three)).save(tmp_path / "a.safetensors")
    back = Atlas.load(tmp_path / "a.safetensors")
    assert [one.name for one in back.fingerprints] == ["logreg", "mlp", "siren"]
    assert all(torch.equal(a.learning, b.learning) for a, b in zip(three, back.fingerprints))
    assert back["mlp"].input_shape == (1, 8, 8)
    with pytest.raises(InputError, match="did you mean mlp"):
        back["mpl"]
    (tmp_path / "a.safetensors").write_bytes(b"nothing")
    with pytest.raises(CorruptError):
        Atlas.load(tmp_path / "a.safetensors")


def test_a_build_goes_on_where_it_was(tmp_path: Path) -> None:
    todo = [
        Entry("small", "logreg", "dense", "image", (1, 4, 4)),
        Entry("wrong", "lenet", "convolutional", "image", (3,)),
        Entry("line", "logreg", "dense", "tabular", (5,)),
    ]
    lines: list[str] = []
    made, left_out = build(tmp_path, todo, report=lines.append)
    assert [one.name for one in made.fingerprints] == ["small", "line"]
    assert list(left_out) == ["wrong"]
    assert len(lines) == 3
    lines.clear()
    again, _ = build(tmp_path, todo, report=lines.append)
    assert len(lines) == 1  # only what was left out is tried again
    assert torch.equal(again.fingerprints[0].kernel, made.fingerprints[0].kernel)


def test_the_atlas_that_comes_along_holds_what_its_list_names() -> None:
    atlas = Atlas.load()
    names = [one.name for one in atlas.fingerprints]
    assert len(names) == len(set(names)) >= 40
    assert set(names) <= {entry.name for entry in entries()}
    assert {one.kind for one in atlas.fingerprints} == {"image", "signal", "tabular", "coordinates", "tokens"}
    assert PACKAGED.stat().st_size < 2_000_000
    typical = np.median([noise(one, "kernel") for one in atlas.fingerprints])
    assert typical < 0.2 * distances(atlas.fingerprints).scale["kernel"]


def test_a_network_measured_again_lies_where_it_was() -> None:
    atlas = Atlas.load()
    found = replace(fingerprint("lenet", (3, 32, 32), seed=5), name="mine")
    (name, distance), *_ = atlas.nearest(found, 3)
    assert name == "lenet"
    assert distance < 0.2


def test_the_page_has_every_network_and_a_place_for_a_new_one(three: list[Fingerprint]) -> None:
    text = atlas_page(three)
    assert all(f">{one.name}</td>" in text for one in three)
    assert ">yours<" not in atlas_page([replace(one, about={"family": "dense"}) for one in three])
    placed = atlas_page(three, replace(three[1], name="<mine>"))
    assert "&lt;mine&gt;, the large ring, is yours" in placed
    assert "<mine>" not in placed
    assert len(row_of(three[0])) == len(COLUMNS)
