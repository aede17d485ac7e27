"""Fine-tune the patch alone by distillation from the intact model (paper, section 3.4, eq. 8, appendices D and E).

online (default): one pass over the text; the frozen prefix runs once, then the teacher goes through the removed layers
and the student through the patch. offline (the paper): the teacher's top-K outputs and the states at the interface go
to disk first, the removed layers leave memory, and every epoch runs only what follows the patch.
"""

import json
import math
import time
from pathlib import Path

import torch
from tqdm import tqdm

from utils import cli
from utils.artifacts import Stopwatch, atomic_path, read_tensors, recipe_difference, reusable, write_tensors
from utils.distillation import PARAMETRISATIONS, Distiller, TrainablePatch
from utils.errors import UserError, WorkError
from utils.modeling_linearpatch import LinearPatch
from utils.patch import layer_lists, random_matrix, write_patch
from utils.networks import ReplacementLayer, SwiGLU, activation_of
from utils.selection import runs_of
from utils.session import Session, default_folder
from utils.model_folder import save_folder
from utils.teacher_cache import TeacherCache, cache_bytes


def arguments():
    p = cli.parser(__doc__, "python distill.py --model smollm2-135m --patch runs/smollm2-135m/patch.safetensors "
                            "--train-samples 8 --val-samples 2 --seq-len 256")
    cli.add_model_flags(p)
    p.add_argument("--patch", type=Path, required=True, help="patch.safetensors of calibrate.py: the start")
    p.add_argument("--mode", choices=["online", "offline"], default="online", help="see above")
    p.add_argument("--top-k", type=cli.positive, default=100, help="teacher tokens that the loss compares")
    p.add_argument("--loss", choices=["kl", "kl-tail", "mse"], default="kl",
                   help="kl: renormalised on the K tokens; kl-tail: one bucket for all others; "
                        "mse: states at the interface")
    p.add_argument("--trainable", default="full", help=f"one of {', '.join(PARAMETRISATIONS)}")
    p.add_argument("--replace", choices=["ffn", "layer"],
                   help="LLM-Streamline's baselines: train a SwiGLU (random start) or a copy of the first removed "
                        "layer in the place of each run, instead of the patch")
    p.add_argument("--init", choices=["patch", "identity", "random"], default="patch", help="where training starts")
    group = p.add_argument_group("training")
    group.add_argument("--train-data", dest="calib_data", help="corpus[:split] or file; default as for calibration")
    group.add_argument("--train-samples", type=cli.positive, default=5000, help="windows an epoch")
    group.add_argument("--val-samples", type=cli.positive, default=16, help="windows of the last tenth of the split")
    group.add_argument("--seq-len", type=cli.positive, default=2048, help="tokens a window")
    group.add_argument("--epochs", type=cli.positive, default=1)
    group.add_argument("--batch-size", type=cli.positive, default=1, help="windows a forward pass")
    group.add_argument("--accumulate", type=cli.positive, default=1, help="forward passes a step")
    group.add_argument("--lr", type=cli.amount, default=1e-4, help="of AdamW; cosine from here to a twentieth")
    group.add_argument("--weight-decay", type=cli.amount, default=1e-4, help="decoupled")
    group.add_argument("--decay-to-start", action="store_true", help="decay toward the initial patch, not toward zero")
    group.add_argument("--clip", type=cli.above_zero, help="largest gradient norm; none by default")
    group.add_argument("--seed", type=cli.seed, default=0)
    group.add_argument("--save-every", type=cli.positive, default=50, help="steps between validations and checkpoints")
    group.add_argument("--cache", type=Path, help="folder of the offline cache; default teacher_cache beside --out")
    group.add_argument("--cache-dtype", choices=["float16", "float32"], default="float16",
                       help="of cached probabilities")
    cli.add_data_flags(p)
    cli.add_output_flags(p, "fine-tuned patch; default runs/<model>/patch_ft.safetensors")
    p.add_argument("--save-model", type=Path, help="also write the fine-tuned model as a folder")
    args = p.parse_args()
    args.calib_sampling, args.calib_samples = "random", args.train_samples
    return args


