"""The set of removed layers of a model: what stays, its runs, and where a layer stands after the cut.

Layers are 0-based. A run is a maximal block of removed layers, half-open: [start, end).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from utils.errors import UserError

PUBLISHED = Path(__file__).parent / "paper" / "paper_results.json"


@dataclass(frozen=True)
class Layers:
    """Layers removed from a model that has `depth` of them; `removed` is a sorted tuple, at least one layer stays.

    Raises UserError on a layer that the model does not have, one named twice, or when none would stay.
    """

    depth: int
    removed: tuple = ()

    def __post_init__(self):
        removed = tuple(sorted(self.removed))
        if removed and not 0 <= removed[0] <= removed[-1] < self.depth:
            wrong = removed[0] if removed[0] < 0 else removed[-1]
            raise UserError(f"layer {wrong} cannot be removed: the model has layers 0 to {self.depth - 1}")
        if len(set(removed)) < len(removed):
            raise UserError(f"a layer is named twice in {list(removed)}")
        check_count(len(removed), self.depth)
        object.__setattr__(self, "removed", removed)

    @classmethod
    def of(cls, content, depth, path):
        """The Layers of an artifact (field `removed`) for a model of `depth` layers. Raises UserError naming `path`."""
        removed = content.get("removed")
        try:
            if isinstance(removed, list) and all(type(layer) is int for layer in removed):
                return cls(depth, tuple(removed))
        except UserError:
            pass
        raise UserError(f"{path}: field 'removed' is no list of distinct layers from 0 to {depth - 1}: {removed}")

    @property
    def kept(self):
        """Sorted list of the layers that stay."""
        gone = set(self.removed)
        return [layer for layer in range(self.depth) if layer not in gone]

    @property
    def runs(self):
        """[(start, end), ...] of the maximal blocks of removed layers, in order."""
        starts = [layer for layer in self.removed if layer - 1 not in self.removed]
        ends = [layer + 1 for layer in self.removed if layer + 1 not in self.removed]
        return list(zip(starts, ends))

    def position(self, index):
        """Number of kept layers before layer `index` (0..depth) of the intact model: its index after the cut."""
        return index - sum(layer < index for layer in self.removed)

    def json(self):
        """What every artifact says about its layers."""
        return {"removed": list(self.removed), "kept": self.kept, "runs": [list(run) for run in self.runs]}

    def __str__(self):
        return ", ".join(f"[{start}, {end})" for start, end in self.runs) or "none"


def check_count(n_prune, depth):
    """Raise UserError unless 0 <= n_prune < depth."""
    if not 0 <= n_prune < depth:
        raise UserError(f"--n-prune {n_prune}: the model has {depth} layers; give 0 to {depth - 1}")


def count_for_ratio(ratio, total, per_layer):
    """The n whose removed parameters come closest to `ratio` (0..1) of all. Raises UserError outside (0, 1)."""
    if not 0 < ratio < 1:
        raise UserError(f"--ratio {ratio}: give a share of all parameters between 0 and 1, for instance 0.25")
    layer = sum(per_layer) / len(per_layer)
    return min(round(ratio * total / layer), len(per_layer) - 1)


def parameter_accounting(total, per_layer, layers, hidden_size):
    """Parameters before, removed and added by one dense patch per run, and the ratios of table 1 in percent.

    ratio_percent counts what is removed; ratio_with_patch_percent subtracts C^2 per run, as the paper's rows do.
    """
    gone, patch = sum(per_layer[layer] for layer in layers.removed), hidden_size**2 * len(layers.runs)
    return {"before": total, "removed": gone, "patch": patch, "ratio_percent": 100 * gone / total,
            "ratio_with_patch_percent": 100 * (gone - patch) / total}


def published_layers(model, method, n_prune):
    """Removed layers, in the paper's order, of table 7 for a preset. Raises UserError listing what there is."""
    table = json.loads(PUBLISHED.read_text(encoding="utf-8"))["selections"]
    rows = [row for row in table if row["model"] == model]
    if not rows:
        raise UserError(f"--layers paper: table 7 has no row for {model}; it has "
                        f"{', '.join(sorted({row['model'] for row in table}))}")
    wanted = (method,) if method else ("linearpatch[S/L]", "linearpatch[L]")
    named = [row for row in rows if row["method"] in wanted and n_prune in (None, row["n_pruned"])]
    if len(named) != 1:
        choices = ", ".join(f"paper:{row['method']} --n-prune {row['n_pruned']}" for row in rows)
        raise UserError(f"--layers paper: {len(named)} rows of table 7 fit; choose one of\n{choices}")
    return named[0]["removed_layers"]
