"""Searches for the layers to remove: every candidate is the model that would result, repaired, under an objective.

Candidates share the layers that they have in common. The greedy search gives up a candidate once a lower bound of its
loss exceeds the best complete loss, so that it removes the layers that a search with every loss would remove.
"""

import math
from dataclasses import dataclass

import torch
from tqdm import tqdm

from utils.decoder import Variant, run_variants
from utils.errors import UserError
from utils.layers import Layers

EQUAL = 1 - 1e-12  # sums of the same numbers in another order


@dataclass(frozen=True)
class Selection:
    """layers: Layers; order: the removed ones in order of removal; scores: one dict a candidate."""

    layers: Layers
    order: tuple
    scores: tuple

    @classmethod
    def stored(cls, content, depth, path):
        """The Selection of a selection artifact. Raises UserError when its order does not fit its layers."""
        layers = Layers.of(content, depth, path)
        if sorted(content["order"]) != list(layers.removed):
            raise UserError(f"{path}: its removed layers were edited and do not follow from its recipe; "
                            "use --layers for a list of your own, or --force")
        return cls(layers, tuple(content["order"]), tuple(content["scores"]))


def unrepaired(layers):
    """The repair that does nothing: {end of run: module} of the empty kind."""
    return {}


def without(depth, removed, repair=unrepaired):
    """The Variant that lacks these layers, repaired by repair(Layers) -> {end of run: module}."""
    layers = Layers(depth, tuple(removed))
    return Variant("candidate", layers, repair(layers))


@torch.no_grad()
def removal_losses(decoder, objective, candidates, repair=unrepaired, progress=True):
    """Mean loss, nats a token, of the model without each one of `candidates` (layers), in their order."""
    variants, totals = [without(decoder.num_layers, [layer], repair) for layer in candidates], [0.0] * len(candidates)
    work = len(objective.batches) * len(variants)
    with tqdm(total=work, desc="single removals", unit="run", disable=not progress) as bar:
        for number in range(len(objective.batches)):

            def leaf(index, hidden):
                totals[index] += objective.loss(number, hidden)
                bar.update(1)

            run_variants(decoder, objective.inputs(number), variants, leaf)
    return [total / objective.tokens for total in totals]


@torch.no_grad()
def greedy(decoder, objective, n_prune, first=0, last=0, repair=unrepaired, rounds=(), after_round=None,
           progress=True):
    """Selection by removing, `n_prune` times, the layer whose absence costs least: SLEB with first = last = 1.

    Of the layers that are left the `first` and `last` ones stay. Each candidate is judged as `repair` repairs it.
    rounds: what an interrupted search had finished; after_round(rounds) is called after each. Scores are mean losses,
    nats a token; those of candidates that were given up are lower bounds, complete=False. Ties go to the lower index.
    """
    rounds, depth, batches = list(rounds)[:n_prune], decoder.num_layers, len(objective.batches)
    work = [batches * (depth - first - last - number) for number in range(n_prune)]
    with tqdm(total=sum(work), initial=sum(work[:len(rounds)]), desc="greedy", unit="run", disable=not progress) as bar:
        while len(rounds) < n_prune:
            removed = [done["layer"] for done in rounds]
            candidates = _open(depth, removed, first, last)
            variants = {layer: without(depth, [*removed, layer], repair) for layer in candidates}
            race = _Race(decoder, objective, variants, _promising(candidates, rounds), bar)
            layer = race.winner()
            bar.update(sum(work[:len(rounds) + 1]) - bar.n)  # what was given up
            rounds.append({"layer": layer, "scores": race.scores(len(rounds) + 1)})
            if after_round is not None:
                after_round(rounds)
    order = tuple(done["layer"] for done in rounds)
    return Selection(Layers(depth, order), order, tuple(row for done in rounds for row in done["scores"]))


def _open(depth, removed, first, last):
    """The layers that a round may remove."""
    alive = Layers(depth, tuple(removed)).kept
    return alive[first:len(alive) - last]


