"""Chapter 07's pictures and slider: lanes drawn from records, and the queue by counting."""
import random
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
from chapter_exercises import cells
from matplotlib.colors import to_hex

from qwen import figures
from qwen.engine import Engine, Request, StaticBatcher
from qwen.model import Model
from qwen.weights import find_model


@pytest.fixture(autouse=True)
def defaults():
    figures.setup()
    yield
    plt.close("all")


def record(rows, seats, finished=(), admitted=()):
    return SimpleNamespace(rows=rows, seats=seats, finished=dict.fromkeys(finished, "stop"), admitted=admitted)


def pieces(ax):
    """(first step, steps, lane, height, colour, hatch) of each box."""
    return [(p.get_x(), p.get_width(), round(-p.get_y() - p.get_height() / 2 - 0.5), p.get_height(), to_hex(p.get_facecolor()),
             p.get_hatch()) for p in ax.patches]


def test_a_lane_tells_prefill_decode_riding_and_empty_apart():
    """A reads 3 + 2 tokens, decodes twice, ends and rides along once; B, of one token, sits down in step 2."""
    records = [record({"A": 3}, ("A", None), admitted=("A",)), record({"A": 2}, ("A", None)),
               record({"A": 1, "B": 1}, ("A", "B"), admitted=("B",)), record({"A": 1, "B": 1}, ("A", "B"), ["A"]),
               record({"A": 1, "B": 1}, ("A", "B"), ["B"])]
    _, ax = plt.subplots()
    assert figures.timeline(ax, records) == {"prefill": 3, "decode": 4, "riding": 1, "empty": 2}
    blue, red, pad, card = (figures.COLORS[key] for key in ("A", "B", "pad", "plain"))
    tall, low = figures.LANES["prefill"], figures.LANES["decode"]
    assert tall > low
    assert [(x, w, lane, pytest.approx(h), c, hatch) for x, w, lane, h, c, hatch in pieces(ax)] == [
        (0, 2, 0, tall, blue, None), (2, 2, 0, low, blue, None), (4, 1, 0, low, pad, "////"),
        (0, 2, 1, low, card, None), (2, 1, 1, tall, red, None), (3, 2, 1, low, red, None)]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["seat 0", "seat 1"]


def test_a_seat_held_without_a_token_is_empty_and_colors_can_be_given():
    _, ax = plt.subplots()
    counts = figures.timeline(ax, [record({}, ("A",)), record({"A": 1}, ("A",))], colors={"A": "C"}, steps=5)
    assert counts == {"prefill": 0, "decode": 1, "riding": 0, "empty": 1} and ax.get_xlim() == (0, 5)
    assert pieces(ax)[1][4] == figures.COLORS["C"]


def test_each_stay_is_named_once():
    """A is preempted and sits down again in the other seat; C is not named again after a step that it stands still."""
    records = [record({"A": 2}, (None, "A"), admitted=("A",)), record({"A": 1}, (None, "A")), record({}, (None, None)),
               record({"A": 3, "C": 2}, ("A", "C"), admitted=("A", "C")), record({"A": 1, "C": 1}, ("A", "C")),
               record({"A": 1}, ("A", "C")), record({"A": 1, "C": 1}, ("A", "C"))]
    _, ax = plt.subplots()
    figures.timeline(ax, records)
    where = sorted((text.get_text(), round(-text.get_position()[1] - 0.5), text.get_position()[0]) for text in ax.texts)
    assert where == [("A", 0, 5.5), ("A", 1, 1.5), ("C", 1, 4.5)]


def test_the_engines_own_records():
    model = Model.from_pretrained(find_model(), device="cpu")
    lengths, counts = [3, 9, 2, 5], {}
    for kind in (StaticBatcher, Engine):
        batcher = kind(model, max_num_seqs=2)
        batcher.generate([Request([5, 6, 7], n, id="ABCD"[i]) for i, n in enumerate(lengths)])
        _, ax = plt.subplots()
        counts[kind] = figures.timeline(ax, batcher.records)
        assert sum(counts[kind].values()) == 2 * len(batcher.records)
        assert counts[kind]["prefill"] == 4 and counts[kind]["decode"] == sum(lengths) - 4
    assert counts[StaticBatcher]["riding"] == (9 - 3) + (5 - 2) and counts[Engine]["riding"] == 0


@pytest.fixture(scope="module")
def chapter():
    """The names of the cells that define the slider's function and what it needs; answers of 27 tokens on average."""
    names = {"random": random, "right": {n: [0] * n for n in (2, 104, 10, 35, 4, 7)}, "AGING": 16}
    for cell in cells("07"):
        for name in ("def percentile(", "def simulate(", "def watch("):
            if cell.cell_type == "code" and f"\n{name}" in f"\n{cell.source}":
                text = f"\n{cell.source}"
                body = text[text.index(f"\n{name}") + 1:]
                end = next((i for i, line in enumerate(body.splitlines()) if i and line and not line.startswith(" ")), None)
                exec("\n".join(body.splitlines()[:end]), names)
    return SimpleNamespace(**{name: names[name] for name in ("percentile", "simulate", "watch")})


def test_percentile(chapter):
    assert [chapter.percentile([5, 1, 4, 2, 3], p) for p in (1, 20, 21, 50, 99, 100)] == [1, 1, 2, 3, 5, 5]
    assert chapter.percentile(range(1, 201), 99) == 198


def test_simulate_by_hand(chapter):
    """Two seats; job 3 arrives later and job 2 waits for the first free seat."""
    start, depth = chapter.simulate([(0, 3, 0), (0, 1, 0), (0, 2, 0), (2, 1, 0)], 2)
    assert start == [0, 0, 1, 3] and depth == [1, 0, 1, 0]
    start, _ = chapter.simulate([(0, 3, 0), (0, 2, 1), (0, 2, 0)], 1, rank=lambda arrival, priority: (priority, arrival))
    assert start == [0, 5, 3]
    assert chapter.simulate([], 3) == ([], [])


def test_watch_answers_for_every_setting_and_more_seats_never_lengthen_the_queue(chapter):
    for rate in (1, 20, 50):
        longest = []
        for seats in (1, 4, 8, 16):
            text = chapter.watch(rate, seats)
            assert text.startswith("<pre>") and text.endswith("</pre>") and f"of {seats} seats" in text
            longest.append(int(text.split("longest ")[1].split("\n")[0]))
        assert longest == sorted(longest, reverse=True)


def test_the_lowest_mark_means_that_nobody_waits(chapter):
    text = chapter.watch(20, 4)
    bars, longest = text.split("queue ")[1].split(" longest ")
    draw = random.Random(1)
    sizes = [2, 104, 10, 35, 4, 7]
    _, depth = chapter.simulate([(step, draw.choice(sizes), 0) for step in range(400) if draw.random() < 0.2], 4)
    assert max(depth) == int(longest.split("\n")[0]) > 8
    assert [mark == "▁" for mark in bars] == [waiting == 0 for waiting in depth[:400:10]]
