"""Our values beside the paper's: cells with a 95 % interval, why one cannot be compared, and a verdict for a row."""

import math
from dataclasses import dataclass

from utils.paper import experiments as paper


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
    if found and all(name in found for name in paper.PERPLEXITY):
        parts = [found[name] for name in paper.PERPLEXITY]
        reason = next((part.reason for part in parts if part.reason), None)
        found["ppl_avg"] = Cell(sum(part.value for part in parts) / 3, None, reason)
    return found


def _perplexity_reason(row):
    corpus = row["corpus"]
    if row["dataset"] not in paper.PERPLEXITY:
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
            whole = paper.QUESTIONS.get(row["task"])
            reason = None if row["n"] == whole else f"{row['n']} of {whole} items" if whole else "other task"
            found[row["task"]] = Cell(100 * row["value"], score_interval(row["value"], row["n"]), reason)
            errors[row["task"]] = row[row["metric"] + "_stderr"] or 0.0
    for content in run.evaluations["qa"]:
        for entry in content["summary"]:
            if entry["variant"] == variant and all(task in found for task in entry["tasks"]):
                reason = next((found[task].reason for task in entry["tasks"] if found[task].reason), None)
                reason = reason or (None if set(entry["tasks"]) == set(paper.QUESTIONS) else "other tasks")
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
            for column, name in paper.MMLU.items():
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
