import sys

from paceline import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

# Newer vLLM: one dictionary.
NEWER = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
# Older vLLM: flat options.
OLDER = {"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 3}


def run(options):
    llm = LLM(model=MODEL, max_num_seqs=4, enable_prefix_caching=True, **options)
    return llm.generate(["one two three one two", "red green blue red"], SamplingParams(temperature=0, max_tokens=16))


for options in (NEWER, OLDER):
    for output in run(options):
        print(repr(output.prompt), "->", repr(output.outputs[0].text))
