"""Result files: what is reused, kept, renamed and replaced, and where a killed call goes on; no model is run."""

import json
from types import SimpleNamespace

import pytest

from tests.artifacts import identity, mmlu_row, ppl_row
from tests.tiny import token_text, variant
from utils.artifacts import read_json
from utils.errors import UserError
from utils.evaluation.results import ResultFile

DENSE, ONE, TWO = variant(), variant("one", (2,)), variant("two", (3, 4))


@pytest.fixture
def call(tmp_path, capsys):
    """call(variants, parts, ...) -> ([(part, name) that were evaluated], what it printed), as the scripts do it."""

    def run(variants, parts, kind="mmlu", force=False, add=False, reuse=True, sha256="f" * 64, settings=0,
            killed=None, more=lambda rows: {"summary": [], "answer_tokens": {}}):
        model = identity(sha256=sha256)
        source = SimpleNamespace(sha256=sha256, label="tiny", json=lambda: model)
        watch = SimpleNamespace(provenance=lambda decoder: {"decoder": decoder})
        session = SimpleNamespace(source=source, watch=watch, dtype_name="float32", decoder="loaded")
        args = SimpleNamespace(out=tmp_path / "r.json", force=force, add=add)
        recipes = {part: {"model": sha256, "part": part, "settings": settings} for part in parts}
        done, field = [], {"mmlu": "subject", "ppl": "dataset"}[kind]
        file = ResultFile(args, kind, field, session, variants, recipes, reuse)
        try:
            for part, missing in file.evaluate(more):
                if part == killed:
                    raise KeyboardInterrupt
                for each in missing:
                    values = {"mmlu": mmlu_row, "ppl": ppl_row}[kind]("?", part, limit=settings)
                    file.put(part, each, values)
                    done.append((part, each.name))
        except KeyboardInterrupt:
            pass
        return done, capsys.readouterr().out

    return run


@pytest.fixture
def stored(tmp_path):
    """stored() -> content of the file; stored(change) applies a change to it first."""

    def read(change=None):
        content = json.loads((tmp_path / "r.json").read_text())
        if change is not None:
            change(content)
            (tmp_path / "r.json").write_text(json.dumps(content))
        return content

    return read


def places(content):
    return [(row["subject"], row["variant"]) for row in content["results"]]


def test_rows_stand_part_by_part_in_the_order_of_the_variants_and_say_what_they_are(call, stored):
    done, out = call([DENSE, ONE], ["a", "b"])
    assert done == places(stored()) == [("a", "dense"), ("a", "one"), ("b", "dense"), ("b", "one")]
    assert "reused" not in out
    row = stored()["results"][1]
    assert row["about"] == {"metric": None, "n": 1, "repair": "none", "stage": "pruned"} and row["removed"] == [2]
    assert row["dtype"] == "float32" and list(row)[:2] == ["variant", "subject"]
    assert len({row["sha256"] for row in stored()["results"]}) == 4


def test_equal_rows_are_reused_whatever_the_order(call, stored, tmp_path):
    call([DENSE, ONE], ["a", "b"])
    before = {(row["subject"], row["variant"]): row for row in stored()["results"]}
    done, out = call([ONE, DENSE], ["b", "a"])
    assert done == [] and f"{tmp_path / 'r.json'}: 4 of 4 rows reused (--force recomputes)" in out
    assert places(stored()) == [("b", "one"), ("b", "dense"), ("a", "one"), ("a", "dense")]
    assert {(row["subject"], row["variant"]): row for row in stored()["results"]} == before
    assert stored()["provenance"] == {"decoder": None}  # no weights were loaded


def test_only_what_is_missing_is_evaluated(call, stored):
    call([DENSE], ["a"])
    done, out = call([DENSE, ONE], ["a", "b"])
    assert done == [("a", "one"), ("b", "dense"), ("b", "one")] and "1 of 4 rows reused" in out
    assert stored()["provenance"] == {"decoder": "loaded"}
    call([DENSE, ONE], ["c", "b"])
    assert stored()["provenance"] == {"decoder": "loaded"}  # also where the last part was there already


