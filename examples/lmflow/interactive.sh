#!/usr/bin/env bash
# LMFlow's speculative_inference.py asks for a text again and again. Here it is a
# conversation: /help says what can be changed on the way, Ctrl-D ends it.
set -euo pipefail
MODEL=${1:-smollm2-135m}
DRAFT=${2:-$MODEL}

paceline chat --model "$MODEL" --draft_model "$DRAFT" --gamma 5 \
    --temperature 0.3 --max_new_tokens 256
