"""Metrics: which layers to remove. One function a metric; what it reads and keeps stands in its registration.

A metric of blocks gives the similarity of every pair (X^(start), X^(end)), a metric of layers one score a layer, and a
metric of sets chooses by itself. A contributor adds one function here; flags, help and README follow.
"""

import random
from dataclasses import dataclass
from functools import cached_property

import torch

from utils import gradients, search
from utils.errors import UserError, WorkError
from utils.evaluation.objectives import NextToken, perplexity
from utils.layers import Layers, check_count
from utils.search import Selection

PAPER = {"calib_samples": 128, "seq_len": 2048, "seed": 0}  # the published calibrations
SHORTENED_LLAMA = {"calib_samples": 10, "seq_len": 128, "seed": 1234}
METRICS = {}


@dataclass(frozen=True)
class Metric:
    """gives: "block", "layer" or "set" (module docstring); reads: "stats", "windows", "weights", "seed" or "nothing".

    protect: layers at the start and at the end that stay by default; calibration: the published one; larger_is_better:
    of blocks, where the best one goes; the layers with the lowest scores go.
    """

    name: str
    function: object
    help: str
    gives: str
    reads: str
    protect: tuple
    calibration: dict
    larger_is_better: bool


def metric(name, help, gives="layer", reads="stats", protect=(0, 0), calibration=PAPER, larger_is_better=False):
    """Decorator: register function(Evidence) (of sets: function(Evidence, n, first, last) -> Selection) as a metric."""

    def register(function):
        METRICS[name] = Metric(name, function, help, gives, reads, protect, calibration, larger_is_better)
        return function

    return register


class Evidence:
    """What metrics may read, each had when first asked for and once for all n.

    stats() -> Stats, windows() -> int64 [N, T] and decoder() -> Decoder are called at most once. rounds, after_round:
    where a search goes on, and what is called after each of its rounds; candidates: layers that may go.
    described(reads) -> (part of a recipe, calibration info or None) of what a metric reads.
    """

    def __init__(self, depth, stats=None, windows=None, decoder=None, seed=0, batch_size=1, described=None):
        self.depth, self.seed, self.batch_size, self.described = depth, seed, batch_size, described
        self._stats, self._windows, self._decoder = stats, windows, decoder
        self.rounds, self.after_round, self.scores, self.candidates = [], None, {}, range(depth)

    @cached_property
    def stats(self):
        return self._stats()

    @cached_property
    def windows(self):
        return self._windows()

    @cached_property
    def decoder(self):
        return self._decoder()

    def objective(self):
        return NextToken(self.decoder, self.windows, self.batch_size)


def protected_layers(name, n_prune, depth, protect_first=None, protect_last=None):
    """(layers that stay at the start, at the end) for a metric; None takes its default.

    Raises UserError unless `n_prune` layers may go.
    """
    first, last = METRICS[name].protect
    first, last = first if protect_first is None else protect_first, last if protect_last is None else protect_last
    check_count(n_prune, depth)
    if n_prune > depth - first - last:
        raise UserError(f"--n-prune {n_prune}: --metric {name} may remove only {max(depth - first - last, 0)} of "
                        f"{depth} layers (it keeps the first {first} and the last {last}; see --protect-first and "
                        "--protect-last)")
    return first, last


def choose(name, evidence, n_prune, protect_first=None, protect_last=None):
    """Selection of `n_prune` layers by a metric. Ties go to the lower index. Raises UserError when none is legal."""
    if n_prune == 0:
        return Selection(Layers(evidence.depth), (), ())
    found, (first, last) = METRICS[name], protected_layers(name, n_prune, evidence.depth, protect_first, protect_last)
    evidence.candidates = range(first, evidence.depth - last)
    if found.gives == "set":
        return found.function(evidence, n_prune, first, last)
    if name not in evidence.scores:
        evidence.scores[name] = found.function(evidence)
    if found.gives == "block":
        return best_block(evidence.scores[name], n_prune, first, last, found.larger_is_better)
    return lowest(evidence.scores[name], n_prune, first, last)


def best_block(similarity, n_prune, first, last, larger_is_better):
    """Selection of the contiguous block with the best entry [start, start + n] of float64 [L+1, L+1]."""
    depth = len(similarity) - 1
    scores = [{"start": start, "end": start + n_prune, "score": similarity[start, start + n_prune].item()}
              for start in range(first, depth - last - n_prune + 1)]
    sign = -1 if larger_is_better else 1
    best = min(scores, key=lambda row: (sign * row["score"], row["start"]))
    layers = Layers(depth, tuple(range(best["start"], best["end"])))
    return Selection(layers, layers.removed, tuple(scores))


def lowest(scores, n_prune, first, last):
    """Selection of the lowest of one score a layer, in rising order, the first and last layers left out.

    A smaller n is a prefix of a larger one's order.
    """
    rows = [{"layer": layer, "score": score} for layer, score in enumerate(scores)][first:len(scores) - last]
    order = tuple(row["layer"] for row in sorted(rows, key=lambda row: (row["score"], row["layer"]))[:n_prune])
    return Selection(Layers(len(scores), order), order, tuple(rows))


# ----- blocks: from the similarities of one forward pass


@metric("cosine", "eq. (2), one block; LLM-Streamline's", gives="block", protect=(1, 1), larger_is_better=True)
def cosine(evidence):
    """Mean over tokens of cos(X^(start)_t, X^(end)_t), over the released code's range 1 <= start <= L - n - 1."""
    return evidence.stats.mean("cosine")


