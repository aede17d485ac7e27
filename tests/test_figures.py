"""The figures: their numbers against independent computations, their files, and their layout at both widths."""

import csv
import json
import re
from itertools import combinations

import numpy
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from tests.artifacts import identity, ppl_row
from tests.steps import CALIB, calibrate, prune
from tests.tiny import plain_states, save, tiny
from tests.tokenizers_for_tests import tok_nobos
from utils import figures
from utils.artifacts import read_tensors, write_json
from utils.data.windows import calibration_windows
from utils.errors import UserError, WorkError
from utils.hadamard import rotation
from utils.repairs import write_patch

NAMES = ("1a", "1b", "2", "4", "massive", "similarity", "d", "metrics")
RESULTS = [ppl_row(f"row {number}", dataset, value, about=dict(metric=metric, n=3, repair=repair, stage=stage))
           for dataset in ("wiki", "news") for number, (metric, repair, stage, value) in enumerate((
               ("cosine", "none", "pruned", 50.0), ("cosine", "hadamard", "calibrated", 45.0),
               ("sleb", "none", "pruned", 40.0), ("sleb", "hadamard", "calibrated", 39.0),
               ("taylor+", "none", "pruned", 90.0), ("taylor+", "hadamard", "calibrated", 60.0),
               ("cosine", "diagonal", "calibrated", 46.0), ("cosine", "hadamard", "distilled", 30.0),
               ("list", "none", "pruned", 1.0)))]
RESULTS.insert(0, ppl_row("dense", "wiki", 20.0))
FROM_STATS = ("4", "similarity", "d")


@pytest.fixture(scope="module")
def artifacts():
    """{file name: bytes} of the artifacts of a tiny model, filled by the first test."""
    return {}


@pytest.fixture
def run(script, folders, tmp_path, text, artifacts, monkeypatch):
    """run(*flags, figure=...) of plot_magnitudes with the artifacts of a tiny model, into tmp_path/figures.

    draw=False leaves the pictures out: a second each.
    """
    folder = folders("llama")
    if not artifacts:
        assert prune(script, folder, tmp_path, text, "--layers", "2-3")[0] == 0
        assert calibrate(script, folder, tmp_path, text, name="P.safetensors")[0] == 0
        assert calibrate(script, folder, tmp_path, text, "--repair", "diagonal", name="d.safetensors")[0] == 0
        artifacts.update({path.name: path.read_bytes() for path in tmp_path.iterdir() if path != text})
    for name, content in artifacts.items():
        (tmp_path / name).write_bytes(content)
    model_of = json.loads((tmp_path / "selection.json").read_text())["model"]
    write_json(tmp_path / "ppl.json", "ppl", {"model": model_of, "results": RESULTS})

    def call(*flags, figure, out="figures", model=folder, stats=True, selection=True, patch=True, results=True,
             draw=False):
        monkeypatch.setattr("plot_magnitudes.render", figures.render if draw else lambda *args: None)
        given = [*(("--model", model) if model else ()), "--figure", *figure]
        given += ["--stats", tmp_path / "stats.safetensors"] if stats else []
        given += ["--selection", f"n2={tmp_path}/selection.json"] if selection else []
        given += ["--patch", f"d={tmp_path}/d.safetensors", f"P={tmp_path}/P.safetensors"] if patch else []
        given += ["--results", tmp_path / "ppl.json"] if results else []
        return script("plot_magnitudes", *given, "--calib-data", text, *CALIB, "--windows", 3, "--datasets", text,
                      "--limit-windows", 3, "--out", tmp_path / out, *flags)

    return call


