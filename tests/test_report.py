"""The report from a run directory, and run_all.sh's commands."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.conftest import ROOT
from tests.steps import calibrate, ppl, prune
from utils.paper import experiments as paper
from utils.artifacts import write_json
from utils.errors import UserError
from utils.paper.render import Table, Text, html_page, markdown
from utils.paper.report import write_report
from utils.paper.verdicts import Cell, score_interval, verdict

TARGETS = ["", *(f"table{number}" for number in range(1, 17) if number != 6), "metrics", "fig1", "fig2", "fig4",
           "overhead", "storage", "responses"]
PRESETS = ["smollm2-135m", "llama2-7b", "llama2-13b", "llama3-8b", "baichuan2-7b", "deepseek-r1-qwen-7b",
           "deepseek-r1-llama-8b"]


@pytest.fixture
def run_folder(script, folders, tmp_path, text):
    folder = folders("no-ops")
    n2 = tmp_path / "n2"
    prune(script, folder, n2, text, "--n-prune", 2, "--stats", tmp_path / "stats.safetensors")
    for scaling in ("diagonal", "hadamard"):
        calibrate(script, folder, n2, text, "--scaling", scaling, "--stats", tmp_path / "stats.safetensors",
                  "--sigma-windows", 2, name=f"patch_{scaling}.safetensors")
    ppl(script, folder, tmp_path, text, "--selection", f"vanilla-n2={n2}/selection.json", "--patch",
        f"d-n2={n2}/patch_diagonal.safetensors", f"P-n2={n2}/patch_hadamard.safetensors",
        f"own={n2}/patch_hadamard.safetensors")
    code, _, err = script("distill", "--model", folder, "--patch", n2 / "patch_hadamard.safetensors",
                          "--train-data", text, "--train-samples", 2, "--val-samples", 1, "--seq-len", 32,
                          "--out", n2 / "ft.safetensors")
    assert code == 0, err
    return tmp_path


def test_the_report_has_its_tables(run_folder):
    report = write_report(run_folder)
    assert report == (run_folder / "report.md").read_text()
    assert "| 2 | cosine, 1.0000 | [2, 4) |" in report
    results = json.loads((run_folder / "ppl.json").read_text())["results"]
    dense = next(row for row in results if row["variant"] == "dense")
    low, high = dense["ppl_ci95"]
    assert f"| 0 | dense | {dense['ppl']:.2f} [{low:.2f}, {high:.2f}] | - |" in report
    for label in ("+d", "+P"):  # the removed layers do nothing, so the patch changes nothing
        assert f"| 2 | {label} | {dense['ppl']:.2f} [{low:.2f}, {high:.2f}] | 1.000 [1.000, 1.000] |" in report
    for part in ("Summary", "Hardware", "sigma_d", "Time and memory", "stats.safetensors", "Protocol", "scored=", "BOS",
                 "float32", "not comparable: other model", "Table 5", "Other variants", "| 2 | own | "):
        assert part in report


class Page(HTMLParser):
    """Collects the cells of a page and everything that it would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells, self.loads = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


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


def test_the_papers_cells_that_do_not_add_up_are_known():
    found = [(table.numbers[-1], model, n, column) for table in paper.TABLES for row in table.rows
             for model in ("llama2-7b", "llama2-13b", "llama3-8b", "baichuan2-7b") for n in paper.depths(table, model)
             for column, _, _ in paper.misprints(table, model, n, row)]
    assert set(found) == {(9, "llama2-7b", 7, "qa_avg"), (10, "llama2-7b", 7, "qa_avg"),
                          (16, "baichuan2-7b", 7, "mmlu_weighted_avg")}


def test_html_is_escaped():
    page = html_page("<t>", [Text("a < b & `<code>`"), Table(("x", "y"), (("<script>", "1|2"),))])
    assert "<script>" not in page and "&lt;script&gt;" in page and "<code>&lt;code&gt;</code>" in page
    assert "1\\|2" in markdown([Table(("x", "y"), (("z", "1|2"),))], ".")


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


