"""A causal language model as embedding, decoder layers, final norm and head, run layer by layer; and its variants.

X^(l) is the input of layer l, X^(L) the raw output of the last layer, before the final norm. `Decoder` finds the
layers by structure, not by the model's name, and runs them with the keyword arguments that the model itself passes.
A `Variant` is the model without some layers and with modules where they were; `run_variants` runs several together.
"""

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from utils.errors import UserError, WorkError
from utils.layers import Layers

NLL_CHUNK = 512  # tokens whose logits exist at one time: 512 x 128,000 float32 = 262 MB


def find_layers(model):
    """(parent module, its decoder layers as nn.ModuleList, module path of the list), found by structure.

    The list has as many entries as the config has layers, and every entry holds attention or another mixer besides
    an MLP: of all candidates the one with most parameters. Raises UserError naming the class when there is none.
    """
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    candidates = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth and depth:
            size = sum(p.numel() for p in module.parameters())
            candidates.append((size, name))
    if not candidates:
        raise UserError(f"{type(model).__name__}: no list of {depth} decoder layers found; this architecture is "
                        "not supported")
    path = max(candidates, key=lambda c: (c[0], -len(c[1])))[1]
    parent = model.get_submodule(path.rpartition(".")[0])
    return parent, model.get_submodule(path), path


def find_final_norm(parent, layers):
    """(attribute name, module) of the norm behind the last layer, or (None, None) when the decoder has none."""
    norms, behind = [], False
    for name, module in parent.named_children():
        behind = behind or module is layers
        if behind and "norm" in type(module).__name__.lower():
            norms.append((name, module))
    if len(norms) > 1:
        raise UserError(f"{type(parent).__name__}: several norms behind its layers "
                        f"({', '.join(name for name, _ in norms)}); this architecture is not supported")
    return norms[0] if norms else (None, None)


@dataclass
class LayerInputs:
    """A batch ready to run: hidden = X^(0), [B, T, C]; kwargs[l] = what the model passes to layer l."""

    hidden: torch.Tensor
    kwargs: list


