"""MMLU, five-shot, by the protocol of its authors' code (Hendrycks et al.): prompts, subjects, categories, averages."""

import csv
import gzip
import hashlib
import json
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from utils.data.corpora import hub_file, is_text
from utils.data.tokens import tokenise
from utils.errors import UserError
from utils.evaluation.scoring import Request

LETTERS = "ABCD"
SHOTS = 5
PROMPT_TOKENS = 2048  # examples are dropped until a prompt fits
CATEGORIES = {  # the paper's grouping, that of the authors' code: 3018, 4705, 3077 and 3242 questions
    "stem": "abstract_algebra astronomy college_biology college_chemistry college_computer_science college_mathematics "
            "college_physics computer_security conceptual_physics electrical_engineering elementary_mathematics "
            "high_school_biology high_school_chemistry high_school_computer_science high_school_mathematics "
            "high_school_physics high_school_statistics machine_learning",
    "humanities": "formal_logic high_school_european_history high_school_us_history high_school_world_history "
                  "international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy "
                  "prehistory professional_law world_religions",
    "social_sciences": "econometrics high_school_geography high_school_government_and_politics "
                       "high_school_macroeconomics high_school_microeconomics high_school_psychology human_sexuality "
                       "professional_psychology public_relations security_studies sociology us_foreign_policy",
    "other": "anatomy business_ethics clinical_knowledge college_medicine global_facts human_aging management "
             "marketing medical_genetics miscellaneous nutrition professional_accounting professional_medicine "
             "virology",
}
CATEGORY_OF = {subject: category for category, subjects in CATEGORIES.items() for subject in subjects.split()}
SUBJECTS = sorted(CATEGORY_OF)
QUESTIONS = {"stem": 3018, "humanities": 4705, "social_sciences": 3077, "other": 3242}


@dataclass(frozen=True)
class Question:
    """question and options are text as in the file ('None' and 'NA' included); answer 0..3."""

    question: str
    options: tuple
    answer: int


def load_subjects(subjects, data_dir=None):
    """{subject: (examples, test questions)}, from local files or the hub. Raises UserError listing what is missing."""
    unknown = [subject for subject in subjects if subject not in CATEGORY_OF]
    if unknown:
        raise UserError(f"--subjects {' '.join(unknown)}: unknown; MMLU has {', '.join(SUBJECTS)}")
    if data_dir is None:
        tables = {split: _by_subject(_hub_rows(split)) for split in ("dev", "test")}
    else:
        tables = _local_tables(Path(data_dir) / "mmlu", subjects)
    missing = [s for s in subjects if not tables["dev"].get(s) or not tables["test"].get(s)]
    if missing:
        raise UserError(f"MMLU: no questions for {', '.join(missing)}")
    return {subject: (tables["dev"][subject], tables["test"][subject]) for subject in subjects}


def _local_tables(folder, subjects):
    """Official layout data/{dev,test}/<subject>_{split}.csv, or {dev,test}.jsonl[.gz] with a field `subject`."""
    tables = {}
    for split in ("dev", "test"):
        files = {subject: folder / "data" / split / f"{subject}_{split}.csv" for subject in subjects}
        joined = next((p for p in (folder / f"{split}.jsonl.gz", folder / f"{split}.jsonl") if p.is_file()), None)
        if not any(path.is_file() for path in files.values()) and joined is not None:
            tables[split] = _by_subject(_jsonl_rows(joined))
            continue
        absent = [str(path) for path in files.values() if not path.is_file()]
        if absent:
            raise UserError(f"MMLU: {len(absent)} of {len(files)} subject files are missing under --data-dir, first "
                            f'{absent[0]};\nsee README, section "Data"')
        tables[split] = {subject: _csv_questions(path) for subject, path in files.items()}
    return tables


def _csv_questions(path):
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a csv file in UTF-8 ({error})") from None
    for number, row in enumerate(rows, 1):
        if len(row) != 6 or row[5].strip() not in tuple(LETTERS):
            raise UserError(f"{path}, record {number}: expected question, A, B, C, D, letter")
    return [Question(row[0], tuple(row[1:5]), LETTERS.index(row[5].strip())) for row in rows]


def _jsonl_rows(path):
    rows = []
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_checked(json.loads(line), f"{path}, line {number}"))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise UserError(f"{path}: line {len(rows) + 1} or later is not readable ({str(error)[:80]})") from None
    return rows


def _checked(row, place):
    """A row of the joined form, with its four options and an answer from 0 to 3."""
    fits = isinstance(row, dict) and is_text(row.get("question")) and isinstance(row.get("subject"), str) and (
        isinstance(row.get("choices"), list) and len(row["choices"]) == 4
        and all(is_text(c) for c in row["choices"])
        and type(row.get("answer")) is int and 0 <= row["answer"] <= 3)
    if not fits:
        raise UserError(f"{place}: expected subject, question, four choices and an answer from 0 to 3")
    return row


def _hub_rows(split):
    import pyarrow.parquet
    path = hub_file("MMLU", "cais/mmlu", "main", f"all/{split}-00000-of-00001.parquet",
                    f"mmlu/data/{split}/<subject>_{split}.csv or mmlu/{split}.jsonl.gz")
    return [_checked(row, str(path)) for row in pyarrow.parquet.read_table(path).to_pylist()]


