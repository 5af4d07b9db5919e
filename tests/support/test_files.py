"""Tensors on disk: whole or not at all."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import biascope as bs
from biascope.support import files
from biascope.support.errors import BiascopeError, CorruptError


def test_tensors_come_back_bit_for_bit_even_when_they_share_memory(tmp_path: Path) -> None:
    base = torch.arange(6.0).view(2, 3)
    given = {"whole": base, "row": base[1], "turned": base.T, "none": torch.empty(0, 2), "int": torch.tensor([1, 2])}
    files.write_tensors(tmp_path / "deep" / "t.safetensors", given, {"about": "this"})
    back, metadata = files.read_tensors(tmp_path / "deep" / "t.safetensors")
    assert metadata == {"about": "this"}
    assert back.keys() == given.keys()
    assert all(torch.equal(back[k], given[k]) and back[k].dtype == given[k].dtype for k in given)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["t.safetensors"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.safetensors"
    files.write_tensors(path, {"a": torch.ones(3)}, {})

    def full(tensors: object, where: Path, metadata: object) -> None:
        where.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(BiascopeError, match=r"t\.safetensors: No space left on device.*intact"):
        files.write_tensors(path, {"a": torch.zeros(3)}, {})
    assert torch.equal(files.read_tensors(path)[0]["a"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_what_is_not_there_or_not_whole_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(CorruptError, match=r"t\.safetensors is missing"):
        files.read_tensors(path)
    files.write_tensors(path, {"a": torch.ones(300)}, {})
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CorruptError, match="not a whole safetensors file"):
        files.read_tensors(path)


@pytest.mark.parametrize("read", [files.read_json, files.read_lines, files.read_bytes, files.mend_tail])
def test_a_folder_and_a_forbidden_file_are_named(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.mkdir()
    with pytest.raises(CorruptError, match=r"config\.json is a folder, a file belongs there: move it away"):
        read(path)
    path.rmdir()
    path.write_text("{}\n")
    read(path)

    def forbidden(self: Path) -> bytes:  # permissions do not stop the superuser, who may run this
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(BiascopeError, match=r"cannot read .*config\.json: Permission denied\. Fix") as caught:
        read(path)
    assert not isinstance(caught.value, CorruptError)  # for which some callers say: delete it


def test_a_forbidden_file_of_tensors_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers say of a damaged one: delete it."""
    path = tmp_path / "t.safetensors"
    files.write_tensors(path, {"a": torch.ones(3)}, {})

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", forbidden)
    monkeypatch.setattr(files, "safe_open", forbidden)
    with pytest.raises(BiascopeError, match=r"cannot read .*t\.safetensors: Permission denied\. Fix") as caught:
        files.read_tensors(path)
    assert not isinstance(caught.value, CorruptError)


def test_a_kernel_is_saved_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "k.safetensors"
    K = bs.ntk(torch.nn.Linear(3, 2), torch.eye(3))
    K.save(path)

    def killed(tensors: object, where: Path, metadata: object) -> None:
        where.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        K.save(path)
    assert torch.equal(type(K).load(path).values, K.values)
    assert [p.name for p in tmp_path.iterdir()] == ["k.safetensors"]
    with pytest.raises(CorruptError, match="other is missing"):
        type(K).load(tmp_path / "other")


def test_folders_of_kernels_and_probes_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder, net, x = tmp_path / "file" / "inside", torch.nn.Linear(2, 1), torch.ones(3, 2)
    for slip in (
        lambda: bs.ntk(net, x, outputs="trace", store=folder),
        lambda: bs.Probe(net, x, None, ["ntk_alignment"], out=folder),
    ):
        with pytest.raises(BiascopeError, match=r"cannot write .*inside: Not a directory"):
            slip()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_an_array_takes_its_place_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A disk that fills up meanwhile is an error and leaves no file; one that cannot promise the place is used."""
    file = tmp_path / "a.npy"
    files.make_array(file, "float32", (3, 1000))
    assert file.stat().st_blocks * 512 >= 12000
    file.unlink()

    def refuse(handle: int, start: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.posix_fallocate", refuse)
    if code == errno.ENOSPC:
        with pytest.raises(OSError, match="No space left"):
            files.make_array(file, "float32", (3, 1000))
        assert not file.exists()
    else:
        files.make_array(file, "float32", (3, 1000))
        assert np.load(file).shape == (3, 1000)
