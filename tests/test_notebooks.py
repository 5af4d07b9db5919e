"""Every notebook runs from a clean kernel, as on Colab; their assertions hold."""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_eight_and_the_page_lists_them() -> None:
    page = (FOLDER.parent / "docs" / "howto" / "notebooks.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 8
    assert [each.name for each in NOTEBOOKS if each.name not in page] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_sets_itself_up_on_colab_and_holds_no_output(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the dev extra")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert '"google.colab" in sys.modules' in code[0].source
    assert any("assert " in cell.source for cell in code)
    assert not any(cell.outputs for cell in code)  # they would be out of date at the next change


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_runs_from_a_clean_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel", reason="needs the dev extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the dev extra")
    nbformat = pytest.importorskip("nbformat")
    if path.stem == "8-language-model":
        pytest.importorskip("transformers")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
