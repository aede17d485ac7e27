"""Log-likelihoods of packed and prefix-shared requests against one plain forward pass each."""

import pytest
import torch

from tests.tiny import FAMILIES, tiny, variant
from utils.decoder import Decoder
from utils.errors import WorkError
from utils.evaluation.scoring import Request, make_packs, score, score_behind_prefix
from utils.model_folder import patched_model
from utils.modeling_linearpatch import LinearPatch


def tokens(count, seed):
    return tuple(torch.randint(4, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def groups():
    """Items with a shared context, with two contexts and one continuation, of one token, and of unequal lengths."""
    shared, other = tokens(12, 0), tokens(9, 1)
    return [
        [Request(shared, tokens(n, 10 + n)) for n in (1, 3, 5, 2)],
        [Request((*other, 50, 60), (7, 8, 9)), Request((*other, 51), (7, 8, 9))],
        [Request(tokens(20, 2), (n,)) for n in (4, 5, 6, 7)],
        [Request(shared, (9,)), Request(shared, (9, 10, 11))],  # one continuation begins with the other
        [Request((3,), tokens(4, 3))],
    ]


def plain(model, request):
    """(sum of the continuation's log-probabilities, whether each token is the first choice)."""
    whole = torch.tensor([[*request.context, *request.continuation]])
    with torch.no_grad():
        logits = model(whole[:, :-1]).logits.double()[0, -len(request.continuation):]
    goal = torch.tensor(request.continuation)
    return logits.log_softmax(-1).gather(1, goal[:, None]).sum().item(), bool((logits.argmax(-1) == goal).all())


def variants():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) / 8
    return [variant(), variant("vanilla", (2, 3)), variant("patched", (2, 3), {4: LinearPatch(weight)}),
            variant("start", (0, 1), {2: LinearPatch(weight)})]


def expected(family, requests):
    models = [tiny(family)] + [patched_model(Decoder(tiny(family)), v) for v in variants()[1:]]
    pairs = [[plain(model, request) for request in requests] for model in models]
    return (torch.tensor([[value for value, _ in row] for row in pairs], dtype=torch.float64),
            torch.tensor([[first for _, first in row] for row in pairs]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_tokens, pack_tokens", [(1, 1024), (4096, 1024), (64, 20)])
def test_packed_requests_equal_plain_prompts(family, batch_tokens, pack_tokens):
    decoder = Decoder(tiny(family))
    packs = make_packs(decoder, groups(), pack_tokens)
    values, greedy = score(decoder, variants(), packs, batch_tokens)
    wanted, first = expected(family, [request for group in groups() for request in group])
    torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(greedy, first)


def test_a_shared_context_is_encoded_once():
    group = groups()[0]
    pack, = make_packs(Decoder(tiny()), [group])
    assert len(pack.tokens) == 12 + sum(n - 1 for n in (1, 3, 5, 2))
    one_token, = make_packs(Decoder(tiny()), [groups()[2]])
    assert len(one_token.tokens) == 20 and len(one_token.scored) == 4


def test_too_long_prompts_lose_their_oldest_tokens():
    decoder = Decoder(tiny(max_position_embeddings=16))
    requests = [Request(tokens(30, 5), tokens(3, n)) for n in (6, 7)]
    values, _ = score(decoder, [variant()], make_packs(decoder, [requests]))
    for value, request in zip(values[0], requests):
        cut = (*request.context, *request.continuation)[-17:]
        assert value.item() == pytest.approx(plain(decoder.model, Request(cut[:-3], cut[-3:]))[0], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_tokens", [1, 30, 4096])
def test_questions_behind_one_prefix_equal_plain_prompts(family, batch_tokens):
    prefix = tokens(25, 8)
    requests = [Request((*prefix, *tokens(n, n)), (answer,)) for n in (3, 7, 1, 7, 12) for answer in (4, 5, 6, 7)]
    values = score_behind_prefix(Decoder(tiny(family)), variants(), requests, batch_tokens)
    torch.testing.assert_close(values, expected(family, requests)[0], rtol=1e-4, atol=1e-4)


def test_one_question_alone_and_without_a_common_prefix():
    for requests in ([Request(tokens(9, 1), (5,))], [Request(tokens(9, 1), (5,)), Request(tokens(9, 2), (5,))]):
        values = score_behind_prefix(Decoder(tiny()), variants(), requests)
        torch.testing.assert_close(values, expected("llama", requests)[0], rtol=1e-4, atol=1e-4)


def test_non_finite_scores_are_failures():
    decoder = Decoder(tiny())
    bad = variant("broken", (2, 3), {4: LinearPatch(torch.full((64,), 1e38))})
    with pytest.raises(WorkError, match="broken"):
        score(decoder, [bad], make_packs(decoder, groups()))
