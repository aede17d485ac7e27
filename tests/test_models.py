"""Finding and loading models."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.tiny import save, tiny
from utils.errors import UserError
from utils.models import find_model, load_decoder, pick_dtype
from utils.session import Session


def test_auto_dtype():
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


def copy(folder, target):
    shutil.copytree(folder, target)
    return target


def test_per_layer_list_of_another_length_is_named(folders, tmp_path):
    folder = copy(folders("qwen3"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = config["layer_types"] + ["full_attention"] * 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="layer_types has 8 entries, num_hidden_layers is 6"):
        find_model(str(folder))


def test_missing_and_extra_weights_are_named(folders, tmp_path):
    from safetensors.torch import load_file, save_file
    for change, message in (("model.layers.1.mlp.up_proj.weight", "missing keys.*layers.1.mlp.up_proj"),
                            (None, "unexpected keys.*stray")):
        folder = copy(folders("llama"), tmp_path / str(change))
        tensors = load_file(folder / "model.safetensors")
        if change:
            del tensors[change]
        else:
            tensors["stray.weight"] = torch.zeros(2)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=message):
            load_decoder(find_model(str(folder)))


def test_the_sha256_follows_the_weights(folders, tmp_path):
    from safetensors.torch import load_file, save_file
    one = find_model(str(folders("llama"))).sha256
    same = copy(folders("llama"), tmp_path / "same")
    assert find_model(str(same)).sha256 == one
    tensors = load_file(same / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, same / "model.safetensors", {"format": "pt"})
    assert find_model(str(same)).sha256 != one


@pytest.mark.parametrize("name, message", [
    ("nobody/nothing", "cannot be reached"), ("llama2-7b", "meta-llama/Llama-2-7b-hf.*cannot be reached"),
    ("missing.gguf", "no such file"), ("/", "no config.json")])
def test_models_that_cannot_be_had_say_what_to_do(name, message):
    with pytest.raises(UserError, match=message) as caught:
        find_model(name)
    assert len(str(caught.value).splitlines()) <= 2


def test_hub_model_from_the_local_cache(folders, tmp_path, monkeypatch):
    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repo / "snapshots" / revision
    shutil.copytree(folders("llama"), snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = find_model("someone/tiny")
    assert source.revision == revision and source.sha256 == find_model(str(folders("llama"))).sha256
    assert load_decoder(source).num_layers == 6


def test_remote_code_is_never_run_unasked(folders, tmp_path):
    folder = copy(folders("llama"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="unheard_of", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="--trust-remote-code"):
        find_model(str(folder))


def test_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    from utils.models import pick_device
    with pytest.raises(UserError, match="--device cuda"):
        pick_device("cuda")


def test_saved_fixture_is_plain(tmp_path):
    assert sum(p.numel() for p in load_decoder(find_model(str(save(tiny(), tmp_path)))).model.parameters()) == sum(
        p.numel() for p in tiny().parameters())


@pytest.mark.parametrize("name", ["llama", "tied", "qwen3", "gemma3"])
def test_parameters_are_counted_without_weights(folders, name, monkeypatch):
    decoder = load_decoder(find_model(str(folders(name))))
    monkeypatch.setattr("utils.session.load_decoder", None)
    session = Session(SimpleNamespace(model=str(folders(name)), trust_remote_code=False, device="cpu", dtype="auto"))
    total, layers = session.parameters
    assert total == sum(p.numel() for p in decoder.model.parameters())
    assert layers == [sum(p.numel() for p in layer.parameters()) for layer in decoder.layers]
