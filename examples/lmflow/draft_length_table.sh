#!/usr/bin/env bash
# LMFlow's table: the speed-up in time and in forwards for draft lengths 1 to 10.
# Theirs: gpt2-xl with gpt2, NUM_PROMPTS=100 MAX_TOKENS=512.
set -euo pipefail
MODEL=${1:-smollm2-135m}
DRAFT=${2:-$MODEL}

paceline sweep --model "$MODEL" --draft_model "$DRAFT" --gamma "${GAMMA:-1..10}" \
    --temperature 0 --max_new_tokens "${MAX_TOKENS:-32}" --num-prompts "${NUM_PROMPTS:-3}"
