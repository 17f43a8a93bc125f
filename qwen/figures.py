"""The series' pictures: one colour for each meaning, and the few shapes that chapters draw again and again.

`setup()` stands in each notebook's first cell. Pictures are dark ink on a light card, which reads the same on
a light and on a dark notebook; colours are Okabe and Ito's (jfly.uni-koeln.de/color), which colour-blind readers
can tell apart, and nothing is said by colour alone. `python -m qwen.figures` draws figures/*.svg.
"""
import io
import re
import textwrap
from html import escape
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

INK, CARD = "#222222", "#fbfaf6"
COLORS = {
    "A": "#0072b2",                                         # user A: blue
    "B": "#d55e00",                                         # user B: vermillion
    "C": "#009e73",                                         # user C: green
    "D": "#cc79a7",                                         # user D: purple
    "weights": "#f0e442",                                   # shared by all users: yellow
    "caches": "#c2a878",                                    # keys and values, each of one user alone: tan
    "pad": "#d4d4d4",                                       # a place nobody's token stands in: light grey
    "masked": "#777777",                                    # a score that nobody may read: dark grey
    "plain": CARD,
    "measured": INK,                                        # what a clock showed: black, solid
    "predicted": "#56b4e9",                                 # what arithmetic says: sky blue, dashed
    "wrong": "#e69f00",                                     # a result that differs from the right one: orange
}
ON_DARK = ("A", "B", "C", "masked", "measured")             # meanings whose cells carry white text
HATCH = {"pad": "////", "masked": "xxxx"}
FOLDER = Path(__file__).resolve().parent.parent / "figures"


def setup():
    """Set matplotlib's defaults for a chapter: the light card, readable sizes, the same bytes on every run."""
    mpl.rcdefaults()
    mpl.rcParams.update({
        "figure.facecolor": CARD, "savefig.facecolor": CARD, "axes.facecolor": CARD,
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False, "grid.color": "#dddddd",
        "font.size": 11, "axes.titlesize": 12, "axes.titlelocation": "left", "hatch.linewidth": 0.5,
        "figure.figsize": (7.5, 3.2), "figure.dpi": 100, "figure.constrained_layout.use": True,
        "lines.linewidth": 2, "lines.markersize": 6, "legend.frameon": False,
        "svg.hashsalt": "batching by hand", "savefig.bbox": None,
    })


def show(figure: Figure, alt: str):
    """Display a finished picture in a notebook, below it what it shows, in words, folded away, and close it.

    The words are the picture's alternative text too (output metadata, which nbconvert's classic template writes as
    alt); JupyterLab drops that, so a screen reader finds them in the fold.
    """
    from IPython.display import display                     # a notebook has it
    display(figure, metadata={"image/png": {"alt": alt}})
    fold = f"<details><summary>The picture in words</summary>{escape(alt)}</details>"
    display({"text/html": fold, "text/plain": textwrap.fill(f"In words: {alt}", 100)}, raw=True)
    plt.close(figure)


def box(ax, x, y, meaning: str, text="", width=1.0, height=1.0):
    """One cell with its lower left corner at (x, y), in the colour of `meaning`, a key of COLORS."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=COLORS[meaning], edgecolor=INK, linewidth=0.8,
                           hatch=HATCH.get(meaning) if text == "" else None))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center",
            color="white" if meaning in ON_DARK else INK)


def bare(ax, title=""):
    """Draw to scale, without axes."""
    ax.set_title(title)
    ax.set_aspect("equal")
    ax.axis("off")
    ax.margins(0.01)
    ax.autoscale_view()


def matrix(ax, values, title="", colors=None, rows=None, columns=None):
    """A matrix as a grid of numbers, row 0 on top.

    values: 2-D (nested lists, array or tensor); text is drawn as it is. colors: one meaning for all, one a row, or
    one a cell. rows, columns: names to write beside and above.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            meaning = colors or "plain"
            if not isinstance(meaning, str):
                meaning = meaning[r] if isinstance(meaning[r], str) else meaning[r][c]
            box(ax, c, -r - 1, meaning, f"{value:g}" if isinstance(value, (int, float)) else str(value))
    for r, name in enumerate(rows or ()):
        ax.text(-0.2, -r - 0.5, name, ha="right", va="center")
    for c, name in enumerate(columns or ()):
        ax.text(c + 0.5, 0.15, name, ha="center", va="bottom")
    bare(ax, title)
    if columns:
        ax.set_title(title, pad=24)


