"""Chapter 08's picture of pages, and its slider's function against first principles."""
import math

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
from chapter_exercises import cells
from matplotlib.colors import to_hex

from qwen import figures
from qwen.roofline import HARDWARE, QWEN_0_8B, rows_in_memory

KV, FIXED = 12_288, 18 * 2 ** 20 + 663_552                 # bytes of the 0.8B shape: a token's, a row's


@pytest.fixture(autouse=True)
def close():
    figures.setup()
    yield
    plt.close("all")


def colors(ax):
    """Colours of the memory's cells, then of the tables'."""
    return [[to_hex(p.get_facecolor()) for p in ax.patches if (p.get_y() > 1) == above] for above in (False, True)]


def test_pages_tells_users_shared_empty_and_free_apart():
    ax = plt.subplots()[1]
    words = figures.pages(ax, {"A": [3, 0], "B": [3, 1]}, {"A": 3, "B": 4}, 4, 2, "a title")
    c = figures.COLORS
    memory, tables = colors(ax)
    assert memory == [c["A"], c["plain"], c["B"], c["B"], c["pad"], c["weights"], c["weights"]]
    assert tables == [c["A"]] * 2 + [c["B"]] * 2
    said = [text.get_text() for text in ax.texts]
    assert [t for t in said if t.isdigit()] == ["3", "0", "3", "1"]
    assert {"block 0\nA", "block 1\nB", "block 2\nfree", "block 3\nA + B", "A", "B"} <= set(said)
    assert words == ("A's table is [3, 0], 3 tokens; B's table is [3, 1], 4 tokens. In the memory: block 0 A, block 1 B, "
                     "block 2 free, block 3 shared by A and B.")
    assert ax.get_title(loc="left") == "a title"


def test_pages_draws_a_line_from_each_entry_to_its_block():
    ax = plt.subplots()[1]
    figures.pages(ax, {"A": [1, 0]}, {"A": 2}, 2, 1)
    ends = [line.get_xdata()[1] for line in ax.lines]
    blocks = {text.get_text().split("\n")[0]: text.get_position()[0] for text in ax.texts if "block" in text.get_text()}
    assert ends == pytest.approx([blocks["block 1"], blocks["block 0"]])


def test_pages_of_a_fork_that_grew_apart():
    """A shared block counts as filled up to the longest of its holders."""
    ax = plt.subplots()[1]
    figures.pages(ax, {"A": [0], "B": [0, 1]}, {"A": 2, "B": 3}, 2, 2)
    c = figures.COLORS
    assert colors(ax)[0] == [c["weights"], c["weights"], c["B"], c["plain"]]


def test_the_kept_picture_is_case_20():
    figure, words = figures.two_tables()
    assert "A's table is [5, 0, 3], 17 tokens; B's table is [1, 2], 13 tokens" in words
    cell = [p for p in figure.axes[0].patches if p.get_y() < 1]
    assert [sum(to_hex(p.get_facecolor()) == figures.COLORS[user] for p in cell) for user in "AB"] == [17, 13]


def test_pages_frames_the_slot_just_written():
    ax = plt.subplots()[1]
    words = figures.pages(ax, {"A": [0, 2], "B": [1]}, {"A": 6, "B": 4}, 3, 4, written="AB")
    frames = [p for p in ax.patches if not p.get_fill()]
    step = 0.4 * 4 + 0.5
    assert [p.get_x() for p in frames] == pytest.approx([2 * step + 0.4, step + 1.2])
    assert words.endswith("block 0 A, block 1 B, slot 3 just written by B, block 2 A, slot 1 just written by A.")


@pytest.fixture(scope="module")
def in_words():
    """The slider's function, out of the chapter, with the names that an earlier cell defines."""
    code = [cell.source for cell in cells("08") if cell.cell_type == "code"]
    (source,) = [text for text in code if "def in_words" in text]
    (above,) = [text for text in code if "ALL_FULL = replace" in text]
    assert above.startswith("ALL_FULL = replace")
    names = {}
    exec("from dataclasses import replace\nfrom qwen.roofline import QWEN_0_8B\n" + "\n".join(above.splitlines()[:2]), names)
    exec(source[:source.index("controls, sliders")], names)
    return names["in_words"]


@pytest.mark.parametrize("gigabytes, tokens, block_size", [(24, 1000, 16), (2, 10, 1), (80, 100_000, 64), (24, 10, 544)])
def test_the_slider_counts_rows(in_words, gigabytes, tokens, block_size):
    slots = math.ceil(tokens / block_size) * block_size
    room = int(0.9 * gigabytes * 10 ** 9) - 2 * 752_393_024
    words = in_words(gigabytes, tokens, block_size)
    assert f"Qwen3.5-0.8B: {room // (FIXED + slots * KV):,} rows" in words
    assert f"all 24 layers full: {room // (4 * slots * KV):,} rows" in words
    assert f"{FIXED / (FIXED + slots * KV):.0%} fixed" in words and words.endswith("0% fixed.")


def test_the_slider_agrees_with_the_roofline_and_fits_nothing_into_nothing(in_words):
    rows = rows_in_memory(QWEN_0_8B, HARDWARE["L4"], 1008, usable=0.9)
    assert f"{rows:,} rows" in in_words(24, 1008, 16)
    assert "0.8B: 0 rows" in in_words(1, 10, 16)
