"""Faults of the prefix cache, chats, tokenizers and batches that other servers had in public, each with the test here
that fails on its kind.
"""

from pathlib import Path

import pytest

# The test of the kind, and where the fault was reported.
KNOWN = {
    "serve/test_engine_equality.py": {
        "test_the_prefix_cache_changes_no_bit": "tpu-inference#3358, #3412: a fresh slot read as state; vllm#11778, "
        "#42019, #51187, #42259: log-probabilities that depend on the cache",
        "test_three_turns_equal_the_one_shot_prompt": "llama.cpp#26185: partial reuse with KDA; omlx#2496: a crash on "
        "every hit",
        "test_order_and_batch_mates_change_no_bit": "vllm#57716, sglang#36859: wrong under load; vllm#51226: a seeded "
        "row changes with its mates",
        "test_other_shapes_agree_within_rounding": "vllm#11778: log-probabilities that depend on the batch size",
    },
    "serve/test_scheduler.py": {
        "test_a_prompt_of_130_tokens_with_pages_of_64_resumes_at_128": "flashinfer#4896: the last state kept for an "
        "earlier boundary",
    },
    "serve/test_engine_soak.py": {
        "test_2000_requests_with_cancellations_leave_nothing_behind": "vllm#57716, sglang#36859: NaN, loops under load",
    },
    "serve/test_engine.py": {
        "test_rows_without_a_token_leave_the_pools_bit_equal": "sglang#36880, #38997: padding overwrites a neighbour",
        "test_a_slot_that_does_not_exist_is_refused_not_clipped": "tpu-inference#2366: slots clipped in silence",
    },
    "serve/test_batch.py": {
        "test_a_custom_id_that_comes_twice_is_refused_up_front": "sglang#1415: the batch hangs",
        "test_an_interrupted_batch_resumes_without_loss_or_repetition": "vllm#52505: an interrupt loses everything",
        "test_a_bad_line_gets_one_error_record_and_the_batch_goes_on": "vllm#8347, #1655: one bad row ends the run",
    },
    "serve/test_chat.py": {
        "test_options_of_thinking": "lobehub#17272, tau#560, hermes-agent#81647: efforts rejected or dropped",
        "test_a_bad_body_is_refused_by_name": "sglang#39895: tools on a user message ignored; oh-my-pi#5994, "
        "inspect_ai#5152: a named tool taken for auto",
    },
    "serve/test_answer.py": {
        "test_messages_of_cut_and_irregular_completions": "vllm#57353, #57098, #50258: reasoning cut short as content",
        "test_a_chat_answer_is_openais_message": "claude-code-proxy#79: tool index mixed with the block's",
        "test_a_stream_put_together_is_the_choice": "vllm#53246, #54273: calls lost while streaming; vllm#51412, "
        "#51399: markers in streamed content",
    },
    "benchmarks/test_serve.py": {
        "test_answers_are_sound_within_a_multiple_of_rounding": "vllm#52190: a speed-up measured on garbage",
    },
    "text/test_chat.py": {
        "test_no_text_of_a_request_becomes_a_special": "smg#2421: user text becomes control tokens",
        "test_a_placeholder_in_a_text_is_no_image": "sglang#33003: a placeholder's spelling taken for an image",
        "test_a_developer_speaks_as_the_system": "vllm#53148, dust#31119: developer messages dropped",
        "test_earlier_reasoning_is_kept_and_a_missing_one_is_an_empty_pair": "codegraff#323, kimi-code#1417, "
        "opencode#16318: reasoning dropped from the history",
        "test_the_first_of_equal_call_ids_gets_the_result": "vllm#50768: call ids that others minted",
        "test_the_span_names_the_size_before_any_resize": "the resized size in an image's span",
    },
    "text/test_completion.py": {
        "test_golden_completions_whole_and_in_pieces": "vllm#38579, #38274, sglang#23363: arguments cut between pieces",
        "test_channels": "dynamo#9227, vllm#36207: reasoning and content mixed; smg#1873: a start channel by model",
        "test_decoding_puts_nothing_between_markers": "vllm#50367: spaces inside markers",
        "test_what_a_message_renders_to_parses_back_from_ids": "markers spelled in an argument",
        "test_600_unclosed_openers_cost_at_most_12_times_60": "quadratic parsing of unclosed openers",
    },
    "text/test_tokenizer.py": {
        "test_golden_encodings": "colibri#676: merges recovered from ranks lose some",
        "test_golden_special_ids": "Kimi-K2.5#37, vllm#39344: gaps of the special table compacted",
        "test_another_models_specials_are_plain_text": "another model's specials get ids beyond the vocabulary",
        "test_golden_long_texts_are_cut_where_the_format_says": "the cuts at 25,000 and 400,000 characters left out",
        "test_a_table_unlike_the_releases_is_said": "K2's special table loads in silence",
    },
}


@pytest.mark.parametrize(("file", "test"), [(file, test) for file, tests in KNOWN.items() for test in tests])
def test_every_known_fault_has_a_test(file, test):
    assert f"def {test}(" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