def sign(ax, text):
    """A sign between two pictures, such as "×" or "="."""
    ax.text(0.5, 0.5, text, ha="center", va="center", fontsize=16, transform=ax.transAxes)
    ax.axis("off")


def padded_box(ax, lengths, names=("A", "B", "C", "D"), left=True, title=""):
    """Rows of unequal length in one rectangle: a row's tokens in its user's colour, numbered, and its pads hatched.

    lengths: real tokens of each row; names: the rows' users (keys of COLORS); left: where the pads stand.
    """
    width = max(lengths)
    for r, (length, name) in enumerate(zip(lengths, names)):
        first = width - length if left else 0
        for c in range(width):
            real = first <= c < first + length
            box(ax, c, -r - 1, name if real else "pad", str(c - first) if real else "")
        ax.text(-0.2, -r - 0.5, f"user {name}", ha="right", va="center")
    bare(ax, title)


def throughput(ax, batch, measured, predicted=None, label="", title="", name="ideal"):
    """A quantity over the batch size: measured black, predicted dashed and blue.

    measured: the values, or {name: values} of up to three curves, told apart by line and marker; name: the dashed one's.
    """
    if predicted is not None:
        ax.plot(batch, predicted, "--", marker="s", color=COLORS["predicted"], label=name)
    curves = measured if isinstance(measured, dict) else {"measured": measured}
    for (curve, values), line, marker in zip(curves.items(), ("-", ":", "-."), "o^v"):
        ax.plot(batch, values, line, marker=marker, color=COLORS["measured"], label=curve)
    ax.set(xlabel="rows in the batch", ylabel=label, title=title, xticks=batch)
    ax.set_ylim(bottom=0)
    ax.grid(axis="y")
    ax.legend()


def trips(ax, users=("A", "B", "C", "D"), batched=False, tiles=3, tile=1.5, work=0.33, title=""):
    """A timeline of one step, left to right: the weights arrive in tiles above, each is multiplied at once below.

    tile, work: how long a tile travels and how long one user's row is multiplied by it, in the same unit; the work
    on one tile runs while the next travels. Returns the time at which the last user has an answer.
    """
    groups = [users] if batched else [(user,) for user in users]
    arrived = 0.0
    for group in groups:
        for number in range(1, tiles + 1):
            box(ax, arrived, 1.2, "weights", f"tile {number}", width=tile)
            arrived += tile
            done = arrived
            for user in group:
                box(ax, done, 0, user, "", width=work)
                ax.text(done + work / 2, -0.15, user, ha="center", va="top", fontsize=9)
                done += work
    for y, name in ((1.7, "memory"), (0.5, "compute")):
        ax.text(-0.3, y, name, ha="right", va="center")
    ax.plot([0, done], [0, 0], color=INK, linewidth=0.8)
    bare(ax, title)
    return done


