"""Good artifacts of every kind, for tests that read, join or damage them."""

import math

ABOUT = {"metric": "cosine", "n": 2, "repair": "none", "stage": "pruned"}
DENSE = {"metric": None, "n": 0, "repair": "none", "stage": "dense"}
RECIPE = {"seed": 0}


def identity(**changes):
    """The model that an artifact was made for."""
    return {"label": "tiny", "revision": None, "sha256": "f" * 64, "num_layers": 6, "hidden_size": 64, **changes}


def row(variant, about=None, **values):
    """What rows of all kinds hold."""
    return {"variant": variant, "about": about or (DENSE if variant == "dense" else ABOUT),
            "removed": [] if variant == "dense" else [2, 3], "dtype": "float32", "sha256": f"{'0' * 16}:{'1' * 16}",
            **values}


def ppl_row(variant, dataset, ppl=None, losses=(1.0, 1.2, 1.1, 1.3), about=None, **changes):
    """A row of ppl.json of the window losses, or of four windows that give `ppl`."""
    losses = list(losses) if ppl is None else [math.log(ppl)] * 4
    mean = sum(losses) / len(losses)
    return row(variant, about, **{
        "dataset": dataset, "split": "test", "ppl": math.exp(mean), "nll_mean": mean, "nll_stderr": 0.06,
        "ppl_ci95": [0.9 * math.exp(mean), 1.1 * math.exp(mean)], "ratio_to_reference": 1.0, "ratio_ci95": [0.9, 1.1],
        "reference": "dense", "windows": len(losses), "seq_len": 32, "scored_tokens": 31 * len(losses),
        "dropped_tokens": 0, "bos": "none", "corpus": {"windows_available": len(losses)}, "window_nll": losses,
        **changes})


def qa_row(variant, task, items="0011", about=None, **changes):
    """A row of qa.json whose items of acc and acc_norm are the same."""
    n, share = len(items), items.count("1") / len(items)
    return row(variant, about, **{
        "task": task, "n": n, "metric": "acc_norm", "value": share, "acc": share, "acc_stderr": 0.1, "acc_items": items,
        "acc_norm": share, "acc_norm_stderr": 0.1, "acc_norm_items": items, "predictions": {"0": n - 1, "2": 1},
        "constant": False, "prompt_sha1": "0" * 40, "task_version": 1.0, "data": "mine.jsonl", **changes})


def mmlu_row(variant, subject="anatomy", items="0011", about=None, **changes):
    """A row of mmlu.json."""
    n = len(items)
    return row(variant, about, **{
        "subject": subject, "category": "other", "n": n, "accuracy": items.count("1") / n, "stderr": 0.1,
        "items": items, "predicted": {"A": n, "B": 0, "C": 0, "D": 0}, **changes})


REMOVAL = {"model": identity(), "about": ABOUT, "removed": [2, 3], "kept": [0, 1, 4, 5], "runs": [[2, 4]],
           "recipe": RECIPE}
GOOD = {
    "selection": {**REMOVAL, "order": [3, 2], "scores": [{"start": 2, "end": 4, "score": 0.5}]},
    "patch": {**REMOVAL, "about": {**ABOUT, "repair": "hadamard", "stage": "distilled"}, "hadamard_order": "paper",
              "training": {"trainable": "full", "loss": "kl", "top_k": 100, "init": "patch", "replace": None}},
    "stats": {"model": identity(), "recipe": RECIPE},
    "progress": {"recipe": RECIPE, "rounds": [{"layer": 3, "scores": [{"layer": 3, "score": 0.5, "round": 1}]}]},
    "checkpoint": {"recipe": RECIPE, "step": 3, "best": None, "log": [{"step": 0, "validation": 1.5}]},
    "teacher": {"recipe": RECIPE, "windows": [0, 16], "sha256": "0" * 64},
    "ppl": {"model": identity(), "results": [ppl_row("dense", "wiki")]},
    "qa": {"model": identity(), "results": [qa_row("dense", "copa")], "summary": [], "paired": [], "bos": "BOS: no",
           "harness": "lm_eval==0"},
    "mmlu": {"model": identity(), "results": [mmlu_row("dense")], "summary": [],
             "answer_tokens": {"convention": "bare", "ids": [1, 2, 3, 4]}},
    "overhead": {"model": identity(), "recipe": RECIPE,
                 "results": [{"title": "t", "head": ["a", "b"], "rows": [["x", 1]], "text": "."}]},
    "folder": {"about": ABOUT, "removed": [2, 3], "base_model": identity()},
    "figure": {"figure": "4", "recipe": RECIPE, "csv_sha256": "0" * 64},
}
