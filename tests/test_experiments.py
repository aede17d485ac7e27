"""The experiments: every target's commands against the scripts' own parsers, rows against the paper's data."""

import importlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from utils.paper import experiments
from utils.paper.experiments import COSINE, DENSE, PRESETS, EMBEDDED, FT, GROUPS, TABLES, TARGETS, Plan, Row, Table, \
    distil, paper, sizes
from utils.paper.verdicts import depths, misprints

MODELS = list(PRESETS)


def plan(model, *targets, **options):
    return Plan(targets or TARGETS, sizes(model, f"runs/{model}", **options))


def lines(*arguments, **options):
    return [command.text() for group in plan(*arguments, **options).groups for command in group]


@pytest.fixture(autouse=True)
def no_other_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_command_of_every_target_names_existing_scripts_and_flags(monkeypatch):
    found = {line for model in MODELS for line in lines(model)}
    found |= {line for options in ({"small": True}, {"local_data": True}) for line in lines(EMBEDDED, **options)}
    assert len(found) > 35 * len(MODELS)
    for line in found:
        words = shlex.split(line)
        assert words[0] == "python"
        module = words[2] if words[1] == "-m" else words[1].removesuffix(".py")
        if module == "utils.paper.report":
            continue
        monkeypatch.setattr(sys, "argv", words[1 + (words[1] == "-m"):])
        importlib.import_module(module).arguments()  # exits on an unknown flag


@pytest.mark.parametrize("model", [EMBEDDED, "llama2-7b", "deepseek-r1-qwen-7b"])
@pytest.mark.parametrize("target", TARGETS)
def test_what_a_command_reads_is_made_by_one_before_it(model, target):
    made, everything = set(), {file for group in plan(model).groups for command in group for file in command.makes}
    for command in (command for group in plan(model, target, local_data=True).groups for command in group):
        read = {word.rpartition("=")[2] for word in shlex.split(command.text())} & everything
        assert read - set(command.makes) <= made, command.line
        assert not made & set(command.makes)
        made |= set(command.makes)


def test_patches_lie_beside_the_selections_that_they_are_made_for():
    seen = 0
    for command in (command for group in plan("llama2-7b").groups for command in group):
        words = shlex.split(command.line)
        if words[1] == "calibrate.py" and "--out" not in words:
            files = [word for word in words if word.endswith("/selection.json")]
            folders = {Path(file).parent for file in command.makes}
            assert {Path(file).parent for file in files} == folders and len(files) == len(folders) == 2
            seen += 1
    assert seen == 12  # the block of cosine and eleven metrics


def test_a_name_stands_for_one_file_and_a_file_for_one_name():
    for model in MODELS:
        files = {}
        for command in (command for group in plan(model, local_data=True).groups for command in group):
            for name, file in command.variants.items():
                assert files.setdefault(name, file) == file
        assert len(set(files.values())) == len(files) > 20


def test_a_command_is_run_once_and_the_main_result_comes_first():
    groups = plan("llama2-7b").groups
    assert all(group[-1].line == "python -m utils.paper.report runs/llama2-7b" for group in groups)
    others = [command.line for group in groups for command in group[:-1] if not command.variants]
    assert len(others) == len(set(others))
    headline = plan("llama2-7b", "table1", "fig2", "table5").groups[0]
    assert [shlex.split(command.line)[1] for command in headline] == [
        "prune.py", "calibrate.py", "distill.py", "eval_ppl.py", "eval_qa.py", "-m"]
    assert list(headline[3].variants) == ["vanilla-n9", "d-n9", "P-n9", "FT-n9"]


def test_the_papers_sizes_for_the_papers_models():
    found = "\n".join(lines("llama2-7b", "table5"))
    assert "--calib-samples 128 --seq-len 2048" in found and "--train-samples 5000" in found
    assert "--datasets wikitext2 c4 ptb --seq-len 2048 --add --out" in found and "--limit-windows" not in found
    assert "--n-prune 9 7 --calib-data wikitext2" in found and "--out runs/llama2-7b/n{n}/selection.json" in found
    windows = [line.split("--calib-samples ")[1].split()[0] for line in lines("llama2-7b", "table8") if "_4x" in line]
    assert windows == ["512", "64", "256"]  # the first statistics hold those of fewer windows
    small = "\n".join(lines("llama2-7b", small=True))
    assert not any(size in small for size in ("2048", "5000", "2500", "7500", "--calib-samples 10 "))


