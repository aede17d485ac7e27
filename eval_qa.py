"""Zero-shot question answering of dense, pruned and patched variants (paper, tables 1, 2, 5, 11 to 14): qa.json.

lm-evaluation-harness makes the prompts and computes the metrics; the choices of an item share one encoding of its
context. The printed metric is the paper's: acc_norm for ARC, HellaSwag and PIQA, acc elsewhere.
"""

import json
from pathlib import Path

from tqdm import tqdm

from utils import cli
from utils.artifacts import atomic_path, read_json, sha256_json
from utils.errors import UserError
from utils.evaluation.qa import (HARNESS, HarnessModel, harness_results, item_records, load_tasks, paired_differences,
                                 result_row, summary)
from utils.evaluation.results import ResultFile
from utils.evaluation.scoring import BATCH_TOKENS, make_packs, score
from utils.model_folder import origin
from utils.session import Session, default_folder


def arguments():
    p = cli.parser(__doc__, "python eval_qa.py --model smollm2-135m --tasks arc_easy copa --limit 20 "
                            "--data-dir FOLDER")
    cli.add_model_flags(p)
    cli.add_variant_flags(p)
    p.add_argument("--tasks", nargs="+", default=["all"], metavar="TASK",
                   help="all: the paper's nine; or tasks of lm-evaluation-harness, or .jsonl files of one's own with "
                        'lines {"context": ..., "choices": [...], "gold": index}')
    p.add_argument("--limit", type=cli.positive, help="a random subset of so many items a task, drawn with --seed")
    p.add_argument("--bos", choices=["auto", "on", "off"], default="auto",
                   help="BOS before each prompt; auto: what the tokenizer does by itself "
                        "(the harness's default is off)")
    p.add_argument("--dense", type=Path, help="qa.json with the dense row that retained performance refers to")
    p.add_argument("--log-samples", type=Path, help="write one line an item: log-likelihoods, lengths, predictions")
    p.add_argument("--batch-tokens", type=cli.positive, default=BATCH_TOKENS, help="padded tokens a forward pass")
    p.add_argument("--seed", type=cli.seed, default=0, help="of the subset")
    cli.add_data_flags(p)
    cli.add_output_flags(p, "result file; default runs/<model>/qa.json")
    return p.parse_args()


def main():
    args = arguments()
    args.out = args.out or default_folder(args.model) / "qa.json"
    cli.check_outputs(args, reads=("dense",), out=".json", log_samples=".jsonl")
    if args.log_samples:
        check_samples(args.log_samples)
    session = Session(args)
    variants = session.variants()
    dense_rows = read_dense(args.dense, session.source) if args.dense else []
    model = HarnessModel(session.tokenizer, args.bos)
    tasks = {qa.name: qa for qa in load_tasks(args.tasks, model, args.data_dir, args.limit, args.seed)}
    check_items(args.dense, dense_rows, tasks)
    print(f"{model.bos_in_words()}; lm-evaluation-harness {HARNESS}, zero-shot; {session.dtype_name}")
    recipes = {name: {"model": session.source.sha256, "dtype": session.dtype_name, "harness": HARNESS,
                      "bos": model.bos_in_words(), "task": name, "items": qa.content_sha1,
                      "tokens": sha256_json([[r.context, r.continuation] for group in qa.groups for r in group])}
               for name, qa in tasks.items()}
    file = ResultFile(args, "qa", "task", session, variants, recipes, reuse=not args.log_samples)
    packs = {name: make_packs(session.decoder, tasks[name].groups) for name, missing in file.missing.items() if missing}

    def more(rows):
        dense = {row["task"]: row["value"] for row in dense_rows or [r for r in rows if r["variant"] == "dense"]}
        return {"summary": summary(rows, dense), "paired": paired_differences(rows, variants[0].name),
                "bos": model.bos_in_words(), "harness": f"lm_eval=={HARNESS}", "dtype": session.dtype_name}

    records, total = [], sum(len(pack.tokens) for group in packs.values() for pack in group)
    with tqdm(total=total, desc="qa", unit="token", unit_scale=True, disable=not packs) as bar:
        for name, missing in file.evaluate(more):
            if missing:
                bar.set_description(name)
                scored = score(session.decoder, missing, packs[name], args.batch_tokens, label=name, bar=bar)
                for variant, values, greedy in zip(missing, *scored):
                    metrics, samples = harness_results(tasks[name], model, values, greedy)
                    file.put(name, variant, {**result_row(tasks[name], metrics, samples, values), "limit": args.limit,
                                             "seed": args.seed})
                    records += item_records(tasks[name], variant, samples, values) if args.log_samples else []
    if args.log_samples:
        with atomic_path(args.log_samples) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        print(f"wrote {args.log_samples}")
    show(file.content)
    print(f"wrote {args.out}")


def read_dense(path, source):
    """Rows of the dense variant of another qa.json, made for this model or the one that a saved folder came from."""
    content, base = read_json(path, "qa"), origin(source.folder).get("base_model", {})
    if content["model"]["sha256"] not in (source.sha256, base.get("sha256")):
        raise UserError(f"{path}: made for another model ({content['model']['label']}), so its dense row is no "
                        f"reference for {source.label}")
    rows = [row for row in content["results"] if row["variant"] == "dense"]
    if not rows:
        raise UserError(f"{path}: has no rows of a variant called dense")
    return rows


def check_items(path, dense_rows, tasks):
    """Raise UserError when the dense rows are over other items or prompts than this call's: no ratio then."""
    for row in dense_rows:
        if row["task"] in tasks and tasks[row["task"]].prompt_sha1 != row["prompt_sha1"]:
            raise UserError(f"{path}: its dense row of {row['task']} is over other items or prompts, so it is no "
                            "reference here; give the same data, --limit and --seed")


def check_samples(path):
    """Raise UserError when --log-samples would overwrite a file that this script did not write."""
    if path.exists() and path.stat().st_size:
        try:
            with open(path, encoding="utf-8") as file:
                ours = "log_likelihoods" in json.loads(file.readline())
        except (ValueError, TypeError, RecursionError):
            ours = False
        if not ours:
            raise UserError(f"--log-samples {path}: is there and was not written by this script; choose another name")


def show(content):
    """Print a line a variant and task, then averages and retained performance."""
    for row in content["results"]:
        stderr = f"+-{100 * row[row['metric'] + '_stderr']:.2f}" if row[row["metric"] + "_stderr"] is not None else ""
        both = "  ".join(f"{metric} {100 * row[metric]:.2f}" for metric in ("acc", "acc_norm") if metric in row)
        print(f"  {row['variant']:16s} {row['task']:14s} {row['metric']} {100 * row['value']:6.2f} {stderr:7s} "
              f"n={row['n']}  ({both})")
        if row.get("constant"):
            print(f"    warning: {row['variant']} gives choice {next(iter(row['predictions']))} in every item")
    for row in content["summary"]:
        retained = row["retained_performance"]
        print(f"  {row['variant']:16s} average of {len(row['tasks'])} tasks {100 * row['average']:.2f}"
              + ("" if retained is None else f", retained performance {retained:.2f}"))
    for row in content["paired"]:
        if row["ci95"]:
            print(f"  {row['variant']} - {row['reference']}, {row['task']}: {100 * row['difference']:+.2f} "
                  f"[{100 * row['ci95'][0]:+.2f}, {100 * row['ci95'][1]:+.2f}]")


if __name__ == "__main__":
    cli.run(main)
