"""From the name a person typed to a local Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quiesce.models import hub, smollm2
from quiesce.models.errors import ModelError
from quiesce.models.folder import check_folder
from quiesce.models.manifest import fault
from quiesce.models.progress import Steps

DEFAULT = smollm2.NAME


@dataclass(frozen=True)
class ModelEntry:
    """One line of `quiesce model list`; an absent model has 0 bytes and no path."""

    name: str
    source: str
    path: Path | None
    bytes: int
    state: Literal["ready", "absent", "damaged"]


def resolve(model: str = DEFAULT, progress: bool = True) -> Path:
    """Return the folder of `model`: a known name, a local folder's path, or a hub id (org/name[@revision]).

    Fetches what is not here yet, with progress on stderr; takes milliseconds when it is here.
    Raises ModelError, whose text says what is wrong and what to do.
    """
    return locate(model, Steps(progress), thorough=False)


def pull(model: str = DEFAULT, verify: bool = False, progress: bool = True) -> Path:
    """Fetch `model` and return its folder; asks the hub for a newer snapshot of a hub id.

    With `verify` the sha256 of every file of a known model is checked, and a damaged one is prepared again.
    Raises ModelError as `resolve` does.
    """
    return locate(model, Steps(progress), thorough=True, verify=verify)


def locate(model: str, steps: Steps, thorough: bool, verify: bool = False) -> Path:
    """Find out what kind of name `model` is and hand it to the module for that kind."""
    if model == smollm2.NAME:
        return smollm2.ensure(smollm2.cache_root(), steps, verify)
    path = Path(model).expanduser()
    if model and (path.is_dir() or model.startswith(("/", ".", "~"))):
        return check_folder(path.resolve())
    if hub.is_hub_id(model):
        return hub.fetch(model, steps, ask_hub=thorough)
    raise ModelError(
        f"There is no model {model!r}.",
        f"Known names: {smollm2.NAME}. Or give a Hugging Face folder's path, or a hub id (org/name).",
    )


def list_models() -> list[ModelEntry]:
    """Return the known models, on this machine or not, and the hub snapshots in the local hub cache."""
    folder = smollm2.folder_of(smollm2.cache_root())
    if folder.is_dir():
        state: Literal["ready", "damaged"] = "ready" if fault(folder, hashes=False) is None else "damaged"
        entries = [ModelEntry(smollm2.NAME, smollm2.SOURCE, folder, folder_bytes(folder), state)]
    else:
        entries = [ModelEntry(smollm2.NAME, smollm2.SOURCE, None, 0, "absent")]
    for name, snapshot, size in hub.cached():
        try:
            check_folder(snapshot)
        except ModelError:
            entries.append(ModelEntry(name, "Hugging Face hub", snapshot, size, "damaged"))
        else:
            entries.append(ModelEntry(name, "Hugging Face hub", snapshot, size, "ready"))
    return entries


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in `folder`."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
