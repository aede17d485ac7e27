"""Log-likelihoods of continuations: what several requests share is encoded once, for several variants at once.

Two ways, same numbers as plain prompts. `score` packs the requests of one item (the answer choices of a question) into
one sequence: their longest common prefix, then one branch each, which sees the prefix and itself at the positions that
it would have alone. `score_behind_prefix` is for many questions behind the same examples: it keeps the prefix's keys
and values and runs the questions behind them. Logits are formed only where a token is scored.
"""

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from utils.decoder import run_variants
from utils.errors import UserError, WorkError

BATCH_TOKENS = 1024  # padded tokens a forward pass; on a GPU larger ones are worth it
PACK_TOKENS = 1024  # a longer pack of branches is split, and its prefix encoded again


@dataclass(frozen=True)
class Request:
    """log p(continuation | context), as token ids; the context holds at least one token."""

    context: tuple
    continuation: tuple


@dataclass
class Pack:
    """One packed sequence: tokens, positions and branch of each entry (0: shared prefix, then 1, 2, ...).

    scored: one (request index, rows, targets) for each request: targets[i] is predicted at entry rows[i].
    """

    tokens: list
    positions: list
    branches: list
    scored: list


def truncated(request, max_length):
    """(inputs, targets): all tokens but the last, and the continuation; the oldest tokens go where it is too long."""
    whole = (*request.context, *request.continuation)[-(max_length + 1):]
    return whole[:-1], whole[-len(request.continuation):] if len(request.continuation) < len(whole) else whole[1:]


def pack_group(requests, indices, max_length, pack_tokens=PACK_TOKENS):
    """Packs of the requests of one item. Requests with equal inputs share one branch.

    requests: list of Request; indices: what the packs call them; max_length: positions of the model.
    """
    branches = {}  # inputs -> [(index, targets)]
    for index, request in zip(indices, requests):
        inputs, targets = truncated(request, max_length)
        branches.setdefault(inputs, []).append((index, targets))
    prefix = _common_prefix(list(branches))
    packs, pack = [], None
    for inputs, wanted in branches.items():
        if pack is None or len(pack.tokens) + len(inputs) - prefix > max(pack_tokens, len(inputs)):
            pack = Pack(list(inputs[:prefix]), list(range(prefix)), [0] * prefix, [])
            packs.append(pack)
        start, branch = len(pack.tokens), pack.branches[-1] + 1 if pack.branches else 1
        pack.tokens += inputs[prefix:]
        pack.positions += range(prefix, len(inputs))
        pack.branches += [branch] * (len(inputs) - prefix)
        for index, targets in wanted:
            places = range(len(inputs) - len(targets), len(inputs))
            pack.scored.append((index, [p if p < prefix else start + p - prefix for p in places], targets))
    return packs


def _common_prefix(sequences):
    """Length of the longest prefix that all sequences share; the last token of none, so that no branch is empty."""
    shortest = min(map(len, sequences))
    if len(sequences) == 1:
        return 0
    length = 0
    while length < shortest and len({sequence[length] for sequence in sequences}) == 1:
        length += 1
    return length


def make_packs(decoder, groups, pack_tokens=PACK_TOKENS):
    """Packs of all groups (lists of Request), whose requests are numbered in the order of the groups."""
    max_length = getattr(decoder.config, "max_position_embeddings", None) or 2048
    packs, total = [], 0
    for group in groups:
        packs += pack_group(group, range(total, total + len(group)), max_length, pack_tokens)
        total += len(group)
    return packs


@torch.no_grad()
def score(decoder, variants, packs, batch_tokens=BATCH_TOKENS, label="score", bar=None):
    """(log-likelihoods float64 [variants, requests], greedy bool [variants, requests]) of packed requests.

    A log-likelihood is the sum over its continuation's tokens, in nats; greedy says whether each of them is the
    model's first choice. bar: a tqdm bar to advance by tokens. Raises WorkError on a non-finite value.
    """
    total = sum(len(pack.scored) for pack in packs)
    values = torch.full((len(variants), total), torch.nan, dtype=torch.float64)
    greedy = torch.zeros(len(variants), total, dtype=torch.bool)
    for batch in _batches(packs, batch_tokens, lambda pack: len(pack.tokens)):
        inputs = packed_inputs(decoder, _padded(pack.tokens for pack in batch),
                               _padded(pack.positions for pack in batch), _padded((p.branches for p in batch), -1))
        _score_batch(decoder, variants, inputs, [pack.scored for pack in batch], values, greedy)
        if bar is not None:
            bar.update(sum(len(pack.tokens) for pack in batch))
    _check_finite(values, variants, label)
    return values, greedy


