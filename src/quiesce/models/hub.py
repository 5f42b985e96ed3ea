"""Models from the Hugging Face hub, in the hub's own cache; never its pickles."""

from __future__ import annotations

import re
from pathlib import Path

from quiesce.models.errors import ModelError
from quiesce.models.folder import check_folder
from quiesce.models.progress import Steps

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
ALLOWED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
IGNORED = ["*/*", "consolidated*.safetensors"]  # other runtimes' copies of the same weights


def is_hub_id(model: str) -> bool:
    """Say whether `model` has the form org/name or org/name@revision."""
    return HUB_ID.fullmatch(model) is not None


def fetch(model: str, steps: Steps, ask_hub: bool) -> Path:
    """Return the local snapshot of `model` (org/name or org/name@revision).

    A complete snapshot in the cache is used as it is, unless `ask_hub`. Then, or when it is not complete,
    the hub is asked. Raises ModelError when the hub cannot be reached or has no such model.
    """
    match = HUB_ID.fullmatch(model)
    if match is None:
        raise ModelError(f"{model!r} is not a hub id.", "Hub ids look like org/name or org/name@revision.")
    if not ask_hub:
        try:
            return check_folder(snapshot(match["repo"], match["revision"], local=True))
        except ModelError:
            steps.say(f"{model} is not complete in the local hub cache: fetching it from the hub")
    return check_folder(snapshot(match["repo"], match["revision"], local=False))


def snapshot(repo: str, revision: str | None, local: bool) -> Path:
    """Call huggingface_hub and turn each of its errors into one for people."""
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415 - 0.3 s that other models need not pay

    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=ALLOWED, ignore_patterns=IGNORED, local_files_only=local
        )
    except errors.GatedRepoError as error:
        raise ModelError(f"{repo} is gated on the hub.", "Accept its licence there and set HF_TOKEN.") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub has no model {repo} that you may read.", "Check its name; a private one needs HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision!r} on the hub.", "Check its name.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelError(
            f"{repo} is not in the local cache, and the hub cannot be reached ({first_line(error)}).",
            "Go online once (without HF_HUB_OFFLINE), or pass the path of a model folder.",
        ) from error
    except Exception as error:  # its network libraries' own errors, which change from version to version
        raise ModelError(f"The hub did not give {repo}: {first_line(error)}.", "Try again later.") from error
    return Path(folder)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ").rstrip(".")


def cached() -> list[tuple[str, Path, int]]:
    """Return (hub id, snapshot folder, bytes on disk) of each model in the local hub cache."""
    from huggingface_hub import scan_cache_dir  # noqa: PLC0415 - as above
    from huggingface_hub.errors import CacheNotFound  # noqa: PLC0415

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repo in repos:
        if repo.repo_type == "model" and repo.revisions:
            latest = max(repo.revisions, key=lambda revision: revision.last_modified)
            found.append((repo.repo_id, latest.snapshot_path, latest.size_on_disk))
    return sorted(found)
