"""The report of one run directory, rebuilt from its artifacts: `python -m utils.paper.report runs/<preset>`.

report.md and report.html hold, for every table of the paper that has been run, our value with its 95 % interval, the
paper's, their difference and a verdict. What has not been run is left out.
"""

import argparse
import math
from pathlib import Path

import torch

from utils import cli
from utils.artifacts import atomic_path
from utils.data.windows import describe
from utils.errors import UserError
from utils.evaluation.objectives import summarise
from utils.paper.experiments import BY_METRIC, COSINE, DENSE, FT, LAYERS, MAIN, P, RESPONSES, TABLES, paper, patch
from utils.paper.render import figure, heading, html_page, items, note, plain, table
from utils.paper.run_folder import Run
from utils.paper.verdicts import COLUMNS, cells, depths, find, misprints, number, verdict, with_interval

STAND_IN = "llama2-7b"  # whose numbers stand beside those of a model that the paper does not have
CAPTIONS = {
    "1a": "Figure 1(a): channel magnitudes over depth; the removed layers in grey.",
    "1b": "Figure 1(b): perplexity with the scaling alpha d.",
    "2": "Figure 2: scaling of every token and channel, raw and rotated.",
    "4": "Figure 4: channel magnitudes over depth.",
    "massive": "Largest activations of each layer and the tokens that carry them.",
    "similarity": "Cosine of every pair of layer inputs; the chosen blocks outlined.",
    "d": "The scale vector d with its standard error.",
    "metrics": "Selection metrics: perplexity of the pruned model, alone and with LinearPatch.",
}


# ---------------------------------------------------------------------------------------------------------------------
# Sections: each returns its blocks in Markdown, or [] when nothing of it has been run.

def block(ends):
    return f"[{ends[0]}, {ends[1]})"


def names(run, rows):
    """[(n, label, variant)] of the rows of a table that have been evaluated, fewest layers first."""
    return [(n, row.label, row.variant(n)) for n in run.depths for row in rows if row.variant(n) in run.variants]


def section_summary(run, model):
    """Model, hardware, what was run, and the three numbers that matter."""
    total = sum(content["provenance"]["wall_seconds"] for _, content in run.artifacts)
    hardware = next((content["provenance"]["hardware"] for _, content in reversed(run.artifacts)
                     if "hardware" in content["provenance"]), None)
    done = [kind for kind, word in (("ppl", "perplexity"), ("qa", "question answering"), ("mmlu", "MMLU"))
            if run.rows(kind)]
    revision = f", revision {model['revision']}" if model["revision"] else ""
    lines = [f"Model {model['label']}: {model['num_layers']} layers, hidden size {model['hidden_size']}, weights "
             f"sha256 {model['sha256'][:16]}{revision}."]
    if hardware:
        lines.append(f"Hardware: {hardware}.")
    lines.append(f"Run: {len(run.selections)} selections, {len(run.patches)} patches, {len(run.variants)} variants "
                 f"evaluated ({', '.join(done) or 'none'}); {total / 60:.1f} minutes of computing in all.")
    return [heading(2, "Summary"), items(lines), *three_numbers(run)]


def three_numbers(run):
    """Perplexity with P against vanilla, with tuned P against vanilla, and retained performance or sigma_d."""
    lines, ns = [], [n for n in run.depths if P.variant(n) in run.variants]
    datasets = list(dict.fromkeys(row["dataset"] for row in run.rows("ppl")))
    if ns and datasets:
        n, dataset = max(ns), datasets[0]
        rows = {row["variant"]: row for row in run.rows("ppl") if row["dataset"] == dataset}
        dense, vanilla = rows.get("dense"), rows.get(COSINE.variant(n))
        for step, words in ((P, "with LinearPatch"), (FT, "with LinearPatch fine-tuned")):
            row = rows.get(step.variant(n))
            if row and vanilla:
                beside = f" (dense {dense['ppl']:.2f})" if dense else ""
                lines.append(f"{dataset}, {n} layers removed: perplexity {vanilla['ppl']:.2f} becomes "
                             f"{row['ppl']:.2f} {words}, {_paired(row, vanilla)} of the unpatched one{beside}.")
    shown = {step.variant(n) for step in (COSINE, P, FT) for n in run.depths}
    retained = [f"{entry['variant']} {entry['retained_performance']:.2f} %" for content in run.evaluations["qa"]
                for entry in content["summary"] if entry["variant"] in shown
                and entry["retained_performance"] is not None]
    if retained:
        lines.append(f"Retained performance on question answering: {', '.join(retained)}.")
    else:
        spread = [row for _, header in run.patches for row in header.get("sigma_d", ())]
        if spread:
            row = max(spread, key=lambda r: r["end"] - r["start"])
            lines.append(f"Spread of the scaling over tokens, block {block((row['start'], row['end']))}: sigma_d "
                         f"{row['sigma_d']:.1f} on raw channels, {row['sigma_d_rotated']:.1f} rotated.")
    return ["The numbers that matter:", items(lines)] if lines else []


