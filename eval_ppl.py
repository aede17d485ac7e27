"""Perplexity of dense, pruned and patched variants of a model (paper, section 4.1, tables 3, 5 and 15): ppl.json.

Non-overlapping windows of the tokenised stream, exp of the mean loss of their next tokens. All variants of one call
share one load and the layers that they have in common. Rows that an earlier ppl.json already has are taken from it, so
an interrupted call goes on where it stopped.
"""

import torch

from utils import cli
from utils.data.corpora import CORPORA
from utils.data.windows import describe, evaluation_windows
from utils.evaluation.objectives import summarise, window_losses
from utils.evaluation.results import ResultFile
from utils.session import Session, default_folder


def arguments():
    p = cli.parser(__doc__, "python eval_ppl.py --model smollm2-135m --patch runs/smollm2-135m/patch.safetensors "
                            "--datasets wiki --seq-len 512 --limit-windows 4")
    cli.add_model_flags(p)
    cli.add_variant_flags(p)
    p.add_argument("--datasets", nargs="+", default=None,
                   help=f"{' '.join(CORPORA)}, or files; default wiki news for the embedded model "
                        "without --data-dir, else wikitext2 c4 ptb")
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
    datasets = list(dict.fromkeys(args.datasets or session.corpora))

    corpora = {name: evaluation_windows(name, session.tokenizer, args.seq_len, bos=args.bos, limit=args.limit_windows,
                                        data_dir=args.data_dir, unk=args.ptb_unk, stride=args.stride)
               for name in datasets}
    recipes = {name: {"model": session.source.sha256, "dtype": session.dtype_name, "dataset": name,
                      "token_ids": windows.info["token_ids_sha256"], "seq_len": args.seq_len, "stride": args.stride}
               for name, windows in corpora.items()}
    file = ResultFile(args, "ppl", "dataset", session, variants, recipes)

    for name, missing in file.evaluate():
        windows = corpora[name]
        print(f"{name}: {describe(windows.info)}; {session.dtype_name}")
        losses = {variant: torch.tensor(row["window_nll"], dtype=torch.float64)
                  for variant, row in file.rows_of(name).items()}
        if missing:
            new = window_losses(session.decoder, missing, windows.ids, args.batch_size, name, scored=args.stride)
            losses |= {variant.name: row for variant, row in zip(missing, new)}
        for variant in variants:
            file.put(name, variant, ppl_row(windows.info, losses, variant.name, variants[0].name))
        show(file.rows_of(name).values())
    print(f"wrote {args.out}")


def ppl_row(info, losses, name, reference):
    """Perplexity of a variant from losses {variant: float64 [windows]}, paired with `reference`; info: the windows'."""
    counts = {field: info[field] for field in ("split", "windows", "seq_len", "scored_tokens", "dropped_tokens", "bos")}
    return {**counts, **summarise(losses[name], losses[reference]), "reference": reference, "corpus": info,
            "window_nll": losses[name].tolist()}


def show(rows):
    """Print one line a variant for one corpus."""
    width = max(len(row["variant"]) for row in rows)
    for row in rows:
        low, high = row["ppl_ci95"] or (float("nan"),) * 2
        print(f"  {row['variant']:{width}s}  perplexity {row['ppl']:9.3f}  95 % [{low:.3f}, {high:.3f}]  "
              f"x{row['ratio_to_reference']:.4f} of {row['reference']}")


if __name__ == "__main__":
    cli.run(main)
