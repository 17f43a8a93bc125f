"""Turn notebooks/NN_name.ipynb into dist/colab/NN_name.ipynb: one file that runs without the repository.

    python notebooks/colab.py          # every chapter

A bundle is the executed chapter between two cells of its own. The first carries the package, with the exercises and
the shipped model, as text; it installs nothing. The last runs a batch on the session's processor.
"""

import base64
import hashlib
import io
import os
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
TARGET = ROOT / "dist" / "colab"
LINE = 2000  # characters of the packed package in a line: editors stumble over a line of millions
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")

# Must parse on the old Pythons that it refuses, so nothing newer than 3.8 stands in it.
FIRST = '''\
# @title Run this cell first: it unpacks the package `qwen` and its small model, installs nothing, needs no network
import sys


class NotReady(Exception):
    """IPython shows its sentence alone, without a traceback, and the cells below do not start."""

    def _render_traceback_(self):
        return [str(self)]


def check_session(needed):
    """Refuse a Python or a library older than the package needs: {name: least version}."""
    found = sys.version.split()[0]
    if sys.version_info < (3, 11):
        raise NotReady("This notebook needs Python 3.11 or newer and runs on " + found + ": choose a newer runtime.")

    import importlib.metadata
    import re

    def numbers(version):                                   # "2.11.0+cu128" -> [2, 11, 0]
        return [int(n) for n in re.findall(r"[0-9]+", version)[:3]]

    lacking = []
    for name, least in needed.items():
        try:
            version = importlib.metadata.version(name)
            if numbers(version) < numbers(least):
                lacking.append(name + " " + least + " or newer (" + version + " is installed)")
        except importlib.metadata.PackageNotFoundError:
            lacking.append(name + " " + least + " or newer (it is missing)")
    if lacking:
        raise NotReady("This notebook needs " + ", ".join(lacking) + ": install what is missing, choose a newer "
                       "runtime for what is too old, and run this cell again.")


def bring_package(packed, digest):
    """Put the package on the path, from this cell or from where it is installed, and return its folder."""
    import base64
    import hashlib
    import importlib.util
    import io
    import os
    import tempfile
    import zipfile

    spec = importlib.util.find_spec("qwen")
    if spec and spec.origin and os.path.isfile(os.path.join(os.path.dirname(spec.origin), "exercises", "__init__.py")):
        return os.path.dirname(spec.origin)
    packed = "".join(packed.split())
    if hashlib.sha256(packed.encode()).hexdigest() != digest:
        raise NotReady("The package in this cell is damaged or cut short (" + str(len(packed)) + " characters came): "
                       "fetch the notebook file again.")
    files = zipfile.ZipFile(io.BytesIO(base64.b64decode(packed)))
    for make in (lambda: os.path.join(os.getcwd(), "batching-by-hand-" + digest[:8]), tempfile.mkdtemp):
        try:
            folder = make()
            for file in files.infolist():                   # what is there already stays
                path = os.path.join(folder, file.filename)
                if not os.path.isfile(path) or os.path.getsize(path) != file.file_size:
                    files.extract(file, folder)
        except OSError as error:
            reason = error
            continue
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        return os.path.join(folder, "qwen")
    raise NotReady("The package can be unpacked neither in " + os.getcwd() + " nor in a temporary folder (" +
                   str(reason) + "): start the notebook in a folder that can be written to.")


def name_processor():
    """What the session computes on, and the dtype in which a model is loaded there."""
    import torch

    if not torch.cuda.is_available():
        return "No GPU: models are loaded on the CPU, in float32."
    major, minor = torch.cuda.get_device_capability()
    dtype = "bfloat16" if major >= 8 else "float32"         # before 8.0 bfloat16 is emulated, and slow
    return ("GPU: " + torch.cuda.get_device_name() + ", compute capability " + str(major) + "." + str(minor) +
            ": the last cell loads its model there, in " + dtype + ".")


check_session(@NEEDED@)
print("qwen is in", bring_package("""
@PACKED@
""", "@DIGEST@"))
print(name_processor())
'''

LAST_WORDS = """\
## On this session's processor

The cells above load the small model on the CPU in float32, where their checks and printed outputs hold (chapter 05 also
measures a GPU where there is one). The next cell loads a model on the GPU if the session has one, in bfloat16 if the
GPU computes in it (compute capability 8.0 or more), otherwise in float32. For the published model, which is downloaded
once, choose `Qwen/Qwen3.5-0.8B` in its field.
"""

