"""The report from a run directory: tables, verdicts, what stands beside the paper's numbers, and its two forms."""

import base64
import json
import math
from html.parser import HTMLParser

import pytest
import torch

from utils.artifacts import write_json, write_tensors
from utils.errors import UserError
from utils.paper.experiments import DENSE, TABLES
from utils.paper.render import figure, heading, html_page, items, note, plain, table
from utils.paper.report import write_report
from utils.paper.verdicts import MMLU, PERPLEXITY, Cell, depths, find, score_interval, verdict

IDENTITY = {"label": "made up", "num_layers": 6, "hidden_size": 64, "sha256": "0" * 64, "revision": None}
WORK = {"wall_seconds": 1.0, "peak_memory_bytes": 2**21, "hardware": "an abacus", "device": "cpu"}
TEXT = {"corpus": "wiki", "split": "train", "source": "a wheel", "kind": "stream", "rows": 3, "join": "\n\n",
        "tokens": 999, "bos": "stream", "unk_literals": 0, "windows": 4, "seq_len": 32}
CALIBRATION = {**TEXT, "sampling": "random", "seed": 0, "part": "train"}
CORPUS = {**TEXT, "windows_available": 9, "scored_tokens": 124, "dropped_tokens": 0}
LOSSES = {"dense": 3.0, "vanilla": 3.5, "d": 3.4, "P": 3.2, "FT": 3.1, "sleb": 3.6, "sleb+P": 3.3, "own": 3.25}


def about(metric, n, repair="none", stage="pruned"):
    return {"metric": metric, "n": n, "repair": repair, "stage": stage}


ABOUT = {"dense": about(None, 0, stage="dense"), "vanilla": about("cosine", 2), "sleb": about("sleb", 2),
         "d": about("cosine", 2, "diagonal", "calibrated"), "P": about("cosine", 2, "hadamard", "calibrated"),
         "FT": about("cosine", 2, "hadamard", "distilled"), "sleb+P": about("sleb", 2, "hadamard", "calibrated"),
         "own": about("list", 2, "hadamard", "calibrated")}


def row(variant, about, removed=(), **more):
    return {"variant": variant, "about": about, "removed": list(removed), "dtype": "float32",
            "sha256": f"{16 * '0'}:{16 * '0'}", **more}


def ppl_row(variant, about, ppl, removed=(), dataset="wiki", windows=4, **more):
    """A row whose windows have equal losses and whose interval is 1 % to either side."""
    loss = math.log(ppl)
    return row(variant, about, removed, dataset=dataset, split="test", ppl=ppl, nll_mean=loss, nll_stderr=0.0,
               ppl_ci95=[0.99 * ppl, 1.01 * ppl], ratio_to_reference=1.0, ratio_ci95=None, reference="dense",
               windows=windows, seq_len=32, scored_tokens=124, dropped_tokens=0, bos="stream", corpus=CORPUS,
               window_nll=windows * [loss]) | more


def write_selection(path, about, removed):
    kept = [layer for layer in range(6) if layer not in removed]
    write_json(path, "selection", {
        "model": IDENTITY, "about": about, "removed": removed, "kept": kept, "runs": [[min(removed), max(removed) + 1]],
        "order": removed, "scores": [{"start": 2, "end": 4, "score": 0.75}, {"start": 1, "end": 3, "score": 0.5}],
        "parameters": {"removed": 2000, "ratio_percent": 20.0, "ratio_with_patch_percent": 19.5},
        "calibration": CALIBRATION, "recipe": {}, "provenance": WORK})


def write_patch(path, about, **more):
    write_tensors(path, "patch", {"run0.d": torch.ones(64)}, {
        "model": IDENTITY, "about": about, "removed": [2, 3], "kept": [0, 1, 4, 5], "runs": [[2, 4]],
        "estimator": "ratio-of-sums", "rotation": {"construction": "Sylvester 64"}, "hadamard_order": "released",
        "calibration": CALIBRATION, "recipe": {}, "provenance": WORK, **more})


