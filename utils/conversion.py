"""Other model formats -> an ordinary Hugging Face folder in the cache: .gguf files, and Baichuan 7B without its code.

Both are converted once; a folder gets its name only when it is complete, and later calls return it at once.
"""

import hashlib
import json
import pickle
import re
import shutil
import sys
import tempfile
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from utils.artifacts import atomic_folder
from utils.data.wheels import cache_dir, remembered_sha256
from utils.errors import UserError, WorkError

CONVERSION_VERSION = 1  # raise it when a conversion changes: converted folders are cached under this number
SHARD_BYTES = 2 << 30  # weights held in memory before a file is written

# Splitting rules of byte-level vocabularies by `tokenizer.ggml.pre`, as llama.cpp defines them. transformers leaves
# names that it does not know at GPT-2's rule: right for the second set, wrong for the first, where every digit is a
# word of its own, so that "\n\n1" is "\n\n" + "1" and not "\n" + "\n" + "1".
SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
PLAIN_GPT2 = {"gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2", "exaone4"}

BAICHUAN2_VOCAB, BAICHUAN1_VOCAB = 125696, 64000
# What `_check_ids` compares: words, punctuation, digits, runs of spaces, line breaks, other scripts, bytes.
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    " Robert Boulter is an English actor . He had a guest role in 2000 , and 1,234.56 \n",
    "\n\n = Heading = \n\n Text with  two   spaces, a\ttab and trailing space ",
    "    def f(x):\n        return x ** 2\n",
    "百川智能：海纳百川，有容乃大。2023年",
    "naïve café, Ærøskøbing, Привет, 日本語 😀 \u00a0 \u2019",
)


def gguf_to_folder(path):
    """Folder with the model and tokenizer of a .gguf file, weights de-quantised to float32 (llama.cpp block formats).

    float32, because scale * integer + offset of a block has no exact bfloat16 or float16 value. The folder is keyed
    by the sha256 of the file. Raises UserError when the file is no GGUF file, damaged, of an architecture that
    transformers cannot read, or when transformers would drop a part of it (rotary scaling, tensors).
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{path}: not a GGUF file (it does not start with the letters GGUF)")
    folder = cache_dir() / "models" / f"gguf-{remembered_sha256(path)}-v{CONVERSION_VERSION}"
    if folder.is_dir():
        return folder
    header = _gguf_header(path)
    print(f"converting {path.name} to an ordinary model folder, once", file=sys.stderr)
    model = _gguf_model(path, header)
    tokenizer = _gguf_tokenizer(path, header)
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return folder


def _gguf_header(path):
    """Metadata of a GGUF file but for its arrays (dict), with "tensors": dict of tensor name to number of values."""
    from gguf import GGUFReader
    try:
        reader = GGUFReader(path)
        header = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
        header["tensors"] = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeDecodeError, OSError):
        raise UserError(f"{path}: truncated or damaged GGUF file; fetch it again") from None
    if "general.architecture" not in header:
        raise UserError(f"{path}: GGUF file without general.architecture, so it holds no model")
    return header


@contextmanager
def _alone(path):
    """Yield (folder, name) of a link to `path` without neighbours: transformers prefers a tokenizer.json beside it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.gguf").symlink_to(path.resolve())
        yield folder, "model.gguf"


def _gguf_model(path, header):
    """The float32 model of a GGUF file. dequantize=True also drops the quantisation marker that forbids saving."""
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    architecture = header["general.architecture"]
    try:
        with _alone(path) as (folder, name):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32, output_loading_info=True,
                quantization_config=GgufConfig(dequantize=True))
    except (ValueError, KeyError, NotImplementedError, RuntimeError, AttributeError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: transformers cannot read a GGUF model of architecture {architecture} ({reason})\n"
                        "use the model's ordinary Hugging Face folder") from None
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"{path}: no weights for {', '.join(missing[:3])}{' and more' if missing[3:] else ''}")
    _check_nothing_dropped(path, header, model)
    model.config.architectures = [type(model).__name__]
    return model