def papers_own_run(folder, model, table, changes=()):
    """A run directory whose perplexities are the paper's own for one table, but for `changes`."""
    results = []
    for row in (paper.DENSE, *table.rows):
        n = 0 if row is paper.DENSE else paper.depths(table, model)[0]
        name = row.variant if row is paper.DENSE else f"{row.variant}-n{n}"
        for dataset, value in (paper.find(table, model, n, row) or {}).items():
            if dataset in paper.PERPLEXITY:
                value = dict(changes).get((name, dataset), value)
                results.append({"variant": name, "dataset": dataset, "ppl": value,
                                "ppl_ci95": [0.99 * value, 1.01 * value], "seq_len": 2048, "windows": 100,
                                "corpus": {"windows_available": 100, "name": dataset}, "removed": list(range(n)),
                                "scaling": None, "window_nll": [1.0, 2.0]})
    identity = {"label": model, "num_layers": 32, "hidden_size": 4096, "fingerprint": "0" * 64, "revision": None}
    folder = folder / model
    folder.mkdir()
    write_json(folder / "ppl.json", "ppl", {"model": identity, "results": results, "protocol": {"dtype": "bfloat16"},
                                            "provenance": {"wall_seconds": 1.0, "peak_memory_bytes": 1}})
    return folder


@pytest.fixture
def no_corpora(monkeypatch):
    monkeypatch.setattr("utils.paper.report.describe", lambda info: "made up")


def test_a_run_with_the_papers_values_agrees(tmp_path, no_corpora):
    table = next(t for t in paper.TABLES if t.numbers == (15,))
    report = write_report(papers_own_run(tmp_path, "llama2-7b", table))
    part = report.split("## Table 15")[1].split("\n## ")[0]
    assert part.count("| agrees |") == 7 and "differs" not in part and "| 35.68" in part and "| +0.00 |" in part
    assert "off in" not in report


def test_a_table_of_another_model_names_every_column_once(tmp_path, no_corpora):
    table = next(t for t in paper.TABLES if t.numbers == (15,))
    folder = papers_own_run(tmp_path, "llama2-7b", table).rename(tmp_path / "mine")
    part = write_report(folder).split("## Table 15")[1].split("\n## ")[0]
    assert "| n | method | from | wikitext2 | c4 | ptb | ppl_avg | verdict |" in part
    assert "not comparable: other model" in part


def test_a_dense_model_that_is_off_taints_what_follows(tmp_path, no_corpora):
    table = next(t for t in paper.TABLES if t.numbers == (15,))
    report = write_report(papers_own_run(tmp_path, "llama2-7b", table, {("dense", "c4"): 7.26}.items()))
    assert "| c4 | 7.26 [7.19, 7.33] | 6.97 | +0.29 | differs: c4 |" in report
    assert "The dense model is off in c4: check" in report
    assert "The dense model is off in c4 (see above)" in report.split("## Table 15")[1].split("\n## ")[0]


def test_every_row_of_every_table_is_tied_to_the_papers_data():
    used = set()
    for table in paper.TABLES:
        for row in (paper.DENSE, *table.rows):
            hits = [index for index, r in enumerate(paper.paper()["results"]) if r["table"] in table.numbers
                    and r["method"] in row.methods and all(r.get(k) == v for k, v in row.fields.items())]
            assert hits or row is paper.DENSE, (table.numbers, row)
            used |= set(hits)
    left = [r for index, r in enumerate(paper.paper()["results"]) if index not in used]
    assert left == []


@pytest.mark.parametrize("gone", ["ppl.json", "n2/selection.json", "n2/patch_diagonal.safetensors",
                                  "stats.safetensors"])
def test_missing_parts_give_a_partial_report(run_folder, gone):
    (run_folder / gone).unlink()
    assert write_report(run_folder).startswith("# ")


