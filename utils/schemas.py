"""What each kind of artifact holds, one schema a kind: types, ranges, and which numbers must agree.

Checked whenever an artifact is read (utils/artifacts.py). Fields that a schema does not name are free, numbers are
finite, and nothing is converted: an integer is no string, a flag is no integer.
"""

import math
from statistics import fmean
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Interval = Annotated[list[Positive], Field(min_length=2, max_length=2)]
Run = Annotated[list[Count], Field(min_length=2, max_length=2)]
Items = Annotated[str, Field(pattern="^[01]+$")]  # right or wrong, one character an item
Letters = Annotated[dict[Literal["A", "B", "C", "D"], Count], Field(min_length=4)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
ROUNDING = 1e-9  # relative: what two ways to compute one number may differ by


class Schema(BaseModel):
    """An object of JSON; the classes below are built when they are first needed."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, defer_build=True)
    version: ClassVar[int] = 2


class Identity(Schema):
    """The model that an artifact was made for."""

    label: str
    sha256: str
    num_layers: Size
    hidden_size: Size


class About(Schema):
    """What a variant is, so that nobody has to read it out of a name."""

    metric: str | None
    n: Count
    repair: str
    stage: Literal["dense", "pruned", "calibrated", "distilled", "merged", "narrowed"]


class Removal(Schema):
    model: Identity
    about: About
    removed: list[Count]
    kept: list[Count]
    runs: list[Run]
    recipe: dict


class Selection(Removal):
    order: list[Count]
    scores: list[dict]


class Patch(Removal):
    hadamard_order: Literal["released", "paper"] = "released"
    training: dict = {}
    sigma_d: list[dict] = []
    auto: list[dict] = []


class Folding(Schema):
    """How a repair went into the weights, and the folded model against the patched one on held-out windows."""

    kind: str
    ppl_patched: Positive
    ppl_folded: Positive
    ratio: Positive
    kl: float
    equal_first: Share
    spread: Annotated[float, Field(ge=0)]
    tolerance: Annotated[float, Field(ge=0)]


class Folder(Schema):
    """linearpatch.json of a saved model folder."""

    about: About
    removed: list[Count]
    base_model: Identity = None
    folding: Folding = None


class Stats(Schema):
    model: Identity
    recipe: dict


class Progress(Schema):
    """Finished rounds of a search."""

    recipe: dict
    rounds: list[dict]


class Checkpoint(Schema):
    """State of a training; best: the lowest validation loss so far."""

    recipe: dict
    step: Count
    best: float | None
    log: list[dict]


class Teacher(Schema):
    """A shard of the teacher's outputs; windows: the first and the one behind the last."""

    recipe: dict
    windows: Run
    sha256: Sha256


class Row(Schema):
    """A row of a result file: one variant on one corpus, task or subject. sha256: 'VARIANT:RECIPE', both shortened."""

    variant: str
    about: About
    removed: list[Count]
    dtype: str
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{16}:[0-9a-f]{16}$")]


class PplRow(Row):
    dataset: str
    split: str | None
    ppl: Positive
    nll_mean: float
    nll_stderr: float | None
    ppl_ci95: Interval | None
    ratio_to_reference: Positive
    ratio_ci95: Interval | None
    reference: str
    windows: Size
    seq_len: Size
    scored_tokens: Size
    dropped_tokens: Count | None  # None: random crops of documents
    bos: str
    corpus: dict
    window_nll: list[float]

    @model_validator(mode="after")
    def agrees(self):
        if len(self.window_nll) != self.windows:
            raise ValueError(f"{len(self.window_nll)} losses of {self.windows} windows")
        mean = fmean(self.window_nll)
        if not (_close(math.log(self.ppl), mean) and _close(self.nll_mean, mean)):
            raise ValueError(f"ppl {self.ppl:.6g} or nll_mean {self.nll_mean:.6g} is not of its mean loss {mean:.6g}")
        return self


class QaRow(Row):
    """acc and acc_norm where a task has them, each with standard error and items; value: the one that is printed."""

    task: str
    n: Size
    metric: Literal["acc", "acc_norm"]
    value: Share
    acc: Share = None
    acc_stderr: float | None = None
    acc_items: Items = None
    acc_norm: Share = None
    acc_norm_stderr: float | None = None
    acc_norm_items: Items = None
    predictions: dict[str, Count] = {}
    constant: bool = False
    prompt_sha1: str

    @model_validator(mode="after")
    def agrees(self):
        if self.value != getattr(self, self.metric):
            raise ValueError(f"value {self.value} is not its {self.metric}")
        for metric in ("acc", "acc_norm"):
            own = [name for name in (metric, f"{metric}_stderr", f"{metric}_items") if name in self.model_fields_set]
            if len(own) not in (0, 3):
                raise ValueError(f"{metric} lacks its value, standard error or items")
            if own:
                _items_agree(getattr(self, metric), getattr(self, f"{metric}_items"), self.n, metric)
        if sum(self.predictions.values()) not in (0, self.n) or self.constant and not self.predictions:
            raise ValueError(f"predictions of {sum(self.predictions.values())} items of {self.n}")
        return self


class MmluRow(Row):
    subject: str
    category: Literal["stem", "humanities", "social_sciences", "other"]
    n: Size
    accuracy: Share
    stderr: float | None
    items: Items
    predicted: Letters

    @model_validator(mode="after")
    def agrees(self):
        _items_agree(self.accuracy, self.items, self.n, "accuracy")
        if (chosen := sum(self.predicted.values())) != self.n:
            raise ValueError(f"predicted letters of {chosen} questions of {self.n}")
        return self


def _close(value, wanted):
    return math.isclose(value, wanted, rel_tol=ROUNDING, abs_tol=ROUNDING)


def _items_agree(value, items, n, name):
    if len(items) != n:
        raise ValueError(f"{name} has {len(items)} items of {n}")
    if not _close(value, items.count("1") / n):
        raise ValueError(f"{name} {value} is not the share of its right items, {items.count('1')} of {n}")


class Ppl(Schema):
    model: Identity
    results: list[PplRow]


class Qa(Schema):
    model: Identity
    results: list[QaRow]
    summary: list[dict]
    paired: list[dict]
    bos: str
    harness: str


class Mmlu(Schema):
    model: Identity
    results: list[MmluRow]
    summary: list[dict]
    answer_tokens: dict


class OverheadPart(Schema):
    """A table of measurements, as it is printed."""

    title: str
    head: list[str]
    rows: list[list]
    text: str


class Overhead(Schema):
    model: Identity
    recipe: dict
    results: list[OverheadPart]


class Figure(Schema):
    """What a picture was drawn from: the numbers lie in a table beside it."""

    figure: str
    recipe: dict
    csv_sha256: Sha256


SCHEMAS = {"folder": Folder, "selection": Selection, "patch": Patch, "stats": Stats, "progress": Progress,
           "checkpoint": Checkpoint,
           "teacher": Teacher, "ppl": Ppl, "qa": Qa, "mmlu": Mmlu, "overhead": Overhead, "figure": Figure}


def problem(kind, content):
    """What is wrong with the JSON of an artifact of `kind`: its first damaged field in words, or None."""
    try:
        SCHEMAS[kind].model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place, row = first["loc"], ""
        if place[:1] == ("results",) and len(place) > 1:
            place, row = place[2:], f"row {place[1] + 1}: "
        field = f"field '{'.'.join(map(str, place))}' " if place else ""
        if first["type"] == "missing":
            return f"{row}{field}is missing"
        reason = first["msg"].removeprefix("Value error, ")
        found = f", found {first['input']!r:.40}" if field else ""
        return f"{row}{field}is damaged ({reason[0].lower()}{reason[1:]}{found})"
