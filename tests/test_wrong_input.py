"""Input that used to give a wrong number, lose a file or end in a traceback; each stands for its kind."""

import json
import shutil

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.steps import CALIB, calibrate, ppl, prune, rows
from tests.test_mmlu import questions, write_subject
from tests.test_qa import rows_of, task_file
from tests.tiny import ids, save, tiny
from tests.tokenizers_for_tests import tok_eos, tok_nobos
from utils import artifacts
from utils.activations import collect
from utils.artifacts import HEADER, read_tensors
from utils.data.windows import calibration_windows
from utils.decoder import Decoder
from utils.errors import UserError, WorkError
from utils.evaluation.mmlu import Question, encode, load_subjects
from utils.evaluation.objectives import summarise
from utils.hadamard import rotation
from utils.models import find_model
from utils.repairs import scale_vector
from utils.session import default_folder


def refused(result, *words):
    code, _, err = result
    message = err[err.rindex("error: "):]  # after the progress bars
    assert code == 2 and all(word in message for word in words) and len(message.strip().splitlines()) <= 2, err
    return True


# ----- wrong numbers


def test_d_is_measured_in_the_rotation_that_p_is_built_with(script, folders, tmp_path, text):
    folder, states = folders("48"), {}
    script("prune", "--model", folder, "--layers", "2-3", "--out", tmp_path / "selection.json")
    model = Decoder(tiny(hidden_size=48))
    for order in ("released", "paper"):
        assert calibrate(script, folder, tmp_path, text, "--hadamard-order", order, "--sigma-windows", 2)[0] == 0
        header, tensors = read_tensors(tmp_path / "patch.safetensors", "patch")
        states[order] = header["sigma_d"][0]["sigma_d_rotated"]
        assert header["recipe"]["stats"]["rotation"]["order"] == order
        windows = calibration_windows(str(text), tok_nobos(), 4, 32).ids
        stats = collect(model, windows, rotation(48, order=order), progress=False)
        torch.testing.assert_close(tensors["run0.d"].double(), scale_vector(stats.l1_rotated, 2, 4), rtol=1e-4, atol=0)
    assert states["released"] != states["paper"]


def test_other_windows_of_the_same_tokens_are_evaluated_anew(script, folders, tmp_path, text):
    def run(out, length, count):
        script("eval_ppl", "--model", folders("llama"), "--datasets", text, "--seq-len", length,
               "--limit-windows", count, "--out", out)
        return json.loads(out.read_text())["results"][0]

    run(tmp_path / "a.json", 64, 4)
    again, fresh = run(tmp_path / "a.json", 128, 2), run(tmp_path / "b.json", 128, 2)
    assert again["ppl"] == fresh["ppl"] and len(again["window_nll"]) == 2


