"""vLLM's manual, an MLP speculator: in our words, and in vLLM's two.

An accelerator fits one target alone. For a gain, name both: a target, and the
accelerator that was published for it.
"""

import sys

from paceline import LLM, MLPSpeculator, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "meta-llama/Meta-Llama-3-8B-Instruct"
HEADS = sys.argv[2] if len(sys.argv) > 2 else "ibm-ai-platform/llama3-8b-accelerator"

ours = {"drafter": MLPSpeculator(HEADS)}
newer = {"speculative_config": {"method": "mlp_speculator", "model": HEADS}}
older = {"speculative_model": HEADS, "speculative_draft_tensor_parallel_size": 1}
prompts = ["The rider in front breaks the wind, and"]
params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)

for name, words in (("ours", ours), ("newer", newer), ("older", older)):
    llm = LLM(model=MODEL, tensor_parallel_size=1, max_model_len=256, **words)
    for output in llm.generate(prompts, params):
        print(f"{name}: {output.prompt!r} -> {output.outputs[0].text!r}")
