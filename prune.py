"""Choose the layers to remove (paper, section 3.1, appendices A and F) and write selection.json.

The cosine family reads stats.safetensors, which one forward pass over the calibration windows gives, for every n.
sleb, ppl and taylor need the loss on the windows, mag the weights only, random and last nothing.
"""

import argparse
import itertools
from pathlib import Path

from utils import cli
from utils.artifacts import read_json, recipe_difference, reusable, write_json
from utils.baselines import BASELINES
from utils.baselines.laco import add_flags
from utils.decoder import Variant
from utils.errors import UserError
from utils.layers import Layers, check_count, count_for_ratio, parameter_accounting, published_layers
from utils.metrics import METRICS, PAPER, Evidence, choose, protected_layers
from utils.model_folder import save_folder
from utils.search import Selection, checked_rounds, rounds_of
from utils.session import Session, default_folder

METHODS = {**METRICS, **BASELINES}  # baselines change the weights of what stays


def arguments():
    p = cli.parser(__doc__, "python prune.py --model smollm2-135m --n-prune 7 --calib-samples 16 --seq-len 512")
    cli.add_model_flags(p)
    which = p.add_argument_group("what to remove")
    which.add_argument("--n-prune", type=int, nargs="+",
                       help="number of layers; several share one computation and need {n} in --out")
    which.add_argument("--ratio", type=float, help="or: share of all parameters, for instance 0.25; nearest n")
    which.add_argument("--layers", help="or: explicit list, for instance 23-29 or 3,5,7 (0-based, ends included); "
                                        "paper or paper:METHOD takes table 7, with --n-prune where it has several")
    p.add_argument("--metric", choices=METHODS, default="cosine", metavar="METRIC", help="one of those below")
    p.epilog += cli.listed("metrics", {name: method.help for name, method in METHODS.items()}) + calibrations()
    for place, name in enumerate(("first", "last")):
        defaults = ", ".join(f"{metric.name} {metric.protect[place]}" for metric in METRICS.values())
        p.add_argument(f"--protect-{name}", type=cli.non_negative,
                       help=f"layers that stay at the {('start', 'end')[place]}; default {defaults}")
    cli.add_data_flags(p)
    cli.add_calibration_flags(p, {"sleb-lines": "SLEB's released loader, --calib-samples random lines joined by blank "
                                                "lines and cut into the few windows that fit"})
    p.set_defaults(**dict.fromkeys(PAPER))
    add_flags(p)
    cli.add_output_flags(p, "selection file; default runs/<model>/selection.json; {n} stands for the number of layers")
    p.add_argument("--stats", type=Path, help="statistics to read or write; default stats.safetensors beside --out")
    p.add_argument("--save-model", type=Path, help="also write the pruned model as a folder")
    args = p.parse_args()
    check_flags(p, args)
    for name, published in (PAPER if args.layers else METHODS[args.metric].calibration).items():
        setattr(args, name, published if getattr(args, name) is None else getattr(args, name))
    return args


def calibrations():
    """The published calibrations of METHODS, which are the defaults, as a list for --help."""
    names = {}
    for name, method in METHODS.items():
        flags = " ".join(f"--{flag.replace('_', '-')} {value}" for flag, value in method.calibration.items())
        names.setdefault(flags, []).append(name)
    return cli.listed("published calibrations, the defaults", {flags: ", ".join(n) for flags, n in names.items()})


def check_flags(p, args):
    """Leave with exit code 2 when flags do not go together."""
    ways = [name for name in ("n_prune", "ratio", "layers") if getattr(args, name) is not None]
    if ways != ["n_prune", "layers"] and len(ways) != 1:
        p.error("give one of --n-prune, --ratio and --layers")
    if args.n_prune and len(args.n_prune) > 1 and (
            args.layers or args.save_model or args.metric in BASELINES or "{n}" not in str(args.out)):
        p.error("several --n-prune: only with {n} in --out, "
                f"and without --layers, --save-model, {' and '.join(BASELINES)}")
    if not args.n_prune and "{n}" in str(args.out) or "{n}" in str(args.stats):
        p.error("{n} stands for --n-prune in --out, and for nothing elsewhere")
    for baseline in BASELINES.values():
        baseline.check_flags(p, args)
    if len(ways) == 2 and not args.layers.startswith("paper"):
        p.error("--layers already says how many; drop --n-prune")
    readers = [name for name, metric in METRICS.items() if metric.reads == "windows"]
    if args.calib_sampling == "sleb-lines" and (args.layers or args.metric not in readers):
        p.error(f"--calib-sampling sleb-lines: only for --metric {', '.join(readers)}")