def starting_patches(args, variant, session):
    """{end of run: TrainablePatch} from the patch file, the identity or random matrices; or --replace's networks."""
    size, patches = session.source.shape[1], {}
    for number, (start, end) in enumerate(runs_of(variant.removed)):
        if args.replace == "ffn":
            patches[end] = SwiGLU.random(session.decoder.config, args.seed + number)
        elif args.replace == "layer":
            patches[end] = ReplacementLayer(session.decoder.layers[start], start)
        if args.replace:
            continue
        patch = variant.patches[end]
        if not isinstance(patch, LinearPatch):
            raise UserError(f"{args.patch}: holds replacement networks, training starts from a patch; --replace takes "
                            "only the removed layers from it")
        weight = {"patch": patch.weight.detach(), "identity": torch.ones(size),
                  "random": random_matrix(size, args.seed + number)}[args.init]
        order = variant.about.get("hadamard_order", "released")
        patches[end] = TrainablePatch(weight, args.trainable, order, args.seed)
    return patches


def learning_rate(step, steps, peak):
    """Cosine from `peak` at step 0 to peak / 20 at the last step."""
    low = peak / 20
    return low + (peak - low) * (1 + math.cos(math.pi * step / max(steps - 1, 1))) / 2


class Trainer:
    """The training loop's state: parameters, AdamW, best validation so far; saved and restored bit for bit."""

    def __init__(self, args, distiller, recipe):
        self.args, self.distiller, self.recipe = args, distiller, recipe
        self.parameters = distiller.parameters
        decay = 0.0 if args.decay_to_start else args.weight_decay
        self.optimizer = torch.optim.AdamW(self.parameters, lr=args.lr, weight_decay=decay)
        self.start = [p.detach().clone() for p in self.parameters]
        self.step, self.best = 0, (math.inf, self.export())
        self.log = []
        self.path = args.out.with_suffix(".checkpoint.safetensors")

    def export(self):
        """{run{i}.name: float32 tensor} of the patches as they are now."""
        patches = sorted(self.distiller.patches.items())
        return {f"run{i}.{name}": value
                for i, (_, patch) in enumerate(patches) for name, value in patch.export().items()}

    def update(self, steps):
        """One AdamW step at this step's learning rate."""
        args, rate = self.args, learning_rate(self.step, steps, self.args.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if args.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, args.clip)
        self.optimizer.step()
        if args.decay_to_start:
            with torch.no_grad():
                for parameter, start in zip(self.parameters, self.start):
                    parameter.lerp_(start, rate * args.weight_decay)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return rate

    def save(self):
        tensors = {f"best.{name}": tensor for name, tensor in self.best[1].items()}
        for number, parameter in enumerate(self.parameters):
            state = self.optimizer.state[parameter]
            tensors[f"parameter.{number}"] = parameter.detach()
            tensors |= {f"{name}.{number}": state[name] for name in ("exp_avg", "exp_avg_sq", "step")}
        best = None if math.isinf(self.best[0]) else self.best[0]
        write_tensors(self.path, "checkpoint", tensors, {"recipe": self.recipe, "step": self.step, "best": best,
                                                         "log": self.log})

    def restore(self):
        """Go on from the checkpoint when it has the same recipe; says so."""
        if not self.path.is_file() or self.args.force:
            return
        try:
            header, tensors = read_tensors(self.path, "checkpoint")
        except UserError as error:
            print(f"{error}; starting anew")
            return
        differing = recipe_difference(header["recipe"], self.recipe)
        if differing:
            print(f"{self.path}: made with another {differing}; starting anew")
            return
        wanted = {f"{name}.{number}" for number in range(len(self.parameters))
                  for name in ("parameter", "exp_avg", "exp_avg_sq", "step")} | {f"best.{name}" for name in self.best[1]}
        if "best" not in header or set(tensors) != wanted:
            print(f"{self.path}: is damaged; starting anew")
            return
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                parameter.copy_(tensors[f"parameter.{number}"])
                self.optimizer.state[parameter] = {
                    name: tensors[f"{name}.{number}"].to(parameter.device if name != "step" else "cpu")
                    for name in ("step", "exp_avg", "exp_avg_sq")}
        self.step, self.log = header["step"], header["log"]
        best = {name.removeprefix("best."): tensor for name, tensor in tensors.items() if name.startswith("best.")}
        self.best = (math.inf if header["best"] is None else header["best"], best)
        print(f"{self.path}: going on from step {self.step}")