def test_files_of_other_models_and_damaged_ones_never_mix_in(run_folder):
    good, content = write_report(run_folder), json.loads((run_folder / "ppl.json").read_text())
    wrong = [{**row, "ppl": 9.99, "ppl_ci95": [9.0, 10.0]} for row in content["results"]]
    foreign = {**content, "model": {**content["model"], "fingerprint": "f" * 64}, "results": wrong}
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


def dry_run(*arguments, **environment):
    return subprocess.run(["bash", str(ROOT / "run_all.sh"), "--dry-run", *arguments], capture_output=True, text=True,
                          env={**os.environ, "LINEARPATCH_DATA": "", "SIZE": "", **environment})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_command_of_every_target_names_existing_scripts_and_flags(preset, monkeypatch):
    seen = 0
    for target in TARGETS if preset == PRESETS[1] else [""]:
        done = dry_run(preset, *([target] if target else []))
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            words = shlex.split(line.removeprefix("+ "))
            assert words[0] == "python"
            if words[1:3] == ["-m", "utils.paper.report"]:
                continue
            words = words[2:] if words[1] == "-m" else words[1:]
            monkeypatch.setattr(sys, "argv", words)
            importlib.import_module(words[0].removesuffix(".py")).arguments()  # exits on an unknown flag
            seen += 1
    assert seen > 35


def launched(tmp_path, *lines):
    return subprocess.run([sys.executable, "-m", "utils.paper.reproduce"], input="\n".join(lines), capture_output=True,
                          text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_commands_run_in_forks_until_one_fails(tmp_path):
    good, bad, after = (tmp_path / f"{name}.py" for name in ("a good one", "bad", "after"))
    good.write_text("import sys, os\nprint('arguments', sys.argv[1:], os.getppid())\nimport torch\n"
                    "torch.manual_seed(1)\nsys.marker = 1\n")
    bad.write_text("import sys\nprint('marked', hasattr(sys, 'marker'))\nsys.exit(2)\n")
    after.write_text("print('never')\n")
    done = launched(tmp_path, f"python {shlex.quote(str(good))} x\\ y 'z  z'", f"python {bad}", f"python {after}")
    assert done.returncode == 2 and "arguments ['x y', 'z  z']" in done.stdout, done.stderr
    assert "marked False" in done.stdout and "never" not in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("+ ")][-1] == f"+ python {bad}"


def test_a_crash_and_a_foreign_command_end_the_run(tmp_path):
    (tmp_path / "crash.py").write_text("raise ValueError('what')\n")
    done = launched(tmp_path, f"python {tmp_path}/crash.py")
    assert done.returncode == 1 and "ValueError: what" in done.stderr
    for line, message in (("rm -rf nothing", "expected python SCRIPT"), ("python 'open", "No closing quotation"),
                          ("python nosuch.py", "expected python SCRIPT")):
        done = launched(tmp_path, line)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    done = launched(tmp_path, f"python {tmp_path}/killed.py")
    assert done.returncode == 137 and "signal 9" in done.stderr


def test_the_papers_sizes_for_the_papers_models():
    lines = dry_run("llama2-7b", "table5").stdout
    assert "--calib-samples 128 --seq-len 2048" in lines and "--train-samples 5000" in lines
    assert "--datasets wikitext2 c4 ptb --seq-len 2048 --add --out" in lines and "--limit-windows" not in lines


def test_presets_and_targets_are_listed_and_checked():
    listing = subprocess.run(["bash", str(ROOT / "run_all.sh")], capture_output=True, text=True)
    assert listing.returncode == 0 and all(word in listing.stdout for word in [*PRESETS, *TARGETS])
    wrong = dry_run("llama2-7b", "table99")
    assert wrong.returncode == 2 and "table99 is no target" in wrong.stderr


def test_a_picture_that_is_none_is_named(run_folder):
    (run_folder / "figures").mkdir()
    (run_folder / "figures" / "figure_d.png").write_text("<script>")
    with pytest.raises(UserError, match="figure_d.png: is no PNG"):
        write_report(run_folder)
