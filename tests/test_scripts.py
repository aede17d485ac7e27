"""The scripts as their users call them: artifacts, reuse, and wrong input."""

import json
import re

import pytest
import torch

from tests.steps import CALIB, calibrate, ppl, prune, rows
from tests.tiny import ids, token_text
from utils.artifacts import read_header, read_tensors, write_tensors
from utils.model_folder import origin
from utils.models import find_model, load_decoder


def test_no_op_layers_are_found_patched_by_the_identity_and_cost_nothing(script, folders, tmp_path, text):
    folder = folders("no-ops")
    code, out, _ = prune(script, folder, tmp_path, text, "--n-prune", 2)
    assert code == 0 and "remove layers [2, 3] (0-based), keep [0, 1, 4, 5]" in out and "warning: 33 %" in out
    selection = json.loads((tmp_path / "selection.json").read_text())
    assert selection["removed"] == [2, 3] and selection["kept"] == [0, 1, 4, 5] and selection["runs"] == [[2, 4]]
    assert {"model", "about", "scores", "parameters", "calibration", "provenance"} <= set(selection)
    assert calibrate(script, folder, tmp_path, text)[0] == 0
    _, tensors = read_tensors(tmp_path / "patch.safetensors", "patch")
    torch.testing.assert_close(tensors["run0.d"], torch.ones(64), rtol=0, atol=1e-5)
    code, out, _ = ppl(script, folder, tmp_path, text, "--selection", f"vanilla={tmp_path}/selection.json",
                       "--patch", f"P={tmp_path}/patch.safetensors")
    assert code == 0 and "layers 4, patch after layer 1, yes" in out and "layers 4, patch no" in out
    assert re.search(r"sha256 [0-9a-f]{12}", out)
    found = rows(tmp_path)
    for name in ("vanilla", "P"):
        assert found[name]["ppl"] == pytest.approx(found["dense"]["ppl"], rel=1e-5)
    assert {"windows", "seq_len", "scored_tokens", "dropped_tokens", "bos", "nll_mean", "nll_stderr", "split"} <= set(
        found["P"])


def test_a_run_that_ends_at_the_last_layer_is_patched_before_the_norm(script, folders, tmp_path, text):
    folder = folders("no-ops-end")
    code, out, _ = prune(script, folder, tmp_path, text, "--n-prune", 2, "--protect-last", 0)
    assert code == 0 and "[4, 6)" in out
    calibrate(script, folder, tmp_path, text)
    ppl(script, folder, tmp_path, text, "--patch", f"P={tmp_path}/patch.safetensors")
    found = rows(tmp_path)
    assert found["P"]["ppl"] == pytest.approx(found["dense"]["ppl"], rel=1e-5)


def test_perplexity_equals_a_plain_evaluation(script, folders, tmp_path):
    text = tmp_path / "thousand.txt"
    text.write_text(token_text(1000, seed=5))
    code, out, _ = script("eval_ppl", "--model", folders("llama"), "--datasets", text, "--seq-len", 256, "--out",
                          tmp_path / "ppl.json")
    row = rows(tmp_path)["dense"]
    assert code == 0 and (row["windows"], row["scored_tokens"], row["dropped_tokens"]) == (3, 765, 232)
    assert re.search(r"windows=3\b.*seq_len=256\b.*scored=765\b.*dropped=232\b", out)
    tokens = torch.tensor([4 + int(w[1:]) for w in text.read_text().split()])[:768].view(3, 256)
    model = load_decoder(find_model(str(folders("llama")))).model
    with torch.no_grad():
        logits = model(tokens).logits.double()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 128), tokens[:, 1:].reshape(-1))
    assert row["ppl"] == pytest.approx(loss.exp().item(), rel=1e-6)


