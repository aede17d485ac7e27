"""The README says what is there: its tables are those of the registries, its files exist."""

import re

import pytest

from tests.readme_tables import README, TABLES, markdown


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_registries(name):
    assert markdown(name) in README.read_text(encoding="utf-8"), "run python -m tests.readme_tables"


def test_scripts_modules_and_pictures_that_it_names_exist():
    text, root = README.read_text(encoding="utf-8"), README.parent
    names = set(re.findall(r"python (\w+\.py)", text)) | set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", text))
    modules = {name.replace(".", "/") + ".py" for name in re.findall(r"python -m ((?:utils|tests)[\w.]+)", text)}
    assert len(names) > 6 and len(modules) > 2
    assert [name for name in names | modules if not (root / name).is_file()] == []