def _paired(row, reference):
    """Ratio of perplexities on the same windows with its interval, as text; '-' for an unpatched model itself."""
    if row["about"]["stage"] == "pruned" or row["corpus"] != reference["corpus"]:
        return "-"
    summary = summarise(*(torch.tensor(r["window_nll"], dtype=torch.float64) for r in (row, reference)))
    return with_interval(summary["ratio_to_reference"], summary["ratio_ci95"], 3)


def section_dense(run):
    """Dense baselines first: when one is off, everything below says so. Returns (blocks, names of what is off)."""
    rows, off = [], []
    for kind in ("ppl", "qa", "mmlu"):
        ours = cells(run, kind, "dense")
        theirs = {name: value for r in paper()["results"] if r["n_pruned"] == 0
                  and r["model"] == (run.preset if run.in_paper else STAND_IN)
                  for name, value in r["values"].items()}
        for name, cell in ours.items():
            judged = verdict({name: cell}, theirs, not run.in_paper)
            off += [name] if judged.startswith("differs") else []
            printed = f"{theirs[name]:.2f}" if name in theirs else "-"
            difference = f"{cell.value - theirs[name]:+.2f}" if name in theirs and run.in_paper else "-"
            rows.append((name, str(cell), printed, difference, judged if name in theirs else cell.reason or "-"))
    if not rows:
        return [], []
    head = ("dense model", "ours [95 %]", paper_name(run), "difference", "verdict")
    return [heading(2, "Dense baselines"), table(head, rows)], off


def paper_name(run, n=None):
    model = "paper" if run.in_paper else f"paper, {STAND_IN}"
    return model if n is None or run.in_paper else f"{model} at {n}"


def section_layers(run):
    """Table 7: what every selection removed, beside the published indices."""
    rows = []
    for _, s in run.selections:
        about = s["about"]
        score = (max((c["score"] for c in s["scores"] if "start" in c), default=None) if about["metric"] == "cosine"
                 else None)
        method = about["metric"] + ("" if score is None else f", {score:.4f}")
        what = "none, but narrower ones" if "widths" in s else ", ".join(map(block, s["runs"])) or "none"
        rows.append((about["n"], method, what, f"{s['parameters']['removed']:,}",
                     f"{s['parameters']['ratio_percent']:.2f}", f"{s['parameters']['ratio_with_patch_percent']:.2f}",
                     _published(run, s)))
    if not rows:
        return []
    rows.sort(key=lambda row: (row[0], not row[1].startswith("cosine"), row[1]))
    return [heading(2, LAYERS.heading), plain(
        "Blocks are half-open and 0-based. For cosine the score of eq. (2) is behind the name. The ratio counts all "
        "parameters; the last but one column subtracts a C x C matrix per run, as the paper's rows do."),
        table(("n", "metric", "layers removed", "parameters", "ratio %", "with patch %", "published"), rows)]


def _published(run, s):
    step = BY_METRIC.get(s["about"]["metric"])
    methods = next((row.methods for row in LAYERS.rows if row.step == step), ())
    found = [r for r in paper()["selections"] if r["model"] == run.preset and r["n_pruned"] == s["about"]["n"]
             and r["method"] in methods]
    if not found:
        return "-"
    theirs = found[0]["removed_layers"]
    if sorted(theirs) == sorted(s["removed"]):
        return "agrees" + (" in order" if theirs == s["order"] else "")
    return f"differs: {theirs}"