def one_trip():
    """The series in one picture: (figure, its alternative text)."""
    figure, axes = plt.subplots(2, 1, figsize=(9, 3.6), sharex=True)
    alone = trips(axes[0], title="One user at a time: four trips of the same weights, compute mostly idle")
    together = trips(axes[1], batched=True, title="Four users in one batch: one trip, each tile serves all four")
    axes[1].set_xlim(-3, alone + 0.5)
    axes[1].text(together + 0.4, 0.5, "all four users have their token", va="center")
    axes[1].annotate("", (alone, -1.1), (alone - 2.5, -1.1), annotation_clip=False,
                     arrowprops={"arrowstyle": "->", "color": INK})
    axes[1].text(alone - 2.7, -1.1, "time (not to scale)", ha="right", va="center")
    return figure, (
        "Two timelines of one decode step for users A, B, C and D. The weights come from memory tile after tile "
        "without a pause, and each tile is multiplied while the next one travels. One user at a time, the same "
        "weights travel four times, and the compute units work for a short moment on each tile and wait for the next. "
        "In one batch the weights travel once, and the compute units multiply each tile with all four users' rows in "
        "the time in which they would have waited, so all four users are served after "
        f"{together:.3g} units of time instead of {alone:.3g}.")


def package_map():
    """The package as a map: which file does what, and the way of a question to its answer (figure, alternative text)."""
    figure, ax = plt.subplots(figsize=(9.5, 3.8))

    def node(x, y, name, what, meaning="plain", width=2.0):
        box(ax, x, y, meaning, "", width, 0.9)
        ax.text(x + width / 2, y + 0.6, name, ha="center", va="center", family="monospace", weight="bold")
        ax.text(x + width / 2, y + 0.25, what, ha="center", va="center", fontsize=9)

    def frame(x, y, width, height, name, what):
        ax.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor=INK, linewidth=0.8, linestyle="--"))
        text = ax.text(x + width - 0.15, y + height - 0.25, what, ha="right", va="center", fontsize=9)
        ax.annotate(name, (0, 0.5), (-6, 0), xycoords=text, textcoords="offset points", ha="right", va="center",
                    family="monospace", weight="bold")

    def arrow(start, end, style="->"):
        ax.annotate("", end, start, arrowprops={"arrowstyle": style, "color": INK, "linewidth": 1.4})

    for y, name, what in ((4.1, "chat", "text and ids"), (2.5, "batch", "pad, mask, loop"), (0.9, "sample", "picks a token")):
        node(0, y, name, what)
    frame(3.1, 1.3, 8.9, 3.9, "model", "runs it all")
    frame(3.3, 1.5, 8.5, 2.0, "layer", "many times over")
    node(3.5, 4.1, "embedding", "ids to vectors, vectors to logits", width=4.2)
    for x, name, what in ((3.5, "norm", "scales a vector"), (5.6, "deltanet", "with chunk"), (7.7, "attention", "with rope"),
                          (9.8, "mlp", "token by token")):
        node(x, 1.8, name, what, width=1.9)
    node(5.6, -0.3, "cache", "what a row keeps", width=4.0)
    node(12.5, 3.9, "config", "reads the sizes")
    node(12.5, 2.2, "weights", "reads the file", "weights")
    for start, end in (((0.7, 4.1), (0.7, 3.4)), ((1.3, 3.4), (1.3, 4.1)), ((1.0, 1.8), (1.0, 2.5)), ((2.0, 2.95), (3.1, 2.95)),
                       ((3.1, 1.5), (2.0, 1.5)), ((4.4, 4.1), (4.4, 3.5)), ((6.7, 3.5), (6.7, 4.1)),
                       ((12.5, 4.35), (12.0, 4.35)), ((12.5, 2.65), (12.0, 2.65))):
        arrow(start, end)
    for x in (6.55, 8.65):
        arrow((x, 1.8), (x, 0.6), "<->")
    ax.text(2.55, 3.3, "ids,\nmask", fontsize=9, ha="center", va="center")
    ax.text(2.55, 1.15, "logits", fontsize=9, ha="center", va="center")
    bare(ax)
    return figure, (
        "Boxes named after the package's files. chat turns text into ids; batch pads them and hands ids and a mask to "
        "model, which runs them: embedding, then layer many times over (norm before deltanet with chunk or attention "
        "with rope, norm again before mlp), then embedding once more, for the logits. sample picks a token for each row, "
        "batch feeds it back, chat turns ids into text. cache stands outside the model and is joined to deltanet and "
        "attention: it keeps what a row carries between calls. config and weights read the files the model is made from.")