@pytest.fixture
def run_folder(tmp_path):
    """n = 2: the cosine block [2, 4) with everything of table 5, sleb with and without a patch, and a variant 'own'."""
    n2 = tmp_path / "n2"
    write_selection(n2 / "selection.json", ABOUT["vanilla"], [2, 3])
    write_selection(n2 / "sleb" / "selection.json", ABOUT["sleb"], [3, 4])
    spread = {"start": 2, "end": 4, "sigma_d": 9.25, "sigma_d_rotated": 1.5, "log_sigma_d": 0.5,
              "log_sigma_d_rotated": 0.25, "windows": 2}
    write_patch(n2 / "patch_diagonal.safetensors", ABOUT["d"])
    write_patch(n2 / "patch_hadamard.safetensors", ABOUT["P"], sigma_d=[spread])
    write_patch(n2 / "FT.safetensors", ABOUT["FT"])
    results = []
    for name, loss in LOSSES.items():
        removed = [] if name == "dense" else [3, 4] if name.startswith("sleb") else [2, 3]
        variant = name if name in ("dense", "own") else f"{name}-n2"
        results.append(ppl_row(variant, ABOUT[name], math.exp(loss), removed))
    write_json(tmp_path / "ppl.json", "ppl", {"model": IDENTITY, "results": results, "provenance": WORK})
    return tmp_path


def test_the_report_has_its_tables(run_folder):
    report = write_report(run_folder)
    assert report == (run_folder / "report.md").read_text()
    parts = {part.split("\n")[0]: part for part in report.split("\n## ")}
    assert "| 2 | cosine, 0.7500 | [2, 4) | 2,000 | 20.00 | 19.50 | - |" in parts["Table 7: layers removed"]
    assert "| 2 | sleb | [3, 5) |" in parts["Table 7: layers removed"]
    main = parts["Perplexity of the block chosen by cosine"]
    assert "| 0 | dense | 20.09 [19.88, 20.29] | - |\n| 2 | vanilla | 33.12 [32.78, 33.45] | - |\n| 2 | +d |" in main
    for label, name in (("+d", "d"), ("+P", "P"), ("+FT", "FT")):  # equal differences in all windows: no spread
        ppl, ratio = math.exp(LOSSES[name]), math.exp(LOSSES[name] - 3.5)
        assert (f"| 2 | {label} | {ppl:.2f} [{0.99 * ppl:.2f}, {1.01 * ppl:.2f}] "
                f"| {ratio:.3f} [{ratio:.3f}, {ratio:.3f}] |") in main
    assert "| 2 | +P | ours | 24.53 [24.29, 24.78] |" in parts["Table 5: the ingredients"]
    assert "| 2 | sleb + LinearPatch | ours | 27.11" in parts["Table 13: with SLEB"]
    assert "| 2 | own | 25.79 [25.53, 26.05] | 0.779 [0.779, 0.779] |" in parts["Other variants"]
    assert [name.split(":")[0] for name in parts if name.startswith("Table")] == [
        "Table 7", "Table 5", "Table 13", "Table 15"]  # P and FT alone make none of tables 3, 8, 9 and 10
    assert "sleb" not in parts["Other variants"] and "P-n2" not in parts["Other variants"]
    assert "becomes 24.53 with LinearPatch, 0.741 [0.741, 0.741] of the unpatched one (dense 20.09)" in report
    for part in ("| 2 | [2, 4) | 9.2 | 1.5 | 0.500 | 0.250 | 2 |", "2 selections, 3 patches, 8 variants",
                 "Hardware: an abacus", "0.1 minutes", "| n2/FT.safetensors | 1.0 | 2 | cpu |", "scored=124",
                 "Rotation: Sylvester 64", "computed in float32", "not comparable: other model"):
        assert part in report, part


def test_three_metrics_stand_side_by_side(run_folder):
    assert "side by side" not in write_report(run_folder)  # two
    content = json.loads((run_folder / "ppl.json").read_text())
    write_selection(run_folder / "n2" / "mag+" / "selection.json", about("mag+", 2), [0, 1])
    new = ppl_row("mag+-n2", about("mag+", 2), 99.0, [0, 1])
    (run_folder / "ppl.json").write_text(json.dumps({**content, "results": [*content["results"], new]}))
    part = write_report(run_folder).split("## Selection metrics side by side")[1].split("\n## ")[0]
    assert [line for line in part.splitlines() if line.startswith("| 2 ")] == [
        "| 2 | cosine | 2, 3 | 33.12 | 24.53 |", "| 2 | mag+ | 0, 1 | 99.00 | - |",
        "| 2 | sleb | 3, 4 | 36.60 | 27.11 |"]


