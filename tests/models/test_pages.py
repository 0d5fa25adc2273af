"""Each family has a page, which names every config field that is read for it."""

import re
from pathlib import Path

import pytest

from rpfunc.models.families import FAMILIES
from rpfunc.models.families.fields import INERT, Fields

DOCS = Path(__file__).parents[2] / "docs" / "models"
COMMON = {
    "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 9, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_key_value_heads": 1, "n_embd": 8, "n_head": 2, "n_layer": 1,
}  # fmt: skip


class Asked(dict):
    def __init__(self, fields):
        super().__init__(fields)
        self.names = set()

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)


def named(path):
    return set(re.findall(r"`([\w.]+)`", path.read_text()))


def test_every_page_is_of_a_family_and_on_the_list():
    assert {path.stem for path in DOCS.glob("*.md")} == {*FAMILIES, "README"}
    for kind in FAMILIES:
        assert f"| `{kind}` |" in (DOCS / "README.md").read_text()
        assert f"`model_type: {kind}`" in (DOCS / f"{kind}.md").read_text()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_page_names_every_field_that_is_read(kind):
    asked = Asked(COMMON)
    fields = Fields(asked)
    FAMILIES[kind].read(fields)
    assert not fields.problems
    pages = named(DOCS / "README.md") | named(DOCS / f"{kind}.md")
    assert asked.names - INERT <= pages
    assert len(asked.names) > 8
