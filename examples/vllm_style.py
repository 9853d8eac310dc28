import sys

from paceline import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

# Newer vLLM: one dictionary.
newer = LLM(
    model=MODEL,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
)

# Older vLLM: flat options.
older = LLM(model=MODEL, speculative_model="[ngram]", num_speculative_tokens=5, ngram_prompt_lookup_max=3)

for llm in (newer, older):
    outputs = llm.generate(
        ["one two three one two", "red green blue red"], SamplingParams(temperature=0, max_tokens=16)
    )
    for output in outputs:
        print(repr(output.prompt), "->", repr(output.outputs[0].text))
