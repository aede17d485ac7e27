"""Selection by the loss of the model without a layer: PPL of Shortened LLaMA in one shot, SLEB greedily.

Candidates share the layers before the removed one. The greedy search gives up a candidate once a lower bound of its
loss exceeds the best complete loss, so that it removes the layers that a search with every loss would remove.
"""

import math

import torch
from torch import nn
from tqdm import tqdm

from utils.errors import WorkError
from utils.decoder import NLL_CHUNK
from utils.selection import Selection

SHORTLIST = 8  # the bound reads one in so many words of the vocabulary
ROUNDING = 64  # units in the last place of the largest logit: more than two products of the same rows ever differ by
EQUAL = 1 - 1e-12  # sums of the same numbers in another order


def without_each(decoder, batch, alive, candidates):
    """Yield (layer, X^(L) of the `alive` layers without it) for the layers in the set `candidates`, in order.

    The layers before each run once. The set may shrink meanwhile.
    """
    hidden = batch.hidden
    for position, layer in enumerate(alive):
        if layer in candidates:
            yield layer, run(decoder, batch, alive[position + 1:], hidden)
        if candidates.isdisjoint(alive[position + 1:]):
            return
        hidden = decoder.layer(batch, layer, hidden)


def run(decoder, batch, layers, hidden):
    """The states [B, T, C] behind `layers`."""
    for layer in layers:
        hidden = decoder.layer(batch, layer, hidden)
    return hidden


def batch_loss(decoder, hidden, ids, look=None):
    """Summed negative log-likelihood of the next tokens of ids int64 [B, T] given X^(L) [B, T, C]; nats, float64."""
    loss = decoder.token_nll(hidden, ids[:, 1:], look).double().sum().item()
    if not math.isfinite(loss):
        raise WorkError(f"{decoder.label}: non-finite loss of a pruned model; use --dtype float32 or bfloat16")
    return loss


@torch.no_grad()
def removal_losses(decoder, input_ids, candidates, batch_size=1, progress=True):
    """Mean loss, nats a token, of the model without each one of `candidates`, in their order, over int64 [N, T]."""
    totals = dict.fromkeys(candidates, 0.0)
    parts = input_ids.split(batch_size)
    with tqdm(total=len(parts) * len(totals), desc="single removals", unit="run", disable=not progress) as bar:
        for ids in parts:
            batch = decoder.inputs(ids)
            for layer, hidden in without_each(decoder, batch, range(decoder.num_layers), set(candidates)):
                totals[layer] += batch_loss(decoder, hidden, ids)
                bar.update(1)
    return [total / input_ids[:, 1:].numel() for total in totals.values()]


@torch.no_grad()
def greedy(decoder, input_ids, n_prune, first=1, last=1, batch_size=1, rounds=(), after_round=None, progress=True):
    """SLEB: Selection by removing, `n_prune` times, the layer whose absence costs least on input_ids, int64 [N, T].

    Of the layers that are left the `first` and `last` ones stay. rounds: what an interrupted search had finished;
    after_round(rounds) is called behind each. Scores are mean losses, nats a token; those of candidates that were given
    up are lower bounds, complete=False. Ties go to the lower index.
    """
    rounds = list(rounds)[:n_prune]
    parts = input_ids.split(batch_size)
    work = [len(parts) * (decoder.num_layers - first - last - number) for number in range(n_prune)]
    with tqdm(total=sum(work), initial=sum(work[:len(rounds)]), desc="sleb", unit="run", disable=not progress) as bar:
        while len(rounds) < n_prune:
            removed = [done["layer"] for done in rounds]
            alive = [layer for layer in range(decoder.num_layers) if layer not in removed]
            candidates = alive[first:len(alive) - last]
            race = _Race(decoder, parts, alive, candidates, _promising(candidates, rounds), bar)
            layer = race.winner()
            bar.update(sum(work[:len(rounds) + 1]) - bar.n)  # what was given up
            rounds.append({"layer": layer, "scores": race.scores(len(rounds) + 1, input_ids[:, 1:].numel())})
            if after_round is not None:
                after_round(rounds)
    order = tuple(done["layer"] for done in rounds)
    return Selection(tuple(sorted(order)), order, tuple(row for done in rounds for row in done["scores"]))