def main():
    # One call for each n, the largest first: the others are parts of it.
    args = arguments()
    args.out = args.out or default_folder(args.model) / "selection.json"
    fixed = Path(*itertools.takewhile(lambda part: "{n}" not in part, args.out.parts[:-1]))  # without {n}
    args.stats = args.stats or fixed / "stats.safetensors"
    calls = [argparse.Namespace(**{**vars(args), "n_prune": n, "out": Path(str(args.out).replace("{n}", str(n)))})
             for n in sorted(args.n_prune or [None], key=lambda n: -(n or 0))]

    # Wrong input is found before anything is written.
    session = Session(args)
    depth = session.source.shape[0]
    for each in calls:
        cli.check_outputs(each, out=".json", stats=".safetensors")
        if len(calls) > 1:
            protected_layers(args.metric, each.n_prune, depth, args.protect_first, args.protect_last)
            if each.out.exists() and not args.force:
                read_json(each.out, "selection")
    if args.save_model:
        session.tokenizer  # a model folder needs one
    if session.source.is_patched:
        raise UserError(f"--model {args.model}: already carries patches; prune the model that it was made from")

    if args.metric in BASELINES:
        return BASELINES[args.metric](calls[0], session).run()
    evidence = Evidence(depth, lambda: session.stats(args.stats)[0], lambda: session.calibration().ids,
                        lambda: session.decoder, args.seed, args.batch_size,
                        lambda reads: describe(reads, args, session))
    for each in calls:
        layers, about, calibration = prune(each, session, evidence)
    if args.save_model:
        save_folder(session.decoder, session.tokenizer, Variant("pruned", layers, about=about), args.save_model,
                    {"base_model": session.source.json(), "calibration": calibration, "seed": args.seed})
        print(f"wrote {args.save_model} (layers {len(layers.kept)}, patch no)")


def prune(args, session, evidence):
    """Choose, write and print the selection of one n: (Layers, about, calibration info)."""
    depth, (total, per_layer) = session.source.shape[0], session.parameters

    # What determines the choice: a list, or a metric and what it reads.
    calibration, is_costly, is_search = None, False, False
    if args.layers is not None:
        order = listed_layers(args, depth)
        name, n_prune, recipe = "list", len(order), {"layers": order}
    else:
        n_prune = args.n_prune if args.ratio is None else count_for_ratio(args.ratio, total, per_layer)
        check_count(n_prune, depth)
        name, recipe = args.metric, {"metric": args.metric, "n_prune": n_prune}
    if args.layers is None and n_prune:
        metric, legal = METRICS[name], protected_layers(name, n_prune, depth, args.protect_first, args.protect_last)
        read, calibration = evidence.described(metric.reads)
        recipe.update(protect=list(legal), **read)
        is_costly, is_search = metric.reads in ("windows", "weights"), metric.gives == "set"
    recipe["model"] = session.source.json()

    # Choose, unless --out holds this choice.
    stored = read_json(args.out, "selection") if reusable(args.out, "selection", recipe, args.force) else None
    if stored and is_costly:
        selection = Selection.stored(stored, depth, args.out)
        if is_search:
            rounds = checked_rounds(rounds_of(selection), depth, *legal, args.out)
            evidence.rounds = max(evidence.rounds, rounds, key=len)
    elif args.layers is not None:
        selection = Selection(Layers(depth, tuple(order)), tuple(order), ())
    else:
        if is_search:
            go_on(args, recipe, evidence, legal)
        selection = choose(name, evidence, n_prune, args.protect_first, args.protect_last)
    layers, about = selection.layers, {"metric": name, "n": n_prune, "repair": "none", "stage": "pruned"}
    if stored and (stored["removed"], stored["about"]) != (list(layers.removed), about):
        raise UserError(f"{args.out}: its removed layers were edited and do not follow from its recipe; "
                        "use --layers for a list of your own, or --force")

    # Write.
    parameters = parameter_accounting(total, per_layer, layers, session.source.shape[1])
    if not stored:
        write_json(args.out, "selection", {
            "model": session.source.json(), "about": about, **layers.json(), "order": list(selection.order),
            "scores": list(selection.scores), "parameters": parameters, "calibration": calibration, "recipe": recipe,
            "provenance": session.watch.provenance(lap=True)})
        progress_path(args).unlink(missing_ok=True)
    show(args, selection, name, parameters)
    return layers, about, calibration


