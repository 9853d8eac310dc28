import sys

from paceline import LLM

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

llm = LLM(MODEL)
texts = ["The rider in front breaks the wind.", "The wind in rider front the breaks."]
for text, score in zip(texts, llm.score(texts)):
    print(f"{score.total:8.2f} {score.perplexity:8.1f}  {text}")
