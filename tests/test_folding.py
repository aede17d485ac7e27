"""Folding patches into the model's own weights: exact where it is, announced where not, refused where it cannot be."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.steps import calibrate, ppl, prune, rows
from tests.tiny import ids, logits_of, save, tiny, variant
from utils.artifacts import read_header
from utils.decoder import Decoder
from utils.errors import UserError
from utils.folding import FOLDS, NotFoldable, compare, is_rms_norm
from utils.hadamard import rotation
from utils.model_folder import origin
from utils.modeling_linearpatch import LinearPatch
from utils.repairs import MLPMap

PRE_NORM = ["llama", "mistral", "qwen2", "qwen3", "phi3"]
REMOVALS = [((2, 3), (4,)), ((1, 3, 4), (2, 5)), ((0, 1), (2,)), ((4, 5), (6,)), ((0, 2, 5), (1, 3, 6))]


def lively(family, **changes):
    """A tiny model whose biases and norm weights are random, not 0 and 1."""
    model = tiny(family, **changes)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def turned(seed, scale):
    """A number times an orthogonal matrix, float32 [64, 64]: every token keeps its length but for the number."""
    draw = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * torch.linalg.qr(draw)[0]).float()


def gentle(seed, size=64, width=0.2):
    """P = H diag(d) H^T with d from 1 to 1 + width."""
    d = 1 + width * torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rotation(size).conjugate(d)


def folded(decoder, one, windows):
    """What folding reports; the decoder's model is changed."""
    return FOLDS["near"](decoder, one.layers)(one, windows)


@pytest.mark.parametrize("family", PRE_NORM)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("removed, places", REMOVALS)
def test_patches_that_keep_lengths_fold_exactly(family, tied, removed, places):
    model = lively(family, tie_word_embeddings=tied).double()
    one = variant("P", removed, {place: LinearPatch(turned(place, 1.3)) for place in places})
    expected = logits_of(Decoder(model), one, ids())
    report = folded(Decoder(model), one, ids(2, 9, seed=3))
    assert max(row["spread"] for row in report) < 1e-4  # the norms' epsilon feels small states
    torch.testing.assert_close(logits_of(Decoder(model), variant("f", removed), ids()), expected, rtol=1e-3, atol=1e-3)
    assert model.config.tie_word_embeddings is False


def test_constants_are_medians_behind_the_folded_layers_before_them():
    """Recomputed with plain hooks: what each norm of the folded model reads, against what it would read patched."""
    model, windows = lively("llama"), ids(3, 20, seed=5)
    one = variant("P", (1, 3), {2: LinearPatch(gentle(1)), 4: LinearPatch(gentle(2))})
    report, read = folded(Decoder(model), one, windows), {}
    named = {name: part for name, part in model.named_modules() if is_rms_norm(part)}
    handles = [part.register_forward_pre_hook(lambda _m, args, name=name: read.__setitem__(name, args[0]))
               for name, part in named.items()]
    decoder = Decoder(model)
    logits_of(decoder, variant("f", (1, 3)), windows)
    for handle in handles:
        handle.remove()
    first, both = gentle(1).double(), gentle(1).double() @ gentle(2).double()
    for row in report:
        place, product = row["place"], first if row["place"] == "layer 2" else both
        names = [name for name in named if f".{place.replace('layer ', 'layers.')}." in name or
                 (place == "final norm" and name == "model.norm")]
        states = [read[name].flatten(0, 1).double() for name in names]
        found = [((u.square().mean(1) + 1e-6) / ((u @ product).square().mean(1) + 1e-6)).sqrt() for u in states]
        assert any(abs(row["c"] - s.median().item()) < 1e-6 for s in found)
        assert any(abs(row["spread"] - (s.std() / s.mean()).item()) < 1e-6 for s in found)
        assert all(len(named[name].weight.unique()) == 1 for name in names)
    assert [row["place"] for row in report] == [p for k in (2, 4, 5) for p in 2 * [f"layer {k}"]] + ["final norm"]
    assert torch.equal(named["model.layers.0.input_layernorm"].weight,
                       lively("llama").model.layers[0].input_layernorm.weight)


