"""Two drafters that need nothing but the target: its own guesses, and its own first layers."""

import sys

from paceline import LLM, EarlyExit, Lookahead, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

llm = LLM(MODEL)
messages = [{"role": "user", "content": "Count from one to twelve, in words, twice."}]
texts = []
for drafter in (None, Lookahead(window=5, ngram=4, guesses=4), EarlyExit(num_draft_tokens=2)):
    llm.set_drafter(drafter)
    [answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=80))
    output = answer.outputs[0]
    texts.append(output.text)
    print(f"{output.stats.tokens_per_forward:.2f} tokens per forward with {drafter}")
print("the same text each time:", len(set(texts)) == 1)
