"""The losses of distillation and their gradients against whole models; what is trained and what stays."""

import pytest
import torch

from tests.tiny import FAMILIES, ids, tiny
from utils import distillation
from utils.decoder import Decoder
from utils.distillation import Distiller, kl_top_k, kl_with_tail, teacher_targets
from utils.layers import Layers
from utils.networks import ReplacementLayer, TrainablePatch

START = torch.eye(64) + torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) / 40


def distiller(family="llama", removed=(2, 3), top_k=128, loss="kl", trainable="full"):
    runs_end = {(2, 3): (4,), (4, 5): (6,), (1, 3, 4): (2, 5), (0, 1): (2,)}[removed]
    return Distiller(Decoder(tiny(family)), Layers(6, removed),
                     {end: TrainablePatch(START, trainable) for end in runs_end}, top_k, loss)


def loss_of(d, input_ids):
    batch, hidden = d.interface(input_ids)
    return d.student_loss(batch, hidden, d.teacher(batch, hidden))


def log_probabilities(model, input_ids):
    return model(input_ids).logits.double().log_softmax(-1).flatten(0, 1)


def kl(teacher, student):
    return (teacher.exp() * (teacher - student)).sum(1).mean()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("removed", [(2, 3), (4, 5), (1, 3, 4), (0, 1)])
def test_suffix_only_loss_and_gradients_are_those_of_the_full_models(family, removed):
    """All of the vocabulary: the full KL between two whole-model forwards, and its gradient with respect to P."""
    d = distiller(family, removed)
    loss = loss_of(d, ids())
    loss.backward()
    student = tiny(family)
    for index in removed:
        student.model.layers[index].forward = lambda hidden_states, **kwargs: hidden_states
    modules = [*student.model.layers, getattr(student.model, "norm", None) or student.model.final_layernorm]
    weights = {end: START.clone().requires_grad_() for end in d.patches}
    for end, weight in weights.items():
        modules[end].register_forward_pre_hook(lambda m, args, w=weight: (args[0] @ w, *args[1:]))
    with torch.no_grad():
        teacher = log_probabilities(tiny(family), ids())
    expected = kl(teacher, log_probabilities(student, ids()))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for end, weight in weights.items():
        torch.testing.assert_close(d.patches[end].weight.grad, weight.grad, rtol=1e-3, atol=1e-5)


def test_the_loss_renormalises_both_sides_on_the_teachers_tokens():
    d = distiller(top_k=50)
    with torch.no_grad():
        teacher = log_probabilities(tiny(), ids())
        values, index = teacher.topk(50)
        batch, hidden = d.interface(ids())
        state = d.patches[4](hidden)
        for layer in (4, 5):
            state = d.decoder.layer(batch, layer, state)
        logits = d.decoder.head_logits(d.decoder.final_states(state)).double().flatten(0, 1)
    expected = kl(values.log_softmax(1), logits.gather(1, index).log_softmax(1))
    assert loss_of(d, ids()).item() == pytest.approx(expected.item(), rel=1e-5)
    not_renormalised = kl(values, logits.log_softmax(1).gather(1, index))
    assert abs(not_renormalised.item() - expected.item()) > 1e-3


def test_one_token_gives_nothing_without_the_bucket_and_something_with_it():
    assert loss_of(distiller(top_k=1), ids()).item() == pytest.approx(0, abs=1e-7)
    assert loss_of(distiller(top_k=1, loss="kl-tail"), ids()).item() > 1e-3


def test_the_bucket_is_at_most_the_full_kl_and_equal_at_the_whole_vocabulary():
    full = loss_of(distiller(top_k=128), ids()).item()
    values = [loss_of(distiller(top_k=k, loss="kl-tail"), ids()).item() for k in (1, 10, 50, 128)]
    assert values == sorted(values) and values[-1] == pytest.approx(full, rel=1e-4) and values[0] < full


def test_no_loss_and_no_gradient_when_the_student_is_the_teacher():
    d = Distiller(Decoder(tiny(no_ops=(2, 3))), Layers(6, (2, 3)), {4: TrainablePatch(torch.eye(64), "full")}, 100)
    loss = loss_of(d, ids())
    loss.backward()
    assert loss.item() < 1e-6 and d.patches[4].weight.grad.abs().max() < 1e-5


