"""LaCo: the merge of weights, the sweep against whole models built for every attempt, and prune.py --metric laco."""

import copy
import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.steps import calibrate, ppl, prune, rows
from tests.tiny import ids, save, tiny, token_text
from utils.artifacts import sha256_file
from utils.baselines.laco import RDSC, Schedule, apply_merges, laco, merge_weights, mergeable
from utils.decoder import Decoder
from utils.errors import UserError
from utils.model_folder import origin
from utils.models import find_model, load_decoder

IDS = ids(3, 12, seed=4)


@pytest.fixture
def text(tmp_path):
    """A short text: 400 tokens."""
    path = tmp_path / "text.txt"
    path.write_text(token_text(400))
    return path


def weights(*seeds):
    return [{"w": torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))} for seed in seeds]


def test_paper_merge_is_the_sum_of_differences_from_the_original_host():
    host, *merged = weights(0, 1, 2, 3)
    expected = host["w"].double() + sum(other["w"].double() - host["w"].double() for other in merged)
    torch.testing.assert_close(merge_weights(host, merged, "paper")["w"].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(merge_weights(host, merged[:1], "paper")["w"], merged[0]["w"])  # two layers: the second one


def test_official_merge_is_what_its_running_subtrahend_leaves():
    host, *merged = weights(0, 1, 2, 3)
    running = host["w"].double().clone()
    for other in merged:
        running += other["w"].double() - running
    torch.testing.assert_close(merge_weights(host, merged, "official")["w"].double(), running, rtol=1e-6, atol=1e-6)
    assert torch.equal(merge_weights(host, merged, "official")["w"], merged[-1]["w"])


@pytest.mark.parametrize("rdsc", RDSC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_nothing_or_copies_changes_no_bit(rdsc, dtype):
    host = {"w": weights(0)[0]["w"].to(dtype)}
    for merged in ([], [host] * 3):
        new = merge_weights(host, merged, rdsc)["w"]
        assert new.dtype == dtype and torch.equal(new, host["w"])


@pytest.mark.parametrize("rdsc", RDSC)
def test_hosts_keep_their_norms_and_old_tensors_are_not_written(rdsc):
    model = tiny()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.normal_()
    before, held = copy.deepcopy(model.state_dict()), dict(model.state_dict())
    apply_merges(Decoder(model), [{"host": 3, "merged": [4, 5]}], rdsc)
    assert all(torch.equal(held[name], before[name]) for name in before)
    for name, tensor in model.state_dict().items():
        if not name.startswith("model.layers.3.") or "norm" in name or rdsc == "remove":
            assert torch.equal(tensor, before[name])
        elif rdsc == "official":
            assert torch.equal(tensor, before[name.replace("layers.3", "layers.5")])
        else:
            three, four, five = (before[name.replace("layers.3", f"layers.{i}")] for i in (3, 4, 5))
            torch.testing.assert_close(tensor, three + (four - three) + (five - three))


def test_biases_of_projections_are_merged_and_norms_are_not():
    names = mergeable(tiny("qwen3").model.layers[0])
    assert not any("norm" in name for name in names) and len(names) == 7
    assert "self_attn.q_proj.bias" in mergeable(tiny("qwen2").model.layers[0])


def whole_model(model, merges, rdsc):
    """The merged model built naively: a copy, new weights by the formula in order, layers deleted."""
    model = copy.deepcopy(model)
    layers = model.model.layers
    for host, merged in merges:
        for name, parameter in layers[host].named_parameters():
            if "norm" in name or rdsc == "remove":
                continue
            own = parameter.detach().double().clone()
            others = [layers[index].get_parameter(name).detach().double() for index in merged]
            new = others[-1] if rdsc == "official" else own + sum(other - own for other in others)
            parameter.data = new.float()
    gone = {index for _, merged in merges for index in merged}
    model.model.layers = nn.ModuleList(layer for index, layer in enumerate(layers) if index not in gone)
    model.config.num_hidden_layers = len(model.model.layers)
    return model


def similarity(model, merges, rdsc):
    with torch.no_grad():
        one, two = (m.model(IDS, use_cache=False).last_hidden_state.double().flatten(1)
                    for m in (model, whole_model(model, merges, rdsc)))
    return ((one * two).sum(1) / one.norm(dim=1) / two.norm(dim=1)).mean().item()


def naive_sweep(model, schedule, n, rdsc, threshold):
    merges, attempts, lay = [], [], schedule.high - schedule.merge + 1
    while lay >= schedule.low:
        gone = [i for _, merged in merges for i in merged]
        members = [i for i in range(lay + 1, schedule.high + 1) if i not in gone][:schedule.merge - 1][:n - len(gone)]
        if not members:
            if len(gone) == n:
                break
            lay -= 1
            continue
        score = similarity(model, [*merges, (lay, members)], rdsc)
        attempts.append((lay, members, score))
        if score > threshold:
            merges.append((lay, members))
            lay -= schedule.interval
        else:
            lay -= 1
    return merges, attempts


@pytest.mark.parametrize("rdsc", RDSC)
@pytest.mark.parametrize("schedule, n", [
    (Schedule(3, 1, 6, 1), 3), (Schedule(3, 0, 7, 2), 5), (Schedule(4, 2, 7, 1), 2)])
def test_sweep_and_threshold_equal_whole_models(rdsc, schedule, n):
    model = tiny(num_hidden_layers=8, seed=3)
    selection, merges, threshold = laco(Decoder(copy.deepcopy(model)), IDS, n, rdsc, schedule, 2, progress=False)
    expected, attempts = naive_sweep(model, schedule, n, rdsc, threshold - 1e-6)  # it lies next to a cosine
    assert [(m["host"], m["merged"]) for m in merges] == expected and len(selection.layers.removed) == n
    assert sorted(selection.order) == list(selection.layers.removed)
    assert [(s["host"], s["merged"]) for s in selection.scores] == [a[:2] for a in attempts]
    for found, (_, _, score) in zip(selection.scores, attempts):
        assert found["score"] == pytest.approx(score, abs=1e-5) and found["accepted"] is (found["score"] > threshold)
    for higher in (threshold + 1e-4, (threshold + 1) / 2):  # no higher threshold reaches n
        assert sum(len(merged) for _, merged in naive_sweep(model, schedule, n, rdsc, higher)[0]) < n


def test_the_model_is_not_changed_by_the_search():
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    laco(Decoder(model), IDS, 3, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_no_op_layers_go_first_and_cost_nothing():
    selection, merges, _ = laco(Decoder(tiny(no_ops=(3, 4))), IDS, 2, "remove", Schedule(3, 1, 5, 1), progress=False)
    assert selection.layers.removed == (3, 4) and merges == [{"host": 2, "merged": [3, 4]}]
    assert selection.scores[-1]["score"] == pytest.approx(1, abs=1e-6)


def test_a_threshold_of_ones_own_stops_short_with_an_error():
    with pytest.raises(UserError, match="0 of 3 layers could be merged"):
        laco(Decoder(tiny()), IDS, 3, schedule=Schedule(2, 1, 5, 1, threshold=1.0), progress=False)
    selection, _, threshold = laco(Decoder(tiny()), IDS, 3, schedule=Schedule(2, 1, 5, 1, -1.0), progress=False)
    assert selection.layers.removed == (3, 4, 5) and threshold == -1 and all(a["accepted"] for a in selection.scores)


def test_gaps_that_the_interval_leaves_are_reported():
    with pytest.raises(UserError, match="every 3 in --laco-range 1-5 remove 2"):
        laco(Decoder(tiny()), IDS, 4, schedule=Schedule(2, 1, 5, 3), progress=False)


def test_defaults_are_in_proportion_to_the_depth():
    assert Schedule.of(32) == Schedule(4, 1, 31, 2) and Schedule.of(30) == Schedule(4, 1, 29, 2)
    assert Schedule.of(6) == Schedule(2, 1, 5, 1)


# ----- prune.py --metric laco

LACO = ("--metric", "laco", "--n-prune", 2, "--laco-merge", 3)


@pytest.mark.parametrize("kind, rdsc", [("llama", "paper"), ("tied", "official"), ("llama", "remove")])
def test_the_folder_is_a_plain_model_with_the_merged_weights(script, folders, tmp_path, text, kind, rdsc):
    folder = folders(kind)
    before = {path.name: sha256_file(path) for path in folder.iterdir()}
    code, out, _ = prune(script, folder, tmp_path, text, *LACO, "--rdsc", rdsc, "--save-model", tmp_path / "merged")
    assert code == 0 and "threshold" in out and {p.name: sha256_file(p) for p in folder.iterdir()} == before
    selection = json.loads((tmp_path / "selection.json").read_text())
    assert {"model", "about", "removed", "kept", "runs", "order", "scores", "parameters", "calibration", "recipe",
            "provenance", "merges", "threshold", "rdsc"} <= set(selection)
    about = {"metric": "laco", "n": 2, "repair": "none",
             "stage": "pruned" if rdsc == "remove" else "merged"}
    assert selection["about"] == origin(tmp_path / "merged")["about"] == about
    assert len(selection["removed"]) == 2 and selection["parameters"]["patch"] == 0
    merges = [(merge["host"], merge["merged"]) for merge in selection["merges"]]
    source = load_decoder(find_model(str(folder))).model
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert sum(p.numel() for p in merged.parameters()) == (
        selection["parameters"]["before"] - selection["parameters"]["removed"])
    with torch.no_grad():
        expected = whole_model(source, merges, rdsc)(IDS, use_cache=False).logits
        torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "merged" / "modeling_linearpatch.py").exists() is False
    assert ppl(script, tmp_path / "merged", tmp_path, text, "--no-dense", "--patch", "mine=dense")[0] == 0
    assert rows(tmp_path)["mine"]["about"] == about


def test_a_selection_without_its_weights_is_refused_and_a_removal_is_not(script, folders, tmp_path, text):
    folder = folders("llama")
    prune(script, folder, tmp_path, text, *LACO, "--save-model", tmp_path / "merged")
    for result in (calibrate(script, folder, tmp_path, text),
                   ppl(script, folder, tmp_path, text, "--selection", tmp_path / "selection.json")):
        assert result[0] == 2 and "changed the weights" in result[2] and "--save-model" in result[2]
    assert not (tmp_path / "patch.safetensors").exists() and not (tmp_path / "ppl.json").exists()
    out = tmp_path / "remove"
    assert prune(script, folder, out, text, *LACO, "--rdsc", "remove")[0] == 0
    assert calibrate(script, folder, out, text)[0] == 0
    assert ppl(script, folder, out, text, "--patch", f"P={out}/patch.safetensors")[0] == 0 and "P" in rows(out)


def test_a_finished_selection_is_reused_for_another_folder(script, folders, tmp_path, text, monkeypatch):
    prune(script, folders("llama"), tmp_path, text, *LACO, "--save-model", tmp_path / "one")

    def no_search(*args):
        raise AssertionError("searched again")

    monkeypatch.setattr("utils.baselines.laco.laco", no_search)
    code, out, _ = prune(script, folders("llama"), tmp_path, text, *LACO, "--save-model", tmp_path / "two")
    assert code == 0 and "reused" in out
    assert sha256_file(tmp_path / "one/model.safetensors") == sha256_file(tmp_path / "two/model.safetensors")
    path = tmp_path / "selection.json"
    path.write_text(path.read_text().replace('"removed": [', '"removed": [\n  1,', 1))
    code, _, err = prune(script, folders("llama"), tmp_path, text, *LACO, "--save-model", tmp_path / "two")
    assert code == 2 and "do not follow from its merges" in err


def test_calibration_is_short_by_default(script, folders, tmp_path, text):
    code, _, _ = script("prune", "--model", folders("llama"), "--calib-data", text, "--metric", "laco", "--n-prune", 1,
                        "--rdsc", "remove", "--out", tmp_path / "s.json")
    calibration = json.loads((tmp_path / "s.json").read_text())["calibration"]
    assert code == 0 and (calibration["samples"], calibration["seq_len"]) == (10, 64)


@pytest.mark.parametrize("flags, message", [
    (("--n-prune", 2), "add --save-model"), (("--n-prune", 6, "--rdsc", "remove"), "--n-prune 6"),
    (("--n-prune", 5, "--rdsc", "remove", "--laco-range", "2-5"), "remove at most 3"),
    (("--n-prune", 2, "--rdsc", "remove", "--laco-range", "2-6"), "layers 0 to 5"),
    (("--n-prune", 2, "--rdsc", "remove", "--laco-range", "x"), "LOW-HIGH"),
    (("--n-prune", 2, "--rdsc", "remove", "--laco-merge", 0), "--laco-merge 0"),
    (("--n-prune", 2, "--rdsc", "remove", "--laco-merge", 1), "remove at most 0"),
    (("--n-prune", 2, "--rdsc", "remove", "--laco-merge", 9), "5 layers only"),
    (("--n-prune", 2, "--rdsc", "remove", "--laco-threshold", 2), "--laco-threshold 2"),
    (("--n-prune", 4, "--rdsc", "remove", "--laco-threshold", 1), "could be merged"),
    (("--layers", "2-3", "--rdsc", "remove"), "no --layers"), (("--ratio", 1.5, "--rdsc", "remove"), "--ratio"),
    (("--n-prune", 2, "--rdsc", "remove", "--protect-first", 2), "--laco-range instead")])
def test_wrong_input_writes_nothing(script, folders, tmp_path, text, flags, message):
    code, _, err = prune(script, folders("llama"), tmp_path, text, "--metric", "laco", *flags)
    assert code == 2 and message in err[err.rindex("error: "):]
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_flags_of_laco_need_laco(script, folders, tmp_path, text):
    code, _, err = prune(script, folders("llama"), tmp_path, text, "--n-prune", 2, "--rdsc", "paper")
    assert code == 2 and "--rdsc belongs to --metric laco" in err


def test_layers_of_different_shapes_are_refused(tmp_path):
    model = tiny()
    model.model.layers[2].mlp.up_proj = nn.Linear(64, 100, bias=False)
    model.model.layers[2].mlp.gate_proj = nn.Linear(64, 100, bias=False)
    model.model.layers[2].mlp.down_proj = nn.Linear(100, 64, bias=False)
    with pytest.raises(UserError, match="differ in the shapes of their weights"):
        laco(Decoder(model), IDS, 2, progress=False)


def test_non_finite_states_are_a_failure(script, tmp_path, text):
    model = tiny()
    with torch.no_grad():
        for index, sign in ((3, -1), (4, 1), (5, 1)):  # each finite, their merge is not: 3.6e38
            layer = model.model.layers[index]
            layer.input_layernorm.weight[0] = 0.01
            layer.self_attn.v_proj.weight[0, 0] = sign * 1.2e38
            layer.self_attn.o_proj.weight[:, [0, 16]] = 0
    folder = save(model, tmp_path / "m")
    code, _, err = prune(script, folder, tmp_path / "o", text, *LACO, "--save-model", tmp_path / "out")
    assert code == 1 and "non-finite hidden states after merging layers [4, 5] into 3" in err
    assert not (tmp_path / "out").exists() and not (tmp_path / "o").exists()
