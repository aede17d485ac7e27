"""Schemas of artifacts: a good one of each kind is read as it was written, a damaged field is named in one line."""

import copy
import json
import math

import pytest
import torch

from tests.artifacts import ABOUT, GOOD, identity, ppl_row
from utils.artifacts import HEADER, read_header, read_json, reusable, write_json, write_tensors
from utils.errors import UserError
from utils.schemas import SCHEMAS, problem

GONE = object()


def changed(content, path, value):
    """A copy of JSON `content` in which the entry at 'results.0.ppl' is `value`, or is GONE."""
    result = copy.deepcopy(content)
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = result
    for part in way:
        place = place[part]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return result


def test_every_kind_has_a_good_example_here():
    assert set(GOOD) == set(SCHEMAS)


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_artifact_is_read_as_it_was_written(tmp_path, kind):
    content = {**GOOD[kind], "a field of its own": [1, {"x": None}]}
    write_json(tmp_path / "a.json", kind, content)
    assert read_json(tmp_path / "a.json", kind) == {"format": f"linearpatch/{kind}@2", **content}


@pytest.mark.parametrize("kind, path, value", [
    ("selection", "model", "x"), ("selection", "model.num_layers", 0), ("selection", "removed.1", "2"),
    ("selection", "removed.0", -1), ("selection", "removed.0", True), ("selection", "removed.0", 2.0),
    ("selection", "removed", "23"), ("selection", "about", GONE), ("selection", "about.metric", 3),
    ("selection", "about.n", -1), ("selection", "about.n", True), ("selection", "about.repair", None),
    ("selection", "about.stage", "vanilla"), ("selection", "runs.0", [2]), ("selection", "recipe", []),
    ("patch", "about.repair", GONE), ("patch", "hadamard_order", "zzz"), ("patch", "training", []),
    ("patch", "kept", GONE), ("stats", "recipe", GONE), ("progress", "rounds", {}), ("checkpoint", "step", -1),
    ("checkpoint", "best", GONE), ("checkpoint", "best", "x"), ("teacher", "sha256", "abc"),
    ("teacher", "windows", [1]),
    ("figure", "csv_sha256", None), ("figure", "recipe", "long " * 100), ("overhead", "results.0.rows", [1])])
def test_a_damaged_field_is_named(kind, path, value):
    found = problem(kind, changed(GOOD[kind], path, value))
    assert f"'{path.removeprefix('results.0.')}" in found and ("missing" if value is GONE else "damaged") in found
    assert "\n" not in found and len(found) < 200


@pytest.mark.parametrize("kind, field, value", [
    ("ppl", "variant", None), ("ppl", "about.n", 1.5), ("ppl", "dataset", [1]), ("ppl", "ppl", "x"),
    ("ppl", "ppl", 0.0), ("ppl", "ppl", GONE), ("ppl", "ppl", math.inf), ("ppl", "window_nll", "abc"),
    ("ppl", "window_nll.1", None), ("ppl", "window_nll.1", math.nan), ("ppl", "ppl_ci95", [1.0]),
    ("ppl", "ppl_ci95", GONE),
    ("ppl", "windows", 0), ("ppl", "sha256", "abc"), ("ppl", "removed", [-2]), ("ppl", "corpus", None),
    ("qa", "n", GONE), ("qa", "n", 0), ("qa", "metric", "foo"), ("qa", "value", 3), ("qa", "acc_items", "01x1"),
    ("qa", "acc_norm_stderr", "x"), ("qa", "predictions", []), ("qa", "predictions.0", -1), ("qa", "task", GONE),
    ("mmlu", "predicted", GONE), ("mmlu", "predicted", {}), ("mmlu", "predicted.E", 0), ("mmlu", "n", "x"),
    ("mmlu", "category", "art"), ("mmlu", "accuracy", 7.5), ("mmlu", "items", ""), ("mmlu", "stderr", "x")])
def test_a_damaged_field_of_a_row_is_named_with_the_row(kind, field, value):
    content = {**GOOD[kind], "results": [GOOD[kind]["results"][0], changed(GOOD[kind]["results"][0], field, value)]}
    found = problem(kind, content)
    assert found.startswith(f"row 2: field '{field}") and "\n" not in found
    assert ("is missing" if value is GONE else "is damaged") in found