def test_sliding_windows_score_every_target_once_with_enough_context(script, folders, tmp_path):
    text = tmp_path / "hundred.txt"
    text.write_text(token_text(100, seed=6))
    code, out, _ = script("eval_ppl", "--model", folders("llama"), "--datasets", text, "--seq-len", 32, "--stride", 10,
                          "--out", tmp_path / "ppl.json")
    row = rows(tmp_path)["dense"]
    assert code == 0 and "windows every 10 tokens" in out
    assert (row["windows"], row["scored_tokens"], row["dropped_tokens"]) == (7, 70, 8)
    tokens = torch.tensor([4 + int(w[1:]) for w in text.read_text().split()])
    model, losses = load_decoder(find_model(str(folders("llama")))).model, []
    for target in range(22, 92):  # the first scored target is the 22nd of the first window
        start = (target - 22) // 10 * 10
        with torch.no_grad():
            logits = model(tokens[None, start:target]).logits[0, -1].double()
        losses.append(-logits.log_softmax(-1)[tokens[target]])
    assert row["ppl"] == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-6)


def test_other_n_metric_estimator_and_repair_need_no_forward(script, folders, tmp_path, text, monkeypatch):
    folder = folders("llama")
    assert prune(script, folder, tmp_path, text, "--n-prune", 2)[0] == 0

    def no_weights(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("utils.session.load_decoder", no_weights)
    for metric in ("cosine", "cosine-sequence-axis", "angular", "shortgpt"):
        code, out, _ = prune(script, folder, tmp_path, text, "--n-prune", 3, "--metric", metric)
        assert code == 0 and "stats.safetensors: reused" in out
    for repair in ("hadamard", "diagonal", "none", "random"):
        for estimator in ("ratio-of-sums", "mean-of-ratios"):
            assert calibrate(script, folder, tmp_path, text, "--repair", repair, "--estimator", estimator)[0] == 0


def test_finished_artifacts_are_reused_and_say_so(script, folders, tmp_path, text):
    folder = folders("llama")
    prune(script, folder, tmp_path, text, "--n-prune", 2)
    calibrate(script, folder, tmp_path, text)
    ppl(script, folder, tmp_path, text, "--patch", tmp_path / "patch.safetensors")
    names = ("selection.json", "stats.safetensors", "patch.safetensors")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    for call, name in ((lambda: prune(script, folder, tmp_path, text, "--n-prune", 2), "selection.json"),
                       (lambda: calibrate(script, folder, tmp_path, text), "patch.safetensors"),
                       (lambda: ppl(script, folder, tmp_path, text, "--patch", tmp_path / "patch.safetensors"),
                        "2 of 2 rows")):
        code, out, _ = call()
        assert code == 0 and re.search(rf"{re.escape(name)}:? reused", out)
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())
    code, out, _ = calibrate(script, folder, tmp_path, text, "--estimator", "mean-of-ratios")
    assert code == 0 and "made with another estimator; recomputing" in out
    code, out, _ = prune(script, folder, tmp_path, text, "--n-prune", 2, "--force")
    assert code == 0 and "reused" not in out


def test_seeds(script, folders, tmp_path, text):
    tensors = []
    for index, seed in enumerate((0, 0, 1)):
        out = tmp_path / str(index)
        prune(script, folders("llama"), out, text, "--n-prune", 2, "--seed", seed)
        calibrate(script, folders("llama"), out, text, "--seed", seed)
        header, found = read_tensors(out / "patch.safetensors", "patch")
        assert header["calibration"]["seed"] == seed and header["calibration"]["token_ids_sha256"]
        tensors.append(found["run0.d"])
    assert torch.equal(tensors[0], tensors[1]) and not torch.equal(tensors[0], tensors[2])


@pytest.mark.parametrize("n", [-1, 6, 7])
def test_impossible_numbers_of_layers(script, folders, tmp_path, text, n):
    code, _, err = prune(script, folders("llama"), tmp_path, text, "--n-prune", n)
    assert code == 2 and f"--n-prune {n}" in err and len(err.strip().splitlines()) <= 2
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_nothing_to_remove_is_fine(script, folders, tmp_path, text):
    code, out, _ = prune(script, folders("llama"), tmp_path, text, "--n-prune", 0, "--save-model", tmp_path / "m")
    assert code == 0 and "0 of 6 layers removed" in out
    one, two = (load_decoder(find_model(str(f))).model for f in (folders("llama"), tmp_path / "m"))
    with torch.no_grad():
        assert torch.equal(one(ids()).logits, two(ids()).logits)


