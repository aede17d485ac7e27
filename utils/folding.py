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

from utils.decoder import NLL_CHUNK, Variant, first_tensor, run_variants
from utils.errors import UserError, WorkError
from utils.evaluation.objectives import perplexity
from utils.model_folder import save_folder

PROBE_TOKENS = 16
CONSTANT_TOKENS = 4096  # calibration tokens that the constants c are medians of


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

    handles = [part.register_forward_hook(watch(name), with_kwargs=True)
               for name, part in layer.named_modules() if name]
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
    scale = getattr(decoder.config, "residual_multiplier", 1.0)
    rest, good = hidden, len(added) == len(norms) > 0 and all(readers for _, readers, _ in norms)
    for (_, _, given), (_, output) in zip(norms, added):  # the stream must be what the norms read
        good, rest = good and _close(given, rest), given + scale * output
    if not good or not _close(after, rest):
        raise NotFoldable(f"{type(layer).__name__}, layer {index}: {_reason(decoder, index)}")
    return after, [(norm, readers) for norm, readers, _ in norms], [part for part, _ in added]


def _reason(decoder, index):
    """Why a layer is not of the kind that folds."""
    if decoder.mlps[index] is None:
        return "adds attention and MLP to the stream together, each of them read from the same norm"
    if not linear_maps(decoder.mlps[index]):
        return "has a norm behind its MLP, so what is added to the stream is not the output of a linear map"
    if any(isinstance(part, nn.LayerNorm) for part in decoder.layers[index].children()):
        return "its LayerNorm subtracts the mean over channels, which depends on the basis"
    return "more stands between its norms w * x / rms(x) and the stream than linear maps"


def _close(a, b):
    return a.shape == b.shape and (a - b).abs().max() <= 1e-3 * b.abs().max().clamp(min=1e-6)


def read_through(part, matrix):
    """Change a linear map y = f(x) into y = f(x M), M float64 [C, C] on row vectors."""
    _set_rows(part, matrix @ _rows(part))


def write_through(part, matrix):
    """Change a linear map y = f(x) into y = f(x) M, M float64 [C, C] on row vectors; its bias as well."""
    _set_rows(part, _rows(part) @ matrix)
    if part.bias is not None:
        part.bias = _constant(part.bias.data.cpu().double() @ matrix, part.bias)


def _rows(part):
    """The weight of a linear map on row vectors, float64 [inputs, outputs] on the CPU."""
    weight = part.weight.data.cpu().double()
    return weight if isinstance(part, Conv1D) else weight.T


def _set_rows(part, new):
    part.weight = _constant(new if isinstance(part, Conv1D) else new.T, part.weight)


def _constant(values, like):
    return nn.Parameter(values.to(like.device, like.dtype).contiguous(), requires_grad=False)


def norm_ratio(norm, states, matrix):
    """s = r(u) / r(u P) of each token, float64 [tokens], for u [..., C] and a norm whose weight is 1.

    r(x) = |x| / |norm(x)| is what the norm divides by: rms(x), with its own epsilon, which small states feel.
    """
    u = states.flatten(0, -2).cpu().double()
    turned = u @ matrix
    divided = [norm(x.to(states.device, states.dtype)).cpu().double().norm(dim=1) for x in (u, turned)]
    return u.norm(dim=1) / divided[0] * divided[1] / turned.norm(dim=1)


@torch.no_grad()
def near(decoder, layers):
    """fold(variant, input_ids) of patches on the stream; raises NotFoldable where the architecture forbids it."""
    first = layers.runs[0][1]
    probe = decoder.inputs(torch.arange(PROBE_TOKENS)[None] % decoder.vocab_size)
    hidden, found = probe.hidden, {}
    for index in layers.kept:
        if index >= first:
            hidden, *found[index] = ports(decoder, probe, index, hidden)
        else:
            hidden = decoder.layer(probe, index, hidden)
    if not is_rms_norm(decoder.norm):
        raise NotFoldable(f"{type(decoder.norm).__name__}: the final norm is not w * x / rms(x)")
    return lambda variant, input_ids: _fold_near(decoder, variant, input_ids, found)