def _promising(candidates, rounds):
    """The best remaining candidate of the last round; the middle one in the first."""
    if not rounds:
        return candidates[len(candidates) // 2]
    rows = [row for row in rounds[-1]["scores"] if row["layer"] in candidates]
    if not rows:
        return candidates[0]
    return min(rows, key=lambda row: (not row["complete"], -row["batches"], row["score"], row["layer"]))["layer"]


class _Race:
    """One round: the candidate with the lowest loss over all batches.

    One promising candidate, the lead, is run completely. Then, batch by batch, all others that are still open: each
    gets a cheap lower bound first, and its loss where it keeps pace with the best; it is closed once its bounds sum to
    more than the best complete loss. Which losses are computed changes the time, never the winner.
    """

    def __init__(self, decoder, parts, alive, candidates, lead, bar):
        self.decoder, self.parts, self.alive, self.lead, self.bar = decoder, parts, alive, lead, bar
        self.exact = {layer: {} for layer in candidates}  # batch -> its loss
        self.floor = {layer: {} for layer in candidates}  # batch -> lower bound of its loss; unseen batches: 0
        self.sums = dict.fromkeys(candidates, 0.0)  # of `floor`
        self.open = set(candidates) - {lead}
        self.best = math.inf

    def winner(self):
        """The layer to remove."""
        shortlists = [self._run_lead(number) for number in range(len(self.parts))]
        hard_first = sorted(range(len(self.parts)), key=lambda number: -self.exact[self.lead][number])
        pace = {self.lead: 0.0}  # loss so far of those that have every loss so far
        for number in hard_first:
            pace = self._run_open(number, shortlists[number], pace)
        for layer in sorted(self.open, key=lambda layer: (self.sums[layer], layer)):
            for number in hard_first:
                if layer in self.open and number not in self.exact[layer]:
                    ids = self.parts[number]
                    batch = self.decoder.inputs(ids)
                    rest = [other for other in self.alive if other != layer]
                    hidden = run(self.decoder, batch, rest, batch.hidden)
                    self._see(layer, number, batch_loss(self.decoder, hidden, ids))
        complete = [layer for layer in self.exact if self._is_complete(layer)]
        return min(complete, key=lambda layer: (self._total(layer), layer))

    def scores(self, number, tokens):
        """One row a candidate; batches: how many of them its loss or bound was computed on."""
        rows = []
        for layer in self.exact:
            complete = self._is_complete(layer)
            total = self._total(layer) if complete else self.sums[layer]
            rows.append({"round": number, "layer": layer, "score": total / tokens, "complete": complete,
                         "batches": len(self.floor[layer])})
        return rows

    def _run_lead(self, number):
        """The loss of the lead on a batch, and the batch's Shortlist (None where there can be none)."""
        ids = self.parts[number]
        batch = self.decoder.inputs(ids)
        rest = [layer for layer in self.alive if layer != self.lead]
        hidden = run(self.decoder, batch, rest, batch.hidden)
        shortlist = Shortlist(self.decoder, ids) if Shortlist.possible(self.decoder) else None
        self._see(self.lead, number, batch_loss(self.decoder, hidden, ids, shortlist and shortlist.look))
        self.bar.update(1)
        return shortlist and shortlist.close()

    def _run_open(self, number, shortlist, pace):
        """A batch for the open candidates. Returns the new pace."""
        ids = self.parts[number]
        batch = self.decoder.inputs(ids)
        rows = shortlist and shortlist.rows(self.decoder)
        best_pace = pace[self.lead] + self.exact[self.lead][number]
        kept = {self.lead: best_pace}
        for layer, hidden in without_each(self.decoder, batch, self.alive, self.open):
            if shortlist:
                self._see(layer, number, shortlist.bound(self.decoder, hidden, rows), exact=False)
            if layer in self.open and (not shortlist or self.sums[layer] * EQUAL <= best_pace):
                self._see(layer, number, batch_loss(self.decoder, hidden, ids))
                if layer in pace:
                    kept[layer] = pace[layer] + self.exact[layer][number]
                    best_pace = min(best_pace, kept[layer])
            self.bar.update(1)
        return kept

    def _see(self, layer, number, loss, exact=True):
        """Record the loss of a batch or a lower bound of it; close whom the best complete loss excludes."""
        self.sums[layer] += loss - self.floor[layer].get(number, 0.0)
        self.floor[layer][number] = loss
        if exact:
            self.exact[layer][number] = loss
            if self._is_complete(layer):
                self.open.discard(layer)
                self.best = min(self.best, self._total(layer))
        self.open -= {other for other in self.open if self.sums[other] * EQUAL > self.best}

    def _is_complete(self, layer):
        return len(self.exact[layer]) == len(self.parts)

    def _total(self, layer):
        """In the order of the batches, as a plain loop adds them."""
        return sum(self.exact[layer][number] for number in range(len(self.parts)))


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
