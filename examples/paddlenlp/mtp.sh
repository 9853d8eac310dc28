#!/usr/bin/env bash
# PaddleNLP's predictor with multi-token prediction, and the same in our words. The
# draft model is a folder of modules.
set -euo pipefail
MODEL=${1:-smollm2-135m} # theirs: deepseek-ai/DeepSeek-R1
DRAFT=${2:-deepseek-ai/DeepSeek-R1-MTP}
PROMPT="Name three rivers."

paceline generate --model_name_or_path "$MODEL" --dtype bfloat16 --mode dynamic \
    --inference_model 1 --append_attn 1 --quant_type weight_only_int8 \
    --mla_use_matrix_absorption 1 --total_max_length 8192 --max_length 64 \
    --decode_strategy greedy_search --speculate_method mtp \
    --draft_model_name_or_path "$DRAFT" --speculate_max_draft_token_num 1 \
    --return_full_hidden_states 1 "$PROMPT"

paceline generate --model "$MODEL" --dtype bfloat16 --quantization int8 \
    --max-model-len 8192 --max-tokens 64 --temperature 0 \
    --drafter "mtp:model=$DRAFT,num_draft_tokens=1" "$PROMPT"
