"""mars.ipynb runs from top to bottom, and is committed as a run leaves it."""

import nbformat
from common import ROOT
from nbclient import NotebookClient

PATH = ROOT / "mars.ipynb"


def test_every_cell_runs():
    """Without a warning, which would be on stderr."""
    notebook = nbformat.read(PATH, as_version=4)
    place = {"metadata": {"path": ROOT}}
    NotebookClient(notebook, startup_timeout=300, resources=place).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", output


def test_its_outputs_are_committed():
    """They are small, and do not name a folder of the machine that made them."""
    cells = [cell for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert PATH.stat().st_size < 350_000
    assert str(ROOT) not in PATH.read_text() and "site-packages" not in PATH.read_text()
