"""Rules, and what breaks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from maitred.core.errors import ConfigError
from maitred.optimize.evaluate import Evaluation, Interval
from maitred.optimize.gate import DEFAULTS, MIN_DOCUMENTS, Rules, judge, read_rules


def evaluation(**figures: Interval) -> Evaluation:
    return Evaluation({name.replace("_general", ", general"): each for name, each in figures.items()})


def rules_of(folder: Path, text: str, tool: str = "evaluate") -> Rules:
    file = folder / "rules.yaml"
    file.write_text(text)
    return read_rules(tool, str(file))


def test_rules_are_judged_at_the_bad_end_of_the_interval():
    rules = Rules({"max_kl": 0.05, "min_acceptance": 0.5})
    good = evaluation(kl=Interval(0.03, 0.02, 0.05, 40), acceptance=Interval(0.6, 0.5, 0.7, 40))
    lucky = evaluation(kl=Interval(0.03, 0.02, 0.06, 40), acceptance=Interval(0.6, 0.49, 0.7, 40))
    assert judge(rules, good) == ()
    assert [(each.rule, each.words) for each in judge(rules, lucky)] == [
        ("max_kl", "max_kl 0.05: kl is 0.03, and may be 0.06 (95%, 40 drawn)"),
        ("min_acceptance", "min_acceptance 0.5: acceptance is 0.6, and may be 0.49 (95%, 40 drawn)"),
    ]


def test_too_few_documents_do_not_pass_however_good_their_figure():
    (failure,) = judge(Rules({"max_kl": 0.05}), evaluation(kl=Interval(0.0, 0.0, 0.0, MIN_DOCUMENTS - 1)))
    assert "too few to judge by" in failure.words
    assert str(MIN_DOCUMENTS) in failure.words


def test_every_part_of_a_figure_must_pass():
    figures = evaluation(acceptance=Interval(0.9, 0.9, 0.9, 40), acceptance_general=Interval(0.1, 0.1, 0.1, 40))
    (failure,) = judge(Rules({"min_acceptance": 0.5}), figures)
    assert "acceptance, general is 0.1" in failure.words


def test_a_rule_of_the_users_must_have_been_measured_and_one_by_default_need_not(tmp_path: Path):
    assert judge(Rules(DEFAULTS["quantize"]), evaluation()) == ()
    (failure,) = judge(rules_of(tmp_path, "max_task_drop: 0.02"), evaluation())
    assert failure.words == "max_task_drop: task_drop was not measured; it needs tasks, a parent or a draft"


def test_a_file_changes_the_rules_it_names_and_null_takes_one_out(tmp_path: Path):
    rules = rules_of(tmp_path, "max_kl: 0.01\nmax_flips: null\n", "quantize")
    assert rules.limits["max_kl"] == 0.01
    assert "max_flips" not in rules.limits
    assert rules.limits["max_perplexity_ratio"] == DEFAULTS["quantize"]["max_perplexity_ratio"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_k: 1", "no rule 'max_k' .did you mean max_kl"),
        ("max_kl: low", "max_kl is 'low'; write a number"),
        ("max_kl: true", "max_kl is True"),
        ("max_kl: .nan", "max_kl is nan"),
        ("- max_kl", "holds a list"),
        ("max_kl: [", "is no valid YAML"),
    ],
)
def test_what_is_no_rule_is_refused_by_name(text: str, told: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"rules.yaml: {told}"):
        rules_of(tmp_path, text)


def test_the_page_lists_the_rules_of_each_tool():
    page = (Path(__file__).parents[2] / "docs" / "optimize.md").read_text(encoding="utf-8")
    for tool, rules in DEFAULTS.items():
        limits = ", ".join(f"`{name}: {limit:g}`" for name, limit in rules.items())
        assert f"| `{tool}` | {limits} |" in page