@pytest.mark.parametrize("layers, message", [("2-9", "layers 0 to 5"), ("a", "--layers a"), ("3,3", "named twice"),
                                             ("4-2", "4-2"), ("0-5", "has 6 layers"), ("paper", "table 7")])
def test_wrong_lists_of_layers(script, folders, tmp_path, text, layers, message):
    code, _, err = prune(script, folders("llama"), tmp_path, text, "--layers", layers)
    assert code == 2 and message in err and not (tmp_path / "selection.json").exists()


def test_a_list_of_layers_needs_no_calibration(script, folders, tmp_path):
    code, out, _ = script("prune", "--model", folders("llama"), "--layers", "1,3-4", "--out", tmp_path / "s.json")
    assert code == 0 and "[1, 2), [3, 5)" in out and "wrote" in out


def test_artifacts_of_another_model_are_refused(script, folders, tmp_path, text):
    prune(script, folders("llama"), tmp_path, text, "--n-prune", 2)
    calibrate(script, folders("llama"), tmp_path, text)
    for other, field in (("48", "hidden_size"), ("no-ops", "sha256")):
        code, _, err = calibrate(script, folders(other), tmp_path, text, name="other.safetensors")
        assert code == 2 and "made for another model" in err and field in err
        code, _, err = ppl(script, folders(other), tmp_path, text, "--patch", tmp_path / "patch.safetensors")
        assert code == 2 and "made for another model" in err and not (tmp_path / "ppl.json").exists()
    assert not (tmp_path / "other.safetensors").exists()


@pytest.mark.parametrize("content, message", [
    (b"", "not a JSON"), (b"{}", "no format field"),
    (b'{"format": "linearpatch/selection@9"}', "selection@9 is unknown"),
    (b'{"format": "linearpatch/selection@1", "removed": [2]}', "--force recomputes it, or run again what wrote it"),
    (b'{"format": "linearpatch/ppl@1"}', "expected a selection"), (b"\xff\xfe", "not a JSON")])
def test_wrong_selection_files(script, folders, tmp_path, text, content, message):
    (tmp_path / "selection.json").write_bytes(content)
    code, _, err = calibrate(script, folders("llama"), tmp_path, text)
    assert code == 2 and "selection.json" in err and message in err and not (tmp_path / "patch.safetensors").exists()


def test_wrong_patch_files(script, folders, tmp_path, text):
    for path in (tmp_path / "none.safetensors", text, folders("llama") / "model.safetensors"):
        code, _, err = ppl(script, folders("llama"), tmp_path, text, "--patch", path)
        assert code == 2 and path.name in err and len(err.strip().splitlines()) <= 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_are_calibrated(script, folders, tmp_path, text, dtype):
    scales = {}
    for wanted in ("float32", dtype):
        for repair in ("hadamard", "diagonal"):
            out = tmp_path / wanted
            assert prune(script, folders("llama"), out, text, "--layers", "2-3", "--dtype", wanted)[0] == 0
            assert calibrate(script, folders("llama"), out, text, "--repair", repair, "--dtype", wanted)[0] == 0
            scales[wanted, repair] = read_tensors(out / "patch.safetensors", "patch")[1]["run0.d"]
    for repair in ("hadamard", "diagonal"):
        torch.testing.assert_close(scales[dtype, repair], scales["float32", repair], rtol=0.02, atol=0)


