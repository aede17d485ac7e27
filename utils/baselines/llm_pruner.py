"""LLM-Pruner (Ma et al., 2023), the width baseline: fewer attention heads and MLP channels in the middle layers.

A head group is one key/value head with its query heads (rows of q, k, v; columns of o), a channel one row of gate and
up and one column of down. Importance is first-order Taylor, |w dL/dw| summed over the coupled weights.
"""

import math

import torch
from torch import nn

from utils import gradients
from utils.baselines.base import Baseline
from utils.decoder import Decoder, Variant
from utils.errors import UserError, WorkError
from utils.layers import Layers, check_count
from utils.model_folder import base_class, importable, own_model, save_folder

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
COLUMNS = ("o_proj", "down_proj")  # projections that a group owns columns of; of the others it owns rows


def projections(layer):
    """{"self_attn.q_proj": nn.Linear, ...}, the seven projections of a Llama-type layer; UserError for others."""
    found = {f"{parent}.{name}": getattr(getattr(layer, parent, None), name, None)
             for parent, names in (("self_attn", ATTENTION), ("mlp", MLP)) for name in names}
    kind = type(layer).__name__
    if not all(isinstance(module, nn.Linear) for module in found.values()):
        missing = next(name for name, module in found.items() if not isinstance(module, nn.Linear))
        raise UserError(f"--metric llm-pruner: {kind} has no linear {missing}; it needs layers with q, k, v, o, gate, "
                        "up and down projections, as in Llama")
    head_dim, known = layer.self_attn.head_dim, {id(p) for module in found.values() for p in module.parameters()}
    others = [(name, p) for name, p in [*layer.self_attn.named_parameters(), *layer.mlp.named_parameters()]
              if id(p) not in known and tuple(p.shape) != (head_dim,)]
    if others:
        raise UserError(f"--metric llm-pruner: {kind} has the weight {others[0][0]} of shape "
                        f"{list(others[0][1].shape)}, which does not belong to single heads or channels")
    return found


def widths_of(layer):
    """{"heads", "kv_heads", "channels"} of a Llama-type decoder layer."""
    found, head_dim = projections(layer), layer.self_attn.head_dim
    return {"heads": found["self_attn.q_proj"].out_features // head_dim,
            "kv_heads": found["self_attn.k_proj"].out_features // head_dim,
            "channels": found["mlp.gate_proj"].out_features}


def grouped(name, weight, groups):
    """A projection's weight [out, in] or bias [out] as [groups, ...]: what each head group or channel owns of it."""
    if name.split(".")[1] in COLUMNS:
        weight = weight.T
    return weight.reshape(groups, -1, *weight.shape[1:])


def groups_of(name, widths):
    """Number of groups that share out a projection."""
    return widths["kv_heads" if name.startswith("self_attn") else "channels"]


def coupled(layer):
    """{name: parameter} of what groups own: the weights, and the biases but those of o and down, of all projections."""
    return {f"{path}.{name}": parameter for path, module in projections(layer).items()
            for name, parameter in module.named_parameters()
            if name == "weight" or path.split(".")[1] not in COLUMNS}


def group_sizes(layer):
    """(parameters of one head group, of one channel)."""
    widths, sizes = widths_of(layer), [0, 0]
    for name, parameter in coupled(layer).items():
        sizes[name.startswith("mlp")] += parameter.numel() // groups_of(name, widths)
    return tuple(sizes)


def importance(decoder, ids, first, last, batch_size=1):
    """Taylor importance of the groups of layers first..last-1: [(head groups float64 [G], channels float64 [I])].

    L is the mean loss of all next tokens of ids, int64 [N, T]; the gradient of the whole text is taken before the
    absolute value. Memory as in gradients.for_each_layer. Raises WorkError on non-finite gradients.
    """
    count, scores = ids[:, 1:].numel(), {}

    def weights_of(index):
        return coupled(decoder.layers[index]) if index < last else {}

    def score(index, found):
        scores[index] = _group_scores(decoder, index, weights_of(index), found, count)

    gradients.for_each_layer(decoder, ids, weights_of, score, batch_size, first, label="llm-pruner")
    return [scores[index] for index in range(first, last)]