def test_the_comparison_is_of_plain_probabilities():
    windows, one = ids(3, 20, seed=5), variant("P", (2, 3), {4: LinearPatch(gentle(1))})
    model = lively("llama", tie_word_embeddings=True)
    patched = logits_of(Decoder(model), one, windows).double()
    decoder = Decoder(model)
    seen = compare(decoder, one, lambda: folded(decoder, one, ids()), windows)
    after = logits_of(Decoder(model), variant("f", (2, 3)), windows).double()
    losses = [nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten()).item()
              for logits in (patched, after)]
    kl = nn.functional.kl_div(after.log_softmax(-1), patched.log_softmax(-1), reduction="sum", log_target=True) / 60
    assert [seen["ppl_patched"], seen["ppl_folded"]] == pytest.approx([2.718281828459045**loss for loss in losses])
    assert seen["ratio"] == pytest.approx(seen["ppl_folded"] / seen["ppl_patched"])
    assert seen["kl"] == pytest.approx(kl.item(), rel=1e-3) and seen["tokens"] == 60
    assert seen["equal_first"] == (patched.argmax(-1) == after.argmax(-1)).double().mean()
    assert 0 < seen["kl"] < 0.01 and abs(seen["ratio"] - 1) < 0.05


def test_layers_behind_which_nothing_folds_are_named():
    for family, reason in (("gemma2", "norm behind its MLP"), ("gemma3", "norm behind its MLP"),
                           ("phi", "attention and MLP to the stream together")):
        model = tiny(family)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(NotFoldable, match=reason):
            FOLDS["near"](Decoder(model), variant("v", (2, 3)).layers)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=64, n_layer=6, n_head=4, n_positions=64)).eval()
    with pytest.raises(NotFoldable, match="LayerNorm subtracts the mean"):
        FOLDS["near"](Decoder(gpt2), variant("v", (2, 3)).layers)


def test_norms_are_told_by_what_they_compute():
    norms = {family: lively(family).model.norm for family in PRE_NORM}
    assert all(is_rms_norm(norm) for norm in norms.values())
    assert not is_rms_norm(lively("gemma3").model.norm)  # 1 + w
    assert not any(map(is_rms_norm, (nn.LayerNorm(64), nn.LayerNorm(64, bias=False), nn.Linear(64, 64), nn.ReLU())))
    assert is_rms_norm(nn.RMSNorm(64, eps=1e-6))


@pytest.mark.parametrize("family", PRE_NORM)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("removed", [(2, 3), (1, 3, 4), (4, 5)])
def test_maps_on_mlp_outputs_fold_exactly(family, tied, removed):
    changes = {"mlp_bias": True} if family == "llama" else {}
    model = lively(family, tie_word_embeddings=tied, **changes).double()
    layers = variant("v", removed).layers
    one = variant("T", removed, {end: MLPMap(turned(end, 0.7) + 0.1, start - 1) for start, end in layers.runs})
    expected = logits_of(Decoder(model), one, ids())
    assert FOLDS["exact"](Decoder(model), layers)(one, ids()) == []
    torch.testing.assert_close(logits_of(Decoder(model), variant("f", removed), ids()), expected, rtol=1e-4, atol=1e-4)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_maps_on_mlp_outputs_that_do_not_fold_are_named():
    for family, removed, error, reason in (("llama", (0, 1), NotFoldable, "no layer before it"),
                                           ("gemma3", (2, 3), NotFoldable, "norm behind its MLP"),
                                           ("phi", (2, 3), UserError, "together with its attention")):
        with pytest.raises(error, match=reason):
            FOLDS["exact"](Decoder(tiny(family)), variant("v", removed).layers)


# ----- the scripts