def rounds_of(selection):
    """The rounds of a greedy search from its Selection."""
    return [{"layer": layer, "scores": [row for row in selection.scores if row.get("round") == number]}
            for number, layer in enumerate(selection.order, 1)]


def checked_rounds(rounds, depth, first, last, path):
    """Finished rounds of a greedy search, if each removed its best candidate. UserError when they are damaged."""
    removed = []
    try:
        for done in rounds:
            losses = {row["layer"]: row["score"] for row in done["scores"] if row["complete"]}
            fits = sorted(row["layer"] for row in done["scores"]) == _open(depth, removed, first, last)
            if not fits or done["layer"] != min(losses, key=lambda layer: (losses[layer], layer)):
                raise ValueError
            removed.append(done["layer"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: its rounds are damaged; delete it, or --force starts anew") from None
    return rounds


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

    def __init__(self, decoder, objective, variants, lead, bar):
        self.decoder, self.objective, self.variants, self.lead, self.bar = decoder, objective, variants, lead, bar
        self.exact = {layer: {} for layer in variants}  # batch -> its loss
        self.floor = {layer: {} for layer in variants}  # batch -> lower bound of its loss; unseen batches: 0
        self.sums = dict.fromkeys(variants, 0.0)  # of `floor`
        self.open = set(variants) - {lead}
        self.best = math.inf

    def winner(self):
        """The layer to remove."""
        batches = range(len(self.objective.batches))
        for number in batches:
            self._run_alone(self.lead, number, learn=True)
            self.bar.update(1)
        hard_first = sorted(batches, key=lambda number: -self.exact[self.lead][number])
        pace = {self.lead: 0.0}  # loss so far of those that have every loss so far
        for number in hard_first:
            pace = self._run_open(number, pace)
        for layer in sorted(self.open, key=lambda layer: (self.sums[layer], layer)):
            for number in hard_first:
                if layer in self.open and number not in self.exact[layer]:
                    self._run_alone(layer, number)
        complete = [layer for layer in self.exact if self._is_complete(layer)]
        return min(complete, key=lambda layer: (self._total(layer), layer))

    def scores(self, number):
        """One row a candidate; batches: how many of them its loss or bound was computed on."""
        rows = []
        for layer in self.exact:
            complete = self._is_complete(layer)
            total = self._total(layer) if complete else self.sums[layer]
            rows.append({"round": number, "layer": layer, "score": total / self.objective.tokens, "complete": complete,
                         "batches": len(self.floor[layer])})
        return rows

    def _run_alone(self, layer, number, learn=False):
        """The loss of one candidate on a batch."""
        run_variants(self.decoder, self.objective.inputs(number), [self.variants[layer]],
                     lambda _, hidden: self._see(layer, number, self.objective.loss(number, hidden, learn)))

    def _run_open(self, number, pace):
        """A batch for the open candidates. Returns the new pace."""
        bound = self.objective.lower_bound(number)
        best_pace = pace[self.lead] + self.exact[self.lead][number]
        kept, layers = {self.lead: best_pace}, [layer for layer in self.variants if layer in self.open]

        def leaf(index, hidden):
            nonlocal best_pace
            layer = layers[index]
            if bound:
                self._see(layer, number, bound(hidden), exact=False)
            if layer in self.open and (not bound or self.sums[layer] * EQUAL <= best_pace):
                self._see(layer, number, self.objective.loss(number, hidden))
                if layer in pace:
                    kept[layer] = pace[layer] + self.exact[layer][number]
                    best_pace = min(best_pace, kept[layer])
            self.bar.update(1)

        run_variants(self.decoder, self.objective.inputs(number), [self.variants[layer] for layer in layers], leaf,
                     wanted=lambda index: layers[index] in self.open)
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
        return len(self.exact[layer]) == len(self.objective.batches)

    def _total(self, layer):
        """In the order of the batches, as a plain loop adds them."""
        return sum(self.exact[layer][number] for number in range(len(self.objective.batches)))
