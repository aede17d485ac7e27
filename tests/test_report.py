"""The report from a run directory, and run_all.sh's commands."""

import importlib
import json
import os
import shlex
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.test_scripts import calibrate, ppl, prune
from utils.errors import UserError
from utils.report import write_report

TARGETS = ["", "table7", "table5", "table2", "table3", "table4", "table9", "table10", "responses"]
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
    ppl(script, folder, tmp_path, text, "--selection", f"vanilla={n2}/selection.json", "--patch",
        f"d={n2}/patch_diagonal.safetensors", f"P={n2}/patch_hadamard.safetensors")
    code, _, err = script("distill", "--model", folder, "--patch", n2 / "patch_hadamard.safetensors", "--train-data", text,
                          "--train-samples", 2, "--val-samples", 1, "--seq-len", 32, "--out", n2 / "ft.safetensors")
    assert code == 0, err
    return tmp_path


def test_the_report_has_its_tables(run_folder):
    report = write_report(run_folder)
    assert report == (run_folder / "report.md").read_text()
    assert "| 2 | [2, 4) | 1.0000 |" in report
    dense = next(row for row in json.loads((run_folder / "ppl.json").read_text())["results"] if row["variant"] == "dense")
    low, high = dense["ppl_ci95"]
    assert f"| 0 | dense | {dense['ppl']:.2f} [{low:.2f}, {high:.2f}] | - |" in report
    for label in ("+d", "+P"):  # the removed layers do nothing, so the patch changes nothing
        assert f"| 2 | {label} | {dense['ppl']:.2f} [{low:.2f}, {high:.2f}] | 1.000 [1.000, 1.000] |" in report
    for part in ("sigma_d", "Time and memory", "stats.safetensors", "Protocol", "scored=", "BOS", "float32"):
        assert part in report


@pytest.mark.parametrize("gone", ["ppl.json", "n2/selection.json", "n2/patch_diagonal.safetensors", "stats.safetensors"])
def test_missing_parts_give_a_partial_report(run_folder, gone):
    (run_folder / gone).unlink()
    assert write_report(run_folder).startswith("# ")


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
    for target in TARGETS:
        done = dry_run(preset, *([target] if target else []))
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            words = shlex.split(line.removeprefix("+ "))
            assert words[0] == "python"
            if words[1] == "-m":
                assert words[2] == "utils.report"
                continue
            monkeypatch.setattr(sys, "argv", words[1:])
            importlib.import_module(words[1].removesuffix(".py")).arguments()  # exits on an unknown flag
            seen += 1
    assert seen > 30


def test_the_papers_sizes_for_the_papers_models():
    lines = dry_run("llama2-7b", "table5").stdout
    assert "--calib-samples 128 --seq-len 2048" in lines and "--train-samples 5000" in lines
    assert "--datasets wikitext2 c4 ptb --seq-len 2048 --out" in lines and "--limit-windows" not in lines


def test_presets_and_targets_are_listed_and_checked():
    listing = subprocess.run(["bash", str(ROOT / "run_all.sh")], capture_output=True, text=True)
    assert listing.returncode == 0 and all(word in listing.stdout for word in [*PRESETS, *TARGETS])
    wrong = dry_run("llama2-7b", "table99")
    assert wrong.returncode == 2 and "table99 is no target" in wrong.stderr