LAST = """\
# @title Four users in one batch
MODEL = ""  # @param ["", "Qwen/Qwen3.5-0.8B"] {allow-input: true}

from qwen import measure
from qwen.batch import generate_batch
from qwen.chat import Chat, build_prompt
from qwen.model import Model
from qwen.weights import find_model

path = find_model(MODEL)                                    # "" is the shipped model
model = Model.from_pretrained(path)
chat = Chat(model, path)
print(f"{model.num_parameters:,} parameters in {model.dtype} on {measure.machine(model.device)}")

questions = ["What is the capital of France?", "Write a poem about a cat.", "北京在哪个国家？", "1+1 等于几？"]
prompts = [chat.tk.encode(build_prompt([{"role": "user", "content": text}])).ids for text in questions]
limits = {"max_new_tokens": 64, "stop": chat.stop}
answers = generate_batch(model, prompts, **limits)
for question, answer in zip(questions, answers):
    print(f"{question}  ->  {chat.tk.decode(answer)}")

together = measure.clock(lambda: generate_batch(model, prompts, **limits))
alone = measure.clock(lambda: [generate_batch(model, [prompt], **limits) for prompt in prompts])
print(f"one after the other {alone:.2f} s, in one batch {together:.2f} s")
"""


def needed():
    """{name: least version} of what the package imports, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(line.split(">=") for line in project["dependencies"])


def pack():
    """The package and its licence as base64 text of a zip archive, the same text for the same files."""
    files = [path for path in (ROOT / "qwen").rglob("*")
             if path.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & set(path.parts)]
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted([*files, ROOT / "LICENSE"]):
            entry = zipfile.ZipInfo(path.relative_to(ROOT).as_posix())          # without the file's time
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return base64.b64encode(data.getvalue()).decode()


def first_cell(packed):
    lines = "\n".join(packed[start:start + LINE] for start in range(0, len(packed), LINE))
    digest = hashlib.sha256(packed.encode()).hexdigest()
    return FIRST.replace("@NEEDED@", repr(needed())).replace("@DIGEST@", digest).replace("@PACKED@", lines)


def unlinked(text):
    """The text without links to other files of the repository, which stand beside no bundle; the words stay."""
    text = text.replace("[glossary](GLOSSARY.md)", "glossary at the end of this notebook")
    text = re.sub(r"nothing(\s+)but(\s+)this(\s+)repository", r"nothing\1but\2this\3notebook", text)
    return LINK.sub(r"\1", text)


def bundle(notebook, first):
    """Put the cells of a bundle around a chapter, in place."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = unlinked(cell.source)
    glossary = re.sub("^#", "##", unlinked((FOLDER / "GLOSSARY.md").read_text(encoding="utf-8")), flags=re.M)
    new = nbformat.v4
    form = {"cellView": "form", "jupyter": {"source_hidden": True}}                # folded in Colab, in JupyterLab
    notebook.cells = [
        new.new_code_cell(first, id="bundle-first", metadata=form),
        *notebook.cells,
        new.new_markdown_cell(LAST_WORDS, id="bundle-last-words"),
        new.new_code_cell(LAST, id="bundle-last", metadata={"cellView": "form"}),
        new.new_markdown_cell(glossary, id="bundle-glossary"),
    ]
    notebook.metadata["colab"] = {"provenance": [], "toc_visible": True}


def build(target=TARGET):
    """Write every chapter's bundle into `target` and return their paths."""
    chapters = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
    first = first_cell(pack())
    try:
        Path(target).mkdir(parents=True, exist_ok=True)
        for chapter in chapters:
            notebook = nbformat.read(chapter, as_version=4)
            bundle(notebook, first)
            unfinished = Path(target) / f".{chapter.name}.unfinished"
            nbformat.write(notebook, unfinished)
            os.replace(unfinished, Path(target) / chapter.name)
    except OSError as error:
        raise SystemExit(f"The bundles cannot be written to {target}: {error.strerror}.")
    return [Path(target) / chapter.name for chapter in chapters]


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit(f"colab.py takes no arguments, found {sys.argv[1:]}: it writes every chapter's bundle.")
    for path in build():
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
