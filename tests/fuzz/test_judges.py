"""The judges' command: what it notes, and that it goes on from there."""

from __future__ import annotations

import json

from mlc.substitution.shipped import shipped_rules
from tests.fuzz import judges


def test_judges_resume_and_say_what_is_against(tmp_path, monkeypatch, capsys):
    chosen = [rule for rule in shipped_rules() if not rule.blocks][:3]
    monkeypatch.setattr(judges, "shipped_rules", lambda: chosen)
    state = tmp_path / "state.jsonl"
    words = ["--instances", "20", "--state", str(state)]
    assert judges.main(words) == 0
    first = state.read_text().splitlines()
    assert len(first) == 2 * len(chosen) and "0 with something against" in capsys.readouterr().out
    state.write_text("\n".join([*first[:-1], first[-1][:20]]))
    monkeypatch.setattr(judges, "_answer", lambda judge, *_: {"against": ["a sign"], "answered": 1, "unknown": 0})
    assert judges.main(words) == 1
    said = capsys.readouterr().out
    assert "all of an earlier run" in said and f"against {chosen[-1].name}: a sign" in said
    assert [json.loads(line)["rule"] for line in state.read_text().splitlines()[-1:]] == [chosen[-1].name]