def test_every_kind_of_folder_is_evaluated(script, folders, tmp_path, text):
    folder = folders("llama")
    prune(script, folder, tmp_path, text, "--n-prune", 2, "--save-model", tmp_path / "pruned")
    calibrate(script, folder, tmp_path, text, "--save-model", tmp_path / "patched")
    ppl(script, folder, tmp_path, text, "--selection", f"pruned={tmp_path}/selection.json", "--patch",
        f"patched={tmp_path}/patch.safetensors")
    live = rows(tmp_path)
    for name in ("pruned", "patched"):
        out = tmp_path / f"of-{name}"
        code, printed, _ = ppl(script, tmp_path / name, out, text)
        removed = json.loads((tmp_path / "selection.json").read_text())["removed"]
        patch = dict(pruned="no", patched=f"after layer {removed[0] - 1}, yes")[name]
        assert code == 0 and f"layers 4, patch {patch}" in printed
        assert rows(out)["dense"]["ppl"] == pytest.approx(live[name]["ppl"], rel=1e-6)
        about = {"metric": "cosine", "n": 2, **dict(pruned={"repair": "none", "stage": "pruned"},
                                                    patched={"repair": "hadamard", "stage": "calibrated"})[name]}
        assert live[name]["about"] == rows(out)["dense"]["about"] == about
        content = origin(tmp_path / name)
        assert content["about"] == about and content["removed"] == content["removed_layers"] == removed
    assert content["patch_position"] == removed[0] - 1
    assert live["dense"]["about"] == {"metric": None, "n": 0, "repair": "none", "stage": "dense"}


def test_auto_keeps_the_repair_that_is_best_on_held_out_windows(script, folders, tmp_path, text):
    prune(script, folders("llama"), tmp_path, text, "--n-prune", 2)
    code, out, _ = calibrate(script, folders("llama"), tmp_path, text, "--repair", "auto", "--auto-windows", 3)
    header = read_header(tmp_path / "patch.safetensors", "patch")
    assert code == 0 and out.count("held-out calibration windows (3)") == 3
    best = min(header["auto"], key=lambda row: row["ppl"])["repair"]
    assert header["about"] == {"metric": "cosine", "n": 2, "repair": best, "stage": "calibrated"}
    assert header["recipe"]["repair"] == "auto"


def test_several_runs_get_a_patch_each(script, folders, tmp_path, text):
    script("prune", "--model", folders("llama"), "--layers", "1,3-4", "--out", tmp_path / "selection.json")
    code, out, _ = calibrate(script, folders("llama"), tmp_path, text, "--sigma-windows", 2)
    header, tensors = read_tensors(tmp_path / "patch.safetensors", "patch")
    assert code == 0 and header["runs"] == [[1, 2], [3, 5]] and {"run0.d", "run1.d", "run0.d_stderr"} <= set(tensors)
    assert [row["windows"] for row in header["sigma_d"]] == [2, 2]


def test_windows_longer_than_the_model_reads(script, folders, tmp_path, text):
    code, _, err = script("eval_ppl", "--model", folders("llama"), "--datasets", text, "--seq-len", 400)
    assert code == 2 and "max_position_embeddings 256" in err


def test_help_shows_a_command(script):
    for name in ("prune", "calibrate", "eval_ppl"):
        code, out, _ = script(name, "--help")
        assert code == 0 and f"python {name}.py" in out


def test_several_selections_and_repairs_in_one_call_equal_single_calls(script, folders, tmp_path, text):
    folder, paths = folders("llama"), []
    for n in (1, 2):
        prune(script, folder, tmp_path / f"n{n}", text, "--n-prune", n, "--stats", tmp_path / "stats.safetensors")
        paths.append(tmp_path / f"n{n}" / "selection.json")
    common = ("--model", folder, "--calib-data", text, *CALIB, "--stats", tmp_path / "stats.safetensors",
              "--sigma-windows", 2)
    code, _, err = script("calibrate", *common, "--selection", *paths, "--repair", "diagonal", "hadamard")
    assert code == 0, err
    for path in paths:
        for repair in ("diagonal", "hadamard"):
            together = path.with_name(f"patch_{repair}.safetensors")
            alone = path.with_name("alone.safetensors")
            script("calibrate", *common, "--selection", path, "--scaling", repair, "--out", alone, "--force")
            (a, x), (b, y) = (read_tensors(file, "patch") for file in (together, alone))
            assert a["recipe"] == b["recipe"] and torch.equal(x["run0.d"], y["run0.d"])
            assert a["sigma_d"][0]["sigma_d"] == pytest.approx(b["sigma_d"][0]["sigma_d"], rel=1e-6)
    code, _, err = script("calibrate", *common, "--selection", *paths, "--out", tmp_path / "one.safetensors")
    assert code == 2 and "--out" in err and not (tmp_path / "one.safetensors").exists()
    twin = paths[0].with_name("twin.json")
    twin.write_text(paths[0].read_text())
    assert script("calibrate", *common, "--selection", paths[0], twin)[0] == 2


