"""Trainable modules that stand where a run was: a patch P, and LLM-Streamline's networks of tables 2 to 4.

A network's output replaces the residual stream behind the run, X^(end) ~ g(X^(start)), at the place of a patch. All
have `export`, {name: float32 tensor} for the patch file.
"""

import copy
import re

import torch
from torch import nn
from transformers.activations import ACT2FN

from utils.errors import UserError
from utils.hadamard import rotation
from utils.modeling_linearpatch import align_tensors

PARAMETRISATIONS = ("full", "symmetric", "diagonal-hadamard", "diagonal", "low-rank:R")


class TrainablePatch(nn.Module):
    """One patch with trainable float32 parameters, started from a matrix or a diagonal.

    parametrisation: full (P), symmetric (P = (A + A^T) / 2), diagonal-hadamard (P = H diag(d) H^T, d trained),
    diagonal (P = diag(d)), low-rank:R (P = P_0 + U V, U starting at zero). `matrix` gives P as it is now.
    """

    def __init__(self, weight, parametrisation, order="released", seed=0):
        super().__init__()
        size = len(weight)
        self.kind, rank = parametrisation, 0
        if found := re.fullmatch("(low-rank):([1-9][0-9]{0,5})", parametrisation):
            self.kind, rank = found[1], int(found[2])
        full = torch.diag(weight) if weight.ndim == 1 else weight
        self.rotation = rotation(size, order=order) if self.kind == "diagonal-hadamard" else None
        if self.kind in ("full", "symmetric"):
            self.weight = nn.Parameter(full.float().clone())
        elif self.kind == "diagonal-hadamard":
            dense = self.rotation.matrix()
            self.weight = nn.Parameter((dense.T @ full.double() @ dense).diagonal().float().clone())
        elif self.kind == "diagonal":
            self.weight = nn.Parameter(full.diagonal().float().clone())
        elif self.kind == "low-rank" and 0 < rank <= size:
            generator = torch.Generator().manual_seed(seed)
            self.register_buffer("start", full.float().clone())
            self.left = nn.Parameter(torch.zeros(size, rank))
            self.right = nn.Parameter(torch.randn(rank, size, generator=generator) / size**0.5)
        else:
            raise UserError(f"--trainable {parametrisation}: expected one of {', '.join(PARAMETRISATIONS)}")

    def forward(self, hidden):
        x = hidden.float()
        if self.kind == "diagonal":
            patched = x * self.weight
        elif self.kind == "diagonal-hadamard":
            patched = self.rotation.apply_transposed(self.rotation.apply(x) * self.weight)
        elif self.kind == "low-rank":
            patched = x @ self.start + (x @ self.left) @ self.right
        else:
            patched = x @ ((self.weight + self.weight.T) / 2 if self.kind == "symmetric" else self.weight)
        return patched.to(hidden.dtype)

    def export(self):
        """{name: float32 tensor} for the patch file."""
        matrix = self.matrix().cpu()
        return {"d" if matrix.ndim == 1 else "weight": matrix}

    @torch.no_grad()
    def matrix(self):
        """P as LinearPatch holds it: float32 [C, C], or [C] for a diagonal one."""
        if self.kind == "diagonal":
            return self.weight.clone()
        if self.kind == "diagonal-hadamard":
            return self.rotation.conjugate(self.weight)
        if self.kind == "low-rank":
            return self.start + self.left @ self.right
        return ((self.weight + self.weight.T) / 2 if self.kind == "symmetric" else self.weight).clone()


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

    reads_batch = True

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