def listed_layers(args, depth):
    """The layers of --layers, in order. Raises UserError."""
    word, _, method = args.layers.partition(":")
    order = published_layers(args.model, method, args.n_prune) if word == "paper" else cli.parse_layers(args.layers)
    if order and max(order) >= depth:
        raise UserError(f"--layers {args.layers}: the model has layers 0 to {depth - 1}")
    check_count(len(order), depth)
    return order


def describe(reads, args, session):
    """(part of the recipe, calibration info or None) of what a metric reads."""
    if reads == "stats":
        _, recipe, calibration = session.stats(args.stats)
        return {"stats": recipe}, calibration
    if reads == "windows":
        return session.windows_recipe()
    return {"seed": args.seed} if reads == "seed" else {}, None


def progress_path(args):
    return args.out.with_suffix(".progress.json")


def go_on(args, recipe, evidence, legal):
    """Let a search write its rounds beside --out as they are finished, and go on from those of a killed call."""
    path, recipe = progress_path(args), {**recipe, "n_prune": None}  # one for fewer layers is its start
    evidence.after_round = lambda rounds: write_json(path, "progress", {"recipe": recipe, "rounds": rounds})
    if path.exists() and not args.force:
        found = read_json(path, "progress")
        if differing := recipe_difference(found["recipe"], recipe):
            print(f"{path}: made with another {differing}; starting anew")
        else:
            evidence.rounds = checked_rounds(found["rounds"], evidence.depth, *legal, path)
            print(f"{path}: goes on after {len(evidence.rounds)} removed layers")


def show(args, selection, name, parameters):
    """Print what goes, what the metric saw, and what that saves."""
    layers, gone = selection.layers, len(selection.layers.removed)
    print(f"remove layers {list(layers.removed)} (0-based), keep {layers.kept}")
    print(f"runs (half-open): {layers}")
    for line in summary(selection, name):
        print(f"  {name} {line}")
    print(f"{gone} of {layers.depth} layers removed; parameters {parameters['before']:,} -> "
          f"{parameters['before'] - parameters['removed']:,} ({parameters['ratio_percent']:.2f} %; "
          f"{parameters['ratio_with_patch_percent']:.2f} % with a dense patch per run)")
    if gone > 0.25 * layers.depth:
        print(f"warning: {100 * gone / layers.depth:.0f} % of the layers go; above 25 % most models lose much, small "
              "ones more")
    print(f"wrote {args.out}")


def summary(selection, name):
    """Up to three best candidates in words; of a search what each removal cost."""
    rows = selection.scores
    if rows and "round" in rows[0]:
        rows = [row for row in rows if row["layer"] == selection.order[row["round"] - 1]]
        return [f"round {row['round']}: layer {row['layer']}, loss {row['score']:.4f}" for row in rows]
    reverse = name in METRICS and METRICS[name].larger_is_better
    rows = sorted(rows, key=lambda row: row["score"], reverse=reverse)[:3]
    places = [f"[{row['start']}, {row['end']})" if "start" in row else f"layer {row['layer']}" for row in rows]
    return [f"{place}: {row['score']:.6f}" for place, row in zip(places, rows)]


if __name__ == "__main__":
    cli.run(main)
