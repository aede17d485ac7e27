"""eval_qa.py: the harness's tasks and metrics over our scoring."""

import gzip
import json
import os
import socket
from pathlib import Path

import pytest
import torch
from datasets.arrow_writer import ArrowWriter

from tests.conftest import ROOT
from tests.tokenizers_for_tests import tok, tok_nobos
from utils.errors import UserError
from utils.evaluation.qa import (LOCAL_FILES, PAPER_TASKS, HarnessModel, harness_results, load_tasks,
                                 paired_differences, result_row, retained_performance)

DATA = Path(os.environ.get("LINEARPATCH_DATA") or ROOT.parent / "shared" / "data")
needs_data = pytest.mark.skipif(not (DATA / "copa").is_dir(), reason=f"no task data in {DATA}")


def task_file(folder, rows, name="mine.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def words(n):
        return " ".join(f"w{i}" for i in torch.randint(0, 124, (n,), generator=generator).tolist())

    return [{"context": words(6), "choices": [words(1), words(3), words(2)], "gold": i % 3} for i in range(count)]


def one_item(tmp_path, choices, gold, scores):
    """The harness's acc and acc_norm of one item from given log-likelihoods."""
    model = HarnessModel(tok_nobos())
    qa, = load_tasks([task_file(tmp_path, [{"context": "w1", "choices": choices, "gold": gold}])], model)
    values = torch.tensor(scores, dtype=torch.float64)
    metrics, samples = harness_results(qa, model, values, torch.zeros(len(scores), dtype=torch.bool))
    return result_row(qa, metrics, samples, values)


def test_acc_norm_divides_by_characters(tmp_path):
    row = one_item(tmp_path, ["a", "abcdef"], 0, [-4.0, -6.0])
    assert (row["acc"], row["acc_norm"]) == (1, 0)
    row = one_item(tmp_path, ["a" * 20, "b" * 8], 0, [-6.0, -8.0])
    assert row["acc_norm"] == 1  # by tokens (2 and 4) the second would win


def test_own_task_without_any_network(script, folders, tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError("network attempt")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    path = task_file(tmp_path, rows_of(20))
    code, out, err = script("eval_qa", "--model", folders("llama"), "--tasks", path, "--out", tmp_path / "qa.json",
                            "--log-samples", tmp_path / "items.jsonl")
    assert code == 0, err
    content = json.loads((tmp_path / "qa.json").read_text())
    row, = content["results"]
    p = row["acc"]
    assert row["n"] == 20 and row["acc_stderr"] == pytest.approx((p * (1 - p) / 19) ** 0.5) and "n=20" in out
    assert content["harness"].startswith("lm_eval==") and row["task_version"] == 1.0 and len(row["prompt_sha1"]) == 40
    items = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert len(items) == 20 and items[0]["tokens"] == [1, 3, 2] and len(items[0]["log_likelihoods"]) == 3
    assert sum(item["prediction"] == item["gold"] for item in items) / 20 == p


def test_the_prompt_hash_follows_every_character(tmp_path):
    model = HarnessModel(tok_nobos())
    rows = rows_of(5)
    one, = load_tasks([task_file(tmp_path, rows, "a.jsonl")], model)
    rows[4]["context"] += "."
    other, = load_tasks([task_file(tmp_path, rows, "b.jsonl")], model)
    assert one.prompt_sha1 != other.prompt_sha1


@pytest.mark.parametrize("tokenizer, bos, expected", [
    (tok, "auto", (1, 5, 6)), (tok, "off", (5, 6)), (tok_nobos, "auto", (5, 6)), (tok_nobos, "on", (1, 5, 6))])
def test_bos_policy(tmp_path, tokenizer, bos, expected):
    model = HarnessModel(tokenizer(), bos)
    qa, = load_tasks([task_file(tmp_path, [{"context": "w1 w2", "choices": ["w3", "w4"], "gold": 0}])], model)
    assert qa.groups[0][0].context == expected and qa.groups[0][0].continuation == (7,)
    assert model.bos_in_words() == ("BOS: yes (1)" if expected[0] == 1 else "BOS: no")


def test_never_two_bos(tmp_path):
    model = HarnessModel(tok(), "on")
    qa, = load_tasks([task_file(tmp_path, [{"context": "<s> w1", "choices": ["w3", "w4"], "gold": 0}])], model)
    assert qa.groups[0][0].context == (1, 5)


@pytest.mark.parametrize("name, message", [
    ("model.safetensors", "not a jsonl task file"), ("none.jsonl", "no such file"), ("no_such_task", "neither a task")])
def test_wrong_tasks(script, folders, tmp_path, name, message):
    code, _, err = script("eval_qa", "--model", folders("llama"), "--tasks", name, "--out", tmp_path / "qa.json")
    assert code == 2 and message in err and not (tmp_path / "qa.json").exists()


def test_a_bad_line_is_named(tmp_path):
    path = task_file(tmp_path, [*rows_of(2), {"context": "a", "choices": ["b"], "gold": 3}])
    with pytest.raises(UserError, match="line 3"):
        load_tasks([path], HarnessModel(tok_nobos()))


def test_a_missing_local_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"copa/validation.jsonl is not there; see README"):
        load_tasks(["copa"], HarnessModel(tok_nobos()), tmp_path)


def test_limit_is_a_seeded_subset_not_the_head(tmp_path):
    model = HarnessModel(tok_nobos())
    path = task_file(tmp_path, rows_of(30))
    picks = [load_tasks([path], model, limit=10, seed=seed)[0].items for seed in (0, 0, 1)]
    assert picks[0] == picks[1] != picks[2] and picks[0] != list(range(10)) and len(set(picks[0])) == 10


def test_variants_live_and_reloaded_and_in_any_order_agree(script, folders, tmp_path, text):
    folder, path = folders("llama"), task_file(tmp_path, rows_of(20))
    calib = ("--calib-data", text, "--calib-samples", 4, "--seq-len", 32)
    script("prune", "--model", folder, "--n-prune", 2, *calib, "--out", tmp_path / "selection.json")
    script("calibrate", "--model", folder, "--selection", tmp_path / "selection.json", *calib, "--out",
           tmp_path / "patch.safetensors", "--save-model", tmp_path / "m")
    script("eval_qa", "--model", folder, "--tasks", path, "--selection", f"v={tmp_path}/selection.json", "--patch",
           f"P={tmp_path}/patch.safetensors", "--out", tmp_path / "live.json", "--log-samples", tmp_path / "a.jsonl")
    script("eval_qa", "--model", tmp_path / "m", "--tasks", path, "--out", tmp_path / "saved.json", "--dense",
           tmp_path / "live.json", "--log-samples", tmp_path / "b.jsonl", "--batch-tokens", 20)
    live, saved = (json.loads((tmp_path / name).read_text()) for name in ("live.json", "saved.json"))
    items = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
             for name in "ab"}
    for one, two in zip([i for i in items["a"] if i["variant"] == "P"], items["b"], strict=True):
        assert one["log_likelihoods"] == pytest.approx(two["log_likelihoods"], abs=1e-4)
    rows = {row["variant"]: row for row in live["results"]}
    assert rows["P"]["acc_norm"] == saved["results"][0]["acc_norm"]
    ratio = 100 * rows["P"]["value"] / rows["dense"]["value"]
    assert saved["summary"][0]["retained_performance"] == pytest.approx(ratio)
    assert [s["retained_performance"] for s in live["summary"]][0] == pytest.approx(100)
    assert {(p["variant"], p["reference"]) for p in live["paired"]} == {("v", "dense"), ("P", "dense")}
    code, out, _ = script("eval_qa", "--model", tmp_path / "m", "--tasks", path, "--out", tmp_path / "saved.json",
                          "--dense", tmp_path / "live.json", "--batch-tokens", 20)
    assert code == 0 and "reused" in out