def test_names_say_nothing_but_which_row_it_is(run_folder):
    """A variant called like one of another number of layers, metric or repair is what its about says."""
    content = json.loads((run_folder / "ppl.json").read_text())
    names = {"own": "P-n9", "vanilla-n2": "FT-n3", "sleb-n2": "x-n3+P"}
    for row in content["results"]:
        row["variant"] = names.get(row["variant"], row["variant"])
    (run_folder / "ppl.json").write_text(json.dumps(content))
    part = write_report(run_folder).split("## Other variants")[1].split("\n## ")[0]
    assert "| 2 | FT-n3 | 33.12 [32.78, 33.45] | - |" in part
    assert "| 2 | x-n3+P | 36.60 [36.23, 36.96] | - |" in part
    assert "| 2 | P-n9 | 25.79 [25.53, 26.05] | 0.779 [0.779, 0.779] |" in part


def test_of_another_model_only_narrowed_layers_are_rows(run_folder):
    other = {**IDENTITY, "sha256": "f" * 64}
    for stage, shown in (("narrowed", True), ("dense", False)):
        own = ppl_row("llm-pruner-n2", about("llm-pruner", 2, stage=stage), 77.0)
        write_json(run_folder / "ppl_other.json", "ppl", {"model": other, "results": [own], "provenance": WORK})
        assert ("| 2 | LLM-Pruner | ours | 77.00" in write_report(run_folder)) == shown


class Page(HTMLParser):
    """Collects the cells and texts of a page and everything that it would load; checks that tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells, self.texts, self.loads, self.alts = [], [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        self.alts += [value for name, value in attrs if name == "alt"]
        self.texts.append("")
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
            self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        if self.open or tag not in ("head", "body", "html"):  # of which a part of a page has the ends only
            assert self.open.pop() == tag
        self.texts.append("")

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data
        if self.texts:
            self.texts[-1] = (self.texts[-1] + data).strip("\n")


def test_the_page_is_well_formed_needs_no_other_file_and_says_the_same(run_folder):
    (run_folder / "figures").mkdir()
    picture = run_folder / "figures" / "figure_1a.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n and more")
    text = write_report(run_folder)
    assert "![" in text and "(figures/figure_1a.png)" in text
    page = Page((run_folder / "report.html").read_text())
    assert page.open == [] and [load[:22] for load in page.loads] == ["data:image/png;base64,"]
    cells = [cell.strip() for line in text.splitlines() if line.startswith("| ")
             for cell in line.strip("| ").split(" | ")]
    assert [cell for cell in page.cells if cell] == [cell for cell in cells if cell.strip("|")]


HOSTILE = ["<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "![x](https://a.b/c.png)", "**bold** and _soft_",
           "a_b|c\\|d", "`code`", "&lt;b&gt; &amp;", "~~gone~~", "# no heading #", "<https://a.b>", "[a]: https://a.b",
           "1. no list", "- no list", "> no quotation", "[1, 2)", "-0.05 [-1.00, 2.00]", "x\ny"]


@pytest.mark.parametrize("text", HOSTILE)
def test_every_text_comes_out_as_text(text, tmp_path):
    pieces = [heading(2, text), plain(text), note(text), items([text, text]), table([text], [[text], [text]])]
    page = Page(html_page(text, "\n\n".join(pieces), tmp_path).split("</style>")[1])
    assert [part for part in page.texts if part] == 8 * [" ".join(text.split())] and page.loads == []
    assert set(page.tags) <= {"body", "h2", "p", "blockquote", "ul", "li", "div", "table", "thead", "tbody", "tr", "th",
                              "td"}


def test_a_report_of_plain_words_and_numbers_reads_as_it_is():
    assert table(("n", "ours [95 %]"), ((7, "5.47 [5.40, 5.54]"), ("+P", "-0.05"))) == (
        "| n | ours [95 %] |\n|---|---|\n| 7 | 5.47 [5.40, 5.54] |\n| +P | -0.05 |")
    assert items(["patch_hadamard.safetensors: P-n7, x 0.5"]) == "- patch_hadamard.safetensors: P-n7, x 0.5"


def test_a_picture_stands_in_the_page_with_its_caption(tmp_path):
    path = tmp_path / "figures" / "figure_a b(1).png"
    path.parent.mkdir()
    path.write_bytes(b"picture")
    page = Page(html_page("t", figure(path, "a <b> & [c](d)", tmp_path), tmp_path).split("</style>")[1])
    assert page.loads == ["data:image/png;base64," + base64.b64encode(b"picture").decode()]
    assert [part for part in page.texts if part] == ["a <b> & [c](d)"] and page.alts == ["a <b> & [c](d)"]


def test_verdicts():
    inside, outside = Cell(5.5, (5.4, 5.6), None), Cell(7.0, (6.9, 7.05), None)
    limited = Cell(9.0, (8.0, 10.0), "first 4 of 98 windows")
    theirs = {"wikitext2": 5.47, "c4": 7.1, "ptb": 9.5}
    assert verdict({"wikitext2": inside}, theirs, False) == "agrees"
    assert verdict({"wikitext2": inside, "c4": outside, "ptb": limited}, theirs, False) == "differs: c4"
    assert verdict({"ptb": limited}, theirs, False) == "not comparable: first 4 of 98 windows"
    assert verdict({"wikitext2": inside}, theirs, True) == "not comparable: other model"
    assert verdict({"wikitext2": inside}, {}, False) == "no value of the paper"
    assert verdict({"wikitext2": inside}, {"wikitext2": float("nan")}, False) == "no value of the paper"


@pytest.mark.parametrize("share, n, low, high", [(0.0, 10, 0.0, 27.75), (0.5, 10, 23.66, 76.34), (1.0, 10, 72.25, 100),
                                                 (0.5, 10000, 49.02, 50.98)])  # tabulated Wilson intervals
def test_intervals_of_shares_stay_between_none_and_all(share, n, low, high):
    assert score_interval(share, n) == pytest.approx((low, high), abs=0.01)


TABLE_15 = next(table for table in TABLES if table.names == (15,))


def papers_own_run(folder, model, changes=None):
    """A run directory whose perplexities are the paper's own for table 15, but for `changes`."""
    results, n = [], depths(TABLE_15, model)[0]
    for method in (DENSE, *TABLE_15.rows):
        variant, own = method.variant(n), ABOUT["dense"] if method is DENSE else about("x", n, stage="merged")
        for dataset, value in (find(TABLE_15, model, own["n"], method) or {}).items():
            if dataset in PERPLEXITY:
                value = (changes or {}).get((variant, dataset), value)
                results.append(ppl_row(variant, own, value, range(own["n"]), dataset, windows=9, seq_len=2048))
    identity = {**IDENTITY, "label": model, "num_layers": 32, "hidden_size": 4096}
    write_json(folder / model / "ppl.json", "ppl", {"model": identity, "results": results, "provenance": WORK})
    return folder / model