@torch.no_grad()
def _fold_near(decoder, variant, input_ids, found):
    """Fold patches into the decoder's own weights, in place; the layers stay in their list.

    input_ids: calibration windows int64 [N, T]; found: {layer: its ports}. Returns [{"place", "c", "spread"}], spread:
    the coefficient of variation of s over tokens at each norm.
    """
    matrices = {end: patch.weight.data.double().cpu() for end, patch in variant.modules.items()}
    matrices = {end: torch.diag(m) if m.ndim == 1 else m for end, m in matrices.items()}
    eye, batch, report = torch.eye(decoder.hidden_size).double(), decoder.inputs(input_ids), []
    hidden, product = batch.hidden, eye
    _untie(decoder)
    for index in variant.layers.kept:
        if index in found:
            product = product @ matrices.get(index, eye)
            inverse = torch.linalg.inv(product)
            norms, writers = found[index]
            for norm, readers in norms:
                for part in readers:
                    read_through(part, product * norm.weight.data.double().cpu())
                norm.weight = _constant(torch.ones(len(norm.weight)), norm.weight)
            for part in writers:
                write_through(part, inverse)
            for norm, _ in norms:  # each behind the folded maps before it
                report.append(_set_constant(norm, _input_of(decoder, batch, index, norm, hidden), product,
                                            f"layer {index}"))
        hidden = decoder.layer(batch, index, hidden)
    product = product @ matrices.get(decoder.num_layers, eye)
    read_through(decoder.head, product * decoder.norm.weight.data.double().cpu())
    report.append(_set_constant(decoder.norm, hidden, product, "final norm"))
    return report


@torch.no_grad()
def exact(decoder, layers):
    """fold(variant, input_ids) of maps on the outputs of MLPs: down_proj <- down_proj T, its bias as well."""
    probe, hosts = decoder.inputs(torch.arange(PROBE_TOKENS)[None] % decoder.vocab_size), {}
    for start, end in layers.runs:
        if start == 0:
            raise NotFoldable(f"run [0, {end}): has no layer before it")
        hosts[start - 1] = None
    for index, hidden in decoder.states(probe, max(hosts)):
        if index in hosts:
            hosts[index] = _writer(decoder, probe, index, hidden)

    def fold(variant, input_ids):
        for module in variant.modules.values():
            write_through(hosts[module.host], module.weight.data.cpu().double())
        return []

    return fold


def _writer(decoder, batch, index, hidden):
    """The linear map whose output is that of a layer's MLP. Raises NotFoldable where there is none."""
    mlp, outputs = decoder.mlp(index), {}
    maps = linear_maps(mlp)
    handles = [part.register_forward_hook(lambda _m, _a, output, name=name: outputs.__setitem__(name, output))
               for name, part in {**maps, None: mlp}.items()]
    try:
        decoder.layer(batch, index, hidden)
    finally:
        for handle in handles:
            handle.remove()
    whole = outputs.pop(None)
    found = [maps[name] for name, output in outputs.items() if _close(output, whole)]
    if len(found) != 1:
        raise NotFoldable(f"{type(decoder.layers[index]).__name__}, layer {index}: " + (
            "what its MLP gives is not the output of one linear map" if maps else _reason(decoder, index)))
    return found[0]


FOLDS = {"near": near, "exact": exact}  # name in --fold -> function (decoder, layers) that gives fold(variant, windows)


def check_fold(session, repair, layers):
    """Raise NotFoldable before any work where --save-model --fold of this repair cannot be."""
    args = session.args
    if args.save_model and args.fold == "no" and not repair.is_matrix:
        raise NotFoldable(f"--save-model: repair {repair.name} has no place in a folder unless it is folded; "
                          + (f"give --fold {repair.folds[0]}" if repair.folds else "evaluate with its patch file"))
    if args.save_model and args.fold != "no":
        if args.fold not in repair.folds:
            raise NotFoldable(f"--fold {args.fold}: repair {repair.name} cannot be folded so"
                              + (f"; give --fold {repair.folds[0]}" if repair.folds else ""))
        _checked(session, layers)


def _checked(session, layers):
    try:
        return FOLDS[session.args.fold](session.decoder, layers)
    except UserError as error:
        raise NotFoldable(f"--fold {session.args.fold}: {error}") from None