class Targets:
    """Where X^(start) and the teacher's targets of a window come from: the model (online) or the cache (offline)."""

    def __init__(self, distiller, windows, cache=None):
        self.distiller, self.windows, self.cache = distiller, windows, cache

    def batch(self, numbers):
        """(LayerInputs, X^(start), target) of windows by number."""
        distiller, ids = self.distiller, self.windows[numbers]
        if self.cache is None:
            inputs, hidden = distiller.interface(ids)
            return inputs, hidden, distiller.teacher(inputs, hidden)
        parts = [self.cache.window(number) for number in numbers.tolist()]
        device = distiller.decoder.device
        logs, index = (torch.cat([part[i] for part in parts]).to(device) for i in (0, 1))
        return distiller.decoder.inputs(ids), torch.stack([part[2] for part in parts]).to(device), (logs, index)

    @torch.no_grad()
    def fill(self, dtype):
        """Write the shards that the cache lacks."""
        missing = self.cache.missing()
        total = sum(stop - start for start, stop in (self.cache.shards[shard] for shard in missing))
        with tqdm(total=total, desc="teacher", unit="window", disable=not missing) as bar:
            for shard in missing:
                logs, indices, states = [], [], []
                for number in range(*self.cache.shards[shard]):
                    inputs, hidden = self.distiller.interface(self.windows[number:number + 1])
                    log, index = self.distiller.teacher(inputs, hidden, normalised=True)
                    logs.append(log.cpu()), indices.append(index.cpu()), states.append(hidden[0].cpu())
                    bar.update(1)
                self.cache.write(shard, torch.stack(logs), torch.stack(indices), torch.stack(states),
                                 self.distiller.decoder.vocab_size, dtype)


@torch.no_grad()
def validation_loss(distiller, targets, batch_size):
    """Mean loss over the validation windows."""
    numbers = torch.arange(len(targets.windows)).split(batch_size)
    losses = [distiller.student_loss(*targets.batch(part)).item() * len(part) for part in numbers]
    return sum(losses) / len(targets.windows)


def train(args, trainer, train_targets, val_targets):
    """The loop: validate and save every --save-every steps, keep the patch with the lowest validation loss."""
    count, group = len(train_targets.windows), args.batch_size * args.accumulate
    steps_an_epoch = math.ceil(count / group)
    steps = steps_an_epoch * args.epochs
    if trainer.step == 0:
        validate(args, trainer, val_targets, 0.0, None, 0.0)
    with tqdm(total=steps, initial=trainer.step, desc="distil", unit="step") as bar:
        while trainer.step < steps:
            epoch, place = divmod(trainer.step, steps_an_epoch)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(args.seed * 1000 + epoch))
            numbers = order[place * group:(place + 1) * group]
            started, total = time.perf_counter(), 0.0
            for part in numbers.split(args.batch_size):
                loss = trainer.distiller.student_loss(*train_targets.batch(part)) * (len(part) / len(numbers))
                if not torch.isfinite(loss):
                    kept = f" ({trainer.path} keeps the last good state)" if trainer.path.is_file() else ""
                    raise WorkError(f"step {trainer.step}: the loss is not finite; lower --lr or use --dtype float32"
                                    f"{kept}")
                loss.backward()
                total += loss.item()
            rate = trainer.update(steps)
            speed = len(numbers) * train_targets.windows.shape[1] / (time.perf_counter() - started)
            if trainer.step % args.save_every == 0 or trainer.step == steps:
                validate(args, trainer, val_targets, rate, total, speed)
                trainer.save()
            else:
                trainer.log.append({"step": trainer.step, "lr": rate, "train": total, "tokens_per_second": speed})
            bar.set_postfix(loss=f"{total:.4f}", best=f"{trainer.best[0]:.4f}")
            bar.update(1)


def validate(args, trainer, val_targets, rate, train_loss, speed):
    value = validation_loss(trainer.distiller, val_targets, args.batch_size)
    memory = Stopwatch().provenance()["peak_memory_bytes"]
    trainer.log.append({"step": trainer.step, "lr": rate, "train": train_loss, "validation": value,
                        "tokens_per_second": speed, "peak_memory_bytes": memory})
    if value < trainer.best[0]:
        trainer.best = (value, trainer.export())


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


