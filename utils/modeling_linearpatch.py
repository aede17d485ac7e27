"""What transformers' classes cannot express: LinearPatch, a matrix on the residual stream where layers were removed,
and layers of fewer heads and MLP channels than the config says (width pruning).

This file needs torch and transformers only. A copy of it, with the base class named at its end, lies in every saved
model folder that carries either, so that `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`
loads the model anywhere. Without remote code the model type is unknown to transformers and loading fails: a patch is
never dropped silently.
"""

import torch
from torch import nn


class LinearPatch(nn.Module):
    """x <- x P, eq. (7), on hidden states [..., C] of any dtype; computed in float32.

    weight: float32 [C, C] for a full P, or [C] for a diagonal one.
    """

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, hidden_states):
        with torch.autocast(device_type=hidden_states.device.type, enabled=False):
            states = hidden_states.float()
            weight = self.weight.to(device=states.device, dtype=torch.float32)
            patched = states * weight if weight.ndim == 1 else states @ weight  # eq. (7)
        return patched.to(hidden_states.dtype)


def patch_input(module, patch):
    """Let `patch` act on the hidden states that enter `module` (a decoder layer or the final norm).

    A hook, not a module in the layer list: the list keeps its length, indices and attributes. Returns its handle.
    """

    def hook(_, args, kwargs):
        if args:
            return (patch(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": patch(kwargs["hidden_states"])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def narrow_layer(layer, widths):
    """Give a Llama-type decoder layer projections of other sizes, with new weights: {"heads", "kv_heads", "channels"}.

    Attention splits whatever its projections give into heads of head_dim, and the ratio of query to key heads is that
    of the config, so nothing else changes.
    """
    attention, mlp = layer.self_attn, layer.mlp
    hidden_size, head_dim = attention.q_proj.in_features, attention.head_dim
    query, key = widths["heads"] * head_dim, widths["kv_heads"] * head_dim
    for parent, name, inputs, outputs in (
            (attention, "q_proj", hidden_size, query), (attention, "k_proj", hidden_size, key),
            (attention, "v_proj", hidden_size, key), (attention, "o_proj", query, hidden_size),
            (mlp, "gate_proj", hidden_size, widths["channels"]), (mlp, "up_proj", hidden_size, widths["channels"]),
            (mlp, "down_proj", widths["channels"], hidden_size)):
        old = getattr(parent, name)
        setattr(parent, name, nn.Linear(inputs, outputs, bias=old.bias is not None, device=old.weight.device,
                                        dtype=old.weight.dtype))


def align_tensors(model):
    """Copy CPU tensors that do not start at a multiple of 64 bytes, as tensors mapped from a file may not.

    The last bits of a product with a single row depend on it, so without this a reloaded model would differ in them.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()
    return model


def patched_classes(base):
    """(config class, model class) of `base` (a transformers causal LM class) with patches and narrow layers.

    The config's field `linear_patches` lists, for each patch, the `module` whose input it multiplies and its `shape`;
    `layer_widths`, where it is there, lists what `narrow_layer` makes of each layer.
    """

    class LinearPatchConfig(base.config_class):
        model_type = f"linearpatch_{base.config_class.model_type}"

    class LinearPatchForCausalLM(base):
        config_class = LinearPatchConfig
        _keep_in_fp32_modules_strict = ["linear_patches"]

        def __init__(self, config, *args, **kwargs):
            super().__init__(config, *args, **kwargs)
            for index, widths in enumerate(getattr(config, "layer_widths", ())):
                narrow_layer(self.base_model.layers[index], widths)
            self.linear_patches = nn.ModuleList(
                LinearPatch(torch.empty(entry["shape"], dtype=torch.float32)) for entry in config.linear_patches
            )
            for entry, patch in zip(config.linear_patches, self.linear_patches):
                patch_input(self.get_submodule(entry["module"]), patch)

        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            loaded = super().from_pretrained(*args, **kwargs)
            align_tensors(loaded[0] if isinstance(loaded, tuple) else loaded)
            return loaded

    return LinearPatchConfig, LinearPatchForCausalLM