@metric("cosine-sequence-axis", "what the released code computes, for comparison", gives="block", protect=(1, 1),
        larger_is_better=True)
def cosine_sequence_axis(evidence):
    """Mean over channels of the cosine along time."""
    return evidence.stats.mean("cosine_sequence")


@metric("angular", "Gromov et al., one block: angle at the last token of each window", gives="block", protect=(1, 1))
def angular(evidence):
    """arccos(cos(X^(start)_T, X^(end)_T)) / pi, averaged over windows."""
    return evidence.stats.mean("angle_last")


@metric("angular-all-tokens", "angular over all tokens", gives="block", protect=(1, 1))
def angular_all_tokens(evidence):
    """The angle at every token, averaged."""
    return evidence.stats.mean("angle_all")


# ----- single layers: the lowest scores go


@metric("shortgpt", "ShortGPT: block influence, single layers")
def shortgpt(evidence):
    """BI_j = 1 - E cos(X^(j), X^(j+1))."""
    similarity = evidence.stats.mean("cosine")
    return [1 - similarity[layer, layer + 1].item() for layer in range(evidence.depth)]


# "+", as published for 32 layers; the same numbers of layers at other depths
@metric("ppl+", "ppl; the first four layers and the last two stay", reads="windows", protect=(4, 2),
        calibration=SHORTENED_LLAMA)
@metric("ppl", "Shortened LLaMA: perplexity without each layer", reads="windows", calibration=SHORTENED_LLAMA)
def ppl(evidence):
    """Perplexity on the windows of the model without the layer; None where the layer stays anyway."""
    losses = search.removal_losses(evidence.decoder, evidence.objective(), evidence.candidates)
    scores = dict(zip(evidence.candidates, map(perplexity, losses)))
    return [scores.get(layer) for layer in range(evidence.depth)]


@metric("taylor+", "taylor; the first four layers and the last two stay", reads="windows", protect=(4, 2),
        calibration=SHORTENED_LLAMA)
@metric("taylor", "Shortened LLaMA: sum of abs(weight x gradient)", reads="windows", calibration=SHORTENED_LLAMA)
def taylor(evidence):
    """I_j = sum over the weights W of layer j, entry by entry, of |W * dL/dW|: list of L floats."""
    return taylor_scores(evidence.decoder, evidence.windows, evidence.batch_size)


def taylor_scores(decoder, input_ids, batch_size=1, progress=True):
    """The Taylor score of every layer on windows int64 [N, T]: list of L floats.

    L is the mean loss of all next tokens, so that the size of a batch does not matter: the gradient is summed over
    batches, in float32, inside the absolute value. Norms count, biases do not. Memory as in gradients.for_each_layer.
    Raises WorkError on a non-finite score.
    """
    tokens, scores = input_ids[:, 1:].numel(), [0.0] * decoder.num_layers

    def weights_of(index):
        return block_weights(decoder.layers[index])

    def score(index, found):
        total = sum(found[name].mul_(weight.detach()).abs_().sum(dtype=torch.float64).item()
                    for name, weight in weights_of(index).items())
        scores[index] = total / tokens

    gradients.for_each_layer(decoder, input_ids, weights_of, score, batch_size, label="taylor" if progress else None)
    for index, value in enumerate(scores):
        if not value < float("inf"):
            raise WorkError(f"{decoder.label}: the Taylor score of layer {index} is not finite; "
                            "use --dtype float32 or bfloat16")
    return scores


@metric("mag+", "mag; the first four layers and the last two stay", reads="weights", protect=(4, 2))
@metric("mag", "size of the weights", reads="weights")
def magnitude(evidence):
    """Sum of |W| over each layer's weights, list of L floats."""
    decoder = evidence.decoder
    scores = [sum(p.abs().sum(dtype=torch.float64).item() for p in block_weights(layer).values())
              for layer in decoder.layers]
    if not all(score < float("inf") for score in scores):
        raise WorkError(f"{decoder.label}: a layer has non-finite weights")
    return scores


def block_weights(layer):
    """{name: parameter} of a layer's weights, those of its norms included; all but biases."""
    return {name: p for name, p in layer.named_parameters() if not name.endswith("bias")}


@metric("random", "seeded draw", reads="seed", protect=(1, 1))
def uniform(evidence):
    """One uniform number a layer: the lowest n are n layers drawn without replacement."""
    generator = random.Random(evidence.seed)
    return [generator.random() for _ in range(evidence.depth)]


@metric("last", "the deepest but the last; the simple baseline of Gromov et al.", reads="nothing", protect=(0, 1))
def last(evidence):
    """0 for the last layer, so that the deepest layers rank first."""
    return [float(evidence.depth - 1 - layer) for layer in range(evidence.depth)]


# ----- sets


@metric("sleb", "SLEB: greedily, by the loss of the pruned model; the first and last layer left at each step stay",
        gives="set", reads="windows", protect=(1, 1))
def sleb(evidence, n_prune, first, last):
    """Greedy removal without a repair, by the loss of the next tokens."""
    selection = search.greedy(evidence.decoder, evidence.objective(), n_prune, first, last, rounds=evidence.rounds,
                              after_round=evidence.after_round)
    evidence.rounds = max(evidence.rounds, search.rounds_of(selection), key=len)
    return selection
