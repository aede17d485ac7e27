"""Gradients of the language-modelling loss with respect to weights, one layer at a time.

The forward pass keeps the input of every other layer only; the backward pass goes from the last layer down and frees
what it has used, so that the gradients of one layer exist at one time.
"""

import torch
from torch import nn
from tqdm import tqdm

HEAD_CHUNK = 16  # tokens whose logits and their gradients exist at one time


def for_each_layer(decoder, input_ids, weights_of, use, batch_size=1, first=0, label=None):
    """Call use(index, {name: dL/dW}) for the layers from the last one down to `first`.

    L is the loss summed over all next tokens of input_ids, int64 [N, T] (a mean's gradients may underflow in float16).
    weights_of(index) -> {name: parameter} of what is wanted of a layer; a layer of which nothing is wanted is skipped.
    Gradients are float32 sums over the whole text, `use` may change them, and they are freed behind it.
    Memory beside the model: (L - first) / 2 N T C numbers for inputs of layers, one layer's gradients, HEAD_CHUNK
    logits. label: names a progress bar.
    """
    parts = input_ids.split(batch_size)
    with tqdm(total=2 * decoder.num_layers - first, desc=label, unit="layer", disable=label is None) as bar:
        batches, inputs, outputs = _forward(decoder, parts, first, bar)
        upstream = [_loss_gradient(decoder, outputs.pop(0), ids) for ids in parts]
        for index in reversed(range(first, decoder.num_layers)):
            states = inputs.pop() or _next_states(decoder, index - 1, batches, inputs[-1])
            weights = weights_of(index)
            gradients, upstream = _layer(decoder, index, batches, states, upstream, weights)
            if weights:
                use(index, gradients)
            del gradients  # before the next layer makes its own
            bar.update(1)


@torch.no_grad()
def _forward(decoder, parts, first, bar):
    """(inputs of each batch, [layer - first][batch] X^(layer) of every other layer, else None, [batch] X^(L))."""
    batches = [decoder.inputs(ids) for ids in parts]
    inputs, states = [], [batch.hidden for batch in batches]
    for index in range(decoder.num_layers):
        if index >= first:
            inputs.append(None if (index - first) % 2 else states)
        states = _next_states(decoder, index, batches, states)
        bar.update(1)
    return batches, inputs, states


@torch.no_grad()
def _next_states(decoder, index, batches, states):
    return [decoder.layer(batch, index, hidden) for batch, hidden in zip(batches, states)]


def _loss_gradient(decoder, hidden, ids):
    """Gradient with respect to X^(L) [B, T, C] of the summed loss of the batch."""
    states = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    gradients = []
    for part, target in zip(states.split(HEAD_CHUNK), ids[:, 1:].reshape(-1).split(HEAD_CHUNK)):
        part = part.detach().requires_grad_()
        with torch.enable_grad():
            logits = decoder.head_logits(decoder.final_states(part))
            loss = nn.functional.cross_entropy(logits, target.to(logits.device), reduction="sum")
        gradients.append(torch.autograd.grad(loss, part)[0])
        del logits, loss
    result = torch.zeros_like(hidden)  # the last position predicts nothing
    result[:, :-1] = torch.cat(gradients).view(len(hidden), -1, hidden.shape[-1])
    return result


def _layer(decoder, index, batches, inputs, upstream, weights):
    """({name: gradient of a weight}, [batch] gradient with respect to X^(index)) from those of X^(index+1)."""
    sums = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()}
    before = []
    for weight in weights.values():
        weight.requires_grad_(True)
    try:
        for number, batch in enumerate(batches):
            hidden = inputs[number].detach().requires_grad_()
            with torch.enable_grad():
                output = decoder.layer(batch, index, hidden)
            found = torch.autograd.grad(output, [hidden, *weights.values()], upstream[number].to(output.device),
                                        allow_unused=True)
            before.append(found[0])
            for total, gradient in zip(sums.values(), found[1:]):
                if gradient is not None:
                    total += gradient
            inputs[number] = upstream[number] = None
            output = found = gradient = None  # before the next batch makes its own
    finally:
        for weight in weights.values():
            weight.requires_grad_(False)
    return sums, before