def table(folder, name):
    with open(folder / f"figure_{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows, column, **wanted):
    return numpy.array([float(row[column]) for row in rows if all(row[key] == str(v) for key, v in wanted.items())])


@pytest.fixture
def windows(text):
    return calibration_windows(str(text), tok_nobos(), 4, 32).ids


def test_every_figure_is_written_in_three_formats_and_the_same_twice(run, tmp_path):
    code, printed, err = run(figure=["all"], out="one", draw=True)
    assert code == 0 and "skipped" not in printed, err
    again = ("1a", "2", "massive", "similarity")  # curves, mathematics, hatches, an image
    assert run(figure=again, out="two", draw=True)[0] == 0
    for name in NAMES:
        for ending in ("png", "pdf", "csv") if name in again else ():
            one, two = (tmp_path / out / f"figure_{name}.{ending}" for out in ("one", "two"))
            assert one.read_bytes() == two.read_bytes(), one
        image = Image.open(tmp_path / "one" / f"figure_{name}.png")
        assert image.width == 2040 and image.info["dpi"] == pytest.approx((300, 300), abs=0.01)
        assert set(image.info) <= {"dpi"}
        document = (tmp_path / "one" / f"figure_{name}.pdf").read_bytes()
        assert b"/FontFile2" in document and b"/Type3" not in document and b"CreationDate" not in document
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(
        f"figure_{name}.{ending}" for name in NAMES for ending in ("png", "pdf", "csv", "json"))
    content = json.loads((tmp_path / "one" / "figure_2.json").read_text())
    assert content["format"] == "linearpatch/figure@2" and {"versions", "git_commit"} <= set(content["provenance"])


def test_what_stats_hold_is_drawn_without_weights(run, tmp_path, windows, monkeypatch):
    monkeypatch.setattr("utils.session.load_decoder", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    monkeypatch.setattr("utils.session.find_model", lambda *args, **kwargs: pytest.fail("the model was looked up"))
    code, out, _ = run(figure=["all"], model=None, patch=False)
    assert code == 0 and re.findall(r"figure (\w+): skipped, needs --model", out) == ["1a", "1b", "2", "massive"]
    folder, states = tmp_path / "figures", plain_states(tiny(), windows)
    size = states.abs().mean((1, 2))
    rows = table(folder, "4")
    for column, expected in (("mean", size.mean(1)), ("median", size.quantile(0.5, 1)), ("largest", size.amax(1)),
                             ("low", size.quantile(0.1, 1)), ("high", size.quantile(0.9, 1))):
        assert numbers(rows, column, item="state") == pytest.approx(expected.numpy(), rel=1e-5)
    assert [(row["layer"], row["end"]) for row in rows if row["item"] == "block"] == [("2", "4")]
    unit = states / states.norm(dim=-1, keepdim=True)
    cosines = torch.einsum("lbtc,mbtc->lmbt", unit, unit).mean((2, 3))
    rows = table(folder, "similarity")
    assert numbers(rows, "value", item="cosine").reshape(7, 7) == pytest.approx(cosines.numpy(), abs=1e-5)
    assert [(row["name"], row["row"], row["column"]) for row in rows if row["item"] == "block"] == [("n2", "2", "4")]
    assert numbers(rows, "value", item="block") == pytest.approx([cosines[2, 4].item()], abs=1e-5)
    rows = table(folder, "d")
    for basis, change in (("raw", torch.eye(64).double()), ("rotated", rotation(64).matrix())):
        norms = (states @ change).abs().sum(2)
        d = norms.sum(1)
        assert numbers(rows, "d", basis=basis) == pytest.approx((d[4] / d[2]).numpy(), rel=1e-4)
        assert numbers(rows, "stderr", basis=basis) == pytest.approx(
            (norms[4] / norms[2]).std(0).numpy() / 2, rel=0.8, abs=0.01)  # of 4 windows, roughly


def patched_states(matrix, input_ids):
    """What the layers 0, 1, 4, 5 and the norm read when layers 2 and 3 are gone and x P enters layer 4."""
    model = tiny()
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in (0, 1, 4, 5))
    model.config.num_hidden_layers = 4
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.model.layers[2].register_forward_pre_hook(lambda m, args: (args[0] @ matrix, *args[1:]))
    return plain_states(model, input_ids)


def test_figure_1a_is_what_the_layers_of_each_model_read(run, tmp_path, windows):
    assert run(figure=["1a"])[0] == 0
    rows, ids = table(tmp_path / "figures", "1a"), windows[:3]
    dense = plain_states(tiny(), ids).abs().mean((1, 2))
    assert numbers(rows, "value", panel="depth", curve="dense") == pytest.approx(dense.mean(1).numpy(), rel=1e-5)
    high = dense.quantile(0.9, 1).numpy()
    assert numbers(rows, "high", panel="depth", curve="dense") == pytest.approx(high, rel=1e-5)
    scales = {name: read_tensors(tmp_path / f"{name}.safetensors", "patch")[1]["run0.d"] for name in ("d", "P")}
    matrix = rotation(64).matrix().float()
    matrices = {"pruned": torch.eye(64), "d": scales["d"].diag(), "P": matrix @ scales["P"].diag() @ matrix.T}
    for curve, matrix in matrices.items():
        read = patched_states(matrix, ids).abs().mean((1, 2))
        assert numbers(rows, "x", panel="depth", curve=curve).tolist() == [0, 1, 4, 5, 6]
        assert numbers(rows, "value", panel="depth", curve=curve) == pytest.approx(read.mean(1).numpy(), rel=1e-4)
        ratio = (read[2] / dense[4]).numpy()
        assert numbers(rows, "value", panel="interface", curve=curve) == pytest.approx(ratio, rel=1e-4)


def test_figure_1b_holds_the_perplexities_of_eval_ppl(run, script, folders, tmp_path, text):
    assert run(figure=["1b"])[0] == 0
    rows = table(tmp_path / "figures", "1b")
    header, tensors = read_tensors(tmp_path / "P.safetensors", "patch")
    write_patch(tmp_path / "half.safetensors", {"run0.d": 0.5 * tensors["run0.d"]}, header)
    patches = [f"{name}={tmp_path}/{name}.safetensors" for name in ("d", "P", "half")]
    code, _, _ = script("eval_ppl", "--model", folders("llama"), "--selection", f"vanilla={tmp_path}/selection.json",
                        "--patch", *patches, "--datasets", text, "--seq-len", 32, "--limit-windows", 3, "--out",
                        tmp_path / "ppl.json")
    assert code == 0
    expected = {row["variant"]: row for row in json.loads((tmp_path / "ppl.json").read_text())["results"]}
    for variant, alpha, name in (("dense", "", "dense"), ("vanilla [2, 4)", "", "vanilla"), ("d", 1.0, "d"),
                                 ("P", 1.0, "P"), ("P", 0.5, "half")):
        found = numbers(rows, "ppl", variant=variant, alpha=alpha)
        assert found == pytest.approx([expected[name]["ppl"]], rel=1e-5)
    assert numbers(rows, "ratio_to_vanilla", variant="P", alpha=1.0) == pytest.approx(
        [expected["P"]["ppl"] / expected["vanilla"]["ppl"]], rel=1e-6)
    assert numbers(rows, "alpha", variant="d").tolist() == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5]


