"""Tables are read as their files say, or refused with the place and the fix; splits are fair."""

import numpy as np
import pytest

from experiments.tabular import sets

GOOD = "a,b,y\n1,2,0.5\n2,1,1.5\n3,5,2.5\n"


def write(tmp_path, text, name="t"):
    (tmp_path / f"{name}.csv").write_text(text, errors="surrogateescape")
    return tmp_path


def rows(*columns):
    return "".join(",".join(map(str, cells)) + "\n" for cells in zip(*columns, strict=True))


def test_reads_numbers(tmp_path):
    folder = write(tmp_path, "\ufeffa, b,y\r\n1, 2,0.5\r\n\r\n2,1e3 ,1.5\r\n")
    table = sets.load("t", "regression", folder)
    assert table.x.dtype == table.y.dtype == np.float64
    assert table.x.tolist() == [[1, 2], [2, 1000]]
    assert table.y.tolist() == [0.5, 1.5]


def test_text_is_one_hot_and_identifiers_go(tmp_path):
    n = 20
    text = "id,nominal,doors,y\n" + rows(
        [f"P{i:02}" for i in range(n - 1)] + ["P00"],
        ["M", "F", "I", "F"] * 5,
        ["2", "5more", "3", "4"] * 5,
        range(n),
    )
    table = sets.load("t", "regression", write(tmp_path, text))
    ranks = np.array([[2, 0], [0, 3], [1, 1], [0, 2]])
    expected = np.hstack([np.eye(3)[ranks[:, 0]], np.eye(4)[ranks[:, 1]]])
    assert table.x[:4].tolist() == expected.tolist()
    numbers = write(tmp_path, "a,y\n" + rows([1, 2, 3, 1] * 5, range(n)), "numbers")
    table = sets.load("numbers", "regression", numbers, nominal=True)
    assert table.x[:4].tolist() == np.eye(3)[[0, 1, 2, 0]].tolist()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["9", "10", "9.0", "10", "-1", "-1"], [1, 2, 1, 2, 0, 0]),
        (["one", "draw", "zero", "one", "draw", "one"], [1, 0, 2, 1, 0, 1]),
        (["1", "2", "x", "1", "2", "10"], [0, 2, 3, 0, 2, 1]),
    ],
)
def test_classes_are_numbered_in_order(tmp_path, targets, expected):
    folder = write(tmp_path, "a,y\n" + rows(range(6), targets))
    y = sets.load("t", "classification", folder).y
    assert np.issubdtype(y.dtype, np.integer)
    assert y.tolist() == expected


REFUSED = [  # (read as, text, message)
    ("regression", "1,2,3\n4,5,6\n", "t.csv must begin with the names of two columns"),
    ("regression", GOOD + "7,,9\n", "column 'b' of .*t.csv has a cell without a value: fill"),
    ("regression", "a,b,y\nu,2,3\nu,3,4\n", "column 'a' of .*t.csv is constant: drop it"),
    # The standard deviation of eleven times 0.3 is not 0.
    ("regression", "a,b,y\n" + rows([0.3] * 11, range(11), range(11)), "'a' .* is constant: drop"),
    ("regression", "a,y\n1,u\n2,v\n", "the last column of .*t.csv is text: regression needs"),
    ("regression", "a,y\n1,3\n2,3\n", "target 'y' of .*t.csv is constant"),
    ("regression", "a,b,y\n" + rows([1, "NA"] * 6, range(12), range(12)), "'a' .* a cell without"),
]


@pytest.mark.parametrize(("kind", "text", "message"), REFUSED)
def test_refused(tmp_path, kind, text, message):
    with pytest.raises(ValueError, match=message):
        sets.load("t", kind, write(tmp_path, text))


def test_names_and_folders(tmp_path):
    assert sets.names([], "classification") == ["wine", "breast_cancer", "digits"]
    with pytest.raises(ValueError, match="data set for regression 'wein'; did you mean 'wine'"):
        sets.names(["wein"], "regression")
    with pytest.raises(ValueError, match="did you mean 'digits'.*or give a data_dir"):
        sets.load("digit", "classification")
    with pytest.raises(ValueError, match="no csv file in .*uci_regression or "):
        sets.names([], "regression", tmp_path)
    (tmp_path / "uci_regression").mkdir()
    write(tmp_path / "uci_regression", GOOD, "concrete")
    write(tmp_path / "uci_regression", GOOD, "power")
    write(tmp_path, GOOD.replace("1,2,", "9,2,"), "power")
    assert sets.names([], "regression", tmp_path) == ["concrete", "power"]
    assert sets.names(["power", "power"], "regression", tmp_path) == ["power"]
    assert sets.load("power", "regression", tmp_path).x[0].tolist() == [9, 2]
    with pytest.raises(ValueError, match="did you mean 'concrete'.*in .*" + tmp_path.name):
        sets.load("concret", "regression", tmp_path)


def a_table(rows=40, columns=3, classes=False):
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, 5.0, size=(rows, columns))
    y = np.arange(rows) % 2 if classes else rng.normal(-7.0, 2.0, size=rows)
    return sets.Table("t", x, y)


def raw_rows(table, part):
    """The numbers of the rows of a split, found by their targets."""
    index = {round(y, 9): i for i, y in enumerate(table.y.tolist())}
    raw = [part.mean + part.scale * y for y in (part.train_y, part.test_y)]
    return [[index[round(y, 9)] for y in ys.tolist()] for ys in raw]


def test_folds():
    """Each row tests once, the rest train and standardise, and of those `train` are kept."""
    table = a_table()
    order = np.random.default_rng(0).permutation(40)
    folds = sets.folds(table, 5, 100, order)
    assert folds.train_x.shape == (5, 32, 3)
    assert folds.test_x.shape == (5, 8, 3)
    np.testing.assert_allclose(folds.train_x.mean(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(folds.train_y.std(axis=1), 1, atol=1e-12)
    tested = []
    for i in range(5):
        part = sets.Split(*(array[i] for array in folds))
        train, test = raw_rows(table, part)
        assert len({*train, *test}) == 40
        centre, spread = table.x[train].mean(axis=0), table.x[train].std(axis=0)
        np.testing.assert_allclose(part.test_x, (table.x[test] - centre) / spread)
        tested += test
    assert sorted(tested) == list(range(40))
    few = sets.folds(table, 5, 10, order[order < 20])  # 20 rows, of which 16 train and 10 are kept
    assert few.train_x.shape == (5, 10, 3)
    part = sets.Split(*(array[0] for array in few))
    train, test = raw_rows(table, part)
    assert max(train + test) < 20
