"""Shortened LLaMA's Taylor score of each layer: sum over its weights of |W * dL/dW|, L the language-modelling loss.

The forward pass keeps the input of every other layer only; the backward pass goes layer by layer and frees what it
scored, so that gradients of one layer exist at one time.
"""

import torch
from torch import nn
from tqdm import tqdm

from utils.errors import WorkError
from utils.selection import block_weights

HEAD_CHUNK = 16  # tokens whose logits and their gradients exist at one time


def taylor_scores(decoder, input_ids, batch_size=1, progress=True):
    """I_j = sum over the weights W of layer j, entry by entry, of |W * dL/dW|: list of L floats.

    L is the mean loss of all next tokens of input_ids, int64 [N, T], so that the size of a batch does not matter: the
    gradient is summed over batches, in float32, inside the absolute value. Norms count, biases do not.
    Memory beside the model: L/2 N T C numbers for inputs of layers, one layer's gradients, HEAD_CHUNK logits.
    Raises WorkError on a non-finite score.
    """
    parts = input_ids.split(batch_size)
    tokens = input_ids[:, 1:].numel()
    scores = [0.0] * decoder.num_layers
    with tqdm(total=2 * decoder.num_layers, desc="taylor", unit="layer", disable=not progress) as bar:
        batches, inputs, outputs = _forward(decoder, parts, bar)
        gradients = [_loss_gradient(decoder, outputs.pop(0), ids) for ids in parts]
        for index in reversed(range(decoder.num_layers)):
            states = inputs.pop() or _next_states(decoder, index - 1, batches, inputs[-1])
            score, gradients = _layer(decoder, index, batches, states, gradients)
            scores[index] = score / tokens
            bar.update(1)
    for index, score in enumerate(scores):
        if not score < float("inf"):
            raise WorkError(f"{decoder.label}: the Taylor score of layer {index} is not finite; "
                            "use --dtype float32 or bfloat16")
    return scores


@torch.no_grad()
def _forward(decoder, parts, bar):
    """(inputs of each batch, [layer][batch] X^(layer) of even layers and None of odd ones, [batch] X^(L))."""
    batches = [decoder.inputs(ids) for ids in parts]
    inputs, states = [], [batch.hidden for batch in batches]
    for index in range(decoder.num_layers):
        inputs.append(None if index % 2 else states)
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
    for part, goal in zip(states.split(HEAD_CHUNK), ids[:, 1:].reshape(-1).split(HEAD_CHUNK)):
        part = part.detach().requires_grad_()
        with torch.enable_grad():
            logits = decoder.head_logits(decoder.final_states(part))
            loss = nn.functional.cross_entropy(logits, goal.to(logits.device), reduction="sum")
        gradients.append(torch.autograd.grad(loss, part)[0])
        del logits, loss
    result = torch.zeros_like(hidden)  # the last position predicts nothing
    result[:, :-1] = torch.cat(gradients).view(len(hidden), -1, hidden.shape[-1])
    return result


def _layer(decoder, index, batches, inputs, gradients):
    """(score of a layer, [batch] gradient with respect to its input) from those with respect to its output."""
    weights = list(block_weights(decoder.layers[index]).values())
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    before = []
    for weight in weights:
        weight.requires_grad_(True)
    try:
        for number, batch in enumerate(batches):
            hidden = inputs[number].detach().requires_grad_()
            with torch.enable_grad():
                output = decoder.layer(batch, index, hidden)
            found = torch.autograd.grad(output, [hidden, *weights], gradients[number].to(output.device),
                                        allow_unused=True)
            before.append(found[0])
            for total, gradient in zip(sums, found[1:]):
                if gradient is not None:
                    total += gradient
            inputs[number] = gradients[number] = None
            del output, found, gradient  # before the next batch makes its own
    finally:
        for weight in weights:
            weight.requires_grad_(False)
    score = sum(total.mul_(weight.detach()).abs_().sum(dtype=torch.float64).item()
                for total, weight in zip(sums, weights))
    return score, before
