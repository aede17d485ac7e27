"""LLM-Streamline's replacement networks, the trained baselines of tables 2 to 4: one small net instead of a run.

The net's output replaces the residual stream behind the run, X^(end) ~ g(X^(start)), at the place of a patch.
"""

import copy

import torch
from torch import nn
from transformers.activations import ACT2FN

from utils.errors import UserError
from utils.modeling_linearpatch import align_tensors


class SwiGLU(nn.Module):
    """g(x) = W_down (act(W_gate x) * W_up x), the shape of the model's own MLP, float32; 3 C I parameters."""

    def __init__(self, gate, up, down, activation):
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(weight.float().clone()) for weight in (gate, up, down))
        self.activation = ACT2FN[activation]

    @classmethod
    def random(cls, config, seed):
        """Random initialisation with the model's own standard deviation."""
        for field in ("initializer_range", "hidden_size", "intermediate_size"):
            if not isinstance(getattr(config, field, None), (int, float)):
                raise UserError(f"--replace ffn: the model's config states no {field}")
        generator = torch.Generator().manual_seed(seed)
        std, size, inner = config.initializer_range, config.hidden_size, config.intermediate_size
        gate, up, down = (torch.randn(shape, generator=generator) * std
                          for shape in ((inner, size), (inner, size), (size, inner)))
        return cls(gate, up, down, activation_of(config))

    def forward(self, hidden):
        x = hidden.float()
        inner = self.activation(x @ self.gate.T) * (x @ self.up.T)
        return (inner @ self.down.T).to(hidden.dtype)

    def export(self):
        """{name: float32 tensor} for the patch file."""
        return {f"ffn.{name}": getattr(self, name).detach().cpu().clone() for name in ("gate", "up", "down")}


class ReplacementLayer(nn.Module):
    """A decoder layer of its own, a copy of layer `index` of the intact model, called as that one is."""

    def __init__(self, layer, index):
        super().__init__()
        self.layer, self.index = copy.deepcopy(layer).float(), index
        self.layer.requires_grad_(True)
        align_tensors(self.layer)

    @classmethod
    def from_state(cls, decoder, index, state):
        """The layer of a patch file, rebuilt with the decoder at hand."""
        made = cls(decoder.layers[index], index)
        made.layer.load_state_dict(state)
        return made.to(decoder.device)

    def forward(self, hidden, batch):
        kwargs = {name: value.float() if name == "attention_mask" and torch.is_tensor(value)
                  and value.is_floating_point() else value for name, value in batch.kwargs[self.index].items()}
        output = self.layer(hidden.float(), **kwargs)
        return (output[0] if isinstance(output, tuple) else output).to(hidden.dtype)

    def export(self):
        """{name: float32 tensor} for the patch file."""
        return {f"layer.{name}": value.detach().cpu().clone() for name, value in self.layer.state_dict().items()}


def activation_of(config):
    """The name of the MLP's activation in a transformers config."""
    names = (getattr(config, field, None) for field in ("hidden_act", "hidden_activation", "activation_function"))
    found = next((name for name in names if name in ACT2FN), None)
    if found is None:
        raise UserError("--replace ffn: the model's config states no activation that is known here")
    return found
