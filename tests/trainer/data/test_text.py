"""Text: the paper's serialisation, records that stay apart, and refusals with their line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from affidavit.trainer.data.numeric_data import WrongData
from affidavit.trainer.sources import WrongOption, load_data
from examples.train.text import (
    MARKS,
    ByteTokenizer,
    TextRecords,
    WordTokenizer,
    bible,
    build_word_list,
    generate_record,
    generated,
    jsonl,
    parse_texts,
    read_jsonl,
)

SOURCES = {name: f"python:examples.train.text:{name}" for name in ("jsonl", "generated", "bible")}
E2E = {"mr": "name[The Vaults], eatType[pub], priceRange[more than £30]", "ref": "The Vaults."}
DART = {
    "tripleset": [["Mars Hill", "JOINED", "2008"], ["A", "Is_A", "B"]],
    "annotations": [{"source": "x", "text": "One."}, {"source": "y", "text": "Two."}],
}


def test_e2e_and_dart_are_serialised_as_the_paper_says() -> None:
    assert parse_texts(E2E) == [
        ("name : The Vaults | eatType : pub | priceRange : more than £30", "The Vaults.")
    ]
    source = "Mars Hill : joined : 2008 | A : is_a : B"
    assert parse_texts(DART) == [(source, "One."), (source, "Two.")]
    assert parse_texts({"tripleset": DART["tripleset"], "text": "T"}) == [(source, "T")]


def test_a_record_is_source_bos_target_eos_and_the_source_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "e2e.jsonl"
    path.write_text("\ufeff" + json.dumps(E2E) + "\n", encoding="utf-8")
    data = jsonl(f"{path},longest=100")
    tokens, counted = data.collate(torch.tensor([0]))
    ((source, target),) = read_jsonl(path)
    expected = [*source.encode(), 257, *f" {target}".encode(), 258]
    assert tokens[0].tolist() == expected
    assert counted[0].tolist() == [place > len(source.encode()) for place in range(len(expected))]


@pytest.mark.soak
def test_gpt2_tokens_begin_and_end_with_endoftext(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"source": "name : Blue Spice", "target": "Blue Spice is a pub."}\n')
    tokens, _ = jsonl(f"{path},longest=100,tokenizer=gpt2").collate(torch.tensor([0]))
    # GPT-2's published vocabulary: " is" 318, " a" 257, "." 13, "<|endoftext|>" 50256
    result = tokens[0].tolist()
    assert result.count(50256) == 2
    assert result[-1] == 50256
    assert result[result.index(50256) + 3 : -1][:2] == [318, 257]
    assert result[-2] == 13


words = some.text(some.characters(exclude_categories=["Cs"]), max_size=12)
texts = some.lists(some.tuples(words, words), min_size=1)


@given(texts, some.integers(2, 20), some.data())
def test_a_record_is_the_same_in_every_batch(
    pairs: list[tuple[str, str]], longest: int, data: some.DataObject
) -> None:
    """Padding is all that a batch changes, and it never counts."""
    held = TextRecords.of(pairs, ByteTokenizer(), longest=longest)
    chosen = sorted(data.draw(some.sets(some.integers(0, len(pairs) - 1), min_size=1)))
    tokens, counted = held.collate(torch.tensor(chosen))
    assert tokens.shape[1] <= longest
    for row, record in enumerate(chosen):
        alone, counts = held.collate(torch.tensor([record]))
        size = alone.shape[1]
        assert torch.equal(tokens[row, :size], alone[0])
        assert torch.equal(counted[row, :size], counts[0])
        assert bool((tokens[row, size:] == held.pad).all())
        assert not counted[row, size:].any()


def test_how_many_records_there_are_does_not_depend_on_their_lengths() -> None:
    held = TextRecords.of([("long" * 50, "target"), ("", "t")], ByteTokenizer(), longest=10)
    assert len(held) == 2
    _, counted = held.collate(torch.tensor([0]))
    assert counted.shape == (1, 10)
    assert not counted.any()


def test_the_digest_tells_content_order_and_borders_apart() -> None:
    def digest(*pairs: tuple[str, str], longest: int = 9) -> str:
        return TextRecords.of(pairs, ByteTokenizer(), longest=longest).digest

    first = digest(("a", "b"), ("c", "d"))
    others = [
        digest(("c", "d"), ("a", "b")),
        digest(("a", "b")),
        digest(("a", "b"), ("c", "e")),
        digest(("", "a b"), ("c", "d")),
        digest(("a", "b"), ("c", "d"), longest=3),
    ]
    assert first == digest(("a", "b"), ("c", "d"))
    assert len({first, *others}) == 6


def test_the_generated_corpus_is_a_function_of_its_seed_and_its_words_are_closed() -> None:
    words = build_word_list()
    data = generated("300,seed=4")
    assert data.digest == generated("300,seed=4").digest != generated("300,seed=5").digest
    assert int(data.tokens.max()) < len(words) == data.vocabulary
    assert MARKS.index("<unk>") not in data.tokens
    assert set(data.tokens.tolist()) >= set(range(4, len(words)))
    assert len({generate_record(4, number) for number in range(300)}) > 250
    assert len(data.collate(torch.arange(300))[0][0]) < data.longest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("", "line 2: not valid JSON"),
        ("[" * 100_000, "line 2: not valid JSON"),
        ("3", "line 2: source"),
        ('{"source": 3, "target": "x"}', "line 2: source"),
        ('{"source": "x"}', "line 2: target"),
        ('{"source": "x", "target": "\\ud800"}', "line 2: target: contains half"),
        ('{"source": "x", "target": ' + "9" * 5000 + "}", "line 2: not valid JSON"),
    ],
)
def test_a_line_that_is_no_record_is_refused_with_its_number(
    line: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"source": "a", "target": "b"}\n' + line + "\n")
    with pytest.raises(WrongData, match=message):
        jsonl(f"{path},longest=9")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"mr": "name The Vaults", "ref": "x"}, "is not of the form slot"),
        ({"mr": "name[a] eatType[b]", "ref": "x"}, "is not of the form slot"),
        ({"mr": "", "ref": "x"}, "no slot"),
        ({"mr": "name[a]"}, "ref"),
        ({"tripleset": [["a", "b"]], "text": "x"}, "tripleset"),
        ({"tripleset": [], "text": "x"}, "tripleset"),
        ({"tripleset": [["a", "b", "c"]], "annotations": []}, "annotations"),
        ({"tripleset": [["a", "b", "c"]], "annotations": ["x"]}, "text"),
        ({"other": "x"}, "not an object with"),
    ],
)
def test_an_object_of_another_form_is_refused_by_field(
    document: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_texts(document)


def test_files_that_are_not_there_or_not_utf8_or_empty_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    with pytest.raises(WrongData, match="cannot read"):
        jsonl(f"{path},longest=9")
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(WrongData, match="line 1"):
        jsonl(f"{path},longest=9")
    path.write_bytes(b"")
    with pytest.raises(WrongData, match="no records"):
        jsonl(f"{path},longest=9")


def test_word_lists_begin_with_the_marks_and_have_each_word_once(tmp_path: Path) -> None:
    for words in (["a"], [*MARKS, "a", "a"]):
        with pytest.raises(WrongData, match="word list"):
            WordTokenizer(words)
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "b a"}\n')
    (tmp_path / "words").write_text("\n".join([*MARKS, "a"]))
    data = jsonl(f"{path},longest=9,tokenizer=words,words={tmp_path / 'words'}")
    assert data.collate(torch.tensor([0]))[0].tolist() == [[1, 3, 4, 2]]


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("jsonl", "", "the file is missing"),
        ("jsonl", "x.jsonl", "longest"),
        ("jsonl", "x.jsonl,longest=1", "longest"),
        ("jsonl", "x.jsonl,longest=9,tokenizer=letters", "tokenizer"),
        ("jsonl", "x.jsonl,longest=9,tokenizer=words", "words"),
        ("generated", "", "give the number of records"),
        ("generated", "0,seed=1", "give the number of records"),
        ("generated", "5", "seed"),
        ("bible", "x,longest=9", "is not an option"),
        ("csv", "", "the file is missing"),
        ("csv", "x.csv,label=y", "classes"),
        ("csv", "x.csv,label=y,classes=1", "classes"),
        ("digits", "part=half", "one of"),
    ],
)
def test_options_that_mean_nothing_are_refused(name: str, argument: str, message: str) -> None:
    with pytest.raises(WrongOption, match=message):
        load_data(f"{SOURCES.get(name, name)}:{argument}")


@pytest.mark.soak
def test_the_verses_are_all_there_without_notes() -> None:
    data = bible("longest=64")
    assert len(data) == 31_102
