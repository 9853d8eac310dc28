import sys
from concurrent.futures import ThreadPoolExecutor

from paceline import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

prompts = ["The wind is", "A wheel is", "The road is", "A rider is"]
params = SamplingParams(temperature=0, max_tokens=24)

with LLM(MODEL, drafter="suffix") as llm, ThreadPoolExecutor(len(prompts)) as threads:
    # Each thread makes a call of its own; the engine runs them in one batch.
    answers = threads.map(lambda prompt: llm.generate(prompt, params)[0], prompts)
    for prompt, answer in zip(prompts, answers):
        print(f"{prompt!r} -> {answer.outputs[0].text!r}")