def save_model(session, variant, held_out, more):
    """Write the folder of --save-model, folded as --fold says; the decoder's model is changed in place.

    held_out: function that gives windows int64 [N, T], on which the folded model is first compared with the patched
    one. Raises WorkError where their perplexities differ by more than --fold-tolerance, relatively; nothing is written.
    """
    args, decoder = session.args, session.decoder
    if args.fold != "no":
        fold, places = _checked(session, variant.layers), []
        windows = session.calibration().ids
        windows = windows[:max(1, CONSTANT_TOKENS // windows.shape[1])]
        seen = compare(decoder, variant, lambda: places.extend(fold(variant, windows)), held_out())
        seen |= {"spread": max((place["spread"] for place in places), default=0.0)}
        text = ("perplexity {ppl_patched:.3f} patched, {ppl_folded:.3f} folded, ratio {ratio:.5f}; KL {kl:.5f}; equal "
                "first tokens {equal_first:.2%}; spread of s {spread:.2%}; {tokens} held-out tokens").format(**seen)
        if not abs(seen["ratio"] - 1) <= args.fold_tolerance:
            raise WorkError(f"--fold {args.fold}: not within {args.fold_tolerance:g} of the patched model, no folder "
                            f"written: {text}")
        print(f"folded ({args.fold}): {text}")
        more = {**more, "folding": {"kind": args.fold, **seen, "tolerance": args.fold_tolerance,
                                    "constants": places, "constants_tokens": windows.numel()}}
        variant = Variant(variant.name, variant.layers, about=variant.about)
    save_folder(decoder, session.tokenizer, variant, args.save_model, more)
    print(f"wrote {args.save_model} ({variant.describe(session.source)})")


def _set_constant(norm, states, product, place):
    norm.weight = _constant(torch.ones(len(norm.weight)), norm.weight)
    ratio = norm_ratio(norm, states, product)
    c = ratio.median().item()
    norm.weight = _constant(torch.full((len(norm.weight),), c), norm.weight)
    return {"place": place, "c": c, "spread": (ratio.std() / ratio.mean()).item()}


def _input_of(decoder, batch, index, norm, hidden):
    """What a norm of a layer reads, [B, T, C]."""
    seen = []
    handle = norm.register_forward_pre_hook(
        lambda _m, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True)
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
    head = copy.copy(decoder.head)
    head._parameters = dict(decoder.head._parameters)  # keeps its own weights when the decoder's head gets others
    before = _head_inputs(decoder, variant, input_ids)
    fold()
    after = _head_inputs(decoder, Variant("folded", variant.layers), input_ids)
    sums = dict.fromkeys(("patched", "folded", "kl", "equal"), 0.0)
    for ids, *states in zip(input_ids, before, after):
        for start in range(0, len(ids), NLL_CHUNK):
            logs = [decoder.scale_logits(apply(part[start:start + NLL_CHUNK]).float()).log_softmax(-1)
                    for apply, part in zip((head, decoder.head), states)]
            targets = ids[start + 1:start + 1 + NLL_CHUNK, None].to(logs[0].device)
            for name, log in zip(("patched", "folded"), logs):
                sums[name] -= log[:len(targets)].gather(1, targets).double().sum().item()
            sums["kl"] += (logs[0].exp() * (logs[0] - logs[1])).sum(1).double().sum().item()
            sums["equal"] += (logs[0].argmax(1) == logs[1].argmax(1)).double().sum().item()
    tokens = input_ids.numel()
    patched, folded = (sums[name] / input_ids[:, 1:].numel() for name in ("patched", "folded"))
    return {"ppl_patched": perplexity(patched), "ppl_folded": perplexity(folded),
            "ratio": perplexity(folded - patched), "kl": max(sums["kl"], 0.0) / tokens,
            "equal_first": sums["equal"] / tokens, "tokens": tokens}


def _head_inputs(decoder, variant, input_ids):
    """What the head reads in a variant, [T, C] a window."""
    states = []
    for ids in input_ids:
        run_variants(decoder, decoder.inputs(ids[None]), [variant],
                     lambda _, hidden: states.append(decoder.final_states(hidden)[0]))
    return states
