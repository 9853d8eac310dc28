import sys

from paceline import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

llm = LLM(MODEL, drafter="suffix")
params = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    presence_penalty=0.3,
    stop=["\n\n"],
    max_tokens=40,
    n=2,  # two samples of the same prompt
    seed=7,  # the same seed gives the same two texts again
    logprobs=1,
)
[answer] = llm.generate("A bicycle race begins when", params)

for sample in answer.outputs:
    print(f"sample {sample.index}, ended by {sample.finish_reason}: {sample.text}")
    print(f"  seed {sample.seed}, log-probability {sample.cumulative_logprob:.2f}")
