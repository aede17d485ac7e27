"""Perplexity of several variants over token windows: one shared prefix, one suffix each, logits in chunks."""

import math

import torch
from scipy.special import stdtrit
from tqdm import tqdm

from utils.errors import WorkError
from utils.variants import run_variants


@torch.no_grad()
def window_losses(decoder, variants, input_ids, batch_size=1, label="ppl", progress=True, scored=None):
    """Mean negative log-likelihood of each window, float64 [variants, N], in nats a token.

    input_ids: int64 [N, T]; every window scores its T-1 next tokens, or the last `scored` of them.
    """
    losses = torch.zeros(len(variants), len(input_ids), dtype=torch.float64)
    done, first = 0, input_ids.shape[1] - 1 - (scored or input_ids.shape[1] - 1)
    with tqdm(total=len(input_ids), desc=label, unit="window", disable=not progress) as bar:
        for ids in input_ids.split(batch_size):

            def leaf(index, hidden):
                losses[index, done:done + len(ids)] = decoder.token_nll(
                    hidden[:, first:], ids[:, 1 + first:]).double().mean(1).cpu()

            run_variants(decoder, decoder.inputs(ids), variants, leaf)
            done += len(ids)
            bar.update(len(ids))
    for variant, row in zip(variants, losses):
        if not torch.isfinite(row).all():
            window = int((~torch.isfinite(row)).nonzero()[0])
            raise WorkError(f"{label}: variant {variant.name} has a non-finite loss in window {window}; "
                            "use --dtype float32 or bfloat16")
    return losses


def summarise(losses, reference=None):
    """Perplexity of one variant from its window losses (float64 [N]), with a 95 % interval over windows.

    ppl = exp(mean loss); the interval is exp(mean -+ t * stderr), Student's t with N-1 degrees of freedom. With
    `reference` (losses of another variant on the same windows) also the paired ratio ppl / reference ppl.
    """
    mean, stderr = mean_stderr(losses)
    result = {"ppl": perplexity(mean), "nll_mean": mean, "nll_stderr": stderr, "ppl_ci95": _interval(losses)}
    if reference is not None:
        result["ratio_to_reference"] = perplexity(mean - reference.mean().item())
        result["ratio_ci95"] = _interval(losses - reference)
    return result


def mean_stderr(values):
    """(mean, standard error of the mean) of float64 [N]; the error is None for one value."""
    stderr = (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else None
    return values.mean().item(), stderr


def _interval(values):
    """exp of the 95 % Student interval of the mean, [low, high]; None for one value."""
    mean, stderr = mean_stderr(values)
    if stderr is None:
        return None
    half = float(stdtrit(len(values) - 1, 0.975)) * stderr
    return [perplexity(mean - half), perplexity(mean + half)]


def perplexity(loss):
    """exp of a mean loss, nats a token. Raises WorkError where that exceeds all floating-point numbers."""
    try:
        return math.exp(loss)
    except OverflowError:
        raise WorkError(f"the perplexity exp({loss:.0f}) exceeds all floating-point numbers; the model is "
                        "broken") from None