def outcomes(ax, rows, columns, same, title=""):
    """A table of runs: rows and columns are names, same[r][c] says whether that run equals the right one."""
    for r, name in enumerate(rows):
        ax.text(-0.15, -0.6 * r - 0.3, name, ha="right", va="center")
        for c in range(len(columns)):
            box(ax, 2 * c, -0.6 * r - 0.6, "plain" if same[r][c] else "wrong", "same" if same[r][c] else "different",
                width=2, height=0.6)
    for c, name in enumerate(columns):
        ax.text(2 * c + 1, 0.15, name, ha="center", va="bottom", fontsize=10)
    bare(ax, title)


def riding(ax, lengths, names=("A", "B", "C", "D"), title=""):
    """Answers of unequal length in one batch: useful tokens in the user's colour, the ride after them hatched."""
    longest = max(lengths)
    for r, (length, name) in enumerate(zip(lengths, names)):
        box(ax, 0, -r - 0.9, name, "", width=length, height=0.8)
        if length < longest:
            box(ax, length, -r - 0.9, "pad", "", width=longest - length, height=0.8)
        ax.text(-0.01 * longest, -r - 0.5, f"user {name}", ha="right", va="center")
        ax.text(1.01 * longest, -r - 0.5, f"{length} of {longest}", ha="left", va="center")
    ax.set(title=title, xlabel="step", xlim=(-0.12 * longest, 1.14 * longest),
           ylim=(-len(lengths), 0), yticks=[])
    ax.spines["left"].set_visible(False)


def batch_gain(machine, ours, library, predicted):
    """Tokens a second over the batch size: (figure, its alternative text).

    ours, library: {rows: tokens/s}; predicted: {rows: (at most, if nothing overlaps)} tokens/s; machine: its name.
    """
    figure, ax = plt.subplots(figsize=(7.5, 4))
    rows = list(ours)
    most, least = zip(*(predicted[n] for n in rows))
    ax.fill_between(rows, least, most, color=COLORS["predicted"], alpha=0.4, linewidth=0, label="predicted")
    ax.plot(rows, list(ours.values()), "-o", color=COLORS["measured"], label="qwen, measured")
    if library:
        ax.plot(list(library), list(library.values()), ":^", color=COLORS["measured"], label="transformers, measured")
    ax.set(title=f"One decode step serves many rows ({machine})", xlabel="rows in the batch", ylabel="tokens a second",
           xscale="log", xticks=rows)
    ax.set_xticks(rows, [str(n) for n in rows])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.grid(axis="y")
    ax.legend(loc="upper left")
    said = ", ".join(f"{n} rows {speed:.0f}" for n, speed in ours.items())
    other = ", ".join(f"{n} rows {speed:.0f}" for n, speed in library.items())
    return figure, (f"Tokens a second of a 0.8B model in fp32 over the rows in a batch, on {machine}: {said}; inside or "
                    f"near the band that the roofline predicts." + (f" transformers: {other}." if other else ""))


def attention_grid(ax, history, new, names=("A", "B", "C", "D"), title=""):
    """Who may look at whom in one step: a line for each new token's query, a column for each key, user by user.

    history, new: each user's token counts. A 1 in the user's colour is allowed, a hatched cell is a later token of the
    same user (computed and masked), an empty one another user's key (never computed). Returns the number of each.
    """
    counts = {"allowed": 0, "masked": 0, "other": 0}
    lines = [(user, h + i, i + 1) for user, (h, n) in enumerate(zip(history, new)) for i in range(n)]
    keys = [(user, k) for user, (h, n) in enumerate(zip(history, new)) for k in range(h + n)]
    for r, (user, position, number) in enumerate(lines):
        ax.text(-0.25, -r - 0.5, f"{names[user]}{number} (q{position})", ha="right", va="center")
        for c, (owner, k) in enumerate(keys):
            kind = "other" if owner != user else "allowed" if k <= position else "masked"
            counts[kind] += 1
            box(ax, c, -r - 1, {"other": "plain", "allowed": names[user], "masked": "masked"}[kind],
                "1" if kind == "allowed" else "")
    for c, (_, k) in enumerate(keys):
        ax.text(c + 0.5, 0.15, f"k{k}", ha="center", va="bottom", fontsize=9)
    column, line = 0, 0
    for h, n in list(zip(history, new))[:-1]:
        column, line = column + h + n, line + n
        ax.plot([column] * 2, [-len(lines), 0], color=INK, linewidth=3)
        ax.plot([0, len(keys)], [-line] * 2, color=INK, linewidth=3)
    bare(ax)
    ax.set_title(title, pad=24)
    return counts


