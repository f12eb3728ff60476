"""Verdicts on the papers' items are those of the csv, and stand on the pages."""

import pytest

from experiments import verdicts
from experiments.verdicts import ITEMS, Counts, Item, Printed

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


def test_a_bound_counts_two_errors():
    assert verdicts.no_better(-0.03, 0.0099, 0.05)
    assert not verdicts.no_better(-0.03, 0.0101, 0.05)


def test_printed_values_are_compared_in_their_order_and_reversed():
    ours, theirs = [(1.0, 0.03), (2.0, 0.04)], [(1.09, 0.04), (1.0, 0.0)]
    first, second = verdicts.printed("case", ours, theirs, 0.0)
    assert first == Printed("case", pytest.approx(-1.8), True, False)
    assert second == Printed("case", pytest.approx(25.0), False, True)


def test_cases_that_deviate_are_named_by_their_signs():
    values = [
        ("a", 3.0, False),
        ("a", 1.0, True),
        ("b", 3.0, False),
        ("b", -3.0, False),
        ("c", 0.1, True),
    ]
    found = verdicts.deviating([Printed(*value, False) for value in values])
    assert found == "a (all couplings deviate in one direction) and b (in both directions)"


def test_order_is_in_joint_errors():
    found = list(verdicts.order(LINES, "{case}", "error", "iid", "orf"))
    assert found == pytest.approx([2.0, -3.0])
    found = list(verdicts.order(LINES, "{case}", "error", "iid", "orf", sign=-1))
    assert found == pytest.approx([-2.0, 3.0])
    assert not list(verdicts.order(LINES, "{case}", "error", "iid", "absent"))


def values(*agreements: bool, exchanged: int = 0) -> list[Printed]:
    return [Printed("case", 0.0, x, i < exchanged) for i, x in enumerate(agreements)]


@pytest.mark.parametrize(
    ("comparisons", "counts", "word"),
    [
        ([True, True], (2, 2, 0, None), "agrees"),
        ([True, False], (1, 2, 0, None), "in part, not the reason"),
        ([False, False, True], (1, 3, 0, None), "does not: the reason"),
        ([0.5, 2.5, -1.9], (3, 3, 1, 2), "not contradicted"),
        ([2.5, 2.5, -1.9], (3, 3, 2, 1), "agrees"),
        ([3.0] * 19 + [-3.0], (19, 20, 19, 1), "agrees but for the reason"),
        (values(True, True, exchanged=0), (2, 2, 0, 0), "agrees"),
        (values(True, True, exchanged=1), (2, 2, 0, 1), "agrees; hardly tells couplings apart"),
        (values(True, False), (1, 2, 0, 0), "in part, not the reason"),
        (values(False, False, True), (1, 3, 0, 0), "does not: the reason"),
    ],
)
def test_verdict(comparisons, counts, word):
    item = Item("P", "Fig. 1", "page", "", lambda: iter(comparisons), "the reason")
    assert verdicts.counts(item) == Counts(*counts)
    assert verdicts.verdict(item) == word
    assert verdicts.verdict(item._replace(agreement=None)) == "not run: the reason"


def test_no_rule_is_made_for_a_result():
    """Statements are of all rows of their csv, and limits are the papers'."""
    by_name = {(item.paper, item.name): item for item in ITEMS}
    assert verdicts.counts(by_name["Quad", "Fig. 3"]).number == 11
    assert verdicts.counts(by_name["VRC", "Fig. 6"])[:2] == (1, 2)


def test_kernel_errors_tell_couplings_apart_and_the_others_do_not():
    """The counts of docs/results/vrc.md, that its sentences repeat."""
    table = [line.strip("| ").split(" | ") for line in verdicts.values_table().splitlines()[2:]]
    counts = {name: [int(x) for x in numbers] for name, *numbers in table}
    kernel = counts["kernel error (Table 1, and RMSE of Table 4)"]
    others = [sum(x) for x in zip(*(counts[k] for k in ("KL", "RMSE", "NLL")), strict=True)]
    text = " ".join((verdicts.PAGES / "vrc.md").read_text().split())
    assert f"{kernel[1]} of {kernel[0]} values of Tables 1 and 4" in text
    assert f"{others[1]} of {others[0]} values agree, and {others[2]} still agree" in text
    assert f"{kernel[1] + others[1]} agree, and {kernel[2] + others[2]} still agree if" in text
