"""Every bundle runs in an empty folder, without the repository and the network, and bad surroundings get a sentence.

Here a few run, with the libraries of this environment. With BUNDLE_PYTHON, another Python with libraries of its own,
all do: `make colabtest` sets it to one that has Colab's releases.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("BUNDLE_PYTHON", sys.executable)
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
RUN = CHAPTERS if "BUNDLE_PYTHON" in os.environ else [name for name in CHAPTERS if name[:2] in ("01", "06")]
chapter = pytest.mark.parametrize("name", CHAPTERS)

spec = importlib.util.spec_from_file_location("colab_builder", ROOT / "notebooks" / "colab.py")
builder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(builder)


@pytest.fixture(scope="session")
def bundles(tmp_path_factory):
    """{name: bundle}"""
    return {path.stem: path for path in builder.build(tmp_path_factory.mktemp("bundles"))}


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """Where the kernel `bundle` is described: see bundle_kernel.py."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "bundle").mkdir()
    argv = [PYTHON, "-I", "-S", str(ROOT / "tests" / "bundle_kernel.py"), str(ROOT), own,
            "-f", "{connection_file}", "--log-level=ERROR"]
    fields = {"argv": argv, "display_name": "bundle", "language": "python"}
    (folder / "bundle" / "kernel.json").write_text(json.dumps(fields))
    return folder


def run(notebook, folder, kernels):
    """Execute all cells in `folder`. Raises CellExecutionError for a cell that raises and is not tagged so."""
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, kernel_name="bundle", timeout=300, resources=where)
    client.create_kernel_manager()
    client.km.kernel_spec_manager = KernelSpecManager(kernel_dirs=[str(kernels)])
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "IPYTHONDIR": str(kernels), "MPLCONFIGDIR": str(kernels)}
    ours = ("PYTHONPATH", "QWEN_MODEL", "MATPLOTLIBRC")     # names the repository, where it is set
    client.execute(env={**{name: value for name, value in os.environ.items() if name not in ours}, **threads})
    return notebook


@pytest.fixture(scope="session")
def runs(request, bundles, kernels, tmp_path_factory):
    """{name: a future of (executed notebook, the folder it ran in)} of the chapters asked for, two kernels at a time."""
    proof = ("import google.colab, ipywidgets, matplotlib, numpy, qwen, sys, torch\n"
             "print(qwen.__file__, sys.version, *(m.__version__ for m in (torch, numpy, matplotlib, ipywidgets)))")

    def start(name):
        folder = tmp_path_factory.mktemp("empty")
        notebook = nbformat.read(bundles[name], as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell(proof))
        return run(notebook, folder, kernels), folder

    with ThreadPoolExecutor(2) as pool:
        tests = [item for item in request.session.items if "runs" in getattr(item, "fixturenames", ())]
        yield {name: pool.submit(start, name) for name in (test.callspec.params["name"] for test in tests)}


def text(cell):
    return "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")


@pytest.mark.parametrize("name", RUN)
def test_a_bundle_runs_in_an_empty_folder(name, runs):
    notebook, folder = runs[name].result()
    print(text(notebook.cells[-1]))                         # the versions, for pytest -rP
    package = Path(text(notebook.cells[-1]).split()[0]).parent
    assert package.parent.parent == folder and package.is_relative_to(folder)
    assert [path.name for path in folder.iterdir()] == [package.parent.name]
    assert text(notebook.cells[0]).startswith(f"qwen is in {package}\n")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        raised = [output.ename for output in cell.outputs if output.output_type == "error"]
        assert bool(raised) == ("raises-exception" in cell.metadata.get("tags", [])), cell.source
    last = next(cell for cell in notebook.cells if cell.id == "bundle-last")
    assert "What is the capital of France?  ->  " in text(last) and "Paris" in text(last)


@chapter
def test_a_bundle_is_the_chapter_between_two_cells_of_its_own(name, bundles):
    bundle = nbformat.read(bundles[name], as_version=4)
    nbformat.validate(bundle)
    own = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    inner = bundle.cells[1:-3]
    assert [(c.id, c.cell_type, c.metadata) for c in inner] == [(c.id, c.cell_type, c.metadata) for c in own.cells]
    for found, wanted in zip(inner, own.cells):
        if wanted.cell_type == "code":
            assert (found.source, found.outputs) == (wanted.source, wanted.outputs)
    assert bundles[name].stat().st_size < 8_000_000


@chapter
def test_no_link_is_dead_and_nothing_is_installed(name, bundles):
    bundle = nbformat.read(bundles[name], as_version=4)
    for cell in bundle.cells:
        if cell.cell_type == "markdown":
            links = re.findall(r"\]\(([^)]*)\)", cell.source)
            assert all(link.startswith("https:") for link in links), cell.source
            assert not re.search(r"""(?:src|href)=["'](?!https:|data:)""", cell.source), cell.source
        else:
            assert not re.search(r"^\s*[!%]+\s*(pip|conda|apt|uv)\b|pip['\", ]+install", cell.source, re.M), cell.source