def test_figure_2_shows_all_token_ratios_of_a_small_model(run, tmp_path, windows):
    assert run(figure=["2"])[0] == 0
    rows, states = table(tmp_path / "figures", "2"), plain_states(tiny(), windows[:3])
    for basis, change in (("raw", torch.eye(64).double()), ("rotated", rotation(64).matrix())):
        ratio = (states[4] @ change).abs() / (states[2] @ change).abs()
        assert numbers(rows, "values", basis=basis)[0] == ratio.numel()
        assert numbers(rows, "sigma_d", basis=basis)[0] == pytest.approx(ratio.std(1).mean().item(), rel=1e-3)
        assert numbers(rows, "log_sigma_d", basis=basis)[0] == pytest.approx(ratio.log().std(1).mean().item(), rel=1e-3)
        for column, share in (("q25", 0.25), ("q50", 0.5), ("q75", 0.75)):
            assert numbers(rows, column, basis=basis)[0] == pytest.approx(ratio.quantile(share).item(), rel=1e-3)
        scaling, density = (numbers(rows, column, basis=basis) for column in ("scaling", "density"))
        assert numpy.trapezoid(density, numpy.log10(scaling)) == pytest.approx(1, abs=0.02)
        below = scaling <= ratio.median().item()
        assert numpy.trapezoid(density[below], numpy.log10(scaling[below])) == pytest.approx(0.5, abs=0.03)


