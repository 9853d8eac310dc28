"""vLLM's manual, an MLP speculator. Not there yet: this ends with a sentence."""

import sys

from paceline import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
HEADS = sys.argv[2] if len(sys.argv) > 2 else "ibm-ai-platform/llama3-8b-accelerator"

llm = LLM(
    model=MODEL,
    tensor_parallel_size=1,
    speculative_config={
        "method": "mlp_speculator",
        "model": HEADS,
        "num_speculative_tokens": 3,
    },
)
params = SamplingParams(temperature=0.8, top_p=0.95)
for output in llm.generate(["The rider in front breaks the wind, and"], params):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
