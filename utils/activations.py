"""The one-pass collector: every statistic of the intact model that selection and patches need.

One forward over the calibration windows, stopped before the head, gives for every sample the L1 norm of each channel
of each X^(l), l = 0..L, raw and rotated, and the similarity of every pair (X^(l), X^(m)). Every n, every metric of
the cosine family, every d and both estimators follow without another forward pass.
"""

from dataclasses import dataclass, fields

import torch
from tqdm import tqdm

from utils.artifacts import read_tensors, write_tensors
from utils.errors import UserError, WorkError

TOKEN_CHUNK = 64  # tokens whose scaled states are copied at one time
STATES_LIMIT = 8e9  # bytes that `layer_states` may keep


@dataclass
class Stats:
    """Per-sample statistics of N windows. L layers, C channels; all float32 but `tokens`.

    l1_raw, l1_rotated: [N, L+1, C], sum over tokens of |X^(l)| and of |X^(l) H|.
    cosine: [N, L+1, L+1], mean over tokens of cos(X^(l)_t, X^(m)_t), eq. (2).
    cosine_sequence: [N, L+1, L+1], mean over channels of the cosine along time (what the released code computes).
    angle_last, angle_all: [N, L+1, L+1], arccos of the token cosine over pi, last token and mean over tokens.
    tokens: int64 [N]. A zero vector has cosine 0 with everything.
    """

    l1_raw: torch.Tensor
    l1_rotated: torch.Tensor
    cosine: torch.Tensor
    cosine_sequence: torch.Tensor
    angle_last: torch.Tensor
    angle_all: torch.Tensor
    tokens: torch.Tensor

    def mean(self, name):
        """Mean over samples of a similarity, float64 [L+1, L+1]; token-wise ones are weighted by tokens."""
        values = getattr(self, name).double()
        weights = self.tokens.double() if name in ("cosine", "angle_all") else torch.ones(len(values)).double()
        return torch.einsum("n,nlm->lm", weights / weights.sum(), values)

    def first(self, samples):
        """The Stats of the first `samples` windows."""
        return Stats(*(getattr(self, f.name)[:samples] for f in fields(self)))

    def save(self, path, content):
        """Write as a stats artifact with `content` (recipe, provenance, ...) in its header."""
        write_tensors(path, "stats", {f.name: getattr(self, f.name) for f in fields(self)}, content)

    @classmethod
    def load(cls, path):
        """(Stats, header) of a stats artifact. Raises UserError."""
        header, tensors = read_tensors(path, "stats")
        missing = {f.name for f in fields(cls)} - set(tensors)
        if missing:
            raise UserError(f"{path}: lacks {', '.join(sorted(missing))}")
        stats = cls(**{f.name: tensors[f.name] for f in fields(cls)})
        samples, states, channels = stats.l1_raw.shape if stats.l1_raw.ndim == 3 else (0, 0, 0)
        square, vectors = (samples, states, states), (samples, states, channels)
        shapes = dict(l1_raw=vectors, l1_rotated=vectors, cosine=square, cosine_sequence=square, angle_last=square,
                      angle_all=square, tokens=(samples,))
        for name, shape in shapes.items():
            if tuple(getattr(stats, name).shape) != shape or not samples:
                raise UserError(f"{path}: {name} has shape {list(getattr(stats, name).shape)}, expected {list(shape)}")
        if header["recipe"].get("samples", samples) != samples:
            raise UserError(f"{path}: is of {samples} windows, its recipe says {header['recipe']['samples']}")
        if header["model"]["num_layers"] != states - 1:
            raise UserError(f"{path}: is of {states - 1} layers, its model has {header['model']['num_layers']}")
        return stats, header


