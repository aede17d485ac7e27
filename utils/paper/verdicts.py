"""Our values beside the paper's: cells with a 95 % interval, why one cannot be compared, and a verdict for a row."""

import math
from dataclasses import dataclass

from utils.evaluation.mmlu import weighted_average
from utils.paper.experiments import paper

PERPLEXITY = ("wikitext2", "c4", "ptb")
QUESTIONS = {"arc_challenge": 1172, "arc_easy": 2376, "boolq": 3270, "hellaswag": 10042, "piqa": 1838,
             "winogrande": 1267, "wsc273": 273, "race": 1045, "copa": 100}  # items behind every printed accuracy
MMLU = {"mmlu_stem": "stem", "mmlu_humanities": "humanities", "mmlu_social_sciences": "social_sciences",
        "mmlu_other": "other", "mmlu_weighted_avg": "weighted_avg"}
COLUMNS = {"ppl": (*PERPLEXITY, "ppl_avg"), "qa": (*QUESTIONS, "qa_avg", "retained_performance"), "mmlu": tuple(MMLU)}


def find(table, model, n, row):
    """{column: value} that the paper prints for a method (Row of a Table) at n removed layers, or None."""
    for found in paper()["results"]:
        if (found["table"] in table.names and found["model"] == model and found["n_pruned"] == n
                and found["method"] in row.methods and all(found.get(k) == v for k, v in row.fields.items())):
            return found["values"]
    return None


def depths(table, model):
    """The numbers of removed layers for which a table has rows of `model`, largest first."""
    return sorted({r["n_pruned"] for r in paper()["results"]
                   if r["table"] in table.names and r["model"] == model and r["n_pruned"]}, reverse=True)


def misprints(table, model, n, row):
    """[(column, printed, mean of its columns)] of the cells of this row that do not add up in the paper."""
    found = [(e["column"], e["printed"], e["mean_of_columns"])
             for e in paper()["printed_averages_that_do_not_match_their_columns"]
             if e["table"] in table.names and e["model"] == model and e["n_pruned"] == n
             and e["method"] in row.methods and not row.fields]
    values = find(table, model, n, row) or {}
    if "mmlu_weighted_avg" in values:
        mean = weighted_average(*(values[name] for name in list(MMLU)[:4]))
        if abs(mean - values["mmlu_weighted_avg"]) > 0.02:  # all others differ by 0.009 at most: rounding
            found.append(("mmlu_weighted_avg", values["mmlu_weighted_avg"], mean))
    return found


@dataclass(frozen=True)
class Cell:
    value: float
    interval: tuple | None
    reason: str | None

    def __str__(self):
        return with_interval(self.value, self.interval)


def with_interval(value, interval, digits=2):
    """'value [low, high]', or the value alone where there is no interval."""
    text = number(value, digits)
    return text if interval is None else f"{text} [{number(interval[0], digits)}, {number(interval[1], digits)}]"


def number(value, digits=2):
    """With so many decimals, or with an exponent where nobody would read them."""
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.2e}"


def cells(run, kind, variant):
    """{column: Cell} of one variant: corpora, tasks or subject groups, under the paper's names, and their averages."""
    return {"ppl": _perplexity_cells, "qa": _qa_cells, "mmlu": _mmlu_cells}[kind](run, variant)


def _perplexity_cells(run, variant):
    found = {}
    for row in run.rows("ppl"):
        if row["variant"] == variant:
            found[row["dataset"]] = Cell(row["ppl"], row["ppl_ci95"], _perplexity_reason(row))
    if found and all(name in found for name in PERPLEXITY):
        parts = [found[name] for name in PERPLEXITY]
        reason = next((part.reason for part in parts if part.reason), None)
        found["ppl_avg"] = Cell(sum(part.value for part in parts) / 3, None, reason)
    return found


def _perplexity_reason(row):
    corpus = row["corpus"]
    if row["dataset"] not in PERPLEXITY:
        return "other corpus"
    if row["seq_len"] != 2048:
        return f"windows of {row['seq_len']} tokens, not 2048"
    if row["windows"] < corpus.get("windows_available", row["windows"]):
        return f"first {row['windows']} of {corpus['windows_available']} windows"
    return corpus.get("not_the_papers")


def _qa_cells(run, variant):
    found, errors = {}, {}
    for row in run.rows("qa"):
        if row["variant"] == variant:
            whole = QUESTIONS.get(row["task"])
            reason = None if row["n"] == whole else f"{row['n']} of {whole} items" if whole else "other task"
            found[row["task"]] = Cell(100 * row["value"], score_interval(row["value"], row["n"]), reason)
            errors[row["task"]] = row[row["metric"] + "_stderr"] or 0.0
    for content in run.evaluations["qa"]:
        for entry in content["summary"]:
            if entry["variant"] == variant and all(task in found for task in entry["tasks"]):
                reason = next((found[task].reason for task in entry["tasks"] if found[task].reason), None)
                reason = reason or (None if set(entry["tasks"]) == set(QUESTIONS) else "other tasks")
                half = 196 * math.sqrt(sum(errors[task] ** 2 for task in entry["tasks"])) / len(entry["tasks"])
                average = 100 * entry["average"]
                found["qa_avg"] = Cell(average, (average - half, average + half), reason)
                if entry["retained_performance"] is not None:
                    found["retained_performance"] = Cell(entry["retained_performance"], None, reason)
    return found


def score_interval(share, n):
    """95 % interval in per cent of a share of n items, Wilson's: inside [0, 100] however few they are."""
    z = 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)


def _mmlu_cells(run, variant):
    found = {}
    for content in run.evaluations["mmlu"]:
        for entry in content["summary"]:
            if entry["variant"] != variant:
                continue
            reason = None if entry["n"] == 14042 else f"{entry['n']} of 14042 questions"
            for column, name in MMLU.items():
                if name in entry:
                    count = entry["n"] if name == "weighted_avg" else sum(
                        row["n"] for row in content["results"] if row["variant"] == variant and row["category"] == name)
                    found[column] = Cell(100 * entry[name], score_interval(entry[name], count), reason)
    return found


def verdict(ours, theirs, other_model):
    """'agrees', 'differs: COLUMN ...' or 'not comparable: REASON' for the cells that both have."""
    if other_model:
        return "not comparable: other model"
    shared = [name for name in ours if math.isfinite(theirs.get(name, math.nan))]
    reasons = list(dict.fromkeys(ours[name].reason for name in shared if ours[name].reason))
    judged = [name for name in shared if ours[name].interval and not ours[name].reason]
    differing = [name for name in judged if not ours[name].interval[0] <= theirs[name] <= ours[name].interval[1]]
    if differing:
        return "differs: " + ", ".join(differing)
    if judged:
        return "agrees"
    return "not comparable: " + "; ".join(reasons) if reasons else "no value of the paper"