def _group_scores(decoder, index, weights, gradient, count):
    widths = widths_of(decoder.layers[index])
    heads, channels = torch.zeros(widths["kv_heads"]).double(), torch.zeros(widths["channels"]).double()
    for name, weight in weights.items():
        groups = groups_of(name, widths)
        product = gradient[name].mul_(weight.detach()).div_(count).abs_()
        score = grouped(name, product, groups).flatten(1).sum(1)
        (heads if name.startswith("self_attn") else channels).add_(score.cpu())
    if not (torch.isfinite(heads).all() and torch.isfinite(channels).all()):
        raise WorkError(f"{decoder.label}: non-finite gradients in layer {index}; use --dtype float32 or bfloat16")
    return heads, channels


def counts_for(target, num_layers, sizes, widths):
    """(head groups, channels) to prune in each of num_layers layers so that about `target` parameters go in all.

    sizes: of one head group and one channel; widths: what the narrowest layer has. Both take the same share as far as
    whole head groups allow; the channels make up for the rest, so the total is within half a channel in every layer.
    Raises UserError when a layer would lose its last head group or channel.
    """
    per_layer = target / num_layers
    whole = sizes[0] * widths["kv_heads"] + sizes[1] * widths["channels"]
    most_heads, most_channels = widths["kv_heads"] - 1, widths["channels"] - 1

    def channels_beside(heads):
        return math.floor((per_layer - sizes[0] * heads) / sizes[1] + 0.5)

    heads = min(math.floor(per_layer / whole * widths["kv_heads"] + 0.5), most_heads)
    while channels_beside(heads) < 0:
        heads -= 1
    while channels_beside(heads) > most_channels and heads < most_heads:
        heads += 1
    channels = channels_beside(heads)
    if channels > most_channels:
        most = num_layers * (sizes[0] * most_heads + sizes[1] * most_channels)
        raise UserError(f"--metric llm-pruner: {target:,.0f} parameters are to go, but its {num_layers} layers can "
                        f"lose at most {most:,}; lower --ratio, --n-prune, --protect-first or --protect-last")
    return heads, channels


def kept_groups(scores, pruned):
    """Sorted indices of the groups that stay when the `pruned` least important ones go; ties go to the lower index."""
    order = torch.argsort(scores, stable=True)
    return order[pruned:].sort().values


def narrow(decoder, kept):
    """The decoder's model without some head groups and channels, as this project's class; the old one is unchanged.

    kept: {layer: (head groups, channels)}, each a sorted index tensor. Parameters of other layers are shared.
    """
    tensors, layer_widths = {}, []
    for index, layer in enumerate(decoder.layers):
        widths = widths_of(layer)
        if index in kept:
            ratio = widths["heads"] // widths["kv_heads"]
            for name, parameter in coupled(layer).items():
                groups = groups_of(name, widths)
                rows = kept[index][name.startswith("mlp")].to(parameter.device)
                part = grouped(name, parameter.detach(), groups)[rows].flatten(0, 1)
                if name.split(".")[1] in COLUMNS:
                    part = part.T
                tensors[f"{decoder.layers_path}.{index}.{name}"] = part.contiguous()
            heads, channels = (len(part) for part in kept[index])
            widths = {"heads": heads * ratio, "kv_heads": heads, "channels": channels}
        layer_widths.append(widths)
    return own_model(decoder.model, tensors, layer_widths=layer_widths)


# ----- what prune.py calls


