"""The report of one run directory, rebuilt from its artifacts: `python -m utils.report runs/<preset>`."""

import argparse
import json
from importlib import resources
from pathlib import Path

import torch

from utils import cli
from utils.artifacts import atomic_path, read_header, read_json
from utils.errors import UserError
from utils.perplexity import summarise
from utils.corpora import describe

ROWS = ("vanilla", "diagonal", "hadamard", "hadamard+ft")
LABELS = {"vanilla": "vanilla", "diagonal": "+d", "hadamard": "+P", "hadamard+ft": "+FT"}
# Methods of the paper's tables behind each row; the first that has the row's model and n counts.
PAPER_METHODS = {"vanilla": ("vanilla", "llm-streamline-none"), "diagonal": ("+d",),
                 "hadamard": ("+P", "linearpatch[S/L]", "linearpatch[L]"),
                 "hadamard+ft": ("+P+ft", "linearpatch[L]+ft", "linearpatch+ft"), None: ("dense",)}


def table(head, rows):
    """Markdown table from a list of column heads and a list of rows of cells."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def with_interval(value, interval, digits=2):
    """'value [low, high]', or the value alone where there is no interval."""
    text = f"{value:.{digits}f}"
    return text if interval is None else f"{text} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def block(run):
    return f"[{run[0]}, {run[1]})"


def selections(folder):
    """selection.json of every n in the run directory, smallest n first."""
    found = [read_json(path, "selection") for path in folder.glob("n*/selection.json")]
    return sorted(found, key=lambda s: s["n_prune"])


def patch_headers(folder):
    return [read_header(path, "patch") for path in sorted(folder.glob("n*/*.safetensors"))
            if not path.name.endswith((".checkpoint.safetensors", ".last.safetensors"))]


def section_blocks(found):
    rows = []
    for s in found:
        score = max((c["score"] for c in s["scores"] if "start" in c), default=None)
        rows.append([s["n_prune"], ", ".join(map(block, s["runs"])), "-" if score is None else f"{score:.4f}",
                     f"{s['parameters']['removed']:,}", f"{s['parameters']['ratio_percent']:.2f}",
                     f"{s['parameters']['ratio_with_patch_percent']:.2f}"])
    return "## Layers removed\n\n" + table(
        ["n", "block", "cosine, eq. (2)", "parameters removed", "ratio %", "ratio % with a C x C patch"], rows)


def section_perplexity(results, model, title="Perplexity"):
    """Perplexities of one ppl artifact, corpus by corpus; variants of an ablation keep their names."""
    main = title == "Perplexity"
    parts = [f"## {title}\n\nIntervals: 95 %, over windows; 'of vanilla' is the ratio of perplexities on the same "
             "windows (paired), below 1 where the patch helps."]
    for dataset in dict.fromkeys(row["dataset"] for row in results):
        mine = [row for row in results if row["dataset"] == dataset]
        vanilla = {tuple(row["removed"]): row for row in mine if row["scaling"] == "vanilla"}
        body = []
        for row in sorted(mine, key=lambda r: (len(r["removed"]), ROWS.index(r["scaling"]) if r["scaling"] in ROWS else 9)):
            reference = vanilla.get(tuple(row["removed"]))
            paired = "-"
            if reference is not None and reference is not row:
                losses = [torch.tensor(r["window_nll"], dtype=torch.float64) for r in (row, reference)]
                summary = summarise(*losses)
                paired = with_interval(summary["ratio_to_reference"], summary["ratio_ci95"], 3)
            label = LABELS.get(row["scaling"], row["variant"]) if main and row["removed"] else row["variant"]
            body.append([len(row["removed"]), label, with_interval(row["ppl"], row["ppl_ci95"]), paired,
                         *paper_cell(model, row)])
        head = ["n", "variant", "perplexity", "of vanilla"]
        parts.append(f"### {dataset}\n\n" + table(head + (["paper"] if len(body[0]) > 4 else []), body))
    return "\n\n".join(parts)


def paper_cell(model, row):
    """[the paper's perplexity for this row] where the paper has this model and corpus, else []."""
    paper = [r for r in json.loads((resources.files("utils") / "paper_results.json").read_text())["results"]
             if r["model"] == model and row["dataset"] in r["values"]]
    if not paper:
        return []
    names = PAPER_METHODS.get(row["scaling"], ())
    fits = [r for r in paper if r["n_pruned"] == len(row["removed"]) and r["method"] in names]
    return [f"{fits[0]['values'][row['dataset']]:.2f}" if fits else "-"]


def section_qa(content, title):
    """One qa artifact: the printed metric of each task, average and retained performance."""
    tasks = list(dict.fromkeys(row["task"] for row in content["results"]))
    body = []
    for entry in content["summary"]:
        mine = {row["task"]: row for row in content["results"] if row["variant"] == entry["variant"]}
        cells = [f"{100 * mine[t]['value']:.2f}" if t in mine else "-" for t in tasks]
        retained = entry["retained_performance"]
        body.append([entry["variant"], *cells, f"{100 * entry['average']:.2f}",
                     "-" if retained is None else f"{retained:.2f}"])
    counts = ", ".join(f"{row['task']} {row['n']} ({row['metric']})" for row in content["results"][:len(tasks)])
    return (f"## Question answering: {title}\n\n{content['harness']}, zero-shot, {content['bos']}; items and metric: "
            f"{counts}.\n\n" + table(["variant", *tasks, "average", "retained %"], body))


def section_mmlu(content, title):
    """One mmlu artifact: categories, weighted and macro average."""
    names = ("stem", "humanities", "social_sciences", "other", "weighted_avg", "macro_avg")
    body = [[row["variant"], *(f"{100 * row[n]:.2f}" if n in row else "-" for n in names), row["n"],
             "yes" if row["collapsed"] else "no"] for row in content["summary"]]
    return f"## MMLU, five-shot: {title}\n\n" + table(["variant", *names, "questions", "collapsed"], body)


def section_extra(path):
    """Any further evaluation in the run directory, by the kind that its format field names; '' for other files."""
    try:
        kind = json.loads(path.read_text()).get("format", "").partition("/")[2].partition("@")[0]
    except (ValueError, AttributeError):
        return ""
    if kind not in ("ppl", "qa", "mmlu"):
        return ""
    content = read_json(path, kind)
    if kind == "ppl":
        return section_perplexity(content["results"], None, path.stem)
    return (section_qa if kind == "qa" else section_mmlu)(content, path.stem)


def section_sigma(headers):
    rows = [[r["end"] - r["start"], block((r["start"], r["end"])), f"{r['sigma_d']:.1f}", f"{r['sigma_d_rotated']:.1f}",
             f"{r['log_sigma_d']:.3f}", f"{r['log_sigma_d_rotated']:.3f}", r["windows"]]
            for header in headers for r in header.get("sigma_d", ())]
    if not rows:
        return ""
    return ("## Spread of the scaling over tokens, eq. (4)\n\nsigma_d has near-zero denominators and so heavy tails; "
            "the same of the logarithm of the ratio is its robust companion.\n\n" + table(
                ["n", "block", "sigma_d raw", "sigma_d rotated", "log raw", "log rotated", "windows"],
                sorted(rows, key=lambda r: r[0])))


def section_cost(folder):
    """Time and peak memory of each artifact's own call."""
    rows = []
    found = [p for p in [*folder.glob("*"), *folder.glob("n*/*")] if p.suffix in (".json", ".safetensors")
             and not p.name.endswith((".last.safetensors", ".checkpoint.safetensors"))]
    for path in sorted(found, key=lambda p: p.stat().st_mtime):
        content = _any_artifact(path)
        if content and "provenance" in content:
            about = content["provenance"]
            rows.append([path.relative_to(folder), f"{about['wall_seconds']:.1f}",
                         f"{about['peak_memory_bytes'] / 2**20:.0f}", about.get("device", "-")])
    return "## Time and memory\n\n" + table(["artifact", "seconds", "peak memory MiB", "device"], rows)


def _any_artifact(path):
    """Content of any artifact of this project, or None."""
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        return content if str(content.get("format", "")).startswith("linearpatch/") else None
    for kind in ("stats", "patch"):
        try:
            return read_header(path, kind)
        except UserError:
            continue
    return None


def section_protocol(found, results, headers, protocol):
    lines = []
    for s in found[:1]:
        if s["calibration"]:
            lines.append(f"Calibration: {describe(s['calibration'])}.")
    for dataset in dict.fromkeys(row["dataset"] for row in results):
        corpus = next(row["corpus"] for row in results if row["dataset"] == dataset)
        lines.append(f"Evaluation on {dataset}: {describe(corpus)}.")
    if protocol:
        lines.append(f"Model computed in {protocol['dtype']}; statistics and patches in float32 or better.")
    rotations = {h["rotation"]["construction"] for h in headers if "rotation" in h}
    lines += [f"Rotation: {name}." for name in sorted(rotations)]
    lines += sorted({f"Estimator of d: {h['estimator']}." for h in headers if "estimator" in h})
    return "## Protocol\n\n" + "\n".join(f"- {line}" for line in lines)


def write_report(folder):
    """Write report.md from what the run directory holds. Raises UserError when it holds nothing."""
    folder = Path(folder)
    found, headers = selections(folder), patch_headers(folder)
    ppl = read_json(folder / "ppl.json", "ppl") if (folder / "ppl.json").is_file() else {}
    if not (found or headers or ppl):
        raise UserError(f"{folder}: holds no artifacts; run 'bash run_all.sh {folder.name}' first")
    results = ppl.get("results", [])
    model = (ppl or found[0] if found or ppl else headers[0])["model"]
    parts = [f"# {folder.name}: layer pruning with and without LinearPatch",
             f"Model {model['label']}, {model['num_layers']} layers, hidden size {model['hidden_size']}, "
             f"weights sha256 {model['fingerprint'][:16]}" + (f", revision {model['revision']}" if model["revision"] else "")
             + "."]
    parts.append(section_blocks(found) if found else "")
    parts.append(section_perplexity(results, folder.name) if results else "")
    parts += [section_extra(path) for path in sorted(folder.glob("*.json")) if path.name != "ppl.json"]
    parts += [section_sigma(headers), section_cost(folder),
              section_protocol(found, results, headers, ppl.get("protocol"))]
    text = "\n\n".join(part for part in parts if part) + "\n"
    with atomic_path(folder / "report.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    return text


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("folder", type=Path)
    args = p.parse_args()
    print(write_report(args.folder))
    print(f"wrote {args.folder / 'report.md'}")


if __name__ == "__main__":
    cli.run(main)
