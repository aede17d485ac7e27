"""LLM-Pruner: importance against a full backward pass, narrowing against masks, folders in a fresh process."""

import copy
import json

import pytest
import torch

from tests.elsewhere import check_elsewhere, expect
from tests.steps import calibrate, ppl, prune, rows
from tests.tiny import ids, logits_of, patched_variant, save, tiny, token_text, variant
from tests.tokenizers_for_tests import tok_nobos
from utils.artifacts import sha256_file
from utils.baselines.llm_pruner import counts_for, group_sizes, importance, kept_groups, narrow, projections, widths_of
from utils.data.windows import calibration_windows
from utils.decoder import Decoder
from utils.errors import UserError
from utils.evaluation.objectives import window_losses
from utils.model_folder import origin, save_folder
from utils.models import find_model, load_decoder

IDS = ids(3, 12, seed=4)
KEPT = {1: (torch.tensor([1]), torch.arange(0, 128, 3)), 3: (torch.tensor([0]), torch.arange(100)),
        4: (torch.tensor([0, 1]), torch.tensor([5, 70]))}
WIDTHS = [(4, 2, 128), (2, 1, 43), (4, 2, 128), (2, 1, 100), (4, 2, 2), (4, 2, 128)]


@pytest.fixture
def text(tmp_path):
    """A short text: 400 tokens."""
    path = tmp_path / "text.txt"
    path.write_text(token_text(400))
    return path


def narrow_model(family="llama", **changes):
    return narrow(Decoder(tiny(family, **changes)), KEPT)


def slices(layer, head):
    """(weight, index of what KV head `head` owns) of a layer of 4 query and 2 KV heads of 16 channels."""
    attention = layer.self_attn
    query, key = slice(32 * head, 32 * head + 32), slice(16 * head, 16 * head + 16)
    return [(attention.q_proj, query, 0), (attention.k_proj, key, 0), (attention.v_proj, key, 0),
            (attention.o_proj, query, 1)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_importance_equals_a_plain_backward_pass(family, tied):
    model = tiny(family, tie_word_embeddings=tied)
    if family == "qwen2":
        with torch.no_grad():
            for layer in model.model.layers:
                for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                    module.bias.normal_()
    found = importance(Decoder(copy.deepcopy(model)), IDS, 2, 5, batch_size=2)
    model(IDS, labels=IDS).loss.backward()  # mean over all next tokens
    assert len(found) == 3
    for (heads, channels), layer in zip(found, model.model.layers[2:5]):
        for head in range(2):
            total = 0.0
            for module, part, axis in slices(layer, head):
                product = (module.weight * module.weight.grad).abs()
                total += (product[part] if axis == 0 else product[:, part]).double().sum()
                if module.bias is not None:
                    total += (module.bias * module.bias.grad).abs()[part].double().sum()
            assert heads[head].item() == pytest.approx(total.item(), rel=1e-4)
        gate, up, down = ((w.weight * w.weight.grad).abs().double()
                          for w in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj))
        torch.testing.assert_close(channels, gate.sum(1) + up.sum(1) + down.sum(0), rtol=1e-4, atol=1e-9)


