import sys

from paceline import LLM, NGram, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

llm = LLM(MODEL, drafter=NGram())
question = "Copy this list and add one fruit: apple, pear, plum, cherry, peach."
messages = [{"role": "user", "content": question}]

for chunk in llm.stream(messages, SamplingParams(temperature=0, max_tokens=64)):
    print(chunk.text, end="", flush=True)
    if chunk.output is not None:  # the last chunk carries the whole answer
        output = chunk.output
        print(f"\n\nended by {output.finish_reason} after {output.stats.rounds} forwards")
