"""The paper's figures 1, 2 and 4 and what explains them, each as png, pdf and the plotted numbers as csv.

1a          mean |activation| over depth as each kept layer reads it: dense, pruned, aligned by the patches; and what
            the first layer behind the block reads, channel by channel, over what it reads in the dense model. Behind
            the block these are measured on the pruned and patched models, not drawn from the dense one.
            Needs --stats and --patch (or --selection, for the gap alone); runs the model.
1b          perplexity of alpha P for alpha from 0.5 to 1.5 beside dense and vanilla. Needs --patch; runs the model.
2           token-wise scalings |X^(end)| / |X^(start)|, raw and rotated, with sigma_d of eq. (4) and the same of log
            ratios, for the blocks of --selection (or --patch); runs the model.
4           magnitudes of the channels over depth of the models of several --stats, removed layers in grey.
massive     largest activations at every depth and the tokens that carry them; runs the model.
similarity  cosine of every pair of depths from --stats, blocks of --selection (or --patch) outlined.
d           d with its standard error, raw and rotated, from --stats and --selection (or --patch).
metrics     perplexity by selection metric and number of layers, alone and with LinearPatch, from --results.
all         every figure that the given files allow; those that run the model only with --model.

4, similarity, d and metrics load no weights. What runs the model runs it on the first --windows calibration windows,
1b on the windows of --datasets. Beside each csv a json holds its recipe and provenance: numbers that are there with
the same recipe are drawn anew, not computed anew.
"""

from functools import cached_property
from pathlib import Path

import numpy
from scipy.stats import gaussian_kde

from utils import cli
from utils.activations import Stats, largest_activations, read_magnitudes, token_scaling_spread
from utils.artifacts import Stopwatch, read_header, read_json, recipe_difference, reusable, sha256_file, write_json
from utils.baselines import BASELINES
from utils.data.windows import evaluation_windows
from utils.decoder import Variant
from utils.errors import UserError, WorkError
from utils.evaluation.objectives import summarise, window_losses
from utils.figures import WIDTHS, check_rows, read_table, render, visible, write_table
from utils.hadamard import rotation
from utils.layers import Layers
from utils.metrics import METRICS
from utils.modeling_linearpatch import LinearPatch
from utils.models import EMBEDDED, check_same_model
from utils.repairs import REPAIRS, scale_stderr, scale_vector
from utils.session import Session, default_folder, named_file

RUN_THE_MODEL = ("1a", "1b", "2", "massive")
ALPHAS = tuple(round(0.5 + 0.1 * step, 1) for step in range(11))
SAMPLED = 20000  # token-wise scalings whose density a violin shows
GRID = 200  # points of a violin's outline
TOP = 3  # largest activations of each depth
CARRIERS = 8  # tokens in the figure


def arguments():
    p = cli.parser(__doc__, "python plot_magnitudes.py --figure similarity d --stats "
                            "runs/smollm2-135m/stats.safetensors --selection "
                            "runs/smollm2-135m/n7/selection.json --out figures")
    p.add_argument("--figure", nargs="+", choices=[*PLANS, "all"], required=True, help="which, see above")
    p.add_argument("--width", type=float, choices=WIDTHS, default=6.8, help="inches: one column or two")
    p.add_argument("--stats", nargs="+", default=[], metavar="[NAME=]FILE",
                   help="stats.safetensors of prune.py; several for figure 4")
    p.add_argument("--selection", nargs="+", default=[], metavar="[NAME=]FILE", help="selection.json of prune.py")
    p.add_argument("--patch", nargs="+", default=[], metavar="[NAME=]FILE", help="patch files, as for eval_ppl.py")
    p.add_argument("--results", type=Path, help="metrics: ppl.json of eval_ppl.py")
    p.add_argument("--variants", nargs="+", help="metrics: names of the rows of --results to draw; default all")
    p.add_argument("--windows", type=cli.positive, default=4, help="calibration windows that 1a, 2 and massive run")
    p.add_argument("--datasets", nargs="+", help="of 1b, as for eval_ppl.py; default its first corpus")
    p.add_argument("--limit-windows", type=cli.positive, help="1b: the first K windows of each data set only")
    cli.add_model_flags(p)
    p.set_defaults(model=None)  # given, the files must be of this model; the embedded one when a figure needs any
    cli.add_data_flags(p)
    cli.add_calibration_flags(p)
    cli.add_output_flags(p, "folder; default figures/ beside the first --stats or --results, or in runs/<model>")
    return p.parse_args()


