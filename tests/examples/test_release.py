"""What a release is built from: addresses in metadata and README, and workflows whose actions cannot change."""

import re
from pathlib import Path

import pytest
from test_readme import README, ROOT

from docs.release import with_absolute_links, with_addresses

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ADDRESS = "https://github.com/OWNER/NAME"


def test_links_of_the_readme_are_absolute() -> None:
    text = with_absolute_links(README.read_text(), ADDRESS, "v0.1.0")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 15 and all(target.startswith("https://") for target in targets)
    assert f"{ADDRESS}/raw/v0.1.0/docs/images/steps_side_by_side.svg" in targets
    assert f"{ADDRESS}/blob/v0.1.0/docs/configuration.md" in targets


def test_addresses_are_added_to_the_metadata() -> None:
    before = (ROOT / "pyproject.toml").read_text()
    after = with_addresses(before, ADDRESS)
    assert f'[project.urls]\nRepository = "{ADDRESS}"\n' in after
    assert [line for line in after.splitlines() if ADDRESS not in line] == before.splitlines()


def test_versions_and_authors_are_those_of_the_citation() -> None:
    citation, project = (ROOT / "CITATION.cff").read_text(), (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)
    assert f'version = "{version}"\n' in project
    (author,) = re.findall(r"^  - name: (.+)$", citation, re.MULTILINE)
    assert f'authors = [{{ name = "{author}" }}]\n' in project


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_hash(workflow: Path) -> None:
    uses = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert uses
    for action, comment in uses:
        assert action.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert action.startswith("./") or re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_the_release_runs_ci_before_it_publishes() -> None:
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    publish = release.partition("\n  publish:")[2]
    assert "needs: [ci, check]" in publish and "id-token: write" in publish
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
