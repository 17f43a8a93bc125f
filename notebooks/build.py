"""Turn notebooks/source/NN_name.py into the executed notebooks/NN_name.ipynb.

    python notebooks/build.py          # every chapter
    python notebooks/build.py 01 06    # the chapters whose names start so
    python notebooks/build.py times    # build none, measure them, and write the README's running times

The way is one way: the text (jupytext's py:percent form) is what is edited, the
notebook is made from it. A second build gives the same bytes, except in the outputs
of cells tagged `nbval-ignore-output`.
"""

import base64
import hashlib
import json
import math
import os
import re
import struct
import sys
import time
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
SOURCE = FOLDER / "source"

IGNORED, RAISES = "nbval-ignore-output", "raises-exception"
VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT = ("tags", "jupyter")  # of a cell's metadata; "jupyter" can fold a solution away

# What a kernel must be given so that its outputs can be compared with another run's.
DROPPED = ("QWEN_MODEL", "MPLBACKEND")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
FIXED = {
    "IPYKERNEL_CELL_NAME": "<cell>",  # else warnings name a file that holds the process id
    "JUPYTER_PREFER_ENV_PATH": "1",  # kernel "python3" is the Python that runs this
    "MATPLOTLIBRC": str(FOLDER / "matplotlibrc"),
    "PYTHONHASHSEED": "0",
    "SOURCE_DATE_EPOCH": "0",
}


def fix_environment():
    """Prepare this process for starting kernels; nbval's kernels start from here too."""
    for name in DROPPED:
        os.environ.pop(name, None)
    os.environ.update(FIXED)
    for name in THREADS:
        os.environ.setdefault(name, "1")
    if str(ROOT) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
    # On a fresh machine matplotlib makes its font list and says so: here, not in a notebook.
    import matplotlib.font_manager  # noqa: F401


def read(source):
    """Return the unexecuted notebook of a py:percent file.

    A cell's id is a digest of its text, so that editing one cell renames no other.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen = Counter()
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] += 1
        cell.id = f"{digest}-{seen[digest]}"
        kept = {key: cell.metadata[key] for key in KEPT if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
    return notebook


def tags(cell):
    return cell.metadata.get("tags", [])


def execute(notebook, name, folder):
    """Run every cell in one fresh kernel with `folder` as its working directory.

    Raises SystemExit naming the chapter and the cell when a cell raises and is not
    tagged `raises-exception`, or is tagged so and does not raise.
    """
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    client.reset_execution_trackers()
    with client.setup_kernel():
        for index, cell in enumerate(tqdm(notebook.cells, desc=name, unit="cell")):
            where = f"{name}: cell {index} of {len(notebook.cells)}"
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                raise SystemExit(f"{where} raised.\n{error}")
            if RAISES in tags(cell) and not any(o.output_type == "error" for o in cell.outputs):
                raise SystemExit(f"{where} is tagged {RAISES} and raised nothing.\n{cell.source}")
        client.set_widgets_metadata()


def plain_png(text):
    """Drop the text and time chunks, which name matplotlib's version, from a base64 PNG."""
    data = base64.b64decode(text)
    kept, at = data[:8], 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        chunk = data[at : at + length + 12]  # length, kind, payload, checksum
        if kind not in (b"tEXt", b"zTXt", b"iTXt", b"tIME"):
            kept += chunk
        at += len(chunk)
    return base64.b64encode(kept).decode()


def plain_path(line):
    """Write a traceback's paths relative to the repository or to the environment."""
    home = str(Path.home())
    for path, short in ((sys.prefix, ".venv"), (str(ROOT), ""), (sys.base_prefix, "python")):
        short = f"{short}/" if short else ""
        forms = [path, path.replace(home, "~", 1)] if path.startswith(home + "/") else [path]
        for form in forms:
            line = line.replace(f"{form}/", short)
    return line


def rename_widgets(notebook):
    """Number the widgets in the order in which the outputs show them.

    The saved state of those that a compared output shows is kept, so that a viewer
    without a kernel draws them; the state of the others may differ from run to run.
    """
    state = notebook.metadata.get("widgets", {}).get(STATE, {}).get("state", {})
    order, rest = [], []

    def visit(model):
        if model in state and model not in order:
            order.append(model)
            for inner in re.findall(r"IPY_MODEL_(\w+)", json.dumps(state[model])):
                visit(inner)

    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if VIEW in output.get("data", {}):
                model = output.data[VIEW]["model_id"]
                rest.append(model) if IGNORED in tags(cell) else visit(model)
    kept = {model: state[model] for model in order}
    if kept:
        notebook.metadata.widgets[STATE]["state"] = kept
    else:
        notebook.metadata.pop("widgets", None)
    names = {model: f"{n:032x}" for n, model in enumerate(dict.fromkeys(order + rest), start=1)}
    text = re.sub(r"[0-9a-f]{32}", lambda m: names.get(m[0], m[0]), json.dumps(notebook))
    return nbformat.from_dict(json.loads(text))


def tidy(notebook):
    """Take out of the outputs what differs between two runs or two machines."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output.traceback = [plain_path(line) for line in output.traceback]
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = plain_png(output.data["image/png"])
    return rename_widgets(notebook)


def build(source, target):
    """Execute the chapter in `source` and put the notebook at `target`, whole or not at all."""
    notebook = read(source)
    execute(notebook, target.stem, target.parent)
    unfinished = target.with_name(f".{target.name}.unfinished")
    nbformat.write(tidy(notebook), unfinished)
    os.replace(unfinished, target)


def measure():
    """Run every chapter from kernel start to last cell and write the README's column of times, in steps of 5 s."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for source in sorted(SOURCE.glob("[0-9][0-9]_*.py")):
        start = time.monotonic()
        execute(read(source), source.stem, FOLDER)
        seconds = time.monotonic() - start
        print(f"{source.stem}: {seconds:.1f} s")
        row = rf"(?m)^(\| {source.name[:2]} \|.*\| )\d+( s \|)$"
        text, found = re.subn(row, rf"\g<1>{5 * math.ceil(seconds / 5)}\g<2>", text)
        if found != 1:
            raise SystemExit(f"README.md has {found} rows for chapter {source.stem}, expected one that ends with its time")
    unfinished = readme.with_name(".README.md.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, readme)


def main(names):
    if names == ["times"]:
        os.environ.update(dict.fromkeys(THREADS, str(os.cpu_count())))  # as a reader's kernel runs
        fix_environment()
        return measure()
    sources = sorted(SOURCE.glob("[0-9][0-9]_*.py"))
    for name in names:
        if not any(source.name.startswith(name) for source in sources):
            raise SystemExit(
                f"No chapter's name starts with {name!r}; "
                f"notebooks/source/ holds {[source.stem for source in sources]}."
            )
    os.environ.update(dict.fromkeys(THREADS, "1"))
    fix_environment()
    for source in sources:
        if not names or source.name.startswith(tuple(names)):
            build(source, FOLDER / f"{source.stem}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
