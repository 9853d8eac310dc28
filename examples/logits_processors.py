import sys

from torch import Tensor

from paceline import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"


def say_nothing_twice(token_ids: list[int], logits: Tensor) -> Tensor:
    """No token of the last twenty may come again."""
    logits[token_ids[-20:]] = float("-inf")
    return logits


params = SamplingParams(temperature=0, max_tokens=40, logits_processors=[say_nothing_twice])
llm = LLM(MODEL)

for drafter in (None, "ngram", "suffix"):
    llm.set_drafter(drafter)
    [answer] = llm.generate("one two three, one two three, one", params)
    print(f"{drafter}: {answer.outputs[0].text!r}")  # the same three times