def two_per_user():
    """Two users with 3 history tokens and 2 new ones each, as a grid: (figure, its alternative text)."""
    figure, ax = plt.subplots(figsize=(7.5, 3.6))
    attention_grid(ax, [3, 3], [2, 2])
    for start, name in ((0, "A"), (5, "B")):
        ax.text(start + 2.5, 1.4, f"User {name}'s keys", ha="center", va="bottom", weight="bold")
        ax.text(start + 1.5, 0.75, "history", ha="center", va="bottom", fontsize=9)
        ax.text(start + 4, 0.75, "new", ha="center", va="bottom", fontsize=9)
    for y, meaning, mark, words in ((-0.9, "A", "1", "allowed (in the\nuser's colour)"), (-2.1, "masked", "", "later token:\nmasked"),
                                    (-3.6, "plain", "", "other user:\nnot computed")):
        box(ax, 11, y, meaning, mark)
        ax.text(12.3, y + 0.5, words, va="center", fontsize=10)
    ax.set_xlim(-2.5, 16)
    ax.set_ylim(-4.1, 2.2)
    return figure, (
        "A grid of 4 queries by 10 keys. Queries A1 and A2 of user A, at positions 3 and 4, B1 and B2 of user B likewise. "
        "Each user's keys are 3 history keys k0 to k2 and 2 new ones, k3 and k4. A1 sees A's k0 to k3, A2 sees A's k0 to "
        "k4, B1 and B2 the same of B's keys. The one later key of A1 and of B1 is masked; the two blocks where a user "
        "would meet the other user's keys are empty and need not be computed.")


def roofline(ax, hardware, points=(), title="", ghost=None, left=None, right=None):
    """The roof of one machine (`roofline.Hardware`): what it can do at most, over FLOP a byte; both axes logarithmic.

    points: (name, FLOP a byte, FLOP/s, meaning) of a mark each; meaning is "predicted" or "measured", and a name that
    begins with "_" is not written. ghost: (name, peak) of a second, wrong roof; left, right: the axis's ends.
    """
    shown = [x for _, x, _, _ in points] + [hardware.ridge]
    left, right = left or min(shown) / 3, right or max(shown) * 8
    for name, peak, meaning, line in [("roof", hardware.peak, "predicted", "-")] + ([(*ghost, "wrong", ":")] if ghost else []):
        ridge = peak / hardware.bandwidth
        first = left if line == "-" else hardware.ridge     # the wrong roof leaves the right one at its ridge
        ax.plot([first, ridge, right], [first * hardware.bandwidth, peak, peak], line, color=COLORS[meaning])
        ax.annotate(f"{name}: ridge {ridge:.3g}", (right, peak), (0, 4), textcoords="offset points", ha="right", fontsize=9)
    for name, x, y, meaning in points:
        ax.plot([x], [y], "os"[meaning == "predicted"], color=COLORS[meaning], markeredgecolor=INK)
        if not name.startswith("_"):
            ax.annotate(name, (x, y), (7, -11), textcoords="offset points", fontsize=9)
    ax.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="FLOP/s", title=title, xlim=(left, right))
    ax.set_ylim(top=3 * max(hardware.peak, ghost[1] if ghost else 0))
    ax.grid(True)


