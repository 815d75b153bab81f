"""Each point of SECURITY.md has tests, and they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS, TRUST = "flow/hf/test_hostile_models.py", "flow/checkpoint/test_trust.py"
VERIFY, REPORT = "flow/checkpoint/test_verify.py", "flow/run/test_report_hostile.py"
HARD, ATTACKS = "flow/run/test_hard_places.py", "flow/checkpoint/test_attacks.py"
SETTINGS = "flow/hf/test_hostile_settings.py"

#: How a point of SECURITY.md begins -> the tests of its sentences.
TESTS: dict[str, list[tuple[str, str]]] = {
    "Nothing is unpickled": [
        ("flow/checkpoint/test_companions.py", "test_layers_of_other_libraries_come_along_and_foreign_weights_do_not"),
        (TRUST, "test_a_file_that_was_added_is_found"),
        (ATTACKS, "test_pickles_of_every_protocol_are_found_under_any_name"),
    ],
    "A header is checked before it is believed": [(VERIFY, "test_verify_names")],
    "Files are read and copied from inside the directory only": [
        (MODELS, "test_no_command_reads_or_copies_what_a_link_leads_to"),
        (MODELS, "test_what_every_command_reads_is_no_link_either"),
        (VERIFY, "test_links_lead_nowhere_but_to_the_blobs_of_the_same_repository_of_the_cache"),
    ],
    "No setting of a config.json loads anything by name": [
        (MODELS, "test_no_command_asks_for_the_kernel_that_a_config_names"),
        (MODELS, "test_settings_that_load_by_name_are_dropped_at_any_depth"),
        (MODELS, "test_an_adapter_beside_a_model_is_refused"),
        (MODELS, "test_quantization_of_others_is_refused_where_it_may_load_code"),
    ],
    "No code of a model repository is run": [(MODELS, "test_code_beside_a_model_is_never_run")],
    "A `generation_config.json` gives": [
        (SETTINGS, "test_how_a_model_generates_is_not_for_its_files_to_say"),
        (SETTINGS, "test_an_evaluation_samples_with_plain_settings"),
        (SETTINGS, "test_a_tokenizer_reads_no_file_elsewhere"),
        (SETTINGS, "test_a_chat_template_that_fails_is_told_in_a_sentence"),
        (SETTINGS, "test_a_chat_template_that_makes_a_long_text_of_a_short_one_is_refused"),
    ],
    "Nothing is written, and nothing removed, through a link": [
        (ATTACKS, "test_a_report_is_never_written_through_a_link"),
        (ATTACKS, "test_nothing_is_written_or_removed_through_a_link_in_the_output"),
    ],
    "Regular expressions of a config": [
        (ATTACKS, "test_a_regular_expression_that_never_ends_is_refused"),
        (ATTACKS, "test_repetitions_beside_each_other_are_refused_by_the_length_of_the_names"),
        (ATTACKS, "test_a_broken_linear_of_a_long_name_is_found"),
        ("core/test_patterns.py", "test_patterns_that_may_never_end_are_known_before_they_are_matched"),
    ],
    "Nothing is fetched over a network": [(MODELS, "test_no_request_is_made_while_a_model_is_built")],
    "Sizes are compared with the files": [
        (MODELS, "test_a_config_of_other_sizes_than_the_files_allocates_nothing"),
        (MODELS, "test_a_config_that_no_model_has_is_refused"),
        (ATTACKS, "test_groups_far_out_of_range_take_no_memory"),
        (MODELS, "test_halves_of_characters_and_deep_nesting_are_told_in_a_sentence"),
    ],
    "A model that is partly quantized": [
        (MODELS, "test_linears_of_integers_are_refused_before_the_run"),
        (MODELS, "test_linears_of_eight_bit_floats_are_carried_over_and_named"),
    ],
    "Control characters and halves of characters": [
        (MODELS, "test_names_with_control_characters_are_refused"),
        ("cli/test_app.py", "test_control_characters_of_names_reach_no_terminal"),
        ("cli/test_terminal.py", "test_no_command_writes_what_a_terminal_obeys"),
        ("cli/test_terminal.py", "test_what_libraries_log_warn_of_and_raise_is_shown"),
    ],
    "`baracuda report` checks the type": [
        (REPORT, "test_a_value_of_another_type_is_refused_with_its_place"),
        (REPORT, "test_no_value_of_a_report_becomes_markup"),
    ],
    "The page's Content-Security-Policy": [(REPORT, "test_a_real_browser_runs_nothing_of_a_hostile_report")],
    "Texts and tokens are data": [(MODELS, "test_lines_that_hold_no_text_are_told_in_a_sentence")],
    "`baracuda quantize` writes the SHA-256": [
        (TRUST, "test_every_changed_byte_is_found_by_its_checksum"),
        (TRUST, "test_a_file_that_was_removed_is_found"),
        (TRUST, "test_pictures_and_words_for_people_are_harmless"),
    ],
    "`verify --against MODEL` trusts nothing": [
        (TRUST, "test_smoothed_tensors_are_compared_too"),
        (TRUST, "test_what_a_report_says_about_smoothing_hides_nothing"),
        (ATTACKS, "test_a_fold_that_nobody_absorbs_is_found"),
        (ATTACKS, "test_a_fold_with_one_reader_left_out_is_found"),
        (TRUST, "test_a_setting_that_is_not_the_originals_is_found"),
        (TRUST, "test_files_beside_the_weights_are_the_originals"),
    ],
    "Somebody who can rewrite a checkpoint": [
        (TRUST, "test_factors_that_are_not_those_of_the_weights_are_found"),
        (ATTACKS, "test_what_is_compared_less_closely_is_told"),
    ],
    "A failed evaluation does not lose": [
        (HARD, "test_a_failed_evaluation_does_not_lose_the_checkpoint"),
        (HARD, "test_a_transformers_that_loads_no_quantized_model_is_found_before_the_work"),
    ],
    "Shapes, types, strides, devices": [
        ("plans/test_checks.py", ""),
        ("functional/test_empty_shapes.py", "test_every_function_answers_or_refuses_every_shape"),
    ],
}


def points() -> list[str]:
    text = (ROOT / "SECURITY.md").read_text().partition("## Threat model")[2].partition("## Not defended")[0]
    return [" ".join(point.split()) for point in re.findall(r"^- (.*?)(?=^- |^\n|^\*\*|\Z)", text, re.M | re.S)]


def test_every_point_has_tests() -> None:
    found = points()
    assert len(found) == len(TESTS)
    for start in TESTS:
        assert sum(point.startswith(start) for point in found) == 1, start


@pytest.mark.parametrize("start", TESTS)
def test_the_tests_of_a_point_are_there(start: str) -> None:
    for file, name in TESTS[start]:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not name or name in names, f"{file} has no {name}"
