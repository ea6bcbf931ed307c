"""Reading prompt sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_evals.prompts import WARM_UP_TEXTS, PromptSetError, load_prompts


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


def test_reads_spec_bench_lines(tmp_path: Path) -> None:
    line = {"question_id": 81, "category": "writing", "turns": ["First\u2028turn", "Second"]}
    (prompt,) = load_prompts(write(tmp_path / "set.jsonl", line))
    assert (prompt.question_id, prompt.category, prompt.text) == (
        "81",
        "writing",
        "First\u2028turn",
    )


def test_stride_starts_at_the_first_and_limit_follows_it(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", *({"turns": [f"q{number}"]} for number in range(25)))
    assert [prompt.text for prompt in load_prompts(path, stride=10)] == ["q0", "q10", "q20"]
    assert [prompt.text for prompt in load_prompts(path, stride=10, limit=2)] == ["q0", "q10"]


def test_missing_id_is_the_line_number_and_empty_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"turns": ["a"]}\n\n{"turns": ["b"]}\n', encoding="utf-8")
    prompts = load_prompts(path, stride=1)
    assert [(prompt.question_id, prompt.text) for prompt in prompts] == [("1", "a"), ("3", "b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompt"),
        ('{"turns": ["a"]}\nnot json\n', r"set\.jsonl:2: not a JSON object"),
        ('{"prompt": "a"}\n', r"set\.jsonl:1: field turns"),
        ('{"turns": []}\n', r"set\.jsonl:1: field turns"),
        ('{"question_id": 7, "turns": ["a"]}\n' * 2, "question_id 7 appears more than once"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(PromptSetError, match=message):
        load_prompts(path)


def test_missing_file_and_bad_stride(tmp_path: Path) -> None:
    with pytest.raises(PromptSetError, match="cannot be read"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(PromptSetError, match="stride"):
        load_prompts(stride=0)


def test_own_set_is_a_dozen_and_holds_no_warm_up_text() -> None:
    prompts = load_prompts()
    assert len(prompts) == 12
    assert not {prompt.text for prompt in prompts} & set(WARM_UP_TEXTS)
