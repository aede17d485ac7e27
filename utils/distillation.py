"""Fine-tuning of the patches alone, by KL on the teacher's top-K logits (paper, section 3.4, eq. 8).

Everything before the first patch is frozen and equal in teacher and student, so it runs once, without a graph. The
teacher goes on through the removed layers, the student through the patches; only the K logits that the loss compares
are formed for the student.
"""

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from utils.errors import UserError


class GatheredLogits(torch.autograd.Function):
    """logits[t, k] = <head row index[t, k], state[t]>, without the other rows of the head.

    states float [T, C], index int64 [T, K], weight [V, C] (frozen) -> float32 [T, K]. The gathered rows, T K C
    numbers, never exist: the gradient is a weighted sum of rows, which an embedding bag forms in one pass, and the
    logits are the gradient of such a sum with respect to its weights.
    """

    @staticmethod
    def forward(ctx, states, index, weight):
        ctx.save_for_backward(index, weight)
        ctx.states = states.dtype, states.device
        with torch.enable_grad():
            weights = torch.zeros(index.shape, dtype=weight.dtype, device=weight.device, requires_grad=True)
            bags = F.embedding_bag(index, weight, per_sample_weights=weights, mode="sum")
        return torch.autograd.grad(bags, weights, states.to(weight))[0].float()

    @staticmethod
    def backward(ctx, gradient):
        index, weight = ctx.saved_tensors
        bags = F.embedding_bag(index, weight, per_sample_weights=gradient.to(weight), mode="sum")
        return bags.to(*reversed(ctx.states)), None, None


def logits_at(decoder, states, index):
    """The decoder's logits at `index` [T, K] given states [T, C] before the head, float32 [T, K]."""
    index = index.to(decoder.head.weight.device)
    logits = GatheredLogits.apply(states, index, decoder.head.weight)
    if getattr(decoder.head, "bias", None) is not None:
        logits = logits + decoder.head.bias[index].float()
    return decoder.scale_logits(logits)


@torch.no_grad()
def teacher_targets(decoder, hidden, top_k, normalised=True, chunk=256):
    """What the loss needs of the teacher, from X^(L) [B, T, C].

    Returns (log-probabilities float32 [B*T, K] over the WHOLE vocabulary, indices int64 [B*T, K], in no order); the
    loss renormalises them, or puts what is missing from 1 into a bucket. Without `normalised` logits take the place of
    log-probabilities, which is the same to a loss that renormalises.
    """
    states = decoder.final_states(hidden).flatten(0, 1)
    top_k = min(top_k, decoder.vocab_size)
    logs, indices = [], []
    for part in states.split(chunk):
        logits = _vocabulary_first(decoder, part)
        values, index = _top(logits, top_k)
        logs.append(values - logits.logsumexp(0)[:, None] if normalised else values)
        indices.append(index)
    return torch.cat(logs), torch.cat(indices)


def _vocabulary_first(decoder, states):
    """Logits float32 [V, T] of states [T, C]: on a CPU a third faster than [T, V], where few states meet many words."""
    logits = decoder.head.weight @ states.T.to(decoder.head.weight)
    if getattr(decoder.head, "bias", None) is not None:
        logits += decoder.head.bias[:, None]
    return decoder.scale_logits(logits.float())


def _top(logits, k, group=16):
    """(values, indices) [T, K] of the K largest of each column of logits [V, T].

    Exact in two stages: the K largest of V lie in the K groups, of `group` words each, with the largest maxima.
    """
    count = len(logits) // group
    if count < k:
        return logits.T.topk(k, dim=1, sorted=False)
    maxima = logits[:count * group].view(group, count, -1).amax(0)  # word w is in group w mod count
    words = maxima.T.contiguous().topk(k, dim=1, sorted=False).indices
    words = words[:, :, None] + count * torch.arange(group, device=words.device)
    rest = torch.arange(count * group, len(logits), device=words.device)
    words = torch.cat([words.flatten(1), rest.expand(len(words), -1)], 1)
    values, place = logits.T.gather(1, words).topk(k, dim=1, sorted=False)
    return values, words.gather(1, place)