def _by_subject(rows):
    table = {}
    for row in rows:
        table.setdefault(row["subject"], []).append(
            Question(row["question"], tuple(row["choices"]), int(row["answer"])))
    return table


def content_sha256(table):
    """Hex sha256 of a subject's (examples, questions)."""
    return hashlib.sha256(repr(table).encode()).hexdigest()


def example(question, with_answer):
    """One question in the prompt's form, with its answer for an example."""
    lines = [question.question] + [f"{letter}. {option}" for letter, option in zip(LETTERS, question.options)]
    text = "\n".join([*lines, "Answer:"])
    return f"{text} {LETTERS[question.answer]}\n\n" if with_answer else text


def prompt(subject, examples, question):
    """The whole prompt; the authors' code puts a space before each word of the subject, hence a double space."""
    words = "".join(f" {word}" for word in subject.split("_"))
    head = f"The following are multiple choice questions (with answers) about {words}.\n\n"
    return head + "".join(example(e, True) for e in examples) + example(question, False)


def answer_tokens(tokenizer, convention):
    """Token ids of the four answers. 'bare': last id of tokenizer("A"), as in the authors' code; 'spaced': the id that
    follows "Answer:" in "Answer: A", as in the examples. Raises UserError unless they are four distinct tokens."""
    if convention == "bare":
        ids = [(tokenise(letter, tokenizer) or [None])[-1] for letter in LETTERS]
    else:
        head = tokenizer("Answer:", add_special_tokens=False).input_ids
        ids = []
        for letter in LETTERS:
            whole = tokenizer(f"Answer: {letter}", add_special_tokens=False).input_ids
            if whole[:len(head)] != head or len(whole) != len(head) + 1:
                raise UserError(f"--answer-tokens spaced: ' {letter}' is not one token behind 'Answer:' for this "
                                "tokenizer; use --answer-tokens bare")
            ids.append(whole[-1])
    if len(set(ids)) != 4 or tokenizer.unk_token_id in ids:
        raise UserError(f"--answer-tokens {convention}: answer tokens are not distinct: "
                        f"{dict(zip(LETTERS, ids))}")
    return ids


def encode(subject, examples, questions, tokenizer, answers, max_tokens=PROMPT_TOKENS):
    """({shots: [question index]}, {question index: four Requests}), fewer shots where a prompt is too long.

    Raises UserError when even the bare question does not fit.
    """
    by_shots, requests = {}, {}
    for index, question in enumerate(questions):
        for shots in range(min(SHOTS, len(examples)), -1, -1):
            ids = tokenise(prompt(subject, examples[:shots], question), tokenizer)
            if len(ids) <= max_tokens:
                break
        else:
            raise UserError(f"MMLU {subject}, question {index}: {len(ids)} tokens without examples, more than "
                            f"{max_tokens}")
        by_shots.setdefault(shots, []).append(index)
        requests[index] = [Request(tuple(ids), (answer,)) for answer in answers]
    return by_shots, requests


def subject_row(subject, questions, letters):
    """What a row of mmlu.json says of one subject: accuracy, standard error sqrt(p (1-p) / (n-1)), letters, items.

    letters: the index of the answer that was chosen for each question.
    """
    n, counts = len(questions), Counter(letters)
    right = [int(letter == question.answer) for letter, question in zip(letters, questions)]
    accuracy = sum(right) / n
    return {"subject": subject, "category": CATEGORY_OF[subject], "accuracy": accuracy, "stderr": _stderr(accuracy, n),
            "n": n, "predicted": {name: counts[index] for index, name in enumerate(LETTERS)},
            "items": "".join(map(str, right))}


def summarise(rows):
    """One entry a variant: accuracy of each category and weighted (micro, over questions) and macro (over subjects)."""
    result = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == variant]
        micro, n = _micro(mine), sum(row["n"] for row in mine)
        predicted = {letter: sum(row["predicted"][letter] for row in mine) for letter in LETTERS}
        parts = {category: [row for row in mine if row["category"] == category] for category in CATEGORIES}
        result.append({
            "variant": variant, "n": n, "subjects": len(mine), "weighted_avg": micro, "stderr": _stderr(micro, n),
            "macro_avg": sum(row["accuracy"] for row in mine) / len(mine), "predicted": predicted,
            **{category: _micro(part) for category, part in parts.items() if part},
            "collapsed": n > 1 and max(predicted.values()) > 0.95 * n})  # one question says nothing
    return result


def _stderr(share, n):
    return (share * (1 - share) / (n - 1)) ** 0.5 if n > 1 else None


def _micro(rows):
    return sum(row["accuracy"] * row["n"] for row in rows) / sum(row["n"] for row in rows)


def weighted_average(stem, humanities, social_sciences, other):
    """The paper's weighted average from its four categories, by their numbers of questions."""
    parts = {"stem": stem, "humanities": humanities, "social_sciences": social_sciences, "other": other}
    return sum(QUESTIONS[name] * value for name, value in parts.items()) / sum(QUESTIONS.values())