def test_a_run_with_the_papers_values_agrees(tmp_path):
    report = write_report(papers_own_run(tmp_path, "llama2-7b"))
    part = report.split("## Table 15")[1].split("\n## ")[0]
    assert part.count("| agrees |") == 7 and "differs" not in part and "| 35.68" in part and "| +0.00 |" in part
    assert "off in" not in report


def test_a_table_of_another_model_names_every_column_once(tmp_path):
    folder = papers_own_run(tmp_path, "llama2-7b").rename(tmp_path / "mine")
    part = write_report(folder).split("## Table 15")[1].split("\n## ")[0]
    assert "| n | method | from | wikitext2 | c4 | ptb | ppl_avg | verdict |" in part
    assert "not comparable: other model" in part


def test_a_dense_model_that_is_off_taints_what_follows(tmp_path):
    report = write_report(papers_own_run(tmp_path, "llama2-7b", {("dense", "c4"): 7.26}))
    assert "| c4 | 7.26 [7.19, 7.33] | 6.97 | +0.29 | differs: c4 |" in report
    assert "> The dense model is off in c4: check" in report
    assert "The dense model is off in c4 (see above)" in report.split("## Table 15")[1].split("\n## ")[0]
    assert "<blockquote>" in (tmp_path / "llama2-7b" / "report.html").read_text()


