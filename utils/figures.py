"""Drawing and saving of the figures: tables of plotted numbers -> png, pdf and csv, the same bytes for the same table.

Every drawing is a function of its table and the width alone. Curves differ in line style and marker as well as in
colour (the palette of Okabe and Ito), so they can be told apart in grey print.
"""

import csv
import math
from contextlib import contextmanager
from functools import lru_cache

import matplotlib
import numpy

matplotlib.use("Agg")
from matplotlib import ft2font, style  # noqa: E402  the backend comes first
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.font_manager import findfont  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogFormatterMathtext, LogLocator, MaxNLocator, NullLocator  # noqa: E402

from utils.artifacts import atomic_path  # noqa: E402
from utils.errors import UserError, WorkError  # noqa: E402

WIDTHS = (3.3, 6.8)  # inches: one column and two
DPI = 300
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "0.82"
TEXT = ("panel", "curve", "dataset", "variant", "model", "token", "basis", "name", "item")  # columns of strings
STYLE = {
    "font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans", "font.size": 7, "axes.labelsize": 7,
    "axes.titlesize": 7, "legend.fontsize": 6.5, "xtick.labelsize": 6.5, "ytick.labelsize": 6.5, "axes.linewidth": 0.6,
    "lines.linewidth": 1.1, "lines.markersize": 2.8, "hatch.linewidth": 0.5, "legend.frameon": False,
    "legend.handlelength": 2.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "pdf.fonttype": 42, "path.simplify": False,
}


@contextmanager
def styled():
    """Within the block matplotlib draws in this module's style, whatever the user's matplotlibrc says."""
    with style.context(["default", STYLE]):
        yield


# ----- tables


def check_rows(rows, name):
    """Raise WorkError when a number of a table (list of dicts) is not finite."""
    for row in rows:
        for column, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise WorkError(f"figure {name}: {column} is not finite; nothing was written")


def write_table(path, rows):
    """Write rows (dicts with the same keys) as csv; floats in full, None as an empty field."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_table(path):
    """The rows that write_table wrote. Raises UserError when a field is no number."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        return [{key: value if key in TEXT else _number(value) for key, value in row.items()} for row in rows]
    except (TypeError, ValueError):
        raise UserError(f"{path}: not a table of this project; use --force to write it anew") from None


def _number(text):
    if text == "":
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)


def render(name, rows, width, stem):
    """Draw figure `name` and write stem.png (300 dpi) and stem.pdf (fonts embedded), without dates and versions."""
    with styled():
        figure = DRAWINGS[name](rows, width)
        FigureCanvasAgg(figure)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # placed: not once more for each format
        for ending, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None, "Creator": None,
                                                                       "Producer": None})):
            with atomic_path(stem.with_name(f"{stem.name}.{ending}")) as temporary:
                figure.savefig(temporary, format=ending, dpi=DPI, metadata=metadata)


# ----- what the drawings share