@torch.no_grad()
def collect(decoder, input_ids, rotation, batch_size=1, attention_mask=None, progress=True):
    """Stats of windows input_ids int64 [N, T]; attention_mask [N, T] with 0 at padding.

    Extra memory: the states of one batch, (L+1) B T C, and 2 (L+1) C floats a sample.
    """
    parts, buffer = [], None
    with tqdm(total=len(input_ids), desc="collect", unit="window", disable=not progress) as bar:
        for ids, mask in _batches(input_ids, attention_mask, batch_size):
            batch = decoder.inputs(ids, mask)
            shape = (decoder.num_layers + 1, *batch.hidden.shape)
            if buffer is None or buffer.shape != shape:
                buffer = torch.empty(shape, dtype=batch.hidden.dtype, device=batch.hidden.device)
            for index, hidden in decoder.states(batch):
                buffer[index] = hidden
            for sample in range(len(ids)):
                states = buffer[:, sample] if mask is None else buffer[:, sample, mask[sample].bool().to(buffer.device)]
                parts.append(_sample_stats(states, rotation))
            bar.update(len(ids))
    stats = Stats(**{f.name: torch.stack([part[f.name] for part in parts]) for f in fields(Stats)})
    for f in fields(Stats):
        if not torch.isfinite(getattr(stats, f.name)).all():
            raise WorkError(f"{decoder.label}: non-finite {f.name} in the collected statistics; "
                            "use --dtype float32 or bfloat16")
    return stats


def _batches(input_ids, attention_mask, batch_size):
    masks = [None] * len(input_ids) if attention_mask is None else attention_mask.split(batch_size)
    return zip(input_ids.split(batch_size), masks)


def _sample_stats(states, rotation):
    """Statistics of one window, states [L+1, T, C]."""
    raw, rotated = [], []
    for state in states:
        raw.append(_column_sums(state.abs()))
        rotated.append(_column_sums(rotation.apply(state).abs_()))
    cosine = _token_cosines(states)
    angle = torch.arccos(cosine.clamp(-1, 1)) / torch.pi
    result = {
        "l1_raw": torch.stack(raw), "l1_rotated": torch.stack(rotated),
        "cosine": cosine.mean(0), "cosine_sequence": _channel_cosines(states),
        "angle_last": angle[-1], "angle_all": angle.mean(0),
    }
    result = {name: value.float().cpu() for name, value in result.items()}
    return {**result, "tokens": torch.tensor(states.shape[1])}


def _column_sums(values):
    """[T, C] -> float32 [C], as a product with ones: the fastest sum over the first axis on a CPU."""
    return (torch.ones(1, len(values), device=values.device) @ values.float())[0]


def _token_cosines(states):
    """[L+1, T, C] -> float64 [T, L+1, L+1], cosines of every pair of layers at every token."""
    states = states if states.dtype == torch.float32 else states.float()
    return _cosines_from_gram(torch.bmm(states.transpose(0, 1), states.permute(1, 2, 0)))