@pytest.fixture
def answers(run_folder):
    """The same with two tasks of 10 questions and four groups of MMLU for dense, P and 'own'."""
    results, summary, subjects, groups = [], [], [], []
    for variant, name, share in (("dense", "dense", 0.8), ("P-n2", "P", 0.6), ("own", "own", 0.5)):
        items = round(10 * share) * "1" + round(10 - 10 * share) * "0"
        results += [row(variant, ABOUT[name], task=task, n=10, metric="acc", value=share, acc=share, acc_stderr=0.1,
                        acc_items=items, prompt_sha1="0") for task in ("piqa", "copa")]
        summary.append({"variant": variant, "tasks": ["piqa", "copa"], "average": share,
                        "retained_performance": 125 * share})
        subjects += [row(variant, ABOUT[name], subject=group, category=group, n=10, accuracy=share, stderr=0.1,
                         items=items, predicted={"A": 10, "B": 0, "C": 0, "D": 0}) for group in list(MMLU.values())[:4]]
        groups.append({"variant": variant, "n": 40, **dict.fromkeys(MMLU.values(), share)})
    content = {"model": IDENTITY, "provenance": WORK}
    write_json(run_folder / "qa.json", "qa", {**content, "results": results, "summary": summary, "paired": [],
                                              "harness": "a harness", "bos": "no BOS"})
    write_json(run_folder / "mmlu.json", "mmlu", {**content, "results": subjects, "summary": groups,
                                                  "answer_tokens": {"convention": "letters", "ids": [1, 2, 3, 4]}})
    return run_folder


def test_answers_stand_in_the_papers_tables_and_the_others_below(answers):
    report = write_report(answers)
    assert "Retained performance on question answering: P-n2 75.00 %." in report
    part = report.split("## Table 5")[1].split("\n## ")[0]
    assert "| 2 | +P | ours | 24.53 [24.29, 24.78] | 60.00 [31.27, 83.18] | 60.00 [31.27, 83.18] |" in part
    others = report.split("## Question answering: other variants")[1].split("\n## ")[0]
    assert "| own | 50.00 [23.66, 76.34] |" in others and "P-n2" not in others and "dense" not in others
    four, all_of_them = 4 * " | 60.00 [31.27, 83.18]", " | 60.00 [44.60, 73.65] |"  # of 10 each, of 40
    assert f"| 2 | LinearPatch [L] | ours{four}{all_of_them}" in report.split("## Table 16")[1].split("\n## ")[0]
    mmlu = report.split("## MMLU, five-shot: other variants")[1].split("\n## ")[0]
    assert "| own | 50.00" in mmlu and "P-n2" not in mmlu
    assert "| piqa | 80.00 [49.02, 94.33] | 79.11 | - | not comparable: other model |" in report
    assert "items and metric: piqa 10 (acc), copa 10 (acc)" in report and "answer tokens letters" in report


@pytest.mark.parametrize("gone", ["ppl.json", "n2/selection.json", "n2/patch_hadamard.safetensors"])
def test_missing_parts_give_a_partial_report(run_folder, gone):
    (run_folder / gone).unlink()
    assert write_report(run_folder).startswith("# ")


def test_files_of_other_models_and_damaged_ones_never_mix_in(run_folder):
    good, content = write_report(run_folder), json.loads((run_folder / "ppl.json").read_text())
    wrong = [ppl_row(row["variant"], row["about"], 9.99, row["removed"]) for row in content["results"]]
    foreign = {**content, "model": {**content["model"], "sha256": "f" * 64}, "results": wrong}
    (run_folder / "zzz.json").write_text(json.dumps(foreign))
    assert "9.99" not in write_report(run_folder)
    for damaged in (json.dumps({**content, "results": wrong}), "{", json.dumps(content)[:500],
                    json.dumps(content).replace('"ppl": ', '"ppl": NaN, "was": ', 1)):
        (run_folder / "zzz.json").write_text(damaged)
        with pytest.raises(UserError):
            write_report(run_folder)
    (run_folder / "zzz.json").write_text("[1]")  # somebody else's file
    assert write_report(run_folder).split("## Time")[0].count("|") == good.split("## Time")[0].count("|")
    patch = run_folder / "n2" / "patch_hadamard.safetensors"
    patch.write_bytes(patch.read_bytes()[:100])
    with pytest.raises(UserError, match="patch_hadamard"):
        write_report(run_folder)


@pytest.mark.parametrize("field", ["removed", "ppl_ci95", "window_nll"])
def test_a_row_without_a_field_is_one_line(run_folder, field):
    content = json.loads((run_folder / "ppl.json").read_text())
    for row in content["results"]:
        row.pop(field)
    (run_folder / "ppl.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=field):
        write_report(run_folder)


def test_an_empty_folder_has_no_report(tmp_path):
    with pytest.raises(UserError, match="holds no artifacts"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_picture_that_is_none_is_named(run_folder):
    (run_folder / "figures").mkdir()
    (run_folder / "figures" / "figure_d.png").write_text("<script>")
    with pytest.raises(UserError, match="figure_d.png: is no PNG"):
        write_report(run_folder)
