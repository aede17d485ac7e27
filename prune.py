"""Choose the layers to remove (paper, section 3.1, appendices A and F) and write selection.json.

The cosine family reads stats.safetensors, which one forward pass over the calibration windows gives, for every n.
sleb, ppl and taylor need the loss on the windows, mag the weights only, random and last nothing.
"""

import argparse
import itertools
import json
from functools import cached_property
from pathlib import Path

from utils import cli
from utils.artifacts import read_json, recipe_difference, reusable, sha256_json, write_json
from utils.errors import UserError
from utils.baselines.laco import FLAGS as LACO_FLAGS
from utils.baselines.laco import Laco, add_flags
from utils.paper.experiments import paper
from utils.patch import layer_lists
from utils.evaluation.objectives import perplexity
from utils.search import greedy, removal_losses
from utils.selection import (METRICS, Selection, check_n_prune, distances_from_end, legal_range, magnitudes,
                             n_for_ratio, one_shot, parameter_accounting, random_scores, select)
from utils.session import Session, default_folder
from utils.model_folder import save_folder
from utils.taylor import taylor_scores
from utils.variants import Variant
from utils.baselines.llm_pruner import LLMPruner

BASELINES = {"laco": Laco, "llm-pruner": LLMPruner}  # metrics that change the weights of what stays
CALIBRATION = {"calib_samples": 128, "seq_len": 2048, "seed": 0}
SHORTENED_LLAMA = {"calib_samples": 10, "seq_len": 128, "seed": 1234}  # as published for taylor and ppl
LLM_PRUNER = {**CALIBRATION, "calib_samples": 10, "seq_len": 64}  # as published; laco reads few short windows as well
METRIC_HELP = (
    "cosine is eq. (2); sleb removes layer by layer what costs least loss; taylor, ppl and mag rank single layers by "
    "gradients, perplexity without the layer and size of the weights; + keeps layers 0-3 and the last two; last takes "
    "the deepest but the last. taylor and ppl have the published defaults --calib-samples 10 --seq-len 128 --seed "
    "1234, all others 128, 2048 and 0, but laco and llm-pruner, which read 10 windows of 64 tokens. These two change "
    "weights and need --save-model: laco merges layers; llm-pruner makes them narrower, by default 4 to 29 of 32, in "
    "proportion")


def arguments():
    p = cli.parser(__doc__, "python prune.py --model smollm2-135m --n-prune 7 --calib-samples 16 --seq-len 512")
    cli.add_model_flags(p)
    which = p.add_argument_group("what to remove")
    which.add_argument("--n-prune", type=int, nargs="+",
                       help="number of layers; several share one computation and need {n} in --out")
    which.add_argument("--ratio", type=float, help="or: share of all parameters, for instance 0.25; nearest n")
    which.add_argument("--layers", help="or: explicit list, for instance 23-29 or 3,5,7 (0-based, ends included); "
                                        "paper or paper:METHOD takes table 7, with --n-prune where it has several")
    p.add_argument("--metric", choices=(*METRICS, *BASELINES), default="cosine", help=METRIC_HELP)
    for field, place in (("protect_first", "start"), ("protect_last", "end")):
        defaults = ", ".join(f"{name} {getattr(metric, field)}" for name, metric in METRICS.items())
        p.add_argument("--" + field.replace("_", "-"), type=cli.non_negative,
                       help=f"layers at the {place} that stay (sleb: of those left at each step); default {defaults}")
    cli.add_data_flags(p)
    cli.add_calibration_flags(p, {"sleb-lines": "SLEB's released loader, --calib-samples random lines joined by blank "
                                                "lines and cut into the few windows that fit"})
    p.set_defaults(**dict.fromkeys(CALIBRATION))
    add_flags(p)
    cli.add_output_flags(p, "selection file; default runs/<model>/selection.json; {n} stands for the number of layers")
    p.add_argument("--stats", type=Path, help="statistics to read or write; default stats.safetensors beside --out")
    p.add_argument("--save-model", type=Path, help="also write the pruned model as a folder")
    args = p.parse_args()
    ways = [name for name in ("n_prune", "ratio", "layers") if getattr(args, name) is not None]
    if ways != ["n_prune", "layers"] and len(ways) != 1:
        p.error("give one of --n-prune, --ratio and --layers")
    if args.n_prune and len(args.n_prune) > 1:
        if args.layers or args.save_model or args.metric in BASELINES or "{n}" not in str(args.out):
            p.error("several --n-prune: only with {n} in --out, "
                    "and without --layers, --save-model, laco and llm-pruner")
    if not args.n_prune and "{n}" in str(args.out) or "{n}" in str(args.stats):
        p.error("{n} stands for --n-prune in --out, and for nothing elsewhere")
    check_baseline_flags(p, args)
    if len(ways) == 2 and not args.layers.startswith("paper"):
        p.error("--layers already says how many; drop --n-prune")
    if args.calib_sampling == "sleb-lines" and (
            args.layers or args.metric in BASELINES or METRICS[args.metric].reads != "windows"):
        names = ", ".join(name for name, metric in METRICS.items() if metric.reads == "windows")
        p.error(f"--calib-sampling sleb-lines: only for --metric {names}")
    published = args.metric.rstrip("+") in ("taylor", "ppl") and args.layers is None
    defaults = SHORTENED_LLAMA if published else LLM_PRUNER if args.metric in BASELINES else CALIBRATION
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def check_baseline_flags(p, args):
    """Leave with exit code 2 when flags do not fit laco or llm-pruner, or are laco's under another metric."""
    flag = next((f"--{name.replace('_', '-')}" for name in LACO_FLAGS if getattr(args, name) is not None), None)
    if flag and args.metric != "laco":
        p.error(f"{flag} belongs to --metric laco")
    if args.metric not in BASELINES:
        return
    if args.layers is not None:
        p.error(f"--metric {args.metric} takes --n-prune or --ratio, no --layers")
    if args.metric == "laco" and (args.protect_first is not None or args.protect_last is not None):
        p.error("--metric laco takes --laco-range instead of --protect-first and --protect-last")