def section_main(run):
    """Perplexity of the cosine block for every n: dense, vanilla, +d, +P, +FT, paired against vanilla."""
    return _perplexities(run, "Perplexity of the block chosen by cosine", [(0, "dense", "dense"), *names(run, MAIN)])


def _perplexities(run, title, entries):
    """entries: [(n, label, variant)]. One table a corpus."""
    blocks = []
    for dataset in dict.fromkeys(row["dataset"] for row in run.rows("ppl")):
        rows = {row["variant"]: row for row in run.rows("ppl") if row["dataset"] == dataset}
        vanilla = {tuple(row["removed"]): row for row in rows.values() if row["about"]["stage"] == "pruned"}
        body = []
        for n, label, variant in entries:
            if variant in rows:
                row, reference = rows[variant], vanilla.get(tuple(rows[variant]["removed"]))
                body.append((n, label, with_interval(row["ppl"], row["ppl_ci95"]),
                             _paired(row, reference) if reference else "-"))
        if body:
            blocks += [heading(3, dataset), table(("n", "variant", "perplexity", "of vanilla"), body)]
    return [heading(2, title), plain(
        "Intervals: 95 %, over windows; 'of vanilla' is the ratio of perplexities on the same windows (paired), "
        "below 1 where the patch helps."), *blocks] if blocks else []


def section_table(run, experiment, off):
    """One table of the paper: our cells, the paper's, the difference and a verdict for every method and n."""
    common = () if experiment.rows is MAIN else [row.step for row in MAIN]  # in many tables: none of these makes one
    own = [row for row in experiment.rows if row.step not in common]
    ns = sorted({n for n, _, _ in names(run, own)}, reverse=True)
    model = run.preset if run.in_paper else STAND_IN
    possible = [name for kind in experiment.kinds if run.rows(kind) for name in COLUMNS[kind]]
    body, columns, notes = [], [], []
    for n in ns:
        depth = n if run.in_paper else min(depths(experiment, STAND_IN) or [n], key=lambda d: abs(d - n))
        for row in (DENSE, *experiment.rows):
            ours = {name: cell for kind in experiment.kinds for name, cell in cells(run, kind, row.variant(n)).items()}
            if not ours or (row is DENSE and n != ns[0]):
                continue
            at = 0 if row is DENSE else depth
            theirs = find(experiment, model, at, row) or {}
            wanted = ours if run.in_paper else [*ours, *(name for name in theirs if name in possible)]
            columns += [name for name in dict.fromkeys(wanted) if name not in columns]
            body.append((n if at else 0, row.label, ours, theirs, depth))
            if run.in_paper:
                notes += [f"the paper prints {column} {printed:.2f} for {row.label}; "
                          f"the mean of its own columns is {mean:.2f}"
                          for column, printed, mean in misprints(experiment, model, n, row)]
    if not body:
        return []
    rows = []
    for n, label, ours, theirs, depth in body:
        rows.append((n, label, "ours", *(str(ours[c]) if c in ours else "-" for c in columns), ""))
        if any(c in theirs for c in columns):
            printed = [f"{theirs[c]:.2f}".replace("nan", "NaN") if c in theirs else "-" for c in columns]
            rows.append(("", "", paper_name(run, depth if n else None), *printed,
                         "" if run.in_paper else verdict(ours, theirs, True)))
            if run.in_paper:
                changes = [f"{ours[c].value - theirs[c]:+.2f}" if c in ours and math.isfinite(theirs.get(c, math.nan))
                           else "-" for c in columns]
                rows.append(("", "", "difference", *changes, verdict(ours, theirs, False)))
    blocks = [heading(2, experiment.heading)]
    if off and run.in_paper:
        blocks.append(note(f"The dense model is off in {', '.join(off)} (see above), and so is what follows."))
    blocks.append(table(("n", "method", "from", *columns, "verdict"), rows))
    return blocks + ([items(dict.fromkeys(notes))] if notes else [])


def alone_and_patched(metric):
    """The two steps that evaluate the layers of a metric: without and with one Hadamard patch per run."""
    step = BY_METRIC[metric]
    return (step, P) if step is COSINE else (step, patch(step))


