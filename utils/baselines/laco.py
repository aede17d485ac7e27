"""LaCo (Yang et al., 2024), a baseline that changes weights: rear layers are merged into an earlier one.

A merge of [lay, lay+m) puts theta* = theta_lay + sum_k (theta_{lay+k} - theta_lay), RDSC, in layer lay and drops the
others. It is accepted when the last hidden states stay similar to those of the original model.
"""

import math
import re
from dataclasses import dataclass

import torch
from torch.func import functional_call
from tqdm import tqdm

from utils.activations import layer_states
from utils.baselines.base import Baseline
from utils.decoder import Variant, first_tensor
from utils.errors import UserError, WorkError
from utils.layers import Layers, check_count, parameter_accounting
from utils.model_folder import save_folder
from utils.search import Selection

RDSC = ("paper", "official", "remove")
FLAGS = ("rdsc", "laco_merge", "laco_range", "laco_interval", "laco_threshold")


@dataclass(frozen=True)
class Schedule:
    """Which merges are tried, in which order: windows of `merge` layers, hosts from the top of the range downward.

    low, high: the range, ends included; nothing outside it is merged or takes a merge. interval: how far the host
    moves down after an accepted merge (by 1 after a rejected one). threshold: least cosine, exclusive; None searches
    the highest one that removes as many layers as wanted.
    """

    merge: int
    low: int
    high: int
    interval: int
    threshold: float | None = None

    @classmethod
    def of(cls, num_layers, merge=None, low=None, high=None, interval=None, threshold=None):
        """Defaults of a depth: at 32 layers 4 a merge and steps of 2, in proportion; all layers but the first."""
        return cls(merge=max(2, round(num_layers / 8)) if merge is None else merge, low=1 if low is None else low,
                   high=num_layers - 1 if high is None else high,
                   interval=max(1, round(num_layers / 16)) if interval is None else interval, threshold=threshold)

    def check(self, n_prune, num_layers):
        """Raise UserError when the schedule leaves the model or cannot remove n_prune layers."""
        check_count(n_prune, num_layers)
        if not 0 <= self.low <= self.high < num_layers:
            raise UserError(f"--laco-range {self.low}-{self.high}: the model has layers 0 to {num_layers - 1}")
        if self.merge > self.high - self.low + 1:
            raise UserError(f"--laco-merge {self.merge}: --laco-range {self.low}-{self.high} has "
                            f"{self.high - self.low + 1} layers only")
        if n_prune > (self.high - self.low if self.merge > 1 else 0):
            raise UserError(f"--n-prune {n_prune}: merges of {self.merge} layers in --laco-range "
                            f"{self.low}-{self.high} remove at most {self.high - self.low if self.merge > 1 else 0}")


def merge_weights(host, merged, rdsc):
    """RDSC on {name: weight} of the host and of each merged layer -> {name: weight} of the new host, same dtypes.

    paper: theta + sum_k (theta_k - theta), in float64 (float32 on devices without it). official: what the released
    code computes; its sum runs over the already updated weights, telescopes, and leaves the last merged layer's.
    remove: the host's own.
    """
    if rdsc == "remove" or not merged:
        return dict(host)
    if rdsc == "official":
        return {name: weight.detach().clone() for name, weight in merged[-1].items()}
    result = {}
    for name, weight in host.items():
        wide = torch.float32 if weight.device.type == "mps" else torch.float64
        total = sum(other[name].detach().to(wide) for other in merged)
        result[name] = (total - (len(merged) - 1) * weight.detach().to(wide)).to(weight.dtype)
    return result


def mergeable(layer):
    """{name: parameter} of a decoder layer that RDSC merges: all but those of norms, which the host keeps."""
    return {f"{path}.{name}".lstrip("."): parameter for path, module in layer.named_modules()
            if "norm" not in type(module).__name__.lower()
            for name, parameter in module.named_parameters(recurse=False)}


def apply_merges(decoder, merges, rdsc):
    """Give the hosts of the decoder's model, in memory, the weights of `merges` [{"host", "merged"}], in their order.

    Old tensors are replaced, not written to. Layers keep their places: cut the merged ones out afterwards.
    """
    for merge in merges:
        own = mergeable(decoder.layers[merge["host"]])
        new = merge_weights(own, [mergeable(decoder.layers[index]) for index in merge["merged"]], rdsc)
        for name, parameter in own.items():
            parameter.data = new[name].detach()


