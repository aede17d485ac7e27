"""Which layers to remove: what each metric reads, the legal range, ranking, and the metrics that need no loss.

Layers are 0-based; a block is half-open, [start, end). A run is a maximal block of removed layers.
"""

import random
from dataclasses import dataclass

import torch

from utils.errors import UserError, WorkError

# metric -> (field of Stats, larger is better); the contiguous block with the best similarity goes
BLOCK_METRICS = {
    "cosine": ("cosine", True),  # eq. (2)
    "cosine-sequence-axis": ("cosine_sequence", True),  # the released code: parity only
    "angular": ("angle_last", False),  # Gromov et al.: last token of each window
    "angular-all-tokens": ("angle_all", False),
}


@dataclass(frozen=True)
class Metric:
    """reads: stats, windows, weights or nothing; layers at either end that stay by default."""

    reads: str
    protect_first: int
    protect_last: int


METRICS = {
    **{name: Metric("stats", 1, 1) for name in BLOCK_METRICS},  # the released code's range 1 <= start <= L-n-1
    "shortgpt": Metric("stats", 0, 0),
    "sleb": Metric("windows", 1, 1),  # of the layers that are left, anew after each removal
    "taylor": Metric("windows", 0, 0),
    "taylor+": Metric("windows", 4, 2),  # "+", as published for 32 layers; the same numbers at other depths
    "ppl": Metric("windows", 0, 0),
    "ppl+": Metric("windows", 4, 2),
    "mag": Metric("weights", 0, 0),
    "mag+": Metric("weights", 4, 2),
    "random": Metric("nothing", 1, 1),
    "last": Metric("nothing", 0, 1),  # the "simple" baseline of Gromov et al.
}


@dataclass(frozen=True)
class Selection:
    """removed: sorted layer indices; order: the same in order of removal; scores: one dict per candidate."""

    removed: tuple
    order: tuple
    scores: tuple

    @classmethod
    def stored(cls, content, path):
        """The Selection of a selection artifact. Raises UserError when its order or scores are damaged."""
        order, scores = content.get("order"), content.get("scores")
        if not (isinstance(order, list) and isinstance(scores, list) and all(type(layer) is int for layer in order)):
            raise UserError(f"{path}: order or scores are damaged; --force recomputes")
        return cls(tuple(sorted(order)), tuple(order), tuple(scores))


def runs_of(removed):
    """Maximal runs of removed layers as [(start, end), ...], half-open, in order."""
    runs = []
    for layer in sorted(removed):
        if runs and runs[-1][1] == layer:
            runs[-1] = (runs[-1][0], layer + 1)
        else:
            runs.append((layer, layer + 1))
    return runs


def kept_layers(num_layers, removed):
    """Sorted indices of the layers that stay."""
    removed = set(removed)
    return [layer for layer in range(num_layers) if layer not in removed]


def legal_range(metric, n_prune, num_layers, protect_first=None, protect_last=None):
    """(protected at the start, protected at the end) for `metric`; None takes its default.

    Raises UserError unless `n_prune` layers may go.
    """
    first = METRICS[metric].protect_first if protect_first is None else protect_first
    last = METRICS[metric].protect_last if protect_last is None else protect_last
    check_n_prune(n_prune, num_layers)
    if n_prune > num_layers - first - last:
        raise UserError(f"--n-prune {n_prune}: --metric {metric} may remove only "
                        f"{max(num_layers - first - last, 0)} of {num_layers} layers (it keeps the first {first} and "
                        f"the last {last}; see --protect-first and --protect-last)")
    return first, last


def select(stats, metric, n_prune, protect_first=None, protect_last=None):
    """Selection of `n_prune` layers by a metric that reads Stats.

    Layers 0..protect_first-1 and the last protect_last are never removed. Ties go to the lower index. Raises
    UserError when no legal candidate is left.
    """
    num_layers = stats.l1_raw.shape[1] - 1
    first, last = legal_range(metric, n_prune, num_layers, protect_first, protect_last)
    if metric == "shortgpt":  # BI_j = 1 - E cos(X^(j), X^(j+1))
        cosine = stats.mean("cosine")
        return one_shot([1 - cosine[j, j + 1].item() for j in range(num_layers)], n_prune, first, last)
    field, larger_is_better = BLOCK_METRICS[metric]
    similarity = stats.mean(field)
    scores = [{"start": start, "end": start + n_prune, "score": similarity[start, start + n_prune].item()}
              for start in range(first, num_layers - last - n_prune + 1)]
    sign = -1 if larger_is_better else 1
    best = min(scores, key=lambda c: (sign * c["score"], c["start"]))
    removed = tuple(range(best["start"], best["end"]))
    return Selection(removed, removed, tuple(scores))


def one_shot(scores, n_prune, first, last):
    """Selection of the `n_prune` lowest of one score a layer, in rising order, the first and last ones left out.

    Ties go to the lower index; a smaller n is a prefix of a larger one's order.
    """
    rows = [{"layer": layer, "score": score} for layer, score in enumerate(scores)][first:len(scores) - last]
    order = tuple(row["layer"] for row in sorted(rows, key=lambda row: (row["score"], row["layer"]))[:n_prune])
    return Selection(tuple(sorted(order)), order, tuple(rows))


def block_weights(layer):
    """{name: parameter} of a layer's weights, those of its norms included; all but biases."""
    return {name: p for name, p in layer.named_parameters() if not name.endswith("bias")}


def magnitudes(decoder):
    """Sum of |W| over each layer's weights, list of L floats."""
    scores = [sum(p.abs().sum(dtype=torch.float64).item() for p in block_weights(layer).values())
              for layer in decoder.layers]
    if not all(score < float("inf") for score in scores):
        raise WorkError(f"{decoder.label}: a layer has non-finite weights")
    return scores


def random_scores(num_layers, seed):
    """One uniform number a layer: the lowest n are n layers drawn without replacement."""
    generator = random.Random(seed)
    return [generator.random() for _ in range(num_layers)]


def distances_from_end(num_layers):
    """0 for the last layer, so that the deepest layers rank first."""
    return [float(num_layers - 1 - layer) for layer in range(num_layers)]


def check_n_prune(n_prune, num_layers):
    """Raise UserError unless 0 <= n_prune < num_layers."""
    if not 0 <= n_prune < num_layers:
        raise UserError(f"--n-prune {n_prune}: the model has {num_layers} layers; give 0 to {num_layers - 1}")


def n_for_ratio(ratio, total, per_layer):
    """The n whose removed parameters come closest to `ratio` (0..1) of all. Raises UserError outside (0, 1)."""
    if not 0 < ratio < 1:
        raise UserError(f"--ratio {ratio}: give a share of all parameters between 0 and 1, for instance 0.25")
    layer = sum(per_layer) / len(per_layer)
    return min(round(ratio * total / layer), len(per_layer) - 1)


def parameter_accounting(total, per_layer, removed, hidden_size):
    """Parameters before, removed and added by one dense patch per run, and the ratios of table 1 in percent.

    ratio_percent counts what is removed; ratio_with_patch_percent subtracts C^2 per run, as the paper's rows do.
    """
    gone = sum(per_layer[layer] for layer in removed)
    patch = hidden_size**2 * len(runs_of(removed))
    return {"before": total, "removed": gone, "patch": patch, "ratio_percent": 100 * gone / total,
            "ratio_with_patch_percent": 100 * (gone - patch) / total}