def _batches(sequences, batch_tokens, size):
    """Lists of sequences of size(sequence) tokens, the longest first: memory shows at once, padding is small."""
    ordered = sorted(sequences, key=size, reverse=True)
    while ordered:
        count = max(1, batch_tokens // size(ordered[0]))
        yield ordered[:count]
        ordered = ordered[count:]


def _padded(sequences, padding=0):
    """Sequences of integers as the rows of one tensor int64 [B, T]."""
    return pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True, padding_value=padding)


def _score_batch(decoder, variants, inputs, lines, values, greedy):
    """Run one batch and enter what it scores into values and greedy [variants, requests].

    inputs: LayerInputs of B sequences; lines: for each of them its (request index, places, targets), where targets[i]
    is predicted at entry places[i].
    """
    length = inputs.hidden.shape[1]
    tokens = [(index, line * length + place, target) for line, scored in enumerate(lines)
              for index, places, targets in scored for place, target in zip(places, targets)]
    owner, rows, targets = (torch.tensor(column) for column in zip(*tokens))
    touched = owner.unique()

    def leaf(variant, hidden):
        states = decoder.final_states(hidden.flatten(0, 1)[rows.to(hidden.device)][None])[0]
        log_likelihood, first = _token_scores(decoder, states, targets)
        values[variant, touched], greedy[variant, touched] = 0.0, True
        values[variant].index_add_(0, owner, log_likelihood)
        greedy[variant, owner[~first]] = False

    run_variants(decoder, inputs, variants, leaf)


def _check_finite(values, variants, label):
    for variant, row in zip(variants, values):
        if not torch.isfinite(row).all():
            raise WorkError(f"{label}: variant {variant.name} has non-finite log-likelihoods; "
                            "use --dtype float32 or bfloat16")


class PrefixStates:
    """Keys and values of a prefix, one entry for each layer run in the order of `run_variants`; layers' `cache`.

    First it records, from a batch of one; after `replay` the same runs see their entry before their own states.
    """

    def __init__(self):
        self.entries, self.cursor = [], None

    def replay(self):
        self.cursor = 0

    def update(self, keys, values, *args, **kwargs):
        """keys, values [B, heads, T, D] of one layer run -> what its attention sees."""
        if self.cursor is None:
            self.entries.append((keys, values))
            return keys, values
        before = self.entries[self.cursor]
        self.cursor += 1
        return tuple(torch.cat([old.expand(len(new), -1, -1, -1), new], 2) for old, new in zip(before, (keys, values)))

    def get_seq_length(self, *args, **kwargs):
        return 0 if self.cursor is None else self.entries[0][0].shape[2]


@torch.no_grad()
def score_behind_prefix(decoder, variants, requests, batch_tokens=BATCH_TOKENS, label="score", bar=None):
    """Log-likelihoods float64 [variants, requests] of requests that share a long prefix, which is encoded once.

    requests: list of Request that fit the model's positions. bar: a tqdm bar to advance by distinct inputs. Raises
    WorkError on a non-finite value.
    """
    branches = {}
    for index, request in enumerate(requests):
        inputs, targets = truncated(request, len(request.context) + len(request.continuation))
        branches.setdefault(inputs, []).append((index, targets))
    length = min(_common_prefix([*branches, *branches]), min(map(len, branches)) - 1)
    prefix, states = next(iter(branches))[:length], PrefixStates()
    values = torch.full((len(variants), len(requests)), torch.nan, dtype=torch.float64)
    greedy = torch.zeros(values.shape, dtype=torch.bool)  # not asked for here
    if length:
        ids = torch.tensor([prefix])
        inputs = packed_inputs(decoder, ids, torch.arange(length)[None], torch.zeros_like(ids))
        run_variants(decoder, _with_cache(inputs, states), variants, lambda variant, hidden: None)
    for batch in _batches(branches, batch_tokens, lambda tokens: len(tokens) - length):
        lines = [[(index, range(len(tokens) - len(targets) - length, len(tokens) - length), targets)
                  for index, targets in branches[tokens]] for tokens in batch]
        if any(places.start < 0 for line in lines for _, places, _ in line):
            raise WorkError(f"{label}: a continuation reaches into the shared prefix")
        inputs = _inputs_behind(decoder, _padded(tokens[length:] for tokens in batch), length)
        if length:
            states.replay()
            inputs = _with_cache(inputs, states)
        _score_batch(decoder, variants, inputs, lines, values, greedy)
        if bar is not None:
            bar.update(len(batch))
    _check_finite(values, variants, label)
    return values