def visible(text):
    """Text with white space and unprintable characters made visible, for labels and csv."""
    special = {" ": "␣", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\"}
    return "".join(special.get(c) or _printable(c) for c in text)


def _printable(character):
    return character if character.isprintable() and _advance(character) else f"\\u{ord(character):04x}"


@lru_cache(maxsize=None)
def _font():
    font = ft2font.FT2Font(findfont("DejaVu Sans"))
    font.set_size(100, 72)
    return font


@lru_cache(maxsize=None)
def _advance(character):
    """Width of a character in ems, or None when the font lacks it."""
    if not _font().get_char_index(ord(character)):
        return None
    return _font().load_char(ord(character), ft2font.LoadFlags.NO_HINTING).linearHoriAdvance / 65536 / 100


def label(text, inches, size=STYLE["legend.fontsize"]):
    """`text` as matplotlib may print it, at most so many inches wide (its middle left out), never as mathematics."""
    text = shown = "".join(map(_printable, text))
    for left_out in range(2, len(text)):
        if _inches(shown, size) <= inches:
            break
        head = (len(text) - left_out) // 2
        shown = f"{text[:head]}…{text[head + left_out:]}"
    return shown.replace("$", r"\$")


def _inches(text, size=STYLE["legend.fontsize"]):
    return sum(map(_advance, text)) * size / 72


def curve_style(index, points=1):
    """Keyword arguments of the index-th curve: colour, dashes and marker, no two equal for the first 30.

    points: of the curve; of many, some carry a marker, and not the same ones in every curve.
    """
    step = -(-points // 16)
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)],
            "marker": MARKERS[index % len(MARKERS)], "markevery": (index * step // 4 % step, step)}


def _panels(width, count, height=2.1, columns=None):
    """(Figure, list of Axes): panels below one another in one column, beside one another in two."""
    columns = columns or (1 if width < 5 else min(count, 2))
    rows = -(-count // columns)
    figure = Figure(figsize=(width, 0.2 + height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for extra in axes[count:]:
        extra.remove()
    return figure, list(axes[:count])


def _legend(figure, width, handles):
    """One legend below the panels, in as many columns as fit; the figure grows by its height."""
    unique = {}
    for handle in handles:  # the same entry of several panels once; two curves with one shortened name stay two
        look = (handle.get_color(), str(handle.get_linestyle())) if isinstance(handle, Line2D) else ()
        unique.setdefault((handle.get_label(), *look), handle)
    names = [key[0] for key in unique]
    sizes = [_inches(name.replace(r"\$", "$")) + 0.55 for name in names]
    for columns in range(len(sizes), 0, -1):
        parts = numpy.array_split(sizes, columns)  # as matplotlib fills its columns
        if sum(part.max() for part in parts) < width - 0.1:
            break
    figure.set_figheight(figure.get_figheight() + 0.05 + 0.14 * len(parts[0]))
    figure.legend(list(unique.values()), names, loc="outside lower center", ncols=columns)


def _value_axis(axes, values, which="y"):
    """A logarithmic axis where positive values span more than a decade, few ticks on a linear one."""
    axis = getattr(axes, f"{which}axis")
    if min(values) > 0 and max(values) > 10 * min(values):
        getattr(axes, f"set_{which}scale")("log")
        axis.set_major_locator(LogLocator(numticks=7))
        axis.set_major_formatter(LogFormatterMathtext())
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def _layer_axis(axes, last):
    axes.set_xlim(-0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))


def _grey(axes, blocks):
    """Grey spans over the removed blocks [(start, end), ...]; nested ones get darker."""
    for start, end in blocks:
        axes.axvspan(start, end, facecolor="0.35", alpha=0.22, linewidth=0, zorder=0)
    return [Patch(facecolor=GREY, label="removed layers")] if blocks else []


def _where(rows, **wanted):
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _distinct(rows, *columns):
    return list(dict.fromkeys(tuple(row[column] for column in columns) if len(columns) > 1 else row[columns[0]]
                              for row in rows))


def _column(rows, name):
    return [row[name] for row in rows]


# ----- the figures


def draw_alignment(rows, width):
    """Figure 1(a): magnitudes over depth, and channel by channel at the interface, before and after alignment."""
    figure, (depth, interface) = _panels(width, 2)
    blocks = [(row["x"], row["end"]) for row in _where(rows, panel="block")]
    handles = _grey(depth, blocks)
    states, channels = _where(rows, panel="depth"), _where(rows, panel="interface")
    dense, start = _where(states, curve="dense"), blocks[0][0]
    band = depth.fill_between(_column(dense, "x"), _column(dense, "low"), _column(dense, "high"), facecolor="none",
                              edgecolor=COLOURS[6], hatch="////", linewidth=0.3, label="10-90 % of channels, dense")
    for index, curve in enumerate(_distinct(states, "curve")):
        points = _where(states, curve=curve)
        if curve != "dense":  # equal to dense before the block; carried over it from there
            points = [row for row in dense if row["x"] == start] + [row for row in points if row["x"] > start]
        line, = depth.plot(_column(points, "x"), _column(points, "value"), label=label(curve, width - 0.8),
                           **curve_style(index, len(points)))
        handles.append(line)
        ratios = sorted(_column(_where(channels, curve=curve), "value"))
        if ratios:
            places = [100 * (rank + 0.5) / len(ratios) for rank in range(len(ratios))]
            interface.plot(places, ratios, **curve_style(index, len(ratios)))
    interface.axhline(1, color=COLOURS[0], linewidth=0.6)
    handles.append(band)
    last = max(_column(dense, "x"))
    _layer_axis(depth, last)
    _value_axis(depth, _column(states, "value") + _column(dense, "low") + _column(dense, "high"))
    _value_axis(interface, _column(channels, "value"))
    depth.set(xlabel="input of layer", ylabel="mean |activation|")
    interface.set(xlabel="channels, sorted (%)", ylabel=f"|read by layer {blocks[0][1]}| / dense"
                  if blocks[0][1] < last else "|read by the norm| / dense")
    _legend(figure, width, handles)
    return figure


def draw_alpha(rows, width):
    """Figure 1(b): perplexity against alpha, with the levels of the dense and the vanilla pruned model."""
    datasets = _distinct(rows, "dataset")
    figure, panels = _panels(width, len(datasets))
    handles = []
    for axes, dataset in zip(panels, datasets):
        own = _where(rows, dataset=dataset)
        for index, (variant, item) in enumerate(_distinct(own, "variant", "item")):
            points, look = _where(own, variant=variant), curve_style(index)
            name = label(variant, width - 0.8)
            if item == "level":
                handles.append(axes.axhline(points[0]["ppl"], label=name, color=look["color"],
                                            linestyle=look["linestyle"]))
            else:
                handles += axes.plot(_column(points, "alpha"), _column(points, "ppl"), label=name, **look)
        _value_axis(axes, _column(own, "ppl"))
        axes.set(title=label(dataset, 2.4, 7), xlabel=r"$\alpha$, scale of the patch", ylabel="perplexity")
    _legend(figure, width, handles)
    return figure


def draw_violins(rows, width):
    """Figure 2: densities of the token-wise scalings, raw and rotated, over their logarithm."""
    blocks = _distinct(rows, "start", "end")
    per_row = min(2 if width < 5 else 4, len(blocks))
    figure, panels = _panels(width, -(-len(blocks) // per_row), 2.2, columns=1)
    looks = {"raw": dict(facecolor=COLOURS[1]), "rotated": dict(facecolor=COLOURS[5], hatch="////")}
    reach = _column(rows, "scaling")
    for number, axes in enumerate(panels):
        places, texts = [], []
        for slot, (start, end) in enumerate(blocks[number * per_row:(number + 1) * per_row]):
            for side, basis in enumerate(looks):
                points, place = _where(rows, start=start, end=end, basis=basis), 2.4 * slot + side
                widest = max(_column(points, "density"))
                left, right = ([place + sign * 0.42 * row["density"] / widest for row in points] for sign in (-1, 1))
                axes.fill_betweenx(_column(points, "scaling"), left, right, edgecolor="black", linewidth=0.5,
                                   **looks[basis])
                row = points[0]
                axes.vlines(place, row["q25"], row["q75"], color="black", linewidth=2.2)
                axes.plot(place, row["q50"], "o", color="white", markeredgecolor="black", markersize=3.2)
                places.append(place)
                texts.append(f"{basis}\n$\\sigma_d$ {_digits(row['sigma_d'])}\n"
                             f"$\\sigma_{{\\log}}$ {_digits(row['log_sigma_d'])}")
            axes.text(2.4 * slot + 0.5, 1.01, f"layers [{start}, {end})", transform=axes.get_xaxis_transform(),
                      ha="center", va="bottom")
        axes.set_xticks(places, texts)
        axes.set_xlim(-0.6, 2.4 * (per_row - 1) + 1.6)
        _value_axis(axes, reach)
        axes.axhline(1, color="0.4", linewidth=0.5, zorder=0)
        axes.set_ylim(min(reach) / 2, 2 * max(reach))
        axes.set_ylabel("token-wise scaling (ratio)")
    shapes = [Patch(edgecolor="black", label=f"{basis} channels", **look) for basis, look in looks.items()]
    median = Line2D([], [], linestyle="none", marker="o", color="white", markeredgecolor="black", label="median")
    _legend(figure, width, [*shapes, median, Line2D([], [], color="black", linewidth=2.2, label="quartiles")])
    return figure


def _digits(value):
    return f"{value:.4g}" if value < 10000 else f"{value:.1e}"


def draw_depths(rows, width):
    """Figure 4: magnitudes of the channels over depth, one panel for each model."""
    models = _distinct(_where(rows, item="state"), "model")
    columns = min(len(models), 2 if width < 5 else 3)
    figure, panels = _panels(width, len(models), 1.7, columns)
    handles = []
    for number, (axes, model) in enumerate(zip(panels, models)):
        states = _where(rows, model=model, item="state")
        grey = _grey(axes, [(row["layer"], row["end"]) for row in _where(rows, model=model, item="block")])
        layers = _column(states, "layer")
        band = axes.fill_between(layers, _column(states, "low"), _column(states, "high"), facecolor="none",
                                 edgecolor=COLOURS[6], hatch="////", linewidth=0.3, label="10-90 % of channels")
        handles += grey + [band]
        for column, name, index in (("largest", "largest channel", 2), ("mean", "mean of channels", 0),
                                    ("median", "median channel", 1)):
            handles += axes.plot(layers, _column(states, column), label=name, **curve_style(index, len(layers)))
        _layer_axis(axes, max(layers))
        _value_axis(axes, [row[c] for row in states for c in ("low", "largest")])
        axes.set_title(label(model, width / columns - 0.6, 7))
        if number % columns == 0:
            axes.set_ylabel("mean |activation|")
        if number + columns >= len(models):
            axes.set_xlabel("input of layer")
    _legend(figure, width, handles)
    return figure


def draw_massive(rows, width):
    """The largest activations at every depth, and the tokens that carry the largest of all."""
    figure, (depth, tokens) = _panels(width, 2)
    states, carriers = _where(rows, item="layer"), _where(rows, item="token")
    for rank in _distinct(states, "rank"):
        points = _where(states, rank=rank)
        name = ("median", "largest", "second", "third")[rank]
        depth.plot(_column(points, "layer"), _column(points, "value"), label=name,
                   **curve_style(rank, len(points)))
    _layer_axis(depth, max(_column(states, "layer")))
    _value_axis(depth, _column(states, "value"))
    depth.set(xlabel="input of layer", ylabel="|activation|")
    kinds = {True: dict(marker="D", color=COLOURS[5], label="first token of its window"),
             False: dict(marker="o", color=COLOURS[6], label="later token")}
    for place, row in enumerate(carriers):
        tokens.axhline(place, color="0.8", linewidth=0.5, zorder=0)
        tokens.plot(row["value"], place, linestyle="none", markeredgecolor="black", markersize=4.5,
                    **kinds[row["position"] == 0])
    tokens.set_yticks(range(len(carriers)), [label(row["token"], 0.9) for row in carriers])
    tokens.invert_yaxis()
    values = _column(carriers, "value")
    _value_axis(tokens, values, "x")
    if tokens.get_xscale() == "log":
        tokens.set_xlim(min(values) / 2, 2 * max(values))
    tokens.set(xlabel="largest |activation| of the token", ylabel="token")
    shapes = [Line2D([], [], linestyle="none", markeredgecolor="black", markersize=4.5, **kind)
              for kind in kinds.values()]
    _legend(figure, width, [*depth.lines, *shapes])
    return figure


def draw_similarity(rows, width):
    """The cosine of every pair of depths, with the chosen blocks outlined."""
    cells, blocks = _where(rows, item="cosine"), _where(rows, item="block")
    size = max(_column(cells, "row")) + 1
    table = [[0.0] * size for _ in range(size)]
    for cell in cells:
        table[cell["row"]][cell["column"]] = cell["value"]
    figure = Figure(figsize=(width, min(0.85 * width, 4.6)), layout="compressed")
    axes = figure.subplots()
    image = axes.imshow(table, cmap="cividis", origin="lower", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="mean cosine of tokens", shrink=0.9)
    handles = []
    for index, block in enumerate(blocks):
        start, end = block["row"], block["column"]
        look = dict(color="black", linewidth=1.1, linestyle=DASHES[index % len(DASHES)])
        low, high = start - 0.5, end + 0.5
        across, up = [low, high, high, low, low], [low, low, high, high, low]
        axes.plot(across, up, color="white", linewidth=2.6)
        handles += axes.plot(across, up, **look, label=f"{label(block['name'], width - 1.4)} [{start}, {end})")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(7, integer=True))
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(True)
    axes.set(xlabel="input of layer", ylabel="input of layer")
    if handles:
        _legend(figure, width, handles)
    return figure


def draw_scales(rows, width):
    """The scale vector d, sorted, with its standard error: on the raw and on the rotated channels."""
    bases = _distinct(rows, "basis")
    figure, panels = _panels(width, len(bases))
    handles = []
    for axes, basis in zip(panels, bases):
        own = _where(rows, basis=basis)
        lowest = min(_column(own, "d"))
        for index, (start, end) in enumerate(_distinct(own, "start", "end")):
            points = sorted(_where(own, start=start, end=end), key=lambda row: row["d"])
            places = [100 * (rank + 0.5) / len(points) for rank in range(len(points))]
            look = curve_style(index, len(points))
            axes.fill_between(places, [max(row["d"] - row["stderr"], lowest / 2) for row in points],
                              [row["d"] + row["stderr"] for row in points], color=look["color"], alpha=0.25,
                              linewidth=0)
            handles += axes.plot(places, _column(points, "d"), label=f"[{start}, {end}) ± standard error", **look)
        axes.axhline(1, color="0.4", linewidth=0.5, zorder=0)
        _value_axis(axes, _column(own, "d"))
        axes.set(xlabel="channels, sorted (%)", ylabel=f"d, {basis} channels")
    _legend(figure, width, handles)
    return figure


def draw_metrics(rows, width):
    """Perplexity by selection metric and number of removed layers, alone and with the patch; best metrics on top.

    Values above ten times the median stand at the right edge as numbers: a broken model would squeeze all others.
    """
    depths = sorted(set(_column(rows, "n")))
    names = sorted(_distinct(rows, "name"), key=lambda name: (_worst(rows, name), name))
    limit = 10 * numpy.median(_column(rows, "ppl")).item()
    figure = Figure(figsize=(width, 0.6 + max(1.3, 0.12 * len(names) * (len(depths) + 1))), layout="constrained")
    axes, handles = figure.subplots(), []
    for index, n in enumerate(depths):
        look = {"color": COLOURS[1 + index % 6], "marker": MARKERS[index % len(MARKERS)], "linestyle": "none",
                "markersize": 4}
        for item, face in (("alone", "white"), ("patched", look["color"])):
            handles += axes.plot([], [], markerfacecolor=face, **look,
                                 label=f"{n} layers, {'with LinearPatch' if item == 'patched' else 'alone'}")
            for row in _where(rows, n=n, item=item):
                if row["ppl"] <= limit:
                    axes.plot(row["ppl"], _place(names, row, depths), markerfacecolor=face, **look)
        for name in names:
            pair = {row["item"]: row["ppl"] for row in _where(rows, n=n, name=name)}
            place = _place(names, {"name": name, "n": n}, depths)
            if pair:
                axes.plot([min(min(pair.values()), limit), min(max(pair.values()), limit)], [place, place],
                          color=look["color"], linewidth=0.8, zorder=1)
            beyond = [f"{pair[item]:.1e}" for item in ("alone", "patched") if pair.get(item, 0) > limit]
            if beyond:
                axes.text(limit, place, " → ".join(beyond) + " ▸", ha="right", va="center", fontsize=5.5,
                          color=look["color"])
    for place in range(1, len(names)):
        axes.axhline(place - 0.5, color="0.85", linewidth=0.5, zorder=0)
    axes.set_yticks(range(len(names)), [label(name, 1.0) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    _value_axis(axes, [min(value, limit) for value in _column(rows, "ppl")], "x")
    if axes.get_xscale() == "log":
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(right=1.05 * limit)
    axes.set(xlabel=f"perplexity on {label(rows[0]['dataset'], 0.9)}", ylabel="selection metric")
    _legend(figure, width, handles)
    return figure


def _place(names, row, depths):
    """Height of a row's point: below one another for the numbers of layers of one metric."""
    return names.index(row["name"]) + (depths.index(row["n"]) + 1) / (len(depths) + 1) - 0.5


def _worst(rows, name):
    """Perplexity of a metric alone at its largest number of layers."""
    own = [row for row in rows if row["name"] == name]
    return max(own, key=lambda row: (row["n"], row["item"] == "alone"))["ppl"]


DRAWINGS = {"1a": draw_alignment, "1b": draw_alpha, "2": draw_violins, "4": draw_depths, "massive": draw_massive,
            "similarity": draw_similarity, "d": draw_scales, "metrics": draw_metrics}
