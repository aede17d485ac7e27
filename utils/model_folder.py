"""Cut layers out of a model, attach patches, and save the result as an ordinary Hugging Face folder."""

import copy
from pathlib import Path

import torch
import transformers
from torch import nn

from utils import modeling_linearpatch
from utils.artifacts import atomic_folder, read_json, write_json
from utils.errors import UserError

INDEX_LISTS = ("mlp_only_layers", "full_attn_idxs")  # lists OF layer indices
NOT_PER_LAYER = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "keys_to_ignore_at_inference")


def cut(decoder, layers):
    """Remove Layers from the decoder's model, in place: list, layer_idx of every module, and per-layer config.

    Kept tensors are untouched. Raises UserError when a model built from the new config would differ in its layers,
    as with patterns that are computed from a layer's index.
    """
    model = decoder.model
    modules = nn.ModuleList(decoder.layers[index] for index in layers.kept)
    setattr(decoder.parent, decoder.layers_path.rpartition(".")[2], modules)
    for new_index, layer in enumerate(modules):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = new_index
    cut_config(model.config.get_text_config(), layers)
    _check_rebuild(model, modules)
    return model


def cut_config(config, layers):
    """Fit a transformers config to the kept layers, in place: the depth and every list with one entry a layer."""
    kept, removed = layers.kept, set(layers.removed)
    config.num_hidden_layers = len(kept)
    for name, value in list(vars(config).items()):
        if not isinstance(value, list):
            continue
        if name in INDEX_LISTS:
            setattr(config, name, [layers.position(index) for index in value if index not in removed])
        elif len(value) == layers.depth and name not in NOT_PER_LAYER:
            setattr(config, name, [value[index] for index in kept])


def _check_rebuild(model, layers):
    """A model built from the cut config must have the same layers: classes, shapes and plain attributes."""
    with torch.device("meta"):
        fresh = type(model)(copy.deepcopy(model.config))
    path = next(name for name, module in model.named_modules() if module is layers)
    for index, (ours, rebuilt) in enumerate(zip(layers, fresh.get_submodule(path), strict=True)):
        if _traits(ours) != _traits(rebuilt):
            raise UserError(f"{type(model).__name__}: layer {index} after the cut cannot be expressed in its config "
                            "(its pattern depends on the layer index); keep the patch file and evaluate with it")


def _traits(layer):
    traits = {}
    for name, module in layer.named_modules():
        plain = {key: value for key, value in vars(module).items()
                 if isinstance(value, (int, float, str)) and not key.startswith("_") and key != "training"}
        shapes = {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False)}
        traits[name] = (type(module).__name__, plain, shapes)
    return traits


def patched_model(decoder, variant):
    """Cut the decoder's model to `variant`, in place, and return it with the variant's patches inside.

    Without patches the result is the model itself; with patches an instance of the patched class of its class, which
    shares all tensors. Its forward, generate and save_pretrained are those of any transformers model.
    """
    if getattr(decoder.model.config, "linear_patches", None):
        raise UserError(f"{decoder.label}: already carries patches; start from the model that it was made from")
    path, norm_name = decoder.layers_path, decoder.norm_name
    model = cut(decoder, variant.layers)
    if not variant.modules:
        return model
    places = []
    for index, patch in sorted(variant.modules.items()):
        if hasattr(patch, "host"):
            raise UserError(f"{type(model).__name__}: a map on the output of an MLP has no place in a folder; fold it")
        if index == variant.layers.depth and norm_name is None:
            raise UserError(f"{type(model).__name__}: has no final norm, so a patch behind its last layer has no place")
        module = (f"{path}.{variant.layers.position(index)}" if index < variant.layers.depth else
                  f"{path.rpartition('.')[0]}.{norm_name}".lstrip("."))
        places.append((module, patch))
    patches = {f"linear_patches.{i}.weight": patch.weight.detach() for i, (_, patch) in enumerate(places)}
    return own_model(model, patches, linear_patches=[{"module": module, "shape": list(patch.weight.shape)}
                                                     for module, patch in places])


def base_class(model):
    """The transformers class that a model is, or that a model of this project's class was made from."""
    name = getattr(model.config, "linear_patch_base", None)
    return type(model) if name is None else getattr(transformers, name)


def own_model(model, tensors, **fields):
    """`model` as an instance of this project's class of its class, with further config `fields`, in eval mode.

    tensors: {name: tensor} beside or instead of the model's own, which are shared. The config names the class that
    saved folders load with.
    """
    base = base_class(model)
    config_class, model_class = modeling_linearpatch.patched_classes(base)
    content = {key: value for key, value in model.config.to_dict().items() if key != "model_type"}
    content = {"linear_patches": [], **content, **fields}
    content.update(
        linear_patch_base=base.__name__,
        architectures=["LinearPatchForCausalLM"],
        auto_map={"AutoConfig": "modeling_linearpatch.LinearPatchConfig",
                  "AutoModelForCausalLM": "modeling_linearpatch.LinearPatchForCausalLM"},
    )
    config = config_class.from_dict(content)
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        patched = model_class(config)
    patched.load_state_dict({**model.state_dict(), **tensors}, assign=True)
    _share_buffers(model, patched)
    patched.tie_weights()
    patched.generation_config = model.generation_config
    return patched.eval()


