"""Question answering through lm-evaluation-harness: its tasks, prompts and metrics, our scoring (utils/scoring.py).

The harness makes the prompts and computes the metrics; in between, the requests of one item share one encoding of
what they have in common, and all variants of a call share the layers that they have in common.
"""

import hashlib
import json
import logging
import math
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import datasets
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from utils.cli import subset
from utils.data.corpora import is_text
from utils.errors import UserError, WorkError
from utils.evaluation.scoring import Request

HARNESS = version("lm_eval")
# The nine tasks of the paper and the metric that its tables print.
PAPER_TASKS = {"arc_challenge": "acc_norm", "arc_easy": "acc_norm", "boolq": "acc", "hellaswag": "acc_norm",
               "piqa": "acc_norm", "winogrande": "acc", "wsc273": "acc", "race": "acc", "copa": "acc"}
# Where a task's evaluation split lies under --data-dir: (split, file).
LOCAL_FILES = {
    "arc_challenge": ("test", "arc_challenge/test.jsonl"), "arc_easy": ("test", "arc_easy/test.jsonl"),
    "boolq": ("validation", "boolq/validation.jsonl.gz"), "hellaswag": ("validation", "hellaswag/validation.jsonl.gz"),
    "piqa": ("validation", "piqa/validation.jsonl"), "winogrande": ("validation", "winogrande/validation.jsonl"),
    "wsc273": ("test", "wsc273/test.jsonl"), "race": ("test", "race/high_test.jsonl.gz"),
    "copa": ("validation", "copa/validation.jsonl"), "openbookqa": ("test", "openbookqa/test.jsonl"),
    "lambada_openai": ("test", "lambada_openai/test.jsonl.gz"),
}
SCORED = ("multiple_choice", "loglikelihood")


@dataclass
class QaTask:
    """A harness task, the items of its subset, their encoded requests and what identifies them.

    groups[i]: the Requests of item i, in the harness's order; texts[i]: their (context, continuation) strings.
    """

    name: str
    task: object
    items: list
    groups: list
    texts: list
    source: str

    def by_item(self, values):
        """The parts of a tensor with a value for each request that belong to each item."""
        return values.split([len(group) for group in self.groups])

    @property
    def prompt_sha1(self):
        """Hex sha1 over every context and continuation: one character of a prompt changes it."""
        digest = hashlib.sha1()
        for item in self.texts:
            for context, continuation in item:
                digest.update(f"{len(context)}:{context}{len(continuation)}:{continuation}".encode())
        return digest.hexdigest()

    @property
    def content_sha1(self):
        """Hex sha1 over the prompts, the items' numbers and their answers: what results depend on."""
        docs = self.task.eval_docs
        answers = [str(self.task.doc_to_target(docs[item])) for item in self.items]
        return hashlib.sha1(json.dumps([self.prompt_sha1, self.items, answers]).encode()).hexdigest()


class HarnessModel(TemplateLM):
    """The harness's model interface over recorded scores. It encodes as the harness does and never runs a model.

    bos: 'auto' (the tokenizer's own default), 'on' or 'off'; never two BOS.
    """

    def __init__(self, tokenizer, bos="auto"):
        super().__init__()
        self.tokenizer = tokenizer
        if bos == "on" and tokenizer.bos_token_id is None:
            raise UserError("--bos on: the tokenizer has no BOS token")
        self.adds_bos = bos == "on" or (bos == "auto" and tokenizer.bos_token_id is not None
                                        and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id])
        self.scores = {}
        self.encoded = None

    def bos_in_words(self):
        return f"BOS: yes ({self.tokenizer.bos_token_id})" if self.adds_bos else "BOS: no"

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self):
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        ids = self.tokenizer(string, add_special_tokens=False).input_ids
        bos = self.tokenizer.bos_token_id
        if self.adds_bos and add_special_tokens is not False and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def encode(self, instances):
        """Requests of harness instances, by the harness's own rules for spaces and empty contexts."""
        self.encoded = []
        self.loglikelihood(instances, disable_tqdm=True)
        encoded, self.encoded = self.encoded, None
        return encoded

    def _loglikelihood_tokens(self, requests, **kwargs):
        if self.encoded is not None:
            self.encoded += [Request(tuple(context), tuple(continuation)) for _, context, continuation in requests]
            return [(0.0, False)] * len(requests)
        return [self.scores[texts] for texts, _, _ in requests]

    def loglikelihood(self, requests, disable_tqdm=False):
        if self.encoded is None:
            return [self.scores[request.args] for request in requests]
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise UserError("--tasks: rolling log-likelihoods are perplexities; use eval_ppl.py")

    def generate_until(self, requests, disable_tqdm=False):
        raise UserError("--tasks: tasks that generate text are not supported, only ones that compare log-likelihoods")


