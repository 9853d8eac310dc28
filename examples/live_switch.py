import sys

from paceline import LLM, NGram, SamplingParams, Suffix

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

llm = LLM(MODEL)  # no drafter: plain decoding
question = "Repeat after me: one two three four, one two three four, one two three four."
messages = [{"role": "user", "content": question}]
params = SamplingParams(temperature=0, max_tokens=64)
turns = {2: Suffix(), 4: NGram(), 6: None}  # after so many chunks

for count, chunk in enumerate(llm.stream(messages, params), start=1):
    print(chunk.text, end="", flush=True)
    if count in turns:
        llm.set_drafter(turns[count])  # the request goes on
    if chunk.output is not None:
        stats = chunk.output.stats
        print(f"\n\n{stats.tokens} tokens in {stats.rounds} forwards")
