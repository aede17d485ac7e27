"""Cutting layers, attaching patches, saving and reloading."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.elsewhere import check_elsewhere, expect
from tests.tiny import FAMILIES, P, ids, logits_of, patched_variant, save, tiny, variant
from tests.tokenizers_for_tests import tok_nobos
from utils.decoder import Decoder
from utils.errors import UserError, WorkError
from utils.layers import Layers
from utils.model_folder import cut, origin, patched_model, save_folder
from utils.modeling_linearpatch import LinearPatch
from utils.models import find_model, load_decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_cut_model_runs_with_and_without_cache(family):
    expected = logits_of(Decoder(tiny(family)), variant("v", (2, 3)), ids())
    model = cut(Decoder(tiny(family)), Layers(6, (2, 3)))
    assert model.config.num_hidden_layers == len(model.model.layers) == 4
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3]
    with torch.no_grad():
        full = model(ids(), use_cache=True).logits
        torch.testing.assert_close(full, expected)
        past, steps = None, []
        for position in range(17):
            out = model(ids()[:, position:position + 1], cache=past, use_cache=True)
            past = out.cache
            steps.append(out.logits)
        torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-4, atol=1e-4)
        generated = [model.generate(ids()[:1], max_new_tokens=8, do_sample=False, use_cache=c) for c in (True, False)]
    assert torch.equal(*generated)


@pytest.mark.parametrize("family", ["gemma3", "qwen3", "gemma2", "llama"])
def test_cut_folder_reloads_with_plain_transformers(family, tmp_path):
    decoder = Decoder(tiny(family))
    types = list(decoder.config.layer_types) if hasattr(decoder.config, "layer_types") else None
    model = save_folder(decoder, tok_nobos(), variant("pruned", (2, 3)), tmp_path / "out", {})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    if types is not None:
        assert config["layer_types"] == [types[i] for i in (0, 1, 4, 5)]
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(reloaded(ids()).logits, model(ids()).logits)
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json",
            "linearpatch.json"} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_the_full_attention_layer_of_gemma3_survives_a_cut_before_it():
    model = cut(Decoder(tiny("gemma3")), Layers(6, (2, 3)))  # five sliding layers, then a full one
    assert model.config.layer_types == ["sliding_attention"] * 3 + ["full_attention"]


def test_kept_tensors_and_names_are_those_of_the_source():
    source = tiny().state_dict()
    model = cut(Decoder(tiny()), Layers(6, (2, 3)))
    fresh = LlamaForCausalLM(model.config).state_dict()
    state = model.state_dict()
    assert set(state) == set(fresh)
    for name, tensor in state.items():
        for new, old in enumerate((0, 1, 4, 5)):
            name = name.replace(f"layers.{new}.", f"layers.{old}.", 1) if f"layers.{new}." in name else name
            if f"layers.{old}." in name:
                break
        assert torch.equal(tensor, source[name])


def test_end_of_text_ids_are_no_per_layer_list():
    model = tiny()
    model.config.eos_token_id = [2, 3, 4, 5, 6, 7]  # as many as layers
    assert cut(Decoder(model), Layers(6, (1,))).config.eos_token_id == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("tied", [False, True])
def test_tied_heads_stay_tied_and_untied_stay_untied(tied, tmp_path):
    from safetensors import safe_open
    before = tiny(tie_word_embeddings=tied)
    embedding = before.model.embed_tokens.weight.clone()
    total = sum(p.numel() for p in before.parameters())
    gone = sum(p.numel() for i in (2, 3) for p in before.model.layers[i].parameters())
    save_folder(Decoder(before), tok_nobos(), patched_variant(), tmp_path / "out", {})
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied
        assert torch.equal(file.get_tensor("model.embed_tokens.weight"), embedding)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied
    model = load_decoder(find_model(str(tmp_path / "out"))).model
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied
    assert sum(p.numel() for p in model.parameters()) == total - gone + 64 * 64


def test_patch_multiplies_rows_from_the_right():
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(LinearPatch(P)(x), torch.einsum("btc,ck->btk", x, P))
    torch.testing.assert_close(LinearPatch(P[0])(x), x * P[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_patch_keeps_the_dtype_and_computes_in_float32(dtype):
    x = (torch.randn(1, 3, 64) * 300).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = LinearPatch(P)(x)
    assert out.dtype == dtype
    assert torch.equal(out, (x.float() @ P).to(dtype))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("removed, place", [((2, 3), 4), ((4, 5), 6), ((0, 1), 2)])
def test_patched_model_in_memory_equals_the_step_runner(family, removed, place):
    patched = patched_variant(removed, place)
    expected = logits_of(Decoder(tiny(family)), patched, ids())
    model = patched_model(Decoder(tiny(family)), patched)
    assert len(model.model.layers) == model.config.num_hidden_layers == 4
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-5, atol=1e-5)


def test_identity_patch_changes_nothing():
    for family in ("llama", "qwen3", "gemma3"):
        decoder = Decoder(tiny(family))
        plain = logits_of(decoder, variant("v", (2, 3)), ids())
        torch.testing.assert_close(logits_of(decoder, patched_variant(weight=torch.eye(64)), ids()), plain,
                                   rtol=1e-5, atol=1e-5)
        assert (logits_of(decoder, patched_variant(), ids()) - plain).abs().max() > 1e-3


def test_patched_folders_elsewhere_are_bit_identical_and_refuse_without_their_code(tmp_path):
    for family in ("llama", "gemma3"):
        expect(save_folder(Decoder(tiny(family)), tok_nobos(), patched_variant(), tmp_path / family, {}),
               tmp_path / family)
    check_elsewhere(tmp_path, tmp_path / "llama", tmp_path / "gemma3")


def test_a_folder_says_what_it_is(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    about = {"metric": "cosine", "n": 2, "repair": "hadamard", "stage": "calibrated"}
    patches = {2: LinearPatch(P), 5: LinearPatch(P[0].clone())}
    save_folder(Decoder(tiny()), tok_nobos(), variant("P", (1, 3, 4), patches, about), one, {"seed": 7})
    save_folder(Decoder(tiny()), tok_nobos(), variant("pruned", (0,)), two, {})
    content = origin(one)
    assert content["format"] == "linearpatch/folder@2" and content["about"] == about and content["seed"] == 7
    assert (content["removed"], content["kept"], content["runs"]) == ([1, 3, 4], [0, 2, 5], [[1, 2], [3, 5]])
    assert content["patch_position"] == [0, 1] and content["removed_layers"] == [1, 3, 4]
    assert find_model(str(one)).patched_after == [0, 1]
    assert origin(two)["about"] == {"metric": None, "n": 1, "repair": "none", "stage": "pruned"}
    assert origin(two)["patch_position"] is None and origin(tmp_path) == {}


def test_our_loader_reads_a_patched_folder_and_needs_its_patch(tmp_path):
    from safetensors.torch import load_file, save_file
    patched = patched_variant()
    expected = logits_of(Decoder(tiny()), patched, ids())
    save_folder(Decoder(tiny()), tok_nobos(), patched, tmp_path / "out", {})
    decoder = load_decoder(find_model(str(tmp_path / "out")))
    torch.testing.assert_close(logits_of(decoder, variant(depth=4), ids()), expected, rtol=1e-5, atol=1e-5)
    bfloat16 = load_decoder(find_model(str(tmp_path / "out")), dtype="bfloat16")
    assert bfloat16.model.linear_patches[0].weight.dtype == torch.float32
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    del tensors["linear_patches.0.weight"]
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="linear_patches.0.weight"):
        load_decoder(find_model(str(tmp_path / "out")))


def test_patch_adds_no_error_to_a_bfloat16_model(folders):
    source = find_model(str(folders("llama")))
    patched = patched_variant(weight=torch.eye(64) * 1.1)
    errors = []
    for v in (variant("pruned", (2, 3)), patched):
        half, full = (logits_of(load_decoder(source, dtype=d), v, ids()) for d in ("bfloat16", "float32"))
        errors.append((half - full).abs().mean())
    assert 0 < errors[1] < 1.5 * errors[0]


def test_a_pattern_that_the_config_cannot_express_is_refused():
    decoder = Decoder(tiny("mistral"))
    decoder.layers[4].self_attn.sliding_window = 3  # as if computed from the layer's index
    with pytest.raises(UserError, match="layer 2 after the cut"):
        cut(decoder, Layers(6, (2, 3)))


def test_a_failed_save_leaves_the_old_folder(tmp_path, monkeypatch):
    save_folder(Decoder(tiny()), tok_nobos(), variant("pruned", (2, 3)), tmp_path / "out", {})
    before = (tmp_path / "out" / "config.json").read_bytes()
    monkeypatch.setattr(type(tok_nobos()), "save_pretrained",
                        lambda *a, **k: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(WorkError, match="full"):
        save_folder(Decoder(tiny()), tok_nobos(), variant("pruned", (1,)), tmp_path / "out", {})
    assert (tmp_path / "out" / "config.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_somebody_else_is_not_overwritten(script, folders, tmp_path):
    save(tiny(), tmp_path / "theirs")
    code, _, err = script("prune", "--model", folders("llama"), "--layers", "2", "--out", tmp_path / "s.json",
                          "--save-model", tmp_path / "theirs")
    assert code == 2 and "not written by this project" in err and not (tmp_path / "s.json").exists()
