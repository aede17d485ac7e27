"""Folding repairs into the weights of the base architecture, so that a patched model is an ordinary model.

A patch P on the stream: in coordinates u with x = u P behind the interface, every linear map that reads a norm of the
stream takes P and that norm's weight into itself, every map that writes to the stream takes P^-1, and the head P. What
is left is one number a token, s = rms(u) / rms(u P), which the norm's weight can hold as one constant c, the median of
s over calibration tokens, taken norm by norm in order of depth. P in the Hadamard basis leaves s nearly constant.
"""

import copy

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from utils.decoder import Variant, first_tensor, run_variants
from utils.errors import UserError
from utils.evaluation.objectives import perplexity

PROBE_TOKENS = 16


class NotFoldable(UserError):
    """This architecture or repair cannot be folded, for the reason that is given."""


def is_rms_norm(module):
    """Whether a module computes w * x / rms(x): its weights are tried on a probe, not its name."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or getattr(module, "bias", None) is not None:
        return False
    probe = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight) * 3 + 1
    wanted = weight.float() * probe.float() * probe.float().square().mean(-1, keepdim=True).rsqrt()
    try:
        found = module(probe[None])[0].float()
    except (TypeError, RuntimeError, ValueError):
        return False
    return found.shape == wanted.shape and (found - wanted).abs().max() <= 2e-2 * wanted.abs().max()


def linear_maps(module):
    """{name: nn.Linear or Conv1D} inside a module."""
    return {name: part for name, part in module.named_modules() if isinstance(part, (nn.Linear, Conv1D))}


@torch.no_grad()
def ports(decoder, batch, index, hidden):
    """(X^(index+1), [(norm, [linear maps that read it])], [maps that write to the stream]) of a layer, by use.

    Raises NotFoldable where the layer is not of the pre-norm kind: a part of the stream reaches something else, or what
    is added to it is not the output of a linear map.
    """
    layer, seen, norms, added = decoder.layers[index], {}, [], []
    maps = linear_maps(layer)

    def watch(name):
        def hook(module, args, kwargs, output):
            seen[name] = (args[0] if args else next(iter(kwargs.values())), output)
        return hook

    handles = [part.register_forward_hook(watch(name), with_kwargs=True) for name, part in layer.named_modules() if name]
    try:
        after = first_tensor(decoder.layers[index](hidden, **batch.kwargs[index]))
    finally:
        for handle in handles:
            handle.remove()
    tensors = {name: pair for name, pair in seen.items()
               if all(torch.is_tensor(t) for t in pair) and pair[1].shape == hidden.shape}
    for name, (given, output) in tensors.items():
        part = layer.get_submodule(name)
        if name not in maps and is_rms_norm(part) and given.shape == hidden.shape and "." not in name:
            readers = [maps[other] for other in maps if other in seen and seen[other][0] is output]
            norms.append((part, readers, given))
    for name in maps:
        if name in seen and torch.is_tensor(seen[name][1]) and seen[name][1].shape == hidden.shape:
            if not any(maps[name] in readers for _, readers, _ in norms):
                added.append((maps[name], seen[name][1]))
    kind, scale = type(layer).__name__, getattr(decoder.config, "residual_multiplier", 1.0)
    if not norms or not all(readers for _, readers, _ in norms):
        raise NotFoldable(f"{kind}: its norms are not read by linear maps alone")
    rest = hidden
    for number, (_, _, given) in enumerate(norms):  # the stream must be what the norms read
        if not _close(given, rest):
            raise NotFoldable(f"{kind}: adds something to the stream that is not the output of a linear map alone")
        if number < len(added):
            rest = given + scale * added[number][1]
    if len(added) != len(norms) or not _close(after, rest):
        raise NotFoldable(f"{kind}: adds something to the stream that is not the output of a linear map alone")
    return after, [(norm, readers) for norm, readers, _ in norms], [part for part, _ in added]


def _close(a, b):
    return a.shape == b.shape and (a - b).abs().max() <= 1e-3 * b.abs().max().clamp(min=1e-6)


def read_through(part, matrix):
    """Change a linear map y = f(x) into y = f(x M), M float64 [C, C] on row vectors."""
    weight = part.weight.data
    new = matrix.to(weight.device) @ (weight if isinstance(part, Conv1D) else weight.T).double()
    part.weight = nn.Parameter((new if isinstance(part, Conv1D) else new.T).to(weight.dtype).contiguous(),
                               requires_grad=False)


def write_through(part, matrix):
    """Change a linear map y = f(x) into y = f(x) M, M float64 [C, C] on row vectors; its bias as well."""
    weight, matrix = part.weight.data, matrix.to(part.weight.device)
    new = (weight if isinstance(part, Conv1D) else weight.T).double() @ matrix
    part.weight = nn.Parameter((new if isinstance(part, Conv1D) else new.T).to(weight.dtype).contiguous(),
                               requires_grad=False)
    if part.bias is not None:
        part.bias = nn.Parameter((part.bias.data.double() @ matrix).to(weight.dtype), requires_grad=False)


def norm_ratio(states, matrix):
    """s = rms(u) / rms(u P) of each token, float64 [tokens], for u [..., C]."""
    u = states.flatten(0, -2).double()
    return u.norm(dim=1) / (u @ matrix.to(u.device)).norm(dim=1)


@torch.no_grad()
def fold_near(decoder, variant, input_ids):
    """Fold the patches of `variant` into the decoder's own weights, in place; the layers stay in their list.

    input_ids: calibration windows int64 [N, T]. Returns [{"place", "c", "spread"}], spread: the coefficient of variation
    of s over tokens at each norm. Raises NotFoldable, before any weight is changed where the architecture is the reason.
    """
    batch, layers, depth = decoder.inputs(input_ids), variant.layers, decoder.num_layers
    matrices = {end: patch.weight.data.double().cpu() for end, patch in variant.modules.items()}
    matrices = {end: torch.diag(m) if m.ndim == 1 else m for end, m in matrices.items()}
    first = min(matrices)
    after = [index for index in layers.kept if index >= first]
    probe = decoder.inputs(torch.arange(PROBE_TOKENS)[None] % decoder.vocab_size)
    hidden, found = probe.hidden, {}
    for index in layers.kept:
        if index >= first:
            hidden, *found[index] = ports(decoder, probe, index, hidden)
        else:
            hidden = decoder.layer(probe, index, hidden)
    if not is_rms_norm(decoder.norm):
        raise NotFoldable(f"{type(decoder.norm).__name__}: the final norm is no RMS norm")
    _untie(decoder)

    hidden, product, report = batch.hidden, torch.eye(decoder.hidden_size).double(), []
    for index in [index for index in layers.kept if index < first]:
        hidden = decoder.layer(batch, index, hidden)
    for index in after:
        product = product @ matrices.get(index, torch.eye(len(product)).double())
        inverse = torch.linalg.inv(product)
        norms, writers = found[index]
        for norm, readers in norms:
            for part in readers:
                read_through(part, product * norm.weight.data.double().cpu())
            norm.weight = nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)
        for part in writers:
            write_through(part, inverse)
        for norm, _ in norms:  # each behind the folded maps before it
            report.append(_set_constant(norm, _input_of(decoder, batch, index, norm, hidden), product, f"layer {index}"))
        hidden = decoder.layer(batch, index, hidden)
    product = product @ matrices.get(depth, torch.eye(len(product)).double())
    read_through(decoder.head, product * decoder.norm.weight.data.double().cpu())
    report.append(_set_constant(decoder.norm, hidden, product, "final norm"))
    return report


def _set_constant(norm, states, product, place):
    ratio = norm_ratio(states, product)
    c = ratio.median().item()
    norm.weight = nn.Parameter(torch.full_like(norm.weight, c), requires_grad=False)
    return {"place": place, "c": c, "spread": (ratio.std() / ratio.mean()).item()}


def _input_of(decoder, batch, index, norm, hidden):
    """What a norm of a layer reads, [B, T, C]."""
    seen = []
    handle = norm.register_forward_pre_hook(lambda _m, args, kwargs: seen.append(args[0] if args else
                                            kwargs["hidden_states"]), with_kwargs=True)
    decoder.layer(batch, index, hidden)
    handle.remove()
    return seen[0]


def _untie(decoder):
    """Give the head weights of its own."""
    embedding = decoder.model.get_input_embeddings()
    if decoder.head.weight is embedding.weight:
        decoder.head.weight = nn.Parameter(decoder.head.weight.data.clone(), requires_grad=False)
    decoder.model.config.tie_word_embeddings = decoder.config.tie_word_embeddings = False


@torch.no_grad()
def compare(decoder, variant, fold, input_ids):
    """What fold(), which changes the decoder's weights, does to a variant on windows int64 [N, T].

    Returns {"ppl_patched", "ppl_folded", "ratio", "kl", "equal_first", "tokens"}: perplexities, mean KL(patched ||
    folded) in nats a token, and the share of tokens whose likeliest next token is the same.
    """
    norm, head = copy.deepcopy(decoder.norm), copy.copy(decoder.head)
    head._parameters = dict(decoder.head._parameters)  # keeps its own weights when the decoder's head gets others
    before = _final_states(decoder, variant, input_ids)
    fold()
    after = _final_states(decoder, Variant("folded", variant.layers), input_ids)
    sums = dict.fromkeys(("patched", "folded", "kl", "equal"), 0.0)
    for ids, one, two in zip(input_ids, before, after):
        logs = [decoder.scale_logits(part.float()).log_softmax(-1) for part in (head(norm(one)), decoder.head(
            decoder.norm(two)))]
        target = ids[1:, None].to(logs[0].device)
        for name, log in zip(("patched", "folded"), logs):
            sums[name] -= log[:-1].gather(1, target).double().sum().item()
        sums["kl"] += (logs[0].exp() * (logs[0] - logs[1])).sum(1).double().sum().item()
        sums["equal"] += (logs[0].argmax(1) == logs[1].argmax(1)).double().sum().item()
    targets, tokens = input_ids[:, 1:].numel(), input_ids.numel()
    patched, folded = (sums[name] / targets for name in ("patched", "folded"))
    return {"ppl_patched": perplexity(patched), "ppl_folded": perplexity(folded),
            "ratio": perplexity(folded - patched), "kl": sums["kl"] / tokens, "equal_first": sums["equal"] / tokens,
            "tokens": tokens}


def _final_states(decoder, variant, input_ids):
    """X^(L) of a variant, [T, C] a window."""
    states = []
    for ids in input_ids:
        run_variants(decoder, decoder.inputs(ids[None]), [variant], lambda _, hidden: states.append(hidden[0]))
    return states
