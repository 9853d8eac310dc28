import sys

from paceline import LLM, NGram, SamplingParams, Suffix

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

llm = LLM(MODEL)  # no drafter: plain decoding
messages = [{"role": "user", "content": "Repeat after me: one two three four, one two three four, one two three four."}]
turns = {2: Suffix(), 4: NGram(min_match=1, max_match=3), 6: None}  # after so many chunks, this drafter

for count, chunk in enumerate(llm.stream(messages, SamplingParams(temperature=0, max_tokens=64)), start=1):
    print(chunk.text, end="", flush=True)
    if count in turns:
        llm.set_drafter(turns[count])  # the request goes on
    if chunk.output is not None:
        print(f"\n\n{len(chunk.output.token_ids)} tokens in {chunk.output.stats.rounds} forwards")