def section_metrics(run):
    """Every metric side by side at every n: what goes, and perplexity alone and with the patch."""
    datasets = list(dict.fromkeys(row["dataset"] for row in run.rows("ppl")))
    values = {(row["variant"], row["dataset"]): number(row["ppl"]) for row in run.rows("ppl")}
    body, metrics = [], []
    for s in sorted((s for _, s in run.selections if s["about"]["metric"] in BY_METRIC),
                    key=lambda s: (s["about"]["n"], s["about"]["metric"] != "cosine", s["about"]["metric"])):
        metric, n = s["about"]["metric"], s["about"]["n"]
        pair = [step.variant(n) for step in alone_and_patched(metric)]
        if any(variant in run.variants for variant in pair):
            metrics.append(metric)
            body.append((n, metric, ", ".join(map(str, s["removed"])) or "none",
                         *(values.get((variant, dataset), "-") for dataset in datasets for variant in pair)))
    if len(set(metrics)) < 3:
        return []
    head = ("n", "metric", "removed", *(f"{d}{p}" for d in datasets for p in ("", " +P")))
    return [heading(2, "Selection metrics side by side"), plain(
        "Perplexity of the pruned model alone and with one Hadamard patch per run."), table(head, body),
        *_figure(run, "metrics")]


def section_responses(run):
    """The ablations of the author responses: random start, d alone tuned, calibration on other corpora."""
    entries = names(run, [row for row in RESPONSES.rows if row not in MAIN])
    if not entries:
        return []
    n = entries[0][0]
    compare = [(n, row.label, row.variant(n)) for row in MAIN if row.step in (COSINE, P, FT)]
    return _perplexities(run, RESPONSES.title.capitalize(), compare + entries)


def section_rest(run, seen):
    """Variants that no table above has shown."""
    entries = [(about["n"], variant, variant) for variant, about in run.variants.items() if variant not in seen]
    return _perplexities(run, "Other variants", entries) if entries else []


def section_other_evaluations(run, tables):
    """Question answering and MMLU of variants that no table of the paper above has shown them for."""
    blocks = []
    for kind, title in (("qa", "Question answering"), ("mmlu", "MMLU, five-shot")):
        own = [part for part in tables if kind in part.kinds]
        shown = {variant for part in own for _, _, variant in names(run, part.rows)} | ({"dense"} if own else set())
        variants = dict.fromkeys(row["variant"] for row in run.rows(kind) if row["variant"] not in shown)
        if not variants:
            continue
        found = {variant: cells(run, kind, variant) for variant in variants}
        columns = list(dict.fromkeys(name for ours in found.values() for name in ours))
        blocks += [heading(2, title + (": other variants" if shown else "")), table(("variant", *columns), [
            (variant, *(str(ours[c]) if c in ours else "-" for c in columns)) for variant, ours in found.items()])]
    return blocks


def section_sigma(run):
    rows = {(r["end"] - r["start"], r["start"]): (
        r["end"] - r["start"], block((r["start"], r["end"])), f"{r['sigma_d']:.1f}", f"{r['sigma_d_rotated']:.1f}",
        f"{r['log_sigma_d']:.3f}", f"{r['log_sigma_d_rotated']:.3f}", r["windows"])
        for _, header in run.patches for r in header.get("sigma_d", ())}
    if not rows:
        return []
    return [heading(2, "Spread of the scaling over tokens, eq. (4)"), plain(
        "sigma_d has near-zero denominators and so heavy tails; the same of the logarithm of the ratio is its robust "
        "companion."),
        table(("n", "block", "sigma_d raw", "sigma_d rotated", "log raw", "log rotated", "windows"),
              [rows[place] for place in sorted(rows)])]


def _figure(run, name):
    return [figure(run.figures[name], CAPTIONS.get(name, name), run.folder)] if name in run.figures else []


def section_figures(run):
    blocks = [part for name in run.figures if name != "metrics" for part in _figure(run, name)]
    return [heading(2, "Figures"), *blocks] if blocks else []


def section_overhead(run):
    """Section 4.4: the patch against LLM-Streamline's network, whole models, and the size of the teacher's cache."""
    blocks = []
    for content in run.evaluations["overhead"]:
        blocks.append(heading(2, "Section 4.4: overhead and storage"))
        for part in content["results"]:
            blocks += [heading(3, part["title"]), plain(part["text"]), table(part["head"], part["rows"])]
    return blocks


