"""Choose the layers to remove (paper, section 3.1, appendices A and F) and write selection.json.

The cosine family reads stats.safetensors, which one forward pass over the calibration windows gives, for every n.
sleb, ppl and taylor need the loss on the windows, mag the weights only, random and last nothing.
"""

import json
from functools import partial
from importlib import resources
from pathlib import Path

from utils import cli
from utils.artifacts import read_json, recipe_difference, reusable, write_json
from utils.errors import UserError
from utils.patch import layer_lists
from utils.perplexity import perplexity
from utils.removal import greedy, removal_losses
from utils.selection import (METRICS, Selection, check_n_prune, distances_from_end, legal_range, magnitudes,
                             n_for_ratio, one_shot, parameter_accounting, random_scores, select)
from utils.session import Session, default_folder
from utils.surgery import save_folder
from utils.taylor import taylor_scores
from utils.variants import Variant

CALIBRATION = {"calib_samples": 128, "seq_len": 2048, "seed": 0}
SHORTENED_LLAMA = {"calib_samples": 10, "seq_len": 128, "seed": 1234}  # as published for taylor and ppl
METRIC_HELP = (
    "cosine is eq. (2); sleb removes layer by layer what costs least loss; taylor, ppl and mag rank single layers by "
    "gradients, perplexity without the layer and size of the weights; + keeps layers 0-3 and the last two; last takes "
    "the deepest but the last. taylor and ppl have the published defaults --calib-samples 10 --seq-len 128 --seed "
    "1234, all others 128, 2048 and 0")

def arguments():
    p = cli.parser(__doc__, "python prune.py --model smollm2-135m --n-prune 7 --calib-samples 16 --seq-len 512")
    cli.add_model_flags(p)
    which = p.add_argument_group("what to remove")
    which.add_argument("--n-prune", type=int, help="number of layers")
    which.add_argument("--ratio", type=float, help="or: share of all parameters, for instance 0.25; nearest n")
    which.add_argument("--layers", help="or: explicit list, for instance 23-29 or 3,5,7 (0-based, ends included); "
                                        "paper or paper:METHOD takes table 7, with --n-prune where it has several")
    p.add_argument("--metric", choices=METRICS, default="cosine", help=METRIC_HELP)
    for field, place in (("protect_first", "start"), ("protect_last", "end")):
        defaults = ", ".join(f"{name} {getattr(metric, field)}" for name, metric in METRICS.items())
        p.add_argument("--" + field.replace("_", "-"), type=cli.non_negative,
                       help=f"layers at the {place} that stay (sleb: of those left at each step); default {defaults}")
    cli.add_data_flags(p)
    cli.add_calibration_flags(p, {"sleb-lines": "SLEB's released loader, --calib-samples random lines joined by blank "
                                                "lines and cut into the few windows that fit"})
    p.set_defaults(**dict.fromkeys(CALIBRATION))
    cli.add_output_flags(p, "selection file; default runs/<model>/selection.json")
    p.add_argument("--stats", type=Path, help="statistics to read or write; default stats.safetensors beside --out")
    p.add_argument("--save-model", type=Path, help="also write the pruned model as a folder")
    args = p.parse_args()
    ways = [name for name in ("n_prune", "ratio", "layers") if getattr(args, name) is not None]
    if ways != ["n_prune", "layers"] and len(ways) != 1:
        p.error("give one of --n-prune, --ratio and --layers")
    if len(ways) == 2 and not args.layers.startswith("paper"):
        p.error("--layers already says how many; drop --n-prune")
    if args.calib_sampling == "sleb-lines" and (args.layers or METRICS[args.metric].reads != "windows"):
        names = ", ".join(name for name, metric in METRICS.items() if metric.reads == "windows")
        p.error(f"--calib-sampling sleb-lines: only for --metric {names}")
    published = args.metric.rstrip("+") in ("taylor", "ppl") and args.layers is None
    for name, value in (SHORTENED_LLAMA if published else CALIBRATION).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def paper_layers(model, method, n_prune):
    """Removed layers of table 7 for a preset. Raises UserError listing what there is."""
    table = json.loads((resources.files("utils") / "paper_results.json").read_text())["selections"]
    rows = [row for row in table if row["model"] == model]
    if not rows:
        raise UserError(f"--layers paper: table 7 has no row for {model}; it has "
                        f"{', '.join(sorted({row['model'] for row in table}))}")
    named = [row for row in rows if (row["method"] == method if method else
                                     row["method"] in ("linearpatch[S/L]", "linearpatch[L]"))]
    named = [row for row in named if n_prune in (None, row["n_pruned"])]
    if len(named) != 1:
        choices = ", ".join(f"paper:{row['method']} --n-prune {row['n_pruned']}" for row in rows)
        raise UserError(f"--layers paper: {len(named)} rows of table 7 fit; choose one of\n{choices}")
    return named[0]["removed_layers"]