def test_massive_activations_and_their_tokens(run, tmp_path, windows):
    assert run(figure=["massive"])[0] == 0
    rows, ids = table(tmp_path / "figures", "massive"), windows[:3]
    states = plain_states(tiny(), ids).abs()
    layers = [row for row in rows if row["item"] == "layer" and row["rank"] != "0"]
    for layer in range(7):
        values, flat = states[layer].flatten().topk(3)
        own = [row for row in layers if row["layer"] == str(layer)]
        assert [float(row["value"]) for row in own] == pytest.approx(values.tolist(), rel=1e-5)
        for row, place in zip(own, flat.tolist()):
            window, position, channel = numpy.unravel_index(place, states[layer].shape)
            assert [int(row[name]) for name in ("window", "position", "channel")] == [window, position, channel]
            assert row["token"] == f"w{ids[window, position] - 4}"
    medians = torch.stack([state.flatten(1).median(1).values.mean() for state in states])
    assert numbers(rows, "value", item="layer", rank=0) == pytest.approx(medians.numpy(), rel=1e-3)
    largest = states.amax((0, 3))
    best = {}
    for window, position in numpy.ndindex(*largest.shape):
        key = f"w{ids[window, position] - 4}", position == 0
        best[key] = max(best.get(key, 0), largest[window, position].item())
    top = sorted(best.values(), reverse=True)[:8]
    assert numbers(rows, "value", item="token") == pytest.approx(top, rel=1e-5)


def test_numbers_that_are_there_are_drawn_anew_but_not_computed(run, tmp_path, monkeypatch):
    assert run(figure=["2"], draw=True)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("utils.session.load_decoder", lambda *args, **kwargs: pytest.fail("weights were loaded"))
        code, out, _ = run("--width", 3.3, figure=["2"], draw=True)
        assert code == 0 and "figure_2.json: reused" in out
    assert Image.open(tmp_path / "figures" / "figure_2.png").width == 990
    assert (tmp_path / "figures" / "figure_2.csv").read_bytes() == before["figure_2.csv"]
    run(figure=["2"], draw=True)
    assert (tmp_path / "figures" / "figure_2.png").read_bytes() == before["figure_2.png"]
    edited = tmp_path / "figures" / "figure_2.csv"
    edited.write_text(edited.read_text().replace("raw", "new"))
    code, out, _ = run(figure=["2"])
    assert code == 0 and "was edited; recomputing" in out and edited.read_bytes() == before["figure_2.csv"]
    code, out, _ = run("--windows", 2, figure=["2"])
    assert code == 0 and "made with another windows; recomputing" in out


def test_a_seed_draws_the_same_scalings(run, tmp_path, monkeypatch):
    monkeypatch.setattr("plot_magnitudes.SAMPLED", 300)
    contents = []
    for seed in (0, 0, 1):
        assert run("--seed", seed, "--force", figure=["2"])[0] == 0
        contents.append((tmp_path / "figures" / "figure_2.csv").read_bytes())
        assert numbers(table(tmp_path / "figures", "2"), "values")[0] == 300
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("figure, given, words", [
    ("1a", dict(stats=False), "--stats"), ("1a", dict(patch=False, selection=False), "--patch"),
    ("1b", dict(patch=False), "--patch"), ("2", dict(selection=False, patch=False), "--selection"),
    ("4", dict(stats=False), "--stats"), ("similarity", dict(stats=False), "--stats"),
    ("d", dict(stats=False), "--stats"),
    ("d", dict(selection=False, patch=False), "--selection"), ("9", {}, "invalid choice")])
def test_a_missing_input_is_named_and_nothing_written(run, tmp_path, figure, given, words):
    code, _, err = run(figure=["massive", figure], **given)
    assert code == 2 and words in err and not (tmp_path / "figures").exists()


