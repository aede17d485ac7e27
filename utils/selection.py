"""Which layers to remove: the metrics of the cosine family, all read from the collected statistics.

Layers are 0-based; a block is half-open, [start, end). A run is a maximal block of removed layers.
"""

from dataclasses import dataclass

from utils.errors import UserError

# metric -> (field of Stats, larger is better, protected layers at each end by default)
BLOCK_METRICS = {
    "cosine": ("cosine", True, 1),  # eq. (2)
    "cosine-sequence-axis": ("cosine_sequence", True, 1),  # the released code: parity only
    "angular": ("angle_last", False, 1),  # Gromov et al.: last token of each window
    "angular-all-tokens": ("angle_all", False, 1),
}
METRICS = (*BLOCK_METRICS, "shortgpt")


@dataclass(frozen=True)
class Selection:
    """removed: sorted layer indices; order: the same in order of removal; scores: one dict per candidate."""

    removed: tuple
    order: tuple
    scores: tuple


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


def select(stats, metric, n_prune, protect_first=None, protect_last=None):
    """Selection of `n_prune` layers by `metric` from Stats.

    Layers 0..protect_first-1 and the last protect_last are never removed; by default one at each end for block
    metrics (the released code's range 1 <= start <= L-n-1), none for shortgpt. Ties go to the lower index.
    Raises UserError when no legal candidate is left.
    """
    num_layers = stats.l1_raw.shape[1] - 1
    default = BLOCK_METRICS[metric][2] if metric in BLOCK_METRICS else 0
    first = default if protect_first is None else protect_first
    last = num_layers - (default if protect_last is None else protect_last)
    check_n_prune(n_prune, num_layers)
    if n_prune > last - first:
        raise UserError(f"--n-prune {n_prune}: only {max(last - first, 0)} of {num_layers} layers may be removed "
                        f"(layers {first} to {last - 1}; see --protect-first and --protect-last)")
    if metric == "shortgpt":
        return _block_influence(stats, n_prune, first, last)
    field, larger_is_better, _ = BLOCK_METRICS[metric]
    similarity = stats.mean(field)
    scores = [{"start": start, "end": start + n_prune, "score": similarity[start, start + n_prune].item()}
              for start in range(first, last - n_prune + 1)]
    sign = -1 if larger_is_better else 1
    best = min(scores, key=lambda c: (sign * c["score"], c["start"]))
    removed = tuple(range(best["start"], best["end"]))
    return Selection(removed, removed, tuple(scores))


def _block_influence(stats, n_prune, first, last):
    """ShortGPT: BI_j = 1 - E cos(X^(j), X^(j+1)); the n lowest go, one shot, not necessarily contiguous."""
    cosine = stats.mean("cosine")
    scores = [{"layer": j, "score": 1 - cosine[j, j + 1].item()} for j in range(first, last)]
    order = tuple(c["layer"] for c in sorted(scores, key=lambda c: (c["score"], c["layer"]))[:n_prune])
    return Selection(tuple(sorted(order)), order, tuple(scores))


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