def test_importance_of_permuted_groups_is_permuted():
    model = tiny()
    heads, channels = importance(Decoder(copy.deepcopy(model)), IDS, 2, 3)[0]
    shuffle = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    layer, swap = model.model.layers[2], torch.cat([torch.arange(32, 64), torch.arange(32)])
    with torch.no_grad():
        for module in (layer.mlp.gate_proj, layer.mlp.up_proj):
            module.weight.copy_(module.weight[shuffle].clone())
        layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, shuffle].clone())
        layer.self_attn.q_proj.weight.copy_(layer.self_attn.q_proj.weight[swap].clone())
        layer.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight[:, swap].clone())
        for module in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            module.weight.copy_(module.weight.roll(16, 0).clone())
    decoder = Decoder(model)
    permuted_heads, permuted_channels = importance(decoder, IDS, 2, 3)[0]
    torch.testing.assert_close(permuted_heads, heads.flip(0), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(permuted_channels, channels[shuffle], rtol=1e-4, atol=1e-9)
    kept = (kept_groups(heads, 1), kept_groups(channels, 40))
    permuted = (kept_groups(permuted_heads, 1), kept_groups(permuted_channels, 40))
    assert set(shuffle[permuted[1]].tolist()) == set(kept[1].tolist())
    with torch.no_grad():
        torch.testing.assert_close(narrow(decoder, {2: permuted})(IDS).logits,
                                   narrow(Decoder(tiny()), {2: kept})(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_a_narrow_model_is_the_full_one_with_the_rest_masked(family):
    model = tiny(family)
    found = narrow(Decoder(copy.deepcopy(model)), KEPT)
    assert found.config.layer_widths == [dict(zip(("heads", "kv_heads", "channels"), w)) for w in WIDTHS]
    with torch.no_grad():
        for index, (heads, channels) in KEPT.items():
            layer = model.model.layers[index]
            for head in set(range(2)) - set(heads.tolist()):
                layer.self_attn.o_proj.weight[:, 32 * head:32 * head + 32] = 0
            for channel in set(range(128)) - set(channels.tolist()):
                layer.mlp.down_proj.weight[:, channel] = 0
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_pruning_nothing_changes_no_bit():
    model = tiny()
    everything = {index: (torch.arange(2), torch.arange(128)) for index in range(6)}
    with torch.no_grad():
        expected = model(IDS).logits
        for kept in ({}, everything):
            assert torch.equal(narrow(Decoder(copy.deepcopy(model)), kept)(IDS).logits, expected)


def test_silent_groups_have_no_importance_and_go_first():
    model = tiny()
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight[:, :32] = 0
        model.model.layers[2].mlp.down_proj.weight[:, [7, 90]] = 0
    decoder = Decoder(model)
    heads, channels = importance(decoder, IDS, 2, 3)[0]
    # the zero columns have w = 0; what feeds only them has no gradient
    assert heads[0] == 0 < heads[1] and channels[[7, 90]].sum() == 0 and (channels > 0).sum() == 126
    kept = kept_groups(heads, 1), kept_groups(channels, 2)
    assert kept[0].tolist() == [1] and not {7, 90} & set(kept[1].tolist())
    with torch.no_grad():
        torch.testing.assert_close(narrow(decoder, {2: kept})(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lower_index():
    assert kept_groups(torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0]), 2).tolist() == [0, 3, 4]


@pytest.mark.parametrize("sizes, widths", [((6144, 192), (2, 128)), ((1000, 7), (32, 300)), ((50, 900), (8, 10))])
def test_the_total_is_within_half_a_channel_of_the_target_in_each_layer(sizes, widths):
    whole = sizes[0] * (widths[0] - 1) + sizes[1] * (widths[1] - 1)
    for share in range(101):
        target = 5 * whole * share / 100
        heads, channels = counts_for(target, 5, sizes, dict(zip(("kv_heads", "channels"), widths)))
        assert 0 <= heads < widths[0] and 0 <= channels < widths[1]
        assert abs(5 * (heads * sizes[0] + channels * sizes[1]) - target) <= 5 * sizes[1] / 2 + 1e-6
    assert counts_for(0, 5, sizes, dict(kv_heads=widths[0], channels=widths[1])) == (0, 0)
    with pytest.raises(UserError, match="can lose at most"):
        counts_for(5 * (whole + sizes[1]), 5, sizes, dict(kv_heads=widths[0], channels=widths[1]))


def test_heads_and_channels_lose_the_same_share_where_groups_allow():
    whole = 10 * (32 * 1000 + 400 * 100)
    assert counts_for(0.25 * whole, 10, (1000, 100), {"kv_heads": 32, "channels": 400}) == (8, 100)


def test_group_sizes_are_the_parameters_that_go():
    for family in ("llama", "qwen2"):
        decoder = Decoder(tiny(family))
        head, channel = group_sizes(decoder.layers[1])
        before = sum(p.numel() for p in decoder.model.parameters())
        after = sum(p.numel() for p in narrow(decoder, KEPT).parameters())
        assert before - after == 2 * head + (85 + 28 + 126) * channel


def test_the_model_is_not_changed():
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    decoder = Decoder(model)
    importance(decoder, IDS, 1, 6)
    narrow(decoder, KEPT)
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.model.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in decoder.model.parameters())


# ----- folders


def test_folders_elsewhere_are_bit_identical_and_refuse_without_their_code(tmp_path):
    for name, family, saved, changes in (("tied", "llama", variant("narrow"), {"tie_word_embeddings": True}),
                                         ("patched", "qwen2", patched_variant(), {})):
        expect(save_folder(Decoder(narrow_model(family, **changes)), tok_nobos(), saved, tmp_path / name, {}),
               tmp_path / name)
    check_elsewhere(tmp_path, tmp_path / "tied", tmp_path / "patched")


def test_our_loader_cuts_and_patches_a_narrow_folder(tmp_path):
    save_folder(Decoder(narrow_model()), tok_nobos(), variant("narrow"), tmp_path / "narrow", {})
    source = find_model(str(tmp_path / "narrow"))
    assert source.is_ours and not source.is_patched and source.patched_after == []
    decoder = load_decoder(source)
    assert [tuple(widths_of(layer).values()) for layer in decoder.layers] == WIDTHS
    patched = patched_variant((2, 3), 4)
    expected = logits_of(decoder, patched, ids())
    save_folder(decoder, tok_nobos(), patched, tmp_path / "patched", {})
    config = json.loads((tmp_path / "patched" / "config.json").read_text())
    assert len(config["layer_widths"]) == 4 and config["layer_widths"][1]["channels"] == 43
    again = load_decoder(find_model(str(tmp_path / "patched")))
    torch.testing.assert_close(logits_of(again, variant(depth=4), ids()), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="already carries patches"):
        save_folder(again, tok_nobos(), variant("v", (1,), patched_variant().modules, depth=4), tmp_path / "twice", {})


@pytest.mark.parametrize("change, message", [
    ({"layer_widths": [{}] * 6}, "layer_widths"), ({"layer_widths": 3}, "layer_widths"),
    ({"layer_widths": [{"heads": 4, "kv_heads": 2, "channels": 128}] * 5}, "5 entries"),
    ({"layer_widths": [{"heads": 4, "kv_heads": 2, "channels": 0}] * 6}, "layer_widths"),
    ({"layer_widths": [{"heads": 4, "kv_heads": 2, "channels": 128}] * 6}, "loaded")])
def test_damaged_widths_are_refused(script, tmp_path, text, change, message):
    save_folder(Decoder(narrow_model()), tok_nobos(), variant("narrow"), tmp_path / "out", {})
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    code, _, err = ppl(script, tmp_path / "out", tmp_path, text)
    assert code == 2 and message in err and len(err[err.rindex("error: "):].strip().splitlines()) <= 2


# ----- prune.py --metric llm-pruner


@pytest.mark.parametrize("kind, amount", [("tied", ("--n-prune", 1)), ("qwen3", ("--ratio", 0.3))])
def test_pruning_by_script(script, folders, tmp_path, text, kind, amount):
    folder, out = folders(kind), tmp_path / "narrow"
    before = {path.name: sha256_file(path) for path in folder.iterdir()}
    code, printed, _ = prune(script, folder, tmp_path, text, "--metric", "llm-pruner", *amount, "--save-model", out)
    assert code == 0 and "head groups" in printed and {p.name: sha256_file(p) for p in folder.iterdir()} == before
    selection = json.loads((tmp_path / "selection.json").read_text())
    assert {"model", "about", "removed", "kept", "runs", "order", "scores", "parameters", "calibration", "recipe",
            "provenance", "widths"} <= set(selection)
    assert selection["removed"] == selection["runs"] == [] and selection["kept"] == list(range(6))
    decoder, dense = load_decoder(find_model(str(out))), load_decoder(find_model(str(folder)))
    total, after = (sum(p.numel() for p in d.model.parameters()) for d in (dense, decoder))
    assert selection["parameters"] == {"before": total, "removed": total - after, "patch": 0,
                                       "ratio_percent": pytest.approx(100 * (total - after) / total),
                                       "ratio_with_patch_percent": pytest.approx(100 * (total - after) / total)}
    layer = sum(p.numel() for p in dense.layers[0].parameters())
    wanted = amount[1] * total if amount[0] == "--ratio" else amount[1] * layer
    assert abs(total - after - wanted) <= 5 * 3 * 64 / 2  # half a channel in each of five layers
    about = {"metric": "llm-pruner", "n": round(wanted / layer), "repair": "none", "stage": "narrowed"}
    assert selection["about"] == origin(out)["about"] == about
    assert [widths_of(layer) for layer in decoder.layers] == selection["widths"]
    assert len({tuple(w.values()) for w in selection["widths"][1:]}) == 1 and selection["widths"][0]["channels"] == 128

    code, _, _ = ppl(script, out, tmp_path, text, "--no-dense", "--patch", "mine=dense")
    tokens = torch.tensor([4 + int(w[1:]) for w in text.read_text().split()])[:12 * 32].view(12, 32)
    scores = importance(dense, calibration_windows(str(text), tok_nobos(), 4, 32).ids, 1, 6)
    kept = {index: (kept_groups(h, 2 - selection["widths"][index]["kv_heads"]),
                    kept_groups(c, 128 - selection["widths"][index]["channels"]))
            for index, (h, c) in zip(range(1, 6), scores)}
    in_memory = window_losses(Decoder(narrow(dense, kept)), [variant()], tokens, progress=False)
    assert code == 0 and rows(tmp_path)["mine"]["nll_mean"] == pytest.approx(in_memory.mean().item(), rel=1e-6)
    assert rows(tmp_path)["mine"]["about"] == about and rows(tmp_path)["mine"]["removed"] == []


def test_the_pruned_folder_is_a_model_for_every_script(script, folders, tmp_path, text):
    out = tmp_path / "narrow"
    llm_pruner = ("--metric", "llm-pruner", "--ratio", 0.2, "--save-model", out)
    prune(script, folders("llama"), tmp_path, text, *llm_pruner)
    first = sha256_file(out / "model.safetensors")
    code, printed, _ = prune(script, folders("llama"), tmp_path, text, *llm_pruner)
    assert code == 0 and "reused" in printed and sha256_file(out / "model.safetensors") == first
    for result in (calibrate(script, folders("llama"), tmp_path, text),
                   ppl(script, folders("llama"), tmp_path, text, "--selection", tmp_path / "selection.json")):
        assert result[0] == 2 and "changed the weights" in result[2]
    on_top = tmp_path / "on"
    code, printed, _ = prune(script, out, on_top, text, "--n-prune", 2, "--save-model", on_top / "pruned")
    total = sum(p.numel() for p in load_decoder(find_model(str(out))).model.parameters())
    assert code == 0 and f"parameters {total:,} ->" in printed
    assert calibrate(script, out, on_top, text, "--save-model", on_top / "patched")[0] == 0
    assert ppl(script, out, on_top, text, "--patch", f"P={on_top}/patch.safetensors", "--selection",
               f"V={on_top}/selection.json")[0] == 0
    live = rows(on_top)
    for name, folder in (("P", "patched"), ("V", "pruned")):
        assert ppl(script, on_top / folder, tmp_path / name, text)[0] == 0
        assert rows(tmp_path / name)["dense"]["ppl"] == pytest.approx(live[name]["ppl"], rel=1e-6)


@pytest.mark.parametrize("flags, message", [
    (("--ratio", 0.2), "add --save-model"), (("--ratio", 0.95, "--save-model", "OUT"), "can lose at most"),
    (("--ratio", 1.2, "--save-model", "OUT"), "--ratio 1.2"), (("--n-prune", 6, "--save-model", "OUT"), "--n-prune 6"),
    (("--n-prune", 1, "--protect-first", 4, "--protect-last", 2, "--save-model", "OUT"), "leave none of 6 layers"),
    (("--layers", "2-3", "--save-model", "OUT"), "no --layers"),
    (("--ratio", 0.2, "--laco-merge", 3, "--save-model", "OUT"), "belongs to --metric laco")])
def test_wrong_input_writes_nothing(script, folders, tmp_path, text, flags, message):
    flags = [tmp_path / "out" if flag == "OUT" else flag for flag in flags]
    code, _, err = prune(script, folders("llama"), tmp_path, text, "--metric", "llm-pruner", *flags)
    assert code == 2 and message in err[err.rindex("error: "):]
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("family, missing", [("phi", "o_proj"), ("phi3", "q_proj")])
def test_other_architectures_are_refused(script, family, missing, tmp_path, text):
    folder = save(tiny(family), tmp_path / "m")
    code, _, err = prune(script, folder, tmp_path / "o", text, "--metric", "llm-pruner", "--ratio", 0.2, "--save-model",
                         tmp_path / "out")
    assert code == 2 and missing in err and "as in Llama" in err and not (tmp_path / "out").exists()
    assert not (tmp_path / "o").exists()


def test_weights_over_all_heads_are_refused():
    layer = tiny("qwen3").model.layers[0]
    layer.self_attn.q_norm = torch.nn.RMSNorm(64)
    with pytest.raises(UserError, match="q_norm.weight of shape"):
        projections(layer)


def test_non_finite_gradients_are_a_failure(script, tmp_path, text):
    model = tiny()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight[0, 0] = 1e38
    folder = save(model, tmp_path / "m")
    code, _, err = prune(script, folder, tmp_path / "o", text, "--metric", "llm-pruner", "--ratio", 0.2, "--save-model",
                         tmp_path / "out")
    assert code == 1 and "non-finite" in err and not (tmp_path / "out").exists()