def load_tasks(names, model, data_dir=None, limit=None, seed=0):
    """QaTasks of harness task names, 'all' (the paper's nine) or .jsonl files. Raises UserError.

    With data_dir the harness's task definition is kept and its data set replaced by the local file; nothing is asked
    of the network. limit: a random subset of so many items, drawn by random.Random(seed), the same for every variant.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    wanted = [each for name in names for each in (PAPER_TASKS if name == "all" else [name])]
    configs = {name: _config(name, data_dir) for name in dict.fromkeys(wanted)}
    found, seen = [], {}
    for name, config in configs.items():
        try:
            for task_name, task in _build(name, config).items():
                if task_name in seen:
                    raise UserError(f"--tasks: {seen[task_name]} and {name} are both called {task_name}; rename one")
                seen[task_name] = name
                found.append(_prepare(task_name, task, model, config, limit, seed))
        except (UserError, MemoryError):
            raise
        except Exception as error:  # over damaged data, `datasets` and the tasks' own code raise errors of many kinds
            cause = error.__cause__ or error
            reason = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0][:120]}"
            remedy = "give --data-dir" if isinstance(config, str) else f"check {_source(config)}"
            raise UserError(f"--tasks {name}: its data set cannot be had or read ({reason});\n"
                            f'{remedy} (see README, section "Data")') from None
    return found


@lru_cache(maxsize=1)
def task_manager():
    """The harness's index of its tasks; made once, since it reads thousands of files."""
    return TaskManager()


def _build(name, config):
    """{task name: harness task} of a name, or of a definition with local data."""
    if isinstance(config, dict) and "output_type" in config:
        return {config["task"]: ConfigurableTask(config=config)}
    if name not in task_manager().all_tasks:
        raise UserError(f"--tasks {name}: neither a task of lm-evaluation-harness nor a .jsonl file")
    if isinstance(config, str):
        return task_manager().load([config])["tasks"]
    return task_manager().load([{"group": f"local_{name}", "task": [config]}])["tasks"]


def _config(name, data_dir):
    """What the harness loads: a name, or a definition whose data come from a local file."""
    path = Path(name)
    if path.suffix or path.is_file():
        return _file_task(path)
    if data_dir is None:
        return name
    if name not in LOCAL_FILES:
        raise UserError(f"--tasks {name}: no local file is known for it under --data-dir; there are "
                        f"{', '.join(LOCAL_FILES)}")
    split, file = LOCAL_FILES[name]
    path = Path(data_dir) / file
    if not path.is_file():
        raise UserError(f'--tasks {name}: {path} is not there; see README, section "Data"')
    return {"task": name, "dataset_path": "json", "dataset_name": None, "training_split": None,
            "validation_split": split if split == "validation" else None,
            "test_split": split if split == "test" else None, "dataset_kwargs": {"data_files": {split: str(path)}}}


def _file_task(path):
    """A task of one's own: lines {"context": text, "choices": [texts], "gold": index}."""
    if path.suffix != ".jsonl":
        raise UserError(f"--tasks {path}: not a jsonl task file")
    if not path.is_file():
        raise UserError(f"--tasks {path}: no such file")
    if set(path.name) & set("*?["):
        raise UserError(f"--tasks {path}: rename the file; its name reads as a pattern")
    rows = []
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            fits = (is_text(row["context"]) and isinstance(row["choices"], list) and len(row["choices"]) > 1
                    and all(is_text(c) and c.strip() for c in row["choices"])
                    and type(row["gold"]) is int and 0 <= row["gold"] < len(row["choices"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            fits = False
        if not fits:
            raise UserError(f'{path}, line {number}: expected {{"context": text, "choices": [two or more texts], '
                            '"gold": index}}')
        rows.append({field: row[field] for field in ("context", "choices", "gold")})
    if not rows:
        raise UserError(f"{path}: holds no items")
    metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")]
    # as they are: the json reader of `datasets` would turn texts that look like dates into dates
    return {"task": path.name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}},
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)}, "test_split": "test",
            "output_type": "multiple_choice", "doc_to_text": "context",
            "doc_to_choice": "choices", "doc_to_target": "gold", "metric_list": metrics, "metadata": {"version": 1.0}}


def _source(config):
    """The local file that a task's items come from."""
    return next(iter(config["dataset_kwargs"]["data_files"].values()))


def _prepare(name, task, model, config, limit, seed):
    if task.OUTPUT_TYPE not in SCORED:
        raise UserError(f"--tasks {name}: is a {task.OUTPUT_TYPE} task; only {' and '.join(SCORED)} ones are supported")
    docs = task.eval_docs  # once: it processes the whole split each time
    items = subset(range(len(docs)), limit, seed)
    for item in items if task.OUTPUT_TYPE == "multiple_choice" else ():
        if not _gold_fits(task, docs[item]):
            raise UserError(f"--tasks {name}: the answer of item {item} is none of its choices")
    task.build_all_requests(samples=items)
    by_item = {}
    for instance in sorted(task.instances, key=lambda i: (i.doc_id, i.idx)):
        by_item.setdefault(instance.doc_id, []).append(instance)
    encoded = iter(model.encode([instance for group in by_item.values() for instance in group]))
    groups = [[next(encoded) for _ in group] for group in by_item.values()]
    for item, group in zip(by_item, groups):
        for request in group:
            if not request.context or not request.continuation:
                raise UserError(f"--tasks {name}: item {item} has a context or a choice that encodes to no tokens")
    texts = [[instance.args for instance in group] for group in by_item.values()]
    return QaTask(name, task, items, groups, texts, Path(_source(config)).name if isinstance(config, dict) else "hub")


