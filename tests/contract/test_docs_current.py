from pathlib import Path

import pytest

from eagle3 import formats
from eagle3.recipe import Recipe, Section
from eagle3.report import recipe_docs

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "module", "document"),
    [
        ("formats.md", "eagle3.formats", formats.document),
        ("recipe.md", "eagle3.report.recipe_docs", recipe_docs.document),
    ],
)
def test_generated_pages_are_current(name, module, document):
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == document() + "\n", f"docs/{name} is old: run 'python -m {module} > docs/{name}'"


def test_the_recipe_page_has_every_field_of_every_section():
    page = recipe_docs.document()

    def sections(kind: type[Section]) -> set[type[Section]]:
        found = {kind}
        for field in kind.model_fields.values():
            for used in recipe_docs._used_sections(field.annotation):
                found |= sections(used)
        return found

    for section in sections(Recipe):
        part = page.split(f"\n## {section.__name__}\n", 1)[1].split("\n## ", 1)[0]
        for name in section.model_fields:
            assert f"\n| `{name}` |" in part, f"{section.__name__}.{name}"
