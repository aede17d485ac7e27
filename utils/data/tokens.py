"""Tokens: text -> ids, in one call for a whole stream, with the tokenizer's own BOS policy; kept on disk."""

import hashlib
import json
import sys

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from utils.artifacts import atomic_path
from utils.data.wheels import cache_dir
from utils.errors import UserError

UNK = "<unk>"
CACHE_VERSION = 1  # raise it when the same key may give other tokens


def token_stream(text, tokenizer, unk="special"):
    """Tokenise `text` (str) in one call: (ids int64 [tokens], info dict).

    The tokenizer's own BOS policy holds, but BOS never comes twice, and an EOS that its template appends is removed.
    unk="text" reads special tokens that are written in the text, like "<unk>" in the Penn Treebank, as plain
    characters. Kept on disk under the hashes of text and tokenizer. Raises UserError for another value of `unk`.
    """
    check_choice("--ptb-unk", unk, ("special", "text"))
    hashes = {"text_sha256": _text_sha256([text]), "tokenizer_sha256": tokenizer_sha256(tokenizer)}
    ids = _cached(["stream", *hashes.values(), unk], lambda: _int64(tokenise(text, tokenizer, unk)))
    return ids, {"tokens": len(ids), **_special_info([text], ids, tokenizer, unk), **hashes}


def check_choice(name, value, choices):
    """Raise UserError unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f"{name} {value}: use {' or '.join(choices)}")


def _int64(values):
    return torch.tensor(values, dtype=torch.int64)


def tokenizer_sha256(tokenizer):
    """Hex sha256 of what determines the ids: the serialised backend, or class, vocabulary and special tokens."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["truncation"] = state["padding"] = None  # left there by earlier calls
    else:
        state = [type(tokenizer).__name__, tokenizer.get_vocab(), str(tokenizer.special_tokens_map)]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def tokenise(text, tokenizer, unk="special"):
    """list of ids of a str, or list of such lists of a list of str; one BOS at most, no EOS by the template."""
    plain = {"split_special_tokens": True} if unk == "text" else {}
    ids = tokenizer(text, return_attention_mask=False, verbose=False, **plain)["input_ids"]
    if plain and tokenizer.is_fast:  # the call leaves its setting in the backend
        tokenizer.backend_tokenizer.encode_special_tokens = tokenizer.split_special_tokens
    prefix, suffix = _template(tokenizer)
    return _trim(ids, prefix, suffix) if isinstance(text, str) else [_trim(one, prefix, suffix) for one in ids]


def _template(tokenizer):
    """Ids (list, list) that the tokenizer puts before and after every text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _trim(ids, prefix, suffix):
    if suffix and ids[-len(suffix) :] == suffix:
        ids = ids[: -len(suffix)]
    while prefix and ids[len(prefix) : 2 * len(prefix)] == prefix:  # by the template, and once more in the text
        ids = ids[len(prefix) :]
    return ids


def leading_bos(stream, tokenizer):
    """Number of BOS ids at the start of the stream: 0, 1, or the length of the tokenizer's longer prefix."""
    prefix, _ = _template(tokenizer)
    return len(prefix) or int(stream[:1].tolist() == [tokenizer.bos_token_id])


def _special_info(rows, ids, tokenizer, unk):
    """What became of BOS, EOS and "<unk>"; `ids` is None for documents."""
    prefix, suffix = _template(tokenizer)
    unit = "document" if ids is None else "stream"
    bos = f"{unit}: tokenizer adds none"
    if prefix:
        bos = f"{unit}: once, id {', '.join(map(str, prefix))}"
    elif ids is not None and ids[:1].tolist() == [tokenizer.bos_token_id]:
        bos = f"{unit}: once, id {tokenizer.bos_token_id}, written in the text"
    literals = sum(row.count(UNK) for row in rows)
    alone = tokenizer(UNK, add_special_tokens=False)["input_ids"]
    special = unk == "special" and alone == [tokenizer.unk_token_id]
    return {
        "bos": bos,
        "eos": f"id {', '.join(map(str, suffix))} of the tokenizer's template removed" if suffix else "none added",
        "unk_literals": literals,
        "unk_encoded_as": (f"special id {alone[0]}" if special else "text") if literals else None,
    }


def document_lengths(text, tokenizer, seq_len, unk="special"):
    """(token count of each document, info). UserError with the counts when none is longer than seq_len."""
    check_choice("--ptb-unk", unk, ("special", "text"))
    hashes = {"text_sha256": _text_sha256(text.rows), "tokenizer_sha256": tokenizer_sha256(tokenizer)}
    lengths = _cached(["lengths", *hashes.values(), unk], lambda: _count_tokens(text.rows, tokenizer, unk)).tolist()
    long_enough = sum(length > seq_len for length in lengths)
    if long_enough == 0:
        raise UserError(f"{text.name}: 0 of {len(lengths)} documents have >= {seq_len + 1} tokens, the longest has "
                        f"{max(lengths)}; lower --seq-len or give longer documents")
    counts = {"tokens": sum(lengths), "documents": len(lengths), "documents_long_enough": long_enough}
    return lengths, {**counts, **_special_info(text.rows, None, tokenizer, unk), **hashes}


def _count_tokens(rows, tokenizer, unk):
    starts = tqdm(range(0, len(rows), 256), desc="counting tokens", unit=" batches", disable=None)
    batches = (tokenise(rows[start : start + 256], tokenizer, unk) for start in starts)
    return _int64([len(ids) for batch in batches for ids in batch])


# --- hashes and cache


def _text_sha256(texts):
    """Hash of the strings with a zero byte between them; of one string, the sha256 of its UTF-8 bytes."""
    digest = hashlib.sha256()
    for index, text in enumerate(texts):
        digest.update((b"\0" if index else b"") + text.encode("utf-8"))
    return digest.hexdigest()


def ids_sha256(ids):
    """Hash of token ids as little-endian int64, row by row."""
    return hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()


def _cached(key, compute):
    """The int64 tensor [n] that `compute` gives, kept in the cache folder under `key` (list of str).

    A damaged file is made anew; where nothing can be written, the tensor is computed each time.
    """
    name = hashlib.sha256(json.dumps([CACHE_VERSION, *key]).encode()).hexdigest()
    try:
        path = cache_dir() / "tokens" / f"{name}.safetensors"
    except UserError:
        return compute()
    values = _read_cached(path) if path.exists() else None
    if values is None:
        values = compute()
        try:
            with atomic_path(path) as temporary:
                save_file({"values": values}, temporary, {"sha256": ids_sha256(values)})
        except (OSError, SafetensorError):
            pass  # a full or read-only cache folder costs time, not correctness
    return values


def _read_cached(path):
    """The tensor in a cache file, or None, with a message, when the file is damaged."""
    try:
        with safe_open(str(path), framework="pt") as file:
            values, expected = file.get_tensor("values"), file.metadata()["sha256"]
    except (SafetensorError, OSError, TypeError, KeyError):
        values = None
    if values is None or ids_sha256(values) != expected:
        print(f"{path}: damaged cache file, made anew", file=sys.stderr)
        return None
    return values
