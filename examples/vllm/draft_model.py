"""vLLM's manual, speculating with a draft model: in our words, and in vLLM's two.

A model that drafts for itself is always right and saves nothing. It shows that all
three say the same. For a gain, name a larger model and a small one of its family,
such as facebook/opt-6.7b and facebook/opt-125m.
"""

import sys

from paceline import LLM, DraftModel, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
DRAFT = sys.argv[2] if len(sys.argv) > 2 else MODEL

ours = {"drafter": DraftModel(DRAFT, num_draft_tokens=5)}
newer = {"speculative_config": {"model": DRAFT, "num_speculative_tokens": 5}}
older = {
    "speculative_model": DRAFT,
    "num_speculative_tokens": 5,
    "use_v2_block_manager": True,  # has no effect here, and says so
}
prompts = ["The rider in front breaks the wind, and"]
params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)

for name, words in (("ours", ours), ("newer", newer), ("older", older)):
    llm = LLM(model=MODEL, tensor_parallel_size=1, max_model_len=256, **words)
    for output in llm.generate(prompts, params):
        print(f"{name}: {output.prompt!r} -> {output.outputs[0].text!r}")
