"""The paper's numbers (paper_results.json) and which of our variants stands behind each row of its tables."""

import json
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources

from utils.evaluation.mmlu import weighted_average

PERPLEXITY = ("wikitext2", "c4", "ptb")
QUESTIONS = {"arc_challenge": 1172, "arc_easy": 2376, "boolq": 3270, "hellaswag": 10042, "piqa": 1838,
             "winogrande": 1267, "wsc273": 273, "race": 1045, "copa": 100}  # items behind every printed accuracy
MMLU = {"mmlu_stem": "stem", "mmlu_humanities": "humanities", "mmlu_social_sciences": "social_sciences",
        "mmlu_other": "other", "mmlu_weighted_avg": "weighted_avg"}
STAND_IN = "llama2-7b"  # whose numbers stand beside those of a model that the paper does not have


@dataclass(frozen=True)
class Row:
    """One method of a table: our variant's name (without -nN), and how the paper's data names it."""

    label: str
    variant: str
    methods: tuple
    fields: dict = field(default_factory=dict)  # what else a row of the paper's data must say


@dataclass(frozen=True)
class PaperTable:
    """kinds: which of ppl, qa and mmlu it prints; numbers: several where one form serves several models."""

    numbers: tuple
    title: str
    kinds: tuple
    rows: tuple

    @property
    def name(self):
        return "Table " + " and ".join(map(str, self.numbers))


DENSE = Row("dense", "dense", ("dense",))
UNTRAINED = (
    Row("LLM-Pruner", "llm-pruner", ("llm-pruner",)), Row("SLEB", "sleb", ("sleb",)),
    Row("ShortGPT", "shortgpt", ("shortgpt",)), Row("LLM-Streamline, no network", "vanilla", ("llm-streamline-none",)),
    Row("LinearPatch [S]", "shortgpt+P", ("linearpatch[S]", "linearpatch[S/L]")),
    Row("LinearPatch [L]", "P", ("linearpatch[L]", "linearpatch[S/L]")),
)
TRAINED = (Row("LLM-Streamline, FFN", "ffn_mse", ("llm-streamline-ffn+ft",)),
           Row("LinearPatch [L]", "P", ("linearpatch[L]",)), Row("LinearPatch [L] + FT", "FT", ("linearpatch[L]+ft",)))
BEFORE_TUNING = Row("LinearPatch, not tuned", "P", ("linearpatch",))


def _with_metric(metric):
    return (Row(metric, metric, (metric,)), Row(f"{metric} + LinearPatch", f"{metric}+P", (f"{metric}+linearpatch",)))


def _sweep(label, methods, name, rows):
    return tuple(Row(f"{label} {text}", variant, methods, {name: value}) for text, variant, value in rows)


TABLES = (
    PaperTable((1, 14), "question answering, methods without training", ("qa",), UNTRAINED),
    PaperTable((2,), "question answering after training", ("qa",), TRAINED),
    PaperTable((3,), "perplexity after training", ("ppl",), TRAINED),
    PaperTable((4,), "what is trained, and by which loss", ("ppl", "qa"), (
        Row("FFN, features, MSE", "ffn_mse", ("llm-streamline+ft",), {"parameters": "ffn", "loss": "mse"}),
        Row("FFN, logits, KL", "ffn_kl", ("llm-streamline+ft",), {"parameters": "ffn", "loss": "kl"}),
        Row("P, features, MSE", "P_mse", ("linearpatch+ft",), {"parameters": "symmetric matrix", "loss": "mse"}),
        Row("diagonal, logits, KL", "d_kl", ("linearpatch+ft",), {"parameters": "diagonal matrix"}),
        Row("P, logits, KL", "FT", ("linearpatch+ft",), {"parameters": "symmetric matrix", "loss": "kl"}))),
    PaperTable((5,), "the ingredients", ("ppl", "qa"), (
        Row("vanilla", "vanilla", ("vanilla",)), Row("+d", "d", ("+d",)), Row("+P", "P", ("+P",)),
        Row("+FT", "FT", ("+P+ft",)))),
    PaperTable((8,), "number of calibration windows, in multiples of 128 or of this run's", ("ppl",), _sweep(
        "windows", ("linearpatch",), "calibration_samples",
        (("x 0.5", "calib0.5x", 64), ("x 1", "P", 128), ("x 2", "calib2x", 256), ("x 4", "calib4x", 512)))),
    PaperTable((9,), "number of distillation windows, in multiples of 5000 or of this run's", ("ppl", "qa"), (
        BEFORE_TUNING, *_sweep("windows", ("linearpatch+ft",), "distillation_samples",
                               (("x 0.5", "samples0.5x", 2500), ("x 1", "FT", 5000), ("x 1.5", "samples1.5x", 7500))))),
    PaperTable((10,), "K of the top-K logits", ("ppl", "qa"), (
        BEFORE_TUNING, *_sweep("K =", ("linearpatch+ft",), "top_k",
                               (("50", "top50", 50), ("100", "FT", 100), ("200", "top200", 200))))),
    PaperTable((11,), "with the metric of ShortGPT", ("ppl", "qa"), _with_metric("shortgpt")),
    PaperTable((12,), "with Taylor+", ("ppl", "qa"), _with_metric("taylor+")),
    PaperTable((13,), "with SLEB", ("ppl", "qa"), _with_metric("sleb")),
    PaperTable((15,), "perplexity, methods without training", ("ppl",), UNTRAINED),
    PaperTable((16,), "MMLU, five-shot", ("mmlu",), UNTRAINED[1:]),
)


@lru_cache(maxsize=1)
def paper():
    """paper_results.json: results (one dict a row), selections (table 7), and cells that do not add up."""
    return json.loads((resources.files("utils.paper") / "paper_results.json").read_text())


def has_model(model):
    """Whether the paper prints results for this preset."""
    return any(row["model"] == model for row in paper()["results"])


def find(table, model, n, row):
    """{column: value} that the paper prints for a method (Row) at n removed layers, or None."""
    for found in paper()["results"]:
        if (found["table"] in table.numbers and found["model"] == model and found["n_pruned"] == n
                and found["method"] in row.methods and all(found.get(k) == v for k, v in row.fields.items())):
            return found["values"]
    return None


def depths(table, model):
    """The numbers of removed layers for which a table has rows of `model`, largest first."""
    return sorted({r["n_pruned"] for r in paper()["results"]
                   if r["table"] in table.numbers and r["model"] == model and r["n_pruned"]}, reverse=True)


def misprints(table, model, n, row):
    """[(column, printed, mean of its columns)] of the cells of this row that do not add up in the paper."""
    found = [(e["column"], e["printed"], e["mean_of_columns"])
             for e in paper()["printed_averages_that_do_not_match_their_columns"]
             if e["table"] in table.numbers and e["model"] == model and e["n_pruned"] == n
             and e["method"] in row.methods and not row.fields]
    values = find(table, model, n, row) or {}
    if "mmlu_weighted_avg" in values:
        mean = weighted_average(*(values[name] for name in list(MMLU)[:4]))
        if abs(mean - values["mmlu_weighted_avg"]) > 0.02:  # all others differ by 0.009 at most: rounding
            found.append(("mmlu_weighted_avg", values["mmlu_weighted_avg"], mean))
    return found
