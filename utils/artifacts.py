"""Artifacts: what the scripts write and read. JSON or safetensors, versioned, atomic, with provenance.

Every file says its kind ("linearpatch/selection@2"), the recipe that determines its content (all inputs, so that
an equal recipe means an equal result) and its provenance (versions, device, time, memory: informative only).
"""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from utils.errors import UserError, WorkError
from utils.schemas import SCHEMAS, problem

REMEDY = "--force recomputes it, or run again what wrote it"
LEFTOVER_SECONDS = 24 * 3600  # age at which the unfinished folder of a killed run is removed
HEADER = "linearpatch"  # key of the JSON inside a safetensors header


@contextmanager
def atomic_path(path):
    """Yield a temporary path in the folder of `path`; rename it to `path` on success, remove it on failure."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    try:
        yield Path(temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_folder(folder, replace=False):
    """Yield a hidden sibling of `folder` to fill, then rename it: `folder` is complete, or as it was.

    replace: what lies at `folder` goes; without it a folder that another process has made meanwhile stays. Raises
    WorkError when it cannot be written.
    """
    folder = Path(folder)
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    old = temporary.with_name(f"{temporary.name}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in folder.parent.glob(f".{folder.name}.*"):
            if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise WorkError(f"{folder.parent}: cannot be written ({error.strerror})") from None
    try:
        yield temporary
        for file in temporary.iterdir():
            if file.is_file():
                file.chmod(temporary.stat().st_mode & 0o666)  # safetensors writes 0600 whatever the umask
        if replace and folder.exists():
            folder.rename(old)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # it is there when another process was faster
                raise
    except (OSError, SafetensorError) as error:
        raise WorkError(f"{folder}: cannot be written ({error})") from None
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        for path in (temporary, old):
            shutil.rmtree(path, ignore_errors=True)


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path, kind, content):
    """Write `content` (dict) as an artifact of `kind`. Raises WorkError on a non-finite number."""
    text = _dump({"format": _format(kind), **content}, path, indent=1)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path, kind, remedy=REMEDY):
    """Read an artifact of `kind`. Raises UserError naming the file, what is wrong with it and the remedy."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        text = ""
    return _checked(text, path, kind, remedy)


def write_tensors(path, kind, tensors, content):
    """Write tensors ({name: tensor}) with `content` as JSON in the header. Raises WorkError on non-finite values."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise WorkError(f"{path}: {name} has non-finite entries; nothing was written")
    header = _dump({"format": _format(kind), **content}, path)
    with atomic_path(path) as temporary:
        try:
            save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary,
                      {HEADER: header})
        except SafetensorError as error:
            raise WorkError(f"{path}: cannot be written ({error})") from None


def read_header(path, kind):
    """The JSON in the header of a safetensors artifact, without reading its tensors."""
    return read_tensors(path, kind, wanted=False)[0]


def read_tensors(path, kind, wanted=True):
    """(header, {name: tensor}) of a safetensors artifact of `kind`; the tensors only where they are wanted."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()} if wanted else {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({str(error).splitlines()[0]})") from None
    if HEADER not in metadata:
        raise UserError(f"{path}: a safetensors file, but not a {kind} written by this project")
    return _checked(metadata[HEADER], path, kind), tensors


