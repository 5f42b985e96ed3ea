"""Templates and tokenisation from a model folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quiesce.api.chat import TextModel
from quiesce.api.errors import ApiError
from tiny_model import make_tiny_llama

pytestmark = pytest.mark.anyio


def altered(folder: Path, **config: object) -> Path:
    make_tiny_llama(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


async def test_a_chat_is_the_template_of_the_folder(text: TextModel) -> None:
    ids = await text.encode([{"role": "user", "content": "hi"}], 512)
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text._tokenizer.decode(ids, skip_special_tokens=False) == expected
    special = {text._tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>")}
    assert special <= set(ids)


async def test_a_folder_without_a_template_says_what_to_use(tmp_path: Path) -> None:
    model = TextModel(altered(tmp_path, chat_template=None))
    with pytest.raises(ApiError, match="/v1/completions"):
        await model.encode([{"role": "user", "content": "hi"}], 512)


async def test_a_template_that_refuses_is_the_clients_400(tmp_path: Path) -> None:
    model = TextModel(altered(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ApiError, match="roles must alternate") as caught:
        await model.encode([{"role": "user", "content": "hi"}], 512)
    assert caught.value.status == 400


async def test_a_hopelessly_long_prompt_is_refused_without_being_tokenized(text: TextModel) -> None:
    with pytest.raises(ApiError, match="at least") as caught:
        await text.encode("the " * 2_000_000, 512)
    assert caught.value.code == "context_length_exceeded"


async def test_the_bound_on_hopeless_prompts_never_refuses_one_that_fits(text: TextModel) -> None:
    longest = max(text._tokenizer.get_vocab(), key=len)
    assert len(await text.encode(longest * 512, 512)) == 512


def test_the_ids_that_end_an_answer_are_those_of_the_engine(text: TextModel) -> None:
    assert text.eos_ids == (1,)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        TextModel(tmp_path)


def test_the_router_loads_no_torch_and_asks_no_network(model_folder: Path) -> None:
    code = (
        "import sys, os, quiesce.router.app as app\n"
        "from pathlib import Path\n"
        "text = app.TextModel(Path(sys.argv[1]))\n"
        "assert text.has_chat_template and 'torch' not in sys.modules\n"
        "assert os.environ['HF_HUB_OFFLINE'] == '1'\n"
    )
    subprocess.run([sys.executable, "-c", code, str(model_folder)], check=True, timeout=170)