def test_a_model_that_always_answers_the_same_is_reported(tmp_path):
    row = one_item(tmp_path, ["a", "b"], 0, [-1.0, -2.0])
    assert row["constant"] is False  # one item says nothing
    model = HarnessModel(tok_nobos())
    qa, = load_tasks([task_file(tmp_path, rows_of(4))], model)
    values = torch.tensor([-1.0, -2.0, -3.0] * 4, dtype=torch.float64)
    metrics, samples = harness_results(qa, model, values, torch.zeros(12, dtype=torch.bool))
    assert result_row(qa, metrics, samples, values)["constant"] is True


def test_retained_performance_is_the_mean_of_ratios():
    """LLaMA-2-7B, 9 layers, table 1: 84.08 as printed; the ratio of means would be 84.51."""
    dense = dict(zip(PAPER_TASKS, (46.25, 74.58, 77.74, 75.97, 79.11, 68.98, 80.59, 39.62, 87.0)))
    patched = dict(zip(PAPER_TASKS, (33.45, 55.22, 62.14, 57.67, 67.46, 65.11, 77.29, 34.93, 79.0)))
    assert retained_performance(patched, dense) == pytest.approx(84.083, abs=1e-3)
    assert 100 * sum(patched.values()) / sum(dense.values()) == pytest.approx(84.51, abs=1e-2)


