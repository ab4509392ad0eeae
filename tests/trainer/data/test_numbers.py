"""Features with classes: strict files, and the digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from affidavit.trainer.data.numeric_data import WrongData, csv_file, digits, read_csv

GOOD = "a,kind,b\n1,0,2.5\n-3e2,2,0\n"


def test_columns_keep_their_order_and_the_label_is_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    data = csv_file(f"{path},label=kind,classes=3")
    assert (len(data), data.features, data.classes) == (2, 2, 3)
    inputs, labels = data.collate(torch.tensor([0, 1]))
    assert inputs.tolist() == [[1, 2.5], [-300, 0]]
    assert labels.tolist() == [0, 2]


def test_the_column_of_users_is_counted_and_is_no_feature(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("who,a,kind\nann,1,0\nbob,2,1\nann,3,1\n")
    data = csv_file(f"{path},label=kind,classes=2,user=who")
    assert data.inputs.tolist() == [[1], [2], [3]]
    assert data.labels.tolist() == [0, 1, 1]
    assert data.most_of_a_user == 2
    with pytest.raises(WrongData, match="no column whom"):
        csv_file(f"{path},label=kind,classes=2,user=whom")


def test_a_cell_may_have_several_users_and_records_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("who,a,kind\nann; bob;,1,0\nbob,2,1\nann;,3,1\n")
    shared = f"{path},label=kind,classes=2,user=who,separator=;"
    data, bounded = csv_file(shared), csv_file(f"{shared},most=1")
    assert (data.most_of_a_user, data.most_users_of_a_record, data.left_out) == (2, 2, 0)
    assert bounded.inputs.tolist() == [[2], [3]]
    assert (bounded.most_of_a_user, bounded.most_users_of_a_record, bounded.left_out) == (1, 1, 1)
    assert csv_file(f"{path},label=kind,classes=2,user=who").most_users_of_a_record == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column kind"),
        ("a,b\n1,2\n", "no column kind"),
        ("kind\n1\n", "no feature columns"),
        ("a,a,kind\n1,2,0\n", "duplicate column a"),
        ("a,kind\n", "no records"),
        ("a,kind\n1,0\n2\n", "line 3: 1 fields, but the header has 2"),
        ("a,kind\n1,0\n\n", "line 3: 0 fields"),
        ("a,kind\n1,0,5\n", "line 2: 3 fields"),
        ("a,kind\nx,0\n", "line 2, column a: 'x'"),
        ("a,kind\nnan,0\n", "line 2, column a"),
        ("a,kind\n1e400,0\n", "line 2, column a"),
        ("a,kind\n1e35,0\n", "line 2, column a"),
        ("a,kind\n1_0,0\n", "line 2, column a"),
        ("a,kind\n,0\n", "line 2, column a"),
        ("a,kind\n1,3\n", "line 2, column kind: '3' is not a class from 0 to 2"),
        ("a,kind\n1,-1\n", "column kind"),
        ("a,kind\n1,1.0\n", "column kind"),
        ("a,kind\n1,²\n", "column kind"),
        ('a,kind\n"1,0\n', "line"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(WrongData, match=message):
        read_csv(path, label="kind", classes=3)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongData, match="cannot read"):
        read_csv(tmp_path / "nothing.csv", label="y", classes=2)
    (tmp_path / "latin.csv").write_bytes(b"a,y\n\xe9,0\n")
    with pytest.raises(WrongData, match="not UTF-8"):
        read_csv(tmp_path / "latin.csv", label="y", classes=2)


def test_digits_are_split_by_place_into_parts_that_share_nothing() -> None:
    whole, train, test = digits(""), digits("part=train"), digits("part=test")
    assert (len(whole), len(train), len(test)) == (1797, 1438, 359)
    assert (whole.features, whole.classes) == (64, 10)
    assert 0 <= float(whole.inputs.min()) <= float(whole.inputs.max()) <= 1
    assert torch.equal(whole.inputs[4::5], test.inputs)
    assert len({whole.digest, train.digest, test.digest}) == 3
