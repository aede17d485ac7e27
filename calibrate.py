"""Make the patch of every run from calibration statistics (paper, sections 3.2 to 3.4, eq. 4 to 7): patch.safetensors.

d is the ratio of the L1 norms of each channel behind and before the run; P = H diag(d) H^T with the Hadamard matrix H.
With the stats.safetensors of prune.py no forward pass is needed. Other repairs (--repair) take the place of P.
"""

from pathlib import Path

import torch

from utils import cli
from utils.activations import token_scaling_spread
from utils.artifacts import reusable
from utils.errors import UserError
from utils.evaluation.objectives import summarise, window_losses
from utils.folding import check_fold, save_model
from utils.hadamard import rotation
from utils.repairs import ESTIMATORS, REPAIRS, Calibration, write_patch
from utils.session import Session, default_folder


def arguments():
    p = cli.parser(__doc__, "python calibrate.py --model smollm2-135m --selection runs/smollm2-135m/selection.json "
                            "--calib-samples 16 --seq-len 512")
    cli.add_model_flags(p)
    p.add_argument("--selection", type=Path, nargs="+",
                   help="selection.json of prune.py, one or several; default runs/<model>/selection.json")
    fitted = {name: repair for name, repair in REPAIRS.items() if repair.closed_form}
    p.add_argument("--repair", "--scaling", choices=fitted, nargs="+", default=["hadamard"], metavar="REPAIR",
                   help="one or several of those below")
    p.epilog += cli.listed("repairs", {name: repair.help for name, repair in fitted.items()})
    p.add_argument("--estimator", choices=ESTIMATORS, default="ratio-of-sums",
                   help="of d: the paper's ratio of sums, or the released code's mean of per-sample ratios")
    p.add_argument("--ridge", type=cli.amount, help="of fits by least squares, times the mean of the diagonal of X^T X;"
                   " default 1e-6 on the stream, 1e-3 on an MLP's output")
    p.add_argument("--rank", type=cli.positive, default=64, help="of --repair low-rank")
    p.add_argument("--exclude-first-token", action="store_true",
                   help="leave the first token of each window, the attention sink, out of fits by least squares")
    p.add_argument("--hadamard-order", choices=["released", "paper"], default="released",
                   help="order of the Kronecker factors of H where C is not a power of two")
    p.add_argument("--sigma-windows", type=cli.non_negative, default=0,
                   help="also measure sigma_d, eq. (4), on so many windows")
    p.add_argument("--auto-windows", type=cli.positive, default=8, help="held-out windows of --repair auto and --fold")
    cli.add_data_flags(p)
    cli.add_calibration_flags(p)
    cli.add_output_flags(p, "patch file; default runs/<model>/patch.safetensors, or with several selections or "
                            "repairs patch_REPAIR.safetensors beside each selection")
    p.add_argument("--stats", type=Path,
                   help="statistics to read or write; default stats.safetensors beside --selection")
    cli.add_save_model_flags(p, "the patched model")
    args = cli.parse(p)
    args.selection = list(dict.fromkeys(args.selection or [default_folder(args.model) / "selection.json"]))
    args.repair = list(dict.fromkeys(args.repair))
    if len(args.selection) * len(args.repair) > 1 and (args.out or args.save_model):
        p.error("--out and --save-model name one patch: give one --selection and one --repair with them")
    return args


def main():
    # Where everything comes from and goes.
    args = arguments()
    single = len(args.selection) * len(args.repair) == 1
    args.out = args.out or (default_folder(args.model) / "patch.safetensors" if single else None)
    if len({path.resolve().parent for path in args.selection}) < len(args.selection):
        raise UserError("--selection: two of the files lie in one folder, where their patches would have one name; "
                        "calibrate them one by one with --out")
    args.stats = args.stats or args.selection[0].with_name("stats.safetensors")
    cli.check_outputs(args, out=".safetensors", stats=".safetensors")
    outs = {(path, name): args.out or path.with_name(f"patch_{name}.safetensors")
            for path in args.selection for name in args.repair}
    if not single and args.stats.resolve() in [out.resolve() for out in outs.values()]:
        raise UserError(f"--stats {args.stats}: is where a patch of this call goes")
    session = Session(args)
    if args.save_model:
        session.tokenizer  # a model folder needs one: fail before any work
    pruned = {path: session.read_selection(path) for path in args.selection}
    for path, name in outs:
        check_fold(session, REPAIRS[name], pruned[path].layers)

    # The statistics, only where a repair or sigma_d needs text; moments of all runs in one pass, when first asked for.
    runs = sorted({run for variant in pruned.values() for run in variant.layers.runs})
    wanted = sorted({name for repair in args.repair for name in REPAIRS[repair].moments})
    given = Calibration(session.source.shape[1], None, args.estimator, args.hadamard_order, args.seed, args.ridge,
                        args.rank, lambda run: session.moments(runs, wanted, args.exclude_first_token)[run],
                        lambda variants: judge(variants, args, session))
    measured = None
    if args.sigma_windows or any(REPAIRS[name].reads for name in args.repair):
        given.stats, *measured = session.stats(args.stats, args.hadamard_order)
    elif wanted:
        measured = session.windows_recipe()
    spreads = Spreads(args, session, runs)

    # One file for each selection and repair.
    for (path, name), out in outs.items():
        make_patch(out, pruned[path], REPAIRS[name], args, session, given, measured, spreads)
        variant, header = session.read_patch(out)
        report(variant, header, out)
    if args.save_model:
        save_model(session, variant, lambda: session.calibration(part="validation", samples=args.auto_windows).ids,
                   {"base_model": header["model"], "calibration": header["calibration"], "seed": args.seed})


