"""Which commit a run was made from, in a checkout and in a copy without git."""

import subprocess
from pathlib import Path

import pytest

from biascope.studies.environment import git_state
from biascope.support.errors import CorruptError


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    home = tmp_path / "checkout"
    (home / "src" / "package").mkdir(parents=True)
    (home / "src" / "package" / "code.py").write_text("one = 1\n")
    (home / "notes.md").write_text("notes\n")
    git(home, "init", "-q")
    git(home, "add", ".")
    git(home, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first")
    return home


def git(home: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(home), *arguments], check=True, capture_output=True, text=True).stdout


def test_a_checkout_is_dirty_by_its_code_alone(checkout: Path) -> None:
    clean = {"commit": git(checkout, "rev-parse", "HEAD").strip(), "dirty": False}
    assert git_state(checkout / "src") == clean
    (checkout / "notes.md").write_text("other notes\n")
    assert git_state(checkout / "src") == clean
    (checkout / "src" / "package" / "new.py").write_text("")  # imported, and in no commit
    assert git_state(checkout / "src") == clean | {"dirty": True}


def test_a_copy_without_git_is_compared_with_a_list(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, commit = checkout / "tree.txt", git(checkout, "rev-parse", "HEAD")
    listed.write_text(commit + git(checkout, "ls-tree", "-r", "HEAD", "src"))
    code = checkout / "src" / "package" / "code.py"
    monkeypatch.setenv("BIASCOPE_TREE", str(listed))
    clean = {"commit": commit.strip(), "dirty": False, "from": "BIASCOPE_TREE"}
    assert git_state(checkout / "src") == clean
    code.write_text("one = 2\n")
    assert git_state(checkout / "src") == clean | {"dirty": True}
    code.write_text("one = 1\n")
    (code.parent / "new.py").write_text("")
    assert git_state(checkout / "src") == clean | {"dirty": True}
    (code.parent / "new.py").unlink()
    code.unlink()
    assert git_state(checkout / "src") == clean | {"dirty": True}
    listed.unlink()
    with pytest.raises(CorruptError, match=r"tree\.txt is missing"):
        git_state(checkout / "src")
