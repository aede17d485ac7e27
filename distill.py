"""Fine-tune the patch alone by distillation from the intact model (paper, section 3.4, eq. 8, appendices D and E).

online (default): one pass over the text; the frozen prefix runs once, then the teacher goes through the removed layers
and the student through the patch. offline (the paper): the teacher's top-K outputs and the states at the interface go
to disk first, the removed layers leave memory, and every epoch runs only what follows the patch.
"""

import json
from pathlib import Path

import torch

from utils import cli
from utils.artifacts import atomic_path, reusable
from utils.distillation import Distiller
from utils.errors import UserError
from utils.folding import check_fold, save_model
from utils.networks import PARAMETRISATIONS
from utils.repairs import REPAIRS, write_patch
from utils.session import Session, default_folder
from utils.teacher_cache import TeacherCache, cache_bytes
from utils.training import Targets, Trainer, train


def arguments():
    p = cli.parser(__doc__, "python distill.py --model smollm2-135m --patch runs/smollm2-135m/patch.safetensors "
                            "--train-samples 8 --val-samples 2 --seq-len 256")
    cli.add_model_flags(p)
    p.add_argument("--patch", type=Path, help="patch file of calibrate.py: the start; default "
                                              "runs/<model>/patch.safetensors")
    p.add_argument("--mode", choices=["online", "offline"], default="online", help="see above")
    p.add_argument("--top-k", type=cli.positive, default=100, help="teacher tokens that the loss compares")
    p.add_argument("--loss", choices=["kl", "kl-tail", "mse"], default="kl",
                   help="kl: renormalised on the K tokens; kl-tail: one bucket for all others; "
                        "mse: states at the interface")
    p.add_argument("--trainable", default="full", help=f"one of {', '.join(PARAMETRISATIONS)}")
    networks = {name: repair for name, repair in REPAIRS.items() if not repair.closed_form}
    p.add_argument("--replace", choices=networks, help="train this in the place of each run, instead of the patch")
    p.epilog += cli.listed("networks for --replace", {name: repair.help for name, repair in networks.items()})
    p.add_argument("--init", choices=["patch", "identity", "random"], default="patch", help="where training starts")
    group = p.add_argument_group("training")
    group.add_argument("--train-data", dest="calib_data", metavar="CORPUS",
                       help="corpus[:split] or file; default as for calibration")
    group.add_argument("--train-samples", type=cli.positive, default=5000, help="windows an epoch")
    group.add_argument("--val-samples", type=cli.positive, default=16, help="windows of the last tenth of the split")
    group.add_argument("--seq-len", type=cli.positive, default=2048, help="tokens a window")
    group.add_argument("--epochs", type=cli.positive, default=1, help="passes over the windows")
    group.add_argument("--batch-size", type=cli.positive, default=1, help="windows a forward pass")
    group.add_argument("--accumulate", type=cli.positive, default=1, help="forward passes a step")
    group.add_argument("--lr", type=cli.amount, default=1e-4, help="of AdamW; cosine from here to a twentieth")
    group.add_argument("--weight-decay", type=cli.amount, default=1e-4, help="decoupled")
    group.add_argument("--decay-to-start", action="store_true", help="decay toward the initial patch, not toward zero")
    group.add_argument("--clip", type=cli.above_zero, help="largest gradient norm; none by default")
    group.add_argument("--seed", type=cli.seed, default=0, help="of windows, their order and random starts")
    group.add_argument("--save-every", type=cli.positive, default=50, help="steps between validations and checkpoints")
    group.add_argument("--cache", type=Path, help="folder of the offline cache; default teacher_cache beside --out")
    group.add_argument("--cache-dtype", choices=["float16", "float32"], default="float16",
                       help="of cached probabilities")
    cli.add_data_flags(p)
    cli.add_output_flags(p, "fine-tuned patch; default runs/<model>/patch_ft.safetensors")
    cli.add_save_model_flags(p, "the fine-tuned model")
    args = cli.parse(p)
    args.patch = args.patch or default_folder(args.model) / "patch.safetensors"
    args.calib_sampling, args.calib_samples = "random", args.train_samples
    return args