class Similarity:
    """Mean cosine over windows between the flattened last hidden states (final norm included) of merged and original.

    Layers below a host are intact, so a candidate runs from its host on, from the stored X^(host).
    """

    def __init__(self, decoder, ids, low, high, rdsc, batch_size):
        self.decoder, self.rdsc = decoder, rdsc
        shapes = [{name: weight.shape for name, weight in mergeable(decoder.layers[index]).items()}
                  for index in range(low, high + 1)]
        if any(shape != shapes[0] for shape in shapes):
            raise UserError(f"--metric laco: layers {low} to {high} of {decoder.label} differ in the shapes of their "
                            "weights, so they cannot be merged")
        self.batches = layer_states(decoder, ids, batch_size, (*range(low, high + 1), decoder.num_layers))
        self.targets = [self._flat(states.pop(decoder.num_layers)) for _, states in self.batches]
        self.known = {}

    def _flat(self, hidden):
        return self.decoder.final_states(hidden).flatten(1).float()

    def weights(self, changed, host, merged):
        """Merged weights of a host; `changed` holds those of earlier hosts."""
        host, *merged = (changed.get(index) or mergeable(self.decoder.layers[index]) for index in (host, *merged))
        return merge_weights(host, merged, self.rdsc)

    @torch.no_grad()
    def __call__(self, path, host, merged, changed, gone):
        """The cosine after one more merge; path: the accepted ones before it, changed: their weights by host."""
        key = (path, host, merged)
        if key not in self.known:
            changed = {**changed, host: self.weights(changed, host, merged)}
            kept = [index for index in range(host, self.decoder.num_layers) if index not in (*gone, *merged)]
            cosines = []
            for (batch, states), target in zip(self.batches, self.targets):
                hidden = states[host]
                for index in kept:
                    hidden = first_tensor(functional_call(self.decoder.layers[index], changed.get(index, {}), (hidden,),
                                                          batch.kwargs[index]))
                cosines.append(torch.nn.functional.cosine_similarity(self._flat(hidden), target, dim=1))
            self.known[key] = torch.cat(cosines).double().mean().item()
            if not math.isfinite(self.known[key]):
                raise WorkError(f"{self.decoder.label}: non-finite hidden states after merging layers {list(merged)} "
                                f"into {host}; use --dtype float32 or bfloat16")
        return self.known[key]


def sweep(similarity, schedule, n_prune, threshold):
    """One pass of LaCo at a threshold, stopped when n_prune layers are gone -> the list of its attempts.

    attempts: {"host", "merged", "start", "end", "score", "accepted"} in the layer numbers of the intact model. The
    last merge is shortened so that exactly n_prune layers go.
    """
    attempts, path, changed, gone = [], (), {}, []
    host = schedule.high + 1 - schedule.merge
    while host >= schedule.low and len(gone) < n_prune:
        above = [index for index in range(host + 1, schedule.high + 1) if index not in gone]
        merged = tuple(above[:min(schedule.merge - 1, n_prune - len(gone))])
        if not merged:
            host -= 1
            continue
        score = similarity(path, host, merged, changed, gone)
        accepted = score > threshold
        attempts.append({"host": host, "merged": list(merged), "start": host, "end": merged[-1] + 1, "score": score,
                         "accepted": accepted})
        if accepted:
            changed = {**changed, host: similarity.weights(changed, host, merged)}
            path, gone = (*path, (host, merged)), [*gone, *merged]
        host -= schedule.interval if accepted else 1
    return attempts


def laco(decoder, ids, n_prune, rdsc="paper", schedule=None, batch_size=1, progress=True):
    """Merge until n_prune layers are gone: (Selection, merges [{"host", "merged"}], threshold used).

    ids: int64 [N, T], a few short windows. Without a threshold in the schedule the highest one is searched at which
    a sweep removes n_prune layers: each sweep lowers it just below the best attempt that the one before rejected. The
    decoder's model is not changed. Raises UserError when the layers run out first. Extra memory: X^(l) of all
    windows, and new weights of every host.
    """
    schedule = schedule or Schedule.of(decoder.num_layers)
    schedule.check(n_prune, decoder.num_layers)
    if n_prune == 0:
        return Selection(Layers(decoder.num_layers), (), ()), [], schedule.threshold
    similarity = Similarity(decoder, ids, schedule.low, schedule.high, rdsc, batch_size)
    threshold = math.inf if schedule.threshold is None else schedule.threshold
    with tqdm(desc="laco", unit="sweep", disable=not progress) as bar:
        while True:
            attempts = sweep(similarity, schedule, n_prune, threshold)
            bar.update()
            merges = [{"host": a["host"], "merged": a["merged"]} for a in attempts if a["accepted"]]
            order = tuple(layer for merge in merges for layer in merge["merged"])
            rejected = [a["score"] for a in attempts if not a["accepted"]]
            if len(order) == n_prune:
                layers = Layers(decoder.num_layers, order)
                return Selection(layers, order, tuple(attempts)), merges, threshold
            if schedule.threshold is not None:
                raise UserError(f"--laco-threshold {threshold}: {len(order)} of {n_prune} layers could be merged; "
                                "lower it, or leave it out to have it searched")
            if not rejected:
                raise UserError(f"--n-prune {n_prune}: merges of {schedule.merge} layers every {schedule.interval} in "
                                f"--laco-range {schedule.low}-{schedule.high} remove {len(order)}; widen the range or "
                                "change --laco-interval")
            threshold = math.nextafter(max(rejected), -math.inf)


