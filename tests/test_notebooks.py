"""Every chapter's text and notebook are the same, and the notebook was run from top to bottom."""

import importlib.util
import json
from pathlib import Path

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"

spec = importlib.util.spec_from_file_location("notebook_builder", NOTEBOOKS / "build.py")
builder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(builder)

CHAPTERS = sorted(path.stem for path in (NOTEBOOKS / "source").glob("*.py"))
chapter = pytest.mark.parametrize("name", CHAPTERS)


def notebook(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def code(name):
    return [cell for cell in notebook(name).cells if cell.cell_type == "code"]


def test_each_text_has_a_notebook_and_each_notebook_a_text():
    assert CHAPTERS
    assert CHAPTERS == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@chapter
def test_text_and_notebook_agree(name):
    text = jupytext.read(NOTEBOOKS / "source" / f"{name}.py", fmt="py:percent")
    one = [(c.cell_type, c.metadata.get("tags", []), c.source) for c in text.cells]
    other = [(c.cell_type, c.metadata.get("tags", []), c.source) for c in notebook(name).cells]
    assert one == other, f"notebooks/{name}.ipynb is not built from its text: make notebooks"


@chapter
def test_a_chapter_links_to_the_one_before_and_the_next(name):
    last = [cell.source for cell in notebook(name).cells if cell.cell_type == "markdown"][-1]
    at = CHAPTERS.index(name)
    for mark, other in (("**Before:**", CHAPTERS[at - 1] if at else None), ("**Next:**", (CHAPTERS + [None])[at + 1])):
        if other:
            assert f"]({other}.ipynb)" in last.partition(mark)[2], f"{mark} does not link to {other}"


@chapter
def test_every_code_cell_was_executed_in_order(name):
    # nbval passes a cell that has neither a count nor an output without running a comparison.
    counts = [cell.execution_count for cell in code(name)]
    assert counts == list(range(1, len(counts) + 1))


@chapter
def test_outputs(name):
    for cell in code(name):
        tags = cell.metadata.get("tags", [])
        kinds = [output.output_type for output in cell.outputs]
        assert not {builder.IGNORED, builder.RAISES} <= set(tags), cell.source
        assert ("error" in kinds) == (builder.RAISES in tags), cell.source
        assert all(output.get("name") != "stderr" for output in cell.outputs), cell.source


@chapter
def test_size(name):
    for cell in code(name):
        assert len(cell.source.splitlines()) <= 25, f"does not fit a screen:\n{cell.source}"
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size <= 2_000_000


@chapter
def test_metadata_is_what_the_builder_writes(name):
    found = notebook(name)
    assert {k: found.metadata[k] for k in builder.METADATA} == builder.METADATA
    assert set(found.metadata) <= {*builder.METADATA, "widgets"}
    expected = builder.read(NOTEBOOKS / "source" / f"{name}.py").cells
    assert [(c.id, c.metadata) for c in found.cells] == [(c.id, c.metadata) for c in expected]


TEXT = """\
# %% [markdown]
# # A made-up chapter

# %%
import time
import ipywidgets as widgets
import matplotlib.pyplot as plt
import qwen
print("first")
print("second")

# %%
plt.plot([1, 2, 3])
plt.show()

# %%
# %config InlineBackend.figure_formats = ["svg"]
plt.imshow([[1, 2], [3, 4]])
plt.show()

# %%
slider, html = widgets.IntSlider(value=3), widgets.HTML()
slider.observe(lambda change: setattr(html, "value", f"<b>{change.new}</b>"), "value")
unseen = widgets.Text()
widgets.VBox([slider, html])

# %% tags=["nbval-ignore-output"]
print(time.time_ns())
widgets.FloatText(time.time())

# %%
slider.value = 5
html

# %% tags=["raises-exception"]
qwen.no_such_name

# %%
print(html.value)

# %%
print(html.value)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Two builds of TEXT, from two folders."""
    builder.fix_environment()
    notebooks = []
    for folder in (tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")):
        (folder / "text.py").write_text(TEXT)
        builder.build(folder / "text.py", folder / "99_try.ipynb")
        assert sorted(path.name for path in folder.iterdir()) == ["99_try.ipynb", "text.py"]
        notebooks.append((folder / "99_try.ipynb").read_text())
    return notebooks


def without_ignored_outputs(text):
    found = nbformat.reads(text, as_version=4)
    for cell in found.cells:
        if builder.IGNORED in cell.metadata.get("tags", []):
            cell.outputs = []
    return nbformat.writes(found)


def test_a_second_build_gives_the_same_bytes(built):
    one, other = built
    assert one != other  # the clock in the ignored cell
    assert without_ignored_outputs(one) == without_ignored_outputs(other)
    assert one.endswith("}\n")


def test_cell_ids_are_unique_and_do_not_move(built, tmp_path):
    ids = [cell.id for cell in nbformat.reads(built[0], as_version=4).cells]
    assert len(set(ids)) == len(ids)
    (tmp_path / "text.py").write_text(TEXT.replace('print("first")', 'print("other")'))
    moved = [cell.id for cell in builder.read(tmp_path / "text.py").cells]
    assert [n for n, (a, b) in enumerate(zip(ids, moved, strict=True)) if a != b] == [1]


def test_widgets_keep_the_state_that_compared_outputs_show(built):
    found = nbformat.reads(built[0], as_version=4)
    views = [
        (output.data[builder.VIEW].model_id, builder.IGNORED in cell.metadata.get("tags", []))
        for cell in found.cells
        for output in cell.get("outputs", [])
        if builder.VIEW in output.get("data", {})
    ]
    state = found.metadata.widgets[builder.STATE]["state"]
    assert [ignored for _, ignored in views] == [False, True, False]
    assert [model in state for model, _ in views] == [True, False, True]
    kinds = sorted(s["model_name"] for s in state.values() if "Control" not in s["model_name"])
    assert {"VBoxModel", "IntSliderModel", "HTMLModel"} <= set(kinds)
    assert "TextModel" not in kinds and "FloatTextModel" not in kinds
    assert [s["state"]["value"] for s in state.values() if s["model_name"] == "HTMLModel"] == [
        "<b>5</b>"
    ]
    for model in state.values():  # every reference is renamed with its target
        for inner in builder.re.findall(r"IPY_MODEL_(\w+)", json.dumps(model)):
            assert inner in state


def test_outputs_name_neither_machine_nor_matplotlib(built):
    assert str(ROOT) not in built[0] and str(Path.home()) + "/" not in built[0]
    found = nbformat.reads(built[0], as_version=4)
    (png,) = [
        output.data["image/png"]
        for cell in found.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert b"Software" not in builder.base64.b64decode(png)


@pytest.mark.parametrize(
    "text, found",
    [
        ("# %%\n1\n\n# %%\nint('x')\n", "99_try: cell 1 of 2 raised."),
        ('# %% tags=["raises-exception"]\n1\n', "99_try: cell 0 of 1 is tagged raises-exception"),
    ],
)
def test_a_build_that_fails_names_the_cell_and_leaves_no_file(tmp_path, text, found):
    builder.fix_environment()
    (tmp_path / "text.py").write_text(text)
    with pytest.raises(SystemExit, match="99_try") as error:
        builder.build(tmp_path / "text.py", tmp_path / "99_try.ipynb")
    assert found in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["text.py"]


def test_a_chapter_that_is_not_there():
    with pytest.raises(SystemExit, match="No chapter's name starts with '98'"):
        builder.main(["98"])