def main():
    args = arguments()
    args.out = args.out or default_folder(args.model) / "patch_ft.safetensors"
    cli.check_outputs(args, reads=("patch",), beside=(".last.safetensors", ".checkpoint.safetensors"),
                      out=".safetensors")
    if args.replace and args.save_model:
        raise UserError("--save-model: replacement networks stay in their patch file; evaluate with it")
    args.cache = args.cache or args.out.with_name("teacher_cache")
    cli.check_parent(args.cache / "shard", f"--cache {args.cache}")
    if args.mode == "offline" and args.loss == "mse":
        raise UserError("--loss mse needs the states of the intact model; use --mode online")
    if args.loss == "kl" and args.top_k == 1:
        raise UserError("--top-k 1: one token renormalised is always certain, so the loss is 0; use --loss kl-tail")
    session = Session(args)
    variant = session.read_patch(args.patch)
    windows, held_out = session.calibration(), session.calibration(part="validation", samples=args.val_samples)
    names = ("mode", "top_k", "loss", "trainable", "replace", "init", "epochs", "batch_size", "accumulate", "lr",
             "weight_decay", "decay_to_start", "clip", "seed", "save_every", "cache_dtype")
    recipe = {"model": session.source.identity(), "removed": variant.removed, "start": variant.digest(),
              "dtype": session.dtype_name, "train": windows.info["token_ids_sha256"],
              "validation": held_out.info["token_ids_sha256"], **{name: getattr(args, name) for name in names}}
    if not reusable(args.out, "patch", recipe, args.force):
        distil(args, session, variant, windows, held_out, recipe)
    if args.save_model:
        tuned = session.read_patch(args.out)
        save_folder(session.decoder, session.tokenizer, tuned, args.save_model,
                    {"stage": "distilled", "base_model": session.source.identity(), "calibration": windows.info,
                     "seed": args.seed})
        print(f"wrote {args.save_model} ({tuned.describe(session.source)})")


def distil(args, session, variant, windows, held_out, recipe):
    """Train and write the best patch, the last one, the log and the loss curve."""
    distiller = Distiller(session.decoder, variant.removed, starting_patches(args, variant, session), args.top_k,
                          args.loss)
    for patch in distiller.patches.values():
        patch.to(session.decoder.device)
    caches = [None, None]
    if args.mode == "offline":
        outputs = cache_bytes(len(windows.ids), args.seq_len, args.top_k, session.decoder.vocab_size)
        states = windows.ids.numel() * session.decoder.hidden_size * session.dtype.itemsize
        print(f"offline cache: {outputs / 1e9:.2f} GB of probabilities and indices, {states / 1e9:.2f} GB of states")
        for number, part in enumerate((windows, held_out)):
            key = {"teacher": session.source.fingerprint, "token_ids_sha256": part.info["token_ids_sha256"],
                   "seq_len": args.seq_len, "top_k": args.top_k, "dtype": session.dtype_name,
                   "cache_dtype": args.cache_dtype, "interface": distiller.start}
            caches[number] = TeacherCache(args.cache, key, len(part.ids))
    train_targets = Targets(distiller, windows.ids, caches[0])
    val_targets = Targets(distiller, held_out.ids, caches[1])
    if args.mode == "offline":
        for targets in (train_targets, val_targets):
            targets.fill(getattr(torch, args.cache_dtype))
        for layer in variant.removed:  # the teacher is on disk: its layers may leave memory
            for parameter in session.decoder.layers[layer].parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype)
    trainer = Trainer(args, distiller, recipe)
    trainer.restore()
    train(args, trainer, train_targets, val_targets)

    content = {"model": recipe["model"], "stage": "distilled", **layer_lists(session.source.shape[0], variant.removed),
               "scaling": f"{args.replace or variant.about['scaling'].removesuffix('+ft')}+ft",
               "trainable": args.replace or args.trainable,
               "hadamard_order": variant.about.get("hadamard_order", "released"), "loss": args.loss,
               "top_k": args.top_k, "calibration": windows.info, "recipe": recipe,
               "validation": {"first": trainer.log[0]["validation"], "best": trainer.best[0]},
               "provenance": session.watch.provenance(session.decoder)}
    if args.replace == "ffn":
        content["activation"] = activation_of(session.decoder.config)
    write_patch(args.out.with_suffix(".last.safetensors"), trainer.export(), content)
    with atomic_path(args.out.with_suffix(".log.jsonl")) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in trainer.log))
    write_curve(args.out.with_suffix(".curve.png"), trainer.log)
    write_patch(args.out, trainer.best[1], content)  # the last one: where it is, the others are
    trainer.path.unlink(missing_ok=True)
    print(f"validation loss {trainer.log[0]['validation']:.4f} -> {trainer.best[0]:.4f} nats a token "
          f"({len(held_out.ids)} windows, {len(runs_of(variant.removed))} run(s), {args.replace or args.trainable})")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    cli.run(main)