def test_paired_difference_and_interval():
    rows = [{"variant": name, "task": "t", "metric": "acc", "acc_items": bits} for name, bits in
            (("dense", "11110000"), ("P", "11000001"))]
    row, = paired_differences(rows, "dense")
    difference = torch.tensor([0, 0, -1, -1, 0, 0, 0, 1.0])
    assert row["difference"] == pytest.approx(-0.125)
    assert row["ci95"][1] - row["ci95"][0] == pytest.approx(2 * 1.96 * (difference.std() / 8**0.5).item())


@needs_data
@pytest.mark.parametrize("name", PAPER_TASKS)
def test_the_nine_tasks_from_local_files(name):
    counts = {"arc_challenge": 1172, "arc_easy": 2376, "boolq": 3270, "hellaswag": 10042, "piqa": 1838,
              "winogrande": 1267, "wsc273": 273, "race": 1045, "copa": 100}
    model = HarnessModel(tok_nobos())
    qa, = load_tasks([name], model, DATA, limit=5)
    assert len(qa.task.eval_docs) == counts[name] and len(qa.items) == 5
    if name in ("winogrande", "wsc273"):  # the text behind the blank, after two contexts
        (first, _), (second, _) = qa.texts[0][0], qa.texts[0][1]
        assert first != second and qa.texts[0][0][1] == qa.texts[0][1][1]
    else:
        assert len({context for context, _ in qa.texts[0]}) == 1


@needs_data
def test_a_file_without_gz_is_not_confused(tmp_path):
    split, file = LOCAL_FILES["race"]
    assert split == "test" and gzip.open(DATA / file).readline().startswith(b"{")


def hub_stand_in(cache, repository, config, rows):
    """A data set in the local cache of `datasets`, where a download from the hub would have left it."""
    import datasets
    owner, name = repository.split("/")
    folder = cache / f"{owner}___{name}" / config / "0.0.0" / ("0" * 40)
    folder.mkdir(parents=True)
    table = datasets.Dataset.from_list(rows)
    splits = {}
    for split in ("train", "validation"):
        with ArrowWriter(features=table.features, path=str(folder / f"{name}-{split}.arrow")) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
        splits[split] = {"name": split, "num_bytes": 1000, "num_examples": len(rows), "dataset_name": name}
    (folder / "dataset_info.json").write_text(json.dumps({
        "builder_name": name, "dataset_name": name, "config_name": config, "splits": splits,
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0}, "features": table.features.to_dict()}))


