"""vLLM's manual, matching n-grams in the prompt: in our words, and in vLLM's two."""

import sys

from paceline import LLM, NGram, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

ours = {"drafter": NGram(num_draft_tokens=5, min_match=1, max_match=4)}
newer = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
}
older = {
    "speculative_model": "[ngram]",
    "num_speculative_tokens": 5,
    "ngram_prompt_lookup_max": 4,
}
prompts = ["one two three four, one two three four, one two"]
params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)

for name, words in (("ours", ours), ("newer", newer), ("older", older)):
    llm = LLM(model=MODEL, tensor_parallel_size=1, max_model_len=256, **words)
    for output in llm.generate(prompts, params):
        print(f"{name}: {output.prompt!r} -> {output.outputs[0].text!r}")