def test_statistics_of_more_windows_hold_those_of_fewer(script, folders, tmp_path, text, monkeypatch):
    folder, stats = folders("llama"), tmp_path / "stats.safetensors"
    script("prune", "--model", folder, "--calib-data", text, "--calib-samples", 8, "--seq-len", 32, "--n-prune", 2,
           "--out", tmp_path / "selection.json", "--stats", stats)
    before = stats.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("utils.session.collect", lambda *a, **k: pytest.fail("a forward pass ran"))
        code, out, err = calibrate(script, folder, tmp_path, text, "--stats", stats)
    assert code == 0 and "its first 4 windows are these" in out and stats.read_bytes() == before, err
    assert calibrate(script, folder, tmp_path, text, "--stats", tmp_path / "own.safetensors",
                     name="own.safetensors.patch.safetensors")[0] == 0
    few, own = (read_tensors(tmp_path / name, "patch")[1]
                for name in ("patch.safetensors", "own.safetensors.patch.safetensors"))
    torch.testing.assert_close(few["run0.d"], own["run0.d"], rtol=1e-6, atol=0)
    code, out, _ = calibrate(script, folder, tmp_path, text, "--stats", stats, "--seed", 5)
    assert code == 0 and "recomputing" in out and stats.read_bytes() != before  # other draws: not their first windows


def test_rows_of_other_variants_stay_with_add_only_under_the_same_protocol(script, folders, tmp_path, text):
    folder = folders("llama")
    for layers in ("2", "3-4"):
        script("prune", "--model", folder, "--layers", layers, "--out", tmp_path / f"s{layers}.json")

    def call(layers, *more):
        code, out, err = ppl(script, folder, tmp_path, text,
                             "--selection", f"cut{layers}={tmp_path}/s{layers}.json", *more)
        assert code == 0, err
        return list(rows(tmp_path))

    assert call("2") == ["dense", "cut2"]
    first = rows(tmp_path)["cut2"]
    assert call("3-4", "--add") == ["cut2", "dense", "cut3-4"] and rows(tmp_path)["cut2"] == first
    assert call("3-4", "--add", "--limit-windows", 3) == ["dense", "cut3-4"]
    assert call("2", "--limit-windows", 3) == ["dense", "cut2"]
    other = tmp_path / "other.txt"
    other.write_text(token_text(300, seed=9))
    code, _, err = script("eval_ppl", "--model", folder, "--datasets", other, "--seq-len", 32, "--no-dense", "--patch",
                          "itself=dense", "--add", "--out", tmp_path / "ppl.json")
    assert code == 0 and list(rows(tmp_path)) == ["dense", "cut2", "itself"], err
    code, out, err = ppl(script, folder, tmp_path, text, "--selection", f"twin={tmp_path}/s2.json", "--add",
                         "--limit-windows", 3)
    assert code == 0 and "2 of 2 rows reused" in out, err  # one variant under two names keeps both
    assert sorted(rows(tmp_path)) == ["cut2", "dense", "itself", "twin"]


