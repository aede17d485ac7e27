"""The training loop of distillation: AdamW with a cosine rate, validations, checkpoints to go on from bit for bit."""

import math
import time

import torch
from tqdm import tqdm

from utils.artifacts import Stopwatch, read_tensors, recipe_difference, write_tensors
from utils.errors import UserError, WorkError


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
                  for name in ("parameter", "exp_avg", "exp_avg_sq", "step")}
        wanted |= {f"best.{name}" for name in self.best[1]}
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