ALONE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
AutoTokenizer.from_pretrained(sys.argv[1])
ids = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[3])
print(json.dumps([type(model).__name__, model.config.num_hidden_layers, "utils" in sys.modules]))
"""


@pytest.mark.parametrize("family, removed, changes", [
    ("llama", "2-3", {}), ("llama", "2-3", {"tie_word_embeddings": True}), ("qwen3", "0-1", {}),
    ("llama", "1,3", {"attention_bias": True, "mlp_bias": True}), ("mistral", "4-5", {"tie_word_embeddings": True}),
    ("phi3", "0,2,5", {})])
def test_a_folded_folder_is_an_ordinary_model(script, tmp_path, text, family, removed, changes):
    """In a fresh process, without remote code, of the base class; what is announced is what eval_ppl.py finds."""
    folder = save(lively(family, **changes), tmp_path / "base")
    prune(script, folder, tmp_path, text, "--layers", removed)
    code, printed, err = calibrate(script, folder, tmp_path, text, "--save-model", tmp_path / "m", "--fold", "near",
                                   "--fold-tolerance", "0.5")
    assert code == 0 and "folded (near): perplexity" in printed and "patch no" in printed, err
    assert not list((tmp_path / "m").glob("*.py")) and "auto_map" not in (tmp_path / "m/config.json").read_text()
    torch.save(ids(), tmp_path / "ids.pt")
    done = subprocess.run([sys.executable, "-I", "-c", ALONE, tmp_path / "m", tmp_path / "ids.pt", tmp_path / "out.pt"],
                          capture_output=True, text=True, cwd=tmp_path, stdin=subprocess.DEVNULL,
                          env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    content, base = origin(tmp_path / "m"), AutoModelForCausalLM.from_pretrained(folder)
    assert json.loads(done.stdout) == [type(base).__name__, 6 - len(content["removed"]), False]
    folding = content["folding"]
    assert content["about"]["repair"] == "hadamard" and folding["kind"] == "near" and folding["tolerance"] == 0.5
    assert folding["spread"] == max(row["spread"] for row in folding["constants"]) > 0
    assert content["patch_position"] is None
    card = (tmp_path / "m/README.md").read_text()
    for part in (f"Layers {', '.join(map(str, content['removed']))} of 0 to 5", "repair: `hadamard`",
                 f"{folding['ppl_folded']:.4f}", f"{folding['spread']:.2%}", "from_pretrained(FOLDER)"):
        assert part in card
    assert read_header(tmp_path / "patch.safetensors", "patch")["about"] == content["about"]
    assert ppl(script, folder, tmp_path, text, "--patch", f"P={tmp_path}/patch.safetensors")[0] == 0
    assert ppl(script, tmp_path / "m", tmp_path / "own", text)[0] == 0
    ratio = rows(tmp_path / "own")["dense"]["ppl"] / rows(tmp_path)["P"]["ppl"]
    assert abs(ratio - 1) < 0.1 and rows(tmp_path / "own")["dense"]["about"] == content["about"]


def test_above_the_tolerance_nothing_is_left_behind(script, folders, tmp_path, text):
    prune(script, folders("llama"), tmp_path, text, "--layers", "2-3")
    there = sorted(path.name for path in tmp_path.iterdir())
    code, _, err = calibrate(script, folders("llama"), tmp_path, text, "--save-model", tmp_path / "m", "--fold", "near",
                             "--fold-tolerance", "0")
    line = err[err.index("error: "):]
    assert code == 1 and line.count("\n") == 1 and "no folder written" in line
    assert "ratio" in line and "spread of s" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*there, "patch.safetensors",
                                                                      "stats.safetensors"])


@pytest.mark.parametrize("family, reason", [("gemma3", "norm behind its MLP"), ("phi", "together")])
def test_architectures_that_do_not_fold_are_refused_before_any_work(script, tmp_path, text, family, reason):
    folder = save(tiny(family), tmp_path / "base")
    prune(script, folder, tmp_path, text, "--layers", "2-3")
    code, _, err = calibrate(script, folder, tmp_path, text, "--save-model", tmp_path / "m", "--fold", "near")
    assert code == 2 and reason in err and err.count("\n") == 1
    assert not (tmp_path / "m").exists() and not (tmp_path / "patch.safetensors").exists()


def test_replaceme_folds_exactly_or_is_refused(script, folders, tmp_path, text):
    folder, patch = folders("tied"), f"T={tmp_path}/patch.safetensors"
    prune(script, folder, tmp_path, text, "--layers", "2-3")
    for fold in ("no", "near"):
        code, _, err = calibrate(script, folder, tmp_path, text, "--repair", "replaceme", "--save-model",
                                 tmp_path / "m", "--fold", fold)
        assert code == 2 and "give --fold exact" in err and err.count("\n") == 1
    assert not (tmp_path / "m").exists() and not (tmp_path / "patch.safetensors").exists()
    code, printed, err = calibrate(script, folder, tmp_path, text, "--repair", "replaceme", "--save-model",
                                   tmp_path / "m", "--fold", "exact", "--fold-tolerance", "1e-5")
    assert code == 0 and "folded (exact)" in printed, err
    assert ppl(script, folder, tmp_path, text, "--patch", patch)[0] == 0
    assert ppl(script, tmp_path / "m", tmp_path / "own", text)[0] == 0
    found, own = rows(tmp_path)["T"], rows(tmp_path / "own")["dense"]
    assert found["about"] == own["about"] and own["about"]["repair"] == "replaceme"
    assert own["ppl"] == pytest.approx(found["ppl"], rel=1e-5)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "m")).__name__ == "LlamaForCausalLM"
    given = ("--model", folder, "--patch", tmp_path / "patch.safetensors")
    for name, *more in (("distill", "--train-data", text, "--out", tmp_path / "ft.safetensors"),
                        ("plot_magnitudes", "--figure", "1b", "--datasets", text, "--seq-len", 32)):
        code, _, err = script(name, *given, *more)
        assert code == 2 and "matri" in err and "on the stream" in err, (name, err)


@pytest.mark.parametrize("family, removed, reason", [
    ("llama", "0-1", "no layer before it"), ("gemma2", "2-3", "norm behind its MLP"),
    ("phi", "2-3", "together with its attention")])
def test_replaceme_is_refused_where_it_has_no_place(script, tmp_path, text, family, removed, reason):
    folder = save(tiny(family), tmp_path / "base")
    prune(script, folder, tmp_path, text, "--layers", removed)
    code, _, err = calibrate(script, folder, tmp_path, text, "--repair", "replaceme", "--save-model", tmp_path / "m",
                             "--fold", "exact")
    assert code == 2 and reason in err and err.count("\n") == 1 and not (tmp_path / "m").exists()
    code, _, err = calibrate(script, folder, tmp_path, text, "--repair", "replaceme")
    assert code == (0 if family == "gemma2" else 2), err  # behind the norm it still acts, as a module of its own
    assert code == 0 or reason in err


def test_fold_needs_a_folder(script, folders, tmp_path, text):
    prune(script, folders("llama"), tmp_path, text, "--layers", "2-3")
    code, _, err = calibrate(script, folders("llama"), tmp_path, text, "--fold", "near")
    assert code == 2 and "--save-model" in err


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_fine_tuned_patch_folds(script, folders, tmp_path, text, mode):
    prune(script, folders("tied"), tmp_path, text, "--layers", "2-3")
    calibrate(script, folders("tied"), tmp_path, text)
    more = ("--model", folders("tied"), "--patch", tmp_path / "patch.safetensors", "--train-data", text,
            "--seq-len", 32, "--train-samples", 4, "--val-samples", 2, "--mode", mode, "--save-model", tmp_path / "m",
            "--fold", "near")
    code, printed, err = script("distill", *more, "--fold-tolerance", "0.5", "--out", tmp_path / "ft.safetensors")
    assert code == 0 and "folded (near)" in printed, err
    content = origin(tmp_path / "m")
    assert content["about"]["stage"] == "distilled" and content["folding"]["tokens"] == 64
    AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_a_folder_with_a_patch_has_a_card_too(script, folders, tmp_path, text):
    prune(script, folders("llama"), tmp_path, text, "--layers", "2-3")
    assert calibrate(script, folders("llama"), tmp_path, text, "--save-model", tmp_path / "m")[0] == 0
    card = (tmp_path / "m/README.md").read_text()
    assert "from_pretrained(FOLDER, trust_remote_code=True)" in card and "folded" not in card