REGIONS = {"weights": "weights", "caches": "caches", "arithmetic": "plain", "out of memory": "masked"}


def regions(ax, batches, contexts, kinds, title=""):
    """What takes longest, for each batch (across) and context (up). kinds[c][b]: a key of REGIONS; letters say it too."""
    for y, row in enumerate(kinds):
        for x, kind in enumerate(row):
            letter = "×" if kind == "out of memory" else kind[0].upper()
            box(ax, x, y, REGIONS[kind], letter)
    for x, batch in enumerate(batches):
        ax.text(x + 0.5, -0.15, f"{batch}", ha="center", va="top", fontsize=9)
    for y, context in enumerate(contexts):
        ax.text(-0.2, y + 0.5, f"{context:,}", ha="right", va="center", fontsize=9)
    ax.text(len(batches) / 2, -0.75, "rows in the batch", ha="center", va="top")
    ax.text(-2.2, len(contexts) / 2, "context", ha="center", va="center", rotation=90)
    bare(ax, title)


def explorer(model, hardware, batch, context):
    """`roofline.report` in bold above the roof with this step's mark, as HTML with the picture inside."""
    from qwen import roofline as paper
    words = paper.report(model, hardware, batch, context)
    fits = batch <= paper.rows_in_memory(model, hardware, context)
    x = paper.intensity(model.step(batch, context))
    figure, ax = plt.subplots(figsize=(6, 2.8))
    roofline(ax, hardware, [("this step" if fits else "out of memory", x, min(hardware.peak, x * hardware.bandwidth),
                             "predicted" if fits else "wrong")],
             f"{model.name} on {hardware.name}, {batch} rows, context {context:,}", left=0.2)
    picture = svg(figure, words)
    return f"<b>{escape(words)}</b><br>{picture[picture.index('<svg'):]}"


def two_ridges():
    """The roof of an H100, the twice as high one that a data sheet prints, and four batches: (figure, alternative text)."""
    from qwen import roofline as paper
    h100 = paper.HARDWARE["H100 SXM"]
    marks = [(f"{n} row{'s' * (n > 1)}", n, min(h100.peak, n * h100.bandwidth), "predicted") for n in (1, 10, 128, 256)]
    figure, ax = plt.subplots(figsize=(8, 4))
    roofline(ax, h100, marks, "H100, bf16, weights only", ghost=("with sparsity (wrong here)", 1979e12))
    return figure, (
        f"The roof rises with 3.35 TB/s to the ridge at {h100.ridge:.0f} FLOP a byte and stays at 989.4 TFLOPS. "
        "1, 10, 128 and 256 rows lie on the slope. A dotted roof at 1,979 TFLOPS is twice as high.")


def work_and_windows():
    """The same work done within 60, 30 and 10 seconds, as boxes of one area: (figure, its alternative text)."""
    from qwen import capacity
    work = capacity.gpu_seconds(200, 800, 2500, utilisation=0.7)
    figure, ax = plt.subplots(figsize=(8, 3.4))
    left, said = 0, []
    for window in (60, 30, 10):
        height, rented = work / window, capacity.gpus_for_work(work, window)
        box(ax, left, 0, "predicted", "", width=window, height=height)
        ax.plot([left, left + window], [rented, rented], "--", color=INK)
        ax.text(left + window / 2, rented + 0.2, f"{height:.2f}, so {rented} GPUs", ha="center", va="bottom")
        ax.text(left + window / 2, -0.3, f"{window} s", ha="center", va="top")
        said.append(f"{window} seconds wide and {height:.2f} GPUs high, {rented} rented")
        left += window + 20
    ax.set(title=f"The same {work:.1f} GPU-seconds, three windows", ylabel="GPUs at work", xticks=[],
           xlim=(-3, left), ylim=(0, 12))
    ax.spines["bottom"].set_visible(False)
    return figure, f"Three boxes of the same area, {work:.1f} GPU-seconds: {'; '.join(said)}. The shorter, the higher."


