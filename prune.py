"""Choose the layers to remove (paper, section 3.1, appendices A and F) and write selection.json.

One forward pass over the calibration windows gives stats.safetensors; every further n or metric reads it.
"""

import json
import sys
from importlib import resources
from pathlib import Path

from utils import cli
from utils.artifacts import read_json, reusable, write_json
from utils.errors import UserError
from utils.merging import FLAGS as LACO_FLAGS
from utils.merging import Laco, add_flags
from utils.models import PRESETS
from utils.patch import layer_lists
from utils.selection import METRICS, Selection, check_n_prune, n_for_ratio, parameter_accounting, select
from utils.session import Session, default_folder
from utils.surgery import save_folder
from utils.variants import Variant
from utils.width import LLMPruner

BASELINES = {"laco": Laco, "llm-pruner": LLMPruner}  # metrics that change the weights of what stays
FEW_WINDOWS = (10, 64)  # samples and tokens of their calibration, as LLM-Pruner publishes


def arguments():
    p = cli.parser(__doc__, "python prune.py --model smollm2-135m --n-prune 7 --calib-samples 16 --seq-len 512")
    cli.add_model_flags(p)
    which = p.add_argument_group("what to remove")
    which.add_argument("--n-prune", type=int, help="number of layers")
    which.add_argument("--ratio", type=float, help="or: share of all parameters, for instance 0.25; nearest n")
    which.add_argument("--layers", help="or: explicit list, for instance 23-29 or 3,5,7 (0-based, ends included); "
                                        "paper or paper:METHOD takes table 7, with --n-prune where it has several")
    p.add_argument("--metric", choices=(*METRICS, *BASELINES), default="cosine",
                   help="cosine is eq. (2); laco merges layers; llm-pruner makes layers narrower, by default 4 to 29 "
                        "of 32 in proportion to the depth; both need --save-model and read 10 windows of 64 tokens "
                        "unless told otherwise")
    p.add_argument("--protect-first", type=cli.non_negative, help="layers at the start that stay; default 1 (shortgpt 0)")
    p.add_argument("--protect-last", type=cli.non_negative, help="layers at the end that stay; default 1 (shortgpt 0)")
    cli.add_data_flags(p)
    cli.add_calibration_flags(p)
    add_flags(p)
    cli.add_output_flags(p, "selection file; default runs/<model>/selection.json")
    p.add_argument("--stats", type=Path, help="statistics to read or write; default stats.safetensors beside --out")
    p.add_argument("--save-model", type=Path, help="also write the pruned model as a folder")
    args = p.parse_args()
    ways = [name for name in ("n_prune", "ratio", "layers") if getattr(args, name) is not None]
    if ways != ["n_prune", "layers"] and len(ways) != 1:
        p.error("give one of --n-prune, --ratio and --layers")
    check_baseline_flags(p, args)
    if len(ways) == 2 and not args.layers.startswith("paper"):
        p.error("--layers already says how many; drop --n-prune")
    return args


def check_baseline_flags(p, args):
    """Flags of laco and llm-pruner fit the metric; their calibration is short unless told otherwise."""
    flag = next((f"--{name.replace('_', '-')}" for name in LACO_FLAGS if getattr(args, name) is not None), None)
    if flag and args.metric != "laco":
        p.error(f"{flag} belongs to --metric laco")
    if args.metric not in BASELINES:
        return
    if args.layers is not None:
        p.error(f"--metric {args.metric} takes --n-prune or --ratio, no --layers")
    if args.metric == "laco" and (args.protect_first is not None or args.protect_last is not None):
        p.error("--metric laco takes --laco-range instead of --protect-first and --protect-last")
    given = {word.partition("=")[0] for word in sys.argv[1:]}
    for name, value in zip(("calib_samples", "seq_len"), FEW_WINDOWS):
        if f"--{name.replace('_', '-')}" not in given:
            setattr(args, name, value)


def change_weights(args, session):
    """laco and llm-pruner: selection.json, and the model whose kept weights they change in --save-model."""
    baseline = BASELINES[args.metric](args, session)
    if reusable(args.out, "selection", baseline.recipe, args.force):
        content = read_json(args.out, "selection")
        baseline.check(content, args.out)
    else:
        content = baseline.select()
        write_json(args.out, "selection", {
            "model": session.source.identity(), "metric": args.metric, **content, "calibration": baseline.windows.info,
            "recipe": baseline.recipe, "provenance": session.watch.provenance(session.decoder)})
    for line in baseline.report(content):
        print(line)
    parameters = content["parameters"]
    print(f"parameters {parameters['before']:,} -> {parameters['before'] - parameters['removed']:,} "
          f"({parameters['ratio_percent']:.2f} %)")
    print(f"wrote {args.out}")
    if args.save_model:
        described = baseline.save(content, {"base_model": session.source.identity(), "seed": args.seed,
                                            "calibration": baseline.windows.info})
        print(f"wrote {args.save_model} ({described})")


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


def choose(args, session):
    """(Selection, recipe, calibration info or None, metric name)."""
    total, per_layer = session.parameters
    recipe = {"model": session.source.identity()}
    if args.layers is not None:
        name, _, method = args.layers.partition(":")
        order = paper_layers(args.model, method, args.n_prune) if name == "paper" else cli.parse_layers(args.layers)
        if order and max(order) >= len(per_layer):
            raise UserError(f"--layers {args.layers}: the model has layers 0 to {len(per_layer) - 1}")
        check_n_prune(len(order), len(per_layer))
        return Selection(tuple(sorted(order)), tuple(order), ()), {**recipe, "layers": order}, None, "list"
    n_prune = args.n_prune if args.ratio is None else n_for_ratio(args.ratio, total, per_layer)
    check_n_prune(n_prune, len(per_layer))
    if n_prune == 0:
        return Selection((), (), ()), {**recipe, "layers": []}, None, args.metric
    stats, stats_recipe, calibration = session.stats(args.stats)
    selection = select(stats, args.metric, n_prune, args.protect_first, args.protect_last)
    recipe.update(metric=args.metric, n_prune=n_prune, stats=stats_recipe,
                  protect=[args.protect_first, args.protect_last])
    return selection, recipe, calibration, args.metric


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
    if args.metric in BASELINES:
        return change_weights(args, session)
    selection, recipe, calibration, metric = choose(args, session)
    total, per_layer = session.parameters
    lists = layer_lists(len(per_layer), selection.removed)
    parameters = parameter_accounting(total, per_layer, selection.removed, session.source.shape[1])

    if reusable(args.out, "selection", recipe, args.force):
        if read_json(args.out, "selection")["removed"] != lists["removed"]:
            raise UserError(f"{args.out}: its removed layers were edited and do not follow from its recipe; "
                            "use --layers for a list of your own, or --force")
    else:
        write_json(args.out, "selection", {
            "model": session.source.identity(), "metric": metric, "n_prune": len(selection.removed), **lists,
            "order": list(selection.order), "scores": list(selection.scores), "parameters": parameters,
            "calibration": calibration, "recipe": recipe, "provenance": session.watch.provenance()})

    print(f"remove layers {lists['removed']} (0-based), keep {lists['kept']}")
    print("runs (half-open): " + (", ".join(f"[{a}, {b})" for a, b in lists["runs"]) or "none"))
    for candidate in sorted(selection.scores, key=lambda c: c["score"], reverse=metric.startswith("cosine"))[:3]:
        place = f"[{candidate['start']}, {candidate['end']})" if "start" in candidate else f"layer {candidate['layer']}"
        print(f"  {metric} {place}: {candidate['score']:.6f}")
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