class LLMPruner(Baseline):
    """--metric llm-pruner."""

    help = "LLM-Pruner makes layers narrower, by default 4 to 29 of 32, in proportion; a model folder"
    stage = "narrowed"

    def __init__(self, args, session):
        if not args.save_model:
            raise UserError("--metric llm-pruner: narrower layers cannot be held by a selection; add --save-model DIR")
        super().__init__(args, session)
        total, per_layer = session.parameters
        depth = len(per_layer)
        check_count(self.n, depth)
        self.target = args.ratio * total if args.ratio is not None else args.n_prune * sum(per_layer) / depth
        first = _share(4, depth) if args.protect_first is None else args.protect_first
        last = depth - (_share(2, depth) if args.protect_last is None else args.protect_last)
        if first >= last:
            raise UserError(f"--protect-first {first} --protect-last {depth - last}: leave none of {depth} layers to "
                            "prune")
        self.layers = range(first, last)
        self.windows = session.calibration()
        self.recipe = {"model": session.source.json(), "metric": "llm-pruner", "target_parameters": self.target,
                       "layers": [first, last], "dtype": session.dtype_name,
                       "token_ids_sha256": self.windows.info["token_ids_sha256"]}

    @classmethod
    def check_flags(cls, p, args):
        if args.metric == "llm-pruner" and args.layers is not None:
            p.error("--metric llm-pruner takes --n-prune or --ratio, no --layers")

    def select(self):
        """The fields of selection.json; keeps what `save` needs."""
        decoder, (total, per_layer) = self.session.decoder, self.session.parameters
        if not importable(base_class(decoder.model)):
            raise UserError(f"{type(decoder.model).__name__}: comes with remote code, so a narrower folder cannot name "
                            "its class")
        widths = [widths_of(layer) for layer in decoder.layers]
        least = {name: min(widths[index][name] for index in self.layers) for name in ("kv_heads", "channels")}
        sizes = group_sizes(decoder.layers[self.layers[0]])
        heads, channels = counts_for(self.target, len(self.layers), sizes, least)
        self.kept, scores = {}, []
        found = importance(decoder, self.windows.ids, self.layers[0], self.layers[-1] + 1, self.args.batch_size)
        for index, (of_heads, of_channels) in zip(self.layers, found):
            self.kept[index] = kept_groups(of_heads, heads), kept_groups(of_channels, channels)
            ratio = widths[index]["heads"] // widths[index]["kv_heads"]
            widths[index] = {"heads": ratio * len(self.kept[index][0]), "kv_heads": len(self.kept[index][0]),
                             "channels": len(self.kept[index][1])}
            stay = torch.zeros(len(of_channels), dtype=torch.bool).index_fill(0, self.kept[index][1], True)
            scores.append({"layer": index, "score": (of_heads.sum() + of_channels.sum()).item(),
                           "head_groups": of_heads.tolist(), "kept_head_groups": self.kept[index][0].tolist(),
                           "channels_kept": of_channels[stay].sum().item(),
                           "channels_pruned": of_channels[~stay].sum().item()})
        gone = len(self.layers) * (heads * sizes[0] + channels * sizes[1])
        return {**Layers(len(per_layer)).json(), "order": [], "scores": scores, "widths": widths,
                "pruned_per_layer": {"head_groups": heads, "channels": channels, "layers": [*self.recipe["layers"]]},
                "parameters": {"before": total, "removed": gone, "patch": 0, "ratio_percent": 100 * gone / total,
                               "ratio_with_patch_percent": 100 * gone / total}}

    def check(self, content, path):
        """Raise UserError when a reused selection does not say what is computed again for its folder."""
        if self.select()["widths"] != content["widths"]:
            raise UserError(f"{path}: its widths were edited and do not follow from its recipe; use --force")

    def report(self, content):
        """Lines to print about a selection."""
        pruned, (first, last) = content["pruned_per_layer"], content["pruned_per_layer"]["layers"]
        now, heads, channels = content["widths"][first], pruned["head_groups"], pruned["channels"]
        yield (f"layers [{first}, {last}): {heads} of {now['kv_heads'] + heads} head groups and {channels} of "
               f"{now['channels'] + channels} MLP channels go in each")
        kept = sum(row["channels_kept"] for row in content["scores"])
        gone = sum(row["channels_pruned"] for row in content["scores"])
        yield f"the pruned channels carry {100 * gone / max(kept + gone, 1e-300):.2f} % of the channels' importance"

    def save(self, content, more):
        """Write the narrower model's folder."""
        narrower = Decoder(narrow(self.session.decoder, self.kept), self.session.source)
        variant = Variant("narrow", Layers(narrower.num_layers), about=self.about)
        save_folder(narrower, self.session.tokenizer, variant, self.args.save_model,
                    {"layer_widths": content["widths"], **more})
        return f"layers {narrower.num_layers}, of other widths, patch no"


def _share(of_32, depth):
    return math.floor(of_32 * depth / 32 + 0.5)
