#!/usr/bin/env bash
# LMFlow's speculative_inference.py with a prompt: in LMFlow's words, then in ours.
# The text is the same. Add --gpu 0, or --device cuda:0, where there is a GPU.
set -euo pipefail
MODEL=${1:-smollm2-135m} # theirs: gpt2-xl
DRAFT=${2:-$MODEL}       # theirs: gpt2; a model that drafts for itself saves nothing
PROMPT="The next rider takes a turn at the front, and"

paceline generate --model "$MODEL" --draft_model "$DRAFT" --gamma 5 \
    --temperature 0. --max_new_tokens 64 --raw "$PROMPT"

paceline generate --model "$MODEL" --drafter "draft:model=$DRAFT,num_draft_tokens=5" \
    --temperature 0 --max-tokens 64 --raw "$PROMPT"
