"""Metrics, legal ranges, runs and the paper's pruning ratios."""

import json
from importlib import resources

import pytest
import torch

from tests.tiny import ids, tiny
from utils.activations import Stats, collect
from utils.errors import UserError
from utils.hadamard import rotation
from utils.decoder import Decoder
from utils.selection import METRICS, n_for_ratio, parameter_accounting, runs_of, select


def stats_with(cosine, layers=6):
    table = torch.as_tensor(cosine, dtype=torch.float32)
    empty = torch.zeros(1, layers + 1, 4)
    angle = torch.arccos(table.clamp(-1, 1))[None] / torch.pi
    return Stats(empty, empty, table[None], table[None], angle, angle, torch.tensor([5]))


def collected(no_ops):
    return collect(Decoder(tiny(no_ops=no_ops)), ids(), rotation(64), progress=False)


@pytest.mark.parametrize("metric", [name for name, metric in METRICS.items() if metric.reads == "stats"])
def test_a_no_op_block_is_chosen(metric):
    selection = select(collected((2, 3)), metric, 2)
    assert selection.removed == (2, 3)


def test_protected_layers_are_never_chosen():
    stats = collected((4, 5))
    assert select(stats, "cosine", 2).removed != (4, 5)  # default range 1 <= start <= L-n-1
    assert select(stats, "cosine", 2, protect_last=0).removed == (4, 5)
    assert select(stats, "shortgpt", 2).removed == (4, 5)
    assert select(collected((2, 3)), "cosine", 2, protect_first=3).removed[0] >= 3
    with pytest.raises(UserError, match="only 1 of 6"):
        select(stats, "cosine", 2, protect_first=3, protect_last=2)


def test_every_candidate_has_a_score_and_ties_go_to_the_first():
    selection = select(stats_with(torch.ones(7, 7)), "cosine", 2)
    assert [(c["start"], c["end"]) for c in selection.scores] == [(1, 3), (2, 4), (3, 5)]
    assert selection.removed == (1, 2)


def test_negative_cosines_still_have_a_best():
    table = -torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) - 0.1
    table[3, 5] = -0.01
    assert select(stats_with(table), "cosine", 2).removed == (3, 4)


def test_shortgpt_is_not_contiguous_and_keeps_its_order():
    table = torch.zeros(7, 7)
    for layer, value in enumerate([0.1, 0.9, 0.2, 0.95, 0.3, 0.99]):
        table[layer, layer + 1] = value
    selection = select(stats_with(table), "shortgpt", 3)
    assert selection.order == (5, 3, 1) and selection.removed == (1, 3, 5)
    assert runs_of(selection.removed) == [(1, 2), (3, 4), (5, 6)]


def test_one_layer_by_cosine_is_one_layer_by_block_influence():
    stats = collected(())
    assert select(stats, "cosine", 1, 0, 0).removed == select(stats, "shortgpt", 1).removed


@pytest.mark.parametrize("removed, runs", [((), []), ((3,), [(3, 4)]), ((5, 1, 2), [(1, 3), (5, 6)]),
                                           (range(4), [(0, 4)])])
def test_runs(removed, runs):
    assert runs_of(removed) == runs


# p_layer and p_total of the paper's models, from their configs
SHAPES = {"llama2-7b": (202_383_360, 6_738_415_616, 32, 4096), "llama2-13b": (317_204_480, 13_015_864_320, 40, 5120),
          "llama3-8b": (218_112_000, 8_030_261_248, 32, 4096), "baichuan2-7b": (202_383_360, 7_505_973_248, 32, 4096)}


def test_the_papers_pruning_ratios():
    """All printed ratios of depth pruning, with and without one patch; the paper truncates in places."""
    paper = json.loads((resources.files("utils.paper") / "paper_results.json").read_text())["results"]
    checked = 0
    for row in paper:
        printed, n = row["values"].get("pruning_ratio"), row["n_pruned"]
        plain = row["method"] in ("sleb", "shortgpt", "llm-streamline-none")
        if row["table"] not in (1, 14, 15, 16) or row["model"] not in SHAPES or not printed or not n:
            continue
        if not plain and not row["method"].startswith("linearpatch"):
            continue
        layer, total, layers, hidden = SHAPES[row["model"]]
        ratio = parameter_accounting(total, [layer] * layers, range(10, 10 + n), hidden)
        found = ratio["ratio_percent" if plain else "ratio_with_patch_percent"]
        assert abs(found - printed) < 0.0101, (row["model"], n, row["method"], found, printed)
        checked += 1
    assert checked > 50


def test_ratio_finds_the_nearest_number_of_layers():
    assert n_for_ratio(0.27, 6_738_415_616, [202_383_360] * 32) == 9
    with pytest.raises(UserError, match="--ratio 25"):
        n_for_ratio(25, 100, [1])