def test_other_settings_another_model_and_another_variant_of_the_name_are_evaluated_anew(call, stored):
    call([DENSE, ONE], ["a"])
    assert call([DENSE, ONE], ["a"], settings=1)[0] == [("a", "dense"), ("a", "one")]
    done, out = call([DENSE, variant("one", (4,))], ["a"], settings=1)
    assert done == [("a", "one")] and "1 of 2 rows" in out and stored()["results"][1]["removed"] == [4]


def test_a_killed_call_goes_on_behind_the_last_finished_part(call, stored):
    call([DENSE, ONE], ["a", "b", "c"], killed="b")
    assert places(stored()) == [("a", "dense"), ("a", "one")]
    done, out = call([DENSE, ONE], ["a", "b", "c"])
    assert done == [("b", "dense"), ("b", "one"), ("c", "dense"), ("c", "one")] and "2 of 6 rows" in out
    interrupted = stored()["results"]
    call([DENSE, ONE], ["a", "b", "c"], force=True)
    assert stored()["results"] == interrupted


def test_a_killed_call_loses_no_row_of_later_parts(call, stored):
    call([DENSE], ["c"])
    call([DENSE], ["a", "b", "c"], killed="b")
    assert places(stored()) == [("a", "dense"), ("c", "dense")]


def test_without_add_other_rows_go_and_with_add_they_stay_in_front(call, stored):
    call([DENSE, ONE], ["a"])
    call([DENSE, TWO], ["a", "b"], add=True)
    assert places(stored()) == [("a", "one"), ("a", "dense"), ("a", "two"), ("b", "dense"), ("b", "two")]
    call([TWO], ["a"], add=True)
    assert places(stored()) == [("a", "one"), ("a", "dense"), ("b", "dense"), ("b", "two"), ("a", "two")]
    assert call([ONE], ["a"])[0] == [] and places(stored()) == [("a", "one")]


def test_add_keeps_rows_of_a_part_under_the_same_settings_only(call, stored):
    call([DENSE, ONE], ["a", "b"])
    call([DENSE, TWO], ["a"], add=True, settings=1)
    assert places(stored()) == [("b", "dense"), ("b", "one"), ("a", "dense"), ("a", "two")]


def test_add_drops_the_row_of_a_variant_that_changed_under_its_name(call, stored):
    call([DENSE, ONE], ["a"])
    call([variant("one", (4,))], ["a"], add=True)
    assert places(stored()) == [("a", "dense"), ("a", "one")] and stored()["results"][1]["removed"] == [4]


def test_force_reuses_nothing_and_keeps_others_only_with_add(call, stored):
    call([DENSE, ONE], ["a", "b"])
    done, out = call([DENSE], ["a"], force=True, add=True)
    assert done == [("a", "dense")] and "reused" not in out
    assert places(stored()) == [("a", "one"), ("b", "dense"), ("b", "one"), ("a", "dense")]
    call([DENSE], ["a"], force=True)
    assert places(stored()) == [("a", "dense")]


def test_without_reuse_rows_are_made_anew_and_others_stay_with_add(call, stored):
    call([DENSE, ONE], ["a"])
    assert call([DENSE], ["a"], add=True, reuse=False)[0] == [("a", "dense")]
    assert places(stored()) == [("a", "one"), ("a", "dense")]


def test_a_renamed_variant_brings_its_row_and_says_what_it_is_now(call, stored):
    call([ONE], ["a"])
    renamed = variant("mag", (2,), about={"metric": "mag"})
    done, _ = call([renamed], ["a"])
    row, = stored()["results"]
    assert done == [] and row["variant"] == "mag" and row["about"]["metric"] == "mag"