def main():
    args = arguments()
    args.out = args.out or default_folder(args.model) / "patch_ft.safetensors"
    cli.check_outputs(args, reads=("patch",), beside=(".last.safetensors", ".checkpoint.safetensors"),
                      out=".safetensors")
    if args.replace and args.save_model and not REPAIRS[args.replace].is_matrix:
        raise UserError("--save-model: replacement networks stay in their patch file; evaluate with it")
    args.cache = args.cache or args.out.with_name("teacher_cache")
    cli.check_parent(args.cache / "shard", f"--cache {args.cache}")
    if args.mode == "offline" and args.loss == "mse":
        raise UserError("--loss mse needs the states of the intact model; use --mode online")
    if args.loss == "kl" and args.top_k == 1:
        raise UserError("--top-k 1: one token renormalised is always certain, so the loss is 0; use --loss kl-tail")
    session = Session(args)
    variant, header = session.read_patch(args.patch)
    repair = REPAIRS[args.replace or variant.about["repair"]]
    if not args.replace and not repair.is_matrix:
        raise UserError(f"{args.patch}: repair {repair.name} is no matrix on the stream, from which training starts; "
                        "--replace takes only the removed layers from it")
    check_fold(session, repair, variant.layers)
    windows, held_out = session.calibration(), session.calibration(part="validation", samples=args.val_samples)
    names = ("mode", "top_k", "loss", "trainable", "replace", "init", "epochs", "batch_size", "accumulate", "lr",
             "weight_decay", "decay_to_start", "clip", "seed", "save_every", "cache_dtype")
    recipe = {"model": session.source.json(), "removed": variant.removed, "start": variant.sha256(),
              "metric": variant.about["metric"], "dtype": session.dtype_name,
              "train": windows.info["token_ids_sha256"], "validation": held_out.info["token_ids_sha256"],
              **{name: getattr(args, name) for name in names}}
    args.order = header.get("hadamard_order", "released")
    if not reusable(args.out, "patch", recipe, args.force):
        distil(args, session, variant, repair, windows, held_out, recipe)
    if args.save_model:
        tuned, _ = session.read_patch(args.out)
        save_model(session, tuned, lambda: held_out.ids,
                   {"base_model": session.source.json(), "calibration": windows.info, "seed": args.seed})


def distil(args, session, variant, repair, windows, held_out, recipe):
    """Train and write the best patch, the last one, the log and the loss curve."""
    # What is trained, in the place of each run; the base model is frozen.
    decoder, layers = session.decoder, variant.layers
    patches = {end: repair.trainable(variant.modules[end], decoder, start, args, number).to(decoder.device)
               for number, (start, end) in enumerate(layers.runs)}
    distiller = Distiller(decoder, layers, patches, args.top_k, args.loss)

    # Where the teacher's targets come from: its branch of the same pass, or the disk.
    if args.mode == "offline":
        outputs = cache_bytes(len(windows.ids), args.seq_len, args.top_k, decoder.vocab_size)
        states = windows.ids.numel() * decoder.hidden_size * session.dtype.itemsize
        print(f"offline cache: {outputs / 1e9:.2f} GB of probabilities and indices, {states / 1e9:.2f} GB of states")
    train_targets, val_targets = (Targets(distiller, part.ids, cache_of(args, session, distiller, part))
                                  for part in (windows, held_out))
    if args.mode == "offline":
        for targets in (train_targets, val_targets):
            targets.fill(getattr(torch, args.cache_dtype))
        for layer in layers.removed:  # the teacher is on disk: its layers may leave memory
            for parameter in decoder.layers[layer].parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype)

    trainer = Trainer(args, distiller, recipe)
    trainer.restore()
    train(args, trainer, train_targets, val_targets)

    # Write; the best patch last: where it is, the others are.
    first, best = trainer.log[0]["validation"], trainer.best[0]
    content = {"model": recipe["model"], "about": {**variant.about, "repair": repair.name, "stage": "distilled"},
               **layers.json(), **repair.training_header(decoder.config), "hadamard_order": args.order,
               "training": {name: getattr(args, name) for name in ("trainable", "loss", "top_k", "init", "replace")},
               "calibration": windows.info, "recipe": recipe, "validation": {"first": first, "best": best},
               "provenance": session.watch.provenance(decoder)}
    write_patch(args.out.with_suffix(".last.safetensors"), trainer.export(), content)
    with atomic_path(args.out.with_suffix(".log.jsonl")) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in trainer.log))
    write_curve(args.out.with_suffix(".curve.png"), trainer.log)
    write_patch(args.out, trainer.best[1], content)
    trainer.path.unlink(missing_ok=True)
    print(f"validation loss {first:.4f} -> {best:.4f} nats a token ({len(held_out.ids)} windows, "
          f"{len(layers.runs)} run(s), {args.replace or args.trainable})")
    print(f"wrote {args.out}")


def cache_of(args, session, distiller, windows):
    """The TeacherCache of these windows; None when training online."""
    if args.mode == "online":
        return None
    key = {"teacher": session.source.sha256, "token_ids_sha256": windows.info["token_ids_sha256"],
           "seq_len": args.seq_len, "top_k": args.top_k, "dtype": session.dtype_name, "cache_dtype": args.cache_dtype,
           "interface": distiller.start}
    return TeacherCache(args.cache, key, len(windows.ids))


def write_curve(path, log):
    """Loss over steps as a picture."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    for name, style in (("train", "-"), ("validation", "o--")):
        points = [(row["step"], row[name]) for row in log if row.get(name) is not None]
        axes.plot(*zip(*points), style, label=name, markersize=3, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.legend()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    cli.run(main)