def _gold_fits(task, doc):
    """Whether an item's answer is one of its choices: the harness counts any other as wrong, without a word."""
    if doc.get("label", 0) in (None, -1, "-1", ""):  # as data sets say that it is kept secret
        return False
    gold, choices = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc), task.doc_to_choice(doc)
    return all(0 <= one < len(choices) if isinstance(one, int) else one in choices
               for one in (gold if isinstance(gold, list) else [gold]))


def harness_results(qa, model, values, greedy):
    """(metrics, samples) that the harness computes for one variant from its log-likelihoods.

    values, greedy: [requests] in the order of qa.groups. samples: the harness's own record of every item.
    """
    flat = [texts for item in qa.texts for texts in item]
    model.scores = {texts: (value.item(), bool(first)) for texts, value, first in zip(flat, values, greedy)}
    out = evaluate(model, {"tasks": {qa.name: qa.task}}, samples={qa.name: qa.items}, bootstrap_iters=0,
                   log_samples=True)
    samples = sorted(out["samples"][qa.name], key=lambda sample: sample["doc_id"])
    metrics = {key.partition(",")[0]: value for key, value in out["results"][qa.name].items()
               if isinstance(value, float) and key.endswith(",none") and "_stderr" not in key}
    return metrics, samples


def result_row(qa, metrics, samples, values):
    """What a row of qa.json says of one task: metrics, standard errors sqrt(p (1-p) / (n-1)), predictions, items."""
    n = len(samples)
    row = {"task": qa.name, "n": n}
    for metric in ("acc", "acc_norm"):
        if metric in metrics:
            row[metric] = metrics[metric]
            row[f"{metric}_stderr"] = math.sqrt(metrics[metric] * (1 - metrics[metric]) / (n - 1)) if n > 1 else None
            row[f"{metric}_items"] = "".join(str(int(sample[metric])) for sample in samples)
    row["metric"] = PAPER_TASKS.get(qa.name, "acc_norm" if "acc_norm" in metrics else "acc")
    if row["metric"] not in row:
        raise WorkError(f"{qa.name}: the harness gave no {row['metric']}, only {', '.join(metrics)}")
    row["value"] = row[row["metric"]]
    if qa.task.OUTPUT_TYPE == "multiple_choice":
        picks = [int(scores.argmax()) for scores in qa.by_item(values)]
        row["predictions"] = {str(choice): picks.count(choice) for choice in sorted(set(picks))}
        row["constant"] = len(set(picks)) == 1 and n > 1
    return {**row, "prompt_sha1": qa.prompt_sha1, "task_version": qa.task.VERSION, "data": qa.source}


def item_records(qa, variant, samples, values):
    """One dict an item for --log-samples: log-likelihood and lengths of each choice, predictions, gold."""
    for group, texts, sample, scores in zip(qa.groups, qa.texts, samples, qa.by_item(values)):
        scores = scores.tolist()
        choices = (qa.task.doc_to_choice(sample["doc"]) if qa.task.OUTPUT_TYPE == "multiple_choice"
                   else [t[1] for t in texts])
        characters = [len(choice) for choice in choices]
        yield {"variant": variant.name, "task": qa.name, "item": sample["doc_id"], "log_likelihoods": scores,
               "characters": characters, "tokens": [len(request.continuation) for request in group],
               "prediction": max(range(len(scores)), key=scores.__getitem__),
               "prediction_norm": max(range(len(scores)), key=lambda i: scores[i] / max(characters[i], 1)),
               "gold": sample["target"]}


def retained_performance(values, dense):
    """Mean over tasks of value / dense value in percent, over the tasks that both have (table 1's RP)."""
    tasks = [task for task in values if dense.get(task)]
    return 100 * sum(values[task] / dense[task] for task in tasks) / len(tasks) if tasks else None


def summary(rows, dense):
    """One entry a variant: average of the printed metrics, and retained performance against `dense` {task: value}."""
    result = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        values = {row["task"]: row["value"] for row in rows if row["variant"] == name}
        result.append({"variant": name, "tasks": list(values), "average": sum(values.values()) / len(values),
                       "retained_performance": retained_performance(values, dense)})
    return result


def paired_differences(rows, reference):
    """Difference of each variant's printed metric to `reference` on the same items, with a 95 % interval."""
    result, bases = [], {row["task"]: row for row in reversed(rows) if row["variant"] == reference}
    for row in rows:
        base = bases.get(row["task"])
        if base is None or base is row:
            continue
        items = f"{row['metric']}_items"
        right, before = (torch.tensor([int(c) for c in r[items]], dtype=torch.float64) for r in (row, base))
        difference = right - before
        half = 1.96 * (difference.std() / math.sqrt(len(difference))).item() if len(difference) > 1 else None
        mean = difference.mean().item()
        result.append({"variant": row["variant"], "reference": reference, "task": row["task"], "metric": row["metric"],
                       "difference": mean, "ci95": None if half is None else [mean - half, mean + half]})
    return result