def make_patch(out, pruned, repair, args, session, given, measured, spreads):
    """Write the patch file of one selection and repair, unless it is there with the same recipe.

    measured: (recipe of the statistics, calibration info) or None.
    """
    recipe = {"model": session.source.json(), "removed": pruned.removed, "metric": pruned.about["metric"],
              "repair": repair.name, "seed": args.seed, "sigma_windows": args.sigma_windows}
    if repair.reads or repair.moments or args.sigma_windows:
        recipe |= {"stats": measured[0], **{name: getattr(args, name) for name in repair.options}}
    if reusable(out, "patch", recipe, args.force):
        return
    fit = repair.fit(given, pruned.layers)
    content = {"model": recipe["model"], "about": {**pruned.about, "repair": fit.repair, "stage": "calibrated"},
               **pruned.layers.json(), "estimator": args.estimator, **fit.header,
               "calibration": measured[1] if "stats" in recipe else None, "recipe": recipe}
    if args.sigma_windows:
        content["sigma_d"] = spreads.of(pruned.layers.runs)
    content["provenance"] = session.watch.provenance(session.decoder if "decoder" in vars(session) else None, lap=True)
    write_patch(out, fit.tensors, content)


def judge(variants, args, session):
    """[{"repair", "ppl", ...}] of each variant on held-out calibration windows, paired with the first; printed."""
    windows = session.calibration(part="validation", samples=args.auto_windows)
    losses = window_losses(session.decoder, variants, windows.ids, args.batch_size, label="held-out")
    seen = [{"repair": variant.about["repair"], **summarise(row, losses[0])} for variant, row in zip(variants, losses)]
    for row in seen:
        low, high = row["ratio_ci95"] or (float("nan"),) * 2
        print(f"  held-out calibration windows ({len(windows.ids)}): {row['repair']:9s} perplexity {row['ppl']:.3f}, "
              f"{row['ratio_to_reference']:.4f} of {seen[0]['repair']} [{low:.4f}, {high:.4f}]")
    return seen


class Spreads:
    """sigma_d of any of `runs`, all measured in one pass when the first is asked for."""

    def __init__(self, args, session, runs):
        self.args, self.session, self.runs, self.rows = args, session, runs, None

    def of(self, runs):
        if self.rows is None:
            windows = self.session.calibration().ids[:self.args.sigma_windows]
            rotated = rotation(self.session.source.shape[1], order=self.args.hadamard_order)
            self.rows = token_scaling_spread(self.session.decoder, windows, self.runs, rotated)
        return [row for row in self.rows if (row["start"], row["end"]) in runs]


def report(variant, header, path):
    """Print what is in a patch file: the repair, and d or the eigenvalues of a symmetric P, which are d."""
    for start, end in variant.layers.runs:
        weight, line = variant.modules[end].weight, f"run [{start}, {end}): repair {variant.about['repair']}"
        if weight.ndim == 1 or torch.equal(weight, weight.T):
            d = weight if weight.ndim == 1 else torch.linalg.eigvalsh(weight)
            low, middle, high = torch.quantile(d.double(), torch.tensor([0.0, 0.5, 1.0]).double()).tolist()
            line += f", d from {low:.3f} over {middle:.3f} (median) to {high:.3f}"
        print(line)
    for row in header.get("sigma_d", ()):
        print(f"run [{row['start']}, {row['end']}): sigma_d {row['sigma_d']:.2f} raw, {row['sigma_d_rotated']:.2f} "
              f"rotated; of log ratios {row['log_sigma_d']:.3f} raw, {row['log_sigma_d_rotated']:.3f} rotated")
    print(f"wrote {path}")


if __name__ == "__main__":
    cli.run(main)