def _check_nothing_dropped(path, header, model):
    """Raise UserError when the file says more than the model holds: transformers skips what it has no place for."""
    scaling = [name for name in header["tensors"] if name.startswith("rope_")]
    scaling += [name for name, value in header.items() if name.endswith("rope.scaling.type") and value != "none"]
    rope = getattr(model.config, "rope_parameters", None) or {}
    if scaling and rope.get("rope_type", "default") == "default":
        raise UserError(f"{path}: its rotary scaling ({scaling[0]}) is lost when transformers reads a GGUF file\n"
                        "use the model's ordinary Hugging Face folder")
    sizes = {name: size for name, size in header["tensors"].items() if not name.startswith("rope_")}
    if model.config.tie_word_embeddings:
        sizes.pop("output.weight", None)
    stored, held = sum(sizes.values()), sum(p.numel() for p in model.parameters())
    if stored != held:
        raise UserError(f"{path}: holds {stored} weights, the {type(model).__name__} read from it {held}\n"
                        "use the model's ordinary Hugging Face folder")


def _gguf_tokenizer(path, header):
    """The tokenizer of a GGUF file with two defects of the conversion in transformers 5.24 repaired.

    Digits of the vocabularies in SINGLE_DIGITS stay apart, and a sentencepiece vocabulary that states no prefix space
    gets none. BOS and EOS as the file's add_bos_token and add_eos_token say.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    try:
        with _alone(path) as (folder, name):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: its tokenizer cannot be read ({type(error).__name__}: {error})\n"
                        "use the model's ordinary Hugging Face folder") from None
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = ""
    backend = tokenizer.backend_tokenizer
    kind, rule = header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre")
    if kind == "gpt2" and rule in SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    elif kind == "gpt2" and rule not in PLAIN_GPT2 and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        warnings.warn(f"{path.name}: splitting rule {rule!r} of its tokenizer is unknown, GPT-2's is used; "
                      "token ids may differ from the original's")
    is_metaspace = isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace)
    if kind == "llama" and is_metaspace and header.get("tokenizer.ggml.add_space_prefix") is False:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def is_baichuan(config):
    """Whether config.json (a dict) describes a Baichuan model, which transformers reads only with remote code."""
    names = config.get("architectures") or []
    return config.get("model_type") == "baichuan" or any(str(name).lower().startswith("baichuan") for name in names)


def baichuan_to_folder(folder):
    """Llama folder with the weights and tokenizer of Baichuan 7B or Baichuan 2 7B (arXiv:2309.10305), in the cache.

    The 7B models are Llamas with q, k, v packed into one matrix and, in version 2, logits from a head whose rows have
    unit length. Weights keep their dtype; the rows are normalised in float32. No code from `folder` is run. The
    result is keyed by names, sizes and times of the source files.

    Raises UserError when the model has ALiBi instead of rotary positions (13B), is quantised, or when a file, field
    or tensor is missing or of another shape; WorkError when the converted tokenizer disagrees with the original.
    """
    folder = Path(folder)
    config = _baichuan_config(folder)
    shards = _weight_files(folder)
    target = cache_dir() / "models" / f"baichuan-{_source_key(folder, shards)}-v{CONVERSION_VERSION}"
    if target.is_dir():
        return target
    print(f"converting {folder} to an ordinary Llama folder, once", file=sys.stderr)
    llama = _llama_config(config, folder)
    normalise = _has_norm_head(config, folder)
    tokenizer = _sentencepiece_tokenizer(folder)
    with atomic_folder(target) as temporary:
        _convert_weights(folder, shards, llama, normalise, temporary)
        llama.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if (folder / "generation_config.json").is_file():
            shutil.copyfile(folder / "generation_config.json", temporary / "generation_config.json")
    return target


def _read_json(path, required=True):
    if not required and not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError:
        raise UserError(f"{path}: not valid JSON") from None


def _baichuan_config(folder):
    """config.json of a Baichuan folder as dict. Raises UserError for models that are no Llama inside.

    Every 13B model has hidden size 5120, 40 heads and ALiBi, and its config class knows no max_position_embeddings,
    which the rotary 7B models all state.
    """
    path = folder / "config.json"
    config = _read_json(path)
    if config.get("hidden_size") == 5120 or config.get("num_attention_heads") == 40 \
            or "max_position_embeddings" not in config:
        raise UserError(f"{path}: a Baichuan with ALiBi positions (13B: hidden size 5120, no max_position_embeddings) "
                        "cannot be loaded; only the 7B models can")
    if config.get("quantization_config"):
        raise UserError(f"{path}: a quantised Baichuan cannot be converted; use the model in half precision")
    return config


def _llama_config(config, folder):
    """LlamaConfig for a Baichuan 7B config: rotary positions of base 10,000, no biases, untied head."""
    from transformers import LlamaConfig
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "rms_norm_eps", "hidden_act")
    for field in fields:
        if field not in config:
            raise UserError(f"{folder / 'config.json'}: field {field} is missing")
    ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return LlamaConfig(
        **{field: config[field] for field in fields}, **ids, num_key_value_heads=config["num_attention_heads"],
        max_position_embeddings=config.get("model_max_length", config["max_position_embeddings"]),
        rope_theta=10000.0, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
        dtype=config.get("torch_dtype", config.get("dtype")))


def _has_norm_head(config, folder):
    """Whether the head's rows are normalised: True for Baichuan 2, False for Baichuan 1.

    The model's own code tells when it lies in the folder (it is read as text, not run), else the vocabulary size.
    """
    code = folder / "modeling_baichuan.py"
    if code.is_file():
        return "NormHead" in code.read_text(encoding="utf-8", errors="replace")
    if "z_loss_weight" in config or config["vocab_size"] == BAICHUAN2_VOCAB:
        return True
    if config["vocab_size"] == BAICHUAN1_VOCAB:
        return False
    raise UserError(f"{folder}: Baichuan 1 or 2? With vocab_size {config['vocab_size']} its modeling_baichuan.py is "
                    "needed to tell;\nit is read for the word NormHead, not run")


def _weight_files(folder):
    """Names of the weight files, safetensors before PyTorch files. Raises UserError when one is missing."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if index.is_file():
            names = sorted(set(_read_json(index).get("weight_map", {}).values()))
            for name in names:
                if not (folder / name).is_file():
                    raise UserError(f"{folder / name}: no such file, but {index.name} lists it")
            if names:
                return names
        elif (folder / single).is_file():
            return [single]
    raise UserError(f"{folder}: no weights (model.safetensors or pytorch_model.bin, or an index of several)")


