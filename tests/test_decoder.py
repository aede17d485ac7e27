"""The decoder layer by layer against the model's own forward; variants, alone and together."""

from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.tiny import FAMILIES, P, ids, logits_of, patched_variant, tiny, variant
from utils.decoder import Decoder, Variant, first_tensor, run_variants
from utils.errors import UserError, WorkError
from utils.layers import Layers
from utils.modeling_linearpatch import LinearPatch


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


# ----- variants

VARIANTS = [variant(), variant("one", (2,)), variant("first", (0, 1), {2: LinearPatch(P)}),
            variant("block", (2, 3), {4: LinearPatch(P)}),
            variant("two", (1, 3, 4), {2: LinearPatch(P[0]), 5: LinearPatch(P)}),
            variant("end", (4, 5), {6: LinearPatch(P)}), variant("twin", (2,))]


def whole_logits(removed, patches):
    """Logits of the whole model's own forward with layers taken out of its list and hooks where patches are."""
    model = tiny()
    modules = [*model.model.layers, model.model.norm]
    for index, patch in patches.items():
        modules[index].register_forward_pre_hook(lambda m, args, w=patch.weight: (
            args[0] @ (w if w.ndim == 2 else w.diag()), *args[1:]))
    model.model.layers = nn.ModuleList(layer for index, layer in enumerate(model.model.layers) if index not in removed)
    model.config.num_hidden_layers = len(model.model.layers)
    with torch.no_grad():
        return model(ids(), use_cache=False).logits


def test_variants_together_equal_whole_models_and_variants_alone():
    decoder, together = Decoder(tiny()), {}
    run_variants(decoder, decoder.inputs(ids()), VARIANTS, together.__setitem__)
    assert sorted(together) == list(range(len(VARIANTS)))
    for index, one in enumerate(VARIANTS):
        found = decoder.head_logits(decoder.final_states(together[index]))
        assert torch.equal(found, logits_of(decoder, one, ids()))
        torch.testing.assert_close(found, whole_logits(one.removed, one.modules), rtol=1e-4, atol=1e-4)


def test_what_variants_share_runs_once():
    """Every distinct beginning of a way is one step."""
    decoder, ran = Decoder(tiny()), []
    step = decoder.step
    decoder.step = lambda batch, what, hidden: (ran.append(what), step(batch, what, hidden))[1]
    counted = run_variants(decoder, decoder.inputs(ids()), VARIANTS, lambda index, hidden: None)
    ways = [one.steps() for one in VARIANTS]
    beginnings = {tuple(map(id, way[:stop])) for way in ways for stop in range(1, len(way) + 1)}
    assert counted == len(ran) == len(beginnings) < sum(map(len, ways))


def test_ways_that_part_are_walked_in_the_order_of_names():
    seen, decoder = [], Decoder(tiny())
    for group in (VARIANTS, VARIANTS[::-1]):
        seen.clear()
        run_variants(decoder, decoder.inputs(ids()), group[:2], lambda index, hidden: seen.append(index))
        assert seen == [0, 1]


@pytest.mark.parametrize("given_up", [g for count in range(4) for g in combinations(range(4), count)])
def test_a_variant_that_is_not_wanted_costs_nothing(given_up):
    """Those given up beforehand leave no step and no result; the others are as without them."""
    decoder, expected, found = Decoder(tiny()), {}, {}
    batch = decoder.inputs(ids())
    rest = [one for index, one in enumerate(VARIANTS[:4]) if index not in given_up]
    steps = run_variants(decoder, batch, rest, expected.__setitem__)
    counted = run_variants(decoder, batch, VARIANTS[:4], found.__setitem__, wanted=lambda index: index not in given_up)
    assert counted == steps and not set(found) & set(given_up)
    assert all(torch.equal(a, b) for a, b in zip(found.values(), expected.values(), strict=True))


def test_a_variant_may_be_given_up_on_its_way():
    """Asked before each step: what is closed by the result of another one goes no further, and has no result."""
    decoder, ran = Decoder(tiny()), []
    step = decoder.step
    decoder.step = lambda batch, what, hidden: (ran.append(what), step(batch, what, hidden))[1]
    group, alive, seen = [variant("v", (layer,)) for layer in (1, 3, 5)], {0, 1, 2}, []

    def leaf(index, hidden):
        seen.append(index)
        alive.discard(2)

    run_variants(decoder, decoder.inputs(ids()), group, leaf, wanted=alive.__contains__)
    assert seen == [0, 1]
    assert ran == [0, 2, 3, 4, 5, 1, 2, 4, 5]  # without the third nothing but layers 0 to 2 is shared


@pytest.mark.parametrize("removed, modules, about, expected", [
    ((), {}, None, (None, 0, "none", "dense")), ((2, 3), {}, None, (None, 2, "none", "pruned")),
    ((2, 3), {4: LinearPatch(P)}, None, (None, 2, None, "pruned")),
    ((2, 3), {4: LinearPatch(P)}, {"repair": "hadamard", "stage": "calibrated"}, (None, 2, "hadamard", "calibrated")),
    ((2,), {}, {"metric": "sleb", "more": 1}, ("sleb", 1, "none", "pruned")),
    ((), {}, {"metric": "llm-pruner", "n": 7, "stage": "narrowed"}, ("llm-pruner", 7, "none", "narrowed"))])
def test_about_always_holds_metric_n_repair_and_stage(removed, modules, about, expected):
    given = dict(about or {})
    made = Variant("v", Layers(6, removed), modules, about)
    assert [made.about[key] for key in ("metric", "n", "repair", "stage")] == list(expected)
    assert set(made.about) == {"metric", "n", "repair", "stage", *given} and (about or {}) == given


def test_steps_and_what_is_printed():
    patch, network = LinearPatch(P), LinearPatch(P)
    two = variant("two", (0, 3, 4), {1: patch, 5: network})
    assert two.steps() == [patch, 1, 2, network, 5] and variant().steps() == [0, 1, 2, 3, 4, 5]
    source = SimpleNamespace(patched_after=[])
    assert two.describe(source) == "layers 3, patch after the embedding, after layer 1, yes"
    assert patched_variant((4, 5), 6).describe(source) == "layers 4, patch after layer 3, yes"
    assert variant("pruned", (2,)).describe(source) == "layers 5, patch no"
    assert variant().describe(SimpleNamespace(patched_after=[2])) == "layers 6, patch after layer 2, yes"


def test_digests_follow_layers_and_modules_and_not_names():
    digests = [one.sha256() for one in VARIANTS[:6]]
    assert len(set(digests)) == 6 and VARIANTS[6].sha256() == digests[1]
    assert patched_variant(weight=P + 0).sha256() == patched_variant().sha256() == digests[3]
    assert patched_variant(weight=P + 1e-3).sha256() != digests[3]