def _share_buffers(model, patched):
    """Buffers outside the state dict (rotary frequencies) were built on the meta device: take the model's."""
    for name, module in patched.named_modules():
        if name.startswith("linear_patches"):
            continue
        original = model.get_submodule(name)
        for key, buffer in original.named_buffers(recurse=False):
            module._buffers[key] = buffer


def origin(folder):
    """The content of linearpatch.json in a folder that this project wrote; {} elsewhere. UserError when damaged."""
    path = Path(folder) / "linearpatch.json"
    return read_json(path, "folder", "save the model anew") if path.is_file() else {}


def save_folder(decoder, tokenizer, variant, folder, more):
    """Write `variant` as a complete model folder, atomically; the decoder's model is cut in place.

    config, safetensors, tokenizer, generation config, linearpatch.json with the layer lists, the variant's `about`,
    where patches sit, and `more`, and README.md, the model card. With patches or narrow layers also
    modeling_linearpatch.py: it then loads with trust_remote_code=True only. What lies at `folder` is replaced:
    cli.check_outputs says what may be. Raises UserError on what cannot be saved.
    """
    if variant.modules and not importable(base_class(decoder.model)):
        raise UserError(f"{type(decoder.model).__name__}: comes with remote code, so a patched folder cannot name its "
                        "class; keep the patch file and evaluate with it")
    layers, places = variant.layers, sorted(variant.modules)
    model = patched_model(decoder, variant)
    positions = [layers.position(index) - 1 for index in places]
    with atomic_folder(folder, replace=True) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if hasattr(model.config, "linear_patch_base"):
            (temporary / "modeling_linearpatch.py").write_text(_remote_code(model.config.linear_patch_base))
        content = {**layers.json(), "about": variant.about, "removed_layers": list(layers.removed),
                   "patch_position": positions[0] if len(positions) == 1 else positions or None,
                   "patch_position_meaning": "acts on the output of this kept layer, numbered in the saved model; "
                                             "-1: embedding",
                   **more}
        write_json(temporary / "linearpatch.json", "folder", content)
        (temporary / "README.md").write_text(model_card(content, hasattr(model.config, "linear_patch_base")),
                                             encoding="utf-8")
    return model


def model_card(content, own_code):
    """README.md of a folder from its linearpatch.json: what was removed, the repair, its numbers, how to load."""
    about, folding, removed = content["about"], content.get("folding"), content["removed"]
    base = content.get("base_model", {}).get("label", "its base model")
    base = Path(base).name if Path(base).exists() else base  # no paths of this machine
    chosen = f" (chosen by `{about['metric']}`)" if about["metric"] else ""
    lines = [f"# {base}, {about['stage']}", "",
             f"Layers {', '.join(map(str, removed))} of 0 to {len(removed) + len(content['kept']) - 1} of {base} were "
             f"removed{chosen}; repair: `{about['repair']}`, {about['stage']}." if removed else
             f"No layer of {base} was removed; {about['n']} were changed{chosen}.", ""]
    if folding:
        lines += [f"The repair is folded (`{folding['kind']}`) into the weights of the base architecture. On "
                  f"{folding['tokens']} held-out tokens, with the repair as a module of its own and folded:", "",
                  "| | |", "|---|---|", f"| perplexity, module | {folding['ppl_patched']:.4f} |",
                  f"| perplexity, folded | {folding['ppl_folded']:.4f} (ratio {folding['ratio']:.5f}) |",
                  f"| KL, nats a token | {folding['kl']:.2g} |",
                  f"| equal first tokens | {folding['equal_first']:.2%} |",
                  f"| spread over tokens of what norms hold as constants | {folding['spread']:.2%} |", ""]
    load = "(FOLDER, trust_remote_code=True)" if own_code else "(FOLDER)"
    code = "; modeling_linearpatch.py of this folder is run" if own_code else ", without code of its own"
    return "\n".join([*lines, f"To load it{code}:", "", "```python", "from transformers import AutoModelForCausalLM",
                      f"model = AutoModelForCausalLM.from_pretrained{load}", "```", ""])


def importable(model_class):
    """Whether a saved folder can name this class: transformers has it."""
    return getattr(transformers, model_class.__name__, None) is model_class


def _remote_code(base_name):
    code = Path(modeling_linearpatch.__file__).read_text(encoding="utf-8")
    return code + (f"\n\nfrom transformers import {base_name}  # noqa: E402  the class of the unpatched model\n\n"
                   f"LinearPatchConfig, LinearPatchForCausalLM = patched_classes({base_name})\n")