def plan(args, session):
    """(recipe, calibration info or None, metric name, function that gives the Selection). Raises UserError."""
    total, per_layer = session.parameters
    recipe = {"model": session.source.identity()}
    if args.layers is not None:
        name, _, method = args.layers.partition(":")
        order = paper_layers(args.model, method, args.n_prune) if name == "paper" else cli.parse_layers(args.layers)
        if order and max(order) >= len(per_layer):
            raise UserError(f"--layers {args.layers}: the model has layers 0 to {len(per_layer) - 1}")
        check_n_prune(len(order), len(per_layer))
        return {**recipe, "layers": order}, None, "list", lambda: Selection(tuple(sorted(order)), tuple(order), ())
    n_prune = args.n_prune if args.ratio is None else n_for_ratio(args.ratio, total, per_layer)
    check_n_prune(n_prune, len(per_layer))
    if n_prune == 0:
        return {**recipe, "layers": []}, None, args.metric, lambda: Selection((), (), ())
    legal = legal_range(args.metric, n_prune, len(per_layer), args.protect_first, args.protect_last)
    recipe.update(metric=args.metric, n_prune=n_prune, protect=[args.protect_first, args.protect_last])
    data = calibration = None
    reads = METRICS[args.metric].reads
    if reads == "stats":
        data, recipe["stats"], calibration = session.stats(args.stats)
    elif reads == "windows":
        windows = session.calibration()
        data, calibration = windows.ids, windows.info
        recipe.update(token_ids_sha256=calibration["token_ids_sha256"], windows=len(data), seq_len=data.shape[1],
                      dtype=session.dtype_name)
    elif args.metric == "random":
        recipe["seed"] = args.seed
    return recipe, calibration, args.metric, partial(choose, args, session, recipe, data, legal)


def choose(args, session, recipe, data, legal):
    """The Selection by --metric. data: Stats, windows int64 [N, T] or None, as the metric reads them."""
    n_prune, (first, last), num_layers = recipe["n_prune"], legal, session.source.shape[0]
    family = args.metric.rstrip("+")
    if METRICS[args.metric].reads == "stats":
        return select(data, args.metric, n_prune, first, last)
    if family == "sleb":
        return search(args, session.decoder, recipe, data, legal)
    if family == "taylor":
        scores = taylor_scores(session.decoder, data, args.batch_size)
    elif family == "ppl":
        scores = [None] * num_layers
        candidates = range(first, num_layers - last)
        for layer, loss in zip(candidates, removal_losses(session.decoder, data, candidates, args.batch_size)):
            scores[layer] = perplexity(loss)
    elif family == "mag":
        scores = magnitudes(session.decoder)
    elif family == "random":
        scores = random_scores(num_layers, args.seed)
    else:
        scores = distances_from_end(num_layers)
    return one_shot(scores, n_prune, first, last)


def progress_path(args):
    return args.out.with_suffix(".progress.json")


def search(args, decoder, recipe, input_ids, legal):
    """SLEB's greedy search. What is finished lies beside --out, so that a killed call goes on from there."""
    path, n_prune, rounds = progress_path(args), recipe["n_prune"], []
    recipe = {**recipe, "n_prune": None}  # a search for fewer layers is the start of one for more
    if path.exists() and not args.force:
        found = read_json(path, "progress")
        differing = recipe_difference(found["recipe"], recipe)
        if differing:
            print(f"{path}: made with another {differing}; starting anew")
        else:
            rounds = checked_rounds(found["rounds"], decoder.num_layers, path)
            print(f"{path}: goes on behind {len(rounds)} removed layers")
    return greedy(decoder, input_ids, n_prune, *legal, args.batch_size, rounds,
                  lambda rounds: write_json(path, "progress", {"recipe": recipe, "rounds": rounds}))