def test_tasks_from_the_hub_come_out_of_its_cache_without_network(script, folders, tmp_path, monkeypatch):
    import datasets
    from huggingface_hub import constants
    rows = [{"premise": f"The man turned on tap {i}.", "choice1": "The toilet filled.", "choice2": "Water flowed.",
             "question": "effect", "idx": i, "label": i % 2} for i in range(5)]
    hub_stand_in(tmp_path / "cache", "aps/super_glue", "copa", rows)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def call(task):
        return script("eval_qa", "--model", folders("llama"), "--tasks", task, "--out", tmp_path / "qa.json")

    code, _, err = call("copa")
    assert code == 0, err
    row = json.loads((tmp_path / "qa.json").read_text())["results"][0]
    assert (row["task"], row["n"], row["metric"]) == ("copa", 5, "acc")
    before = (tmp_path / "qa.json").read_bytes()
    code, _, err = call("boolq")
    assert code == 2 and "Traceback" not in err and "--data-dir" in err, err
    assert (tmp_path / "qa.json").read_bytes() == before


def test_rows_of_another_tokenizer_are_not_reused(script, folders, tmp_path):
    import shutil
    path = task_file(tmp_path, rows_of(6))
    other = tmp_path / "other"
    shutil.copytree(folders("llama"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    names = list(tokenizer["model"]["vocab"])
    words = [name for name in names if name.startswith("w")]
    tokenizer["model"]["vocab"].update({a: tokenizer["model"]["vocab"][b] for a, b in zip(words, words[::-1])})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    command = ("--tasks", path, "--out", tmp_path / "qa.json")
    assert script("eval_qa", "--model", folders("llama"), *command)[0] == 0
    code, out, err = script("eval_qa", "--model", other, *command)
    assert code == 0 and "reused" not in out, err


COPA = [{"premise": f"w{i}.", "choice1": "w2.", "choice2": "w3.", "question": "effect", "idx": i, "label": i % 2}
        for i in range(4)]
BOOLQ = [{"question": f"w{i}", "passage": "w3 w4", "label": i % 2} for i in range(4)]


def packed(rows):
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0)


@pytest.mark.parametrize("task, content", [
    ("copa", b""), ("copa", b'{"premise": "w1'), ("copa", b"\xff\xfe"), ("copa", b'{"a": 1}'),
    ("copa", json.dumps({**COPA[0], "choice1": None}).encode()),
    ("copa", json.dumps({**COPA[0], "label": -1}).encode()),
    ("copa", json.dumps({**COPA[0], "label": None}).encode()), ("boolq", packed(BOOLQ)[:-9]), ("boolq", b"x"),
    ("boolq", bytes(b ^ 0x55 if i == 30 else b for i, b in enumerate(packed(BOOLQ)))),
    ("boolq", packed([{**BOOLQ[0], "label": 5}]))])
def test_damaged_local_files_are_named(script, folders, tmp_path, monkeypatch, task, content):
    import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / LOCAL_FILES[task][1]
    path.parent.mkdir()
    path.write_bytes(content)
    code, _, err = script("eval_qa", "--model", folders("llama"), "--tasks", task, "--data-dir", tmp_path, "--out",
                          tmp_path / "qa.json")
    assert code == 2 and f"error: --tasks {task}: " in err and not (tmp_path / "qa.json").exists(), err


def test_a_folder_called_as_a_task_is_no_task_file(tmp_path, monkeypatch):
    (tmp_path / "copa").mkdir()
    (tmp_path / "copa" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in COPA))
    monkeypatch.chdir(tmp_path)
    assert load_tasks(["copa"], HarnessModel(tok_nobos()), ".")[0].name == "copa"