def kl_top_k(teacher_log, student_logits):
    """KL(teacher || student) on the teacher's K tokens, renormalised on both sides: mean over tokens, in nats.

    teacher_log: log-probabilities or logits float [T, K]; student_logits float [T, K] at the same tokens.
    """
    student_log, teacher_log = F.log_softmax(student_logits, 1), F.log_softmax(teacher_log.float(), 1)
    return F.kl_div(student_log, teacher_log, reduction="batchmean", log_target=True)  # eq. (8)


def kl_with_tail(teacher_log, student_logits, student_normaliser):
    """The same without renormalising, with one bucket for all other tokens on both sides; at most the full KL.

    teacher_log: true log-probabilities [T, K]; student_normaliser: log of the sum over the whole vocabulary [T].
    """
    student_log = student_logits - student_normaliser[:, None]
    total = (teacher_log.exp() * (teacher_log - student_log)).sum(1)
    teacher_rest = -torch.expm1(teacher_log.logsumexp(1).clamp(max=-1e-12))
    student_rest = -torch.expm1(student_log.logsumexp(1).clamp(max=-1e-12))
    tiny = torch.finfo(torch.float32).tiny
    rest = teacher_rest * (teacher_rest.clamp(min=tiny).log() - student_rest.clamp(min=tiny).log())
    return (total + torch.where(teacher_rest > 1e-7, rest, 0.0)).mean()


class Distiller:
    """Teacher and student of one decoder: Layers are removed, one trainable module stands behind each run.

    patches: {end of run: module of utils/networks.py}. loss: 'kl', 'kl-tail' (with the bucket for the rest) or 'mse'
    (of the states at each interface).
    """

    def __init__(self, decoder, layers, patches, top_k=100, loss="kl"):
        if not layers.removed:
            raise UserError("nothing to fine-tune: the patch removes no layers")
        self.decoder, self.layers, self.patches, self.top_k, self.loss = decoder, layers, patches, top_k, loss
        self.start, self.last_end = layers.runs[0][0], layers.runs[-1][1]
        self.parameters = [p for patch in patches.values() for p in patch.parameters()]

    @torch.no_grad()
    def interface(self, ids):
        """(LayerInputs, X^(start) [B, T, C]): the frozen prefix, run once for teacher and student."""
        batch = self.decoder.inputs(ids)
        *_, (_, hidden) = self.decoder.states(batch, self.start)
        return batch, hidden

    @torch.no_grad()
    def teacher(self, batch, hidden, normalised=None):
        """Targets from X^(start): (log-probabilities, indices) as in teacher_targets, or for mse {end: X^(end)}.

        normalised: by default only where the loss needs it.
        """
        wanted = {}
        for index in range(self.start, self.decoder.num_layers):
            hidden = self.decoder.layer(batch, index, hidden)
            if index + 1 in self.patches:
                wanted[index + 1] = hidden
            if self.loss == "mse" and index + 1 == self.last_end:
                return wanted
        if self.loss == "mse":
            return wanted
        normalised = self.loss == "kl-tail" if normalised is None else normalised
        return teacher_targets(self.decoder, hidden, self.top_k, normalised)

    def student_loss(self, batch, hidden, target):
        """The loss of the student branch from X^(start), with gradients to the patches only."""
        total, kept = 0.0, set(self.layers.kept)
        for index in range(self.layers.runs[0][1], self.decoder.num_layers + 1):
            if index in self.patches:
                hidden = self.decoder.step(batch, self.patches[index], hidden)
                if self.loss == "mse":
                    total = total + F.mse_loss(hidden.float(), target[index].float())
                    if index == self.last_end:
                        return total
            if index in kept:
                hidden = self.decoder.layer(batch, index, hidden)
        return self._logit_loss(hidden, target)

    def _logit_loss(self, hidden, target):
        teacher_log, index = target
        states = self.decoder.final_states(hidden).flatten(0, 1)
        logits = logits_at(self.decoder, states, index)
        if self.loss == "kl":
            return kl_top_k(teacher_log, logits)
        normaliser = torch.cat([checkpoint(
            lambda part: self.decoder.head_logits(part).logsumexp(1), part, use_reentrant=False)
            for part in states.split(256)])
        return kl_with_tail(teacher_log, logits, normaliser)

