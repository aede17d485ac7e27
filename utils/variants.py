"""Variants of one loaded model (dense, pruned, patched), run together: what they share is computed once."""

import hashlib
from dataclasses import dataclass, field

import torch

from utils.networks import ReplacementLayer
from utils.selection import kept_layers


@dataclass(frozen=True)
class Variant:
    """A set of removed layers and the patches that act where they were.

    patches[i] acts on the input of module i of the INTACT model: the first kept layer behind a run, or i = L for the
    final norm. about: what reports print (file, scaling, stage, ...).
    """

    name: str
    removed: tuple = ()
    patches: dict = field(default_factory=dict)
    about: dict = field(default_factory=dict)

    def steps(self, num_layers):
        """The way from X^(0) to the input of the final norm: layer indices and patches, in order."""
        steps = []
        for index in [*kept_layers(num_layers, self.removed), num_layers]:
            if index in self.patches:
                steps.append(self.patches[index])
            if index < num_layers:
                steps.append(index)
        return steps

    def digest(self):
        """Hex sha256 of what this variant computes: its removed layers and the bytes of its patches."""
        digest = hashlib.sha256(str(sorted(self.removed)).encode())
        for index, patch in sorted(self.patches.items()):
            for name, tensor in patch.state_dict().items():
                digest.update(f"{index}{name}{list(tensor.shape)}".encode())
                digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()

    def describe(self, source):
        """What scripts print, in the numbers of the cut model: 'layers 4, patch after layer 1, yes'.

        source: ModelSource; a folder that carries patches itself has them in every variant.
        """
        kept = kept_layers(source.shape[0], self.removed)
        behind = [sum(layer < index for layer in kept) - 1 for index in sorted(self.patches)] + source.patched_behind
        places = ", ".join("after the embedding" if layer < 0 else f"after layer {layer}" for layer in behind)
        return f"layers {len(kept)}, patch {places}, yes" if places else f"layers {len(kept)}, patch no"


@torch.no_grad()
def run_variants(decoder, batch, variants, leaf):
    """Call leaf(variant index, X [B, T, C] before the final norm) for every variant, shared prefixes run once.

    Returns the number of layers and patches that ran.
    """
    ran = 0

    def walk(group, hidden):
        nonlocal ran
        while True:
            branches = {}
            for index, steps in group:
                branches.setdefault(steps[0] if steps else None, []).append((index, steps[1:]))
            for index, _ in branches.pop(None, ()):
                leaf(index, hidden)
            if not branches:
                return
            *others, (last_step, last_group) = branches.items()
            for step, members in others:
                ran += 1
                walk(members, apply_step(decoder, batch, step, hidden))
            ran += 1
            hidden, group = apply_step(decoder, batch, last_step, hidden), last_group

    walk([(index, variant.steps(decoder.num_layers)) for index, variant in enumerate(variants)], batch.hidden)
    return ran


def apply_step(decoder, batch, step, hidden):
    """One step of a variant: a layer index, a patch, or a network in the place of a run."""
    if isinstance(step, int):
        return decoder.layer(batch, step, hidden)
    return step(hidden, batch) if isinstance(step, ReplacementLayer) else step(hidden)