def read_entry(path, place):
    """{name: tensor[place]} of a safetensors artifact that has been checked, read without the rest of it."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_slice(name)[place] for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise WorkError(f"{path}: cannot be read any more ({str(error).splitlines()[0]})") from None


def content_of(path):
    """The JSON of an artifact of any kind, or None for a file of others. Raises UserError on a damaged one."""
    try:
        if Path(path).suffix == ".safetensors":
            with safe_open(str(path), framework="pt") as file:
                content = json.loads((file.metadata() or {}).get(HEADER, "null"))
        else:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (SafetensorError, OSError, ValueError, RecursionError):
        raise UserError(f"{path}: cannot be read; remove it, or run what wrote it again") from None
    fits = isinstance(content, dict) and str(content.get("format", "")).startswith("linearpatch/")
    return content if fits else None


def kind_of(path):
    """'patch', 'stats', 'selection', ... of an artifact; None for any other file and for a damaged one."""
    try:
        content = content_of(path)
    except UserError:
        return None
    return content and content["format"].removeprefix("linearpatch/").partition("@")[0]


def _format(kind):
    return f"linearpatch/{kind}@{SCHEMAS[kind].version}"


def _checked(text, path, kind, remedy=REMEDY):
    """The content of an artifact from its JSON, as it stands there, if it is what its kind holds (utils/schemas.py)."""
    def refuse(constant):
        raise UserError(f"{path}: holds {constant}, which is never a result; {remedy}")

    try:
        content = json.loads(text, parse_constant=refuse,
                             parse_float=lambda number: float(number) if math.isfinite(float(number)) else refuse(number))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not a JSON file; expected a {kind} written by this project") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found == _format(kind):
        if wrong := problem(kind, content):
            raise UserError(f"{path}: {wrong}; {remedy}")
        return content
    if found == f"linearpatch/{kind}@1":
        raise UserError(f"{path}: format {found} was written by an earlier version; {remedy}")
    if isinstance(found, str) and found.startswith(f"linearpatch/{kind}@"):
        raise UserError(f"{path}: format {found} is unknown here; this version reads {_format(kind)}")
    raise UserError(f"{path}: expected a {kind} ({_format(kind)}), found {found or 'no format field'}")


def _dump(content, path, indent=None):
    try:
        return json.dumps(content, allow_nan=False, indent=indent)
    except ValueError:
        bad = next(iter(_non_finite(content)), "?")
        raise WorkError(f"{path}: {bad} is not finite; nothing was written") from None


def _non_finite(value, name=""):
    if isinstance(value, float) and not math.isfinite(value):
        yield name
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _non_finite(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _non_finite(item, f"{name}[{index}]")


def reusable(path, kind, recipe, force):
    """True when the artifact at `path` has exactly this recipe; says so, or says which field differs.

    An unreadable or foreign file at `path` is not overwritten silently: UserError, unless `force`. An artifact of
    another kind is not replaced even then.
    """
    path = Path(path)
    if not path.exists():
        return False
    if force:
        found = kind_of(path)
        if found not in (None, kind):
            raise UserError(f"{path}: holds a {found}, which --force does not replace by a {kind}; choose another name")
        return False
    content = read_header(path, kind) if path.suffix == ".safetensors" else read_json(path, kind)
    differing = recipe_difference(content.get("recipe", {}), recipe)
    if differing:
        print(f"{path}: made with another {differing}; recomputing")
        return False
    print(f"{path}: reused (same recipe; --force recomputes)")
    return True


def recipe_difference(found, wanted, prefix=""):
    """Name of the first field in which two recipes differ, or None. Compared as JSON, so tuples equal lists."""
    found, wanted = json.loads(json.dumps(found)), json.loads(json.dumps(wanted))
    for key in sorted(set(found) | set(wanted)):
        a, b = found.get(key), wanted.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = recipe_difference(a, b, f"{prefix}{key}.")
            if inner:
                return inner
        elif a != b:
            return f"{prefix}{key}"
    return None


class Stopwatch:
    """Wall seconds since its creation, and the peak memory of this process: for provenance."""

    def __init__(self):
        self.start = time.perf_counter()

    def provenance(self, decoder=None, lap=False):
        """dict: versions, git commit, device, wall seconds, peak memory in bytes (process; GPU if there is one).

        lap: the seconds since the last lap, for a call that writes several artifacts.
        """
        now = time.perf_counter()
        seconds, self.start = now - self.start, now if lap else self.start
        result = {
            "versions": versions(),
            "git_commit": git_commit(),
            "hardware": hardware(),
            "wall_seconds": round(seconds, 3),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if decoder is not None:
            result["device"] = str(decoder.device)
            result["dtype"] = str(decoder.dtype).removeprefix("torch.")
        if torch.cuda.is_available():
            result["peak_gpu_memory_bytes"] = sum(
                torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())
            )
        return result


def versions():
    """{package: version} of what results depend on."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "datasets", "lm_eval", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def hardware():
    """Processor, its number of threads, and GPUs, in words."""
    try:
        names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                 if line.startswith("model name")]
    except OSError:
        names = []
    name = names[0] if names else platform.processor() or platform.machine()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join([f"{os.cpu_count()} x {name}", *(gpus or ["no GPU"])])


def git_commit():
    """Commit of this checkout with '+' when files differ from it, or None outside git."""
    folder = Path(__file__).resolve().parent.parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def sha256_json(content):
    """Hex sha256 of what JSON can hold, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_file(path):
    """Hex sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
