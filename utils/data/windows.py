"""Windows: a text -> token windows, int64 [windows, seq_len], and a record of exactly how they were made.

Calibration windows are drawn by the formula of the paper's released loader, evaluation windows do not overlap and
drop the tail (section 4.1); separate documents are evaluated on crops of the long ones, drawn with a fixed seed.
"""

import random
from dataclasses import dataclass

import numpy
import torch

from utils.data.corpora import BLANK_LINE, load_text, split_lines
from utils.data.tokens import check_choice, document_lengths, ids_sha256, leading_bos, token_stream, tokenise
from utils.errors import UserError

TRAIN_SHARE = 0.9  # training windows lie in the first 90 %, validation windows in the last 10 %
CROPS_SEED = 0  # of evaluation windows of separate documents


@dataclass(frozen=True)
class Windows:
    """ids: int64 [windows, seq_len]; info: JSON-able record of the protocol, put into words by `describe`."""

    ids: torch.Tensor
    info: dict


# --- calibration windows


def calibration_windows(spec, tokenizer, samples, seq_len, seed=0, sampling="random", data_dir=None, part="train"):
    """Windows to calibrate or train on: ids int64 [samples, seq_len].

    Stream of n tokens, sampling="random": starts random.Random(seed).randint(lo, hi - seq_len - 1) with replacement,
    [lo, hi) = [0, int(0.9 n)) for part="train", as in the released loader, and [int(0.9 n), n) for part="validation".
    (Validation windows of the released loader may begin seq_len + 1 tokens before the 90 % mark; these never do.)
    sampling="first": consecutive windows from the start of the stream for part="train" (of the whole stream: they
    meet the validation part when they take more than 90 % of it), from the 90 % mark for part="validation".
    Documents: the same shares of the list of documents. "random" draws a document until one has more than seq_len
    tokens, then an offset; "first" takes the first seq_len tokens of each such document, in order.
    sampling="sleb-lines": SLEB's released loader, in which `samples` counts lines: that many random lines of the whole
    split joined by blank lines, cut into as many windows as fit, often a handful. part must be "train".

    Raises UserError when the text is too short, with the counts.
    """
    check_choice("--calib-sampling", sampling, ("random", "first", "sleb-lines"))
    check_choice("part", part, ("train", "validation"))
    _check_at_least("--calib-samples", samples, 1)
    _check_at_least("--seq-len", seq_len, 2)
    text = load_text(spec, "calibration", data_dir)
    if sampling == "sleb-lines":
        cut = _calibration_from_lines
    else:
        cut = _calibration_from_stream if text.kind == "stream" else _calibration_from_documents
    ids, tokens_info = cut(text, tokenizer, samples, seq_len, seed, sampling, part)
    info = {
        **_text_info(text),
        "part": part,
        "sampling": sampling,
        "seed": None if sampling == "first" else seed,
        "samples": samples,
        "seq_len": seq_len,
        "windows": len(ids),
        **tokens_info,
        "token_ids_sha256": ids_sha256(ids),
    }
    return Windows(ids, info)