LANES = {"prefill": 0.76, "decode": 0.5, "riding": 0.5, "empty": 0.5}     # kind of a lane's piece -> its height


def timeline(ax, records, title="", steps=None, colors=None):
    """An engine's own records, one lane for each seat: who sat there, and what the row did in each step.

    A tall box in the user's colour reads a prompt, a low one decodes; hatched, the row has ended and rides along; blank,
    nobody sits there. Each stay in a seat is named once. records: `engine.StepRecord`s. steps: where the axis ends.
    colors: {id: a key of COLORS}, else A to D in turn. Returns {kind: steps of all lanes}, kinds as in LANES.
    """
    order = dict.fromkeys(name for record in records for name in record.seats if name is not None)
    colors = {name: "ABCD"[n % 4] for n, name in enumerate(order)} | (colors or {})
    ended, pieces = set(), {}
    for at, record in enumerate(records):
        for lane, name in enumerate(record.seats):
            kind = ("empty" if name not in record.rows else "riding" if name in ended
                    else "prefill" if record.rows[name] > 1 or name in record.admitted else "decode")
            lanes = pieces.setdefault(lane, [])
            if lanes and lanes[-1][:2] == [name, kind]:
                lanes[-1][3] = at + 1
            else:
                lanes.append([name, kind, at, at + 1])
        ended |= set(record.finished)
    counts = dict.fromkeys(LANES, 0)
    for lane, lanes in pieces.items():
        named = None                                                  # whose stay in this seat has its letter
        for name, kind, first, last in lanes:
            named = name if name == named else None
            counts[kind] += last - first
            color = {"empty": "plain", "riding": "pad"}.get(kind) or colors[name]
            ax.add_patch(Rectangle((first, -lane - 0.5 - LANES[kind] / 2), last - first, LANES[kind], facecolor=COLORS[color],
                                   edgecolor=INK, linewidth=0.6, hatch=HATCH.get(color)))
            if kind == "decode" and named is None:
                named = name
                short = last - first < 0.025 * (steps or len(records))    # then the name stands above
                ax.text((first + last) / 2, -lane - (0.12 if short else 0.52), str(name), ha="center",
                        va="bottom" if short else "center", fontsize=9,
                        color="white" if color in ON_DARK and not short else INK)
    ax.set(title=title, xlabel="step", xlim=(0, steps or len(records)), ylim=(-len(pieces), 0.25), yticks=[-lane - 0.5 for lane in pieces],
           yticklabels=[f"seat {lane}" for lane in pieces])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    return counts


def two_schedules():
    """The same eight requests under static and under continuous batching: (figure, its alternative text)."""
    from dataclasses import replace

    from qwen.config import FULL, Config
    from qwen.engine import Engine, Request, StaticBatcher
    from qwen.model import Model
    from qwen.weights import SHIPPED

    config = replace(Config.from_file(SHIPPED), hidden_size=8, num_hidden_layers=1, layer_types=(FULL,))
    model = Model(config)                                   # what it answers makes no difference
    lengths = {"A": 10, "B": 48, "C": 30, "D": 24, "E": 3, "F": 28, "G": 14, "H": 20}
    figure, axes = plt.subplots(2, 1, figsize=(9, 4), sharex=True)
    words, steps = [], None
    for ax, name, batcher in zip(axes, ("Static", "Continuous"), (StaticBatcher(model, 4), Engine(model, 4))):
        batcher.generate([Request([0], length, id=user) for user, length in lengths.items()])
        records = batcher.records
        steps = steps or len(records)
        counts = timeline(ax, records, f"{name} batching: {len(records)} steps", steps, dict(zip("EFGH", "DCBA")))
        words.append(f"{name} batching takes {len(records)} steps, of {4 * len(records)} seats in steps {counts['riding']} "
                     f"ride along and {counts['empty']} are empty")
    axes[0].set_xlabel("")
    return figure, (f"Two timelines of eight requests, {', '.join(f'{k} {n} steps' for k, n in lengths.items())}, on four seats. "
                    f"{'. '.join(words)}. Static: E to H wait until B, the longest, has ended. Continuous: each enters when a "
                    "seat is free.")


