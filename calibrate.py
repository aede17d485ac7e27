"""Make the patch of every run from calibration statistics (paper, sections 3.2 to 3.4, eq. 4 to 7): patch.safetensors.

d is the ratio of the L1 norms of each channel behind and before the run; P = H diag(d) H^T with the Hadamard matrix H.
With the stats.safetensors of prune.py no forward pass is needed.
"""

from pathlib import Path

import torch

from utils import cli
from utils.activations import token_scaling_spread
from utils.artifacts import reusable
from utils.errors import UserError
from utils.hadamard import rotation
from utils.patch import (ESTIMATORS, SCALINGS, layer_lists, patch_module, random_matrix, scale_stderr,
                         scale_vector, write_patch)
from utils.evaluation.objectives import summarise, window_losses
from utils.selection import runs_of
from utils.session import Session, default_folder
from utils.model_folder import save_folder
from utils.variants import Variant

AUTO_CHOICES = ("none", "diagonal", "hadamard")


def arguments():
    p = cli.parser(__doc__, "python calibrate.py --model smollm2-135m --selection runs/smollm2-135m/selection.json "
                            "--calib-samples 16 --seq-len 512")
    cli.add_model_flags(p)
    p.add_argument("--selection", type=Path, nargs="+", required=True,
                   help="selection.json of prune.py, one or several")
    p.add_argument("--scaling", choices=[*SCALINGS, "auto"], nargs="+", default=["hadamard"],
                   help="hadamard: P = H diag(d) H^T; diagonal: d on the raw channels; none: identity; random: a "
                        "random P (ablation); auto: the best of none, diagonal and hadamard on held-out calibration "
                        "windows")
    p.add_argument("--estimator", choices=ESTIMATORS, default="ratio-of-sums",
                   help="of d: the paper's ratio of sums, or the released code's mean of per-sample ratios")
    p.add_argument("--hadamard-order", choices=["released", "paper"], default="released",
                   help="order of the Kronecker factors of H where C is not a power of two")
    p.add_argument("--sigma-windows", type=cli.non_negative, default=0,
                   help="also measure sigma_d, eq. (4), on so many windows")
    p.add_argument("--auto-windows", type=cli.positive, default=8, help="held-out windows of --scaling auto")
    cli.add_data_flags(p)
    cli.add_calibration_flags(p)
    cli.add_output_flags(p, "patch file; default runs/<model>/patch.safetensors, or with several selections or "
                            "scalings patch_SCALING.safetensors beside each selection")
    p.add_argument("--stats", type=Path,
                   help="statistics to read or write; default stats.safetensors beside --selection")
    p.add_argument("--save-model", type=Path, help="also write the patched model as a folder")
    args = p.parse_args()
    args.selection, args.scaling = list(dict.fromkeys(args.selection)), list(dict.fromkeys(args.scaling))
    if len(args.selection) * len(args.scaling) > 1 and (args.out or args.save_model):
        p.error("--out and --save-model name one patch: give one --selection and one --scaling with them")
    return args


def estimate(scaling, args, stats, runs, hidden_size):
    """{run{i}.d, run{i}.d_stderr or run{i}.weight: tensor} for one scaling."""
    tensors = {}
    for index, (start, end) in enumerate(runs):
        if scaling == "random":
            tensors[f"run{index}.weight"] = random_matrix(hidden_size, args.seed + index)
        elif scaling == "none":
            tensors[f"run{index}.d"] = torch.ones(hidden_size)
        else:
            l1 = stats.l1_rotated if scaling == "hadamard" else stats.l1_raw
            tensors[f"run{index}.d"] = scale_vector(l1, start, end, args.estimator)
            tensors[f"run{index}.d_stderr"] = scale_stderr(l1, start, end, args.estimator, args.seed)
    return tensors


def best_scaling(args, session, stats, removed):
    """(scaling with the lowest perplexity on held-out calibration windows, what was seen for each)."""
    runs, hidden_size = runs_of(removed), session.source.shape[1]
    windows = session.calibration(part="validation", samples=args.auto_windows)
    variants = []
    for scaling in AUTO_CHOICES:
        d = estimate(scaling, args, stats, runs, hidden_size)
        patches = {end: patch_module(scaling, d=d[f"run{i}.d"], order=args.hadamard_order)
                   for i, (_, end) in enumerate(runs)}
        variants.append(Variant(scaling, removed, patches))
    losses = window_losses(session.decoder, variants, windows.ids, args.batch_size, label="held-out")
    seen = [{"scaling": name, **summarise(row, losses[0])} for name, row in zip(AUTO_CHOICES, losses)]
    for row in seen:
        low, high = row["ratio_ci95"] or (float("nan"),) * 2
        print(f"  held-out calibration windows ({len(windows.ids)}): {row['scaling']:9s} perplexity {row['ppl']:.3f}, "
              f"{row['ratio_to_reference']:.4f} of none [{low:.4f}, {high:.4f}]")
    return min(seen, key=lambda row: row["ppl"])["scaling"], seen