def _calibration_from_stream(text, tokenizer, samples, seq_len, seed, sampling, part):
    stream, info = token_stream(text.text(), tokenizer)
    lo, hi = _share(part, sampling, len(stream))
    where = f"{text.name}: {hi - lo} tokens"
    if hi - lo < len(stream):
        where += f" (the {part} part of {len(stream)})"
    if sampling == "random":
        if hi - lo < seq_len + 1:
            raise UserError(f"{where} < one window of {seq_len} and a token to move it by; lower --seq-len")
        generator = random.Random(seed)
        starts = [generator.randint(lo, hi - seq_len - 1) for _ in range(samples)]
    else:
        if hi - lo < seq_len:
            raise UserError(f"{where} < one window of {seq_len}; lower --seq-len")
        _check_enough(text, (hi - lo) // seq_len, samples, seq_len)
        starts = [lo + index * seq_len for index in range(samples)]
    return torch.stack([stream[start : start + seq_len] for start in starts]), info


def _calibration_from_documents(text, tokenizer, samples, seq_len, seed, sampling, part):
    lengths, info = document_lengths(text, tokenizer, seq_len)
    lo, hi = _share(part, sampling, len(lengths))
    long_enough = [index for index in range(lo, hi) if lengths[index] > seq_len]
    if not long_enough:
        raise UserError(f"{text.name}: {info['documents_long_enough']} of {len(lengths)} documents have >= "
                        f"{seq_len + 1} tokens, but none of the {hi - lo} in the {part} part; lower --seq-len")
    if sampling == "random":
        crops = _draw_crops(lengths, samples, seq_len, random.Random(seed), lo, hi)
    else:
        _check_enough(text, len(long_enough), samples, seq_len)
        crops = [(index, 0) for index in long_enough[:samples]]
    return _cut_crops(text, tokenizer, crops, seq_len), info


def _calibration_from_lines(text, tokenizer, samples, seq_len, seed, sampling, part):
    """The order of lines is that of a data set shuffled by the library `datasets` with this seed."""
    if text.kind != "stream" or part != "train":
        raise UserError(f"--calib-sampling {sampling}: takes lines of a text, not the {part} part of {text.name} "
                        f"({text.kind})")
    lines = [line for row in text.rows for line in (split_lines(row) or [row])]
    if len(lines) < samples:
        raise UserError(f"{text.name}: {len(lines)} lines, {samples} asked for; lower --calib-samples")
    chosen = numpy.random.default_rng(seed).permutation(len(lines))[:samples]
    stream, info = token_stream(BLANK_LINE.join(lines[index] for index in chosen), tokenizer)
    count = len(stream) // seq_len
    if count == 0:
        raise UserError(f"{text.name}: {samples} random lines have {len(stream)} tokens < one window of {seq_len}; "
                        "lower --seq-len or give more --calib-samples")
    return stream[: count * seq_len].view(count, seq_len), {**info, "dropped_tokens": len(stream) - count * seq_len}


def _share(part, sampling, length):
    """[lo, hi) of `length` tokens or documents from which the windows of `part` come."""
    border = int(length * TRAIN_SHARE)
    if part == "validation":
        return border, length
    return 0, (border if sampling == "random" else length)


# --- evaluation windows


def evaluation_windows(spec, tokenizer, seq_len, bos="stream", limit=None, data_dir=None, unk="special", stride=None):
    """Windows to measure perplexity on: ids int64 [windows, seq_len]; each has seq_len - 1 scored targets.

    bos="stream": the field's convention, BOS at most once, before the first token. bos="window": every window is BOS
    and seq_len - 1 tokens of the stream; the first target is the token after BOS. limit: only the first windows.
    unk: see `token_stream`. Tokens after the last window that fits are dropped and counted in the info.
    stride: windows start every `stride` tokens instead and each scores its last `stride` targets only, so that every
    scored token has at least seq_len - stride tokens before it.

    Raises UserError when the text is shorter than one window, when the tokenizer has no BOS for bos="window", or when
    a stride is asked of a corpus of separate documents.
    """
    check_choice("--bos", bos, ("stream", "window"))
    if stride is not None and not 1 <= stride < seq_len:
        raise UserError(f"--stride {stride}: give 1 to --seq-len - 1, here {seq_len - 1}")
    _check_at_least("--seq-len", seq_len, 2)
    if limit is not None:
        _check_at_least("--limit-windows", limit, 1)
    if bos == "window" and tokenizer.bos_token_id is None:
        raise UserError("--bos window: this tokenizer has no BOS token; use --bos stream")
    text = load_text(spec, "evaluation", data_dir)
    if stride is not None:
        if text.kind != "stream" or bos == "window":
            raise UserError(f"--stride: {text.name} with --bos {bos} has no stream to slide over")
        ids, tokens_info = _sliding(text, tokenizer, seq_len, stride, unk)
    else:
        cut = _evaluation_from_stream if text.kind == "stream" else _evaluation_from_documents
        ids, tokens_info = cut(text, tokenizer, seq_len, bos, unk)
    available, ids = len(ids), ids[:limit]
    info = {
        **_text_info(text),
        "seq_len": seq_len,
        "windows": len(ids),
        "windows_available": available,
        "stride": stride,
        "scored_tokens": len(ids) * (stride or seq_len - 1),
        **tokens_info,
        "token_ids_sha256": ids_sha256(ids),
    }
    if bos == "window":
        info["bos"] = f"window: id {tokenizer.bos_token_id} in each"
    return Windows(ids, info)


def _evaluation_from_stream(text, tokenizer, seq_len, bos, unk):
    stream, info = token_stream(text.text(), tokenizer, unk)
    if bos == "window":
        stream = stream[leading_bos(stream, tokenizer) :]
    step = seq_len if bos == "stream" else seq_len - 1
    count = len(stream) // step
    if count == 0:
        raise UserError(f"{text.name}: {len(stream)} tokens < one window (--seq-len {seq_len})")
    if text.windows is not None:
        count = min(count, text.windows)
    windows = stream[: count * step].view(count, step)
    if bos == "window":
        windows = torch.cat([torch.full((count, 1), tokenizer.bos_token_id), windows], dim=1)
    return windows, {**info, "tokens": len(stream), "dropped_tokens": len(stream) - count * step}


def _sliding(text, tokenizer, seq_len, stride, unk):
    stream, info = token_stream(text.text(), tokenizer, unk)
    if len(stream) < seq_len:
        raise UserError(f"{text.name}: {len(stream)} tokens < one window (--seq-len {seq_len})")
    windows = stream.unfold(0, seq_len, stride).contiguous()
    dropped = len(stream) - (len(windows) - 1) * stride - seq_len
    return windows, {**info, "tokens": len(stream), "dropped_tokens": dropped}


def _evaluation_from_documents(text, tokenizer, seq_len, bos, unk):
    lengths, info = document_lengths(text, tokenizer, seq_len, unk)
    crops = _draw_crops(lengths, text.windows, seq_len, random.Random(CROPS_SEED), 0, len(lengths))
    windows = _cut_crops(text, tokenizer, crops, seq_len, unk)
    if bos == "window":  # the same crops, moved right by one where they do not start with BOS already
        moved = torch.cat([torch.full((len(windows), 1), tokenizer.bos_token_id), windows[:, :-1]], dim=1)
        windows = torch.where(windows[:, :1] == tokenizer.bos_token_id, windows, moved)
    return windows, {**info, "dropped_tokens": None}


# --- crops of separate documents


def _draw_crops(lengths, count, seq_len, generator, lo, hi):
    """`count` pairs (document in [lo, hi), offset), in the order of draws of the released loader.

    At least one of these documents must be longer than seq_len, so the inner loop ends after about
    (hi - lo) / (number of such documents) draws.
    """
    crops = []
    for _ in range(count):
        index = generator.randint(lo, hi - 1)
        while lengths[index] <= seq_len:
            index = generator.randint(lo, hi - 1)
        crops.append((index, generator.randint(0, lengths[index] - seq_len - 1)))
    return crops


def _cut_crops(text, tokenizer, crops, seq_len, unk="special"):
    """int64 [crops, seq_len]."""
    chosen = {index for index, _ in crops}
    documents = {index: torch.tensor(tokenise(text.rows[index], tokenizer, unk)) for index in chosen}
    return torch.stack([documents[index][offset : offset + seq_len] for index, offset in crops])


# --- the record of a protocol


def describe(info):
    """The protocol of an info dict in one line."""
    split = f" {info['split']}" if info["split"] else ""
    source = f" ({info['source']})" if info["source"] != info["corpus"] else ""
    parts = [f"{info['corpus']}{split}{source}"]
    if info["kind"] == "documents":
        parts.append(f"{info['documents_long_enough']} of {info['documents']} documents are longer than a window")
    elif info.get("sampling") == "sleb-lines":
        lines = f"{info['samples']} random lines (seed {info['seed']})"
        parts.append(f"{lines} joined by blank lines, {info['tokens']} tokens")
    else:
        joined = f"{info['rows']} rows joined by {info['join']!r}" if info["join"] else "text as it is"
        parts.append(f"{joined}, tokenised once into {info['tokens']} tokens")
    if "sampling" in info:
        order = {"random": f"drawn at random with seed {info['seed']}", "first": "the first ones",
                 "sleb-lines": "as many as fit"}[info["sampling"]]
        parts.append(f"windows={info['windows']} seq_len={info['seq_len']}, {order}, {info['part']} part")
    else:
        cut = "crops of documents" if info["kind"] == "documents" else "non-overlapping windows"
        if info.get("stride"):
            cut = f"windows every {info['stride']} tokens, each scoring its last {info['stride']} targets"
        numbers = f"windows={info['windows']} seq_len={info['seq_len']} scored={info['scored_tokens']}"
        dropped = "" if info["dropped_tokens"] is None else f" dropped={info['dropped_tokens']}"
        limited = info["windows"] < info["windows_available"]
        first = f", the first of {info['windows_available']} windows" if limited else ""
        parts.append(f"{cut}: {numbers}{dropped}{first}")
    parts.append(f"BOS {info['bos']}")
    if info["unk_literals"]:
        parts.append(f"unk literals: {info['unk_literals']}, encoded as {info['unk_encoded_as']}")
    return "; ".join(parts)


def _text_info(text):
    return {"corpus": text.name, "split": text.split, "source": text.source, "kind": text.kind,
            "rows": len(text.rows), "join": text.join}


# --- checks


def _check_at_least(name, value, least):
    if value < least:
        raise UserError(f"{name} {value}: must be at least {least}")


def _check_enough(text, fitting, samples, seq_len):
    if fitting < samples:
        raise UserError(f"{text.name}: only {fitting} windows of {seq_len} tokens fit, {samples} asked for; "
                        "lower --calib-samples or --seq-len")