def test_wrong_inputs_leave_nothing(run, script, folders, tmp_path, text):
    def refused(result, *words):
        code, _, err = result
        message = err[err.rindex("error: "):]
        assert code == 2 and all(word in message for word in words) and len(message.strip().splitlines()) <= 2, err
        assert not (tmp_path / "figures").exists()

    for name in ("1a", "similarity", "d"):
        refused(run(figure=[name], model=folders("no-ops"), selection=False, patch=name != "similarity"),
                "another model")
    refused(run("--calib-samples", 5, figure=["1a"]), "--stats", "other windows")
    refused(run(figure=["d"], selection=False, patch=False, stats=False), "needs one --stats file, 0 given")
    refused(run("--width", "5", figure=["d"]), "--width")
    refused(run("--datasets", tmp_path / "none.txt", figure=["d", "1b"]), "none.txt")
    (tmp_path / "broken.safetensors").write_bytes(b"{}")
    refused(run("--stats", tmp_path / "broken.safetensors", figure=["4"]), "broken.safetensors")
    stats = tmp_path / "stats.safetensors"
    refused(run("--stats", f"a={stats}", f"b={stats}", figure=["d"]), "needs one --stats file, 2 given")
    refused(run("--stats", f"a={stats}", f"a={stats}", figure=["4"]), "two files are called a")
    script("prune", "--model", folders("llama"), "--layers", "1", "--out", tmp_path / "other.json")
    script("calibrate", "--model", folders("llama"), "--selection", tmp_path / "other.json", "--calib-data",
           text, *CALIB, "--out", tmp_path / "other.safetensors")
    refused(run("--patch", tmp_path / "other.safetensors", f"P={tmp_path}/P.safetensors", figure=["1a"]), "same layers")
    refused(run("--patch", f"dense={tmp_path}/P.safetensors", figure=["1b"]), "dense is taken")
    script("prune", "--model", folders("48"), "--layers", "1", "--out", tmp_path / "48.json")
    refused(run("--selection", tmp_path / "48.json", figure=["d"]), "48.json", "another model")
    (tmp_path / "file").write_text("mine")
    code, _, err = run(figure=["d"], out="file")
    assert code == 2 and "--out" in err and (tmp_path / "file").read_text() == "mine"


def test_all_says_what_it_leaves_out(run, tmp_path):
    code, out, _ = run(figure=["all"], patch=False, stats=False, results=False)
    assert code == 0 and sorted(re.findall(r"figure (\w+): skipped, (needs [\w-]+)", out)) == [
        ("1a", "needs one"), ("1b", "needs --patch"), ("4", "needs --stats"), ("d", "needs one"),
        ("metrics", "needs --results"), ("similarity", "needs one")]
    assert sorted(path.stem for path in (tmp_path / "figures").glob("*.csv")) == ["figure_2", "figure_massive"]


def test_models_of_several_stats_have_their_own_blocks(run, script, folders, tmp_path, text):
    other = save(tiny(seed=1, num_hidden_layers=4), tmp_path / "other-model")
    prune(script, other, tmp_path / "other", text, "--n-prune", 1)
    code, _, _ = run("--stats", f"one={tmp_path}/stats.safetensors", f"two={tmp_path}/other/stats.safetensors",
                     "--selection", tmp_path / "selection.json", tmp_path / "other" / "selection.json", figure=["4"],
                     model=None)
    rows = table(tmp_path / "figures", "4")
    removed = json.loads((tmp_path / "other" / "selection.json").read_text())["runs"][0]
    blocks = [(row["model"], int(row["layer"]), int(row["end"])) for row in rows if row["item"] == "block"]
    assert code == 0 and blocks == [("one", 2, 4), ("two", *removed)]
    assert [len(numbers(rows, "mean", model=name, item="state")) for name in ("one", "two")] == [7, 5]


# ----- layout