def _inputs_behind(decoder, tokens, length):
    """LayerInputs of right-padded tokens [B, T] that follow a prefix of `length` entries."""
    count, size = tokens.shape
    positions = torch.arange(length, length + size)
    before = torch.arange(length + size)
    seen = (before[None, :] <= positions[:, None]).expand(count, size, length + size)
    distance = (positions[:, None] - before[None, :]).expand_as(seen)
    return _masked_inputs(decoder, tokens, positions.expand(count, size), seen, distance)


def _with_cache(inputs, states):
    for layer, kwargs in enumerate(inputs.kwargs):
        name = next((n for n in ("cache", "past_key_values", "past_key_value", "layer_past") if n in kwargs), None)
        if name is None:
            raise UserError(f"layer {layer} takes no cache of keys and values, so examples cannot be shared; "
                            "this architecture is not supported here")
        kwargs[name] = states
    return inputs


def _token_scores(decoder, states, targets, chunk=512):
    """Log-probabilities float64 [N] of targets [N] given states [N, C] before the head, and whether each is first.

    The float32 log-softmax is the harness's arithmetic: on a CPU it sums a large vocabulary less exactly than
    logsumexp does (2e-5 nats a token at 49,152 words), and the numbers are to be the harness's.
    """
    found, first = [], []
    for part, target in zip(states.split(chunk), targets.split(chunk)):
        logits = decoder.head_logits(part)
        target = target.to(logits.device)
        found.append(-torch.nn.functional.cross_entropy(logits, target, reduction="none").double().cpu())
        first.append((logits.argmax(1) == target).cpu())
    return torch.cat(found), torch.cat(first)


def packed_inputs(decoder, tokens, positions, branches):
    """LayerInputs of packed sequences, all [B, T]: an entry sees earlier entries of the prefix and of its branch.

    branches: 0 for the shared prefix, -1 for padding. Layers with a sliding window see the nearer ones only.
    """
    length = tokens.shape[1]
    order = torch.arange(length)
    own = branches[:, :, None] == branches[:, None, :]
    prefix = (branches == 0)[:, None, :]
    seen = (order[:, None] >= order[None, :]) & (own | prefix)
    distance = positions[:, :, None] - positions[:, None, :]
    return _masked_inputs(decoder, tokens, positions, seen, distance)


def _masked_inputs(decoder, tokens, positions, seen, distance):
    """LayerInputs of tokens [B, T] at `positions`; seen bool [B, T, S] and distance [B, T, S] to the S entries."""
    device, dtype = decoder.device, decoder.dtype
    masks = {None: _additive(seen, dtype, device)}
    try:
        inputs = decoder.inputs(tokens, masks[None], position_ids=positions.to(device))
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise UserError(f"{type(decoder.model).__name__}: takes no attention mask of one's own "
                        f"({str(error).splitlines()[0][:100]}); this architecture is not supported here") from None
    for layer, kwargs in enumerate(inputs.kwargs):
        window = attention_window(decoder.config, layer)
        window = window if window is not None and window <= int(positions.max()) else None
        if window not in masks:
            masks[window] = _additive(seen & (distance < window), dtype, device)
        kwargs["attention_mask"] = masks[window]
    return inputs


def _additive(seen, dtype, device):
    """bool [B, T, T] -> additive mask [B, 1, T, T]: 0 where seen, the dtype's lowest value elsewhere."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen.to(device), torch.finfo(dtype).min)[:, None]


def attention_window(config, layer):
    """Number of latest positions that a layer's attention sees, or None for all. Raises UserError on other patterns."""
    types = getattr(config, "layer_types", None)
    kind = types[layer] if types else None
    if kind not in (None, "full_attention", "sliding_attention"):
        raise UserError(f"layer {layer} has {kind}; only full and sliding attention are scored")
    window = getattr(config, "sliding_window", None)
    if kind == "full_attention" or window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    return window
