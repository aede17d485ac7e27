"""Perplexities of variants that share what they can, against plain evaluations."""

import math

import pytest
import torch

from tests.tiny import ids, tiny, variant
from utils.decoder import Decoder, run_variants
from utils.errors import WorkError
from utils.evaluation.objectives import summarise, window_losses
from utils.modeling_linearpatch import LinearPatch


def variants():
    generator = torch.Generator().manual_seed(3)
    full = LinearPatch(torch.randn(64, 64, generator=generator) / 8)
    diagonal = LinearPatch(torch.rand(64, generator=generator) + 0.5)
    return [variant(), variant("vanilla", (2, 3)), variant("patched", (2, 3), {4: full}),
            variant("end", (4, 5), {6: diagonal}), variant("start", (0,), {1: full}),
            variant("two runs", (1, 3, 4), {2: diagonal, 5: full})]


def plain_loss(case, input_ids):
    """Mean loss of each window by a whole-model forward with hooks in place of cut layers."""
    model = tiny()
    for index in case.removed:
        model.model.layers[index].forward = lambda hidden_states, **kwargs: hidden_states
    modules = [*model.model.layers, model.model.norm]
    for index, patch in case.modules.items():
        modules[index].register_forward_pre_hook(lambda m, args, patch=patch: (patch(args[0]), *args[1:]))
    with torch.no_grad():
        logits = model(input_ids).logits.double()
    return -torch.log_softmax(logits[:, :-1], -1).gather(-1, input_ids[:, 1:, None]).squeeze(-1).mean(1)


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_variants_together_equal_plain_evaluations(batch_size):
    input_ids = ids(4)
    losses = window_losses(Decoder(tiny()), variants(), input_ids, batch_size, progress=False)
    for case, row in zip(variants(), losses):
        torch.testing.assert_close(row, plain_loss(case, input_ids), rtol=1e-5, atol=1e-5)


def test_shared_layers_run_once():
    decoder = Decoder(tiny())
    calls = []
    for index, layer in enumerate(decoder.layers):
        layer.register_forward_hook(lambda m, a, o, index=index: calls.append(index))
    three = [variant("a", (3, 4)), variant("b", (3, 4), {5: LinearPatch(torch.eye(64))}), variant()]
    batch = decoder.inputs(ids())
    calls.clear()  # `inputs` passes through the layers without running them
    ran = run_variants(decoder, batch, three, lambda index, hidden: None)
    assert sorted(calls) == [0, 1, 2, 3, 4, 5, 5, 5] and ran == len(calls) + 1


def test_equal_variants_are_computed_once_and_all_reported():
    decoder = Decoder(tiny())
    seen = []
    ran = run_variants(decoder, decoder.inputs(ids()), [variant("a"), variant("b")], lambda i, hidden: seen.append(i))
    assert ran == 6 and sorted(seen) == [0, 1]


def test_summary_has_students_interval_and_the_paired_ratio():
    losses = torch.tensor([1.0, 1.2, 1.1, 1.3], dtype=torch.float64)
    reference = losses + torch.tensor([0.1, 0.2, 0.1, 0.2], dtype=torch.float64)
    row = summarise(losses, reference)
    assert row["ppl"] == pytest.approx(math.exp(1.15))
    half = 3.182446 * losses.std().item() / 2  # t for 3 degrees of freedom, 97.5 %
    assert row["ppl_ci95"] == pytest.approx([math.exp(1.15 - half), math.exp(1.15 + half)], rel=1e-6)
    assert row["ratio_to_reference"] == pytest.approx(math.exp(-0.15))
    assert row["ratio_ci95"][1] < 1 and summarise(losses[:1])["ppl_ci95"] is None


def test_a_non_finite_loss_names_its_variant():
    bad = variant("broken", (2, 3), {4: LinearPatch(torch.full((64,), 1e38))})
    with pytest.raises(WorkError, match="broken.*window 0"):
        window_losses(Decoder(tiny()), [variant(), bad], ids(), progress=False)