def check_layout(name, rows, width):
    """No two texts overlap, none leaves the canvas, and the legend lies outside of all panels."""
    with figures.styled():
        figure = figures.DRAWINGS[name](rows, width)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer, hidden = canvas.get_renderer(), set()
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            shown = set(axis._update_ticks())
            for tick in {*axis.get_major_ticks(), *axis.get_minor_ticks()} - shown:
                hidden |= {tick.label1, tick.label2}
        texts = [text for text in figure.findobj(Text)
                 if text.get_visible() and text.get_text().strip() and text not in hidden]
        boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
        assert len(boxes) > 5
        for what, box in boxes:
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, what
        for (one, a), (two, b) in combinations(boxes, 2):
            apart = min(a.x1, b.x1) - max(a.x0, b.x0) < 0.5 or min(a.y1, b.y1) - max(a.y0, b.y0) < 0.5
            assert apart, f"{one!r} and {two!r} overlap"
        panels = [axes.get_window_extent(renderer) for axes in figure.axes]
        assert all(panel.height > 100 for panel in panels)  # one inch
        legends = [legend.get_window_extent(renderer) for legend in figure.legends]
        assert not any(legend.overlaps(panel) for legend in legends for panel in panels)
        return figure


def deep_tables():
    """Tables of a deep model with long, strange and clashing names and values over many decades."""
    long = ["W" * 90, "W" * 89 + "V", "runs/$cost$_of/a very long folder name/" + "patch " * 12, "模型" * 30, "P"]
    depth, blocks = range(81), [(40, 61), (3, 10), (11, 80), (70, 71), (5, 6), (60, 79)]
    states = [dict(panel="depth", curve=curve, x=x, end=None, value=10.0 ** (x / 16), low=10.0 ** (x / 16 - 2),
                   high=10.0 ** (x / 16 + 1)) for curve in ["dense", *long] for x in depth]
    ratios = [dict(panel="interface", curve=curve, x=x, end=None, value=10.0 ** (x - 3), low=None, high=None)
              for curve in long for x in range(7)]
    block = [dict(panel="block", curve="removed", x=40, end=61, value=None, low=None, high=None)]
    yield "1a", block + states + ratios
    yield "1b", [dict(dataset=dataset, item="level" if name == "dense" else "patch", variant=name, alpha=a, ppl=ppl * a)
                 for dataset, ppl in (("D" * 70, 6.0), ("c4", 123456.0)) for name in ["dense", *long]
                 for a in (0.5, 1.0, 1.5)]
    violin = dict(sigma_d=123456.7, log_sigma_d=10.25, windows=128, values=20000, q25=0.5, q50=1.0, q75=2.0)
    yield "2", [dict(violin, start=a, end=b, basis=basis, scaling=10.0**x, density=1.0 / (1 + x * x))
                for a, b in blocks for basis in ("raw", "rotated") for x in range(-6, 7)]
    yield "4", [dict(item="state", model=name, layer=x, end=None, mean=1.0 + x, low=0.01, median=1.0, high=10.0 + x,
                     largest=2e4) for name in long for x in depth] + [
                dict(item="block", model=name, layer=40, end=61) for name in long]
    yield "massive", [dict(item="layer", layer=x, rank=rank, value=10.0 ** (x / 16) * (rank + 0.01), token="w",
                           position=0) for x in depth for rank in range(4)] + [
                      dict(item="token", layer=None, rank=1, value=20000.0 / (i + 1), token=figures.visible(name),
                           position=i) for i, name in enumerate([*long, " \n\t", "$", "␣"])]
    yield "similarity", [dict(item="cosine", name="", row=a, column=b, value=1 - abs(a - b) / 90) for a in depth
                         for b in depth] + [dict(item="block", name=name, row=a, column=b, value=0.5)
                                            for name, (a, b) in zip(long, blocks)]
    yield "d", [dict(basis=basis, start=a, end=b, channel=k, d=10.0 ** (k - 3 + a / 80), stderr=20.0) for basis in
                ("raw", "rotated") for a, b in blocks for k in range(7)]
    yield "metrics", [dict(dataset="D" * 70, name=name, n=n, item=item, ppl=10.0 ** (n / 3)) for name in
                      ("cosine-sequence-axis", *long) for n in (3, 5, 7, 9) for item in ("alone", "patched")]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("width", figures.WIDTHS)