def _source_key(folder, shards):
    """Hex digest over name, size and time of every file that the conversion reads."""
    names = [*shards, "config.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json",
             "modeling_baichuan.py"]
    digest = hashlib.sha256(str(folder.resolve()).encode())
    for name in names:
        if (folder / name).is_file():
            stat = (folder / name).stat()
            digest.update(f"\n{name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


def _convert_weights(folder, shards, llama, normalise, target):
    """Write the tensors of `shards` under Llama's names into `target`, at most SHARD_BYTES in memory at one time.

    Raises UserError naming the first tensor that is missing, unexpected or of another shape.
    """
    from transformers import LlamaForCausalLM
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(llama).state_dict().items()}
    files, written, pending = [], set(), {}

    def flush():
        files.append({name: tensor.nbytes for name, tensor in pending.items()})
        save_file(pending, target / f"part-{len(files)}", metadata={"format": "pt"})
        pending.clear()

    for shard in shards:
        for source_name, source in _tensors(folder / shard):
            for name, tensor in _as_llama(source_name, source, llama.hidden_size, normalise):
                if expected.get(name) != tuple(tensor.shape):
                    raise UserError(f"{folder / shard}: {source_name} {list(source.shape)} does not fit config.json "
                                    f"({name} {list(expected[name]) if name in expected else 'is not expected'})")
                pending[name] = tensor.clone(memory_format=torch.contiguous_format)
                written.add(name)
            if sum(tensor.nbytes for tensor in pending.values()) >= SHARD_BYTES:
                flush()
    missing = sorted(set(expected) - written)
    if missing:
        raise UserError(f"{folder}: no weights for {', '.join(missing[:3])}{' and more' if missing[3:] else ''}")
    if pending:
        flush()
    _name_shards(target, files)


def _as_llama(name, tensor, hidden_size, normalise):
    """Yield (Llama's name, tensor) for one Baichuan tensor: W_pack [3C, C] gives three, a rotary buffer none."""
    if name.endswith("self_attn.W_pack.weight"):
        if tensor.shape[0] != 3 * hidden_size:
            yield name, tensor  # an unexpected name: refused by the caller with its shape
            return
        for projection, rows in zip(("q_proj", "k_proj", "v_proj"), tensor.split(hidden_size)):
            yield name.replace("W_pack", projection), rows
    elif name == "lm_head.weight" and normalise:
        yield name, torch.cat([F.normalize(rows.float()).to(tensor.dtype) for rows in tensor.split(8192)])
    elif not name.endswith("rotary_emb.inv_freq"):
        yield name, tensor