def change_weights(args, session):
    """laco and llm-pruner: selection.json, and the model whose kept weights they change in --save-model."""
    baseline = BASELINES[args.metric](args, session)
    stored = reusable(args.out, "selection", baseline.recipe, args.force)
    content = read_json(args.out, "selection") if stored else {
        "model": session.source.identity(), "metric": args.metric, **baseline.select(),
        "calibration": baseline.windows.info, "recipe": baseline.recipe}
    fingerprint = sha256_json({name: value for name, value in content.items() if name != "provenance"})
    folder_is_there = stored and args.save_model and made_from(args.save_model, fingerprint)
    if stored and not folder_is_there:
        baseline.check(content, args.out)
    elif not stored:
        write_json(args.out, "selection", {**content, "provenance": session.watch.provenance(session.decoder)})
    for line in baseline.report(content):
        print(line)
    parameters = content["parameters"]
    print(f"parameters {parameters['before']:,} -> {parameters['before'] - parameters['removed']:,} "
          f"({parameters['ratio_percent']:.2f} %)")
    print(f"wrote {args.out}")
    if folder_is_there:
        print(f"{args.save_model}: reused (made from this selection; --force writes it anew)")
    elif args.save_model:
        described = baseline.save(content, {"base_model": session.source.identity(), "seed": args.seed,
                                            "calibration": baseline.windows.info, "selection_sha256": fingerprint})
        print(f"wrote {args.save_model} ({described})")


def made_from(folder, fingerprint):
    """Whether a model folder of this project was written from the selection with this sha256."""
    about = folder / "linearpatch.json"
    return about.is_file() and json.loads(about.read_text()).get("selection_sha256") == fingerprint


def paper_layers(model, method, n_prune):
    """Removed layers of table 7 for a preset. Raises UserError listing what there is."""
    table = paper()["selections"]
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


class Needed:
    """What the metric reads and computes, had once however many n are asked for."""

    def __init__(self, args, session):
        self.args, self.session = args, session
        self.rounds = []  # of sleb, for the largest n so far

    @cached_property
    def stats(self):
        return self.session.stats(self.args.stats)

    @cached_property
    def windows(self):
        return self.session.calibration()

    def scores(self, legal):
        """One score a layer for the metrics that rank single layers; None where the metric never looks."""
        if not hasattr(self, "_scores"):
            self._scores = self._compute(legal)
        return self._scores

    def _compute(self, legal):
        args, (first, last), num_layers = self.args, legal, self.session.source.shape[0]
        family = args.metric.rstrip("+")
        if family == "taylor":
            return taylor_scores(self.session.decoder, self.windows.ids, args.batch_size)
        if family == "ppl":
            candidates = range(first, num_layers - last)
            losses = removal_losses(self.session.decoder, self.windows.ids, candidates, args.batch_size)
            return [None] * first + [perplexity(loss) for loss in losses] + [None] * last
        if family == "mag":
            return magnitudes(self.session.decoder)
        return random_scores(num_layers, args.seed) if family == "random" else distances_from_end(num_layers)


def plan(args, session, needed):
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
    calibration, reads = None, METRICS[args.metric].reads
    if reads == "stats":
        _, recipe["stats"], calibration = needed.stats
    elif reads == "windows":
        calibration, (windows, seq_len) = needed.windows.info, needed.windows.ids.shape
        recipe.update(token_ids_sha256=calibration["token_ids_sha256"], windows=windows, seq_len=seq_len,
                      dtype=session.dtype_name)
    elif args.metric == "random":
        recipe["seed"] = args.seed
    return recipe, calibration, args.metric, lambda: choose(args, session, needed, recipe, legal)