def _channel_cosines(states):
    """[L+1, T, C] -> float64 [L+1, L+1], mean over channels of the cosine along time.

    With every channel of every layer scaled to length 1 over time, the sum of all cosines is one inner product.
    """
    lengths = torch.linalg.vector_norm(states, dim=1, dtype=torch.float32)
    scale = torch.where(lengths > 0, 1 / lengths.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    total = 0
    for part in states.transpose(0, 1).split(TOKEN_CHUNK):  # [t, L+1, C]
        scaled = part * scale
        total = total + torch.bmm(scaled, scaled.transpose(1, 2)).double().sum(0)
    return total / states.shape[-1]


def _cosines_from_gram(gram):
    gram = gram.double()
    squares = torch.diagonal(gram, dim1=1, dim2=2)
    norms = (squares[:, :, None] * squares[:, None, :]).sqrt()
    return torch.where(norms > 0, gram / norms.clamp(min=torch.finfo(torch.float64).tiny), 0.0)  # eq. (2)


@torch.no_grad()
def token_scaling_spread(decoder, input_ids, runs, rotation, progress=True, keep=0, seed=0):
    """sigma_d of eq. (4) for each run (start, end), raw and rotated, over windows input_ids int64 [N, T].

    For each window and channel the standard deviation over tokens (unbiased) of |X^(end)| / |X^(start)|, averaged.
    Its robust companion is the same of the logarithm of that ratio: eq. (4) has near-zero denominators and hence
    heavy tails. Zero denominators (and zero numerators, for the logarithm) are left out.
    Returns a list of {"start", "end", "sigma_d", "sigma_d_rotated", "log_sigma_d", "log_sigma_d_rotated", "windows"};
    with `keep` also "values" and "values_rotated": at most so many of the positive ratios, float32 [<= keep], drawn
    with `seed` evenly from all windows.
    """
    names = ("sigma_d", "sigma_d_rotated", "log_sigma_d", "log_sigma_d_rotated")
    totals = [dict.fromkeys(names, 0.0) for _ in runs]
    kept = [{"values": [], "values_rotated": []} for _ in runs]
    generator = torch.Generator().manual_seed(seed)
    wanted = {index for run in runs for index in run}
    for ids in tqdm(input_ids.split(1), desc="sigma_d", unit="window", disable=not progress):
        passed = decoder.states(decoder.inputs(ids), max(wanted, default=0))
        states = {index: hidden[0].float() for index, hidden in passed if index in wanted}
        for total, some, (start, end) in zip(totals, kept, runs):
            for suffix, change in (("", lambda x: x), ("_rotated", rotation.apply)):
                before, after = change(states[start]).abs(), change(states[end]).abs()
                ratio = torch.where(before > 0, after / before, torch.nan)
                total["sigma_d" + suffix] += _mean_std(ratio)
                total["log_sigma_d" + suffix] += _mean_std(torch.where(ratio > 0, ratio, torch.nan).log())
                if keep:
                    positive = ratio[ratio > 0].cpu()
                    pick = torch.randperm(len(positive), generator=generator)[:keep // len(input_ids)]
                    some["values" + suffix].append(positive[pick])
    return [{"start": start, "end": end, **{name: total[name] / len(input_ids) for name in names},
             "windows": len(input_ids), **({name: torch.cat(parts) for name, parts in some.items()} if keep else {})}
            for total, some, (start, end) in zip(totals, kept, runs)]


def _mean_std(values):
    """Mean over channels of the unbiased standard deviation over tokens, [T, C] with NaN where undefined -> float."""
    values = values.double()
    count = (~values.isnan()).sum(0)
    centred = values - values.nanmean(0)
    std = (centred.square().nansum(0) / (count - 1).clamp(min=1)).sqrt()  # eq. (4), one window
    return std[count > 1].mean().item() if (count > 1).any() else 0.0


@torch.no_grad()
def layer_states(decoder, input_ids, batch_size, wanted):
    """[(LayerInputs, {l: X^(l) [B, T, C] for l in wanted})] of windows input_ids int64 [N, T], l = 0..L.

    For methods that run parts of the model again and again on few short windows. Raises UserError when the states
    would take more than STATES_LIMIT bytes.
    """
    wanted = sorted(set(wanted))
    size = len(wanted) * input_ids.numel() * decoder.hidden_size * decoder.dtype.itemsize
    if size > STATES_LIMIT:
        raise UserError(f"--calib-samples {len(input_ids)} --seq-len {input_ids.shape[1]}: the states of all layers "
                        f"would take {size / 1e9:.0f} GB;\ngive few short windows, for instance --calib-samples 10 "
                        "--seq-len 64")
    result = []
    for ids in input_ids.split(batch_size):
        batch = decoder.inputs(ids)
        states = decoder.states(batch, wanted[-1])
        result.append((batch, {index: hidden for index, hidden in states if index in wanted}))
    return result


@torch.no_grad()
def read_magnitudes(decoder, input_ids, variants, progress=True):
    """Mean over tokens of |what is read| in each channel at every place of variants, float64 [variants, L+1, C].

    input_ids: int64 [N, T]. Entry [v, l] is of the input of layer l in variant v, behind its patch if there is one,
    and [v, L] of the input of the final norm; NaN where layer l is removed. Layers before the first run of removed
    layers run once for all variants. Raises WorkError on a non-finite state.
    """
    length = decoder.num_layers
    changed = [(*variant.removed, *variant.modules, *(module.host for module in variant.modules.values() if
                                                      hasattr(module, "host"))) for variant in variants]
    first = min((min(places, default=length) for places in changed), default=0)
    result = torch.full((len(variants), length + 1, decoder.hidden_size), torch.nan, dtype=torch.float64)
    result[:, :first] = 0.0
    for row, variant in zip(result, variants):
        row[[*variant.layers.kept, length]] = 0.0
    for ids in tqdm(input_ids.split(1), desc="magnitudes", unit="window", disable=not progress):
        batch = decoder.inputs(ids)
        for index, hidden in decoder.states(batch, first):
            if index < first:
                result[:, index] += _column_sums(hidden[0].abs()).cpu().double()
        for row, variant in zip(result, variants):
            own, after = hidden, [step for step in variant.steps() if not isinstance(step, int) or step >= first]
            for step in [*after, length]:
                place = step if isinstance(step, int) else getattr(step, "host", None)
                if place is not None:
                    row[place] += _column_sums(own[0].abs()).cpu().double()
                if step != length:
                    own = decoder.step(batch, step, own)
    result /= input_ids.numel()
    for row, variant in zip(result, variants):
        if not torch.isfinite(row[[*variant.layers.kept, length]]).all():
            raise WorkError(f"{decoder.label}: variant {variant.name} has non-finite states; "
                            "use --dtype float32 or bfloat16")
    return result


@torch.no_grad()
def largest_activations(decoder, input_ids, top=3, progress=True):
    """The largest |X^(l)| over windows input_ids int64 [N, T], for every l = 0..L, and the tokens that carry them.

    Returns (layers, tokens, medians). layers: for each l a list of `top` entries (value, window, position, channel),
    largest first; tokens: float32 [N, T], the largest of each token over all layers and channels; medians: float64
    [L+1], of |X^(l)| over tokens and channels, averaged over windows.
    """
    length = decoder.num_layers
    layers = [[] for _ in range(length + 1)]
    tokens, medians = torch.zeros(input_ids.shape), torch.zeros(length + 1, dtype=torch.float64)
    for window, ids in enumerate(tqdm(input_ids.split(1), desc="massive", unit="window", disable=not progress)):
        for index, hidden in decoder.states(decoder.inputs(ids)):
            size = hidden[0].float().abs()
            values, flat = size.flatten().topk(min(top, size.numel()))
            places = zip(values.tolist(), (flat // size.shape[1]).tolist(), (flat % size.shape[1]).tolist())
            found = layers[index] + [(value, window, position, channel) for value, position, channel in places]
            layers[index] = sorted(found, key=lambda entry: (-entry[0], *entry[1:]))[:top]
            tokens[window] = torch.maximum(tokens[window], size.amax(1).cpu())
            medians[index] += size.median().item() / len(input_ids)
    if not torch.isfinite(tokens).all():
        raise WorkError(f"{decoder.label}: non-finite states; use --dtype float32 or bfloat16")
    return layers, tokens, medians


MOMENTS = {  # name -> what is summed over tokens: X = X^(start), Y = X^(end), M = MLP output of layer start - 1
    "xx": ("x", "x"), "xy": ("x", "y"), "yy": ("y", "y"), "mm": ("m", "m"), "mr": ("m", "r"),  # R = Y - (X - M)
}


@torch.no_grad()
def collect_moments(decoder, input_ids, runs, wanted, batch_size=1, skip_first=False, progress=True):
    """{run: {name: float64 [C, C]}} over windows int64 [N, T]: sums over tokens, so parts of a text add up exactly.

    runs: [(start, end)]; wanted: names of MOMENTS; those of an MLP are left out where a run starts at layer 0.
    skip_first: leave out the first token of each window, the attention sink. One pass for all runs; memory beside one
    batch of states: len(wanted) C^2 float64 a run.
    """
    sums = {run: {name: 0 for name in wanted if run[0] > 0 or "m" not in name} for run in runs}
    hosts = {start - 1 for start, _ in runs if start > 0 and any("m" in name for name in wanted)}
    depths = sorted({depth for run in runs for depth in run})
    for ids in tqdm(input_ids.split(batch_size), desc="moments", unit="batch", disable=not progress):
        states, mlps = {}, {}
        with decoder.mlp_outputs(hosts, mlps):
            for depth, hidden in decoder.states(decoder.inputs(ids), max(depths, default=0)):
                if depth in depths:
                    states[depth] = _tokens(hidden, skip_first)
        for start, end in runs:
            parts = {"x": states[start], "y": states[end]}
            if start - 1 in mlps:
                parts["m"] = _tokens(mlps[start - 1], skip_first)
                parts["r"] = parts["y"] - parts["x"] + parts["m"]
            for name in sums[start, end]:
                left, right = MOMENTS[name]
                sums[start, end][name] += parts[left].T @ parts[right]
    for run, found in sums.items():
        for name, value in found.items():
            if not torch.isfinite(value).all():
                raise WorkError(f"{decoder.label}: non-finite moments of run [{run[0]}, {run[1]}); "
                                "use --dtype float32 or bfloat16")
    return sums


def _tokens(hidden, skip_first):
    """[B, T, C] -> float64 [tokens, C] on the CPU or the device of `hidden` where that has float64."""
    hidden = hidden[:, 1:] if skip_first else hidden
    hidden = hidden.cpu() if hidden.device.type == "mps" else hidden
    return hidden.flatten(0, 1).double()
