"""MMLU: prompts, answer tokens, shared examples, averages; the paper's own tables."""

import csv
import json
import os
from importlib import resources
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split
from transformers import PreTrainedTokenizerFast

from tests.conftest import ROOT
from tests.tiny import save, tiny
from tests.tokenizers_for_tests import tok
from utils.errors import UserError
from utils.evaluation.mmlu import (CATEGORIES, CATEGORY_OF, QUESTIONS, SUBJECTS, Question, answer_tokens, encode,
                                   load_subjects, prompt, subject_row, summarise, weighted_average)
from utils.evaluation.qa import PAPER_TASKS, retained_performance

DATA = Path(os.environ.get("LINEARPATCH_DATA") or ROOT.parent / "shared" / "data")
needs_data = pytest.mark.skipif(not (DATA / "mmlu").is_dir(), reason=f"no MMLU in {DATA}")


def char_tokenizer():
    """One token a character, but ' A'..' D' are tokens of their own, as in byte-level vocabularies."""
    characters = [chr(c) for c in range(32, 127)] + ["\n", " A", " B", " C", " D", "?"]
    vocabulary = {c: i for i, c in enumerate(dict.fromkeys(["<unk>", *characters]))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    from tokenizers import Regex
    backend.pre_tokenizer = Sequence([Split(Regex(r" (?=[ABCD](\n|$))[ABCD]|[\s\S]"), "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def questions(count, letter="x"):
    return [Question(f"{letter}{i}?", ("a", "None", "NA", str(i)), i % 4) for i in range(count)]


def write_subject(folder, subject, dev, test):
    for split, rows in (("dev", dev), ("test", test)):
        path = folder / "mmlu" / "data" / split / f"{subject}_{split}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([q.question, *q.options, "ABCD"[q.answer]] for q in rows)


def test_the_prompt_of_the_benchmarks_authors():
    one = Question("1 + 1 = ?", ("1", "2", "3", "4"), 1)
    assert prompt("college_mathematics", [one], Question("2 + 2 = ?", ("4", "3", "2", "1"), 0)) == (
        "The following are multiple choice questions (with answers) about  college mathematics.\n\n"
        "1 + 1 = ?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: B\n\n2 + 2 = ?\nA. 4\nB. 3\nC. 2\nD. 1\nAnswer:")


def test_answer_tokens_bare_and_spaced_differ_where_the_vocabulary_does():
    tokenizer = char_tokenizer()
    bare, spaced = answer_tokens(tokenizer, "bare"), answer_tokens(tokenizer, "spaced")
    assert tokenizer.convert_ids_to_tokens(bare) == list("ABCD")
    assert tokenizer.convert_ids_to_tokens(spaced) == [" A", " B", " C", " D"]
    text = prompt("anatomy", questions(4), questions(1)[0])
    assert all(token in tokenizer(text).input_ids for token in spaced)  # the ids that the examples show


def test_answers_that_are_one_token_are_an_error():
    with pytest.raises(UserError, match="answer tokens are not distinct"):
        answer_tokens(tok(), "bare")


def test_shots_are_dropped_until_the_prompt_fits():
    tokenizer, examples = char_tokenizer(), questions(5)
    lengths = [len(tokenizer(prompt("anatomy", examples[:k], questions(1)[0])).input_ids) for k in range(6)]
    for shots in (5, 3, 0):
        by_shots, requests = encode("anatomy", examples, questions(1), tokenizer, [1, 2, 3, 4], lengths[shots])
        assert list(by_shots) == [shots] and len(requests[0][0].context) == lengths[shots]
    with pytest.raises(UserError, match="question 0"):
        encode("anatomy", examples, questions(1), tokenizer, [1, 2, 3, 4], lengths[0] - 1)


def test_options_stay_text(tmp_path):
    write_subject(tmp_path, "anatomy", questions(5), questions(3))
    examples, test = load_subjects(["anatomy"], tmp_path)["anatomy"]
    assert test[0].options == ("a", "None", "NA", "0") and len(examples) == 5


def test_a_missing_subject_is_listed_not_left_out(tmp_path):
    write_subject(tmp_path, "anatomy", questions(5), questions(3))
    with pytest.raises(UserError, match="1 of 2 subject files.*virology_dev.csv"):
        load_subjects(["anatomy", "virology"], tmp_path)
    with pytest.raises(UserError, match="unknown"):
        load_subjects(["alchemy"], tmp_path)


def test_micro_and_macro_averages_and_collapse():
    rows = [subject_row("anatomy", questions(4)[:1], [0]), subject_row("virology", questions(4)[1:], [0] * 3)]
    entry, = summarise([{**row, "variant": "v"} for row in rows])
    assert (entry["weighted_avg"], entry["macro_avg"]) == (0.25, 0.5)
    assert entry["collapsed"] and entry["predicted"]["A"] == 4 and entry["other"] == 0.25


@pytest.fixture
def char_folder(tmp_path):
    return save(tiny(vocab_size=128, max_position_embeddings=1024), tmp_path / "chars", char_tokenizer())


def test_shared_examples_give_the_predictions_of_plain_prompts(script, char_folder, tmp_path):
    for subject in ("anatomy", "virology"):
        write_subject(tmp_path, subject, questions(5, subject[0]), questions(9, subject[1]))
    code, out, err = script("eval_mmlu", "--model", char_folder, "--subjects", "anatomy", "virology", "--data-dir",
                            tmp_path, "--out", tmp_path / "mmlu.json", "--answer-tokens", "spaced")
    assert code == 0, err
    assert "answer tokens (spaced): A = " in out and "predicted letters" in out
    content = json.loads((tmp_path / "mmlu.json").read_text())
    model, tokenizer = tiny(vocab_size=128, max_position_embeddings=1024), char_tokenizer()
    letters = answer_tokens(tokenizer, "spaced")
    for row in content["results"]:
        examples, test = load_subjects([row["subject"]], tmp_path)[row["subject"]]
        right = ""
        for question in test:
            ids = torch.tensor([tokenizer(prompt(row["subject"], examples, question)).input_ids])
            with torch.no_grad():
                logits = model(ids).logits[0, -1]
            right += str(int(logits[letters].argmax() == question.answer))
        assert row["items"] == right and row["accuracy"] == pytest.approx(right.count("1") / 9)
    assert content["results"][0]["shots"] == {"5": 9}


def test_no_subject_file_writes_nothing(script, char_folder, tmp_path):
    code, _, err = script("eval_mmlu", "--model", char_folder, "--data-dir", tmp_path, "--out", tmp_path / "m.json")
    assert code == 2 and "57 of 57 subject files are missing" in err and "README" in err
    assert not (tmp_path / "m.json").exists()


def joined(folder, test):
    """MMLU in the joined layout: good examples, and the bytes of test.jsonl.gz."""
    import gzip
    row = {"subject": "anatomy", "question": "q", "choices": list("abcd"), "answer": 1}
    (folder / "mmlu").mkdir()
    (folder / "mmlu" / "dev.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (folder / "mmlu" / "test.jsonl.gz").write_bytes(test(gzip.compress, row))


@pytest.mark.parametrize("test", [
    lambda pack, row: bytes(b ^ 0x55 if i == 14 else b for i, b in enumerate(pack(json.dumps(row).encode()))),
    lambda pack, row: pack(json.dumps(row).encode())[:-9], lambda pack, row: pack(b"[" * 100000),
    lambda pack, row: pack(json.dumps({**row, "question": "\ud800"}).encode()),
    lambda pack, row: pack(json.dumps({**row, "choices": ["a", "b", "c", "\udfff"]}).encode())],
    ids=["flipped", "cut", "deep", "half of a pair", "half of a pair in an option"])
def test_damaged_joined_files_are_named(tmp_path, test):
    joined(tmp_path, test)
    with pytest.raises(UserError, match="test.jsonl.gz.*line 1"):
        load_subjects(["anatomy"], tmp_path)


def test_a_question_too_long_in_the_last_subject_is_said_before_any_work(script, char_folder, tmp_path):
    write_subject(tmp_path, "anatomy", questions(5), questions(3))
    write_subject(tmp_path, "virology", questions(5), [Question("x" * 2000, tuple("abcd"), 0)])
    code, _, err = script("eval_mmlu", "--model", char_folder, "--subjects", "anatomy", "virology", "--data-dir",
                          tmp_path, "--out", tmp_path / "m.json")
    assert code == 2 and "virology, question 0" in err and not (tmp_path / "m.json").exists()


def test_damaged_rows_are_refused_and_stay(script, char_folder, tmp_path):
    write_subject(tmp_path, "anatomy", questions(5), questions(3))
    command = ("--model", char_folder, "--subjects", "anatomy", "--data-dir", tmp_path, "--out", tmp_path / "m.json")
    assert script("eval_mmlu", *command)[0] == 0
    content = json.loads((tmp_path / "m.json").read_text())
    content["results"][0]["predicted"]["A"] += 1
    (tmp_path / "m.json").write_text(json.dumps(content))
    before = (tmp_path / "m.json").read_bytes()
    code, _, err = script("eval_mmlu", *command)
    assert code == 2 and "row 1: is damaged (predicted letters of 4 questions of 3)" in err and "--force" in err
    assert (tmp_path / "m.json").read_bytes() == before
    assert script("eval_mmlu", *command, "--force")[0] == 0


def test_force_with_add_keeps_the_rows_of_other_subjects(script, char_folder, tmp_path):
    for subject in ("anatomy", "virology"):
        write_subject(tmp_path, subject, questions(5), questions(3))
        code, out, err = script("eval_mmlu", "--model", char_folder, "--subjects", subject, "--data-dir", tmp_path,
                                "--out", tmp_path / "m.json", "--add", "--force")
        assert code == 0, err
    rows = json.loads((tmp_path / "m.json").read_text())["results"]
    assert [row["subject"] for row in rows] == ["anatomy", "virology"]


def test_add_never_drops_the_rows_of_another_model(script, char_folder, tmp_path):
    write_subject(tmp_path, "anatomy", questions(5), questions(3))
    other = save(tiny(vocab_size=128, max_position_embeddings=1024, seed=1), tmp_path / "other", char_tokenizer())
    command = ("--subjects", "anatomy", "--data-dir", tmp_path, "--out", tmp_path / "m.json", "--add")
    assert script("eval_mmlu", "--model", other, *command)[0] == 0
    before = (tmp_path / "m.json").read_bytes()
    code, _, err = script("eval_mmlu", "--model", char_folder, *command)
    assert code == 2 and "made for another model" in err and (tmp_path / "m.json").read_bytes() == before


def test_a_tokenizer_that_drops_the_letters_has_no_answers():
    from tokenizers.models import BPE
    with pytest.raises(UserError, match="not distinct"):
        answer_tokens(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"x": 0}, []))), "bare")


def test_one_question_is_no_collapse():
    assert summarise([{**subject_row("anatomy", questions(1), [0]), "variant": "v"}])[0]["collapsed"] is False


def test_57_subjects_in_four_categories():
    assert len(SUBJECTS) == 57 and {c: len(s.split()) for c, s in CATEGORIES.items()} == {
        "stem": 18, "humanities": 13, "social_sciences": 12, "other": 14}


@needs_data
def test_the_real_files_have_the_papers_numbers_of_questions():
    counts = dict.fromkeys(QUESTIONS, 0)
    for subject, (examples, test) in load_subjects(SUBJECTS, DATA).items():
        assert len(examples) == 5
        counts[CATEGORY_OF[subject]] += len(test)
    assert counts == QUESTIONS and sum(counts.values()) == 14042


# ----- the paper's tables from their own columns

PAPER = json.loads((resources.files("utils.paper") / "paper_results.json").read_text())["results"]
TASKS = list(PAPER_TASKS)
# (table, model, layers, method, column): cells that do not follow from their row, and what the row gives.
DO_NOT_ADD_UP = {
    (9, "llama2-7b", 7, "linearpatch", "qa_avg"): 62.42, (10, "llama2-7b", 7, "linearpatch", "qa_avg"): 62.42,
    (16, "baichuan2-7b", 7, "linearpatch[S/L]", "mmlu_weighted_avg"): 52.04,
}


def cell(row, column):
    return (row["table"], row["model"], row["n_pruned"], row["method"], column)


def dense_of(row):
    return next(r for r in PAPER
                if r["table"] == row["table"] and r["model"] == row["model"] and r["method"] == "dense")


def test_every_printed_average_and_retained_performance():
    found, checked = {}, 0
    for row in PAPER:
        values = row["values"]
        derived = {}
        if all(task in values for task in TASKS):
            derived["qa_avg"] = sum(values[task] for task in TASKS) / 9
            if "retained_performance" in values:
                derived["retained_performance"] = retained_performance(
                    {task: values[task] for task in TASKS}, dense_of(row)["values"])
        if all(name in values for name in ("wikitext2", "c4", "ptb", "ppl_avg")):
            derived["ppl_avg"] = (values["wikitext2"] + values["c4"] + values["ptb"]) / 3
        if "mmlu_weighted_avg" in values:
            derived["mmlu_weighted_avg"] = weighted_average(
                *(values[f"mmlu_{name}"] for name in ("stem", "humanities", "social_sciences", "other")))
        for column, value in derived.items():
            checked += 1
            if abs(value - values[column]) > 0.0151:  # half a unit of each input and of the printed value, truncation
                found[cell(row, column)] = round(value, 2)
    assert found == DO_NOT_ADD_UP and checked > 200