def main():
    args = arguments()
    single = len(args.selection) * len(args.scaling) == 1
    args.out = args.out or (default_folder(args.model) / "patch.safetensors" if single else None)
    if len({path.resolve().parent for path in args.selection}) < len(args.selection):
        raise UserError("--selection: two of the files lie in one folder, where their patches would have one name; "
                        "calibrate them one by one with --out")
    args.stats = args.stats or args.selection[0].with_name("stats.safetensors")
    cli.check_outputs(args, out=".safetensors", stats=".safetensors")
    for path in args.selection:
        if not single and args.stats.resolve() in [
                path.with_name(f"patch_{name}.safetensors").resolve() for name in args.scaling]:
            raise UserError(f"--stats {args.stats}: is where a patch of this call goes")
    session = Session(args)
    if args.save_model:
        session.tokenizer  # a model folder needs one: fail before any work
    removed_of = {path: tuple(session.read_selection(path)["removed"]) for path in args.selection}
    stats = stats_recipe = calibration = None
    if set(args.scaling) - {"none", "random"} or args.sigma_windows:
        stats, stats_recipe, calibration = session.stats(args.stats, args.hadamard_order)
    spreads = Spreads(args, session, sorted({run for removed in removed_of.values() for run in runs_of(removed)}))

    for path, removed in removed_of.items():
        for scaling in args.scaling:
            out = args.out or path.with_name(f"patch_{scaling}.safetensors")
            make_patch(out, removed, scaling, args, session, stats, stats_recipe, calibration, spreads)
            variant = session.read_patch(out)
            report(variant, out)
    if args.save_model:
        header = variant.about
        save_folder(session.decoder, session.tokenizer, variant, args.save_model,
                    {"stage": "calibrated", "base_model": header["model"], "scaling": header["scaling"],
                     "calibration": calibration, "seed": args.seed})
        print(f"wrote {args.save_model} ({variant.describe(session.source)})")


class Spreads:
    """sigma_d of any of `runs`, all measured in one pass when the first is asked for."""

    def __init__(self, args, session, runs):
        self.args, self.session, self.runs, self.rows = args, session, runs, None

    def of(self, runs):
        if self.rows is None:
            windows = self.session.calibration().ids[:self.args.sigma_windows]
            turn = rotation(self.session.source.shape[1], order=self.args.hadamard_order)
            self.rows = token_scaling_spread(self.session.decoder, windows, self.runs, turn)
        return [row for row in self.rows if (row["start"], row["end"]) in runs]


def make_patch(out, removed, scaling, args, session, stats, stats_recipe, calibration, spreads):
    """Write the patch file of one selection and scaling, unless it is there with the same recipe."""
    runs, (num_layers, hidden_size) = runs_of(removed), session.source.shape
    recipe = {"model": session.source.identity(), "removed": removed, "scaling": scaling, "seed": args.seed,
              "sigma_windows": args.sigma_windows}
    measured = scaling not in ("none", "random") or args.sigma_windows
    if measured:
        recipe.update(stats=stats_recipe, estimator=args.estimator, hadamard_order=args.hadamard_order)
    if scaling == "auto":
        recipe.update(auto_windows=args.auto_windows)
    if reusable(out, "patch", recipe, args.force):
        return
    content = {"model": recipe["model"], "stage": "calibrated", **layer_lists(num_layers, removed),
               "estimator": args.estimator, "calibration": calibration if measured else None, "recipe": recipe}
    if scaling == "auto":
        scaling, content["auto"] = best_scaling(args, session, stats, removed)
    content["scaling"] = scaling
    if scaling == "hadamard":
        turn = rotation(hidden_size, order=args.hadamard_order)
        content.update(hadamard_order=args.hadamard_order, rotation=turn.info())
    if args.sigma_windows:
        content["sigma_d"] = spreads.of(runs)
    tensors = estimate(scaling, args, stats, runs, hidden_size)
    content["provenance"] = session.watch.provenance(session.decoder if "decoder" in vars(session) else None, lap=True)
    write_patch(out, tensors, content)


def report(variant, path):
    """Print what is in a patch file."""
    about = variant.about
    for index, (start, end) in enumerate(runs_of(variant.removed)):
        weight = variant.patches[end].weight
        values = (weight if weight.ndim == 1 else
                  torch.linalg.eigvalsh(weight) if about["scaling"] == "hadamard" else None)
        line = f"run [{start}, {end}): scaling {about['scaling']}"
        if values is not None:
            low, middle, high = torch.quantile(values.double(), torch.tensor([0.0, 0.5, 1.0]).double()).tolist()
            line += f", d from {low:.3f} over {middle:.3f} (median) to {high:.3f}"
        print(line)
    for row in about.get("sigma_d", ()):
        print(f"run [{row['start']}, {row['end']}): sigma_d {row['sigma_d']:.2f} raw, {row['sigma_d_rotated']:.2f} "
              f"rotated; of log ratios {row['log_sigma_d']:.3f} raw, {row['log_sigma_d_rotated']:.3f} rotated")
    print(f"wrote {path}")


if __name__ == "__main__":
    cli.run(main)