def checked_rounds(rounds, num_layers, path):
    """Finished rounds of a search as a progress file has them. Raises UserError when they are damaged."""
    layers = [done.get("layer") for done in rounds if isinstance(done, dict) and isinstance(done.get("scores"), list)]
    if len(layers) < len(rounds) or not set(layers) <= set(range(num_layers)) or len(set(layers)) < len(layers):
        raise UserError(f"{path}: its rounds are damaged; delete it, or --force starts anew")
    return rounds


def summary(selection, metric):
    """Up to three best candidates in words; of a greedy search what each removal cost."""
    rows = selection.scores
    if metric == "sleb":
        rows = [row for row in rows if row["layer"] == selection.order[row["round"] - 1]]
        return [f"round {row['round']}: layer {row['layer']}, loss {row['score']:.4f}" for row in rows]
    rows = sorted(rows, key=lambda row: row["score"], reverse=metric.startswith("cosine"))[:3]
    places = [f"[{row['start']}, {row['end']})" if "start" in row else f"layer {row['layer']}" for row in rows]
    return [f"{place}: {row['score']:.6f}" for place, row in zip(places, rows)]


def main():
    args = arguments()
    args.out = args.out or default_folder(args.model) / "selection.json"
    args.stats = args.stats or args.out.with_name("stats.safetensors")
    cli.check_outputs(args, out=".json", stats=".safetensors")
    session = Session(args)
    if args.save_model:
        session.tokenizer  # a model folder needs one: fail before any work
    if session.source.is_patched:
        raise UserError(f"--model {args.model}: already carries patches; prune the model that it was made from")
    recipe, calibration, metric, compute = plan(args, session)
    stored = read_json(args.out, "selection") if reusable(args.out, "selection", recipe, args.force) else None
    costly = metric in METRICS and METRICS[metric].reads in ("windows", "weights")
    selection = Selection.stored(stored, args.out) if stored and costly else compute()
    total, per_layer = session.parameters
    lists = layer_lists(len(per_layer), selection.removed)
    parameters = parameter_accounting(total, per_layer, selection.removed, session.source.shape[1])

    if stored:
        if stored["removed"] != lists["removed"]:
            raise UserError(f"{args.out}: its removed layers were edited and do not follow from its recipe; "
                            "use --layers for a list of your own, or --force")
    else:
        write_json(args.out, "selection", {
            "model": session.source.identity(), "metric": metric, "n_prune": len(selection.removed), **lists,
            "order": list(selection.order), "scores": list(selection.scores), "parameters": parameters,
            "calibration": calibration, "recipe": recipe, "provenance": session.watch.provenance()})
        if metric == "sleb":
            progress_path(args).unlink(missing_ok=True)

    print(f"remove layers {lists['removed']} (0-based), keep {lists['kept']}")
    print("runs (half-open): " + (", ".join(f"[{a}, {b})" for a, b in lists["runs"]) or "none"))
    for line in summary(selection, metric):
        print(f"  {metric} {line}")
    print(f"{len(selection.removed)} of {len(per_layer)} layers removed; parameters {total:,} -> "
          f"{total - parameters['removed']:,} ({parameters['ratio_percent']:.2f} %; "
          f"{parameters['ratio_with_patch_percent']:.2f} % with a dense patch per run)")
    if len(selection.removed) > 0.25 * len(per_layer):
        print(f"warning: {100 * len(selection.removed) / len(per_layer):.0f} % of the layers go; above 25 % most models "
              "lose much, small ones more")
    print(f"wrote {args.out}")
    if args.save_model:
        save_folder(session.decoder, session.tokenizer, Variant("pruned", selection.removed), args.save_model,
                    {"stage": "pruned", "base_model": session.source.identity(), "calibration": calibration,
                     "seed": args.seed})
        print(f"wrote {args.save_model} (layers {len(lists['kept'])}, patch no)")


if __name__ == "__main__":
    cli.run(main)