def test_a_killed_evaluation_goes_on_row_by_row(script, folders, tmp_path, monkeypatch):
    items = tmp_path / "items.jsonl"
    items.write_text("".join(json.dumps({"context": f"w{i} w{i + 1}", "choices": ["w5", "w9 w2"], "gold": i % 2}) + "\n"
                             for i in range(6)))
    second = tmp_path / "second.jsonl"
    second.write_text(items.read_text().replace("w5", "w7"))
    import eval_qa
    calls, real = [], eval_qa.score

    def dies(*args, **kwargs):
        calls.append(kwargs["label"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    command = ("eval_qa", "--model", folders("llama"), "--tasks", items, second, "--out", tmp_path / "qa.json")
    monkeypatch.setattr("eval_qa.score", dies)
    assert script(*command)[0] == 130
    code, out, _ = script(*command)
    assert code == 0 and calls == ["items.jsonl", "second.jsonl", "second.jsonl"] and "1 of 2 rows reused" in out
    resumed = json.loads((tmp_path / "qa.json").read_text())
    assert script(*command, "--force")[0] == 0
    fresh = json.loads((tmp_path / "qa.json").read_text())
    assert resumed["results"] == fresh["results"] and resumed["summary"] == fresh["summary"]


@pytest.mark.parametrize("change", [{"window_nll": [1.0]}, {"window_nll": "abc"}, {"variant": None}, {"ppl": "x"},
                                    {"ppl": float("nan")}, {"dataset": [1]}])
def test_damaged_rows_are_refused_and_stay(script, folders, tmp_path, text, change):
    assert ppl(script, folders("llama"), tmp_path, text)[0] == 0
    content = json.loads((tmp_path / "ppl.json").read_text())
    content["results"][0].update(change)
    (tmp_path / "ppl.json").write_text(json.dumps(content))
    before = (tmp_path / "ppl.json").read_bytes()
    code, _, err = ppl(script, folders("llama"), tmp_path, text, "--add")
    assert code == 2 and "ppl.json" in err and "--force" in err and (tmp_path / "ppl.json").read_bytes() == before
    assert ppl(script, folders("llama"), tmp_path, text, "--force")[0] == 0


def test_several_n_are_checked_before_anything_is_written(script, folders, tmp_path):
    for flags in (("--n-prune", 2, -1), ("--n-prune", 2, 6), ("--ratio", 0.2)):
        code, _, err = script("prune", "--model", folders("llama"), "--metric", "last", *flags, "--out",
                              tmp_path / "n{n}" / "selection.json")
        assert code == 2 and err and not list(tmp_path.iterdir()), flags
    (tmp_path / "n1.json").write_text("{")
    code, _, err = script("prune", "--model", folders("llama"), "--metric", "last", "--n-prune", 2, 1, "--out",
                          tmp_path / "n{n}.json")
    assert code == 2 and "n1.json" in err and not (tmp_path / "n2.json").exists()


def test_smaller_n_of_one_call_equal_calls_of_their_own(script, folders, tmp_path, text):
    for metric in ("cosine", "shortgpt", "sleb", "taylor", "ppl", "mag", "random"):
        common = ("--model", folders("llama"), "--metric", metric, "--calib-data", text, *CALIB)
        code, _, err = script("prune", *common, "--n-prune", 1, 3,
                              "--out", tmp_path / metric / "n{n}" / "selection.json")
        assert code == 0, err
        for n in (1, 3):
            assert script("prune", *common, "--n-prune", n, "--out", tmp_path / "alone.json", "--force")[0] == 0
            together, alone = (json.loads(path.read_text()) for path in (
                tmp_path / metric / f"n{n}" / "selection.json", tmp_path / "alone.json"))
            assert all(together[name] == alone[name] for name in ("removed", "order", "scores", "recipe")), (metric, n)
        assert not list((tmp_path / metric).glob("nn")) and not list((tmp_path / metric).glob("**/*progress*"))


def test_statistics_that_are_of_fewer_windows_than_they_say_are_refused(script, folders, tmp_path, text):
    assert prune(script, folders("llama"), tmp_path, text, "--n-prune", 2)[0] == 0
    path = tmp_path / "stats.safetensors"
    header, tensors = read_tensors(path, "stats")
    header.pop("format")
    write_tensors(path, "stats", tensors, {**header, "recipe": {**header["recipe"], "samples": 10**9}})
    code, _, err = calibrate(script, folders("llama"), tmp_path, text)
    assert code == 2 and "is of 4 windows, its recipe says 1000000000" in err