class Decoder:
    """A causal language model as embedding, layers 0..L-1, final norm and head.

    `inputs` captures X^(0) and every layer's keyword arguments from a real call of the model with the layers
    themselves skipped; `layer` then runs any one of them. On creation both are compared with the model's own forward,
    so an architecture that does more between its layers is refused instead of computed wrongly.
    """

    def __init__(self, model, source=None):
        self.model = model.eval()
        self.model.requires_grad_(False)
        self.source = source
        self.parent, self.layers, self.layers_path = find_layers(model)
        self.norm_name, self.norm = find_final_norm(self.parent, self.layers)
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise UserError(f"{type(model).__name__}: has no output head; a causal language model is needed")
        self.config = model.config.get_text_config()
        self.num_layers = len(self.layers)
        self.hidden_size = self.config.hidden_size
        self.vocab_size = self.head.weight.shape[0]
        self._check()

    @property
    def device(self):
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self):
        return self.head.weight.dtype

    @property
    def label(self):
        return self.source.label if self.source else type(self.model).__name__

    def inputs(self, input_ids, attention_mask=None, **kwargs):
        """LayerInputs of a batch: input_ids int64 [B, T], attention_mask [B, T] with 0 at padding.

        Costs the embedding and the masks only. Further keyword arguments go to the model (position_ids, ...).
        """
        rows = self.model.get_input_embeddings().weight.shape[0]
        if input_ids.numel() and int(input_ids.max()) >= rows:
            raise UserError(f"{self.label}: the tokenizer gives token id {int(input_ids.max())}, the model has {rows} "
                            "embeddings; the tokenizer belongs to another model")
        captured = {}
        calls = [None] * self.num_layers

        def take_hidden(_, args, kwargs):
            captured["hidden"] = args[0] if args else kwargs["hidden_states"]

        def skipping(index):
            def forward(*args, **kwargs):
                hidden = args[0] if args else kwargs.pop("hidden_states")
                calls[index] = kwargs
                return (hidden,) if self.returns_tuple else hidden
            return forward

        handle = self.layers[0].register_forward_pre_hook(take_hidden, with_kwargs=True, prepend=True)
        try:
            with _replaced_forwards(self.layers, skipping):
                self.model.base_model(input_ids=input_ids.to(self.device), use_cache=False,
                                      attention_mask=None if attention_mask is None else attention_mask.to(self.device),
                                      **kwargs)
        finally:
            handle.remove()
        return LayerInputs(captured["hidden"], calls)

    def layer(self, batch, index, hidden):
        """X^(index) -> X^(index+1), [B, T, C]. Raises WorkError when float16 overflows."""
        output = self.layers[index](hidden, **batch.kwargs[index])
        output = first_tensor(output)
        if output.dtype == torch.float16 and not torch.isfinite(output).all():
            raise WorkError(f"{self.label}: float16 overflow in the residual stream, output of layer {index}; "
                            "use --dtype bfloat16 or float32")
        return output

    def states(self, batch, stop=None):
        """Yield (l, X^(l) [B, T, C]) for l = 0..stop, by default 0..L; layer l runs only when X^(l+1) is asked for."""
        stop, hidden = self.num_layers if stop is None else stop, batch.hidden
        for index in range(stop):
            yield index, hidden
            hidden = self.layer(batch, index, hidden)
        yield stop, hidden

    def step(self, batch, step, hidden):
        """One step of a variant [B, T, C] -> [B, T, C]: a layer by its index, a module in the place of a run, or the
        layer `host` of a module with that attribute, which then changes the output of its MLP."""
        if isinstance(step, int):
            return self.layer(batch, step, hidden)
        if hasattr(step, "host"):
            handle = self.mlp(step.host).register_forward_hook(lambda _m, _a, output: step(output))
            try:
                return self.layer(batch, step.host, hidden)
            finally:
                handle.remove()
        return step(hidden, batch) if getattr(step, "reads_batch", False) else step(hidden)

    @cached_property
    def mlps(self):
        """[module of each layer whose output is what the layer adds last to the residual stream]: its MLP, or the norm
        behind it where there is one. Found by use and checked on a probe: X^(l+1) minus that output is the input of
        a part of the layer that ran before. None where a layer adds attention and MLP together (parallel blocks)."""
        found = [None] * self.num_layers
        with torch.no_grad():
            batch = self.inputs(torch.arange(16).view(2, 8) % self.vocab_size)
            hidden = batch.hidden
            for index, layer in enumerate(self.layers):
                ran = []
                handles = [child.register_forward_hook(
                    lambda module, args, kwargs, output: ran.append((module, args, kwargs, output)), with_kwargs=True)
                    for child in layer.children()]
                after = self.layer(batch, index, hidden)
                for handle in handles:
                    handle.remove()
                output = ran[-1][3]
                if torch.is_tensor(output) and output.shape == after.shape:
                    residual, tolerance = after - output, 1e-3 * after.abs().max()
                    read = [args[0] if args else next(iter(kwargs.values()), None) for _, args, kwargs, _ in ran[1:]]
                    if any(torch.is_tensor(x) and x.shape == after.shape and (x - residual).abs().max() < tolerance
                           for x in read):
                        found[index] = next(module for module, _, _, given in ran  # a dropout behind it gives the same
                                            if torch.is_tensor(given) and torch.equal(given, output))
                hidden = after
        return found

    def mlp(self, index):
        """The one of `mlps` in layer `index`. Raises UserError where it has none of its own."""
        if self.mlps[index] is None:
            raise UserError(f"{self.label}: layer {index} adds its MLP to the stream together with its attention, so a "
                            "repair on the MLP's output has no place")
        return self.mlps[index]

    @contextmanager
    def mlp_outputs(self, layers, into):
        """Within the block, into[l] is the output [B, T, C] of the MLP of each of `layers` when that runs."""
        handles = []
        try:
            for index in layers:
                handles.append(self.mlp(index).register_forward_hook(
                    lambda _m, _a, output, index=index: into.__setitem__(index, output)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def final_states(self, hidden):
        """X^(L) -> input of the head, [B, T, C]."""
        if self.norm is None:
            return hidden
        return self.norm(hidden)

    def head_logits(self, states):
        """Input of the head [..., C] -> logits [..., V], float32, with the model's own scaling and soft cap."""
        return self.scale_logits(self.head(states).float())

    def scale_logits(self, logits):
        """The model's own scaling and soft cap of raw logits."""
        for name, scale in (("logit_scale", 1), ("logits_scaling", -1)):
            factor = getattr(self.config, name, None)
            if factor is not None:
                logits = logits * factor**scale
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def token_nll(self, hidden, targets, look=None):
        """Negative log-likelihoods of `targets` [B, T'] (float32, nats) given X^(L) [B, >=T', C] at their positions.

        targets[:, t] is the token that position t predicts. Logits exist for NLL_CHUNK tokens at one time;
        look(logits float32 [chunk, V]) sees each chunk of them.
        """
        length = targets.shape[1]
        states = self.final_states(hidden[:, :length]).reshape(-1, hidden.shape[-1])
        losses = []
        for part, target in zip(states.split(NLL_CHUNK), targets.reshape(-1).split(NLL_CHUNK)):
            logits = self.head_logits(part)
            if look is not None:
                look(logits)
            losses.append(nn.functional.cross_entropy(logits, target.to(logits.device), reduction="none"))
        return torch.cat(losses).view(targets.shape)

    @torch.no_grad()
    def _check(self):
        kinds = []
        handles = [layer.register_forward_hook(lambda _m, _a, output: kinds.append(isinstance(output, tuple)))
                   for layer in self.layers]
        ids = torch.arange(16).view(2, 8) % self.vocab_size
        expected = self.model(input_ids=ids.to(self.device), use_cache=False).logits.float()
        for handle in handles:
            handle.remove()
        self.returns_tuple = any(kinds)
        *_, (_, hidden) = self.states(self.inputs(ids))
        found = self.head_logits(self.final_states(hidden)).to(expected.device)
        tolerance = 1e-4 if self.dtype == torch.float32 else 3e-2
        scale = expected.abs().max().clamp(min=1.0)
        if not torch.isfinite(expected).all():
            raise WorkError(f"{self.label}: non-finite logits in {str(self.dtype).removeprefix('torch.')}; "
                            "use --dtype float32 or bfloat16, or check its weights")
        if (found - expected).abs().max() > tolerance * scale:
            raise UserError(f"{type(self.model).__name__}: running its layers one by one does not give its own "
                            "logits; this architecture is not supported")


def first_tensor(output):
    """The hidden states [B, T, C] that a layer returned, as a tensor or as the first entry of a tuple."""
    hidden = output[0] if isinstance(output, tuple) else output
    if hidden.ndim != 3:
        raise WorkError(f"a decoder layer returned a tensor of {hidden.ndim} dimensions, expected [B, T, C]")
    return hidden


@contextmanager
def _replaced_forwards(layers, make_forward):
    """Within the block, layer l runs make_forward(l) instead of its own forward; its hooks stay."""
    saved = [layer.__dict__.get("forward") for layer in layers]
    try:
        for index, layer in enumerate(layers):
            layer.forward = make_forward(index)
        yield
    finally:
        for layer, forward in zip(layers, saved):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


@dataclass(frozen=True)
class Variant:
    """A model with layers removed and modules where they were.

    modules[i] acts on the input of module i of the INTACT model: the first kept layer behind a run, or i = L for the
    final norm; one with an attribute `host` instead on the output of the MLP of that layer, before the run.
    about: always `metric` that chose the layers, `n` of them, `repair` and `stage`; or more, from a file.
    """

    name: str
    layers: Layers
    modules: dict = field(default_factory=dict)
    about: dict = None

    def __post_init__(self):
        removed = self.layers.removed
        about = {"metric": None, "n": len(removed), "repair": None if self.modules else "none",
                 "stage": "pruned" if removed else "dense"}
        object.__setattr__(self, "about", {**about, **(self.about or {})})

    @property
    def removed(self):
        return self.layers.removed

    def steps(self):
        """The way from X^(0) to the input of the final norm: layer indices and modules, in order."""
        steps, hosted = [], {module.host: module for module in self.modules.values() if hasattr(module, "host")}
        for index in [*self.layers.kept, self.layers.depth]:
            steps += [self.modules[index]] if index in self.modules and not hasattr(self.modules[index], "host") else []
            steps += [hosted.get(index, index)] if index < self.layers.depth else []
        return steps

    def sha256(self):
        """Hex sha256 of what this variant computes: its removed layers and the bytes of its modules."""
        digest = hashlib.sha256(str(list(self.removed)).encode())
        for index, module in sorted(self.modules.items()):
            for name, tensor in module.state_dict().items():
                digest.update(f"{index}{name}{list(tensor.shape)}".encode())
                digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    def describe(self, source):
        """What scripts print, in the numbers of the cut model: 'layers 4, patch after layer 1, yes'.

        source: ModelSource; a folder that carries patches itself has them in every variant.
        """
        after = [self.layers.position(index) - 1 for index in sorted(self.modules)] + source.patched_after
        places = ", ".join("after the embedding" if layer < 0 else f"after layer {layer}" for layer in after)
        kept = len(self.layers.kept)
        return f"layers {kept}, patch {places}, yes" if places else f"layers {kept}, patch no"


@torch.no_grad()
def run_variants(decoder, batch, variants, leaf, wanted=None):
    """Call leaf(variant index, X^(L) [B, T, C]) for every variant; what variants have in common runs once.

    wanted(variant index) may give up a variant meanwhile; it is asked wherever ways part. There the variant that is
    named first goes first. Returns the number of layers and modules that ran.
    """
    ran = 0

    def walk(group, hidden):
        nonlocal ran
        while True:
            branches = {}
            for index, steps in group:
                if wanted is None or wanted(index):
                    branches.setdefault(steps[0] if steps else None, []).append((index, steps[1:]))
            for index, _ in branches.pop(None, ()):
                leaf(index, hidden)
            if not branches:
                return
            *others, (last_step, last_group) = branches.items()
            for step, members in others:
                ran += 1
                walk(members, decoder.step(batch, step, hidden))
            ran += 1
            hidden, group = decoder.step(batch, last_step, hidden), last_group

    walk([(index, variant.steps()) for index, variant in enumerate(variants)], batch.hidden)
    return ran
