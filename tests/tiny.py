"""Tiny random models for the tests: hidden 64 (or 48, not a power of two), 6 layers, vocabulary 128; and variants."""

import torch
from transformers import (Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig,
                          LlamaForCausalLM, MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM, PhiConfig,
                          PhiForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

from tests.tokenizers_for_tests import tok_nobos
from utils.decoder import Variant, run_variants
from utils.layers import Layers
from utils.modeling_linearpatch import LinearPatch
from utils.repairs import REPAIRS

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"head_dim": 16, "sliding_window": 8}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {"head_dim": 16, "sliding_window": 8}),
    "phi": (PhiConfig, PhiForCausalLM, {}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
}


def tiny(family="llama", no_ops=(), seed=0, **changes):
    """A random model of a family in eval mode; layers in `no_ops` leave the residual stream unchanged."""
    config_class, model_class, extra = FAMILIES[family]
    values = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
                  tie_word_embeddings=False, initializer_range=0.2)
    torch.manual_seed(seed)
    model = model_class(config_class(**{**values, **extra, **changes})).eval()
    with torch.no_grad():
        for index in no_ops:
            layer = model.model.layers[index]
            for name, module in layer.named_modules():
                if name.split(".")[-1] in ("o_proj", "down_proj", "dense", "fc2"):
                    module.weight.zero_()
                    if module.bias is not None:
                        module.bias.zero_()
    return model


def save(model, folder, tokenizer=None):
    """Write a model with a word-level tokenizer as a folder; returns the folder."""
    model.save_pretrained(folder)
    (tokenizer or tok_nobos()).save_pretrained(folder)
    return folder


def token_text(count, seed=0):
    """Text of `count` random words w0..w123: exactly `count` tokens under the test tokenizers."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(0, 124, (count,), generator=generator).tolist())


def ids(batch=2, length=17, seed=0):
    """Random token ids [batch, length], none of them special."""
    return torch.randint(4, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


def variant(name="dense", removed=(), modules=None, about=None, depth=6):
    """A Variant of a tiny model."""
    return Variant(name, Layers(depth, removed), modules or {}, about)


P = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) / 8  # not symmetric


def patched_variant(removed=(2, 3), place=4, weight=P):
    """A Variant with one patch of any matrix."""
    return variant("patched", removed, {place: LinearPatch(weight)}, {"repair": "hadamard", "stage": "calibrated"})


def logits_of(decoder, one, input_ids):
    """Logits of a Variant by the step runner, which never cuts the model."""
    out = []
    run_variants(decoder, decoder.inputs(input_ids), [one],
                 lambda _, hidden: out.append(decoder.head_logits(decoder.final_states(hidden))))
    return out[0]


def patch_of(name, d, order="released"):
    """The module that the repair `name` makes of the scale vector d."""
    return REPAIRS[name].module({"d": d}, {"hadamard_order": order}, 0)


def plain_states(model, input_ids):
    """Inputs of every layer and the raw output of the last, by hooks on a whole-model forward: [L+1, B, T, C]."""
    seen = []
    handles = [layer.register_forward_pre_hook(lambda m, a, k: seen.append(a[0] if a else k["hidden_states"]),
                                               with_kwargs=True) for layer in model.model.layers]
    handles.append(model.model.layers[-1].register_forward_hook(
        lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out)))
    with torch.no_grad():
        model(input_ids)
    for handle in handles:
        handle.remove()
    return torch.stack(seen).double()