def test_no_texts_overlap_with_long_names(width):
    for name, rows in deep_tables():
        figure = check_layout(name, rows, width)
        assert figure.get_figwidth() == width
        if name in ("1a", "1b"):
            assert len(figure.legends[0].texts) == {"1a": 8, "1b": 6}[name]  # clashing names stay apart


@pytest.mark.filterwarnings("error")
def test_no_texts_overlap_in_the_figures_of_a_small_model(run, tmp_path):
    assert run(figure=["all"])[0] == 0
    for name in NAMES:
        check_layout(name, figures.read_table(tmp_path / "figures" / f"figure_{name}.csv"), min(figures.WIDTHS))


def test_help_names_every_figure_and_a_command(script):
    code, out, _ = script("plot_magnitudes", "--help")
    assert code == 0 and "python plot_magnitudes.py --figure" in out and all(f"\n{name} " in out for name in NAMES)


def test_curves_differ_without_colour():
    looks = [figures.curve_style(index) for index in range(30)]
    assert len({(str(look["linestyle"]), look["marker"]) for look in looks}) == 30
    assert len({look["color"] for look in looks}) == 7


def test_white_space_and_strange_characters_are_visible():
    assert figures.visible(" the") == "␣the" and figures.visible("\n\n") == "\\n\\n"
    assert figures.visible("\x00") == "\\u0000"
    assert figures.visible("模") == "\\u6a21" and figures.visible("é") == "é" and figures.visible("\\n") == "\\\\n"


def test_tables_survive_their_file_and_non_finite_numbers_do_not(tmp_path):
    rows = [dict(variant="12", alpha=0.1 + 0.2, ppl=1e-300, end=None),
            dict(variant="a,\"b\"\n", alpha=-1, ppl=2.0, end=3)]
    figures.write_table(tmp_path / "t.csv", rows)
    assert figures.read_table(tmp_path / "t.csv") == rows
    with pytest.raises(WorkError, match="figure 1b: ppl is not finite"):
        figures.check_rows([dict(ppl=float("nan"))], "1b")
    (tmp_path / "t.csv").write_text("variant,ppl\na,b\n")
    with pytest.raises(UserError, match="t.csv"):
        figures.read_table(tmp_path / "t.csv")


def test_metrics_takes_its_rows_from_the_results_alone(run, tmp_path, monkeypatch):
    monkeypatch.setattr("utils.session.load_decoder", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    assert run(figure=["metrics"], model=None)[0] == 0
    rows = table(tmp_path / "figures", "metrics")
    found = {(row["name"], row["n"], row["item"]): pytest.approx(float(row["ppl"])) for row in rows}
    assert len(rows) == len(found)
    assert found == {("cosine", "3", "alone"): 50.0, ("cosine", "3", "patched"): 45.0, ("sleb", "3", "alone"): 40.0,
                     ("sleb", "3", "patched"): 39.0, ("taylor+", "3", "alone"): 90.0, ("taylor+", "3", "patched"): 60.0}
    twin = {**next(row for row in RESULTS if row["about"]["repair"] == "hadamard"), "variant": "other windows"}
    write_json(tmp_path / "ppl.json", "ppl", {"model": identity(), "results": [*RESULTS, twin]})
    code, _, err = run(figure=["metrics"], model=None, out="twice")
    assert code == 2 and "--variants" in err and not (tmp_path / "twice").exists()
    names = [row["variant"] for row in RESULTS]
    assert run("--variants", *names, figure=["metrics"], model=None, out="named")[0] == 0
    assert table(tmp_path / "named", "metrics") == rows
    write_json(tmp_path / "ppl.json", "ppl", {"model": identity(), "results": RESULTS[-1:]})
    code, _, err = run("--results", tmp_path / "ppl.json", figure=["metrics"], model=None, out="empty", results=False)
    assert code == 2 and "no pruned variant" in err and not (tmp_path / "empty").exists()