def test_twins_are_two_rows_of_one_content(call, stored):
    call([ONE], ["a"])
    done, out = call([variant("twin", (2,), about={"metric": "mag"}), ONE], ["a"], add=True)
    one, two = stored()["results"]
    assert done == [] and "2 of 2 rows" in out and [one["variant"], two["variant"]] == ["twin", "one"]
    assert one["sha256"] == two["sha256"] and (one["about"]["metric"], two["about"]["metric"]) == ("mag", None)
    call([variant("third", (2,))], ["a"], add=True)
    assert [row["variant"] for row in stored()["results"]] == ["twin", "one", "third"]


def test_rows_of_another_model_are_never_dropped_by_add(call, stored):
    call([DENSE], ["a"], sha256="0" * 64)
    before = stored()
    with pytest.raises(UserError, match="made for another model.*choose another --out"):
        call([DENSE], ["a"], add=True)
    assert stored() == before
    assert call([DENSE], ["a"])[0] == [("a", "dense")]


@pytest.mark.parametrize("change, words", [
    (lambda c: c.update(format="linearpatch/mmlu@1"), "earlier version"),
    (lambda c: c.pop("results"), "'results' is missing"),
    (lambda c: c["results"][0].update(items="01"), "row 1: is damaged"),
    (lambda c: c["results"][0].pop("sha256"), "'sha256' is missing")])
def test_a_damaged_or_earlier_file_stays_until_it_is_replaced(call, stored, tmp_path, change, words):
    call([DENSE], ["a"])
    stored(change)
    before = (tmp_path / "r.json").read_bytes()
    for flags, remedy in (({}, "--force recomputes it"), ({"add": True}, "--force without --add"),
                          ({"add": True, "force": True}, "--force without --add")):
        with pytest.raises(UserError, match=words) as caught:
            call([DENSE], ["a"], **flags)
        assert remedy in str(caught.value) and (tmp_path / "r.json").read_bytes() == before
    assert call([DENSE], ["a"], force=True)[0] == [("a", "dense")] and stored()["format"] == "linearpatch/mmlu@2"


def test_what_stands_beside_the_rows_is_made_from_all_of_them(call, stored):
    def more(rows):
        return {"summary": [{"rows": len(rows)}], "answer_tokens": {}}

    call([DENSE, ONE], ["a", "b"], more=more)
    assert stored()["summary"] == [{"rows": 4}]
    call([TWO], ["a"], add=True, more=more)
    assert stored()["summary"] == [{"rows": 5}]


def test_perplexities_are_such_rows_too(call, stored):
    assert call([DENSE, ONE], ["wiki"], kind="ppl", more=lambda rows: {})[0]
    done, out = call([DENSE, ONE], ["wiki"], kind="ppl", more=lambda rows: {})
    assert done == [] and "2 of 2 rows" in out and stored()["results"][0]["dataset"] == "wiki"


@pytest.mark.parametrize("corpus", ["c4", "c4-new", "wikitext2", "ptb", "ptb-new"])
def test_rows_of_every_kind_of_corpus_are_read_again(script, folders, tmp_path, corpus):
    """Random crops of documents drop no tokens that could be counted, a stream does."""
    words = [token_text(60, seed=seed) for seed in range(6)]
    for name, lines in {"c4/c4-validation.00000-of-00008.json": [json.dumps({"text": text}) for text in words],
                        "wikitext2/wiki.test.raw": words, "ptb/ptb.valid.txt": words,
                        "ptb/ptb.test.txt": words}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    command = ("eval_ppl", "--model", folders("llama"), "--datasets", corpus, "--data-dir", tmp_path, "--seq-len", 16,
               "--limit-windows", 2, "--out", tmp_path / "ppl.json")
    assert script(*command)[0] == 0
    assert read_json(tmp_path / "ppl.json", "ppl")["results"][0]["windows"] == 2
    code, out, _ = script(*command)
    assert code == 0 and "1 of 1 rows reused" in out
