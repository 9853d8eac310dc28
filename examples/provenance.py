import sys

from paceline import LLM, FirstOf, NGram, SamplingParams, Suffix

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

llm = LLM(MODEL, drafter=FirstOf(Suffix(), NGram()))
question = "Repeat after me: one two three, one two three, one two three."
messages = [{"role": "user", "content": question}]
[answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32))

output = answer.outputs[0]
for token, origin in zip(output.token_ids, output.provenance):
    text = llm.tokenizer.decode([token])
    place = f"round {origin.round:2}  depth {origin.depth}"
    print(f"{text!r:>12}  {place}  {origin.kind:9}  {origin.drafter or 'target'}")