def section_cost(run):
    """Time and peak memory of each artifact's own call."""
    rows = [(str(path.relative_to(run.folder)), f"{content['provenance']['wall_seconds']:.1f}",
             f"{content['provenance']['peak_memory_bytes'] / 2**20:.0f}", content["provenance"].get("device", "-"))
            for path, content in run.artifacts]
    return [heading(2, "Time and memory"), table(("artifact", "seconds", "peak memory MiB", "device"), rows)]


def section_protocol(run):
    lines = [f"Calibration: {describe(s['calibration'])}." for _, s in run.selections if s["calibration"]]
    lines = list(dict.fromkeys(lines))
    seen = {}
    for row in run.rows("ppl"):
        seen.setdefault(row["dataset"], row["corpus"])
    lines += [f"Evaluation on {dataset}: {describe(corpus)}." for dataset, corpus in seen.items()]
    for content in run.evaluations["qa"][:1]:
        counts = {row["task"]: f"{row['task']} {row['n']} ({row['metric']})" for row in content["results"]}
        lines.append(f"Question answering: {content['harness']}, zero-shot, {content['bos']}; items and metric: "
                     f"{', '.join(counts.values())}.")
    for content in run.evaluations["mmlu"][:1]:
        lines.append(f"MMLU: five examples, answer tokens {content['answer_tokens']['convention']} "
                     f"{content['answer_tokens']['ids']}.")
    if run.rows("qa") or run.rows("mmlu"):
        lines.append("Intervals of accuracies: Wilson's; of their average: normal, from the standard errors.")
    dtypes = sorted({row["dtype"] for kind in ("ppl", "qa", "mmlu") for row in run.rows(kind) if "dtype" in row})
    if dtypes:
        lines.append(f"Model computed in {' and '.join(dtypes)}; statistics and patches in float32 or better.")
    headers = [header for _, header in run.patches]
    lines += sorted({f"Rotation: {h['rotation']['construction']}." for h in headers if "rotation" in h})
    lines += sorted({f"Estimator of d: {h['estimator']}." for h in headers if h.get("estimator")})
    lines.append("Verdicts: 'agrees' where the paper's value lies inside our 95 % interval; a cell measured on other "
                 "text, fewer items or another model is not comparable.")
    return [heading(2, "Protocol"), items(lines)]


def title(run):
    return f"{run.preset}: layer pruning with and without LinearPatch"


def blocks_of(run):
    """All blocks of the report. Raises UserError when the run directory holds nothing."""
    model = run.model
    dense, off = section_dense(run)
    blocks = [heading(1, title(run)), *section_summary(run, model), *dense]
    if off:
        blocks.append(note(f"The dense model is off in {', '.join(off)}: check data, tokenizer and dtype before "
                           "reading on."))
    blocks += [*section_layers(run), *section_main(run)]
    tables = [(experiment, section_table(run, experiment, off)) for experiment in TABLES]
    shown = [experiment for experiment, part in tables if part]
    metrics = section_metrics(run)
    seen = {"dense", *(variant for rows in (MAIN, RESPONSES.rows, *(experiment.rows for experiment in shown))
                       for _, _, variant in names(run, rows))}
    if metrics:
        seen |= {step.variant(n) for metric in BY_METRIC for step in alone_and_patched(metric) for n in run.depths}
    return [*blocks, *(block for _, part in tables for block in part), *metrics, *section_responses(run),
            *section_rest(run, seen), *section_other_evaluations(run, shown), *section_sigma(run),
            *section_figures(run), *section_overhead(run), *section_cost(run), *section_protocol(run)]


def write_report(folder):
    """Write report.md and report.html of a run folder; returns the Markdown text. Raises UserError when it is empty."""
    run = Run(folder)
    try:
        text = "\n\n".join(blocks_of(run)) + "\n"
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"{run.folder}: an artifact lacks a field or has a damaged one "
                        f"({type(error).__name__}: {error});\nrun what wrote it again with --force") from None
    for name, content in (("report.md", text), ("report.html", html_page(title(run), text, run.folder))):
        with atomic_path(run.folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return text


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("folder", type=Path)
    args = p.parse_args()
    print("\n## ".join(write_report(args.folder).split("\n## ")[:2]).strip())  # title and summary
    print(f"wrote {args.folder / 'report.md'} and {args.folder / 'report.html'}")


if __name__ == "__main__":
    cli.run(main)
