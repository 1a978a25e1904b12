"""Table of every known key of a model's files, with how an export treats it, and the notes that follow from it.

A key is applied, or it changes no text.  It is refused if it asks for something unsupported.  Otherwise it is left out,
and the export names it.  The keys are those of transformers 5.24 and of llama.cpp (llama-arch.cpp).  The export also
names keys that are not in the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from edgespec.export.source.converters import quantization
from edgespec.export.tokenizers.facts import GENERATION, begin_and_ends, read_if_sound
from edgespec.runtimes.text.codec import TextCodec

Fate = Literal["applied", "refused", "left out", "nothing"]
CONFIG, TOKENIZER, QUANTIZATION, GGUF = "config.json", "tokenizer_config.json", "quantization_config", "GGUF metadata"
OFF: tuple[object, ...] = (None, False, 0, "", [], {})
"""Values that ask for nothing, of whatever key."""


class Row(NamedTuple):
    """Keys with the same fate."""

    fate: Fate
    why: str  # where it is applied; why it is refused, left out, or changes nothing
    keys: str  # separated by spaces; KEY=VALUE: a value, in addition to ``OFF``, that asks for nothing


TABLE: dict[str, tuple[Row, ...]] = {
    CONFIG: (
        Row("applied", "sizes, by architectures/base.py and each architecture", """
            hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
            max_position_embeddings n_embd n_head n_inner n_layer n_positions ffn_hidden_size num_kv_heads multi_query
            d_model d_ff d_kv num_layers num_heads num_decoder_layers encoder_layers decoder_layers encoder_ffn_dim
            encoder_attention_heads decoder_attention_heads decoder_ffn_dim decoder_vocab_size max_source_positions
            max_target_positions num_mel_bins block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of
            block_dim block_ff_dim conv_dim hidden_size_per_layer_input vocab_size_per_layer_input
            use_double_wide_mlp num_kv_shared_layers per_layer_config depth embed_dim mlp_ratio projection_dim
            image_size patch_size num_patches num_position_embeddings num_embeddings spatial_merge_size scale_factor
            downsample_factor downsample_ratio n_window n_window_infer window_size mm_tokens_per_image
            projector_hidden_size downsample_hidden_size global_head_dim num_global_key_value_heads"""),
        Row("applied", "operations, by architectures/base.py and each architecture", """
            hidden_act hidden_activation activation activation_function feed_forward_proj rms_norm_eps layer_norm_eps
            layer_norm_epsilon norm_eps norm_epsilon attention_bias attention_out_bias mlp_bias use_bias bias
            use_qkv_bias conv_bias qk_layernorm use_qk_norm use_sandwich_norm parallel_attn new_decoder_architecture
            num_ln_in_parallel_attn use_parallel_residual tie_word_embeddings tie_embedding
            attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar attention_multiplier
            embedding_multiplier residual_multiplier logits_scaling logit_scale scale_embedding scale_decoder_outputs
            scale_attn_weights scale_attn_by_inverse_layer_idx attention_k_eq_v use_attention_gate
            sliding_window sliding_window_pattern use_sliding_window max_window_layers full_attention_interval
            global_attn_every_n_layers local_attention norm_bias type_vocab_size classifier_pooling
            classifier_activation
            layers_block_type block_size multiple_of ffn_dim_multiplier rope_base
            layer_types full_attn_idxs no_rope_layers no_rope_layer_interval rope_parameters rope_scaling rope_theta
            rope_local_base_freq partial_rotary_factor rotary_pct rotary_emb_base rope_ratio
            original_max_position_embeddings conv_L_cache relative_attention_num_buckets
            relative_attention_max_distance linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
            linear_num_value_heads linear_value_head_dim linear_allow_neg_eigval mamba_conv_bias mamba_d_conv
            mamba_d_state mamba_expand mamba_n_groups mamba_n_heads mamba_proj_bias time_step_limit num_experts
            num_local_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
            shared_intermediate_size num_dense_layers norm_topk_prob routed_scaling_factor use_expert_bias
            decoder_sparse_step mlp_only_layers
            swiglu_limit swiglu_alpha enable_moe_block top_k_experts layer_rope_theta qkv_bias
            mlp_layer_types
            deepstack_visual_indexes fullatt_block_indexes norm_type
            use_absolute_position_embeddings use_mean_pooling projector_hidden_act projector_use_layernorm
            vision_feature_layer vision_feature_select_strategy pooling_kernel_size position_embedding_size
            use_clipped_linears"""),
        Row("applied", "what the model is, by architectures/__init__.py and the towers", """
            model_type architectures text_config vision_config audio_config vq_config thinker_config aligner_config
            image_token_id image_token_index audio_token_id quantization_config compression_config quantization
            cls_token_num num_classes cond dim n_kv_head"""),
        Row("applied", "modules of tokenizers/, where generation_config.json does not say it", """
            bos_token_id eos_token_id pad_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
            suppress_tokens begin_suppress_tokens bad_words_ids no_repeat_ngram_size min_length max_length num_beams
            length_penalty early_stopping do_sample temperature top_k top_p min_p repetition_penalty
            task_specific_params is_encoder_decoder"""),
        Row("refused", "no operation does it", """
            classify_num alibi add_cross_attention clip_qkv use_bidirectional_attention
            position_embedding_type double_latent standardize"""),
        Row("nothing", "for training alone", """
            attention_dropout activation_dropout dropout dropout_rate attn_pdrop embd_pdrop resid_pdrop hidden_dropout
            hidden_dropout_prob hidden_dropout_rate embedding_dropout residual_dropout projection_dropout
            classifier_dropout decoder_layerdrop encoder_layerdrop layerdrop initializer_range initializer_factor
            init_std layer_scale_init_value linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max
            linear_dt_min mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length
            mask_time_min_masks mask_time_prob apply_spec_augment use_mask_token router_aux_loss_coef
            output_router_logits embedding_initializer_range z_loss_coefficient"""),
        Row("nothing", "for classification, or another head than the LM head", """
            classifier_proj_size id2label label2id problem_type num_labels summary_activation summary_first_dropout
            summary_proj_to_labels summary_type summary_use_proj use_weighted_layer_sum token_classification_bias
            median_filter_width finetuning_task"""),
        Row("nothing", "how transformers runs or saves it", """
            dtype torch_dtype transformers_version return_dict output_attentions output_hidden_states use_cache
            chunk_size_feed_forward pretraining_tp reorder_and_upcast_attn attn_implementation cache_implementation
            auto_map torchscript pruned_heads use_return_dict tokenizer_class prefix unsloth_version unsloth_fixed
            is_decoder sep_token_id mamba_chunk_size use_mamba_kernels attention_chunk_size"""),
        Row("nothing", "it follows from other keys, or from the shapes of tensors, which are checked", """
            dense_act_fn is_gated_act mamba_d_head share_encoder_decoder_embeddings base_channels channel_multiplier
            in_channels num_channels out_channels latent_channels num_res_blocks out_hidden_size output_dim
            experts_per_token initial_context_length
            image_token_embed_dim num_image_tokens image_seq_length projector_bias eod_token_id"""),
        Row("left out", "sound of these models is not read", """
            boa_token_id eoa_token_index subsampling_conv_channels conv_kernel_size residual_weight
            attention_context_left attention_context_right attention_logit_cap attention_invalid_logits_value
            gradient_clipping output_proj_dims"""),
        Row("left out", "layers that guess are not read", """
            num_mtp_layers num_nextn_predict_layers mtp_layer_types mtp_mlp_layer_types"""),
        Row("nothing", "tokens around pictures, which the chat template and the tower's reader write", """
            boi_token_index eoi_token_index boi_token_id eoi_token_id vision_start_token_id vision_end_token_id
            timestamp_token_id
            vision_use_head"""),
        Row("left out", "videos are not read; pictures are", "video_token_id temporal_patch_size=2 tokens_per_second"),
    ),
    GENERATION: (
        Row("applied", "tokenizers/facts.py", """
            do_sample temperature top_k top_p min_p repetition_penalty bos_token_id eos_token_id"""),
        Row("applied", "tokenizers/generation.py, text_form.py and speech.py, as rules that every method keeps", """
            suppress_tokens begin_suppress_tokens bad_words_ids no_repeat_ngram_size min_length min_new_tokens
            forced_eos_token_id decoder_start_token_id is_multilingual max_initial_timestamp_index"""),
        Row("left out", "a request, or else the context, decides the length", "max_length=20 max_new_tokens max_time"),
        Row("left out", "a request asks for beams", """
            num_beams=1 length_penalty=1.0 early_stopping num_return_sequences=1 num_beam_groups=1
            diversity_penalty"""),
        Row("left out", "no sampling here does it", """
            typical_p=1.0 epsilon_cutoff eta_cutoff top_h encoder_repetition_penalty=1.0 encoder_no_repeat_ngram_size
            exponential_decay_length_penalty sequence_bias watermarking_config guidance_scale=1 token_healing
            penalty_alpha dola_layers constraints force_words_ids low_memory"""),
        Row("left out", "a request names its stops", "stop_strings"),
        Row("left out", "of the first token of an empty prompt; encoder-decoders keep it", "forced_bos_token_id"),
        Row("nothing", "logits that are normalized give the same tokens; NaN is an error", """
            renormalize_logits remove_invalid_values"""),
        Row("nothing", "how transformers speculates, caches and compiles", """
            use_mtp use_cache cache_implementation cache_config max_cache_len is_assistant num_assistant_tokens
            num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens
            max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind
            assistant_ensemble_weight speculation_type compile_config disable_compile continuous_batching_config
            prefill_chunk_size"""),
        Row("nothing", "what transformers returns", """
            output_attentions output_hidden_states output_scores output_logits return_dict_in_generate pad_token_id
            transformers_version trust_remote_code"""),
        Row("nothing", "tokens of transcripts are found by their names (tokenizers/speech.py)", """
            no_timestamps_token_id lang_to_id task_to_id prev_sot_token_id language task return_timestamps
            alignment_heads forced_decoder_ids"""),
        Row("applied", "tokenizers/text_form.py, where the tokenizer has such a token", "lang_code_to_id"),
    ),
    TOKENIZER: (
        Row("applied", "runtimes/text/special.py, tokenizers/facts.py and vocabulary.py", """
            bos_token eos_token unk_token pad_token sep_token cls_token mask_token additional_special_tokens
            extra_special_tokens added_tokens_decoder chat_template"""),
        Row("applied", "tokenizers/files.py and sentencepieces.py, where a tokenizer.json is made", """
            tokenizer_class add_bos_token add_eos_token add_prefix_space legacy add_dummy_prefix_space"""),
        Row("applied", "tokenizers/text_form.py", "src_lang tgt_lang source_lang target_lang"),
        Row("nothing", "tokenizer.json says it, where there is one, as in transformers 5", """
            vocab_file merges_file tokenizer_file vocab_size do_lower_case strip_accents tokenize_chinese_chars
            spaces_between_special_tokens sp_model_kwargs use_default_system_prompt keep_accents remove_space
            errors from_slow fix_mistral_regex separate_vocabs extra_ids max_len"""),
        Row("nothing", "a text is never padded or cut, but refused where it is too long", """
            model_max_length max_length padding_side truncation_side stride truncation_strategy pad_to_multiple_of
            pad_token_type_id truncation padding"""),
        Row("nothing", "how transformers loads or saves it", """
            name_or_path backend is_local local_files_only processor_class auto_map model_input_names tokenizer_type
            special_tokens_map_file added_tokens_file return_token_type_ids verbose use_fast trust_remote_code device
            files_loaded init_inputs full_tokenizer_file"""),
        Row("nothing", "the tower's reader finds its tokens by the configuration", """
            image_token image_start_token image_end_token boi_token eoi_token audio_token audio_bos_token
            audio_eos_token vision_bos_token vision_eos_token video_token model_specific_special_tokens
            chat_control_tokens response_schema response_template"""),
        Row("left out", "special tokens in a text are always found", "split_special_tokens"),
        Row("left out", "spaces in front of punctuation stay as the model writes them", """
            clean_up_tokenization_spaces
            clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"""),
    ),
    QUANTIZATION: (
        Row("applied", "source/converters.py and packed.py", """
            quant_method bits w_bit group_size q_group_size checkpoint_format format is_marlin_format pack_dtype
            dynamic version weight_block_size config_groups sparsity_config"""),
        Row("refused", "rotations of the stored weights", "transform_config"),
        Row("nothing", "the tensors say it", """
            modules_to_not_convert modules_to_convert ignore sym zero_point desc_act static_groups lm_head
            modules_in_block_to_quantize block_name_to_quantize module_name_preceding_first_block
            quantization_status scale_fmt expert_dtype fmt weight_dtype layer_modules_strict"""),
        Row("nothing", "how it was quantized, or is run elsewhere", """
            tokenizer dataset damp_percent damp_auto_increment act_group_aware true_sequential meta backend
            model_seqlen batch_size pad_token_id max_input_length cache_block_outputs use_cuda_fp16 use_exllama
            exllama_config max_input_len do_fuse fuse_max_seq_len modules_to_fuse model_name_or_path
            model_file_base_name quantizer run_compressed dequantize use_optimized_inference
            global_compression_ratio uncalibrated_modules"""),
        Row("nothing", "activations and caches are quantized by --format and --attention, not as config.json says", """
            activation_scheme activation_scale_ub kv_cache_scheme"""),
    ),
    GGUF: (
        Row("applied", "source/gguf_config.py and gguf_t5.py", """
            general.architecture ARCH.context_length ARCH.embedding_length ARCH.block_count ARCH.feed_forward_length
            ARCH.attention.head_count ARCH.attention.head_count_kv ARCH.attention.key_length
            ARCH.attention.layer_norm_rms_epsilon ARCH.attention.relative_buckets_count ARCH.decoder_start_token_id
            ARCH.decoder_block_count ARCH.rope.freq_base ARCH.rope.scale_linear ARCH.rope.scaling.type
            ARCH.rope.scaling.factor ARCH.rope.scaling.attn_factor ARCH.rope.scaling.original_context_length
            ARCH.rope.scaling.yarn_beta_fast ARCH.rope.scaling.yarn_beta_slow gemma2.attn_logit_softcapping
            gemma2.final_logit_softcapping gemma2.attention.sliding_window gemma3.attn_logit_softcapping
            gemma3.final_logit_softcapping gemma3.attention.sliding_window gemma3.attention.sliding_window_pattern
            gemma3.rope.freq_base_swa gpt-oss.expert_count gpt-oss.expert_used_count
            gpt-oss.expert_feed_forward_length gpt-oss.attention.sliding_window"""),
        Row("applied", "source/gguf_files.py", """
            general.alignment general.sampling.temp general.sampling.top_k general.sampling.top_p
            general.sampling.min_p ARCH.pooling_type split.no split.count split.tensors.count
            tokenizer.ggml.suppress_tokens tokenizer.ggml.eos_token_id tokenizer.ggml.eot_token_id
            tokenizer.ggml.eom_token_id tokenizer.ggml.fim_pad_token_id tokenizer.ggml.fim_rep_token_id
            tokenizer.ggml.fim_sep_token_id"""),
        Row("applied", "source/gguf_config.py, as tokenizer.json and tokenizer_config.json", """
            tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type
            tokenizer.ggml.scores tokenizer.ggml.merges tokenizer.ggml.bos_token_id tokenizer.ggml.unknown_token_id
            tokenizer.ggml.padding_token_id tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token
            tokenizer.ggml.add_space_prefix tokenizer.ggml.remove_extra_whitespaces
            tokenizer.ggml.precompiled_charsmap tokenizer.chat_template"""),
        Row("refused", "unless they say what every layer does", """
            general.type ARCH.expert_count ARCH.attention.causal ARCH.attention.value_length
            ARCH.rope.dimension_count ARCH.attention.key_length_swa ARCH.attention.value_length_swa
            ARCH.rope.dimension_count_swa ARCH.nextn_predict_layers gemma2.rope.freq_base_swa
            gemma2.attention.sliding_window_pattern gpt-oss.attention.sliding_window_pattern"""),
        Row("left out", "as llama.cpp does for these models", "ARCH.attention.sliding_window"),
        Row("left out", "no sampling here does it, or in another way", """
            general.sampling.sequence general.sampling.xtc_probability general.sampling.xtc_threshold
            general.sampling.penalty_last_n general.sampling.penalty_repeat=1.0 general.sampling.mirostat
            general.sampling.mirostat_tau general.sampling.mirostat_eta"""),
        Row("left out", "no separator is written", "tokenizer.ggml.add_sep_token"),
        Row("left out", "llama.cpp reads it for other architectures alone", """
            ARCH.activation.situ_beta ARCH.activation.situ_linear_beta ARCH.activation_sparsity_scale
            ARCH.adapters.count ARCH.adapters.lora_rank ARCH.adapters.router_gain ARCH.adapters.token_ids_activate
            ARCH.adapters.token_ids_substitute ARCH.altup.active_idx ARCH.altup.num_inputs ARCH.attention.clamp_kqv
            ARCH.attention.compress_ratios ARCH.attention.compress_rope_freq_base ARCH.attention.decay_lora_rank
            ARCH.attention.gate_lora_rank ARCH.attention.group_norm_epsilon ARCH.attention.group_norm_groups
            ARCH.attention.iclr_lora_rank ARCH.attention.indexer.block_size ARCH.attention.indexer.head_count
            ARCH.attention.indexer.key_length ARCH.attention.indexer.kpool ARCH.attention.indexer.kpool_select_tail
            ARCH.attention.indexer.local_blocks ARCH.attention.indexer.top_k ARCH.attention.indexer.types
            ARCH.attention.key_length_mla ARCH.attention.key_length_mla_swa ARCH.attention.kv_lora_rank
            ARCH.attention.kv_lora_rank_swa ARCH.attention.layer_norm_epsilon ARCH.attention.max_alibi_bias
            ARCH.attention.output_group_count ARCH.attention.output_lora_rank ARCH.attention.output_scale
            ARCH.attention.q_lora_rank ARCH.attention.recurrent_layers ARCH.attention.rope_pattern ARCH.attention.scale
            ARCH.attention.shared_kv_layers ARCH.attention.sliding_window_pattern ARCH.attention.temperature_length
            ARCH.attention.temperature_scale ARCH.attention.value_length_mla ARCH.attention.value_length_mla_swa
            ARCH.attention.value_residual_mix_lora_rank ARCH.attention.value_scale ARCH.attn_logit_softcapping
            ARCH.attn_res.block_size ARCH.block_size ARCH.conv_group_size ARCH.conv_kernel_size
            ARCH.convnext.block_count ARCH.convnext.embedding_length ARCH.deepstack_mapping ARCH.dense_2_feat_in
            ARCH.dense_2_feat_out ARCH.dense_3_feat_in ARCH.dense_3_feat_out ARCH.embedding_length_per_layer_input
            ARCH.embedding_scale ARCH.expert_chunk_feed_forward_length ARCH.expert_feed_forward_length
            ARCH.expert_gating_func ARCH.expert_group_count ARCH.expert_group_scale ARCH.expert_group_used_count
            ARCH.expert_latent_length ARCH.expert_shared_count ARCH.expert_shared_feed_forward_length
            ARCH.expert_weights_norm ARCH.expert_weights_scale ARCH.experts_per_group ARCH.features_length
            ARCH.final_logit_softcapping ARCH.full_attention_interval ARCH.hash_layer_count ARCH.hidden_activation
            ARCH.hrm.h_cycles ARCH.hrm.l_cycles ARCH.hrm.layers_per_stack ARCH.hrm.prefix_lm ARCH.hyper_connection.count
            ARCH.hyper_connection.epsilon ARCH.hyper_connection.low_rank ARCH.hyper_connection.magnitude
            ARCH.hyper_connection.sinkhorn_iterations ARCH.interleave_moe_layer_step ARCH.kda.gate_lower_bound
            ARCH.kda.head_dim ARCH.kda.safe_gate ARCH.leading_dense_block_count ARCH.logit_scale ARCH.moe_every_n_layers
            ARCH.moe_latent_size ARCH.n_deepstack_layers ARCH.norm_before_fc ARCH.norm_before_residual ARCH.num_loops
            ARCH.ple.conv_kernel ARCH.ple.eos_token_id ARCH.ple.head_offsets ARCH.ple.head_vocab_sizes
            ARCH.ple.heads_per_ngram ARCH.ple.image_token_id ARCH.ple.layer_multipliers ARCH.ple.layers
            ARCH.ple.ngram_size ARCH.posnet.block_count ARCH.posnet.embedding_length ARCH.rescale_every_n_layers
            ARCH.residual_scale ARCH.rope.dimension_sections ARCH.rope.freq_base_swa ARCH.rope.scaling.alpha
            ARCH.rope.scaling.yarn_attn_factor ARCH.rope.scaling.yarn_ext_factor ARCH.rope.scaling.yarn_log_multiplier
            ARCH.router_logit_softcapping ARCH.selector_rank ARCH.selector_top_k ARCH.shortconv.l_cache
            ARCH.skip_loop_final_norm ARCH.ssm.conv_kernel ARCH.ssm.dt_b_c_rms ARCH.ssm.group_count ARCH.ssm.inner_size
            ARCH.ssm.state_size ARCH.ssm.time_step_rank ARCH.swiglu_clamp_exp ARCH.swiglu_clamp_shexp ARCH.swin_norm
            ARCH.target_hidden_size ARCH.target_layers ARCH.time_decay_extra_dim ARCH.time_mix_extra_dim
            ARCH.token_shift_count ARCH.wkv.head_size diffusion.shift_logits tokenizer.ggml.normalizer.lowercase
            tokenizer.ggml.normalizer.strip_accents xielu.alpha_n xielu.alpha_p xielu.beta xielu.eps"""),
        Row("refused", "an adapter is no model (source/gguf_files.py)", """
            adapter.type adapter.lora.alpha adapter.lora.task_name adapter.lora.prompt_prefix
            adapter.alora.invocation_tokens"""),
        Row("nothing", "names, and what tensors and tokens say themselves", """
            ARCH.vocab_size ARCH.tensor_data_layout general.quantization_version general.file_type
            ARCH.rope.scaling.finetuned ARCH.use_parallel_residual tokenizer.ggml.token_type_count
            tokenizer.huggingface.json tokenizer.rwkv.world tokenizer.chat_templates ARCH.classifier.output_labels
            ARCH.classifier.pooling_type ARCH.embedding_length_out ARCH.expert_used_count"""),
        Row("nothing", "tokens that only a template, or who fills in a middle, writes", """
            tokenizer.ggml.seperator_token_id tokenizer.ggml.cls_token_id tokenizer.ggml.mask_token_id
            tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_suf_token_id tokenizer.ggml.fim_mid_token_id
            tokenizer.ggml.prefix_token_id tokenizer.ggml.suffix_token_id tokenizer.ggml.middle_token_id"""),
    ),
}  # fmt: skip
"""The fate of each key, by file.  Of GGUF metadata ``ARCH`` stands for any architecture, and a named one goes first."""
NAMES = ("general.", "imatrix.", "quantize.", "tokenizer.chat_template.")
"""How keys of GGUF metadata begin that are names, licenses and the like, or further templates, which are applied."""


class Known(NamedTuple):
    """Entry of the table for one key."""

    fate: Fate
    why: str
    off: object  # another value that asks for nothing


def _read(rows: tuple[Row, ...]) -> dict[str, Known]:
    found: dict[str, Known] = {}
    for row in rows:
        for entry in row.keys.split():
            key, _, off = entry.partition("=")
            assert key not in found, key
            found[key] = Known(row.fate, row.why, float(off) if off else None)
    return found


KEYS: dict[str, dict[str, Known]] = {file: _read(rows) for file, rows in TABLE.items()}


def left_out(folder: Path, config: Mapping[str, Any], codec: TextCodec, sequence: bool) -> list[str]:
    """Describe requests of a folder's files that an export ignores, and ends of text that only one file lists.

    Args:
        folder: of the model.
        config: config.json's part about text.
        codec: its tokenizer.
        sequence: it is an encoder-decoder: its lengths, beams and first token are applied.
    """
    generation = read_if_sound(folder / GENERATION)
    if sequence:  # tokenizers/text_form.py
        own = ("max_length", "num_beams", "length_penalty", "early_stopping", "forced_bos_token_id")
        generation = {key: value for key, value in generation.items() if key not in own}
    tokenizer = read_if_sound(folder / TOKENIZER)
    if type(codec.tokenizer.model).__name__ == "BPE":  # transformers does not clean these up either
        tokenizer.pop("clean_up_tokenization_spaces", None)
    settings = quantization(folder, config, {}) or {}
    prefix = tokenizer.get("add_prefix_space")
    files = {CONFIG: read_if_sound(folder / CONFIG) | {**config}, GENERATION: generation, TOKENIZER: tokenizer,
             QUANTIZATION: settings}  # fmt: skip
    words = [words for file, given in files.items() for words in unread(file, given)]
    if isinstance(prefix, bool) and prefix != adds_space(codec):
        words.append(f"{TOKENIZER}: not read: add_prefix_space (tokenizer.json decides, and says {not prefix})")
    (_, named), (_, ends) = begin_and_ends(folder, config, None), begin_and_ends(folder, config, codec)
    if named and (added := [codec.tokenizer.id_to_token(number) for number in ends if number not in named]):
        words.append(f"a text ends at {added[0]}, too: {TOKENIZER} names it as eos_token, and {GENERATION} does not")
    return words


def adds_space(codec: TextCodec) -> bool:
    """Tell whether a tokenizer puts a space before a text."""
    described = json.loads(codec.tokenizer.to_str())
    waiting = [described["normalizer"], described["pre_tokenizer"]]
    while waiting:
        part = waiting.pop() or {}
        if part.get("add_prefix_space") or part.get("type") == "Prepend":
            return True
        if part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
        waiting += [*part.get("normalizers", ()), *part.get("pretokenizers", ())]
    return False


def unread(file: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Describe keys of a file that are left out or not in the table: a sentence for each reason."""
    reasons: dict[str, list[str]] = {}
    architecture = str(given.get("general.architecture" if file == GGUF else "model_type"))
    for key, value in given.items():
        known = fate_of(file, key, architecture)
        why = "edgespec does not know them" if known is None else known.why if known.fate == "left out" else ""
        if why and not key.startswith("_") and value not in (*OFF, known and known.off):
            reasons.setdefault(why, []).append(key)
    for why, keys in reasons.items():
        yield f"{file}: not read: {', '.join(sorted(keys))} ({why})"


def fate_of(file: str, key: str, architecture: str = "") -> Known | None:
    """Look a key up; None = it is not in the table."""
    table = KEYS[file]
    if own := table.get(f"{architecture}.{key}"):
        return own
    if key in table or file != GGUF:
        return table.get(key)
    if architecture and key.startswith(f"{architecture}."):
        return table.get("ARCH" + key.removeprefix(architecture))
    return Known("nothing", "names", None) if key.startswith(NAMES) else None