def _tensors(path):
    """Yield (name, tensor) of a safetensors or PyTorch file, mapped from disk. Raises UserError when damaged."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys())
        else:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            yield from state.items()
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: not a readable weight file ({reason})") from None


def _name_shards(target, files):
    """Rename part-1.. to the names that transformers expects; `files`: per part, tensor name to bytes."""
    if len(files) == 1:
        (target / "part-1").rename(target / "model.safetensors")
        return
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for number, name in enumerate(names, 1):
        (target / f"part-{number}").rename(target / name)
    places = {tensor: name for name, tensors in zip(names, files) for tensor in tensors}
    index = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _sentencepiece_tokenizer(folder):
    """PreTrainedTokenizerFast with the ids of `folder`/tokenizer.model, a sentencepiece BPE model.

    It follows what the model file states (prefix space, whitespace, user-defined symbols, byte fallback) instead of
    Llama's habits; bos, eos, unk and pad in a text become their ids, as Hugging Face tokenizers do. BOS and EOS are
    added only where tokenizer_config.json asks for it (the released models do not).
    """
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto
    from transformers import PreTrainedTokenizerFast
    path = folder / "tokenizer.model"
    proto = ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
        if proto.trainer_spec.model_type != proto.trainer_spec.BPE or proto.trainer_spec.treat_whitespace_as_suffix:
            raise UserError(f"{path}: not a sentencepiece BPE model with spaces before words")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except DecodeError:
        raise UserError(f"{path}: not a sentencepiece model") from None
    settings = _read_json(folder / "tokenizer_config.json", required=False)
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    special = {name: _content(settings.get(name) or default) for name, default in defaults.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_sentencepiece_backend(proto), **special,
        add_bos_token=bool(settings.get("add_bos_token")), add_eos_token=bool(settings.get("add_eos_token")),
        model_max_length=settings.get("model_max_length"), chat_template=settings.get("chat_template"),
        clean_up_tokenization_spaces=False)
    _check_ids(path, tokenizer)
    return tokenizer


def _content(token):
    return token["content"] if isinstance(token, dict) else token


def _sentencepiece_backend(proto):
    """tokenizers.Tokenizer that encodes like the sentencepiece BPE model `proto`.

    sentencepiece normalises, keeps user-defined symbols whole, and merges the pair whose joined piece has the highest
    score. So: one merge rule for every split of a normal piece into two, best score first. (The converter of
    transformers 5.24, SpmConverter.build_tokenizer_from_spm_proto, takes a literal <0x41> between two symbols for its
    byte.)
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from sentencepiece.sentencepiece_model_pb2 import ModelProto
    kinds, spec = ModelProto.SentencePiece, proto.normalizer_spec
    vocab = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == kinds.NORMAL}
    merges = [(-score, -cut, piece[:cut], piece[cut:]) for piece, score in scores.items()
              for cut in range(1, len(piece)) if piece[:cut] in scores and piece[cut:] in scores]
    unknown = next(piece.piece for piece in proto.pieces if piece.type == kinds.UNKNOWN)
    backend = Tokenizer(models.BPE(
        vocab=vocab, merges=[merge[2:] for merge in sorted(merges)], unk_token=unknown, fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback))
    symbols = [piece.piece for piece in proto.pieces if piece.type == kinds.USER_DEFINED]
    steps = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:  # not before a symbol alone: `tokenizers` normalises the symbols themselves, too
        alone = "|".join(map(re.escape, symbols))
        steps += [normalizers.Replace(Regex(rf"\A(?!(?:{alone})?\z)"), "▁")]
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(content=" ", left=1)] if spec.add_dummy_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_tokens([AddedToken(symbol, normalized=True, special=False) for symbol in symbols])
    return backend


def _check_ids(path, tokenizer):
    """Raise WorkError unless `tokenizer` gives the ids of sentencepiece itself for every probe text."""
    from sentencepiece import SentencePieceProcessor
    original = SentencePieceProcessor(model_file=str(path))
    for text in PROBES:
        if tokenizer.encode(text, add_special_tokens=False) != original.encode(text):
            raise WorkError(f"{path}: the converted tokenizer disagrees with sentencepiece on {text!r}")