@pytest.mark.parametrize("kind, change, words", [
    ("ppl", {"window_nll": [1.0]}, "1 losses of 4 windows"), ("ppl", {"ppl": 3.01}, "ppl 3.01 or"),
    ("ppl", {"ppl": math.exp(1.15) * (1 + 1e-7)}, "is not of its mean loss 1.15"),
    ("ppl", {"nll_mean": 1.0}, "nll_mean"), ("ppl", {"window_nll": [800.0] * 4}, "mean loss 800"),
    ("qa", {"acc_norm_items": "01"}, "acc_norm has 2 items of 4"), ("qa", {"acc_items": "0001"}, "acc 0.5 is not"),
    ("qa", {"value": 0.25}, "value 0.25 is not its acc_norm"), ("qa", {"predictions": {"0": 3}}, "3 items of 4"),
    ("qa", {"predictions": {}, "constant": True}, "predictions of 0"), ("qa", {"acc_stderr": GONE}, "acc lacks"),
    ("qa", {"acc": GONE}, "acc lacks"), ("mmlu", {"items": "011"}, "accuracy has 3 items of 4"),
    ("mmlu", {"accuracy": 0.75}, "accuracy 0.75 is not"),
    ("mmlu", {"predicted": dict(A=1, B=1, C=1, D=0)}, "3 questions of 4")])
def test_numbers_that_do_not_agree_are_named(kind, change, words):
    row = {key: value for key, value in {**GOOD[kind]["results"][0], **change}.items() if value is not GONE}
    found = problem(kind, {**GOOD[kind], "results": [row]})
    assert found.startswith("row 1: is damaged (") and words in found and "\n" not in found


def test_what_may_be_absent():
    row = GOOD["qa"]["results"][0]
    for gone in (("acc", "acc_stderr", "acc_items"), ("predictions", "constant")):
        rows = [{key: value for key, value in row.items() if key not in gone}]
        assert problem("qa", {**GOOD["qa"], "results": rows}) is None
    one = ppl_row("v", "wiki", losses=[1.0], nll_stderr=None, ppl_ci95=None, ratio_ci95=None)
    assert problem("ppl", {"model": identity(), "results": [one]}) is None
    assert problem("selection", {**GOOD["selection"], "about": {**ABOUT, "metric": None}}) is None


@pytest.mark.parametrize("content, words", [
    ("{", "not a JSON file"), ("", "not a JSON file"), ("[" * 100000, "not a JSON file"),
    ("1" * 9999, "not a JSON file"), ("[1]", "no format field"),
    ('{"format": 3}', "found 3"), ('{"format": "linearpatch/qa@2"}', "expected a ppl"),
    ('{"format": "linearpatch/ppl@9"}', "ppl@9 is unknown here"), ('{"format": "linearpatch/ppl@2", "x": NaN}', "NaN"),
    ('{"format": "linearpatch/ppl@1", "results": []}', "ppl@1 was written by an earlier version; --force recomputes"),
    ('{"format": "linearpatch/ppl@2"}', "field 'model' is missing; --force recomputes")])
def test_other_files_are_refused_in_one_line_that_names_them(tmp_path, content, words):
    path = tmp_path / "ppl.json"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_json(path, "ppl")
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value) and "\n" not in str(caught.value)


def test_headers_of_tensors_are_checked_too(tmp_path):
    from safetensors.torch import save_file
    path, tensors = tmp_path / "p.safetensors", {"run0.d": torch.ones(4)}
    write_tensors(path, "patch", tensors, GOOD["patch"])
    assert read_header(path, "patch")["about"] == GOOD["patch"]["about"]
    for content, words in ((changed(GOOD["patch"], "about.n", "x"), "about.n"), ("{", "not a JSON")):
        text = content if content == "{" else json.dumps({"format": "linearpatch/patch@2", **content})
        save_file(tensors, path, {HEADER: text})
        with pytest.raises(UserError, match=words):
            read_header(path, "patch")


def test_force_replaces_an_artifact_of_an_earlier_version_and_nothing_else_does(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({**GOOD["selection"], "format": "linearpatch/selection@1"}))
    with pytest.raises(UserError, match="earlier version; --force recomputes"):
        reusable(path, "selection", {}, force=False)
    assert reusable(path, "selection", {}, force=True) is False
    with pytest.raises(UserError, match="holds a selection, which --force does not replace"):
        reusable(path, "figure", {}, force=True)


def test_a_number_beyond_all_floating_point_ones_is_refused_wherever_it_stands(tmp_path):
    write_json(tmp_path / "a.json", "selection", {**GOOD["selection"], "extra": 0.125})
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace("0.125", "1e999"))
    with pytest.raises(UserError, match="1e999"):
        read_json(tmp_path / "a.json", "selection")