def choose(args, session, needed, recipe, legal):
    """The Selection by --metric."""
    n_prune = recipe["n_prune"]
    if METRICS[args.metric].reads == "stats":
        return select(needed.stats[0], args.metric, n_prune, *legal)
    if args.metric == "sleb":
        return search(args, session.decoder, recipe, needed, legal)
    return one_shot(needed.scores(legal), n_prune, *legal)


def progress_path(args):
    return args.out.with_suffix(".progress.json")


def search(args, decoder, recipe, needed, legal):
    """SLEB's greedy search. What is finished lies beside --out, so that a killed call goes on from there."""
    path, n_prune, rounds = progress_path(args), recipe["n_prune"], list(needed.rounds)
    recipe = {**recipe, "n_prune": None}  # a search for fewer layers is the start of one for more
    if path.exists() and not args.force:
        found = read_json(path, "progress")
        differing = recipe_difference(found["recipe"], recipe)
        if differing:
            print(f"{path}: made with another {differing}; starting anew")
        else:
            rounds = checked_rounds(found["rounds"], decoder.num_layers, legal, path)
            print(f"{path}: goes on behind {len(rounds)} removed layers")
    return greedy(decoder, needed.windows.ids, n_prune, *legal, args.batch_size, rounds,
                  lambda rounds: write_json(path, "progress", {"recipe": recipe, "rounds": rounds}))


def rounds_of(selection):
    """The rounds of a search from its Selection."""
    return [{"layer": layer, "scores": [row for row in selection.scores if row.get("round") == number]}
            for number, layer in enumerate(selection.order, 1)]


def checked_rounds(rounds, num_layers, legal, path):
    """Finished rounds of a search, if each removed its best candidate. Raises UserError when they are damaged."""
    removed, (first, last) = [], legal
    try:
        for done in rounds:
            alive = [layer for layer in range(num_layers) if layer not in removed]
            candidates = alive[first:len(alive) - last]
            losses = {row["layer"]: row["score"] for row in done["scores"] if row["complete"]}
            fits = sorted(row["layer"] for row in done["scores"]) == candidates
            if not fits or done["layer"] != min(losses, key=lambda layer: (losses[layer], layer)):
                raise ValueError
            removed.append(done["layer"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: its rounds are damaged; delete it, or --force starts anew") from None
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
    fixed = Path(*itertools.takewhile(lambda part: "{n}" not in part, args.out.parts[:-1]))  # without {n}
    args.stats = args.stats or fixed / "stats.safetensors"
    session = Session(args)
    needed, calls = Needed(args, session), []
    for n_prune in sorted(args.n_prune or [None], key=lambda n: -(n or 0)):  # the largest first: others are parts of it
        each = argparse.Namespace(**{**vars(args), "n_prune": n_prune})
        each.out = Path(str(args.out).replace("{n}", str(n_prune)))
        cli.check_outputs(each, out=".json", stats=".safetensors")
        if len(args.n_prune or ()) > 1:  # wrong input is found before anything is written
            legal_range(args.metric, n_prune, session.source.shape[0], args.protect_first, args.protect_last)
            if each.out.exists() and not args.force:
                read_json(each.out, "selection")
        calls.append(each)
    for each in calls:
        prune(each, session, needed)


def prune(args, session, needed):
    """Write the selection of one n, and with --save-model its folder."""
    if args.save_model:
        session.tokenizer  # a model folder needs one: fail before any work
    if session.source.is_patched:
        raise UserError(f"--model {args.model}: already carries patches; prune the model that it was made from")
    if args.metric in BASELINES:
        return change_weights(args, session)
    recipe, calibration, metric, compute = plan(args, session, needed)
    stored = read_json(args.out, "selection") if reusable(args.out, "selection", recipe, args.force) else None
    costly = metric in METRICS and METRICS[metric].reads in ("windows", "weights")
    selection = Selection.stored(stored, args.out) if stored and costly else compute()
    if metric == "sleb" and selection.order:
        legal = legal_range(metric, 0, session.source.shape[0], args.protect_first, args.protect_last)
        rounds = checked_rounds(rounds_of(selection), session.source.shape[0], legal, args.out)
        needed.rounds = max(needed.rounds, rounds, key=len)
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
            "calibration": calibration, "recipe": recipe, "provenance": session.watch.provenance(lap=True)})
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
        print(f"warning: {100 * len(selection.removed) / len(per_layer):.0f} % of the layers go; above 25 % most "
              "models lose much, small ones more")
    print(f"wrote {args.out}")
    if args.save_model:
        save_folder(session.decoder, session.tokenizer, Variant("pruned", selection.removed), args.save_model,
                    {"stage": "pruned", "base_model": session.source.identity(), "calibration": calibration,
                     "seed": args.seed})
        print(f"wrote {args.save_model} (layers {len(lists['kept'])}, patch no)")


if __name__ == "__main__":
    cli.run(main)
