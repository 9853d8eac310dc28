import sys

from paceline import LLM, SamplingParams, Suffix

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

llm = LLM(MODEL, drafter=Suffix())
question = "Say this three times: the quick brown fox jumps over the lazy dog."
messages = [{"role": "user", "content": question}]
[answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=80))
output = answer.outputs[0]
print(output.text)
print(f"{output.stats.tokens_per_forward:.2f} tokens per forward of the model")