def test_dates_and_halves_of_surrogate_pairs_in_a_task_file(tmp_path):
    row = {"context": "2020-01-01T00:00:00Z", "choices": ["2020-01-01", "2020-01-02"], "gold": 0}
    qa, = load_tasks([task_file(tmp_path, [row])], HarnessModel(tok_nobos()))
    assert qa.texts[0][0] == (row["context"], " 2020-01-01")
    with pytest.raises(UserError, match="line 1"):
        load_tasks([task_file(tmp_path, [{**row, "context": "\ud800"}], "b.jsonl")], HarnessModel(tok_nobos()))


def test_log_samples_loses_neither_files_nor_rows(script, folders, tmp_path):
    mine, other = task_file(tmp_path, rows_of(4)), task_file(tmp_path, rows_of(4, 1), "other.jsonl")
    command, before = ("--model", folders("llama"), "--out", tmp_path / "qa.json"), mine.read_bytes()
    code, _, err = script("eval_qa", *command, "--tasks", mine, "--log-samples", mine, "--force")
    assert code == 2 and "not written by this script" in err and mine.read_bytes() == before
    for task in (mine, other):
        code, _, err = script("eval_qa", *command, "--tasks", task, "--add", "--log-samples", tmp_path / "log.jsonl")
        assert code == 0, err
    assert [row["task"] for row in json.loads((tmp_path / "qa.json").read_text())["results"]] == [mine.name, other.name]
    (tmp_path / "qa.json").write_text("{}")
    code, _, err = script("eval_qa", *command, "--tasks", mine, "--log-samples", tmp_path / "log.jsonl")
    assert code == 2 and (tmp_path / "qa.json").read_text() == "{}"


def test_a_dense_reference_over_other_items_or_in_the_file_to_be_written_is_refused(script, folders, tmp_path):
    path, dense = task_file(tmp_path, rows_of(9)), tmp_path / "dense.json"
    command = ("--model", folders("llama"), "--tasks", path, "--out")
    assert script("eval_qa", *command, dense, "--limit", 5)[0] == 0
    code, _, err = script("eval_qa", *command, tmp_path / "qa.json", "--dense", dense)
    assert code == 2 and "other items" in err and not (tmp_path / "qa.json").exists()
    code, _, err = script("eval_qa", *command, dense, "--dense", dense, "--limit", 5)
    assert code == 2 and "would overwrite --dense" in err
    assert script("eval_qa", *command, tmp_path / "qa.json", "--dense", dense, "--limit", 5)[0] == 0


@pytest.mark.parametrize("about", ["{", "[]", '{"base_model": 3}', "\xff"])
def test_a_damaged_account_of_a_saved_folder_is_refused(script, folders, tmp_path, about):
    import shutil
    path = task_file(tmp_path, rows_of(4))
    command = ("--tasks", path, "--out", tmp_path / "qa.json")
    assert script("eval_qa", "--model", folders("no-ops"), *command)[0] == 0
    shutil.copytree(folders("llama"), tmp_path / "m")
    (tmp_path / "m" / "linearpatch.json").write_bytes(about.encode("latin-1"))
    code, _, err = script("eval_qa", "--model", tmp_path / "m", "--tasks", path, "--dense", tmp_path / "qa.json",
                          "--out", tmp_path / "b.json")
    assert code == 2 and "linearpatch.json" in err and len(err.splitlines()) == 1, err


def test_damaged_rows_are_refused_and_stay(script, folders, tmp_path):
    command = ("--model", folders("llama"), "--tasks", task_file(tmp_path, rows_of(4)), "--out", tmp_path / "qa.json")
    assert script("eval_qa", *command)[0] == 0
    content = json.loads((tmp_path / "qa.json").read_text())
    content["results"][0]["acc_norm_items"] = "01"
    (tmp_path / "qa.json").write_text(json.dumps(content))
    before = (tmp_path / "qa.json").read_bytes()
    code, _, err = script("eval_qa", *command)
    assert code == 2 and "row 1: is damaged (acc_norm has 2 items of 4)" in err and "--force" in err
    assert (tmp_path / "qa.json").read_bytes() == before and script("eval_qa", *command, "--force")[0] == 0