class Missing(UserError):
    """A figure cannot be drawn from what was given: an error by its name, a line with --figure all."""


class Inputs:
    """The files of one call, each read and checked once; the model only when a figure runs it."""

    def __init__(self, args):
        self.args, self.named_model, self.watch = args, args.model is not None, Stopwatch()
        args.model = args.model or EMBEDDED

    @cached_property
    def session(self):
        return Session(self.args)

    @cached_property
    def all_stats(self):
        """[(name, path, Stats, header)] of --stats; names are the model's where none is given."""
        found = []
        for text in self.args.stats:
            name, path = named_file(text)
            stats, header = Stats.load(path)
            name = Path(header["model"]["label"]).name if path == text else name
            if name in [entry[0] for entry in found]:
                raise UserError(f"--stats: two files are called {name}; name them with NAME=FILE")
            found.append((name, path, stats, header))
        return found

    def stats(self):
        """(path, Stats, header) of the one --stats file, made for --model where that is given."""
        if len(self.args.stats) != 1:
            raise Missing(f"needs one --stats file, {len(self.args.stats)} given")
        _, path, stats, header = self.all_stats[0]
        if self.named_model:
            self.session.source.check_artifact(header["model"], path)
        return path, stats, header

    def blocks(self, identity, strict=True):
        """[(name, Layers)] of --selection, or else of --patch, checked against a model's identity.

        strict=False leaves files of other models out.
        """
        kind = "selection" if self.args.selection else "patch"
        found = {}
        for text in getattr(self.args, kind):
            name, path = named_file(text)
            content = (read_json if kind == "selection" else read_header)(path, kind)
            if not strict and content["model"]["sha256"] != identity["sha256"]:
                continue
            check_same_model(content["model"], identity, path)
            if name in found:
                raise UserError(f"two files of --{kind} are called {name}; name them with NAME=FILE")
            found[name] = Layers.of(content, identity["num_layers"], path)
        return list(found.items())

    def runs(self, identity):
        """Distinct runs [(start, end), ...] of all blocks."""
        runs = list(dict.fromkeys(run for _, layers in self.blocks(identity) for run in layers.runs))
        if not runs:
            raise Missing("needs --selection (or --patch) files that remove layers")
        return runs

    @cached_property
    def patches(self):
        """Variants of --patch."""
        names = [named_file(text)[0] for text in self.args.patch]
        taken = {name for name in names if names.count(name) > 1 or name in ("dense", "pruned", "vanilla")}
        if taken:
            raise UserError(f"--patch: the name {sorted(taken)[0]} is taken; choose others with NAME=FILE")
        return [self.session.read_patch(path, name)[0] for name, path in map(named_file, self.args.patch)]

    @cached_property
    def windows(self):
        """(ids int64 [K, T], info) of the first --windows calibration windows."""
        windows = self.session.calibration()
        if len(windows.ids) < self.args.windows:
            print(f"--windows {self.args.windows}: the calibration has {len(windows.ids)} windows; all are taken")
        return windows.ids[:self.args.windows], windows.info

    def recipe(self, **more):
        """What determines numbers that the model gives."""
        return {"model": self.session.source.json(), "dtype": self.session.dtype_name, **more}

    def runs_recipe(self, **more):
        ids, info = self.windows
        return self.recipe(token_ids_sha256=info["token_ids_sha256"], windows=len(ids), seq_len=self.args.seq_len,
                           **more)


# ---------------------------------------------------------------------------------------------------------------------
# One function a figure: reads and checks its inputs and returns (recipe, function that computes its table).


def plan_1a(inputs):
    path, stats, header = inputs.stats()
    inputs.session.source.check_artifact(header["model"], path)
    recipe = header["recipe"]
    variants = list(inputs.patches)
    found = {variant.layers for variant in variants} or {
        layers for _, layers in inputs.blocks(inputs.session.source.json())}
    if len(found) != 1 or not min(layers.removed for layers in found):
        raise Missing("needs --patch files (or one --selection) that remove the same layers, at least one of them")
    variants.insert(0, Variant("pruned", found.pop()))
    ids, info = inputs.windows
    wanted = {"token_ids_sha256": info["token_ids_sha256"], "dtype": inputs.session.dtype_name}
    if recipe_difference({key: recipe.get(key) for key in wanted}, wanted):
        raise UserError(f"--stats {path}: made from other windows ({recipe.get('samples')} of {recipe.get('seq_len')} "
                        f"tokens, {recipe.get('dtype')});\nrepeat the --calib-*, --seq-len, --seed and --dtype flags")

    def compute():
        dense = stats.l1_raw[:len(ids)].double().sum(0) / stats.tokens[:len(ids)].sum()
        return alignment_table(dense, read_magnitudes(inputs.session.decoder, ids, variants), variants)

    return inputs.runs_recipe(variants={v.name: v.sha256() for v in variants}), compute