# ----- what prune.py calls


def add_flags(p):
    """LaCo's flags of prune.py."""
    group = p.add_argument_group("--metric laco (reads few short windows: 10 of 64 tokens unless told otherwise)")
    group.add_argument("--rdsc", choices=RDSC, help="paper (default): the sum of differences; official: what the "
                       "released code computes, the last merged layer; remove: just drop what would be merged")
    group.add_argument("--laco-merge", type=int, help="layers of one merge, its host included; default 4 of 32 layers, "
                                                      "in proportion to the depth")
    group.add_argument("--laco-range", help="LOW-HIGH: layers that may take part, ends included; default all but 0")
    group.add_argument("--laco-interval", type=int, help="layers to go down after a merge; default 2 of 32 layers")
    group.add_argument("--laco-threshold", type=float,
                       help="least cosine of the last hidden states, exclusive; default: the highest that reaches n")


def schedule_of(args, num_layers):
    """Schedule of the flags. Raises UserError."""
    low = high = None
    if args.laco_range is not None:
        ends = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", args.laco_range)
        if not ends:
            raise UserError(f"--laco-range {args.laco_range}: expected LOW-HIGH, for instance 4-{num_layers - 1}")
        low, high = map(int, ends.groups())
    for name in ("laco_merge", "laco_interval"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    threshold = args.laco_threshold
    if threshold is not None and not -1 <= threshold <= 1:
        raise UserError(f"--laco-threshold {threshold}: is a cosine, from -1 to 1")
    return Schedule.of(num_layers, args.laco_merge, low, high, args.laco_interval, threshold)


class Laco(Baseline):
    """--metric laco."""

    help = "LaCo merges layers (--rdsc paper, official, remove); a model folder"

    def __init__(self, args, session):
        self.rdsc = args.rdsc or "paper"
        self.stage = "pruned" if self.rdsc == "remove" else "merged"
        if self.rdsc != "remove" and not args.save_model:
            raise UserError("--metric laco: merging changes weights, which a selection cannot hold; add --save-model "
                            "DIR, or --rdsc remove")
        super().__init__(args, session)
        depth = len(session.parameters[1])
        self.schedule = schedule_of(args, depth)
        self.schedule.check(self.n, depth)
        self.windows = session.calibration()
        self.recipe = {"model": session.source.json(), "metric": "laco", "n_prune": self.n, "rdsc": self.rdsc,
                       "schedule": vars(self.schedule), "dtype": session.dtype_name,
                       "token_ids_sha256": self.windows.info["token_ids_sha256"]}

    @classmethod
    def check_flags(cls, p, args):
        flag = next((f"--{name.replace('_', '-')}" for name in FLAGS if getattr(args, name) is not None), None)
        if args.metric != "laco":
            return p.error(f"{flag} belongs to --metric laco") if flag else None
        if args.layers is not None:
            p.error("--metric laco takes --n-prune or --ratio, no --layers")
        if args.protect_first is not None or args.protect_last is not None:
            p.error("--metric laco takes --laco-range instead of --protect-first and --protect-last")

    def select(self):
        """The fields of selection.json."""
        total, per_layer = self.session.parameters
        selection, merges, threshold = laco(self.session.decoder, self.windows.ids, self.n, self.rdsc, self.schedule,
                                            self.args.batch_size)
        return {**selection.layers.json(), "order": list(selection.order), "scores": list(selection.scores),
                "rdsc": self.rdsc, "merges": merges, "threshold": threshold,
                "parameters": parameter_accounting(total, per_layer, selection.layers, hidden_size=0)}  # no patch

    def check(self, content, path):
        """Raise UserError when a reused selection is inconsistent in itself."""
        if sorted(layer for merge in content["merges"] for layer in merge["merged"]) != content["removed"]:
            raise UserError(f"{path}: its removed layers were edited and do not follow from its merges; use --force")

    def report(self, content):
        """Lines to print about a selection."""
        yield f"remove layers {content['removed']} (0-based), keep {content['kept']}"
        for attempt in content["scores"]:
            if attempt["accepted"]:
                yield f"  layers {attempt['merged']} into {attempt['host']}: cosine {attempt['score']:.6f}"
        tried = f"{sum(a['accepted'] for a in content['scores'])} of {len(content['scores'])} merges accepted"
        yield tried + ("" if content["threshold"] is None else f", threshold {content['threshold']:.6f}")

    def save(self, content, more):
        """Write the merged model's folder; changes the decoder's model in memory."""
        decoder = self.session.decoder
        apply_merges(decoder, content["merges"], self.rdsc)
        variant = Variant("merged", Layers(decoder.num_layers, tuple(content["removed"])), about=self.about)
        save_folder(decoder, self.session.tokenizer, variant, self.args.save_model,
                    {"rdsc": self.rdsc, "merges": content["merges"], **more})
        return f"layers {len(content['kept'])}, patch no"
