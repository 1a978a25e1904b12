"""Tests of which a run of everything takes one cell of several: their cells prove the same code in similar ways.

A cell is a test with one set of its parameters.  Where a run names files or folders, all of them run, and so they do
with ``--whole``, which nightly gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

CELLS: Mapping[int, tuple[str, ...]] = {
    8: ("cli/test_foreign.py",),
    6: (
        "cli/test_surroundings.py",
        "engine",
        "export/architectures",
        "export/bundle",
        "export/emit",
        "export/source/test_gguf.py",
        "export/source/test_gguf_kinds.py",
        "export/source/test_keys.py",
        "export/source/test_tensors.py",
        "export/test_grouped_weights.py",
        "export/test_plan_manifest.py",
        "export/test_stock_weights.py",
        "lossless",
        "runtimes/devices",
        "runtimes/files/test_attention_formats.py",
        "runtimes/native",
        "runtimes/slots",
        "runtimes/text/test_answer.py",
        "server/test_models.py",
        "test_bad_input.py",
    ),
    4: (
        "cli/test_export.py::test_a_bundle_appears_only_with_its_golden_vectors",
        "cli/test_run.py::test_ctrl_c_during_an_export",
        "cli/test_terminal.py",
        "cli/test_tokenizers.py",
        "control",
        "decoding",
        "drafters",
        "export/measuring",
        "export/quantization",
        "export/test_calibrated.py",
        "export/test_mixed_weights.py",
        "export/tokenizers",
        "export/training",
        "judge",
        "planning",
        "plugins",
        "reports",
        "runtimes/text/test_translation.py",
        "test_benchmarks.py",
        "tools/test_retest.py::test_a_second_chance",
    ),
    3: ("audio",),
    2: (
        "runtimes/files/test_repack.py",
        "runtimes/text/test_chat_forms.py",
        "server/test_fields.py",
        "server/test_reading.py",
        "tools/test_threads.py",
    ),
    0: (
        "export/emit/test_fill.py::test_a_conversion_holds_one_tensor_at_a_time",
        "judge/test_judging.py::test_rows_with_guesses_that_are_rounded_otherwise_are_no_fault",
        "planning/test_peak.py::test_a_batch_within_the_limit_is_decoded_by_fewer_at_a_time",
        "runtimes/native/test_kernels.py::test_rows_do_not_depend_on_what_runs_beside_them",
        "server/test_models.py::test_serve_takes_sampling_as_options",
        "stress/test_stress.py::test_engines_opened_and_closed_keep_no_descriptor",
        "decoding/test_distribution.py::test_block_verification_keeps_the_distribution_under_all_rules",
        "decoding/test_distribution.py::test_the_same_test_sees_a_block_that_reads_the_numbers_of_the_one_before",
        "export/measuring/test_mixing.py::test_more_bytes_are_nearer_to_the_source",
        "export/quantization/test_kv_tables.py::test_what_fails_the_gate_is_no_default",
        "export/quantization/test_quantizers.py::test_better_quantizers_are_nearer_to_the_source",
        "export/test_calibrated.py::test_a_model_that_hears_is_calibrated_on_recordings",
        "export/test_calibrated.py::test_an_encoder_decoder_is_calibrated_on_what_it_writes_about_sources",
        "export/training/test_state.py::test_killed_at_any_moment",
        "export/training/test_state.py::test_the_command",
        "fuzz/test_fuzz.py::test_mutants_of_bundles_and_sources",
        "judge/test_judging.py::test_without_log_probabilities_draws_are_compared_with_draws",
        "planning/test_attention.py::test_nomad2_that_failed_its_gate_only_drafts",
        "planning/test_peak.py::test_a_run_within_the_limit_takes_a_cheaper_method_and_finishes",
        "planning/test_peak.py::test_self_speculation_needs_no_memory_of_its_own",
        "runtimes/native/test_kernels.py::test_a_device_gets_the_program_and_loses_it",
        "runtimes/native/test_kernels.py::test_numbers_that_are_none_reach_the_logits",
        "runtimes/native/test_kernels.py::test_this_machine_is_measured",
        "server/test_connections.py::test_requests_made_from_the_description",
        "stress/test_changes.py::test_no_change_is_called_exact_or_lossless",
        "stress/test_stress.py::test_killed_or_without_a_disk",
        "stress/test_stress.py::test_mixed_requests_write_what_plain_decoding_writes",
        "test_benchmarks.py::test_streaming",
        "test_privacy.py::test_a_day_without_a_network_call",
    ),
}
"""n -> folders and files of ``tests/``, and tests, of which one cell of n runs, the first one always; of 0, none."""
SHARES = {f"tests/{name}": share for share, names in CELLS.items() for name in names}


def share_of(test: str, shares: Mapping[str, int] = SHARES) -> int:
    """Find the share of a test: its own, that of its file, or that of the nearest folder."""
    file = test.partition("::")[0]
    places = [test, file, *("/".join(file.split("/")[:depth]) for depth in range(file.count("/"), 0, -1))]
    return next((shares[place] for place in places if place in shares), 1)


def leave_out(names: Iterable[str], shares: Mapping[str, int] = SHARES) -> set[str]:
    """List the tests, by their ids in the order of their files, that a run of everything leaves to nightly."""
    seen: Counter[str] = Counter()
    left = set()
    for name in names:
        test = name.partition("[")[0]
        share = share_of(test, shares)
        if not share or seen[test] % share:
            left.add(name)
        seen[test] += 1
    return left
