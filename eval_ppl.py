"""Perplexity of dense, pruned and patched variants of a model (paper, section 4.1, tables 3, 5 and 15): ppl.json.

Non-overlapping windows of the tokenised stream, exp of the mean loss of their next tokens. All variants of one call
share one load and the layers that they have in common. ppl.json holds the rows of one call; those that an earlier
ppl.json already has are taken from it, so an interrupted call goes on where it stopped.
"""

import torch

from utils import cli
from utils.artifacts import read_json, write_json
from utils.corpora import describe, evaluation_windows
from utils.perplexity import summarise, window_losses
from utils.session import Session, default_folder


def arguments():
    p = cli.parser(__doc__, "python eval_ppl.py --model smollm2-135m --patch runs/smollm2-135m/patch.safetensors "
                            "--datasets wiki --seq-len 512 --limit-windows 4")
    cli.add_model_flags(p)
    cli.add_variant_flags(p)
    p.add_argument("--datasets", nargs="+", default=None,
                   help="wikitext2 c4 c4-new ptb ptb-new wiki news, or files; default wiki news for the embedded model, "
                        "else wikitext2 c4 ptb")
    p.add_argument("--seq-len", type=cli.positive, default=2048, help="tokens a window")
    p.add_argument("--limit-windows", type=cli.positive, help="take the first K windows only")
    p.add_argument("--bos", choices=["stream", "window"], default="stream",
                   help="stream: once at its start if the tokenizer adds one (the field's convention); window: in each")
    p.add_argument("--stride", type=cli.positive,
                   help="sliding windows: one every so many tokens, each scoring its last so many targets")
    p.add_argument("--ptb-unk", choices=["special", "text"], default="special",
                   help="how <unk> in the text is encoded: as the special token, or as plain characters")
    p.add_argument("--batch-size", type=cli.positive, default=1, help="windows a forward pass")
    cli.add_data_flags(p)
    cli.add_output_flags(p, "result file; default runs/<model>/ppl.json")
    return p.parse_args()


def main():
    args = arguments()
    args.out = args.out or default_folder(args.model) / "ppl.json"
    cli.check_outputs(args, out=".json")
    session = Session(args)
    session.check_seq_len(args.seq_len)
    variants = session.variants()
    datasets = list(dict.fromkeys(args.datasets or [])) or (["wiki", "news"] if session.embedded_text else ["wikitext2", "c4", "ptb"])

    earlier = {}
    if args.out.exists() and not args.force:
        earlier = {row.get("key"): row for row in read_json(args.out, "ppl")["results"] if "window_nll" in row}
    corpora = [evaluation_windows(name, session.tokenizer, args.seq_len, bos=args.bos, limit=args.limit_windows,
                                  data_dir=args.data_dir, unk=args.ptb_unk, stride=args.stride) for name in datasets]
    keys_of = [[f"{session.source.fingerprint[:16]}:{variant.digest()[:16]}:{windows.info['token_ids_sha256'][:16]}:"
                f"{session.dtype_name}:{args.seq_len}:{args.stride}" for variant in variants] for windows in corpora]
    results = []
    for position, (name, windows, keys) in enumerate(zip(datasets, corpora, keys_of)):
        print(f"{name}: {describe(windows.info)}; {session.dtype_name}")
        missing = [i for i, key in enumerate(keys) if key not in earlier]
        if len(missing) < len(variants):
            print(f"{name}: {len(variants) - len(missing)} of {len(variants)} rows reused (--force recomputes)")
        if missing:
            losses = window_losses(session.decoder, [variants[i] for i in missing], windows.ids, args.batch_size, name,
                                   scored=args.stride)
            for i, row in zip(missing, losses):
                earlier[keys[i]] = {"key": keys[i], "window_nll": row.tolist()}
        results += rows(name, windows.info, variants, keys, earlier)
        still_wanted = {key for keys in keys_of[position + 1:] for key in keys}
        later = [earlier[key] for key in still_wanted if "ppl" in earlier.get(key, {})]
        write_json(args.out, "ppl", {
            "model": session.source.identity(), "results": results + later,
            "protocol": {"seq_len": args.seq_len, "bos": args.bos, "dtype": session.dtype_name},
            "provenance": session.watch.provenance(session.decoder if missing else None)})
        show(name, variants, results)
    print(f"wrote {args.out}")


def rows(name, info, variants, keys, losses):
    """One result a variant: perplexity, its interval, and the paired ratio to the first variant."""
    all_losses = [torch.tensor(losses[key]["window_nll"], dtype=torch.float64) for key in keys]
    result = []
    for variant, key, values in zip(variants, keys, all_losses):
        result.append({
            "variant": variant.name, "dataset": name, "split": info["split"], **summarise(values, all_losses[0]),
            "reference": variants[0].name, "windows": info["windows"], "seq_len": info["seq_len"],
            "scored_tokens": info["scored_tokens"], "dropped_tokens": info["dropped_tokens"], "bos": info["bos"],
            "removed": list(variant.removed), "scaling": variant.about.get("scaling"),
            "stage": variant.about.get("stage"), "corpus": info, "key": key, "window_nll": values.tolist()})
    return result


def show(name, variants, results):
    """Print one line a variant for one corpus."""
    width = max(len(variant.name) for variant in variants)
    for row in results:
        if row["dataset"] == name:
            low, high = row["ppl_ci95"] or (float("nan"),) * 2
            print(f"  {row['variant']:{width}s}  perplexity {row['ppl']:9.3f}  95 % [{low:.3f}, {high:.3f}]  "
                  f"x{row['ratio_to_reference']:.4f} of {row['reference']}")


if __name__ == "__main__":
    cli.run(main)
