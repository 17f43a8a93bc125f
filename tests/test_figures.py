"""Pictures are kept as drawn, say in words what they show, and read on both themes; sliders call their function."""
import io
import re
import xml.etree.ElementTree as ET

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from qwen import figures, widgets

SVG = "{http://www.w3.org/2000/svg}"
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


@pytest.fixture(autouse=True)
def defaults():
    figures.setup()
    yield
    plt.close("all")


@pytest.mark.parametrize("name", figures.PICTURES)
def test_kept_pictures_are_what_the_code_draws(name):
    drawn, again = (figures.svg(*figures.PICTURES[name]()) for _ in range(2))
    assert drawn == again
    kept = (figures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    if kept != drawn:                                       # another processor may round a coordinate differently
        assert NUMBER.sub("#", kept) == NUMBER.sub("#", drawn), "make figures"
        pairs = zip(map(float, NUMBER.findall(kept)), map(float, NUMBER.findall(drawn)))
        assert all(abs(a - b) <= 0.01 for a, b in pairs), "make figures"


@pytest.mark.parametrize("name", figures.PICTURES)
def test_kept_pictures_stand_on_a_card_and_carry_their_words(name):
    root = ET.parse(figures.FOLDER / f"{name}.svg").getroot()
    desc = root.find(f"{SVG}desc")
    assert len(desc.text) > 100 and root.get("aria-labelledby") == desc.get("id") and root.get("role") == "img"
    assert root.find(f".//{SVG}g[@id='patch_1']/{SVG}path").get("style") == f"fill: {figures.CARD}"


def test_figures_holds_nothing_else():
    """batch_gain.svg is drawn by `make bench`, from what it measured."""
    assert {path.stem for path in figures.FOLDER.glob("*.svg")} - {"batch_gain"} == set(figures.PICTURES)


def test_batch_gain_says_what_it_shows():
    speeds = {1: 7.0, 4: 25.0, 16: 60.0}
    drawn = figures.svg(*figures.batch_gain("a machine", speeds, {1: 4.0}, {n: (2 * s, s) for n, s in speeds.items()}))
    assert "16 rows 60" in drawn and "transformers: 1 rows 4" in drawn and "a machine" in drawn


def test_main_writes_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    figures.main()
    first = {path.name: path.read_bytes() for path in figures.FOLDER.iterdir()}
    matplotlib.rcParams["svg.hashsalt"] = None              # main sets what it needs
    figures.main()
    assert first == {path.name: path.read_bytes() for path in figures.FOLDER.iterdir()}


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """WCAG 2 contrast ratio."""
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def test_text_can_be_read_in_every_cell():
    assert len(set(figures.COLORS.values())) == len(figures.COLORS)
    assert contrast(figures.INK, figures.CARD) > 10
    for meaning, color in figures.COLORS.items():
        text = "#ffffff" if meaning in figures.ON_DARK else figures.INK
        assert contrast(text, color) >= 3.4, meaning


def texts(ax):
    return [text.get_text() for text in ax.texts]


def faces(ax):
    return [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in ax.patches]


def test_matrix():
    _, axes = plt.subplots(1, 3)
    figures.matrix(axes[0], torch.tensor([[1.0, 10.5], [110, -1]]), colors=["A", "B"], rows=["a", "b"], columns=["x", "y"])
    assert texts(axes[0]) == ["1", "10.5", "110", "-1", "a", "b", "x", "y"]
    assert faces(axes[0]) == [figures.COLORS[m] for m in "AABB"]
    figures.matrix(axes[1], [[1, "-inf"]], colors=[["C", "masked"]])
    assert texts(axes[1]) == ["1", "-inf"] and faces(axes[1]) == [figures.COLORS["C"], figures.COLORS["masked"]]
    figures.matrix(axes[2], [[1]], colors="weights")
    assert faces(axes[2]) == [figures.COLORS["weights"]]


def test_sign():
    figures.sign(plt.subplots()[1], "×")
    assert texts(plt.gca()) == ["×"] and not plt.gca().axison


def test_padded_box():
    _, axes = plt.subplots(1, 2)
    figures.padded_box(axes[0], [3, 1])
    assert texts(axes[0]) == ["0", "1", "2", "user A", "", "", "0", "user B"]
    assert faces(axes[0]) == [figures.COLORS[m] for m in ("A", "A", "A", "pad", "pad", "B")]
    figures.padded_box(axes[1], [3, 1], left=False)
    assert texts(axes[1]) == ["0", "1", "2", "user A", "0", "", "", "user B"]


def test_trips_and_throughput():
    _, axes = plt.subplots(1, 3)
    alone = figures.trips(axes[0], tiles=2, tile=4, work=0.5)
    batch = figures.trips(axes[1], batched=True, tiles=2, tile=4, work=0.5)
    assert (alone, batch) == (4 * 8 + 0.5, 8 + 4 * 0.5)     # only the last tile's work is not under a trip
    assert texts(axes[0]).count("tile 2") == 4 and texts(axes[1]).count("tile 2") == 1
    for ax, trips in ((axes[0], 4), (axes[1], 1)):
        bus = [(p.get_x(), p.get_x() + p.get_width()) for p in ax.patches if p.get_y() > 1]
        assert len(bus) == 2 * trips and all(a[1] == b[0] for a, b in zip(bus, bus[1:]))       # memory never idle
        work = {p.get_x() // 4 for p in ax.patches if p.get_y() == 0}
        assert work == set(range(1, 2 * trips + 1))         # each tile is worked on as soon as it is there
    figures.throughput(axes[2], [1, 2], [10, 19], [10, 20], "tok/s")
    assert [list(line.get_ydata()) for line in axes[2].lines] == [[10, 20], [10, 19]]
    assert axes[2].get_ylim()[0] == 0
    axes[2].clear()
    figures.throughput(axes[2], [1, 2], {"one": [10, 19], "other": [9, 18]})
    assert [line.get_label() for line in axes[2].lines] == ["one", "other"]
    assert len({(line.get_linestyle(), line.get_marker()) for line in axes[2].lines}) == 2


def test_show_says_it_in_words_and_closes(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *args, **options: shown.append((*args, options)))
    figure = plt.figure()
    figures.show(figure, "one box < two")
    assert shown[0] == (figure, {"metadata": {"image/png": {"alt": "one box < two"}}})
    words, options = shown[1]
    assert options == {"raw": True} and words["text/plain"] == "In words: one box < two"
    assert words["text/html"].startswith("<details>") and "one box &lt; two</details>" in words["text/html"]
    assert not plt.get_fignums()


def test_setup_gives_the_same_png_twice():
    def png():
        file = io.BytesIO()
        figure, _ = figures.one_trip()
        figure.savefig(file, metadata={"Software": None})
        return file.getvalue()

    first = png()
    matplotlib.rcParams["figure.dpi"] = 50                  # whatever was set before, setup starts afresh
    figures.setup()
    assert first == png()


def test_play():
    calls = []

    def function(users, d):
        calls.append((users, d))
        return f"<b>{users * d}</b>"

    box, sliders, text = widgets.play(function, users=(1, 64, 3), d=[10, 110])
    assert text.value == "<b>30</b>" and list(box.children) == [*sliders.values(), text]
    sliders["users"].value = 4
    assert text.value == "<b>40</b>"
    sliders["d"].value = 110
    assert text.value == "<b>440</b>" and calls == [(3, 10), (4, 10), (4, 110)]