def alignment_table(dense, read, variants):
    """Rows of figure 1(a) from mean magnitudes: dense [L+1, C] of X^(l), read [variants, L+1, C] (NaN where removed).

    In the interface panel a value is |what the first layer behind the first block reads| over the dense model's;
    channels that are silent in the dense model are left out.
    """
    runs, removed = variants[0].layers.runs, variants[0].removed
    rows = [dict(panel="block", curve="removed", x=start, end=end, value=None, low=None, high=None)
            for start, end in runs]
    for name, table in [("dense", dense), *((variant.name, values) for variant, values in zip(variants, read))]:
        for layer, values in enumerate(table.numpy()):
            if name == "dense" or layer not in removed:
                low, high = numpy.quantile(values, (0.1, 0.9)).tolist()
                rows.append(dict(panel="depth", curve=name, x=layer, end=None, value=values.mean().item(), low=low,
                                 high=high))
    end = runs[0][1]
    for variant, values in zip(variants, read):
        for channel, (value, reference) in enumerate(zip(values[end].tolist(), dense[end].tolist())):
            if reference > 0:
                rows.append(dict(panel="interface", curve=variant.name, x=channel, end=None, value=value / reference,
                                 low=None, high=None))
    return rows


def plan_1b(inputs):
    if not inputs.args.patch:
        raise Missing("needs --patch")
    args, session = inputs.args, inputs.session
    session.check_seq_len(args.seq_len)
    variants, about = [Variant("dense", Layers(session.source.shape[0]))], [("dense", None, 0)]
    for patched in inputs.patches:
        if not patched.modules or not REPAIRS[patched.about["repair"]].is_matrix:
            raise Missing(f"scales matrices on the stream; {patched.name} has none")
        levels = [v.removed for v in variants]
        if patched.removed not in levels:
            variants.append(Variant("vanilla", patched.layers))
            about.append((f"vanilla {patched.layers}", None, len(variants) - 1))
        level = [v.removed for v in variants].index(patched.removed)
        for alpha in ALPHAS:
            scaled = {end: LinearPatch(alpha * patch.weight) for end, patch in patched.modules.items()}
            variants.append(Variant(f"{alpha} {patched.name}", patched.layers, scaled))
            about.append((patched.name, alpha, level))
    names = list(dict.fromkeys(args.datasets or session.corpora[:1]))
    corpora = {name: evaluation_windows(name, session.tokenizer, args.seq_len, limit=args.limit_windows,
                                        data_dir=args.data_dir) for name in names}

    def compute():
        rows = []
        for dataset, windows in corpora.items():
            losses = window_losses(session.decoder, variants, windows.ids, args.batch_size, dataset)
            for (name, alpha, level), loss in zip(about, losses):
                row = summarise(loss, losses[level])
                low, high = row["ppl_ci95"] or (None, None)
                rows.append(dict(dataset=dataset, item="level" if alpha is None else "patch", variant=name, alpha=alpha,
                                 ppl=row["ppl"], ci95_low=low, ci95_high=high,
                                 ratio_to_vanilla=None if alpha is None else row["ratio_to_reference"],
                                 windows=len(windows.ids)))
        return rows

    return inputs.recipe(datasets={name: windows.info["token_ids_sha256"] for name, windows in corpora.items()},
                         windows=[len(windows.ids) for windows in corpora.values()], seq_len=args.seq_len,
                         variants={variant.name: variant.sha256() for variant in variants}), compute