def test_what_a_preset_does_without():
    local, hub = "\n".join(lines(EMBEDDED, local_data=True)), "\n".join(lines(EMBEDDED))
    assert all(f"{name}.py" in local and f"{name}.py" not in hub for name in ("eval_qa", "eval_mmlu"))
    assert plan(EMBEDDED, "table1").unanswered and not plan(EMBEDDED, "table3").unanswered
    assert "P-from-news" in hub and "P-from-c4" not in hub
    assert "P-from-c4" in local and "P-from-ptb" in local and "news" not in local
    assert "llm-pruner" in hub and "llm-pruner" not in "\n".join(lines("deepseek-r1-qwen-7b"))


def test_figure_4_shows_every_model_that_has_been_run(tmp_path):
    for path in ("one/stats.safetensors", "one/n3/selection.json", "two/n3/selection.json", "me/stats.safetensors"):
        (tmp_path / "runs" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / path).touch()
    found = [c.line for group in Plan(["fig4"], sizes("me", "runs/me")).groups for c in group if "--figure 4" in c.line]
    assert found == ["python plot_magnitudes.py --stats me=runs/me/stats.safetensors one=runs/one/stats.safetensors "
                     "--figure 4 --selection n3=runs/me/n3/selection.json n5=runs/me/n5/selection.json "
                     "n7=runs/me/n7/selection.json one/n3/selection.json=runs/one/n3/selection.json "
                     "--out runs/me/figures"]


def test_a_model_with_spaces_in_its_path_is_one_word():
    for command in Plan(["table1"], sizes("/a b/c 'd'", "runs/c")).groups[0]:
        words = shlex.split(command.text())
        assert "--model" not in words or words[words.index("--model") + 1] in ("/a b/c 'd'", *(
            f"runs/c/n{n}/llm-pruner/model" for n in (3, 5, 7)))


def test_a_new_target_is_one_entry(monkeypatch):
    new = Table(("mine",), "what I want to know", ("ppl",), "tuned", (
        Row("vanilla", COSINE), Row("lower K", distil("top7", "--top-k 7"))))
    monkeypatch.setattr(experiments, "GROUPS", (*GROUPS, (new,)))
    assert [line.split()[1] for line in lines("llama2-7b", "mine")] == [
        "prune.py", "calibrate.py", "distill.py", "eval_ppl.py", "-m"]
    evaluation, folder = lines("llama2-7b", "mine")[-2], "runs/llama2-7b/n7"
    assert f"--selection vanilla-n7={folder}/selection.json --patch top7-n7={folder}/top7.safetensors" in evaluation


def test_an_evaluation_does_without_missing_files_and_keeps_the_rest():
    command = plan("llama2-7b", "table5").groups[0][3]
    assert command.text({"runs/llama2-7b/n9/FT.safetensors"}) == command.text().replace(
        f" FT-n9=runs/llama2-7b/n9/{FT.name}.safetensors", "")
    assert " --patch" not in command.text(set(command.variants.values()) - {"runs/llama2-7b/n9/selection.json"})


def test_every_row_of_every_table_is_tied_to_the_papers_data():
    used = set()
    for table in TABLES:
        for row in (DENSE, *table.rows):
            hits = [index for index, r in enumerate(paper()["results"]) if r["table"] in table.names
                    and r["method"] in row.methods and all(r.get(k) == v for k, v in row.fields.items())]
            assert hits or row is DENSE, (table.names, row)
            used |= set(hits)
    assert [r for index, r in enumerate(paper()["results"]) if index not in used] == []


def test_every_number_of_layers_of_the_paper_is_run():
    for table in TABLES:
        for model in MODELS[1:]:
            at = PRESETS[model][table.at]
            assert set(depths(table, model)) <= set(at if table.at == "every" else (at,))


def test_the_papers_cells_that_do_not_add_up_are_known():
    found = [(table.names[-1], model, n, column) for table in TABLES for row in table.rows
             for model in MODELS for n in depths(table, model) for column, _, _ in misprints(table, model, n, row)]
    assert set(found) == {(9, "llama2-7b", 7, "qa_avg"), (10, "llama2-7b", 7, "qa_avg"),
                          (16, "baichuan2-7b", 7, "mmlu_weighted_avg")}


def test_commands_are_rendered_without_any_installed_package():
    code = "import utils.paper.reproduce"  # -S: no site-packages
    assert subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT).returncode == 0
