"""Finding, loading and running models layer by layer."""

import json
import shutil

import pytest
import torch
from torch import nn

from tests.tiny import FAMILIES, ids, save, tiny
from utils.errors import UserError, WorkError
from utils.decoder import Decoder, first_tensor
from utils.models import find_model, load_decoder, pick_dtype


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_layers_one_by_one_give_the_models_own_states(family, tied):
    model = tiny(family, tie_word_embeddings=tied)
    decoder = Decoder(model)
    seen = []
    handles = [layer.register_forward_pre_hook(lambda m, a, k: seen.append(a[0] if a else k["hidden_states"]),
                                               with_kwargs=True) for layer in decoder.layers]
    handles.append(decoder.layers[-1].register_forward_hook(lambda m, a, out: seen.append(first_tensor(out))))
    with torch.no_grad():
        logits = model(ids()).logits
        for handle in handles:
            handle.remove()
        batch = decoder.inputs(ids())
        hidden = batch.hidden
        for index in range(decoder.num_layers):
            torch.testing.assert_close(hidden, seen[index])
            hidden = decoder.layer(batch, index, hidden)
        torch.testing.assert_close(hidden, seen[-1])
        torch.testing.assert_close(decoder.head_logits(decoder.final_states(hidden)), logits)


def test_padding_mask_reaches_the_layers():
    decoder = Decoder(tiny())
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[0, 12:] = 0
    with torch.no_grad():
        expected = decoder.model(input_ids=ids(), attention_mask=mask).logits
        batch = decoder.inputs(ids(), mask)
        hidden = batch.hidden
        for index in range(6):
            hidden = decoder.layer(batch, index, hidden)
        torch.testing.assert_close(decoder.head_logits(decoder.final_states(hidden)), expected)


def test_last_state_is_raw_not_normed():
    model = tiny(no_ops=(5,))
    decoder = Decoder(model)
    with torch.no_grad():
        out = model(ids(), output_hidden_states=True)
        batch = decoder.inputs(ids())
        hidden = batch.hidden
        for index in range(6):
            before, hidden = hidden, decoder.layer(batch, index, hidden)
    assert torch.equal(before, hidden)  # the no-op layer: similarity exactly 1 on raw states
    assert (out.hidden_states[-1] - hidden).abs().max() > 0.1  # the library's last entry is behind the norm
    torch.testing.assert_close(out.hidden_states[-1], decoder.final_states(hidden))


class TupleLayer(nn.Module):
    """Wraps a decoder layer so that it returns a tuple, as older releases and much remote code do."""

    def __init__(self, layer):
        super().__init__()
        self.inner = layer

    def forward(self, hidden_states, **kwargs):
        return (self.inner(hidden_states, **kwargs),)


def test_layers_that_return_tuples_give_the_same():
    plain, wrapped = Decoder(tiny()), tiny()
    for index, layer in enumerate(wrapped.model.layers):
        wrapped.model.layers[index] = TupleLayer(layer)
    original = type(wrapped.model).forward

    def unwrapping(self, *args, **kwargs):  # a model loop of that time takes the first entry itself
        handles = [layer.register_forward_hook(lambda m, a, out: out[0] if isinstance(out, tuple) else out)
                   for layer in self.layers]
        try:
            return original(self, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    wrapped.model.forward = unwrapping.__get__(wrapped.model)
    decoder = Decoder(wrapped)
    assert decoder.returns_tuple
    with torch.no_grad():
        a, b = plain.inputs(ids()), decoder.inputs(ids())
        assert decoder.layer(b, 0, b.hidden).shape == (2, 17, 64)
        torch.testing.assert_close(decoder.layer(b, 0, b.hidden), plain.layer(a, 0, a.hidden))


def test_a_layer_that_lost_its_batch_axis_is_refused():
    with pytest.raises(WorkError, match="2 dimensions"):
        first_tensor(torch.zeros(17, 64))


def test_an_architecture_that_does_more_between_layers_is_refused():
    model = tiny()
    original = model.model.norm.forward
    model.model.norm.register_forward_hook(lambda m, a, out: out)  # harmless
    Decoder(model)
    model.lm_head.register_forward_hook(lambda m, a, out: out)
    forward = type(model).forward

    def scaled(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = out.logits * 0.5
        return out

    model.forward = scaled.__get__(model)
    with pytest.raises(UserError, match="LlamaForCausalLM.*not supported"):
        Decoder(model)
    assert original is not None


def test_no_layers_found_names_the_class():
    model = tiny()
    model.config.num_hidden_layers = 9
    with pytest.raises(UserError, match="LlamaForCausalLM: no list of 9 decoder layers"):
        Decoder(model)


def test_float16_overflow_is_named():
    model = tiny().half()
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(60000)
    with pytest.raises(WorkError, match="float16.*float32"):
        Decoder(model)


def test_float16_overflow_on_later_text_names_the_layer():
    decoder = Decoder(tiny().half())
    with torch.no_grad():
        decoder.layers[3].mlp.down_proj.weight.mul_(60000)
        batch = decoder.inputs(ids())
        hidden = batch.hidden
        with pytest.raises(WorkError, match="float16 overflow.*output of layer 3"):
            for index in range(6):
                hidden = decoder.layer(batch, index, hidden)


def test_auto_dtype():
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


def test_token_nll_is_cross_entropy_whatever_the_chunk(monkeypatch):
    decoder = Decoder(tiny("gemma2"))  # with a soft cap on its logits
    with torch.no_grad():
        batch = decoder.inputs(ids())
        hidden = batch.hidden
        for index in range(6):
            hidden = decoder.layer(batch, index, hidden)
        logits = decoder.model(ids()).logits.double()
        expected = -torch.log_softmax(logits[:, :-1], -1).gather(-1, ids()[:, 1:, None]).squeeze(-1)
        for chunk in (3, 512):
            monkeypatch.setattr("utils.decoder.NLL_CHUNK", chunk)
            torch.testing.assert_close(decoder.token_nll(hidden, ids()[:, 1:]).double(), expected, rtol=1e-5, atol=1e-5)


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


def test_fingerprint_follows_the_weights(folders, tmp_path):
    from safetensors.torch import load_file, save_file
    one = find_model(str(folders("llama"))).fingerprint
    same = copy(folders("llama"), tmp_path / "same")
    assert find_model(str(same)).fingerprint == one
    tensors = load_file(same / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, same / "model.safetensors", {"format": "pt"})
    assert find_model(str(same)).fingerprint != one


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
    assert source.revision == revision and source.fingerprint == find_model(str(folders("llama"))).fingerprint
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
    assert load_decoder(find_model(str(save(tiny(), tmp_path)))).parameters()[0] == sum(
        p.numel() for p in tiny().parameters())
