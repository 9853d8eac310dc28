#!/usr/bin/env bash
# PaddleNLP's predictor with DeepSeek's multi-token prediction. Not there yet: this
# ends with a sentence.
set -euo pipefail
MODEL=${1:-smollm2-135m} # theirs: deepseek-ai/DeepSeek-R1
DRAFT=${2:-deepseek-ai/DeepSeek-R1-MTP}

paceline generate --model_name_or_path "$MODEL" --dtype bfloat16 --mode dynamic \
    --inference_model 1 --append_attn 1 --quant_type weight_only_int8 \
    --total_max_length 8192 --max_length 2048 \
    --speculate_method mtp --draft_model_name_or_path "$DRAFT" \
    --speculate_max_draft_token_num 1 --return_full_hidden_states 1 \
    "Name three rivers."