def plan_2(inputs):
    if not inputs.args.selection and not inputs.args.patch:
        raise Missing("needs --selection (or --patch)")
    runs = inputs.runs(inputs.session.source.json())
    ids, _ = inputs.windows
    rotated = rotation(inputs.session.source.shape[1])

    def compute():
        rows = []
        spreads = token_scaling_spread(inputs.session.decoder, ids, runs, rotated, keep=SAMPLED, seed=inputs.args.seed)
        for found in spreads:
            for basis, suffix in (("raw", ""), ("rotated", "_rotated")):
                logs = numpy.log10(found["values" + suffix].double().numpy())
                if len(logs) < 2 or numpy.ptp(logs) == 0:
                    raise WorkError(f"figure 2: the scalings of [{found['start']}, {found['end']}) are all equal")
                grid = numpy.linspace(logs.min(), logs.max(), GRID)
                common = {"start": found["start"], "end": found["end"], "basis": basis,
                          "sigma_d": found["sigma_d" + suffix], "log_sigma_d": found["log_sigma_d" + suffix],
                          "windows": found["windows"], "values": len(logs),
                          **{f"q{q}": 10 ** numpy.quantile(logs, q / 100).item() for q in (25, 50, 75)}}
                rows += [{**common, "scaling": 10**x, "density": y}
                         for x, y in zip(grid.tolist(), gaussian_kde(logs)(grid).tolist())]
        return rows

    return inputs.runs_recipe(runs=runs, rotation=rotated.info(), seed=inputs.args.seed, sampled=SAMPLED), compute


def plan_4(inputs):
    if not inputs.args.stats:
        raise Missing("needs --stats")
    models = inputs.all_stats
    blocks = {name: inputs.blocks(header["model"], strict=False) for name, _, _, header in models}

    def compute():
        rows = []
        for name, _, stats, _ in models:
            means = (stats.l1_raw.double().sum(0) / stats.tokens.sum()).numpy()
            for layer, values in enumerate(means):
                low, median, high = numpy.quantile(values, (0.1, 0.5, 0.9)).tolist()
                rows.append(dict(item="state", model=name, layer=layer, end=None, mean=values.mean().item(), low=low,
                                 median=median, high=high, largest=values.max().item()))
            for start, end in sorted({run for _, layers in blocks[name] for run in layers.runs}):
                rows.append(dict(item="block", model=name, layer=start, end=end, mean=None, low=None, median=None,
                                 high=None, largest=None))
        return rows

    removed = {name: [[block, layers.removed] for block, layers in found] for name, found in blocks.items()}
    return {"stats": [[name, header["recipe"]] for name, _, _, header in models], "blocks": removed}, compute


def plan_massive(inputs):
    ids, _ = inputs.windows
    tokenizer = inputs.session.tokenizer

    def compute():
        layers, tokens, medians = largest_activations(inputs.session.decoder, ids, TOP)
        texts = {token: visible(tokenizer.decode([token])) for token in set(ids.flatten().tolist())}
        rows = []
        for layer, entries in enumerate(layers):
            for rank, (value, window, position, channel) in enumerate(entries, 1):
                rows.append(dict(item="layer", layer=layer, rank=rank, value=value,
                                 token=texts[ids[window, position].item()], window=window,
                                 position=position, channel=channel))
            rows.append(dict(item="layer", layer=layer, rank=0, value=medians[layer].item(), token="", window=None,
                             position=None, channel=None))
        seen = set()
        for flat in tokens.flatten().argsort(descending=True, stable=True).tolist():
            window, position = divmod(flat, ids.shape[1])
            text = texts[ids[window, position].item()]
            if (text, position == 0) not in seen and len(seen) < CARRIERS:
                seen.add((text, position == 0))
                rows.append(dict(item="token", layer=None, rank=len(seen), value=tokens[window, position].item(),
                                 token=text, window=window, position=position, channel=None))
        return rows

    return inputs.runs_recipe(top=TOP, carriers=CARRIERS), compute


def plan_similarity(inputs):
    _, stats, header = inputs.stats()
    blocks = [(name, run) for name, layers in inputs.blocks(header["model"]) for run in layers.runs]

    def compute():
        table = stats.mean("cosine").tolist()
        rows = [dict(item="cosine", name="", row=start, column=end, value=value)
                for start, line in enumerate(table) for end, value in enumerate(line)]
        return rows + [dict(item="block", name=name, row=start, column=end, value=table[start][end])
                       for name, (start, end) in blocks]

    return {"stats": header["recipe"], "blocks": blocks}, compute


def plan_d(inputs):
    _, stats, header = inputs.stats()
    runs = inputs.runs(header["model"])

    def compute():
        rows = []
        for basis, l1 in (("raw", stats.l1_raw), ("rotated", stats.l1_rotated)):
            for start, end in runs:
                d, error = scale_vector(l1, start, end), scale_stderr(l1, start, end, seed=inputs.args.seed)
                rows += [dict(basis=basis, start=start, end=end, channel=channel, d=value, stderr=spread)
                         for channel, (value, spread) in enumerate(zip(d.tolist(), error.tolist()))]
        return rows

    return {"stats": header["recipe"], "runs": runs, "seed": inputs.args.seed}, compute