def test_a_second_build_gives_the_same_bytes(tmp_path):
    for one, other in zip(builder.build(tmp_path / "one"), builder.build(tmp_path / "other")):
        assert one.read_bytes() == other.read_bytes()


# Bad surroundings: the first cell alone, in this process.

FIRST = builder.first_cell(builder.pack())


@pytest.fixture
def without_package(monkeypatch):
    """The path as it is, restored afterwards, and nothing called qwen on it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "qwen" else find(name, *a))
    monkeypatch.setattr(sys, "path", list(sys.path))


def sentence(cell):
    """What IPython shows of the error that the cell raises."""
    with pytest.raises(Exception) as caught:
        exec(compile(cell, "<cell>", "exec"), {})
    lines = caught.value._render_traceback_()
    assert len(lines) == 1 and lines[0].endswith(".") and "\n" not in lines[0]
    return lines[0]


def test_the_first_cell_can_be_parsed_by_the_pythons_it_refuses():
    ast.parse(FIRST, feature_version=(3, 8))


def test_an_old_python_gets_a_sentence(monkeypatch):
    Version = namedtuple("Version", "major minor micro")
    monkeypatch.setattr(sys, "version_info", Version(3, 10, 4))
    monkeypatch.setattr(sys, "version", "3.10.4 (main)")
    assert sentence(FIRST) == "This notebook needs Python 3.11 or newer and runs on 3.10.4: choose a newer runtime."


def test_old_and_missing_libraries_get_a_sentence(monkeypatch, without_package):
    known = importlib.metadata.version

    def version(name):
        if name == "tokenizers":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.4.1+cu121" if name == "torch" else known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert sentence(FIRST).startswith("This notebook needs torch 2.5 or newer (2.4.1+cu121 is installed), "
                                      "tokenizers 0.20 or newer (it is missing): ")


@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_a_package_cut_short_gets_a_sentence(cut, without_package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start, end = FIRST.index('bring_package("""'), FIRST.rindex('\n""", "')
    assert start < end - cut
    assert "damaged or cut short" in sentence(FIRST[:end - cut] + FIRST[end:])
    assert list(tmp_path.iterdir()) == []


def test_a_notebook_shows_the_sentence_alone_and_stops(kernels, tmp_path):
    end = FIRST.rindex('\n""", "')
    cells = [nbformat.v4.new_code_cell(source) for source in (FIRST[:end - 10] + FIRST[end:], "print('on')")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with pytest.raises(CellExecutionError):
        run(notebook, tmp_path, kernels)
    (error,) = cells[0].outputs
    assert error.traceback == [error.evalue]
    assert error.evalue.startswith("The package in this cell is damaged or cut short")
    assert cells[1].execution_count is None


def read_only_folder():
    folder = Path("/proc")                                  # not even root writes there
    if not folder.is_dir():
        pytest.skip("no folder here that root cannot write to")
    return folder


def test_a_read_only_folder_is_passed_over(monkeypatch, without_package, tmp_path, capsys):
    monkeypatch.chdir(read_only_folder())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exec(compile(FIRST, "<cell>", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith(f"qwen is in {tmp_path}") and (Path(sys.path[0]) / "qwen" / "model.py").is_file()


def test_no_folder_at_all_gets_a_sentence(monkeypatch, without_package):
    monkeypatch.chdir(read_only_folder())
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    assert "neither in /proc nor in a temporary folder" in sentence(FIRST)


def test_an_installed_package_is_used_as_it_is(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(FIRST, "<cell>", "exec"), {})
    assert capsys.readouterr().out.startswith(f"qwen is in {ROOT / 'qwen'}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_keeps_what_the_reader_wrote_and_mends_what_is_missing(monkeypatch, without_package, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile(FIRST, "<cell>", "exec"), {})
    (folder,) = tmp_path.iterdir()
    (folder / "qwen" / "norm.py").unlink()
    (folder / "qwen" / "mine.py").write_text("x = 1\n")
    exec(compile(FIRST, "<cell>", "exec"), {})
    assert (folder / "qwen" / "norm.py").read_bytes() == (ROOT / "qwen" / "norm.py").read_bytes()
    assert (folder / "qwen" / "mine.py").is_file()


@pytest.mark.parametrize("capability, dtype", [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_a_gpu_is_named_with_a_dtype_it_computes_in(capability, dtype, monkeypatch, capsys, tmp_path):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    exec(compile(FIRST, "<cell>", "exec"), {})
    assert (f"GPU: Tesla T4, compute capability {capability[0]}.{capability[1]}: the last cell loads its model there, "
            f"in {dtype}.") in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_stops_the_build():
    with pytest.raises(SystemExit, match="cannot be written to /proc/colab: "):
        builder.build(read_only_folder() / "colab")
