"""Objectives: how bad a variant of a model is on windows of text. Next-token loss, its perplexity and its intervals.

`window_losses` gives every window of every variant, for evaluations; `NextToken` the losses of batches one by one, and
cheap lower bounds of them, for searches.
"""

import math

import torch
from scipy.special import stdtrit
from torch import nn
from tqdm import tqdm

from utils.decoder import NLL_CHUNK, run_variants
from utils.errors import WorkError

SHORTLIST = 8  # the bound reads one in so many words of the vocabulary
ROUNDING = 64  # units in the last place of the largest logit: more than two products of the same rows ever differ by


@torch.no_grad()
def window_losses(decoder, variants, input_ids, batch_size=1, label="ppl", progress=True, scored=None):
    """Mean negative log-likelihood of each window, float64 [variants, N], in nats a token.

    input_ids: int64 [N, T]; every window scores its T-1 next tokens, or the last `scored` of them.
    """
    losses = torch.zeros(len(variants), len(input_ids), dtype=torch.float64)
    done, first = 0, input_ids.shape[1] - 1 - (scored or input_ids.shape[1] - 1)
    with tqdm(total=len(input_ids), desc=label, unit="window", disable=not progress) as bar:
        for ids in input_ids.split(batch_size):

            def leaf(index, hidden):
                losses[index, done:done + len(ids)] = decoder.token_nll(
                    hidden[:, first:], ids[:, 1 + first:]).double().mean(1).cpu()

            run_variants(decoder, decoder.inputs(ids), variants, leaf)
            done += len(ids)
            bar.update(len(ids))
    for variant, row in zip(variants, losses):
        if not torch.isfinite(row).all():
            window = int((~torch.isfinite(row)).nonzero()[0])
            raise WorkError(f"{label}: variant {variant.name} has a non-finite loss in window {window}; "
                            "use --dtype float32 or bfloat16")
    return losses


def summarise(losses, reference=None):
    """Perplexity of one variant from its window losses (float64 [N]), with a 95 % interval over windows.

    ppl = exp(mean loss); the interval is exp(mean -+ t * stderr), Student's t with N-1 degrees of freedom. With
    `reference` (losses of another variant on the same windows) also the paired ratio ppl / reference ppl.
    """
    mean, stderr = mean_stderr(losses)
    result = {"ppl": perplexity(mean), "nll_mean": mean, "nll_stderr": stderr, "ppl_ci95": _interval(losses)}
    if reference is not None:
        result["ratio_to_reference"] = perplexity(mean - reference.mean().item())
        result["ratio_ci95"] = _interval(losses - reference)
    return result


def mean_stderr(values):
    """(mean, standard error of the mean) of float64 [N]; the error is None for one value."""
    stderr = (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else None
    return values.mean().item(), stderr


def _interval(values):
    """exp of the 95 % Student interval of the mean, [low, high]; None for one value."""
    mean, stderr = mean_stderr(values)
    if stderr is None:
        return None
    half = float(stdtrit(len(values) - 1, 0.975)) * stderr
    return [perplexity(mean - half), perplexity(mean + half)]


def perplexity(loss):
    """exp of a mean loss, nats a token. Raises WorkError where that exceeds all floating-point numbers."""
    try:
        return math.exp(loss)
    except OverflowError:
        raise WorkError(f"the perplexity exp({loss:.0f}) exceeds all floating-point numbers; the model is "
                        "broken") from None


class NextToken:
    """The objective of searches: loss of the next tokens of windows int64 [N, T], batch by batch, in nats.

    bounded: loss(..., learn=True) of one variant on a batch then also prepares lower bounds of that of others.
    """

    def __init__(self, decoder, input_ids, batch_size=1, bounded=True):
        self.decoder, self.batches = decoder, input_ids.split(batch_size)
        self.tokens = input_ids[:, 1:].numel()
        self.bounded = bounded and Shortlist.possible(decoder)
        self.shortlists = {}

    def inputs(self, number):
        """LayerInputs of a batch."""
        return self.decoder.inputs(self.batches[number])

    def loss(self, number, hidden, learn=False):
        """Summed loss of a batch, float64, given its X^(L) [B, T, C]. Raises WorkError when it is not finite."""
        ids = self.batches[number]
        shortlist = Shortlist(self.decoder, ids) if learn and self.bounded else None
        losses = self.decoder.token_nll(hidden, ids[:, 1:], shortlist and shortlist.look)
        if shortlist:
            self.shortlists[number] = shortlist.close()
        total = losses.double().sum().item()
        if not math.isfinite(total):
            raise WorkError(f"{self.decoder.label}: non-finite loss of a pruned model; use --dtype float32 or bfloat16")
        return total

    def lower_bound(self, number):
        """Function X^(L) [B, T, C] -> at most the loss of this batch, or None where there is none."""
        shortlist = self.shortlists.get(number)
        if shortlist is None:
            return None
        rows = shortlist.rows(self.decoder)
        return lambda hidden: shortlist.bound(self.decoder, hidden, rows)


class Shortlist:
    """A part of the vocabulary that bounds the loss of a batch from below.

    A logarithm of a sum of exponentials over some words is at most that over all of them. The words are the batch's
    own targets and those that a similar model finds likeliest over the batch, so that little is missing.
    """

    def __init__(self, decoder, ids):
        self.targets = ids[:, 1:].reshape(-1)
        self.mass = torch.zeros(decoder.vocab_size, device=decoder.head.weight.device)

    @staticmethod
    def possible(decoder):
        """The head must be one matrix in memory, and its products precise enough for a bound."""
        head = decoder.head
        return type(head) is nn.Linear and head.weight.dtype == torch.float32 and not hasattr(head, "_hf_hook")

    def look(self, logits):
        """Add the probabilities of a chunk of tokens, logits float32 [chunk, V]."""
        self.mass += logits.softmax(1).sum(0)

    def close(self):
        """Choose the words."""
        likely = self.mass.topk(max(len(self.mass) // SHORTLIST, 1)).indices
        self.words = torch.cat([likely, self.targets.to(likely.device)]).unique()  # sorted
        self.places = torch.searchsorted(self.words, self.targets.to(likely.device))
        del self.mass, self.targets
        return self

    def rows(self, decoder):
        """The head restricted to the words: (weight [K, C], bias [K] or None)."""
        head = decoder.head
        return head.weight[self.words], None if head.bias is None else head.bias[self.words]

    def bound(self, decoder, hidden, rows):
        """At most the loss of the batch, nats, from X^(L) [B, T, C]."""
        states = decoder.final_states(hidden[:, :-1]).reshape(-1, hidden.shape[-1])
        total = 0.0
        for part, places in zip(states.split(NLL_CHUNK), self.places.split(NLL_CHUNK)):
            logits = decoder.scale_logits(nn.functional.linear(part, *rows))
            slack = ROUNDING * torch.finfo(logits.dtype).eps * logits.abs().amax(1)
            losses = logits.logsumexp(1) - logits.gather(1, places[:, None])[:, 0] - slack
            total += losses.clamp(min=0).double().sum().item()
        return total