def test_two_tasks_of_one_name_are_refused(script, folders, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        task_file(tmp_path / name, rows_of(4), "t.jsonl")
    result = script("eval_qa", "--model", folders("llama"), "--tasks", tmp_path / "a" / "t.jsonl",
                    tmp_path / "b" / "t.jsonl", "--out", tmp_path / "qa.json")
    assert refused(result, "both called t.jsonl")


def test_changed_answers_are_scored_anew(script, folders, tmp_path):
    def run():
        code, _, err = script("eval_qa", "--model", folders("llama"), "--tasks", path, "--out", tmp_path / "qa.json")
        assert code == 0, err
        return json.loads((tmp_path / "qa.json").read_text())["results"][0]["acc_items"]

    items = rows_of(6)
    path = task_file(tmp_path, items)
    before = run()
    for item in items:
        item["gold"] = (item["gold"] + 1) % 3
    path = task_file(tmp_path, items)
    assert run() != before


def test_mmlu_prompts_never_end_in_the_tokenizers_eos():
    tokenizer = tok_eos()
    _, requests = encode("anatomy", [], [Question("w1", ("w2", "w3", "w4", "w5"), 0)], tokenizer, [4, 5, 6, 7])
    assert requests[0][0].context[0] == tokenizer.bos_token_id and tokenizer.eos_token_id not in requests[0][0].context


@pytest.mark.parametrize("letter", ["AB", "", "E", "a"])
def test_mmlu_answers_are_one_of_four_letters(tmp_path, letter):
    write_subject(tmp_path, "anatomy", questions(5), questions(2))
    path = tmp_path / "mmlu" / "data" / "test" / "anatomy_test.csv"
    path.write_text(path.read_text() + f"q,1,2,3,4,{letter}\n")
    with pytest.raises(UserError, match="record 3"):
        load_subjects(["anatomy"], tmp_path)


@pytest.mark.parametrize("row", [{"answer": 7}, {"answer": -1}, {"choices": ["a", "b"]}, {"answer": "B"},
                                 {"question": 3}])
def test_mmlu_rows_are_checked(tmp_path, row):
    good = {"subject": "anatomy", "question": "q", "choices": list("abcd"), "answer": 1}
    (tmp_path / "mmlu").mkdir()
    for split in ("dev", "test"):
        (tmp_path / "mmlu" / f"{split}.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({**good, **row}) + "\n")
    with pytest.raises(UserError, match="line 2"):
        load_subjects(["anatomy"], tmp_path)


@pytest.mark.parametrize("item", [
    {"context": "w1", "choices": [" ", "w2"], "gold": 0}, {"context": "w1", "choices": ["", "w2"], "gold": 0},
    {"context": "w1", "choices": ["w2"], "gold": 0}, {"context": "w1", "choices": "ab", "gold": 0},
    {"context": "w1", "choices": {"a": 1, "b": 2}, "gold": 0}, {"context": "w1", "choices": ["w2", "w3"], "gold": 1.0},
    {"context": "w1", "choices": ["w2", "w3"], "gold": True}, {"context": 1, "choices": ["w2", "w3"], "gold": 0}])
def test_items_that_cannot_be_scored_are_named(script, folders, tmp_path, item):
    path = task_file(tmp_path, [*rows_of(1), item])
    assert refused(script("eval_qa", "--model", folders("llama"), "--tasks", path, "--out", tmp_path / "qa.json"),
                   "line 2")


def test_line_separators_inside_a_string_and_a_bom_are_text(script, folders, tmp_path):
    path = tmp_path / "t.jsonl"
    item = {"context": "w1\u2028w2\u0085w3", "choices": ["w4", "w5"], "gold": 0}
    path.write_text(json.dumps(item, ensure_ascii=False) + "\n" + json.dumps(rows_of(1)[0]) + "\n", encoding="utf-8")
    code, _, err = script("eval_qa", "--model", folders("llama"), "--tasks", path, "--out", tmp_path / "qa.json")
    assert code == 0 and json.loads((tmp_path / "qa.json").read_text())["results"][0]["n"] == 2, err


@pytest.mark.parametrize("removed", [[2, 99], [-1, 2], ["2", "3"], "23", {}, [2.0, 3.5], [True, False],
                                     [0, 1, 2, 3, 4, 5], [2, 2]])
def test_impossible_removed_layers_in_a_selection(script, folders, tmp_path, text, removed):
    prune(script, folders("llama"), tmp_path, text, "--layers", "2-3")
    content = json.loads((tmp_path / "selection.json").read_text())
    (tmp_path / "selection.json").write_text(json.dumps({**content, "removed": removed}))
    assert refused(calibrate(script, folders("llama"), tmp_path, text), "selection.json", "removed")
    assert refused(ppl(script, folders("llama"), tmp_path, text, "--selection", f"v={tmp_path}/selection.json"),
                   "removed")


@pytest.mark.parametrize("flags", [("--protect-first", -3), ("--protect-last", -1), ("--seed", 10**20), ("--seed", -1)])
def test_numbers_out_of_range(script, folders, tmp_path, text, flags):
    code, _, err = prune(script, folders("llama"), tmp_path, text, "--n-prune", 2, *flags)
    assert code == 2 and "must be" in err and not (tmp_path / "selection.json").exists()


def test_a_selection_edited_by_hand_is_not_called_reused(script, folders, tmp_path, text):
    prune(script, folders("llama"), tmp_path, text, "--n-prune", 2)
    content = json.loads((tmp_path / "selection.json").read_text())
    (tmp_path / "selection.json").write_text(json.dumps({**content, "removed": [0, 1]}))
    assert refused(prune(script, folders("llama"), tmp_path, text, "--n-prune", 2), "edited")


def test_a_dense_reference_of_another_model_is_refused(script, folders, tmp_path):
    path = task_file(tmp_path, rows_of(4))
    script("eval_qa", "--model", folders("no-ops"), "--tasks", path, "--out", tmp_path / "other.json")
    assert refused(script("eval_qa", "--model", folders("llama"), "--tasks", path, "--out", tmp_path / "qa.json",
                          "--dense", tmp_path / "other.json"), "made for another model")


def test_dense_names_the_model_only(script, folders, tmp_path, text):
    prune(script, folders("llama"), tmp_path, text, "--layers", "2-3")
    assert refused(ppl(script, folders("llama"), tmp_path, text, "--no-dense", "--selection",
                       f"dense={tmp_path}/selection.json"), "dense is the name")


def test_a_path_with_an_equals_sign_is_a_path(script, folders, tmp_path, text):
    out = tmp_path / "a=b c"
    prune(script, folders("llama"), out, text, "--layers", "2-3")
    code, _, err = ppl(script, folders("llama"), tmp_path, text, "--selection", out / "selection.json")
    assert code == 0 and "a=b c/selection" in rows(tmp_path), err


# ----- lost files


def test_a_saved_model_never_replaces_what_is_read_or_written(script, folders, tmp_path, text):
    folder = tmp_path / "m"
    prune(script, folders("llama"), tmp_path, text, "--layers", "2-3", "--save-model", folder)
    before = sorted(p.name for p in folder.iterdir())
    assert refused(script("prune", "--model", folder, "--layers", "1", "--out", tmp_path / "s.json",
                          "--save-model", folder), "would replace")
    assert refused(script("prune", "--model", folders("llama"), "--layers", "1", "--out", folder / "s.json",
                          "--save-model", folder), "would replace")
    assert sorted(p.name for p in folder.iterdir()) == before
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert refused(script("prune", "--model", folders("llama"), "--layers", "1", "--out", tmp_path / "s.json",
                          "--save-model", link), "is a link")


def test_outputs_of_one_name_or_of_another_kind_are_refused(script, folders, tmp_path):
    path = task_file(tmp_path, rows_of(3))
    assert refused(script("eval_qa", "--model", folders("llama"), "--tasks", path, "--out", tmp_path / "x.json",
                          "--log-samples", tmp_path / "x.json"), "must end in .jsonl")
    assert refused(script("prune", "--model", folders("llama"), "--layers", "1", "--out", tmp_path / "s.safetensors"),
                   "must end in .json")


def test_default_folders_keep_the_whole_name(tmp_path):
    names = {default_folder(str(tmp_path / name)).name for name in ("Llama-3.1-8B", "Llama-3.2-1B")
             if (tmp_path / name).mkdir() is None}
    assert names == {"Llama-3.1-8B", "Llama-3.2-1B"} and default_folder("a/b-1.5").name == "a--b-1.5"


# ----- tracebacks


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*args):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(artifacts, "save_file", full)
    with pytest.raises(WorkError, match="p.safetensors: cannot be written.*No space left"):
        artifacts.write_tensors(tmp_path / "p.safetensors", "stats", {"a": torch.zeros(2)}, {"recipe": {}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "empty", "list", "text_config", "hidden", "tokenizer"])
def test_damaged_model_folders(script, folders, tmp_path, text, damage):
    folder = tmp_path / "m"
    shutil.copytree(folders("llama"), folder)
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    if damage in ("cut", "empty"):
        weights.write_bytes(weights.read_bytes()[:999 if damage == "cut" else 0])
    elif damage == "tokenizer":
        (folder / "tokenizer_config.json").write_text("[]")
    else:
        changed = {"list": [config], "text_config": {**config, "text_config": 3},
                   "hidden": {**config, "hidden_size": "x"}}
        (folder / "config.json").write_text(json.dumps(changed[damage]))
    assert refused(ppl(script, folder, tmp_path, text))


def test_windows_longer_than_gpt2_reads(script, tmp_path, text):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=1,
                                       eos_token_id=2))
    folder = save(model, tmp_path / "gpt2")
    assert refused(script("eval_ppl", "--model", folder, "--datasets", text, "--seq-len", 100), "n_positions 64")
    code, out, err = script("prune", "--model", folder, "--n-prune", 1, "--calib-data", text, *CALIB, "--out",
                            tmp_path / "s.json")
    assert code == 0 and "3 of 4" not in err and "1 of 4 layers removed" in out, err