def plan_metrics(inputs):
    if inputs.args.results is None:
        raise Missing("needs --results")
    content = read_json(inputs.args.results, "ppl")
    if inputs.named_model:
        inputs.session.source.check_artifact(content["model"], inputs.args.results)
    names = inputs.args.variants
    rows = metric_rows([row for row in content["results"] if names is None or row["variant"] in names])
    if not rows:
        raise Missing(f"finds no pruned variant in {inputs.args.results}")
    places = [(row["name"], row["n"], row["item"]) for row in rows]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice:
        raise UserError(f"{inputs.args.results}: several rows of {twice[0]}, n = {twice[1]}, {twice[2]}; name those to "
                        "draw with --variants")
    return {"model": content["model"], "rows": rows}, lambda: rows


def metric_rows(results):
    """Rows of the figure of metrics from the rows of a ppl.json, of the data set that has most of them.

    A metric's selection alone, and with the patch of calibrate.py; other repairs and tuned ones are left out.
    """
    items = {("none", "pruned"): "alone", ("hadamard", "calibrated"): "patched"}
    rows = [dict(dataset=row["dataset"], name=row["about"]["metric"], n=row["about"]["n"],
                 item=items.get((row["about"]["repair"], row["about"]["stage"])), ppl=row["ppl"]) for row in results]
    rows = [row for row in rows if row["item"] and row["name"] in (*METRICS, *BASELINES)]
    datasets = [row["dataset"] for row in rows]
    rows = [row for row in rows if row["dataset"] == max(datasets, key=datasets.count)]  # the first of equal ones
    return sorted(rows, key=lambda row: (row["name"], row["n"], row["item"]))


PLANS = {"1a": plan_1a, "1b": plan_1b, "2": plan_2, "4": plan_4, "massive": plan_massive, "similarity": plan_similarity,
         "d": plan_d, "metrics": plan_metrics}


# ---------------------------------------------------------------------------------------------------------------------


def table_of(name, recipe, compute, inputs, stem):
    """The rows of a figure, from stem.csv where stem.json has the same recipe, else computed and written."""
    paths = {ending: stem.with_name(f"{stem.name}.{ending}") for ending in ("csv", "json")}
    if reusable(paths["json"], "figure", recipe, inputs.args.force):
        known = read_json(paths["json"], "figure")["csv_sha256"]
        if paths["csv"].is_file() and sha256_file(paths["csv"]) == known:
            return read_table(paths["csv"])
        print(f"{paths['csv']}: is missing or was edited; recomputing")
    rows = compute()
    check_rows(rows, name)
    write_table(paths["csv"], rows)
    loaded = inputs.session.decoder if "session" in vars(inputs) and "decoder" in vars(inputs.session) else None
    write_json(paths["json"], "figure", {"figure": name, "recipe": recipe, "csv_sha256": sha256_file(paths["csv"]),
                                         "provenance": inputs.watch.provenance(loaded, lap=True)})
    return rows


def plans(args, inputs):
    """{figure: (recipe, compute)}; with 'all', figures that the inputs do not allow are named and left out."""
    found = {}
    for name in PLANS if "all" in args.figure else dict.fromkeys(args.figure):
        try:
            if "all" in args.figure and name in RUN_THE_MODEL and not inputs.named_model:
                raise Missing("needs --model")
            found[name] = PLANS[name](inputs)
        except Missing as missing:
            if "all" not in args.figure:
                raise UserError(f"--figure {name}: {missing}") from None
            print(f"figure {name}: skipped, {missing}")
    if not found:
        raise UserError("--figure all: nothing can be drawn; give --stats, --selection, --patch, --results or --model")
    return found


def main():
    args = arguments()
    inputs = Inputs(args)
    home = default_folder(args.model)
    if args.stats or args.results:
        home = Path(named_file(args.stats[0])[1] if args.stats else args.results).parent
    args.out = args.out or home / "figures"
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out}: is a file; name a folder")
    for name, (recipe, compute) in plans(args, inputs).items():
        stem = args.out / f"figure_{name}"
        rows = table_of(name, recipe, compute, inputs, stem)
        render(name, rows, args.width, stem)
        print(f"wrote {stem}.png, .pdf and .csv ({len(rows)} rows)")


if __name__ == "__main__":
    cli.run(main)
