"""Saving, loading, and refusing what is not a metric."""

import pytest
import torch

import biascope as bs
from biascope.support.errors import CorruptError
from curvature.curvature_zoo import case, relative


@pytest.mark.parametrize("name", ["mlp", "norms", "words", "conv2d"])
@pytest.mark.parametrize("representation", ["dense", "diagonal", "block", "quasidiagonal", "kfac", "ekfac", "lowrank"])
def test_round_trip(tmp_path, name, representation):
    F = bs.fisher(*case(name), representation, sua=name == "conv2d")
    G = bs.load_curvature(F.save(tmp_path / "sub" / "metric.safetensors"))
    assert torch.equal(F.to_dense(), G.to_dense())
    assert (repr(F), str(F.plan), F.info) == (repr(G), str(G.plan), G.info)
    v = torch.ones(F.shape[0], dtype=torch.float64)
    assert relative(F.solve(v, damping=0.2), G.solve(v, damping=0.2)) < 1e-12
    assert not list((tmp_path / "sub").glob("*.part"))


def test_damaged_files_are_refused_by_name(tmp_path):
    path = bs.fisher(*case("mlp"), "ekfac").save(tmp_path / "f.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptError, match=r"f.safetensors is not a whole"):
        bs.load_curvature(path)
    flipped = bytearray(whole)
    flipped[-5] ^= 0xFF
    path.write_bytes(flipped)
    with pytest.raises(CorruptError, match=r"f.safetensors.*checksum"):
        bs.load_curvature(path)
    path.write_bytes(whole.replace(b'\\"kind\\":', b'\\"kinX\\":'))
    with pytest.raises(CorruptError, match="damaged"):
        bs.load_curvature(path)
    path.write_bytes(whole.replace(b'\\"format\\": 1', b'\\"format\\": 9'))
    with pytest.raises(CorruptError, match="format 9"):
        bs.load_curvature(path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(CorruptError, match="not a metric saved by biascope"):
        bs.load_curvature(path)
    with pytest.raises(CorruptError, match="nothing is missing"):
        bs.load_curvature(tmp_path / "nothing")
