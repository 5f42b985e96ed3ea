"""What `quiesce serve` refuses before anything starts: the context as the engine will have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quiesce.engine.context import context_of
from quiesce.ops.preflight import check_model
from quiesce.options import EngineOptions, SizeOptions
from quiesce.roles.settings import SettingsError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def folder(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 512} | config))
    return path


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_d3_the_context_that_yarn_stretches_counts(tmp_path: Path, where: str, kind: str) -> None:
    model = folder(tmp_path, **{where: {**YARN, kind: "yarn"}})
    check_model(model, SizeOptions(context_length=1024, max_total_tokens=1024), EngineOptions(), 1)
    with pytest.raises(SettingsError, match="1025 but the model's own limit is 1024"):
        check_model(model, SizeOptions(context_length=1025, max_total_tokens=4096), EngineOptions(), 1)
    with pytest.raises(SettingsError, match="pool holds 512 tokens but the context length is 1024"):
        check_model(model, SizeOptions(max_total_tokens=512), EngineOptions(), 1)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, 512),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 512),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 256}}, 512),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 100}}, 512),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "four"}}, 512),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, 512),
        ({"rope_scaling": {"rope_type": "yarn"}}, 512),
        ({"rope_scaling": [1]}, 512),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": 0}, None),
    ],
)
def test_how_far_a_config_reaches(config: dict[str, Any], tokens: int | None) -> None:
    assert context_of({"max_position_embeddings": 512} | config) == tokens
