"""Verdicts on the papers' items are those of the csv, and stand on the pages."""

import pytest

from experiments import verdicts
from experiments.verdicts import ITEMS, Item

LINES = [
    {"case": 1, "coupling": "iid", "error": 2.0, "error ±": 0.3},
    {"case": 1, "coupling": "orf", "error": 1.0, "error ±": 0.4},
    {"case": 2, "coupling": "iid", "error": 1.0, "error ±": 0.3},
    {"case": 2, "coupling": "orf", "error": 2.5, "error ±": 0.4},
]


@pytest.mark.parametrize("page", ["index", *dict.fromkeys(item.page for item in ITEMS)])
def test_pages_have_the_verdicts_of_the_csv(page):
    text = (verdicts.PAGES / f"{page}.md").read_text()
    assert text.count(verdicts.BEGIN) == text.count(verdicts.END) == 1
    assert text == verdicts.written(page), "run python -m experiments.verdicts"


@pytest.mark.parametrize("page", sorted(verdicts.PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_pages_end_with_their_verdict(page):
    *_, last = page.read_text().split("\n## ")
    assert page.stem == "index" or last.startswith("Verdict\n")


def test_every_item_has_its_reason():
    assert len(ITEMS) == 31
    for item in ITEMS:
        count = verdicts.counts(item)
        assert item.why or (count and count[0] == count[1]), f"{item.paper} {item.name}: no reason"


def test_close_counts_two_joint_errors_and_the_rounding():
    assert verdicts.close(1.0, 0.03, 1.099, 0.04, 0.0)
    assert not verdicts.close(1.0, 0.03, 1.101, 0.04, 0.0)
    assert verdicts.close(1.0, 0.03, 1.1049, 0.04, 0.01)


def test_order_is_in_joint_errors():
    found = list(verdicts.order(LINES, "{case}", "error", "iid", "orf"))
    assert found == pytest.approx([2.0, -3.0])
    found = list(verdicts.order(LINES, "{case}", "error", "iid", "orf", sign=-1))
    assert found == pytest.approx([-2.0, 3.0])
    assert not list(verdicts.order(LINES, "{case}", "error", "iid", "absent"))


@pytest.mark.parametrize(
    ("values", "counts", "word"),
    [
        ([True, True], (2, 2, 0), "agrees"),
        ([0.5, 2.5, -1.9], (3, 3, 1), "not contradicted"),
        ([2.5, 2.5, -1.9], (3, 3, 2), "agrees"),
        ([3.0] * 19 + [-3.0], (19, 20, 19), "agrees but for the reason"),
        ([True, False], (1, 2, 0), "in part, not the reason"),
        ([False, False, True], (1, 3, 0), "does not: the reason"),
    ],
)
def test_verdict(values, counts, word):
    item = Item("P", "Fig. 1", "page", "", lambda: iter(values), "the reason")
    assert verdicts.counts(item) == counts
    assert verdicts.verdict(item) == word
    assert verdicts.verdict(item._replace(agreement=None)) == "not run: the reason"