def test_the_mean_over_tokens_ignores_batch_size_and_length():
    d = distiller(top_k=20)
    whole = loss_of(d, ids(4)).item()
    assert whole == pytest.approx(sum(loss_of(d, part).item() for part in ids(4).split(1)) / 4, rel=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_gathered_logits_and_their_gradient_are_those_of_the_whole_head(dtype, tolerance):
    generator = torch.Generator().manual_seed(3)
    weight, states = (torch.randn(*size, generator=generator).to(dtype) for size in ((50, 16), (7, 16)))
    index, gradient = torch.randint(50, (7, 9), generator=generator), torch.randn(7, 9, generator=generator)
    index[:, 1] = index[:, 0]  # a word twice
    found, expected = states.clone().requires_grad_(), states.double().requires_grad_()
    logits = distillation.GatheredLogits.apply(found, index, weight)
    reference = (expected @ weight.double().T).gather(1, index)
    assert logits.dtype == torch.float32 and not weight.requires_grad
    torch.testing.assert_close(logits.double(), reference, rtol=tolerance, atol=10 * tolerance)
    logits.backward(gradient)
    reference.backward(gradient.double())
    assert found.grad.dtype == dtype
    torch.testing.assert_close(found.grad.double(), expected.grad, rtol=tolerance, atol=10 * tolerance)


def test_teacher_targets_are_the_models_own():
    decoder = Decoder(tiny("gemma2"))
    batch = decoder.inputs(ids())
    hidden = batch.hidden
    with torch.no_grad():
        for index in range(6):
            hidden = decoder.layer(batch, index, hidden)
        expected = log_probabilities(decoder.model, ids()).float()
    logs, index = teacher_targets(decoder, hidden, 5, chunk=7)
    assert torch.equal(index.sort().values, expected.topk(5).indices.sort().values)
    torch.testing.assert_close(logs, expected.gather(1, index), rtol=1e-4, atol=1e-4)
    logits, same = teacher_targets(decoder, hidden, 5, normalised=False, chunk=7)
    assert torch.equal(same, index)
    torch.testing.assert_close(logits.log_softmax(1), logs.log_softmax(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocabulary, k", [(1000, 20), (1003, 62), (1003, 63), (31, 31), (333, 1)])
def test_the_two_stages_find_the_largest_logits(vocabulary, k):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(vocabulary, 9, generator=generator)
    logits[:, 1] = logits[:, 1].round()  # many ties
    logits[-k:, 2] += 10  # all in the rows after the last whole group, or across groups
    values, index = distillation._top(logits, k)
    assert index.shape == (9, k) and all(len(row.unique()) == k for row in index)
    assert torch.equal(values, logits.T.gather(1, index))
    assert torch.equal(values.sort(1).values, logits.T.sort(1).values[:, -k:])


def test_feature_loss_is_the_mean_square_at_the_interface():
    d = distiller(loss="mse")
    batch, hidden = d.interface(ids())
    after = d.decoder.layer(batch, 3, d.decoder.layer(batch, 2, hidden))
    expected = (hidden @ START - after).square().mean()
    assert loss_of(d, ids()).item() == pytest.approx(expected.item(), rel=1e-5)


def test_both_losses_on_numbers_done_by_hand():
    teacher = torch.tensor([[0.6, 0.3]]).log()
    student = torch.tensor([[0.5, 0.1]]).log()
    p, q = torch.tensor([2 / 3, 1 / 3]), torch.tensor([5 / 6, 1 / 6])
    assert kl_top_k(teacher, student).item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.5, 0.1, 0.4])
    assert kl_with_tail(teacher, student, torch.zeros(1)).item() == pytest.approx((p * (p / q).log()).sum().item(),
                                                                                 rel=1e-5)


def test_base_weights_and_embedding_stay(folders):
    d = distiller()
    before = {name: p.clone() for name, p in d.decoder.model.named_parameters()}
    optimizer = torch.optim.AdamW(d.parameters, lr=1e-2)
    loss_of(d, ids()).backward()
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in d.decoder.model.named_parameters())


def test_a_copied_layer_in_the_place_of_one_layer_is_the_teacher():
    decoder = Decoder(tiny())
    d = Distiller(decoder, Layers(6, (3,)), {4: ReplacementLayer(decoder.layers[3], 3)}, 128)
    assert loss_of(d, ids()).item() < 1e-6
