"""Layers against brute force over all sets of removed layers, its JSON, wrong input; the paper's pruning ratios."""

import json
from importlib import resources
from itertools import combinations

import pytest

from utils.errors import UserError
from utils.layers import Layers, count_for_ratio, parameter_accounting, published_layers

SETS = [removed for count in range(6) for removed in combinations(range(6), count)]


@pytest.mark.parametrize("removed", SETS)
def test_every_property_equals_brute_force(removed):
    layers = Layers(6, removed[::-1])
    kept = [layer for layer in range(6) if layer not in removed]
    runs = [(start, end) for start in range(6) for end in range(start + 1, 7)
            if set(range(start, end)) <= set(removed) and start - 1 not in removed and end not in removed]
    assert layers.removed == removed and layers.kept == kept and layers.runs == sorted(runs)
    assert [layers.position(index) for index in range(7)] == [len([k for k in kept if k < index]) for index in range(7)]
    assert [layers.position(layer) for layer in kept] == list(range(len(kept)))
    assert layers.json() == {"removed": list(removed), "kept": kept, "runs": [list(run) for run in runs]}
    assert Layers.of(json.loads(json.dumps(layers.json())), 6, "x.json") == layers == Layers(6, removed)
    assert hash(layers) == hash(Layers(6, removed))
    assert str(layers) == (", ".join(f"[{start}, {end})" for start, end in runs) or "none")


@pytest.mark.parametrize("removed, runs", [((), []), ((3,), [(3, 4)]), ((5, 1, 2), [(1, 3), (5, 6)]),
                                           (range(4), [(0, 4)])])
def test_runs(removed, runs):
    assert Layers(7, removed).runs == runs


def test_layers_cannot_be_changed():
    with pytest.raises(AttributeError):
        Layers(6, (1,)).removed = (2,)


@pytest.mark.parametrize("removed, message", [
    ((6,), "layer 6 cannot be removed: the model has layers 0 to 5"), ((-1, 2), "layer -1 cannot be removed"),
    ((2, 3, 2), "named twice"), (range(6), "has 6 layers")])
def test_impossible_layers(removed, message):
    with pytest.raises(UserError, match=message):
        Layers(6, tuple(removed))


@pytest.mark.parametrize("removed", [[2, 99], [-1, 2], ["2", "3"], "23", {}, None, 3, [2.0, 3.5], [True, False], [[2]],
                                     [0, 1, 2, 3, 4, 5], [2, 2]])
def test_an_artifact_without_possible_layers_is_named(removed):
    with pytest.raises(UserError, match="some/file.json: field 'removed' is no list of distinct layers from 0 to 5"):
        Layers.of({"removed": removed}, 6, "some/file.json")
    with pytest.raises(UserError, match="some/file.json"):
        Layers.of({}, 6, "some/file.json")


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
        layer, total, depth, hidden = SHAPES[row["model"]]
        ratio = parameter_accounting(total, [layer] * depth, Layers(depth, tuple(range(10, 10 + n))), hidden)
        found = ratio["ratio_percent" if plain else "ratio_with_patch_percent"]
        assert abs(found - printed) < 0.0101, (row["model"], n, row["method"], found, printed)
        checked += 1
    assert checked > 50


def test_ratio_finds_the_nearest_number_of_layers():
    assert count_for_ratio(0.27, 6_738_415_616, [202_383_360] * 32) == 9
    with pytest.raises(UserError, match="--ratio 25"):
        count_for_ratio(25, 100, [1])


def test_published_layers_are_those_of_table_7():
    rows = json.loads((resources.files("utils.paper") / "paper_results.json").read_text())["selections"]
    for row in rows:
        found = published_layers(row["model"], row["method"], row["n_pruned"])
        assert found == row["removed_layers"] and len(found) == row["n_pruned"]
    with pytest.raises(UserError, match="table 7 has no row for tiny"):
        published_layers("tiny", "", None)
    with pytest.raises(UserError, match="choose one of"):
        published_layers(rows[0]["model"], "no-such-method", None)