def test_a_tokenizer_of_another_model(script, tmp_path, text):
    folder = save(tiny(vocab_size=60), tmp_path / "m")
    assert refused(ppl(script, folder, tmp_path, text), "belongs to another model")


def test_a_perplexity_beyond_all_numbers_is_a_failure():
    with pytest.raises(WorkError, match="exceeds"):
        summarise(torch.full((3,), 800.0, dtype=torch.float64))


HEADERS = [{"about": None}, {"about": {"metric": "list", "n": 2, "repair": "foo", "stage": "calibrated"}},
           {"about": {"metric": "list", "n": 2, "repair": "hadamard"}}, {"removed": None}, {"model": "x"},
           {"hadamard_order": "zzz"}, {"format": "linearpatch/patch@1"}]


@pytest.mark.parametrize("change", HEADERS)
def test_patch_headers_are_checked(script, folders, tmp_path, text, change):
    prune(script, folders("llama"), tmp_path, text, "--layers", "2-3")
    calibrate(script, folders("llama"), tmp_path, text)
    path = tmp_path / "patch.safetensors"
    with safe_open(path, "pt") as file:
        header, tensors = json.loads(file.metadata()[HEADER]), {key: file.get_tensor(key) for key in file.keys()}
    save_file(tensors, path, {HEADER: json.dumps({k: v for k, v in {**header, **change}.items() if v is not None})})
    assert refused(ppl(script, folders("llama"), tmp_path, text, "--patch", path), "patch.safetensors")


def test_a_read_only_cache_only_costs_time(folders, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    expected = find_model(str(folders("llama"))).sha256
    monkeypatch.setenv("LINEARPATCH_CACHE", str(tmp_path / "file" / "cache"))
    assert find_model(str(folders("llama"))).sha256 == expected


def test_out_of_range_ids_in_a_batch_are_named():
    with pytest.raises(UserError, match="token id 128"):
        Decoder(tiny()).inputs(torch.cat([ids(), torch.full((2, 1), 128)], 1))


def test_force_replaces_no_artifact_of_another_kind(script, folders, tmp_path, text):
    folder = folders("llama")
    prune(script, folder, tmp_path, text, "--n-prune", 1)
    assert calibrate(script, folder, tmp_path, text)[0] == 0
    patch = tmp_path / "patch.safetensors"
    before = patch.read_bytes()
    result = script("prune", "--model", folder, "--n-prune", 1, "--calib-data", text, *CALIB, "--stats", patch,
                    "--out", tmp_path / "b" / "selection.json", "--force")
    assert refused(result, "holds a patch", "stats") and patch.read_bytes() == before
    assert not (tmp_path / "b" / "selection.json").exists()
