"""Shortened LLaMA's Taylor score of each layer: sum over its weights of |W * dL/dW|, L the language-modelling loss."""

import torch

from utils import gradients
from utils.errors import WorkError
from utils.selection import block_weights


def taylor_scores(decoder, input_ids, batch_size=1, progress=True):
    """I_j = sum over the weights W of layer j, entry by entry, of |W * dL/dW|: list of L floats.

    L is the mean loss of all next tokens of input_ids, int64 [N, T], so that the size of a batch does not matter: the
    gradient is summed over batches, in float32, inside the absolute value. Norms count, biases do not. Memory as in
    gradients.for_each_layer. Raises WorkError on a non-finite score.
    """
    tokens = input_ids[:, 1:].numel()
    scores = [0.0] * decoder.num_layers

    def weights_of(index):
        return block_weights(decoder.layers[index])

    def score(index, found):
        total = sum(found[name].mul_(weight.detach()).abs_().sum(dtype=torch.float64).item()
                    for name, weight in weights_of(index).items())
        scores[index] = total / tokens

    gradients.for_each_layer(decoder, input_ids, weights_of, score, batch_size, label="taylor" if progress else None)
    for index, value in enumerate(scores):
        if not value < float("inf"):
            raise WorkError(f"{decoder.label}: the Taylor score of layer {index} is not finite; "
                            "use --dtype float32 or bfloat16")
    return scores
