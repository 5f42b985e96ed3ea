"""What a grammar may cost before it is compiled."""

from __future__ import annotations

import pytest

from quiesce.api import structure
from quiesce.api.errors import ApiError


@pytest.mark.parametrize(
    "text",
    [
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(10_000)),
        "root ::= " + " | ".join(['"abc"'] * 12_000),
    ],
    ids=["rules", "bytes"],
)
def test_gbnf_whose_translation_would_take_long_is_refused_without_it(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure, "gbnf_to_lark", lambda _: pytest.fail("it was translated"))
    with pytest.raises(ApiError, match="GBNF may have 65536 bytes and 256 rules") as caught:
        structure.of_ebnf(text, "guided_grammar")
    assert caught.value.status == 400 and caught.value.param == "guided_grammar"


def test_gbnf_with_as_many_rules_as_it_may_have_is_taken() -> None:
    count = structure.MAX_GBNF_RULES - 2
    rules = ["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(count)), f'r{count} ::= "a"']
    assert structure.of_ebnf("\n".join(rules), "ebnf")
