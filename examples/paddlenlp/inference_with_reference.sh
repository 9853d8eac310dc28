#!/usr/bin/env bash
# PaddleNLP's predictor, inference_with_reference: in PaddleNLP's words, then in ours.
# The text is the same. Theirs runs with DTYPE=float16, which works here as well.
set -euo pipefail
MODEL=${1:-smollm2-135m} # theirs: meta-llama/Llama-2-7b-chat
DTYPE=${DTYPE:-float32}
PROMPT="Copy this list and add one fruit: apple, pear, plum, cherry, peach."

paceline generate --model_name_or_path "$MODEL" --inference_model --dtype "$DTYPE" \
    --speculate_method inference_with_reference --speculate_max_draft_token_num 5 \
    --speculate_max_ngram_size 2 --max_length 64 "$PROMPT"

paceline generate --model "$MODEL" --dtype "$DTYPE" --max-tokens 64 \
    --drafter ngram:rule=reference,num_draft_tokens=5,max_match=2 "$PROMPT"