def pages(ax, tables, lengths, num_blocks, block_size, title="", written=""):
    """Block tables above, the memory of `num_blocks` blocks below, a line from each entry to its block.

    tables: {user: block table}, lengths: {user: tokens}. A slot has its user's colour, yellow if several users hold its
    block; a held slot without a token is empty, a free block hatched. written: users whose last token has just been
    written, its slot in a thick frame. Returns the picture in words.
    """
    step, shift, said = 0.4 * block_size + 0.5, 0.0, []
    holders = {b: [name for name, table in tables.items() if b in table] for b in range(num_blocks)}
    for b, names in holders.items():
        filled = max((lengths[n] - tables[n].index(b) * block_size for n in names), default=0)
        for place in range(block_size if names else 0):
            kind = "plain" if place >= filled else names[0] if len(names) == 1 else "weights"
            box(ax, b * step + 0.4 * place, 0, kind, "", 0.4, 0.9)
        if not names:
            box(ax, b * step, 0, "pad", "", 0.4 * block_size, 0.9)
        ax.text(b * step + 0.2 * block_size, -0.15, f"block {b}\n{' + '.join(names) or 'free'}", ha="center", va="top",
                fontsize=9)
        said.append(f"block {b} {'shared by ' if len(names) > 1 else ''}{' and '.join(names) or 'free'}")
    for name in written:
        index, place = divmod(lengths[name] - 1, block_size)
        ax.add_patch(Rectangle((tables[name][index] * step + 0.4 * place, 0), 0.4, 0.9, fill=False, edgecolor=INK, linewidth=3.5))
        said[tables[name][index]] += f", slot {place} just written by {name}"
    width = num_blocks * step - 0.5
    for name, table in tables.items():
        start = shift + (width / len(tables) - 1.1 * len(table)) / 2
        ax.text(start - 0.2, 3.3, name, ha="right", va="center", weight="bold")
        for i, b in enumerate(table):
            box(ax, start + 1.1 * i, 2.9, name, str(b), 1.1, 0.8)
            ax.plot([start + 1.1 * i + 0.55, b * step + 0.2 * block_size], [2.9, 0.9], color=COLORS[name], linewidth=1.5)
        shift += width / len(tables)
    bare(ax, title)
    rows = "; ".join(f"{name}'s table is {list(table)}, {lengths[name]} tokens" for name, table in tables.items())
    return f"{rows}. In the memory: {', '.join(said)}."


def two_tables():
    """Two users' block tables into one memory: (figure, its alternative text)."""
    figure, ax = plt.subplots(figsize=(9, 3))
    words = pages(ax, {"A": [5, 0, 3], "B": [1, 2]}, {"A": 17, "B": 13}, 6, 8,
                  "Two users, one memory, blocks of 8: a table says where a row's tokens are")
    return figure, (f"Two block tables above a memory of six blocks of eight slots. {words} "
                    f"The last block of each is partly empty.")


PICTURES = {"one_trip": one_trip, "two_per_user": two_per_user, "two_ridges": two_ridges,
            "work_and_windows": work_and_windows, "two_tables": two_tables,
            "two_schedules": two_schedules}                 # file name in figures/ -> its drawing function


def svg(figure: Figure, alt: str) -> str:
    """The picture as SVG text, the same bytes on every run, with `alt` as its <desc> for those who do not see it."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", file.getvalue(), flags=re.S)
    head, tail = re.split(r"(?<=>)(?=\s*<defs>)", text, maxsplit=1)
    head = head.removesuffix(">") + ' role="img" aria-labelledby="alt">'
    return f'{head}\n <desc id="alt">{escape(alt)}</desc>{tail}'


def main():
    """Write figures/*.svg."""
    setup()
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(svg(*draw()), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
